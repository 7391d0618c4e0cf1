"""What a host sees as its own files: /etc/hosts, ssh's configuration, /run, /dev/shm and /sys. All else is shared."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from vitscale.lab import secure_shell
from vitscale.lab.namespaces import call_inside
from vitscale.lab.processes import Process

HOSTS_FILE = "hosts"


def write_hosts_file(folder: Path, hosts: Sequence[tuple[str, str]]) -> None:
    """Writes /etc/hosts for names and addresses."""
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in hosts)]
    (folder / HOSTS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def mount_files(first: Process, folder: Path, host: Path, *, with_ssh: bool) -> None:
    """Mounts them, in the host's own mount namespace alone. `folder` is the lab's, `host` the host's in it."""
    _own_run(first, folder, host)
    _mount(first, "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")  # noqa: S108 - the host's own
    _own_sys(first)
    _mount(first, "--bind", str(folder / HOSTS_FILE), "/etc/hosts")
    if with_ssh:
        _mount(first, "--bind", str(folder / secure_shell.CLIENT_CONFIGURATION), "/etc/ssh/ssh_config")
        # Without PAM, sshd lets nobody in whose password is locked, as Ubuntu's root's is.
        shadow = host / "shadow"
        shadow.write_text(f"{pwd.getpwuid(os.geteuid()).pw_name}:*:::::::\n", encoding="utf-8")
        shadow.chmod(0o600)
        _mount(first, "--bind", str(shadow), "/etc/shadow")
        own = Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".ssh"
        if own.is_dir():  # the user's keys and known hosts are neither used nor written
            _mount(first, "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(own))


def _own_run(first: Process, folder: Path, host: Path) -> None:
    run = host / "run"
    run.mkdir()
    _mount(first, "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(run))
    call_inside(first, "mkdir", str(run / "sshd"), str(run / folder.name), str(run / "sys"))
    _mount(first, "--bind", str(folder), str(run / folder.name))
    _mount(first, "--move", str(run), "/run")


def _own_sys(first: Process) -> None:
    """A sysfs shows the interfaces of the namespace it was mounted in. The cgroups stay in sight."""
    _mount(first, "-t", "sysfs", "sysfs", "/run/sys")
    _mount(first, "--rbind", "/sys/fs/cgroup", "/run/sys/fs/cgroup")
    _mount(first, "--move", "/run/sys", "/sys")
    call_inside(first, "rmdir", "/run/sys")


def _mount(first: Process, *arguments: str) -> None:
    call_inside(first, "mount", "--no-mtab", *arguments)  # it would note them in /run, outside
