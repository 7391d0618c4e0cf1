"""Links: how fast and how late bytes pass between ranks, and how surely that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["inside", "across"]
"""Of a host."""
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
    hosts: int | None = None
    """Between how many a check measured it; None where no check did, or inside one."""


@dataclass(frozen=True)
class Network:
    """Inside hosts and across them; the operations a check measured apart from one another."""

    inside: Link
    across: Link
    by_operation: Mapping[tuple[Level, str], Link] = field(default_factory=dict)
    """(level, operation) -> what a check measured of that very operation, for three ranks or more."""
    between_two: Mapping[tuple[Level, str], Link] = field(default_factory=dict)
    """The same of two ranks alone: there some operations are slower than the link, for both neighbours of a ring are
    one (gloo's all-gather takes up to half as long again), and with more ranks they are not."""

    def link(self, level: Level, operation: str) -> Link:
        """Of an operation as the field names it (all_reduce, all_gather, reduce_scatter, all_to_all, ...)."""
        return self.by_operation.get((level, operation)) or (self.inside if level == "inside" else self.across)

    def link_between_two(self, level: Level, operation: str) -> Link:
        """The same where two ranks are all there are."""
        return self.between_two.get((level, operation)) or self.link(level, operation)
