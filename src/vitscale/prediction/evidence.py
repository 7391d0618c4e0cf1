"""What a results folder says for a prediction: series of measured points, and the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitscale.prediction.network.links import Network
from vitscale.trial import Mode, Trial


@dataclass(frozen=True)
class StepParts:
    """Mean seconds of an explained step, of the rank with the median wait. None where unknown."""

    compute: float
    """Copies to the device, forward and backward, and what lies between them."""
    backward: float | None
    """Of `compute`: backward alone, under which transfers may hide."""
    optimizer: float | None
    data_wait: float | None
    wait: float | None
    wire: float | None
    exposed: float
    """Wait and wire together; known also where they cannot be told apart."""


@dataclass(frozen=True)
class Point:
    """One measured trial."""

    trial_id: str
    trial: Trial
    nodes: int
    images: int | None
    """Of an epoch, all ranks together."""
    steps_per_epoch: int | None
    step_seconds: tuple[float, ...]
    """Of each run: its median light step; where only epochs were recorded, its median epoch over the epoch's steps."""
    parts: StepParts | None = None
    sent_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What an optimizer step was counted to send: (operation, dtype) -> bytes of the whole tensors, all calls together;
    empty where it was not counted."""
    sent_calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The same, the number of calls."""
    devices: tuple[str, ...] = ()
    """The device of each rank, by name; empty where unknown."""
    rank_speeds: tuple[float, ...] | None = None
    """Of each rank against the fastest."""
    step_spread: float | None = None
    """Of like steps within a run: standard deviation over median, robustly (interquartile range / 1.349)."""
    joules_per_image: float | None = None
    startup_seconds: float | None = None
    memory_capacity_bytes: int | None = None

    @property
    def gpus(self) -> int:
        """Ranks."""
        return self.trial.world.size


@dataclass(frozen=True)
class Series:
    """Points that differ in rank count alone, under one batch policy: what a prediction continues."""

    name: str
    mode: Mode
    labels: Mapping[str, Any]
    points: tuple[Point, ...]
    """By rank count; only those with a completed run."""


@dataclass(frozen=True)
class Evidence:
    """All that a prediction rests on."""

    series: tuple[Series, ...]
    network: Network
    """What is known of it: measured by a check, declared by the user, or nothing."""
