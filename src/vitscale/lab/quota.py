"""CPU quotas of hosts: a cgroup for each, inside one for the lab, in version 1 or 2 of the kernel's interface."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError, VitscaleError
from vitscale.machine.hardware import quota_of

PERIOD_MICROSECONDS = 20_000
"""Shorter than a step, so that a host with half a core is slow rather than at a standstill now and then."""
LEAST_CORES = 0.05
"""Smallest quota: the kernel takes none below 1 ms per period."""
_EMPTYING_SECONDS = 10.0
"""Time until the kernel lets go of a cgroup whose processes have ended."""
_LARGEST_WEIGHT_BY_VERSION = {1: "262144", 2: "10000"}
"""The lab's weight against everything else on the machine, by interface version, so that hosts get their quota on a
busy machine. With equal weights each login session (the kernel's autogroup) takes as much as all hosts together,
however nice its processes are."""


@dataclass(frozen=True)
class Controller:
    """The kernel's CPU controller: its version and where it is mounted."""

    version: int
    root: Path

    def create(self, lab: str, hosts: tuple[str, ...]) -> None:
        """Make the hosts' cgroups, without a quota.

        Raises:
            OSError: they cannot be made.
        """
        folder = self.root / lab
        folder.mkdir()
        if self.version == 2:
            for parent in (self.root, folder):
                _enable_cpu(parent)
        weight_file = "cpu.weight" if self.version == 2 else "cpu.shares"
        _write_setting(folder / weight_file, _LARGEST_WEIGHT_BY_VERSION[self.version])
        for host in hosts:
            (folder / host).mkdir()

    def limit(self, lab: str, host: str, cores: float) -> None:
        """Limit all processes of the host together to `cores` CPU seconds per second."""
        quota_microseconds = str(round(cores * PERIOD_MICROSECONDS))
        folder = self.root / lab / host
        if self.version == 2:
            _write_setting(folder / "cpu.max", f"{quota_microseconds} {PERIOD_MICROSECONDS}")
        else:
            _write_setting(folder / "cpu.cfs_period_us", str(PERIOD_MICROSECONDS))
            _write_setting(folder / "cpu.cfs_quota_us", quota_microseconds)

    def cores(self, lab: str, host: str) -> float | None:
        """Return the cores that the host is limited to now; None where nothing limits it."""
        return quota_of(self.root / lab / host)

    def members(self, lab: str, host: str) -> Path:
        """Return the file to which a process writes to join a host's cgroup."""
        return self.root / lab / host / "cgroup.procs"

    def remove(self, lab: str) -> None:
        """Remove the lab's cgroups, whose processes have ended.

        Raises:
            VitscaleError: a cgroup still has processes after 10 s.
        """
        folder = self.root / lab
        end = time.monotonic() + _EMPTYING_SECONDS
        host_folders = [path for path in folder.glob("*") if path.is_dir()]
        for path in (*host_folders, folder):
            while not _remove_unless_busy(path):
                if time.monotonic() > end:
                    raise VitscaleError(f"cgroup {path} is still in use", next_step="Try again later")
                time.sleep(0.01)


def find_controller(mounts: Path = Path("/proc/self/mounts")) -> Controller | None:
    """Return the machine's CPU controller; None where there is none.

    `mounts`: the mounted file systems, as proc(5) describes them. Version 1 goes first where both are mounted.
    """
    version_2_root: Path | None = None
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, folder, file_system, options = line.split(" ")[:4]
        if file_system == "cgroup" and "cpu" in options.split(","):
            return Controller(1, Path(folder))
        if file_system == "cgroup2" and version_2_root is None:
            version_2_root = Path(folder)
    if version_2_root is None:
        return None
    with suppress(OSError):
        controllers = (version_2_root / "cgroup.controllers").read_text(encoding="ascii").split()
        if "cpu" in controllers:
            return Controller(2, version_2_root)
    return None


def refused(reason: str) -> RequestError:
    """Return the error for a quota that was asked for and cannot be set."""
    return RequestError(
        f"this machine cannot limit the cores of hosts: {reason}",
        next_step="Leave out --cores-per-host; in a container, start it with --privileged --cgroupns=host",
    )


def _enable_cpu(folder: Path) -> None:
    """Let the folder's children have quotas.

    At the root, where systemd does the same, this stays enabled: other cgroups may rely on it by then.
    """
    enabled = folder / "cgroup.subtree_control"
    if "cpu" not in enabled.read_text(encoding="ascii").split():
        _write_setting(enabled, "+cpu")


def _write_setting(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")


def _remove_unless_busy(folder: Path) -> bool:
    """Remove a cgroup; False where it still has processes."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True
