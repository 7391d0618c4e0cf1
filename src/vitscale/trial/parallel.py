"""How several ranks share one model, and each rank's place among them; the rest of the world is data parallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from vitscale.trial.fields import FieldTraits, Spec

SplitCount = Annotated[int, Field(ge=1, le=4096)]
ParallelAxis = Literal["pipeline", "data", "sequence", "tensor"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]


class ParallelSpec(Spec):
    """[parallel]: over how many ranks one model is split, and along which axes."""

    tensor: Annotated[SplitCount, FieldTraits(curve_words="tensor {}")] = 1
    """Ranks over which each block's matrices are cut: attention by heads, the MLP by its width (Shoeybi et al.,
    "Megatron-LM", arXiv 1909.08053, section 3)."""
    sequence: Annotated[SplitCount, FieldTraits(curve_words="sequence {}")] = 1
    """Ranks over which each image's tokens are cut, and exchanged for heads around attention (Jacobs et al., "DeepSpeed
    Ulysses", arXiv 2309.14509, section 3)."""
    pipeline: Annotated[SplitCount, FieldTraits(curve_words="pipeline {}")] = 1
    """Ranks over which the blocks are cut into stages, each of which hands its activations on to the next."""
    schedule: Annotated[Schedule, FieldTraits(curve_words="{}")] = "1f1b"
    """Order in which a pipeline's rank takes the forward and backward of the step's micro-batches. "gpipe": all
    forward, then all backward (Huang et al., arXiv 1811.06965); "1f1b": by turns once the pipeline is full;
    "interleaved": by turns among several stages of each rank (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    stages_per_rank: Annotated[SplitCount, FieldTraits(curve_words="{} stages per rank")] = 2
    """Stages of each rank under `schedule` "interleaved"; the other schedules have one."""
    shard_norms: Annotated[bool, FieldTraits(curve_words=("sharded norms", "whole norms"))] = False
    """Whether under `tensor` norms and residuals hold a part of the tokens on each rank, instead of all on every rank
    (Korthikanti et al., arXiv 2205.05198, section 4.2.2)."""

    def __hash__(self) -> int:
        """Hashes the counts only: ten times as fast as pydantic's hash, for each of thousands of configurations."""
        return hash((self.tensor, self.sequence, self.pipeline))

    @property
    def stages(self) -> int:
        """Number of stages into which the blocks are cut."""
        return self.pipeline * (self.stages_per_rank if self.schedule == "interleaved" else 1)

    def bubble_share(self, micro_batches: int) -> float:
        """Share of a step in which a rank waits for other stages, if all take equally long and nothing is sent.

        (P - 1) / (v M + P - 1) for P ranks with v stages each (arXiv 2104.04473, section 2.2, of the whole step).

        Args:
            micro_batches: M, of an optimizer step.
        """
        return (self.pipeline - 1) / (self.stages // self.pipeline * micro_batches + self.pipeline - 1)

    @property
    def split_axes(self) -> tuple[ParallelAxis, ...]:
        """Axes along which ranks share a model."""
        return tuple(axis for axis in get_args(ParallelAxis) if axis != "data" and getattr(self, axis) > 1)

    @property
    def in_words(self) -> str:
        """The split in the study's words: "parallel.sequence = 2 x parallel.tensor = 2"."""
        return " x ".join(f"parallel.{axis} = {getattr(self, axis)}" for axis in self.split_axes)

    @property
    def ranks_per_model(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor * self.sequence * self.pipeline


NO_SPLIT = ParallelSpec()
"""No split: each rank has a model of its own."""


def even_parts(count: int, ranks: int) -> list[slice]:
    """Slices that cut `count` things for `ranks` ranks; the first ranks get one more where it does not divide."""
    ends = [rank * (count // ranks) + min(rank, count % ranks) for rank in range(ranks + 1)]
    return list(map(slice, ends, ends[1:]))


class Coordinates(NamedTuple):
    """A rank's place along each axis, counted from 0."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class RankLayout:
    """Ranks in a row along four axes: tensor varies fastest, then sequence, data, pipeline.

    So the ranks of a tensor group, which exchange in every block, are neighbours on one host, and stages, which
    exchange least, lie furthest apart.
    """

    pipeline: int
    data: int
    sequence: int
    tensor: int

    @classmethod
    def of(cls, ranks: int, parallel: ParallelSpec) -> RankLayout:
        """The layout of a world with this many ranks.

        Raises:
            ValueError: its ranks are not a multiple of those that share one model.
        """
        data, rest = divmod(ranks, parallel.ranks_per_model)
        if rest or not data:
            raise ValueError(f"{ranks} ranks are not a multiple of {parallel.ranks_per_model}, which share one model")
        return cls(parallel.pipeline, data, parallel.sequence, parallel.tensor)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the axes in the order of `Coordinates`."""
        return self.pipeline, self.data, self.sequence, self.tensor

    @property
    def by_axis(self) -> dict[ParallelAxis, int]:
        """The size of a group along each axis."""
        return dict(zip(get_args(ParallelAxis), self.sizes, strict=True))

    @property
    def replicas(self) -> int:
        """Number of ranks over which a gradient is averaged: data x sequence."""
        return self.data * self.sequence

    @property
    def exchanges_in_groups(self) -> bool:
        """Whether some exchanges involve only a part of the ranks: then not all ranks leave one together."""
        return self.pipeline > 1 or max(self.sizes) < math.prod(self.sizes)

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank."""
        along = []
        for size in reversed(self.sizes):
            rank, number = divmod(rank, size)
            along.append(number)
        return Coordinates(*reversed(along))

    def groups_of(self, rank: int) -> str:
        """A rank's groups in words: "pipeline 1+3, data 2+3" for rank 3; empty where no ranks share a model."""
        if self.data == math.prod(self.sizes):
            return ""
        own = {axis: next(group for group in self.groups(axis) if rank in group) for axis in get_args(ParallelAxis)}
        named = {axis: "+".join(map(str, group[:8])) + "+..." * (len(group) > 8) for axis, group in own.items()}
        return ", ".join(f"{axis} {named[axis]}" for axis, group in own.items() if len(group) > 1)

    def groups(self, *axes: ParallelAxis) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axes`, each in order."""
        fixed: dict[tuple[int, ...], list[int]] = {}
        for rank in range(math.prod(self.sizes)):
            at = self.coordinates(rank)
            key = tuple(value for axis, value in at._asdict().items() if axis not in axes)
            fixed.setdefault(key, []).append(rank)
        return tuple(map(tuple, fixed.values()))
