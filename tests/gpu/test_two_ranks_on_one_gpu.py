"""Engines whose two ranks share one GPU: what several GPUs would do, but for NCCL, by gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import jobs
from engines.curves import Curve, Job, largest_difference, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

EQUAL = 1e-5
"""Of the loss, in fp32: the kernels of one device."""
SCRIPT = Path(__file__).with_name("gloo_curve_ranks.py")
SETTINGS = ("adamw-clipped", "sgd-accumulated")
ENGINES = ("ddp", "fsdp2")
"""Not DeepSpeed and Accelerate, which have not been tried on gloo with tensors of a GPU."""


def on_gpu(name: str, fields: jobs.Train) -> Job:
    return {"name": name, "train": fields | {"device": "cuda"}, "steps": 5}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    alone = [on_gpu(setting, {"engine": "none"} | jobs.SETTINGS[setting]) for setting in SETTINGS]
    return train(alone, 1, tmp_path_factory.mktemp("reference") / "1")


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_train_as_one_process_does(engine: str, reference: dict[str, Curve], tmp_path: Path) -> None:
    both = [on_gpu(setting, jobs.ENGINE_FIELDS[engine] | jobs.SETTINGS[setting]) for setting in SETTINGS]
    curves = train(both, 2, tmp_path / "ranks", script=SCRIPT)
    for setting in SETTINGS:
        assert largest_difference(curves[setting].losses, reference[setting].losses) < EQUAL, setting
