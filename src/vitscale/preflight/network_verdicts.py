"""Will the libraries take the right network interface, and is it as fast as it should be?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vitscale.preflight.verdict import error, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import listed, rate
from vitscale.store.checks import CheckRecord, FactsLine, Interface

_SLOWER = 0.5
"""The interface taken is too slow if its speed is below this share of another's."""
_LINK_SHARE = 0.5
"""Share of an interface's speed that all-reduce across nodes should reach."""


def facts_by_host(record: CheckRecord) -> dict[str, FactsLine]:
    """The facts of one rank of each host."""
    by_host: dict[str, FactsLine] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            by_host.setdefault(rank.facts.environment.host, rank.facts)
    return by_host


def interface_choices(record: CheckRecord) -> Iterable[Finding]:
    """The traps of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where there are several hosts."""
    hosts = facts_by_host(record)
    if len(hosts) < 2:
        return
    choices = {host: library_choice(facts) for host, facts in hosts.items()}
    yield from _lacking(choices)
    yield from _loopback(hosts, choices)
    yield from _virtual(choices)
    yield from _same_address(hosts, choices)
    yield from _slower(hosts, choices)
    yield from _unused_infiniband(hosts, choices)


def _lacking(choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    lacking = [host for host, choice in choices.items() if choice.setting is not None and not choice.names]
    if lacking:
        choice = choices[lacking[0]]
        yield error(
            "interface-missing",
            f"{choice.variable} = '{choice.setting}' names no working interface of {listed(lacking)}",
            f"Interfaces have other names there (ip -br addr): set {choice.variable} to what all hosts have, or leave "
            "it out",
            About(hosts=tuple(lacking)),
        )


def _loopback(hosts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    alone = [host for host, choice in choices.items() if choice.names == ("lo",)]
    if not alone:
        return
    choice = choices[alone[0]]
    if choice.address is not None:
        resolved = hosts[alone[0]].hostname_addresses
        why = f"their own names resolve to {resolved[0]}" if resolved else "their own names resolve to no address"
        how = "Correct /etc/hosts there (Debian writes 127.0.1.1 before the host's name), or set"
    else:
        why, how = "it is what is set, or all there is", "Set"
    candidate = next((nic.name for nic in _outward(hosts[alone[0]])), "eth0")
    yield error(
        "loopback-chosen",
        f"{listed(alone)} would be reached at a loopback address, which leads every other host to itself: {why}",
        f'{how} launch.interface = "{candidate}" in the study',
        About(hosts=tuple(alone)),
    )


def _virtual(choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    wrong = {host: c.names[0] for host, c in choices.items() if c.names and c.names[0].startswith(VIRTUAL)}
    if wrong:
        host, name = next(iter(wrong.items()))
        yield warning(
            "virtual-interface",
            f"{choices[host].variable}: {listed([*wrong])} would talk over {name}, which leads to containers or "
            "virtual machines and not to other hosts",
            "Set launch.interface in the study to the interface of the network between the hosts",
            About(hosts=tuple(wrong)),
        )


def _same_address(hosts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    owners: dict[str, list[str]] = {}
    for host, choice in choices.items():
        for nic in named(hosts[host], choice.names[:1]):
            for address in bare_addresses(nic)[:1]:
                if not is_loopback(address):
                    owners.setdefault(address, []).append(host)
    for address, several in owners.items():
        if len(several) > 1:
            yield error(
                "same-address",
                f"{listed(several)} all have the address {address} on the interface that is taken "
                f"({choices[several[0]].names[0]}): they would connect to themselves",
                "Set launch.interface in the study to the interface of the network between the hosts",
                About(hosts=tuple(several)),
            )


def _slower(hosts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    slower = {}
    for host, choice in choices.items():
        taken = [nic.speed_mbit for nic in named(hosts[host], choice.names) if nic.speed_mbit is not None]
        best = next((nic for nic in _outward(hosts[host]) if nic.name not in choice.names), None)
        if taken and best is not None and max(taken) < _SLOWER * (best.speed_mbit or 0):
            slower[host] = (
                f"{choice.names[0]} at {max(taken):,} Mbit/s is taken, and {best.name} has {best.speed_mbit:,}"
            )
    if slower:
        host, how = next(iter(slower.items()))
        yield warning(
            "slower-interface",
            f"{listed([*slower])}: {how}",
            "Set launch.interface in the study to the faster one, if it leads to the other hosts",
            About(hosts=tuple(slower)),
        )


def _unused_infiniband(hosts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    active = [host for host, facts in hosts.items() if any(port.active for port in facts.infiniband)]
    unused = []
    for host in active:
        environment = hosts[host].environment
        by_socket = environment.backend != "nccl" or environment.settings.get("NCCL_IB_DISABLE", "0") not in ("", "0")
        over_ip = any(nic.kind == "infiniband" for nic in named(hosts[host], choices[host].names))
        if by_socket and not over_ip:
            unused.append(host)
    if unused:
        port = next(port for port in hosts[unused[0]].infiniband if port.active)
        nccl = hosts[unused[0]].environment.backend == "nccl"
        yield warning(
            "infiniband-unused",
            f"{listed(unused)}: InfiniBand is there ({port.name}, {port.rate}) and "
            + ("NCCL_IB_DISABLE keeps NCCL from it" if nccl else "gloo talks over another interface"),
            "Unset NCCL_IB_DISABLE" if nccl else "Set launch.interface in the study to its IP interface (ib0)",
            About(hosts=tuple(unused)),
        )


def slow_link(record: CheckRecord) -> Iterable[Finding]:
    """All-reduce across nodes that is far below the speed of its interface."""
    hosts = facts_by_host(record)
    speeds = []
    for facts in hosts.values():
        choice = library_choice(facts)
        if facts.environment.backend == "nccl" and any(port.active for port in facts.infiniband):
            return  # NCCL uses InfiniBand, whose speed is not that of a network interface
        speeds += [nic.speed_mbit for nic in named(facts, choice.names) if nic.speed_mbit is not None]
    for fit in record.fits:
        if fit.group == "across nodes" and fit.operation == "all_reduce" and speeds:
            possible = min(speeds) * 1e6 / 8
            if fit.bandwidth_bytes_per_second < _LINK_SHARE * possible:
                reached = fit.bandwidth_bytes_per_second / possible
                yield warning(
                    "slow-link",
                    f"all-reduce across nodes reaches {rate(fit.bandwidth_bytes_per_second, 'B/s')}, {reached:.2f} of "
                    f"the interface's {rate(possible, 'B/s')}",
                    "See whether others use the network, and whether a switch or a limit lies between the hosts "
                    "(iperf3 -P 8)",
                )


def _outward(facts: FactsLine) -> list[Interface]:
    """Interfaces that may lead to other hosts, as far as can be seen here, the fastest first."""
    usable = [
        nic
        for nic in facts.interfaces
        if nic.up and nic.addresses and nic.kind != "loopback" and not nic.name.startswith(VIRTUAL)
    ]
    return sorted(usable, key=lambda nic: -(nic.speed_mbit or 0))


VIRTUAL = ("docker", "virbr", "br-", "cni", "flannel", "cali", "lxc", "lxd", "tun", "tap", "wg", "zt", "podman")
"""Prefixes of interfaces that lead to containers, virtual machines and tunnels, not to other hosts."""
_NCCL_LAST = ("docker", "lo", "virbr")
"""Prefixes of interfaces that NCCL takes only where there are no others."""


@dataclass(frozen=True)
class InterfaceChoice:
    """The network interfaces that a library takes on one host."""

    variable: str
    """Name of the variable that sets them."""
    setting: str | None
    """The variable's value; None where it is not set."""
    names: tuple[str, ...]
    """Interfaces that the library takes; empty: the setting names none that exists."""
    address: str | None = None
    """For gloo without a setting: the address that the host's name resolves to."""


def library_choice(facts: FactsLine) -> InterfaceChoice:
    """The interfaces that this rank's backend takes."""
    return nccl_choice(facts) if facts.environment.backend == "nccl" else gloo_choice(facts)


def nccl_choice(facts: FactsLine) -> InterfaceChoice:
    """The interfaces that NCCL takes.

    `NCCL_SOCKET_IFNAME` is a list of name prefixes; `^` excludes them, and `=` makes them whole names. Without it NCCL
    takes `ib*`, else all but docker, lo and virbr, else these (NCCL user guide, environment variables;
    src/misc/socket.cc).
    """
    setting = facts.environment.settings.get("NCCL_SOCKET_IFNAME") or None
    usable = [nic for nic in facts.interfaces if nic.addresses and nic.up]
    if setting is not None:
        excluded, rest = setting.startswith("^"), setting.removeprefix("^")
        whole, rest = rest.startswith("="), rest.removeprefix("=")
        listed = [word for word in rest.split(",") if word]
        matching = [
            nic.name
            for nic in usable
            if excluded != any(nic.name == word if whole else nic.name.startswith(word) for word in listed)
        ]
        return InterfaceChoice("NCCL_SOCKET_IFNAME", setting, tuple(matching))
    infiniband = [nic.name for nic in usable if nic.name.startswith("ib")]
    others = [nic.name for nic in usable if not nic.name.startswith(_NCCL_LAST)]
    last = [nic.name for beginning in _NCCL_LAST for nic in usable if nic.name.startswith(beginning)]
    return InterfaceChoice("NCCL_SOCKET_IFNAME", None, tuple(infiniband or others or last[:1]))


def gloo_choice(facts: FactsLine) -> InterfaceChoice:
    """The interfaces that gloo takes.

    `GLOO_SOCKET_IFNAME` is a list of whole names. Without it gloo takes the address that the host's own name resolves
    to, or loopback where that address is not the host's (torch, `ProcessGroupGloo::createDefaultDevice`).
    """
    setting = facts.environment.settings.get("GLOO_SOCKET_IFNAME") or None
    if setting is not None:
        there = {nic.name for nic in facts.interfaces if nic.addresses}
        return InterfaceChoice("GLOO_SOCKET_IFNAME", setting, tuple(n for n in setting.split(",") if n in there))
    for address in facts.hostname_addresses[:1]:
        if is_loopback(address):
            return InterfaceChoice("GLOO_SOCKET_IFNAME", None, ("lo",), address)
        owner = next((nic.name for nic in facts.interfaces if address in bare_addresses(nic)), None)
        if owner is not None:
            return InterfaceChoice("GLOO_SOCKET_IFNAME", None, (owner,), address)
    return InterfaceChoice("GLOO_SOCKET_IFNAME", None, ("lo",), "127.0.0.1")


def named(facts: FactsLine, names: Sequence[str]) -> list[Interface]:
    """The interfaces with these names."""
    return [nic for nic in facts.interfaces if nic.name in names]


def bare_addresses(nic: Interface) -> list[str]:
    """The interface's addresses without prefix lengths."""
    return [address.partition("/")[0] for address in nic.addresses]


def is_loopback(address: str) -> bool:
    """Whether an address is ::1 or in 127.0.0.0/8, where Debian puts a host's own name (127.0.1.1)."""
    return address.startswith("127.") or address == "::1"
