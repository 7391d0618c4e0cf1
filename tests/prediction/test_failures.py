"""Jobs on hosts that fail, against simulation and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vitscale.prediction.finishing import (
    NODE_MTBF_SECONDS,
    Interruptions,
    assumed_failures,
    best_interval,
    time_to_finish,
)

HOUR, DAY = 3600.0, 86_400.0


def simulated(work: float, between: float, interval: float, saving: float, restart: float, seed: int) -> float:
    """Wall time of one job: failures at exponential times, whatever it is doing."""
    random = np.random.default_rng(seed)
    clock, left, failure = 0.0, work, random.exponential(between)
    while left > 0:
        piece = min(interval, left)
        if clock + piece + saving <= failure:
            clock += piece + saving
            left -= piece
            continue
        clock, failure = failure, failure + random.exponential(between)
        while clock + restart > failure:
            clock, failure = failure, failure + random.exponential(between)
        clock += restart
    return clock


def test_the_expected_time_is_that_of_simulated_jobs() -> None:
    """200 hosts that each fail every 30 days: every 3.6 hours; 2 days of work, 5 minutes to save, 10 to restart."""
    work, mtbf = 2 * DAY, 30 * DAY
    told = time_to_finish(work, 200, 300.0, 600.0, mtbf)
    walls = [simulated(work, mtbf / 200, told.interval_seconds, 300.0, 600.0, seed) for seed in range(400)]
    assert told.wall_seconds == pytest.approx(np.mean(walls), rel=0.02)
    assert told.failures == pytest.approx(np.mean(walls) / (mtbf / 200), rel=0.02)
    assert told.lost_share == pytest.approx(1 - work / np.mean(walls), abs=0.02)


@pytest.mark.parametrize(
    ("hours", "mtbf_hours", "nodes"),
    # The last three: two rare ones, and a restart that is as long as the time between failures.
    [(10, 24, 8), (10, 24, 2), (10, 240, 8), (200, 3840, 64), (5, 1000, 2), (5, 250, 1), (2, 24, 125)],
)
def test_nine_of_ten_simulated_jobs_lie_in_the_interval_of_one_run(hours: float, mtbf_hours: float, nodes: int) -> None:
    """Steps differ by 2 % from run to run; 30 s to save and to load, 600 s to notice, 60 s of start-up."""
    between = Interruptions(30.0, 30.0, mtbf_hours * HOUR, mtbf_assumed=False, assumptions=())
    work, random = hours * HOUR, np.random.default_rng(74_001)
    told, low, high = between.of_a_run((work, work * math.exp(-0.0329), work * math.exp(0.0329)), nodes, 60.0)
    walls = [
        simulated(work * math.exp(0.02 * normal), mtbf_hours * HOUR / nodes, told.interval_seconds, 30.0, 690.0, seed)
        for seed, normal in enumerate(random.standard_normal(600))
    ]
    assert 0.86 < np.mean([low <= wall <= high for wall in walls]) < 0.94
    assert 0.03 < np.mean([wall > high for wall in walls]) < 0.08


@given(
    hours=st.floats(0.01, 1000),
    spread=st.sampled_from([0.0, 0.001, 0.01, 0.1]),
    mtbf_hours=st.floats(1, 1e6),
    nodes=st.sampled_from([1, 8, 64, 1024]),
    assumed=st.booleans(),
)
@example(hours=0.5, spread=0.01, mtbf_hours=1000, nodes=64, assumed=False)  # the mean: more than most jobs take
@example(
    hours=0.01, spread=0.1, mtbf_hours=24, nodes=256, assumed=False
)  # restarts longer than the time between failures
def test_no_run_ends_before_its_work_and_the_mean_lies_in_the_interval(
    hours: float, spread: float, mtbf_hours: float, nodes: int, *, assumed: bool
) -> None:
    work = hours * HOUR
    ends = (work, work * (1 - spread), work * (1 + spread))
    told, low, high = Interruptions(10.0, 10.0, mtbf_hours * HOUR, assumed, ()).of_a_run(ends, nodes, 30.0)
    if math.isfinite(told.wall_seconds):
        assert 0 < ends[1] <= low <= told.wall_seconds <= high


def test_an_assumed_rate_of_failures_widens_the_interval_and_hardly_any_failures_do_not() -> None:
    known, assumed = (Interruptions(30.0, 30.0, NODE_MTBF_SECONDS, told, ()) for told in (False, True))
    work = (10 * DAY, 9.9 * DAY, 10.1 * DAY)
    for nodes in (64, 2048):
        (_, low, high), (_, least, most) = (each.of_a_run(work, nodes, 60.0) for each in (known, assumed))
        assert least < low < high < most
    hour = (HOUR, 0.9 * HOUR, 1.1 * HOUR)
    expected, low, high = assumed.of_a_run(hour, 8, 60.0)
    assert expected == assumed.wall(HOUR, 8, 60.0)
    assert (low, high) == tuple(assumed.wall(seconds, 8, 60.0).wall_seconds for seconds in hour[1:])


def test_the_interval_by_hand() -> None:
    """A checkpoint of 2 s and a failure every 100 s: sqrt(400) (1 + 0.1/3 + 0.01/9) - 2; M once a checkpoint is 2 M."""
    assert best_interval(2.0, 100.0) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert best_interval(200.0, 100.0) == 100.0


@pytest.mark.parametrize("saving", [1.0, 60.0, 600.0])
def test_no_other_interval_is_better(saving: float) -> None:
    between = 2 * HOUR

    def wall(interval: float) -> float:
        return math.expm1((interval + saving) / between) / interval

    chosen = best_interval(saving, between)
    assert all(wall(chosen) <= wall(factor * chosen) for factor in (0.5, 0.8, 1.25, 2.0))


def test_a_short_job_on_one_host_loses_next_to_nothing() -> None:
    told = time_to_finish(HOUR, 1, 10.0, 60.0)
    assert told.interval_seconds == HOUR
    assert told.wall_seconds == pytest.approx(HOUR + 10, rel=1e-3)
    assert told.failures < 0.001


def test_llama_3_was_interrupted_about_as_often_as_the_prior_says() -> None:
    """2,048 hosts, 54 days, 419 interruptions, more than 90 % effective time."""
    told = time_to_finish(54 * DAY * 0.9, 2048, 10.0, 600.0)
    assert 419 / 3 < told.failures < 419 * 3
    assert told.lost_share < 0.25


def test_hundred_thousand_gpus() -> None:
    told = time_to_finish(30 * DAY, 12_500, 30.0, 300.0)
    assert 30 * DAY < told.wall_seconds < 90 * DAY


def test_a_job_that_would_never_end() -> None:
    told = time_to_finish(DAY, 10**9, 600.0, 600.0)
    assert (told.wall_seconds, told.lost_share) == (math.inf, 1.0)


def test_checkpoints_that_cost_nothing_leave_the_restarts() -> None:
    told = time_to_finish(1000.0, 1, 0.0, 0.0, 100.0)
    assert (told.wall_seconds, told.failures, told.lost_share) == (1000.0, 10.0, 0.0)
    assert time_to_finish(1000.0, 1, 0.0, 50.0, 100.0).wall_seconds == pytest.approx(1000 * math.exp(0.5))


def test_no_work_takes_no_time() -> None:
    assert time_to_finish(0.0, 8, 60.0, 60.0).wall_seconds == 0.0


@pytest.mark.parametrize(
    ("work", "nodes", "mtbf"), [(-1.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0), (math.nan, 1, 1.0), (math.inf, 1, 1.0)]
)
def test_what_cannot_be_is_refused(work: float, nodes: int, mtbf: float) -> None:
    with pytest.raises(ValueError, match="no job of"):
        time_to_finish(work, nodes, 1.0, 1.0, mtbf)


TIMES = st.floats(0.0, 1e5)


@given(st.floats(1.0, 1e8), st.integers(1, 10**6), TIMES, TIMES, st.floats(1.0, 1e9))
def test_never_less_than_the_work_and_more_hosts_fail_more(
    work: float, nodes: int, saving: float, restart: float, mtbf: float
) -> None:
    told = time_to_finish(work, nodes, saving, restart, mtbf)
    assert told.wall_seconds >= work * (1 - 1e-9)
    assert 0 <= told.lost_share <= 1
    assert 0 <= told.interval_seconds <= work
    assert told.interval_seconds > 0 or saving < 1e-300
    assert time_to_finish(work, 2 * nodes, saving, restart, mtbf).wall_seconds >= told.wall_seconds * (1 - 1e-9)


def test_it_says_what_it_takes_for_granted() -> None:
    told = assumed_failures(2048)
    assert told.part == "failures of hosts"
    assert "a host fails every 160 days" in told.taken
    assert "one of 2,048 hosts fails every 1.88 hours" in told.taken
    assert "the host fails every 160 days" in assumed_failures(1).taken
    assert NODE_MTBF_SECONDS == 160 * DAY
