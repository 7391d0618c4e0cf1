from __future__ import annotations

from typing import Any

import pytest

from results_factory import explained_run, make_rank, make_run, make_trial
from verdict_finder import STEP
from vitscale.analysis.quality.measurement import clock_anomalies
from vitscale.store.records import RankRecord
from vitscale.store.results import Run

TRIAL = make_trial("ddp", 2)


def rank(number: int, epoch_seconds: float | None = None, steps: list[float] | None = None) -> RankRecord:
    """One epoch of ten steps of a second, and how long the epoch is said to have taken."""
    record = make_rank(TRIAL, number, steps or [1.0] * 10)
    if epoch_seconds is None:
        return record
    return record.model_copy(update={"epochs": (record.epochs[0].model_copy(update={"seconds": epoch_seconds}),)})


def run(*ranks: RankRecord) -> Run:
    return make_run(TRIAL, ranks)


def test_clocks_that_agree() -> None:
    assert clock_anomalies(run(rank(0), rank(1))) == ()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (10.5, "the steps of epoch 0 on rank 0 add up to 4.8 % less than the epoch took"),
        (9.5, "the steps of epoch 0 on rank 0 add up to 5.3 % more than the epoch took"),
    ],
)
def test_steps_that_do_not_add_up_to_their_epoch(seconds: float, said: str) -> None:
    assert clock_anomalies(run(rank(0, seconds), rank(1, seconds))) == (said,)


@pytest.mark.parametrize("seconds", [10.109, 9.902])
def test_within_1_percent_and_10_ms_they_agree(seconds: float) -> None:
    assert clock_anomalies(run(rank(0, seconds), rank(1, seconds))) == ()


@pytest.mark.parametrize("seconds", [10.113, 9.89])
def test_just_beyond_they_do_not(seconds: float) -> None:
    assert len(clock_anomalies(run(rank(0, seconds), rank(1, seconds)))) == 1


def test_a_barrier_of_milliseconds_is_no_anomaly_in_a_short_epoch() -> None:
    steps = [0.002] * 10
    assert clock_anomalies(run(rank(0, 0.027, steps), rank(1, 0.027, steps))) == ()


def test_ranks_that_count_the_same_epoch_differently() -> None:
    found = clock_anomalies(run(rank(0), rank(1, steps=[1.05] * 10)))
    assert found == ("epoch 0 took 5.0 % longer on one rank than on another",)


def test_ranks_are_held_against_their_own_clocks_and_not_the_slowest_of_each_step() -> None:
    """Two ranks that are late by turns: each step's slowest would add up to half as much again as the epoch."""
    late, early = [1.5, 0.5] * 5, [0.5, 1.5] * 5
    assert clock_anomalies(run(rank(0, 10.0, late), rank(1, 10.0, early))) == ()


def test_steps_of_no_length() -> None:
    assert clock_anomalies(run(rank(0, 9.0, [0.0, *[1.0] * 9]), rank(1, 9.0, [0.9] * 10))) == ("1 step of no length",)


def test_epochs_with_explained_steps_are_not_judged() -> None:
    """They hold the pauses in which profiles are read."""
    found = explained_run(TRIAL, [STEP, STEP])
    assert any(line.window == "explained" for line in found.ranks[0].steps if line.epoch == 0)

    def with_pause(record: RankRecord) -> RankRecord:
        paused = record.epochs[0].model_copy(update={"seconds": record.epochs[0].seconds + 60.0})
        return record.model_copy(update={"epochs": (paused, *record.epochs[1:])})

    assert clock_anomalies(found.model_copy(update={"ranks": tuple(map(with_pause, found.ranks))})) == ()


def test_an_epoch_with_a_lost_line_is_not_judged() -> None:
    whole = rank(0)
    assert clock_anomalies(run(whole.model_copy(update={"steps": whole.steps[1:]}), rank(1))) == ()


@pytest.mark.parametrize("fields", [{"epochs": ()}, {"steps": ()}, {"steps": (), "epochs": ()}])
def test_records_that_lack_lines_are_no_anomaly(fields: dict[str, Any]) -> None:
    assert clock_anomalies(run(*(rank(n).model_copy(update=fields) for n in range(2)))) == ()


def test_an_epoch_of_no_length_is_no_error() -> None:
    assert clock_anomalies(run(rank(0, 0.0), rank(1, 0.0))) == ()
