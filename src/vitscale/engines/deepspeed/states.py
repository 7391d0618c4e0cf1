"""What DeepSpeed keeps at each ZeRO stage: what its source allocates, which is more than its paper counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from vitscale.engines import states as common
from vitscale.engines.deepspeed.config import as_number, flag, section
from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.parts import Part, PartGathers
from vitscale.engines.states import RankStates
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.model_counts import Block, Module
from vitscale.trial.trial import TrainSpec, Trial


class ZeroSettings(NamedTuple):
    """Settings of `zero_optimization`, sizes in elements; defaults as in runtime/zero/config.py of DeepSpeed 0.19."""

    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_live: int
    max_reuse: int
    overlap: bool


def zero_settings(train: TrainSpec) -> ZeroSettings:
    """The study's settings, or else those of the user's file, or else DeepSpeed's defaults.

    DeepSpeed takes the keys of stage 3 with `stage3_` before them and without (`populate_by_name`).
    """
    zero = section(train.deepspeed_config, "zero_optimization")

    def elements(key: str, default: int) -> int:
        value = as_number(zero.get(f"stage3_{key}", zero.get(key)))
        return default if value is None else min(int(value), 10**15)  # no more than what arrays can count in bytes

    reduce_bucket = elements("reduce_bucket_size", 500_000_000)
    prefetch = elements("prefetch_bucket_size", 50_000_000)
    if train.bucket_mib is not None:
        reduce_bucket = train.bucket_mib * 2**20 // communicated_bytes(train)
    if train.gather_bucket_mib is not None:
        prefetch = train.gather_bucket_mib * 2**20 // weight_bytes(train)
    overlap = flag(train, "overlap_comm") is True if train.overlap_comm is None else train.overlap_comm
    live, reuse = elements("max_live_parameters", 10**9), elements("max_reuse_distance", 10**9)
    threshold = elements("param_persistence_threshold", 100_000)
    return ZeroSettings(reduce_bucket, prefetch, threshold, live, reuse, overlap)


FLATTENED_AT_MOST = 500_000_000
"""Elements that stage 0 flattens and sends at a time (`allreduce_gradients` in runtime/engine.py of DeepSpeed 0.19)."""


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """What DeepSpeed holds at the trial's stage; see the functions below."""
    return {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}[trial.train.zero_stage](trial, shapes)


def _stage_0(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """No ZeRO: what plain training holds, and all gradients once more while they are averaged, even on one rank.

    `bf16.enabled` keeps fp32 masters and states beside the 16-bit weights, and for its step makes fp32 copies of all
    16-bit gradients at once (`step` in runtime/fp16/unfused_optimizer.py, which serves torch's optimizers).
    """
    train, count = trial.train, common.sizes(shapes)
    alone = common.whole_states(trial, shapes)
    each = weight_bytes(train)
    flattened = min(count.all, FLATTENED_AT_MOST)
    cast = flattened * communicated_bytes(train) if communicated_bytes(train) != each else 0
    masters: dict[str, int] = {}
    unscaled: dict[str, int] = {}
    if each == 2:
        masters = {"master weights": 4 * count.all}
        unscaled = {"temporaries": 4 * count.all}
    return RankStates(
        steady=_states(trial, count, 1) | {"weights": each * count.all} | masters,
        gradient_bytes=alone.gradient_bytes,
        new_gradient_bytes=each,
        held=alone.held,
        exchange=common.added(alone.exchange, {"buckets": flattened * each + cast}),
        step=common.added(alone.step, unscaled),
    )


def _stages_1_and_2(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """ZeRO's first two stages (arXiv 1910.02054, sections 5.1 and 5.2), as runtime/zero/stage_1_and_2.py has them.

    They hold more than the paper counts: fp32 masters of this rank's part even where the weights are fp32 already; a
    bucket of `reduce_bucket_size` elements whatever the model's size, two with `overlap_comm`, and under autocast
    as many again, for gradients of either dtype; a flat copy of a bucket while it is reduced; and in the step a second
    copy of this rank's gradients, flattened group by group.

    Without overlap the first stage keeps all gradients until backward is over. The second reduces as it goes, in each
    micro-step.
    """
    train, ranks, count = trial.train, trial.world.size, common.sizes(shapes)
    settings = zero_settings(train)
    each = weight_bytes(train)
    dtypes = 2 if train.precision == "bf16" else 1
    bucket = settings.reduce_bucket * each * dtypes * (2 if settings.overlap else 1)
    part = _whole_tensors_in_part(shapes, ranks) * each
    filled = _filled(count, settings)
    # The previous bucket's copy may still be there, on another stream.
    copies = 2 if settings.overlap and train.device == "cuda" else 1
    per_element = each * copies if ranks > 1 else 0
    if communicated_bytes(train) != each:
        per_element += communicated_bytes(train)
    flattened = filled * per_element
    matrices = common.shard(max(map(sum, groups(shapes))), ranks)
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
    return RankStates(
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


def _filled(count: common.Sizes, settings: ZeroSettings) -> int:
    """Elements that are reduced at a time: a bucket, the whole model, or one tensor too large for a bucket."""
    return min(count.all, max(settings.reduce_bucket, count.largest_of_block))


def _stage_3(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """ZeRO's third stage (arXiv 1910.02054, section 5.3).

    It follows runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py, and holds more than
    the paper counts. fp32 masters and a bucket are there as at the other stages. Gathered weights of up to 1e5 elements
    each stay (`stage3_param_persistence_threshold`). All others stay from forward to their backward where
    `traversal` gathers none a second time, as in a model of less than half of `stage3_max_reuse_distance` (1e9).
    Weights arrive in a flat buffer, out of which they are copied. In the step this rank's gradients are there once
    more. One rank gathers nothing.
    """
    train, ranks, count = trial.train, trial.world.size, common.sizes(shapes)
    settings = zero_settings(train)
    each = weight_bytes(train)
    scattered = 2 if train.precision == "bf16" else communicated_bytes(train)
    bucket = settings.reduce_bucket * (each + (2 if train.precision == "bf16" else 0))
    gathers = ranks > 1

    of_block, of_all = _gathered(shapes, settings.persistence_threshold)
    rest_of_block, rest = of_block * each * gathers, of_all * each * gathers
    lasting = {"gathered weights": count.all * each - rest if gathers else 0}
    arriving = min(rest, (min(settings.prefetch_bucket, settings.max_live) + count.largest_of_block) * each)
    filled = _filled(count, settings)
    copied = arriving if train.device == "cpu" and arriving < rest else 0
    forward = {"gathered weights": rest + arriving, "gloo's copies": copied}
    forward_end = {"gathered weights": rest}
    gathered_blocks = tuple(left * rest_of_block for left in range(shapes.blocks[1].repeats + 1))
    order = in_forward(shapes)
    went = traversal(order, settings, train.activation_checkpointing)
    if went.gathered_twice * each * gathers > arriving:  # else it is no more than what is on its way anyway
        at = [number for _, number in order]
        most = {number: max(went.forward[n] for n in range(len(at)) if at[n] == number) for number in set(at)}
        again = {number: max(went.backward[n] for n in range(len(at)) if at[n] == number) for number in set(at)}
        last = max(at)
        own = max(went.coming[n] for n in range(len(at)) if at[n] == last) if train.device == "cpu" else 0
        forward = {"gathered weights": most[last] * each, "gloo's copies": own * each}
        forward_end = {"gathered weights": most[at[-1]] * each}
        gathered_blocks = tuple(again[number] * each for number in range(last + 1))
    flush = {"temporaries": scattered, "gloo's copies": scattered if train.device == "cpu" else 0}
    matrices = common.shard(max(map(sum, groups(shapes))), ranks)
    return RankStates(
        steady={
            "weights": common.shard(count.all, ranks) * each,
            "gradients": common.shard(count.all, ranks) * each,
            "buckets": bucket,
        }
        | _masters(count, ranks)
        | _states(trial, count, ranks),
        gradient_bytes=0,
        new_gradient_bytes=each,
        forward=common.added(lasting, forward),
        forward_end=common.added(lasting, forward_end),
        backward=lasting,
        gathered_blocks=gathered_blocks,
        bucket=settings.reduce_bucket,
        flush=flush,
        exchange=common.added(lasting, {part: filled * each for part, each in flush.items()}),
        step={"temporaries": matrices * (each + (4 if each == 2 else 0))},
    )


class Fetch(NamedTuple):
    """An all-gather of ZeRO-3's weights, or two where some of them travel in 16 bits and some in 32."""

    in_forward: bool
    at: int
    """The module that asks for it, for itself or for modules that come later."""
    needed_in_forward: bool
    needed: int
    """The module that waits for it first."""
    tensors: tuple[tuple[int, int], ...]
    """Module and index among its tensors."""


class Traversal(NamedTuple):
    """What ZeRO-3 gathers in a micro-step; all but fetches as elements, small weights that stay left out."""

    fetches: tuple[Fetch, ...]
    forward: tuple[int, ...]
    """The most that is gathered or on its way in each module's forward, buffers included."""
    backward: tuple[int, ...]
    coming: tuple[int, ...]
    """The most that each module asks for ahead in forward, of which gloo has a copy while it comes."""
    gathered_twice: int
    """What is released after it was used, and gathered again."""


Order = tuple[tuple[Module, int], ...]
"""Modules in the order of forward, each with the number of its wrapped block, from 1 on; outside blocks 0 before them
and -1 behind them."""


@lru_cache(maxsize=256)
def in_forward(shapes: ParameterShapes) -> Order:
    """A model's modules in the order of forward."""
    rows: list[tuple[Module, int]] = []
    number = 0
    for block in shapes.each():
        number += block.wrapped
        rows += [(module, number if block.wrapped else -1 if number else 0) for module in block.in_forward]
    return tuple(rows)


@lru_cache(maxsize=1024)
def traversal(order: Order, settings: ZeroSettings, checkpointing: bool) -> Traversal:
    """Goes through forward and backward as runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19 does.

    At each module `fetch_sub_module` gathers what the module lacks, and then `stage3_prefetch_bucket_size` elements of
    what comes next, as long as fewer than `stage3_max_live_parameters` are gathered. The module is released
    (`__params_to_release`) unless fewer than `stage3_max_reuse_distance` elements are gone through until it is used
    again, on the way through the rest of forward and back; or unless that use was passed over by fetching ahead.
    With large buckets that saves all modules but the first few, because it is done at every module, those without
    weights included: there is one around each block, each attention and each MLP, here before a block and behind a
    norm. Of a block that is computed again the last module is still there when its backward begins, because torch
    stops there.
    """
    sizes = [[math.prod(shape) for shape in module.tensors] for module, _ in order]
    steps = _steps(order, checkpointing)
    uses: list[list[int]] = [[] for _ in order]
    for step, (module, own, _) in enumerate(steps):
        uses[module] += [step] * own
    through = [0, *accumulate(sum(sizes[module]) if own else 0 for module, own, _ in steps)]
    queue = [(module, i) for module, own, _ in steps if own for i in range(len(sizes[module]))]
    used_at = [step for step, (module, own, _) in enumerate(steps) if own for _ in sizes[module]]
    front = live = 0
    seen: dict[tuple[int, int], int] = {}  # the latest use that fetching ahead has passed over
    there: dict[tuple[int, int], int] = {}  # the fetch that brought it
    fetched: list[tuple[int, list[tuple[int, int]]]] = []
    until: dict[tuple[tuple[int, int], int], int] = {}
    for step, (module, own, stopped) in enumerate(steps):
        needs = [(module, i) for i in range(len(sizes[module]))] if own else []
        missing = [(n, i) for n, i in needs if sizes[n][i] > settings.persistence_threshold and (n, i) not in there]
        live += sum(sizes[n][i] for n, i in missing)
        there |= dict.fromkeys(missing, len(fetched))
        fetched += [(step, missing)] * bool(missing)
        for _ in range(sum(seen.get(tensor, -1) < step for tensor in needs)):
            seen[queue[front]] = used_at[front]
            front += 1
        ahead: list[tuple[int, int]] = []
        limit, amount = min(settings.max_live - live, settings.prefetch_bucket), 0
        while front < len(queue) and amount < limit:
            n, i = tensor = queue[front]
            seen[tensor] = used_at[front]
            front += 1
            if sizes[n][i] > settings.persistence_threshold and tensor not in there:
                there[tensor] = len(fetched)
                ahead.append(tensor)
                amount += sizes[n][i]
        live += amount
        fetched += [(step, ahead)] * bool(ahead)
        again = next((use for use in uses[module] if use > step), None)
        if not stopped and (again is None or through[again] - through[step + 1] >= settings.max_reuse):
            for n, i in needs:
                if (n, i) in there and seen[n, i] <= step + 1:
                    until[(n, i), there.pop((n, i))] = step
                    live -= sizes[n][i]
    return _summed(order, steps, uses, fetched, until)


_Steps = list[tuple[int, bool, bool]]


def _steps(order: Order, checkpointing: bool) -> _Steps:
    """Modules as forward and backward come to them: number, whether it is itself, and not one of no weights beside it,
    and whether torch stops in it, as it does in a block that is computed again."""
    blocks: list[tuple[int, _Steps]] = []
    for index, (module, number) in enumerate(order):
        if not blocks or blocks[-1][0] != number:
            blocks.append((number, [(index, False, False)]))
        norm = all(len(shape) == 1 for shape in module.tensors)
        blocks[-1][1].extend([(index, True, False)] + [(index, False, False)] * norm)
    steps = [step for _, own in blocks for step in own]
    for number, own in reversed(blocks):
        if checkpointing and number > 0:
            steps += [*own[:-1], (*own[-1][:2], True)]
        steps += reversed(own)
    return steps


def _summed(
    order: Order,
    steps: _Steps,
    uses: list[list[int]],
    fetched: list[tuple[int, list[tuple[int, int]]]],
    until: dict[tuple[tuple[int, int], int], int],
) -> Traversal:
    """What is there at each step: a tensor that comes with others lies in their buffer first, and then beside it."""
    there, coming = [0] * (len(steps) + 1), [0] * (len(steps) + 1)
    ends = len(_steps(order, checkpointing=False)) // 2

    def add(to: list[int], elements: int, first: int, last: int) -> None:
        to[first] += elements
        to[last + 1] -= elements

    fetches, amounts = [], []
    for number, (at, tensors) in enumerate(fetched):
        waits = [next(use for use in uses[module] if use >= at) for module, _ in tensors]
        elements = [math.prod(order[module][0].tensors[i]) for module, i in tensors]
        amounts.append(elements)
        copied = min(waits) if len(tensors) > 1 else at
        if len(tensors) > 1:
            add(there, sum(elements), at, max(waits))
        add(coming, sum(elements), at, min(at, min(waits) - 1))
        for tensor, own in zip(tensors, elements, strict=True):
            add(there, own, copied, until.get((tensor, number), len(steps) - 1))
        first = min(waits)
        fetches.append(Fetch(at < ends, steps[at][0], first < ends, steps[first][0], tuple(tensors)))
    forward, backward, ahead = ([0] * len(order) for _ in range(3))
    both = zip(accumulate(there), accumulate(coming), strict=True)
    for step, ((module, _, _), (gathered, asked)) in enumerate(zip(steps, both, strict=False)):
        most = forward if step < ends else backward
        most[module] = max(most[module], gathered)
        if step < ends:
            ahead[module] = max(ahead[module], asked)
    every = {tensor for _, own in fetched for tensor in own}
    twice = sum(sum(own) for own in amounts) - sum(math.prod(order[n][0].tensors[i]) for n, i in every)
    return Traversal(tuple(fetches), tuple(forward), tuple(backward), tuple(ahead), twice)


@lru_cache(maxsize=256)
def _gathered(shapes: ParameterShapes, persistence_threshold: int) -> tuple[int, int]:
    """Elements of tensors that are gathered when they are needed: (in the largest wrapped block, in the model)."""

    def large(block: Block) -> int:
        tensors = (math.prod(shape) for module in block.modules for shape in module.tensors)
        return sum(n for n in tensors if n > persistence_threshold)

    return max((large(block) for block in shapes.blocks if block.wrapped), default=0), sum(map(large, shapes.each()))


def _masters(count: common.Sizes, ranks: int) -> dict[str, int]:
    return {"master weights": 4 * common.shard(count.all, ranks)}


def _states(trial: Trial, count: common.Sizes, ranks: int) -> dict[str, int]:
    return {"optimizer states": common.state_bytes(trial.train) * common.shard(count.all, ranks)}


@lru_cache(maxsize=256)
def groups(shapes: ParameterShapes) -> tuple[list[int], list[int]]:
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
    for group in groups(shapes):
        length = common.shard(sum(group), ranks)
        start = 0
        for elements in group:
            first, last = start // length, min(ranks - 1, (start + elements - 1) // length)
            more_from[first] = more_from.get(first, 0) + elements
            more_from[last + 1] = more_from.get(last + 1, 0) - elements
            start += elements
    return max(accumulate(more_from[rank] for rank in sorted(more_from)))


def part_gathers(trial: Trial, parts: Sequence[Part]) -> PartGathers | None:
    """Weights gathered in each part's forward and backward: small ones stay, all others are as in `_stage_3`.

    None below stage 3, where all weights stay.
    """
    if trial.train.zero_stage < 3:
        return None
    train, settings = trial.train, zero_settings(trial.train)
    each = weight_bytes(train) if trial.world.size > 1 else 0
    large = [sum(n for n in part.tensors if n > settings.persistence_threshold) for part in parts]
    upto, rest = list(accumulate(large)), sum(large)
    lasting = sum(part.elements for part in parts) - rest
    largest = max((n for part in parts for n in part.tensors), default=0)
    ahead = min(settings.prefetch_bucket, settings.max_live) + largest
    forward: list[common.Parts] = []
    backward: list[common.Parts] = []
    order = tuple((module, part.block) for part in parts for module in part.modules)
    went = traversal(order, settings, train.activation_checkpointing)
    on_cpu = train.device == "cpu"
    if went.gathered_twice * bool(each) > min(rest, ahead):
        ends = list(accumulate(len(part.modules) for part in parts))
        for part, end in zip(parts, ends, strict=True):
            own = slice(max(0, min(end - len(part.modules), len(order) - 1)), max(end, 1))
            there, asked, again = (max(of[own]) for of in (went.forward, went.coming, went.backward))
            forward.append({"gathered weights": (lasting + there) * each, "gloo's copies": on_cpu * asked * each})
            backward.append({"gathered weights": (lasting + again) * each})
        return PartGathers(forward, backward)
    for number in range(len(large)):
        left = min(rest - upto[number], ahead)
        copied = left * each if on_cpu and left < rest else 0
        kept = lasting + upto[number]
        forward.append({"gathered weights": (kept + 2 * left) * each, "gloo's copies": copied})
        backward.append({"gathered weights": kept * each})
    return PartGathers(forward, backward)
