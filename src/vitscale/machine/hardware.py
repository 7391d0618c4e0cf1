"""What this machine offers, without torch: cores (affinity, quota), GPUs, whether bf16 is fast."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from vitscale.base.processors import usable_cores
from vitscale.machine.cores import cpu_facts, physical_cores
from vitscale.machine.gpus import Gpu, GpusUnreadable, visible_gpus
from vitscale.trial.trial import DeviceName

__all__ = ["Gpu", "Machine", "cpu_quota_cores", "cpu_throttled_seconds", "this_machine"]


@dataclass(frozen=True)
class Machine:
    """The resources that trials can be placed on."""

    cores: int
    """Whole cores that this process may use: those of its affinity mask, limited by the cgroup CPU quota."""
    cpu_quota_cores: float | None
    gpus: tuple[Gpu, ...]
    cpu_has_fast_bf16: bool
    node_cores: tuple[tuple[int | None, int], ...] = ()
    """For each memory node its number and the number of physical cores on it: ((0, 32), (1, 32)). Empty where unknown:
    then every core counts as a physical one."""
    gpus_unreadable: str | None = None
    """Why GPUs that seem to be there cannot be used; None where there are no signs of such GPUs."""
    stated_memory_bytes: int | None = None
    """Memory of the host as a study states it; None: it states none, or this is the machine that plans."""

    @property
    def physical_cores(self) -> int:
        """Number of physical cores, and never more than `cores`, which a quota may limit."""
        cores_of_nodes = sum(count for _, count in self.node_cores)
        return min(self.cores, cores_of_nodes) if cores_of_nodes else self.cores

    def threads_for(self, ranks: int, device: DeviceName) -> int:
        """Return the threads that each of `ranks` ranks gets by default: an equal share of the physical cores.

        On GPUs the number is limited so that the ranks whose GPUs belong to one memory node fit on its cores.
        """
        threads = self.physical_cores // ranks
        if device == "cuda":
            ranks_by_node = Counter(gpu.numa_node for gpu in self.gpus[:ranks])
            for node, cores in self.node_cores:
                ranks_of_node = 0 if node is None else ranks_by_node[node]
                if 0 < ranks_of_node <= cores:  # more ranks than cores cannot fit anyway
                    threads = min(threads, cores // ranks_of_node)
        return max(1, threads)

    def limited_to(self, cores: int) -> Self:
        """Return the same machine with at most `cores` of its logical cores, taken from all memory nodes alike."""
        if cores >= self.cores:
            return self
        node_cores = tuple((node, max(1, count * cores // self.cores)) for node, count in self.node_cores)
        return replace(self, cores=cores, node_cores=node_cores)

    def fast_bf16(self, device: str) -> bool:
        """Whether bf16 arithmetic is faster than fp32: with AMX or AVX512-BF16, or where all GPUs have units for it."""
        if device == "cpu":
            return self.cpu_has_fast_bf16
        return bool(self.gpus) and all(gpu.has_fast_bf16 for gpu in self.gpus)


def this_machine() -> Machine:
    """Return the resources of this machine, as the kernel and the libraries of GPU vendors report them."""
    quota = cpu_quota_cores()
    cores = len(usable_cores())
    if quota is not None:
        cores = max(1, min(cores, math.floor(quota)))
    flags = cpu_facts().get("flags", "").split()
    cores_by_node = Counter(core.node for core in physical_cores())
    gpus: tuple[Gpu, ...] = ()
    gpus_unreadable = None
    try:
        gpus = visible_gpus()
    except GpusUnreadable as error:
        gpus_unreadable = str(error)
    return Machine(
        cores=cores,
        cpu_quota_cores=quota,
        gpus=gpus,
        cpu_has_fast_bf16="amx_bf16" in flags or "avx512_bf16" in flags,
        node_cores=tuple(cores_by_node.items()),
        gpus_unreadable=gpus_unreadable,
    )


# --- cores ---------------------------------------------------------------------------------------------------------


def cpu_quota_cores(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return the number of cores to which this process's cgroup is limited, such as 1.5; None without a limit.

    The limit is `cpu.max` in version 2, `cpu.cfs_quota_us` in version 1. Limits of all ancestors bind too, so the
    smallest counts. In a container the path in /proc/self/cgroup may name folders outside the container's view; folders
    that do not exist are skipped.
    """
    return min((quota.cores for quota in _read_quotas(proc_cgroup, mount)), default=None)


def cpu_throttled_seconds(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return the seconds for which the kernel has held back processes of this cgroup so far; None without a quota.

    The group is the one whose quota binds (see `cpu_quota_cores`), with all its processes. The kernel adds up over
    cores: two cores held back for a second are two seconds. It counts them in `cpu.stat`, as `throttled_usec` in
    version 2, as `throttled_time` (nanoseconds) in version 1.
    """
    quotas = _read_quotas(proc_cgroup, mount)
    if not quotas:
        return None
    smallest = min(quotas, key=lambda quota: quota.cores)
    try:
        counters = _read_counters(smallest.folder / "cpu.stat")
    except (OSError, ValueError):
        return None
    if "throttled_usec" in counters:
        return counters["throttled_usec"] / 1e6
    if "throttled_time" in counters:
        return counters["throttled_time"] / 1e9
    return None


def _read_counters(path: Path) -> dict[str, int]:
    """Return name -> number from a file with lines such as "nr_periods 12".

    Raises:
        OSError: the file cannot be read.
        ValueError: the second word of a line is no number.
    """
    counters = {}
    for line in path.read_text(encoding="ascii").splitlines():
        words = line.split()
        if len(words) == 2:
            counters[words[0]] = int(words[1])
    return counters


class _Quota(NamedTuple):
    """The limit of a cgroup."""

    cores: float
    folder: Path
    """The cgroup's."""


def _read_quotas(proc_cgroup: Path, mount: Path) -> list[_Quota]:
    """Return the quotas of this process's group and each ancestor, those without one left out."""
    try:
        lines = proc_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    quotas: list[_Quota] = []
    for line in lines:
        for folder in _cgroup_folders(line, mount):
            cores = quota_of(folder)
            if cores is not None:
                quotas.append(_Quota(cores, folder))
    return quotas


def _cgroup_folders(line: str, mount: Path) -> list[Path]:
    """Return the folders in which the limits of a group and its ancestors may lie, under all usual mount points.

    Args:
        line: a line of /proc/self/cgroup: "0::/user.slice" in version 2, "4:cpu,cpuacct:/slurm/job_1" in version 1.
        mount: where cgroups are mounted.
    """
    fields = line.split(":", 2)
    if len(fields) != 3:
        return []
    hierarchy, controllers, path = fields
    if hierarchy == "0":
        roots = [mount, mount / "unified"]
    elif "cpu" in controllers.split(","):
        roots = [mount / controllers, mount / "cpu"]
    else:
        return []
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folders: list[Path] = []
    for root in roots:
        folders += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def quota_of(folder: Path) -> float | None:
    """Return the number of cores to which a cgroup is limited; None if it has no limit, or does not exist.

    The kernel states it as the microseconds of processor time that the group has in each period.
    """
    try:
        if (folder / "cpu.max").is_file():  # version 2: "150000 100000", or "max 100000" without a limit
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            return None if quota == "max" else int(quota) / int(period)
        if (folder / "cpu.cfs_quota_us").is_file():  # version 1: -1 without a limit
            quota_micros = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
            period_micros = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
            return None if quota_micros <= 0 else quota_micros / period_micros
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return None
