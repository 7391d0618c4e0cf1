"""Bytes that FSDP2 holds around each part of a model whose blocks are unlike; a block may have several parts.

The root is all that lies in no block. Its parts lie before the blocks (`Part.block` 0) or behind them (-1).
"""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.engines.fsdp2.sharding import Sharding
from vitscale.engines.parts import Around, InTurn, Part
from vitscale.engines.states import Parts, RankStates, added, shard
from vitscale.trial.trial import Trial


def around_parts(trial: Trial, rank_states: RankStates, parts: Sequence[Part], turn: InTurn | None) -> Around:
    """Return what FSDP2 holds around each part, in a pipeline's turn or outside one."""
    if turn is None:
        return _BlockByBlock(trial, parts).around(rank_states)
    return _StageInTurn(trial, rank_states, parts, turn).around()


class _BlockByBlock:
    """The weights and gradients of `states`, for blocks that are unlike.

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
        self._accumulates = trial.train.grad_accum > 1
        self._casts_shards = self._sharding.has_buffers and trial.train.master_weights

    def around(self, rank_states: RankStates) -> Around:
        """Return what is there at each part and between parts; `rank_states`: gradients of earlier micro-steps."""
        held = rank_states.held
        forward: list[Parts] = []
        backward: list[Parts] = []
        between: list[tuple[int, float, Parts]] = []
        for number, part in enumerate(self._parts):
            forward.append(added(held, self._in_forward(number)))
            if not part.modules:  # the loss: the model's forward is over, and its backward has not begun
                backward.append(forward[-1])
                continue
            backward.append(added(held, self._in_backward(number)))
            if part.block > 0 and self._is_end_of_block(number):
                between.append((number, 0.0, added(held, self._at_first_gradient(part.block))))
            if part.block > 0 and self._is_begin_of_block(number):
                between.append((number - 1, 0.0, added(held, self._at_scatter(part.block))))
        root_bytes = self._root_elements * self._sharding.weight_bytes
        exchange = {
            "gradients": rank_states.exchange["gradients"] + root_bytes,
            "buckets": self._root_elements * self._sharding.sent_bytes,
        }
        return Around(forward, backward, between, exchange)

    def _is_begin_of_block(self, number: int) -> bool:
        return self._parts[number - 1].block != self._parts[number].block

    def _is_end_of_block(self, number: int) -> bool:
        is_last = number + 1 == len(self._parts)
        return is_last or self._parts[number + 1].block != self._parts[number].block

    def _in_forward(self, number: int) -> Parts:
        """Return what is gathered in a part's forward."""
        part = self._parts[number]
        if part.block > 0:
            block_elements = self._block_elements[part.block]
            late = block_elements if self._is_begin_of_block(number) else 0
            return self._gathered(part.block, arriving=block_elements, late=late)
        is_before_blocks = bool(part.modules) and part.block == 0
        if is_before_blocks:
            return self._gathered(0, arriving=self._root_elements)
        arriving = self._block_elements[self._last_block] if part.modules else 0
        return self._gathered(self._last_block if self._sharding.stays_gathered else 0, arriving=arriving)

    def _in_backward(self, number: int) -> Parts:
        """Return what is there in a part's backward, where the gradient of its largest tensor is just made."""
        part = self._parts[number]
        same_block = (other for other in self._parts[number + 1 :] if other.block == part.block)
        made = sum(other.elements for other in same_block)
        gradients = self._gradients(part.block, made=made, new=max(part.tensors))
        if part.block < 0:
            gathered_block = self._last_block if self._sharding.stays_gathered else 0
            fetched = self._fetched_ahead(self._last_block + 1)
            return added(self._gathered(gathered_block, arriving=fetched), gradients)
        gathered = self._gathered(part.block, arriving=self._fetched_ahead(part.block))
        return added(gathered, gradients, self._scattered(part.block + 1))

    def _at_first_gradient(self, block: int) -> Parts:
        """Return what is there when a block's backward begins, where gloo lets go of its copies late."""
        fetched = self._fetched_ahead(block)
        # The last block's own copy is late: it was fetched ahead too.
        own_copy = self._block_elements[block] if block == self._last_block else 0
        following = self._block_elements[block + 1]
        cast_elements = shard(following, self._sharding.ranks) if self._casts_shards else 0
        return added(
            self._gathered(block, arriving=fetched, late=fetched + own_copy),
            self._gradients(block, made=0, new=0),
            self._scattered(block + 1, late=following),
            {"temporaries": cast_elements * self._sharding.weight_bytes},
        )

    def _at_scatter(self, block: int) -> Parts:
        """Return what is there when a block's backward is over, and its gradients have been copied to be scattered."""
        return added(
            self._gathered(0, arriving=self._fetched_ahead(block)),
            self._gradients(block, made=self._block_elements[block], new=0),
            self._scattered(block),
        )

    def _fetched_ahead(self, block: int) -> int:
        """Return the elements that are on their way while a block runs backward: those of the block before it."""
        return 0 if self._sharding.stays_gathered or block == 0 else self._block_elements[block - 1]

    def _gathered(self, block: int, *, arriving: int, late: int = 0) -> Parts:
        """Return the weights of the root and of a block, and where blocks stay gathered of all blocks before it.

        Args:
            block: the number of the block; 0: none.
            arriving: elements in the buffer that weights arrive in.
            late: elements in copies of gloo.
        """
        sharding = self._sharding
        blocks = sum(self._block_elements[1 : block + 1]) if sharding.stays_gathered else self._block_elements[block]
        buffered = arriving if sharding.has_buffers else 0
        copied = late if sharding.has_gloo else 0
        return {
            "gathered weights": (self._root_elements + blocks + buffered) * sharding.weight_bytes,
            "gloo's copies": copied * sharding.weight_bytes,
        }

    def _scattered(self, block: int, *, late: int = 0) -> Parts:
        """Return the buffer out of which a block's gradients are scattered; `late`: elements in copies of gloo."""
        sharding = self._sharding
        copied = late if sharding.has_gloo else 0
        return {
            "buckets": self._block_elements[block] * sharding.sent_bytes,
            "gloo's copies": copied * sharding.sent_bytes,
        }

    def _gradients(self, block: int, *, made: int, new: int) -> Parts:
        """Return the gradients that are there in a block's backward, or in that of parts outside blocks.

        Args:
            block: the number of the block, 0 or -1.
            made: elements of the block's gradients that are made.
            new: elements of the gradient that has just been made.
        """
        sharding = self._sharding
        if block < 0:
            return {"gradients": (made + new) * sharding.weight_bytes}
        whole = self._elements_behind + made + new
        scattered = sum(self._block_elements[block + 1 :])
        scattered_bytes = 0.0 if self._accumulates else sharding.shard_bytes / sharding.ranks
        return {"gradients": whole * sharding.weight_bytes + int(scattered * scattered_bytes)}


class _StageInTurn:
    """The weights and gradients of `stage_states`, for a stage whose blocks are unlike; each is a part by itself.

    Gradients stay whole, and so do weights that backward has gathered; a forward frees them block by block.
    """

    def __init__(self, trial: Trial, rank_states: RankStates, parts: Sequence[Part], turn: InTurn) -> None:
        self._sharding = Sharding.of(trial)
        self._rank_states = rank_states
        self._parts = parts
        self._is_gathered_before = turn.whole
        self._block_elements = [part.elements if part.block > 0 else 0 for part in parts]
        """Elements by the number of the part; 0 for parts of the root."""
        self._root_elements = sum(part.elements for part in parts) - sum(self._block_elements)
        self._last_block = max((number for number, elements in enumerate(self._block_elements) if elements), default=0)

    def around(self) -> Around:
        """Return what is there at each part of the stage and between parts."""
        stays_gathered = self._is_gathered_before or self._sharding.stays_gathered
        forward: list[Parts] = []
        backward: list[Parts] = []
        between: list[tuple[int, float, Parts]] = []
        for number, block_elements in enumerate(self._block_elements):
            forward.append(self._in_forward(number))
            fetched = 0 if stays_gathered or number == 0 else self._block_elements[number - 1]
            gathered = sum(self._block_elements if stays_gathered else self._block_elements[number:])
            backward.append(added(self._gathered(gathered, arriving=fetched), self._gradients(number, new_tensor=True)))
            if block_elements and not stays_gathered:
                own_copy = block_elements if number == self._last_block or not fetched else 0
                late = self._gathered(gathered, arriving=fetched or block_elements, late=fetched + own_copy)
                between.append((number, 0.0, added(late, self._gradients(number, new_tensor=False))))
        return Around(forward, backward, between, self._rank_states.exchange)

    def _in_forward(self, number: int) -> Parts:
        """Return what is gathered in a part's forward."""
        block_elements = self._block_elements[number]
        earlier = sum(self._block_elements[:number]) if self._sharding.stays_gathered else 0
        if self._is_gathered_before:
            return self._gathered(sum(self._block_elements[number:]), arriving=0)
        if block_elements:
            return self._gathered(block_elements + earlier, arriving=block_elements, late=block_elements)
        arriving = self._root_elements if number == 0 else self._block_elements[self._last_block]
        return self._gathered(earlier, arriving=arriving)

    def _gradients(self, number: int, *, new_tensor: bool) -> Parts:
        """Return the gradients in a part's backward; `new_tensor`: with its largest one, which has just been made."""
        made = 0 if self._rank_states.held else sum(part.elements for part in self._parts[number + 1 :])
        new = max(self._parts[number].tensors, default=0) if new_tensor else 0
        return {"gradients": made * self._sharding.sent_bytes + new * self._sharding.weight_bytes}

    def _gathered(self, blocks: int, *, arriving: int, late: int = 0) -> Parts:
        """Return the weights of the root and of blocks, and gradients of earlier micro-batches; all in elements.

        Args:
            blocks: elements of blocks.
            arriving: elements in the buffer that weights arrive in.
            late: elements in copies of gloo.
        """
        sharding = self._sharding
        buffered = arriving if sharding.has_buffers else 0
        copied = late if sharding.has_gloo else 0
        return added(
            self._rank_states.held,
            {"gathered weights": (self._root_elements + blocks + buffered) * sharding.weight_bytes},
            {"gloo's copies": copied * sharding.weight_bytes},
        )
