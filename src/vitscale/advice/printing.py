"""Advice for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box, filesize
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from vitscale.advice import words
from vitscale.advice.next_measurement import Measurement
from vitscale.advice.option import Option, Verdict
from vitscale.advice.pipeline import Advice
from vitscale.advice.quantities import duration, figures
from vitscale.errors import printable
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.results import Label

_MOST_ROWS = 12
"""Of the table of the Pareto front."""
_SHORT: dict[Label, str] = {
    "measured": "meas",
    "interpolated": "interp",
    "extrapolated": "extrap",
    "prior-driven": "prior",
    "does not fit": "no fit",
}
_SHORT_VERDICT: dict[Verdict, str] = {"meets": "yes", "probably": "prob", "misses": "no"}
_ENGINE_WIDTH = 9
_LIMIT_OF = {"time": "deadline", "GPU-hours": "budget", "cost": "budget", "efficiency": "efficiency"}


def advice_text(advice: Advice, launch: Sequence[str], written: str | None) -> list[RenderableType]:
    """The answers, the Pareto front, what was left out, what to measure next, and what to run.

    Args:
        advice: what was found.
        launch: the commands that would start it.
        written: the study file that was written; None: none.
    """
    lines: list[RenderableType] = [_safe(line) for line in _head(advice)]
    lines += [_safe(line) for line in _answers(advice)]
    if advice.front:
        lines += ["", *_front(advice)]
    said = [*words.notes(advice), *words.dropped_lines(advice)]
    lines += ["", *(_safe(f"! {line}") for line in said)] if said else []
    lines += [_safe(line) for line in _assumed(advice)]
    lines += ["", *(_safe(line) for line in _measurements(advice.measurements))]
    if advice.chosen is not None:
        which = words.in_short(advice.chosen)
        lines += ["", _safe(f"To run ({which}):")]
        lines += [_safe(f"  vitscale run {written}")] if written else [escape("  -o STUDY.toml writes it as a study")]
        lines += [_safe(f"  {line}") for line in launch]
    return lines


def _safe(line: str) -> str:
    """Neither markup nor control characters that a name carried in are obeyed."""
    return escape(printable(line))


def _head(advice: Advice) -> Iterator[str]:
    work = advice.work
    yield (
        f"Advice from {words.origins(advice)}: {work.epochs} epoch{'s' if work.epochs > 1 else ''} of {work.images:,} "
        f"images. {advice.looked_at:,} configurations looked at."
    )
    if limits := words.limit_lines(advice):
        yield f"Limits: {'; '.join(limits)}."
    yield (
        "In brackets: where 9 of 10 runs will lie. A limit is met (yes) where the far end of that is within it, and "
        "probably met where the expected value is."
    )


def _answers(advice: Advice) -> Iterator[str]:
    if advice.closest is not None:
        yield ""
        yield "No configuration meets the limits. What comes nearest:"
        yield from _block("nearest", advice.closest)
        yield from _shortfalls(advice, advice.closest)
        yield from _alone(advice)
    shown: dict[Candidate, str] = {}
    for answer in advice.answers:
        name = words.question(advice, answer)
        yield ""
        if answer.option.candidate in shown:
            yield f"{name.capitalize()}: the same as the {shown[answer.option.candidate]}."
        else:
            yield from _block(name, answer.option)
        shown.setdefault(answer.option.candidate, name)


def _alone(advice: Advice) -> Iterator[str]:
    """Where several limits cannot be met together: which can be one by one."""
    if len(advice.alone) + len(advice.never) < 2:
        return
    yield ""
    for limit, option in advice.alone.items():
        yield f"The {limit} alone: {words.in_short(option)}, {words.amounts(option)}."
    for limit in advice.never:
        yield f"The {limit} alone: nothing meets it."


def _shortfalls(advice: Advice, option: Option) -> Iterator[str]:
    """By how much the nearest one misses."""
    asked = advice.asked
    spent = option.cost or option.gpu_hours
    for limit, value, most in (
        ("deadline", option.seconds.value, asked.deadline_seconds),
        ("budget", spent.value, asked.budget),
    ):
        if most is not None and value > most:
            yield f"  The {limit} would have to be {100 * (value / most - 1):.3g} % larger."
    if asked.min_efficiency is not None and not option.efficiency.value >= asked.min_efficiency:
        yield f"  Its efficiency is {option.efficiency.value:.3g}, and {asked.min_efficiency:g} was asked for."


def _block(name: str, option: Option) -> Iterator[str]:
    yield f"{name.capitalize()}: {words.in_short(option)}{words.mark(option)}"
    rows = {"time": words.time(option.seconds)}
    if option.startup is not None:
        rows["start-up"] = f"{words.time(option.startup)}, in the time"
    rows |= {"GPU-hours": words.amount(option.gpu_hours)}
    if option.cost is not None:
        rows["cost"] = words.amount(option.cost)
    rows["efficiency"] = words.amount(option.efficiency)
    if option.same_loss_seconds is not None:
        rows["same loss"] = duration(option.same_loss_seconds)
    if option.memory_bytes is not None:
        chance = "" if option.oom_chance is None else f" a rank; chance that it does not fit {option.oom_chance:.0%}"
        rows["memory"] = filesize.decimal(int(option.memory_bytes)) + chance
    rows["known by"] = f"{option.label}, {'in' if option.label == 'measured' else 'from'} {option.series}"
    for title, value in rows.items():
        limit = _LIMIT_OF.get(title)
        if title == "GPU-hours" and option.cost is not None:
            limit = None
        met = option.verdicts.get(limit) if limit is not None else None
        verdict = "" if met is None else f"   {limit} met: {words.VERDICT_WORDS[met]}"
        yield f"  {title:<10} {value}{verdict}"


def _front(advice: Advice) -> Iterator[RenderableType]:
    """Nothing else is both faster and cheaper; of a long front some, evenly chosen, and both ends."""
    rows = advice.front
    if len(rows) > _MOST_ROWS:
        places = {round(n * (len(rows) - 1) / (_MOST_ROWS - 1)) for n in range(_MOST_ROWS)}
        rows = tuple(rows[place] for place in sorted(places))
    yield escape(
        "Nothing else is both faster and cheaper"
        + (f" ({len(rows)} of {len(advice.front)}):" if len(rows) < len(advice.front) else ":")
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    columns = _columns(advice, rows)
    first, *_ = columns
    table.add_column(
        first, overflow="fold", min_width=min(_ENGINE_WIDTH, max(len(columns[first](option)) for option in rows))
    )
    for title in [*columns][1:-1]:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    for option in rows:
        table.add_row(*(_safe(value(option)) for value in columns.values()))
    yield table


def _columns(advice: Advice, rows: Sequence[Option]) -> dict[str, Callable[[Option], str]]:
    """Title -> what stands there; of instances their price takes the place of GPU-hours."""
    rented = any(option.candidate.instance is not None for option in rows)
    several_engines = len({words.engine(option) for option in rows}) > 1

    def instance(option: Option) -> str:
        name = "as measured" if option.candidate.instance is None else option.candidate.instance.name
        return f"{name}, {words.engine(option)}" if several_engines else name

    columns: dict[str, Callable[[Option], str]] = {"instance": instance} if rented else {"engine": words.engine}
    columns["ranks"] = lambda option: str(option.gpus)
    if any(option.nodes > 1 for option in rows):
        columns["hosts"] = lambda option: str(option.nodes)
    columns["batch"] = lambda option: words.batch(option) + words.mark(option)
    columns["time"] = lambda option: duration(option.seconds.value)
    if not rented:
        columns["GPU-h"] = lambda option: figures(option.gpu_hours.value)
    if advice.asked.priced:
        columns["cost"] = lambda option: "-" if option.cost is None else figures(option.cost.value)
    columns["eff."] = lambda option: f"{option.efficiency.value:.2f}"
    if advice.noise.images is not None:
        columns["same\nloss"] = lambda option: (
            "-" if option.same_loss_seconds is None else duration(option.same_loss_seconds)
        )
    if advice.asked.limited:
        columns["met"] = lambda option: _SHORT_VERDICT[option.verdict]
    return columns | {"known": lambda option: _SHORT[option.label]}


def _assumed(advice: Advice) -> Iterator[str]:
    if advice.assumptions:
        yield ""
        yield "Assumed for the first answer, for nothing measured it:"
    for one in advice.assumptions:
        yield f"  {one.part}: {one.taken}. Measure it: {one.measurement}."


def _measurements(extra: Sequence[Measurement]) -> Iterator[str]:
    if not extra:
        yield "No single measurement would narrow the first answer by a tenth: what is left is mostly job-to-job."
        return
    yield "What would narrow the first answer most, for what it costs:"
    for one in extra[:3]:
        yield (
            f"  {one.what}: about {figures(one.gpu_minutes)} GPU-minutes; tells of {one.part}; the 90 % interval's "
            f"ends, now a factor {one.spread_before:.2f} apart, would be {one.spread_after:.2f} apart"
        )
