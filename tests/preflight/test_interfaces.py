"""Which interface NCCL and gloo take, told from what a host says of itself."""

from __future__ import annotations

import pytest

from check_factory import facts, interface
from vitscale.preflight.network_verdicts import gloo_choice, library_choice, nccl_choice

LO = interface("lo", "127.0.0.1/8", None)
ETH = interface("eth0", "10.0.0.1/24")
FAST = interface("eth1", "10.1.0.1/24", 100_000)
IB = interface("ib0", "10.2.0.1/24", 100_000)
DOCKER = interface("docker0", "172.17.0.1/16", None)
DOWN = interface("aaa0", "10.3.0.1/24", None, up=False)


@pytest.mark.parametrize(
    ("setting", "there", "taken"),
    [
        (None, (LO, DOCKER, ETH, FAST), ("eth0", "eth1")),
        (None, (LO, DOCKER, ETH, IB), ("ib0",)),
        (None, (LO, DOCKER), ("docker0",)),
        (None, (LO,), ("lo",)),
        (None, (LO, DOWN, ETH), ("eth0",)),
        ("eth", (LO, DOCKER, ETH, FAST), ("eth0", "eth1")),
        ("=eth1", (LO, ETH, FAST), ("eth1",)),
        ("=eth", (LO, ETH, FAST), ()),
        ("^docker,lo", (LO, DOCKER, ETH, IB), ("eth0", "ib0")),
        ("^=eth0,lo", (LO, ETH, FAST), ("eth1",)),
        ("enp", (LO, ETH), ()),
        ("", (LO, ETH), ("eth0",)),
    ],
)
def test_nccl(setting: str | None, there: tuple[object, ...], taken: tuple[str, ...]) -> None:
    settings = {} if setting is None else {"NCCL_SOCKET_IFNAME": setting}
    found = nccl_choice(facts(interfaces=there, settings=settings, backend="nccl"))
    assert found.names == taken


@pytest.mark.parametrize(
    ("setting", "resolved", "taken"),
    [
        (None, ("10.0.0.1",), ("eth0",)),
        (None, ("127.0.1.1", "10.0.0.1"), ("lo",)),  # Debian's /etc/hosts
        (None, ("172.17.0.1",), ("docker0",)),
        (None, ("192.0.2.77",), ("lo",)),  # an address of somebody else's
        (None, (), ("lo",)),
        ("eth0", ("127.0.1.1",), ("eth0",)),
        ("eth0,eth1", ("127.0.1.1",), ("eth0", "eth1")),
        ("enp1s0", ("10.0.0.1",), ()),
        ("eth", ("10.0.0.1",), ()),  # gloo wants whole names
    ],
)
def test_gloo(setting: str | None, resolved: tuple[str, ...], taken: tuple[str, ...]) -> None:
    settings = {} if setting is None else {"GLOO_SOCKET_IFNAME": setting}
    there = (LO, DOCKER, ETH, FAST)
    found = gloo_choice(facts(interfaces=there, hostname_addresses=resolved, settings=settings))
    assert found.names == taken


def test_the_backend_decides_which_rules_hold() -> None:
    assert library_choice(facts(backend="nccl")).variable == "NCCL_SOCKET_IFNAME"
    assert library_choice(facts(backend="gloo")).variable == "GLOO_SOCKET_IFNAME"
