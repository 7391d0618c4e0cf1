"""Probes: each measures one quantity around steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class EpochMeter(Protocol):
    """Measures something around each epoch on every rank: a class of another package, without arguments, that a study
    names in `measure.meters`."""

    def begin(self, device: torch.device) -> None:
        """Begins, before an epoch's first step; no step is timed now."""

    def end(self) -> Mapping[str, float]:
        """Ends, after its last step, likewise; returns name, ending in the unit -> value, finite."""
