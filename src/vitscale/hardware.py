"""What this machine offers, without torch: cores (affinity, quota, topology), GPUs, whether bf16 is fast."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_FIELDS = "uuid,name,memory.total,driver_version,clocks.sm,compute_cap"


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi tells of it; what it does not tell is None."""

    uuid: str
    name: str
    memory_bytes: int | None
    driver: str | None
    sm_clock_mhz: int | None
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True)
class Machine:
    """What trials can be placed on."""

    cores: int
    """Whole cores this process may use: the affinity mask, cut down to the cgroup CPU quota."""
    cpu_quota_cores: float | None
    gpus: tuple[Gpu, ...]
    cpu_has_fast_bf16: bool

    def fast_bf16(self, device: str) -> bool:
        """Whether bf16 arithmetic is faster than fp32 on `device`: AMX or AVX512-BF16; compute capability 8.0."""
        if device == "cpu":
            return self.cpu_has_fast_bf16
        return bool(self.gpus) and all(gpu.compute_capability and gpu.compute_capability >= (8, 0) for gpu in self.gpus)


def this_machine() -> Machine:
    """Asks the kernel and, where it exists, nvidia-smi."""
    quota = cpu_quota_cores()
    cores = len(os.sched_getaffinity(0))
    if quota is not None:
        cores = max(1, min(cores, math.floor(quota)))
    flags = _cpu_flags()
    return Machine(cores, quota, visible_gpus(), bool(flags & {"amx_bf16", "avx512_bf16"}))


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


# --- cores ---------------------------------------------------------------------------------------------------------


def cpu_quota_cores(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Cores the CPU controller grants (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`), or None without a limit.

    A limit on any ancestor binds too, so the smallest on the way up counts. In a container the path in
    /proc/self/cgroup may name folders outside its own view; those that do not exist are passed over.
    """
    return min((quota for quota, _ in _quotas(proc_cgroup, mount)), default=None)


def cpu_throttled_seconds(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Seconds for which the CPU controller has held this process's group back so far, or None without a quota.

    Of the group whose quota binds (see `cpu_quota_cores`), all its processes together: `throttled_usec` of `cpu.stat`
    in version 2, `throttled_time` (nanoseconds) in version 1. The kernel adds up over cores: two cores held back for a
    second are two seconds.
    """
    quotas = _quotas(proc_cgroup, mount)
    if not quotas:
        return None
    _, folder = min(quotas, key=lambda found: found[0])
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
    """The quota in cores of each group on the way up that has one, with the group's folder."""
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
            quotas += [(q, folder) for folder in _upwards(root, path) if (q := _quota_of(folder)) is not None]
    return quotas


def _upwards(root: Path, path: str) -> list[Path]:
    inner = [part for part in path.split("/") if part not in ("", ".", "..")]
    return [root.joinpath(*inner[:depth]) for depth in range(len(inner), -1, -1)]


def _quota_of(folder: Path) -> float | None:
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


def cores_in_order(
    allowed: frozenset[int] | None = None, topology: Path = Path("/sys/devices/system/cpu")
) -> list[int]:
    """Allowed cores so ordered that neighbours in the list are different physical cores as long as there are any.

    Ranks are pinned to consecutive runs of it: hyper-thread siblings are shared only when nothing else is left.
    """
    cores = sorted(os.sched_getaffinity(0) if allowed is None else allowed)

    def place(core: int) -> tuple[int, int]:
        try:
            siblings = (topology / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
            order = [s for s in _cpu_list(siblings) if s in cores]
            return (order.index(core), core)
        except (OSError, ValueError):
            return (0, core)

    return sorted(cores, key=place)


def _cpu_list(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def numa_nodes(cores: frozenset[int], nodes: Path = Path("/sys/devices/system/node")) -> tuple[int, ...] | None:
    """The memory nodes that `cores` belong to, in order; None where the kernel does not tell of every core."""
    found: set[int] = set()
    told: set[int] = set()
    for folder in nodes.glob("node*"):
        number = folder.name.removeprefix("node")
        if not _is_count(number):
            continue
        try:
            own = cores.intersection(_cpu_list((folder / "cpulist").read_text(encoding="ascii")))
        except (OSError, ValueError):  # a node of memory alone has an empty list
            continue
        if own:
            found.add(int(number))
            told |= own
    return tuple(sorted(found)) if found and told == cores else None


def share_of_cores(local_rank: int, threads: int, cores: list[int]) -> tuple[int, ...] | None:
    """The cores local rank `local_rank` is pinned to, or None where there are too few (oversubscription)."""
    first = local_rank * threads
    return tuple(cores[first : first + threads]) if first + threads <= len(cores) else None


# --- GPUs ----------------------------------------------------------------------------------------------------------


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs this process may use, honouring CUDA_VISIBLE_DEVICES; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={_NVIDIA_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, errors="replace", timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return select_visible(parse_nvidia_smi(answer.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Reads `nvidia-smi --query-gpu=uuid,name,memory.total,driver_version,clocks.sm,compute_cap` in CSV."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6:
            continue
        uuid, name, memory_mib, driver, clock, capability = fields
        major, _, minor = capability.partition(".")
        gpus.append(
            Gpu(
                uuid=uuid,
                name=name,
                memory_bytes=int(memory_mib) * 2**20 if _is_count(memory_mib) else None,
                driver=driver if driver and not driver.startswith("[") else None,
                sm_clock_mhz=int(clock) if _is_count(clock) else None,
                compute_capability=(int(major), int(minor)) if _is_count(major) and _is_count(minor) else None,
            )
        )
    return tuple(gpus)


def select_visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES names, by index or by a UUID's unique beginning, in its order.

    As in CUDA, the list ends at the first entry that names nothing. A GPU named twice counts once: two ranks on it
    would share it.
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if _is_count(entry):
            named = gpus[int(entry) : int(entry) + 1]
        else:
            named = tuple(gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        if len(named) != 1:
            break
        chosen += named
    return tuple(dict.fromkeys(chosen))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16
