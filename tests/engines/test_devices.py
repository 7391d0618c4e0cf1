"""The GPU of a rank is the one that it was given, whatever engine trains on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engines import fake_gpus
from forks import prepared_here

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"engine": "none"},
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "zero-0": {"engine": "deepspeed", "train": {"zero_stage": 0}},
    "zero-1": {"engine": "deepspeed", "train": {"zero_stage": 1}},
    "zero-2": {"engine": "deepspeed", "train": {"zero_stage": 2}},
    "zero-3": {"engine": "deepspeed", "train": {"zero_stage": 3}},
    "accelerate ddp": {"engine": "accelerate", "train": {"accelerate_backend": "ddp"}},
    "accelerate fsdp2": {"engine": "accelerate", "train": {"accelerate_backend": "fsdp2"}},
    "accelerate zero-3": {"engine": "accelerate", "train": {"accelerate_backend": "deepspeed", "zero_stage": 3}},
    "megatron": {"engine": "megatron"},
}


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        pytest.param(1, 0, id="its-own-alone"),
        pytest.param(2, 1, id="two-ranks-share-each"),
        pytest.param(4, 3, id="those-of-all-ranks"),
    ],
)
def test_every_engine_asks_for_the_gpu_of_its_rank_alone(visible: int, number: int) -> None:
    """The fourth rank of a host, of which 1, 2 or 4 GPUs are visible to it, under Open MPI.

    It is rank 0 of the world, so that a broadcast that sends nothing gives it the right values.
    """
    jobs = [{"name": name} | fields for name, fields in ENGINES.items()]
    variables = {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_TORCH_DEVICE": "cuda:7",
    }  # fmt: skip
    script = str(Path(fake_gpus.__file__))
    search_path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    request = {
        "kind": "script",
        "argv": [script, str(visible), json.dumps(jobs)],
        "environment": dict(os.environ) | variables | search_path,
    }
    answer = prepared_here().run(request, 300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == {name: [number] for name in ENGINES}
