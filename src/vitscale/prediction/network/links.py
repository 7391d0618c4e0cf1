"""Links: how fast and how late bytes pass between ranks, how surely that is known, and the names they go by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vitscale.errors import RequestError, shown

Level = Literal["inside", "across"]
"""Inside a host, or across hosts."""
Source = Literal["check", "declared", "assumed"]
"""check: measured by `vitscale check`. declared: the user named the network. assumed: a prior about clusters."""


@dataclass(frozen=True)
class Link:
    """One level of a network, as a collective sees it."""

    bandwidth_bytes_per_second: float
    """Bus bandwidth (nccl-tests' convention): what passes a rank's slowest link in one direction."""
    latency_seconds: float
    """Latency of one hop: one step of a ring, one level of a tree."""
    bandwidth_spread: float
    """Standard deviation of the logarithm of the bandwidth: how surely it is known."""
    latency_spread: float
    source: Source
    described: str
    """For messages: "check of 2026-11-20, all_reduce over 2 hosts", "25GbE", "nothing measured between hosts"."""
    hosts: int | None = None
    """How many hosts a check measured it between; None where no check did, or inside one."""


@dataclass(frozen=True)
class Network:
    """The links inside hosts and across them, in general and for each operation that a check measured."""

    inside: Link
    across: Link
    by_operation: Mapping[tuple[Level, str], Link] = field(default_factory=dict)
    """(level, operation) -> what a check measured of that very operation, for three ranks or more."""
    between_two: Mapping[tuple[Level, str], Link] = field(default_factory=dict)
    """The same for two ranks alone. There some operations are slower than the link, because both neighbours in a ring
    are the same rank (gloo's all-gather takes up to half as long again); with more ranks they are not."""

    def link(self, level: Level, operation: str) -> Link:
        """The link of an operation as the field names it (all_reduce, all_gather, reduce_scatter, all_to_all, ...)."""
        return self.by_operation.get((level, operation)) or (self.inside if level == "inside" else self.across)

    def link_between_two(self, level: Level, operation: str) -> Link:
        """The link of an operation between only two ranks."""
        return self.between_two.get((level, operation)) or self.link(level, operation)


VALID = ("25GbE", "HDR", "200Gb/s", "12.5GB/s", "100mbit", "4x200Gb/s")
"""An example of each form."""

_GBIT = {
    "SDR": 8.0, "DDR": 16.0, "QDR": 32.0, "FDR": 54.3, "EDR": 100.0, "HDR100": 100.0, "HDR": 200.0, "HDR200": 200.0,
    "NDR200": 200.0, "NDR": 400.0, "NDR400": 400.0, "XDR": 800.0,
}  # fmt: skip
"""Data rates of InfiniBand's generations on four lanes: up to FDR less than they signal (8b/10b, then 64b/66b)."""
_REACHED, _REACHED_SPREAD = 0.5, 0.7
"""Share of a line rate that the collectives of a training step reach, and the standard deviation of its logarithm. A
well set up InfiniBand adapter gives nccl-tests 0.96 (its issues 119 and 290), RoCE 0.75 (nccl issue 495), TCP without
tuning 0.72; what published trainings on named networks reached is less and varies more. Both were chosen on one source
of such tables (DLPerf, EDR): its 90 % intervals hold 71 % of held-out runs with them, and 47 % with 0.85 and 0.15. On
the other source (TensorFlow on 10GbE) it is 89 and 78 %."""
_ETHERNET_LATENCY, _INFINIBAND_LATENCY = 30e-6, 10e-6
"""Latencies of a hop. NCCL reckons with 10 to 14 us on its networks (`hwLat` in src/graph/tuning.cc); TCP goes through
the kernel at both ends."""
_LATENCY_SPREAD = 0.7

_RATE = re.compile(
    r"(?:(?P<count>[0-9]{1,4})\s*[xX*]\s*)?(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*"
    r"(?:(?P<ethernet>[gG][bB][eE]|[gG][iI][gG][eE])|(?P<prefix>[kKmMgGtT])(?P<unit>[bB](?:[iI][tT])?)(?:/s|/sec|ps)?)"
)
_PREFIX = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_LANES = re.compile(r"[0-9]{1,4}\s*[xX*]\s*(?P<name>[a-zA-Z]{3}[0-9]{0,3})")


def declared_link(text: str) -> Link:
    """The link that collectives will get from a network across hosts that the user names.

    It is named as Ethernet ("25GbE"), as InfiniBand by generation ("HDR") or by rate: bits with a small b ("200Gb/s",
    "100mbit"), bytes with a large one ("12.5GB/s"), always decimal; several adapters of a host as "4x200Gb/s".

    Raises:
        RequestError: none of these forms, or a rate of 0.
    """
    named = text.strip()
    if named.upper() in _GBIT:
        return _link(named, _GBIT[named.upper()] * 1e9 / 8, _INFINIBAND_LATENCY)
    lanes = _LANES.fullmatch(named)
    if lanes is not None and lanes["name"].upper() in _GBIT:
        raise _refused(
            text,
            f"is either one link of so many lanes or so many adapters: {lanes['name'].upper()} names one adapter, "
            f"'4x{_GBIT[lanes['name'].upper()]:g}Gb/s' four",
        )
    rate = _RATE.fullmatch(named)
    if rate is None:
        raise _refused(text, "is no network that is known here")
    per_second = float(rate["number"]) * int(rate["count"] or 1)
    if rate["ethernet"]:
        per_second *= 1e9 / 8
    else:
        per_second *= _PREFIX[rate["prefix"].lower()] * (1.0 if rate["unit"] == "B" else 1 / 8)
    if per_second <= 0:
        raise _refused(text, "passes nothing")
    return _link(named, per_second, _ETHERNET_LATENCY)


def _link(named: str, bytes_per_second: float, latency: float) -> Link:
    return Link(
        bandwidth_bytes_per_second=_REACHED * bytes_per_second,
        latency_seconds=latency,
        bandwidth_spread=_REACHED_SPREAD,
        latency_spread=_LATENCY_SPREAD,
        source="declared",
        described=named,
    )


def _refused(text: str, why: str) -> RequestError:
    return RequestError(
        f"the network {shown(text)} {why}", valid=VALID, next_step="Or leave it out and measure it: `vitscale check`"
    )
