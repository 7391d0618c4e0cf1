"""How fast training progresses: accuracy by images and by seconds, what a target accuracy took, gradient noise.

Throughput alone says nothing of the time to an accuracy. A larger global batch takes fewer steps per epoch, but each of
them teaches less once the batch is beyond the gradient noise scale. That scale is how large a batch may grow before a
larger one hardly gives a better gradient.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), appendix A.1. Let G be the
gradient over all data, Sigma the covariance of one image's gradient and G_b the mean gradient of b images. Then
E|G_b|^2 = |G|^2 + tr(Sigma)/b, so that two batch sizes b < B in one step give, without bias,

    |G|^2     = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

A ratio of two noisy numbers is biased: both are averaged over the steps of a run before they are divided. The (simple)
noise scale B_noise = tr(Sigma) / |G|^2, in images, holds for the moment of training at which it was taken.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.repeats import Clusters, observations
from vitscale.analysis.runs.steps import common_steps, has_only_whole_epochs
from vitscale.analysis.statistics import finite_or_none, interval, whole_mean
from vitscale.engines.checks import why_no_gradient_norms
from vitscale.engines.step_schedule import has_two_batch_sizes
from vitscale.present.estimate import Estimate
from vitscale.store.records import EpochLine, GradientLine
from vitscale.store.results import Run


@dataclass(frozen=True)
class AccuracyPoint:
    """The state after one epoch; the last epoch of a run that `measure.steps` ends may be incomplete."""

    epoch: int
    """Counted from 1."""
    images: int
    """Images trained on so far, without padding."""
    seconds: float | None
    """Training so far, at the run's images per second, without start-up and evaluation."""
    held_out_accuracy: float | None
    """Share in [0, 1]."""
    evaluation_seconds: float | None = None
    """Evaluation so far, which `seconds` leaves out; None where it is not recorded."""


@dataclass(frozen=True)
class TargetRun:
    """How long one run took to reach the target accuracy. `epochs` is None where the run did not reach it."""

    repeat: int
    seed: int
    epochs: int | None
    images: int | None
    seconds: float | None
    """Time of training; None where the target was not reached, or the record has no times."""
    evaluation_seconds: float | None = None
    """Evaluation after each epoch until then; with it, the time is what MLPerf calls time to train."""
    trained_images: int | None = None
    """Images until the run ended: a run that did not reach the target would have taken more."""
    trained_seconds: float | None = None


@dataclass(frozen=True)
class Convergence:
    """How fast one trial learned, over its runs."""

    noise_scale_images: Estimate | None
    """The simple gradient noise scale, B_noise."""
    noise_reason: str
    """Why the noise scale is None; empty where it is known."""
    target_accuracy: float | None
    target_runs: tuple[TargetRun, ...]
    """All runs, by repeat; empty where there is no target."""
    images_to_target: Estimate | None
    seconds_to_target: Estimate | None
    """None, as `images_to_target`, where a run did not reach the target: those that did were the quickest."""
    points: tuple[AccuracyPoint, ...]
    """Means over all runs, as far as every run went."""
    images_to_target_at_least: float | None = None
    """A lower bound where some runs did not reach the target: each of them counts with all that it trained."""
    seconds_to_target_at_least: float | None = None
    trained_images: tuple[int, ...] = ()
    """Images that each run was trained on in all, as far as they are recorded."""


@dataclass(frozen=True)
class Reach:
    """How far a comparison can go: every trial with any accuracy was trained at least that long."""

    images: int | None
    seconds: float | None


def convergence(runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters = None) -> Convergence | None:
    """Return the convergence of one trial; None where there is no run.

    Args:
        runs: its completed runs.
        figures: the figures of each of these runs.
        clusters: the runs of each observation of a time, by repeat; for images each run is an observation.
    """
    if not runs:
        return None
    points_by_run = [accuracy_points(run, run_figures) for run, run_figures in zip(runs, figures, strict=True)]
    target = runs[0].header.trial.train.target_accuracy
    target_runs: list[TargetRun] = []
    if target is not None:
        target_runs = [_target_run(run, points, target) for run, points in zip(runs, points_by_run, strict=True)]
        target_runs.sort(key=lambda run: run.repeat)
    images_cost = _cost_of_target([_images_to_target(run) for run in target_runs], clusters=None)
    seconds_cost = _cost_of_target([_seconds_to_target(run) for run in target_runs], clusters)
    points_by_epoch = zip(*points_by_run, strict=False)  # as far as every run went
    noise = noise_scale(runs)
    return Convergence(
        noise_scale_images=noise.images,
        noise_reason=noise.reason,
        target_accuracy=target,
        target_runs=tuple(target_runs),
        images_to_target=images_cost.estimate,
        seconds_to_target=seconds_cost.estimate,
        points=tuple(map(_mean_point, points_by_epoch)),
        images_to_target_at_least=images_cost.at_least,
        seconds_to_target_at_least=seconds_cost.at_least,
        trained_images=tuple(points[-1].images for points in points_by_run if points),
    )


def accuracy_points(run: Run, figures: RunFigures) -> tuple[AccuracyPoint, ...]:
    """Return the points of one run, one for each epoch, up to the first epoch that its record lacks.

    An epoch takes what its images take at the run's `images_per_second`, so that no time holds warm-up, explained or
    rare slow steps. In an imported log of whole epochs alone it takes its own seconds.
    """
    lines_by_epoch = _lines_by_epoch(run)
    has_epoch_times_alone = has_only_whole_epochs(run)
    rate = figures.images_per_second
    points: list[AccuracyPoint] = []
    # Sums over the epochs so far.
    images = 0
    epoch_seconds = 0.0
    evaluation_seconds: float | None = 0.0
    for epoch in itertools.count():
        lines = lines_by_epoch.get(epoch, [])
        if not lines:
            break
        first_line = lines[0]
        if first_line.images is None or first_line.steps is None:
            break  # an imported log without the number of images of an epoch
        images += first_line.images
        epoch_seconds += max(line.seconds for line in lines)
        if has_epoch_times_alone:
            seconds = finite_or_none(epoch_seconds)
        else:
            seconds = finite_or_none(images / rate) if rate is not None else None
        evaluation_seconds = _add_evaluation(evaluation_seconds, lines)
        point = AccuracyPoint(
            epoch=epoch + 1,
            images=images,
            seconds=seconds,
            held_out_accuracy=finite_or_none(first_line.held_out_accuracy),
            evaluation_seconds=finite_or_none(evaluation_seconds),
        )
        points.append(point)
    return tuple(points)


def _lines_by_epoch(run: Run) -> dict[int, list[EpochLine]]:
    """Return number of an epoch -> its line of each rank that has one."""
    lines_by_epoch: dict[int, list[EpochLine]] = {}
    for rank in run.ranks:
        for line in rank.epochs:
            lines_by_epoch.setdefault(line.epoch, []).append(line)
    return lines_by_epoch


def _add_evaluation(seconds_so_far: float | None, lines: Sequence[EpochLine]) -> float | None:
    """Return the seconds of evaluation with those of another epoch, of its slowest rank; None where unknown.

    Args:
        seconds_so_far: evaluation of the epochs before; None where one of them recorded none.
        lines: the epoch's line of each rank.
    """
    seconds = [line.evaluation_seconds for line in lines if line.evaluation_seconds is not None]
    if seconds_so_far is None or not seconds:
        return None
    return seconds_so_far + max(seconds)


def accuracy_at_images(learned: Convergence, images: float) -> float | None:
    """Return the mean held-out accuracy after `images`, linear between epochs.

    None before the first epoch and after the last one, and where a neighbouring epoch was not evaluated.
    """
    return linear_between([(float(point.images), point.held_out_accuracy) for point in learned.points], images)


def accuracy_at_seconds(learned: Convergence, seconds: float) -> float | None:
    """Return the mean held-out accuracy after `seconds` of training; like `accuracy_at_images`."""
    timed = [(point.seconds, point.held_out_accuracy) for point in learned.points if point.seconds is not None]
    return linear_between(timed, seconds)


def common_reach(trials: Iterable[Convergence]) -> Reach:
    """Return the largest number of images, and of seconds, at which all these trials can be compared.

    It is the smallest of the trials' last points with an accuracy; trials without any are left out.
    """
    last_points = []
    for trial in trials:
        evaluated = [point for point in trial.points if point.held_out_accuracy is not None]
        if evaluated:
            last_points.append(evaluated[-1])
    if not last_points:
        return Reach(images=None, seconds=None)
    seconds = [point.seconds for point in last_points if point.seconds is not None]
    all_are_timed = len(seconds) == len(last_points)
    return Reach(images=min(point.images for point in last_points), seconds=min(seconds) if all_are_timed else None)


def _target_run(run: Run, points: Sequence[AccuracyPoint], target: float) -> TargetRun:
    """Return how long one run took to reach the target accuracy, by its points."""
    at_target = _first_point_with(points, target)
    last_point = points[-1] if points else None
    return TargetRun(
        repeat=run.header.repeat,
        seed=seed_of(run),
        epochs=at_target.epoch if at_target else None,
        images=at_target.images if at_target else None,
        seconds=at_target.seconds if at_target else None,
        evaluation_seconds=at_target.evaluation_seconds if at_target else None,
        trained_images=last_point.images if last_point else None,
        trained_seconds=last_point.seconds if last_point else None,
    )


def _first_point_with(points: Sequence[AccuracyPoint], accuracy: float) -> AccuracyPoint | None:
    """Return the first point with at least this held-out accuracy; None where no point has it."""
    for point in points:
        if point.held_out_accuracy is not None and point.held_out_accuracy >= accuracy:
            return point
    return None


class _RunCost(NamedTuple):
    """Images or seconds that one run took to the target accuracy, or without reaching it."""

    reached_target: bool
    to_target: float | None
    """Cost up to the target; None where it was not reached, or is unknown."""
    in_all: float | None
    """Cost until the run ended; None where it is unknown."""


def _images_to_target(run: TargetRun) -> _RunCost:
    """Return the cost of one run in images."""
    return _RunCost(run.epochs is not None, to_target=run.images, in_all=run.trained_images)


def _seconds_to_target(run: TargetRun) -> _RunCost:
    """Return the cost of one run in seconds of training."""
    return _RunCost(run.epochs is not None, to_target=run.seconds, in_all=run.trained_seconds)


class _CostOfTarget(NamedTuple):
    """Images or seconds that a target accuracy took, over all runs of a trial."""

    estimate: Estimate | None = None
    """None where a run did not reach the target."""
    at_least: float | None = None
    """A lower bound of the centre where some runs did not reach the target; else None."""


def _cost_of_target(costs: Sequence[_RunCost], clusters: Clusters) -> _CostOfTarget:
    """Return what a target took over all runs.

    Where a run did not reach the target, only a lower bound is known: that run counts with all that it trained.

    Args:
        costs: the cost of each run; empty where there is no target.
        clusters: the runs of each observation.
    """
    if not costs:
        return _CostOfTarget()
    if all(cost.reached_target for cost in costs):
        return _CostOfTarget(estimate=_interval([cost.to_target for cost in costs], clusters))
    least_costs = [cost.to_target if cost.reached_target else cost.in_all for cost in costs]
    if None in least_costs:
        return _CostOfTarget()
    bound = _interval(least_costs, clusters)
    return _CostOfTarget(at_least=bound.value if bound is not None else None)


def _mean_point(points: Sequence[AccuracyPoint]) -> AccuracyPoint:
    """Return the mean of the points that all runs have for one epoch; a value that one of them lacks is None."""
    return AccuracyPoint(
        epoch=points[0].epoch,
        images=points[0].images,
        seconds=whole_mean([point.seconds for point in points]),
        held_out_accuracy=whole_mean([point.held_out_accuracy for point in points]),
    )


def _interval(values: Sequence[float | None], clusters: Clusters) -> Estimate | None:
    """Return the interval of one value per observation; None where no run has one. A value of 0 counts as unknown."""
    observed = observations([value or None for value in values], clusters)
    return interval(observed) if observed else None


def linear_between(points: Sequence[tuple[float, float | None]], position: float) -> float | None:
    """Return the value at `position`, linear between the points on either side.

    None before the first and after the last point, and where the value of one of the two points is unknown.

    Args:
        points: (position, value) by rising position; the value is None where it is unknown.
        position: the position to look up.
    """
    for point_position, value in points:
        if point_position == position:
            return value
    for (start, start_value), (end, end_value) in itertools.pairwise(points):
        if start < position < end:
            if start_value is None or end_value is None:
                return None
            return start_value + (end_value - start_value) * (position - start) / (end - start)
    return None


FEWEST_STEPS = 4
"""Fewest steps of a run that must have norms at two batch sizes."""
ONE_SEED = "runs of one seed: no interval"
_LARGEST_SQUARE_RATIO = 1.01
"""Largest ratio of the squared norm of a mean of gradients to their mean squared norm: exactly it is at most 1, and
bfloat16 may round it up by less than this."""
_CONTRADICTING_NORMS = "the recorded norms of the gradients contradict each other"


class TrialNoiseScale(NamedTuple):
    """The gradient noise scale of a trial, B_noise."""

    images: Estimate | None
    reason: str
    """Why it is None; empty where it is known."""


@dataclass(frozen=True)
class _RunNoiseScale:
    """The gradient noise scale of one run."""

    images: float | None
    reason: str
    """Why it is None; empty where it is known."""
    is_drowned: bool = False
    """Whether noise drowns the gradient."""


def noise_scale(runs: Sequence[Run]) -> TrialNoiseScale:
    """Return the noise scale B_noise in images over the runs of one trial; or None, with the reason.

    Runs of one seed see the same gradients and count as one observation. Where noise drowns the gradient in any run
    there is no figure: the other runs alone would make it too small.
    """
    reason = _reason_for_no_norms(runs)
    if reason:
        return TrialNoiseScale(None, reason)
    noise_scales = [_run_noise_scale(run) for run in runs]
    drowned = [scale for scale in noise_scales if scale.is_drowned]
    if drowned:
        share_of_runs = f"in {len(drowned)} of {len(runs)} runs " if len(runs) > 1 else ""
        return TrialNoiseScale(None, f"{share_of_runs}{drowned[0].reason}")
    images_by_seed: dict[int, list[float]] = {}
    for run, scale in zip(runs, noise_scales, strict=True):
        if scale.images is not None:
            images_by_seed.setdefault(seed_of(run), []).append(scale.images)
    if not images_by_seed:
        return TrialNoiseScale(None, noise_scales[0].reason)
    observed = [statistics.median(images) for images in images_by_seed.values()]
    known_runs = sum(len(images) for images in images_by_seed.values())
    if len(observed) == 1 and known_runs > 1:
        return TrialNoiseScale(Estimate(observed[0], None, None, note=ONE_SEED), "")
    return TrialNoiseScale(interval(observed), "")


def _reason_for_no_norms(runs: Sequence[Run]) -> str:
    """Return why no run of a trial can have norms at two batch sizes; empty where runs can have them."""
    if not runs:
        return "no run has completed"
    trial = runs[0].header.trial
    if not has_two_batch_sizes(trial):
        return "one rank and one micro-step: no gradient of fewer images than the step has"
    if trial.window.explain:
        return ""
    if trial.origin is not None:
        return "imports do not tell the gradients' norms"
    return "measure.explain is false: no step takes the gradients' norms"


def seed_of(run: Run) -> int:
    """Return the seed that a run used: its own, else that of its trial."""
    header = run.header
    return header.trial.train.seed if header.seed is None else header.seed


def _run_noise_scale(run: Run) -> _RunNoiseScale:
    """Return the noise scale of one run: the mean noise of its steps / the mean of their squared gradients."""
    steps = common_steps(run, lambda rank: rank.gradients)
    known_steps = [lines for lines in steps if all(map(_has_norms, lines))]
    if len(known_steps) < FEWEST_STEPS:
        return _RunNoiseScale(None, _reason_for_few_norms(run, steps, len(known_steps)))
    step_noises = []
    for lines in known_steps:
        step_noise = _step_noise(lines)
        if step_noise is None:
            return _RunNoiseScale(None, _CONTRADICTING_NORMS)
        step_noises.append(step_noise)
    squared_gradient = sum(step.squared_gradient for step in step_noises) / len(step_noises)
    noise = sum(step.noise for step in step_noises) / len(step_noises)
    if squared_gradient <= 0:
        return _RunNoiseScale(
            None,
            f"the noise drowns the mean gradient: over {len(step_noises)} steps the estimate of its square is not "
            "positive, and more steps are needed",
            is_drowned=True,
        )
    if noise <= 0:
        return _RunNoiseScale(None, "the gradients of all micro-batches are alike: there is no noise")
    images = noise / squared_gradient
    return _RunNoiseScale(images, "") if math.isfinite(images) else _RunNoiseScale(None, _CONTRADICTING_NORMS)


def _has_norms(line: GradientLine) -> bool:
    """Whether both norms of a rank's step are known."""
    return line.small_squared_norm is not None and line.big_squared_norm is not None


def _reason_for_few_norms(run: Run, steps: Sequence[Sequence[GradientLine]], known_steps: int) -> str:
    """Return why fewer steps of a run than necessary have norms.

    Args:
        run: the record.
        steps: its steps with a line of gradients on all ranks.
        known_steps: how many of them have norms on all ranks.
    """
    if not steps:
        reason = why_no_gradient_norms(run.header.trial)
        return reason or "no step took the gradients' norms: the run has too few steps for it"
    for lines in steps:
        for line in lines:
            if line.reason:
                return line.reason
    return f"the gradients' norms are known in {known_steps} steps, and {FEWEST_STEPS} are needed"


class _StepNoise(NamedTuple):
    """The two quantities that a step's norms give."""

    squared_gradient: float
    """|G|^2, the squared norm of the gradient over all data."""
    noise: float
    """tr(Sigma), the variance of one image's gradient."""


def _step_noise(lines: Sequence[GradientLine]) -> _StepNoise | None:
    """Return the noise of one step; None where its norms cannot be those of gradients and their mean.

    With b the small and B the big batch, in images, this gives |G|^2 and tr(Sigma) as the module's docstring has them.
    |G_b|^2 is the mean over ranks. Where ranks take different numbers of images b_r, they count in proportion to these:
    the expectation of `sum(b_r |G_b_r|^2) / sum(b_r)` is |G|^2 + tr(Sigma) / b with b the mean of the b_r.

    Args:
        lines: one line per rank.
    """
    ranks = len(lines)
    micro_step_images = sum(line.small_images for line in lines)
    small_batch = micro_step_images / ranks  # b
    weighted_norms = [line.small_images / small_batch * (line.small_squared_norm or 0.0) for line in lines]
    small_squared_norm = sum(weighted_norms) / ranks
    big_squared_norm = sum(line.big_squared_norm or 0.0 for line in lines) / ranks
    big_batches = {line.big_images for line in lines}
    if len(big_batches) > 1:
        return None
    big_batch = big_batches.pop()  # B
    if big_batch % micro_step_images != 0 or small_batch >= big_batch:
        return None  # the big batch is that of one or more micro-steps of all ranks
    is_mean_possible = big_squared_norm <= _LARGEST_SQUARE_RATIO * small_squared_norm  # False for NaN too
    if not is_mean_possible:
        return None
    squared_gradient = (big_batch * big_squared_norm - small_batch * small_squared_norm) / (big_batch - small_batch)
    noise = (small_squared_norm - big_squared_norm) / (1 / small_batch - 1 / big_batch)
    if not math.isfinite(squared_gradient) or not math.isfinite(noise):
        return None
    return _StepNoise(squared_gradient, noise)
