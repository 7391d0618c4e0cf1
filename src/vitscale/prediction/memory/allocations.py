"""Memory of a step as allocations on one axis of moments; the bytes at a moment are those of all that span it.

The moments are numbered in the order of time: the forward of each part, the backward of each part from the last one to
the first, the exchange of gradients that is left then, and the optimizer's step. A part has several moments where sizes
decide which of them takes most. Example: two parts with one moment each are 0 and 1 in forward, 2 and 3 in backward, 4
is the exchange and 5 the step; the activations of the first part are `Allocation("activations", kept, 0, 3)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.engines import wrapper_facts
from vitscale.engines.parts import Around, AtMoment, InTurn, Part
from vitscale.engines.states import Parts, RankStates
from vitscale.prediction.memory.activations import is_autocast
from vitscale.prediction.memory.around import around
from vitscale.prediction.memory.pieces import Pieces
from vitscale.trial.trial import Trial

ACTIVATIONS = "activations"
COPIES = "autocast's copies"
PASSED_ON = "passed on in backward"


class Allocation(NamedTuple):
    """Bytes that lie in memory from the first to the last moment, both included."""

    name: str
    """Their purpose, such as "weights"."""
    bytes: int
    first: int
    last: int


class StepMemory(NamedTuple):
    """Everything that lies in a rank's memory during a step, or during one turn of a pipeline."""

    moments: tuple[str, ...]
    """The name of each moment; several may have one name. Empty: the moment lies in another turn."""
    allocations: tuple[Allocation, ...]

    def totals(self) -> NDArray[np.int64]:
        """Return the bytes at each moment, (moments,)."""
        sizes = np.array([allocation.bytes for allocation in self.allocations], dtype=np.int64)
        first = np.array([allocation.first for allocation in self.allocations])
        last = np.array([allocation.last for allocation in self.allocations])
        changes = np.zeros(len(self.moments) + 1, dtype=np.int64)
        np.add.at(changes, first, sizes)
        np.subtract.at(changes, last + 1, sizes)
        totals: NDArray[np.int64] = changes.cumsum()[:-1]
        return totals

    def own_totals(self) -> list[int]:
        """Return the bytes at each moment that lies in this turn."""
        named_totals = zip(self.moments, self.totals().tolist(), strict=True)
        return [total for name, total in named_totals if name]

    def parts_at(self, moment: int) -> dict[str, int]:
        """Return purpose -> bytes at a moment; a purpose without bytes is left out."""
        parts: dict[str, int] = {}
        for name, size, first, last in self.allocations:
            if first <= moment <= last:
                parts[name] = parts.get(name, 0) + size
        return {name: size for name, size in parts.items() if size}

    def highest(self) -> dict[str, Parts]:
        """Return the name of each moment -> bytes by purpose at the one that takes most among those with the name."""
        totals = self.totals().tolist()
        highest_by_name: dict[str, int] = {}
        for moment, name in enumerate(self.moments):
            highest = highest_by_name.get(name)
            if name and (highest is None or totals[moment] > totals[highest]):
                highest_by_name[name] = moment
        return {name: self.parts_at(moment) for name, moment in highest_by_name.items()}


class _PartMoments(NamedTuple):
    """Numbers of the moments of one part."""

    forward: range
    before_backward: range
    """Moments at which an engine holds more than when the part's backward is widest, before that."""
    backward: range
    bucket_full: range
    """Moments of the part's backward at which a bucket of gradients is exchanged because it is full."""


class _Axis:
    """The moments of a step."""

    def __init__(self, model: Pieces, engine: Around) -> None:
        self._names: list[str] = []
        forward = [self._append("end of forward", len(part.forward)) for part in model.parts]
        self.parts: list[_PartMoments] = []
        between_by_part = _by_part(engine.between)
        for number in reversed(range(len(model.parts))):
            is_bucket_full = [more.is_bucket_full for more in between_by_part.get(number, [])]
            moments = _PartMoments(
                forward=forward[number],
                before_backward=self._append("backward", is_bucket_full.count(False)),
                backward=self._append("backward", len(model.parts[number].backward)),
                bucket_full=self._append("backward", is_bucket_full.count(True)),
            )
            self.parts.insert(0, moments)
        self.forward_end = forward[-1][-1]
        self.backward_end = len(self._names) - 1
        (self.exchange,) = self._append("exchange", 1)
        (self.step,) = self._append("step", 1)

    def _append(self, name: str, count: int) -> range:
        """Add moments behind those that are there; return their numbers."""
        begin = len(self._names)
        self._names += [name] * count
        return range(begin, len(self._names))

    def names(self, turn: InTurn | None) -> tuple[str, ...]:
        """Return the name of each moment, empty where it lies in another turn."""
        if turn is None:
            return tuple(self._names)
        return tuple(name if name in turn.moments else "" for name in self._names)


def step_memory(
    model: Pieces, trial: Trial, rank_states: RankStates, turn: InTurn | None = None, handed_on_bytes: int = 0
) -> StepMemory:
    """Return all allocations of a step; how many moments it has does not depend on the micro-batch.

    Args:
        model: the parts of a rank, and the bytes beside them.
        trial: the trial.
        rank_states: what its engine holds of the model.
        turn: that of a pipeline.
        handed_on_bytes: activations that the stage has handed on, which stay until its backward is over.
    """
    engine = around(trial, rank_states, model.parts, turn)
    axis = _Axis(model, engine)
    turn_allocations = [
        *_spanning(turn.beside if turn else {}, 0, axis.backward_end),
        Allocation(ACTIVATIONS, handed_on_bytes, axis.forward_end + 1, axis.backward_end),
    ]
    allocations = (
        *_of_model(model, trial, engine, axis),
        *_of_engine(rank_states, engine, axis),
        *turn_allocations,
    )
    return StepMemory(axis.names(turn), allocations)


class LinearMemory:
    """Totals of one model for many micro-batches and numbers of ranks, where no ranks share the model.

    Activations depend on the micro-batch and not on the number of ranks, and what the engine holds the other way round.
    """

    def __init__(self, models: Sequence[Pieces]) -> None:
        """Begin with the parts of the model for each micro-batch."""
        self._models = models
        self._latest_states: RankStates | None = None
        self._latest_totals: list[NDArray[np.int64]] = []
        self._model_totals: dict[tuple[MomentKey, ...], _ModelTotals] = {}

    def totals(self, trial: Trial, rank_states: RankStates) -> list[NDArray[np.int64]]:
        """Return the bytes at each moment for each micro-batch, (moments,).

        Args:
            trial: the trial, on the number of ranks in question; it differs from the one before in that number alone.
            rank_states: what its engine holds there.
        """
        if rank_states == self._latest_states:  # as under DDP, on any number of ranks
            return self._latest_totals
        engine = around(trial, rank_states, self._models[0].parts)
        key = tuple(MomentKey(more.part, more.released_share, more.is_bucket_full) for more in engine.between)
        if key not in self._model_totals:
            self._model_totals[key] = self._totals_of_model(trial, engine)
        axis, totals_by_batch = self._model_totals[key]
        engine_memory = StepMemory(axis.names(None), tuple(_of_engine(rank_states, engine, axis)))
        engine_totals = engine_memory.totals()
        self._latest_states = rank_states
        self._latest_totals = [engine_totals + model_totals for model_totals in totals_by_batch]
        return self._latest_totals

    def _totals_of_model(self, trial: Trial, engine: Around) -> _ModelTotals:
        """Return the moments of a step with this engine, and what the model takes at each for each micro-batch."""
        axis = _Axis(self._models[0], engine)
        totals_by_batch = []
        for model in self._models:
            memory = StepMemory(axis.names(None), tuple(_of_model(model, trial, engine, axis)))
            totals_by_batch.append(memory.totals())
        return _ModelTotals(axis, totals_by_batch)


class _ModelTotals(NamedTuple):
    """The part of the totals that is the same on any number of ranks."""

    axis: _Axis
    totals_by_batch: list[NDArray[np.int64]]
    """Bytes of the model at each moment, (moments,), for each micro-batch."""


class MomentKey(NamedTuple):
    """Where an engine's own moment of backward lies."""

    part: int
    released_share: float
    is_bucket_full: bool


def _by_part(between: Sequence[AtMoment]) -> dict[int, list[AtMoment]]:
    """Return number of a part -> an engine's own moments in its backward."""
    by_part: dict[int, list[AtMoment]] = {}
    for moment in between:
        by_part.setdefault(moment.part, []).append(moment)
    return by_part


def _spanning(parts: Parts, first: int, last: int) -> list[Allocation]:
    """Return each purpose's bytes as an allocation from the first to the last moment."""
    return [Allocation(name, size, first, last) for name, size in parts.items()]


def _of_model(model: Pieces, trial: Trial, engine: Around, axis: _Axis) -> Iterator[Allocation]:
    """Yield the allocations of the model itself: its images, buffers and logits, then those of each part."""
    yield Allocation("images", model.images, 0, axis.step)
    yield Allocation("buffers of the model", model.buffers, 0, axis.step)
    yield Allocation("logits", model.logits, axis.parts[-1].forward[0], axis.backward_end)
    between_by_part = _by_part(engine.between)
    # DeepSpeed's linear layer of ZeRO-3 casts again in backward, so that no copy is kept for it.
    keeps_linear_copies = not wrapper_facts(trial.train).casts_again(trial.train)
    recomputes = trial.train.activation_checkpointing
    for number, (part, moments) in enumerate(zip(model.parts, axis.parts, strict=True)):
        copies = part.cast_bytes(linear=keeps_linear_copies) if is_autocast(trial.train) else 0
        at_full_bucket = [more for more in between_by_part.get(number, []) if more.is_bucket_full]
        yield Allocation(ACTIVATIONS, part.kept, moments.forward[0], moments.backward[-1])
        yield from _copies_of_part(copies, moments, axis, recomputes=recomputes)
        yield from _passing_of_part(part, moments)
        for moment, more in zip(moments.bucket_full, at_full_bucket, strict=True):
            yield from _of_part_at_full_bucket(part, copies, moment, more.released_share, recomputes=recomputes)


def _copies_of_part(copies: int, moments: _PartMoments, axis: _Axis, *, recomputes: bool) -> Iterator[Allocation]:
    """Yield autocast's copies of a part's weights, in bytes: kept until its backward, or made again for it.

    Args:
        copies: their bytes.
        moments: those of the part.
        axis: all moments.
        recomputes: whether the part is computed again in backward: its copies of forward stay until that is over.
    """
    if not recomputes:
        yield Allocation(COPIES, copies, moments.forward[0], moments.backward[-1])
        return
    yield Allocation(COPIES, copies, moments.forward[0], axis.forward_end)
    yield Allocation(COPIES, copies, moments.backward[0], moments.backward[-1])


def _passing_of_part(part: Part, moments: _PartMoments) -> Iterator[Allocation]:
    """Yield what a part holds for a moment: between its layers in forward, and what backward passes on."""
    for moment, size in zip(moments.forward, part.forward, strict=True):
        yield Allocation(ACTIVATIONS, size, moment, moment)
    for moment, size in zip(moments.backward, part.backward, strict=True):
        yield Allocation(PASSED_ON, size, moment, moment)
    for moment in moments.before_backward:
        yield Allocation(PASSED_ON, part.output_gradient, moment, moment)


def _of_part_at_full_bucket(
    part: Part, copies: int, moment: int, released_share: float, *, recomputes: bool
) -> Iterator[Allocation]:
    """Yield what a part still holds when a bucket of gradients is full in the middle of its backward.

    A layer whose gradients are made has let go of its activations, and of the copy of its weights.

    Args:
        part: the part.
        copies: bytes of autocast's copies of its weights.
        moment: that at which the bucket is full.
        released_share: share of the part's activations and copies that is let go of by then.
        recomputes: whether the part is computed again in backward: its copies are then made anew.
    """
    yield Allocation(ACTIVATIONS, part.kept - round(released_share * part.kept), moment, moment)
    # A block passes on as much as where its MLP is widest, for its largest weights are there.
    yield Allocation(PASSED_ON, part.backward[0] if part.block > 0 else 0, moment, moment)
    if not recomputes:
        yield Allocation(COPIES, copies - round(released_share * copies), moment, moment)


def _of_engine(rank_states: RankStates, engine: Around, axis: _Axis) -> Iterator[Allocation]:
    """Yield what the engine holds throughout, at each part, and behind backward."""
    yield from _spanning(rank_states.steady, 0, axis.step)
    yield from _spanning(engine.exchange, axis.exchange, axis.exchange)
    yield from _spanning(rank_states.step, axis.step, axis.step)
    between_by_part = _by_part(engine.between)
    for number, moments in enumerate(axis.parts):
        yield from _spanning(engine.forward[number], moments.forward[0], moments.forward[-1])
        yield from _spanning(engine.backward[number], moments.backward[0], moments.backward[-1])
        in_time = sorted(between_by_part.get(number, []), key=lambda more: more.is_bucket_full)
        for moment, more in zip((*moments.before_backward, *moments.bucket_full), in_time, strict=True):
            yield from _spanning(more.parts, moment, moment)


def highest_of_turns(turns: Sequence[StepMemory]) -> dict[str, Parts]:
    """Return the name of each moment -> bytes by purpose, in the turn of a rank in which that moment takes most."""
    highest: dict[str, Parts] = {}
    for turn in turns:
        for name, parts in turn.highest().items():
            if name not in highest or sum(parts.values()) > sum(highest[name].values()):
                highest[name] = parts
    return highest
