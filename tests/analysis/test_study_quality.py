from __future__ import annotations

import pytest

from results_factory import TRAIN_SAMPLES, failed_run, make_curve, make_results, make_trial, one_curve, steady_run
from verdict_finder import THREE, kinds, verdict
from vitscale.analysis import analyse
from vitscale.store.results import Imported, Results


def test_too_few_repeats() -> None:
    found = verdict(one_curve({1: [0.1], 2: [0.1, 0.1]}), "too-few-repeats")
    assert "1 trial with one run (no interval)" in found.message
    assert "1 trial with 2 runs" in found.message
    assert "repeats = 3" in found.advice
    assert len(found.about.trials) == 2


def test_unfinished_counts_the_runs_that_are_missing() -> None:
    found = verdict(one_curve({1: THREE, 2: THREE[:1], 4: []}, repeats=3), "unfinished")
    assert "5 of 9 runs" in found.message
    assert len(found.about.trials) == 2


def test_baseline_missing_where_nothing_completed() -> None:
    trial = make_trial()
    results = make_results([(make_curve([trial]), [trial])], [failed_run(trial, "failed", "boom")], repeats=1)
    assert (
        "no run has completed with an epoch time or images/s of ddp (strong-micro)"
        in verdict(results, "baseline-missing").message
    )


def test_a_baseline_of_more_than_one_rank_is_named() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [failed_run(trials[0], "oom", "out of memory"), steady_run(trials[1], 0.1)]
    for results in (make_results([(make_curve(trials), trials)], runs), one_curve({2: THREE, 4: THREE})):
        assert "of ddp (strong-micro) are relative to 2 ranks" in verdict(results, "baseline-missing").message


def test_epoch_times_of_two_kinds_on_one_curve() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    run = steady_run(trials[1], 0.1)
    told = Imported(log_format="epochs", files=(), ranks=(0, 1))
    alone = run.model_copy(
        update={
            "header": run.header.model_copy(update={"imported": told}),
            "ranks": tuple(rank.model_copy(update={"steps": ()}) for rank in run.ranks),
        }
    )
    results = make_results([(make_curve(trials), trials)], [steady_run(trials[0], 0.1), alone])
    assert verdict(results, "mixed-epoch-times").severity == "note"


def test_a_share_that_divides_into_single_images_is_no_cost_of_scaling() -> None:
    """A global batch of 148: 16 images fit, 74 = 37 x 2 on two ranks, and 37 is prime."""
    cut = {1: (4, 37), 2: (2, 37), 4: (1, 37)}
    trials = [make_trial("ddp", n, micro_batch=size, grad_accum=parts) for n, (size, parts) in cut.items()]
    allowed = make_trial("ddp", 3, micro_batch=16, grad_accum=3)
    curve = make_curve([trials[0], trials[1], allowed, trials[2]]).model_copy(update={"mode": "strong-global"})
    all_trials = [*trials, allowed]
    results = make_results([(curve, all_trials)], [steady_run(trial, 0.1) for trial in all_trials])
    found = verdict(results, "badly-divided-batch")
    assert found.severity == "note"
    assert "4 ranks take 37 x 1 of 37 images a rank, where 3 micro-steps would hold them" in found.message
    assert "3 ranks" not in found.message


def test_images_that_drop_last_leaves_out_are_told_and_comparisons_stay_per_image() -> None:
    """1,437 images: in batches of 32 44 steps of them (29 left), in batches of 256 5 (157 left, 10.9 %)."""

    def study(*ranks: int, samples: int = 1437, drop_last: bool = True) -> Results:
        trials = [make_trial("ddp", gpus, micro_batch=32, drop_last=drop_last) for gpus in ranks]
        runs = [steady_run(trial, 0.1, r, model={"train_samples": samples}) for trial in trials for r in range(3)]
        return make_results([(make_curve(trials), trials)], runs)

    found = verdict(study(1, 8), "images-left-out")
    assert found.severity == "warning"
    assert "an epoch of 2 trials lacks more than 0.5 % of the images (up to 11 %" in found.message
    assert "up to 2 %" in verdict(study(1), "images-left-out").message
    assert verdict(study(1), "images-left-out").severity == "note"
    for whole in (study(1, 8, samples=TRAIN_SAMPLES), study(1, 8, drop_last=False), study(1, samples=32 * 210 + 1)):
        assert "images-left-out" not in kinds(whole)
    # Steps as long on 8 ranks as on one train 8 times the images in them, whatever an epoch leaves out.
    speedup = analyse(study(1, 8)).curves[0].points[1].speedup
    assert speedup is not None
    assert speedup.value == pytest.approx(8.0)
