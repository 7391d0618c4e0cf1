"""`vitscale check` on the GPUs of this machine: NCCL, the GPU's own clocks and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from driving import vitscale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]


def test_every_gpu_is_measured(tmp_path: Path) -> None:
    answer = vitscale("check", "--quick", "--json", "-o", tmp_path)
    assert answer.returncode == 0, answer.stderr[-3000:]
    check = json.loads(answer.stdout)["check"]
    assert len(check["ranks"]) == torch.cuda.device_count()
    for rank in check["ranks"]:
        assert rank["facts"]["environment"]["device"]["type"] == "cuda"
        assert rank["facts"]["environment"]["backend"] == "nccl"
        assert {stage["ending"] for stage in rank["stages"]} <= {"done", "skipped"}
        assert rank["matmul"]["flops_per_second"] > 1e12
        assert rank["compute"]["gpu"]["samples"] >= 1
        assert rank["compute"]["gpu"]["sm_clock_mhz_median"] > 0
    assert bool(check["fits"]) == (len(check["ranks"]) > 1)
