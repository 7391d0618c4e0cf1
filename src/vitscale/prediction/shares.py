"""What a rank has of a model that several share, by arithmetic: its tensors, its blocks, its part of each matrix and of
the tokens. As `engines.splits` and `engines.stages` cut a model."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from vitscale.trial.model_cost import ParameterShapes, recorded_shapes, stage_blocks
from vitscale.trial.model_counts import Block
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial


class Share(NamedTuple):
    """Of the ranks that share a model those of one place in its pipeline."""

    parallel: ParallelSpec
    rank: int
    """Along the pipeline."""
    chunks: tuple[range, ...]
    """Blocks of each of its stages, in the order of the model; empty: all blocks of a model without stages."""

    @property
    def blocks(self) -> int:
        """Of all its stages; 0 without stages."""
        return sum(map(len, self.chunks))

    @property
    def first(self) -> bool:
        """Whether the embedding lies here."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether the head does."""
        return self.rank == self.parallel.pipeline - 1

    @property
    def received(self) -> int:
        """Stages that take the activations of the one before."""
        return len(self.chunks) - self.first

    @property
    def handed_on(self) -> int:
        """Stages that hand theirs on."""
        return len(self.chunks) - self.last

    def in_flight(self, micro_batches: int) -> int:
        """Most micro-batches, counted once in every stage that has them, between their forward and their backward.

        Args:
            micro_batches: M, of an optimizer step.
        """
        ranks, behind, stages = self.parallel.pipeline, self.parallel.pipeline - 1 - self.rank, len(self.chunks)
        if self.parallel.schedule == "gpipe":
            return micro_batches
        if self.parallel.schedule == "1f1b":
            return min(micro_batches, behind + 1)
        # ScheduleInterleaved1F1B (torch/distributed/pipelining/schedules.py): what goes forward before the first
        # backward, and one more.
        rounds = max(1, micro_batches // ranks)
        return min(micro_batches * stages, (stages - 1) * (micro_batches // rounds) + 2 * behind + 1)

    def shapes(self, whole: ParameterShapes) -> ParameterShapes:
        """The tensors of this rank before a data-parallel wrapper shards them."""
        return _shapes(whole, self.parallel.tensor, self.chunks, self.first, self.last)


WHOLE = Share(NO_SPLIT, 0, ())
"""Of a rank that has a model for itself."""


def shares(trial: Trial) -> tuple[Share, ...]:
    """Of a resolved trial's ranks, by their place in the pipeline; those of one place have the same."""
    parallel = trial.parallel
    if parallel.pipeline == 1:
        return (Share(parallel, 0, ()),)
    stages = stage_blocks(trial.model, parallel.stages)
    return tuple(Share(parallel, rank, stages[rank :: parallel.pipeline]) for rank in range(parallel.pipeline))


def compute_share(trial: Trial) -> float:
    """A rank's share of the products that an image takes, by arithmetic: of the largest stage; of heads of segmentation
    that of the sequence rank with most images of the micro-batch. 1 where no ranks share a model, or only building the
    model could tell."""
    whole, parallel = recorded_shapes(trial.model), trial.parallel
    if whole is None or parallel.ranks_per_model == 1:
        return 1.0
    most = max(_macs(share.shapes(whole)) for share in shares(trial)) / parallel.sequence
    if trial.model.task == "segmentation":
        images = largest_micro_batch(trial.train)
        head = _macs(whole._replace(blocks=whole.blocks[-1:]))
        most += head * (math.ceil(images / parallel.sequence) / images - 1 / parallel.sequence)
    return most / _macs(whole)


def _macs(shapes: ParameterShapes) -> int:
    return sum(block.repeats * module.macs for block in shapes.blocks for module in block.modules)


@lru_cache(maxsize=1024)
def _shapes(whole: ParameterShapes, tensor: int, chunks: tuple[range, ...], first: bool, last: bool) -> ParameterShapes:
    if tensor == 1 and not chunks:
        return whole
    blocks = whole.blocks
    if chunks:
        embedding, *_, head = blocks
        nothing = Block((), ())
        row = [block for chunk in chunks for number in chunk for block in whole.in_a_row[number]]
        alike = [block._replace(repeats=len(list(run))) for block, run in groupby(row)]
        blocks = (embedding if first else nothing, *alike, head if last else nothing)
    return whole._replace(
        blocks=tuple(b._replace(modules=tuple(module.part(tensor) for module in b.modules)) for b in blocks), units=()
    )
