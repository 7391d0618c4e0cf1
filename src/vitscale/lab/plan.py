"""What a laboratory shall be: checked before anything is made.

The hosts' network: a switch in a namespace of its own, and a link of known bandwidth from it to every host.

Both ends of a link are shaped where they send: a host sends at most at the rate, and receives at most at it, as over a
full-duplex cable. In a ring each host sends 2(N-1)/N*S bytes to one neighbour and gets as many from the other, so a
ring all-reduce of S bytes takes 2(N-1)/N*S/B. Shaped on the host's side alone, N-1 hosts that send to one would reach
it at N-1 times the rate.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from vitscale.errors import RequestError, shown
from vitscale.lab.processes import Process, call, call_inside
from vitscale.lab.quota import LEAST_CORES

INTERFACE = "eth0"
MOST_HOSTS = 64
_BRIDGE = "bridge0"
# A larger burst lets small messages pass at several times the rate.
_BURST = "128kb"
_LONGEST_QUEUE = "50ms"


def address(number: int) -> str:
    """The address of host `number`, from 0."""
    return f"10.77.0.{number + 1}"


def start_switch(switch: Process) -> None:
    """Makes a namespace the switch that hosts are linked to."""
    call_inside(switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
    call_inside(switch, "ip", "link", "set", _BRIDGE, "up")


def link(switch: Process, host: Process, number: int, bandwidth_mbit: float | None) -> None:
    """Links a host to the switch; None leaves the link as fast as it is."""
    port = _port(number)
    # Both ends are born inside: no interface is ever seen outside the lab.
    peer = ("peer", "name", port, "netns", str(switch.pid))
    call("ip", "link", "add", INTERFACE, "netns", str(host.pid), "type", "veth", *peer)
    call_inside(switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
    call_inside(host, "ip", "address", "add", f"{address(number)}/24", "dev", INTERFACE)
    for device in ("lo", INTERFACE):
        call_inside(host, "ip", "link", "set", device, "up")
    if bandwidth_mbit is not None:
        shape = ("tbf", "rate", f"{bandwidth_mbit:f}mbit", "burst", _BURST, "latency", _LONGEST_QUEUE)
        for end, device in ((host, INTERFACE), (switch, port)):
            call_inside(end, "tc", "qdisc", "add", "dev", device, "root", *shape)


def set_link(switch: Process, number: int, state: str) -> None:
    """Sets the switch's end of a host's link "down", which is as if its cable were pulled, or "up"."""
    call_inside(switch, "ip", "link", "set", _port(number), state)


def _port(number: int) -> str:
    return f"port{number}"


DEFAULT_NAME = "default"
LEAST_MBIT, MOST_MBIT = 1.0, 100_000.0
MOST_SLOTS = 1024
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_BANDWIDTH = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(mbit|gbit)")
_MBIT = {"mbit": 1.0, "gbit": 1000.0}


@dataclass(frozen=True)
class Plan:
    """How many hosts, and what each of them has.

    Raises:
        RequestError: a value is none that can be made.
    """

    name: str = DEFAULT_NAME
    hosts: int = 2
    bandwidth_mbit: float | None = None
    """Megabits per second that a host sends, and receives, at most; None does not limit them."""
    cores_per_host: float | None = None
    """CPU seconds per second, of all of a host's processes together; None does not limit them."""
    slots: int = 1
    """Ranks per host, as the hostfile says."""

    def __post_init__(self) -> None:
        check_name(self.name)
        _check("hosts", self.hosts, 1, MOST_HOSTS)
        _check("slots", self.slots, 1, MOST_SLOTS)
        if self.bandwidth_mbit is not None:
            _check("bandwidth in Mbit/s", self.bandwidth_mbit, LEAST_MBIT, MOST_MBIT)
        if self.cores_per_host is not None:
            _check("cores per host", self.cores_per_host, LEAST_CORES, os.cpu_count() or 1)


def check_name(name: str) -> str:
    """`name`, where a laboratory can be called so: it becomes part of paths.

    Raises:
        RequestError: it cannot.
    """
    if not _NAME.fullmatch(name):
        valid = "at most 31 of a-z, 0-9 and -, and no - in front"
        raise RequestError(f"{shown(name)} cannot be the name of a lab", valid=[valid])
    return name


def parse_bandwidth(text: str) -> float:
    """Megabits per second from "100mbit" or "1gbit".

    Raises:
        RequestError: it is written otherwise, or out of range.
    """
    match = _BANDWIDTH.fullmatch(text)
    megabits = float(match[1]) * _MBIT[match[2]] if match else math.nan
    if not LEAST_MBIT <= megabits <= MOST_MBIT:
        raise RequestError(f"{shown(text)} is no bandwidth", valid=["a number and mbit or gbit, from 1mbit to 100gbit"])
    return megabits


def _check(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # false for nan too
        raise RequestError(f"{what}: {shown(value)}", valid=[f"{least:g} to {most:g}"])
