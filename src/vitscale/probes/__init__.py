"""Probes: each measures one quantity around steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Probe(Protocol):
    """What another package measures (`measure.probes`), on every rank: a class without arguments."""

    def begin(self, device: torch.device) -> None:
        """Called before an epoch's first step, while no step is timed."""

    def end(self) -> Mapping[str, float]:
        """Called after its last step, likewise: name, ending in the unit -> value, finite."""
