"""`vitscale check --training` on the GPUs of this machine: every claim that a GPU can prove holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from driving import vitscale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]


def test_every_claim_holds(tmp_path: Path) -> None:
    answer = vitscale("check", "--training", "--json", "-o", tmp_path / "results", timeout=1200)
    told = json.loads(answer.stdout)
    assert answer.returncode == 0, told["verdicts"]
    assert Path(told["bundle"]).is_file()
    proofs = told["training"]["proofs"]
    assert len({proof["engine"] for proof in proofs}) >= 3  # the plain one, DDP, FSDP2
    for claim in ("placement", "launches", "clocks", "profiling"):
        assert {proof["status"] for proof in proofs if proof["subject"] == claim} == {"holds"}, claim
