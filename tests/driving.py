"""Starts the real command line, and finds what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from forks import AT_FIRST, Prepared

TINY_MODEL = """
[model]
name = "vit-ti16"
image_size = 16
patch_size = 8
layers = 2
hidden_size = 32
heads = 2
mlp_size = 64
"""
"""Trains in milliseconds: what is tested is everything around it."""


def vitscale(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 300, anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs `vitscale ARGUMENTS` to its end: as a fork of a process that has imported it, or started anew, as always
    where modules are searched for elsewhere."""
    command, environment = [*map(str, arguments)], os.environ | {"COLUMNS": "120"}
    if not anew and os.environ.get("PYTHONPATH") == AT_FIRST.get("PYTHONPATH"):
        request = {"kind": "command", "argv": command, "environment": environment, "cwd": str(cwd or Path.cwd())}
        return Prepared.of_all("commands").run(request, timeout)
    return subprocess.run(
        [sys.executable, "-m", "vitscale", *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
        env=environment,
    )


def start(*command: str | Path, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Starts a command and returns at once."""
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
    )


def processes_naming(text: Path | str) -> list[psutil.Process]:
    """Processes with `text` in their command line, or in the name of the file that they print to: launchers and ranks
    that are started anew name their run's folder in the one, forks print to a log in it."""
    found = []
    for process in psutil.process_iter():
        try:
            named = any(str(text) in part for part in [*process.cmdline(), printed_to(process)])
            if named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def printed_to(process: psutil.Process) -> str:
    """The path of a process's standard output."""
    try:
        return str(Path(f"/proc/{process.pid}/fd/1").readlink())
    except OSError:
        return ""


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
