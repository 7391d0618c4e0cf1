"""Bytes that a rank holds under DeepSpeed at each ZeRO stage: what its source allocates, more than its paper counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from vitscale.engines import states as common
from vitscale.engines.deepspeed.extensions import offload_of, zero_plus_plus
from vitscale.engines.deepspeed.settings import STAGE_0_BUCKET_ELEMENTS, ZeroSettings, zero_settings
from vitscale.engines.deepspeed.traversal import GatheredMoment, PlacedModule, gathered_moments
from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.parts import Part, PartGathers
from vitscale.engines.states import Parts, RankStates
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import TrainSpec, Trial

_FP32_BYTES = 4
_NORM_BYTES = 8
"""Bytes of an element while DeepSpeed takes the norm of a gradient that it offloads (`get_norm_dtype`)."""
_QUANTISED_ARRIVAL_BYTES = 3
"""Bytes of an element on its way under quantised weights: 8 bits as they come, and 16 into which they are expanded."""


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """Return what DeepSpeed holds at the trial's stage; see the function of each stage."""
    by_stage = {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}
    return by_stage[trial.train.zero_stage](trial, shapes)


def _stage_0(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """No ZeRO: what plain training holds, and all gradients once more while they are averaged, even on one rank.

    `bf16.enabled` keeps fp32 masters and states beside the 16-bit weights, and for its step makes fp32 copies of all
    16-bit gradients at once (`step` in runtime/fp16/unfused_optimizer.py, which serves torch's optimizers).
    """
    count = common.sizes(shapes)
    plain = common.whole_states(trial, shapes)
    element_bytes = weight_bytes(trial.train)
    sent_bytes = communicated_bytes(trial.train)
    copy_bytes = element_bytes if sent_bytes == element_bytes else element_bytes + sent_bytes
    flattened = min(count.all, STAGE_0_BUCKET_ELEMENTS)
    steady = _optimizer_states(trial, count, ranks=1) | {"weights": element_bytes * count.all}
    step: Parts = plain.step
    if element_bytes < _FP32_BYTES:
        steady |= _master_weights(count, ranks=1)
        step = common.added(plain.step, {"temporaries": _FP32_BYTES * count.all})
    return RankStates(
        steady=steady,
        gradient_bytes=plain.gradient_bytes,
        new_gradient_bytes=element_bytes,
        held=plain.held,
        exchange=common.added(plain.exchange, {"buckets": flattened * copy_bytes}),
        step=step,
    )


def _stages_1_and_2(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """ZeRO's first two stages (arXiv 1910.02054, sections 5.1 and 5.2), as runtime/zero/stage_1_and_2.py has them.

    They hold more than the paper counts: fp32 masters of this rank's part even where the weights are fp32 already; a
    bucket of `reduce_bucket_size` elements whatever the model's size, two with `overlap_comm`, and under autocast
    as many again, for gradients of either dtype; a flat copy of a bucket while it is reduced; and in the step a second
    copy of this rank's gradients, flattened group by group.

    Without overlap the first stage keeps all gradients until backward is over. The second reduces as it goes, in each
    micro-step.

    With `offload_optimizer` gradients of this rank's part go to the host as they are reduced, and stay there. See
    `_host_buffers`. The device keeps a buffer of the largest tensor for them.
    """
    train = trial.train
    offload = offload_of(train)
    ranks = trial.world.size
    count = common.sizes(shapes)
    settings = zero_settings(train)
    element_bytes = weight_bytes(train)
    reduces_in_backward = train.zero_stage == 2 or settings.overlap
    accumulates = train.grad_accum > 1
    holds_buckets_in_forward = accumulates and not reduces_in_backward
    grows_in_backward = not (reduces_in_backward or accumulates)
    weights = {"weights": count.all * element_bytes}
    buckets = {"buckets": _bucket_bytes(train, settings)}
    optimizer = _master_weights(count, ranks) | _optimizer_states(trial, count, ranks)
    part_bytes = _copied_gradient_elements(shapes, ranks) * element_bytes
    scratch_bytes = 0
    step: Parts = {
        "gradients": part_bytes,
        "temporaries": _flattened_gradient_bytes(shapes, ranks, element_bytes),
    }
    placed = _placed(trial, on_device=weights | optimizer, on_host={})
    if offload.optimizer:
        largest = _largest_tensor(shapes)
        placed = _placed(
            trial,
            on_device=weights | {"temporaries": largest * element_bytes},
            on_host=common.added(optimizer, _host_buffers(trial, shapes)),
        )
        part_bytes = 0
        scratch_bytes = largest * _NORM_BYTES
        step = _gathered_by_gloo(trial, shapes)
    accumulated_bytes = part_bytes if train.zero_stage == 2 else count.all * element_bytes
    return RankStates(
        steady=placed.steady,
        gradient_bytes=element_bytes if grows_in_backward else 0,
        new_gradient_bytes=element_bytes,
        held={"gradients": accumulated_bytes} if accumulates else {},
        held_buckets=buckets if holds_buckets_in_forward else {},
        backward=buckets,
        bucket=settings.reduce_bucket if reduces_in_backward else 0,
        flush={"temporaries": _flat_copy_bytes(trial, settings)},
        from_first_flush={"gradients": part_bytes} if reduces_in_backward else {},
        exchange=buckets | _last_exchange(trial, count, settings, part_bytes=part_bytes, scratch_bytes=scratch_bytes),
        step=step,
        host=placed.host,
    )


class _Placed(NamedTuple):
    """Bytes at all moments by where they lie, as `RankStates` has them."""

    steady: Parts
    host: Parts


def _placed(trial: Trial, *, on_device: Parts, on_host: Parts) -> _Placed:
    """Return the parts of the device and those of the host; on a CPU all lie in one memory."""
    if trial.train.device == "cpu":
        return _Placed(steady=common.added(on_device, on_host), host={})
    return _Placed(steady=on_device, host=on_host)


def _host_buffers(trial: Trial, shapes: ParameterShapes) -> Parts:
    """Return the bytes that offloading in stages 1 and 2 takes on the host beside fp32 masters and optimizer states.

    They are those of runtime/zero/stage_1_and_2.py: the fp32 gradients of this rank's part
    (`initialize_optimizer_states`), its new weights in their own dtype, a buffer as large as the largest tensor
    (`param_buffer_of_bit16_for_cpu_offload_groups`), and sums of gradients. What page-locking rounds up comes on top.
    """
    part_elements = common.shard(common.sizes(shapes).all, trial.world.size)
    copied_weight_elements = part_elements + _largest_tensor(shapes)
    return {
        "gradients": part_elements * _FP32_BYTES + _host_gradient_sum_bytes(trial, shapes),
        "temporaries": copied_weight_elements * weight_bytes(trial.train),
    }


def _host_gradient_sum_bytes(trial: Trial, shapes: ParameterShapes) -> int:
    """Return the bytes of the gradients that stage 2 sums over micro-steps on the host; 0 in stage 1.

    Stage 2 reduces in each micro-step, and keeps the sum so far of every gradient of which this rank's part has a piece
    (`accumulated_grads_in_cpu` in runtime/zero/stage_1_and_2.py). Stage 1 reduces in the last micro-step alone.
    """
    has_several_micro_steps = trial.train.grad_accum > 1
    if not has_several_micro_steps or trial.train.zero_stage != 2:
        return 0
    return _copied_gradient_elements(shapes, trial.world.size) * weight_bytes(trial.train)


def _gathered_by_gloo(trial: Trial, shapes: ParameterShapes) -> Parts:
    """Return gloo's copy of the new weights of the optimizer's largest group, which a step ends with gathering.

    Without offloading a step holds more than that before it: its gradients, flattened once more.
    """
    has_gloo = trial.train.device == "cpu" and trial.world.size > 1
    largest_group = max(map(sum, optimizer_groups(shapes)))
    return {"gloo's copies": largest_group * weight_bytes(trial.train)} if has_gloo else {}


def _largest_tensor(shapes: ParameterShapes) -> int:
    """Return the elements of the largest tensor, in a block or not."""
    return max(map(math.prod, shapes.tensors()))


def _bucket_bytes(train: TrainSpec, settings: ZeroSettings) -> int:
    """Return the bytes of all buckets of stages 1 and 2."""
    dtypes = 2 if train.precision == "bf16" else 1
    buckets = 2 if settings.overlap else 1
    return settings.reduce_bucket * weight_bytes(train) * dtypes * buckets


def _flat_copy_bytes(trial: Trial, settings: ZeroSettings) -> int:
    """Return the bytes per element of a bucket's flat copies while stages 1 and 2 reduce it; one rank makes none."""
    train = trial.train
    element_bytes = weight_bytes(train)
    # The previous bucket's copy may still be there, on another stream.
    copies = 2 if settings.overlap and train.device == "cuda" else 1
    copy_bytes = element_bytes * copies if trial.world.size > 1 else 0
    if communicated_bytes(train) != element_bytes:
        copy_bytes += communicated_bytes(train)
    return copy_bytes


def _last_exchange(
    trial: Trial, count: common.Sizes, settings: ZeroSettings, *, part_bytes: int, scratch_bytes: int
) -> dict[str, int]:
    """Return what stages 1 and 2 hold beside buckets when backward is over, and the last bucket is reduced.

    Args:
        trial: the trial.
        count: parameters of the model.
        settings: ZeRO's settings.
        part_bytes: gradients that are copied out for this rank's part.
        scratch_bytes: what copying one of them out takes for a moment, when the flat copy of the bucket is gone.
    """
    reduced = _elements_reduced_at_once(count, settings)
    flat_bytes = reduced * _flat_copy_bytes(trial, settings)
    if reduced == count.all:
        # One bucket holds all gradients: its flat copy is gone when this rank's part is copied out.
        return {"temporaries": max(flat_bytes, part_bytes, scratch_bytes)}
    if trial.train.zero_stage == 2 or settings.overlap:
        return {"gradients": part_bytes, "temporaries": max(flat_bytes, scratch_bytes)}
    # Gradients that fill a bucket are gone from where backward put them; tensors larger than a bucket stay there.
    bucketed = reduced if reduced <= settings.reduce_bucket else 0
    return {"gradients": (count.all - bucketed) * weight_bytes(trial.train) + part_bytes}


def _elements_reduced_at_once(count: common.Sizes, settings: ZeroSettings) -> int:
    """Return the elements of a bucket, of the whole model, or of one tensor too large for a bucket."""
    return min(count.all, max(settings.reduce_bucket, count.largest_of_block))


def _stage_3(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """ZeRO's third stage (arXiv 1910.02054, section 5.3).

    It follows runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py, and holds more than
    the paper counts. fp32 masters and a bucket are there as at the other stages. Gathered weights of up to 1e5 elements
    each stay (`stage3_param_persistence_threshold`); for all others see `part_gathers`. In the step this rank's
    gradients are there once more, unless the step is on the host. One rank gathers nothing, unless from the host.
    """
    train = trial.train
    count = common.sizes(shapes)
    settings = zero_settings(train)
    element_bytes = weight_bytes(train)
    bucket_bytes = settings.reduce_bucket * (element_bytes + (2 if train.precision == "bf16" else 0))
    flush = _scattered_bytes(trial)
    reduced = _elements_reduced_at_once(count, settings)
    flush_bytes = {part: reduced * part_bytes for part, part_bytes in flush.items()}
    large = _elements_above(map(math.prod, shapes.tensors()), settings.persistence_threshold)
    persistent = {"gathered weights": (count.all - large) * _gathered_element_bytes(trial)}
    # All have been released when a micro-step is over, and some when a forward is.
    released = large if train.grad_accum > 1 else large - _lasting_elements(settings, large)
    placed = _placed_in_stage_3(trial, shapes, buckets={"buckets": bucket_bytes})
    flattens_gradients = not offload_of(train).optimizer
    step_bytes = _flattened_gradient_bytes(shapes, trial.world.size, element_bytes) if flattens_gradients else 0
    return RankStates(
        steady=placed.steady,
        gradient_bytes=0,
        new_gradient_bytes=element_bytes,
        held=_second_shard(trial, released),
        bucket=settings.reduce_bucket,
        flush=flush,
        exchange=common.added(persistent, flush_bytes, _copied_out(trial, shapes), _second_shard(trial, large)),
        step=common.added({"temporaries": step_bytes}, _second_shard(trial, count.all)),
        host=placed.host,
    )


def _placed_in_stage_3(trial: Trial, shapes: ParameterShapes, *, buckets: Parts) -> _Placed:
    """Return what stage 3 holds at all moments, on the device and on the host.

    With `offload_optimizer` the gradients that it scatters lie on the host, and once more in fp32 for the step
    (`_setup_for_real_optimizer` and `initialize_optimizer_states` in runtime/zero/stage3.py).
    """
    offload = offload_of(trial.train)
    count = common.sizes(shapes)
    ranks = trial.world.size
    part_elements = common.shard(count.all, ranks)
    weights = {"weights": part_elements * weight_bytes(trial.train)}
    gradients = {"gradients": part_elements * weight_bytes(trial.train)}
    optimizer = common.added(_master_weights(count, ranks), _optimizer_states(trial, count, ranks), gradients)
    on_device: list[Parts] = [buckets]
    on_host: list[Parts] = []
    if offload.weights:
        on_host.append(weights)
        if trial.train.device == "cuda":
            on_host.append(_second_shard_parts(trial, count.all))
    else:
        on_device.append(weights)
    if offload.optimizer:
        on_host += [optimizer, {"gradients": part_elements * _FP32_BYTES}]
    else:
        on_device.append(optimizer)
    return _placed(trial, on_device=common.added(*on_device), on_host=common.added(*on_host))


def _scattered_bytes(trial: Trial) -> dict[str, int]:
    """Return the bytes per element of a bucket's copies while stage 3 scatters it.

    Gradients that are quantised are sent tensor by tensor, if there are several hosts; until they are they lie in the
    dtype in which they are communicated. Their shards, of 16 bits over two ranks or more, take a byte at most
    (`all_to_all_quant_reduce` in runtime/comm/coalesced_collectives.py).
    """
    train = trial.train
    sent_bytes = 2 if train.precision == "bf16" else communicated_bytes(train)
    if zero_plus_plus(train).quantises_gradients and trial.world.nodes > 1:
        cast_bytes = 0 if sent_bytes == weight_bytes(train) else sent_bytes
        return {"temporaries": cast_bytes + 1}
    return {"temporaries": sent_bytes, "gloo's copies": sent_bytes if train.device == "cpu" else 0}


def _copied_out(trial: Trial, shapes: ParameterShapes) -> Parts:
    """Return what stage 3 takes for a moment while it copies this rank's part of a gradient to the host.

    On a GPU it copies the part back to take its norm (`partition_grads` in runtime/zero/stage3.py).
    """
    if not offload_of(trial.train).optimizer:
        return {}
    copy_bytes = weight_bytes(trial.train) if trial.train.device == "cuda" else 0
    part_elements = common.shard(_largest_tensor(shapes), trial.world.size)
    return {"temporaries": part_elements * (copy_bytes + _NORM_BYTES)}


def _second_shard(trial: Trial, elements: int) -> Parts:
    """Return hpZ's second shard of weights on the device; empty without hpZ, or where it is on the host.

    A tensor has one from when it is first released until the step is over (`_partition_param_sec` in
    runtime/zero/partition_parameters.py, `invalidate_secondary_tensor` in stage3.py); a small one is released for the
    step. During backward, where it takes the place of weights that are released, it is left out.

    Args:
        trial: the trial.
        elements: elements of the tensors that have been released.
    """
    is_on_host = offload_of(trial.train).weights and trial.train.device == "cuda"
    return {} if is_on_host else _second_shard_parts(trial, elements)


def _second_shard_parts(trial: Trial, elements: int) -> Parts:
    """Return the second shard of so many elements, wherever it lies; one rank has all of them once more."""
    second_shard_ranks = zero_plus_plus(trial.train).second_shard_ranks
    if second_shard_ranks == 1:
        return {}
    ranks = min(second_shard_ranks, trial.world.size)
    return {"second shard of weights": common.shard(elements, ranks) * weight_bytes(trial.train)}


def _buffer_element_bytes(trial: Trial) -> int:
    """Return the bytes of an element in the buffer that weights arrive in; one rank has none.

    Quantised weights come in 8 bits and are expanded to 16 (`_all_gather_coalesced` in runtime/zero/
    partition_parameters.py); the scales, of one number for thousands of weights, are left out.
    """
    if trial.world.size == 1:
        return 0
    if zero_plus_plus(trial.train).quantises_weights:
        return _QUANTISED_ARRIVAL_BYTES
    return weight_bytes(trial.train)


def _copied_from_host_bytes(trial: Trial, arriving: int) -> int:
    """Return the bytes of this rank's shards on the device while they are copied from the host into the buffer.

    `arriving`: elements that are gathered at once.
    """
    is_copied = offload_of(trial.train).weights and trial.train.device == "cuda" and trial.world.size > 1
    return common.shard(arriving, trial.world.size) * weight_bytes(trial.train) if is_copied else 0


def _is_copied_by_gloo(trial: Trial, arriving: int, large_elements: int) -> bool:
    """Whether gloo, which exchanges between CPUs, has a copy of what arrives late in forward (ProcessGroupGloo.cpp).

    Where all weights of the model arrive at once, they have done so before its first block.
    """
    return trial.train.device == "cpu" and arriving < large_elements


def _lasting_elements(settings: ZeroSettings, large_elements: int) -> int:
    """Return how many elements stay gathered from forward to their backward: those at the end of the model.

    It is a rule of two settings. Where not all stay, `part_gathers` goes through the step instead.

    A weight is released after its use unless its next use is less than `stage3_max_reuse_distance` elements away
    (`__params_to_release` in runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19). From the last n elements
    of a model to their backward it is 2 n. A weight stays, too, if fetching ahead has passed over that next use. It has
    soon, for it goes a bucket ahead at every module, unless `stage3_max_live_parameters` stops it.

    Args:
        settings: ZeRO's settings.
        large_elements: elements of all weights that are gathered when they are used.
    """
    if settings.max_live >= large_elements:
        return large_elements
    return min(large_elements, settings.max_reuse // 2)


def _gathered_element_bytes(trial: Trial) -> int:
    """Return the bytes of a gathered weight; 0 on one rank, unless it gathers from the host."""
    comes_from_host = offload_of(trial.train).weights and trial.train.device == "cuda"
    return weight_bytes(trial.train) if trial.world.size > 1 or comes_from_host else 0


def _elements_on_their_way(settings: ZeroSettings, largest_tensor: int) -> int:
    """Return the most elements that fetching ahead asks for: it stops once a tensor has filled the bucket."""
    return min(settings.prefetch_bucket, settings.max_live) + largest_tensor


def _elements_above(tensor_elements: Iterable[int], threshold: int) -> int:
    """Return the elements of all tensors that have more than `threshold`."""
    return sum(elements for elements in tensor_elements if elements > threshold)


def _master_weights(count: common.Sizes, ranks: int) -> dict[str, int]:
    return {"master weights": _FP32_BYTES * common.shard(count.all, ranks)}


def _optimizer_states(trial: Trial, count: common.Sizes, ranks: int) -> dict[str, int]:
    return {"optimizer states": common.state_bytes(trial.train) * common.shard(count.all, ranks)}


def _flattened_gradient_bytes(shapes: ParameterShapes, ranks: int, element_bytes: int) -> int:
    """Return the bytes of this rank's gradients, flattened for the step, of the largest group of the optimizer."""
    largest_group = max(map(sum, optimizer_groups(shapes)))
    # Gradients are flattened in their own dtype, and cast for fp32 masters.
    cast_bytes = _FP32_BYTES if element_bytes < _FP32_BYTES else 0
    return common.shard(largest_group, ranks) * (element_bytes + cast_bytes)


class OptimizerGroups(NamedTuple):
    """Elements of each tensor in the optimizer's two groups."""

    with_weight_decay: list[int]
    without_weight_decay: list[int]


@lru_cache(maxsize=256)
def optimizer_groups(shapes: ParameterShapes) -> OptimizerGroups:
    """Return the tensors that the optimizer updates together: biases and norms take no weight decay."""
    all_shapes = shapes.tensors()
    matrices = [shape for shape in all_shapes if len(shape) > 1]
    vectors = [shape for shape in all_shapes if len(shape) == 1]
    return OptimizerGroups(
        with_weight_decay=list(map(math.prod, matrices)), without_weight_decay=list(map(math.prod, vectors))
    )


@lru_cache(maxsize=65_536)
def _copied_gradient_elements(shapes: ParameterShapes, ranks: int) -> int:
    """Return the elements of all tensors of which a rank's part has a piece, on the rank that has most of them.

    The copy of its gradients takes each of these tensors whole (`copy_grads_in_partition`).
    """
    change_at_rank: Counter[int] = Counter()
    """Rank -> elements that it has more than the rank before, as a sparse array: ranks may be many thousands."""
    for group in optimizer_groups(shapes):
        part_elements = common.shard(sum(group), ranks)
        start = 0
        for elements in group:
            last = start + elements - 1
            first_rank = start // part_elements
            last_rank = min(ranks - 1, last // part_elements)
            change_at_rank[first_rank] += elements
            change_at_rank[last_rank + 1] -= elements
            start += elements
    changes = [change_at_rank[rank] for rank in sorted(change_at_rank)]
    return max(accumulate(changes))


def part_gathers(trial: Trial, parts: Sequence[Part]) -> PartGathers | None:
    """Return the weights that stage 3 gathers in each part's forward and backward, small ones that stay included.

    Return None below stage 3, where nothing is gathered. Where `stage3_max_live_parameters` allows all large weights at
    once they stay from forward to their backward; else it depends on where fetching ahead is at each module.
    """
    if trial.train.zero_stage < 3:
        return None
    settings = zero_settings(trial.train)
    element_bytes = _gathered_element_bytes(trial)
    buffer_element_bytes = _buffer_element_bytes(trial)
    large_by_part = [_elements_above(part.tensors, settings.persistence_threshold) for part in parts]
    large = sum(large_by_part)
    small = sum(part.elements for part in parts) - large
    if settings.max_live < large:
        return _gathers_module_by_module(trial, parts, small * element_bytes)
    largest_tensor = max((max(part.tensors, default=0) for part in parts), default=0)
    most_on_their_way = _elements_on_their_way(settings, largest_tensor)
    arriving = min(large, most_on_their_way)
    gloo_bytes = arriving * element_bytes if _is_copied_by_gloo(trial, arriving, large) else 0
    forward: list[Parts] = []
    backward: list[Parts] = []
    for elements_so_far in accumulate(large_by_part):
        # Fetching ahead is soon through with the model, but for a bucket, which lies there until its weights are used.
        is_arriving = elements_so_far < large
        arriving_bytes = arriving * buffer_element_bytes if is_arriving else 0
        forward.append(
            {
                "gathered weights": (small + large) * element_bytes + arriving_bytes,
                "gloo's copies": gloo_bytes if is_arriving else 0,
                "temporaries": _copied_from_host_bytes(trial, arriving) if is_arriving else 0,
            }
        )
        backward.append({"gathered weights": (small + elements_so_far) * element_bytes})
    return PartGathers(forward, backward)


def _gathers_module_by_module(trial: Trial, parts: Sequence[Part], small_bytes: int) -> PartGathers:
    """Return the weights that stage 3 gathers in each part where `stage3_max_live_parameters` are fewer than there are.

    Args:
        trial: the trial.
        parts: those of the model, in the order of forward.
        small_bytes: bytes of the weights that are never released.
    """
    modules = tuple(PlacedModule(module, part.block) for part in parts for module in part.modules)
    part_of_module = [number for number, part in enumerate(parts) for _ in part.modules]
    highest_in_forward: list[Parts] = [{} for _ in parts]
    highest_in_backward: list[Parts] = [{} for _ in parts]
    forward_end: Parts = {}
    for moment in gathered_moments(modules, zero_settings(trial.train), trial.train.activation_checkpointing):
        gathered = _gathered_at(trial, moment, small_bytes)
        highest = highest_in_forward if moment.in_forward else highest_in_backward
        number = part_of_module[moment.module]
        is_highest = not highest[number] or sum(gathered.values()) > sum(highest[number].values())
        if is_highest:
            highest[number] = gathered
        if moment.in_forward:
            forward_end = gathered
    for number, part in enumerate(parts):
        if not part.modules:  # the loss
            highest_in_forward[number] = forward_end
            highest_in_backward[number] = forward_end
    return PartGathers(highest_in_forward, highest_in_backward)


def _gathered_at(trial: Trial, moment: GatheredMoment, small_bytes: int) -> Parts:
    """Return the bytes of gathered weights at a moment.

    gloo has a copy of what it has just begun to gather, and may still have one of what has just arrived.

    Args:
        trial: the trial.
        moment: the elements of large weights that are there.
        small_bytes: bytes of the weights that are never released.
    """
    element_bytes = _gathered_element_bytes(trial)
    has_buffers = trial.world.size > 1
    if has_buffers:
        large_bytes = (moment.copied + moment.copying) * element_bytes + moment.buffered * _buffer_element_bytes(trial)
    else:  # what one rank takes from its host lies in tensors of their own at once
        large_bytes = (moment.copied + moment.buffered) * element_bytes
    has_gloo = trial.train.device == "cpu" and has_buffers
    return {
        "gathered weights": small_bytes + large_bytes,
        "gloo's copies": (moment.started + moment.copying) * element_bytes if has_gloo else 0,
        "temporaries": _copied_from_host_bytes(trial, moment.started),
    }
