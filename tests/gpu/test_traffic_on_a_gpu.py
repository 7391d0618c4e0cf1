"""What two CUDA devices send each other, and what explaining costs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driving import vitscale
from vitscale import store
from vitscale.analysis import Analysis, analyse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: torch.cuda.device_count() < 2"),
]

STUDY = """
name = "gpu-traffic"
[model]
name = "vit-s16"
image_size = 64
patch_size = 8
[data]
name = "synthetic"
samples = 8192
classes = 10
[train]
engine = "ddp"
precision = "fp32"
micro_batch = 32
[scaling]
gpus = [2]
[measure]
repeats = 1
steps = 100
evaluate = false
explain = {explain}
"""


def analysed(where: Path, explain: bool) -> Analysis:
    (where / "study.toml").write_text(STUDY.replace("{explain}", str(explain).lower()))
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return analyse(store.load(where / "results"))


def test_ddp_sends_two_psi_and_its_ranks_wait_and_transfer(tmp_path: Path) -> None:
    (trial,) = analysed(tmp_path, explain=True).trials.values()
    assert trial.traffic is not None
    (model,) = {run.model.parameters or 0 for run in trial.run_figures if run.model}
    assert trial.traffic.backend == "nccl"
    assert trial.traffic.logical_bytes == pytest.approx(2 * 4 * model, rel=1e-3)
    assert trial.breakdown is not None
    assert trial.breakdown.wait_known
    for rank in trial.breakdown.ranks:
        assert rank.sum_of(*rank.parts) == pytest.approx(rank.seconds, rel=1e-6)
        assert (rank.parts["wait"], rank.parts["wire"]) != (None, None)
    assert trial.breakdown.attached_overhead is not None


def test_reported_steps_are_as_fast_with_explaining_as_without(tmp_path: Path) -> None:
    seconds = []
    for explain in (True, False):
        (tmp_path / str(explain)).mkdir()
        (trial,) = analysed(tmp_path / str(explain), explain).trials.values()
        seconds += [run.step_seconds for run in trial.run_figures]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)
