"""Two hosts on one machine: network namespaces joined by a link of known bandwidth. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

INTERFACE = "eth0"
# A larger burst lets small messages pass at several times the rate.
_BURST = "128kb"


class Hosts:
    """Namespaces by number, each with the address 10.77.0.(number + 1) on its `eth0`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as it is run on a host; the process keeps its identity and its environment."""
        return ["ip", "netns", "exec", self.names[host], *argv]


@contextmanager
def two_hosts(megabits_per_second: float | None) -> Iterator[Hosts]:
    """Two hosts, each sending at most at the given rate; None leaves the link as fast as it is.

    Skips the test, with the reason, where namespaces cannot be made.
    """
    names = [f"vitscale-{os.getpid()}-{host}" for host in (0, 1)]
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("two hosts cannot be made: install iproute2")
    made: list[str] = []
    try:
        for name in names:
            answer = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if answer.returncode != 0:
                pytest.skip(f"two hosts cannot be made: {answer.stderr.strip()}")
            made.append(name)
        _run("ip", "link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", INTERFACE, "netns", names[1])
        for host, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if megabits_per_second is not None:
                shape = ["tbf", "rate", f"{megabits_per_second:g}mbit", "burst", _BURST, "latency", "50ms"]
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield Hosts(names)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
