"""The collectives of an optimizer step, as engines ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from vitscale.base.arrays import FloatArray

StepPhase = Literal["forward", "backward", "after"]
RankGroup = Literal["replicas", "sharding", "replication", "second shard", "tensor", "sequence", "pipeline", "all"]
"""Who exchanges: ranks that hold the same of a model (data x sequence; all ranks where each has its own model); the
ranks of them that make one replica, or that have one shard of all replicas (`trial.parallel`); those that share a
second shard of the weights (`EngineFacts.second_shard_ranks`); those along one axis of the ranks that share a model; or
all ranks."""
MicroSteps = Literal["all", "first", "later", "last"]
"""The micro-steps of an optimizer step: all of them, the first or the last alone, or all but the first."""
MessageKind = tuple[str, float, RankGroup, int | None]


@dataclass(frozen=True)
class Message:
    """One collective of an optimizer step, as an engine asks for it.

    It runs beside computing where `ready` is given, and else holds it up: nothing hides it.
    """

    operation: str
    """Name of the collective as records have it: all_reduce, all_gather, reduce_scatter, ..."""
    tensor_bytes: float
    """Bytes of the whole tensor, in one call."""
    calls: float
    """Number of calls, one right after the other."""
    phase: StepPhase
    """The phase in which it is sent. After: between backward and the end of the step."""
    ready: float | None
    """The share of its phase that is computed when it may start; None: nothing is computed beside it."""
    micro_steps: MicroSteps
    """The micro-steps of an optimizer step that send it."""
    needed: float | None = None
    """The share of its phase after which computing waits for it (weights of a block). None: the phase's end waits."""

    beside_later: bool = False
    """Whether it has a stream of its own: it starts when the message before it is over, and later messages do not wait
    for it, but for those of the same kind."""
    rows: tuple[tuple[int, int], ...] = ()
    """(rows, elements of a row) of its tensors, where each is padded to whole rows on every rank of `sharding_group`,
    and so grows with these ranks; empty: its size is the same on any number of ranks."""
    padded_for: int = 1
    """The ranks of `sharding_group` for which `tensor_bytes` holds."""
    steps_between: int = 1
    """Optimizer steps from one such message to the next. Where an engine gives fewer than it has from one exchange to
    the next (`EngineFacts.steps_between_exchanges`), these count."""
    group: RankGroup = "replicas"
    images: int | None = None
    """Images of the micro-batch for which `tensor_bytes` holds; the bytes grow with them. None: they do not."""

    @property
    def kind(self) -> MessageKind:
        """Return what decides how long a call takes: messages of one engine with the same kind take equally long."""
        return self.operation, self.tensor_bytes, self.group, self.images

    @property
    def sharding_group(self) -> RankGroup:
        """The group over which its tensors are sharded: its own; of a message among replicas, which is of one shard,
        the group that shards a replica."""
        return "sharding" if self.group == "replication" else self.group

    def tensor_bytes_at(self, ranks: FloatArray, micro_batch: FloatArray) -> float | FloatArray:
        """Return the bytes of the whole tensor in one call, with `micro_batch` images.

        Args:
            ranks: ranks of `sharding_group`.
            micro_batch: images.
        """
        if self.images is not None:
            return self.tensor_bytes * micro_batch / self.images
        if not self.rows:
            return self.tensor_bytes
        return self.tensor_bytes * self._elements(ranks) / self._elements(np.array([float(self.padded_for)]))

    def _elements(self, ranks: FloatArray) -> FloatArray:
        """Return the elements of all tensors, each padded to whole rows on every rank; among replicas those of a shard.

        Args:
            ranks: ranks of `sharding_group`.
        """
        shard_elements = np.zeros_like(ranks)
        for rows, row_elements in self.rows:
            shard_elements = shard_elements + np.ceil(rows / ranks) * row_elements
        carries_one_shard = self.group == "replication"
        return shard_elements if carries_one_shard else shard_elements * ranks

    @overload
    def times(self, grad_accum: int) -> float: ...

    @overload
    def times(self, grad_accum: FloatArray) -> float | FloatArray: ...

    def times(self, grad_accum: int | FloatArray) -> float | FloatArray:
        """Return the calls in an optimizer step of `grad_accum` micro-steps; their mean if not every step sends it."""
        number_by_kind = {"all": grad_accum, "first": 1, "later": grad_accum - 1, "last": 1}
        return self.calls * number_by_kind[self.micro_steps] / self.steps_between
