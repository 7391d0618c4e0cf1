"""Which measured series advice is about: the one asked for, and those that train the same under another wrapper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vitscale.advice.request import NoiseScale, Request, Work
from vitscale.analysis import Analysis
from vitscale.engines.checks import computation
from vitscale.engines.facts import ONE_PROCESS
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError, shown
from vitscale.prediction.answering import matching
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.workloads import workload
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class ComparableSeries:
    """A series, and others that train the same model on the same data."""

    reference: Series
    members: tuple[Series, ...]
    """The reference first, then series of its batch policy, then the others."""

    @cached_property
    def measured(self) -> Mapping[Candidate, Series]:
        """Each configuration that was run -> the first member that has it."""
        points = ((point.trial, series) for series in reversed(self.members) for point in series.points)
        return {Candidate.of(trial): series for trial, series in points if not trial.train.micro_batches}

    @property
    def of_the_policy(self) -> tuple[Series, ...]:
        """The members of the reference's batch policy."""
        return tuple(series for series in self.members if series.mode == self.reference.mode)

    @property
    def trial(self) -> Trial:
        """The reference's trial at its largest rank count."""
        return self.reference.points[-1].trial

    @property
    def variants(self) -> frozenset[EngineVariant]:
        """The engine of every member, with its variant."""
        return frozenset(_variant(series) for series in self.members)

    def nearest(self, candidate: Candidate) -> Series:
        """The member to work a candidate out from; the reference where none has its engine and variant.

        Among members that have, those that split models likewise come first, then those of the reference's policy, then
        those with the nearest micro-batch.
        """
        same = [series for series in self.members if _variant(series) == candidate.variant]
        return min(
            same or [self.reference],
            key=lambda member: (
                member.points[-1].trial.parallel != candidate.parallel,
                member.mode != self.reference.mode,
                _apart(member, candidate.micro_batch),
            ),
        )


def comparable_series(evidence: Evidence, name: str | None) -> ComparableSeries:
    """The best measured series of those that `name` names, and the series that are comparable with it.

    The best has most rank counts; among equals strong-micro comes before strong-global before weak, then, of what
    trains the same model otherwise (in bf16, compiled), what takes the fewest GPU-seconds an image, then most runs.

    Raises:
        RequestError: there is no such series, or none at all.
    """
    if not evidence.series:
        raise evidence.refusal("to advise from")
    by_name = {series.name: series for series in evidence.series}
    asked = list(by_name) if name is None else matching(by_name, name)
    candidates = [by_name[series] for series in asked]
    # An engine that trains otherwise is often faster, and is advised about only where nothing else was asked for.
    candidates = [own for own in candidates if _trains_like_one_process(own)] or candidates
    best = max(candidates, key=_merit)
    alike = [own for own in candidates if _merit(own)[:2] == _merit(best)[:2]]
    of_model = [own for own in alike if _learns(own) == _learns(best)]
    cheapest = workload(min(of_model, key=_image_seconds).points[-1].trial)
    reference = max((own for own in of_model if workload(own.points[-1].trial) == cheapest), key=_merit)
    work = workload(reference.points[-1].trial)
    others = [own for own in evidence.series if own is not reference and workload(own.points[-1].trial) == work]
    return ComparableSeries(reference, (reference, *sorted(others, key=lambda own: own.mode != reference.mode)))


def _trains_like_one_process(series: Series) -> bool:
    return computation(series.points[-1].trial) == ONE_PROCESS


def _merit(series: Series) -> tuple[int, int, int]:
    policies = ("weak", "strong-global", "strong-micro")
    runs = sum(len(point.step_seconds) for point in series.points)
    return (len(series.points), policies.index(series.mode), runs)


def _learns(series: Series) -> tuple[object, ...]:
    """What is learned, and from what, on what; the rest of a workload is how."""
    trial = series.points[-1].trial
    learned = (trial.model, trial.data.name, trial.train.optimizer, trial.train.gradient_clipping)
    return (*learned, trial.train.device, trial.world.threads_per_rank, trial.origin)


def _image_seconds(series: Series) -> float:
    """GPU-seconds for an image at the fewest ranks; infinite where a batch is not told."""
    point = min(series.points, key=lambda point: point.gpus)
    if not point.batch_known or not point.step_seconds:
        return math.inf
    return statistics.median(point.step_seconds) * point.gpus / point.trial.global_batch


def _variant(series: Series) -> EngineVariant:
    return EngineVariant.of_train(series.points[-1].trial.train)


def _apart(series: Series, micro_batch: int) -> float:
    return abs(math.log(series.points[-1].trial.train.micro_batch / micro_batch))


def measured_micro_batches(members: Sequence[Series]) -> frozenset[int]:
    """Micro-batches of all points of some series."""
    return frozenset(point.trial.train.micro_batch for series in members for point in series.points)


def work_of(comparable: ComparableSeries, asked: Request) -> Work:
    """What is to be done: the dataset as the study's largest trial uses it, for as many epochs as asked.

    Raises:
        RequestError: the results do not say how many images or epochs.
    """
    points = comparable.reference.points
    if not all(point.batch_known for point in points):
        raise RequestError(
            f"how many images a step of {shown(comparable.reference.name)} takes is not told, and so not how many "
            "steps an epoch has",
            next_step="Import the files again with --micro-batch",
        )
    known = [point.images for point in points if point.images is not None]
    images = asked.images or max(known, default=None)
    if images is None:
        raise RequestError("these results do not say how many images an epoch has", next_step="Give them with --images")
    epochs = asked.epochs or comparable.trial.train.epochs
    if epochs is None:
        raise RequestError(
            "the study measured some steps and does not say for how many epochs to train", next_step="Give --epochs"
        )
    return Work(images, epochs, comparable.trial.train.drop_last)


def noise_of(analysis: Analysis, evidence: Evidence, name: str | None) -> NoiseScale:
    """The median over the trials of comparable series whose gradient noise scale is known; else why it is not.

    Raises:
        RequestError: there is no such series.
    """
    members = comparable_series(evidence, name).members
    ids = [point.trial_id for series in members for point in series.points]
    results = [result for trial_id in ids if (result := analysis.trials.get(trial_id)) is not None]
    scales = [result.convergence.noise_scale_images for result in results if result.convergence is not None]
    known = [scale.value for scale in scales if scale is not None]
    if known:
        return NoiseScale(statistics.median(known), min(known), max(known))
    # The reference comes first, its points in rising order: its largest trial could have measured it best.
    largest = analysis.trials.get(members[0].points[-1].trial_id)
    why = largest.convergence.noise_reason if largest is not None and largest.convergence is not None else ""
    return NoiseScale.unknown(why or "no trial measured it")
