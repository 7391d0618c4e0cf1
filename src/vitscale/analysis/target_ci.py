"""Is a trial's epoch time known as closely as the study asks (`measure.target_ci`), or does it need more runs?

Stopping when the interval is narrow favours runs that happened to agree: such intervals hold the truth less often than
95 %. In simulated studies of 3 to 30 runs with log-normal effects it was 89 to 95 % (tests/analysis/test_target_ci.py).
"""

from __future__ import annotations

from typing import Literal

from vitscale.analysis.statistics import FEWEST_REPEATS, Interval
from vitscale.analysis.trials import TrialResult

Standing = Literal["reached", "open", "stopped", "failed", "untimed"]
"""reached: known closely enough. open: another run is wanted. stopped: not reached with as many runs as are allowed.
failed: a run did not complete, so none is added. untimed: its completed runs tell no epoch time."""


def half_width(interval: Interval | None) -> float | None:
    """How far the 95 % interval reaches from its centre, as a share of it; of its two sides the longer one."""
    if interval is None or interval.low is None or interval.high is None:
        return None
    return max(interval.high - interval.centre, interval.centre - interval.low) / interval.centre


def standing(result: TrialResult, target_ci: float, max_repeats: int) -> Standing:
    """How a trial stands. The interval is that of the report: of the runs that may be combined.

    Fewer than 3 runs reach nothing: two may agree by chance.
    """
    if result.failures:
        return "failed"
    if result.runs and not result.epoch_costs:
        return "untimed"
    width = half_width(result.epoch_seconds)
    if width is not None and width <= target_ci and len(result.epoch_costs) >= FEWEST_REPEATS:
        return "reached"
    return "stopped" if result.runs_done >= max_repeats else "open"
