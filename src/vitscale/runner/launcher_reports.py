"""What launchers print about ranks that failed: exit codes by rank, each launcher in its own words."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Two lines of torchrun's report, as `ChildFailedError` words them (torch/distributed/elastic/multiprocessing/errors).
_TORCHRUN = re.compile(
    r"^ *rank +: (?P<rank>\d{1,6}) \(local_rank: \d+\)\n *exitcode +: (?P<code>-?\d{1,3}) \(pid: \d+\)", re.MULTILINE
)
_TORCHRUN_KILLED = "forcefully exiting via"
"""torchrun says so before it sends SIGKILL itself, to ranks that did not heed SIGTERM when another had failed."""
_TORCHRUN_LIST = "\nFailures:\n"
"""Begins the list of failures: where it is there, the list is whole."""
# Open MPI's help texts (orte/tools/orterun/help-orterun.txt: aborted by a signal, non-zero exit).
_MPI_SIGNAL = re.compile(
    r"process rank (?P<rank>\d{1,6}) with PID \d+ on node \S+\s+exited on\s+signal (?P<code>\d{1,3})"
)
_MPI_EXIT = re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d{1,6})\]\s+Exit code: +(?P<code>\d{1,3})")
# Slurm's srun: "srun: error: node1: task 1: Killed", "tasks 2-3,5: Exited with exit code 3". Not "Terminated": so it
# speaks of those that it has ended itself.
_SRUN = re.compile(
    r"^srun: error: \S+ tasks? (?P<rank>\d{1,6})[\d,-]*: "
    r"(?:(?P<name>Killed|Out Of Memory|Segmentation fault|Bus error|Aborted)|Exited with exit code (?P<code>\d{1,3}))",
    re.MULTILINE,
)
_SIGNALS = {"Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}
_SLURM_OUT_OF_MEMORY = re.compile(
    r"^slurmstepd\S*: error: Detected \d+ oom.kill event|^srun: error: .*: Out Of Memory", re.M
)
"""slurmstepd saw the kernel end a process for memory, on whichever node."""
# `vitscale.processes.local_ranks`.
_LOCAL = re.compile(r"^local: rank (?P<rank>\d{1,6}) ended with exit code (?P<code>-?\d{1,3})$", re.MULTILINE)
_LOCAL_LIST = "local: the ranks that failed, the first one first:\n"
_LOCAL_KILLED = "local: SIGKILL to the ranks that did not heed SIGTERM\n"
# OpenSSH's own failures: "ssh: connect to host node1 port 22: No route to host"; pdsh puts the host before it.
_SSH = re.compile(
    r"^(?:[\w.-]{1,253}: )?(?P<words>ssh: (?:connect to host (?P<host>[\w.:-]{1,253}) port"
    r"|Could not resolve hostname (?P<name>[\w.-]{1,253}):)[^\n]{0,200})",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Reports:
    """What one run's launchers have said."""

    codes: tuple[tuple[int, int], ...]
    """(rank, exit code; negative: the signal), what the launcher takes for the cause first."""
    whole: bool
    """Whether every rank that failed is among them: the others left by themselves."""
    launcher_killed: bool
    """Whether the launcher has sent SIGKILL itself."""
    out_of_memory: bool
    """Whether Slurm says that the kernel ended a rank for memory."""
    unreached: tuple[tuple[str, str], ...]
    """(host, ssh's words) of hosts that could not be reached."""


def read(log: str) -> Reports:
    """Reads what launchers printed; `log` is untrusted."""
    # torchrun lists the root cause last.
    codes = [(int(m["rank"]), int(m["code"])) for m in _TORCHRUN.finditer(log)][::-1]
    codes += [(int(m["rank"]), int(m["code"])) for m in _LOCAL.finditer(log)]
    codes += [(int(m["rank"]), -int(m["code"])) for m in _MPI_SIGNAL.finditer(log)]
    codes += [(int(m["rank"]), int(m["code"])) for m in _MPI_EXIT.finditer(log)]
    codes += [(int(m["rank"]), -_SIGNALS[m["name"]] if m["name"] else int(m["code"])) for m in _SRUN.finditer(log)]
    return Reports(
        codes=tuple(dict.fromkeys(codes)),
        whole=_TORCHRUN_LIST in log or _LOCAL_LIST in log,
        launcher_killed=_TORCHRUN_KILLED in log or _LOCAL_KILLED in log,
        out_of_memory=_SLURM_OUT_OF_MEMORY.search(log) is not None,
        unreached=tuple((m["host"] or m["name"], m["words"].strip()) for m in _SSH.finditer(log)),
    )
