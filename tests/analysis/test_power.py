"""What a comparison could have shown: against the noncentral t where that answers it, else by simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import nctdtr

from vitscale.analysis import power
from vitscale.analysis.counterparts import Measured, gate_of
from vitscale.analysis.power import (
    MOST_REPEATS,
    ComparisonQuestion,
    repeats_to_find_within,
    repeats_to_show,
    smallest_shown,
)
from vitscale.analysis.statistics import LogMean, compare, compare_pairs, corrected, log_mean, ratio, t_quantile

RANDOM_SEED = 41
MANY = 1_000_000
"""Degrees of freedom with which a spread is as good as known."""


def sides(spread: float, runs: int, freedom: int | None = None) -> tuple[LogMean, LogMean]:
    side = LogMean(0.0, spread**2 / runs, runs - 1 if freedom is None else freedom, runs)
    return side, side


@pytest.mark.parametrize(("runs", "tests"), [(3, 1), (5, 1), (10, 20)])
def test_where_the_spread_is_known_the_power_is_that_of_the_noncentral_t(runs: int, tests: int) -> None:
    """Two sides of n runs: 2 (n - 1) degrees of freedom, noncentrality log(1 + d) / sqrt(2 s^2 / n)."""
    freedom, spread, slowdown = 2 * (runs - 1), 0.02, 0.06
    design = power._Design(2 * spread**2 / runs, freedom, MANY)
    noncentrality = math.log1p(slowdown) / math.sqrt(2 * spread**2 / runs)
    exact = 1 - nctdtr(freedom, noncentrality, t_quantile(freedom, 1 - 0.025 / tests))
    assert power._power(math.log1p(slowdown), design, ComparisonQuestion(tests)) == pytest.approx(exact, abs=0.005)


def shown_of(
    runs: int, spread: float, question: ComparisonQuestion, *, paired: bool = False, studies: int = 600
) -> float:
    """The share of studies that show the slowdown which another study, of the same kind, printed."""
    random = np.random.default_rng(RANDOM_SEED)

    def measured(slowdown: float) -> Measured:
        rounds = np.exp(0.03 * random.standard_normal(runs))
        first, other = (np.exp(spread * random.standard_normal(runs)) for _ in range(2))
        ours, theirs = ((first * rounds).tolist(), (other * rounds * (1 + slowdown)).tolist())
        if paired:
            result = compare_pairs(theirs, ours)
            return Measured(result, result.ratio.into(1.0), (log_mean((np.array(theirs) / ours).tolist()),), runs)
        ours, theirs = first.tolist(), (other * (1 + slowdown)).tolist()
        return Measured(compare(theirs, ours), ratio(theirs, ours), (log_mean(theirs), log_mean(ours)))

    shown = []
    for _ in range(studies):
        printed = smallest_shown(measured(0.0).sides, question)
        assert printed is not None
        trials = [measured(printed), *(measured(0.0) for _ in range(question.tests - 1))]
        slower = replace(trials[0], result=corrected([trial.result for trial in trials], range(len(trials)))[0])
        is_shown = slower.result.verdict == "slower"
        shown.append(is_shown if question.limit is None else gate_of(slower, question.limit) == "slower")
    return float(np.mean(shown))


@pytest.mark.parametrize(
    ("runs", "spread", "question", "paired"),
    [
        (3, 0.02, ComparisonQuestion(1), False),
        (3, 0.02, ComparisonQuestion(1, 0.05), False),
        (5, 0.03, ComparisonQuestion(7, 0.05), False),
        (4, 0.02, ComparisonQuestion(1, 0.05), True),
    ],
)
def test_four_of_five_studies_show_the_slowdown_that_another_one_printed(
    runs: int, spread: float, question: ComparisonQuestion, *, paired: bool
) -> None:
    """The spread that it printed from was as wrong as that of so few runs is."""
    assert 0.75 <= shown_of(runs, spread, question, paired=paired) <= 0.86


def test_the_advised_repeats_show_what_was_asked() -> None:
    random = np.random.default_rng(RANDOM_SEED)
    shown = []
    for _ in range(500):
        few = tuple(log_mean(np.exp(0.04 * random.standard_normal(4)).tolist()) for _ in range(2))
        repeats = repeats_to_show(0.05, few, ComparisonQuestion(1)) or MOST_REPEATS
        first, other = (np.exp(0.04 * random.standard_normal(repeats)) for _ in range(2))
        shown.append(compare((1.05 * other).tolist(), first.tolist()).verdict == "slower")
    assert 0.76 <= np.mean(shown) <= 0.88


def test_more_trials_a_limit_and_more_spread_take_a_larger_slowdown_or_more_repeats() -> None:
    plain = smallest_shown(sides(0.02, 3), ComparisonQuestion(1))
    assert plain is not None
    for spread, question in (
        (0.02, ComparisonQuestion(20)),
        (0.02, ComparisonQuestion(1, 0.05)),
        (0.04, ComparisonQuestion(1)),
    ):
        other = smallest_shown(sides(spread, 3), question)
        assert other is not None
        assert other > plain + 0.03
    counts = [repeats_to_show(0.05, sides(spread, 3), ComparisonQuestion(1)) for spread in (0.005, 0.02, 0.04)]
    assert counts == sorted(counts)  # type: ignore[type-var]  # none is None here
    of_twenty, of_one = (repeats_to_show(0.05, sides(0.02, 3), ComparisonQuestion(tests)) for tests in (20, 1))
    assert of_twenty > of_one  # type: ignore[operator]  # none is None here


def test_equal_trials_are_cleared_by_as_many_repeats_as_show_the_limit_in_one_trial() -> None:
    assert repeats_to_find_within(0.05, sides(0.02, 3)) == repeats_to_show(0.05, sides(0.02, 3), ComparisonQuestion(1))


def test_the_repeats_of_two_runs_are_known_and_of_one_run_are_not() -> None:
    assert smallest_shown(sides(0.02, 2), ComparisonQuestion(1)) is None
    assert repeats_to_show(0.05, sides(0.01, 2), ComparisonQuestion(1)) is not None
    assert repeats_to_show(0.05, sides(0.01, 1), ComparisonQuestion(1)) is None


def test_runs_without_any_spread_show_everything() -> None:
    assert smallest_shown(sides(0.0, 3), ComparisonQuestion(1)) == 0.0
    assert smallest_shown(sides(0.0, 3), ComparisonQuestion(5, 0.05)) == 0.05
    assert repeats_to_show(0.05, sides(0.0, 3), ComparisonQuestion(5)) == 3


def test_more_repeats_than_are_advised_are_none() -> None:
    assert repeats_to_show(0.01, sides(0.5, 5), ComparisonQuestion(1)) is None
