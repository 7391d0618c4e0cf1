"""Links: how fast and how late bytes pass between ranks, and how surely that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Source = Literal["check", "declared", "assumed"]
"""check: measured by `vitscale check`. declared: the user named the network. assumed: a prior about clusters."""


@dataclass(frozen=True)
class Link:
    """One level of a network, as a collective sees it."""

    bandwidth_bytes_per_second: float
    """Bus bandwidth (nccl-tests' convention): what passes a rank's slowest link in one direction."""
    latency_seconds: float
    """Of one hop: one step of a ring, one level of a tree."""
    bandwidth_spread: float
    """Standard deviation of the logarithm of the bandwidth: how surely it is known."""
    latency_spread: float
    source: Source
    described: str
    """For messages: "check of 2026-11-20, all_reduce over 2 hosts", "25GbE", "nothing measured between hosts"."""


@dataclass(frozen=True)
class Network:
    """Inside hosts and across them; the operations a check measured apart from one another."""

    inside: Link
    across: Link
    by_operation: Mapping[tuple[Literal["inside", "across"], str], Link] = field(default_factory=dict)
    """(level, operation) -> what a check measured of that very operation, where it did."""

    def link(self, level: Literal["inside", "across"], operation: str) -> Link:
        """Of an operation as the field names it (all_reduce, all_gather, reduce_scatter, all_to_all, ...)."""
        return self.by_operation.get((level, operation)) or (self.inside if level == "inside" else self.across)
