"""What a rank has of a model that several share: its tensors, its blocks, its part of each matrix and of the tokens.

It is worked out by arithmetic, as `engines.shared.splits` and `engines.shared.stages` cut a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import ge
from typing import NamedTuple

from vitscale.trial.model_cost import ParameterShapes, has_formula, recorded_shapes, stage_blocks, swin_shape
from vitscale.trial.model_counts import ModelBlock, stages
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial


class Share(NamedTuple):
    """What ranks at one place in the pipeline have of the model that they share."""

    parallel: ParallelSpec
    rank: int
    """Place in the pipeline."""
    chunks: tuple[range, ...]
    """Blocks of each of its stages, in the order of the model; empty: all blocks of a model without stages."""

    @property
    def blocks(self) -> int:
        """How many blocks all its stages have; 0 without stages."""
        return sum(map(len, self.chunks))

    @property
    def first(self) -> bool:
        """Whether the embedding lies here."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether the head lies here."""
        return self.rank == self.parallel.pipeline - 1

    @property
    def received(self) -> int:
        """How many of its stages take the activations of the stage before."""
        return len(self.chunks) - self.first

    @property
    def handed_on(self) -> int:
        """How many of its stages hand their activations on."""
        return len(self.chunks) - self.last

    @property
    def stages(self) -> tuple[Share, ...]:
        """Each of its stages as if it were a rank's only one."""
        if len(self.chunks) == 1:
            return (self,)
        parallel = self.parallel
        alone = parallel.model_copy(update={"pipeline": parallel.stages, "schedule": "1f1b"})
        return tuple(
            Share(alone, self.rank + index * parallel.pipeline, (chunk,)) for index, chunk in enumerate(self.chunks)
        )

    def in_flight(self, micro_batches: int) -> int:
        """Most micro-batches between their forward and their backward, counted once in every stage that has them.

        Args:
            micro_batches: M, those of an optimizer step.
        """
        return _ahead(self.parallel, self.rank, len(self.chunks), micro_batches) + 1

    def order(self, micro_batches: int) -> Iterator[tuple[bool, int]]:
        """What its stages do in an optimizer step, one after the other: (whether it is a backward, of which stage)."""
        return _in_order(self.parallel, self.rank, len(self.chunks), micro_batches)

    def turns(self, micro_batches: int, *, sharded: bool) -> tuple[Turn, ...]:
        """The turns of `order` beside which most may be held; `sharded`: whether weights are sharded."""
        if self.parallel.schedule == "1f1b":  # its turns are soon all alike
            micro_batches = min(micro_batches, 2 * self.parallel.pipeline)
        return _turns(self.parallel, self.rank, len(self.chunks), micro_batches, sharded)

    def shapes(self, whole: ParameterShapes) -> ParameterShapes:
        """The tensors of this rank before a data-parallel wrapper shards them."""
        return _shapes(whole, self.parallel.tensor, self.chunks, self.first, self.last)


WHOLE = Share(NO_SPLIT, 0, ())
"""The share of a rank that has a model for itself."""


class Turn(NamedTuple):
    """A micro-batch goes through one of a rank's stages. Tuples tell what else each stage holds, in model order."""

    stage: int
    """Which of the rank's stages it goes through."""
    backward: bool
    others: tuple[int, ...]
    """Other micro-batches, between their forward and their backward."""
    finished: tuple[int, ...]
    """Micro-batches whose backward is over."""
    whole: tuple[bool, ...]
    """Whether all of the stage's weights, where they are sharded, are gathered before the turn begins: a backward
    leaves them so, and an interleaved schedule gathers them ahead of the first forward."""


def _ahead(parallel: ParallelSpec, rank: int, stages: int, micro_batches: int) -> int:
    """How many forwards come before the one that is followed by the first backward; afterwards they take turns.

    With gpipe all do; otherwise as many as `Schedule1F1B` and `ScheduleInterleaved1F1B` have it
    (torch/distributed/pipelining/schedules.py).
    """
    behind = parallel.pipeline - 1 - rank
    if parallel.schedule == "interleaved":
        before = (stages - 1) * _in_a_round(parallel, micro_batches) + 2 * behind
    else:
        before = behind if parallel.schedule == "1f1b" else micro_batches
    return min(micro_batches * stages - 1, before)


def _in_a_round(parallel: ParallelSpec, micro_batches: int) -> int:
    """Micro-batches that one stage of a rank takes before the next one takes them."""
    return micro_batches // max(1, micro_batches // parallel.pipeline)


def _in_order(parallel: ParallelSpec, rank: int, stages: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """Turns of an optimizer step, one after the other: (whether it is a backward, of which of the rank's stages)."""
    ahead, in_a_round = _ahead(parallel, rank, stages, micro_batches), _in_a_round(parallel, micro_batches)
    count = stages * micro_batches
    for number in range(count + ahead):
        if number < count:
            yield False, number // in_a_round % stages
        if number >= ahead:
            yield True, stages - 1 - (number - ahead) // in_a_round % stages


@lru_cache(maxsize=1024)
def _turns(parallel: ParallelSpec, rank: int, stages: int, micro_batches: int, sharded: bool) -> tuple[Turn, ...]:
    others, finished, whole = [0] * stages, [0] * stages, [sharded and parallel.schedule == "interleaved"] * stages
    turns = []
    for backward, stage in _in_order(parallel, rank, stages, micro_batches):
        others[stage] -= backward
        turns.append(Turn(stage, backward, tuple(others), tuple(finished), tuple(whole)))
        (finished if backward else others)[stage] += 1
        whole[stage] = sharded and backward
    outermost = _outermost(turns)
    return tuple(turn for turn in turns if turn in outermost)


def _outermost(turns: Sequence[Turn]) -> set[Turn]:
    """Turns that no other of the same stage, direction and whole weights covers.

    A turn covers another if beside it there is as much of everything, and gradients in all of the other's stages.
    """
    outermost: dict[tuple[object, ...], dict[tuple[int, ...], Turn]] = {}
    for turn in reversed(turns):
        known = outermost.setdefault((turn.stage, turn.backward, turn.whole), {})
        sent = map(sum, zip(turn.others, turn.finished, strict=True))
        held = (*turn.others, *sent, *map(bool, turn.finished))
        if not any(all(map(ge, more, held)) for more in known):
            for less in [less for less in known if all(map(ge, held, less))]:
                del known[less]
            known[held] = turn
    return {turn for known in outermost.values() for turn in known.values()}


def shares(trial: Trial) -> tuple[Share, ...]:
    """The shares of a resolved trial's ranks, by place in the pipeline; ranks at one place have the same."""
    parallel = trial.parallel
    if parallel.pipeline == 1:
        return (Share(parallel, 0, ()),)
    stages = stage_blocks(trial.model, parallel.stages)
    return tuple(Share(parallel, rank, stages[rank :: parallel.pipeline]) for rank in range(parallel.pipeline))


def compute_share(trial: Trial) -> float:
    """The largest share that a rank has of the products that an image takes, by arithmetic.

    That is the largest stage's, for the sequence rank with most rows of a Swin's tokens; with a head of segmentation,
    for the one with most images of the micro-batch. It is 1 where no ranks share a model, or where only building the
    model could tell.
    """
    return max(_compute_shares(trial))


def filling(trial: Trial) -> float:
    """Micro-steps of the slowest rank that it waits for while the pipeline fills and runs empty.

    They are what the other ranks compute together, over v where each rank has v stages. With P equal ranks, or where
    only building the model could tell, they are (P - 1) / v (arXiv 2104.04473, section 2.2).
    """
    ranks = trial.parallel.pipeline
    of_ranks = _compute_shares(trial)
    others = sum(of_ranks) / max(of_ranks) - 1 if len(of_ranks) == ranks else ranks - 1
    return others * ranks / trial.parallel.stages


def slowest_ranks(trial: Trial) -> list[int]:
    """The ranks whose share is `compute_share`, in order; where only building the model could tell, all of them."""
    of_ranks = _compute_shares(trial)
    slowest = [number for number, share in enumerate(of_ranks) if share == max(of_ranks)]
    everyone = range(trial.world.size)
    if len(of_ranks) < trial.parallel.pipeline:
        return list(everyone)
    return [rank for rank in everyone if trial.layout.coordinates(rank).pipeline in slowest]


def _compute_shares(trial: Trial) -> list[float]:
    """`compute_share` of each place in the pipeline."""
    whole, parallel = recorded_shapes(trial.model), trial.parallel
    if whole is None or parallel.ranks_per_model == 1 or not has_formula(trial.model):
        return [1.0]
    more, of_tokens = 0.0, 1 / parallel.sequence
    if swin := swin_shape(trial.model):
        first = stages(swin, parallel.sequence)[0]
        of_tokens = first.rows / first.side
    if trial.model.task == "segmentation":
        images = largest_micro_batch(trial.train)
        head = _macs(whole._replace(blocks=whole.blocks[-1:]))
        more = head * (math.ceil(images / parallel.sequence) / images - of_tokens)
    of_ranks = (_macs(share.shapes(whole)) * of_tokens + share.last * more for share in shares(trial))
    return [own / _macs(whole) for own in of_ranks]


def _macs(shapes: ParameterShapes) -> int:
    return sum(block.repeats * module.macs for block in shapes.blocks for module in block.modules)


@lru_cache(maxsize=1024)
def _shapes(whole: ParameterShapes, tensor: int, chunks: tuple[range, ...], first: bool, last: bool) -> ParameterShapes:
    if tensor == 1 and not chunks:
        return whole
    blocks = whole.blocks
    if chunks:
        embedding, *_, head = blocks
        nothing = ModelBlock((), ())
        row = [block for chunk in chunks for number in chunk for block in whole.in_a_row[number]]
        alike = [block._replace(repeats=len(list(run))) for block, run in groupby(row)]
        blocks = (embedding if first else nothing, *alike, head if last else nothing)
    return whole._replace(
        blocks=tuple(b._replace(modules=tuple(module.part(tensor) for module in b.modules)) for b in blocks), units=()
    )
