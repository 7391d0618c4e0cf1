"""One rank's measurements of a check, line by line: each is safe once written, and read whatever else is there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from vitscale.errors import printable, shown
from vitscale.store.check_records import (
    LINE,
    CheckedRank,
    CheckLine,
    CollectiveLine,
    ComputeLine,
    DiskLine,
    FactsLine,
    LoaderLine,
    ReachLine,
    StageLine,
)
from vitscale.store.records import EndLine, MatmulLine, Record

_RANK_FILE = re.compile(r"rank-(\d{1,6})\.jsonl")
_LARGEST_NUMBER = 1e100
"""Sums and products of such numbers do not overflow."""

Kind = TypeVar("Kind", bound=Record)


class CheckLog:
    """Appends one rank's lines to rank-K.jsonl, each on disk when `write` returns: what comes next may hang."""

    def __init__(self, folder: Path, rank: int) -> None:
        # O_EXCL: a second rank that takes itself for rank K is a broken launch, and must not mix its lines in.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(folder / f"rank-{rank}.jsonl", flags, 0o644)

    def write(self, line: CheckLine) -> None:
        """Appends one line whole.

        Raises:
            OSError: the disk does not take it.
        """
        data = f"{line.model_dump_json()}\n".encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)


def read_checked_ranks(folder: Path, world_size: int) -> tuple[CheckedRank, ...]:
    """What all ranks of a check have written so far, by rank; lines that cannot be read are named in `broken`."""
    found = []
    for path in folder.iterdir():
        match = _RANK_FILE.fullmatch(path.name)
        if match is not None and int(match[1]) < world_size:
            found.append(read_checked_rank(path, int(match[1])))
    return tuple(sorted(found, key=lambda checked: checked.rank))


def read_checked_rank(path: Path, rank: int) -> CheckedRank:
    """One rank's lines. A line that is broken, or cut off, is named and left out."""
    lines: list[CheckLine] = []
    broken: list[str] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("cut off")
                refuse_wild_numbers(json.loads(raw))
                lines.append(LINE.validate_json(raw))
            except (RecursionError, ValueError) as error:
                broken.append(f"{path.name}:{number}: {first_reason(error)}")

    def last_of(kind: type[Kind]) -> Kind | None:
        return next((line for line in reversed(lines) if isinstance(line, kind)), None)

    return CheckedRank(
        rank=rank,
        facts=last_of(FactsLine),
        reach=last_of(ReachLine),
        collectives=tuple(line for line in lines if isinstance(line, CollectiveLine)),
        matmul=last_of(MatmulLine),
        compute=last_of(ComputeLine),
        loader=last_of(LoaderLine),
        disk=last_of(DiskLine),
        stages=tuple(line for line in lines if isinstance(line, StageLine)),
        ended=last_of(EndLine) is not None,
        broken=tuple(broken),
    )


def refuse_wild_numbers(content: Any) -> Any:
    """Refuses what this program never writes: NaN, infinity, numbers beyond all measure, integers beyond 64 bits."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif (isinstance(value, float) and not abs(value) < _LARGEST_NUMBER) or (
            isinstance(value, int) and value.bit_length() > 63
        ):
            raise ValueError(f"no number of vitscale's: {shown(value)}")
    return content


def first_reason(error: BaseException) -> str:
    """What is wrong, on one line of at most 200 characters."""
    text = printable(str(error)).splitlines()
    return (" ".join(text[:3]) or type(error).__name__)[:200]
