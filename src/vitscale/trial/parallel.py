"""How several ranks share one model, and where each rank stands among them; the rest of the world is data parallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from vitscale.trial.facts import Fact, Spec

SplitCount = Annotated[int, Field(ge=1, le=4096)]
Axis = Literal["pipeline", "data", "sequence", "tensor"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]


class ParallelSpec(Spec):
    """[parallel]: over how many ranks one model is split, and along what."""

    tensor: Annotated[SplitCount, Fact(since=10, short="tensor {}")] = 1
    """Ranks among which each block's matrices are cut: attention by heads, the MLP by its width (Shoeybi et al.,
    "Megatron-LM", arXiv 1909.08053, section 3)."""
    sequence: Annotated[SplitCount, Fact(since=10, short="sequence {}")] = 1
    """Ranks among which each image's tokens are cut, and exchanged for heads around attention (Jacobs et al.,
    "DeepSpeed Ulysses", arXiv 2309.14509, section 3)."""
    pipeline: Annotated[SplitCount, Fact(since=10, short="pipeline {}")] = 1
    """Ranks among which the blocks are cut, as stages that hand their activations on."""
    schedule: Annotated[Schedule, Fact(since=11, short="{}")] = "1f1b"
    """Of `pipeline`, in what order a rank takes the forward and backward of the step's micro-batches: "gpipe", all of
    the one and then all of the other (Huang et al., arXiv 1811.06965); "1f1b", by turns once the pipeline is full;
    "interleaved", by turns among several stages of each rank (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    stages_per_rank: Annotated[SplitCount, Fact(since=11, short="{} stages per rank")] = 2
    """Of `schedule` "interleaved"; the other schedules have one."""
    shard_norms: Annotated[bool, Fact(since=10, short=("sharded norms", "whole norms"))] = False
    """Of `tensor`: norms and residuals hold a part of the tokens on each rank, instead of all on every one (Korthikanti
    et al., arXiv 2205.05198, section 4.2.2)."""

    def __hash__(self) -> int:
        """Of the counts alone: pydantic's own takes ten times as long, for each of thousands of configurations."""
        return hash((self.tensor, self.sequence, self.pipeline))

    @property
    def stages(self) -> int:
        """Into which the blocks are cut."""
        return self.pipeline * (self.stages_per_rank if self.schedule == "interleaved" else 1)

    def bubble_share(self, micro_batches: int) -> float:
        """Share of a step in which a rank waits for other stages, where all of them take equally long and nothing is
        sent: (P - 1) / (v M + P - 1) of P ranks with v stages each (arXiv 2104.04473, section 2.2, of the whole step).

        Args:
            micro_batches: M, of an optimizer step.
        """
        return (self.pipeline - 1) / (self.stages // self.pipeline * micro_batches + self.pipeline - 1)

    @property
    def ranks_per_model(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor * self.sequence * self.pipeline


NO_SPLIT = ParallelSpec()
"""Each rank has a model for itself."""


def even_parts(count: int, ranks: int) -> list[slice]:
    """`count` things in a row, cut for so many ranks: the first ones have one more where they do not divide."""
    ends = [rank * (count // ranks) + min(rank, count % ranks) for rank in range(ranks + 1)]
    return list(map(slice, ends, ends[1:]))


class Coordinates(NamedTuple):
    """Of one rank; counted from 0 along each axis."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class RankLayout:
    """Ranks in a row along four axes: tensor counts fastest, then sequence, data, pipeline.

    So the ranks of a tensor group, which exchange in every block, are neighbours on one host, and stages, which
    exchange least, lie furthest apart.
    """

    pipeline: int
    data: int
    sequence: int
    tensor: int

    @classmethod
    def of(cls, ranks: int, parallel: ParallelSpec) -> RankLayout:
        """The layout of a world.

        Raises:
            ValueError: its ranks are not a multiple of those that share one model.
        """
        data, rest = divmod(ranks, parallel.ranks_per_model)
        if rest or not data:
            raise ValueError(f"{ranks} ranks are not a multiple of {parallel.ranks_per_model}, which share one model")
        return cls(parallel.pipeline, data, parallel.sequence, parallel.tensor)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In the order of `Coordinates`."""
        return self.pipeline, self.data, self.sequence, self.tensor

    @property
    def by_axis(self) -> dict[Axis, int]:
        """The size of a group along each axis."""
        return dict(zip(get_args(Axis), self.sizes, strict=True))

    @property
    def replicas(self) -> int:
        """Ranks over which the gradient of what each of them holds is averaged: data x sequence."""
        return self.data * self.sequence

    @property
    def exchanges_in_groups(self) -> bool:
        """Whether some exchanges are among a part of the ranks: then not all of them leave one together."""
        return self.pipeline > 1 or max(self.sizes) < math.prod(self.sizes)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands."""
        along = []
        for size in reversed(self.sizes):
            rank, number = divmod(rank, size)
            along.append(number)
        return Coordinates(*reversed(along))

    def groups_of(self, rank: int) -> str:
        """ "pipeline 1+3, data 2+3": with whom rank 3 exchanges along each axis; empty where no ranks share a model."""
        if self.data == math.prod(self.sizes):
            return ""
        own = {axis: next(group for group in self.groups(axis) if rank in group) for axis in get_args(Axis)}
        named = {axis: "+".join(map(str, group[:8])) + "+..." * (len(group) > 8) for axis, group in own.items()}
        return ", ".join(f"{axis} {named[axis]}" for axis, group in own.items() if len(group) > 1)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ along `axes` alone, each in order."""
        fixed: dict[tuple[int, ...], list[int]] = {}
        for rank in range(math.prod(self.sizes)):
            at = self.coordinates(rank)
            key = tuple(value for axis, value in at._asdict().items() if axis not in axes)
            fixed.setdefault(key, []).append(rank)
        return tuple(map(tuple, fixed.values()))
