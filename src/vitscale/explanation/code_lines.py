"""Lines of the user's program in which the training thread was seen, by samples of its stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from vitscale.explanation.rank_record import HookedRank

_LEAST_SHARE = 0.3
"""Share of a part's samples that a line must have to be named."""
_FEWEST_SAMPLES = 5
"""Fewest samples of a part that say anything."""
_LONGEST_NAME = 60


@dataclass(frozen=True)
class CodeLine:
    """A line of code, and how much of a part's time it takes."""

    file: str
    line: int
    function: str
    share: float
    """Share of the part's samples that lie in it."""

    def __str__(self) -> str:
        name = PurePath(self.file).name[-_LONGEST_NAME:]
        return f"{name}:{self.line} in {self.function[:_LONGEST_NAME]}"


class _Position(NamedTuple):
    file: str
    line: int
    function: str


def top_line(records: Iterable[HookedRank], part: str) -> CodeLine | None:
    """Return the line in which most samples of a part lie, over some ranks; None where no line has many."""
    return _largest(_shares(records, part))


def line_of_slow_rank(slow: HookedRank, others: Sequence[HookedRank], part: str) -> CodeLine | None:
    """Return the line of a part in which a slow rank is more often than the others; None where no line has many."""
    shares = _shares([slow], part)
    usual_shares = _shares(others, part)
    largest: _Position | None = None
    largest_excess = 0.0
    for position, share in shares.items():
        excess = share - usual_shares.get(position, 0.0)
        if excess > largest_excess:
            largest = position
            largest_excess = excess
    return None if largest is None else _largest({largest: shares[largest]})


def _shares(records: Iterable[HookedRank], part: str) -> dict[_Position, float]:
    """Return line -> its share of the samples of a part; empty where there are too few samples."""
    count_by_position: dict[_Position, int] = {}
    samples = 0
    for record in records:
        rows = record.rows_of(part)
        samples += max((row.of_all for row in rows), default=0)
        for row in rows:
            position = _Position(row.file, row.line, row.function)
            count_by_position[position] = count_by_position.get(position, 0) + max(0, row.count)
    if samples < _FEWEST_SAMPLES:
        return {}
    return {position: min(1.0, count / samples) for position, count in count_by_position.items()}


def _largest(share_by_position: dict[_Position, float]) -> CodeLine | None:
    """Return the line with the largest share; None where that is small, or there is none."""
    position = max(share_by_position, key=share_by_position.__getitem__, default=None)
    if position is None or share_by_position[position] < _LEAST_SHARE:
        return None
    return CodeLine(*position, share=share_by_position[position])
