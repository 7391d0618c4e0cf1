"""How fast training gets somewhere: accuracy by images and by seconds, what a target accuracy took, gradient noise.

Throughput alone says nothing of the time to an accuracy: a larger global batch takes fewer steps per epoch, and each of
them teaches less once the batch is beyond the gradient noise scale.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from vitscale.analysis.learning.noise_scale import noise_scale, seed_of
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.repeats import Clusters, observations
from vitscale.analysis.runs.steps import whole_epochs_alone
from vitscale.analysis.statistics import finite_or_none, interval
from vitscale.present.estimate import Estimate
from vitscale.store.records import EpochLine
from vitscale.store.results import Run


@dataclass(frozen=True)
class AccuracyPoint:
    """After one epoch; the last one of a run that `measure.steps` ends may be a part of it."""

    epoch: int
    """Counted from 1."""
    images: int
    """Trained on so far, padding not counted."""
    seconds: float | None
    """Of training so far at the run's images per second; start-up and evaluation left out."""
    held_out_accuracy: float | None
    """Share in [0, 1]."""
    evaluation_seconds: float | None = None
    """Of evaluating so far, which `seconds` leaves out; None in older records."""


@dataclass(frozen=True)
class TargetRun:
    """What one run took to reach the target accuracy. `epochs` None: it did not reach it."""

    repeat: int
    seed: int
    epochs: int | None
    images: int | None
    seconds: float | None
    """Of training; None where it was not reached, and where the record does not tell."""
    evaluation_seconds: float | None = None
    """Of evaluating after each epoch until then: with it, time to train is what MLPerf means by it."""
    trained_images: int | None = None
    """Until the run ended: one that did not reach the target would have taken more."""
    trained_seconds: float | None = None


@dataclass(frozen=True)
class Convergence:
    """What one trial learned, over its runs."""

    noise_scale_images: Estimate | None
    """The simple gradient noise scale, B_noise."""
    noise_reason: str
    """Why it is None; empty where it is not."""
    target_accuracy: float | None
    target_runs: tuple[TargetRun, ...]
    """Every run, by repeat; empty where there is no target."""
    images_to_target: Estimate | None
    seconds_to_target: Estimate | None
    """Both None where a run did not reach it: those that did were the quickest."""
    points: tuple[AccuracyPoint, ...]
    """Means over all runs, as far as every run went."""
    images_to_target_at_least: float | None = None
    """A lower bound where some runs did not reach the target: each of these counts with all that it trained."""
    seconds_to_target_at_least: float | None = None


@dataclass(frozen=True)
class Reach:
    """How far a comparison can go: every trial that has any accuracy was trained at least so long."""

    images: int | None
    seconds: float | None


def convergence(runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters = None) -> Convergence | None:
    """The convergence of one trial from its completed runs and their figures; None where there is no run.

    `clusters`: the runs of each observation of a time, by repeat; of images each run is one.
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
    )


def course(run: Run, figures: RunFigures) -> tuple[AccuracyPoint, ...]:
    """One run's own points, up to the first epoch that its record lacks.

    An epoch takes what its images take at the run's `images_per_second`: warm-up, explained and rare slow steps are in
    no time. Of an imported log of whole epochs alone it takes its own seconds.
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
            break  # an imported log that does not tell of how many images an epoch is
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
    """Mean held-out accuracy after so many images: linear between epochs; None before the first and after the last."""
    return _between([(float(point.images), point.held_out_accuracy) for point in learned.points], images)


def accuracy_at_seconds(learned: Convergence, seconds: float) -> float | None:
    """The same after so many seconds of training."""
    known = [(point.seconds, point.held_out_accuracy) for point in learned.points if point.seconds is not None]
    return _between(known, seconds)


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
    """What the target took over all runs; or, where some did not reach it, None and a lower bound of the centre."""
    if not runs:
        return None, None
    if all(run.epochs is not None for run in runs):
        return _interval([took(run) for run in runs], clusters), None
    counted = [took(run) if run.epochs is not None else trained(run) for run in runs]
    bound = _interval(counted, clusters) if None not in counted else None
    return None, bound.value if bound else None


def _mean_point(same: Sequence[AccuracyPoint]) -> AccuracyPoint:
    """One epoch of all runs; unknown as soon as it is unknown for one of them."""
    accuracies = [point.held_out_accuracy for point in same if point.held_out_accuracy is not None]
    seconds = [point.seconds for point in same if point.seconds is not None]
    return AccuracyPoint(
        epoch=same[0].epoch,
        images=same[0].images,
        seconds=statistics.fmean(seconds) if len(seconds) == len(same) else None,
        held_out_accuracy=statistics.fmean(accuracies) if len(accuracies) == len(same) else None,
    )


def _interval(values: Sequence[float | None], clusters: Clusters) -> Estimate | None:
    known = observations([value or None for value in values], clusters)
    return interval(known) if known else None


def _between(points: Sequence[tuple[float, float | None]], wanted: float) -> float | None:
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


Split = Literal["held-out", "train"]


@dataclass(frozen=True)
class EqualSamples:
    """Accuracies of the runs of two trials after the same number of images."""

    split: Split
    images: int
    """Seen by either when the accuracy was taken: the most that every run reached."""
    reference: tuple[float, ...]
    other: tuple[float, ...]


def equal_samples(reference: Sequence[Run], other: Sequence[Run]) -> EqualSamples | None:
    """Held-out accuracy where all these runs have it, else training accuracy; None where neither is known.

    Between two epochs it is linear in the images seen.
    """
    splits: tuple[Split, ...] = ("held-out", "train")
    for split in splits:
        courses = [[_course(run, split) for run in runs] for runs in (reference, other)]
        ends = [course[-1][0] for side in courses for course in side if course]
        if not all(courses) or len(ends) < len(reference) + len(other):
            continue
        images = min(ends)
        values = [[_between(course, images) for course in side] for side in courses]
        known = [tuple(value for value in side if value is not None) for side in values]
        if all(len(some) == len(side) for some, side in zip(known, values, strict=True)):
            return EqualSamples(split, images, known[0], known[1])
    return None


def _course(run: Run, split: Split) -> list[tuple[int, float]]:
    """(Images seen so far, accuracy) after each epoch, up to the first that has none."""
    lines = {line.epoch: line for rank in sorted(run.ranks, key=lambda r: r.rank, reverse=True) for line in rank.epochs}
    accuracies: list[tuple[int, float]] = []
    images = 0
    while (line := lines.get(len(accuracies))) is not None:
        value = line.held_out_accuracy if split == "held-out" else line.train_accuracy
        if value is None or not math.isfinite(value) or not 0 <= value <= 1 or not line.images:
            break
        images += line.images
        accuracies.append((images, value))
    return accuracies
