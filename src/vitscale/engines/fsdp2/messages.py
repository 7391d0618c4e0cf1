"""The collectives of an optimizer step under FSDP2.

With replicas (HSDP) weights are gathered and gradients scattered in the sharding group, and the shards that come of it
are all-reduced in the replication group (`trial.parallel`). Without, the sharding group is all data-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import Tensor, tensors, up_to_multiple
from vitscale.engines.messages import Message, MicroSteps, RankGroup, StepPhase
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial

_Block = Sequence[Tensor]
"""Tensors that are gathered and scattered together: those of a wrapped block, or of the root, all that is in none."""


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Return the collectives of an optimizer step: all-gathers of weights, and reduce-scatters of gradients.

    Where there are replicas, each reduce-scatter is followed by an all-reduce of its shards.

    Before a block of the model is computed its weights are gathered from all ranks, in forward and again in backward.
    After its backward its gradients are scattered to the ranks. The root, which is all that is in no block, is gathered
    before forward, and its gradients come last. `_MessageFactory` says when each call may start, and how often it is
    made.
    """
    model_tensors = tensors(shapes)
    blocks = _blocks_in_order(model_tensors)
    root = [tensor for tensor in model_tensors if tensor.block is None]
    factory = _MessageFactory(trial)
    root_gathers = [factory.gather_root(root)] if root else []
    forward_gathers = factory.forward_gathers(blocks)
    backward_messages = factory.backward_messages(blocks)
    root_scatters = factory.reductions(root, ready=1.0) if root else ()
    return (*root_gathers, *forward_gathers, *backward_messages, *root_scatters)


def _blocks_in_order(model_tensors: Sequence[Tensor]) -> list[_Block]:
    """Return the tensors of each wrapped block, in the order of forward."""
    runs_of_tensors = groupby(model_tensors, key=lambda tensor: tensor.block)
    return [list(tensors_of_block) for block, tensors_of_block in runs_of_tensors if block is not None]


class _MessageFactory:
    """Makes the messages of a trial's ranks.

    When calls start: a block is gathered while the one before is computed, and its gradients are scattered while the
    next ones are made (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). Computing waits for the first gathers
    of forward and of backward, and for the root's. On a CPU, which has no streams, it waits for every call.

    How often: in every micro-step. In stages of a pipeline, however, a block stays gathered from a backward to the next
    forward. A step then gathers it in each forward and once more. It gathers the root and scatters gradients only once.

    Among replicas: the all-reduce of a block's shards starts when they have been scattered, on a stream of its own
    (`foreach_reduce` in _fsdp_collectives.py), so that later gathers and scatters do not wait for it.

    How many bytes: tensors are cut along their first dimension, and padded to a multiple of the ranks. So a class token
    or positions, whose first dimension is 1, grow with every rank: FSDP2 sends them like that (docs/traffic.md), which
    is much at a thousand ranks.
    """

    def __init__(self, trial: Trial) -> None:
        self._ranks = trial.layout.sharding_ranks
        self._replicas = trial.parallel.replicate
        self._group: RankGroup = "sharding" if self._replicas > 1 else "replicas"
        self._weight_bytes = weight_bytes(trial.train)
        self._gradient_bytes = communicated_bytes(trial.train)
        self._has_streams = trial.train.device == "cuda"
        self._is_staged = trial.parallel.pipeline > 1
        self._micro_steps: MicroSteps = "last" if self._is_staged else "all"
        self._gathers_in_backward = trial.train.reshard_after_forward is not False

    def forward_gathers(self, blocks: Sequence[_Block]) -> Iterator[Message]:
        """Yield a gather for each block, which starts when forward comes to the block before."""
        for number, block in enumerate(blocks):
            begins = block[0].begins
            # The first could be gathered only beside the embedding, which would hide next to nothing.
            ready = begins if number == 0 else blocks[number - 1][0].begins
            yield self._gather(block, phase="forward", ready=self._if_streams(ready), needed=begins, micro_steps="all")

    def backward_messages(self, blocks: Sequence[_Block]) -> Iterator[Message]:
        """Yield a gather and a scatter for each block; it is scattered when the block before it has been gathered."""
        following: _Block | None = None
        for block in reversed(blocks):
            if self._gathers_in_backward:
                yield self._gather_in_backward(block, following)
            if following is not None:
                yield from self.reductions(following, ready=1.0 - following[0].begins)
            following = block
        if following is not None:
            yield from self.reductions(following, ready=1.0 - following[0].begins)

    def _gather_in_backward(self, block: _Block, following: _Block | None) -> Message:
        """Return a block's gather, which starts when backward comes to the block that follows it in forward."""
        starts = 1.0 - block[-1].ends
        ready = starts if following is None else 1.0 - following[-1].ends
        return self._gather(
            block,
            phase="backward",
            ready=self._if_streams(ready),
            needed=starts,
            micro_steps=self._micro_steps,
        )

    def gather_root(self, root: _Block) -> Message:
        """Return the root's gather, which forward waits for."""
        return self._gather(root, phase="forward", ready=None, needed=None, micro_steps=self._micro_steps)

    def _gather(
        self, block: _Block, *, phase: StepPhase, ready: float | None, needed: float | None, micro_steps: MicroSteps
    ) -> Message:
        return Message(
            "all_gather",
            tensor_bytes=self._padded_elements(block) * self._weight_bytes,
            calls=1,
            phase=phase,
            ready=ready,
            micro_steps=micro_steps,
            needed=needed,
            rows=_rows(block),
            padded_for=self._ranks,
            group=self._group,
        )

    def reductions(self, block: _Block, *, ready: float) -> tuple[Message, ...]:
        """Return the collectives that average gradients, which are there after the share `ready` of backward.

        They are a reduce-scatter, and with replicas an all-reduce of the shards.
        """
        scatter = self._scatter(block, ready=ready)
        if self._replicas == 1:
            return (scatter,)
        among_replicas = replace(
            scatter,
            operation="all_reduce",
            tensor_bytes=scatter.tensor_bytes / self._ranks,
            beside_later=True,
            group="replication",
        )
        return scatter, among_replicas

    def _scatter(self, block: _Block, *, ready: float) -> Message:
        return Message(
            "reduce_scatter",
            tensor_bytes=self._padded_elements(block) * self._gradient_bytes,
            calls=1,
            phase="after" if self._is_staged else "backward",
            ready=None if self._is_staged else self._if_streams(ready),
            micro_steps=self._micro_steps,
            rows=_rows(block),
            padded_for=self._ranks,
            group=self._group,
        )

    def _if_streams(self, ready: float) -> float | None:
        """Return when a call may start beside computing; None where there are no streams, and computing waits."""
        return ready if self._has_streams else None

    def _padded_elements(self, block: _Block) -> int:
        """Return the elements that are sent, every tensor's first dimension padded to a multiple of the ranks."""
        return sum(up_to_multiple(tensor.shape[0], self._ranks) * _row_elements(tensor) for tensor in block)


def _rows(block: _Block) -> tuple[tuple[int, int], ...]:
    """Return (rows, elements of a row) of all tensors; those with as many rows are added up."""
    elements: Counter[int] = Counter()
    for tensor in block:
        elements[tensor.shape[0]] += _row_elements(tensor)
    return tuple(elements.items())


def _row_elements(tensor: Tensor) -> int:
    return tensor.elements // tensor.shape[0]
