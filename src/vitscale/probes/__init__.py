"""Probes: each measures one quantity around steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class EpochMeter(Protocol):
    """Measures something around each epoch on every rank.

    It is a class of another package that a study names in `measure.meters`, and is made without arguments.
    """

    def begin(self, device: torch.device) -> None:
        """Begins to measure. Called before an epoch's first step, when no step is timed."""

    def end(self) -> Mapping[str, float]:
        """Ends measuring, and returns the figures of the epoch. Called after its last step, when no step is timed.

        Returns:
            Name of a figure, which ends in its unit -> a finite number: {"room_celsius": 21.5}.
        """
