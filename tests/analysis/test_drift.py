"""Trials that compute the same show the same loss: what is held against what, and what is said of a difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import failed_run, make_curve, make_rank, make_results, make_run, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.comparisons import compare_curves
from vitscale.analysis.learning.drift import TOLERANCES, between_runs, differences, largest_difference, losses
from vitscale.analysis.quality.study import drift, unknown_drift
from vitscale.analysis.trials import Drift, TrialResult
from vitscale.present.document import Finding
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

LOSSES = [2.3 / (1 + 0.02 * step) for step in range(30)]

Change = Callable[[int], float]
"""By what share a loss is off, by step."""


def constant(share: float) -> Change:
    """Equal before the first update, off by `share` after it."""
    return lambda step: share if step else 0.0


def growing(factor: float, first: float = 1e-7) -> Change:
    """As amplified rounding grows."""
    return lambda step: first * factor**step


EQUAL = constant(0.0)


def run_of(trial: Trial, change: Change = EQUAL, repeat: int = 0, **model: Any) -> Run:
    changed = [loss * (1 + change(step)) for step, loss in enumerate(LOSSES)]
    losses = [loss if math.isfinite(loss) else None for loss in changed]
    ranks = [
        make_rank(trial, rank, [0.1] * len(losses), warmup=3, losses=losses, model=model)
        for rank in range(trial.world.size)
    ]
    return make_run(trial, ranks, repeat)


def judge(*pairs: tuple[Trial, Sequence[Run]]) -> list[TrialResult]:
    """Each trial with its runs, held against the others."""
    curves = [(make_curve([trial]), [trial]) for trial, _ in pairs]
    runs = [run for _, runs_of_trial in pairs for run in runs_of_trial]
    return list(analyse(make_results(curves, runs)).trials.values())


def drift_verdicts(trials: Sequence[TrialResult]) -> list[Finding]:
    return [*drift(trials), *unknown_drift(trials)]


def statuses(*pairs: tuple[Trial, Change]) -> list[str]:
    return [result.drift.status for result in judge(*((trial, [run_of(trial, change)]) for trial, change in pairs))]


def drift_of(change: Change, *, precision: str = "fp32", **model: Any) -> Drift:
    """Of DDP on two ranks against the run without a wrapper at the same global batch."""
    plain = make_trial("none", micro_batch=16, precision=precision)
    ddp = make_trial("ddp", 2, precision=precision)
    return judge((plain, [run_of(plain)]), (ddp, [run_of(ddp, change, **model)]))[1].drift


# --- how far apart two runs are ------------------------------------------------------------------------------------


def test_differences_are_relative_to_the_reference_by_step() -> None:
    (first, second) = differences({0: 2.0, 1: 1.5, 2: 3.0}, {0: 2.0, 1: 1.0, 3: 1.0})
    assert (first, second) == ((0, 0.0), (1, 0.5))


def test_a_loss_that_has_fallen_to_nothing_is_held_against_a_hundredth_of_the_first() -> None:
    assert differences({0: 2.0, 1: 0.002}, {0: 2.0, 1: 0.001})[1][1] == pytest.approx(0.001 / 0.02)
    assert differences({0: 0.0, 1: 1.0}, {0: 0.0, 1: 0.0}) == ((0, 0.0), (1, math.inf))


def test_a_loss_that_is_finite_on_one_side_only_is_infinitely_far_and_ends_the_comparison() -> None:
    assert differences({0: 1.0, 1: None, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}) == ((0, 0.0), (1, math.inf))
    assert differences({0: 1.0, 1: 1.0, 2: None, 3: 1.0}, {0: 1.0, 1: 1.0, 2: None, 3: 2.0}) == ((0, 0.0), (1, 0.0))


def test_one_common_step_tells_nothing_for_nothing_was_updated_before_it() -> None:
    assert differences({0: 1.0, 1: 2.0}, {0: 1.0, 2: 2.0}) == ()
    assert differences({0: 1.0, 1: None}, {0: 1.0, 1: None}) == ()


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20), st.floats(-0.5, 0.5))
def test_a_scaled_loss_is_off_by_its_factor_everywhere_above_a_hundredth(losses: list[float], share: float) -> None:
    theirs = dict(enumerate(losses))
    found = differences({step: loss * (1 + share) for step, loss in theirs.items()}, theirs)
    assert [step for step, _ in found] == list(theirs)
    for step, difference in found:
        assert difference == pytest.approx(abs(share) * min(1.0, theirs[step] / (0.01 * losses[0])), rel=1e-6, abs=1e-9)


# --- what is said of it --------------------------------------------------------------------------------------------


def test_rounding_agrees_and_one_percent_drifts() -> None:
    agreeing, drifting = drift_of(constant(3e-7)), drift_of(constant(0.01))
    assert (agreeing.status, agreeing.tolerance) == ("agrees", 1e-5)
    assert agreeing.difference == pytest.approx(3e-7, rel=1e-3)
    assert drifting.status == "drifts"
    assert drifting.difference == pytest.approx(0.01)
    assert drifting.reference_name == "plain (no wrapper) on 1 rank"


@pytest.mark.parametrize(("difference", "status"), [(2.5e-5, "agrees"), (3e-4, "drifts")])
def test_compiled_blocks_put_sums_in_another_order_and_what_is_not_compiled_is_the_reference(
    difference: float, status: str
) -> None:
    """Swin V2 in fp32 on a CPU, compiled and not, was 2.5e-5 apart in 20 steps."""
    eager, compiled = make_trial("none"), make_trial("none", compile=True)
    runs = [(eager, [run_of(eager)]), (compiled, [run_of(compiled, constant(difference))])]
    for pairs in (runs, runs[::-1]):
        by_trial = {result.trial_id: result.drift for result in judge(*pairs)}
        assert by_trial[eager.identity()].status == "reference"
        assert (by_trial[compiled.identity()].status, by_trial[compiled.identity()].tolerance) == (status, 1e-4)


def test_what_clipping_by_default_was_measured_to_do_drifts() -> None:
    """A 4-block ViT under AdamW at 5e-4, clipped at 1.0 and not: Adam hides a scale at first, and then no more."""
    measured = [0.0, 2e-6, 7e-6, 3e-3, 8e-3, 1e-2, 4e-3, 6e-3, 9e-3, 2e-2]
    found = drift_of(lambda step: measured[step] if step < len(measured) else 1e-2)
    assert (found.status, found.step) == ("drifts", 9)


def test_amplified_rounding_is_told_from_drift() -> None:
    found = drift_of(growing(3.0))
    assert found.status == "unknown"
    assert "equal over the first 5 steps, then apart by up to 1.2e+02" in found.reason  # 1e-7 x 3^5 is beyond 1e-5


def test_others_that_agree_show_that_rounding_is_not_amplified() -> None:
    """A difference that comes late is drift where two trials agree far more closely."""
    plain = make_trial("none", micro_batch=16)
    late: Change = lambda step: 0.002 if step > 10 else 0.0  # noqa: E731 - one of several changes
    others = [(make_trial("ddp", 2), constant(2e-7)), (make_trial("none", micro_batch=8, grad_accum=2), constant(3e-7))]
    odd = (make_trial("deepspeed", 2), late)
    assert statuses((plain, EQUAL), odd) == ["reference", "unknown"]
    assert statuses((plain, EQUAL), *others, odd) == ["reference", "agrees", "agrees", "drifts"]


def test_only_the_first_twenty_steps_count() -> None:
    assert drift_of(lambda step: 0.5 if step >= 20 else 0.0).status == "agrees"
    assert drift_of(lambda step: 0.5 if step >= 19 else 0.0).status == "unknown"


def test_a_loss_that_is_not_finite_drifts_at_once_or_is_unknown_late() -> None:
    found = drift_of(lambda step: math.nan if step == 1 else 0.0)
    assert (found.status, found.difference, found.step) == ("drifts", math.inf, 1)
    late = drift_of(lambda step: math.nan if step == 9 else 0.0)
    assert late.status == "unknown"
    assert "apart by up to a loss that is not finite" in late.reason


@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_sixteen_bits_round_more(precision: str) -> None:
    tolerance = TOLERANCES[precision]
    assert drift_of(constant(0.9 * tolerance), precision=precision).status == "agrees"
    assert drift_of(constant(1.1 * tolerance), precision=precision).status == "drifts"


def test_gradients_that_travel_in_sixteen_bits_have_the_tolerance_of_sixteen_bits() -> None:
    assert drift_of(constant(1e-3)).status == "drifts"
    rounded = drift_of(constant(1e-3), gradient_dtype="bfloat16")
    assert (rounded.status, rounded.tolerance) == ("agrees", TOLERANCES["bf16"])


def test_other_micro_batches_of_the_reference_set_the_tolerance_of_sixteen_bits() -> None:
    """Two of them or more, and in 16 bits alone: in fp32 a reference that differs from itself would hide a drift."""

    def ddp_beside_splits(precision: str) -> Drift:
        plain = make_trial("none", micro_batch=32, precision=precision)
        splits = [make_trial("none", micro_batch=32 // n, grad_accum=n, precision=precision) for n in (2, 4)]
        ddp = make_trial("ddp", 2, micro_batch=16, precision=precision)
        changes = [(plain, EQUAL), (splits[0], constant(1e-3)), (splits[1], constant(0.0045))]
        return judge(*((t, [run_of(t, c)]) for t, c in (*changes, (ddp, constant(0.008)))))[3].drift

    found = ddp_beside_splits("bf16")
    assert found.status == "agrees"
    assert found.tolerance == pytest.approx(0.009)
    assert ddp_beside_splits("fp32").status == "drifts"


def test_a_reference_that_differs_from_itself_is_no_measure() -> None:
    plain, ddp = make_trial("none", micro_batch=16), make_trial("ddp", 2)
    for own, status, reason in ((0.02, "unknown", "runs of plain (no wrapper) on 1 rank differ by 2.0%"),
                                (0.004, "agrees", "")):  # fmt: skip
        repeats = [run_of(plain), run_of(plain, constant(own), 1)]
        found = judge((plain, repeats), (ddp, [run_of(ddp, constant(0.005))]))[1].drift
        assert found.status == status
        assert reason in found.reason


def test_the_worst_repeat_counts() -> None:
    plain, ddp = make_trial("none", micro_batch=16), make_trial("ddp", 2)
    runs = [run_of(ddp, constant(1e-7)), run_of(ddp, constant(0.01), 1)]
    assert judge((plain, [run_of(plain)]), (ddp, runs))[1].drift.status == "drifts"


def test_repeats_with_seeds_of_their_own_are_held_repeat_against_repeat() -> None:
    plain = make_trial("none", micro_batch=16, target_accuracy=0.9)
    ddp = make_trial("ddp", 2, target_accuracy=0.9)
    seeds = [EQUAL, constant(0.1)]

    def both(order: list[int]) -> str:
        ours = [run_of(ddp, seeds[seed], repeat) for repeat, seed in enumerate(order)]
        return judge((plain, [run_of(plain, c, r) for r, c in enumerate(seeds)]), (ddp, ours))[1].drift.status

    assert (both([0, 1]), both([1, 0])) == ("agrees", "drifts")


def test_a_models_own_chance_is_not_the_engines() -> None:
    def foreign(engine: str, gpus: int, **train: Any) -> Trial:
        trial = make_trial(engine, gpus, **train)
        return trial.model_copy(update={"model": trial.model.model_copy(update={"name": None, "factory": "m:build"})})

    plain, ddp, same = foreign("none", 1, micro_batch=16), foreign("ddp", 2), foreign("ddp", 1, micro_batch=16)
    for trial, where in ((ddp, "in another split"), (same, "under another engine")):
        _, found = judge((plain, [run_of(plain)]), (trial, [run_of(trial, constant(0.05))]))
        assert found.drift.status == "unknown"
        assert where in found.drift.reason
    assert statuses((plain, EQUAL), (ddp, constant(1e-7))) == ["reference", "agrees"]


def test_unequal_shares_are_held_to_the_same_losses_and_another_split() -> None:
    """Their steps have the images of equal shares: a loss that leaves them is drift, but for a model's own chance."""
    plain, unequal = make_trial("none", micro_batch=16), make_trial("ddp", 2, micro_batches=(13, 3))
    assert statuses((plain, EQUAL), (unequal, constant(1e-3))) == ["reference", "drifts"]


def test_fp16_tells_nothing() -> None:
    assert "loss scaling" in drift_of(EQUAL, precision="fp16").reason


# --- what is held against what -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"zero_stage": 3, "offload": "parameters", "bucket_mib": 1},
        {"activation_checkpointing": True, "compile": True},
        {"epochs": 9},
        {"micro_batches": (13, 3)},
        {"learning_rate": 0.001 * 256 / 16, "learning_rate_scaling": "linear"},
    ],
)
def test_what_only_distributes_or_comes_to_the_same_is_held_against_the_others(other: dict[str, Any]) -> None:
    pair = make_trial("none", micro_batch=16), make_trial("deepspeed", 2, **other)
    assert statuses(*((trial, EQUAL) for trial in pair)) == ["reference", "agrees"]


@pytest.mark.parametrize(
    "other",
    [
        {"learning_rate": 0.002}, {"optimizer": "sgd"}, {"seed": 1}, {"gradient_clipping": 1.0}, {"precision": "bf16"},
        {"weight_decay": 0.0}, {"micro_batch": 4}, {"fraction": 0.5}, {"model": "vit-s16"},
        {"learning_rate_scaling": "linear"}, {"learning_rate_warmup_steps": 5}, {"drop_last": True},
        {"deepspeed_config": {"scheduler": {"type": "WarmupLR"}}},
    ],
)  # fmt: skip
def test_what_trains_otherwise_is_held_against_nothing(other: dict[str, Any]) -> None:
    found = judge(
        *((t, [run_of(t)]) for t in (make_trial("none", micro_batch=16), make_trial("deepspeed", 2, **other)))
    )
    assert {result.drift.reason for result in found} == {"no other trial of the study computes the same"}


def test_weights_in_sixteen_bits_are_held_apart_from_those_with_fp32_beside_them() -> None:
    engines = ("none", "ddp", "fsdp2", "deepspeed", "accelerate")
    trials = [make_trial(engine, precision="bf16-params") for engine in engines]
    trials[-1] = make_trial("accelerate", precision="bf16-params", accelerate_backend="deepspeed")
    trials.append(make_trial("fsdp2", precision="bf16-params", master_weights=True))
    references = [result.drift.reference for result in judge(*((trial, [run_of(trial)]) for trial in trials))]
    assert references[:3] == [trials[0].identity()] * 3
    assert references[3:] == [references[3]] * 3
    assert references[3] in {trial.identity() for trial in trials[3:]}


def test_without_a_plain_run_the_reference_is_what_most_agree_with_and_first_ddp() -> None:
    ddp, fsdp2, deepspeed = (make_trial(engine, 2) for engine in ("ddp", "fsdp2", "deepspeed"))
    odd, even = constant(0.01), EQUAL
    assert statuses((deepspeed, even), (fsdp2, even), (ddp, even)) == ["agrees", "agrees", "reference"]
    assert statuses((ddp, even), (deepspeed, odd)) == ["reference", "drifts"]
    assert statuses((ddp, odd), (fsdp2, even), (deepspeed, even))[0] == "drifts"


def test_trials_without_a_completed_run_are_unknown_and_held_against_nothing() -> None:
    ddp, deepspeed = make_trial("ddp"), make_trial("deepspeed")
    found = judge((ddp, [run_of(ddp)]), (deepspeed, [failed_run(deepspeed, "oom", "out of memory")]))
    assert [result.drift.reason for result in found] == [
        "no other trial of the study computes the same",
        "no run has completed",
    ]


# --- what a drift leads to -----------------------------------------------------------------------------------------


def drifting_study(drifting: str) -> Analysis:
    """DDP and DeepSpeed on 1 and 2 ranks and the plain run; one of them trains something else."""
    curves, runs = [], []
    for engine in ("none", "ddp", "deepspeed"):
        trials = [make_trial(engine, gpus) for gpus in ((1,) if engine == "none" else (1, 2))]
        curves.append((make_curve(trials), trials))
        for trial in trials:
            off = 1.01 if f"{engine}-{trial.world.size}" == drifting else 1.0
            losses = [loss * (off if step else 1.0) for step, loss in enumerate(LOSSES * 13)]
            runs += [steady_run(trial, 0.1, repeat, losses=losses) for repeat in range(3)]
    return analyse(make_results(curves, runs))


def test_a_trial_that_drifts_has_no_speedup_and_is_in_no_comparison() -> None:
    analysis = drifting_study("deepspeed-2")
    curves, results = analysis.curves, analysis.trials
    ddp, deepspeed = curves[1].points[1], curves[2].points[1]
    assert results[deepspeed.trial_id].epoch_costs
    assert (deepspeed.speedup, deepspeed.efficiency, deepspeed.efficiency_over_plain) == (None, None, None)
    assert ddp.speedup is not None
    compared = {one.second_trial for one in compare_curves(curves, results, False)}
    assert deepspeed.trial_id not in compared
    assert curves[2].points[0].trial_id in compared


def test_a_trial_that_drifts_is_nobodys_baseline() -> None:
    curves = drifting_study("deepspeed-1").curves
    assert curves[2].baseline is not None
    assert curves[2].baseline.gpus == 2
    assert curves[1].baseline is not None
    assert curves[1].baseline.gpus == 1


def test_the_verdict_names_the_engine_the_difference_and_the_tolerance() -> None:
    results = drifting_study("deepspeed-2").trials
    (found,) = drift_verdicts(list(results.values()))
    assert (found.kind, found.severity) == ("drift", "warning")
    assert "deepspeed ZeRO-0 on 2 ranks: its loss differs by 1 % from that of ddp on 2 ranks at step" in found.message
    assert "(rounding: up to 1e-05)" in found.message
    assert [results[trial].trial.train.engine for trial in found.about.trials] == ["deepspeed"]
    assert list(drift_verdicts(list(drifting_study("nobody").trials.values()))) == []


def test_what_cannot_be_told_is_a_note_and_trials_on_their_own_are_none() -> None:
    plain, ddp, alone = make_trial("none", micro_batch=16), make_trial("ddp", 2), make_trial("ddp", 4)
    found = judge((plain, [run_of(plain)]), (ddp, [run_of(ddp, growing(3.0))]), (alone, [run_of(alone)]))
    (note,) = drift_verdicts(found)
    assert (note.kind, note.severity, note.about.trials) == ("drift-unknown", "note", (ddp.identity(),))
    unjudged = [dataclasses.replace(result, drift=Drift("unknown")) for result in found]
    assert list(drift_verdicts(unjudged)) == []


def test_a_cause_that_several_trials_share_is_said_once_with_the_largest_difference() -> None:
    less, more = drift_of(growing(2.0)), drift_of(growing(3.0))
    assert less.difference is not None
    assert more.difference is not None
    assert (less.status, more.status, less.difference < more.difference) == ("unknown", "unknown", True)
    other = dataclasses.replace(less, difference=None, reason="it has no two steps in common with ddp")
    results = drifting_study("nobody").trials.values()
    unsure = [dataclasses.replace(result, drift=own) for result, own in zip(results, (other, less, more), strict=False)]
    assert len(unsure) == 3
    (note,) = drift_verdicts(unsure)
    assert note.message == f"equality unknown of 3 trials: {more.reason}; {other.reason}"


@given(
    st.lists(st.lists(st.floats(-1e-3, 1e-3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 2**32)
)
def test_all_runs_at_once_differ_as_each_by_itself_does(changes: list[list[float]], seed: int) -> None:
    """To the digit; the reference has other losses than each of them."""
    alone, several = make_trial("none"), make_trial("ddp", 2)
    reference, member = judge(
        (alone, [run_of(alone, lambda step: (seed >> step % 32 & 1) * 1e-5)]),
        (several, [run_of(several, lambda step, own=own: own[step % 5], k) for k, own in enumerate(changes)]),  # type: ignore[misc]  # of a closure
    )
    by_run = [between_runs(run, reference) for run in losses(member)]
    worst = max((known for known in by_run if known is not None), key=lambda known: known.worst[1])
    assert largest_difference(member, reference) == worst
