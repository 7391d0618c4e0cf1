"""What runs ran on, and whether two runs may be combined: like devices, drivers, versions, settings and links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitscale.present.units import counted
from vitscale.store.records import Environment
from vitscale.store.results import Run

_TRANSPORT_SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_MUST_AGREE = ("NCCL_", "GLOO_")
"""TORCH_NCCL_ settings are reported, but need not agree: launchers set some themselves (torchrun, for each rank)."""
_NO_MATTER = ("NCCL_DEBUG",)
"""Beginnings of settings that only say what is logged."""


@dataclass(frozen=True)
class RunEnvironment:
    """What a run's ranks ran on, all ranks together."""

    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    """Different device types, by name."""
    drivers: tuple[str, ...]
    quotas: tuple[float, ...]
    """CPU quotas in cores; empty where there was none."""
    versions: tuple[tuple[str, str], ...]
    """Library and version, for libraries that were there."""
    settings: tuple[tuple[str, str], ...]
    """Settings of the transport (NCCL, gloo) that were set."""
    git_revision: str | None
    hardware: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Settings and links of hosts and GPUs: name and different values; without what the ranks could not tell."""
    unheld_sm_clock_mhz: float | None = None
    """Clock of the slowest GPU while nothing but the user's setting held the clocks back."""

    def __str__(self) -> str:
        return f"{' and '.join(self.devices)} on {', '.join(self.hosts)}"

    @property
    def without_clock(self) -> RunEnvironment:
        """The same without the measured clock, which differs by a few MHz from run to run on one machine."""
        return replace(self, unheld_sm_clock_mhz=None)


def run_environments(runs: Sequence[Run]) -> list[RunEnvironment | None]:
    """The environment of each run, all its ranks together; None where no rank recorded it.

    Packed runs of a trial share their environments; what they share is gone through once.
    """
    known: dict[tuple[tuple[int, ...], float | None], RunEnvironment | None] = {}
    around = []
    for run in runs:
        of_ranks, clock = environments(run), _slowest_unheld_clock(run)
        key = (tuple(map(id, of_ranks)), clock)
        if key not in known:
            known[key] = _environment(of_ranks, clock)
        around.append(known[key])
    return around


def _slowest_unheld_clock(run: Run) -> float | None:
    clocks = [
        max((line.gpu.unheld_sm_clock_mhz or 0.0 for line in rank.resources if line.gpu), default=0.0)
        for rank in run.ranks
    ]
    return min(filter(None, clocks), default=None)


def _environment(of_ranks: Sequence[Environment], clock: float | None) -> RunEnvironment | None:
    if not of_ranks:
        return None
    hosts = _unique(e.host for e in of_ranks)
    asked = _HARDWARE | (_BETWEEN_HOSTS if len(hosts) > 1 else {})
    return RunEnvironment(
        hosts=hosts,
        devices=_unique(e.device.name for e in of_ranks),
        drivers=_unique(e.device.driver for e in of_ranks if e.device.driver is not None),
        quotas=tuple(sorted({e.cpu_quota_cores for e in of_ranks if e.cpu_quota_cores is not None})),
        versions=tuple(sorted({(k, v) for e in of_ranks for k, v in e.versions.items() if v is not None})),
        settings=tuple(
            sorted({(k, v) for e in of_ranks for k, v in e.settings.items() if k.startswith(_TRANSPORT_SETTINGS)})
        ),
        git_revision=next((e.git_revision for e in of_ranks if e.git_revision is not None), None),
        hardware=tuple((name, values) for name, ask in asked.items() if (values := _told(of_ranks, ask))),
        unheld_sm_clock_mhz=clock,
    )


def _gpu(name: str) -> Callable[[Environment], Any]:
    return lambda environment: getattr(environment.device.settings, name, None)


_HARDWARE: dict[str, Callable[[Environment], Any]] = {
    "processor": lambda environment: environment.cpu if environment.device.type == "cuda" else None,
    "CPU governor": lambda environment: environment.cpu_governor,
    "CPU boost": lambda environment: environment.cpu_boost,
    "TF32": lambda environment: environment.tf32,
    "power limit in W": _gpu("power_limit_watts"),
    "application clock in MHz": _gpu("application_clock_mhz"),
    "memory's application clock in MHz": _gpu("memory_application_clock_mhz"),
    "ECC": _gpu("ecc"),
    "MIG": _gpu("mig"),
    "PCIe generation": _gpu("pcie_generation"),
    "PCIe lanes": _gpu("pcie_width"),
    "NVLinks": _gpu("nvlinks"),
}
"""What decides a time besides type and versions, and must agree where both runs record it."""
_BETWEEN_HOSTS: dict[str, Callable[[Environment], Any]] = {
    "network adapters": lambda environment: "; ".join(environment.network_adapters or ()) or None
}
"""The same for runs on several hosts."""
_LIKE_CLOCKS = 0.95
"""Boost clocks fall by a few percent as a GPU gets warm; locked clocks differ by more, or cost no more than that."""


def _told(of_ranks: Sequence[Environment], ask: Callable[[Environment], Any]) -> tuple[str, ...]:
    values = [ask(environment) for environment in of_ranks]
    return _unique(_shown(value) for value in values if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def environments(run: Run) -> list[Environment]:
    """The environment of each rank that recorded it, in the order of the ranks."""
    return [rank.start.environment for rank in run.ranks if rank.start is not None]


def in_unlike_places(runs: Sequence[Run]) -> list[Run]:
    """The runs but those whose ranks have the very environments of a later one, as packed runs of a trial mostly do."""
    latest: dict[tuple[int, ...], Run] = {}
    for run in runs:
        key = tuple(map(id, environments(run)))
        latest.pop(key, None)
        latest[key] = run
    return list(latest.values())


def differences(first: RunEnvironment | None, other: RunEnvironment | None) -> tuple[str, ...]:
    """Why two runs must not be combined; empty where nothing speaks against it, or where nothing is known.

    Versions count only for libraries that both runs name, and settings of hardware only where both record them.
    """
    if first is None or other is None or first is other:
        return ()
    differing = []
    if first.devices != other.devices:
        differing.append(f"device: {' and '.join(first.devices)} against {' and '.join(other.devices)}")
    if first.drivers and other.drivers and first.drivers != other.drivers:
        differing.append(f"driver: {', '.join(first.drivers)} against {', '.join(other.drivers)}")
    if first.quotas != other.quotas:
        differing.append(f"CPU quota in cores: {_quota(first)} against {_quota(other)}")
    hardware = dict(other.hardware)
    differing += [
        f"{name}: {', '.join(values)} against {', '.join(hardware[name])}"
        for name, values in first.hardware
        if name in hardware and hardware[name] != values
    ]
    clocks = [clock for clock in (first.unheld_sm_clock_mhz, other.unheld_sm_clock_mhz) if clock is not None]
    if len(clocks) == 2 and min(clocks) < _LIKE_CLOCKS * max(clocks):
        differing.append(
            f"SM clock where neither heat nor power held it back, in MHz: {clocks[0]:g} against {clocks[1]:g}"
        )
    settings, others = _transport(first), _transport(other)
    differing += [
        f"{name}: {settings.get(name, 'not set')} against {others.get(name, 'not set')}"
        for name in sorted(settings.keys() | others.keys())
        if settings.get(name) != others.get(name)
    ]
    theirs = dict(other.versions)
    differing += [
        f"{library}: {version} against {theirs[library]}"
        for library, version in first.versions
        if library in theirs and theirs[library] != version
    ]
    return tuple(differing)


def largest_like_group(around: Sequence[RunEnvironment | None]) -> list[int]:
    """The places in `around` of the largest group of runs that may be combined; of equally large groups the first."""
    groups: list[list[int]] = []
    for index, environment in enumerate(around):
        home = next((group for group in groups if not differences(around[group[0]], environment)), None)
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    return max(groups, key=len, default=[])


def oversubscription(run: Run) -> str:
    """How ranks shared cores or a GPU; empty where each had its own, or where it is not known.

    Pinned ranks see only their own cores, so a host's cores are those of all its ranks together.
    """
    of_ranks = environments(run)
    for host in _unique(e.host for e in of_ranks):
        here = [e for e in of_ranks if e.host == host]
        if here[0].device.type == "cuda":
            uuids = [e.device.uuid for e in here if e.device.uuid is not None]
            if len(set(uuids)) < len(uuids):
                return f"{len(uuids)} ranks on {counted(len(set(uuids)), 'GPU')}"
            continue
        threads = sum(e.threads or 0 for e in here)
        cores: float = len({core for e in here for core in e.cores_allowed})
        quotas = [e.cpu_quota_cores for e in here if e.cpu_quota_cores is not None]
        cores = min([cores, *quotas])
        if threads > cores > 0:
            ranks, each = counted(len(here), "rank"), counted(here[0].threads or 0, "thread")
            return f"{ranks} x {each} on {cores:g} core{'' if cores == 1 else 's'}"
    return ""


def shared_physical_cores(run: Run) -> str:
    """How ranks share physical cores with more threads than cores; empty where none do, or where it is not known.

    Ranks whose cores overlap are taken together: those that are not pinned may still have enough cores.
    """
    of_ranks = environments(run)
    for host in _unique(e.host for e in of_ranks):
        groups: list[tuple[set[int], list[Environment]]] = []
        for environment in (e for e in of_ranks if e.host == host and e.physical_cores):
            cores, members = set(environment.physical_cores or ()), [environment]
            for group in [group for group in groups if group[0] & cores]:
                groups.remove(group)
                cores, members = cores | group[0], [*group[1], *members]
            groups.append((cores, members))
        for cores, members in groups:
            threads = sum(e.threads or 0 for e in members)
            if len(members) > 1 and threads > len(cores):
                return f"{len(members)} ranks with {threads} threads on {counted(len(cores), 'physical core')}"
    return ""


def off_their_gpus_node(run: Run) -> tuple[int, ...]:
    """The ranks without a core on the memory node of their GPU."""
    return tuple(
        rank.rank
        for rank in run.ranks
        if rank.start is not None
        and (near := rank.start.environment.device.numa_node) is not None
        and (nodes := rank.start.environment.numa_nodes) is not None
        and near not in nodes
    )


def _transport(run: RunEnvironment) -> dict[str, str]:
    return {k: v for k, v in run.settings if k.startswith(_MUST_AGREE) and not k.startswith(_NO_MATTER)}


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def _quota(run: RunEnvironment) -> str:
    return ", ".join(f"{quota:g}" for quota in run.quotas) or "none"
