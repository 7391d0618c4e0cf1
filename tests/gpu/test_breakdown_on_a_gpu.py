"""The breakdown on one CUDA device, held against the profiler's own trace, read by other means."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driving import vitscale
from vitscale import store
from vitscale.analysis.time.breakdown import breakdown
from vitscale.store.results import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

STUDY = """
name = "gpu-breakdown"
[model]
name = "vit-b16"
[data]
name = "synthetic"
samples = 8192
source_size = 224
workers = 8
[train]
precision = "bf16"
micro_batch = 128
[scaling]
gpus = [1]
[sweep]
"train.engine" = ["ddp", "deepspeed"]
[measure]
repeats = 1
steps = 150
evaluate = false
traces = true
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("gpu-breakdown")
    (where / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return where / "results"


def traces_of(results: Path, run: Run) -> list[list[dict[str, Any]]]:
    paths = sorted(results.glob(f"runs/{run.header.trial_id}-*/trace-rank-0-*.json.gz"))
    return [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in paths]


def busy_seconds(events: list[dict[str, Any]]) -> float:
    """How long a kernel ran on the device in a step, in the mean over the trace's steps, however far apart they lie."""
    kernels = [e for e in events if e.get("cat") == "kernel" and not e["name"].startswith("nccl")]
    first = min(e["ts"] for e in kernels)
    busy = np.zeros(int(max(e["ts"] + e["dur"] for e in kernels) - first) + 1, bool)
    for e in kernels:
        busy[int(e["ts"] - first) : int(e["ts"] + e["dur"] - first)] = True
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "vitscale.step"]
    return float(busy.sum()) / 1e6 / len(steps)


def test_parts_add_up_and_compute_agrees_with_the_trace(results: Path) -> None:
    for run in store.load(results).runs:
        found = breakdown(run)
        assert found is not None
        (rank,) = found.ranks
        assert rank.sum_of(*rank.parts) == pytest.approx(rank.seconds, rel=1e-6)
        assert rank.sum_of("other") <= 0.03 * rank.seconds
        # The trace is of explained steps, which are longer; the kernels in them are not.
        busy = np.mean([busy_seconds(events) for events in traces_of(results, run)])
        assert rank.sum_of("forward", "backward", "optimizer") == pytest.approx(busy, rel=0.03)


def test_a_gpu_has_gaps_where_nvml_saw_it_idle_alone_however_much_the_profiler_costs(results: Path) -> None:
    """The timed steps are the truth: where NVML saw a kernel at every look, steps are as long as their kernels."""
    for run in store.load(results).runs:
        gpu = run.ranks[0].resources[0].gpu
        assert gpu is not None
        assert gpu.utilisation is not None
        found = breakdown(run)
        assert found is not None
        assert found.overhead is not None
        (rank,) = found.ranks
        timed = [step.seconds for step in run.ranks[0].steps if step.window == "light" and not step.warmup]
        assert rank.seconds == pytest.approx(np.mean(timed), rel=0.03)
        assert rank.sum_of("launch_gaps", "other") < (1.06 - gpu.utilisation) * rank.seconds
