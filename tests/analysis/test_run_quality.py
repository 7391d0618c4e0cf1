from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from results_factory import explained_run, make_curve, make_rank, make_results, make_run, make_trial, one_curve
from verdict_finder import STEP, explained_study, kinds, of_one_trial, verdict
from vitscale.analysis import analyse
from vitscale.store.results import Results


def test_startup_dominates_and_says_how_much() -> None:
    # 3 epochs of 128 steps of 10 ms: 3.83 s without the first step, against 6 s of start-up.
    found = verdict(one_curve({1: [0.01]}), "startup-dominates")
    assert "6.0 s of start-up against 3.8 s of training (61%" in found.message
    assert found.severity == "note"


def test_loss_not_finite() -> None:
    trial = make_trial()
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 6, losses=[1.0, 2.0, None, None, None, None])])
    found = verdict(make_results([(make_curve([trial]), [trial])], [run]), "loss-not-finite")
    assert found.about.trials == (trial.identity(),)


def test_few_steps() -> None:
    trial = make_trial()
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 6, warmup=3)])
    assert "as few as 3" in verdict(make_results([(make_curve([trial]), [trial])], [run]), "few-steps").message


# --- unstable ------------------------------------------------------------------------------------------------------


def test_runs_that_differ_by_more_than_5_percent_are_unstable() -> None:
    # Logarithms -d, 0, d have the standard deviation d.
    found = verdict(one_curve({2: [math.exp(-0.06), 1.0, math.exp(0.06)]}), "unstable")
    assert found.severity == "warning"
    assert "the epoch times of 1 trial differ from run to run by more than 5 %" in found.message
    assert "(standard deviation; 6 % in ddp on 2 ranks)" in found.message
    assert "measure.target_ci" in found.advice


@pytest.mark.parametrize("runs", [[math.exp(-0.04), 1.0, math.exp(0.04)], [1.0, 2.0]])
def test_runs_that_agree_and_two_runs_are_not_called_unstable(runs: list[float]) -> None:
    assert "unstable" not in kinds(one_curve({2: runs}))


def run_of(*steps: float, repeats: int = 3) -> Results:
    """Repeats of one run of these steps after one of warm-up."""
    return runs_of(*[steps] * repeats)


def runs_of(*runs: Sequence[float]) -> Results:
    """Runs of one trial by their steps, after one of warm-up."""
    trial = make_trial(warmup_steps=1)
    ranks = [make_rank(trial, 0, [steps[0], *steps], warmup=1) for steps in runs]
    return of_one_trial(trial, *(make_run(trial, [rank], repeat) for repeat, rank in enumerate(ranks)))


def test_steps_whose_middle_half_is_wide_are_unstable() -> None:
    # 0.8, 0.9, 1.0, 1.1, 1.2 in turn: quartiles 0.9 and 1.1; at 1.3 times the distance 26 %.
    found = verdict(run_of(*[1.0, 0.74, 1.26, 0.87, 1.13] * 8), "unstable")
    assert found.severity == "note"
    assert "in 1 trial the middle half of a run's steps spans more than 20 % of the median (26 %" in found.message
    assert "p95" in found.advice
    assert "unstable" not in kinds(run_of(*[1.0, 0.82, 1.18, 0.91, 1.09] * 8))


# --- warm-up -------------------------------------------------------------------------------------------------------


def test_steps_that_go_on_falling_are_still_warming_up() -> None:
    found = verdict(run_of(*(1.0 - 0.2 * k / 99 for k in range(100))), "still-warming-up")
    assert found.severity == "warning"
    assert found.message.startswith("still warming up: in 1 trial step times go on falling through the run (by up to 1")
    assert "measure.warmup_steps" in found.advice


def test_steps_that_go_on_rising_are_slowing_down() -> None:
    results = run_of(*(0.8 + 0.2 * k / 99 for k in range(100)))
    found = verdict(results, "slowing-down")
    assert found.severity == "warning"
    assert "in 1 trial step times rise through the run (by up to 1" in found.message
    assert "still-warming-up" not in kinds(results)


def test_rare_slow_steps_are_told_above_2_percent_of_the_time() -> None:
    # 79 steps of 0.1 s and one of 8.1: half the time of one of three runs, so a sixth of the mean share.
    steady = [0.1] * 80
    found = verdict(runs_of([*steady[:79], 8.1], steady, steady), "slow-steps")
    assert found.severity == "note"
    assert "a single slow step" in found.message
    assert "(17 % in 1 of 240 steps of ddp on 1 rank)" in found.message
    # 0.16 of 8.06 s.
    assert "slow-steps" not in kinds(runs_of([*steady[:79], 0.16], steady, steady))


def test_slow_steps_that_come_often_stay_and_are_told() -> None:
    found = verdict(run_of(*[0.1] * 78, 8.1, 8.1), "slow-steps")
    assert found.severity == "warning"
    assert "they recur and stay in every figure (68 % of the time in 6 steps" in found.message
    once_a_run = verdict(run_of(*[0.1] * 79, 8.1), "slow-steps")
    assert "they recur and stay in every figure (51 % of the time in 3 steps" in once_a_run.message


def test_a_run_of_a_few_seconds_on_a_gpu_measures_boost_clocks() -> None:
    for device, seconds, told in (("cuda", 0.09, True), ("cuda", 0.11, False), ("cpu", 0.09, False)):
        trial = make_trial(device=device)
        run = make_run(trial, [make_rank(trial, 0, [seconds] * 101, warmup=3)])
        results = make_results([(make_curve([trial]), [trial])], [run])
        assert ("short-runs" in kinds(results)) is told


def test_warm_up_beyond_the_marked_one_is_told_with_what_to_set() -> None:
    results = run_of(*[2.0] * 4, *[1.0] * 40)
    found = verdict(results, "long-warm-up")
    assert found.severity == "note"
    assert "left out of every figure (up to 4 of a run" in found.message
    assert found.advice == "Set measure.warmup_steps = 5 to mark them from the beginning (now 1)."
    assert "still-warming-up" not in kinds(results)


def test_warm_up_of_fewer_than_half_of_the_runs_is_chance() -> None:
    trial = make_trial(warmup_steps=1)
    slow = make_rank(trial, 0, [2.0] * 5 + [1.0] * 40, warmup=1)
    level = make_rank(trial, 0, [2.0] + [1.0] * 44, warmup=1)
    for ranks, told in (([slow, level, level], False), ([slow, slow, level, level], True)):
        runs = [make_run(trial, [rank], repeat) for repeat, rank in enumerate(ranks)]
        results = of_one_trial(trial, *runs)
        assert ("long-warm-up" in kinds(results)) is told
        first, *_ = analyse(results).trials[trial.identity()].run_figures
        assert first.detected_warmup_steps == 4


# --- data-bound ----------------------------------------------------------------------------------------------------


def test_waiting_for_data_for_more_than_a_tenth_of_a_step_is_data_bound() -> None:
    # 0.25 of 1.25 s.
    found = verdict(explained_study(STEP | {"data_wait": 0.25}), "data-bound")
    assert found.severity == "warning"
    assert "(20 % in ddp on 1 rank, with data.workers = 0)" in found.message
    assert "Set data.workers = 2 or more" in found.advice
    found = verdict(explained_study(STEP | {"data_wait": 0.25}, workers=4), "data-bound")
    assert "Set data.workers = 8 or more" in found.advice


def test_no_imported_trial_is_told_of_workers_that_no_file_names() -> None:
    trial = make_trial().model_copy(update={"origin": "GPU"})
    found = verdict(of_one_trial(trial, explained_run(trial, [STEP | {"data_wait": 0.25}])), "data-bound")
    assert found.message.endswith("wait for data for more than 10 % of a step (20 % in ddp on 1 rank)")
    assert found.advice.startswith("Look at the loader of that training")
    assert "data." not in found.message + found.advice


def test_a_loader_that_limits_is_named_with_its_own_rate() -> None:
    results = explained_study(STEP | {"data_wait": 0.25}, source="jpeg")
    assert "images/s" not in verdict(results, "data-bound").message  # a record of before
    runs = []
    for run, rate in zip(results.runs, (100.0, 1234.4, 1300.0), strict=True):
        (rank,) = run.ranks
        lines = tuple(line.model_copy(update={"loader_images_per_second": rate}) for line in rank.epochs)
        runs.append(run.model_copy(update={"ranks": (rank.model_copy(update={"epochs": lines}),)}))
    found = verdict(results.model_copy(update={"runs": tuple(runs)}), "data-bound")
    assert "with data.workers = 0; its loader reads 1,234 images/s a rank from jpeg)" in found.message
    assert 'as far as there are cores for them, or data.source = "cache": until then' in found.advice


@pytest.mark.parametrize(("busy", "told"), [(0.05, False), (0.3, True)])
def test_a_loader_that_computes_on_the_ranks_cores_is_named_though_nobody_waits(busy: float, told: bool) -> None:
    """Its threads read and decode for so much of the time of the one core."""
    results = explained_study(STEP, source="jpeg", workers=2)
    runs = []
    for run in results.runs:
        (rank,) = run.ranks
        lines = tuple(
            line.model_copy(
                update={
                    "loader_reading_seconds": 0.25 * busy * line.seconds,
                    "loader_decoding_seconds": 0.75 * busy * line.seconds,
                    "loader_images_per_second": 500.0,
                }
            )
            for line in rank.epochs
        )
        runs.append(run.model_copy(update={"ranks": (rank.model_copy(update={"epochs": lines}),)}))
    found = results.model_copy(update={"runs": tuple(runs)})
    assert ("loader-on-the-cores" in kinds(found)) is told
    assert "data-bound" not in kinds(found)
    if told:
        message = verdict(found, "loader-on-the-cores").message
        assert "cores that compute (30 % in ddp on 1 rank, reading 500 images/s a rank)" in message


def test_waiting_for_data_for_less_is_not() -> None:
    assert "data-bound" not in kinds(explained_study(STEP | {"data_wait": 0.1}))


def test_steps_that_spread_by_half_are_a_warning() -> None:
    # Quartiles 0.1 and 0.2 around a median of 0.1: a spread of 100 %.
    assert verdict(run_of(*[0.1, 0.1, 0.2] * 8), "unstable").severity == "warning"
