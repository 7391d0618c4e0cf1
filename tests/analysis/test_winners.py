"""The cheapest of several trials: who is not told apart from it, and its cost corrected for having been chosen."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from vitscale.analysis.statistics import compare, interval
from vitscale.analysis.winners import Winner, winner


def noisy(truth: float, spread: float, runs: int, source: random.Random) -> list[float]:
    return [truth * math.exp(source.gauss(0.0, spread)) for _ in range(runs)]


def simulated(truths: list[float], spread: float, runs: int, studies: int, seed: int) -> list[tuple[float, Winner]]:
    """(true cost of the winner, the winner) of each study."""
    source = random.Random(seed)  # a simulation, no secret
    found = []
    for _ in range(studies):
        chosen = winner([noisy(truth, spread, runs, source) for truth in truths])
        found.append((truths[chosen.position], chosen))
    return found


def test_the_smallest_mean_wins_and_what_is_not_significantly_slower_is_named() -> None:
    """1.00 and 1.01 with 2 % noise cannot be told apart; 2.0 can."""
    chosen = winner([[2.0, 2.04, 1.96], [1.01, 1.03, 0.99], [1.00, 1.02, 0.98]])
    assert (chosen.position, chosen.rivals, chosen.is_tested) == (2, (1,), True)


def test_a_rival_is_one_that_a_one_sided_welch_test_divided_by_the_number_of_tests_leaves() -> None:
    """Two others: the two-sided p-value counts as slower below 0.05, for one-sided it is half, and there are two."""
    best, far = [1.00, 1.01, 0.99], [9.0, 9.1, 8.9]
    verdicts = []
    for shift in np.linspace(1.0, 1.06, 61):
        other = [shift * 1.00, shift * 1.01, shift * 0.99]
        p = compare(best, other).p
        assert p is not None
        verdicts.append((winner([best, other, far]).rivals == (1,), 2 * p / 2 >= 0.05))
    assert [is_rival for is_rival, _ in verdicts] == [expected for _, expected in verdicts]
    assert len({is_rival for is_rival, _ in verdicts}) == 2


def test_with_fewer_than_three_runs_nobody_is_told_apart_and_nothing_is_corrected() -> None:
    assert winner([[2.0, 2.1], [1.0, 1.1]]) == Winner(1, (), is_tested=False, corrected=None)


def test_a_single_run_is_as_noisy_as_all_trials_together() -> None:
    """One run at 1.02 may be slow by chance where runs differ by 1 %, and one at 2.0 is not."""
    assert winner([[1.0, 1.01, 0.99], [1.02]]).rivals == (1,)
    assert winner([[1.0, 1.01, 0.99], [2.0]]).rivals == ()


def test_the_only_trial_was_not_chosen_and_is_not_corrected() -> None:
    assert winner([[1.0, 1.1, 1.2]]) == Winner(0, (), is_tested=True, corrected=None)
    with pytest.raises(ValueError, match="no trials"):
        winner([])


def test_costs_without_noise_are_what_they_are() -> None:
    chosen = winner([[1.0] * 3, [2.0] * 3])
    assert chosen.corrected is not None
    assert (chosen.corrected.value, *chosen.corrected.ends) == (1.0, 1.0, 1.0)
    assert chosen.rivals == ()


def test_the_interval_by_another_way() -> None:
    """The conditional distribution integrated by SciPy, in place of quotients of the distribution function."""
    source = random.Random(3)  # a simulation, no secret
    costs = [noisy(1.0, 0.05, 4, source) for _ in range(4)]
    logs = [[math.log(cost) for cost in values] for values in costs]
    means = sorted(statistics.fmean(values) for values in logs)
    freedom = 4 * 3
    error = math.sqrt(statistics.fmean([statistics.variance(values) for values in logs]) / 4)
    reach = error * stats.t.ppf(1 - 0.005 / 8, freedom)

    def share_below(truth: float) -> float:
        density = stats.t(freedom, loc=truth, scale=error).pdf
        least, most = truth - reach, min(means[1], truth + reach)
        return float(integrate.quad(density, least, means[0])[0] / integrate.quad(density, least, most)[0])

    tail = (0.05 - 0.005) / (1 - 0.005) / 2
    ends = [
        optimize.brentq(
            lambda truth, share=share: share_below(truth) - share, means[0] - reach + 1e-9, means[0] + reach
        )
        for share in (1 - tail, tail)
    ]
    chosen = winner(costs)
    assert len(chosen.rivals) == 3  # all are close, so that all variances are pooled
    assert chosen.corrected is not None
    assert [math.log(end) for end in chosen.corrected.ends] == pytest.approx(ends, abs=1e-6)


def test_the_bias_of_equal_trials_by_hand() -> None:
    """Of two equal normal means the smaller is too small by 1/sqrt(pi) standard errors. Two means that lie closer than
    noise would have them say nothing of true differences, and all of it is added."""
    costs = [[math.exp(log) for log in (-0.01, 0.0, 0.01)], [math.exp(log + 1e-6) for log in (-0.01, 0.0, 0.01)]]
    corrected = winner(costs).corrected
    assert corrected is not None
    assert math.log(corrected.value) == pytest.approx(0.01 / math.sqrt(3) / math.sqrt(math.pi), rel=1e-3)


def test_a_winner_far_ahead_keeps_its_time() -> None:
    """Nobody else could have won: nothing is corrected, and the interval is Student's, from its own runs' noise."""
    costs = [[1.0, 1.02, 0.98], [50.0, 51.0, 49.0]]
    corrected, measured = winner(costs).corrected, interval(costs[0])
    assert corrected is not None
    assert corrected.value == pytest.approx(measured.value, rel=1e-6)
    assert corrected.ends == pytest.approx(measured.ends, rel=0.02)  # the outer interval leaves 0.5 % aside


@pytest.mark.parametrize(
    ("truths", "spread", "runs", "seed"),
    [
        ([1.0] * 10, 0.02, 3, 1),
        ([1.0] * 10, 0.19, 5, 2),
        ([1.0, 1.0, 3.0, 3.0, 3.0], 0.05, 3, 3),
        ([1.0, 1.02, 1.04, 1.06], 0.02, 5, 4),
        ([1.0, 1.0], 0.05, 3, 5),
    ],
)
def test_the_corrected_time_is_the_true_one_on_average_and_its_interval_holds_it(
    truths: list[float], spread: float, runs: int, seed: int
) -> None:
    """Its bias is below a fifth of a mean's standard error; its interval holds the truth in 93 to 97 % of studies."""
    studies = 1000
    found = simulated(truths, spread, runs, studies, seed)
    offs, covered = [], 0
    for truth, chosen in found:
        assert chosen.corrected is not None
        offs.append(math.log(chosen.corrected.value / truth) / spread)
        covered += chosen.corrected.ends[0] <= truth <= chosen.corrected.ends[1]
    assert abs(statistics.fmean(offs)) < 0.2 / math.sqrt(runs) + 3 * statistics.stdev(offs) / math.sqrt(studies)
    assert 0.93 <= covered / studies <= 0.972


def test_as_measured_the_fastest_of_ten_equal_trials_is_too_fast() -> None:
    """What the correction is for: 1.54 standard errors, 1.8 % at a spread of 2 %."""
    source = random.Random(1)  # a simulation, no secret
    offs = []
    for _ in range(500):
        costs = [noisy(1.0, 0.02, 3, source) for _ in range(10)]
        offs.append(math.log(interval(costs[winner(costs).position]).value))
    assert statistics.fmean(offs) == pytest.approx(-1.54 * 0.02 / math.sqrt(3), rel=0.05)


def test_all_but_one_trial_in_twenty_studies_name_the_best_among_those_not_told_apart() -> None:
    found = simulated([1.0, 1.01, 1.02, 1.03, 1.04], 0.02, 3, 500, 6)
    named = sum(0 in (chosen.position, *chosen.rivals) for _, chosen in found)
    assert named / len(found) >= 0.95
