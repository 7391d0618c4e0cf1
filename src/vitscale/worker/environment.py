"""Reads the environment of a rank: its host, device, cores, versions and settings."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from vitscale.base.files import open_regular
from vitscale.base.secret_names import is_secret_name
from vitscale.engines.packages import installed_versions
from vitscale.machine.batch_systems import BATCH_SYSTEMS
from vitscale.machine.cores import cpu_facts, numa_nodes, physical_cores
from vitscale.machine.gpus import gpu_settings, gpu_with_uuid
from vitscale.machine.hardware import cpu_quota_cores
from vitscale.probes.host import infiniband_ports, kernel_text
from vitscale.probes.matmul import tf32_allowed
from vitscale.probes.resources import gpu_uuid
from vitscale.processes.launch_file import LIBRARY_PATH, LIBRARY_SETTINGS, NETWORK_SETTINGS
from vitscale.store.records import FORMAT, DeviceRecord, Environment, GpuSettings, StartLine
from vitscale.store.results import RunHeader
from vitscale.worker.git_revision import git_revision
from vitscale.worker.rank_process import RankInfo

_RECORDED_PREFIXES = (*LIBRARY_SETTINGS, LIBRARY_PATH, "HF_HUB_OFFLINE")
"""Beginnings of the names of variables that are recorded."""
_HOST_NCCL_FILE = Path("/etc/nccl.conf")
_USER_NCCL_FILE = ".nccl.conf"
"""In the home folder, unless NCCL_CONF_FILE names another one."""
_LARGEST_NCCL_FILE_BYTES = 65_536
_MOST_VALUE_CHARACTERS = 1_023
"""Longest value that NCCL reads from a file."""
_CPUS = Path("/sys/devices/system/cpu")
_ADAPTERS = Path("/sys/class/infiniband")


def environment(
    device: torch.device, backend: str | None, *, with_revision: bool = True, engines: tuple[str, ...] = ()
) -> Environment:
    """Reads the environment of this process.

    Args:
        device: what it computes on.
        backend: backend of its process group; None without one.
        with_revision: whether to look for the git revision, which takes three processes to find.
        engines: names of the engines in use, whose versions are read too.
    """
    cores = frozenset(os.sched_getaffinity(0))
    return Environment(
        # The host.
        host=socket.gethostname(),
        cpu=_cpu_name(),
        kernel=platform.release(),
        network_adapters=_network_adapters(),
        allocation=allocation(os.environ),
        host_memory_bytes=_host_memory_bytes(),
        # What this process computes on.
        device=_device_record(device),
        tf32=tf32_allowed(os.environ.get("NVIDIA_TF32_OVERRIDE")) if device.type == "cuda" else None,
        gpus_unused=torch.cuda.device_count() if device.type == "cpu" else None,
        threads=torch.get_num_threads(),
        cores_allowed=tuple(sorted(cores)),
        physical_cores=_physical_cores(cores),
        numa_nodes=numa_nodes(cores),
        cpu_quota_cores=cpu_quota_cores(),
        cpu_governor=_governor(cores),
        cpu_boost=_boost(),
        # Its software.
        versions=_software_versions(device, engines),
        backend=backend,
        settings=_all_settings(device, os.environ),
        git_revision=git_revision(Path.cwd()) if with_revision else None,
    )


def _software_versions(device: torch.device, engines: tuple[str, ...]) -> dict[str, str | None]:
    """Returns name -> version of Python, the packages in use and, on a GPU, of CUDA and NCCL, or of ROCm and RCCL."""
    versions: dict[str, str | None] = {"python": platform.python_version(), **installed_versions(engines)}
    if device.type == "cuda":
        collectives_version = ".".join(str(part) for part in torch.cuda.nccl.version())
        if torch.version.hip is None:
            versions |= {"cuda": torch.version.cuda, "nccl": collectives_version}
        else:
            versions |= {"rocm": torch.version.hip, "rccl": collectives_version}
    return versions


def _physical_cores(cores: frozenset[int]) -> tuple[int, ...] | None:
    """Returns one core number for each physical core, sorted; None where the kernel does not report which share one."""
    if not (_CPUS / "cpu0/topology/thread_siblings_list").exists():
        return None
    return tuple(sorted(core.number for core in physical_cores(cores)))


def start_line(
    header: RunHeader, rank: RankInfo, device: torch.device, backend: str | None, engines: tuple[str, ...] = ()
) -> StartLine:
    """Returns the first line of this rank's record: where it runs, and which trial."""
    return StartLine(
        format=FORMAT,
        trial=header.trial_id,
        rank=rank.rank,
        world_size=rank.world_size,
        environment=environment(device, backend, with_revision=rank.rank == 0, engines=engines),
    )


def recorded_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which libraries are set, sorted by name, without those whose names suggest a secret."""
    names = sorted(name for name in variables if name.startswith(_RECORDED_PREFIXES) and not is_secret_name(name))
    return {name: variables[name] for name in names}


def _all_settings(device: torch.device, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which libraries are set and, on a GPU, the settings of NCCL's files, sorted by name."""
    settings = recorded_settings(variables)
    if device.type == "cuda":
        settings = nccl_file_settings(variables) | settings
    return dict(sorted(settings.items()))


def nccl_file_settings(variables: Mapping[str, str], host_file: Path = _HOST_NCCL_FILE) -> dict[str, str]:
    """Returns the settings in the files that NCCL reads as it starts, without those that a variable replaces.

    These are the user's file and then the host's, each line NAME=VALUE; the first file with a name counts (NCCL:
    src/misc/param.cc). Names that are no setting of the network are left out, and so are those that suggest a secret.

    Args:
        variables: this process's; NCCL_CONF_FILE names the user's file, and HOME is where it lies otherwise.
        host_file: the host's file.
    """
    settings: dict[str, str] = {}
    for path in (_user_nccl_file(variables), host_file):
        if path is not None:
            settings = _settings_in(path) | settings
    return {name: value for name, value in settings.items() if name not in variables}


def _user_nccl_file(variables: Mapping[str, str]) -> Path | None:
    """Returns the user's file of settings of NCCL; None where there is no home folder."""
    named = variables.get("NCCL_CONF_FILE")
    if named:
        return Path(named)
    home = variables.get("HOME")
    return Path(home) / _USER_NCCL_FILE if home else None


def _settings_in(path: Path) -> dict[str, str]:
    """Returns the network's settings in one of NCCL's files; of lines with the same name the first one counts.

    Empty where the file cannot be read.
    """
    try:
        with open_regular(path, largest_bytes=_LARGEST_NCCL_FILE_BYTES) as file:
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return {}
    settings: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        is_setting = bool(separator) and name.startswith(NETWORK_SETTINGS) and not is_secret_name(name)
        if is_setting:
            settings.setdefault(name, value[:_MOST_VALUE_CHARACTERS])
    return settings


def allocation(variables: Mapping[str, str]) -> str | None:
    """Returns the batch system and its job id, as "slurm 123", from variables that it sets; None outside a job."""
    for system in BATCH_SYSTEMS.values():
        job_id = variables.get(system.job_id_variable)
        if job_id:
            return f"{system.name} {job_id}"
    return None


def _host_memory_bytes() -> int:
    """Returns the bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_record(device: torch.device) -> DeviceRecord:
    """Returns the record of a device, with what the driver reports of a GPU."""
    if device.type == "cpu":
        return DeviceRecord(type="cpu", name=_cpu_name(), memory_bytes=_host_memory_bytes())
    properties = torch.cuda.get_device_properties(device)
    uuid = gpu_uuid(device)
    gpu = gpu_with_uuid(uuid) if uuid is not None else None
    settings = gpu_settings(uuid) if uuid is not None else None
    return DeviceRecord(
        type="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        driver=gpu.driver if gpu else None,
        uuid=uuid,
        numa_node=gpu.numa_node if gpu else None,
        settings=GpuSettings(**settings) if settings else None,
    )


def _governor(cores: frozenset[int], cpus: Path = _CPUS) -> str | None:
    """Returns the frequency governors of `cores`, as "performance, powersave"; None if the kernel lacks one of them."""
    governors = {kernel_text(cpus / f"cpu{core}/cpufreq/scaling_governor") for core in cores}
    if None in governors:
        return None
    return ", ".join(sorted(filter(None, governors)))


def _boost(cpus: Path = _CPUS) -> bool | None:
    """Whether boost is on, by Intel's driver or by the general one; None where the kernel does not report it."""
    no_turbo = kernel_text(cpus / "intel_pstate/no_turbo")
    if no_turbo in ("0", "1"):
        return no_turbo == "0"
    boost = kernel_text(cpus / "cpufreq/boost")
    if boost in ("0", "1"):
        return boost == "1"
    return None


def _network_adapters(adapters: Path = _ADAPTERS) -> tuple[str, ...] | None:
    """Returns type, firmware and rate of active adapters: "MT4129, firmware 28.39.1002, 400 Gb/sec (4X NDR)".

    Their names are left out, for their numbers differ from host to host. None where there are no active adapters.
    """
    descriptions = set()
    for port in infiniband_ports(adapters):
        folder = adapters / port.name.partition(":")[0]
        firmware = kernel_text(folder / "fw_ver")
        if port.active and firmware:
            adapter_type = kernel_text(folder / "hca_type") or "unknown type"
            descriptions.add(f"{adapter_type}, firmware {firmware}, {port.rate}")
    return tuple(sorted(descriptions)) or None


def _cpu_name() -> str:
    """Returns the processor's model name; its architecture where the kernel does not report one."""
    return cpu_facts().get("model name") or platform.machine()
