"""Advice as a document: the answers as one table, notes on them, all other tables folded; and as JSON."""

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
from vitscale.trial.model_words import UNNAMED_MODEL, CountedModel, parameter_fields, parameter_lines

_MOST_MEASUREMENTS = 3
"""Most measurements that are proposed."""
_MULTIPLE_FROM = 10
"""Times a limit from which a value is given as a multiple of it, and no longer as a percentage beyond it."""
_SHORT_VERDICT: dict[WishVerdict, str] = {"meets": "yes", "probably": "probably", "misses": "no"}
_NOTE_ON_BRACKETS = (
    "In brackets: where 9 of 10 runs will lie. A limit is met (yes) where the far end of that is within it, and "
    "probably met where the expected value is."
)


def advice_document(
    advice: Advice, launch: Sequence[str], start: str | None, remarks: Remarks = NO_REMARKS
) -> doc.Document:
    """Return the answers, what would narrow them, and notes on them; the Pareto front and all else are folded.

    Args:
        advice: what was found.
        launch: the commands that would start it.
        start: the command that starts the file that was written; None: none was.
        remarks: notes on the results, which come first.
    """
    best_measurement, *other_measurements = _sentences_on_measurements(
        advice.measurements, units.ranks_time(advice.device, "minutes")
    )
    blocks: list[doc.Block] = [
        *remarks.blocks,
        doc.Paragraph(" ".join(_head_sentences(advice)), "strong"),
        *_answer_blocks(advice),
        doc.Paragraph(best_measurement),
    ]
    notes = (*sentences.notes(advice), *sentences.dropped_lines(advice))
    if notes:
        blocks.append(doc.Bullets(notes))
    refusals = [line for line in launch if line.startswith("unavailable: ")] if advice.chosen is not None else []
    if launch and not refusals:
        blocks.append(doc.Section("Commands that start its ranks", (doc.Code(tuple(launch)),)))
    blocks += _front_table(advice)
    blocks += _assumption_section(advice)
    if other_measurements:
        bullets = doc.Bullets(tuple(other_measurements))
        blocks.append(doc.Section("Other measurements", (bullets,), folded=True))
    return doc.Document("", tuple(blocks), tuple(_last_lines(advice, refusals, start)))


def _front_table(advice: Advice) -> Iterator[doc.Block]:
    """Yields a folded table of the options for which nothing else is both faster and cheaper, if there are any."""
    if advice.front:
        columns = _option_columns(advice, advice.front)
        rows = [_cells(option, columns) for option in advice.front]
        yield doc.table(list(columns), rows, title="Nothing else is both faster and cheaper", folded=True)


def _assumption_section(advice: Advice) -> Iterator[doc.Block]:
    """Yields a folded section on what the first answer takes for granted, if there is anything."""
    sentences_on_assumptions = tuple(
        f"{assumption.part}: {assumption.taken}. Measure it: {assumption.measurement}."
        for assumption in advice.assumptions
    )
    if sentences_on_assumptions:
        bullets = doc.Bullets(sentences_on_assumptions)
        yield doc.Section("Assumed, for nothing measured it", (bullets,), folded=True)


def _head_sentences(advice: Advice) -> list[str]:
    """Return the first sentences: the work, the number of configurations, the limits."""
    work = advice.work
    head = [
        f"Advice from {sentences.origin_series(advice)}: {counted(work.epochs, 'epoch')} of {work.images:,} images, "
        f"{counted(advice.looked_at, 'configuration')} looked at."
    ]
    limits = sentences.limit_lines(advice)
    if limits:
        head.append(f"Limits: {'; '.join(limits)}.")
    if any(assumption.part == PROFILER for assumption in advice.assumptions):
        head.append("It rests on profiler traces: a few steps, the profiler's cost in each.")
    return head


def _last_lines(advice: Advice, refusals: Sequence[str], start: str | None) -> list[str]:
    """Return where the time of the chosen option goes, and how to run it; empty where there is no option.

    Args:
        advice: what was found.
        refusals: why no command would start it.
        start: the command that starts the file that was written; None: none was.
    """
    if advice.chosen is None:
        return []
    lines = []
    chosen_in_words = "the first answer" if advice.met else "what comes nearest"
    where_time_goes = shares_in_words(advice.step_shares, chosen_in_words)
    if where_time_goes:
        lines.append(where_time_goes)
    lines.append(f"To run {sentences.in_short(advice.chosen)}:")
    if refusals:
        lines += refusals
    else:
        lines.append(f"  {start}" if start else "  -o STUDY.toml writes it as a study")
    return lines


def _answer_blocks(advice: Advice) -> Iterator[doc.Block]:
    """Yields the table of the answers, the better but less sure options, and a folded table of all figures.

    The table has a row for each question. Where nothing meets the limits, it has the row "nearest" too, and bullets say
    by how much that option misses.
    """
    option_by_question = {sentences.QUESTIONS[answer.kind]: answer.option for answer in advice.answers}
    if advice.closest is not None:
        option_by_question = {"nearest": advice.closest}
        yield doc.Paragraph(_why_nearest(advice), "bad")
    if not option_by_question:
        return
    options = list(option_by_question.values())
    columns = _option_columns(advice, options, time_cell=lambda option: _seconds_cell(option.seconds))
    detail_columns = _detail_columns(advice, options)
    first_question: dict[Candidate, str] = {}  # of the questions that a candidate answers
    rows: list[tuple[doc.Cell, ...]] = []
    detail_rows = []
    for question, option in option_by_question.items():
        earlier_question = first_question.setdefault(option.candidate, question)
        if earlier_question == question:
            rows.append((doc.Cell(question), *_cells(option, columns)))
            detail_rows.append((doc.Cell(question), *_cells(option, detail_columns)))
        else:  # "cheapest = fastest"
            rows.append((doc.Cell(question), doc.Cell(f"= {earlier_question}", spans=len(columns))))
    question_column = doc.Column("answer", words=True)
    notes = [_NOTE_ON_BRACKETS]
    if any(starts_as_forks(advice, option) for option in options):
        notes.append(OF_FORKS)
    notes += _model_lines(advice)
    yield doc.Table((question_column, *columns), (doc.RowGroup("", tuple(rows)),), tuple(notes))
    riskier_options = tuple(sentences.sentences_on_riskier_options(advice))
    if riskier_options:
        yield doc.Bullets(riskier_options)
    if advice.closest is not None:
        yield doc.Bullets((*_shortfalls(advice, advice.closest), *_limits_one_by_one(advice)))
    yield doc.table([question_column, *detail_columns], detail_rows, title="The answers in full", folded=True)


def _model_lines(advice: Advice) -> list[str]:
    """Return a line with the model's number of parameters; none for a model that nobody names, of unknown size."""
    if advice.parameters is None and advice.trial.model.unknown:
        return []
    return parameter_lines([CountedModel(advice.trial.model_name or UNNAMED_MODEL, advice.parameters)])


def _cells(option: Option, columns: OptionColumns) -> list[doc.Cell]:
    """Return the cells of an option's row."""
    return [cell_of(option) for cell_of in columns.values()]


def _why_nearest(advice: Advice) -> str:
    """Return the sentence above the nearest option: nothing meets the limits, or only large-batch training does."""
    large = advice.large_batch
    if large is None:
        return "No configuration meets the limits. What comes nearest:"
    verb = "meets" if large.verdict == "meets" else "probably meets"
    return (
        f"Only large-batch training {verb} the limits: {sentences.in_short(large)}, "
        f"{sentences.time_and_gpu_hours(advice, large)} ({large.label}). "
        "--large-batch lets the answers do that. What comes nearest without it:"
    )


def starts_as_forks(advice: Advice, option: Option) -> bool:
    """Whether the start-up in an option's time is that of forks of a process that has imported everything."""
    return option.startup is not None and started_as_forks(advice.trials[option.series])


def _limits_one_by_one(advice: Advice) -> Iterator[str]:
    """Yields a sentence on each limit by itself, where there are several and nothing meets all of them."""
    if len(advice.alone) + len(advice.never) < 2:
        return
    for limit, option in advice.alone.items():
        figures = sentences.time_and_gpu_hours(advice, option)
        yield f"The {limit} alone: {sentences.in_short(option)}, {figures} ({option.label})."
    for limit in advice.never:
        without = "" if advice.asked.large_batch else " without large-batch training"
        yield f"The {limit} alone: nothing meets it{without}."


def _shortfalls(advice: Advice, option: Option) -> Iterator[str]:
    """Yields sentences on how far the nearest option misses each limit."""
    request = advice.asked
    cost = option.cost or option.gpu_hours  # the budget is in money where prices are known
    yield from _excess_over_limit("deadline", option.seconds.value, request.deadline_seconds)
    yield from _excess_over_limit("budget", cost.value, request.budget)
    if request.min_efficiency is not None and not option.efficiency.value >= request.min_efficiency:
        yield f"Its efficiency is {option.efficiency.value:.3g}, and {request.min_efficiency:g} was asked for."


def _excess_over_limit(name: str, value: float, limit: float | None) -> Iterator[str]:
    """Yields how much larger a limit would have to be; nothing where there is none, or the value is within it."""
    if limit is None or not value > limit:
        return
    if value > _MULTIPLE_FROM * limit:
        yield f"The {name} would have to be {value / limit:,.0f} times as large."
    else:
        yield f"The {name} would have to be {100 * (value / limit - 1):.3g} % larger."


CellOf = Callable[[Option], doc.Cell]
"""Option -> the cell of a column."""
OptionColumns = dict[doc.Column, CellOf]
"""The columns of a table of options, in order, with the function that makes the cells of each."""


def _time_cell(option: Option) -> doc.Cell:
    """Return the cell of an option's time, without its interval."""
    return doc.Cell(units.seconds(option.seconds.value))


def _seconds_cell(estimate: Estimate | None) -> doc.Cell:
    """Return the cell of a time, with its bounds in the unit of the value."""
    if estimate is None:
        return doc.Cell(units.UNKNOWN)
    unit = units.time_unit([estimate.value])
    return doc.Cell(units.seconds(estimate.value), units.bounds(estimate.low, estimate.high, unit.text))


_NO_UNIT = units.Unit(1.0, "")


def _amount_cell(estimate: Estimate | None, unit: units.Unit = _NO_UNIT) -> doc.Cell:
    """Return the cell of a number, with its bounds in the unit of the value; a dash where it is unknown."""
    if estimate is None:
        return doc.Cell(units.UNKNOWN)
    return doc.Cell(unit.text(estimate.value), units.bounds(estimate.low, estimate.high, unit.text))


def _gpu_hours_unit(advice: Advice, options: Sequence[Option], *, short: bool = False) -> units.Unit:
    """Return the unit for a column with the GPU-hours of some options: "GPU-hours", "GPU-days"."""
    return units.rank_time_unit([option.gpu_hours.value for option in options], advice.device, short=short)


def _detail_columns(advice: Advice, options: Sequence[Option]) -> OptionColumns:
    """Return the columns for which the table of answers has no room.

    The start-up is in the time of that table too. "OOM chance" is the chance that the option does not fit in memory.
    """
    gpu_hours_unit = _gpu_hours_unit(advice, options)
    return {
        doc.Column("limits met", words=True): lambda option: doc.Cell(_verdicts_in_words(option)),
        doc.Column("start-up"): lambda option: _seconds_cell(option.startup),
        doc.Column(gpu_hours_unit.sign): lambda option: _amount_cell(option.gpu_hours, gpu_hours_unit),
        doc.Column("cost"): lambda option: _amount_cell(option.cost),
        doc.Column("efficiency"): lambda option: _amount_cell(option.efficiency),
        doc.Column("memory a rank"): lambda option: doc.Cell(units.size(option.memory_bytes)),
        doc.Column("OOM chance"): lambda option: doc.Cell(units.percent(option.oom_chance)),
        **_host_memory_columns(options),
        doc.Column("known by", words=True): _known_by_cell,
    }


def _host_memory_columns(options: Sequence[Option]) -> OptionColumns:
    """Return the columns of what is offloaded to a host; none where no option offloads anything."""
    if not any(option.host_memory_bytes for option in options):
        return {}
    return {
        doc.Column("offloaded to a host"): lambda option: doc.Cell(units.size(option.host_memory_bytes)),
        doc.Column("the host's OOM chance"): lambda option: doc.Cell(units.percent(option.host_oom_chance)),
    }


def _known_by_cell(option: Option) -> doc.Cell:
    """Return "measured, in ddp (weak)" or "predicted, from ddp (weak)"."""
    preposition = "in" if option.label == "measured" else "from"
    return doc.Cell(f"{option.label}, {preposition} {option.series}")


def _verdicts_in_words(option: Option) -> str:
    """ "deadline: yes, budget: probably"; a dash without limits."""
    verdicts = [f"{limit}: {_SHORT_VERDICT[verdict]}" for limit, verdict in option.verdicts.items()]
    return ", ".join(verdicts) if verdicts else units.UNKNOWN


def _option_columns(advice: Advice, options: Sequence[Option], time_cell: CellOf = _time_cell) -> OptionColumns:
    """Return the columns of a table of options.

    The cost is in money where there is a price or an instance, else in GPU-hours.

    Args:
        advice: what was found.
        options: the rows.
        time_cell: makes the cells of the column "time".
    """
    are_rented = any(option.candidate.instance is not None for option in options)
    has_several_engines = len({sentences.engine(option) for option in options}) > 1

    def instance_cell(option: Option) -> doc.Cell:
        name = "as measured" if option.candidate.instance is None else option.candidate.instance.name
        return doc.Cell(f"{name}, {sentences.engine(option)}" if has_several_engines else name)

    columns: OptionColumns = {}
    if are_rented:
        columns[doc.Column("instance", words=True)] = instance_cell
    else:
        columns[doc.Column("engine", words=True)] = lambda option: doc.Cell(sentences.engine(option))
    columns[doc.Column("ranks")] = lambda option: doc.Cell(str(option.gpus))
    if any(option.nodes > 1 for option in options):
        columns[doc.Column("hosts")] = lambda option: doc.Cell(str(option.nodes))
    columns[doc.Column("batch")] = lambda option: doc.Cell(sentences.batch(option) + sentences.large_batch_mark(option))
    columns[doc.Column("time")] = time_cell
    if advice.asked.priced or are_rented:
        columns[doc.Column("cost")] = lambda option: doc.Cell(
            number(None if option.cost is None else option.cost.value)
        )
    else:
        unit = _gpu_hours_unit(advice, options, short=True)
        columns[doc.Column(unit.sign)] = lambda option: doc.Cell(unit.text(option.gpu_hours.value))
    columns[doc.Column("eff.")] = lambda option: doc.Cell(units.share(option.efficiency.value))
    if advice.noise.images is not None:
        columns[doc.Column("same loss")] = lambda option: doc.Cell(units.seconds(option.same_loss_seconds))
    if advice.asked.limited:
        columns[doc.Column("met", words=True)] = lambda option: doc.Cell(_SHORT_VERDICT[option.verdict])
    columns[doc.Column("known", words=True, narrow=None)] = lambda option: doc.Cell(option.label)
    return columns


def _sentences_on_measurements(measurements: Sequence[Measurement], minutes: str) -> list[str]:
    """Return a sentence on each of the best measurements; where there is none, one sentence that says so.

    Args:
        measurements: the measurements, the best first.
        minutes: the unit of their costs: "GPU-minutes".
    """
    if not measurements:
        return ["No single measurement would narrow the first answer by a tenth: what is left is mostly job-to-job."]
    best, *others = [_measurement_in_words(measurement, minutes) for measurement in measurements[:_MOST_MEASUREMENTS]]
    return [f"What would narrow the first answer most, for what it costs: {best}.", *others]


def _measurement_in_words(measurement: Measurement, minutes: str) -> str:
    """Return the command or study, its cost, and what it would narrow by how much."""
    return (
        f"{measurement.what}: about {number(measurement.gpu_minutes)} {minutes}; tells of {measurement.part}; the "
        f"90 % interval's ends, now a factor {measurement.spread_before:.2f} apart, would be "
        f"{measurement.spread_after:.2f} apart"
    )


def advice_fields(advice: Advice, study: str | None, remarks: Remarks = NO_REMARKS) -> dict[str, Any]:
    """Return the advice as one JSON object.

    Args:
        advice: what was found.
        study: the text of the study that would run it; None where there is none.
        remarks: notes on the results, which come first.
    """
    request = advice.asked
    return {
        **remarks.fields,
        "series": list(advice.origins),
        "model": advice.trial.model_name,
        **parameter_fields(advice.parameters),
        "limits": {
            **attributes(request, "deadline_seconds", "budget", "min_efficiency"),
            "budget_unit": "money" if request.priced else units.ranks_time(advice.device),
        },
        "price_per_gpu_hour": request.price_per_gpu_hour,
        "work": {"images_per_epoch": advice.work.images, "epochs": advice.work.epochs},
        **attributes(advice.noise, "images", "reason", prefix="noise_scale_"),
        "met": advice.met,
        "answers": [
            {
                "question": answer.kind,
                **_option_fields(answer.option),
                "bolder": None if answer.riskier is None else _option_fields(answer.riskier),
                "at_the_end": answer.at_the_end,
            }
            for answer in advice.answers
        ],
        "closest": None if advice.closest is None else _option_fields(advice.closest),
        "each_limit_alone": {limit: _option_fields(option) for limit, option in advice.alone.items()}
        | dict.fromkeys(advice.never),
        "other_batch": None if advice.other_batch is None else _option_fields(advice.other_batch),
        "large_batch": None if advice.large_batch is None else _option_fields(advice.large_batch),
        "pareto_front": [_option_fields(option) for option in advice.front],
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


def _option_fields(option: Option) -> dict[str, Any]:
    """Return an option as a JSON object."""
    candidate = option.candidate
    return {
        **attributes(option, "gpus", "nodes"),
        "instance": None if candidate.instance is None else candidate.instance.name,
        "gpu": None if candidate.instance is None else candidate.instance.gpu.name,
        **attributes(candidate, "ranks_per_node", "engine"),
        "zero_stage": candidate.changes["zero_stage"],
        "hpz": candidate.second_shard_ranks,
        "parallel": candidate.parallel.model_dump(),
        **attributes(candidate, "micro_batch", "grad_accum", "activation_checkpointing"),
        "keeps_global_batch": option.keeps_batch,
        **attributes(option, "global_batch", "large_batch", "label", "series"),
        "engine_measured": option.measured_engine,
        **estimate_fields("startup_seconds", option.startup),
        **estimates(option, "seconds", "gpu_hours", "cost", "efficiency"),
        "seconds_to_same_loss": option.same_loss_seconds,
        "verdicts": dict(option.verdicts),
        **attributes(option, "memory_bytes", "oom_chance", "host_memory_bytes", "host_oom_chance", "verdict"),
    }
