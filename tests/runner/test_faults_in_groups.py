"""Real ranks that share models, one of which is killed or stands still: it is named with those it exchanges with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from driving import TINY_MODEL, processes_naming, start
from vitscale import store
from vitscale.store.results import Outcome

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

STUDY = f"""
name = "groups"
{TINY_MODEL}
[data]
name = "digits"
[train]
engine = "ENGINE"
precision = "fp32"
micro_batch = 4
grad_accum = 2
[parallel]
AXIS = 2
[scaling]
gpus = [4]
[launch]
oversubscribe = true
[measure]
steps = 100000
warmup_steps = 1
repeats = 1
hang_seconds = 40
evaluate = false
"""
SPLITS = {
    "pipeline": ("ddp", "rank 3 of pipeline 1+3, data 2+3"),
    "tensor": ("fsdp2", "rank 3 of data 1+3, tensor 2+3"),
    "sequence": ("ddp", "rank 3 of data 1+3, sequence 2+3"),
}
"""Axis -> engine, and the groups of rank 3 of four."""


def rank_process(results: Path, rank: int) -> psutil.Process | None:
    """The process that writes a rank's file; None where there is none yet."""
    for process in psutil.process_iter():
        try:
            files = [file.path for file in process.open_files()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if any(file.startswith(str(results)) and file.endswith(f"/rank-{rank}.jsonl") for file in files):
            return process
    return None


def outcome_after(folder: Path, axis: str, sent: signal.Signals) -> Outcome:
    """Of a run whose rank 3 gets a signal while it trains."""
    (folder / "study.toml").write_text(STUDY.replace("ENGINE", SPLITS[axis][0]).replace("AXIS", axis))
    command = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", "results", cwd=folder)
    try:
        until = time.monotonic() + 200
        while not any((folder / "results").glob("runs/*/rank-3.jsonl")) or not _trains(folder):
            assert command.poll() is None, command.communicate()[0]
            assert time.monotonic() < until, "no rank has begun to train"
            time.sleep(0.2)
        victim = rank_process(folder / "results", 3)
        assert victim is not None
        os.kill(victim.pid, sent)
        said, _ = command.communicate(timeout=250)
    except subprocess.TimeoutExpired:
        command.kill()
        raise
    assert command.returncode == 1, said
    assert processes_naming(folder / "results") == []
    (run,) = store.load(folder / "results").runs
    return run.outcome


def _trains(folder: Path) -> bool:
    """Whether rank 3 has written a step."""
    return any(
        '"step"' in file.read_text(encoding="utf-8") for file in (folder / "results").glob("runs/*/rank-3.jsonl")
    )


def by_day(axis: str) -> list[Any]:
    """All axes, those other than this one at night alone."""
    return [axis, *(pytest.param(other, marks=pytest.mark.nightly) for other in SPLITS if other != axis)]


@pytest.mark.parametrize("axis", by_day("tensor"))
def test_a_rank_that_is_killed_is_named_with_its_groups(tmp_path: Path, axis: str) -> None:
    outcome = outcome_after(tmp_path, axis, signal.SIGKILL)
    assert (outcome.kind, outcome.rank) == ("failed", 3)
    assert outcome.reason == f"rank 3 was ended by SIGKILL without a word ({SPLITS[axis][1]})"


@pytest.mark.parametrize("axis", by_day("pipeline"))
def test_a_rank_that_the_others_wait_for_in_their_groups_is_named_with_them(tmp_path: Path, axis: str) -> None:
    outcome = outcome_after(tmp_path, axis, signal.SIGSTOP)
    assert (outcome.kind, outcome.rank) == ("hang", 3)
    assert SPLITS[axis][1] in outcome.reason
