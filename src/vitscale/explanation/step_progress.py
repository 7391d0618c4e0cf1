"""How far each rank is, from what its file has grown by since the last look. Other lines are read after the end."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from vitscale.base.files import open_regular
from vitscale.hook.lines import HookedEndLine, HookedRankLine, HookedStepLine, Line, parse_line

AGREED_STEP = "agreed step"
"""Reason in a rank's last line where it followed the plan."""
_MOST_NEW_BYTES = 1 << 20
"""Bytes of one file that are read at a look; where it has grown by more, the latest ones."""
_MOST_FILES = 100_000
_RECENT_STEPS = 20
"""Latest steps of a rank from which its usual step is worked out."""


class RankFileTail:
    """What is known of one rank from its file so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        """Bytes of the file that were read, or passed over."""
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.end_reason: str | None = None
        """Why the rank has ended, as its last line says; None while it has not written that."""
        self.world_size = 1
        self.recent_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Durations of the latest steps."""

    @property
    def steps(self) -> int:
        """Number of steps that the rank has recorded."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1

    def update(self) -> None:
        """Read what has come since the last look."""
        for line in self._new_lines():
            if isinstance(line, HookedRankLine):
                self.world_size = max(1, line.world_size)
            elif isinstance(line, HookedStepLine):
                self.first_step = line.number if self.first_step is None else self.first_step
                self.last_step = line.number
                self.recent_seconds.append(line.seconds)
            elif isinstance(line, HookedEndLine):
                self.end_reason = line.reason

    def _new_lines(self) -> Iterator[Line]:
        """Yield the whole lines that have come since the last look; those that are damaged are passed over."""
        for text in self._new_text().split(b"\n"):
            try:
                line = parse_line(text.decode())
            except ValueError:
                continue
            if line is not None:
                yield line

    def _new_text(self) -> bytes:
        """Return the bytes up to the last line break that have come since the last look; none if it is unreadable."""
        try:
            with open_regular(self._path, follow_links=False) as file:
                size = file.seek(0, 2)
                file.seek(max(self._offset, size - _MOST_NEW_BYTES))
                begin = file.tell()
                content = file.read(_MOST_NEW_BYTES)
        except OSError:
            return b""
        end = content.rfind(b"\n") + 1
        self._offset = begin + end
        return content[:end]


class StepProgress:
    """How far all ranks are that write into a folder."""

    def __init__(self, ranks: Path) -> None:
        """Watch a folder. Args: ranks: the folder of the ranks' files."""
        self._folder = ranks
        self._tails: dict[str, RankFileTail] = {}

    def update(self) -> None:
        """Read what has come since the last look."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if len(self._tails) < _MOST_FILES:
                self._tails.setdefault(path.name, RankFileTail(path))
        for tail in self._tails.values():
            tail.update()

    @property
    def has_steps(self) -> bool:
        """Whether a rank has recorded a step."""
        return any(tail.steps for tail in self._tails.values())

    @property
    def is_missing_ranks(self) -> bool:
        """Whether ranks of the world have written nothing."""
        world_size = max((tail.world_size for tail in self._tails.values()), default=1)
        return len(self._tails) < world_size

    @property
    def fewest_steps(self) -> int:
        """Steps of the rank with the fewest; 0 while ranks of the world are missing.

        Ranks on hosts that the hook does not reach stay missing: then the time decides.
        """
        if self.is_missing_ranks:
            return 0
        return min((tail.steps for tail in self._tails.values()), default=0)

    @property
    def hindmost_step(self) -> int:
        """Number of the last step of the rank that is behind all others; 0 where one has none."""
        return min((tail.last_step or 0 for tail in self._tails.values()), default=0)

    @property
    def foremost_step(self) -> int:
        """Number of the last step of the rank that is ahead of all others; 0 without steps."""
        return max((tail.last_step or 0 for tail in self._tails.values()), default=0)

    @property
    def step_seconds(self) -> float:
        """Usual duration of the latest steps, of the slowest rank; 0 where it is unknown."""
        medians = [statistics.median(tail.recent_seconds) for tail in self._tails.values() if tail.recent_seconds]
        return max(0.0, *medians) if medians else 0.0

    @property
    def all_ended(self) -> bool:
        """Whether there are ranks, and each has written its last line."""
        return bool(self._tails) and all(tail.end_reason is not None for tail in self._tails.values())

    @property
    def all_ended_as_agreed(self) -> bool:
        """Whether each rank has ended itself at the step that the plan names."""
        return bool(self._tails) and all(tail.end_reason == AGREED_STEP for tail in self._tails.values())
