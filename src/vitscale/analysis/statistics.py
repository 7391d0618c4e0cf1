"""Intervals of 95 %, ratios and comparisons. An observation is a run, never a step: steps of a run are not independent.

The centre of costs and of rates is the geometric mean over runs, everywhere. It is the one centre under which figures
that belong together agree however they are worked out: the ratio of two centres is the centre of the ratios, and the
centre of images/s is the images over the centre of the seconds. (For constant work the geometric mean lies between the
arithmetic mean, which suits costs, and the harmonic mean, which suits rates; at a spread of 5 % these two differ by
0.25 %.)

Sources: Hoefler & Belli, "Scientific Benchmarking of Parallel Computing Systems" (SC'15), sections 3 and 4; Welch, "The
generalization of 'Student's' problem" (Biometrika 34, 1947, 28-35); Efron & Stein, "The jackknife estimate of
variance" (Annals of Statistics 9, 1981, 586-596); Holm, "A simple sequentially rejective multiple test procedure"
(Scandinavian Journal of Statistics 6, 1979, 65-70).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

from vitscale.present.estimate import Estimate

CONFIDENCE = 0.95
FEWEST_REPEATS = 3
"""Fewest runs that decide anything. An interval of two runs is given for times, but settles no direction."""

ONE_RUN = "one run: no interval"
TOO_FEW = "too few repeats"

ComparisonVerdict = Literal[
    "faster", "slower", "no significant difference", "not significant among all comparisons", "too few repeats to tell"
]
NOT_AMONG_ALL: Literal["not significant among all comparisons"] = "not significant among all comparisons"
_DIRECTIONS = ("faster", "slower", "higher", "lower")


@dataclass(frozen=True)
class Comparison:
    """How many times as fast the first is as the second."""

    ratio: Estimate
    verdict: ComparisonVerdict
    p: float | None = None
    """Two-sided p-value of no difference; None from fewer than 3 runs on a side."""
    p_adjusted: float | None = None
    """`p` after Holm's correction for all comparisons that were made together."""


class _Tested(Protocol):
    @property
    def verdict(self) -> str: ...

    @property
    def p(self) -> float | None: ...


Tested = TypeVar("Tested", bound=_Tested)
"""A dataclass with `verdict`, `p` and `p_adjusted`: a comparison of times or of accuracies."""


class SquaredError(NamedTuple):
    """The squared standard error of a figure, and how well it is known."""

    value: float
    freedom: float
    """Degrees of freedom."""


@dataclass(frozen=True)
class LogMean:
    """The mean of some logarithms, its squared standard error, and the degrees of freedom of that error."""

    value: float
    squared_error: float
    freedom: int
    runs: int

    @property
    def error(self) -> SquaredError:
        """Its squared error with the degrees of freedom, as Welch's functions take it."""
        return SquaredError(self.squared_error, self.freedom)


def interval(values: Sequence[float], *, deciding_runs: int = 0, fewest: int = 2) -> Estimate:
    """Return the geometric mean of one positive value per run with its 95 % interval: Student's t on the logarithms.

    Times are bounded below and skewed to the right; their logarithms are less so.

    Args:
        values: one per run, in the order of the runs.
        deciding_runs: how many of the first runs decided how many runs there are (`analysis.runs.repeats`). What they
            say about the spread is left out, because it was acted on.
        fewest: number of runs below which there are no bounds.

    Raises:
        ValueError: there is no value, or one that is not positive and finite.
    """
    mean = log_mean(values, deciding_runs)
    if mean.runs < max(2, fewest):
        return Estimate(values[0] if mean.runs == 1 else exp_of(mean.value), note=_note(mean.runs))
    half_width = t_quantile(mean.freedom) * math.sqrt(mean.squared_error)  # of the logarithm
    low = exp_of(mean.value - half_width)
    high = exp_of(mean.value + half_width)
    return Estimate(exp_of(mean.value), low, high, note=_note(mean.runs))


def mean_interval(values: Sequence[float], *, least: float = 0.0, most: float = math.inf) -> Estimate:
    """Return the arithmetic mean of one value per run with its 95 % interval: Student's t on the values themselves.

    This is for figures that may be 0 in a run, such as a part of a step. No interval from fewer than 3 runs.

    Args:
        values: at least one.
        least: the smallest possible value: no end of the interval lies below it.
        most: the largest possible value.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no values: a figure needs at least one run")
    mean = statistics.fmean(values)
    if len(values) < FEWEST_REPEATS:
        return Estimate(mean, note=_note(len(values)))
    half_width = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(least, mean - half_width), min(most, mean + half_width))


def jackknife(centre: float, without: Sequence[Sequence[float]]) -> Estimate:
    """Return a figure that is worked out from the runs of one side, or of several together, with its 95 % interval.

    Each side adds the jackknife's variance: (n-1)/n times the sum of squared deviations of the figures with one of the
    side's n runs left out. For a mean this is its ordinary variance. Student's t has Welch's degrees of freedom.

    Args:
        centre: the figure from all runs.
        without: for each side the figures with one of its runs left out, each run in turn: [side][run]. There is no
            interval where a side has fewer than 3 runs.
    """
    fewest_runs = min(len(side) for side in without)
    if fewest_runs < FEWEST_REPEATS:
        return Estimate(centre, note=_note(fewest_runs))
    errors = []
    for side in without:
        freedom = len(side) - 1
        # (n - 1) / n times the sum of squared deviations: n - 1 times their mean.
        errors.append(SquaredError(freedom * statistics.pvariance(side), freedom))
    half_width = welch_half(errors)
    return Estimate(centre, centre - half_width, centre + half_width)


def ratio(
    numerators: Sequence[float], denominators: Sequence[float], deciding_runs: tuple[int, int] = (0, 0)
) -> Estimate:
    """Return the ratio of two costs, each with one positive value per run, with its 95 % interval.

    It is the ratio of the geometric means, with Welch's t on the logarithms: the uncertainty of both sides is in it.
    There is no interval where either side has one run.

    Args:
        numerators: one value per run, in the order of the runs.
        denominators: the same for the other side.
        deciding_runs: `deciding_runs` of each side, as for `interval`: of the numerators, of the denominators.

    Raises:
        ValueError: a side is empty or holds a value that is not positive and finite.
    """
    numerator_deciding_runs, denominator_deciding_runs = deciding_runs
    numerator = log_mean(numerators, numerator_deciding_runs)
    denominator = log_mean(denominators, denominator_deciding_runs)
    log_ratio = numerator.value - denominator.value
    fewest_runs = min(numerator.runs, denominator.runs)
    if fewest_runs == 1:
        return Estimate(exp_of(log_ratio), note=ONE_RUN)
    half_width = welch_half([numerator.error, denominator.error])
    low = exp_of(log_ratio - half_width)
    high = exp_of(log_ratio + half_width)
    return Estimate(exp_of(log_ratio), low, high, note=_note(fewest_runs))


def compare(
    seconds: Sequence[float], other_seconds: Sequence[float], deciding_runs: tuple[int, int] = (0, 0)
) -> Comparison:
    """Compare two sides, each with one cost in seconds per run: is the first faster than the second?

    No difference is claimed where the 95 % interval of the ratio holds 1, nor from fewer than 3 runs on a side.

    Args:
        seconds: costs of the first side, in the order of the runs.
        other_seconds: costs of the second side.
        deciding_runs: `deciding_runs` of each side, as for `interval`: of the first, of the second.
    """
    first_deciding_runs, second_deciding_runs = deciding_runs
    times_as_fast = ratio(other_seconds, seconds, (second_deciding_runs, first_deciding_runs))
    if times_as_fast.note:
        return Comparison(times_as_fast, "too few repeats to tell")
    first = log_mean(seconds, first_deciding_runs)
    second = log_mean(other_seconds, second_deciding_runs)
    p = welch_p(first.value - second.value, [first.error, second.error])
    return Comparison(times_as_fast, _direction(times_as_fast), p, p)


def compare_pairs(seconds: Sequence[float], other_seconds: Sequence[float]) -> Comparison:
    """Compare two sides, where run k of one was made beside run k of the other: is the first faster than the second?

    A pair has the time at which it was made in common, so that what changes from pair to pair cancels: Student's t on
    the logarithms of the ratios. It has half the degrees of freedom of `compare`, and no direction from fewer than 3.

    Args:
        seconds: one positive cost per pair.
        other_seconds: the cost of the other run of each pair.
    """
    ratios = [other / first for first, other in zip(seconds, other_seconds, strict=True)]
    times_as_fast = interval(ratios)
    if times_as_fast.note:
        return Comparison(times_as_fast, "too few repeats to tell")
    mean = log_mean(ratios)
    p = welch_p(mean.value, [mean.error])
    return Comparison(times_as_fast, _direction(times_as_fast), p, p)


def _direction(times_as_fast: Estimate) -> ComparisonVerdict:
    """Return the verdict by the interval of how many times as fast the first side is: does it hold 1?"""
    match times_as_fast.side_of(1.0):
        case "above":
            return "faster"
        case "below":
            return "slower"
        case None:
            return "no significant difference"


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for all of them together (Holm), in the same order.

    An adjusted p-value is below 0.05 where a family-wise test at 5 % rejects. The smallest of n is multiplied by n, the
    next one by n - 1 and so on, and none is smaller than the one before: 0.01, 0.04 and 0.03 give 0.03, 0.06 and 0.06.
    """
    tests = len(p_values)
    adjusted_values = [0.0] * tests
    largest_so_far = 0.0
    indices_by_p = sorted(range(tests), key=p_values.__getitem__)
    for smaller_values, index in enumerate(indices_by_p):
        factor = tests - smaller_values
        largest_so_far = max(largest_so_far, min(1.0, factor * p_values[index]))
        adjusted_values[index] = largest_so_far
    return adjusted_values


def adjusted(test: Tested, p_adjusted: float | None) -> Tested:
    """Return a test with its p-value adjusted; it keeps a direction only where the adjusted p-value is below 0.05.

    Args:
        test: the test.
        p_adjusted: its p-value after a correction; None: the test has no p-value, and stays as it is.
    """
    if p_adjusted is None:
        return test
    loses_direction = test.verdict in _DIRECTIONS and p_adjusted >= 1 - CONFIDENCE
    verdict = NOT_AMONG_ALL if loses_direction else test.verdict
    return replace(test, p_adjusted=p_adjusted, verdict=verdict)  # type: ignore[type-var]  # a dataclass, whatever the type variable


def corrected(tests: Sequence[Tested], pairs: Sequence[Hashable]) -> list[Tested]:
    """Return the same tests after Holm's correction for all of them.

    Args:
        tests: the tests.
        pairs: the pair that each test compares; tests of the same pair count as one.
    """
    p_by_pair = {pair: test.p for test, pair in zip(tests, pairs, strict=True) if test.p is not None}
    adjusted_by_pair = dict(zip(p_by_pair, holm(list(p_by_pair.values())), strict=True))
    return [adjusted(test, adjusted_by_pair.get(pair)) for test, pair in zip(tests, pairs, strict=True)]


def finite_or_none(value: float | None) -> float | None:
    """Return `value`; None where it is unknown or not finite. Records are input, and may hold anything."""
    return value if value is not None and math.isfinite(value) else None


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None where none is known."""
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None where none is known."""
    known_values = [value for value in values if value is not None]
    return statistics.fmean(known_values) if known_values else None


def whole_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values; None where any of them is unknown, or there is none."""
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return None
    return statistics.fmean(known_values)


def welch_half(errors: Sequence[SquaredError]) -> float:
    """Return half the width of the 95 % interval of a sum of independent figures, from the error of each."""
    squared_error = sum(error.value for error in errors)
    if squared_error <= 0:
        return 0.0
    return t_quantile(welch_freedom(errors)) * math.sqrt(squared_error)


def welch_p(difference: float, errors: Sequence[SquaredError]) -> float:
    """Return the two-sided p-value of a difference between independent figures, from the error of each.

    It is the chance of so large a difference, in either direction, where there is none.
    """
    squared_error = sum(error.value for error in errors)
    if squared_error == 0:
        return 1.0 if difference == 0 else 0.0
    return 2 * t_below(welch_freedom(errors), -abs(difference) / math.sqrt(squared_error))


def log_mean(values: Sequence[float], deciding_runs: int = 0) -> LogMean:
    """Return the mean of the logarithms of positive values, at least one.

    Its spread is that of all runs; with `deciding_runs` (as for `interval`), only what the later runs add to it.

    In normal noise, what they add to the sum of squares is independent of the first runs' spread, and so is the mean of
    all runs. Hence no decision that rested on that spread makes the interval wrong. One degree of freedom less is
    counted than there is: skewed noise leaves some dependence (benchmarks/target_ci.py).
    """
    logs = _logs(values)
    runs = len(logs)
    mean = statistics.fmean(logs)
    if runs == 1:
        return LogMean(mean, squared_error=0.0, freedom=0, runs=1)
    if not 0 < deciding_runs < runs - 1:
        return LogMean(mean, squared_error=variance(logs) / runs, freedom=runs - 1, runs=runs)
    first_logs = logs[:deciding_runs]
    first_mean = statistics.fmean(first_logs)
    added_squares = sum((log - mean) ** 2 for log in logs) - sum((log - first_mean) ** 2 for log in first_logs)
    added_variance = max(0.0, added_squares) / (runs - deciding_runs)
    return LogMean(mean, squared_error=added_variance / runs, freedom=runs - deciding_runs - 1, runs=runs)


def variance(values: Sequence[float]) -> float:
    """Return the variance of a sample, exactly 0 for equal values. `statistics.variance` takes ten times as long."""
    shifted = [value - values[0] for value in values]
    mean = statistics.fmean(shifted)
    return math.fsum((value - mean) ** 2 for value in shifted) / (len(values) - 1)


class GroupSpread(NamedTuple):
    """How far costs are from the mean of their group."""

    deviation: float
    """Standard deviation of their logarithms."""
    freedom: float
    """Its degrees of freedom."""


def spread_within(costs: Iterable[tuple[float, ...]], prior: float, weight: float) -> GroupSpread:
    """Return the spread of costs about the mean of their group, over all groups together, drawn towards a prior.

    Args:
        costs: positive costs of each group.
        prior: the standard deviation that is expected.
        weight: the degrees of freedom that `prior` counts for.
    """
    squares = prior**2 * weight
    freedom = weight
    for group in costs:
        squares += _squares_about_mean(group)
        freedom += len(group) - 1
    return GroupSpread(math.sqrt(squares / freedom), freedom)


@functools.lru_cache(maxsize=1 << 12)
def _squares_about_mean(costs: tuple[float, ...]) -> float:
    """Return the sum of the logarithms' squared deviations; cached, as advice asks for each trial's a hundred times."""
    logs = [math.log(cost) for cost in costs]
    mean = statistics.fmean(logs)
    return sum((log - mean) ** 2 for log in logs)


def welch_freedom(errors: Sequence[SquaredError]) -> float:
    """Return Welch-Satterthwaite's degrees of freedom of a sum of independent figures, whose errors are not all 0.

    It is worked out in shares of the whole squared error: squares of tiny ones underflow.
    """
    squared_error = sum(error.value for error in errors)
    return 1 / sum((error.value / squared_error) ** 2 / error.freedom for error in errors)


def _logs(values: Sequence[float]) -> list[float]:
    """Return the logarithms of positive costs, at least one; raise ValueError for others."""
    if not values:
        raise ValueError("no values: a figure needs at least one run")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"costs must be positive and finite, not {list(values)}")
    return [math.log(value) for value in values]


def exp_of(log: float) -> float:
    """Return `math.exp`; infinity on overflow, as for the bound of a two-run interval."""
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def _note(runs: int) -> str:
    """Return why an interval of so many runs decides nothing; empty where it may."""
    if runs == 1:
        return ONE_RUN
    return TOO_FEW if runs < FEWEST_REPEATS else ""


# SciPy's special functions are imported where they are called: the import takes 0.15 s, and `vitscale plan` calls none.


def t_below(freedom: float, value: float) -> float:
    """Return the chance that Student's t with `freedom` degrees of freedom is below `value`."""
    from scipy.special import stdtr

    return float(stdtr(freedom, value))


def t_quantile(freedom: float, share: float = (1 + CONFIDENCE) / 2) -> float:
    """Return the value below which `share` of Student's t lies; by default both 2.5 % tails are outside."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))


def f_above(numerator_freedom: float, denominator_freedom: float, value: float) -> float:
    """Return the chance that F with these degrees of freedom is above `value`, which is at least 0."""
    from scipy.special import fdtrc

    return float(fdtrc(numerator_freedom, denominator_freedom, value))
