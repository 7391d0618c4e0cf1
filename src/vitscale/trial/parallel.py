"""How several ranks share one model, and each rank's place among them.

Ranks that share one copy of the model split it along the axes tensor, sequence and pipeline. The copies are data
parallel: ranks = pipeline x data x sequence x tensor.

Hybrid sharding (HSDP) splits no model: each data-parallel rank computes all of it. Weights are sharded over a part of
these ranks, the sharding group, and each sharding group is a replica of all others. Ranks with the same shard, one of
each replica, are a replication group: 4 ranks in 2 replicas are the sharding groups (0, 1) and (2, 3), and the
replication groups (0, 2) and (1, 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
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
    replicate: Annotated[SplitCount, FieldTraits(curve_words="replicas {}")] = 1
    """Replicas of the sharded model, each over as many of the data-parallel ranks (HSDP; Zhao et al., "PyTorch FSDP",
    arXiv 2304.11277, section 3.2.2). With 1 all of these ranks shard one; with as many as ranks, none shards."""

    def __hash__(self) -> int:
        """Hash the counts only: ten times as fast as pydantic's hash, for each of thousands of configurations."""
        return hash((self.tensor, self.sequence, self.pipeline, self.replicate))

    @property
    def stages(self) -> int:
        """Number of stages into which the blocks are cut, over all ranks of a pipeline."""
        if self.schedule == "interleaved":
            return self.pipeline * self.stages_per_rank
        return self.pipeline

    def bubble_share(self, micro_batches: int) -> float:
        """Return the share of a step in which a rank waits for other stages.

        It is (P - 1) / (v M + P - 1) for P ranks with v stages each, if all stages take equally long and nothing is
        sent (arXiv 2104.04473, section 2.2, of the whole step).

        Args:
            micro_batches: M, of an optimizer step.
        """
        stages_per_rank = self.stages // self.pipeline
        return (self.pipeline - 1) / (stages_per_rank * micro_batches + self.pipeline - 1)

    @property
    def split_axes(self) -> tuple[ParallelAxis, ...]:
        """Axes along which ranks share a model, outermost first: ("pipeline", "tensor")."""
        axes: tuple[ParallelAxis, ...] = ("pipeline", "sequence", "tensor")
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def in_words(self) -> str:
        """The split in the study's words: "parallel.sequence = 2 x parallel.tensor = 2"."""
        return " x ".join(f"parallel.{axis} = {getattr(self, axis)}" for axis in self.split_axes)

    @property
    def model_split(self) -> ParallelSpec:
        """How ranks share a model, whatever replicas they shard."""
        return self.model_copy(update={"replicate": 1})

    @property
    def ranks_per_model(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor * self.sequence * self.pipeline

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that can train like this, of which every number of ranks is a multiple."""
        return self.ranks_per_model * self.replicate


NO_SPLIT = ParallelSpec()
"""No split: each rank has a model of its own. What shards weights shards them over all ranks."""


def even_parts(count: int, ranks: int) -> list[slice]:
    """Return the slice of each rank where ranks divide `count` things; the first ranks get one more than the others.

    Example: 7 things for 3 ranks are 0:3, 3:5 and 5:7.
    """
    smaller_part, larger_parts = divmod(count, ranks)  # 7 for 3: parts of 2, of which the first 1 has one more
    bounds = [rank * smaller_part + min(rank, larger_parts) for rank in range(ranks + 1)]  # 0, 3, 5, 7
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class Coordinates(NamedTuple):
    """A rank's position along each axis, counted from 0."""

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
    replicate: int = 1
    """Replicas of the sharded model among the data x sequence ranks; see the module's docstring."""

    @classmethod
    def of(cls, ranks: int, parallel: ParallelSpec) -> RankLayout:
        """Return the layout of a world with this many ranks.

        Raises:
            ValueError: its ranks are not a multiple of those that share one model, or replicas do not divide them.
        """
        models, remainder = divmod(ranks, parallel.ranks_per_model)
        if remainder or not models:
            raise ValueError(f"{ranks} ranks are not a multiple of {parallel.ranks_per_model}, which share one model")
        if ranks % parallel.least_ranks:
            raise ValueError(f"{ranks} ranks do not divide into {parallel.replicate} equal replicas")
        return cls(
            pipeline=parallel.pipeline,
            data=models,
            sequence=parallel.sequence,
            tensor=parallel.tensor,
            replicate=parallel.replicate,
        )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes)

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
    def sharding_ranks(self) -> int:
        """Number of ranks over which what shards weights shards them: data x sequence / replicate."""
        return self.replicas // self.replicate

    @property
    def exchanges_in_groups(self) -> bool:
        """Whether some exchanges involve only a part of the ranks, so that not all ranks leave one together."""
        is_along_one_axis = max(self.sizes) == self.ranks
        shards_in_groups = 1 < self.replicate < self.replicas
        return self.pipeline > 1 or not is_along_one_axis or shards_in_groups

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a rank along each axis.

        It is rank = ((pipeline x D + data) x S + sequence) x T + tensor, for axes of D, S and T ranks. Example: of 2
        data x 2 tensor ranks, rank 3 has data 1 and tensor 1.
        """
        tensor_group, tensor = divmod(rank, self.tensor)
        stage_of_copy, sequence = divmod(tensor_group, self.sequence)
        pipeline, data = divmod(stage_of_copy, self.data)
        return Coordinates(pipeline=pipeline, data=data, sequence=sequence, tensor=tensor)

    def groups_in_words(self, rank: int) -> str:
        """Return a rank's group along each axis of several ranks: "pipeline 1+3, data 2+3" for rank 3.

        With replicas it is the groups that exchange shards: "sharding 2+3, replication 1+3". Return an empty text where
        no ranks share a model, and all shard it together.
        """
        if 1 < self.replicate < self.replicas:
            sharding, replication = _joined(self.sharding_group(rank)), _joined(self.replication_group(rank))
            return f"sharding {sharding}, replication {replication}"
        if self.data == self.ranks:
            return ""
        clauses = []
        for axis, size in self.by_axis.items():
            if size > 1:
                (group,) = [ranks for ranks in self.groups(axis) if rank in ranks]
                clauses.append(f"{axis} {_joined(group)}")
        return ", ".join(clauses)

    def sharding_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over which weights are sharded with a rank, in order: neighbours among its replicas."""
        group = self._gradient_group(rank)
        first = group.index(rank) // self.sharding_ranks * self.sharding_ranks
        return group[first : first + self.sharding_ranks]

    def replication_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shard as a rank, one of each replica, in order."""
        group = self._gradient_group(rank)
        return group[group.index(rank) % self.sharding_ranks :: self.sharding_ranks]

    def _gradient_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over which a rank's gradients are averaged: those that differ in data and sequence."""
        (group,) = [ranks for ranks in self.groups("data", "sequence") if rank in ranks]
        return group

    def groups(self, *axes: ParallelAxis) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along `axes`, each in order.

        Example: for 2 data x 2 tensor ranks, groups("tensor") is ((0, 1), (2, 3)), and groups("data") ((0, 2), (1, 3)).
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            number_by_axis = self.coordinates(rank)._asdict()
            on_other_axes = tuple(number for axis, number in number_by_axis.items() if axis not in axes)
            groups.setdefault(on_other_axes, []).append(rank)
        return tuple(tuple(group) for group in groups.values())


_MOST_RANKS_IN_WORDS = 8


def _joined(ranks: tuple[int, ...]) -> str:
    """Return ranks in words: "0+2"; those after the eighth are replaced by "...": "0+1+2+3+4+5+6+7+..."."""
    numbers = [str(rank) for rank in ranks[:_MOST_RANKS_IN_WORDS]]
    if len(ranks) > _MOST_RANKS_IN_WORDS:
        numbers.append("...")
    return "+".join(numbers)
