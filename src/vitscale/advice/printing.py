"""What advice says: the answers as one table, what a reader must know of them, the rest folded; and the JSON of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from vitscale.advice import sentences
from vitscale.advice.next_measurement import Measurement
from vitscale.advice.pipeline import Advice
from vitscale.advice.request import Option, WishVerdict
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.labels import PROFILER
from vitscale.prediction.remarks import NO_REMARKS, Remarks
from vitscale.prediction.start_up import OF_FORKS, started_as_forks
from vitscale.prediction.step_shares import shares_in_words
from vitscale.present import document as doc
from vitscale.present import units
from vitscale.present.data import attributes, estimate_fields, estimates
from vitscale.present.estimate import Estimate
from vitscale.present.units import counted, number

_SHORT_VERDICT: dict[WishVerdict, str] = {"meets": "yes", "probably": "probably", "misses": "no"}
_BRACKETS = (
    "In brackets: where 9 of 10 runs will lie. A limit is met (yes) where the far end of that is within it, and "
    "probably met where the expected value is."
)


def advice_document(
    advice: Advice, launch: Sequence[str], start: str | None, remarks: Remarks = NO_REMARKS
) -> doc.Document:
    """The answers, what would narrow them, what must be known; the Pareto front and all else folded.

    Args:
        advice: what was found.
        launch: the commands that would start it.
        start: the command that starts the file that was written; None: none was.
        remarks: what a reader must know first.
    """
    work = advice.work
    head = (
        f"Advice from {sentences.origins(advice)}: {counted(work.epochs, 'epoch')} of {work.images:,} images, "
        f"{counted(advice.looked_at, 'configuration')} looked at."
    )
    limits = [f"Limits: {'; '.join(told)}."] if (told := sentences.limit_lines(advice)) else []
    if any(assumed.part == PROFILER for assumed in advice.assumptions):
        limits.append("It rests on profiler traces: a few steps, the profiler's cost in each.")
    narrower, *others = _measurements(advice.measurements, units.ranks_time(advice.device, "minutes"))
    blocks: list[doc.Block] = [
        *remarks.blocks,
        doc.Paragraph(" ".join([head, *limits]), "strong"),
        *_answers(advice),
        doc.Paragraph(narrower),
    ]
    last = []
    if advice.chosen is not None:
        next_step = f"  {start}" if start else "  -o STUDY.toml writes it as a study"
        refused = [line for line in launch if line.startswith("unavailable: ")]
        whose = "the first answer" if advice.met else "what comes nearest"
        where_time_goes = shares_in_words(advice.step_shares, whose)
        last += [where_time_goes] if where_time_goes else []
        last += [f"To run {sentences.in_short(advice.chosen)}:", *(refused or [next_step])]
        launch = () if refused else launch
    notes = (*sentences.notes(advice), *sentences.dropped_lines(advice))
    blocks += [doc.Bullets(notes)] if notes else []
    if launch:
        blocks.append(doc.Section("Commands that start its ranks", (doc.Code(tuple(launch)),)))
    if advice.front:
        title = "Nothing else is both faster and cheaper"
        columns = _columns(advice, advice.front)
        rows = [[form(option) for form in columns.values()] for option in advice.front]
        blocks.append(doc.table([*columns], rows, title=title, folded=True))
    assumed = tuple(
        f"{assumption.part}: {assumption.taken}. Measure it: {assumption.measurement}."
        for assumption in advice.assumptions
    )
    for title, items in (("Assumed, for nothing measured it", assumed), ("Other measurements", tuple(others))):
        blocks += [doc.Section(title, (doc.Bullets(items),), folded=True)] if items else []
    return doc.Document("", tuple(blocks), tuple(last))


def _answers(advice: Advice) -> Iterator[doc.Block]:
    """One row for each question; where nothing meets the limits, what comes nearest and by how much it misses."""
    asked = {sentences.QUESTIONS[answer.kind]: answer.option for answer in advice.answers}
    if advice.closest is not None and (large := advice.large_batch) is not None:
        surely = "meets" if large.verdict == "meets" else "probably meets"
        yield doc.Paragraph(
            f"Only large-batch training {surely} the limits: {sentences.in_short(large)}, "
            f"{sentences.amounts(advice, large)} ({large.label}). "
            "--large-batch lets the answers do that. What comes nearest without it:",
            "bad",
        )
        asked = {"nearest": advice.closest}
    elif advice.closest is not None:
        yield doc.Paragraph("No configuration meets the limits. What comes nearest:", "bad")
        asked = {"nearest": advice.closest}
    if not asked:
        return
    columns = _columns(advice, [*asked.values()], lambda option: _seconds_cell(option.seconds))
    rest = _rest(advice, [*asked.values()])
    names: dict[Candidate, str] = {}
    rows, whole = [], []
    for question, option in asked.items():
        same = f"= {names[option.candidate]}" if option.candidate in names else ""
        cells = [doc.Cell(same, spans=len(columns))] if same else [form(option) for form in columns.values()]
        rows.append((doc.Cell(question), *cells))
        whole += [] if same else [(doc.Cell(question), *(form(option) for form in rest.values()))]
        names.setdefault(option.candidate, question)
    first = doc.Column("answer", words=True)
    of_forks = any(starts_as_forks(advice, option) for option in asked.values())
    notes = (_BRACKETS, *((OF_FORKS,) if of_forks else ()))
    yield doc.Table((first, *columns), (doc.RowGroup("", tuple(rows)),), notes)
    if dares := tuple(sentences.dares(advice)):
        yield doc.Bullets(dares)
    if advice.closest is not None:
        yield doc.Bullets((*_shortfalls(advice, advice.closest), *_alone(advice)))
    yield doc.table([first, *rest], whole, title="The answers in full", folded=True)


def starts_as_forks(advice: Advice, option: Option) -> bool:
    """Whether the start-up in an option's time is that of forks of a process that has imported everything."""
    return option.startup is not None and started_as_forks(advice.trials[option.series])


def _alone(advice: Advice) -> Iterator[str]:
    """Which limits can be met one by one, where several cannot be met together."""
    if len(advice.alone) + len(advice.never) < 2:
        return
    for limit, option in advice.alone.items():
        yield f"The {limit} alone: {sentences.in_short(option)}, {sentences.amounts(advice, option)} ({option.label})."
    for limit in advice.never:
        without = "" if advice.asked.large_batch else " without large-batch training"
        yield f"The {limit} alone: nothing meets it{without}."


def _shortfalls(advice: Advice, option: Option) -> Iterator[str]:
    """Sentences on how far the nearest option misses each limit."""
    asked = advice.asked
    spent = option.cost or option.gpu_hours
    for limit, value, most in (
        ("deadline", option.seconds.value, asked.deadline_seconds),
        ("budget", spent.value, asked.budget),
    ):
        if most is not None and value > most:
            more = (
                f"{value / most:,.0f} times as large"
                if value > 10 * most
                else f"{100 * (value / most - 1):.3g} % larger"
            )
            yield f"The {limit} would have to be {more}."
    if asked.min_efficiency is not None and not option.efficiency.value >= asked.min_efficiency:
        yield f"Its efficiency is {option.efficiency.value:.3g}, and {asked.min_efficiency:g} was asked for."


CellOf = Callable[[Option], doc.Cell]


def _time(option: Option) -> doc.Cell:
    return doc.Cell(units.seconds(option.seconds.value))


def _seconds_cell(between: Estimate | None) -> doc.Cell:
    """A time with its bounds in the unit of the value."""
    if between is None:
        return doc.Cell(units.UNKNOWN)
    unit = units.time_unit([between.value])
    return doc.Cell(units.seconds(between.value), units.bounds(between.low, between.high, unit.text))


_AS_IT_IS = units.Unit(1.0, "")


def _amount_cell(between: Estimate | None, unit: units.Unit = _AS_IT_IS) -> doc.Cell:
    if between is None:
        return doc.Cell(units.UNKNOWN)
    return doc.Cell(unit.text(between.value), units.bounds(between.low, between.high, unit.text))


def _spent_unit(advice: Advice, options: Sequence[Option], *, short: bool = False) -> units.Unit:
    """The unit in which the time of all ranks of some options stands in a column."""
    return units.rank_time_unit([option.gpu_hours.value for option in options], advice.device, short=short)


def _rest(advice: Advice, options: Sequence[Option]) -> dict[doc.Column, CellOf]:
    """What the table of answers has no room for. Start-up is in the time; the chance is that of not fitting."""
    spent = _spent_unit(advice, options)
    return {
        doc.Column("limits met", words=True): lambda option: doc.Cell(
            ", ".join(f"{limit}: {_SHORT_VERDICT[met]}" for limit, met in option.verdicts.items()) or units.UNKNOWN
        ),
        doc.Column("start-up"): lambda option: _seconds_cell(option.startup),
        doc.Column(spent.sign): lambda option: _amount_cell(option.gpu_hours, spent),
        doc.Column("cost"): lambda option: _amount_cell(option.cost),
        doc.Column("efficiency"): lambda option: _amount_cell(option.efficiency),
        doc.Column("memory a rank"): lambda option: doc.Cell(units.size(option.memory_bytes)),
        doc.Column("OOM chance"): lambda option: doc.Cell(units.percent(option.oom_chance)),
        doc.Column("known by", words=True): lambda option: doc.Cell(
            f"{option.label}, {'in' if option.label == 'measured' else 'from'} {option.series}"
        ),
    }


def _columns(advice: Advice, options: Sequence[Option], time: CellOf = _time) -> dict[doc.Column, CellOf]:
    """What stands in each column; for instances, and where there is a price, money takes the place of ranks' time."""
    rented = any(option.candidate.instance is not None for option in options)
    several_engines = len({sentences.engine(option) for option in options}) > 1
    money = advice.asked.priced or rented

    def instance(option: Option) -> doc.Cell:
        name = "as measured" if option.candidate.instance is None else option.candidate.instance.name
        return doc.Cell(f"{name}, {sentences.engine(option)}" if several_engines else name)

    columns: dict[doc.Column, CellOf] = {}
    if rented:
        columns[doc.Column("instance", words=True)] = instance
    else:
        columns[doc.Column("engine", words=True)] = lambda option: doc.Cell(sentences.engine(option))
    columns[doc.Column("ranks")] = lambda option: doc.Cell(str(option.gpus))
    if any(option.nodes > 1 for option in options):
        columns[doc.Column("hosts")] = lambda option: doc.Cell(str(option.nodes))
    columns[doc.Column("batch")] = lambda option: doc.Cell(sentences.batch(option) + sentences.mark(option))
    columns[doc.Column("time")] = time
    if money:
        columns[doc.Column("cost")] = lambda option: doc.Cell(
            number(None if option.cost is None else option.cost.value)
        )
    else:
        spent = _spent_unit(advice, options, short=True)
        columns[doc.Column(spent.sign)] = lambda option: doc.Cell(spent.text(option.gpu_hours.value))
    columns[doc.Column("eff.")] = lambda option: doc.Cell(units.share(option.efficiency.value))
    if advice.noise.images is not None:
        columns[doc.Column("same loss")] = lambda option: doc.Cell(units.seconds(option.same_loss_seconds))
    if advice.asked.limited:
        columns[doc.Column("met", words=True)] = lambda option: doc.Cell(_SHORT_VERDICT[option.verdict])
    return columns | {doc.Column("known", words=True, narrow=None): lambda option: doc.Cell(option.label)}


def _measurements(measurements: Sequence[Measurement], minutes: str) -> list[str]:
    """Sentences on measurements; first what would narrow the first answer most for what it costs, in `minutes`."""
    told = [
        f"{measurement.what}: about {number(measurement.gpu_minutes)} {minutes}; tells of {measurement.part}; the "
        f"90 % interval's ends, now a factor {measurement.spread_before:.2f} apart, would be "
        f"{measurement.spread_after:.2f} apart"
        for measurement in measurements[:3]
    ]
    if not told:
        return ["No single measurement would narrow the first answer by a tenth: what is left is mostly job-to-job."]
    return [f"What would narrow the first answer most, for what it costs: {told[0]}.", *told[1:]]


def advice_fields(advice: Advice, study: str | None, remarks: Remarks = NO_REMARKS) -> dict[str, Any]:
    """The advice as one JSON object.

    Args:
        advice: what was found.
        study: the text of the study that would run it; None where there is none.
        remarks: what a reader must know first.
    """
    asked = advice.asked
    return {
        **remarks.fields,
        "series": list(advice.origins),
        "limits": {
            **attributes(asked, "deadline_seconds", "budget", "min_efficiency"),
            "budget_unit": "money" if asked.priced else units.ranks_time(advice.device),
        },
        "price_per_gpu_hour": asked.price_per_gpu_hour,
        "work": {"images_per_epoch": advice.work.images, "epochs": advice.work.epochs},
        **attributes(advice.noise, "images", "reason", prefix="noise_scale_"),
        "met": advice.met,
        "answers": [
            {
                "question": answer.kind,
                **_option(answer.option),
                "bolder": None if answer.riskier is None else _option(answer.riskier),
                "at_the_end": answer.at_the_end,
            }
            for answer in advice.answers
        ],
        "closest": None if advice.closest is None else _option(advice.closest),
        "each_limit_alone": {limit: _option(option) for limit, option in advice.alone.items()}
        | dict.fromkeys(advice.never),
        "other_batch": None if advice.other_batch is None else _option(advice.other_batch),
        "large_batch": None if advice.large_batch is None else _option(advice.large_batch),
        "pareto_front": [_option(option) for option in advice.front],
        "looked_at": advice.looked_at,
        "dropped": dict(advice.dropped),
        "refused": dict(advice.refused),
        "step_shares": dict(advice.step_shares),
        "assumptions": list(map(asdict, advice.assumptions)),
        "measurements": [
            {
                **attributes(measurement, "part", "what", "gpu_minutes"),
                "interval_ratio_before": measurement.spread_before,
                "interval_ratio_after": measurement.spread_after,
            }
            for measurement in advice.measurements
        ],
        "study": study,
    }


def _option(option: Option) -> dict[str, Any]:
    candidate = option.candidate
    return {
        **attributes(option, "gpus", "nodes"),
        "instance": None if candidate.instance is None else candidate.instance.name,
        "gpu": None if candidate.instance is None else candidate.instance.gpu.name,
        **attributes(candidate, "ranks_per_node", "engine"),
        "zero_stage": candidate.changes["zero_stage"],
        "parallel": candidate.parallel.model_dump(),
        **attributes(candidate, "micro_batch", "grad_accum", "activation_checkpointing"),
        "keeps_global_batch": option.keeps_batch,
        **attributes(option, "global_batch", "large_batch", "label", "series"),
        "engine_measured": option.measured_engine,
        **estimate_fields("startup_seconds", option.startup),
        **estimates(option, "seconds", "gpu_hours", "cost", "efficiency"),
        "seconds_to_same_loss": option.same_loss_seconds,
        "verdicts": dict(option.verdicts),
        **attributes(option, "memory_bytes", "oom_chance", "verdict"),
    }
