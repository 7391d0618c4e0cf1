"""Start-up on one rank: every second before training belongs to a phase, whatever is asked of the host meanwhile."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from results_factory import make_trial, steady_run
from vitscale.store.records import PhaseLine
from vitscale.worker import session
from vitscale.worker.rank_process import RankInfo

GIT_SECONDS = 7.0


class Reached(Exception):
    """Training would begin."""


@pytest.mark.parametrize(("rank", "programs"), [(0, ["git", "git"]), (1, [])])
def test_what_the_host_is_asked_is_part_of_start_up_and_only_rank_0_starts_programs(
    rank: int, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, started = [0.0], list[str]()
    lines: list[Any] = []

    def takes(amount: float, answer: Any = None) -> Any:
        def work(*_: Any, **__: Any) -> Any:
            seconds[0] += amount
            return answer

        return work

    def run(argv: list[str], **_: Any) -> Any:
        started.append(Path(argv[0]).name)
        seconds[0] += GIT_SECONDS
        return subprocess.CompletedProcess(argv, 0, stdout="0123abc")

    def train(*_: Any) -> Any:
        raise Reached

    log: Any = SimpleNamespace(write=lines.append)
    header = steady_run(make_trial("ddp", 2), 0.1).header
    summary = SimpleNamespace(
        fingerprint=header.dataset_fingerprint, train_samples=10, held_out_samples=2, sizes_vary=False
    )
    monkeypatch.setattr("vitscale.worker.session.time.perf_counter", lambda: seconds[0])
    monkeypatch.setattr("vitscale.worker.session.gc.freeze", takes(0.0))  # of the tests' own process
    monkeypatch.setattr(session, "_set_thread_pools", takes(0.0))
    monkeypatch.setattr(session, "preload", takes(2.0))
    monkeypatch.setattr("vitscale.worker.session.sources.load", takes(1.0, SimpleNamespace(summary=summary)))
    monkeypatch.setattr("vitscale.worker.session.models.build", takes(0.5, nn.Linear(2, 2)))
    monkeypatch.setattr("vitscale.worker.session.group.join", takes(3.0, "gloo"))
    monkeypatch.setattr("vitscale.worker.session.engines.build", takes(4.0, SimpleNamespace(gradient_dtype="float32")))
    monkeypatch.setattr(session, "Training", train)
    monkeypatch.setattr("vitscale.worker.environment.shutil.which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr("vitscale.worker.environment.subprocess.run", run)
    with pytest.raises(Reached):
        session.train(header, RankInfo(rank, 2, rank, None), log, 0.0)
    assert started == programs
    phases = {line.name: line.seconds for line in lines if isinstance(line, PhaseLine)}
    assert phases == {"imports": 2.0, "data": 1.0, "model": 0.5, "engine": 7.0 + GIT_SECONDS * len(programs)}
    assert sum(phases.values()) == seconds[0], "between two phases something was done that stands in neither"
