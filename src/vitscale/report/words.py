"""Numbers and findings as a reader wants them: three significant digits, whole sentences, a dash for the unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveComparison, CurveResult, Interval
from vitscale.analysis.statistics import ONE_RUN
from vitscale.trial import Mode

DASH = "\N{EN DASH}"
UNKNOWN = DASH

MODE_TITLES: dict[Mode, str] = {
    "strong-micro": "Strong scaling, micro-batch per rank fixed (strong-micro)",
    "strong-global": "Strong scaling, global batch fixed (strong-global)",
    "weak": "Weak scaling, samples per rank fixed (weak)",
}
MODE_MEANINGS: dict[Mode, str] = {
    "strong-micro": "The same images on more ranks; the global batch grows with the ranks.",
    "strong-global": "The same images on more ranks; micro-batch or accumulation shrinks with the ranks.",
    "weak": "Each rank keeps its number of images, so the ideal epoch time is constant. Speedup is efficiency x ranks.",
}


@dataclass(frozen=True)
class Unit:
    """A unit for a column or an axis: what seconds are multiplied by, and its sign."""

    per_second: float
    sign: str


def time_unit(values: Iterable[float | None]) -> Unit:
    """The unit in which the largest of some times in seconds reads best."""
    largest = max((value for value in values if value is not None), default=1.0)
    if largest < 1:
        return Unit(1000.0, "ms")
    if largest < 600:
        return Unit(1.0, "s")
    return Unit(1 / 60, "min") if largest < 36_000 else Unit(1 / 3600, "h")


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, whole thousands in full, no exponent for everyday sizes; a dash for the unknown."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    magnitude = int(rounded.partition("e")[2])
    if not -4 <= magnitude <= 9:
        return rounded
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def share(value: float | None) -> str:
    """A share or ratio with two decimals."""
    return UNKNOWN if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """A time with its unit."""
    if value is None:
        return UNKNOWN
    unit = time_unit([value])
    return f"{number(value * unit.per_second)} {unit.sign}"


def bytes_text(value: int | None) -> str:
    """A size in GiB or MiB."""
    if value is None:
        return UNKNOWN
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def ranks(count: int) -> str:
    """ "1 rank", "8 ranks"."""
    return f"{count:,} rank{'s' if count != 1 else ''}"


def certainty(interval: Interval) -> str:
    """ "95 % interval 0.88 to 0.95", or why there is none."""
    if interval.low is None or interval.high is None:
        return interval.note or ONE_RUN
    bounds = f"95 % interval {share(interval.low)} to {share(interval.high)}"
    return f"{bounds}, {interval.note}" if interval.note else bounds


def plain(text: str) -> str:
    """`text` for a terminal or a table cell: on one line, control characters shown and not obeyed."""
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


def headlines(analysis: Analysis) -> tuple[str, ...]:
    """What a reader should take away: how each curve scales to its largest measured size, and who is faster there."""
    found = [text for curve in analysis.curves if (text := _curve_headline(curve))]
    found += [comparison(largest) for largest in _largest_comparisons(analysis)]
    return tuple(found)


def _curve_headline(curve: CurveResult) -> str:
    reached = [(p.gpus, p.speedup, p.efficiency) for p in curve.points if p.speedup and p.efficiency]
    if curve.baseline is None or not reached or reached[-1][0] == curve.baseline.gpus:
        return ""
    base = curve.baseline.gpus
    gpus, speedup, efficiency = reached[-1]
    trust = f"efficiency {share(efficiency.centre)}; {certainty(efficiency)}"
    if curve.mode == "weak":
        work = f"{gpus / base:.3g}x the images in {share(1 / efficiency.centre)}x the time of {base}"
        return f"{curve.name}, weak: {ranks(gpus)} train {work} ({trust})."
    times = share(speedup.centre)
    if speedup.low is not None and speedup.high is not None and speedup.low <= 1 <= speedup.high:
        pace = f"not significantly faster or slower than {base}: {times}x"
    else:
        pace = f"{times}x as fast as {base}" if speedup.centre >= 1 else f"slower than {base}: {times}x"
    return f"{curve.name}, {curve.mode}: {ranks(gpus)} are {pace} ({trust})."


def _largest_comparisons(analysis: Analysis) -> list[CurveComparison]:
    """Per pair of curves the one at the most ranks; a pair of trials that two modes share counts once."""
    largest: dict[tuple[str, str, str], CurveComparison] = {}
    for one in analysis.comparisons:
        key = (one.mode, one.first, one.second)
        if key not in largest or one.gpus > largest[key].gpus:
            largest[key] = one
    by_trials: dict[tuple[str, str], CurveComparison] = {}
    for one in largest.values():
        by_trials.setdefault((one.first_trial, one.second_trial), one)
    return list(by_trials.values())


def comparison(one: CurveComparison) -> str:
    """One comparison as a sentence."""
    result, where = one.result, f"{one.mode}, {ranks(one.gpus)}"
    if result.verdict == "too few repeats to tell":
        return f"{where}: too few repeats to tell {one.first} from {one.second} ({share(result.ratio)}x)."
    bounds = f"95 % interval {share(result.low)} to {share(result.high)}"
    if result.verdict == "no significant difference":
        between = f"between {one.first} and {one.second}"
        return f"{where}: no significant difference {between} ({share(result.ratio)}x; {bounds})."
    return f"{where}: {one.first} is {share(result.ratio)}x as fast as {one.second} ({bounds})."
