"""Sentences and clauses that statements share: on the parts of a waterfall, intervals, and the cost of explaining."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from vitscale.analysis import Analysis, Factor, TrialResult, Waterfall
from vitscale.analysis.comparisons import pairs_tested
from vitscale.analysis.learning.drift import STEPS
from vitscale.analysis.runs.environments import environments
from vitscale.analysis.runs.repeats import Components
from vitscale.analysis.statistics import CONFIDENCE, ONE_RUN
from vitscale.analysis.time.breakdown import Breakdown, Straggler
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP
from vitscale.analysis.time.waterfall import STEP_ROUNDING
from vitscale.present.estimate import Estimate
from vitscale.present.units import counted, number, percent, ranks, ratio_end, relative
from vitscale.store.records import COMMUNICATION
from vitscale.trial.trial import Mode, World

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

_WIDEST_OMITTED_INTERVAL = 0.1
"""Width of an efficiency's interval up to which the interval is not printed."""


def ranks_on_hosts(world: World) -> str:
    """Return ranks as hosts x ranks of a host: "8 = 2 x 4", or "7 = 1 x 4 + 3" on unequal hosts; "8" on one host."""
    if world.nodes == 1:
        return f"{world.size:,}"
    full_hosts, further_ranks = divmod(world.size, world.ranks_per_node)
    text = f"{world.size:,} = {full_hosts:,} x {world.ranks_per_node:,}"
    return f"{text} + {further_ranks:,}" if further_ranks else text


def certainty(interval: Estimate) -> str:
    """Return "95 % interval 0.88 to 0.95", or why there is no interval, or only one of too few runs."""
    if interval.low is None or interval.high is None or interval.note:
        return interval.note or ONE_RUN
    return f"95 % interval {ratio_interval(interval)}"


def ratio_interval(interval: Estimate) -> str:
    """Return the ends of a ratio's interval: "0.88 to 0.95", with enough digits to show their sides of 1."""
    return f"{ratio_end(interval.low)} to {ratio_end(interval.high)}"


def reached_of_ideal(split: Waterfall) -> str:
    """Return "8 ranks reach 72 % of ideal", with "measured at" for "reach" where runs are too few.

    Where the interval is wide or missing, it follows in brackets.
    """
    verb = "reach" if _has_sound_interval(split.interval) else "measured at"
    percent_of_ideal = 100 * (split.efficiency or 0.0)
    return f"{ranks(split.gpus)} {verb} {percent_of_ideal:.0f} % of ideal{_interval_in_brackets(split.interval)}"


def _has_sound_interval(interval: Estimate | None) -> bool:
    """Whether there is an interval, over enough runs."""
    return interval is not None and interval.low is not None and not interval.note


def _interval_in_brackets(interval: Estimate | None) -> str:
    """Return in brackets a wide interval, or why there is no interval; empty for a narrow one of enough runs."""
    if interval is None or interval.low is None or interval.high is None:
        return " (one run: too few to tell)"
    is_wide = interval.high - interval.low > _WIDEST_OMITTED_INTERVAL
    return f" ({certainty(interval)})" if is_wide or interval.note else ""


def unexplained_sentences(analysis: Analysis) -> tuple[str, ...]:
    """Return a sentence for each reason why efficiencies were not split into what takes them."""
    with_efficiency = [waterfall for waterfall in analysis.waterfalls if waterfall.efficiency is not None]
    count_by_reason = Counter(waterfall.reason for waterfall in with_efficiency if not waterfall.factors)
    return tuple(
        f"Where the efficiency goes is unknown at {count} of {len(with_efficiency)} points: {reason}."
        for reason, count in count_by_reason.items()
    )


def explaining_cost_sentence(analysis: Analysis) -> str:
    """Return a sentence on how much slower explained steps were than others.

    Return "" where no step was explained, or none could be compared with a step that was not.
    """
    breakdowns = _breakdowns(analysis)
    slowdowns = [_whole_percent(breakdown.overhead) for breakdown in breakdowns if breakdown.overhead is not None]
    if not slowdowns:
        return ""
    after_profiler = [
        breakdown.attached_overhead for breakdown in breakdowns if breakdown.attached_overhead is not None
    ]
    attached = ""
    if after_profiler:
        longer = _whole_percent(max(after_profiler))
        attached = f" Steps after the profiler stopped took up to {longer} % longer (in none either)."
    return (
        f"Explaining slowed its steps by {_percent_range(slowdowns)} (those steps are in no reported time).{attached}"
    )


def _breakdowns(analysis: Analysis) -> list[Breakdown]:
    return [trial.breakdown for trial in analysis.trials.values() if trial.breakdown is not None]


def _whole_percent(share: float) -> int:
    """Return a share in whole percent, and 0 for one below 0."""
    return max(0, round(100 * share))


def _percent_range(percents: Sequence[int]) -> str:
    """Return the range of some percents: "2 to 7 %", or "7 %" where all are equal; "less than 1 %" where all are 0."""
    if max(percents) == 0:
        return "less than 1 %"
    if min(percents) == max(percents):
        return f"{max(percents)} %"
    return f"{min(percents)} to {max(percents)} %"


def equality_sentence(analysis: Analysis) -> str:
    """Return a sentence on how close the losses of trials that compute the same are; "" where no trial agrees.

    Example: "Equality: over the first 10 steps the losses of 3 trials are those of a trial that must compute the same,
    within 3.1e-07; 1 drifts."
    """
    trials = analysis.trials.values()
    agreeing = [trial.drift for trial in trials if trial.drift.status == "agrees"]
    if not agreeing:
        return ""
    losses = "the loss of 1 trial is that"
    if len(agreeing) > 1:
        losses = f"the losses of {len(agreeing)} trials are those"
    largest = max(drift.difference or 0.0 for drift in agreeing)
    how_near = f"within {relative(largest)}" if largest else "exactly"
    return (
        f"Equality: over the first {counted(_compared_steps(trials), 'step')} {losses} of a trial that must "
        f"compute the same, {how_near}{_drift_clause(trials)}."
    )


def _drift_clause(trials: Iterable[TrialResult]) -> str:
    count = sum(trial.drifts for trial in trials)
    if count == 0:
        return ""
    return "; 1 drifts" if count == 1 else f"; {count} drift"


def _compared_steps(trials: Iterable[TrialResult]) -> int:
    """Return the number of first steps whose losses are compared: `STEPS`, or as many as the longest run has."""
    lengths = []
    for trial in trials:
        lengths += [len(run.loss_by_step.step) for run in trial.run_figures]
    return min(STEPS, max(lengths, default=STEPS))


class _TrialSpread(NamedTuple):
    """A trial whose epoch times differ between allocations, or between hosts."""

    trial_name: str
    spread: Components


def scope_sentence(analysis: Analysis) -> str:
    """Return a sentence on how times differ between allocations or hosts, or that intervals do not cover this.

    Return "" where no trial was repeated, or nothing is known of it.
    """
    repeated = []
    for trial in analysis.trials.values():
        if len(trial.run_figures) > 1 and trial.environment is not None:
            repeated.append(trial)
    if not repeated:
        return ""
    kind = _allocation_or_host(repeated)
    differing = []
    for trial in repeated:
        if trial.components is not None and trial.components.clustered:
            differing.append(_TrialSpread(trial.name, trial.components))
    if differing:
        return _differing_places(differing, len(repeated), kind)
    if all(len(trial.allocations) == 1 for trial in repeated):
        shared = "one allocation" if kind == "allocation" else "their hosts"
        return f"The runs of each trial shared {shared}: intervals do not cover how {kind}s differ."
    return ""


def _allocation_or_host(trials: Iterable[TrialResult]) -> Literal["allocation", "host"]:
    """Return "allocation" where a run recorded that of its scheduler, else "host": what runs of a trial may share."""
    for trial in trials:
        if any(environment.allocation for environment in environments(trial.recorded_runs[0])):
            return "allocation"
    return "host"


def _differing_places(differing: Sequence[_TrialSpread], trials: int, kind: Literal["allocation", "host"]) -> str:
    """Return a sentence on how far times differ between allocations or hosts, and how intervals account for it.

    Args:
        differing: the repeated trials whose times differ so.
        trials: number of repeated trials.
        kind: what differs.
    """
    worst = max(differing, key=lambda trial: trial.spread.between)
    article = "an" if kind == "allocation" else "a"
    return (
        f"Epoch times differ from {kind} to {kind} in {len(differing)} of {trials} repeated trials (up to "
        f"{percent(worst.spread.between, 1)} between them, {percent(worst.spread.within, 1)} inside; "
        f"{worst.trial_name}): of these {article} {kind} with all its runs counts as one observation."
    )


def multiplicity_sentence(analysis: Analysis) -> str:
    """Return a sentence on the number of comparisons and its effect on verdicts; "" for fewer than 2."""
    count = pairs_tested(analysis.comparisons)
    if count < 2:
        return ""
    by_chance = number(count * (1 - CONFIDENCE), 2)
    return (
        f"{count} pairs of trials were compared, each interval at 95 %: of {count} equal pairs about {by_chance} would "
        "exclude 1 by chance. Faster and slower are said after Holm's correction for all of them."
    )


def corrected_p(value: float | None) -> str:
    """Return "p = 0.08 after correction"; "" without a test."""
    return f"p = {value:.2g} after correction" if value is not None else ""


class _FactorWords(NamedTuple):
    """Words for a factor of the efficiency in a sentence such as "8 points are the transfer"."""

    taking: str
    """Words where it takes points: "the transfer"."""
    gaining: str
    """Words where it gains points: "a shorter transfer"."""


_WORDS_BY_FACTOR = {
    STEP_ROUNDING: _FactorWords("step rounding", "step rounding"),
    "data wait": _FactorWords("waiting for data", "less waiting for data"),
    "loading": _FactorWords("waiting for images to be read", "less waiting for images to be read"),
    "decoding": _FactorWords("waiting for images to be decoded", "less waiting for images to be decoded"),
    START_UP: _FactorWords("start-up", "a shorter start-up"),
    EVALUATION: _FactorWords("evaluation", "a shorter evaluation"),
    CHECKPOINT: _FactorWords("saving a checkpoint", "a checkpoint that is saved sooner"),
    "pipeline bubble": _FactorWords(
        "waiting for the stages of other ranks", "less waiting for the stages of other ranks"
    ),
    "straggler wait": _FactorWords("waiting for the slowest rank", "less waiting for the slowest rank"),
    "wire": _FactorWords("the transfer", "a shorter transfer"),
    "synchronised norm": _FactorWords("what synchronised norms exchange", "a shorter exchange of synchronised norms"),
    COMMUNICATION: _FactorWords(
        "waiting for ranks and the transfer, which could not be told apart",
        "less waiting for ranks and transfer, which could not be told apart",
    ),
    "optimizer": _FactorWords("the optimizer", "a faster optimizer"),
    "launch gaps": _FactorWords("gaps between kernels", "shorter gaps between kernels"),
}
"""Factor of a waterfall -> its words.

"compute scaling" and "other" have none here: see `_factor_in_words` and `_OTHER_THINGS`.
"""
_OTHER_THINGS = "other things"
_MOST_FACTORS_NAMED = 4


class _Contribution(NamedTuple):
    """The points that one factor takes from the efficiency."""

    points: int
    """In whole percent of the ideal; below 0 where it gains some."""
    what: str
    """The factor in words."""
    bounds: str = ""
    """ " (12 to 21)", the interval of the points; empty: none, or narrower than a point."""


def contribution_clauses(waterfall: Waterfall) -> tuple[str, ...]:
    """Return a clause on each of the four largest contributions of at least a point, and one on all others together.

    Their numbers and the efficiency, all in whole percent, add up to 100. Example for an efficiency of 0.72: "17 points
    (12 to 21) are the transfer", "8 are waiting for data", "3 are other things".
    """
    if waterfall.efficiency is None:
        return ()
    clauses: list[str] = []
    for contribution in _rounded_contributions(waterfall, waterfall.efficiency):
        if contribution.points != 0:
            clauses.append(_contribution_clause(contribution, with_unit=not clauses))
    return tuple(clauses)


def _rounded_contributions(waterfall: Waterfall, efficiency: float) -> list[_Contribution]:
    """Return the largest contributions, largest first, and those of all other factors in one.

    All are rounded to whole percent so that, with the efficiency, they add up to 100.
    """
    largest_first = sorted(waterfall.factors, key=lambda factor: -abs(factor.points))
    large = [factor for factor in largest_first if abs(factor.points) >= 0.01 and factor.name != "other"]
    listed_factors = large[:_MOST_FACTORS_NAMED]
    other_points = sum(factor.points for factor in waterfall.factors if factor not in listed_factors)
    exact_percents = [100 * factor.points for factor in listed_factors]
    *rounded, rounded_other = whole_numbers([*exact_percents, 100 * other_points], total=100 - round(100 * efficiency))
    contributions_of_listed = []
    for factor, points in zip(listed_factors, rounded, strict=True):
        takes_points = points > 0
        words = _factor_in_words(waterfall, factor.name, takes_points=takes_points)
        contributions_of_listed.append(
            _Contribution(points, words, _points_bounds_text(factor, takes_points=takes_points))
        )
    return [*contributions_of_listed, _Contribution(rounded_other, _OTHER_THINGS)]


def loss_in_words(waterfall: Waterfall, factor: Factor) -> str:
    """Return the words for a factor that takes points: "the transfer"."""
    return _OTHER_THINGS if factor.name == "other" else _factor_in_words(waterfall, factor.name, takes_points=True)


def points_interval(factor: Factor) -> str:
    """Return the interval of the points that a factor takes: "12 to 21"; "" where it is narrower than a point."""
    return _points_bounds_text(factor, takes_points=True).strip(" ()")


def _points_bounds_text(factor: Factor, *, takes_points: bool) -> str:
    """Return the 95 % interval of a factor's points, " (12 to 21)"; empty where it is narrower than a point.

    Where a factor gains points, they are shown as positive, so the ends change places and signs.
    """
    if factor.interval is None or factor.interval.low is None or factor.interval.high is None:
        return ""
    low = 100 * factor.interval.low if takes_points else -100 * factor.interval.high
    high = 100 * factor.interval.high if takes_points else -100 * factor.interval.low
    return f" ({low:z.0f} to {high:z.0f})" if high - low >= 1 else ""


def whole_numbers(values: Sequence[float], total: int) -> list[int]:
    """Return whole numbers that add up to `total`, each within 1 of its value.

    All are rounded down, and then those with the largest remainders up, as many as `total` lacks. Example: 1.6, 2.3 and
    0.1 with a total of 4 give 2, 2 and 0.

    Args:
        values: at least one, their sum within 0.5 of `total`.
        total: the sum of the result.
    """
    rounded = [math.floor(value) for value in values]
    largest_remainder_first = sorted(range(len(values)), key=lambda index: rounded[index] - values[index])
    lacking = total - sum(rounded)
    for index in largest_remainder_first[:lacking]:
        rounded[index] += 1
    return rounded


def _contribution_clause(contribution: _Contribution, *, with_unit: bool) -> str:
    """Return a contribution as a clause.

    Examples: "17 points (12 to 21) are the transfer", "8 are the transfer", "1 is gained by step rounding".
    """
    points = abs(contribution.points)
    verb = "is" if points == 1 else "are"
    unit = ""
    if with_unit:
        unit = " point" if points == 1 else " points"
    gained_by = "" if contribution.points > 0 else "gained by "
    return f"{points}{unit}{contribution.bounds} {verb} {gained_by}{contribution.what}"


def _factor_in_words(waterfall: Waterfall, name: str, *, takes_points: bool) -> str:
    """Return the words for a factor that takes points, or gains some."""
    if name == "compute scaling":
        if waterfall.work_per_rank is not None and waterfall.work_per_rank < 1:
            return "smaller per-rank work"
        return "slower computing" if takes_points else "faster computing"
    if name == "straggler wait" and takes_points:
        return _straggler_clause(waterfall.straggler)
    if name == STEP_ROUNDING and not takes_points and waterfall.images_left_out >= 0.005:
        return f"step rounding, which leaves {100 * waterfall.images_left_out:.0f} % of the images out"
    words = _WORDS_BY_FACTOR[name]
    return words.taking if takes_points else words.gaining


def _straggler_clause(straggler: Straggler | None) -> str:
    """Return "waiting for rank 3, which computes 21 % slower and comes last in 80 % of steps"."""
    if straggler is None:
        return "waiting for the slowest rank"
    clauses = []
    if straggler.slower_by is not None and straggler.slower_by >= 0.005:
        clauses.append(f"computes {100 * straggler.slower_by:.0f} % slower")
    if straggler.share_of_steps < 0.995:
        clauses.append(f"comes last in {100 * straggler.share_of_steps:.0f} % of steps")
    which = f", which {' and '.join(clauses)}" if clauses else ""
    return f"waiting for rank {straggler.rank}{which}"
