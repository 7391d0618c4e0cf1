"""What a wrapper holds around the parts of a model whose blocks are not alike: at each part, and between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from vitscale.prediction.memory.holding import Holding, Parts, added, shard
from vitscale.prediction.memory.in_stages import InTurn
from vitscale.prediction.memory.zero import traversal, zero_settings
from vitscale.trial.model_counts import Module
from vitscale.trial.trial import Trial


class Part(NamedTuple):
    """One piece of a model; bytes of a micro-batch.

    Where sizes decide which moment is widest, every moment that can be widest is listed: each is a straight line in
    the number of images, and their maximum is not.
    """

    kept: int = 0
    """What it keeps for backward."""
    forward: tuple[int, ...] = (0,)
    """What its forward holds beside that, at each moment that can be the widest."""
    backward: tuple[int, ...] = (0,)
    """Gradients passed on, and those that wait, at each moment of its backward that can be the widest; what is kept is
    there too."""
    modules: tuple[Module, ...] = ()
    """Its modules in the order of forward."""
    block: int = 0
    """The number of the wrapped block that holds it, from 1 on; outside blocks 0 before them and -1 behind them."""

    @property
    def elements(self) -> int:
        """Elements of all its tensors."""
        return sum(module.elements for module in self.modules)

    def cast_bytes(self, *, linear: bool) -> int:
        """Bytes of the 16-bit copies that autocast makes of its weights; `linear`: those of linear layers too."""
        return 2 * sum(m.elements for m in self.modules if m.macs and (linear or len(m.tensors[0]) == 4))

    @property
    def tensors(self) -> list[int]:
        """Elements of each tensor, in the order of forward."""
        return [math.prod(shape) for module in self.modules for shape in reversed(module.gradients)]


class Around(NamedTuple):
    """Bytes beside `Holding.steady`, activations and what backward passes on."""

    forward: Sequence[Parts]
    """What is there in each part's forward."""
    backward: Sequence[Parts]
    """What is there in each part's backward, where it is widest: gradients included."""
    between: Sequence[tuple[int, float, Parts]]
    """Other moments of backward: the part, the share of it whose activations are gone, and what is there."""
    exchange: Parts
    """What is there when backward is over."""


def around(trial: Trial, holding: Holding, parts: Sequence[Part], turn: InTurn | None = None) -> Around:
    """What the trial's wrapper holds, in a pipeline's turn or outside one; see the functions below."""
    if trial.train.wrapper == "fsdp2":
        return _fsdp2(trial, holding, parts) if turn is None else _fsdp2_in_turn(trial, holding, parts, turn)
    gathered = _zero_3(trial, parts) if trial.train.wrapper == "deepspeed" and trial.train.zero_stage == 3 else None
    ends = list(accumulate(part.elements for part in parts))
    full = list(_full_buckets(parts, holding.bucket)) if holding.bucket else []
    first_full = full[0][0] if full else -1
    of_forward, of_backward = gathered or ([holding.forward] * len(parts), [holding.backward] * len(parts))

    def in_backward(number: int, made: int, new: int, *, flushed: int = 0, after: bool) -> Parts:
        return added(of_backward[number], holding.in_backward(made, new, flushed=flushed, after=after))

    return Around(
        forward=[added(holding.held, holding.held_buckets, own) for own in of_forward],
        # The loss's own backward is over before anything of the wrapper begins.
        backward=[
            in_backward(n, ends[-1] - ends[n], max(part.tensors), after=n < first_full)
            if part.modules
            else added(holding.held, holding.held_buckets, of_forward[n])
            for n, part in enumerate(parts)
        ],
        between=[
            (n, gone, added(in_backward(n, 0, new, flushed=flushed, after=index > 0), _passed_on(parts[n])))
            for index, (n, gone, flushed, new) in enumerate(full)
        ],
        exchange=holding.exchange,
    )


def _passed_on(part: Part) -> Parts:
    """What backward passes on in a block while a bucket is exchanged because the block's gradient does not fit into it.

    It is as much as where its MLP is widest, for its largest weights are there.
    """
    return {"passed on in backward": part.backward[0] if part.block > 0 else 0}


def _full_buckets(parts: Sequence[Part], bucket: int) -> Iterator[tuple[int, float, int, int]]:
    """Every full bucket of a backward, in order.

    Yields:
        The number of the part whose gradient does not fit, the share of its elements whose gradients are made already,
        the elements in the bucket, and the elements of the gradient that does not fit.
    """
    filled = 0
    for number in reversed(range(len(parts))):
        done = 0
        for elements in reversed(parts[number].tensors):
            if filled and filled + elements > bucket:
                yield number, done / parts[number].elements, filled, elements
                filled = 0
            filled += elements
            done += elements


def _zero_3(trial: Trial, parts: Sequence[Part]) -> tuple[list[Parts], list[Parts]]:
    """Weights gathered in each part's forward and backward: small ones stay, all others are as in `zero._stage_3`."""
    train, settings = trial.train, zero_settings(trial.train)
    each = train.weight_bytes if trial.world.size > 1 else 0
    large = [sum(n for n in part.tensors if n > settings.persistence_threshold) for part in parts]
    upto, rest = list(accumulate(large)), sum(large)
    lasting = sum(part.elements for part in parts) - rest
    largest = max((n for part in parts for n in part.tensors), default=0)
    ahead = min(settings.prefetch_bucket, settings.max_live) + largest
    forward: list[Parts] = []
    backward: list[Parts] = []
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
        return forward, backward
    for number in range(len(large)):
        left = min(rest - upto[number], ahead)
        copied = left * each if on_cpu and left < rest else 0
        kept = lasting + upto[number]
        forward.append({"gathered weights": (kept + 2 * left) * each, "gloo's copies": copied})
        backward.append({"gathered weights": kept * each})
    return forward, backward


def _fsdp2(trial: Trial, holding: Holding, parts: Sequence[Part]) -> Around:
    """What `holding.fsdp2` describes, block by block.

    The root's weights and gradients stay whole from forward to the end of backward; its weights are let go of before
    its gradients are scattered (`post_backward`). The root's buffer is there while the root begins. While the parts
    behind the blocks run, the last block's buffer is there: in forward until the next gather, in backward because the
    last block is fetched ahead. In forward gloo has let go of its copy by the second part of a block: in none of 24
    steps was it still there at the end of a stage of two.
    """
    train, ranks = trial.train, trial.layout.replicas
    each, sent = train.weight_bytes, train.communicated_bytes
    kept = 0.0 if train.grad_accum > 1 else (4 if train.master_weights else each) / ranks
    buffers, gloo = ranks > 1, ranks > 1 and train.device == "cpu"
    stays = train.reshard_after_forward is False
    numbers = range(1, max((part.block for part in parts), default=0) + 1)
    sizes = [0, *(sum(part.elements for part in parts if part.block == number) for number in numbers), 0]
    last = len(sizes) - 2
    root = sum(part.elements for part in parts if part.block < 1)
    behind = sum(part.elements for part in parts if part.block < 0)

    def gathered(block: int, arriving: int, late: int = 0) -> Parts:
        """`block`: the one whose weights are there; `arriving`, `late`: elements in a buffer, and in gloo's copies."""
        there = sum(sizes[1 : block + 1]) if stays else sizes[block]
        return {"gathered weights": (root + there + buffers * arriving) * each, "gloo's copies": gloo * late * each}

    def scattered(block: int, copies: int = 1) -> Parts:
        return {"buckets": sizes[block] * sent, "gloo's copies": gloo * (copies - 1) * sizes[block] * sent}

    def made(block: int, done: int, new: int) -> Parts:
        earlier = sum(sizes[block + 1 :]) if block >= 0 else 0
        whole = (behind if block >= 0 else 0) + done + new
        return {"gradients": whole * each + int(earlier * kept)}

    forward: list[Parts] = []
    backward: list[Parts] = []
    between: list[tuple[int, float, Parts]] = []
    for number, part in enumerate(parts):
        block = part.block
        if block > 0:
            forward.append(gathered(block, sizes[block], sizes[block] if parts[number - 1].block != block else 0))
        elif part.modules:
            forward.append(gathered(last if stays and block else 0, sizes[last] if block else root))
        else:  # the loss: the model's forward is over, and its backward has not begun
            forward.append(gathered(last if stays else 0, 0))
            backward.append(forward[-1])
            continue
        index = block if block >= 0 else last + 1
        done = sum(other.elements for other in parts[number + 1 :] if other.block == block)
        fetched = 0 if stays or index < 1 else sizes[index - 1]
        whole = index if stays or block > 0 else 0
        now = added(gathered(min(whole, last), fetched), made(block, done, max(part.tensors)))
        backward.append(added(now, scattered(index + 1)) if block >= 0 else now)
        if block > 0 and (number + 1 == len(parts) or parts[number + 1].block != block):
            own = sizes[block] if block == last else 0  # the last block's own copy is late: it was fetched ahead too
            late = added(gathered(block, fetched, fetched + own), made(block, 0, 0), scattered(block + 1, 2))
            cast = shard(sizes[block + 1], ranks) * each if buffers and train.master_weights else 0
            between.append((number, 0.0, added(late, {"temporaries": cast})))
        if block > 0 and parts[number - 1].block != block:
            copied = added(gathered(0, fetched), made(block, sizes[block], 0), scattered(block))
            between.append((number - 1, 0.0, copied))
    exchange = {"gradients": holding.exchange["gradients"] + root * each, "buckets": root * sent}
    return Around(
        [added(holding.held, own) for own in forward],
        [added(holding.held, own) for own in backward],
        [(number, gone, added(holding.held, own)) for number, gone, own in between],
        exchange,
    )


def _fsdp2_in_turn(trial: Trial, holding: Holding, parts: Sequence[Part], turn: InTurn) -> Around:
    """What `holding.fsdp2_in_stages` describes, for a stage whose blocks are not alike; each is a part by itself.

    Gradients stay whole, and so do weights that backward has gathered; a forward frees them block by block.
    """
    ranks, each, summed = trial.layout.replicas, trial.train.weight_bytes, trial.train.communicated_bytes
    buffers, gloo = ranks > 1, ranks > 1 and trial.train.device == "cpu"
    stays = trial.train.reshard_after_forward is False
    sizes = [part.elements if part.block > 0 else 0 for part in parts]
    root = sum(part.elements for part in parts) - sum(sizes)
    last = max((number for number, size in enumerate(sizes) if size), default=0)
    forward: list[Parts] = []
    backward: list[Parts] = []
    between: list[tuple[int, float, Parts]] = []

    def gathered(there: int, arriving: int, late: int = 0) -> Parts:
        arrived = {"gathered weights": (root + there + buffers * arriving) * each}
        return added(holding.held, arrived, {"gloo's copies": gloo * late * each})

    for number, part in enumerate(parts):
        own, earlier, from_here = sizes[number], sum(sizes[:number]), sum(sizes[number:])
        if turn.whole:
            forward.append(gathered(from_here, 0))
        elif own:
            forward.append(gathered(own + stays * earlier, own, own))
        else:
            forward.append(gathered(stays * earlier, sizes[last] if number else root))
        fetched = 0 if turn.whole or stays or number == 0 else sizes[number - 1]
        there = sum(sizes) if turn.whole or stays else from_here
        made = 0 if holding.held else sum(part.elements for part in parts[number + 1 :])
        new = {"gradients": made * summed + max(part.tensors, default=0) * each}
        backward.append(added(gathered(there, fetched), new))
        if own and not (turn.whole or stays):
            late = fetched + (own if number == last or not fetched else 0)
            between.append((number, 0.0, added(gathered(there, fetched or own, late), {"gradients": made * summed})))
    return Around(forward, backward, between, holding.exchange)
