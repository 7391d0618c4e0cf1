"""Which network interface NCCL and gloo take on a host, from what the host told of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.store.check_records import FactsLine, Interface

VIRTUAL = ("docker", "virbr", "br-", "cni", "flannel", "cali", "lxc", "lxd", "tun", "tap", "wg", "zt", "podman")
"""Beginnings of names of interfaces that lead to containers, virtual machines and tunnels, not to other hosts."""
_NCCL_LAST = ("docker", "lo", "virbr")
"""What NCCL takes only where there is nothing else."""


@dataclass(frozen=True)
class Choice:
    """What a library takes on one host."""

    variable: str
    """That would decide."""
    setting: str | None
    """Its value; None where it is not set."""
    names: tuple[str, ...]
    """Interfaces it takes; empty: the setting names none that is there."""
    address: str | None = None
    """gloo without a setting: what the host's name resolves to."""


def choice(facts: FactsLine) -> Choice:
    """What the backend of this rank takes."""
    return nccl_choice(facts) if facts.environment.backend == "nccl" else gloo_choice(facts)


def nccl_choice(facts: FactsLine) -> Choice:
    """`NCCL_SOCKET_IFNAME` is a list of beginnings of names; `^` excludes, `=` wants names whole. Without it: `ib*`
    first, then all but docker, lo and virbr, then these (NCCL user guide, environment variables; src/misc/socket.cc).
    """
    setting = facts.environment.settings.get("NCCL_SOCKET_IFNAME") or None
    usable = [one for one in facts.interfaces if one.addresses and one.up]
    if setting is not None:
        excluded, rest = setting.startswith("^"), setting.removeprefix("^")
        whole, rest = rest.startswith("="), rest.removeprefix("=")
        listed = [word for word in rest.split(",") if word]
        matching = [
            one.name
            for one in usable
            if excluded != any(one.name == word if whole else one.name.startswith(word) for word in listed)
        ]
        return Choice("NCCL_SOCKET_IFNAME", setting, tuple(matching))
    infiniband = [one.name for one in usable if one.name.startswith("ib")]
    others = [one.name for one in usable if not one.name.startswith(_NCCL_LAST)]
    last = [one.name for beginning in _NCCL_LAST for one in usable if one.name.startswith(beginning)]
    return Choice("NCCL_SOCKET_IFNAME", None, tuple(infiniband or others or last[:1]))


def gloo_choice(facts: FactsLine) -> Choice:
    """`GLOO_SOCKET_IFNAME` is a list of whole names. Without it: the address that the host's own name resolves to, and
    the loopback address where that is none of its own (torch, `ProcessGroupGloo::createDefaultDevice`).
    """
    setting = facts.environment.settings.get("GLOO_SOCKET_IFNAME") or None
    if setting is not None:
        there = {one.name for one in facts.interfaces if one.addresses}
        return Choice("GLOO_SOCKET_IFNAME", setting, tuple(n for n in setting.split(",") if n in there))
    for address in facts.hostname_addresses[:1]:
        if is_loopback(address):
            return Choice("GLOO_SOCKET_IFNAME", None, ("lo",), address)
        owner = next((one.name for one in facts.interfaces if address in bare_addresses(one)), None)
        if owner is not None:
            return Choice("GLOO_SOCKET_IFNAME", None, (owner,), address)
    return Choice("GLOO_SOCKET_IFNAME", None, ("lo",), "127.0.0.1")


def named(facts: FactsLine, names: Sequence[str]) -> list[Interface]:
    """The interfaces of these names."""
    return [one for one in facts.interfaces if one.name in names]


def bare_addresses(interface: Interface) -> list[str]:
    """Without their prefix lengths."""
    return [address.partition("/")[0] for address in interface.addresses]


def is_loopback(address: str) -> bool:
    """127.0.0.0/8, of which Debian gives 127.0.1.1 to a host's own name, and ::1."""
    return address.startswith("127.") or address == "::1"
