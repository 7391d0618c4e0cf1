"""An engine reads the fields of [train] that it declares: what nobody reads would be swept as if it did something."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from forks import prepared_here
from vitscale.engines import ENGINES, OPTIONS, readers_of
from vitscale.engines.facts import BLOCK_OPTIONS
from vitscale.trial.trial import AccelerateBackend

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from results_factory import make_trial
from vitscale import models
from vitscale.engines import OPTIONS, building
from vitscale.trial.model_spec import resolve
from vitscale.trial.trial import TrainSpec

engine, more = sys.argv[1], json.loads(sys.argv[2])
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
if engine == "megatron":
    from engines.megatron_on_cpu import redirect

    redirect()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
read = set()


class Recording(TrainSpec):
    def __getattribute__(self, name):
        if name in OPTIONS:
            read.add(name)
        return super().__getattribute__(name)


trial = make_trial(engine, 1, **more)
trial = trial.model_copy(update={"model": resolve(trial.model, 10)})
trial = trial.model_copy(update={"train": Recording(**trial.train.model_dump())})
model = models.build(trial.model)
read.clear()
try:
    building.build(model, trial, torch.device("cpu"))
except RuntimeError as error:
    # On a CPU Accelerate drops its plugin of FSDP2 when all its settings have been made.
    if "accelerate_backend = 'fsdp2', but Accelerate made a" not in str(error):
        raise
print(json.dumps(sorted(read)))
sys.stdout.flush()
os._exit(0)
"""
BUILT = [
    pytest.param(
        engine,
        marks=pytest.mark.skipif(
            engine == "megatron" and find_spec("megatron") is None,
            reason="needs megatron-core (pip install 'vitscale[megatron]')",
        ),
    )
    for engine in ENGINES
]


def read_by(engine: str, folder: Path, **train: object) -> set[str]:
    """Options that an engine reads of a recording [train] while it is built on one CPU rank."""
    script = folder / "read.py"
    script.write_text(SCRIPT)
    argv = [str(script), engine, json.dumps(train)]
    answer = prepared_here().run({"kind": "script", "argv": argv, "environment": dict(os.environ)}, 300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return set(json.loads(answer.stdout.splitlines()[-1]))


@pytest.mark.ranks
@pytest.mark.parametrize("engine", BUILT)
def test_an_engine_reads_every_option_that_it_declares(engine: str, tmp_path: Path) -> None:
    facts = ENGINES[engine]
    declared = {*facts.options, *filter(None, [facts.stands_for])}
    assert declared - read_by(engine, tmp_path, **facts.defaults) == set()


@pytest.mark.ranks
@pytest.mark.parametrize("backend", get_args(AccelerateBackend))
def test_accelerate_reads_every_option_of_the_engine_that_it_stands_for(backend: str, tmp_path: Path) -> None:
    declared = {*ENGINES[backend].options, "accelerate_backend"}
    assert declared - read_by("accelerate", tmp_path, accelerate_backend=backend) == set()


@pytest.mark.ranks
def test_a_declared_and_unread_option_is_seen(tmp_path: Path) -> None:
    """Plain training reads what is done to blocks, and nothing that only others have."""
    read = read_by("none", tmp_path)
    assert set(BLOCK_OPTIONS) <= read
    assert read.isdisjoint({"bucket_mib", "reshard_after_forward", "offload", "overlap_comm"})


def test_the_docs_table_of_options_names_the_engines_that_read_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "study-file.md"
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    named = {option: engines for option, engines in rows if option in OPTIONS}
    assert set(named) == set(OPTIONS)
    for option, engines in named.items():
        everybody = option in BLOCK_OPTIONS
        words = set(re.findall(r"\w+", engines)) & set(ENGINES)
        assert (engines == "all") if everybody else (words == set(readers_of(option))), option
