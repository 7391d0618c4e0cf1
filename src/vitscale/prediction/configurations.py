"""A configuration of a workload, and what is expected of many of them, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.engines.variants import EngineVariant
from vitscale.prediction.results import Label, predicted
from vitscale.present.estimate import Estimate
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance  # with readers of tables


@dataclass(frozen=True)
class Candidate:
    """One configuration. All that it does not name is as in the series."""

    gpus: int
    ranks_per_node: int
    variant: EngineVariant
    micro_batch: int
    grad_accum: int
    activation_checkpointing: bool = False
    instance: Instance | None = None
    """What it is rented as; None: hosts like the measured ones."""
    parallel: ParallelSpec = NO_SPLIT
    """How many of the ranks share a model."""
    second_shard_ranks: int = 1
    """Ranks that share a second shard of the weights, as `TrainSpec.hpz`."""

    @staticmethod
    def of(trial: Trial) -> Candidate:
        """A trial's own configuration, with the largest of unequal micro-batches."""
        train, world = trial.train, trial.world
        return Candidate(
            world.size, world.ranks_per_node, EngineVariant.of_train(train), largest_micro_batch(train),
            train.grad_accum, train.activation_checkpointing, None, trial.parallel, train.hpz,
        )  # fmt: skip

    @property
    def engine(self) -> str:
        """The name of the engine, as a study writes it."""
        return self.variant.engine

    @property
    def changes(self) -> dict[str, Any]:
        """All that it may change of a series, but ranks and batch: see `variants.variant`."""
        changes: dict[str, Any] = {
            **self.variant.changes,
            "activation_checkpointing": self.activation_checkpointing,
            "hpz": self.second_shard_ranks,
            "parallel": self.parallel,
        }
        if self.instance is not None:
            changes["gpu"] = self.instance.gpu
            changes |= {} if self.instance.network is None else {"network": self.instance.network}
        return changes

    @property
    def global_batch(self) -> int:
        """Images of an optimizer step, all ranks together."""
        return self.gpus // self.parallel.ranks_per_model * self.micro_batch * self.grad_accum

    @property
    def alone(self) -> Candidate:
        """The same on one rank, which has the model for itself."""
        return replace(self, gpus=1, ranks_per_node=1, parallel=NO_SPLIT)


def column(candidates: Sequence[Candidate], name: str) -> FloatArray:
    """A number of every configuration, (configurations,)."""
    return np.fromiter(map(attrgetter(name), candidates), float, len(candidates))


@dataclass(frozen=True)
class Estimates:
    """`Estimate` of many configurations: an array for each of its numbers."""

    value: FloatArray
    low: FloatArray
    high: FloatArray
    future_low: FloatArray
    future_high: FloatArray

    def at(self, n: int) -> Estimate:
        """The estimate of one configuration."""
        return predicted(*(float(getattr(self, field.name)[n]) for field in fields(self)))

    def halfway(self, other: Estimates) -> Estimates:
        """The geometric means of these numbers and the other's."""
        return Estimates(*(np.sqrt(getattr(self, each.name) * getattr(other, each.name)) for each in fields(self)))


@dataclass(frozen=True)
class Evaluated:
    """What is expected of configurations: arrays with a place for each; NaN is unavailable."""

    step: Estimates
    """Seconds."""
    speed: Estimates
    """Seconds of the base's step over those of the configuration's own."""
    parts: dict[str, Estimates]
    """Seconds of compute (with the optimizer), wait, wire, norm and bubble; empty unless they were asked for."""
    memory_bytes: FloatArray
    """Peak bytes of a rank's tensors."""
    oom_chance: FloatArray
    """Chance that a rank's device runs out of memory."""
    host_memory_bytes: FloatArray
    """Bytes that all ranks of a host offload to its memory together; 0 where none are offloaded."""
    host_oom_chance: FloatArray
    """Chance that a host runs out of memory by what is offloaded; 0 where nothing is."""
    labels: tuple[Label, ...]


def joined(pieces: Sequence[Estimates]) -> Estimates:
    """Pieces one after the other, as one."""
    columns = ([getattr(piece, field.name) for piece in pieces] for field in fields(Estimates))
    return Estimates(*(np.concatenate([np.empty(0), *values]) for values in columns))


def gathered(pieces: Sequence[tuple[list[int], Evaluated]]) -> Evaluated:
    """Pieces as one, each given with the places of its configurations in the whole. Parts are left out."""
    order = np.argsort(np.array([n for members, _ in pieces for n in members], dtype=int))

    def gathered_column(of: Callable[[Evaluated], FloatArray]) -> FloatArray:
        return np.concatenate([np.empty(0), *(of(piece) for _, piece in pieces)])[order]

    def estimates(of: Callable[[Evaluated], Estimates]) -> Estimates:
        whole = joined([of(piece) for _, piece in pieces])
        return Estimates(*(getattr(whole, field.name)[order] for field in fields(whole)))

    labels = [label for _, piece in pieces for label in piece.labels]
    return Evaluated(
        step=estimates(lambda piece: piece.step),
        speed=estimates(lambda piece: piece.speed),
        parts={},
        memory_bytes=gathered_column(lambda piece: piece.memory_bytes),
        oom_chance=gathered_column(lambda piece: piece.oom_chance),
        host_memory_bytes=gathered_column(lambda piece: piece.host_memory_bytes),
        host_oom_chance=gathered_column(lambda piece: piece.host_oom_chance),
        labels=tuple(labels[n] for n in order),
    )
