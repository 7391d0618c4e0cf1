"""From fitted parts to figures: hand-computed sizes, rounding, labels, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence_factory import IMAGES, MEASURED, UNKNOWN, make_evidence, make_point
from vitscale.errors import RequestError
from vitscale.prediction import fitting
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series, StepParts
from vitscale.prediction.fitting import fit
from vitscale.prediction.network.links import Network, declared_link
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction, predicted
from vitscale.trial.model_spec import ModelSpec, resolve

PARTS = StepParts(0.19, 0.125, 0.01, 0.0, 0.0, 0.0, 0.0)
ONE_HOST = (make_point(1, (0.2, 0.201), parts=PARTS), make_point(2, (0.202, 0.203)), make_point(4, (0.204, 0.205)))


def ask(
    gpus: int, *points: MeasuredPoint, network: Network = MEASURED, mode: str = "strong-micro", **how: object
) -> Prediction:
    evidence = make_evidence(points or ONE_HOST, network, mode=mode)  # type: ignore[arg-type]  # one of its modes
    return predict(fit(evidence), Question((gpus,), **how))[0]  # type: ignore[arg-type]  # fields of a question


def test_an_epoch_is_its_whole_steps_and_the_slots_share_of_the_last() -> None:
    # 50,000 images: 16 steps of 3,072, and 848 that are left: ceil(64 x 848 / 3,072) = 18 of each slot's 64.
    found = ask(48, nodes_of=8)
    assert found.steps_per_epoch == math.ceil(IMAGES / (48 * 64)) == 17
    assert found.epoch_seconds == found.step_seconds.times(16 + 18 / 64)
    assert found.images_per_second is not None
    assert found.images_per_second.value * found.epoch_seconds.value == pytest.approx(IMAGES)
    assert found.images == IMAGES


def test_images_a_second_are_those_of_a_whole_step() -> None:
    found = ask(16, nodes_of=8)
    assert found.images_per_second is not None
    assert found.images_per_second.value == pytest.approx(16 * 64 / found.step_seconds.value)
    assert found.images_per_second.ends[0] == pytest.approx(16 * 64 / found.step_seconds.ends[1])


def test_a_measured_point_is_met() -> None:
    found = ask(4)
    assert found.label == "interpolated"
    assert found.step_seconds.value == pytest.approx(0.2045, rel=0.01)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(782 / 196 * 0.2005 / 0.2045, rel=0.01)


def test_the_parts_add_up_to_the_step() -> None:
    found = ask(64, nodes_of=8)
    parts = (found.compute_seconds, found.wait_seconds, found.wire_seconds)
    assert sum(part.value for part in parts if part) == pytest.approx(found.step_seconds.value, rel=0.02)


def test_the_smallest_measured_count_has_speedup_one_by_definition() -> None:
    found = ask(1)
    assert found.speedup == found.efficiency == predicted(1.0, 1.0, 1.0, 1.0, 1.0)


def test_weak_scaling_keeps_the_images_of_a_rank() -> None:
    points = [
        make_weak(make_point(n, (0.2, 0.2), images=5000 * n, model=None, engine="unknown"), 0.1 * n) for n in (1, 2, 4)
    ]
    found = ask(32, *points, network=UNKNOWN, mode="weak", nodes_of=32)
    assert found.images == 160_000  # more than the dataset has: 3.2 times as many
    assert found.steps_per_epoch == math.ceil(160_000 / (32 * 64)) == 79
    assert found.efficiency is not None
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(32 * found.efficiency.value)


def make_weak(point: MeasuredPoint, fraction: float) -> MeasuredPoint:
    data = point.trial.data.model_copy(update={"fraction": fraction})
    return replace(point, trial=point.trial.model_copy(update={"data": data}))


def test_strong_global_keeps_the_global_batch_and_refuses_what_does_not_divide() -> None:
    points = [make_point(n, (0.2 / n,) * 2, micro_batch=64 // n) for n in (1, 2, 4)]
    found = ask(16, *points, mode="strong-global", nodes_of=8)
    assert (found.trial.train.micro_batch, found.trial.train.grad_accum, found.trial.global_batch) == (4, 1, 64)
    with pytest.raises(RequestError, match="does not divide over 24"):
        ask(24, *points, mode="strong-global", nodes_of=8)


# --- labels and what they rest on -----------------------------------------------------------------------------------


def test_one_host_says_nothing_of_the_network_between_hosts() -> None:
    blind, checked = ask(64, network=UNKNOWN, nodes_of=8), ask(64, network=MEASURED, nodes_of=8)
    assert blind.label == "prior-driven"
    assert blind.assumptions[0].part == "network between hosts"
    assert "vitscale check" in blind.assumptions[0].measurement
    assert checked.label == "extrapolated"
    assert [one.part for one in checked.assumptions] == ["further hosts"]

    def width(found: Prediction) -> float:
        return math.log(found.step_seconds.ends[1] / found.step_seconds.ends[0])

    assert width(blind) > 2 * width(checked)


def test_runs_that_crossed_hosts_tell_of_the_network_between_them() -> None:
    points = [make_point(n, (0.2, 0.2), per_node=1) for n in (1, 2)]
    assert ask(16, *points, network=UNKNOWN).label == "extrapolated"


def test_unlike_devices_stay_as_slow_as_the_slowest_of_them() -> None:
    """The old type takes twice as long; alone, the first of the mixture is new."""
    slow = make_point(4, (0.4, 0.4), devices=("new", "old", "new", "new"), rank_speeds=(1.0, 0.5, 1.0, 1.0))
    points = (make_point(1, (0.2, 0.2), devices=("new",)), slow)
    assert ask(8, *points).step_seconds.value == pytest.approx(0.4, rel=0.05)
    assert ask(1, *points).step_seconds.value == pytest.approx(0.2, rel=0.05)


def test_beyond_the_measured_counts_on_one_host_is_extrapolated() -> None:
    assert ask(8, network=UNKNOWN).label == "extrapolated"
    assert ask(3, network=UNKNOWN).label == "interpolated"


def test_a_single_rank_says_nothing_of_any_network() -> None:
    assert ask(4, ONE_HOST[0], network=UNKNOWN).label == "prior-driven"
    assert ask(1, ONE_HOST[0], network=UNKNOWN).label == "interpolated"


def test_hosts_of_eight_are_assumed_and_said_where_nobody_says_how_many() -> None:
    found = ask(16, network=MEASURED)
    assert (found.nodes, found.trial.world.ranks_per_node) == (2, 8)
    assert {one.part for one in found.assumptions} == {"ranks on a host", "further hosts"}
    assert ask(4).assumptions == ()
    (one_host,) = ask(8).assumptions
    assert (ask(8).nodes, one_host.taken) == (1, "8, more than were measured on one")
    assert [(ask(n).nodes, ask(n).trial.world.ranks_per_node) for n in (12, 20, 13)] == [(2, 8), (3, 8), (2, 8)]


def test_hosts_are_as_large_as_they_were_measured() -> None:
    points = [make_point(n, (0.2, 0.2), per_node=1) for n in (1, 2)]
    assert ask(16, *points).nodes == 16


def test_ranks_that_do_not_fill_hosts_leave_the_rest_to_the_last() -> None:
    world = ask(11, nodes_of=8).trial.world
    assert (world.size, world.nodes, world.ranks_per_node) == (11, 2, 8)


def test_more_ranks_make_no_step_shorter_for_where_they_lie() -> None:
    points = [make_point(n, (0.2, 0.2), per_node=4) for n in (1, 2, 4, 8)]
    steps = [ask(n, *points, network=MEASURED).step_seconds.value for n in range(8, 21)]
    assert all(after > 0.999 * before for before, after in pairwise(steps))


UNTOLD = [make_point(n, (0.2, 0.2), model=None, engine="unknown", devices=("V100",) * n) for n in (1, 4, 8)]


@pytest.mark.parametrize("across", [8, 16], ids=["one host", "two hosts"])
def test_a_declared_link_changes_nothing_while_what_is_sent_is_unknown(across: int) -> None:
    points = [*UNTOLD, make_point(16, (0.21, 0.21), model=None, engine="unknown", devices=("V100",) * 16)]
    points = [point for point in points if point.gpus <= across]
    links = (UNKNOWN.across, declared_link("1kbit/s"), declared_link("8x800Gb/s"))
    none, slow, fast = (ask(64, *points, network=replace(UNKNOWN, across=link), nodes_of=8) for link in links)
    assert none.step_seconds == slow.step_seconds == fast.step_seconds
    assert none.label == slow.label == fast.label
    (sent,) = (one for one in slow.assumptions if one.part == "what is sent")
    assert "the network (1kbit/s) changes nothing while what is sent is unknown" in sent.taken
    assert sent.measurement == "say --engine ddp and --parameters 110M, or --model"


def test_further_hosts_are_an_assumption_and_wider_where_their_gpus_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def widened(*names: str) -> tuple[float, str]:
        """The mean over fits of nine seeds: a fit's draws move an end by 1 %."""
        points = [make_point(n, (0.2, 0.2), devices=(names * n)[:n] if names else ()) for n in (4, 8)]
        within = ask(8, *points, nodes_of=8)
        assert "further hosts" not in {assumption.part for assumption in within.assumptions}
        widenings = []
        for seed in range(1, 10):
            monkeypatch.setattr(fitting, "SEED", seed)
            predicted = ask(32, *points, nodes_of=8)
            (hosts,) = (assumption for assumption in predicted.assumptions if assumption.part == "further hosts")
            widenings.append(predicted.step_seconds.ends[1] / predicted.step_seconds.value)
        return fmean(widenings), hosts.taken

    alike, untold, unlike = widened("V100"), widened(), widened("V100", "T4")
    assert alike[1] == "as those measured are (V100)"
    assert untold[1] == "as those measured are (GPU types not recorded), or slower"
    assert unlike[1] == "as those measured are (T4, V100), or slower"
    # One side of a normal logarithm of 0.35: its median for one host in ten, its 90th percentile for one in two.
    assert alike[0] < 1.1 < 0.95 * math.exp(0.35 * 0.674) < untold[0] < 0.95 * math.exp(0.35 * 1.645) < unlike[0]


def test_an_epoch_that_fills_no_batch_and_drops_the_last_has_no_rate() -> None:
    points = [make_point(n, (0.2, 0.2), drop_last=True) for n in (1, 2, 4)]
    found = ask(100_000, *points, nodes_of=8)
    assert (found.epoch_seconds, found.images_per_second, found.speedup, found.efficiency) == (None,) * 4
    reason = "50,000 images do not fill one batch of 6,400,000, and drop_last leaves them out"
    assert found.reasons["images_per_second"] == found.reasons["epoch_seconds"] == reason
    assert ask(512, *points, nodes_of=8).images_per_second is not None
    padded = ask(100_000, nodes_of=8)
    assert padded.images_per_second is not None
    assert padded.images_per_second.value == pytest.approx(50_000 / padded.step_seconds.value)


def test_what_would_narrow_it_most_is_what_leaves_the_most_open() -> None:
    one_run = [make_point(n, 0.2, devices=("V100",)) for n in (1, 2)]
    far, near = ask(64, *one_run, network=UNKNOWN, nodes_of=8), ask(2, *one_run, network=UNKNOWN)
    assert next(one.part for one in far.assumptions) == "network between hosts"
    assert [one.part for one in near.assumptions] == ["job-to-job variation"]
    steady = [make_point(n, 0.2, devices=("V100",)) for n in (8, 16)]
    wild = replace(MEASURED, across=replace(MEASURED.across, bandwidth_spread=0.01))
    assert next(one.part for one in ask(32, *steady, network=wild).assumptions) == "job-to-job variation"


def test_hosts_of_an_assumed_size_decide_an_answer_across_them() -> None:
    declared = replace(MEASURED, across=declared_link("100GbE"))
    assert ask(16, network=declared).label == "prior-driven"
    assert ask(16, network=declared, nodes_of=8).label == "extrapolated"
    spanning = [make_point(n, (0.2, 0.2)) for n in (8, 16)]
    assert ask(32, *spanning, network=declared).label == "extrapolated"


@pytest.mark.parametrize("gpus", [0, -4, 100_001])
def test_rank_counts_that_cannot_be_are_refused(gpus: int) -> None:
    with pytest.raises(RequestError, match="1 to 100,000"):
        ask(gpus)


def test_a_hundred_thousand_ranks_are_answered() -> None:
    found = ask(100_000, nodes_of=8)
    step = found.step_seconds
    assert all(math.isfinite(number) and number > 0 for number in (step.value, *step.ends, *step.future_ends))
    assert found.efficiency is not None
    assert found.efficiency.value < 0.05  # one step of 6.4 million images for 50,000


def test_unknown_images_leave_the_epoch_unavailable() -> None:
    found = ask(8, make_point(1, 0.2, images=None), make_point(2, 0.21, images=None))
    assert found.epoch_seconds is None
    assert "not recorded" in found.reasons["epoch_seconds"]
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(8 * 0.2 / found.step_seconds.value, rel=0.05)


# --- money, energy, memory -------------------------------------------------------------------------------------------


def test_cost_is_the_price_of_all_ranks_for_an_epoch() -> None:
    found = ask(8, price_per_gpu_hour=3.6)
    assert found.epoch_seconds is not None
    assert found.cost_per_epoch == found.epoch_seconds.times(3.6 * 8 / 3600)
    assert ask(8).cost_per_epoch is None
    assert "--price" in ask(8).reasons["cost_per_epoch"]


def test_energy_is_at_the_power_that_was_measured() -> None:
    """4 joules an image at 2 ranks x 64 images in 0.2 s: 1280 W a rank."""
    points = (make_point(1, 0.2), make_point(2, (0.2, 0.2), joules_per_image=4.0))
    found = ask(8, *points)
    assert found.joules_per_epoch is not None
    assert found.epoch_seconds is not None
    assert found.joules_per_epoch.value == pytest.approx(1280 * 8 * found.epoch_seconds.value)
    assert ask(8).joules_per_epoch is None


def test_memory_that_does_not_fit_has_a_chance_near_one() -> None:
    assert ask(8, memory_capacity_bytes=2 * 10**9).oom_chance == pytest.approx(1.0, abs=0.01)
    assert ask(8, memory_capacity_bytes=80 * 10**9).oom_chance == pytest.approx(0.0, abs=0.01)
    assert ask(8).oom_chance is None


# --- changes ----------------------------------------------------------------------------------------------------------


def test_another_micro_batch_scales_the_compute() -> None:
    found, same = ask(8, changes={"micro_batch": 128}), ask(8, changes={"micro_batch": 64})
    assert found.compute_seconds is not None
    assert found.compute_seconds.value == pytest.approx(0.19 * (0.05 + 0.95 * 2) + 0.01, rel=0.05)
    assert found.steps_per_epoch == math.ceil(IMAGES / (8 * 128))
    assert same == ask(8)  # it is what was measured


def test_another_model_scales_with_its_flops_and_says_so() -> None:
    larger = ask(8, changes={"model": resolve(ModelSpec(name="vit-l16"), 10)})
    assert larger.compute_seconds is not None
    assert larger.compute_seconds.value == pytest.approx(0.19 * 61.6 / 17.6, rel=0.15)  # GFLOPs of a ViT-L and a ViT-B
    assert [one.part for one in larger.assumptions][:1] == ["compute of another model"]
    assert larger.step_seconds.ends[1] / larger.step_seconds.ends[0] > 1.5


def test_another_engine_sends_what_it_sends() -> None:
    slow = Network(MEASURED.inside, MEASURED.inside.__class__(1e9, 3e-5, 0.05, 0.3, "check", "a check", hosts=2))
    zero1 = ask(16, network=slow, nodes_of=8, changes={"engine": "deepspeed", "zero_stage": 1})
    zero0 = ask(16, network=slow, nodes_of=8, changes={"engine": "deepspeed"})
    assert zero0.wire_seconds is not None
    assert zero1.wire_seconds is not None
    # Two hosts over 1 GB/s: each host's part of the sum crosses once, 2 (n-1)/n x 4 bytes of Psi.
    whole = 4 * 85_806_346
    assert zero0.wire_seconds.value == pytest.approx(whole / 1e9, rel=0.1)
    # ZeRO-1 under autocast sends bf16 gradients, half of that, and gathers fp32 weights around one ring of 16.
    assert zero1.wire_seconds.value == pytest.approx((0.5 + 15 / 16) * whole / 1e9, rel=0.1)
    assert zero0.label == zero1.label == "prior-driven"  # nobody ran either
    assert "an engine that was not measured" in [one.part for one in zero0.assumptions]


def test_an_engine_that_shards_updates_its_share_alone() -> None:
    """0.1 s of optimizer on one rank are an eighth of that on each of eight."""
    parts = StepParts(0.19, 0.125, 0.1, 0.0, 0.0, 0.0, 0.0)
    points = [make_point(n, (0.29, 0.291), parts=parts) for n in (1, 2)]
    whole, share = ask(8, *points), ask(8, *points, changes={"engine": "deepspeed", "zero_stage": 1})
    assert whole.compute_seconds is not None
    assert share.compute_seconds is not None
    assert whole.compute_seconds.value == pytest.approx(0.29, rel=0.03)
    assert share.compute_seconds.value == pytest.approx(0.19 + 0.1 / 8, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "horovod"}, "horovod"),
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"zero_stage": 2}, "zero_stage"),
        ({"model": ModelSpec(factory="my:model", num_classes=10)}, "model cannot be exchanged"),
    ],
)
def test_changes_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ask(8, changes=changes)


def test_a_series_that_was_measured_with_the_change_answers_alone() -> None:
    two = Evidence(
        (
            Series("ddp", "strong-micro", {}, ONE_HOST),
            Series("fsdp2", "strong-micro", {}, tuple(make_point(n, (0.3, 0.3), engine="fsdp2") for n in (1, 2))),
        ),
        MEASURED,
    )
    found = predict(fit(two), Question((4,), changes={"engine": "fsdp2"}))
    assert [one.series for one in found] == ["fsdp2"]
    assert "an engine that was not measured" not in [one.part for one in found[0].assumptions]
    assert {one.series for one in predict(fit(two), Question((4,)))} == {"ddp", "fsdp2"}


def test_nothing_to_predict_from_is_told() -> None:
    with pytest.raises(RequestError, match="no trial has a completed run"):
        predict(fit(Evidence((), UNKNOWN)), Question((2,)))
    alone = make_evidence([make_point(1, 0.2, engine="none")], name="plain")
    with pytest.raises(RequestError, match="engine 'none'"):
        predict(fit(alone), Question((2,)))
    with pytest.raises(RequestError, match="engine 'none'"):
        predict(fit(alone), Question((2,), series="plain"))
    with pytest.raises(RequestError, match="plain"):
        predict(fit(alone), Question((1,), series="plian"))


# --- properties -------------------------------------------------------------------------------------------------

FITTED = fit(make_evidence(ONE_HOST, UNKNOWN))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12_500), st.sampled_from([1, 2, 4, 8]))
def test_intervals_hold_each_other_and_their_figure(hosts: int, per_host: int) -> None:
    for one in predict(FITTED, Question((hosts * per_host,), nodes_of=per_host)):
        for figure in (one.step_seconds, one.epoch_seconds, one.images_per_second, one.speedup, one.efficiency):
            assert figure is not None
            assert (
                0
                < figure.future_ends[0]
                <= figure.ends[0]
                <= figure.value
                <= figure.ends[1]
                <= figure.future_ends[1]
                < math.inf
            )


NOISE = (0.006, -0.009, 0.004, 0.011, -0.007)
"""Of one run on 1, 2, 4, 8 and 16 ranks, in logarithms."""


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda n: 0.0, id="constant"),
        pytest.param(lambda n: 0.2 * (n - 1) / n, id="a ring over all ranks"),
        pytest.param(lambda n: 0.15 * (min(n, 8) - 1) / 8, id="inside hosts alone"),
        pytest.param(lambda n: 0.04 * math.log2(n), id="a logarithm"),
        pytest.param(lambda n: 0.05 * (min(n, 8) - 1) / 8 + (0.4 * (1 - 8 / n) if n > 8 else 0.0), id="hosts"),
    ],
)
def test_a_curve_that_stops_growing_lies_within_as_well_as_one_that_goes_on(more: Callable[[int], float]) -> None:
    """All that may lengthen a step is above nothing; low ends must reach a step that nothing lengthens further."""
    runs = [0.3 * (1 + more(n)) * math.exp(off) for n, off in zip((1, 2, 4, 8, 16), NOISE, strict=True)]
    points = [make_point(n, s, model=None, engine="unknown") for n, s in zip((1, 2, 4, 8, 16), runs, strict=True)]
    for found in predict(fit(make_evidence(points, UNKNOWN)), Question((32, 64, 128))):
        low, high = found.step_seconds.ends
        assert low < 0.3 * (1 + more(found.gpus)) < high


@settings(max_examples=8, deadline=None)
@given(st.floats(1.0, 20.0), st.floats(1.0, 10.0))
def test_the_unit_of_time_matters_only_where_steps_are_as_long_as_steps_are(more: float, less: float) -> None:
    """A step of 0.1 to 3 s tells how large a share transfers may be: the shorter it is, the more ranks add to it."""

    def at(scale: float) -> float:
        points = [make_point(n, s * scale, model=None, engine="unknown") for n, s in ((1, 0.6), (2, 0.66), (4, 0.7))]
        return ask(8, *points, network=UNKNOWN).step_seconds.value / scale

    assert at(5 * more) == pytest.approx(at(5.0), rel=0.01)
    assert at(0.16 / less) == pytest.approx(at(0.16), rel=0.01)
    assert at(0.16) > at(1.0) > at(5.0) > at(0.16) / 1.05
