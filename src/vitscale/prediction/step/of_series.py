"""The model of a series' step, from what its measured points have in common."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from vitscale.engines import wrapper_facts
from vitscale.engines.messages import Message
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series
from vitscale.prediction.shares import filling
from vitscale.prediction.step.messages import messages, norm_messages, rescaled
from vitscale.prediction.step.model import Loading, StepModel, Worlds
from vitscale.trial.rank_batches import largest_micro_batch

_BACKWARD_SHARE = 2 / 3
"""Backward's share of compute where it was not timed: it has twice the matrix products of forward."""
_ALIKE = 0.9
"""Share of the median speed above which ranks are not told apart."""
_OF_NORMS = ("all_reduce", "float64")
"""(operation, dtype) that synchronised norms alone send, but for two scalars of ZeRO-3."""
_LEAST_LOADING = 0.01
"""Share of a step; a shorter wait for data is not taken for waiting for the loader."""


def fitted_points(series: Series) -> tuple[tuple[MeasuredPoint, ...], str]:
    """(points that a fit may rest on, why others are left out).

    Ranks on one device type say nothing about ranks on a mixture of types, unless the speeds of types were compared.
    """
    mixtures = [point for point in series.points if len(set(point.devices)) > 1 and point.rank_speeds is None]
    if not mixtures:
        return series.points, ""
    left_out = [point for point in series.points if point not in mixtures]
    counts = ", ".join(str(point.gpus) for point in left_out)
    return tuple(mixtures), f"{counts} ranks ran on one device type, the others on a mixture" if left_out else ""


def device_factors(points: Sequence[MeasuredPoint]) -> dict[str, float]:
    """Device name -> its time for an image over the fastest type's; empty where no point compares types.

    The largest point that has unlike devices and timed each rank is taken.
    """
    for point in reversed(points):
        if len(set(point.devices)) > 1 and point.rank_speeds is not None:
            slower: dict[str, list[float]] = {}
            for name, speed in zip(point.devices, point.rank_speeds, strict=True):
                slower.setdefault(name, []).append(1 / speed)
            typical = {name: statistics.median(slowness) for name, slowness in slower.items()}
            return {name: slowness / min(typical.values()) for name, slowness in typical.items()}
    return {}


def slowdown(point: MeasuredPoint, factors: Mapping[str, float]) -> float:
    """With equal shares, the slowest rank's time for an image over the fastest device type's; 1 where nothing tells
    ranks apart.

    Where types are not told apart, it is over the typical rank's time.
    """
    return max(_slowdowns(point, factors), default=1.0)


def _slowdowns(point: MeasuredPoint, factors: Mapping[str, float]) -> tuple[float, ...]:
    """`slowdown` of each rank; empty where nothing tells ranks apart."""
    if factors:
        return tuple(factors.get(name, 1.0) for name in point.devices)
    speeds = point.rank_speeds
    if not speeds or min(speeds) > _ALIKE * statistics.median(speeds):
        return ()
    return tuple(statistics.median(speeds) / speed for speed in speeds)


def _as_measured(point: MeasuredPoint, factors: Mapping[str, float]) -> tuple[int, float]:
    """(images per micro-step, slowdown) of the rank that a point's step waited for: with unequal shares the one whose
    images take longest, which need not be the slowest."""
    train, slower = point.trial.train, _slowdowns(point, factors)
    if train.micro_batches is None or len(slower) != len(train.micro_batches):
        return largest_micro_batch(train), slowdown(point, factors)
    return max(zip(train.micro_batches, slower, strict=True), key=lambda rank: (rank[0] * rank[1], rank[1]))


def typical_slowdown(point: MeasuredPoint, factors: Mapping[str, float]) -> float:
    """The median rank, whose parts are `Point.parts`, beside one of slowdown 1 with the images of `worlds_of`."""
    train, slower = point.trial.train, _slowdowns(point, factors)
    if train.micro_batches is not None and len(slower) == len(train.micro_batches):
        images, _ = _as_measured(point, factors)
        times = (share * each for share, each in zip(train.micro_batches, slower, strict=True))
        return statistics.median(times) / images
    return statistics.median(slower) if factors and slower else 1.0


def worlds_of(points: Sequence[MeasuredPoint]) -> Worlds:
    """The configurations that points were measured at."""

    def column(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array(values, dtype=float)

    factors = device_factors(points)
    as_measured = [_as_measured(point, factors) for point in points]
    return Worlds(
        ranks=column([point.gpus for point in points]),
        ranks_per_node=column([point.trial.world.ranks_per_node for point in points]),
        micro_batch=column([images for images, _ in as_measured]),
        grad_accum=column([point.trial.train.grad_accum for point in points]),
        slowdown=column([slower for _, slower in as_measured]),
    )


def model_of(points: Sequence[MeasuredPoint], evidence: Evidence) -> StepModel:
    """The model of the points' step: the engine's messages by arithmetic, with the bytes that were counted."""
    largest = points[-1]
    sent = messages(largest.trial)
    counted = next((point for point in reversed(points) if point.sent_bytes and point.gpus > 1), None)
    norms = norm_messages(largest.trial)
    if norms is None:
        norms = _counted_norms(counted)
    parallel = largest.trial.parallel
    # Where ranks share a model, unlike groups use one operation: counts do not tell them apart, and arithmetic does. Of
    # replicas, counts at one number of ranks say nothing of another, where a shard is larger or smaller.
    if sent is not None and counted is not None and parallel.least_ranks == 1:
        of_engine = {kind: amount for kind, amount in counted.sent_bytes.items() if not norms or kind != _OF_NORMS}
        sent = rescaled(sent, of_engine, counted.trial.train.grad_accum)
    shares = [p.parts.backward / p.parts.compute for p in points if p.parts and p.parts.backward and p.parts.compute]
    return StepModel(
        messages=sent,
        norms=norms,
        backend=largest.backend,
        shards_optimizer=wrapper_facts(largest.trial.train).shards(largest.trial.train),
        backward_share=min(0.95, statistics.median(shares)) if shares else _BACKWARD_SHARE,
        reference_micro_batch=largest_micro_batch(points[0].trial.train),
        network=evidence.network,
        loading=_loading(points, evidence),
        imported=largest.trial.origin is not None,
        parallel=parallel,
        second_shard_ranks=wrapper_facts(largest.trial.train).second_shard_ranks(largest.trial.train),
        filling=filling(largest.trial),
    )


def _counted_norms(counted: MeasuredPoint | None) -> tuple[Message, ...]:
    """What norms were counted to exchange, for a model that arithmetic does not know."""
    calls = counted.sent_calls.get(_OF_NORMS, 0) if counted is not None else 0
    if counted is None or not calls:
        return ()
    each = counted.sent_bytes[_OF_NORMS] / calls
    return (Message("all_reduce", each, calls / counted.trial.train.grad_accum, "after", None, micro_steps="all"),)


def _loading(points: Sequence[MeasuredPoint], evidence: Evidence) -> Loading | None:
    """How long a rank takes to read an image: from steps that waited for it, else from a check of the loader alone."""
    waits = [
        (point.parts.data_wait, statistics.median(point.step_seconds), point.trial.train)
        for point in points
        if point.parts is not None and point.parts.data_wait is not None
    ]
    ahead = points[-1].trial.data.workers > 0
    if waits and not ahead:
        return Loading(
            statistics.median(wait / (train.micro_batch * train.grad_accum) for wait, _, train in waits), ahead
        )
    bound = [step / (t.micro_batch * t.grad_accum) for wait, step, t in waits if wait > _LEAST_LOADING * step]
    if bound:  # the loader is the slower of the two, and sets the pace
        return Loading(statistics.median(bound), ahead)
    if ahead and evidence.loader_images_per_second:
        return Loading(1 / evidence.loader_images_per_second, ahead)
    return None
