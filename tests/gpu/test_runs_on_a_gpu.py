"""Real runs on one CUDA device: engines agree, steps are timed by events, memory that runs out is told as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driving import vitscale
from vitscale import store
from vitscale.store.results import Results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

STUDY = """
name = "gpu"
[model]
name = "vit-s16"
image_size = 64
patch_size = 8
layers = 4
[data]
name = "synthetic"
samples = 2048
classes = 10
[train]
precision = "fp32"
micro_batch = 64
grad_accum = 2
epochs = 2
learning_rate = 0.0005
gradient_clipping = 0.5
[scaling]
gpus = [1]
[sweep]
"train.engine" = ["none", "ddp", "deepspeed"]
[measure]
repeats = 1
warmup_steps = 2
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    where = tmp_path_factory.mktemp("gpu")
    (where / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return store.load(where / "results")


def test_engines_agree_on_the_losses(results: Results) -> None:
    curves = {run.header.trial.train.engine: [s.loss for s in run.ranks[0].steps] for run in results.runs}
    assert len(curves["none"]) == 2 * 16
    assert curves["ddp"] == pytest.approx(curves["none"], rel=1e-4)
    assert curves["deepspeed"] == pytest.approx(curves["none"], rel=1e-4)
    final = {run.header.trial.train.engine: run.ranks[0].epochs[-1] for run in results.runs}
    assert all((line.train_accuracy or 0) > 0.2 for line in final.values()), final


def test_the_device_is_recorded(results: Results) -> None:
    for run in results.runs:
        (rank,) = run.ranks
        assert rank.start is not None
        device = rank.start.environment.device
        assert (device.type, device.name) == ("cuda", torch.cuda.get_device_name(0))
        assert device.driver is not None
        assert rank.start.environment.backend == (None if run.header.trial.train.engine == "none" else "nccl")
        assert 0 < (rank.epochs[-1].peak_bytes or 0) < torch.cuda.get_device_properties(0).total_memory


def test_steps_add_up_to_the_epoch(results: Results) -> None:
    """Event times of all steps against the epoch's wall clock, in the first epoch, which no explained block pauses:
    nothing is lost between steps."""
    for run in results.runs:
        (rank,) = run.ranks
        first = [step for step in rank.steps if step.epoch == 0]
        assert {step.window for step in first} == {"light"}
        assert sum(step.seconds for step in first) == pytest.approx(rank.epochs[0].seconds, rel=0.01), run.header


def test_out_of_memory_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    study = STUDY.replace('"none", "ddp", "deepspeed"', '"none"').replace("micro_batch = 64", "micro_batch = 65536")
    study = study.replace('name = "vit-s16"', 'name = "vit-h14"')
    study = study.replace("image_size = 64\npatch_size = 8\nlayers = 4", "")
    study = study.replace("samples = 2048", "samples = 131072")
    study = study.replace("repeats = 1", "repeats = 2").replace("epochs = 2", "epochs = 3")
    (tmp_path / "study.toml").write_text(study)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    outcomes = [run.outcome for run in store.load(tmp_path / "results").runs]
    assert sorted(outcome.kind for outcome in outcomes) == ["oom", "skipped"]
    assert "OutOfMemoryError" in next(outcome.reason for outcome in outcomes if outcome.kind == "oom")


def test_more_ranks_than_gpus_is_refused_before_anything_starts(tmp_path: Path) -> None:
    many = torch.cuda.device_count() + 1
    (tmp_path / "study.toml").write_text(STUDY.replace("gpus = [1]", f"gpus = [1, {many}]"))
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 2
    assert f"{many} ranks need {many} GPUs" in answer.stderr
    assert not (tmp_path / "results").exists()


def test_fsdp2_with_its_weights_on_the_host_clips_and_takes_its_gradient_steps(tmp_path: Path) -> None:
    """A whole run: it clips (STUDY), is long enough for gradients' norms, and what it sends is NCCL's all the same."""
    study = STUDY.replace('"train.engine" = ["none", "ddp", "deepspeed"]', '"train.engine" = ["fsdp2"]')
    (tmp_path / "study.toml").write_text(study.replace("[scaling]", 'offload = "parameters"\n[scaling]'))
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = store.load(tmp_path / "results").runs
    (rank,) = run.ranks
    assert rank.start is not None
    assert rank.start.environment.backend == "nccl"
    assert {line.backend for line in rank.traffic} == {"nccl"}
    assert not rank.gradients
