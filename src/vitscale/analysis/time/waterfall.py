"""Works out the waterfall: from ideal to measured, in factors that multiply to the efficiency.

T is the seconds of an epoch, S its whole step and K = T / S the steps it comes to (`runs.steps`: the short last one
counts by its time); the baseline's have the index b. With q the images of a rank's step against the baseline's,
`analysis.scaling` gives

    E = step rounding * q * S_b / S        step rounding = K_b / K / q, times N_b / N in the strong modes

A step with a share of the images takes more than that share of the time: for equal images per rank the first factor is
(K_b / exact K_b) / (K / exact K), with exact K = images / global batch. Under drop_last K covers all images, though an
epoch leaves some out: `images_left_out` says how many, and the factor is 1.

What remains is shared out over the parts of the step by the logarithmic mean Divisia index (LMDI-I; Ang, "Decomposition
analysis for policymaking in energy: which is the preferred method?", Energy Policy 32, 2004, 1131-1139). With x the
parts of the trial's step, X = S their sum, y those of the baseline's times q, Y their sum, and
L(a, b) = (a - b) / ln(a / b),

    ln f = (y - x) / L(X, Y)        sum of ln f = (Y - X) / L(X, Y) = ln(Y / X) = ln(q * S_b / S)

so nothing is left over, no order has to be chosen, and a part may be zero. The points of a factor,
(1 - E) * ln f / ln E, add up to 1 - E, and those of the parts are in proportion to the seconds that each adds.

The parts are those of a typical rank (`Breakdown.typical`) on the scale of light steps (`exposure.unprofiled`): they
add up to S.

Where images are decoded while training waits, data wait is two factors, loading and decoding, in the proportion in
which the loader's threads spent their time (`sources.base.Spent`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vitscale.analysis.scaling import CurveResult, ScalingPoint
from vitscale.analysis.statistics import FEWEST_REPEATS, jackknife
from vitscale.analysis.time.breakdown import COMPUTE, Straggler
from vitscale.analysis.time.exposure import unprofiled
from vitscale.analysis.trials import TrialResult
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION, EXPOSED, PARTS
from vitscale.trial.trial import Mode

STEP_ROUNDING = "step rounding"
"""Factor for the steps of an epoch: it loses where the last step of an epoch has few images, but takes a step."""

_PARTS_OF_FACTOR: dict[str, tuple[str, ...]] = {
    "compute scaling": COMPUTE,
    "data wait": ("data_wait",),
    "loading": ("loading",),
    "decoding": ("decoding",),
    "pipeline bubble": ("bubble",),
    "straggler wait": ("wait",),
    "wire": ("wire",),
    "synchronised norm": ("norm",),
    COMMUNICATION: (COMMUNICATION,),
    "optimizer": ("optimizer",),
    "launch gaps": ("launch_gaps",),
    "other": ("other",),
}
"""Factor -> the parts of a step whose logarithms add up to its own."""
FACTORS = (STEP_ROUNDING, *_PARTS_OF_FACTOR)
"""All factors that a waterfall may hold, in its order."""
_LEAST_BELIEVABLE = 1e-9
_LARGEST_BELIEVABLE = 1e9
"""Limits of steps in seconds and of efficiencies: values outside come from broken clocks and explain nothing."""

_LARGEST_LOG = 700.0
"""A logarithm whose exponential is still a float."""


@dataclass(frozen=True)
class Factor:
    """One step of the waterfall."""

    name: str
    """One of `FACTORS`."""
    factor: float
    """All factors multiply to the efficiency; one above 1 helps."""
    points: float
    """Efficiency that it costs: 0.17 is 17 points of 100 lost; below zero it is a gain."""
    interval: Estimate | None = None
    """Interval of the points, over the runs of the trial and of its baseline; None where it is unknown."""
    without: tuple[tuple[float, ...], ...] = ()
    """The points with each run left out in turn: those of the trial, then those of its baseline; empty where there is
    no interval."""

    def less(self, others: Sequence[Factor]) -> Estimate | None:
        """Return its points less those of `others` together, with the interval over runs; None where it is unknown.

        The difference is taken for each run that is left out, not between two intervals: factors vary together.
        """
        if not self.without or not all(other.without for other in others):
            return None
        differences_by_side = []
        for side, points_by_run in enumerate(self.without):  # the trial, then its baseline
            differences = []
            for run, points in enumerate(points_by_run):
                points_of_others = math.fsum(other.without[side][run] for other in others)
                differences.append(points - points_of_others)
            differences_by_side.append(differences)
        difference = self.points - math.fsum(other.points for other in others)
        return jackknife(difference, differences_by_side)


@dataclass(frozen=True)
class Waterfall:
    """The way from the ideal to what one trial reaches, against a curve's baseline. None where that is unknown."""

    curve: str
    mode: Mode
    gpus: int
    trial_id: str
    baseline_trial: str | None
    baseline_gpus: int | None
    efficiency: float | None
    factors: tuple[Factor, ...]
    """In the order of `FACTORS`; empty where they are unknown."""
    reason: str
    """Why the factors are unknown; empty where they are known."""
    straggler: Straggler | None
    """The trial's straggler."""
    interval: Estimate | None = None
    """The efficiency with its interval."""
    work_per_rank: float | None = None
    """Images of a rank's optimizer step, mean over ranks, against the baseline's."""
    images_left_out: float = 0.0
    """Share of an epoch's images that drop_last leaves out."""


class Unexplained(Exception):
    """Raised, with the reason, where there are no factors."""


def waterfalls(curve: CurveResult, trials: Mapping[str, TrialResult]) -> tuple[Waterfall, ...]:
    """Return one waterfall for each trial of a curve but its baseline."""
    baseline_trial = curve.baseline.trial_id if curve.baseline is not None else None
    points = [point for point in curve.points if point.trial_id != baseline_trial]
    return tuple(_waterfall(curve, point, trials) for point in points)


def decompose(parts: Mapping[str, float], ideal_parts: Mapping[str, float]) -> dict[str, float]:
    """Return ln f of each part of a step, by LMDI-I: see the module's docstring.

    Args:
        parts: seconds of the measured step, none negative, their sum above 0.
        ideal_parts: seconds under the same names, of the step that it would be with perfect scaling.

    Returns:
        Logarithms that add up to ln(sum of ideal_parts / sum of parts); below 0 for what costs time.
    """
    mean_of_sums = logarithmic_mean(sum(parts.values()), sum(ideal_parts.values()))  # L(X, Y)
    return {name: (ideal_parts[name] - parts[name]) / mean_of_sums for name in parts}


def _waterfall(curve: CurveResult, point: ScalingPoint, trials: Mapping[str, TrialResult]) -> Waterfall:
    """Return the waterfall of one point; without factors, but with the reason, where they are unknown."""
    trial = trials[point.trial_id]
    base = curve.baseline
    factors: tuple[Factor, ...] = ()
    reason = ""
    try:
        factors = _factors(curve, point, trials)
    except Unexplained as unexplained:
        reason = str(unexplained)
    return Waterfall(
        curve=curve.name,
        mode=curve.mode,
        gpus=point.gpus,
        trial_id=point.trial_id,
        baseline_trial=base.trial_id if base else None,
        baseline_gpus=base.gpus if base else None,
        efficiency=point.efficiency.value if point.efficiency else None,
        factors=factors,
        reason=reason,
        straggler=trial.breakdown.straggler if trial.breakdown else None,
        interval=point.efficiency,
        work_per_rank=_work_per_rank(trial, trials[base.trial_id]) if base else None,
        images_left_out=trial.images_left_out,
    )


def _factors(curve: CurveResult, point: ScalingPoint, trials: Mapping[str, TrialResult]) -> tuple[Factor, ...]:
    """Return the factors of one point with their intervals.

    Raises:
        Unexplained: with the reason.
    """
    base = curve.baseline
    trial = trials[point.trial_id]
    if base is None:
        raise Unexplained("no trial of the curve has completed with an epoch time or images/s")
    if not trial.observed_costs:
        raise Unexplained(trial.reason or "no run has completed with an epoch time or images/s")
    if trial.drifts:
        raise Unexplained("its loss drifts: it does other work than the baseline")
    if point.efficiency is None:
        raise Unexplained("it ran in other surroundings than the baseline")
    reference = trials[base.trial_id]
    time_share = ideal_time_share(curve.mode, base.gpus, point.gpus)
    return with_intervals(trial, reference, time_share, step_factors)


def ideal_time_share(mode: Mode, base_gpus: int | None, gpus: int) -> float:
    """Return the share of the baseline's time that perfect scaling takes: N_b / N in the strong modes, 1 in weak."""
    return 1.0 if mode == "weak" or base_gpus is None else base_gpus / gpus


def step_factors(trial: TrialResult, reference: TrialResult, time_share: float) -> tuple[Factor, ...]:
    """Return the factors of an epoch's efficiency, without their intervals.

    Args:
        trial: the trial that is explained.
        reference: its baseline.
        time_share: `ideal_time_share` of the two.

    Raises:
        Unexplained: with the reason.
    """
    log_time_ratio = mean_log(reference) - mean_log(trial)
    time_ratio = math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, log_time_ratio)))
    efficiency = _checked_value(time_share * time_ratio, "its efficiency")
    work = _work_per_rank(trial, reference)  # q of the module's docstring
    rounding = _steps_per_epoch(reference) / _steps_per_epoch(trial) * time_share / work
    parts, reference_parts = _comparable_parts({"": trial, " of the baseline": reference})
    ideal_parts = {name: work * seconds for name, seconds in reference_parts.items()}
    log_by_part = decompose(parts, ideal_parts)
    log_by_factor = {STEP_ROUNDING: math.log(rounding)}
    for factor_name, part_names in _PARTS_OF_FACTOR.items():
        if log_by_part.keys() >= set(part_names):
            log_by_factor[factor_name] = sum(log_by_part[part_name] for part_name in part_names)
    return factors_of(log_by_factor, efficiency)


def light_step_parts(trial: TrialResult) -> dict[str, float]:
    """Return the seconds of the parts of a trial's light step.

    Parts of computing have their own names ("forward"), the others those of their factors ("data wait").

    Raises:
        Unexplained: with the reason.
    """
    (parts,) = _comparable_parts({"": trial})
    factor_by_part: dict[str, str] = {}
    for factor_name, part_names in _PARTS_OF_FACTOR.items():
        if part_names != COMPUTE:
            factor_by_part |= dict.fromkeys(part_names, factor_name)
    return {factor_by_part.get(part, part): seconds for part, seconds in parts.items()}


def factors_of(logs: Mapping[str, float], efficiency: float) -> tuple[Factor, ...]:
    """Return the factors, without their intervals.

    Args:
        logs: name of a factor -> its logarithm; they add up to that of the efficiency.
        efficiency: the product of all factors.
    """
    per_log = points_per_log(efficiency)  # negative
    # Adding 0.0 makes 0.0 of -0.0.
    return tuple(Factor(name, math.exp(log), points=per_log * log + 0.0) for name, log in logs.items())


def with_intervals(
    trial: TrialResult,
    reference: TrialResult,
    time_share: float,
    factors_by: Callable[[TrialResult, TrialResult, float], tuple[Factor, ...]],
) -> tuple[Factor, ...]:
    """Return the factors with the intervals of their points, by leaving out each run of both sides in turn (jackknife).

    The factors have no intervals where a side has too few runs. The typical rank stays the same whichever run is left
    out: which rank is named is not part of the uncertainty.

    Args:
        trial: the trial that is explained.
        reference: its baseline.
        time_share: `ideal_time_share` of the two.
        factors_by: (trial, reference, time_share) -> the factors without intervals; raises Unexplained.
    """
    factors = factors_by(trial, reference, time_share)
    if not _have_runs_for_interval(trial) or not _have_runs_for_interval(reference):
        return factors
    try:
        all_of_trial = trial.without(())  # all runs, but with the typical rank fixed
        all_of_reference = reference.without(())
        # [left-out observation][factor]
        factors_without_trial_run = [
            factors_by(trial.without(dropped), all_of_reference, time_share) for dropped in trial.clusters
        ]
        factors_without_reference_run = [
            factors_by(all_of_trial, reference.without(dropped), time_share) for dropped in reference.clusters
        ]
    except (Unexplained, statistics.StatisticsError):
        return factors  # too few runs were explained, or have an epoch time
    factors_with_intervals = []
    for position, factor in enumerate(factors):
        points_by_side = (
            _points_of_factor(position, factors_without_trial_run),
            _points_of_factor(position, factors_without_reference_run),
        )
        interval = jackknife(factor.points, points_by_side)
        factors_with_intervals.append(replace(factor, interval=interval, without=points_by_side))
    return tuple(factors_with_intervals)


def _points_of_factor(position: int, factors_by_run: Sequence[tuple[Factor, ...]]) -> tuple[float, ...]:
    """Return the points of the factor at one position, for each run that was left out."""
    return tuple(factors[position].points for factors in factors_by_run)


def _have_runs_for_interval(side: TrialResult) -> bool:
    """Whether a trial has enough runs for an interval: those with an epoch time, and those with an explained step."""
    return len(side.clusters) >= FEWEST_REPEATS and side.explained_runs >= FEWEST_REPEATS


class _CommonParts(NamedTuple):
    """The parts of a step that can be told apart in all trials that are compared."""

    is_communication_one_part: bool
    """Whether wait, wire and norm are one part."""
    merged: Mapping[str, str]
    """Part -> the part that it is added to."""
    is_decoding_apart: bool
    """Whether data wait is divided into loading and decoding."""


def _comparable_parts(sides: Mapping[str, TrialResult]) -> list[dict[str, float]]:
    """Return the seconds of the parts of each side's step without the profiler, by names that both can tell apart.

    Args:
        sides: clause that messages add for a side (" of the baseline") -> its trial.

    Returns:
        Part -> seconds of each side, in the order of the sides.

    Raises:
        Unexplained: with the reason.
    """
    common = _common_parts(list(sides.values()))
    return [_light_parts(trial, side_clause, common) for side_clause, trial in sides.items()]


def _common_parts(trials: Sequence[TrialResult]) -> _CommonParts:
    """Return the parts of a step by which these trials can be compared: those that every trial knows.

    A part that one trial does not know is merged into another part in all of them, so that all have the same parts.
    """
    is_communication_one_part = any(_mixes_wait_and_transfer(trial) for trial in trials)
    merged: dict[str, str] = {}
    for part in _PARTS_BY_MARKS:
        if any(_lacks_part(trial, part) for trial in trials):
            merged[part] = "other"  # which holds its time in the trial that lacks it
    # Parts that are 0 in all of these trials get no factor: adding 0 to another part changes nothing.
    if not is_communication_one_part and not any(_synchronises_norms(trial) for trial in trials):
        merged["norm"] = "wire"
    if not any(_is_pipeline(trial) for trial in trials):
        merged["bubble"] = "other"
    is_data_wait_known = "data_wait" not in merged
    return _CommonParts(
        is_communication_one_part, merged, is_decoding_apart=is_data_wait_known and _is_decoding_known(trials)
    )


_PARTS_BY_MARKS = ("launch_gaps", "data_wait", "optimizer")
"""Parts that show by marks in a profile; without its marks the time of a part is in "other"."""


def _mixes_wait_and_transfer(trial: TrialResult) -> bool:
    """Whether a trial's steps were explained, but waiting for other ranks could not be told from the transfer."""
    return trial.breakdown is not None and not trial.breakdown.wait_known


def _lacks_part(trial: TrialResult, part: str) -> bool:
    """Whether the seconds of a part are unknown for a trial."""
    return trial.breakdown is None or trial.breakdown.typical.parts[part] is None


def _synchronises_norms(trial: TrialResult) -> bool:
    """Whether ranks exchange the statistics of batch norms: the part "norm"."""
    return trial.trial.train.batch_norm == "synchronised"


def _is_pipeline(trial: TrialResult) -> bool:
    """Whether ranks hold stages of one model, which wait for one another: the part "bubble"."""
    return trial.trial.parallel.pipeline > 1


def _is_decoding_known(trials: Sequence[TrialResult]) -> bool:
    """Whether all trials know which share of loading was decoding, and some trial decoded at all."""
    decoding_shares = [trial.loader.decoding_share for trial in trials]
    return None not in decoding_shares and any(decoding_shares)


def _light_parts(result: TrialResult, side_clause: str, common: _CommonParts) -> dict[str, float]:
    """Return part -> seconds of the light step that the trial's epochs consist of.

    Args:
        result: the trial.
        side_clause: what messages add for it (" of the baseline").
        common: the parts that can be told apart.

    Raises:
        Unexplained: with the reason.
    """
    if result.breakdown is None:
        raise Unexplained(f"no step{side_clause} was explained")
    typical = result.breakdown.typical
    reasons = result.breakdown.reasons
    if typical.exposed_seconds is None or typical.parts["other"] is None:
        raise Unexplained(f"parts of the step{side_clause} are unknown: {reasons.get('other') or reasons.get('wait')}")
    parts = {name: typical.parts[name] or 0.0 for name in PARTS}
    if common.is_communication_one_part:
        sum_of_parts = sum(parts.pop(name) for name in EXPOSED)
        parts[COMMUNICATION] = sum_of_parts if result.breakdown.wait_known else typical.exposed_seconds
    for name, target in common.merged.items():
        parts[target] += parts.pop(name)
    decoding_share = result.loader.decoding_share
    if common.is_decoding_apart and decoding_share is not None:
        data_wait = parts.pop("data_wait")
        parts["loading"] = data_wait * (1 - decoding_share)
        parts["decoding"] = data_wait * decoding_share
    step_seconds = _checked_value(_step_seconds(result), f"the light step{side_clause}", unit=" s")
    _checked_value(sum(parts.values()), f"the explained step{side_clause}", unit=" s")
    return unprofiled(parts, step_seconds, result.trial.train.device)


def _step_seconds(result: TrialResult) -> float:
    """Return S, the seconds of a step: the mean epoch as `analysis.scaling` takes it, divided by its steps."""
    return math.exp(mean_log(result) - math.log(_steps_per_epoch(result)))


def mean_log(result: TrialResult) -> float:
    """Return the mean logarithm, over observations, of the seconds for all images of an epoch."""
    return statistics.fmean(math.log(cost) for cost in result.comparable_costs)


def _steps_per_epoch(result: TrialResult) -> float:
    """Return K, the steps of an epoch with all its images.

    Where costs are seconds per image, as of rates, K is the steps of one image times the share of the data that is
    trained.

    Raises:
        Unexplained: the steps are unknown.
    """
    if result.has_rates_alone:
        if not result.batch_known:
            raise Unexplained("how many images a step takes is not told")
        return result.trial.data.fraction / result.trial.global_batch
    steps = result.effective_steps
    if steps is None:
        raise Unexplained("how many steps an epoch has is unknown")
    return steps / (1 - result.images_left_out)


def _work_per_rank(result: TrialResult, reference: TrialResult) -> float:
    """Return q, the images of a rank's optimizer step: those of the trial / those of the reference."""
    train = result.trial.train
    reference_train = reference.trial.train
    images = train.micro_batch * train.grad_accum
    reference_images = reference_train.micro_batch * reference_train.grad_accum
    return images / reference_images


def _checked_value(value: float, subject: str, *, unit: str = "") -> float:
    """Return the value, if it can have been measured by a clock that works.

    Args:
        value: the value.
        subject: what it is, for the message.
        unit: its unit, with a space before it.

    Raises:
        Unexplained: only a broken clock can have measured it.
    """
    if not _LEAST_BELIEVABLE < value < _LARGEST_BELIEVABLE:
        raise Unexplained(f"{subject} cannot be believed: {value:.3g}{unit}")
    return value


def logarithmic_mean(first: float, second: float) -> float:
    """Return the logarithmic mean L(a, b) = (a - b) / ln(a / b), and a for a = b."""
    log_ratio = math.log(first) - math.log(second)
    if log_ratio == 0:
        return first
    if abs(log_ratio) < 1:  # a - b of close values would lose digits: it is b (e^ln(a/b) - 1)
        return second * math.expm1(log_ratio) / log_ratio
    return (first - second) / log_ratio


def points_per_log(efficiency: float) -> float:
    """Return the points of efficiency per unit of its logarithm: (1 - E) / ln E, and -1, its limit, for E = 1."""
    log = math.log(efficiency)
    if log == 0:
        return -1.0
    return -math.expm1(log) / log  # expm1(ln E) is E - 1
