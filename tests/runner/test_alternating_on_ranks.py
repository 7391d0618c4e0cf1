"""`vitscale compare --run` on real ranks: two versions of a model in turn, cut off in between, and compared."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from driving import start
from vitscale import store
from vitscale.store.results import Run

pytestmark = pytest.mark.ranks

ROUNDS = 3
STUDY = """
name = "in-turn"
[model]
factory = "{side}_model:model"
image_size = 8
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 16
device = "cpu"
[scaling]
gpus = [1]
[measure]
steps = 10
warmup_steps = 1
explain = false
evaluate = false
"""
MODEL = """
from torch import nn

def model(num_classes=10, **settings):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, {hidden}), nn.GELU(), nn.Linear({hidden}, num_classes))
"""
_SECONDS = 240.0


def runs_in_time(folder: Path) -> list[tuple[str, Run]]:
    """The finished runs of both sides in the order in which they were begun, each with its side."""
    runs = [(side, run) for side in ("old", "new") for run in store.load(folder / side).runs]
    return sorted(runs, key=lambda pair: pair[1].outcome.started_unix_seconds)


def test_two_versions_of_a_model_run_in_turn_and_resume(tmp_path: Path) -> None:
    for side, hidden in (("old", 16), ("new", 32)):
        (tmp_path / f"{side}.toml").write_text(STUDY.format(side=side))
        (tmp_path / f"{side}_model.py").write_text(MODEL.format(hidden=hidden))
    command = [sys.executable, "-m", "vitscale", "compare", "--run", "old.toml", "new.toml", "-o", "both", "--json"]
    command += ["--repeats", str(ROUNDS), "--fail-if-slower", "5%"]

    cut_off = start(*command, cwd=tmp_path)
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until and cut_off.poll() is None and not (tmp_path / "both" / "new" / "runs").exists():
        time.sleep(0.05)
    cut_off.send_signal(signal.SIGINT)
    said, _ = cut_off.communicate(timeout=_SECONDS)
    assert cut_off.returncode == 130, said
    assert "Run the same command again" in said

    again = start(*command, cwd=tmp_path)
    said, _ = again.communicate(timeout=_SECONDS)
    told = json.loads(said[said.index("{\n") :])
    assert [side for side, _ in runs_in_time(tmp_path / "both")] == ["old", "new", "new", "old", "old", "new"]
    (pair,) = told["pairs"]
    assert pair["rounds"] == ROUNDS
    assert pair["time_ratio"] is not None
    assert told["sessions"] == []
    assert again.returncode == (1 if pair["gate"] == "slower" else 0)
