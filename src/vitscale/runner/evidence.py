"""The evidence that a run leaves when it ends, from which its outcome is judged.

Reads what launchers print about ranks that failed: exit codes by rank, each launcher in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from vitscale.base.files import open_regular
from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner.gpu_failures import GpuFailure, gpu_failures
from vitscale.store.checks import CheckedRank
from vitscale.store.records import ErrorLine, RankRecord
from vitscale.store.results import OutcomeKind
from vitscale.trial.parallel import RankLayout

# Two lines of torchrun's report, as `ChildFailedError` words them (torch/distributed/elastic/multiprocessing/errors).
_TORCHRUN_EXIT = re.compile(
    r"^ *rank +: (?P<rank>\d{1,6}) \(local_rank: \d+\)\n *exitcode +: (?P<code>-?\d{1,3}) \(pid: \d+\)", re.MULTILINE
)
_TORCHRUN_KILLED = "forcefully exiting via"
"""torchrun prints this before it sends SIGKILL to ranks that ignored SIGTERM after another had failed."""
_TORCHRUN_LIST = "\nFailures:\n"
"""Begins torchrun's list of failures, which is complete where it is printed."""
# Open MPI's help texts (orte/tools/orterun/help-orterun.txt: aborted by a signal, non-zero exit).
_MPI_SIGNAL = re.compile(
    r"process rank (?P<rank>\d{1,6}) with PID \d+ on node \S+\s+exited on\s+signal (?P<code>\d{1,3})"
)
_MPI_EXIT = re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d{1,6})\]\s+Exit code: +(?P<code>\d{1,3})")
# Slurm's srun: "srun: error: node1: task 1: Killed", "tasks 2-3,5: Exited with exit code 3". "Terminated" is left out:
# srun says that of tasks that it has ended itself.
_SRUN_EXIT = re.compile(
    r"^srun: error: \S+ tasks? (?P<rank>\d{1,6})[\d,-]*: "
    r"(?:(?P<name>Killed|Out Of Memory|Segmentation fault|Bus error|Aborted)|Exited with exit code (?P<code>\d{1,3}))",
    re.MULTILINE,
)
_SIGNAL_NUMBERS = {"Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}
_SLURM_OUT_OF_MEMORY = re.compile(
    r"^slurmstepd\S*: error: Detected \d+ oom.kill event|^srun: error: .*: Out Of Memory", re.M
)
"""What slurmstepd or srun prints when the kernel ended a process for memory, on any node."""
# `vitscale.processes.local_ranks`.
_LOCAL_EXIT = re.compile(r"^local: rank (?P<rank>\d{1,6}) ended with exit code (?P<code>-?\d{1,3})$", re.MULTILINE)
_LOCAL_LIST = "local: the ranks that failed, the first one first:\n"
_LOCAL_KILLED = "local: SIGKILL to the ranks that did not heed SIGTERM\n"
SSH_FAILED = 255
"""ssh's own exit code for failure."""
# OpenSSH's failures: "ssh: connect to host node1 port 22: No route to host"; pdsh puts the host's name before it.
_SSH_FAILURE = re.compile(
    r"^(?:[\w.-]{1,253}: )?(?P<words>ssh: (?:connect to host (?P<host>[\w.:-]{1,253}) port"
    r"|Could not resolve hostname (?P<name>[\w.-]{1,253}):)[^\n]{0,200})",
    re.MULTILINE,
)


class RankExit(NamedTuple):
    """A rank's end, as its launcher reports it."""

    rank: int
    code: int
    """Exit code, or minus a signal's number: -9 for SIGKILL."""


class UnreachedHost(NamedTuple):
    """A host that ssh could not reach."""

    host: str
    words: str
    """The message of ssh."""


@dataclass(frozen=True)
class Reports:
    """Failures of a run that its launchers have printed."""

    codes: tuple[RankExit, ...]
    """The rank that the launcher takes for the cause comes first."""
    lists_all_failures: bool
    """Whether `codes` has every rank that failed: then the others left by themselves."""
    launcher_killed: bool
    """Whether the launcher has sent SIGKILL itself."""
    out_of_memory: bool
    """Whether Slurm says that the kernel ended a rank for memory."""
    unreached: tuple[UnreachedHost, ...]


def read_reports(log: str) -> Reports:
    """Read what launchers printed; `log` is untrusted."""
    return Reports(
        codes=tuple(dict.fromkeys(_reported_exits(log))),  # each once, in their order
        lists_all_failures=_TORCHRUN_LIST in log or _LOCAL_LIST in log,
        launcher_killed=_TORCHRUN_KILLED in log or _LOCAL_KILLED in log,
        out_of_memory=_SLURM_OUT_OF_MEMORY.search(log) is not None,
        unreached=tuple(_unreached_host(match) for match in _SSH_FAILURE.finditer(log)),
    )


def _reported_exits(log: str) -> list[RankExit]:
    """Return the ends of ranks that launchers report, by launcher; first the one that a launcher takes for the cause.

    As a rule one launcher has printed: its own order counts, not that of the launchers here.
    """
    torchrun_exits = [_rank_exit(match) for match in _TORCHRUN_EXIT.finditer(log)]
    return [
        *reversed(torchrun_exits),  # it lists the root cause last
        *(_rank_exit(match) for match in _LOCAL_EXIT.finditer(log)),
        *(_rank_exit_by_signal(match) for match in _MPI_SIGNAL.finditer(log)),
        *(_rank_exit(match) for match in _MPI_EXIT.finditer(log)),
        *(_srun_rank_exit(match) for match in _SRUN_EXIT.finditer(log)),
    ]


def _rank_exit(match: re.Match[str]) -> RankExit:
    """Return the end in a report that has the exit code."""
    return RankExit(int(match["rank"]), int(match["code"]))


def _rank_exit_by_signal(match: re.Match[str]) -> RankExit:
    """Return the end in a report that has the number of the signal which ended the rank."""
    return RankExit(int(match["rank"]), -int(match["code"]))


def _srun_rank_exit(match: re.Match[str]) -> RankExit:
    """Return the end in a line of srun, which has an exit code or names a signal."""
    code = -_SIGNAL_NUMBERS[match["name"]] if match["name"] else int(match["code"])
    return RankExit(int(match["rank"]), code)


def _unreached_host(match: re.Match[str]) -> UnreachedHost:
    """Return the host in a message of ssh, which has its address or its name."""
    return UnreachedHost(match["host"] or match["name"], match["words"].strip())


_LOG_TAIL_BYTES = 64_000
_WATCHDOG_LOG_BYTES = 4_000_000
# What a rank raises because another is gone, in gloo's and NCCL's words for a connection that ended.
_LOST_PEER = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE
)

Stop = Literal["hang", "timeout", "lost"]


@dataclass(frozen=True)
class Ending:
    """The end of a run, as the driver saw it from outside."""

    exit_code: int | None
    """Exit code of the launcher; None where the driver had to end it."""
    stopped: Stop | None
    """Why the driver ended the run; None where the run ended by itself."""
    limit_seconds: float | None
    """The limit that was reached, where one was."""
    kernel_oom_kills: int
    """Processes that the kernel's OOM killer ended on this host during the run."""
    started_unix_seconds: float
    wall_seconds: float
    seen_seconds: float = 0.0
    """`time.monotonic()` when the run ended; times in `statuses` are on the same clock."""
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    """The last status heard of each rank, before the driver ended anything."""
    stopped_ranks: frozenset[int] = frozenset()
    """Ranks whose processes were stopped (SIGSTOP, a debugger)."""
    unreached: tuple[str, ...] = ()
    """Hosts that were out of reach when they were to end what was left."""
    not_begun: tuple[tuple[str, int], ...] = ()
    """(host, exit code) of hosts on which ssh or the shell there began nothing, before the driver ended anything."""
    last_words: str = ""
    """The last line that was printed then; empty where all hosts have begun."""


RankEnd = RankRecord | CheckedRank
"""The record of a rank that trains, or that checks."""


@dataclass(frozen=True)
class RunVerdict:
    """The cause of a run's end."""

    kind: OutcomeKind
    reason: str
    rank: int | None = None
    detail: str = ""
    external: bool = False
    host: str | None = None
    transient: bool = False


@dataclass(frozen=True)
class RunEvidence:
    """The evidence that a run leaves: what the driver saw, its folder, and its launcher's words."""

    ending: Ending
    ranks: Sequence[RankEnd]
    """Records of the ranks that recorded anything."""
    world_size: int
    folder: Path
    layout: RankLayout | None = None
    """Which ranks share a model."""
    elsewhere: tuple[str, ...] = ()
    """Hosts of the run other than the driver's."""

    @cached_property
    def tail(self) -> str:
        """The end of what launcher and ranks printed (`log_tail`)."""
        return log_tail(self.folder / "log.txt")

    @cached_property
    def gpu_failures(self) -> tuple[GpuFailure, ...]:
        """Failures of GPUs and of NCCL that ranks printed, or recorded as exceptions; the cause of others comes first.

        Many ranks' watchdogs print long stacks after the first words, so that these are searched for far back.
        """
        failures = gpu_failures(log_tail(self.folder / "log.txt", _WATCHDOG_LOG_BYTES))
        for record in self.ranks:
            if record.error is not None:
                message = f"[rank{record.rank}]: {record.error.message}"
                failures += gpu_failures(message)
        return tuple(sorted(failures, key=lambda failure: failure.kind))

    @cached_property
    def reports(self) -> Reports:
        """What launchers say in `tail` about ranks that failed."""
        return read_reports(self.tail)

    @cached_property
    def codes(self) -> tuple[RankExit, ...]:
        """The ends of ranks that launchers report.

        For a single rank without a report it is the launcher's own exit code.
        """
        if self.reports.codes:
            return self.reports.codes
        if self.world_size == 1 and self.ending.exit_code:
            return (RankExit(0, self.ending.exit_code),)
        return ()

    @cached_property
    def ranks_with_an_end(self) -> frozenset[int]:
        """The ranks that recorded an error, or that they did all their work."""
        return frozenset(record.rank for record in self.ranks if record.error is not None or record.ended)

    @cached_property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that did not do all their work."""
        ended = {record.rank for record in self.ranks if record.ended}
        return tuple(rank for rank in range(self.world_size) if rank not in ended)

    @property
    def completed(self) -> bool:
        """Whether every rank has done its work, none recorded an error, and the launcher ended with exit code 0."""
        has_error = any(record.error for record in self.ranks)
        return not self.unfinished and not has_error and self.ending.exit_code == 0


# Log lines of torch's C++ and others, as "[W1126 10:34:12.089956061 socket.cpp:207] [c10d] ...".
_TORCH_LOG_LINE = re.compile(r"\[?[IWE]\d{4} ")


def last_words(log: str) -> str:
    """Return the last line of a log that is no log line of torch itself; empty where there is none."""
    for line in reversed(log.splitlines()):
        words = line.strip()
        if words and not _TORCH_LOG_LINE.match(words):
            return words
    return ""


def is_about_lost_peer(error: ErrorLine) -> bool:
    """Whether a rank raised this error because another rank, its peer, is gone."""
    return _LOST_PEER.search(error.message) is not None


def has_own_error(record: RankEnd) -> bool:
    """Whether a rank recorded an exception that does not follow from another rank's end."""
    return record.error is not None and not is_about_lost_peer(record.error)


def log_tail(log: Path, most_bytes: int = _LOG_TAIL_BYTES) -> str:
    """Return the last `most_bytes` of what launcher and ranks printed; empty where the file cannot be read."""
    try:
        with open_regular(log) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - most_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
