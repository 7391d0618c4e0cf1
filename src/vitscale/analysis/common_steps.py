"""What all ranks of a run recorded of the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from vitscale.store.records import RankRecord, Run


class _OfAStep(Protocol):
    @property
    def step(self) -> int: ...


Line = TypeVar("Line", bound=_OfAStep)


def common_steps(run: Run, lines_of: Callable[[RankRecord], Sequence[Line]]) -> list[tuple[Line, ...]]:
    """In order, one line per rank for each step of which every rank needed has one; empty if a rank is missing.

    Args:
        run: the record.
        lines_of: the lines of one rank, each with a `step`.
    """
    by_rank = [{line.step: line for line in lines_of(rank)} for rank in run.ranks]
    if not by_rank or len(by_rank) < len(run.ranks_needed):
        return []
    common = set.intersection(*(set(lines) for lines in by_rank))
    return [tuple(lines[step] for lines in by_rank) for step in sorted(common)]
