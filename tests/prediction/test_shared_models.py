"""Ranks that share a model: how long their steps take and what they hold, by hand and against a known truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from operator import mul
from typing import Any

import numpy as np
import pytest

from evidence_factory import MEASURED, make_evidence, make_point, make_trial
from vitscale.analysis.time.breakdown import Breakdown, RankParts
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import MeasuredPoint, _parts
from vitscale.prediction.fitting import fit
from vitscale.prediction.memory.forecast import forecast, forecast_bytes, peak_bytes_of_many, unavailable
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.shares import Share, compute_share, filling, shares, slowest_ranks
from vitscale.prediction.step.messages import messages
from vitscale.prediction.step.model import StepModel, Worlds
from vitscale.prediction.variants import variant
from vitscale.prediction.workloads import evaluate_all
from vitscale.store.records import PARTS
from vitscale.trial.model_cost import forward_flops, parameter_shapes
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec, RankLayout

HUGE = ModelSpec(name="vit-h14", image_size=224)
SHARED = ModelSpec(name="swinv2-b", image_size=256)
"""Of 4 heads in its first stage."""
SEGMENTING = ModelSpec(task="segmentation", name="vit-b16", image_size=512)
SPLITS = [
    ParallelSpec(tensor=tensor, sequence=sequence, pipeline=pipeline)
    for tensor, sequence, pipeline in product((1, 2, 4), repeat=3)
]


def worlds(ranks: int, per_node: int, micro_batch: int = 64, grad_accum: int = 1) -> Worlds:
    return Worlds(*(np.array([float(n)]) for n in (ranks, per_node, micro_batch, grad_accum, 1)))


def model_of(parallel: ParallelSpec, **fields: Any) -> StepModel:
    content: dict[str, Any] = {
        "messages": (), "norms": (), "backend": "nccl", "shards_optimizer": False, "backward_share": 2 / 3,
        "reference_micro_batch": 64, "network": MEASURED, "loading": None, "parallel": parallel,
    }  # fmt: skip
    return StepModel(**content | fields)


def nothing_uncertain() -> dict[str, Any]:
    """Draws: a micro-step of 1 s, links as they were checked, nothing else."""
    neutral = ("compute", "alone", "bandwidth inside", "latency inside", "bandwidth across", "latency across",
               "overlap", "tree advantage", "either way")  # fmt: skip
    fitted = fit(make_evidence([make_point(1, 1.0)], MEASURED)).series["ddp"]
    return {name: np.array([[0.0 if name in neutral else -30.0]]) for name in fitted.draws}


# --- where groups lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", SPLITS, ids=str)
@pytest.mark.parametrize(("ranks", "per_node"), [(64, 8), (64, 4), (128, 16), (64, 64)])
def test_groups_lie_on_hosts_as_the_layout_has_them(parallel: ParallelSpec, ranks: int, per_node: int) -> None:
    """Of each group's ranks the most that share a host, and how many groups of a host go beyond it."""
    layout = RankLayout.of(ranks, parallel)
    axes: dict[Any, tuple[Any, ...]] = {
        "tensor": ("tensor",), "sequence": ("sequence",), "replicas": ("data", "sequence"), "pipeline": ("pipeline",),
        "all": ("pipeline", "data", "sequence", "tensor"),
    }  # fmt: skip
    for name, along in axes.items():
        groups = layout.groups(*along)
        first = [sum(rank < per_node for rank in group) for group in groups]
        size, local, beyond = model_of(parallel)._group(worlds(ranks, per_node), name)
        assert (size[0], local[0]) == (len(groups[0]), max(first)), name
        leaving = sum(0 < own < len(group) for own, group in zip(first, groups, strict=True))
        assert beyond[0] == max(1, leaving), name


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_stages_that_send_nothing_stand_still_for_the_share_that_the_formula_has(schedule: Any, each: int) -> None:
    parallel = ParallelSpec(pipeline=4, schedule=schedule)
    times = model_of(parallel).times(nothing_uncertain(), worlds(8, 8, grad_accum=8))
    assert times.bubble[0, 0] == pytest.approx(3 / each)
    assert times.bubble[0, 0] / times.total[0, 0] == pytest.approx(parallel.bubble_share(8), rel=1e-6)


def test_ranks_wait_for_what_the_others_compute_while_the_pipeline_fills() -> None:
    """Heads of segmentation that outweigh their blocks are on the last of two ranks, which waits for the other's share
    once; blocks of the same size on four, for three of their own, and for half of it with two stages each."""
    trial = make_trial(8, model=SEGMENTING, engine="fsdp2", grad_accum=4)
    shapes = parameter_shapes(trial.model)
    assert shapes is not None
    head = sum(module.macs for module in shapes.blocks[-1].modules) * 2 / (forward_flops(trial.model) or 1)
    staged = trial.model_copy(update={"parallel": ParallelSpec(pipeline=2)})
    assert compute_share(staged) == pytest.approx(head)
    assert filling(staged) == pytest.approx((1 - head) / head)
    times = replace(model_of(staged.parallel), filling=filling(staged)).times(nothing_uncertain(), worlds(8, 8))
    assert times.bubble[0, 0] == pytest.approx((1 - head) / head)
    for parallel, of_stages in (
        (ParallelSpec(pipeline=4), 3.0), (ParallelSpec(pipeline=4, schedule="interleaved"), 1.5)
    ):  # fmt: skip
        alike = make_trial(8, model=HUGE, engine="fsdp2", parallel=parallel)
        assert filling(alike) == pytest.approx(of_stages, rel=0.01)
    unknown = trial.model_copy(update={"model": trial.model.model_copy(update={"name": None, "factory": "mine:build"})})
    assert filling(unknown.model_copy(update={"parallel": ParallelSpec(pipeline=4)})) == 3.0


def test_the_step_of_unlike_stages_is_that_of_the_rank_that_computes_most() -> None:
    """Of two hosts with four ranks each the second has the heads; the others stand in the bubble for longer."""
    trial = make_trial(8, model=SEGMENTING, engine="ddp", grad_accum=4, parallel=ParallelSpec(pipeline=2))
    assert slowest_ranks(trial) == [4, 5, 6, 7]
    assert slowest_ranks(trial.model_copy(update={"parallel": ParallelSpec(tensor=2)})) == list(range(8))
    ranks = [
        RankParts(rank, 10.0, dict.fromkeys(PARTS, 0.0) | {"bubble": 3.0 if rank > 3 else 6.0, "backward": 2.0}, 0.0)
        for rank in range(8)
    ]
    for order in (ranks, ranks[::-1]):
        parts = _parts(Breakdown(tuple(order), 1, {}, None, None), trial)
        assert parts is not None
        assert parts.compute == pytest.approx(7.0)
    assert _parts(Breakdown(tuple(ranks[:4]), 1, {}, None, None), trial) is None  # the second host left no profile


def test_a_rank_multiplies_its_share() -> None:
    """ViT-H of 32 equal blocks, and an embedding and a head that are next to nothing."""
    trial = make_trial(8, model=HUGE, engine="fsdp2", grad_accum=8)
    for parallel, share in (
        (NO_SPLIT, 1.0), (ParallelSpec(tensor=4), 1 / 4), (ParallelSpec(sequence=2), 1 / 2),
        (ParallelSpec(pipeline=8), 1 / 8), (ParallelSpec(tensor=2, sequence=2, pipeline=2), 1 / 8),
    ):  # fmt: skip
        assert compute_share(trial.model_copy(update={"parallel": parallel})) == pytest.approx(share, rel=0.02)


def test_sequence_ranks_of_a_swin_have_whole_rows_of_its_last_map() -> None:
    """swinv2-b at 224 pixels: 7 x 7 of its last tokens, of which the first of four ranks has two rows."""
    model = SHARED.model_copy(update={"image_size": 224})
    assert compute_share(make_trial(8, model=model, parallel=ParallelSpec(sequence=4))) == pytest.approx(2 / 7)


def test_heads_of_segmentation_are_computed_by_images_of_sequence_ranks_and_by_each_tensor_rank() -> None:
    """Of three images one of two sequence ranks labels two, and of one all."""
    trial = make_trial(8, model=SEGMENTING, engine="fsdp2", micro_batch=3)
    shapes = parameter_shapes(trial.model)
    assert shapes is not None
    head = sum(module.macs for module in shapes.blocks[-1].modules) * 2 / (forward_flops(trial.model) or 1)
    embedding = shapes.blocks[0].modules[1].macs * 2 / (forward_flops(trial.model) or 1)
    assert head > 0.5
    for parallel, images, share in (
        (ParallelSpec(sequence=2), 4, 1 / 2), (ParallelSpec(sequence=2), 3, (1 - head) / 2 + head * 2 / 3),
        (ParallelSpec(sequence=4), 1, (1 - head) / 4 + head),
        (ParallelSpec(tensor=4), 3, (1 - head - embedding) / 4 + head + embedding),
    ):  # fmt: skip
        train = trial.train.model_copy(update={"micro_batch": images})
        asked = trial.model_copy(update={"parallel": parallel, "train": train})
        assert compute_share(asked) == pytest.approx(share, rel=1e-6)


def test_tensor_ranks_of_a_swin_all_have_its_patches_its_mergings_and_what_its_biases_are_made_of() -> None:
    """swinv2-b at 256 pixels: 64 x 64 patches, whose number halves along each side as their width of 128 doubles; 15 x
    15 distances in a window, in 24 blocks."""
    trial = make_trial(8, model=SHARED, engine="fsdp2", parallel=ParallelSpec(tensor=4))
    whole = 64**2 * 48 * 128 + 3 * (32**2 * 512 * 256) + 24 * 15**2 * 2 * 512
    macs = (forward_flops(trial.model) or 0) / 2
    assert compute_share(trial) == pytest.approx((whole + (macs - whole) / 4) / macs, rel=1e-6)


def test_autocasts_norms_give_gradients_of_16_bits_on_a_processor_and_of_32_on_a_gpu() -> None:
    """Of swinv2-b's 24 blocks of 2 sums, each of 2^19 elements an image halved from stage to stage; and the gradient of
    512 numbers of each of 15 x 15 distances."""
    of_activations = 2 * 64 * sum(depth * 2**19 // 2**n for n, depth in enumerate((2, 2, 18, 2)))
    for device, backward in (("cpu", 2), ("cuda", 4)):
        trial = make_trial(2, model=SHARED, engine="fsdp2", device=device, parallel=ParallelSpec(tensor=2))
        sent = [m for m in messages(trial) or () if m.group == "tensor" and m.operation == "all_reduce"]
        of_phase = {
            phase: sum(m.tensor_bytes * m.calls for m in sent if m.phase == phase and m.tensor_bytes > 2**20 / 3)
            for phase in ("forward", "backward")
        }
        of_biases = [m for m in sent if m.images is None]
        assert of_phase == {"forward": 2 * of_activations, "backward": backward * of_activations}
        assert sum(m.tensor_bytes * m.calls for m in of_biases) == 24 * 15**2 * 512 * 2


def test_activations_are_all_reduced_over_the_links_of_a_tensor_group() -> None:
    """ViT-B, 64 images of 197 tokens: 4 all-reduces of 64 x 197 x 768 x 2 bytes in forward of 12 blocks under autocast
    and of 4 bytes in backward: two ranks of a host at 100 GB/s, 2 (N-1)/N = 1; and two hops of 10 us each, 49 times,
    with the class token's gradient."""
    trial = make_trial(2, engine="fsdp2", parallel=ParallelSpec(tensor=2))
    sent = tuple(one for one in messages(trial) or () if one.group == "tensor" and one.operation == "all_reduce")
    times = model_of(trial.parallel, messages=sent, backend="gloo").times(nothing_uncertain(), worlds(2, 2))
    bytes_alone, hops = 12 * 2 * (64 * 197 * 768) * (2 + 4) / 100e9, 49 * 2 * 1e-5
    assert times.wire[0, 0] == pytest.approx(bytes_alone + hops, rel=0.001)
    half = model_of(trial.parallel, messages=sent, backend="gloo").times(nothing_uncertain(), worlds(2, 2, 32))
    assert half.wire[0, 0] == pytest.approx(bytes_alone / 2 + hops, rel=0.001)


# --- from measurements ------------------------------------------------------------------------------------------------


def measured(parallel: ParallelSpec, counts: tuple[int, ...] = (8, 16), **train: Any) -> list[MeasuredPoint]:
    """Steps as the model itself has them, of a micro-step of 0.4 s on a rank."""
    how: dict[str, Any] = {"engine": "fsdp2", "parallel": parallel} | train
    points = []
    for gpus in counts:
        trial = make_trial(gpus, **how)
        model = model_of(parallel, messages=messages(trial), shards_optimizer=True)
        draws = nothing_uncertain() | {"compute": np.array([[np.log(0.4)]])}
        accum = trial.train.grad_accum
        step = float(model.times(draws, worlds(gpus, min(8, gpus), grad_accum=accum)).total[0, 0])
        points.append(make_point(gpus, (step, step * 1.001, step * 0.999), **how))
    return points


@pytest.mark.parametrize(
    ("parallel", "accum"),
    [(ParallelSpec(tensor=2), 1), (ParallelSpec(sequence=4), 1), (ParallelSpec(pipeline=2), 4)],
    ids=["tensor", "sequence", "pipeline"],
)
def test_larger_worlds_with_the_same_split_are_predicted(parallel: ParallelSpec, accum: int) -> None:
    """Measured on one host and two, asked for four and eight."""
    truth = measured(parallel, (8, 16, 32, 64), grad_accum=accum)
    fitted = fit(make_evidence(truth[:2], MEASURED))
    for found, point in zip(predict(fitted, Question((32, 64))), truth[2:], strict=True):
        assert found.step_seconds.value == pytest.approx(point.step_seconds[0], rel=0.03)
        assert found.steps_per_epoch == point.steps_per_epoch
        assert found.bubble_seconds is not None
        assert (found.bubble_seconds.value > 0) is (parallel.pipeline > 1)


def test_ranks_that_no_model_is_left_for_are_refused() -> None:
    fitted = fit(make_evidence(measured(ParallelSpec(tensor=4)), MEASURED))
    with pytest.raises(RequestError, match=r"30 ranks are not a multiple of the 4 that share a model.*Valid: 28"):
        predict(fitted, Question((30,)))


def test_a_split_that_nobody_measured_computes_its_share_and_says_so() -> None:
    """From two ranks with a model each: two that share one, whose matrices take half as long, and send activations."""
    fitted = fit(make_evidence(measured(NO_SPLIT, (1, 2, 8)), MEASURED))
    asked = variant(fitted.series["ddp"], {"parallel": ParallelSpec(tensor=2)})
    assert asked.model.parallel == ParallelSpec(tensor=2)
    assert any(one.part == "compute of ranks that share a model" for one in asked.assumptions)
    base = Candidate(8, 8, EngineVariant("fsdp2"), 64, 1)
    found = evaluate_all(fitted, "ddp", [base, replace(base, parallel=ParallelSpec(tensor=2))])
    whole, half = found.step.value
    sent = sum(one.tensor_bytes * one.calls for one in messages(asked.trial) or () if one.group == "tensor")
    assert half == pytest.approx(whole / 2 + sent / 100e9, rel=0.1)
    # Against one rank alone: of two ranks' step half the images.
    assert found.speed.value[1] == pytest.approx(0.4 / (2 * half), rel=0.05)
    assert found.labels[1] == "prior-driven"


def test_stages_are_as_fast_as_their_bubble_leaves_and_the_rank_alone_has_none() -> None:
    """Four micro-batches through two stages: a fifth of each rank's time goes."""
    fitted = fit(make_evidence(measured(NO_SPLIT, (1, 2, 8)), MEASURED))
    staged = Candidate(2, 8, EngineVariant("fsdp2"), 64, 4, parallel=ParallelSpec(pipeline=2))
    found = evaluate_all(fitted, "ddp", [staged])
    assert variant(fitted.series["ddp"], {"parallel": staged.parallel}).model.filling == pytest.approx(1.0, rel=0.05)
    assert found.speed.value[0] == pytest.approx(0.8, rel=0.05)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_rank_holds_its_part_of_weights_and_activations() -> None:
    """ViT-H: 632 M parameters. Of its blocks a tensor group's rank has 1/8 but for norms and second biases."""
    whole, part = (
        forecast(make_trial(8, model=HUGE, engine="fsdp2", precision="fp32", parallel=parallel))
        for parallel in (NO_SPLIT, ParallelSpec(tensor=8))
    )
    assert whole is not None
    assert part is not None
    assert part.parts["weights"] == pytest.approx(whole.parts["weights"], rel=0.02)  # both have an eighth
    # Of 8h + 2m a token the inputs and outputs of norms, 4h, stay whole: with m = 4h (4 + 12/8) / 16.
    assert part.parts["activations"] == pytest.approx(whole.parts["activations"] * 5.5 / 16, rel=0.02)


def test_stages_hold_activations_of_as_many_micro_batches_as_are_under_way() -> None:
    """Of four stages the first holds four micro-batches' under 1F1B, and all eight under GPipe."""
    trial = make_trial(4, model=HUGE, engine="ddp", precision="fp32", grad_accum=8, parallel=ParallelSpec(pipeline=4))
    assert [share.in_flight(8) for share in shares(trial)] == [4, 3, 2, 1]
    all_at_once = trial.model_copy(update={"parallel": ParallelSpec(pipeline=4, schedule="gpipe")})
    assert [share.in_flight(8) for share in shares(all_at_once)] == [8] * 4
    by_turns, at_once = forecast(trial), forecast(all_at_once)
    assert by_turns is not None
    assert at_once is not None
    activations = [sum(v for k, v in one.parts.items() if "activations" in k) for one in (by_turns, at_once)]
    assert activations[1] == pytest.approx(2 * activations[0], rel=0.05)


@pytest.mark.parametrize(
    ("engine", "parallel", "accum", "model"),
    [
        ("fsdp2", ParallelSpec(tensor=2), 1, "vit-b16"), ("fsdp2", ParallelSpec(sequence=2), 1, "vit-b16"),
        ("ddp", ParallelSpec(pipeline=4), 4, "vit-b16"), ("ddp", ParallelSpec(pipeline=4), 32, "vit-b16"),
        ("fsdp2", ParallelSpec(pipeline=4), 32, "vit-b16"), ("fsdp2", ParallelSpec(tensor=4), 2, SHARED),
        ("ddp", ParallelSpec(pipeline=4), 8, SHARED), ("fsdp2", ParallelSpec(tensor=4), 1, SEGMENTING),
        ("ddp", ParallelSpec(sequence=4), 2, SEGMENTING), ("ddp", ParallelSpec(pipeline=4, sequence=2), 4, SEGMENTING),
        ("fsdp2", ParallelSpec(pipeline=4, schedule="gpipe"), 8, SEGMENTING),
        ("ddp", ParallelSpec(pipeline=8), 8, SHARED.model_copy(update={"task": "segmentation"})),
        ("ddp", ParallelSpec(sequence=4), 2, SHARED),
    ],
)  # fmt: skip
def test_many_at_once_are_what_each_is(engine: str, parallel: ParallelSpec, accum: int, model: str | ModelSpec) -> None:
    how: dict[str, Any] = {"engine": engine, "parallel": parallel, "grad_accum": accum, "model": model}
    how["precision"] = "bf16" if model == "vit-b16" else "bf16-params" if engine == "fsdp2" else "fp32"
    batches = (1, 3, 8, 64)
    trials = [make_trial(8, micro_batch=size, **how) for size in batches]
    at_once = peak_bytes_of_many(trials[0], np.array([8] * 4), np.array([8] * 4), accum, np.array(batches))
    each = [one.peak_bytes for trial in trials if (one := forecast(trial)) is not None]
    assert at_once.tolist() == each


@pytest.mark.parametrize("accum", [1, 2, 3, 4, 8, 9, 32])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_ranks_that_are_left_out_hold_no_more(monkeypatch: pytest.MonkeyPatch, schedule: Any, accum: int) -> None:
    """Of 2, 3, 3 and 2 blocks, so that ranks in the middle hold most."""
    split, model = ParallelSpec(pipeline=4, schedule=schedule), HUGE.model_copy(update={"layers": 10})
    trials = [
        make_trial(8, model=model, engine=engine, micro_batch=size, grad_accum=accum, parallel=split)
        for engine in ("ddp", "fsdp2")
        for size in (1, 64)
    ]
    some = [forecast_bytes(trial) for trial in trials]
    monkeypatch.setattr("vitscale.prediction.memory.forecast.that_may_take_most", lambda trial, _: shares(trial))
    assert some == [forecast_bytes(trial) for trial in trials]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_stages_take_turns_as_torchs_schedules_have_them(schedule: Any) -> None:
    """Of up to four ranks, three stages each and 32 micro-batches; nothing of a schedule but its order is built."""
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    for ranks, each, count in product((2, 3, 4), (2, 3) if schedule == "interleaved" else (1,), (1, 2, 4, 8, 9, 32)):
        rounds = max(1, count // ranks)
        if count % rounds if schedule == "interleaved" else schedule == "1f1b" and count < ranks:
            continue
        kinds = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
        of_torch = object.__new__(getattr(schedules, kinds[schedule]))
        of_torch.__dict__ |= {
            "_num_stages": ranks, "_n_microbatches": count, "n_local_stages": each, "pp_group_size": ranks,
            "microbatches_per_round": count // rounds,
        }  # fmt: skip
        for rank in range(ranks):
            if schedule == "interleaved":
                actions = of_torch._calculate_single_rank_operations(rank)
            else:
                actions = of_torch._get_pipeline_order()[rank]
            wanted = [
                (action.computation_type.name == "FULL_BACKWARD", action.stage_index // ranks)
                for action in actions
                if action is not None and action.computation_type.name in ("FORWARD", "FULL_BACKWARD")
            ]
            parallel = ParallelSpec(pipeline=ranks, schedule=schedule, stages_per_rank=max(2, each))
            share = Share(parallel, rank, (range(1),) * each)
            assert list(share.order(count)) == wanted
            under_way = [(-1 if backward else 1) for backward, _ in wanted]
            assert share.in_flight(count) == max(accumulate(under_way))


def test_of_turns_only_those_are_left_out_that_have_no_more_beside_them() -> None:
    """Whatever a micro-batch takes of each stage, as long as it keeps as much as it sends."""
    parallel = ParallelSpec(pipeline=4, schedule="interleaved", stages_per_rank=3)
    share = Share(parallel, 1, (range(1),) * 3)
    counts = {(stage, backward): 0 for stage in range(3) for backward in (False, True)}
    every = []
    for backward, stage in share.order(16):
        begun = [counts[n, False] - counts[n, True] - (backward and n == stage) for n in range(3)]
        every.append((stage, backward, begun, [counts[n, True] for n in range(3)]))
        counts[stage, backward] += 1

    def most(turns: Any, stage: int, backward: bool, kept: tuple[int, ...], sent: tuple[int, ...]) -> int:
        return max(
            sum(int(own) for own in (*map(mul, others, kept), *map(mul, finished, sent)))
            for at, direction, others, finished in turns
            if (at, direction) == (stage, backward)
        )

    chosen = [(turn.stage, turn.backward, turn.others, turn.finished) for turn in share.turns(16, sharded=True)]
    assert len(chosen) < len(every) / 2
    for kept, sent in (((9, 9, 9), (0, 0, 0)), ((9, 5, 2), (3, 2, 1)), ((1, 4, 40), (1, 4, 2)), ((7, 1, 1), (7, 0, 1))):
        for stage, backward in counts:
            assert most(chosen, stage, backward, kept, sent) == most(every, stage, backward, kept, sent)


TINY = resolve(ModelSpec(name="swinv2-t", image_size=32, hidden_size=24, heads=3, depths=(2, 2), window_size=4), 10)
"""8 x 8 tokens of 24 in 3 heads and 4 x 4 of 48 in 6; windows of 4 x 4, of 7 x 7 distances."""
FIRST = 4 * (8 * 8 * 24) + 8 * 8 * 8
"""Its patches' norm keeps what it takes, and two numbers a token."""
WIDE = 64 * (28 * 24 + 16 * 3 + 8 * 16 * 3) + 64 * (44 * 24 + 16) + 4 * (49 * 512 + 3 * 16**2)
"""A block of 24 keeps, as docs/memory.md has it, with its position biases; one of 48:"""
NARROW = 16 * (28 * 48 + 16 * 6 + 8 * 16 * 6) + 16 * (44 * 48 + 16) + 4 * (49 * 512 + 6 * 16**2)
MERGE = 16 * (24 * 24 + 8)
HEAD = 16 * (4 * 48 + 8) + 4 * 48 + 8 * 10


SENT = 4 * (16 * 48)
"""By the first of two stages, and by the second and third of four."""


@pytest.mark.parametrize(
    ("schedule", "engine", "others", "again"),
    [
        # The last rank's first backward: three more micro-batches have gone forward. Where activations are computed
        # again its second, with all gradients: what the second block takes, and the gradient that was sent.
        ("gpipe", "ddp", 3 * (2 * NARROW + HEAD), 2 * (SENT + HEAD) + SENT),
        # The same in turns: the gradient that was sent last.
        ("1f1b", "ddp", SENT, SENT),
        # The first rank: one more, what it has handed on, and what it handed on before the first backward. Computed
        # again the last one, whose block is larger.
        ("1f1b", "fsdp2", FIRST + 2 * WIDE + MERGE + 2 * SENT, SENT),
        # The first rank's second stage, a block of 48, when all four are under way in its first: and of the second
        # stage's first micro-batch what was handed on, and its gradient. Computed again its first stage, when both have
        # two under way, and one and two of each have been sent both ways.
        (
            "interleaved", "ddp", 4 * (FIRST + WIDE + 4 * (64 * 24)) + 2 * SENT,
            2 * (FIRST + 2 * 4 * (64 * 24)) + 2 * SENT + 4 * (64 * 24) + 2 * 2 * SENT,
        ),
    ],
)  # fmt: skip
def test_a_swins_stages_hold_what_each_of_them_keeps(schedule: Any, engine: str, others: int, again: int) -> None:
    how: dict[str, Any] = {"engine": engine, "precision": "fp32", "micro_batch": 1, "grad_accum": 4, "device": "cpu"}
    trial = make_trial(2 if engine == "ddp" else 4, model=TINY, parallel=ParallelSpec(pipeline=2, schedule=schedule))
    for checkpointing, wanted in ((False, others), (True, again)):
        fields = how | {"activation_checkpointing": checkpointing}
        expected = forecast(trial.model_copy(update={"train": trial.train.model_copy(update=fields)}))
        assert expected is not None
        assert expected.moments["backward"]["activations of other micro-batches"] == wanted


def test_sharded_stages_hold_whole_gradients_but_not_whole_weights() -> None:
    """Of two replicas, in the micro-batch before which another's backward was: less than under DDP, by half of the
    weights and states and all of its buckets; more than half of it, by gradients."""
    how: dict[str, Any] = {"grad_accum": 8, "parallel": ParallelSpec(pipeline=2)}
    whole, cut = (forecast(make_trial(4, engine=engine, **how)) for engine in ("ddp", "fsdp2"))
    assert whole is not None
    assert cut is not None
    by_ddp, by_fsdp2 = whole.moments["step"], cut.moments["step"]
    for part in ("weights", "optimizer states", "gradients"):
        assert by_fsdp2[part] == pytest.approx(by_ddp[part] / 2, rel=1e-3)
    assert cut.moments["exchange"]["gradients"] == by_ddp["gradients"]
    assert 0 < cut.moments["exchange"]["gathered weights"] < by_ddp["weights"]
    assert cut.peak_bytes < whole.peak_bytes


def test_what_is_not_modelled_is_unavailable() -> None:
    of_swin = make_trial(2, engine="fsdp2", model=SHARED, parallel=ParallelSpec(tensor=2))
    assert "autocast" in unavailable(of_swin)
    assert not unavailable(of_swin.model_copy(update={"train": of_swin.train.model_copy(update={"device": "cpu"})}))
