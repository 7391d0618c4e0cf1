"""Findings of a check about networks: whether libraries take the right interface, and whether it is fast enough.

NCCL and gloo take an interface of their own choice on each host, or the one that a variable names. An interface that
does not lead to the other hosts lets ranks wait for each other until they time out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.preflight.verdict import error, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import listed, rate
from vitscale.store.checks import CheckRecord, FactsLine, Interface

_SLOW_INTERFACE_SHARE = 0.5
"""The interface that a library takes is too slow if its speed is below this share of another's."""
_EXPECTED_LINK_SHARE = 0.5
"""Share of an interface's speed that all-reduce across nodes should reach."""


def facts_by_host(record: CheckRecord) -> dict[str, FactsLine]:
    """Return the facts of one rank of each host."""
    by_host: dict[str, FactsLine] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            by_host.setdefault(rank.facts.environment.host, rank.facts)
    return by_host


def interface_choices(record: CheckRecord) -> Iterable[Finding]:
    """Warns of the traps of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where there are several hosts."""
    facts = facts_by_host(record)
    if len(facts) < 2:
        return
    choices = {host: library_choice(host_facts) for host, host_facts in facts.items()}
    yield from _missing_interfaces(choices)
    yield from _loopback_interfaces(facts, choices)
    yield from _virtual_interfaces(choices)
    yield from _shared_addresses(facts, choices)
    yield from _slower_interfaces(facts, choices)
    yield from _unused_infiniband(facts, choices)


def _missing_interfaces(choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    """Report hosts where the variable names no interface that works."""
    hosts = [host for host, choice in choices.items() if choice.is_setting_in_vain]
    if not hosts:
        return
    choice = choices[hosts[0]]
    yield error(
        kind="interface-missing",
        message=f"{choice.variable} = '{choice.setting}' names no working interface of {listed(hosts)}",
        advice=f"Interfaces have other names there (ip -br addr): set {choice.variable} to what all hosts have, or "
        "leave it out",
        about=About(hosts=tuple(hosts)),
    )


def _loopback_interfaces(facts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    """Report hosts where the library takes the loopback interface, by the setting or by the host's own name."""
    hosts = [host for host, choice in choices.items() if choice.names == ("lo",)]
    if not hosts:
        return
    # The first host stands for all.
    host_facts = facts[hosts[0]]
    is_by_host_name = choices[hosts[0]].address is not None
    if is_by_host_name:
        addresses = host_facts.hostname_addresses
        cause = f"their own names resolve to {addresses[0] if addresses else 'no address'}"
        remedy = "Correct /etc/hosts there (Debian writes 127.0.1.1 before the host's name), or set"
    else:
        cause = "it is what is set, or all there is"
        remedy = "Set"
    fastest_first = _outward_interfaces(host_facts)
    better_name = fastest_first[0].name if fastest_first else "eth0"
    yield error(
        kind="loopback-chosen",
        message=f"{listed(hosts)} would be reached at a loopback address, which leads every other host to itself: "
        f"{cause}",
        advice=f'{remedy} launch.interface = "{better_name}" in the study',
        about=About(hosts=tuple(hosts)),
    )


def _virtual_interfaces(choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    """Warn of hosts where the library takes an interface to containers or virtual machines."""
    names = {host: choice.first_name for host, choice in choices.items() if choice.first_name is not None}
    hosts = [host for host, name in names.items() if name.startswith(VIRTUAL_PREFIXES)]
    if not hosts:
        return
    yield warning(
        kind="virtual-interface",
        message=f"{choices[hosts[0]].variable}: {listed(hosts)} would talk over {names[hosts[0]]}, which "
        "leads to containers or virtual machines and not to other hosts",
        advice="Set launch.interface in the study to the interface of the network between the hosts",
        about=About(hosts=tuple(hosts)),
    )


def _shared_addresses(facts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    """Report hosts that have the same address on the interface that the library takes, loopback apart."""
    hosts_by_address: dict[str, list[str]] = {}
    for host, choice in choices.items():
        for address in _first_addresses(facts[host], choice):
            if not is_loopback(address):
                hosts_by_address.setdefault(address, []).append(host)
    for address, hosts in hosts_by_address.items():
        if len(hosts) > 1:
            yield error(
                kind="same-address",
                message=f"{listed(hosts)} all have the address {address} on the interface that is taken "
                f"({choices[hosts[0]].first_name}): they would connect to themselves",
                advice="Set launch.interface in the study to the interface of the network between the hosts",
                about=About(hosts=tuple(hosts)),
            )


def _first_addresses(facts: FactsLine, choice: InterfaceChoice) -> list[str]:
    """Return the first address of the first interface that the library takes.

    The list is empty where there is none, and has several addresses where the host lists that interface several times.
    """
    if choice.first_name is None:
        return []
    addresses_of_entries = [bare_addresses(interface) for interface in interfaces_named(facts, (choice.first_name,))]
    return [addresses[0] for addresses in addresses_of_entries if addresses]


def _slower_interfaces(facts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    """Warn of hosts where the library takes an interface that is much slower than another one."""
    comparisons: dict[str, str] = {}
    for host, choice in choices.items():
        comparison = _much_faster_interface(facts[host], choice)
        if comparison is not None:
            comparisons[host] = comparison
    if not comparisons:
        return
    hosts = list(comparisons)
    yield warning(
        kind="slower-interface",
        message=f"{listed(hosts)}: {comparisons[hosts[0]]}",
        advice="Set launch.interface in the study to the faster one, if it leads to the other hosts",
        about=About(hosts=tuple(hosts)),
    )


def _much_faster_interface(facts: FactsLine, choice: InterfaceChoice) -> str | None:
    """Return "eth0 at 1,000 Mbit/s is taken, and eth1 has 100,000"; None where none is much faster than those taken."""
    taken_interfaces = interfaces_named(facts, choice.names)
    taken_speeds = [interface.speed_mbit for interface in taken_interfaces if interface.speed_mbit is not None]
    other_interfaces = [interface for interface in _outward_interfaces(facts) if interface.name not in choice.names]
    if not taken_speeds or not other_interfaces:
        return None
    fastest = other_interfaces[0]
    if max(taken_speeds) >= _SLOW_INTERFACE_SHARE * (fastest.speed_mbit or 0):
        return None
    return (
        f"{choice.first_name} at {max(taken_speeds):,} Mbit/s is taken, and {fastest.name} has {fastest.speed_mbit:,}"
    )


def _unused_infiniband(facts: Mapping[str, FactsLine], choices: Mapping[str, InterfaceChoice]) -> Iterable[Finding]:
    """Warn of hosts where the library leaves a working InfiniBand port unused."""
    hosts = [host for host, host_facts in facts.items() if _leaves_infiniband_unused(host_facts, choices[host])]
    if not hosts:
        return
    host_facts = facts[hosts[0]]
    port = next(port for port in host_facts.infiniband if port.active)
    if host_facts.environment.backend == "nccl":
        cause = "NCCL_IB_DISABLE keeps NCCL from it"
        advice = "Unset NCCL_IB_DISABLE"
    else:
        cause = "gloo talks over another interface"
        advice = "Set launch.interface in the study to its IP interface (ib0)"
    yield warning(
        kind="infiniband-unused",
        message=f"{listed(hosts)}: InfiniBand is there ({port.name}, {port.rate}) and {cause}",
        advice=advice,
        about=About(hosts=tuple(hosts)),
    )


def _leaves_infiniband_unused(facts: FactsLine, choice: InterfaceChoice) -> bool:
    """Whether the host has a working InfiniBand port, over which neither NCCL's verbs nor IP will go."""
    if not _has_infiniband(facts):
        return False
    environment = facts.environment
    ib_disable = environment.settings.get("NCCL_IB_DISABLE", "0")
    uses_sockets = environment.backend != "nccl" or ib_disable not in ("", "0")
    is_over_ip = any(interface.kind == "infiniband" for interface in interfaces_named(facts, choice.names))
    return uses_sockets and not is_over_ip


def _has_infiniband(facts: FactsLine) -> bool:
    return any(port.active for port in facts.infiniband)


def slow_link(record: CheckRecord) -> Iterable[Finding]:
    """Warns of all-reduce across nodes that is far below the speed of its interface."""
    speeds_mbit: list[int] = []
    for facts in facts_by_host(record).values():
        if facts.environment.backend == "nccl" and _has_infiniband(facts):
            return  # NCCL uses InfiniBand, whose speed is not that of a network interface
        interfaces = interfaces_named(facts, library_choice(facts).names)
        speeds_mbit += [interface.speed_mbit for interface in interfaces if interface.speed_mbit is not None]
    if not speeds_mbit:
        return
    possible_bytes_per_second = min(speeds_mbit) * 1e6 / 8
    for fit in record.fits:
        bandwidth = fit.bandwidth_bytes_per_second
        is_across_nodes = fit.group == "across nodes" and fit.operation == "all_reduce"
        if is_across_nodes and bandwidth < _EXPECTED_LINK_SHARE * possible_bytes_per_second:
            share = bandwidth / possible_bytes_per_second
            yield warning(
                kind="slow-link",
                message=f"all-reduce across nodes reaches {rate(bandwidth, 'B/s')}, {share:.2f} of the interface's "
                f"{rate(possible_bytes_per_second, 'B/s')}",
                advice="See whether others use the network, and whether a switch or a limit lies between the hosts "
                "(iperf3 -P 8)",
            )


def _outward_interfaces(facts: FactsLine) -> list[Interface]:
    """Return the interfaces that may lead to other hosts, the fastest first.

    These are all that work, apart from loopback and those to containers and virtual machines.
    """
    working = [interface for interface in facts.interfaces if _works(interface)]
    physical = [interface for interface in working if not interface.name.startswith(VIRTUAL_PREFIXES)]
    outward = [interface for interface in physical if interface.kind != "loopback"]
    return sorted(outward, key=lambda interface: interface.speed_mbit or 0, reverse=True)


def _works(interface: Interface) -> bool:
    """Whether an interface is up, and has an address."""
    return bool(interface.up and interface.addresses)


VIRTUAL_PREFIXES = (
    "docker",
    "virbr",
    "br-",
    "cni",
    "flannel",
    "cali",
    "lxc",
    "lxd",
    "tun",
    "tap",
    "wg",
    "zt",
    "podman",
)
"""Prefixes of interfaces that lead to containers, virtual machines and tunnels, not to other hosts."""
_NCCL_LAST_RESORT_PREFIXES = ("docker", "lo", "virbr")
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

    @property
    def is_setting_in_vain(self) -> bool:
        """Whether the variable is set, and names no interface that works."""
        return self.setting is not None and not self.names

    @property
    def first_name(self) -> str | None:
        """The first interface that the library takes; None where it takes none."""
        return self.names[0] if self.names else None


def library_choice(facts: FactsLine) -> InterfaceChoice:
    """Return the interfaces that this rank's backend takes."""
    return nccl_choice(facts) if facts.environment.backend == "nccl" else gloo_choice(facts)


class _NcclSetting(NamedTuple):
    """The value of NCCL_SOCKET_IFNAME, taken apart."""

    words: tuple[str, ...]
    excludes: bool
    """Whether it names interfaces that are not to be taken."""
    are_whole_names: bool
    """Whether the words are names; else they are the begins of names."""

    @classmethod
    def parse(cls, value: str) -> _NcclSetting:
        """Take a value apart.

        "^=eth0,lo" excludes eth0 and lo; "eth,ib" takes all interfaces whose names begin with eth or ib.
        """
        excludes = value.startswith("^")
        without_caret = value.removeprefix("^")
        are_whole_names = without_caret.startswith("=")
        word_list = without_caret.removeprefix("=")
        return cls(tuple(word for word in word_list.split(",") if word), excludes, are_whole_names)

    def allows(self, name: str) -> bool:
        """Whether NCCL may take the interface with this name."""
        is_listed = name in self.words if self.are_whole_names else name.startswith(self.words)
        return is_listed != self.excludes


def nccl_choice(facts: FactsLine) -> InterfaceChoice:
    """Return the interfaces that NCCL takes.

    `NCCL_SOCKET_IFNAME` is a list of name prefixes; `^` excludes them, and `=` makes them whole names. Without it NCCL
    takes all of `ib*`, else all but docker, lo and virbr, else the first of these (NCCL user guide, environment
    variables; src/misc/socket.cc).
    """
    value = facts.environment.settings.get("NCCL_SOCKET_IFNAME") or None
    names = [interface.name for interface in facts.interfaces if _works(interface)]
    if value is not None:
        setting = _NcclSetting.parse(value)
        allowed = tuple(name for name in names if setting.allows(name))
        return InterfaceChoice("NCCL_SOCKET_IFNAME", value, allowed)
    infiniband = [name for name in names if name.startswith("ib")]
    usual = [name for name in names if not name.startswith(_NCCL_LAST_RESORT_PREFIXES)]
    last_resorts: list[str] = []
    for prefix in _NCCL_LAST_RESORT_PREFIXES:
        last_resorts += [name for name in names if name.startswith(prefix)]
    return InterfaceChoice("NCCL_SOCKET_IFNAME", None, tuple(infiniband or usual or last_resorts[:1]))


def gloo_choice(facts: FactsLine) -> InterfaceChoice:
    """Return the interfaces that gloo takes.

    `GLOO_SOCKET_IFNAME` is a list of whole names. Without it gloo takes the address that the host's own name resolves
    to, or loopback where that address is not the host's (torch, `ProcessGroupGloo::createDefaultDevice`).
    """
    variable = "GLOO_SOCKET_IFNAME"
    setting = facts.environment.settings.get(variable) or None
    if setting is not None:
        existing = {interface.name for interface in facts.interfaces if interface.addresses}
        return InterfaceChoice(variable, setting, tuple(name for name in setting.split(",") if name in existing))
    if facts.hostname_addresses:
        address = facts.hostname_addresses[0]
        if is_loopback(address):
            return InterfaceChoice(variable, None, ("lo",), address)
        for interface in facts.interfaces:
            if address in bare_addresses(interface):
                return InterfaceChoice(variable, None, (interface.name,), address)
    return InterfaceChoice(variable, None, ("lo",), "127.0.0.1")


def interfaces_named(facts: FactsLine, names: Sequence[str]) -> list[Interface]:
    """Return the interfaces with these names."""
    return [interface for interface in facts.interfaces if interface.name in names]


def bare_addresses(interface: Interface) -> list[str]:
    """Return the interface's addresses without prefix lengths."""
    return [address.partition("/")[0] for address in interface.addresses]


def is_loopback(address: str) -> bool:
    """Whether an address is ::1 or in 127.0.0.0/8, where Debian puts a host's own name (127.0.1.1)."""
    return address.startswith("127.") or address == "::1"
