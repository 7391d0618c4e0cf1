"""One host against several, and accuracy against accuracy: by hand, and where the truth is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.analysis.claims import MARGIN, HostsTest, accuracy_difference, doubling_test, hosts_test

T_2 = 4.302653
"""The 97.5 % quantile of Student's t with 2 degrees of freedom."""


def of_ratios(ratios: dict[int, float]) -> HostsTest:
    found = hosts_test({gpus: [100.0] for gpus in ratios}, {gpus: [100.0 * r] for gpus, r in ratios.items()})
    assert found is not None
    return found


def test_three_counts_by_hand() -> None:
    found = of_ratios({2: 1.0, 4: 1.1, 8: 1.21})
    log = math.log(1.1)
    error = log / math.sqrt(3)
    assert found.ratio.value == pytest.approx(1.1)
    assert found.ratio.low == pytest.approx(math.exp(log - T_2 * error))
    assert found.ratio.high == pytest.approx(math.exp(log + T_2 * error))
    assert found.scatter == pytest.approx(0.1)
    # With 2 degrees of freedom P(T < t) = 1/2 + t / (2 sqrt(2 + t^2)).
    t = (log - math.log(1.05)) / error
    assert found.p_equivalence == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert found.cannot_exclude == pytest.approx(math.exp(log + T_2 * error) - 1)
    assert found.verdict == "no difference shown"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ({2: 1.001, 4: 0.999, 8: 1.002}, "equivalent"),
        ({2: 1.02, 4: 1.021, 8: 1.019}, "different, but within the margin"),
        ({2: 1.2, 4: 1.21, 8: 1.19}, "different"),
        ({2: 0.9, 4: 1.1, 8: 1.0}, "no difference shown"),
        ({2: 1.0, 4: 1.0}, "too few to tell"),
        ({2: 1.0}, "too few to tell"),
    ],
)
def test_verdicts(ratios: dict[int, float], verdict: str) -> None:
    assert of_ratios(ratios).verdict == verdict


def test_one_gpu_is_no_pair_and_counts_without_a_partner_are_left_out() -> None:
    found = hosts_test({1: [8.0], 2: [4.0], 4: [2.0]}, {1: [8.0], 2: [4.4], 8: [1.0]})
    assert found is not None
    assert [one.gpus for one in found.counts] == [2]
    assert hosts_test({1: [8.0]}, {1: [8.0]}) is None
    assert hosts_test({2: [8.0]}, {2: []}) is None


def test_single_counts_have_an_interval_only_where_runs_were_repeated() -> None:
    found = hosts_test({2: [1.0, 1.01, 0.99], 4: [1.0]}, {2: [1.0, 1.02, 1.01], 4: [1.1]})
    assert found is not None
    repeated, single = found.counts
    assert repeated.ratio.low is not None
    assert single.ratio.low is None
    assert (repeated.one_host_runs, repeated.several_hosts_runs, single.one_host_runs) == (3, 3, 1)


def test_one_repeated_count_answers_for_itself() -> None:
    slower = hosts_test({2: [1.0, 1.01, 0.99]}, {2: [1.3, 1.31, 1.29]})
    assert slower is not None
    assert slower.verdict == "different"
    assert slower.p_equivalence is None
    # Spreads of 0.1 %: the interval reaches 0.23 % either way, so all of it lies in 1 to 1.05.
    within = hosts_test({2: [1.0, 1.001, 0.999]}, {2: [1.01, 1.01101, 1.00899]})
    assert within is not None
    assert (within.verdict, within.p_equivalence) == ("different, but within the margin", None)
    assert within.ratio.ends == pytest.approx((1.00771, 1.01229), abs=2e-5)


def simulated(truth: float, trials: int, spread: float = 0.02) -> list[HostsTest]:
    """Single runs at 7 GPU counts, each of which varies by `spread`."""
    random_ = random.Random(7)  # a simulation, no secret
    found = []
    for _ in range(trials):
        one = {gpus: [100 / gpus * random_.lognormvariate(0, spread)] for gpus in range(2, 9)}
        several = {gpus: [truth * 100 / gpus * random_.lognormvariate(0, spread)] for gpus in range(2, 9)}
        test = hosts_test(one, several)
        assert test is not None
        found.append(test)
    return found


@pytest.mark.parametrize("truth", [1.0, 1.07])
def test_the_interval_holds_the_truth_in_95_of_100_studies(truth: float) -> None:
    found = simulated(truth, 2000)
    held = sum(
        t.ratio.low is not None and t.ratio.high is not None and t.ratio.low <= truth <= t.ratio.high for t in found
    )
    assert 0.935 <= held / len(found) <= 0.965  # 3 standard errors of 2000


def test_equivalence_is_claimed_in_5_of_100_studies_at_most_where_it_is_not_there() -> None:
    at_the_margin = simulated(1 + MARGIN, 2000)
    wrongly = sum(t.p_equivalence is not None and t.p_equivalence < 0.05 for t in at_the_margin)
    assert 0.035 <= wrongly / len(at_the_margin) <= 0.065
    assert sum(t.verdict == "equivalent" for t in simulated(1.0, 300)) > 250


@given(
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=8),
    st.floats(0.01, 100.0),
)
def test_units_do_not_matter_and_swapping_sides_inverts(ratios: list[float], unit: float) -> None:
    one = {gpus + 2: [unit] for gpus in range(len(ratios))}
    several = {gpus + 2: [unit * ratio] for gpus, ratio in enumerate(ratios)}
    there, back = hosts_test(one, several), hosts_test(several, one)
    assert there is not None
    assert back is not None
    assert there.ratio.value == pytest.approx(math.exp(sum(map(math.log, ratios)) / len(ratios)))
    assert back.ratio.value == pytest.approx(1 / there.ratio.value)
    assert there.ratio.low is not None
    assert back.ratio.high == pytest.approx(1 / there.ratio.low)
    assert back.p_equivalence == pytest.approx(there.p_equivalence, abs=1e-9)


def test_times_beyond_everything_are_no_error() -> None:
    extreme = {2: [1e-300, 1e300], 3: [1e300], 4: [1.0]}
    found = hosts_test(extreme, {2: [1e300], 3: [1e-300], 4: [1.0, 1e-300]})
    assert found is not None
    assert found.ratio.high == found.scatter == math.inf
    assert found.verdict == "no difference shown"


def test_accuracies_of_repeated_runs_by_hand() -> None:
    found = accuracy_difference([0.5, 0.6], [0.7, 0.8], (100, 100))
    half = T_2 * math.sqrt(0.005)
    assert (found.difference.value, *found.difference.ends) == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-6)
    assert found.verdict == "too few runs: beyond counting error"
    assert accuracy_difference([0.5, 0.5], [0.4, 0.4]).verdict == "too few runs: no error known"
    assert accuracy_difference([0.5, 0.51, 0.5], [0.4, 0.41, 0.4]).verdict == "lower"
    assert accuracy_difference([0.5, 0.51, 0.5], [0.6, 0.61, 0.6]).verdict == "higher"


def test_single_runs_have_no_interval_and_their_counting_error_by_hand() -> None:
    found = accuracy_difference([0.5], [0.4], (100, 100))
    assert found.difference.low is found.difference.high is None
    assert found.counting_error == pytest.approx(1.959964 * math.sqrt(0.25 / 100 + 0.24 / 100), rel=1e-6)
    assert found.verdict == "too few runs: within counting error"
    assert accuracy_difference([0.5], [0.4], (1000, 1000)).verdict == "too few runs: beyond counting error"
    assert accuracy_difference([0.5], [0.4]).verdict == "too few runs: no error known"
    assert accuracy_difference([0.5, 0.6], [0.4]).difference.low is None


@pytest.mark.parametrize("bad", [([], [0.5]), ([0.5], []), ([0.5], [1.5]), ([math.nan], [0.5]), ([-0.1], [0.5])])
def test_what_is_no_share_is_refused(bad: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="accuracies must be shares"):
        accuracy_difference(*bad)


# --- doublings -------------------------------------------------------------------------------------------------------


def test_a_doubling_that_halves_the_time_refutes_that_it_hardly_helps() -> None:
    found = doubling_test(([100.0, 101.0, 99.0], [50.0, 50.5, 49.5]), ([1.0, 1.01, 0.99], [1.0, 1.01, 0.99]), 0.1)
    assert found.gain.ratio.value == pytest.approx(2.0)
    assert (found.hardly, found.gain.verdict) == ("refuted", "faster")
    # 1 s and all of 0.1 s on top would leave 2 / 1.1.
    assert found.left == pytest.approx(2 / 1.1, rel=1e-4)
    assert found.transfers == "are enough"


def test_a_doubling_that_gains_2_percent_confirms_it_and_a_tenth_of_transfer_does_not_explain_it() -> None:
    """Both sides have a standard deviation of 1 %: 2.776 x sqrt(2 / 3) = 2.27 % with 4 degrees of freedom."""
    found = doubling_test(([102.0, 103.02, 100.98], [100.0, 101.0, 99.0]), ([1.0, 1.01, 0.99], [1.96, 1.98, 1.94]), 0.1)
    assert found.gain.ratio.ends == pytest.approx((1.02 / 1.0229, 1.02 * 1.0229), rel=1e-3)
    assert (found.hardly, found.gain.verdict) == ("confirmed", "no significant difference")
    assert found.beyond is not None
    assert found.beyond.value == pytest.approx(1.96 / 1.1, rel=1e-3)
    assert found.transfers == "do not explain it"
    assert found.left == pytest.approx(1.02 * 1.96 / 1.1, rel=1e-3)


@pytest.mark.parametrize("runs", [1, 2])
def test_a_doubling_of_one_run_or_two_is_not_decided(runs: int) -> None:
    found = doubling_test(([100.0, 101.0][:runs], [99.0, 100.0][:runs]), ([1.0, 1.01][:runs], [2.0, 2.02][:runs]), 0.1)
    assert (found.hardly, found.transfers) == ("not decided", "not decided")
    assert found.gain.verdict == "too few repeats to tell"


def test_runs_that_scatter_decide_nothing_and_an_unknown_transfer_is_unknown() -> None:
    found = doubling_test(([100.0, 120.0, 90.0], [95.0, 110.0, 85.0]), ([1.0, 1.2, 0.9], [1.9, 2.2, 1.7]), None)
    assert found.hardly == "not decided"
    assert (found.left, found.beyond, found.transfers) == (None, None, None)
