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

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.repeats import Clusters, observations
from vitscale.analysis.runs.steps import common_steps, whole_epochs_alone
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
    """What one run took to reach the target accuracy. `epochs` is None where the run did not reach it."""

    repeat: int
    seed: int
    epochs: int | None
    images: int | None
    seconds: float | None
    """Time of training; None where the target was not reached, or the record does not tell."""
    evaluation_seconds: float | None = None
    """Evaluation after each epoch until then; with it, the time is what MLPerf calls time to train."""
    trained_images: int | None = None
    """Images until the run ended: a run that did not reach the target would have taken more."""
    trained_seconds: float | None = None


@dataclass(frozen=True)
class Convergence:
    """What one trial learned, over its runs."""

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
    """Images that each run was trained on in all, as far as its record tells."""


@dataclass(frozen=True)
class Reach:
    """How far a comparison can go: every trial with any accuracy was trained at least that long."""

    images: int | None
    seconds: float | None


def convergence(runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters = None) -> Convergence | None:
    """The convergence of one trial from its completed runs and their figures; None where there is no run.

    `clusters`: the runs of each observation of a time, by repeat; for images each run is an observation.
    """
    if not runs:
        return None
    courses = [course(run, own) for run, own in zip(runs, figures, strict=True)]
    target = runs[0].header.trial.train.target_accuracy
    targets: list[TargetRun] = []
    if target is not None:
        of_runs = [_target_run(run, points, target) for run, points in zip(runs, courses, strict=True)]
        targets = sorted(of_runs, key=lambda t: t.repeat)
    images_to_target, images_at_least = _to_target(targets, lambda t: t.images, lambda t: t.trained_images, None)
    seconds_to_target, seconds_at_least = _to_target(
        targets, lambda t: t.seconds, lambda t: t.trained_seconds, clusters
    )
    scale, reason = noise_scale(runs)
    return Convergence(
        noise_scale_images=scale,
        noise_reason=reason,
        target_accuracy=target,
        target_runs=tuple(targets),
        images_to_target=images_to_target,
        seconds_to_target=seconds_to_target,
        points=tuple(_mean_point(same) for same in zip(*courses, strict=False)),
        images_to_target_at_least=images_at_least,
        seconds_to_target_at_least=seconds_at_least,
        trained_images=tuple(points[-1].images for points in courses if points),
    )


def course(run: Run, figures: RunFigures) -> tuple[AccuracyPoint, ...]:
    """One run's own points, up to the first epoch that its record lacks.

    An epoch takes what its images take at the run's `images_per_second`, so that no time holds warm-up, explained or
    rare slow steps. In an imported log of whole epochs alone it takes its own seconds.
    """
    epochs: dict[int, list[EpochLine]] = {}
    for line in (line for rank in run.ranks for line in rank.epochs):
        epochs.setdefault(line.epoch, []).append(line)
    whole, rate = whole_epochs_alone(run), figures.images_per_second
    points: list[AccuracyPoint] = []
    evaluating: float | None = 0.0
    images, seconds = 0, 0.0 if whole or rate is not None else None
    while (number := len(points)) in epochs:
        line = epochs[number][0]
        if line.images is None or line.steps is None:
            break  # an imported log that does not tell how many images an epoch has
        images += line.images
        if whole and seconds is not None:
            seconds += max(line.seconds for line in epochs[number])
        elif rate is not None:
            seconds = images / rate
        lasted = [line.evaluation_seconds for line in epochs[number] if line.evaluation_seconds is not None]
        evaluating = evaluating + max(lasted) if evaluating is not None and lasted else None
        accuracy = finite_or_none(line.held_out_accuracy)
        points.append(AccuracyPoint(number + 1, images, finite_or_none(seconds), accuracy, finite_or_none(evaluating)))
    return tuple(points)


def accuracy_at_images(learned: Convergence, images: float) -> float | None:
    """Mean held-out accuracy after `images`: linear between epochs; None before the first and after the last."""
    return linear_between([(float(point.images), point.held_out_accuracy) for point in learned.points], images)


def accuracy_at_seconds(learned: Convergence, seconds: float) -> float | None:
    """The same after `seconds` of training."""
    known = [(point.seconds, point.held_out_accuracy) for point in learned.points if point.seconds is not None]
    return linear_between(known, seconds)


def common_reach(trials: Iterable[Convergence]) -> Reach:
    """The largest number of images, and of seconds, at which all these trials can be compared.

    That is the smallest of their last points; trials without a known accuracy are left aside.
    """
    known = [[point for point in trial.points if point.held_out_accuracy is not None] for trial in trials]
    last = [points[-1] for points in known if points]
    seconds = [point.seconds for point in last if point.seconds is not None]
    return Reach(
        images=min((point.images for point in last), default=None),
        seconds=min(seconds) if last and len(seconds) == len(last) else None,
    )


def _target_run(run: Run, points: Sequence[AccuracyPoint], target: float) -> TargetRun:
    reached = next((p for p in points if p.held_out_accuracy is not None and p.held_out_accuracy >= target), None)
    return TargetRun(
        repeat=run.header.repeat,
        seed=seed_of(run),
        epochs=reached.epoch if reached else None,
        images=reached.images if reached else None,
        seconds=reached.seconds if reached else None,
        evaluation_seconds=reached.evaluation_seconds if reached else None,
        trained_images=points[-1].images if points else None,
        trained_seconds=points[-1].seconds if points else None,
    )


def _to_target(
    runs: Sequence[TargetRun],
    took: Callable[[TargetRun], float | None],
    trained: Callable[[TargetRun], float | None],
    clusters: Clusters,
) -> tuple[Estimate | None, float | None]:
    """What the target took over all runs; where some did not reach it, None and a lower bound of the centre."""
    if not runs:
        return None, None
    if all(run.epochs is not None for run in runs):
        return _interval([took(run) for run in runs], clusters), None
    counted = [took(run) if run.epochs is not None else trained(run) for run in runs]
    bound = _interval(counted, clusters) if None not in counted else None
    return None, bound.value if bound else None


def _mean_point(same: Sequence[AccuracyPoint]) -> AccuracyPoint:
    """One epoch over all runs; a value is unknown if it is unknown for one of them."""
    return AccuracyPoint(
        epoch=same[0].epoch,
        images=same[0].images,
        seconds=whole_mean([point.seconds for point in same]),
        held_out_accuracy=whole_mean([point.held_out_accuracy for point in same]),
    )


def _interval(values: Sequence[float | None], clusters: Clusters) -> Estimate | None:
    known = observations([value or None for value in values], clusters)
    return interval(known) if known else None


def linear_between(points: Sequence[tuple[float, float | None]], wanted: float) -> float | None:
    """The value at `wanted`, linear between neighbours; None outside, and beside a point whose value is unknown."""
    for at, value in points:
        if at == wanted:
            return value
    for (left, before), (right, after) in pairwise(points):
        if left < wanted < right:
            if before is None or after is None:
                return None
            return before + (after - before) * (wanted - left) / (right - left)
    return None


FEWEST_STEPS = 4
"""Fewest steps of a run that must have norms at two batch sizes."""
ONE_SEED = "runs of one seed: no interval"
_ROUNDING = 1.01
"""A mean of gradients is never longer than their root mean square; bfloat16 may round its square up by under this."""


@dataclass(frozen=True)
class _Estimate:
    """What one run says about the noise scale."""

    images: float | None
    reason: str
    drowned: bool = False


def noise_scale(runs: Sequence[Run]) -> tuple[Estimate | None, str]:
    """B_noise in images over the runs of one trial; or None, with the reason.

    Runs of one seed see the same gradients and count as one observation. Where noise drowns the gradient in any run
    there is no figure: the other runs alone would make it too small.
    """
    if not runs:
        return None, "no run has completed"
    if not has_two_batch_sizes(runs[0].header.trial):
        return None, "one rank and one micro-step: no gradient of fewer images than the step has"
    if not runs[0].header.trial.window.explain:
        imported = runs[0].header.trial.origin is not None
        why = "imports do not tell" if imported else "measure.explain is false: no step takes"
        return None, f"{why} the gradients' norms"
    estimates = [_estimate(run) for run in runs]
    if drowned := [estimate for estimate in estimates if estimate.drowned]:
        in_runs = f"in {len(drowned)} of {len(estimates)} runs " if len(estimates) > 1 else ""
        return None, f"{in_runs}{drowned[0].reason}"
    by_seed: dict[int, list[float]] = {}
    for run, estimate in zip(runs, estimates, strict=True):
        if estimate.images is not None:
            by_seed.setdefault(seed_of(run), []).append(estimate.images)
    if not by_seed:
        return None, estimates[0].reason
    figures = [statistics.median(same) for same in by_seed.values()]
    if len(figures) == 1 and sum(map(len, by_seed.values())) > 1:
        return Estimate(figures[0], None, None, note=ONE_SEED), ""
    return interval(figures), ""


def seed_of(run: Run) -> int:
    """The seed that a run used: its own, or that of its trial."""
    header = run.header
    return header.trial.train.seed if header.seed is None else header.seed


def _estimate(run: Run) -> _Estimate:
    steps = common_steps(run, lambda rank: rank.gradients)
    if not steps:
        few = "no step took the gradients' norms: the run has too few steps for it"
        return _Estimate(None, why_no_gradient_norms(run.header.trial) or few)
    known = [lines for lines in steps if all(_known(line) for line in lines)]
    if len(known) < FEWEST_STEPS:
        why = next((line.reason for lines in steps for line in lines if line.reason), None)
        return _Estimate(
            None, why or f"the gradients' norms are known in {len(known)} steps, and {FEWEST_STEPS} are needed"
        )
    parts = [_parts(lines) for lines in known]
    if any(part is None for part in parts):
        return _Estimate(None, "the recorded norms of the gradients contradict each other")
    squared_gradient = sum(part[0] for part in parts if part) / len(parts)
    noise = sum(part[1] for part in parts if part) / len(parts)
    if squared_gradient <= 0:
        return _Estimate(
            None,
            f"the noise drowns the mean gradient: over {len(parts)} steps the estimate of its square is not positive, "
            "and more steps are needed",
            drowned=True,
        )
    if noise <= 0:
        return _Estimate(None, "the gradients of all micro-batches are alike: there is no noise")
    images = noise / squared_gradient
    if not math.isfinite(images):
        return _Estimate(None, "the recorded norms of the gradients contradict each other")
    return _Estimate(images, "")


def _known(line: GradientLine) -> bool:
    return line.small_squared_norm is not None and line.big_squared_norm is not None


def _parts(lines: Sequence[GradientLine]) -> tuple[float, float] | None:
    """|G|^2 and tr(Sigma) of one step; None where its norms cannot be those of gradients and their mean.

    Ranks of unequal shares b_r count in proportion to them: the expectation of `sum(b_r |G_b_r|^2) / sum(b_r)` is |G|^2
    + tr(Sigma) / b with b the mean share.
    """
    at_once = sum(line.small_images for line in lines)
    few = at_once / len(lines)
    small = sum(line.small_images / few * (line.small_squared_norm or 0.0) for line in lines) / len(lines)
    big = sum(line.big_squared_norm or 0.0 for line in lines) / len(lines)
    many, *others = {line.big_images for line in lines}
    if others or many % at_once or few >= many or not big <= _ROUNDING * small:
        return None
    squared_gradient = (many * big - few * small) / (many - few)
    noise = (small - big) / (1 / few - 1 / many)
    return (squared_gradient, noise) if math.isfinite(squared_gradient) and math.isfinite(noise) else None
