"""What saving a checkpoint and restoring it took, of the slowest rank and over a trial's runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.store.records import Run


@dataclass(frozen=True)
class CheckpointCost:
    """Medians over runs."""

    save_seconds: float
    """Until the last rank has its files on the disk."""
    load_seconds: float
    """Until the last rank has restored all; what it reads may still be in the host's memory."""
    bytes: float
    """Of all files together."""


def checkpoint_cost(runs: Sequence[Run]) -> CheckpointCost | None:
    """The cost of a checkpoint; None where no run measured it (`measure.checkpoint`)."""
    measured = [
        [rank.checkpoint for rank in run.ranks if rank.checkpoint is not None]
        for run in runs
        if any(rank.checkpoint is not None for rank in run.ranks)
    ]
    if not measured:
        return None
    return CheckpointCost(
        save_seconds=statistics.median(max(line.save_seconds for line in lines) for lines in measured),
        load_seconds=statistics.median(max(line.load_seconds for line in lines) for lines in measured),
        bytes=statistics.median(max(line.bytes for line in lines) for lines in measured),
    )
