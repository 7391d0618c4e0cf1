"""Runs of two sides that were made in turn: which run of one was made beside which of the other.

A machine of today is not quite that of yesterday: clocks, temperature, neighbours and updates make two sessions differ
by 2 to 3 %, which repeats inside a session do not show. Where the runs of two sides alternate (`vitscale compare
--run`), a pair of neighbours in time has its session in common, and the ratio of the two does not depend on it.

Whether they alternated is read from when each run began and ended, so that any way of alternating counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.analysis.trials import TrialResult

_CLOCK_SECONDS = 1.0
"""Seconds by which a run may seem to begin before the one before it ended."""
_INTERRUPTION_SECONDS = 600.0
_INTERRUPTION_TIMES = 3.0
"""Between two runs lies an interruption where more passed than ten minutes and than three times what usually does."""


class Round(NamedTuple):
    """Two runs, one of each side, that were made one after the other."""

    first_seconds: float
    """What the run of the first side cost."""
    other_seconds: float


class Span(NamedTuple):
    """The first run's begin and the last run's end, in seconds since 1970."""

    began: float
    ended: float


class _MadeRun(NamedTuple):
    is_first: bool
    """Whether it is one of the first side."""
    began: float
    ended: float
    seconds: float
    """Its cost."""


def rounds(first: TrialResult, other: TrialResult) -> tuple[Round, ...]:
    """The rounds in which the runs of a trial and of its counterpart alternated; empty where they did not.

    They alternated where no two runs went on at one time, 3 pairs or more are neighbours in time, and no side has more
    runs outside a pair than inside. A pair with an interruption between its two runs is none, for the machine may have
    changed in between.
    """
    made = sorted([*_made(first, is_first=True), *_made(other, is_first=False)], key=lambda run: run.began)
    if any(later.began < earlier.ended - _CLOCK_SECONDS for earlier, later in itertools.pairwise(made)):
        return ()
    pairs = _without_interruptions(_neighbours(made))
    pairs_needed = max(FEWEST_REPEATS, _most_of_a_side(made) / 2)
    if len(pairs) < pairs_needed:
        return ()
    return tuple(
        Round(earlier.seconds, later.seconds) if earlier.is_first else Round(later.seconds, earlier.seconds)
        for earlier, later in pairs
    )


def span(results: Sequence[TrialResult]) -> Span | None:
    """When the runs of some trials were made; None where no run tells it, as in imported logs."""
    outcomes = [
        run.outcome
        for result in results
        for run in result.records
        if run.header.imported is None and run.outcome.started_unix_seconds > 0
    ]
    if not outcomes:
        return None
    began = min(outcome.started_unix_seconds for outcome in outcomes)
    return Span(began, max(outcome.started_unix_seconds + outcome.wall_seconds for outcome in outcomes))


def _made(result: TrialResult, *, is_first: bool) -> list[_MadeRun]:
    """The runs that vitscale made itself and that have a cost."""
    made = []
    trained_share = 1 - result.images_left_out
    for run, seconds in zip(result.records, result.run_costs, strict=True):
        if run.header.imported is None and seconds is not None:
            began = run.outcome.started_unix_seconds
            made.append(_MadeRun(is_first, began, began + run.outcome.wall_seconds, seconds / trained_share))
    return made


def _neighbours(made: Sequence[_MadeRun]) -> list[tuple[_MadeRun, _MadeRun]]:
    """Pairs of runs of different sides, one directly after the other in time; each run in one pair at most."""
    pairs = []
    at = 0
    while at + 1 < len(made):
        earlier, later = made[at], made[at + 1]
        if earlier.is_first != later.is_first:
            pairs.append((earlier, later))
            at += 2
        else:
            at += 1
    return pairs


def _without_interruptions(pairs: Sequence[tuple[_MadeRun, _MadeRun]]) -> list[tuple[_MadeRun, _MadeRun]]:
    gaps = [later.began - earlier.ended for earlier, later in pairs]
    if not gaps:
        return []
    longest = max(_INTERRUPTION_SECONDS, _INTERRUPTION_TIMES * statistics.median(gaps))
    return [pair for pair, gap in zip(pairs, gaps, strict=True) if gap <= longest]


def _most_of_a_side(made: Sequence[_MadeRun]) -> int:
    of_first = sum(run.is_first for run in made)
    return max(of_first, len(made) - of_first)
