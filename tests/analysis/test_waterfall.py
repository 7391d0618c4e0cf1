from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import (
    explained_run,
    failed_run,
    make_curve,
    make_environment,
    make_results,
    make_trial,
    steady_run,
)
from vitscale.analysis import Analysis, Waterfall, analyse
from vitscale.analysis.statistics import jackknife
from vitscale.analysis.time.breakdown import Breakdown, RankParts
from vitscale.analysis.time.exposure import unprofiled
from vitscale.analysis.time.waterfall import FACTORS, decompose, waterfalls
from vitscale.store.records import PARTS, DeviceRecord
from vitscale.store.results import Run
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import Mode, Trial

# An epoch of 1,024 images at micro-batch 8 has 128 steps on one rank, 64 on two, 43 on three (42.67 before rounding).

ONE_RANK = {"data_wait": 0.002, "forward": 0.03, "backward": 0.05, "optimizer": 0.006, "other": 0.002}
"""0.09 s."""


def study(trials: Sequence[Trial], runs: Sequence[Run], mode: Mode = "strong-micro") -> Analysis:
    return analyse(make_results([(make_curve(trials, mode), trials)], runs))


def against_one_rank(
    parts: Sequence[Mapping[str, float]],
    *,
    base: Mapping[str, float] = ONE_RANK,
    mode: Mode = "strong-micro",
    base_step: float | None = None,
    step: float | None = None,
    **train: Any,
) -> Waterfall:
    """The waterfall of a trial with `parts` on its ranks, against one rank with `base`."""
    ranks = len(parts)
    micro_batch = 8 // ranks if mode == "strong-global" else 8
    shares = (1 / 16, ranks / 16) if mode == "weak" else (1.0, 1.0)
    trials = [
        make_trial(gpus=1, fraction=shares[0], **train),
        make_trial(gpus=ranks, fraction=shares[1], micro_batch=micro_batch, **train),
    ]
    runs = [explained_run(trials[0], [base], base_step), explained_run(trials[1], parts, step)]
    (found,) = study(trials, runs, mode).waterfalls
    return found


def points(found: Waterfall) -> dict[str, float]:
    return {factor.name: factor.points for factor in found.factors}


def costing(found: Waterfall) -> dict[str, float]:
    """The points of the factors that take or give any."""
    return {name: value for name, value in points(found).items() if abs(value) > 1e-9}


# --- by hand -------------------------------------------------------------------------------------------------------


def test_strong_micro_by_hand() -> None:
    # Half the steps of 0.12 s instead of 0.09: 0.75 of ideal. 20 of the 30 ms are waiting, 10 the transfer.
    waiting = ONE_RANK | {"wait": 0.02, "wire": 0.01}
    slow = ONE_RANK | {"wire": 0.01, "forward": 0.05}
    found = against_one_rank([waiting, slow])
    assert found.efficiency == pytest.approx(0.75)
    assert (found.curve, found.mode, found.gpus, found.baseline_gpus) == ("ddp", "strong-micro", 2, 1)
    assert found.work_per_rank == 1.0
    assert found.reason == ""
    assert costing(found) == pytest.approx({"straggler wait": 0.25 * 2 / 3, "wire": 0.25 / 3})
    factors = {factor.name: factor.factor for factor in found.factors}
    assert (factors["straggler wait"], factors["wire"]) == pytest.approx((0.75 ** (2 / 3), 0.75 ** (1 / 3)))
    assert factors["step rounding"] == factors["data wait"] == 1.0
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.share_of_steps) == (1, 1.0)


def test_strong_global_by_hand() -> None:
    # Half the micro-batch, as many steps: ideal is half of each part, 45 ms, but the step takes 70.
    half = {"data_wait": 0.001, "forward": 0.02, "backward": 0.03, "wire": 0.01, "optimizer": 0.006, "other": 0.003}
    found = against_one_rank([half, half], mode="strong-global")
    assert found.efficiency == pytest.approx(0.09 / 0.07 / 2)
    assert found.work_per_rank == 0.5
    lost = 1 - 0.09 / 0.07 / 2
    seconds = {"compute scaling": 0.010, "wire": 0.010, "optimizer": 0.003, "other": 0.002}
    assert costing(found) == pytest.approx({name: lost * part / 0.025 for name, part in seconds.items()})


def test_weak_by_hand() -> None:
    # Four times the images on four ranks, whose loaders keep each step waiting for 22.5 ms more.
    starved = ONE_RANK | {"data_wait": 0.0245}
    found = against_one_rank([starved] * 4, mode="weak")
    assert found.efficiency == pytest.approx(0.8)
    assert found.work_per_rank == 1.0
    assert costing(found) == pytest.approx({"data wait": 0.2})
    assert {f.name: f.factor for f in found.factors}["data wait"] == pytest.approx(0.8)


def test_a_step_that_is_rounded_up_costs_what_it_does_not_train() -> None:
    found = against_one_rank([ONE_RANK] * 3)
    assert found.efficiency == pytest.approx(128 / 43 / 3)
    assert costing(found) == pytest.approx({"step rounding": 1 - 128 / 43 / 3})
    assert found.factors[0].factor == pytest.approx((1024 / 24) / 43)
    assert found.images_left_out == 0.0


def test_a_last_step_takes_what_it_took() -> None:
    # 128 steps on one rank; on three 42, and one of 16 instead of 24 images in 0.8 of the time.
    trials = [make_trial(gpus=1), make_trial(gpus=3)]
    runs = [explained_run(trial, [ONE_RANK] * trial.world.size) for trial in trials]
    ranks = []
    for rank in runs[1].ranks:
        steps = [line.model_copy(update={"seconds": 0.072}) if line.step % 43 == 42 else line for line in rank.steps]
        ranks.append(rank.model_copy(update={"steps": tuple(steps)}))
    (found,) = study(trials, [runs[0], runs[1].model_copy(update={"ranks": tuple(ranks)})]).waterfalls
    assert found.efficiency == pytest.approx(128 / (42.8 * 3))
    assert costing(found) == pytest.approx({"step rounding": 1 - 128 / (42.8 * 3)})
    assert found.factors[0].factor == pytest.approx((1024 / 24) / 42.8)


def test_under_drop_last_efficiency_is_by_image_and_the_images_left_out_are_told() -> None:
    # 42 steps train 1,008 of 1,024 images: in equal time for each, so that nothing is gained by leaving 16 out.
    found = against_one_rank([ONE_RANK] * 3, drop_last=True)
    assert found.efficiency == pytest.approx(1.0)
    assert costing(found) == {}
    assert found.images_left_out == 16 / 1024


def test_weak_scaling_of_images_that_do_not_divide() -> None:
    # A third of 1,024 images is 342 on one rank, two thirds are 683 on two: 43 steps each.
    trials = [make_trial(gpus=1, fraction=1 / 3), make_trial(gpus=2, fraction=2 / 3)]
    runs = [explained_run(trial, [ONE_RANK] * trial.world.size) for trial in trials]
    (found,) = study(trials, runs, "weak").waterfalls
    assert found.efficiency == pytest.approx(1.0)
    assert costing(found) == {}


def test_accumulation_counts_as_work_of_a_step() -> None:
    # Two micro-steps on one rank against one on each of two.
    trials = [make_trial(gpus=1, grad_accum=2), make_trial(gpus=2)]
    base = {"forward": 0.06, "backward": 0.1, "optimizer": 0.01}
    each = {"forward": 0.03, "backward": 0.05, "optimizer": 0.01}
    runs = [explained_run(trials[0], [base]), explained_run(trials[1], [each, each])]
    (found,) = study(trials, runs, "strong-global").waterfalls
    assert found.efficiency == pytest.approx(0.17 / 0.09 / 2)
    assert found.work_per_rank == 0.5
    assert costing(found) == pytest.approx({"optimizer": 1 - 0.17 / 0.18})


def test_accumulation_on_both_sides_makes_no_more_work() -> None:
    found = against_one_rank([ONE_RANK | {"wire": 0.01}] * 2, grad_accum=2)
    assert found.work_per_rank == 1.0
    assert costing(found) == pytest.approx({"wire": 0.1})


def test_a_baseline_of_more_than_one_rank() -> None:
    trials = [make_trial(gpus=2), make_trial(gpus=4)]
    runs = [explained_run(trials[0], [ONE_RANK] * 2), explained_run(trials[1], [ONE_RANK | {"wire": 0.01}] * 4)]
    (found,) = study(trials, runs).waterfalls
    assert found.baseline_gpus == 2
    assert found.efficiency == pytest.approx(0.9)
    assert costing(found) == pytest.approx({"wire": 0.1})


# --- the scale of light steps ----------------------------------------------------------------------------------------


def test_what_the_profiler_slows_is_scaled_and_the_transfer_is_not() -> None:
    # Explained, the host computes for 100 ms of a step; in light steps for 80. The transfer takes 20 in both.
    computing = {"forward": 0.04, "backward": 0.05, "optimizer": 0.01}
    found = against_one_rank([computing | {"wire": 0.02}] * 2, base=computing, base_step=0.08, step=0.1)
    assert found.efficiency == pytest.approx(0.8)
    assert costing(found) == pytest.approx({"wire": 0.2})


def test_communication_longer_than_the_light_step_is_scaled_with_all_the_rest() -> None:
    # 300 ms explained, 150 light: transfer 100, forward 50, where one rank takes 100 ms.
    found = against_one_rank(
        [{"forward": 0.1, "backward": 0.0, "wire": 0.2}] * 2, base={"forward": 0.1, "backward": 0.0}, step=0.15
    )
    lost = 1 - 0.1 / 0.15
    assert costing(found) == pytest.approx({"wire": 2 * lost, "compute scaling": -lost})


# --- which factors ---------------------------------------------------------------------------------------------------


def test_factors_stand_in_order_and_without_launch_gaps_on_a_host() -> None:
    found = against_one_rank([ONE_RANK] * 2)
    left_out = ("synchronised norm", "pipeline bubble", "communication", "launch gaps", "loading", "decoding")
    assert [factor.name for factor in found.factors] == [name for name in FACTORS if name not in left_out]


def test_synchronised_norms_are_a_factor_where_a_side_has_them() -> None:
    # Half the steps of 0.12 s instead of 0.09: 0.75 of ideal. 18 of the 30 ms are norms', 12 the gradients'.
    found = against_one_rank([ONE_RANK | {"norm": 0.018, "wire": 0.012}] * 2, batch_norm="synchronised")
    assert costing(found) == pytest.approx({"synchronised norm": 0.15, "wire": 0.1})
    assert math.prod(factor.factor for factor in found.factors) == pytest.approx(0.75)
    left_out = ("pipeline bubble", "communication", "launch gaps", "loading", "decoding")
    expected = [name for name in FACTORS if name not in left_out]
    assert [factor.name for factor in found.factors] == expected
    untold = against_one_rank(
        [ONE_RANK | {"norm": 0.018, "wire": 0.012, "told_apart": False}] * 2, batch_norm="synchronised"
    )
    assert costing(untold) == pytest.approx({"communication": 0.25})
    assert "synchronised norm" not in points(untold)


def test_the_bubble_is_a_factor_where_a_side_has_stages() -> None:
    """Half the steps of 0.12 s instead of 0.09, for fewer micro-batches flow: 0.75 of ideal, all of it the bubble's."""
    stages = {"parallel": ParallelSpec(pipeline=2)}
    trials = [make_trial(gpus=ranks).model_copy(update=stages) for ranks in (2, 4)]
    parts = ONE_RANK | {"told_apart": False}
    of_each = [[parts | {"bubble": 0.01, "forward": 0.02}] * 2, [parts | {"bubble": 0.04, "forward": 0.02}] * 4]
    runs = [explained_run(trial, own) for trial, own in zip(trials, of_each, strict=True)]
    (found,) = study(trials, runs).waterfalls
    assert costing(found) == pytest.approx({"pipeline bubble": 0.25})
    assert found.efficiency == pytest.approx(0.75)


def test_wait_and_wire_that_cannot_be_told_apart_are_one_factor() -> None:
    found = against_one_rank([ONE_RANK | {"wait": 0.02, "wire": 0.01, "told_apart": False}] * 2)
    names = [factor.name for factor in found.factors]
    assert names == ["step rounding", "compute scaling", "data wait", "communication", "optimizer", "other"]
    assert costing(found) == pytest.approx({"communication": 0.25})


def test_a_baseline_whose_wait_is_unknown_joins_them_too() -> None:
    base = ONE_RANK | {"wire": 0.01, "told_apart": False}
    found = against_one_rank([ONE_RANK | {"wait": 0.02, "wire": 0.005}] * 2, base=base)
    # Of the two equal ranks nobody waits, so that all 25 ms are transfer.
    assert costing(found) == pytest.approx({"communication": 1 - 0.1 / 0.115})


def with_parts(found: Analysis, trial_id: str, parts: Mapping[str, float | None]) -> Analysis:
    """The analysis with another breakdown of one trial, on one rank."""
    seconds = sum(value or 0.0 for value in parts.values())
    rank = RankParts(0, seconds, dict.fromkeys(PARTS, 0.0) | dict(parts), 0.0)
    changed = dataclasses.replace(found.trials[trial_id], breakdown=Breakdown((rank,), 1, {}, None, None))
    return dataclasses.replace(found, trials={**found.trials, trial_id: changed})


@pytest.mark.parametrize(
    ("part", "name"), [("launch_gaps", "launch gaps"), ("data_wait", "data wait"), ("optimizer", "optimizer")]
)
def test_what_only_marks_tell_is_a_factor_where_both_sides_know_it_and_else_other(part: str, name: str) -> None:
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    found = study(trials, [steady_run(trials[0], 0.08), steady_run(trials[1], 0.1)])
    base, trial = (one.identity() for one in trials)
    found = with_parts(found, trial, {"forward": 0.08, part: 0.02})
    both = with_parts(found, base, {"forward": 0.08, part: 0.0})
    one = with_parts(found, base, {"forward": 0.08, part: None})
    (known,) = waterfalls(both.curves[0], both.trials)
    (unknown,) = waterfalls(one.curves[0], one.trials)
    assert costing(known) == pytest.approx({name: 0.2})
    assert costing(unknown) == pytest.approx({"other": 0.2})
    assert name not in points(unknown)


def test_on_a_gpu_the_profilers_cost_is_in_the_launch_gaps_and_kernels_keep_their_length() -> None:
    """1 to 8 GPUs at the same global batch. Explained, each step's launches come 7 ms late; no kernel is longer."""
    trials = [make_trial(gpus=gpus, micro_batch=8 // gpus, device="cuda") for gpus in (1, 8)]
    alone = {"forward": 0.040, "backward": 0.056, "optimizer": 0.004}
    truth = {
        "forward": 0.0055, "backward": 0.0070, "launch_gaps": 0.0095, "wait": 0.001, "wire": 0.002, "optimizer": 0.004,
    }  # fmt: skip
    found = study(trials, [steady_run(trials[0], 0.1), steady_run(trials[1], 0.029)], "strong-global")
    base, eight = (one.identity() for one in trials)
    found = with_parts(found, base, alone | {"launch_gaps": 0.007})
    found = with_parts(found, eight, truth | {"launch_gaps": 0.0165})
    (fall,) = waterfalls(found.curves[0], found.trials)
    assert fall.efficiency == pytest.approx(12.5 / 29)
    lost = 1 - 12.5 / 29
    extra = {"compute scaling": 0.5, "launch gaps": 9.5, "straggler wait": 1, "wire": 2, "optimizer": 3.5}
    assert costing(fall) == pytest.approx({name: lost * ms / 16.5 for name, ms in extra.items()})
    assert {name: round(100 * part, 1) for name, part in costing(fall).items()} == {
        "compute scaling": 1.7, "launch gaps": 32.8, "straggler wait": 3.4, "wire": 6.9, "optimizer": 12.1,
    }  # fmt: skip


def test_what_the_gaps_cannot_hold_is_taken_from_the_rest_and_a_host_takes_it_from_what_it_computes() -> None:
    explained = {"forward": 0.06, "launch_gaps": 0.02, "wire": 0.01, "other": 0.01}
    assert unprofiled(explained, 0.085, "cuda") == pytest.approx(
        {"forward": 0.06, "launch_gaps": 0.01, "wire": 0.01, "other": 0.005}
    )
    assert unprofiled(explained, 0.05, "cuda") == pytest.approx(
        {"forward": 0.04, "launch_gaps": 0.0, "wire": 0.01, "other": 0.0}
    )
    # Another rank's kernels came 20 ms later, and 5 ms of this rank's; its own last as long as ever.
    late = {"forward": 0.09, "launch_gaps": 0.005, "wait": 0.028, "wire": 0.002}
    assert unprofiled(late, 0.1, "cuda") == pytest.approx(
        {"forward": 0.09, "launch_gaps": 0.0, "wait": 0.008, "wire": 0.002}
    )
    mixed = {"forward": 0.09, "launch_gaps": 0.005, "communication": 0.03}
    assert unprofiled(mixed, 0.1, "cuda") == pytest.approx({"forward": 0.09, "launch_gaps": 0.0, "communication": 0.01})
    assert unprofiled(explained, 0.085, "cpu") == pytest.approx(
        {"forward": 0.05, "launch_gaps": 0.02 / 1.2, "wire": 0.01, "other": 0.01 / 1.2}
    )
    # A step that was shorter under the profiler: nobody knows which of its parts.
    assert unprofiled({"forward": 0.06, "launch_gaps": 0.02}, 0.1, "cuda") == pytest.approx(
        {"forward": 0.075, "launch_gaps": 0.025}
    )


# --- why there is none -----------------------------------------------------------------------------------------------


def test_a_profile_that_lost_kernels_explains_nothing_and_its_unknown_parts_are_not_0() -> None:
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    found = study(trials, [steady_run(trials[0], 0.08), steady_run(trials[1], 0.1)])
    base, trial = (one.identity() for one in trials)
    found = with_parts(with_parts(found, base, {"forward": 0.08}), trial, {"forward": 0.08, "launch_gaps": 0.02})
    unseen = RankParts(0, 0.1, dict.fromkeys(PARTS), None)
    lost = Breakdown((unseen,), 1, dict.fromkeys(PARTS, "the profiler lost 1 of 6 launched kernels"), None, None)
    changed = dataclasses.replace(found.trials[trial], breakdown=lost)
    (fall,) = waterfalls(found.curves[0], {**found.trials, trial: changed})
    assert fall.factors == ()
    assert fall.reason == "parts of the step are unknown: the profiler lost 1 of 6 launched kernels"


def reasons(found: Analysis) -> list[str]:
    assert all(bool(one.reason) != bool(one.factors) for one in found.waterfalls)
    return [one.reason for one in found.waterfalls]


def test_the_baseline_has_no_waterfall_and_every_other_trial_of_every_curve_has_one() -> None:
    ddp, deepspeed = ([make_trial(engine, gpus) for gpus in (1, 2, 4)] for engine in ("ddp", "deepspeed"))
    runs = [explained_run(trial, [ONE_RANK] * trial.world.size) for trial in (*ddp, *deepspeed)]
    found = analyse(make_results([(make_curve(trials), trials) for trials in (ddp, deepspeed)], runs))
    assert [(one.curve, one.gpus) for one in found.waterfalls] == [
        ("ddp", 2), ("ddp", 4), ("deepspeed", 2), ("deepspeed", 4),
    ]  # fmt: skip
    assert {one.baseline_trial for one in found.waterfalls} == {ddp[0].identity(), deepspeed[0].identity()}
    assert reasons(found) == [""] * 4


def test_what_was_not_explained_has_a_reason() -> None:
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    explained = [explained_run(trial, [ONE_RANK] * trial.world.size) for trial in trials]
    light = [steady_run(trial, 0.09) for trial in trials]
    assert reasons(study(trials, [explained[0], light[1]])) == ["no step was explained"]
    assert reasons(study(trials, [light[0], explained[1]])) == ["no step of the baseline was explained"]


def test_without_a_baseline_or_a_completed_run_there_is_a_reason() -> None:
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    failed = [failed_run(trial, "oom", "rank 0 ran out of memory") for trial in trials]
    assert reasons(study(trials, failed)) == ["no trial of the curve has completed with an epoch time or images/s"] * 2
    one = study(trials, [explained_run(trials[0], [ONE_RANK]), failed[1]])
    assert reasons(one) == ["rank 0 ran out of memory"]
    assert [(w.efficiency, w.baseline_gpus) for w in one.waterfalls] == [(None, 1)]
    assert reasons(study(trials, [explained_run(trials[0], [ONE_RANK])])) == ["not run yet"]


def test_unlike_surroundings_are_not_held_against_each_other() -> None:
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    elsewhere = [make_environment(rank, device=DeviceRecord(type="cpu", name="Other CPU")) for rank in range(2)]
    runs = [
        explained_run(trials[0], [ONE_RANK]),
        explained_run(trials[1], [ONE_RANK] * 2, environments=elsewhere),
    ]
    assert reasons(study(trials, runs)) == ["it ran in other surroundings than the baseline"]


@pytest.mark.parametrize(
    ("base", "step", "reason"),
    [
        (0.09, 1e-200, "its efficiency cannot be believed: 9e+198"),
        (1e-20, 1e-20, "the light step cannot be believed: 1e-20 s"),
        (1e300, 1e300, "the light step cannot be believed: 1e+300 s"),
    ],
)
def test_times_of_broken_clocks_explain_nothing(base: float, step: float, reason: str) -> None:
    found = against_one_rank([ONE_RANK] * 2, base_step=base, step=step)
    assert (found.reason, found.factors) == (reason, ())


def test_explained_steps_without_time_explain_nothing() -> None:
    nothing = dict.fromkeys(ONE_RANK, 0.0)
    found = against_one_rank([nothing] * 2, step=0.1)
    assert found.reason == "the explained step cannot be believed: 0 s"


# --- properties ------------------------------------------------------------------------------------------------------

SECONDS = st.floats(min_value=1e-4, max_value=1.0)
SOME = st.one_of(st.just(0.0), SECONDS)
STEP = st.fixed_dictionaries(
    {"data_wait": SOME, "forward": SECONDS, "backward": SECONDS, "wire": SOME, "optimizer": SOME, "other": SOME}
)


@given(
    base=STEP,
    own=STEP,
    wait=SOME,
    ranks=st.sampled_from([2, 3, 4]),
    mode=st.sampled_from(["strong-micro", "strong-global", "weak"]),
    slowdowns=st.lists(st.floats(min_value=-0.3, max_value=1.0), min_size=4, max_size=4),
    drop_last=st.booleans(),
)
def test_factors_multiply_to_the_efficiency_and_points_add_up_to_what_is_lost(
    base: dict[str, float],
    own: dict[str, float],
    wait: float,
    ranks: int,
    mode: Mode,
    slowdowns: list[float],
    drop_last: bool,
) -> None:
    shares = (1 / 16, ranks / 16) if mode == "weak" else (1.0, 1.0)
    micro_batch = 12 // ranks if mode == "strong-global" else 12
    trials = [
        make_trial(micro_batch=12, fraction=shares[0], drop_last=drop_last, epochs=6),
        make_trial(gpus=ranks, micro_batch=micro_batch, fraction=shares[1], drop_last=drop_last, epochs=6),
    ]
    by_rank = [own | {"wait": wait}] * (ranks - 1) + [own | {"forward": own["forward"] + wait}]
    runs = [explained_run(trials[0], [base], repeat=r, slowdown=s) for r, s in enumerate(slowdowns[:2])]
    runs += [explained_run(trials[1], by_rank, repeat=r, slowdown=s) for r, s in enumerate(slowdowns[2:])]
    analysis = study(trials, runs, mode)
    (found,) = analysis.waterfalls
    efficiency = analysis.curves[0].points[1].efficiency
    assert efficiency is not None
    assert found.efficiency == efficiency.value
    assert found.interval == efficiency
    assert math.prod(factor.factor for factor in found.factors) == pytest.approx(efficiency.value, rel=1e-9)
    assert sum(factor.points for factor in found.factors) == pytest.approx(1 - efficiency.value, abs=1e-9)
    # Points are the logarithm's share: a factor below 1 costs, above 1 gains.
    assert all(factor.points * (1 - factor.factor) >= 0 for factor in found.factors)


PARTS_OF_TWO = st.lists(st.tuples(SOME, SOME), min_size=2, max_size=9).filter(
    lambda pairs: all(sum(side) > 0 for side in zip(*pairs, strict=True))
)


@given(PARTS_OF_TWO, st.randoms())
def test_no_order_of_the_parts_matters_and_nothing_is_left_over(pairs: list[tuple[float, float]], random: Any) -> None:
    names = [str(place) for place in range(len(pairs))]
    measured, ideal = ({n: pair[side] for n, pair in zip(names, pairs, strict=True)} for side in (0, 1))
    logs = decompose(measured, ideal)
    whole = math.log(sum(ideal.values()) / sum(measured.values()))
    assert sum(logs.values()) == pytest.approx(whole, abs=1e-9)
    random.shuffle(names)
    shuffled = decompose({n: measured[n] for n in names}, {n: ideal[n] for n in names})
    assert shuffled == pytest.approx(logs, rel=1e-9, abs=1e-12)


@given(PARTS_OF_TWO)
def test_two_parts_in_one_cost_what_they_cost_apart(pairs: list[tuple[float, float]]) -> None:
    measured, ideal = ({str(k): pair[side] for k, pair in enumerate(pairs)} for side in (0, 1))
    apart = decompose(measured, ideal)
    joined = [
        {"both": parts["0"] + parts["1"]} | {k: v for k, v in parts.items() if k > "1"} for parts in (measured, ideal)
    ]
    assert decompose(*joined)["both"] == pytest.approx(apart["0"] + apart["1"], rel=1e-9, abs=1e-12)


@given(STEP)
def test_equal_steps_cost_nothing(parts: dict[str, float]) -> None:
    found = against_one_rank([parts] * 2, base=parts)
    assert found.efficiency == pytest.approx(1.0)
    assert [factor.factor for factor in found.factors] == pytest.approx([1.0] * len(found.factors))
    assert costing(found) == {}


def test_at_exactly_the_ideal_losses_and_gains_are_shares_of_the_step() -> None:
    # 2 of 80 ms are waiting for data in place of the optimizer: ln E is 0, and the points are their own limit.
    base = {"forward": 0.03, "backward": 0.04, "optimizer": 0.01}
    found = against_one_rank(
        [base | {"optimizer": 0.008, "data_wait": 0.002}] * 2, base=base, mode="weak", base_step=0.08, step=0.08
    )
    assert found.efficiency == 1.0
    assert costing(found) == pytest.approx({"data wait": 0.025, "optimizer": -0.025})


def test_steps_of_nothing_but_waiting_are_scaled_as_they_are() -> None:
    waiting = {"data_wait": 0.05, "forward": 0.0, "backward": 0.0}
    found = against_one_rank([waiting] * 2, base=waiting, base_step=0.08, step=0.1)
    assert costing(found) == pytest.approx({"data wait": 0.2})


def test_better_than_ideal_is_gained_by_what_takes_less() -> None:
    # 0.09 s on one rank, 0.075 on each of two: the data wait is gone and the optimizer takes 13 ms less, wire adds.
    base = {"data_wait": 0.01, "forward": 0.03, "backward": 0.03, "optimizer": 0.02}
    fast = {"data_wait": 0.0, "forward": 0.03, "backward": 0.03, "optimizer": 0.007, "wire": 0.008}
    found = against_one_rank([fast] * 2, base=base)
    assert found.efficiency == pytest.approx(1.2)
    gained = {"data wait": -0.2 * 10 / 15, "optimizer": -0.2 * 13 / 15, "wire": 0.2 * 8 / 15}
    assert costing(found) == pytest.approx(gained)


# --- over runs -----------------------------------------------------------------------------------------------------


def of_runs(repeats: int, skip: tuple[int, int] | None = None) -> Analysis:
    """One rank and two, whose parts differ from run to run; `skip`: a trial's place and a run of it to leave out."""
    trials = [make_trial(gpus=1), make_trial(gpus=2)]
    runs = []
    for repeat in range(repeats):
        part = 1 + 0.05 * (repeat - 1)
        base = {"forward": 0.03 * part, "backward": 0.05}
        slow = {"forward": 0.03, "backward": 0.052, "wire": 0.02 * part**2, "wait": 0.004}
        fast = slow | {"forward": 0.034, "wait": 0.0}
        runs += [
            explained_run(trial, parts, repeat=repeat)
            for place, (trial, parts) in enumerate(zip(trials, [[base], [slow, fast]], strict=True))
            if (place, repeat) != skip
        ]
    return study(trials, runs)


def test_points_have_the_jackknifes_interval_over_the_runs_of_both_sides() -> None:
    """Against the whole analysis of studies that lack a run."""
    (whole,) = of_runs(4).waterfalls
    sides = [[points(of_runs(4, (place, run)).waterfalls[0]) for run in range(4)] for place in (1, 0)]
    for factor in whole.factors:
        expected = jackknife(factor.points, [[without[factor.name] for without in side] for side in sides])
        assert factor.interval is not None
        assert (factor.interval.low, factor.interval.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    wire = next(factor for factor in whole.factors if factor.name == "wire")
    assert wire.interval is not None
    assert (wire.interval.high or 0) - (wire.interval.low or 0) > 0.01


@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_runs_give_no_interval_of_anything_explained(repeats: int) -> None:
    analysis = of_runs(repeats)
    assert all(factor.interval is None for one in analysis.waterfalls for factor in one.factors)
    for trial in analysis.trials.values():
        assert trial.breakdown is not None
        of_parts = trial.breakdown.over_runs(lambda one: one.rank(0).parts["forward"])
        assert of_parts is not None
        assert of_parts.low is of_parts.high is None
        assert of_parts.note


def test_parts_have_students_interval_over_runs() -> None:
    base, _ = of_runs(3).trials.values()
    assert base.breakdown is not None
    # 28.5, 30 and 31.5 ms: standard deviation 1.5 ms, t 4.30265: 4.30265 x 1.5 / sqrt(3) = 3.72621 ms.
    forward = base.breakdown.over_runs(lambda one: one.rank(0).parts["forward"])
    assert forward is not None
    assert (forward.value, forward.low, forward.high) == pytest.approx((0.03, 0.02627379, 0.03372621), rel=1e-6)
    nothing = base.breakdown.over_runs(lambda one: one.rank(0).parts["wire"])
    assert nothing is not None
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("repeats", "seed"), [(3, 31), (5, 32), (8, 33)])
def test_intervals_of_points_hold_the_truth(repeats: int, seed: int) -> None:
    """Simulated studies of a baseline and a trial: log-normal effects of 3 % on parts, of 30 % on waiting."""
    truth = [0.08, 0.0, 0.0], [0.084, 0.012, 0.02]
    spread = np.array([0.03, 0.3, 0.05])

    def worked_out(base: np.ndarray, trial: np.ndarray) -> list[float]:
        logs = decompose(dict(enumerate(trial)), dict(enumerate(base)))  # type: ignore[arg-type]  # by number
        log = sum(logs.values())
        return [math.expm1(log) / log * -part for part in logs.values()]

    exact = worked_out(*map(np.array, truth))
    random, held = np.random.default_rng(seed), np.zeros(3)
    for _ in range(400):
        base, trial = (
            np.array(means) * np.exp(spread * random.standard_normal((repeats, 3)) - spread**2 / 2) for means in truth
        )
        found = worked_out(base.mean(0), trial.mean(0))
        left = (
            [worked_out(base.mean(0), np.delete(trial, run, 0).mean(0)) for run in range(repeats)],
            [worked_out(np.delete(base, run, 0).mean(0), trial.mean(0)) for run in range(repeats)],
        )
        for part in range(3):
            one = jackknife(found[part], [[run[part] for run in side] for side in left])
            held[part] += (one.low or -math.inf) <= exact[part] <= (one.high or math.inf)
    assert all(0.90 < share < 0.995 for share in held / 400)
    assert 0.92 < held.mean() / 400 < 0.985
