"""MFU and the share of the measured rate, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from results_factory import make_environment, make_rank, make_run, make_trial
from vitscale.analysis.runs.compute import compute, flops_per_image
from vitscale.analysis.runs.figures import run_figures
from vitscale.store.records import DeviceRecord, MatmulLine
from vitscale.store.results import Run
from vitscale.trial.model_cost import training_flops
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import Trial

MODEL = ModelSpec(
    name="vit-ti16", image_size=32, patch_size=16, num_classes=10, hidden_size=192, layers=12, heads=3, mlp_size=768
)
FLOPS = training_flops(MODEL) or 0
H100 = DeviceRecord(type="cuda", name="NVIDIA H100 80GB HBM3")
STEP_SECONDS = 0.25


def trial_of(gpus: int = 1, precision: str = "bf16", model: ModelSpec = MODEL, device: str = "cuda") -> Trial:
    trial = make_trial(gpus=gpus, precision=precision, device=device)
    return trial.model_copy(update={"model": model})


def run_of(
    trial: Trial, devices: list[DeviceRecord], rates: list[float | None], images: list[int], **matmul: Any
) -> Run:
    """A run of steady steps: each rank with its device, its measured rate and its images per step."""
    mean = sum(images) // len(images)
    trial = trial.model_copy(update={"train": trial.train.model_copy(update={"micro_batch": mean})})
    ranks = []
    for number, (device, rate, own) in enumerate(zip(devices, rates, images, strict=True)):
        environment = make_environment(number, device=device)
        rank = make_rank(trial, number, [STEP_SECONDS] * 8, warmup=2, images=own, environment=environment)
        fields = {"dtype": "bf16", "size": 4096, "flops_per_second": rate} | matmul
        line = None if rate is None else MatmulLine.model_validate(fields)
        ranks.append(rank.model_copy(update={"matmul": line}))
    return make_run(trial, ranks)


def test_flops_of_an_image() -> None:
    """Five tokens (2 x 2 patches and the class token), 3 x forward, 2 FLOPs per MAC; by hand from the layers."""
    tokens, h, m = 5, 192, 768
    block = tokens * (4 * h * h + 2 * h * m) + 2 * tokens * tokens * h
    forward = 2 * (4 * 3 * 16 * 16 * h + 12 * block + h * 10)
    assert flops_per_image(trial_of()) == 3 * forward


def test_one_gpu() -> None:
    """64 images in 0.25 s."""
    found = compute(run := run_of(trial_of(), [H100], [700e12], [64]), run_figures(run))
    achieved = 64 * FLOPS / STEP_SECONDS
    assert found.achieved_flops_per_second == pytest.approx(achieved)
    assert found.matmul_flops_per_second == 700e12
    assert found.share_of_matmul == pytest.approx(achieved / 700e12)
    assert found.mfu == pytest.approx(achieved / 989.4e12)
    assert found.peak is not None
    assert found.peak.name == "H100 SXM, bf16 dense, 989.4 TFLOP/s"
    assert found.reason == ""


def test_rates_are_per_rank() -> None:
    """Two ranks, 48 and 16 images a step: 32 on average. Each rank's own share is of its own device's rate."""
    run = run_of(trial_of(2), [H100, H100], [800e12, 400e12], [48, 16])
    found = compute(run, run_figures(run))
    assert found.achieved_flops_per_second == pytest.approx(32 * FLOPS / STEP_SECONDS)
    assert found.matmul_flops_per_second == 600e12
    assert found.shares_of_matmul == {
        0: pytest.approx(48 * FLOPS / STEP_SECONDS / 800e12),
        1: pytest.approx(16 * FLOPS / STEP_SECONDS / 400e12),
    }


def test_of_ranks_with_stages_only_the_share_of_all_is_known() -> None:
    """Two stages of this model's heads and blocks need not be equal, as ranks that share tensors are."""
    for split, ranks in ((ParallelSpec(pipeline=2), 0), (ParallelSpec(tensor=2), 2)):
        trial = trial_of(2).model_copy(update={"parallel": split})
        run = run_of(trial, [H100, H100], [800e12, 400e12], [32, 32])
        found = compute(run, run_figures(run))
        assert len(found.shares_of_matmul) == ranks
        assert found.share_of_matmul == pytest.approx(16 * FLOPS / STEP_SECONDS / 600e12)


def test_only_light_steps_count() -> None:
    run = run_of(trial_of(), [H100], [700e12], [64])
    slow = [line.model_copy(update={"seconds": 9.0, "window": "explained"}) for line in run.ranks[0].steps[4:6]]
    steps = (*run.ranks[0].steps[:4], *slow, *run.ranks[0].steps[6:])
    disturbed = run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"steps": steps}),)})
    assert compute(disturbed, run_figures(disturbed)) == compute(run, run_figures(run))


def test_the_peak_is_that_of_the_arithmetic_that_was_measured() -> None:
    run = run_of(trial_of(precision="fp32"), [H100], [300e12], [64], dtype="tf32")
    found = compute(run, run_figures(run))
    assert found.peak is not None
    assert found.peak.dtype == "tf32"


def test_without_a_measured_rate_there_is_still_mfu() -> None:
    run = run_of(trial_of(2, precision="bf16-params"), [H100, H100], [700e12, None], [64, 64])
    found = compute(run, run_figures(run))
    assert (found.matmul_flops_per_second, found.share_of_matmul) == (None, None)
    assert found.mfu == pytest.approx(64 * FLOPS / STEP_SECONDS / 989.4e12)


def test_a_cpu_has_a_share_of_its_measured_rate_and_no_mfu() -> None:
    cpu = DeviceRecord(type="cpu", name="Example CPU")
    run = run_of(trial_of(device="cpu"), [cpu], [1e12], [64])
    found = compute(run, run_figures(run))
    assert found.share_of_matmul == pytest.approx(64 * FLOPS / STEP_SECONDS / 1e12)
    assert (found.mfu, found.peak, found.reason) == (None, None, "a CPU has no published peak")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            ModelSpec(factory="mine:build", num_classes=10),
            "the FLOPs of this model are not known here: it has no card (`vitscale plan` on the machine that trains)",
        ),
        (
            ModelSpec(hf="example/model", num_classes=10),
            "the FLOPs of this model are not known here: it has no card (`vitscale plan` on the machine that trains)",
        ),
        (
            ModelSpec(hf="/nowhere/at/all", num_classes=10),
            "the model's FLOPs are unknown here: model.hf '/nowhere/at/all' is neither a folder nor a name on the hub. "
            "Name a folder with an image-classification config.json, or a model of the hub.",
        ),
        (ModelSpec(name="vit-ti16"), "the model's shape was not recorded"),
    ],
)
def test_a_model_whose_flops_are_unknown(model: ModelSpec, reason: str) -> None:
    run = run_of(trial_of(model=model), [H100], [700e12], [64])
    found = compute(run, run_figures(run))
    assert (found.achieved_flops_per_second, found.mfu, found.share_of_matmul) == (None, None, None)
    assert found.reason == reason
    assert found.matmul_flops_per_second == 700e12


def test_ranks_on_different_devices_have_no_common_peak() -> None:
    other = DeviceRecord(type="cuda", name="NVIDIA H100 PCIe")
    run = run_of(trial_of(2), [H100, other], [700e12, 500e12], [64, 64])
    found = compute(run, run_figures(run))
    assert found.mfu is None
    assert found.reason == "the ranks computed on different devices: NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe"
    assert found.share_of_matmul == pytest.approx(64 * FLOPS / STEP_SECONDS / 600e12)


def test_a_run_without_a_timed_step() -> None:
    run = run_of(trial_of(), [H100], [700e12], [64])
    short = run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"steps": run.ranks[0].steps[:2]}),)})
    found = compute(short, run_figures(short))
    assert (found.achieved_flops_per_second, found.reason) == (None, "no light step was timed")


def test_a_run_without_environments() -> None:
    run = run_of(trial_of(), [H100], [700e12], [64])
    bare = run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"start": None}),)})
    assert compute(bare, run_figures(bare)).reason == "no rank recorded its device"
