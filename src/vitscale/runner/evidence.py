"""All that is known of a run that has ended, from which its outcome is judged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner import launcher_reports
from vitscale.runner.launcher_reports import Reports
from vitscale.store.records import ErrorLine
from vitscale.store.results import OutcomeKind

_LOG_TAIL_BYTES = 64_000
# What a rank raises because another is gone: gloo's and NCCL's words for a connection that ended.
_LOST_PEER = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE
)

Stop = Literal["hang", "timeout", "lost"]


@dataclass(frozen=True)
class Ending:
    """What the driver saw of a run from outside."""

    exit_code: int | None
    """Of the launcher; None where the driver had to end it."""
    stopped: Stop | None
    limit_seconds: float | None
    """The limit that was reached, where one was."""
    kernel_oom_kills: int
    """Processes the kernel's OOM killer ended on this host meanwhile."""
    started_unix_seconds: float
    wall_seconds: float
    seen_seconds: float = 0.0
    """`time.monotonic()` when it ended; what `statuses` are to be read against."""
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    """What was last heard of each rank, before anything was ended from here."""
    stopped_ranks: frozenset[int] = frozenset()
    """Ranks that the kernel held stopped."""
    unreached: tuple[str, ...] = ()
    """Hosts that did not answer when they were asked to end what was left."""


class RankEnd(Protocol):
    """What the record of any rank tells of its end, of one that trains and of one that checks."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def error(self) -> ErrorLine | None:
        """The exception that ended it."""

    @property
    def ended(self) -> bool:
        """Whether it did all its work."""

    @property
    def last_sign(self) -> str:
        """How far it has come, in words."""


@dataclass(frozen=True)
class Verdict:
    """What has ended a run."""

    kind: OutcomeKind
    reason: str
    rank: int | None = None
    detail: str = ""
    external: bool = False
    host: str | None = None
    transient: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a run has left: on the driver's side, in its folder, and in its launcher's words."""

    ending: Ending
    ranks: Sequence[RankEnd]
    """Those that recorded anything."""
    world_size: int
    folder: Path

    @cached_property
    def tail(self) -> str:
        """The end of what launcher and ranks printed."""
        return log_tail(self.folder / "log.txt")

    @cached_property
    def reports(self) -> Reports:
        """What launchers say there of ranks that failed."""
        return launcher_reports.read(self.tail)

    @cached_property
    def codes(self) -> tuple[tuple[int, int], ...]:
        """(rank, exit code; negative: the signal) as the launcher reports them; of a world of one without a report,
        that of the process."""
        if not self.reports.codes and self.world_size == 1 and self.ending.exit_code:
            return ((0, self.ending.exit_code),)
        return self.reports.codes

    @cached_property
    def told(self) -> frozenset[int]:
        """The ranks that recorded why they ended."""
        return frozenset(record.rank for record in self.ranks if record.error is not None or record.ended)

    @cached_property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that did not do all their work."""
        ended = {record.rank for record in self.ranks if record.ended}
        return tuple(rank for rank in range(self.world_size) if rank not in ended)

    @property
    def completed(self) -> bool:
        """Whether every rank has done its work, and the launcher has nothing to object."""
        return not self.unfinished and not any(record.error for record in self.ranks) and self.ending.exit_code == 0


def lost_peer(error: ErrorLine) -> bool:
    """Whether a rank raised this because another one is gone."""
    return _LOST_PEER.search(error.message) is not None


def own_cause(record: RankEnd) -> bool:
    """Whether a rank recorded an exception that does not follow from another's end."""
    return record.error is not None and not lost_peer(record.error)


def log_tail(log: Path) -> str:
    """The last 64,000 bytes of what launcher and ranks printed."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
