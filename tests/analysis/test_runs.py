from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from json_values import apart
from results_factory import (
    PHASE_SECONDS,
    STARTUP_SECONDS,
    TRAIN_SAMPLES,
    make_rank,
    make_run,
    make_trial,
    rich_study,
    steady_run,
    write_results,
)
from vitscale.analysis import analyse
from vitscale.analysis.runs import steps
from vitscale.analysis.runs.figures import all_run_figures, run_figures
from vitscale.analysis.trials import StartUp
from vitscale.pages.contract import to_json
from vitscale.store import load, reading
from vitscale.store.packs import pack_files

# Two ranks, micro-batch 4, accumulation 2: a global batch of 16 images, 8 per rank. One warm-up step, then four timed.
TWO_RANKS = make_trial("ddp", 2, micro_batch=4, grad_accum=2)
RANK_0 = [9.0, 0.50, 0.25, 0.50, 0.25]
RANK_1 = [9.5, 0.25, 0.75, 0.25, 0.50]
# By the end of each timed step rank 0 has taken 0.50, 0.75, 1.25, 1.50 and rank 1 0.25, 1.00, 1.25, 1.75: 0.50, 1.00,
# 1.25 and 1.75 s have passed, 0.4375 a step. The slowest rank of each step would come to 2.25.


def two_rank_run(rank_0: list[float] = RANK_0, rank_1: list[float] = RANK_1, **fields: object):  # type: ignore[no-untyped-def]  # of a factory's keywords
    ranks = [make_rank(TWO_RANKS, rank, steps, warmup=1, **fields) for rank, steps in enumerate([rank_0, rank_1])]  # type: ignore[arg-type]  # the factory's keywords
    return run_figures(make_run(TWO_RANKS, ranks))


def test_throughput_by_hand_at_two_ranks_with_accumulation_two() -> None:
    # 4 steps x 16 images in 1.75 s. optimum-benchmark divides the volume of all steps by the mean step: 64 / 0.4375 =
    # 146 images/s, four times too much; and without the world size 8 images a step would give half of ours.
    found = two_rank_run()
    assert found.images_per_second == pytest.approx(64 / 1.75)
    assert found.images_per_second != pytest.approx(64 / 0.4375)
    assert found.images_per_second != pytest.approx(32 / 1.75)


def test_a_step_is_what_it_adds_to_the_time_and_warm_up_counts_nowhere() -> None:
    found = two_rank_run()
    assert found.step_seconds == pytest.approx(0.4375)
    assert found.timed_steps == 4


def test_tails_are_those_of_the_slowest_rank_and_of_100_steps_or_more() -> None:
    # 100 timed steps: 80 of 0.5 s, 20 of 0.75 on one of the two ranks, and the largest of all 8 s: set aside, but here.
    late = [0.75 if k % 5 == 0 else 0.5 for k in range(99)]
    steps = [[9.0, *late, 8.0], [9.0, *[0.5] * 100]]
    found = run_figures(make_run(TWO_RANKS, [make_rank(TWO_RANKS, k, own, warmup=1) for k, own in enumerate(steps)]))
    assert (found.tail_steps, found.timed_steps, found.slow.set_aside) == (100, 99, (100,))
    assert found.step_seconds_p95 == 0.75
    assert found.step_seconds_p99 == pytest.approx(0.75 + 7.25 * 0.01)  # place 98.01 of 99
    steps = [own[:100] for own in steps]
    found = run_figures(make_run(TWO_RANKS, [make_rank(TWO_RANKS, k, own, warmup=1) for k, own in enumerate(steps)]))
    assert (found.step_seconds_p95, found.step_seconds_p99, found.tail_steps) == (None, None, 99)


def test_elapsed_epochs_are_those_free_of_warm_up_and_of_the_slowest_rank() -> None:
    # Epoch 0 holds the warm-up step; epochs 1 and 2 take 2.0 and 3.0 s on the slowest rank.
    steps = [[5.0, 5.0, 1.0, 1.0, 1.5, 1.5], [5.0, 5.0, 0.5, 0.5, 1.0, 0.5]]
    ranks = [make_rank(TWO_RANKS, k, own, warmup=1, steps_in_epoch=2) for k, own in enumerate(steps)]
    found = run_figures(make_run(TWO_RANKS, ranks))
    assert (found.elapsed_epoch_seconds, found.elapsed_epochs) == (2.5, 2)


def test_an_epoch_with_warm_up_stays_one_when_the_warm_up_line_is_lost() -> None:
    # The broken line is left out by the reader; what it was about must not slip into a measured epoch.
    trial = make_trial("ddp", 1, warmup_steps=1)
    rank = make_rank(trial, 0, [5.0, 5.0, 1.0, 1.0], warmup=1, steps_in_epoch=2)
    found = run_figures(make_run(trial, [rank.model_copy(update={"steps": rank.steps[1:]})]))
    assert (found.elapsed_epoch_seconds, found.elapsed_epochs) == (2.0, 1)


def test_an_epoch_is_its_steps_whether_one_was_seen_or_not() -> None:
    # 1,024 images, global batch 16: 64 steps, of a mean 0.4375 s. All five steps are in epoch 0, with the warm-up.
    found = two_rank_run()
    assert found.epoch_seconds == pytest.approx(TRAIN_SAMPLES / 16 * 0.4375)
    assert (found.pace.source, found.pace.effective_steps, found.pace.epoch_images) == ("steps", 64.0, TRAIN_SAMPLES)
    assert (found.elapsed_epoch_seconds, found.elapsed_epochs) == (None, 0)


def test_an_epoch_that_the_run_cut_short_has_not_elapsed() -> None:
    # Six steps of one second, four to an epoch: epoch 0 has the warm-up, epoch 1 only two of its four steps.
    trial = make_trial("ddp", 1)
    found = run_figures(make_run(trial, [make_rank(trial, 0, [1.0] * 6, warmup=1, steps_in_epoch=4)]))
    assert (found.epoch_seconds, found.elapsed_epochs) == (128.0, 0)


@pytest.mark.parametrize(("drop_last", "steps", "images"), [(False, 62.5, 500), (True, 62, 496)])
def test_a_last_step_that_was_not_seen_has_its_slots_share(drop_last: bool, steps: float, images: int) -> None:
    # 500 images on one rank by 8: 62 steps and 4 images, half a slot.
    trial = make_trial("ddp", 1, drop_last=drop_last)
    run = make_run(trial, [make_rank(trial, 0, [1.0] * 4, warmup=1, model={"train_samples": 500})])
    found = run_figures(run)
    assert found.epoch_seconds == steps
    assert found.images_per_second == pytest.approx(images / steps)
    assert found.pace.last_step_source == (None if drop_last else "share")


def test_a_last_step_that_was_seen_counts_as_long_as_it_took() -> None:
    # Three steps an epoch: 8, 8 and 4 images, the last in 0.75 of the time.
    trial = make_trial("ddp", 1, warmup_steps=1)
    rank = make_rank(trial, 0, [9.0, *[1.0, 0.75, 1.0] * 3], warmup=1, steps_in_epoch=3, model={"train_samples": 20})
    short = tuple(line.model_copy(update={"images": 4}) if line.step % 3 == 2 else line for line in rank.steps)
    found = run_figures(make_run(trial, [rank.model_copy(update={"steps": short})]))
    assert (found.pace.last_step_source, found.pace.effective_steps) == ("measured", 2.75)
    assert (found.step_seconds, found.epoch_seconds) == (1.0, 2.75)
    assert found.images_per_second == pytest.approx(20 / 2.75)


def test_the_step_that_begins_an_epoch_counts_once_in_it() -> None:
    # Four steps an epoch, the first of which waits for the loader: 2 + 3 x 1 s, however many of each were timed.
    trial = make_trial("ddp", 1, warmup_steps=4)
    steps = [1.0] * 4 + [2.0, 1.0, 1.0, 1.0] * 2 + [2.0, 1.0]
    rank = make_rank(trial, 0, steps, warmup=4, steps_in_epoch=4, model={"train_samples": 32})
    found = run_figures(make_run(trial, [rank]))
    assert (found.step_seconds, found.epoch_seconds) == (1.25, 5.0)
    assert found.elapsed_epoch_seconds == 5.0


def test_an_epoch_of_one_step_is_that_step() -> None:
    trial = make_trial("ddp", 1, warmup_steps=1)
    rank = make_rank(
        trial, 0, [9.0, 1.0, 2.0, 1.0, 2.0], warmup=1, images=5, steps_in_epoch=1, model={"train_samples": 5}
    )
    found = run_figures(make_run(trial, [rank]))
    assert (found.step_seconds, found.epoch_seconds) == (1.5, 1.5)
    assert found.images_per_second == pytest.approx(5 / 1.5)


def test_startup_is_the_sum_over_phases_of_the_slowest_rank() -> None:
    slow_import = dict(PHASE_SECONDS) | {"imports": 4.0}
    ranks = [
        make_rank(TWO_RANKS, 0, [1.0, 1.0], phases=slow_import),
        make_rank(TWO_RANKS, 1, [1.0, 1.0], phases=dict(PHASE_SECONDS) | {"model": 1.0}),
    ]
    found = run_figures(make_run(TWO_RANKS, ranks))
    assert found.phase_seconds == dict(PHASE_SECONDS) | {"imports": 4.0, "model": 1.0}
    assert StartUp(found.phase_seconds, one_off={}).seconds == STARTUP_SECONDS + 1.0 + 0.5


def test_a_truncated_rank_leaves_the_steps_that_all_ranks_have_and_says_so() -> None:
    found = two_rank_run(rank_1=RANK_1[:3])
    assert found.timed_steps == 2
    assert found.images_per_second == pytest.approx(32 / 1.0)
    assert any("only the 3 of 5 that all recorded count" in note for note in found.notes)


def test_steps_are_matched_by_number_not_by_place() -> None:
    ranks = [make_rank(TWO_RANKS, rank, steps, warmup=1) for rank, steps in enumerate([RANK_0, RANK_1])]
    ranks[1] = ranks[1].model_copy(update={"steps": (*ranks[1].steps[:2], *ranks[1].steps[3:])})  # step 2 is lost
    found = run_figures(make_run(TWO_RANKS, ranks))
    # 0.5 s, and after the gap 0.5 and 0.25 on either rank: 0.75.
    assert found.timed_steps == 3
    assert found.images_per_second == pytest.approx(48 / 1.25)


def test_without_one_ranks_record_nothing_is_claimed() -> None:
    found = run_figures(make_run(TWO_RANKS, [make_rank(TWO_RANKS, 0, RANK_0, warmup=1)]))
    assert (found.step_seconds, found.images_per_second) == (None, None)
    assert any("repeat 1: no record of rank 1" in note for note in found.notes)


def test_a_run_of_warm_up_alone_has_no_figures() -> None:
    found = two_rank_run(RANK_0[:1], RANK_1[:1])
    assert (found.step_seconds, found.images_per_second, found.epoch_seconds) == (None, None, None)
    assert any("no timed step" in note for note in found.notes)


def test_loss_is_the_mean_over_ranks_and_unknown_where_one_diverged() -> None:
    ranks = [
        make_rank(TWO_RANKS, 0, [1.0] * 3, losses=[2.0, 1.0, 0.5]),
        make_rank(TWO_RANKS, 1, [1.0] * 3, losses=[4.0, None, 1.5]),
    ]
    assert run_figures(make_run(TWO_RANKS, ranks)).loss_by_step == ((0, 3.0), (1, None), (2, 1.0))


def test_a_loss_that_is_not_a_number_is_unknown() -> None:
    rank = make_rank(make_trial(), 0, [1.0, 1.0], losses=[float("nan"), float("inf")])
    found = run_figures(make_run(make_trial(), [rank]))
    assert found.loss_by_step == ((0, None), (1, None))
    assert found.epochs[0].train_loss is None


def test_memory_is_that_of_the_rank_that_needed_most() -> None:
    assert two_rank_run().peak_bytes == 501_000_000


def test_epochs_carry_train_and_held_out_figures() -> None:
    epochs = run_figures(steady_run(make_trial(epochs=3), 0.1)).epochs
    assert [epoch.epoch for epoch in epochs] == [0, 1, 2]
    assert [epoch.train_accuracy for epoch in epochs] == pytest.approx([0.4, 0.55, 0.7])
    assert [epoch.held_out_accuracy for epoch in epochs] == pytest.approx([0.35, 0.5, 0.65])


def test_a_record_of_absurd_times_is_no_error() -> None:
    found = run_figures(make_run(make_trial(), [make_rank(make_trial(), 0, [1e300] * 4)]))
    assert found.images_per_second == pytest.approx(8e-300)
    assert run_figures(make_run(make_trial(), [make_rank(make_trial(), 0, [0.0] * 4)])).step_seconds is None


# --- warm-up that is seen in the times ------------------------------------------------------------------------------

ALONE = make_trial("ddp", 1, warmup_steps=1)


def test_slow_first_steps_are_counted_and_in_no_figure() -> None:
    # 1 marked, 4 slow ones, then 36 level ones: 8 images a step.
    found = run_figures(make_run(ALONE, [make_rank(ALONE, 0, [9.0, 4.0, 3.0, 2.0, 2.0, *[0.5] * 36], warmup=1)]))
    assert (found.detected_warmup_steps, found.timed_steps, found.steady_from) == (4, 36, 5)
    assert found.images_per_second == pytest.approx(8 / 0.5)
    assert found.epoch_seconds == pytest.approx(TRAIN_SAMPLES / 8 * 0.5)
    assert found.training_seconds == pytest.approx(11.0 + 36 * 0.5)
    assert len(found.loss_by_step) == 41


def test_a_level_run_loses_nothing() -> None:
    found = run_figures(make_run(ALONE, [make_rank(ALONE, 0, [9.0, *[0.5] * 40], warmup=1)]))
    assert (found.detected_warmup_steps, found.timed_steps, found.steady_from) == (0, 40, 1)
    assert found.trend is None


def test_warm_up_is_looked_for_in_what_a_step_adds_for_all_ranks() -> None:
    # By the end of each step 2.0, 4.0, 6.0 s have passed on rank 1 or 0: both are as late by then.
    ranks = [
        make_rank(TWO_RANKS, 0, [9.0, 2.0, 1.5, 2.5, *[0.5] * 30], warmup=1),
        make_rank(TWO_RANKS, 1, [9.0, 1.5, 2.5, 2.0, *[0.5] * 30], warmup=1),
    ]
    assert run_figures(make_run(TWO_RANKS, ranks)).detected_warmup_steps == 3


def test_an_epoch_with_detected_warm_up_has_not_elapsed_undisturbed() -> None:
    # Epochs of 20 steps. Without the warm-up epochs 1 and 2 (20 s each) would count, and 0 only for its marked step.
    steps = [9.0, *[1.0] * 19, *[3.0] * 5, *[1.0] * 15, *[1.0] * 20]
    marked = make_trial("ddp", 1, warmup_steps=20)
    found = run_figures(
        make_run(marked, [make_rank(marked, 0, steps, warmup=20, steps_in_epoch=20, model=OF_20_STEPS)])
    )
    assert (found.detected_warmup_steps, found.steady_from) == (4 + 1, 25)
    assert (found.epoch_seconds, found.elapsed_epoch_seconds, found.elapsed_epochs) == (20.0, 20.0, 1)
    rank = make_rank(marked, 0, steps[:40], warmup=20, steps_in_epoch=20, model=OF_20_STEPS)
    alone = run_figures(make_run(marked, [rank]))
    assert (alone.epoch_seconds, alone.elapsed_epochs) == (20.0, 0)


OF_20_STEPS = {"train_samples": 160}


def test_neither_the_first_nor_the_last_step_of_an_epoch_is_taken_for_warm_up() -> None:
    # The timed steps begin with an epoch, whose first step waits for the loader; its last one holds half the images.
    epoch = [3.0, *[1.0] * 18, 0.5]
    marked = make_trial("ddp", 1, warmup_steps=20)
    rank = make_rank(marked, 0, epoch * 3, warmup=20, steps_in_epoch=20)
    half = [line.model_copy(update={"images": 4}) if line.step % 20 == 19 else line for line in rank.steps]
    found = run_figures(make_run(marked, [rank.model_copy(update={"steps": tuple(half)})]))
    assert (found.detected_warmup_steps, found.timed_steps) == (0, 40)
    assert found.step_spread == 0.0


def test_the_spread_is_that_of_whole_batches() -> None:
    # Every third step beyond the first of an epoch holds half the images, in half the time.
    rank = make_rank(ALONE, 0, [9.0, 1.0, 1.0, 0.5] + [1.0, 1.0, 1.0, 0.5] * 5, warmup=1, steps_in_epoch=4)
    half = [line.model_copy(update={"images": 4}) if line.step % 4 == 3 else line for line in rank.steps]
    assert run_figures(make_run(ALONE, [rank])).step_spread == pytest.approx(0.5)
    assert run_figures(make_run(ALONE, [rank.model_copy(update={"steps": tuple(half)})])).step_spread == 0.0


def test_the_very_first_step_of_a_run_may_be_warm_up() -> None:
    unmarked = make_trial("ddp", 1, warmup_steps=0)
    found = run_figures(make_run(unmarked, [make_rank(unmarked, 0, [30.0, *[1.0] * 20])]))
    assert (found.detected_warmup_steps, found.images_per_second) == (1, 8.0)


def test_at_least_half_of_the_light_steps_stay() -> None:
    found = run_figures(make_run(ALONE, [make_rank(ALONE, 0, [9.0, *[2.0] * 30, *[1.0] * 10], warmup=1)]))
    assert (found.detected_warmup_steps, found.timed_steps) == (0, 40)  # the later half is level at 2.0: no warm-up
    found = run_figures(make_run(ALONE, [make_rank(ALONE, 0, [9.0, *[2.0] * 24, *[1.0] * 16], warmup=1)]))
    assert (found.detected_warmup_steps, found.timed_steps) == (20, 20)
    assert found.trend == pytest.approx(-0.5)


def test_the_spread_of_steps_is_their_middle_half_over_the_median() -> None:
    # 1.0, 1.1, 1.2, 1.3, 1.4 in turn: quartiles 1.1 and 1.3, median 1.2.
    found = run_figures(make_run(ALONE, [make_rank(ALONE, 0, [9.0, *[1.2, 1.0, 1.4, 1.1, 1.3] * 4], warmup=1)]))
    assert found.step_spread == pytest.approx(0.2 / 1.2)
    assert run_figures(make_run(ALONE, [make_rank(ALONE, 0, [9.0, *[1.0] * 4], warmup=1)])).step_spread is None


def test_many_packs_are_read_in_forks_with_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: here polars has threads already, and nothing would be forked."""
    monkeypatch.setattr(reading, "PACK_RUNS", 4)
    write_results(rich_study(), tmp_path)
    reading.pack_finished(tmp_path)
    code = f"""if True:
        import os, sys
        from pathlib import Path
        from vitscale import analysis
        from vitscale.pages.contract import to_json
        from vitscale.store import reading
        from vitscale.store.results import LaterRank
        asked, again = set(), reading._read_ranks_again
        reading._read_ranks_again = lambda results, folder: asked.add(folder) or again(results, folder)
        os.sched_getaffinity = lambda _pid: {{0, 1, 2}}
        analysed = analysis.analyse_folder(Path({str(tmp_path)!r}))
        assert all(isinstance(rank, LaterRank) for run in analysed.runs for rank in run.ranks)
        print(to_json(analysed), end="")
        print(*asked, file=sys.stderr)
    """
    assert len(pack_files(tmp_path)) >= 15
    forked = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert list(apart(json.loads(forked.stdout), json.loads(to_json(analyse(load(tmp_path)))))) == []
    assert forked.stderr.split() == []  # no run is read twice


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from([3, 24, 60]), st.integers(0, 5)), min_size=1, max_size=6))
def test_runs_worked_out_together_have_the_figures_that_each_has_alone(drawn: list[tuple[int, int, int]]) -> None:
    """Runs of unlike lengths, first steps that are slow still, slow ones later on, and times that fall. All runs
    decide together which slow steps are set aside, worked out as one or not."""
    runs = []
    for seed, count, slow in drawn:
        random = np.random.default_rng(seed)
        seconds = np.exp(0.02 * random.standard_normal((2, count))) * np.linspace(1 + 0.3 * (seed % 3 == 0), 1, count)
        seconds[:, 1 : 1 + slow] *= 3.0
        seconds[:, random.integers(0, count, seed % 3)] *= 5.0
        losses = random.choice([1.0, 2.0, math.nan], count, p=[0.5, 0.49, 0.01])
        told = [None if math.isnan(loss) else float(loss) for loss in losses]
        ranks = [
            make_rank(TWO_RANKS, rank, own, warmup=1, steps_in_epoch=-(-count // 2), losses=told)
            for rank, own in enumerate(seconds.tolist())
        ]
        runs.append(make_run(TWO_RANKS, ranks[: 2 - (seed == 7)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "group_runs_by_steps", lambda recorded: [[index] for index in range(len(recorded))])
        alone = all_run_figures(runs)
    assert all_run_figures(runs) == alone
