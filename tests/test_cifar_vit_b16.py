"""The published study's model on its dataset: ViT-B/16 at 224 on CIFAR-10's official layout, 2 ranks, both engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from cifar_factory import pack, write_cifar10
from driving import vitscale

from vitscale import store

pytestmark = pytest.mark.ranks

STUDY = """
name = "cifar-vit-b16"
[model]
name = "vit-b16"
[data]
name = "cifar10"
root = "cifar-10-python.tar.gz"
verify = false
[train]
micro_batch = 2
[scaling]
gpus = [2]
[sweep]
"train.engine" = ["ddp", "deepspeed"]
[measure]
steps = 2
warmup_steps = 1
repeats = 1
evaluate = false
"""


def test_vit_b16_trains_on_cifar_10(tmp_path: Path) -> None:
    archive = pack(write_cifar10(tmp_path / "unpacked", per_batch=20))
    archive.rename(tmp_path / "cifar-10-python.tar.gz")
    (tmp_path / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path, timeout=550)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    runs = store.load(tmp_path / "results").runs
    assert {run.header.trial.train.engine for run in runs} == {"ddp", "deepspeed"}
    losses = {}
    for run in runs:
        assert run.outcome.kind == "completed"
        for rank in run.ranks:
            assert rank.model is not None
            assert rank.model.parameters == 85_806_346  # 86,567,656 less 990 classes of 768 weights and a bias
            assert rank.model.train_samples == 100
            assert [(step.images, step.warmup) for step in rank.steps] == [(2, True), (2, False), (2, False)]
        per_rank = [[step.loss or 0.0 for step in rank.steps] for rank in run.ranks]
        losses[run.header.trial.train.engine] = [sum(pair) / 2 for pair in zip(*per_rank, strict=True)]
    # The same images, weights and arithmetic: what separates the engines is rounding.
    assert losses["ddp"] == pytest.approx(losses["deepspeed"], rel=0.02)
