"""Bytes that FSDP2 holds around each part of a model; a block may have several parts.

A `Part` is a piece of the model, in the order of forward; `Parts` are bytes by their purpose. The root is all that lies
in no block. Its parts lie before the blocks (`Part.block` 0) or behind them (-1). In a pipeline, a turn is the time in
which one micro-batch goes through one stage (`InTurn`).

It follows torch 2.13 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py). FSDP2 gathers
a block's weights before the block runs. They arrive in a flat buffer, which stays until the next gather, and are copied
out of it; one rank copies without a buffer. In backward the block before is gathered meanwhile. A block's gradients are
copied into a flat buffer and scattered; it stays until those of the next block are. A block's fp32 shards are cast
before they are gathered.

gloo, which exchanges between CPUs, works on a copy of each of these buffers (ProcessGroupGloo.cpp). Its thread lets go
of a finished exchange when it is scheduled next: in about one step of eight only after the next gather has begun. A
whole run meets such a step, so the copy of what was scattered counts beside the copy of what is gathered.

With replicas (`Sharding.reduced_bytes`) the shards of a block's gradients are all-reduced in the buffer that they were
scattered into. Where gradients are cast or accumulated, FSDP2 holds these buffers until backward is over
(`_all_reduce_state`). With shards on the host (`CPUOffloadPolicy`) a rank copies its shard of a block to the device to
gather it (`all_gather_inputs` in _fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.engines.fsdp2.sharding import Sharding
from vitscale.engines.parts import Around, AtMoment, InTurn, Part
from vitscale.engines.states import Parts, RankStates, added, shard
from vitscale.trial.trial import Trial


def around_parts(trial: Trial, rank_states: RankStates, parts: Sequence[Part], turn: InTurn | None) -> Around:
    """Return what FSDP2 holds around each part, in a pipeline's turn or outside one."""
    if turn is None:
        return _BlockByBlock(trial, parts).around(rank_states)
    return _StageInTurn(trial, rank_states, parts, turn).around()


def _gathered_weights(sharding: Sharding, gathered: int, *, buffered: int, copied_by_gloo: int = 0) -> Parts:
    """Return the bytes of weights that are gathered, of the buffer that weights arrive in, and of gloo's copies.

    Args:
        sharding: how the ranks shard; it decides whether they have a buffer, and whether gloo exchanges.
        gathered: elements of weights that are gathered.
        buffered: elements in the buffer, if the ranks have one.
        copied_by_gloo: elements of which gloo still holds a copy, if it exchanges.
    """
    buffer_elements = buffered if sharding.has_buffers else 0
    gloo_elements = copied_by_gloo if sharding.has_gloo else 0
    return {
        "gathered weights": (gathered + buffer_elements) * sharding.weight_bytes,
        "gloo's copies": gloo_elements * sharding.weight_bytes,
    }


class _BlockByBlock:
    """The weights and gradients of a model, of which each rank has a shard.

    The root's weights and gradients stay whole from forward to the end of backward; its weights are let go of before
    its gradients are scattered (`post_backward`). The root's buffer is there while the root begins. While the parts
    behind the blocks run, the last block's buffer is there: in forward until the next gather, in backward because the
    last block is fetched ahead. In forward gloo has let go of its copy by the second part of a block: in none of 24
    steps was it still there at the end of a stage of two.
    """

    def __init__(self, trial: Trial, parts: Sequence[Part]) -> None:
        self._sharding = Sharding.of(trial)
        self._parts = parts
        self._last_block = max((part.block for part in parts), default=0)
        self._block_elements = [0] * (self._last_block + 2)
        """Elements by the number of the block; there are none at 0, and at the number that follows the last."""
        self._elements_before = 0
        self._elements_behind = 0
        for part in parts:
            if part.block > 0:
                self._block_elements[part.block] += part.elements
            elif part.block == 0:
                self._elements_before += part.elements
            else:
                self._elements_behind += part.elements
        self._root_elements = self._elements_before + self._elements_behind
        self._block_gathered_behind = self._last_block if self._sharding.stays_gathered else 0
        """The block that `_weights` takes for the parts behind the blocks: the last one, or none (0)."""
        self._accumulates = trial.train.grad_accum > 1

    def around(self, rank_states: RankStates) -> Around:
        """Return the bytes at each part and between parts.

        Args:
            rank_states: gives the gradients of earlier micro-steps (`held`), and those after backward (`exchange`).
        """
        earlier_gradients = rank_states.held
        forward: list[Parts] = []
        backward: list[Parts] = []
        between: list[AtMoment] = []
        for number, part in enumerate(self._parts):
            forward.append(added(earlier_gradients, self._in_forward(number)))
            is_loss = not part.modules and number == len(self._parts) - 1
            if is_loss:  # the model's forward is over, and its backward has not begun
                backward.append(forward[-1])
                continue
            backward.append(added(earlier_gradients, self._in_backward(number)))
            # Backward goes through a block from its last part to its first one.
            if part.block > 0 and self._is_last_of_block(number):
                at_first_gradient = self._at_first_gradient(part.block)
                between.append(AtMoment(number, 0.0, added(earlier_gradients, at_first_gradient)))
            if part.block > 0 and self._is_first_of_block(number):
                at_scatter = self._at_scatter(part.block)
                between.append(AtMoment(number - 1, 0.0, added(earlier_gradients, at_scatter)))
        root_gradient_bytes = self._root_elements * self._sharding.weight_bytes
        exchange = {
            "gradients": rank_states.exchange["gradients"] + root_gradient_bytes,
            "buckets": self._root_elements * self._sharding.sent_bytes + rank_states.exchange["buckets"],
        }
        return Around(forward, backward, between, exchange)

    def _is_first_of_block(self, number: int) -> bool:
        """Whether a part is the first of its block in forward; parts are numbered in the order of forward."""
        return self._parts[number - 1].block != self._parts[number].block

    def _is_last_of_block(self, number: int) -> bool:
        """Whether a part is the last of its block in forward."""
        is_last_of_all = number + 1 == len(self._parts)
        return is_last_of_all or self._parts[number + 1].block != self._parts[number].block

    def _in_forward(self, number: int) -> Parts:
        """Return what is gathered in a part's forward."""
        part = self._parts[number]
        if part.block > 0:
            block_elements = self._block_elements[part.block]
            copied_by_gloo = block_elements if self._is_first_of_block(number) else 0
            return self._weights(part.block, buffered=block_elements, copied_by_gloo=copied_by_gloo)
        if not part.modules:  # the loss
            return self._weights(self._block_gathered_behind, buffered=0)
        if part.block == 0:
            return self._weights(0, buffered=self._root_elements)
        return self._weights(self._block_gathered_behind, buffered=self._block_elements[self._last_block])

    def _in_backward(self, number: int) -> Parts:
        """Return what is there in a part's backward, where the gradient of its largest tensor is just made."""
        part = self._parts[number]
        later_in_block = (other for other in self._parts[number + 1 :] if other.block == part.block)
        finished = sum(other.elements for other in later_in_block)
        gradients = self._gradients(part.block, finished=finished, new=max(part.tensors, default=0))
        if part.block < 0:
            fetched = self._fetched_ahead(self._last_block + 1)
            return added(self._weights(self._block_gathered_behind, buffered=fetched), gradients)
        weights = self._weights(part.block, buffered=self._fetched_ahead(part.block))
        return added(weights, gradients, self._scattered(part.block + 1))

    def _at_first_gradient(self, block: int) -> Parts:
        """Return what is there when a block's backward begins, while the block before it is on its way."""
        fetched = self._fetched_ahead(block)
        following = self._block_elements[block + 1]
        copied_bytes = shard(following, self._sharding.ranks) * self._sharding.copied_shard_bytes
        return added(
            self._weights(block, buffered=fetched, copied_by_gloo=fetched + self._late_copy(block)),
            self._gradients(block, finished=0, new=0),
            self._scattered(block + 1, copied_by_gloo=following),
            {"temporaries": copied_bytes},
        )

    def _at_scatter(self, block: int) -> Parts:
        """Return what is there when a block's backward is over, and its gradients have been copied to be scattered."""
        return added(
            self._weights(0, buffered=self._fetched_ahead(block)),
            self._gradients(block, finished=self._block_elements[block], new=0),
            self._scattered(block),
        )

    def _late_copy(self, block: int) -> int:
        """Return the elements of a block's weights of which gloo may still hold a copy when its backward begins.

        The last block is gathered and at once the one before it, so that both copies may be there. It counts among
        replicas alone: elsewhere the copy of gradients that are scattered later (`Sharding.keeps_scattered`) is as
        much.
        """
        is_counted_later = self._sharding.keeps_scattered or self._sharding.stays_gathered
        return 0 if is_counted_later or block != self._last_block else self._block_elements[block]

    def _fetched_ahead(self, block: int) -> int:
        """Return the elements that are on their way while a block runs backward: those of the block before it."""
        return 0 if self._sharding.stays_gathered or block == 0 else self._block_elements[block - 1]

    def _weights(self, block: int, *, buffered: int, copied_by_gloo: int = 0) -> Parts:
        """Return the gathered weights while a block runs, with buffers and copies (`_gathered_weights`).

        They are those of the root and of the block. Where blocks stay gathered, those of all blocks before it are
        there too.

        Args:
            block: the number of the block; 0: no block is gathered.
            buffered: elements in the buffer.
            copied_by_gloo: elements in gloo's copies.
        """
        if self._sharding.stays_gathered:
            block_elements = sum(self._block_elements[1 : block + 1])
        else:
            block_elements = self._block_elements[block]
        gathered = self._root_elements + block_elements
        return _gathered_weights(self._sharding, gathered, buffered=buffered, copied_by_gloo=copied_by_gloo)

    def _scattered(self, block: int, *, copied_by_gloo: int = 0) -> Parts:
        """Return the buffer out of which a block's gradients are scattered, and gloo's copies of gradients.

        Args:
            block: the number of the block.
            copied_by_gloo: elements of gradients of which gloo still holds a copy, if it exchanges.
        """
        sharding = self._sharding
        gloo_elements = copied_by_gloo if sharding.keeps_scattered else 0
        return {
            "buckets": self._block_elements[block] * sharding.sent_bytes,
            "gloo's copies": gloo_elements * sharding.sent_bytes,
        }

    def _gradients(self, block: int, *, finished: int, new: int) -> Parts:
        """Return all gradients that are there while a block, or parts of the root, run backward.

        Those of the root are whole. Those of the blocks that follow in forward have been scattered.

        Args:
            block: the number of the block; of parts of the root 0 or -1 (`Part.block`).
            finished: elements of the gradients that earlier parts of this backward have made, in the same block or,
                for parts behind the blocks, behind the blocks.
            new: elements of the gradient that has just been made.
        """
        sharding = self._sharding
        if block < 0:
            return {"gradients": (finished + new) * sharding.weight_bytes}
        whole_elements = self._elements_behind + finished + new
        scattered_elements = sum(self._block_elements[block + 1 :])
        scattered_element_bytes = sharding.scattered_bytes(accumulates=self._accumulates)
        scattered_bytes = int(scattered_elements * scattered_element_bytes)
        return {"gradients": whole_elements * sharding.weight_bytes + scattered_bytes}


class _StageInTurn:
    """The weights and gradients of a stage of a pipeline (`fsdp2.states.stage_states`).

    Each block is a part by itself here. Gradients stay whole, and so do weights that backward has gathered; a forward
    frees them block by block.
    """

    def __init__(self, trial: Trial, rank_states: RankStates, parts: Sequence[Part], turn: InTurn) -> None:
        self._sharding = Sharding.of(trial)
        self._rank_states = rank_states
        self._parts = parts
        self._is_gathered_before = turn.whole
        """Whether all weights are gathered when the turn begins."""
        self._stays_gathered = turn.whole or self._sharding.stays_gathered
        """Whether no block is gathered in backward."""
        self._block_elements = [part.elements if part.block > 0 else 0 for part in parts]
        """Elements by the number of the part; 0 for parts of the root."""
        self._root_elements = sum(part.elements for part in parts) - sum(self._block_elements)
        self._last_block = max((number for number, elements in enumerate(self._block_elements) if elements), default=0)
        """Number of the part that is the last block; 0: there is none."""

    def around(self) -> Around:
        """Return what is there at each part of the stage and between parts."""
        numbers = range(len(self._parts))
        late_gathers = [
            AtMoment(number, 0.0, self._at_late_gather(number))
            for number in numbers
            if self._is_gathered_in_backward(number)
        ]
        return Around(
            forward=[self._in_forward(number) for number in numbers],
            backward=[self._in_backward(number) for number in numbers],
            between=late_gathers,
            exchange=self._rank_states.exchange,
        )

    def _in_forward(self, number: int) -> Parts:
        """Return what is gathered in a part's forward."""
        block_elements = self._block_elements[number]
        if self._is_gathered_before:
            return self._weights(sum(self._block_elements[number:]), buffered=0)
        earlier_blocks = sum(self._block_elements[:number]) if self._sharding.stays_gathered else 0
        if block_elements:
            gathered = earlier_blocks + block_elements
            return self._weights(gathered, buffered=block_elements, copied_by_gloo=block_elements)
        # A part of the root. The buffer is that of the last gather before it: of the root, or of the last block.
        buffered = self._root_elements if number == 0 else self._block_elements[self._last_block]
        return self._weights(earlier_blocks, buffered=buffered)

    def _in_backward(self, number: int) -> Parts:
        """Return what is there in a part's backward, where the gradient of its largest tensor is just made."""
        weights = self._weights(self._gathered_blocks(number), buffered=self._fetched_ahead(number))
        return added(weights, self._gradients(number, has_new_tensor=True))

    def _at_late_gather(self, number: int) -> Parts:
        """Return what is there when a block's backward begins, while the block before it is on its way."""
        block_elements = self._block_elements[number]
        fetched_elements = self._fetched_ahead(number)
        weights = self._weights(
            self._gathered_blocks(number),
            buffered=fetched_elements or block_elements,
            copied_by_gloo=fetched_elements,
        )
        return added(weights, self._gradients(number, has_new_tensor=False))

    def _is_gathered_in_backward(self, number: int) -> bool:
        """Return whether a part is a block that is gathered for its backward."""
        is_block = self._block_elements[number] > 0
        return is_block and not self._stays_gathered

    def _gathered_blocks(self, number: int) -> int:
        """Return the elements of the blocks that are gathered in a part's backward: its own and all that follow."""
        if self._stays_gathered:
            return sum(self._block_elements)
        return sum(self._block_elements[number:])

    def _fetched_ahead(self, number: int) -> int:
        """Return the elements that are on their way while a part runs backward: those of the part before it."""
        return 0 if self._stays_gathered or number == 0 else self._block_elements[number - 1]

    def _gradients(self, number: int, *, has_new_tensor: bool) -> Parts:
        """Return the gradients in a part's backward.

        Args:
            number: the number of the part.
            has_new_tensor: whether the gradient of its largest tensor has just been made.
        """
        # Gradients that are added to those of earlier micro-batches are among the latter (`held`) already.
        accumulates = bool(self._rank_states.held)
        finished = 0 if accumulates else sum(part.elements for part in self._parts[number + 1 :])
        new = max(self._parts[number].tensors, default=0) if has_new_tensor else 0
        return {"gradients": finished * self._sharding.sent_bytes + new * self._sharding.weight_bytes}

    def _weights(self, block_elements: int, *, buffered: int, copied_by_gloo: int = 0) -> Parts:
        """Return the weights of the root and of blocks, with buffers and copies, and gradients of other micro-batches.

        Args:
            block_elements: elements of the blocks that are gathered.
            buffered: elements in the buffer, as in `_gathered_weights`.
            copied_by_gloo: elements in gloo's copies.
        """
        gathered = self._root_elements + block_elements
        weights = _gathered_weights(self._sharding, gathered, buffered=buffered, copied_by_gloo=copied_by_gloo)
        return added(self._rank_states.held, weights)
