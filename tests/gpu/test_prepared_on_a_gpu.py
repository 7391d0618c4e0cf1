"""Imports leave the GPU alone, so that ranks are forks of what has imported, and a first step is soon there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from driving import vitscale
from vitscale import store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

ENGINES: list[dict[str, Any]] = [
    {"engine": "none"},
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    {"engine": "deepspeed", "zero_stage": 3},
    {"engine": "accelerate", "accelerate_backend": "ddp"},
    {"engine": "accelerate", "accelerate_backend": "fsdp2"},
    {"engine": "accelerate", "accelerate_backend": "deepspeed", "zero_stage": 2},
    *([{"engine": "megatron"}] if importlib.util.find_spec("megatron") else []),
]
IMPORT = """
import json, sys
from pathlib import Path
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import TrainSpec
from vitscale.worker import __main__, prepared, session
train = TrainSpec.model_validate(json.loads(sys.argv[1]) | {"device": "cuda", "precision": "bf16", "micro_batch": 8})
session.preload(train, ModelSpec(name="vit-b16"))
opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
print(prepared.unforkable(len([*Path("/proc/self/task").iterdir()]), opened))
"""


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(map(str, engine.values())))
def test_what_an_engine_imports_opens_no_gpu_and_starts_no_thread(engine: dict[str, Any]) -> None:
    argv = [sys.executable, "-c", IMPORT, json.dumps(engine)]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    assert (answer.returncode, answer.stdout.splitlines()[-1:]) == (0, ["None"]), answer.stderr[-2000:]


def test_ranks_are_forks_and_no_run_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "anew" not in answer.stdout + answer.stderr
    assert len(store.load(tmp_path / "results").runs) == 4


STUDY = """
name = "forks"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 8
layers = 2
[data]
name = "synthetic"
samples = 1024
[train]
device = "cuda"
precision = "bf16"
micro_batch = 32
[scaling]
gpus = [1]
[sweep]
"train.engine" = ["ddp", "deepspeed"]
[measure]
repeats = 2
steps = 16
warmup_steps = 2
evaluate = false
"""
