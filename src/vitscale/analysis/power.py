"""What a comparison of times could have shown: the smallest slowdown, and how many repeats show a given one.

A slowdown d (0.1: a tenth longer) moves the difference D of the mean logarithms by log(1 + d). `compare` reports
"slower" where D / S exceeds a quantile of Student's t. S is the standard error of D, with f degrees of freedom
(Welch's, or those of pairs). The chance of that, the power, is the upper tail of the noncentral t with noncentrality
log(1 + d) / sigma. A gate on a limit L wants the whole interval beyond it too, so that

    power(d) = P( D > max( log(1 + L) + t(0.975, f) S,  t(1 - 0.025 / m, f) S ) )
    D ~ Normal(log(1 + d), sigma^2)        S^2 ~ sigma^2 chi2(f) / f

Both bounds depend on the same S, so the chance is worked out by integrating over S. m trials are tested together:
Holm's correction asks p < 0.05 / m of the one that is slower while the others are equal, which is its strictest step.

The spread of runs is known from these few runs alone. A slowdown that took their S for sigma would be shown by fewer
than 80 % of the studies that read it, for S is too small in more than half of them. So sigma^2 is integrated over too,
as f S^2 / chi2(f): then 80 % holds on average over studies, at any spread (benchmarks/comparing.py).

Sources: Cohen, "Statistical Power Analysis for the Behavioral Sciences" (2nd ed., 1988), chapter 2 (power of t tests by
the noncentral t); Welch, "The generalization of 'Student's' problem" (Biometrika 34, 1947, 28-35); Geisser,
"Predictive Inference" (1993), chapter 2 (the spread of a coming sample where that of a small one is all that is known).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitscale.analysis.statistics import (
    CONFIDENCE,
    FEWEST_REPEATS,
    LogMean,
    SquaredError,
    exp_of,
    t_quantile,
    welch_freedom,
)

POWER = 0.8
"""Share of studies that report a slowdown of which these functions say that runs show it: 4 of 5."""
MOST_REPEATS = 200
"""Most repeats that are advised: what takes more is not shown by repeating."""
_INTEGRAL_POINTS = 60
"""Points of each integral, at equal steps of probability."""
_LARGEST_LOG_SLOWDOWN = 10.0
"""Logarithm of the largest slowdown that is looked for."""
_LOG_SLOWDOWN_PRECISION = 1e-5


class ComparisonQuestion(NamedTuple):
    """What a comparison is to answer: "slower at all?", or for a gate (a limit) "slower by more than the limit?"."""

    tests: int
    """Number of trials that are tested together, for Holm's correction."""
    limit: float | None = None
    """Share by which a trial may be slower; None: is it slower at all?"""


class _Design(NamedTuple):
    """A comparison still to be made: how large its error is, and how well that is known from the runs at hand."""

    squared_error: float
    """Squared standard error of the difference of the mean logarithms."""
    freedom: float
    """Degrees of freedom of that error in the comparison to be made."""
    freedom_of_spread: float
    """Degrees of freedom with which the spread is known from the runs at hand."""


@functools.lru_cache(4096)
def smallest_shown(sides: tuple[LogMean, ...], question: ComparisonQuestion) -> float | None:
    """Return the smallest slowdown, as a share, that 80 % of studies with as many runs of the same spread report.

    Args:
        sides: mean logarithms of the costs of both sides; of paired runs the one of their ratios.
        question: what is to be reported.

    Returns:
        None where a side has fewer than 3 runs, which report nothing.
    """
    if min(side.runs for side in sides) < FEWEST_REPEATS:
        return None
    squared_error = sum(side.squared_error for side in sides)
    if squared_error == 0:
        return question.limit or 0.0
    freedom = welch_freedom([side.error for side in sides])
    design = _Design(squared_error, freedom, freedom_of_spread=freedom)
    # Bisection: the larger a slowdown, the more studies report it.
    too_small = 0.0
    shown = _LARGEST_LOG_SLOWDOWN
    while shown - too_small > _LOG_SLOWDOWN_PRECISION:
        middle = (too_small + shown) / 2
        if _power(middle, design, question) >= POWER:
            shown = middle
        else:
            too_small = middle
    return exp_of(shown) - 1


@functools.lru_cache(4096)
def repeats_to_show(slowdown: float, sides: tuple[LogMean, ...], question: ComparisonQuestion) -> int | None:
    """Return the fewest repeats on each side that report a slowdown in 80 % of studies, if runs spread as these do.

    Args:
        slowdown: the true slowdown, as a share.
        sides: mean logarithms of the costs of both sides; of paired runs the one of their ratios.
        question: what is to be reported: "slower", or "slower by more than a limit".

    Returns:
        None where a side has one run, whose spread is unknown, or `MOST_REPEATS` are too few.
    """
    return _fewest_repeats(sides, lambda design: _power(math.log1p(slowdown), design, question))


@functools.lru_cache(4096)
def repeats_to_find_within(limit: float, sides: tuple[LogMean, ...]) -> int | None:
    """Return the fewest repeats on each side that find equal trials within a limit in 80 % of studies.

    They are found within it where the upper end of the interval of their slowdown is. By symmetry that is as probable
    as that a slowdown of the limit is reported as slower, tested alone.

    Args:
        limit: the slowdown that is allowed, as a share.
        sides: as for `repeats_to_show`.

    Returns:
        None where a side has one run, whose spread is unknown, or `MOST_REPEATS` are too few.
    """
    return _fewest_repeats(sides, lambda design: _power(math.log1p(limit), design, ComparisonQuestion(tests=1)))


def _fewest_repeats(sides: Sequence[LogMean], power_of: Callable[[_Design], float]) -> int | None:
    """Return the fewest repeats on each side with which the power reaches 80 %, by bisection.

    Args:
        sides: mean logarithms of both sides, or of the ratios of pairs.
        power_of: a comparison still to be made -> the share of studies that give the right answer.

    Returns:
        None where a side has one run, whose spread is unknown, or `MOST_REPEATS` are too few.
    """
    if min(side.runs for side in sides) < 2:
        return None
    if all(side.squared_error == 0 for side in sides):
        return FEWEST_REPEATS

    def suffices(repeats: int) -> bool:
        return power_of(_with_repeats(sides, repeats)) >= POWER

    if not suffices(MOST_REPEATS):
        return None
    too_few = FEWEST_REPEATS - 1
    enough = MOST_REPEATS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if suffices(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _with_repeats(sides: Sequence[LogMean], repeats: int) -> _Design:
    """Return the comparison with so many repeats on each side, whose runs spread as these do."""
    run_variances = [side.squared_error * side.runs for side in sides]  # of a single run's logarithm
    errors = [SquaredError(variance / repeats, repeats - 1) for variance in run_variances]
    known_spreads = [SquaredError(variance, side.freedom) for variance, side in zip(run_variances, sides, strict=True)]
    return _Design(
        squared_error=sum(error.value for error in errors),
        freedom=welch_freedom(errors),
        freedom_of_spread=welch_freedom(known_spreads),
    )


def _power(log_slowdown: float, design: _Design, question: ComparisonQuestion) -> float:
    """Return the share of studies that report a slowdown (the module's docstring has the formula).

    Both integrals are means over P points of equal probability: of sigma (rows), and of the error S that a study finds
    (columns).
    """
    from scipy.special import ndtr  # here, as in `analysis.statistics`

    sigma = math.sqrt(design.squared_error) / _deviation_ratios(design.freedom_of_spread)[:, None]  # (P, 1)
    standard_error = sigma * _deviation_ratios(design.freedom)[None, :]  # S of the formula, (P, P)
    one_sided_error = (1 - CONFIDENCE) / 2 / question.tests
    needed_difference = t_quantile(design.freedom, 1 - one_sided_error) * standard_error
    if question.limit is not None:
        beyond_limit = math.log1p(question.limit) + t_quantile(design.freedom) * standard_error
        needed_difference = np.maximum(needed_difference, beyond_limit)
    shown_probability = ndtr((log_slowdown - needed_difference) / sigma)  # P(D > needed), (P, P)
    return float(np.mean(shown_probability))


@functools.lru_cache(1024)
def _deviation_ratios(freedom: float) -> npt.NDArray[np.float64]:
    """Return P quantiles at equal steps of probability of an estimated standard deviation over the true one, (P,).

    That ratio is distributed as sqrt(chi2(f) / f).
    """
    from scipy.special import chdtri

    probabilities = (np.arange(_INTEGRAL_POINTS) + 0.5) / _INTEGRAL_POINTS
    return np.asarray(np.sqrt(chdtri(freedom, probabilities) / freedom))
