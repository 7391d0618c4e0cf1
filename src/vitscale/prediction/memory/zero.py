"""What DeepSpeed keeps at each ZeRO stage: what its source allocates, which is more than its paper counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from vitscale.prediction.memory import holding
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.model_counts import Block
from vitscale.trial.trial import TrainSpec, Trial


class ZeroSettings(NamedTuple):
    """Settings of `zero_optimization`, sizes in elements; defaults as in runtime/zero/config.py of DeepSpeed 0.19."""

    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_kept: int
    overlap: bool


def zero_settings(train: TrainSpec) -> ZeroSettings:
    """The study's settings, or else those of the user's file, or else DeepSpeed's defaults."""
    zero = section(train.deepspeed_config, "zero_optimization")

    def elements(key: str, default: int) -> int:
        value = zero.get(key)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    reduce_bucket = elements("reduce_bucket_size", 500_000_000)
    prefetch = elements("stage3_prefetch_bucket_size", 50_000_000)
    if train.bucket_mib is not None:
        reduce_bucket = train.bucket_mib * 2**20 // holding.communicated_bytes(train)
    if train.gather_bucket_mib is not None:
        prefetch = train.gather_bucket_mib * 2**20 // holding.weight_bytes(train)
    overlap = zero.get("overlap_comm") is True if train.overlap_comm is None else train.overlap_comm
    live = elements("stage3_max_live_parameters", 10**9)
    reuse = elements("stage3_max_reuse_distance", 10**9)
    threshold = elements("stage3_param_persistence_threshold", 100_000)
    return ZeroSettings(reduce_bucket, prefetch, threshold, min(live, reuse), overlap)


def modelled(train: TrainSpec) -> bool:
    """Whether the user's own file leaves alone the settings with which DeepSpeed holds something else than modelled."""
    config = train.deepspeed_config or {}
    zero = section(config, "zero_optimization")
    offloads = any(section(zero, key).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param"))
    return not offloads and zero.get("contiguous_gradients") is not False and "data_types" not in config


def section(config: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """A section of a DeepSpeed file; empty where it has none, or something else in its place."""
    value = (config or {}).get(key)
    return value if isinstance(value, dict) else {}


_FLATTENED_AT_MOST = 500_000_000
"""Elements that stage 0 flattens at a time (`allreduce_gradients` in runtime/engine.py of DeepSpeed 0.19)."""


def deepspeed(trial: Trial, shapes: ParameterShapes) -> holding.Holding:
    """What DeepSpeed holds at the trial's stage; see the functions below."""
    return {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}[trial.train.zero_stage](trial, shapes)


def _stage_0(trial: Trial, shapes: ParameterShapes) -> holding.Holding:
    """No ZeRO: what plain training holds, and all gradients once more while they are averaged, even on one rank.

    `bf16.enabled` keeps fp32 masters and states beside the 16-bit weights, and for its step makes fp32 copies of all
    16-bit gradients at once (`step` in runtime/fp16/unfused_optimizer.py, which serves torch's optimizers).
    """
    train, count = trial.train, holding.sizes(shapes)
    alone = holding.plain(trial, shapes)
    each = holding.weight_bytes(train)
    flattened = min(count.all, _FLATTENED_AT_MOST)
    cast = flattened * holding.communicated_bytes(train) if holding.communicated_bytes(train) != each else 0
    masters: dict[str, int] = {}
    unscaled: dict[str, int] = {}
    if each == 2:
        masters = {"master weights": 4 * count.all}
        unscaled = {"temporaries": 4 * count.all}
    return holding.Holding(
        steady=_states(trial, count, 1) | {"weights": each * count.all} | masters,
        gradient_bytes=alone.gradient_bytes,
        new_gradient_bytes=each,
        held=alone.held,
        exchange=holding.added(alone.exchange, {"buckets": flattened * each + cast}),
        step=holding.added(alone.step, unscaled),
    )


def _stages_1_and_2(trial: Trial, shapes: ParameterShapes) -> holding.Holding:
    """ZeRO's first two stages (arXiv 1910.02054, sections 5.1 and 5.2), as runtime/zero/stage_1_and_2.py has them.

    They hold more than the paper counts: fp32 masters of this rank's part even where the weights are fp32 already; a
    bucket of `reduce_bucket_size` elements whatever the model's size, two with `overlap_comm`, and under autocast
    as many again, for gradients of either dtype; a flat copy of a bucket while it is reduced; and in the step a second
    copy of this rank's gradients, flattened group by group.

    Without overlap the first stage keeps all gradients until backward is over. The second reduces as it goes, in each
    micro-step.
    """
    train, ranks, count = trial.train, trial.world.size, holding.sizes(shapes)
    settings = zero_settings(train)
    each = holding.weight_bytes(train)
    dtypes = 2 if train.precision == "bf16" else 1
    bucket = settings.reduce_bucket * each * dtypes * (2 if settings.overlap else 1)
    part = _whole_tensors_in_part(shapes, ranks) * each
    filled = _filled(count, settings)
    # The previous bucket's copy may still be there, on another stream.
    copies = 2 if settings.overlap and train.device == "cuda" else 1
    per_element = each * copies if ranks > 1 else 0
    if holding.communicated_bytes(train) != each:
        per_element += holding.communicated_bytes(train)
    flattened = filled * per_element
    matrices = holding.shard(max(map(sum, _groups(shapes))), ranks)
    # Gradients are flattened in their own dtype, and cast for fp32 masters.
    step = {"gradients": part, "temporaries": matrices * (each + (4 if each == 2 else 0))}
    during = train.zero_stage == 2 or settings.overlap
    held = part if train.zero_stage == 2 else count.all * each
    exchange = {"gradients": part, "temporaries": flattened}
    if filled == count.all:
        # One bucket holds all gradients: its flat copy is gone when this rank's part is copied out.
        exchange = {"temporaries": max(flattened, part)}
    elif not during:
        # Gradients that fill a bucket are gone from where backward put them; tensors larger than a bucket stay there.
        bucketed = filled if filled <= settings.reduce_bucket else 0
        exchange = {"gradients": (count.all - bucketed) * each + part}
    return holding.Holding(
        steady={"weights": count.all * each} | _masters(count, ranks) | _states(trial, count, ranks),
        gradient_bytes=0 if during or train.grad_accum > 1 else each,
        new_gradient_bytes=each,
        held={"gradients": held} if train.grad_accum > 1 else {},
        held_buckets={"buckets": bucket} if train.grad_accum > 1 and not during else {},
        backward={"buckets": bucket},
        bucket=settings.reduce_bucket if during else 0,
        flush={"temporaries": per_element},
        from_first_flush={"gradients": part} if during else {},
        exchange={"buckets": bucket} | exchange,
        step=step,
    )


def _filled(count: holding.Sizes, settings: ZeroSettings) -> int:
    """Elements that are reduced at a time: a bucket, the whole model, or one tensor too large for a bucket."""
    return min(count.all, max(settings.reduce_bucket, count.largest_of_block))


def _stage_3(trial: Trial, shapes: ParameterShapes) -> holding.Holding:
    """ZeRO's third stage (arXiv 1910.02054, section 5.3).

    It follows runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py, and holds more than
    the paper counts. fp32 masters and a bucket are there as at the other stages. Gathered weights of up to 1e5 elements
    each stay (`stage3_param_persistence_threshold`). All others stay from forward to their backward as long as the
    model is smaller than `stage3_max_live_parameters` and `stage3_max_reuse_distance`, both 1e9. Weights arrive in a
    flat buffer, out of which they are copied. In the step this rank's gradients are there once more. One rank gathers
    nothing.
    """
    train, ranks, count = trial.train, trial.world.size, holding.sizes(shapes)
    settings = zero_settings(train)
    each = holding.weight_bytes(train)
    scattered = 2 if train.precision == "bf16" else holding.communicated_bytes(train)
    bucket = settings.reduce_bucket * (each + (2 if train.precision == "bf16" else 0))
    gathers = ranks > 1

    of_block, of_all = _gathered(shapes, settings.persistence_threshold)
    rest_of_block, rest = of_block * each * gathers, of_all * each * gathers
    lasting = {"gathered weights": count.all * each - rest if gathers else 0}
    kept = rest <= settings.max_kept * each
    arriving = min(rest, (settings.prefetch_bucket + count.largest_of_block) * each)
    filled = _filled(count, settings)
    copied = arriving if train.device == "cpu" and kept and arriving < rest else 0
    fetched = rest if kept else rest_of_block
    flush = {"temporaries": scattered, "gloo's copies": scattered if train.device == "cpu" else 0}
    matrices = holding.shard(max(map(sum, _groups(shapes))), ranks)
    return holding.Holding(
        steady={
            "weights": holding.shard(count.all, ranks) * each,
            "gradients": holding.shard(count.all, ranks) * each,
            "buckets": bucket,
        }
        | _masters(count, ranks)
        | _states(trial, count, ranks),
        gradient_bytes=0,
        new_gradient_bytes=each,
        forward=holding.added(lasting, {"gathered weights": fetched + arriving, "gloo's copies": copied}),
        forward_end=holding.added(lasting, {"gathered weights": fetched}),
        backward=lasting if kept else holding.added(lasting, {"gathered weights": fetched + arriving}),
        gathered_blocks=tuple(left * rest_of_block for left in range(shapes.blocks[1].repeats + 1)) if kept else (),
        bucket=settings.reduce_bucket,
        flush=flush,
        exchange=holding.added(lasting, {part: filled * each for part, each in flush.items()}),
        step={"temporaries": matrices * (each + (4 if each == 2 else 0))},
    )


@lru_cache(maxsize=256)
def _gathered(shapes: ParameterShapes, persistence_threshold: int) -> tuple[int, int]:
    """Elements of tensors that are gathered when they are needed: (in the largest wrapped block, in the model)."""

    def large(block: Block) -> int:
        tensors = (math.prod(shape) for module in block.modules for shape in module.tensors)
        return sum(n for n in tensors if n > persistence_threshold)

    return max((large(block) for block in shapes.blocks if block.wrapped), default=0), sum(map(large, shapes.each()))


def _masters(count: holding.Sizes, ranks: int) -> dict[str, int]:
    return {"master weights": 4 * holding.shard(count.all, ranks)}


def _states(trial: Trial, count: holding.Sizes, ranks: int) -> dict[str, int]:
    return {"optimizer states": holding.state_bytes(trial.train) * holding.shard(count.all, ranks)}


@lru_cache(maxsize=256)
def _groups(shapes: ParameterShapes) -> tuple[list[int], list[int]]:
    """Elements of each tensor in the optimizer's two groups: those with weight decay and those without."""
    everything = shapes.tensors()
    return (
        [math.prod(shape) for shape in everything if len(shape) > 1],
        [math.prod(shape) for shape in everything if len(shape) == 1],
    )


@lru_cache(maxsize=65_536)
def _whole_tensors_in_part(shapes: ParameterShapes, ranks: int) -> int:
    """Elements of all tensors of which a rank's part has at least a piece, on the rank that has most of them.

    The copy of its gradients takes each of these tensors whole (`copy_grads_in_partition`).
    """
    more_from: dict[int, int] = {}
    for group in _groups(shapes):
        length = holding.shard(sum(group), ranks)
        start = 0
        for elements in group:
            first, last = start // length, min(ranks - 1, (start + elements - 1) // length)
            more_from[first] = more_from.get(first, 0) + elements
            more_from[last + 1] = more_from.get(last + 1, 0) - elements
            start += elements
    return max(accumulate(more_from[rank] for rank in sorted(more_from)))
