"""Speedup and efficiency along a curve, against its baseline and against the plain run without a wrapper.

The baseline is the curve's smallest rank count with a completed run, N_base. All of a curve is relative to it:

    strong modes   speedup    = baseline epoch seconds / epoch seconds
                   efficiency = speedup / (N / N_base)
    weak           efficiency = baseline epoch seconds / epoch seconds     (equal samples per rank)
                   speedup    = efficiency x N / N_base                    (scaled speedup)

so with N_base > 1 a speedup of 2 means twice as fast as N_base ranks, not as one rank. Strong and weak scaling:
Amdahl (AFIPS 1967) and Gustafson (CACM 31, 1988). A trial that drifts (`learning.drift`) does other work: it
has its place on the curve, but no speedup, and is nobody's baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitscale.analysis.curve_names import curve_name
from vitscale.analysis.runs.environments import differences
from vitscale.analysis.statistics import ONE_RUN, ratio
from vitscale.analysis.trials import TrialResult
from vitscale.present.estimate import Estimate
from vitscale.store.results import Curve
from vitscale.trial.trial import HOW_FOUND, OF_THE_BATCH, OF_THE_WRAPPER, Mode, Trial, exact


@dataclass(frozen=True)
class Point:
    """One trial's place on a curve. None where it is unknown."""

    gpus: int
    trial_id: str
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    speedup_over_plain: Estimate | None = None
    """Against the run on one rank without a distributed wrapper (engine = "none"), where the study has it."""
    efficiency_over_plain: Estimate | None = None


@dataclass(frozen=True)
class CurveResult:
    """Trials that differ in rank count alone, under one batch policy."""

    name: str
    """Engine and swept values, as a reader would name the curve."""
    mode: Mode
    labels: Mapping[str, Any]
    points: tuple[Point, ...]
    baseline: Point | None
    """None: no trial of the curve has completed, or each that has drifts."""
    plain_trial: str | None
    unlike: tuple[str, ...]
    """Points not held against the baseline, because their surroundings differ from it, and how."""


def scale(curve: Curve, trials: Mapping[str, TrialResult], combine_unlike: bool) -> CurveResult:
    """Works out one curve."""
    ordered = sorted(curve.points, key=lambda point: point.gpus)
    base = next((point for point in ordered if trials[point.trial_id].comparable_costs), None)
    plain = _plain_twin(curve.mode, trials[ordered[0].trial_id].trial, trials) if ordered else None
    points, unlike = [], []
    for point in ordered:
        result = trials[point.trial_id]
        speedup = efficiency = over_plain = efficiency_over_plain = None
        if base is not None and result.comparable_costs:
            reference = trials[base.trial_id]
            between = () if combine_unlike else differences(reference.environment, result.environment)
            if between:
                unlike.append(f"{point.gpus} ranks: {'; '.join(between)}")
            else:
                speedup, efficiency = _against(reference, result, curve.mode, point.gpus / base.gpus)
        if plain is not None and result.comparable_costs:
            between = () if combine_unlike else differences(plain.environment, result.environment)
            if not between:
                over_plain, efficiency_over_plain = _against(plain, result, curve.mode, point.gpus)
        points.append(Point(point.gpus, point.trial_id, speedup, efficiency, over_plain, efficiency_over_plain))
    return CurveResult(
        name=curve_name(curve.labels, trials[ordered[-1].trial_id].trial if ordered else None),
        mode=curve.mode,
        labels=curve.labels,
        points=tuple(points),
        baseline=next((point for point in points if base is not None and point.gpus == base.gpus), None),
        plain_trial=plain.trial_id if plain is not None else None,
        unlike=tuple(unlike),
    )


def _against(
    reference: TrialResult, result: TrialResult, mode: Mode, times_the_ranks: float
) -> tuple[Estimate, Estimate]:
    """Speedup and efficiency of `result` on `times_the_ranks` as many ranks as `reference`."""
    if reference.trial_id == result.trial_id:
        by_definition = 1.0 if len(result.comparable_costs) > 1 else None
        same = Estimate(1.0, by_definition, by_definition, note="" if by_definition else ONE_RUN)
        return same, same
    times_as_fast = ratio(reference.comparable_costs, result.comparable_costs, (reference.looked, result.looked))
    if mode == "weak":
        return times_as_fast.times(times_the_ranks), times_as_fast
    return times_as_fast, times_as_fast.times(1 / times_the_ranks)


def _plain_twin(mode: Mode, trial: Trial, trials: Mapping[str, TrialResult]) -> TrialResult | None:
    """The completed trial without a wrapper that does on one rank what `trial`'s curve does on N."""
    return next(
        (
            other
            for other in trials.values()
            if other.trial.train.engine == "none" and other.comparable_costs and _same_work(mode, other.trial, trial)
        ),
        None,
    )


def _same_work(mode: Mode, plain: Trial, trial: Trial) -> bool:
    ranks = trial.world.size
    if mode == "strong-global":
        batch = plain.global_batch == trial.global_batch
    else:
        ours, theirs = plain.train, trial.train
        batch = (ours.micro_batch, ours.grad_accum) == (theirs.micro_batch, theirs.grad_accum)
    share = exact(trial.data.fraction) / (ranks if mode == "weak" else 1)
    # Shares have passed through a float each, which their exact product has not.
    fraction = abs(exact(plain.data.fraction) - share) < 1e-9
    return batch and fraction and plain.world.size == 1 and _rest(plain) == _rest(trial)


def _rest(trial: Trial) -> tuple[Any, ...]:
    """All that must agree whatever the mode. The launcher acts on the start-up alone."""
    return (
        trial.model,
        trial.data.model_dump(exclude={"fraction", *HOW_FOUND}),
        trial.train.model_dump(exclude={*OF_THE_WRAPPER, *OF_THE_BATCH}),
        trial.window,
        trial.world.threads_per_rank,
    )
