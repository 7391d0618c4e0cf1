"""What keeps the hook from a command's ranks: seen in the command's words, and in its processes on this host.

The hook reaches a Python by PYTHONPATH. So it does not reach one that ignores the variable (`-I`, `-E`, `-S`), one
whose environment was made anew (sudo, `env -i`, `export PYTHONPATH=...` in a script), one in a container that does not
get the variable or does not see the results folder, and one on another host to which nobody passes it on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from vitscale.explanation.results_folder import PATH_VARIABLE

_PYTHON = re.compile(r"python[\d.]*")
_IGNORING_FLAGS = frozenset("IES")
"""Flags of Python under which it ignores PYTHONPATH (-I, -E), or imports no sitecustomize (-S)."""
_FLAGS_WITH_VALUE = frozenset("XW")
_FLAGS_BEFORE_PROGRAM = frozenset("cm")
"""Flags behind which the program stands, so that what follows is no flag of Python's."""
_CONTAINER_PROGRAMS = ("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot", "shifter", "charliecloud")
_CONTAINER_OPTIONS = ("--container-image", "--container-name")
"""srun's options by which pyxis starts ranks in a container."""
_REMOTE_PROGRAMS = ("ssh", "pdsh", "clush", "kubectl", "rsh")
_CLEARING_PROGRAMS = ("sudo", "su", "doas")
_MPI_PROGRAMS = ("mpirun", "mpiexec", "prterun", "orterun")
_TORCH_LIBRARY = "libtorch"
"""Part of the names of torch's libraries, by which a process shows that it has loaded torch."""


class Hindrance(NamedTuple):
    """Something by which PYTHONPATH may not reach a rank."""

    sign: str
    """What was seen: "docker in the command"."""
    remedy: str
    """What would let the hook through."""


class ReachedProcess(NamedTuple):
    """A Python process of the command, as seen from outside."""

    pid: int
    words: tuple[str, ...]
    """Its command line."""
    has_hook_in_path: bool
    """Whether the hook's folder stands in its PYTHONPATH."""
    has_torch: bool | None
    """Whether it has loaded torch; None where the system does not say."""


def hindrances(argv: Sequence[str], processes: Iterable[ReachedProcess]) -> list[Hindrance]:
    """Return what may keep the hook from the ranks; each once, the surest first.

    Args:
        argv: the command.
        processes: its processes on this host.
    """
    found: dict[Hindrance, None] = {}
    for process in processes:
        found.update(dict.fromkeys(_hindrances_of_process(process)))
        found.update(dict.fromkeys(_hindrances_in_words(process.words, f"process {process.pid}")))
    found.update(dict.fromkeys(_hindrances_in_words(argv, "the command")))
    by_remedy: dict[str, Hindrance] = {}
    for hindrance in found:
        by_remedy.setdefault(hindrance.remedy, hindrance)
    return list(by_remedy.values())


def reach_sentences(argv: Sequence[str], processes: Sequence[ReachedProcess]) -> str:
    """Return in sentences whether the hook reached a process that trains, and if not, what may keep it away.

    Args:
        argv: the command.
        processes: its processes on this host.
    """
    hooked = [process for process in processes if _is_hooked(process)]
    if hooked:
        first = hooked[0]
        return f"The hook is in process {first.pid} ({_named(first.words)}), which has loaded torch."
    found = hindrances(argv, processes)
    if found:
        signs = " ".join(f"{hindrance.sign}. {hindrance.remedy}." for hindrance in found)
        return f"The hook may not reach the ranks: {signs}"
    if any(process.has_torch for process in processes):
        return "Nothing was seen that keeps the hook from the ranks."
    return "None of its processes on this host has loaded torch."


def _is_hooked(process: ReachedProcess) -> bool:
    """Whether a process has loaded torch, and the hook before it."""
    is_reached = process.has_hook_in_path and ignores_python_path(process.words) is None
    return is_reached and process.has_torch is True


def ignores_python_path(words: Sequence[str]) -> str | None:
    """Return the flag by which a Python command line leaves the hook out: "-I", "-E" or "-S"; None where none does."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    is_value = False
    for word in words[1:]:
        if is_value:
            is_value = False
            continue
        if not word.startswith("-") or word in ("-", "--") or word.startswith("--"):
            return None
        for position, flag in enumerate(word[1:], start=1):
            if flag in _IGNORING_FLAGS:
                return f"-{flag}"
            if flag in _FLAGS_BEFORE_PROGRAM:
                return None
            if flag in _FLAGS_WITH_VALUE:
                is_value = position == len(word) - 1
                break
    return None


def looked_at(processes: Iterable[psutil.Process], hook: Path) -> list[ReachedProcess]:
    """Return what can be seen of processes; those that have ended, or are another user's, are left out.

    Args:
        processes: live processes.
        hook: the hook's folder, as it stands in PYTHONPATH.
    """
    reached = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            search_path = process.environ().get(PATH_VARIABLE, "")
            has_hook = str(hook) in search_path.split(os.pathsep)
            reached.append(ReachedProcess(process.pid, tuple(process.cmdline()), has_hook, _has_torch(process.pid)))
    return reached


def _has_torch(pid: int) -> bool | None:
    """Whether a process has loaded torch's libraries; None where the system does not say (no Linux)."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return _TORCH_LIBRARY in maps


def _hindrances_of_process(process: ReachedProcess) -> Iterator[Hindrance]:
    """Yield what shows in a process's environment."""
    if process.has_torch and not process.has_hook_in_path:
        yield Hindrance(
            f"process {process.pid} ({_named(process.words)}) has loaded torch, but its PYTHONPATH was set anew",
            "Let what starts it keep PYTHONPATH: export PYTHONPATH=/your/path:$PYTHONPATH",
        )


def _hindrances_in_words(words: Sequence[str], owner: str) -> Iterator[Hindrance]:
    """Yield what shows in a command line.

    Args:
        words: the command line.
        owner: "the command", or "process 123".
    """
    for start in range(len(words)):
        flag = ignores_python_path(words[start:])
        if flag is not None:
            yield Hindrance(f"python {flag} in {owner}", f"Leave {flag} out: with it Python does not load the hook")
    programs = [Path(word).name for word in words]
    for program in programs:
        if program in _CONTAINER_PROGRAMS:
            yield Hindrance(
                f"{program} in {owner}",
                "Run vitscale explain inside the container, or give it the results folder and PYTHONPATH",
            )
        if program in _CLEARING_PROGRAMS:
            yield Hindrance(f"{program} in {owner}", f"Run vitscale explain under {program}, not the other way round")
    yield from _hindrances_of_launchers(words, programs, owner)


def _hindrances_of_launchers(words: Sequence[str], programs: Sequence[str], owner: str) -> Iterator[Hindrance]:
    """Yield what shows in the words of a program that starts ranks elsewhere."""
    is_srun = "srun" in programs
    has_container = any(word.split("=")[0] in _CONTAINER_OPTIONS for word in words)
    export_options = [word for word in words if word.startswith("--export")]
    if is_srun and has_container:
        yield Hindrance(f"srun --container-... in {owner}", "Mount the results folder: --container-mounts=RESULTS")
    if is_srun and any("ALL" not in option for option in export_options):
        yield Hindrance(f"srun --export in {owner}", "Add PYTHONPATH: --export=ALL,...")
    if programs and programs[0] in _REMOTE_PROGRAMS:
        yield Hindrance(
            f"{programs[0]} in {owner}", "Pass PYTHONPATH on to the other hosts, which must see the results folder"
        )
    is_mpi = any(program in _MPI_PROGRAMS for program in programs)
    if is_mpi and PATH_VARIABLE not in words:
        yield Hindrance(
            f"mpirun without -x PYTHONPATH in {owner}",
            "For ranks on other hosts give Open MPI: -x PYTHONPATH",
        )


def _named(words: Sequence[str]) -> str:
    """Return a command line in short: its program and the first file that it names."""
    program = Path(words[0]).name if words else "?"
    scripts = [Path(word).name for word in words[1:] if word.endswith(".py")]
    return " ".join([program, *scripts[:1]])
