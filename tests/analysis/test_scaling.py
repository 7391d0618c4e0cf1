from __future__ import annotations

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
    rich_study,
    steady_run,
)
from vitscale.analysis import Analysis, CurveResult, analyse
from vitscale.analysis.statistics import ratio
from vitscale.store.records import DeviceRecord
from vitscale.store.results import Results
from vitscale.trial.trial import Mode

# An epoch of 1,024 images at micro-batch 8 has 128 steps on one rank, 64 on two, 32 on four.


def only_curve(results: Results) -> CurveResult:
    (curve,) = analyse(results).curves
    return curve


def centres(curve: CurveResult, figure: str) -> list[float | None]:
    found = [getattr(point, figure) for point in curve.points]
    return [None if interval is None else round(interval.value, 9) for interval in found]


def test_strong_speedup_and_efficiency() -> None:
    # Epochs of 12.8, 8.0 and 6.4 s.
    curve = only_curve(one_curve({1: [0.1], 2: [0.125], 4: [0.2]}))
    assert centres(curve, "speedup") == pytest.approx([1.0, 1.6, 2.0])
    assert centres(curve, "efficiency") == pytest.approx([1.0, 0.8, 0.5])


def test_strong_scaling_is_relative_to_a_baseline_of_more_than_one_rank() -> None:
    # Epochs of 8.0 s on 2 and 6.4 s on 4 ranks: 1.25 times as fast on twice the ranks.
    curve = only_curve(one_curve({2: [0.125], 4: [0.2]}))
    assert curve.baseline is not None
    assert curve.baseline.gpus == 2
    assert centres(curve, "speedup") == pytest.approx([1.0, 1.25])
    assert centres(curve, "efficiency") == pytest.approx([1.0, 0.625])


def test_weak_efficiency_is_the_ratio_of_epoch_times_and_speedup_is_scaled() -> None:
    # A sixteenth of the images per rank: 8 steps an epoch at every rank count. 0.8, 1.0 and 1.6 s.
    curve = only_curve(one_curve({1: [0.1], 2: [0.125], 4: [0.2]}, mode="weak"))
    assert centres(curve, "efficiency") == pytest.approx([1.0, 0.8, 0.5])
    assert centres(curve, "speedup") == pytest.approx([1.0, 1.6, 2.0])


def test_weak_scaling_is_relative_to_a_baseline_of_more_than_one_rank() -> None:
    curve = only_curve(one_curve({2: [0.1], 8: [0.2]}, mode="weak"))
    assert centres(curve, "efficiency") == pytest.approx([1.0, 0.5])
    assert centres(curve, "speedup") == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(("mode", "times"), [("strong-micro", 1.0), ("weak", 2.0)])
def test_intervals_carry_both_uncertainties(mode: Mode, times: float) -> None:
    base, point = [0.1, 0.11, 0.105], [0.06, 0.062, 0.067]
    curve = only_curve(one_curve({1: base, 2: point}, mode=mode))
    steps = 2.0 if mode == "strong-micro" else 1.0  # steps of the baseline's epoch for each of the point's
    truth = ratio(base, point).times(times * steps)
    found = curve.points[1].speedup
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((truth.value, truth.low, truth.high))
    efficiency = curve.points[1].efficiency
    assert efficiency is not None
    assert (efficiency.low, efficiency.high) == pytest.approx((found.low / 2, found.high / 2))  # type: ignore[operator]  # not None: above


def test_one_run_gives_no_interval_and_the_baseline_is_one_by_definition() -> None:
    single = only_curve(one_curve({1: [0.1], 2: [0.06, 0.061]}))
    assert [point.speedup and point.speedup.low for point in single.points] == [None, None]
    several = only_curve(one_curve({1: [0.1, 0.12], 2: [0.06, 0.061]}))
    assert several.points[0].speedup is not None
    assert (several.points[0].speedup.low, several.points[0].speedup.high) == (1.0, 1.0)


def test_the_baseline_is_the_smallest_rank_count_that_completed() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2, 4)]
    runs = [failed_run(trials[0], "oom", "rank 0 ran out of memory"), *(steady_run(t, 0.1) for t in trials[1:])]
    curve = only_curve(make_results([(make_curve(trials), trials)], runs))
    assert curve.baseline is not None
    assert curve.baseline.gpus == 2
    assert centres(curve, "speedup") == [None, 1.0, 2.0]


def test_without_a_completed_run_there_is_no_baseline_and_no_figure() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    found = analyse(make_results([(make_curve(trials), trials)], []))
    assert found.curves[0].baseline is None
    assert centres(found.curves[0], "speedup") == [None, None]
    assert {trial.outcome for trial in found.trials.values()} == {None}
    assert {trial.reason for trial in found.trials.values()} == {"not run yet"}


def test_points_stand_in_order_of_ranks_whatever_the_studys_order() -> None:
    curve = only_curve(one_curve({4: [0.2], 1: [0.1], 2: [0.125]}))
    assert [point.gpus for point in curve.points] == [1, 2, 4]


# --- against the plain run -----------------------------------------------------------------------------------------


def with_plain(mode: Mode) -> Analysis:
    """DDP at 1 and 2 ranks, and a plain run that takes 0.8 of the time of DDP on one rank."""
    share = (lambda gpus: gpus / 16) if mode == "weak" else (lambda gpus: 1.0)
    micro = (lambda gpus: 8 // gpus) if mode == "strong-global" else (lambda gpus: 8)
    trials = [make_trial("ddp", n, fraction=share(n), micro_batch=micro(n)) for n in (1, 2)]
    plain = make_trial("none", 1, fraction=share(1))
    other = make_trial("none", 1, fraction=0.75)
    runs = [steady_run(t, 0.1) for t in trials] + [steady_run(plain, 0.08), steady_run(other, 0.01)]
    curves = [(make_curve(trials, mode), trials), (make_curve([plain], mode), [plain]), (make_curve([other]), [other])]
    return analyse(make_results(curves, runs))


@pytest.mark.parametrize(
    ("mode", "speedups", "efficiencies"),
    [
        ("strong-micro", [0.8, 1.6], [0.8, 0.8]),
        ("strong-global", [0.8, 0.8], [0.8, 0.4]),  # half the micro-batch, as many steps
        ("weak", [0.8, 1.6], [0.8, 0.8]),
    ],
)
def test_speedup_over_the_run_without_a_wrapper(mode: Mode, speedups: list[float], efficiencies: list[float]) -> None:
    curve = with_plain(mode).curves[0]
    assert centres(curve, "speedup_over_plain") == pytest.approx(speedups)
    assert centres(curve, "efficiency_over_plain") == pytest.approx(efficiencies)


def test_a_plain_run_of_other_work_is_no_baseline() -> None:
    trials = [make_trial("ddp", 1), make_trial("ddp", 2)]
    for other in (
        make_trial("none", micro_batch=4),
        make_trial("none", precision="bf16"),
        make_trial("none", learning_rate=0.5),
        make_trial("none", model="vit-s16"),
        make_trial("none", fraction=0.5),
    ):
        runs = [steady_run(trial, 0.1) for trial in (*trials, other)]
        found = analyse(make_results([(make_curve(trials), trials), (make_curve([other]), [other])], runs))
        assert found.curves[0].plain_trial is None


def test_the_engines_own_fields_do_not_keep_the_plain_run_away() -> None:
    trials = [make_trial("deepspeed", gpus, zero_stage=2) for gpus in (1, 2)]
    plain = make_trial("none")
    runs = [steady_run(trial, 0.1) for trial in (*trials, plain)]
    found = analyse(make_results([(make_curve(trials), trials), (make_curve([plain]), [plain])], runs))
    assert found.curves[0].plain_trial == plain.identity()


@pytest.mark.parametrize("counts", [(1, 3), (3,)])
def test_unequal_shares_have_the_plain_run_and_a_name(counts: tuple[int, ...]) -> None:
    trials = [make_trial("ddp", gpus, micro_batches=(11, 10, 3) if gpus == 3 else None) for gpus in counts]
    plain = make_trial("none")
    runs = [steady_run(trial, 0.1) for trial in (*trials, plain)]
    found = analyse(make_results([(make_curve(trials), trials), (make_curve([plain]), [plain])], runs))
    assert found.curves[0].plain_trial == plain.identity()
    assert found.curves[0].name == "ddp, unequal shares"
    # Images of all ranks, however they are shared out.
    per_second = found.trials[trials[-1].identity()].images_per_second
    assert per_second is not None
    assert per_second.value == pytest.approx(1024 / (43 * 0.1))


# --- curve against curve -------------------------------------------------------------------------------------------


def two_engines(ddp: list[float], deepspeed: list[float]) -> Analysis:
    curves, runs = [], []
    for engine, seconds in (("ddp", ddp), ("deepspeed", deepspeed)):
        trials = [make_trial(engine, gpus) for gpus in (1, 2)]
        curves.append((make_curve(trials), trials))
        runs += [steady_run(trial, s, repeat) for trial in trials for repeat, s in enumerate(seconds)]
    return analyse(make_results(curves, runs))


def test_equal_work_relabelled_shows_no_significant_difference() -> None:
    found = two_engines([0.1, 0.104, 0.098], [0.098, 0.1, 0.104])
    assert [one.result.verdict for one in found.comparisons] == ["no significant difference"] * 2
    assert [one.gpus for one in found.comparisons] == [1, 2]


def test_a_real_difference_between_engines_is_named_and_sized() -> None:
    one = two_engines([0.1, 0.101, 0.099], [0.2, 0.202, 0.198]).comparisons[0]
    assert (one.first, one.second, one.fields, one.result.verdict) == ("ddp", "deepspeed", ("train.engine",), "faster")
    assert one.result.ratio.value == pytest.approx(2.0)


def test_one_run_a_side_tells_no_difference() -> None:
    assert {one.result.verdict for one in two_engines([0.1], [0.5]).comparisons} == {"too few repeats to tell"}


def test_curves_that_differ_in_two_fields_or_in_their_data_are_not_compared() -> None:
    ddp, deepspeed = make_trial("ddp"), make_trial("deepspeed", micro_batch=16)
    other_data = make_trial("ddp", fraction=0.5)
    curves = [
        (make_curve([ddp], train__micro_batch=8, data__fraction=1.0), [ddp]),
        (make_curve([deepspeed], train__micro_batch=16, data__fraction=1.0), [deepspeed]),
        (make_curve([other_data], train__micro_batch=8, data__fraction=0.5), [other_data]),
    ]
    runs = [steady_run(trial, 0.1, repeat) for trial in (ddp, deepspeed, other_data) for repeat in range(2)]
    assert analyse(make_results(curves, runs)).comparisons == ()


# --- trials --------------------------------------------------------------------------------------------------------


def test_a_trial_on_several_curves_is_one_trial() -> None:
    found = analyse(rich_study())
    shared = [c for c in found.curves if c.name == "ddp" and c.mode != "weak"]
    assert shared[0].points[0].trial_id == shared[1].points[0].trial_id
    assert len(found.trials) == len(set(found.trials)) == 23  # 2 x (3 x 4 - 1 shared) + 1 plain


def test_outcome_is_completed_as_soon_as_one_repeat_is_and_the_reason_tells_of_the_others() -> None:
    trial = make_trial()
    runs = [steady_run(trial, 0.1), failed_run(trial, "oom", "rank 1 ran out of memory", repeat=1)]
    runs.append(steady_run(trial, 0.1, repeat=2))
    (found,) = analyse(make_results([(make_curve([trial]), [trial])], runs)).trials.values()
    assert found.outcome == "completed"
    assert found.reason == "1 of 3 repeats ended in oom: rank 1 ran out of memory"
    assert len(found.run_figures) == 2


def test_outcome_is_that_of_the_last_run_where_none_completed() -> None:
    trial = make_trial()
    runs = [failed_run(trial, "hang", "no progress for 300 s"), failed_run(trial, "oom", "out of memory", repeat=1)]
    (found,) = analyse(make_results([(make_curve([trial]), [trial])], runs)).trials.values()
    assert (found.outcome, found.reason) == ("oom", "out of memory")


# --- unlike runs ---------------------------------------------------------------------------------------------------


def other_cpu(ranks: int) -> list[object]:
    return [make_environment(rank, device=DeviceRecord(type="cpu", name="Other CPU")) for rank in range(ranks)]


def test_repeats_from_unlike_machines_are_not_combined() -> None:
    trial = make_trial()
    runs = [steady_run(trial, 0.1, repeat) for repeat in range(2)]
    runs.append(steady_run(trial, 9.0, 2, environments=other_cpu(1)))
    results = make_results([(make_curve([trial]), [trial])], runs)
    (found,) = analyse(results).trials.values()
    assert found.step_seconds is not None
    assert found.step_seconds.value == pytest.approx(0.1)
    assert found.left_out == ("repeat 3: device: Example CPU against Other CPU",)
    (combined,) = analyse(results, combine_unlike=True).trials.values()
    assert len(combined.run_figures) == 3


def test_a_point_on_another_machine_than_the_baseline_has_no_speedup() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=other_cpu(2))]
    results = make_results([(make_curve(trials), trials)], runs)
    assert centres(analyse(results).curves[0], "speedup") == [1.0, None]
    assert centres(analyse(results, combine_unlike=True).curves[0], "speedup") == [1.0, 2.0]


def test_library_versions_count_only_where_both_name_them() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]

    def under(versions: dict[str, str | None]) -> CurveResult:
        environments = [make_environment(rank, versions=versions) for rank in range(2)]
        runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=environments)]
        return only_curve(make_results([(make_curve(trials), trials)], runs))

    assert centres(under({"torch": "2.13.0"}), "speedup") == [1.0, 2.0]
    assert centres(under({"torch": "2.12.0"}), "speedup") == [1.0, None]


def test_one_diverged_repeat_is_not_hidden_by_the_mean_of_the_others() -> None:
    trial = make_trial()
    diverged = [1.0, float("nan"), float("nan"), float("nan"), float("nan")]
    runs = [
        make_run(trial, [make_rank(trial, 0, [0.1] * 5, losses=losses)], r) for r, losses in enumerate([None, diverged])
    ]
    (found,) = analyse(make_results([(make_curve([trial]), [trial])], runs)).trials.values()
    assert found.epochs[0].train_loss is None
    assert found.loss_by_step[1] == (1, None)
    assert found.loss_by_step[0] == (0, 1.5)  # 2.0 and 1.0


def test_trials_are_named_by_what_tells_them_apart_in_their_study() -> None:
    """The rank count alone where that does; else the micro-batch, what was swept, the share of the images."""
    small, large = make_trial("ddp", 2), make_trial("ddp", 2, micro_batch=16)
    half, other = make_trial("ddp", 4, fraction=0.5), make_trial("ddp", 4)
    slow, fast = make_trial("fsdp2", 1, learning_rate=0.1), make_trial("fsdp2", 1, learning_rate=0.2)
    alone = make_trial("none", 1)
    curves = [
        (make_curve(trials, "strong-micro", **labels), trials)
        for trials, labels in (
            ([small, other], {}), ([large], {}), ([half], {}), ([alone], {}),
            ([slow], {"train__learning_rate": 0.1}), ([fast], {"train__learning_rate": 0.2}),
        )
    ]  # fmt: skip
    trials = analyse(make_results(curves, [])).trials
    assert {trial: trials[trial.identity()].name for trial in (small, large, half, other, slow, fast, alone)} == {
        small: "ddp on 2 ranks, micro-batch 8",
        large: "ddp on 2 ranks, micro-batch 16",
        half: "ddp on 4 ranks, 0.5 of the images",
        other: "ddp on 4 ranks",
        slow: "fsdp2 on 1 rank, learning_rate 0.1",
        fast: "fsdp2 on 1 rank, learning_rate 0.2",
        alone: "plain (no wrapper) on 1 rank",
    }
