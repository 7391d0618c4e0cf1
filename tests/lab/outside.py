"""What a laboratory leaves outside itself: processes, namespaces, cgroups, files, and the machine's own settings."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from vitscale.lab import state


def left_of(name: str, namespaces: Iterable[str] = ()) -> list[str]:
    """Everything that is left of the lab of this name and of its `namespaces` ("net:[4026532]")."""
    wanted = state.PREFIX + name
    # Not by Path.glob, which ends with an error where a folder goes while it looks.
    groups = [Path(folder, wanted) for folder, below, _ in os.walk("/sys/fs/cgroup") if wanted in below]
    left = [str(path) for path in (state.folder_of(name), *groups) if path.exists()]
    left += [line for line in Path("/proc/self/mounts").read_text().splitlines() if wanted in line]
    sought = set(namespaces)
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue  # it holds them open itself
        try:
            arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # A namespace lives as long as a process is in it, or has it open.
            held = {link.readlink().name for link in (*(process / "ns").iterdir(), *(process / "fd").iterdir())}
        except OSError:
            continue
        if any(wanted in argument for argument in arguments) or sought & held:
            left.append(f"process {process.name}: {' '.join(arguments)}")
    return left


def namespaces_of(lab: state.State, held: contextlib.ExitStack) -> list[str]:
    """The names of the lab's namespaces of every kind that this process is not in.

    They are held open: the kernel gives the number of one that is gone to the next, be it another test's.
    """
    ours = {link.readlink().name for link in Path("/proc/self/ns").iterdir()}
    links = [link for holder in lab.holders for link in Path(f"/proc/{holder.first.pid}/ns").iterdir()]
    for link in links:
        held.enter_context(link.open("rb"))
    return sorted({link.readlink().name for link in links} - ours)


def machine() -> dict[str, object]:
    """What may not change: interfaces, routes, names, and the files that hosts have their own of."""
    home = Path("~/.ssh").expanduser()
    return {
        "host name": os.uname().nodename,
        "links": _said("ip", "-brief", "link"),
        "addresses": _said("ip", "-brief", "address"),
        "routes": _said("ip", "route", "show", "table", "all"),
        "named namespaces": _said("ip", "netns", "list"),
        "files": {path: _state_of(Path(path)) for path in ("/etc/hosts", "/etc/ssh/ssh_config", "/etc/shadow")},
        "~/.ssh": {str(path): _state_of(path) for path in sorted(home.rglob("*"))} if home.exists() else None,
    }


def _state_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _said(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
