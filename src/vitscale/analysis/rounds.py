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
_INTERRUPTION_MEDIAN_GAPS = 3.0
"""A gap between two runs is an interruption where it exceeds ten minutes and three times the median gap of pairs."""


class Round(NamedTuple):
    """Two runs, one of each side, that were made one after the other."""

    first_seconds: float
    """Cost of the run of the first side: seconds of an epoch of all images."""
    other_seconds: float
    """Cost of the run of the other side."""


class RoundSpan(NamedTuple):
    """When the first run began and the last one ended, in seconds since 1970."""

    began: float
    ended: float


class _TimedRun(NamedTuple):
    """A run of either side, with its time of day and its cost."""

    is_first_side: bool
    began_unix_seconds: float
    ended_unix_seconds: float
    cost_seconds: float
    """Seconds of an epoch of all images."""


class _RunPair(NamedTuple):
    """Two runs of different sides, one directly after the other."""

    earlier: _TimedRun
    later: _TimedRun

    @property
    def gap_seconds(self) -> float:
        """Seconds from the earlier run's end to the later one's begin; negative where the clock has jumped back."""
        return self.later.began_unix_seconds - self.earlier.ended_unix_seconds

    @property
    def as_round(self) -> Round:
        """The costs of the two runs, by side."""
        if self.earlier.is_first_side:
            return Round(first_seconds=self.earlier.cost_seconds, other_seconds=self.later.cost_seconds)
        return Round(first_seconds=self.later.cost_seconds, other_seconds=self.earlier.cost_seconds)


def rounds(first: TrialResult, other: TrialResult) -> tuple[Round, ...]:
    """Return the rounds in which the runs of a trial and of its counterpart alternated; empty where they did not.

    They alternated if all of this holds: no two runs went on at one time; 3 or more pairs of runs of different sides
    are neighbours in time; and no side has more runs outside a pair than inside. A pair with an interruption between
    its two runs does not count, for the machine may have changed in between.
    """
    runs = [*_timed_runs(first, is_first_side=True), *_timed_runs(other, is_first_side=False)]
    runs.sort(key=lambda run: run.began_unix_seconds)
    if _overlap(runs):
        return ()
    pairs = _without_interruptions(_neighbours(runs))
    pairs_needed = max(FEWEST_REPEATS, _runs_of_larger_side(runs) / 2)
    if len(pairs) < pairs_needed:
        return ()
    return tuple(pair.as_round for pair in pairs)


def span(results: Sequence[TrialResult]) -> RoundSpan | None:
    """Return when the runs of these trials were made; None where no run records it, as in imported logs."""
    outcomes = []
    for result in results:
        for run in result.recorded_runs:
            if run.header.imported is None and run.outcome.started_unix_seconds > 0:
                outcomes.append(run.outcome)
    if not outcomes:
        return None
    return RoundSpan(
        began=min(outcome.started_unix_seconds for outcome in outcomes),
        ended=max(outcome.started_unix_seconds + outcome.wall_seconds for outcome in outcomes),
    )


def _timed_runs(result: TrialResult, *, is_first_side: bool) -> list[_TimedRun]:
    """Return the runs of a trial that have a cost, without imported ones, whose time of day is unknown."""
    runs = []
    trained_share = 1 - result.images_left_out
    for run, seconds in zip(result.recorded_runs, result.run_costs, strict=True):
        if run.header.imported is not None or seconds is None:
            continue
        began = run.outcome.started_unix_seconds
        ended = began + run.outcome.wall_seconds
        runs.append(_TimedRun(is_first_side, began, ended, seconds / trained_share))
    return runs


def _overlap(runs: Sequence[_TimedRun]) -> bool:
    """Whether a run began before the one before it had ended, for runs in the order in which they began."""
    for earlier, later in itertools.pairwise(runs):
        if later.began_unix_seconds < earlier.ended_unix_seconds - _CLOCK_SECONDS:
            return True
    return False


def _neighbours(runs: Sequence[_TimedRun]) -> list[_RunPair]:
    """Return pairs of runs of different sides, one directly after the other; each run is in one pair at most.

    Example: runs of the sides A B B A A B give the pairs A B, B A and A B.

    Args:
        runs: in the order in which they began.
    """
    pairs = []
    unpaired: _TimedRun | None = None
    for run in runs:
        if unpaired is None or unpaired.is_first_side == run.is_first_side:
            unpaired = run
        else:
            pairs.append(_RunPair(unpaired, run))
            unpaired = None
    return pairs


def _without_interruptions(pairs: Sequence[_RunPair]) -> list[_RunPair]:
    """Return the pairs between whose two runs no more time passed than usual (`_INTERRUPTION_SECONDS`)."""
    if not pairs:
        return []
    median_gap_seconds = statistics.median(pair.gap_seconds for pair in pairs)
    longest_gap_seconds = max(_INTERRUPTION_SECONDS, _INTERRUPTION_MEDIAN_GAPS * median_gap_seconds)
    return [pair for pair in pairs if pair.gap_seconds <= longest_gap_seconds]


def _runs_of_larger_side(runs: Sequence[_TimedRun]) -> int:
    """Return the number of runs of the side that has more."""
    first_side_runs = sum(run.is_first_side for run in runs)
    return max(first_side_runs, len(runs) - first_side_runs)
