"""A rank of a check whose other ranks never come: it ends in time, and has measured what needs nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from check_factory import request
from vitscale.store.checks import STAGES, read_checked_rank
from vitscale.trial.trial import World

pytestmark = pytest.mark.ranks


def test_a_rank_that_waits_in_vain_still_measures_the_rest(tmp_path: Path) -> None:
    limits = dict.fromkeys(STAGES, 60.0) | {"network": 5.0, "join": 3.0}
    wanted = request(world=World(nodes=1, ranks_per_node=2, threads_per_rank=1), limits=limits)
    (tmp_path / "request.json").write_text(wanted.model_dump_json())
    # Rank 1, and nobody listens: port 9 (discard) of this host is closed.
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, "-m", "vitscale.worker", str(tmp_path)]
    answer = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    found = read_checked_rank(tmp_path / "rank-1.jsonl")
    assert found.ended
    endings = {stage.name: stage.ending for stage in found.stages}
    assert endings == {
        "facts": "done", "network": "failed", "join": "timeout", "collectives": "skipped", "matmul": "done",
        "compute": "done", "disk": "done",
    }  # fmt: skip
    assert found.reach is not None
    assert (found.reach.port, found.reach.seconds) == (9, None)
    assert "ConnectionRefusedError" in found.reach.reason
    assert found.matmul is not None
    assert found.disk is not None
    assert found.disk.seen_reason == "the ranks did not meet"


def test_what_ends_a_check_outside_its_stages_is_recorded(tmp_path: Path) -> None:
    wanted = request(world=World(nodes=1, ranks_per_node=1, threads_per_rank=1), device="cuda")
    (tmp_path / "request.json").write_text(wanted.model_dump_json())
    command = [sys.executable, "-m", "vitscale.worker", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 1
    found = read_checked_rank(tmp_path / "rank-0.jsonl")
    assert (found.ended, found.stages, found.last_sign) == (False, (), "nothing recorded")
    assert found.error is not None
    assert found.error.message.startswith("this trial computes on GPUs, and torch sees none on this host")
