from __future__ import annotations

from typing import Any

import pytest

from results_factory import (
    failed_run,
    make_curve,
    make_environment,
    make_rank,
    make_results,
    make_run,
    make_trial,
    one_curve,
    steady_run,
)
from vitscale.analysis import Verdict, analyse
from vitscale.record import Device, Results

THREE = [0.1, 0.101, 0.099]
CLEAN = one_curve({1: [1.0, 1.01, 0.99], 2: [1.1, 1.11, 1.09]}, repeats=3)


def verdict(results: Results, kind: str) -> Verdict:
    """The one verdict of a kind."""
    found = [one for one in analyse(results).verdicts if one.kind == kind]
    assert len(found) == 1, [one.kind for one in analyse(results).verdicts]
    return found[0]


def one_trial(environments: list[Any] | None = None, gpus: int = 2, **rank_fields: Any) -> Results:
    trial = make_trial("ddp", gpus)
    runs = [steady_run(trial, s, r, environments=environments, **rank_fields) for r, s in enumerate(THREE)]
    return make_results([(make_curve([trial]), [trial])], runs)


def test_a_study_with_nothing_wrong_has_no_verdict() -> None:
    assert analyse(CLEAN).verdicts == ()


def test_too_few_repeats() -> None:
    found = verdict(one_curve({1: [0.1], 2: [0.1, 0.1]}), "too-few-repeats")
    assert "1 trial with one run (no interval)" in found.message
    assert "1 trial with 2 runs" in found.message
    assert "repeats = 3" in found.advice
    assert len(found.trials) == 2


def test_unfinished_counts_the_runs_that_are_missing() -> None:
    found = verdict(one_curve({1: THREE, 2: THREE[:1], 4: []}, repeats=3), "unfinished")
    assert "5 of 9 runs" in found.message
    assert len(found.trials) == 2


def test_baseline_missing_where_nothing_completed() -> None:
    trial = make_trial()
    results = make_results([(make_curve([trial]), [trial])], [failed_run(trial, "failed", "boom")], repeats=1)
    assert (
        "no run has completed with an epoch time of ddp (strong-micro)" in verdict(results, "baseline-missing").message
    )


def test_a_baseline_of_more_than_one_rank_is_named() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [failed_run(trials[0], "oom", "out of memory"), steady_run(trials[1], 0.1)]
    for results in (make_results([(make_curve(trials), trials)], runs), one_curve({2: THREE, 4: THREE})):
        assert "of ddp (strong-micro) are relative to 2 ranks" in verdict(results, "baseline-missing").message


def test_startup_dominates_and_says_how_much() -> None:
    # 3 epochs of 128 steps of 10 ms: 3.83 s without the first step, against 6 s of start-up.
    found = verdict(one_curve({1: [0.01]}), "startup-dominates")
    assert "6.0 s of start-up against 3.8 s of training (61%" in found.message
    assert found.level == "note"


def test_synchronised_timing() -> None:
    found = verdict(one_trial(model={"synchronised_timing": True}), "synchronised-timing")
    assert found.message == "synchronised timing: the DeepSpeed file's wall_clock_breakdown waits for the device"


@pytest.mark.parametrize(
    ("environments", "how"),
    [
        # Unpinned ranks see all cores: two threads each on a shared set of three.
        ([make_environment(r, cores_allowed=(0, 1, 2), threads=2) for r in range(2)], "2 rank(s) x 2 thread(s) on 3"),
        # Pinned apart, but the quota gives them one core together.
        ([make_environment(r, cpu_quota_cores=1.0) for r in range(2)], "2 rank(s) x 1 thread(s) on 1"),
        # Both ranks on one GPU.
        ([make_environment(r, device=Device(type="cuda", name="T4", uuid="GPU-1")) for r in range(2)], "1 GPU(s)"),
    ],
)
def test_oversubscribed(environments: list[Any], how: str) -> None:
    assert how in verdict(one_trial(environments), "oversubscribed").message


@pytest.mark.parametrize(
    "environments",
    [
        [make_environment(r, cores_allowed=(2 * r, 2 * r + 1), threads=2) for r in range(2)],
        [make_environment(r, cores_allowed=(0,), host=f"node{r}") for r in range(2)],
        [make_environment(r, device=Device(type="cuda", name="T4", uuid=f"GPU-{r}")) for r in range(2)],
        [make_environment(r, device=Device(type="cuda", name="T4")) for r in range(2)],
    ],
)
def test_ranks_with_cores_or_gpus_of_their_own_are_not_oversubscribed(environments: list[Any]) -> None:
    assert "oversubscribed" not in [one.kind for one in analyse(one_trial(environments)).verdicts]


def test_mixed_hardware_inside_a_run() -> None:
    environments = [make_environment(r, device=Device(type="cpu", name=name)) for r, name in enumerate("AB")]
    assert "A and B" in verdict(one_trial(environments), "mixed-hardware").message


def test_unlike_repeats_are_named() -> None:
    trial = make_trial()
    runs = [steady_run(trial, s, r) for r, s in enumerate(THREE)]
    runs.append(steady_run(trial, 0.1, 3, environments=[make_environment(versions={"torch": "2.12.0"})]))
    found = verdict(make_results([(make_curve([trial]), [trial])], runs), "unlike-runs")
    assert "torch: 2.13.0 against 2.12.0" in found.message


def test_unlike_points_are_named() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    other = [make_environment(rank, device=Device(type="cpu", name="Other CPU")) for rank in range(2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=other)]
    found = verdict(make_results([(make_curve(trials), trials)], runs, repeats=1), "unlike-runs")
    assert "2 ranks: device: Example CPU against Other CPU" in found.message
    assert found.trials == (trials[1].identity(),)


def test_gradient_dtypes_that_differ() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, model={"gradient_dtype": "bfloat16"})]
    found = verdict(make_results([(make_curve(trials), trials)], runs), "gradient-dtype")
    assert "float32 in 1 trial and bfloat16 in 1 trial" in found.message


def test_loss_not_finite() -> None:
    trial = make_trial()
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 6, losses=[1.0, 2.0, None, None, None, None])])
    found = verdict(make_results([(make_curve([trial]), [trial])], [run]), "loss-not-finite")
    assert found.trials == (trial.identity(),)


def test_few_steps() -> None:
    trial = make_trial()
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 6, warmup=3)])
    assert "as few as 3" in verdict(make_results([(make_curve([trial]), [trial])], [run]), "few-steps").message


def test_epoch_times_of_two_kinds_on_one_curve() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    short = make_run(trials[1], [make_rank(trials[1], rank, [0.1] * 20, warmup=3) for rank in range(2)])
    results = make_results([(make_curve(trials), trials)], [steady_run(trials[0], 0.1), short])
    assert verdict(results, "mixed-epoch-times").level == "note"


def test_changed_surroundings_are_a_note() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    moved = [make_environment(rank, host="node2", settings={"NCCL_ALGO": "Ring"}) for rank in range(2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=moved)]
    found = verdict(make_results([(make_curve(trials), trials)], runs), "surroundings-changed")
    assert "host, NCCL or gloo settings" in found.message


def test_every_verdict_says_what_to_do_and_warnings_come_first() -> None:
    found = analyse(one_curve({2: [0.001], 4: [0.001, 0.001]}, repeats=3)).verdicts
    assert all(one.advice for one in found)
    levels = [one.level for one in found]
    assert levels == sorted(levels, key=lambda level: level != "warning")
    assert {"warning", "note"} <= set(levels)


def test_problems_of_records_are_passed_on_with_those_of_runs() -> None:
    trial = make_trial("ddp", 2)
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 4)])
    found = analyse(make_results([(make_curve([trial]), [trial])], [run], problems=["runs/x is no run"])).problems
    assert found[0] == "runs/x is no run"
    assert any("no record of rank 1" in problem for problem in found)
