"""Which measured series advice is about: the one asked for, and those that train the same under another wrapper.

series        the measured points of one curve: the same training at several rank counts
batch policy  what stays as the rank count grows: a rank's micro-batch (strong-micro), the global batch (strong-global),
              or a rank's images of an epoch (weak)
workload      what must be equal for one trial's step time to say something of another's: model, data, precision and so
              on, but not the engine's wrapper, the batch, or how ranks share a model
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
    """A series, the reference, and others that train the same model on the same data."""

    reference: Series
    members: tuple[Series, ...]
    """The reference first, then series of its batch policy, then the others."""

    @cached_property
    def series_by_candidate(self) -> Mapping[Candidate, Series]:
        """Each configuration that was measured -> the first member that has it."""
        series_by_candidate = {}
        for series in reversed(self.members):  # the first member is the last to be written
            for point in series.points:
                if not point.trial.train.micro_batches:
                    series_by_candidate[Candidate.of(point.trial)] = series
        return series_by_candidate

    @property
    def members_of_policy(self) -> tuple[Series, ...]:
        """The members with the reference's batch policy."""
        return tuple(series for series in self.members if series.mode == self.reference.mode)

    @property
    def trial(self) -> Trial:
        """The reference's trial at its largest rank count."""
        return self.reference.points[-1].trial

    @property
    def variants(self) -> frozenset[EngineVariant]:
        """The engines of the members, each with its options for distributing training (deepspeed ZeRO-2)."""
        return frozenset(_variant(series) for series in self.members)

    def has_trained(self, candidate: Candidate) -> bool:
        """Return whether any member shards as a candidate does: see `_ShardedVariant`."""
        return _ShardedVariant.of(candidate) in self._trained

    @cached_property
    def _trained(self) -> frozenset[_ShardedVariant]:
        """How each member shards."""
        return frozenset(_ShardedVariant.of(Candidate.of(_largest_trial(series))) for series in self.members)

    def second_shard_ranks(self, variant: EngineVariant) -> frozenset[int]:
        """Return `TrainSpec.hpz` of the members that have an engine variant; empty where none has it."""
        return frozenset(_largest_trial(series).train.hpz for series in self.members if _variant(series) == variant)

    def nearest(self, candidate: Candidate) -> Series:
        """Return the member from which a candidate is worked out; the reference where none has its engine variant.

        Among members that have it, those that split models likewise come first, then those with the same second shards,
        then those of the reference's policy, then those with the nearest micro-batch.
        """

        def distance(member: Series) -> _Distance:
            return _Distance(
                other_split=_largest_trial(member).parallel != candidate.parallel,
                other_second_shard=_largest_trial(member).train.hpz != candidate.second_shard_ranks,
                other_policy=member.mode != self.reference.mode,
                micro_batch=_micro_batch_distance(member, candidate.micro_batch),
            )

        same_variant = [series for series in self.members if _variant(series) == candidate.variant]
        return min(same_variant or [self.reference], key=distance)


class _ShardedVariant(NamedTuple):
    """An engine variant, and over which ranks it shards, whatever their number."""

    variant: EngineVariant
    has_replicas: bool
    has_second_shards: bool

    @staticmethod
    def of(candidate: Candidate) -> _ShardedVariant:
        """Return that of a candidate."""
        return _ShardedVariant(
            variant=candidate.variant,
            has_replicas=candidate.parallel.replicate > 1,
            has_second_shards=candidate.second_shard_ranks > 1,
        )


class _Distance(NamedTuple):
    """How far a series is from a candidate, the weightiest difference first."""

    other_split: bool
    """Whether its ranks share a model in another way, or shard other replicas."""
    other_second_shard: bool
    """Whether other numbers of ranks share a second shard of the weights."""
    other_policy: bool
    """Whether its batch policy is not the reference's."""
    micro_batch: float
    """|ln(a / b)| of the two micro-batches."""


def comparable_series(evidence: Evidence, name: str | None) -> ComparableSeries:
    """Return the best measured series of those that `name` names, with the series that are comparable with it.

    The best is chosen by these criteria in turn:

    1. most rank counts;
    2. the batch policy: strong-micro before strong-global before weak;
    3. of the ways in which the same model was trained (in bf16, compiled), that with the fewest GPU-seconds an image;
    4. most runs.

    Args:
        evidence: all measured series.
        name: a series, or the beginning of the names of several; None: any series may be the best.

    Raises:
        RequestError: there is no such series, or none at all.
    """
    if not evidence.series:
        raise evidence.refusal("to advise from")
    reference = _best_series(_requested_series(evidence, name))
    others = [series for series in evidence.series if series is not reference and _is_same_work(series, reference)]
    others.sort(key=lambda series: series.mode != reference.mode)  # those of the reference's policy first
    return ComparableSeries(reference, (reference, *others))


def _requested_series(evidence: Evidence, name: str | None) -> list[Series]:
    """Return the series that `name` names, all for None; of these only such as train like one process, if any does.

    An engine that trains otherwise is often faster, and is advised about only where nothing else was asked for.
    """
    series_by_name = {series.name: series for series in evidence.series}
    names = list(series_by_name) if name is None else matching(series_by_name, name)
    requested = [series_by_name[series_name] for series_name in names]
    like_one_process = [series for series in requested if computation(_largest_trial(series)) == ONE_PROCESS]
    return like_one_process or requested


def _best_series(requested: Sequence[Series]) -> Series:
    """Return the best series to advise from, by the criteria of `comparable_series`; there is one at least."""
    best_curve = max(requested, key=_merit)
    equally_good = [series for series in requested if _merit(series).is_equal_but_for_runs(_merit(best_curve))]
    rivals = [series for series in equally_good if _learning_task(series) == _learning_task(best_curve)]
    cheapest = min(rivals, key=_image_gpu_seconds)
    trained_like_cheapest = [series for series in rivals if _is_same_work(series, cheapest)]
    return max(trained_like_cheapest, key=_merit)


def _is_same_work(series: Series, other: Series) -> bool:
    """Whether two series have the same workload."""
    return workload(_largest_trial(series)) == workload(_largest_trial(other))


def _largest_trial(series: Series) -> Trial:
    """Return the trial of a series at its largest rank count."""
    return series.points[-1].trial


class _Merit(NamedTuple):
    """What makes a series better to advise from, the weightiest first; more is better."""

    rank_counts: int
    policy: int
    """Position of its batch policy in `_POLICIES`."""
    runs: int

    def is_equal_but_for_runs(self, other: _Merit) -> bool:
        """Whether the two have equally many rank counts and the same policy."""
        return (self.rank_counts, self.policy) == (other.rank_counts, other.policy)


_POLICIES = ("weak", "strong-global", "strong-micro")
"""Batch policies, the best to advise from last."""


def _merit(series: Series) -> _Merit:
    """Return how good a series is to advise from."""
    runs = sum(len(point.step_seconds) for point in series.points)
    return _Merit(len(series.points), _POLICIES.index(series.mode), runs)


def _learning_task(series: Series) -> tuple[object, ...]:
    """Return what a series learns, from which data and on which device; the rest of a workload is how it trains."""
    trial = _largest_trial(series)
    train = trial.train
    learned = (trial.model, trial.data.name, train.optimizer, train.gradient_clipping)
    return (*learned, train.device, trial.world.threads_per_rank, trial.origin)


def _image_gpu_seconds(series: Series) -> float:
    """Return the GPU-seconds for an image at the fewest ranks; infinite where the batch is unknown."""
    point = min(series.points, key=lambda point: point.gpus)
    if not point.batch_known or not point.step_seconds:
        return math.inf
    return statistics.median(point.step_seconds) * point.gpus / point.trial.global_batch


def _variant(series: Series) -> EngineVariant:
    """Return the engine of a series, with its options for distributing training."""
    return EngineVariant.of_train(_largest_trial(series).train)


def _micro_batch_distance(series: Series, micro_batch: int) -> float:
    """Return |ln(a / b)| of the micro-batches of a series and of a candidate."""
    return abs(math.log(_largest_trial(series).train.micro_batch / micro_batch))


def measured_micro_batches(members: Sequence[Series]) -> frozenset[int]:
    """Return the micro-batches of all points of some series."""
    return frozenset(point.trial.train.micro_batch for series in members for point in series.points)


def work_of(comparable: ComparableSeries, request: Request) -> Work:
    """Return the work to be done: the dataset as the study uses it, for as many epochs as the request names.

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
    recorded_images = [point.images for point in points if point.images is not None]
    images = request.images or max(recorded_images, default=None)
    if images is None:
        raise RequestError("these results do not say how many images an epoch has", next_step="Give them with --images")
    epochs = request.epochs or comparable.trial.train.epochs
    if epochs is None:
        raise RequestError(
            "the study measured some steps and does not say for how many epochs to train", next_step="Give --epochs"
        )
    return Work(images, epochs, comparable.trial.train.drop_last)


def noise_of(analysis: Analysis, evidence: Evidence, name: str | None) -> NoiseScale:
    """Return the median gradient noise scale over the trials of comparable series that have one; else why none has.

    Raises:
        RequestError: there is no such series.
    """
    members = comparable_series(evidence, name).members
    convergences = []
    for series in members:
        for point in series.points:
            result = analysis.trials.get(point.trial_id)
            if result is not None and result.convergence is not None:
                convergences.append(result.convergence)
    scales = [convergence.noise_scale_images for convergence in convergences]
    images = [scale.value for scale in scales if scale is not None]
    if images:
        return NoiseScale(statistics.median(images), low=min(images), high=max(images))
    # The reference comes first, its points in rising order: its largest trial could have measured it best.
    largest = analysis.trials.get(members[0].points[-1].trial_id)
    reason = largest.convergence.noise_reason if largest is not None and largest.convergence is not None else ""
    return NoiseScale.unknown(reason or "no trial measured it")
