"""What this machine offers, without torch: cores (affinity, quota), GPUs, whether bf16 is fast."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

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
    """(memory node, physical cores there). Empty where unknown: then every core counts as a physical one."""
    gpus_unreadable: str | None = None
    """Why GPUs that seem to be there cannot be used; None where there are no signs of such GPUs."""

    @property
    def physical_cores(self) -> int:
        """Number of physical cores, and never more than `cores`, which a quota may limit."""
        return min(self.cores, sum(count for _, count in self.node_cores) or self.cores)

    def threads_for(self, ranks: int, device: DeviceName) -> int:
        """Threads that each of `ranks` ranks gets by default: an equal share of the physical cores.

        On GPUs it is limited so that all ranks of a memory node's GPUs fit on that node.
        """
        threads = self.physical_cores // ranks
        if device == "cuda":
            on_node = Counter(gpu.numa_node for gpu in self.gpus[:ranks])
            shares = [count // on_node[node] for node, count in self.node_cores if node is not None and on_node[node]]
            threads = min([threads, *(share for share in shares if share)])
        return max(1, threads)

    def limited_to(self, cores: int) -> Self:
        """The same machine with at most `cores` of its logical cores; which ones is not known."""
        if cores >= self.cores:
            return self
        nodes = tuple((node, max(1, count * cores // self.cores)) for node, count in self.node_cores)
        return replace(self, cores=cores, node_cores=nodes)

    def fast_bf16(self, device: str) -> bool:
        """Whether bf16 arithmetic is faster than fp32: with AMX or AVX512-BF16, or from compute capability 8.0."""
        if device == "cpu":
            return self.cpu_has_fast_bf16
        return bool(self.gpus) and all(gpu.compute_capability and gpu.compute_capability >= (8, 0) for gpu in self.gpus)


def this_machine() -> Machine:
    """This machine, from the kernel and, where it exists, NVML."""
    quota = cpu_quota_cores()
    cores = len(usable_cores())
    if quota is not None:
        cores = max(1, min(cores, math.floor(quota)))
    flags = cpu_facts().get("flags", "").split()
    nodes = Counter(core.node for core in physical_cores())
    gpus: tuple[Gpu, ...] = ()
    unreadable = None
    try:
        gpus = visible_gpus()
    except GpusUnreadable as error:
        unreadable = str(error)
    fast_bf16 = "amx_bf16" in flags or "avx512_bf16" in flags
    return Machine(cores, quota, gpus, fast_bf16, tuple(nodes.items()), unreadable)


# --- cores ---------------------------------------------------------------------------------------------------------


def cpu_quota_cores(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Cores that the CPU controller grants (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`); None without a limit.

    Limits on all ancestors bind too, so the smallest counts. In a container the path in /proc/self/cgroup may name
    folders outside the container's view; folders that do not exist are skipped.
    """
    return min((quota for quota, _ in _quotas(proc_cgroup, mount)), default=None)


def cpu_throttled_seconds(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Seconds for which the CPU controller has held this process's group back so far; None without a quota.

    They are those of all processes in the group whose quota binds (see `cpu_quota_cores`): `throttled_usec` of
    `cpu.stat` in version 2, `throttled_time` (nanoseconds) in version 1. The kernel adds up over cores: two cores held
    back for a second are two seconds.
    """
    quotas = _quotas(proc_cgroup, mount)
    if not quotas:
        return None
    _, folder = min(quotas, key=lambda quota: quota[0])
    try:
        lines = [line.split() for line in (folder / "cpu.stat").read_text(encoding="ascii").splitlines()]
        counters = {line[0]: int(line[1]) for line in lines if len(line) == 2}
    except (OSError, ValueError):
        return None
    if "throttled_usec" in counters:
        return counters["throttled_usec"] / 1e6
    if "throttled_time" in counters:
        return counters["throttled_time"] / 1e9
    return None


def _quotas(proc_cgroup: Path, mount: Path) -> list[tuple[float, Path]]:
    """(quota in cores, folder) of this process's group and each ancestor, where they have a quota."""
    try:
        entries = [line.split(":", 2) for line in proc_cgroup.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    quotas: list[tuple[float, Path]] = []
    for entry in entries:
        if len(entry) != 3:
            continue
        hierarchy, controllers, path = entry
        if hierarchy == "0":
            roots = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        for root in roots:
            quotas += [(q, folder) for folder in _upwards(root, path) if (q := quota_of(folder)) is not None]
    return quotas


def _upwards(root: Path, path: str) -> list[Path]:
    inner = [part for part in path.split("/") if part not in ("", ".", "..")]
    return [root.joinpath(*inner[:depth]) for depth in range(len(inner), -1, -1)]


def quota_of(folder: Path) -> float | None:
    """Cores that the cgroup with this folder is limited to; None where it has no limit of its own, or is not there."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            return None if quota == "max" else int(quota) / int(period)
        if (folder / "cpu.cfs_quota_us").is_file():
            micros = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
            period_micros = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
            return None if micros <= 0 else micros / period_micros
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return None
