"""Compares what runs ran on. Runs are combined only on equal devices, drivers, versions, settings and links."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vitscale.present.units import counted
from vitscale.processes.launch_file import LIBRARY_PATH, NETWORK_SETTINGS
from vitscale.store.records import Environment, RankRecord
from vitscale.store.results import Run

_TRANSPORT_SETTINGS = (*NETWORK_SETTINGS, "TORCH_NCCL_")
"""Beginnings of the environment variables that set the transport."""
_COMPARED_SETTINGS = (*NETWORK_SETTINGS, LIBRARY_PATH)
"""Beginnings of those that must agree. TORCH_NCCL_ settings are reported, but need not: launchers set some themselves
(torchrun, for each rank)."""
_LOGGING_SETTINGS = ("NCCL_DEBUG", "FI_LOG_", "UCX_LOG_", "SHARP_COLL_LOG_")
"""Beginnings of settings that only say what is logged, and need not agree."""


@dataclass(frozen=True)
class RunEnvironment:
    """The machines and software of a run, all ranks together."""

    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    """Different device types, by name."""
    drivers: tuple[str, ...]
    quotas: tuple[float, ...]
    """CPU quotas in cores; empty where there was none."""
    versions: tuple[tuple[str, str], ...]
    """Library and version, for libraries that were there."""
    settings: tuple[tuple[str, str], ...]
    """Settings of the transport (NCCL, gloo, their plug-ins) that were set, by variable or in a file of NCCL."""
    git_revision: str | None
    hardware: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Settings and links of hosts and GPUs: name and different values; without those that no rank recorded."""
    unheld_sm_clock_mhz: float | None = None
    """Clock of the slowest GPU while nothing but the user's setting held the clocks back."""

    def __str__(self) -> str:
        return f"{' and '.join(self.devices)} on {', '.join(self.hosts)}"

    @property
    def without_clock(self) -> RunEnvironment:
        """The same without the measured clock, which differs by a few MHz from run to run on one machine."""
        return replace(self, unheld_sm_clock_mhz=None)


def run_environments(runs: Sequence[Run]) -> list[RunEnvironment | None]:
    """Return the environment of each run, all its ranks together; None where no rank recorded it.

    Packed runs of a trial share their environments; each set of shared ones is gone through once.
    """
    environment_by_key: dict[_EnvironmentKey, RunEnvironment | None] = {}
    environment_by_run = []
    for run in runs:
        rank_environments = environments(run)
        clock = _slowest_unheld_clock(run)
        key = _EnvironmentKey(tuple(map(id, rank_environments)), clock)
        if key not in environment_by_key:
            environment_by_key[key] = _run_environment(rank_environments, clock)
        environment_by_run.append(environment_by_key[key])
    return environment_by_run


class _EnvironmentKey(NamedTuple):
    """What runs with the same `RunEnvironment` have in common."""

    identities: tuple[int, ...]
    """`id` of each rank's environment."""
    clock: float | None
    """`_slowest_unheld_clock`."""


def _slowest_unheld_clock(run: Run) -> float | None:
    """Return the clock in MHz of the run's slowest GPU while nothing but the user's setting held it back.

    It is the lowest of the ranks' highest such clocks; None where no rank has one.
    """
    clocks = [_highest_unheld_clock(rank) for rank in run.ranks]
    return min((clock for clock in clocks if clock), default=None)


def _highest_unheld_clock(rank: RankRecord) -> float:
    """Return the highest clock of a rank's GPU while nothing but the user's setting held it; 0 where unknown."""
    clocks = [line.gpu.unheld_sm_clock_mhz for line in rank.resources if line.gpu]
    return max((clock for clock in clocks if clock is not None), default=0.0)


def _run_environment(ranks: Sequence[Environment], clock: float | None) -> RunEnvironment | None:
    """Put the environments of a run's ranks together; None where no rank recorded one."""
    if not ranks:
        return None
    hosts = _unique(rank.host for rank in ranks)
    readers = _HARDWARE | _NETWORK_HARDWARE if len(hosts) > 1 else _HARDWARE
    hardware = []
    for name, value_of in readers.items():
        values = _recorded_values(ranks, value_of)
        if values:
            hardware.append((name, values))
    versions = set()
    settings = set()
    for rank in ranks:
        versions |= {(library, version) for library, version in rank.versions.items() if version is not None}
        settings |= _transport_settings(rank)
    return RunEnvironment(
        hosts=hosts,
        devices=_unique(rank.device.name for rank in ranks),
        drivers=_unique(rank.device.driver for rank in ranks if rank.device.driver is not None),
        quotas=tuple(sorted({rank.cpu_quota_cores for rank in ranks if rank.cpu_quota_cores is not None})),
        versions=tuple(sorted(versions)),
        settings=tuple(sorted(settings)),
        git_revision=next((rank.git_revision for rank in ranks if rank.git_revision is not None), None),
        hardware=tuple(hardware),
        unheld_sm_clock_mhz=clock,
    )


def _transport_settings(rank: Environment) -> set[tuple[str, str]]:
    """Return (name, value) of the settings of a rank's transport.

    On a GPU the search path for libraries is one: NCCL finds its plug-in for a network by it, and where it finds none
    it takes sockets without a word. gloo has no plug-ins.
    """
    prefixes = (*_TRANSPORT_SETTINGS, LIBRARY_PATH) if rank.device.type == "cuda" else _TRANSPORT_SETTINGS
    return {(name, value) for name, value in rank.settings.items() if name.startswith(prefixes)}


def _gpu_setting(name: str) -> Callable[[Environment], Any]:
    """Return a function that reads a setting of a rank's GPU; it gives None where there is no GPU."""

    def read(environment: Environment) -> Any:
        return getattr(environment.device.settings, name, None)

    return read


def _processor_of_gpus(environment: Environment) -> str | None:
    """Return the processor beside a GPU. On a CPU it is the device itself, and compared as such: None."""
    return environment.cpu if environment.device.type == "cuda" else None


def _network_adapters(environment: Environment) -> str | None:
    """Return the adapters of a rank's host as one text; None where none were recorded."""
    return "; ".join(environment.network_adapters or ()) or None


_HARDWARE: dict[str, Callable[[Environment], Any]] = {
    "processor": _processor_of_gpus,
    "CPU governor": operator.attrgetter("cpu_governor"),
    "CPU boost": operator.attrgetter("cpu_boost"),
    "TF32": operator.attrgetter("tf32"),
    "power limit in W": _gpu_setting("power_limit_watts"),
    "application clock in MHz": _gpu_setting("application_clock_mhz"),
    "memory's application clock in MHz": _gpu_setting("memory_application_clock_mhz"),
    "ECC": _gpu_setting("ecc"),
    "MIG": _gpu_setting("mig"),
    "PCIe generation": _gpu_setting("pcie_generation"),
    "PCIe lanes": _gpu_setting("pcie_width"),
    "NVLinks": _gpu_setting("nvlinks"),
}
"""Name in messages -> reads what decides a time besides type and versions: it must agree where both runs record it."""
_NETWORK_HARDWARE: dict[str, Callable[[Environment], Any]] = {"network adapters": _network_adapters}
"""The same for runs on several hosts alone."""
_LEAST_CLOCK_RATIO = 0.95
"""Least ratio of two clocks that count as equal. Boost clocks fall by a few percent as a GPU gets warm; locked clocks
differ by more, or cost no more than that."""


def _recorded_values(ranks: Sequence[Environment], value_of: Callable[[Environment], Any]) -> tuple[str, ...]:
    """Return the different values that ranks recorded, as texts."""
    values = [value_of(rank) for rank in ranks]
    return _unique(_as_text(value) for value in values if value is not None)


def _as_text(value: Any) -> str:
    """Return a recorded value as messages show it: "on", "300", "ondemand"."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def environments(run: Run) -> list[Environment]:
    """Return the environment of each rank that recorded it, in the order of the ranks."""
    return [rank.start.environment for rank in run.ranks if rank.start is not None]


def last_in_each_environment(runs: Sequence[Run]) -> list[Run]:
    """Return the last run of each set of runs that share the environments of their ranks, in the order of the runs.

    Packed runs of a trial mostly share the very same objects, so that one run stands for all of them.
    """
    last_by_identities: dict[tuple[int, ...], Run] = {}
    for run in runs:
        identities = tuple(map(id, environments(run)))
        last_by_identities.pop(identities, None)  # so that the run comes last again
        last_by_identities[identities] = run
    return list(last_by_identities.values())


def differences(first: RunEnvironment | None, other: RunEnvironment | None) -> tuple[str, ...]:
    """Return why two runs must not be combined; empty where they may be, or where nothing is known of one of them.

    Versions count only for libraries that both runs name, and settings of hardware only where both record them.
    """
    if first is None or other is None or first is other:
        return ()
    different = []
    if first.devices != other.devices:
        different.append(f"device: {' and '.join(first.devices)} against {' and '.join(other.devices)}")
    if first.drivers and other.drivers and first.drivers != other.drivers:
        different.append(f"driver: {', '.join(first.drivers)} against {', '.join(other.drivers)}")
    if first.quotas != other.quotas:
        different.append(f"CPU quota in cores: {_quotas_in_words(first)} against {_quotas_in_words(other)}")
    other_hardware = dict(other.hardware)
    for name, values in first.hardware:
        other_values = other_hardware.get(name, values)
        if values != other_values:
            different.append(f"{name}: {', '.join(values)} against {', '.join(other_values)}")
    different += _clock_difference(first.unheld_sm_clock_mhz, other.unheld_sm_clock_mhz)
    different += _transport_differences(_compared_transport(first), _compared_transport(other))
    other_versions = dict(other.versions)
    for library, version in first.versions:
        other_version = other_versions.get(library, version)
        if version != other_version:
            different.append(f"{library}: {version} against {other_version}")
    return tuple(different)


def _clock_difference(first: float | None, other: float | None) -> list[str]:
    """Return in words that two unheld clocks differ, if they do; both in MHz."""
    if first is None or other is None or min(first, other) >= _LEAST_CLOCK_RATIO * max(first, other):
        return []
    return [f"SM clock where neither heat nor power held it back, in MHz: {first:g} against {other:g}"]


def _transport_differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return in words the settings of the transport in which two runs differ."""
    different = []
    for name in sorted(first.keys() | other.keys()):
        if first.get(name) != other.get(name):
            different.append(f"{name}: {first.get(name, 'not set')} against {other.get(name, 'not set')}")
    return different


def largest_like_group(environment_by_run: Sequence[RunEnvironment | None]) -> list[int]:
    """Return the positions of the largest group of runs that may be combined; of equally large groups the first."""
    groups: list[list[int]] = []  # positions of the runs of each group
    for position, environment in enumerate(environment_by_run):
        group = _matching_group(environment, groups, environment_by_run)
        if group is None:
            groups.append([position])
        else:
            group.append(position)
    return max(groups, key=len, default=[])


def _matching_group(
    environment: RunEnvironment | None,
    groups: Sequence[list[int]],
    environment_by_run: Sequence[RunEnvironment | None],
) -> list[int] | None:
    """Return the first group whose first run may be combined with a run of this environment; None where none may."""
    for group in groups:
        first_environment = environment_by_run[group[0]]
        if not differences(first_environment, environment):
            return group
    return None


def oversubscription(run: Run) -> str:
    """Return how ranks shared cores or a GPU; empty where each had its own, or where it is not known.

    Pinned ranks see only their own cores, so a host's cores are those of all its ranks together.
    """
    for ranks in _ranks_by_host(run):
        are_on_gpus = ranks[0].device.type == "cuda"
        sharing = _gpu_sharing(ranks) if are_on_gpus else _core_sharing(ranks)
        if sharing:
            return sharing
    return ""


def _ranks_by_host(run: Run) -> list[list[Environment]]:
    """Return the environments of the ranks on each host, by the host's name."""
    ranks_by_host: dict[str, list[Environment]] = {}
    for rank in environments(run):
        ranks_by_host.setdefault(rank.host, []).append(rank)
    return [ranks_by_host[host] for host in sorted(ranks_by_host)]


def _gpu_sharing(ranks: Sequence[Environment]) -> str:
    """Return "2 ranks on 1 GPU" where ranks of a host share one; else empty."""
    gpus = [rank.device.uuid for rank in ranks if rank.device.uuid is not None]
    different_gpus = len(set(gpus))
    return f"{len(gpus)} ranks on {counted(different_gpus, 'GPU')}" if different_gpus < len(gpus) else ""


def _core_sharing(ranks: Sequence[Environment]) -> str:
    """Return "2 ranks x 4 threads on 4 cores" where a host has more threads than cores; else empty."""
    threads = sum(rank.threads or 0 for rank in ranks)
    allowed_cores = set(itertools.chain.from_iterable(rank.cores_allowed for rank in ranks))
    quotas = [rank.cpu_quota_cores for rank in ranks if rank.cpu_quota_cores is not None]
    cores = min([len(allowed_cores), *quotas])
    if not threads > cores > 0:
        return ""
    threads_per_rank = counted(ranks[0].threads or 0, "thread")
    return f"{counted(len(ranks), 'rank')} x {threads_per_rank} on {cores:g} core{'' if cores == 1 else 's'}"


class _CoreGroup(NamedTuple):
    """Ranks of a host whose physical cores overlap: each rank's with those of at least one other in the group."""

    cores: set[int]
    ranks: list[Environment]


def shared_physical_cores(run: Run) -> str:
    """Return how ranks share physical cores with more threads than cores; empty where none do, or where unknown.

    Ranks whose cores overlap are taken together: those that are not pinned may still have enough cores.
    """
    for ranks in _ranks_by_host(run):
        for group in _core_groups(ranks):
            threads = sum(rank.threads or 0 for rank in group.ranks)
            if len(group.ranks) > 1 and threads > len(group.cores):
                cores = counted(len(group.cores), "physical core")
                return f"{len(group.ranks)} ranks with {threads} threads on {cores}"
    return ""


def _core_groups(ranks: Sequence[Environment]) -> list[_CoreGroup]:
    """Return groups of ranks whose physical cores overlap; ranks that recorded none are in no group."""
    groups: list[_CoreGroup] = []
    for rank in ranks:
        if not rank.physical_cores:
            continue
        merged = _CoreGroup(set(rank.physical_cores), [rank])  # the rank with all groups that it overlaps
        separate = []
        for group in groups:
            if group.cores & merged.cores:
                merged = _CoreGroup(merged.cores | group.cores, [*group.ranks, *merged.ranks])
            else:
                separate.append(group)
        groups = [*separate, merged]
    return groups


def off_their_gpus_node(run: Run) -> tuple[int, ...]:
    """Return the ranks without a core on the memory node of their GPU."""
    far_ranks = []
    for rank in run.ranks:
        if rank.start is None:
            continue
        gpu_node = rank.start.environment.device.numa_node
        cpu_nodes = rank.start.environment.numa_nodes
        if gpu_node is not None and cpu_nodes is not None and gpu_node not in cpu_nodes:
            far_ranks.append(rank.rank)
    return tuple(far_ranks)


def _compared_transport(run: RunEnvironment) -> dict[str, str]:
    """Return the settings of the transport that must agree: name -> value, or "1 and 2" where its ranks differ."""
    compared: dict[str, str] = {}
    for name, value in run.settings:
        if name.startswith(_COMPARED_SETTINGS) and not name.startswith(_LOGGING_SETTINGS):
            # Hosts of a run may differ: then all values count, in their order.
            compared[name] = f"{compared[name]} and {value}" if name in compared else value
    return compared


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return each different name once, in alphabetical order."""
    return tuple(sorted(set(names)))


def _quotas_in_words(run: RunEnvironment) -> str:
    """Return the CPU quotas of a run in cores: "2, 4"; "none" without any."""
    return ", ".join(f"{quota:g}" for quota in run.quotas) or "none"
