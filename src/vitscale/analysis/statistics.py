"""Intervals of 95 %, ratios and comparisons. An observation is a run, never a step: steps of a run are not independent.

Sources: Hoefler & Belli, "Scientific Benchmarking of Parallel Computing Systems" (SC'15), sections 3 and 4;
Hettmansperger & Sheather, "Confidence intervals based on interpolated order statistics" (Statistics & Probability
Letters 4, 1986, 75-79); Welch, "The generalization of 'Student's' problem" (Biometrika 34, 1947, 28-35).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
FEWEST_FOR_ORDER_STATISTICS = 6
"""With 5 runs even the smallest and the largest hold the median in only 93.75 % of cases."""
FEWEST_REPEATS = 3
"""Below it an interval exists, but is too wide to decide anything: "too few repeats"."""

ONE_RUN = "one run: no interval"
TOO_FEW = "too few repeats"

ComparisonVerdict = Literal["faster", "slower", "no significant difference", "too few repeats to tell"]


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval; `low` and `high` are None where there is no interval, and `note` says why."""

    centre: float
    low: float | None
    high: float | None
    note: str = ""

    def times(self, factor: float) -> Interval:
        """The same figure in another unit: all three numbers multiplied by a positive exact `factor`."""
        return Interval(
            self.centre * factor,
            None if self.low is None else self.low * factor,
            None if self.high is None else self.high * factor,
            self.note,
        )


@dataclass(frozen=True)
class Comparison:
    """How many times as fast the first is as the second, with its 95 % interval."""

    ratio: float
    low: float | None
    high: float | None
    verdict: ComparisonVerdict


def interval(values: Sequence[float]) -> Interval:
    """The centre of one positive value per run, and its 95 % interval.

    From 6 runs: the median, with interpolated order statistics, which assume no distribution. Below: the geometric
    mean, with Student's t on the logarithms, for times are bounded below and skewed to the right.

    Raises:
        ValueError: there is no value, or one that is not positive and finite.
    """
    logs = _logs(values)
    if len(values) == 1:
        return Interval(values[0], None, None, ONE_RUN)
    if len(values) >= FEWEST_FOR_ORDER_STATISTICS:
        low, high = _order_statistics(values)
        return Interval(statistics.median(values), low, high)
    mean = statistics.fmean(logs)
    half = _t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(_exp(mean), _exp(mean - half), _exp(mean + half), _note(len(logs)))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of two costs, each with one positive value per run, and its 95 % interval.

    The ratio of the geometric means, with Welch's t on the logarithms: the uncertainty of both sides is in it. No
    interval where either side has one run.

    Raises:
        ValueError: a side is empty or holds a value that is not positive and finite.
    """
    above, below = _logs(numerators), _logs(denominators)
    difference = statistics.fmean(above) - statistics.fmean(below)
    fewest = min(len(above), len(below))
    if fewest == 1:
        return Interval(_exp(difference), None, None, ONE_RUN)
    parts = [(statistics.variance(logs) / len(logs), len(logs) - 1) for logs in (above, below)]
    squared_error = sum(part for part, _ in parts)
    if squared_error > 0:
        # Welch-Satterthwaite, in shares of the squared error so that tiny variances do not underflow when squared.
        freedom = 1 / sum((part / squared_error) ** 2 / degrees for part, degrees in parts)
        half = _t_quantile(freedom) * math.sqrt(squared_error)
    else:
        half = 0.0
    return Interval(_exp(difference), _exp(difference - half), _exp(difference + half), _note(fewest))


def compare(seconds: Sequence[float], other_seconds: Sequence[float]) -> Comparison:
    """Is the first faster than the second? One cost in seconds per run on each side.

    No difference is claimed where the 95 % interval of the ratio holds 1.
    """
    times_as_fast = ratio(other_seconds, seconds)
    low, high = times_as_fast.low, times_as_fast.high
    verdict: ComparisonVerdict
    if low is None or high is None:
        verdict = "too few repeats to tell"
    elif low <= 1 <= high:
        verdict = "no significant difference"
    else:
        verdict = "faster" if low > 1 else "slower"
    return Comparison(times_as_fast.centre, low, high, verdict)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile, linear between the two nearest values (Hyndman & Fan 1996, definition 7)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _order_statistics(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the median between the order statistics d and d + 1 from either end.

    `[x_(d), x_(n-d+1)]` holds the median with probability `g_d = 1 - 2 P(B <= d-1)`, B binomial (n, 1/2). With
    `g_(d+1) <= 0.95 <= g_d` and `I = (g_d - 0.95) / (g_d - g_(d+1))`, Hettmansperger & Sheather interpolate both ends
    by `(n-d) I / (d + (n-2d) I)`.
    """
    ordered, count = sorted(values), len(values)

    def held(depth: int) -> float:
        return 1 - 2 * sum(math.comb(count, k) for k in range(depth)) / 2.0**count

    depth = 1
    while held(depth + 1) >= CONFIDENCE:
        depth += 1
    share = (held(depth) - CONFIDENCE) / (held(depth) - held(depth + 1))
    weight = (count - depth) * share / (depth + (count - 2 * depth) * share)
    low = ordered[depth - 1] + weight * (ordered[depth] - ordered[depth - 1])
    high = ordered[count - depth] - weight * (ordered[count - depth] - ordered[count - depth - 1])
    return low, high


def _t_quantile(degrees_of_freedom: float) -> float:
    from scipy.special import stdtrit  # a third of a second to import, and only needed here

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))


def _logs(values: Sequence[float]) -> list[float]:
    if not values:
        raise ValueError("no values: a figure needs at least one run")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"costs must be positive and finite, not {list(values)}")
    return [math.log(value) for value in values]


def _exp(log: float) -> float:
    """Infinity where the bound of a two-run interval is beyond all floats."""
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def _note(runs: int) -> str:
    return TOO_FEW if runs < FEWEST_REPEATS else ""
