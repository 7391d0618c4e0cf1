"""The layout of a prediction's ranks over hosts, and their batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.errors import RequestError
from vitscale.prediction.evidence import MeasuredPoint, Series
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import Trial, effective_steps, exact, steps_per_epoch, world_of_hosts

MOST_RANKS = 100_000
_USUAL_HOST = 8
"""Ranks that a host is assumed to take, where all that was measured lay on one and nobody said."""


@dataclass(frozen=True)
class SeriesLayout:
    """One rank count of a series, with what follows from it."""

    trial: Trial
    images: int | None
    """Images of an epoch."""
    steps_per_epoch: int | None
    host_size_assumed: bool

    @property
    def gpus(self) -> int:
        """Ranks."""
        return self.trial.world.size

    @property
    def effective_steps(self) -> float | None:
        """Whole steps that an epoch comes to; its short last one counts by its slots' share of a whole one."""
        return effective_steps(self.trial, self.images) if self.images and self.steps_per_epoch else None

    @property
    def steps_of_all_images(self) -> float | None:
        """The same, but under `drop_last` as if no image were left out: what speedups compare."""
        exact_steps = self.images / self.trial.global_batch if self.images else None
        return exact_steps if self.trial.train.drop_last else self.effective_steps


def ranks_per_node(series: Series, gpus: int, nodes_of: int | None) -> tuple[int, bool]:
    """(ranks on a full host, whether that is an assumption).

    They are as the user says; else as in a measured point with as many ranks; else as `host_size` has it.
    """
    if nodes_of is not None:
        return min(nodes_of, gpus), False
    same = [point for point in series.points if point.gpus == gpus]
    if same:
        return same[-1].trial.world.ranks_per_node, False
    host, assumed = host_size(series.points)
    return min(gpus, host), assumed and gpus > max(point.gpus for point in series.points)


def host_size(points: Sequence[MeasuredPoint]) -> tuple[int, bool]:
    """(ranks that a host takes, whether that is an assumption).

    They are the most that any host had, where some points span hosts; else eight, or more if more were measured.
    """
    most = max(point.trial.world.ranks_per_node for point in points)
    if any(point.nodes > 1 for point in points):
        return most, False
    return max(_USUAL_HOST, most), True


def equal_hosts(gpus: int, host: int) -> int:
    """The most ranks on each of equal hosts that take at most `host`."""
    return next(count for count in range(min(host, gpus), 0, -1) if gpus % count == 0)


def placement_of(
    series: Series, template: Trial, gpus: int, nodes_of: int | None, most_micro_batch: int | None = None
) -> SeriesLayout:
    """The trial at a rank count.

    Args:
        series: the series that it continues.
        template: its trial with what is changed.
        gpus: ranks.
        nodes_of: ranks on each host; None: as `ranks_per_node`.
        most_micro_batch: where a global batch is kept, the largest micro-batch; None: as measured.

    Raises:
        RequestError: the rank count cannot be, or a global batch does not divide over it.
    """
    if not 1 <= gpus <= MOST_RANKS:
        raise RequestError(f"--gpus holds {gpus}", valid=[f"1 to {MOST_RANKS:,}"])
    shared = template.parallel.ranks_per_model
    if gpus % template.parallel.least_ranks:
        raise _uneven_ranks(gpus, template.parallel)
    per_node, assumed = ranks_per_node(series, gpus, nodes_of)
    train = template.train.model_copy(update={"micro_batches": None})
    if series.mode == "strong-global":
        train = train.model_copy(update=share_of_global_batch(series, gpus // shared, most_micro_batch))
    world = world_of_hosts(gpus, per_node, template.world.threads_per_rank)
    images, fraction = images_at(series, gpus)
    data = template.data if fraction is None else template.data.model_copy(update={"fraction": min(1.0, fraction)})
    trial = template.model_copy(update={"train": train, "world": world, "data": data})
    steps = (
        None
        if images is None
        else steps_per_epoch(images, gpus // shared, train.micro_batch, train.grad_accum, train.drop_last)
    )
    return SeriesLayout(trial, images, steps or None, assumed)


def _uneven_ranks(gpus: int, parallel: ParallelSpec) -> RequestError:
    """Return the error for a rank count that does not divide into models, or into replicas."""
    factor = parallel.least_ranks
    near = [str(times * factor) for times in range(max(1, gpus // factor), gpus // factor + 3)]
    if gpus % parallel.ranks_per_model:
        what = f"{gpus} ranks are not a multiple of the {parallel.ranks_per_model} that share a model ([parallel])"
    else:
        what = f"{gpus} ranks do not divide into {parallel.replicate} replicas ([parallel])"
    return RequestError(what, valid=near, next_step="Ask for a multiple with --gpus")


def images_at(series: Series, gpus: int) -> tuple[int | None, float | None]:
    """(images of an epoch, share of the training images): under weak scaling both grow with the ranks."""
    known: MeasuredPoint = series.points[-1]
    if series.mode != "weak":
        return known.images, known.trial.data.fraction
    fraction = exact(known.trial.data.fraction) * gpus / known.gpus
    if known.images is None:
        return None, float(fraction)
    whole = exact(known.trial.data.fraction)
    return math.ceil(known.images / whole * fraction) if known.gpus != gpus else known.images, float(fraction)


def share_of_global_batch(series: Series, models: int, most_micro_batch: int | None = None) -> dict[str, int]:
    """Micro-batch and accumulation that keep a series' global batch over `models` copies of the model.

    They are as measured, else as `study.resolve.batch_of` has them with the largest micro-batch that was measured or is
    allowed.

    Raises:
        RequestError: the batch does not divide.
    """
    whole = series.points[-1].trial.global_batch
    for point in series.points if most_micro_batch is None else ():
        if (point.trial.layout.data, point.trial.global_batch) == (models, whole):
            return {"micro_batch": point.trial.train.micro_batch, "grad_accum": point.trial.train.grad_accum}
    if whole % models:
        near = [n for n in range(1, min(whole, 2 * models) + 1) if whole % n == 0]
        shared = series.points[-1].trial.parallel.ranks_per_model
        what = f"a global batch of {whole} does not divide over {models * shared} ranks"
        valid = [str(n * shared) for n in near[-4:]]
        raise RequestError(what, valid=valid, next_step="Ask for a rank count that divides it")
    share = whole // models
    most = most_micro_batch or max(point.trial.train.micro_batch for point in series.points)
    micro_batch = next(b for b in range(min(most, share), 0, -1) if share % b == 0)
    return {"micro_batch": micro_batch, "grad_accum": share // micro_batch}


def whole_steps(images: FloatArray, per_step: FloatArray, micro_batch: FloatArray, drop_last: bool) -> FloatArray:
    """`trial.effective_steps` of many configurations; NaN where not one step is full under `drop_last`."""
    full = np.floor(images / per_step)
    if drop_last:
        return np.asarray(np.where(full > 0, full, np.nan))
    share = np.ceil(micro_batch * (images - full * per_step) / per_step) / micro_batch
    return np.asarray(np.where(full > 0, full + share, 1.0 + 0.0 * images))
