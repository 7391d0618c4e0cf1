"""Numbers and findings as a reader wants them: three significant digits, whole sentences, a dash for the unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vitscale.analysis import Analysis, CurveComparison, CurveResult, Interval, Waterfall
from vitscale.analysis.comparisons import AgainstReference, against_references, pairs_tested
from vitscale.analysis.learning.drift import STEPS
from vitscale.analysis.runs.environments import environments
from vitscale.analysis.statistics import CONFIDENCE, ONE_RUN, ComparisonVerdict
from vitscale.report.contributions import contributions
from vitscale.trial.trial import Mode, World

DASH = "\N{EN DASH}"
UNKNOWN = DASH
NOT_FINITE = "not finite"

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

_FEW_CURVES = 4
"""As many have a sentence on their waterfall among the findings."""
_WIDEST_UNSAID = 0.1
"""An interval of an efficiency that is wider stands beside it."""


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


def percent(value: float | None, decimals: int = 0) -> str:
    """A share in percent: "7 %"; "<1 %" for what is there and would be shown as none."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    least = 10.0**-decimals
    return f"<{least:g} %" if 0 < 100 * value < least / 2 else f"{100 * value:.{decimals}f} %"


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


def finite(value: Any) -> Any:
    """`value` with every number that JSON does not know (NaN, infinity) as null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def ranks(count: int) -> str:
    """ "1 rank", "8 ranks"."""
    return f"{count:,} rank{'s' if count != 1 else ''}"


def ranks_on_hosts(world: World) -> str:
    """ "8", or "8 = 2 x 4" on two hosts, "7 = 1 x 4 + 3" on unequal ones."""
    if world.nodes == 1:
        return f"{world.size:,}"
    full, rest = divmod(world.size, world.ranks_per_node)
    return f"{world.size:,} = {full:,} x {world.ranks_per_node:,}" + (f" + {rest:,}" if rest else "")


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
    """What a reader should take away: how each curve scales to its largest measured size, why, and who is faster.

    Of many curves who is faster comes first, and why each scales as it does is left to the waterfalls.
    """
    scaling, many = [], len({curve.name for curve in analysis.curves}) > _FEW_CURVES
    for curve in analysis.curves:
        if text := _curve_headline(curve):
            scaling += [text] if many else [text, *_why(analysis, curve)]
    faster = [_against(analysis, largest) for largest in _largest_comparisons(analysis)]
    return (*faster, *scaling) if many else (*scaling, *faster)


def _curve_headline(curve: CurveResult) -> str:
    reached = [(p.gpus, p.speedup, p.efficiency) for p in curve.points if p.speedup and p.efficiency]
    if curve.baseline is None or not reached or reached[-1][0] == curve.baseline.gpus:
        return ""
    base = curve.baseline.gpus
    gpus, speedup, efficiency = reached[-1]
    trust = f"efficiency {share(efficiency.centre)}; {certainty(efficiency)}"
    times = share(speedup.centre)
    if speedup.low is None or speedup.high is None or speedup.note:
        measured = f"efficiency {share(efficiency.centre)}, speedup {times}x measured"
        bounds = f"; {certainty(efficiency)}" if efficiency.low is not None else ""
        where = f"{curve.name}, {curve.mode}: {ranks(gpus)} against {base}"
        return f"{where}: too few runs to tell ({measured}{bounds or '; one run'})."
    if curve.mode == "weak":
        work = f"{gpus / base:.3g}x the images in {share(1 / efficiency.centre)}x the time of {base}"
        return f"{curve.name}, weak: {ranks(gpus)} train {work} ({trust})."
    side = speedup.side_of(1.0)
    if side is None:
        pace = f"not significantly faster or slower than {base}: {times}x"
    else:
        pace = f"{times}x as fast as {base}" if side == "above" else f"slower than {base}: {times}x"
    return f"{curve.name}, {curve.mode}: {ranks(gpus)} are {pace} ({trust})."


def _why(analysis: Analysis, curve: CurveResult) -> list[str]:
    """The waterfall of a curve's largest measured point, where it has one."""
    largest = [point.trial_id for point in curve.points if point.efficiency][-1]
    return [
        f"{one.curve}, {one.mode}: {waterfall(one)}"
        for one in analysis.waterfalls
        if one.factors and (one.trial_id, one.mode, one.curve) == (largest, curve.mode, curve.name)
    ]


def waterfall(one: Waterfall) -> str:
    """From ideal to measured, as a sentence."""
    if one.efficiency is None:
        return f"What {ranks(one.gpus)} reach of ideal is unknown: {one.reason}."
    doubt = _doubt(one.interval)
    verb = "measured at" if one.interval is None or one.interval.low is None or one.interval.note else "reach"
    head = f"{ranks(one.gpus)} {verb} {100 * one.efficiency:.0f} % of ideal{doubt}"
    if not one.factors:
        return f"{head}; where the rest goes is unknown: {one.reason}."
    return f"{': '.join(filter(None, (head, '; '.join(contributions(one)))))}."


def _doubt(interval: Interval | None) -> str:
    """In brackets, why a figure is not to be relied on; nothing where it is."""
    if interval is None or interval.low is None or interval.high is None:
        return " (one run: too few to tell)"
    wide = interval.high - interval.low > _WIDEST_UNSAID
    return f" ({certainty(interval)})" if wide or interval.note else ""


def unexplained(analysis: Analysis) -> tuple[str, ...]:
    """Why efficiencies were not taken apart: each reason once."""
    known = [one for one in analysis.waterfalls if one.efficiency is not None]
    reasons = [one.reason for one in known if not one.factors]
    return tuple(
        f"Where the efficiency goes is unknown at {reasons.count(reason)} of {len(known)} points: {reason}."
        for reason in dict.fromkeys(reasons)
    )


def explaining_cost(analysis: Analysis) -> str:
    """What explaining cost, in a sentence; empty where nothing was explained, or no light step lies beside."""
    found = [trial.breakdown.overhead for trial in analysis.trials.values() if trial.breakdown is not None]
    slower = [max(0, round(100 * overhead)) for overhead in found if overhead is not None]
    if not slower:
        return ""
    least, most = min(slower), max(slower)
    how_much = "less than 1 %" if most == 0 else f"{most} %" if least == most else f"{least} to {most} %"
    return f"Explaining slowed its steps by {how_much} (those steps are in no reported time).{_attached(analysis)}"


def _attached(analysis: Analysis) -> str:
    """What the profiler left behind on GPUs; empty where nothing was timed after it."""
    found = [trial.breakdown.attached_overhead for trial in analysis.trials.values() if trial.breakdown is not None]
    slower = [overhead for overhead in found if overhead is not None]
    if not slower:
        return ""
    return f" Steps after the profiler stopped took up to {max(0, round(100 * max(slower)))} % longer (in none either)."


def _largest_comparisons(analysis: Analysis) -> list[AgainstReference]:
    """Of what was compared those at the most ranks; where two modes share all trials, once."""
    largest: dict[tuple[str, str, frozenset[str]], AgainstReference] = {}
    for one in against_references(analysis.curves, analysis.trials, analysis.comparisons):
        key = (one.mode, one.varies, frozenset([one.reference, *(other.first for other in one.others)]))
        covered = [k for k in largest if k[:2] == key[:2] and (k[2] <= key[2] or key[2] <= k[2])]
        if all(largest[k].gpus < one.gpus for k in covered):
            for k in covered:
                del largest[k]
            largest[key] = one
    by_trials: dict[frozenset[str], AgainstReference] = {}
    for one in largest.values():
        by_trials.setdefault(frozenset([one.reference_trial, *(other.first_trial for other in one.others)]), one)
    return list(by_trials.values())


def _against(analysis: Analysis, one: AgainstReference) -> str:
    """All curves against one of them, as a sentence; of two curves in the order of the study."""
    if len(one.others) == 1:
        pair = {one.reference_trial, one.others[0].first_trial}
        return comparison(
            next(c for c in analysis.comparisons if c.mode == one.mode and {c.first_trial, c.second_trial} == pair)
        )
    by_verdict: dict[ComparisonVerdict, list[str]] = {}
    for other in one.others:
        result = other.result
        ratio = f" ({share(result.ratio)}x)" if result.verdict != "no significant difference" else ""
        by_verdict.setdefault(result.verdict, []).append(f"{other.first}{ratio}")
    said = " / ".join(f"{verdict}: {'; '.join(names)}" for verdict, names in by_verdict.items())
    return f"{one.mode}, {ranks(one.gpus)}, against {one.reference}: {said}."


def equality(analysis: Analysis) -> str:
    """How far trials that compute the same show the same loss; empty where none was held against another."""
    agreeing = [trial.drift for trial in analysis.trials.values() if trial.drift.status == "agrees"]
    if not agreeing:
        return ""
    most = max(drift.difference or 0.0 for drift in agreeing)
    drifting = sum(trial.drifts for trial in analysis.trials.values())
    but = f"; {drifting} drift{'s' if drifting == 1 else ''}" if drifting else ""
    losses = f"the losses of {len(agreeing)} trials are those" if len(agreeing) > 1 else "the loss of 1 trial is that"
    how = f"within {relative(most)}" if most else "exactly"
    return f"Equality: over the first {STEPS} steps {losses} of a trial that must compute the same, {how}{but}."


def relative(difference: float | None) -> str:
    """A relative difference: "1.0 %", "3.1e-07"; "not finite" where a loss is not."""
    if difference is None:
        return UNKNOWN
    if not math.isfinite(difference):
        return NOT_FINITE
    return f"{100 * difference:.2g} %" if difference >= 1e-3 else f"{difference:.1e}" if difference else "0"


def comparison(one: CurveComparison) -> str:
    """One comparison as a sentence."""
    result, where = one.result, f"{one.mode}, {ranks(one.gpus)}"
    if result.verdict == "too few repeats to tell":
        return f"{where}: too few repeats to tell {one.first} from {one.second} ({share(result.ratio)}x)."
    bounds = f"95 % interval {share(result.low)} to {share(result.high)}"
    if result.verdict == "no significant difference":
        between = f"between {one.first} and {one.second}"
        return f"{where}: no significant difference {between} ({share(result.ratio)}x; {bounds})."
    if result.verdict == "not significant among all comparisons":
        between = f"between {one.first} and {one.second} among so many comparisons"
        return (
            f"{where}: no significant difference {between} ({share(result.ratio)}x; {bounds}; {_p(result.p_adjusted)})."
        )
    return f"{where}: {one.first} is {share(result.ratio)}x as fast as {one.second} ({bounds})."


def scope(analysis: Analysis) -> str:
    """What the intervals over runs do not cover, in a sentence; empty where no trial was repeated, or nobody knows."""
    repeated = [trial for trial in analysis.trials.values() if len(trial.runs) > 1 and trial.surroundings is not None]
    if not repeated:
        return ""
    kind = "allocation" if any(one.allocation for t in repeated for one in environments(t.records[0])) else "host"
    apart = [(trial.components.between, trial) for trial in repeated if trial.components and trial.components.clustered]
    if apart:
        between, worst = max(apart, key=lambda pair: pair[0])
        within = worst.components.within if worst.components else 0.0
        return (
            f"Epoch times differ from {kind} to {kind} in {len(apart)} of {len(repeated)} repeated trials (up to "
            f"{percent(between, 1)} between them, {percent(within, 1)} inside; {worst.trial_id}): of these an {kind} "
            "with all its runs counts as one observation."
        ).replace("an host", "a host")
    if all(len(trial.allocations) == 1 for trial in repeated):
        return (
            f"The runs of each trial shared {'one allocation' if kind == 'allocation' else 'their hosts'}: intervals "
            f"do not cover how {kind}s differ."
        )
    return ""


def multiplicity(analysis: Analysis) -> str:
    """How many comparisons were made, in a sentence; empty where there are fewer than 2."""
    count = pairs_tested(analysis.comparisons)
    if count < 2:
        return ""
    by_chance = number(count * (1 - CONFIDENCE), 2)
    return (
        f"{count} pairs of trials were compared, each interval at 95 %: of {count} equal pairs about {by_chance} would "
        "exclude 1 by chance. Faster and slower are said after Holm's correction for all of them."
    )


def _p(value: float | None) -> str:
    return f"p = {value:.2g} after correction" if value is not None else ""
