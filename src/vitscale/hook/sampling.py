"""Samples of the training thread's stack, by part of the step.

A sample is the innermost frame of the user's own code, or the innermost of all where the whole stack is of libraries.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from .lines import HookedSamplesLine, SampleRow
from .marks import CHECKPOINT, EVALUATION, OTHER
from .steps import Break

BREAK = "break"
_MOST_ROWS = 20
_MOST_PENDING = 20_000
"""Samples of one step: nearly seven minutes at 20 ms."""
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")


class Spot(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


class Sample(NamedTuple):
    """Where the training thread was at a moment."""

    moment_ns: int
    part: str
    spot: Spot


class StackSamples:
    """Samples of the open step, and counts of those of all closed steps."""

    def __init__(self) -> None:
        self._open: list[Sample] = []
        self._counts: dict[str, Counter[Spot]] = {}
        self._is_user_code: dict[str, bool] = {}
        self._hook_folder = os.path.dirname(os.path.abspath(__file__)) + os.sep

    def take(self, thread_id: int, part: str, moment_ns: int) -> None:
        """Take a sample of this thread."""
        frame = sys._current_frames().get(thread_id)
        if frame is not None and len(self._open) < _MOST_PENDING:
            self._open.append(Sample(moment_ns, part, self._spot(frame)))

    def count_step(self, end_ns: int, breaks: Sequence[Break]) -> list[Spot | None]:
        """Count the samples up to a step's end; the most frequent spot of each of its breaks."""
        samples = [sample for sample in self._open if sample.moment_ns < end_ns]
        self._drop_until(end_ns)
        spots_by_break: list[Counter[Spot]] = [Counter() for _ in breaks]
        for sample in samples:
            position = _break_at(sample.moment_ns, breaks)
            if position is not None:
                spots_by_break[position][sample.spot] += 1
            self._counts.setdefault(_part_of(sample, in_break=position is not None), Counter())[sample.spot] += 1
        return [spots.most_common(1)[0][0] if spots else None for spots in spots_by_break]

    def skip_step(self, end_ns: int) -> None:
        """Forget the samples up to a step's end."""
        self._drop_until(end_ns)

    def lines(self) -> list[HookedSamplesLine]:
        """The most frequent spots of each part so far."""
        return [_samples_line(part, spots) for part, spots in self._counts.items()]

    def _drop_until(self, end_ns: int) -> None:
        self._open = [sample for sample in self._open if sample.moment_ns >= end_ns]

    def _spot(self, innermost: FrameType) -> Spot:
        frame: FrameType | None = innermost
        while frame is not None:
            if self._is_user(frame):
                return _spot_of(frame)
            frame = frame.f_back
        return _spot_of(innermost)

    def _is_user(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        is_user = self._is_user_code.get(file)
        if is_user is None:
            is_user = is_user_file(file, self._hook_folder)
            self._is_user_code[file] = is_user
        return is_user


def is_user_file(file: str, hook_folder: str) -> bool:
    """Whether a code object's file is the user's: not of an installed package, Python, a frozen module or the hook."""
    if file.startswith(("<frozen", hook_folder)) or any(folder in file for folder in _LIBRARY_FOLDERS):
        return False
    return not file.startswith(_python_folders())


def _python_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib")
    paths = [sysconfig.get_path(name) for name in names]
    return tuple(path.rstrip(os.sep) + os.sep for path in paths if path)


def _spot_of(frame: FrameType) -> Spot:
    return Spot(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def _part_of(sample: Sample, *, in_break: bool) -> str:
    """Part that a sample counts for. An evaluation that was cut out as no break lies between a step's parts."""
    if in_break:
        return BREAK
    return OTHER if sample.part in (EVALUATION, CHECKPOINT) else sample.part


def _break_at(moment_ns: int, breaks: Sequence[Break]) -> int | None:
    """Position of the break that covers this moment."""
    for position, cut in enumerate(breaks):
        if cut.begin_ns <= moment_ns < cut.end_ns:
            return position
    return None


def _samples_line(part: str, spots: Counter[Spot]) -> HookedSamplesLine:
    total = sum(spots.values())
    rows = [
        SampleRow(file=spot.file, line=spot.line, function=spot.function, count=count, of_all=total)
        for spot, count in spots.most_common(_MOST_ROWS)
    ]
    return HookedSamplesLine(part=part, rows=rows)
