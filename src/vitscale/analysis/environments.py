"""Where runs ran, and whether two runs may be combined: like devices, drivers, library versions and CPU quota."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vitscale.record import Environment, Run

_TRANSPORT_SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_")


@dataclass(frozen=True)
class Surroundings:
    """What a run's ranks ran on, all ranks together."""

    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    """Different device types, by name."""
    drivers: tuple[str, ...]
    quotas: tuple[float, ...]
    """CPU quotas in cores; empty where there was none."""
    versions: tuple[tuple[str, str], ...]
    """Library and version, for those that were there."""
    settings: tuple[tuple[str, str], ...]
    """Settings of the transport (NCCL, gloo) that were set."""
    git_revision: str | None

    def __str__(self) -> str:
        return f"{' and '.join(self.devices)} on {', '.join(self.hosts)}"


def surroundings(run: Run) -> Surroundings | None:
    """Of one run; None where no rank recorded its environment."""
    found = environments(run)
    if not found:
        return None
    return Surroundings(
        hosts=_unique(e.host for e in found),
        devices=_unique(e.device.name for e in found),
        drivers=_unique(e.device.driver for e in found if e.device.driver is not None),
        quotas=tuple(sorted({e.cpu_quota_cores for e in found if e.cpu_quota_cores is not None})),
        versions=tuple(sorted({(k, v) for e in found for k, v in e.versions.items() if v is not None})),
        settings=tuple(
            sorted({(k, v) for e in found for k, v in e.settings.items() if k.startswith(_TRANSPORT_SETTINGS)})
        ),
        git_revision=next((e.git_revision for e in found if e.git_revision is not None), None),
    )


def environments(run: Run) -> list[Environment]:
    """One per rank that recorded it, by rank."""
    return [rank.start.environment for rank in run.ranks if rank.start is not None]


def allocation(run: Run) -> str | None:
    """The batch system's job that the run's ranks ran in ("slurm 4711"); None outside, and in older records."""
    return next((e.allocation for e in environments(run) if e.allocation is not None), None)


def differences(one: Surroundings | None, other: Surroundings | None) -> tuple[str, ...]:
    """Why two runs must not be combined; empty where nothing speaks against it, or where it is not known.

    Versions count only for libraries that both runs name.
    """
    if one is None or other is None:
        return ()
    found = []
    if one.devices != other.devices:
        found.append(f"device: {' and '.join(one.devices)} against {' and '.join(other.devices)}")
    if one.drivers and other.drivers and one.drivers != other.drivers:
        found.append(f"driver: {', '.join(one.drivers)} against {', '.join(other.drivers)}")
    if one.quotas != other.quotas:
        found.append(f"CPU quota in cores: {_quota(one)} against {_quota(other)}")
    theirs = dict(other.versions)
    found += [
        f"{library}: {version} against {theirs[library]}"
        for library, version in one.versions
        if library in theirs and theirs[library] != version
    ]
    return tuple(found)


def largest_like_group(runs: Sequence[Run]) -> list[Run]:
    """The largest group of runs that may be combined; of equally large ones the first."""
    groups: list[list[Run]] = []
    for run in runs:
        home = next((g for g in groups if not differences(surroundings(g[0]), surroundings(run))), None)
        if home is None:
            groups.append([run])
        else:
            home.append(run)
    return max(groups, key=len, default=[])


def oversubscription(run: Run) -> str:
    """How ranks shared cores or a GPU; empty where each had its own, or where it is not known.

    Ranks that are pinned see their own cores alone, so the cores of a host are those of all its ranks together.
    """
    found = environments(run)
    for host in _unique(e.host for e in found):
        here = [e for e in found if e.host == host]
        if here[0].device.type == "cuda":
            uuids = [e.device.uuid for e in here if e.device.uuid is not None]
            if len(set(uuids)) < len(uuids):
                return f"{len(uuids)} ranks on {len(set(uuids))} GPU(s)"
            continue
        threads = sum(e.threads or 0 for e in here)
        cores: float = len({core for e in here for core in e.cores_allowed})
        quotas = [e.cpu_quota_cores for e in here if e.cpu_quota_cores is not None]
        cores = min([cores, *quotas])
        if threads > cores > 0:
            return f"{len(here)} rank(s) x {here[0].threads} thread(s) on {cores:g} core(s)"
    return ""


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def _quota(one: Surroundings) -> str:
    return ", ".join(f"{quota:g}" for quota in one.quotas) or "none"
