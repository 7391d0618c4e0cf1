"""Reads what ranks wrote. The files are untrusted: torn, damaged, huge, or written by somebody else.

A file has one JSON object a line (`vitscale.hook.lines`). Its beginning says who the rank is; of the rest the last
megabytes are read. Lines that cannot be read are left out and counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vitscale.base.files import open_regular
from vitscale.errors import shown
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.results_folder import ExplainFolder
from vitscale.hook import lines
from vitscale.present.units import counted

HEAD_BYTES = 1 << 20
"""Bytes from the beginning of a file that are always read."""
TAIL_BYTES = 32 << 20
"""Bytes from its end that are read: some 80,000 steps."""
LONGEST_LINE_BYTES = 1 << 20
_LARGEST_FILE_BYTES = 1 << 40
_MOST_RANK_FILES = 10_000
_MOST_NOTES = 100
_LARGEST_TRACE_BYTES = 2 << 30
_TRACE_NAME = re.compile(r"[\w-][\w.-]{0,200}\.json(?:\.gz)?", re.ASCII)
"""A file's name without a folder."""


class RankFile(NamedTuple):
    """What one file holds."""

    name: str
    rank: HookedRank | None
    """None: nothing in it says which rank wrote it."""
    unreadable_lines: int


@dataclass(frozen=True)
class RankFiles:
    """What all ranks wrote."""

    ranks: tuple[HookedRank, ...]
    """Each rank once, in the order of their numbers."""
    problems: tuple[str, ...] = ()
    """Sentences on what could not be read, or is not there."""

    @property
    def has_steps(self) -> bool:
        """Whether a rank recorded a step."""
        return any(rank.steps for rank in self.ranks)

    @property
    def missing_ranks(self) -> int:
        """Ranks of the world without a file."""
        world_size = max((rank.rank.world_size for rank in self.ranks), default=0)
        return max(0, world_size - len(self.ranks))


def read_rank_files(folder: ExplainFolder) -> RankFiles:
    """Return what the ranks of an explanation wrote into their results folder."""
    paths = sorted(folder.ranks.glob("*.jsonl"))
    files = [_read_file(path, folder) for path in paths[:_MOST_RANK_FILES]]
    ranks = _one_for_each_rank(files)
    problems = [*_file_problems(files), *_problems_of_world(files, ranks)]
    if len(paths) > _MOST_RANK_FILES:
        problems.append(f"{len(paths) - _MOST_RANK_FILES:,} files of ranks were not read.")
    return RankFiles(tuple(ranks), tuple(problems))


def trace_path(folder: ExplainFolder, profile: lines.HookedProfileLine) -> Path | None:
    """Return the trace of a rank's profiled steps; None where it is no file in the folder of traces.

    The name comes from the rank's file: it may hold no folder, and a link is not followed.
    """
    if _TRACE_NAME.fullmatch(profile.trace) is None:
        return None
    path = folder.traces / profile.trace
    try:
        open_regular(path, largest_bytes=_LARGEST_TRACE_BYTES, follow_links=False).close()
    except OSError:
        return None
    return path


@dataclass
class _LinesByKind:
    """The lines of one file, as they are read. Of lines that are written again the last one counts."""

    rank: lines.HookedRankLine | None = None
    model: lines.HookedModelLine | None = None
    loader: lines.HookedLoaderLine | None = None
    optimizers: dict[str, lines.HookedOptimizerLine] = field(default_factory=dict)
    """Class name -> its last line."""
    steps: dict[int, lines.HookedStepLine] = field(default_factory=dict)
    """Number -> step."""
    breaks: list[lines.HookedBreakLine] = field(default_factory=list)
    samples: dict[str, lines.HookedSamplesLine] = field(default_factory=dict)
    """Part of the step -> its last line."""
    profile: lines.HookedProfileLine | None = None
    end: lines.HookedEndLine | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, line: lines.Line) -> None:
        """Add the next line of the file.

        Raises:
            ValueError: its numbers cannot be.
        """
        match line:
            case lines.HookedRankLine():
                self.rank = _checked_rank(line)
            case lines.HookedModelLine():
                self.model = line
            case lines.HookedLoaderLine():
                self.loader = line
            case lines.HookedOptimizerLine():
                self.optimizers[line.class_name] = line
            case lines.HookedStepLine():
                self.steps[line.number] = _checked_step(line)
            case lines.HookedBreakLine():
                if line.seconds < 0:
                    raise ValueError("a break of negative length")
                self.breaks.append(line)
            case lines.HookedSamplesLine():
                self.samples[line.part] = line
            case lines.HookedProfileLine():
                self.profile = line
            case lines.HookedEndLine():
                self.end = line
            case lines.HookedNoteLine() if len(self.notes) < _MOST_NOTES:
                self.notes.append(line.text)

    def record(self) -> HookedRank | None:
        """Return the lines as a record; None where nothing says which rank wrote them."""
        if self.rank is None:
            return None
        return HookedRank(
            rank=self.rank,
            model=self.model,
            loader=self.loader,
            optimizer=next(iter(self.optimizers.values()), None),
            steps=tuple(self.steps[number] for number in sorted(self.steps)),
            breaks=tuple(self.breaks),
            samples=tuple(self.samples.values()),
            profile=self.profile,
            end=self.end,
            notes=tuple(self.notes),
        )


def _checked_rank(line: lines.HookedRankLine) -> lines.HookedRankLine:
    """Return a rank's line.

    Raises:
        ValueError: its numbers cannot be.
    """
    if not 0 <= line.rank < line.world_size:
        raise ValueError("a rank outside its world")
    return line


def _checked_step(line: lines.HookedStepLine) -> lines.HookedStepLine:
    """Return a step's line.

    Raises:
        ValueError: a number that counts or measures something is negative.
    """
    numbers = (
        line.number,
        line.seconds,
        line.images,
        line.micro_steps,
        line.data_seconds,
        line.forward_seconds,
        line.backward_seconds,
        line.own_backward_seconds,
        line.first_bucket_seconds,
        line.optimizer_seconds,
    )
    if any(number is not None and number < 0 for number in numbers):
        raise ValueError("a negative number in a step")
    return line


def _read_file(path: Path, folder: ExplainFolder) -> RankFile:
    """Return what one file holds."""
    collected = _LinesByKind()
    unreadable_lines = 0
    try:
        with open_regular(path, largest_bytes=_LARGEST_FILE_BYTES, follow_links=False) as file:
            for content in _line_bytes(file):
                try:
                    line = lines.parse_line(content.decode())
                    if line is not None:
                        collected.add(line)
                except ValueError:
                    unreadable_lines += 1
    except OSError:
        return RankFile(path.name, None, unreadable_lines=1)
    record = collected.record()
    if record is not None:
        record = _with_safe_profile(record, folder)
    return RankFile(path.name, record, unreadable_lines)


def _line_bytes(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file's beginning and end, without a torn last one; a longer line comes as b"?" in its stead.

    A file between these two sizes is read whole.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    yield from _lines_up_to(file, HEAD_BYTES)
    if size - file.tell() > TAIL_BYTES:
        file.seek(size - TAIL_BYTES)
        file.readline(LONGEST_LINE_BYTES)  # the rest of a line whose beginning is left out
    yield from _lines_up_to(file, size)


def _lines_up_to(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield lines from where the file is until one ends at or behind `end`, in bytes from its beginning."""
    while file.tell() < end:
        line = file.readline(LONGEST_LINE_BYTES)
        if not line:
            return
        if line.endswith(b"\n"):
            yield line
            continue
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(LONGEST_LINE_BYTES)
        if piece:
            yield b"?"  # too long to be read; one that is torn at the file's end is left out without a word


def _with_safe_profile(record: HookedRank, folder: ExplainFolder) -> HookedRank:
    """Return a record without a trace that is not in the folder of traces."""
    profile = record.profile
    if profile is None or trace_path(folder, profile) is not None:
        return record
    note = f"The trace {shown(profile.trace)} is no file of the folder traces/."
    return replace(record, profile=None, notes=(*record.notes, note))


def _one_for_each_rank(files: Sequence[RankFile]) -> list[HookedRank]:
    """Return the records by rank. A rank that was started again wrote several files: the one with most steps counts."""
    record_by_rank: dict[int, HookedRank] = {}
    for file in files:
        if file.rank is None:
            continue
        number = file.rank.rank.rank
        earlier = record_by_rank.get(number)
        if earlier is None or len(file.rank.steps) > len(earlier.steps):
            record_by_rank[number] = file.rank
    return [record_by_rank[number] for number in sorted(record_by_rank)]


def _file_problems(files: Sequence[RankFile]) -> Iterator[str]:
    """Yield a sentence for each file that has lines that cannot be read."""
    for file in files:
        if file.rank is None:
            yield f"{shown(file.name)} does not say which rank wrote it."
        elif file.unreadable_lines:
            yield f"{shown(file.name)}: {counted(file.unreadable_lines, 'line')} cannot be read."


def _problems_of_world(files: Sequence[RankFile], ranks: Sequence[HookedRank]) -> Iterator[str]:
    """Yield sentences on ranks that wrote several files, or none."""
    records = sum(file.rank is not None for file in files)
    if records > len(ranks):
        yield f"{counted(records - len(ranks), 'file')} of ranks that were started again: the longest of each is used."
    missing = RankFiles(tuple(ranks)).missing_ranks
    if missing:
        yield f"{counted(missing, 'rank')} wrote nothing: the hook did not reach them, or they took no step."
