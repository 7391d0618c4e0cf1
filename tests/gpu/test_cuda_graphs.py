"""`train.compile_mode = "reduce-overhead"`: blocks replayed as CUDA graphs train like blocks that are launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from driving import vitscale
from engines import jobs
from engines.curves import Curve, Job, largest_difference, train
from vitscale import store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

COMPILED = 1e-4
"""Of the loss, in fp32: a compiler has put the sums in another order."""
GRAPHS: jobs.Train = {"device": "cuda", "compile": True, "compile_mode": "reduce-overhead"}
STEPS = 12
"""Graphs are recorded in the second step of each shape; every third step is shorter."""
ENGINES = {"none": {"engine": "none"}} | {
    name: jobs.ENGINE_FIELDS[name]
    for name in ("ddp", "zero-0", "zero-1", "zero-2", "accelerate-ddp", "accelerate-zero-2")
}  # fmt: skip


def job(name: str, fields: dict[str, Any], **more: Any) -> Job:
    return {"name": name, "train": fields, "steps": STEPS, "evaluate": True, **more}  # type: ignore[typeddict-item]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    plain = {"engine": "none", "device": "cuda"} | jobs.SETTINGS["adamw-clipped"]
    return train([job("plain", plain)], 1, tmp_path_factory.mktemp("reference") / "1")["plain"]


@pytest.mark.parametrize("engine", ENGINES)
def test_graphs_train_alike_and_evaluate_alike_and_resume(engine: str, reference: Curve, tmp_path: Path) -> None:
    fields, folder = ENGINES[engine] | jobs.SETTINGS["adamw-clipped"] | GRAPHS, tmp_path / "ranks"
    whole = job("whole", fields, save_before=jobs.SAVED_BEFORE)
    curves = train([whole, job("resumed", fields, load=str(folder / "whole"))], 1, folder, timeout=120)
    for curve in curves.values():
        assert largest_difference(curve.losses, reference.losses[curve.first :]) < COMPILED
        assert curve.scores[0][0] == pytest.approx(reference.scores[0][0], rel=1e-3)


STUDY = """
name = "graphs"
[model]
name = "vit-b16"
[data]
name = "synthetic"
samples = 8192
source_size = 224
workers = 8
[train]
precision = "bf16"
micro_batch = 64
compile = true
[scaling]
gpus = [1]
[sweep]
"train.engine" = ["none", "ddp", "deepspeed"]
"train.compile_mode" = ["default", "reduce-overhead"]
[measure]
repeats = 1
steps = 60
warmup_steps = 10
evaluate = false
"""


def test_a_step_of_small_batches_is_shorter_by_its_launch_gaps(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    median: dict[tuple[str, str], float] = {}
    for run in store.load(tmp_path / "results").runs:
        seconds = sorted(step.seconds for step in run.ranks[0].steps if step.window == "light" and not step.warmup)
        median[run.header.trial.train.engine, run.header.trial.train.compile_mode] = seconds[len(seconds) // 2]
    for engine in ("none", "ddp", "deepspeed"):
        assert median[engine, "reduce-overhead"] < median[engine, "default"]
