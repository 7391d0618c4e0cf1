"""Start-up on one rank: every second before training belongs to a phase, whatever is asked of the host meanwhile."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forks import prepared_here
from results_factory import make_trial, steady_run
from vitscale.store.records import PhaseLine
from vitscale.trial.parallel import ParallelSpec
from vitscale.worker import session
from vitscale.worker.rank_process import RankInfo

GIT_SECONDS = 7.0


class Reached(Exception):
    """Training would begin."""


@pytest.mark.parametrize(("rank", "programs"), [(0, ["git", "git", "git"]), (1, [])])
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
    monkeypatch.setattr(session, "keep_freed_memory", takes(0.0))
    monkeypatch.setattr(session, "preload", takes(2.0))
    monkeypatch.setattr("vitscale.worker.session.sources.load", takes(1.0, SimpleNamespace(summary=summary)))
    monkeypatch.setattr("vitscale.worker.session.models.build", takes(0.5, nn.Linear(2, 2)))
    monkeypatch.setattr("vitscale.worker.session.group.join", takes(3.0, "gloo"))
    monkeypatch.setattr("vitscale.worker.session.building.build", takes(4.0, SimpleNamespace(gradient_dtype="float32")))
    monkeypatch.setattr(session, "Training", train)
    monkeypatch.setattr("vitscale.worker.git_revision.shutil.which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr("vitscale.worker.git_revision.subprocess.run", run)
    with pytest.raises(Reached):
        session.train(header, RankInfo(rank, 2, rank, None), log, 0.0)
    assert started == programs
    phases = {line.name: line.seconds for line in lines if isinstance(line, PhaseLine)}
    assert phases == {"imports": 2.0, "data": 1.0, "model": 0.5, "engine": 7.0 + GIT_SECONDS * len(programs)}
    assert sum(phases.values()) == seconds[0], "between two phases something was done that stands in neither"


@pytest.mark.parametrize(("split", "seeds"), [({}, [0, 1, 2, 3]), ({"tensor": 2}, [0, 0, 1, 1]),
                                              ({"tensor": 2, "sequence": 2}, [0, 0, 1, 1])])  # fmt: skip
def test_what_is_dropped_out_differs_between_ranks_but_not_between_those_with_the_same_activations(
    split: dict[str, int], seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a sequence group have other tokens of the same images."""
    drawn: list[Tensor] = []

    def build(*_: Any) -> Any:
        drawn.append(torch.rand(4))
        raise Reached

    log: Any = SimpleNamespace(write=lambda _: None)
    trial = make_trial("fsdp2", 4).model_copy(update={"parallel": ParallelSpec.model_validate(split)})
    header = steady_run(trial, 0.1).header
    dataset = SimpleNamespace(summary=SimpleNamespace(fingerprint=header.dataset_fingerprint, sizes_vary=False))
    monkeypatch.setattr("vitscale.worker.session.gc.freeze", lambda: None)
    for name in ("_set_thread_pools", "keep_freed_memory", "preload"):
        monkeypatch.setattr(session, name, lambda *_: None)
    monkeypatch.setattr("vitscale.worker.session.sources.load", lambda _: dataset)
    monkeypatch.setattr("vitscale.worker.session.models.build", lambda _: nn.Linear(2, 2))
    monkeypatch.setattr("vitscale.worker.session.group.join", lambda *_, **__: "gloo")
    monkeypatch.setattr("vitscale.worker.session.building.build", build)
    for rank in range(4):
        with pytest.raises(Reached):
            session.train(header, RankInfo(rank, 4, rank, None), log, 0.0)
    for seed, own in zip(seeds, drawn, strict=True):
        assert torch.equal(own, torch.rand(4, generator=torch.Generator().manual_seed(trial.train.seed + seed)))


def test_a_copy_with_other_times_is_told_apart_from_data_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose copy of an image folder was made by `cp -r` has the same images and another fingerprint."""
    monkeypatch.setattr("vitscale.worker.session.gc.freeze", lambda: None)
    for name in ("_set_thread_pools", "keep_freed_memory", "preload"):
        monkeypatch.setattr(session, name, lambda *_: None)
    dataset = SimpleNamespace(summary=SimpleNamespace(fingerprint="0ther"))
    monkeypatch.setattr("vitscale.worker.session.sources.load", lambda _: dataset)
    log: Any = SimpleNamespace(write=lambda _: None)
    with pytest.raises(
        RuntimeError, match=r"fingerprint is 0ther, .* this host's copy has other times of change \(cp -a"
    ):
        session.train(steady_run(make_trial("ddp", 2), 0.1).header, RankInfo(0, 2, 0, None), log, 0.0)


STEPS_OF_64_MIB = """
import ctypes
import resource
import torch
from vitscale.worker.session import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        pieces = [torch.ones(4 << 20) for _ in range(4)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD as at first; whether a heap can be cut is luck
usual = faults()
keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.ranks
@pytest.mark.parametrize("own_setting", [{}, {"MALLOC_ARENA_MAX": "2"}], ids=["by default", "set by the user"])
def test_what_a_step_frees_is_kept_for_the_next_unless_the_user_has_set_malloc(
    tmp_path: Path, own_setting: dict[str, str]
) -> None:
    """Of eight steps that take and free four pieces of 16 MiB the kernel hands none out again."""
    (tmp_path / "steps.py").write_text(STEPS_OF_64_MIB)
    request = {"kind": "script", "argv": [str(tmp_path / "steps.py")], "environment": os.environ | own_setting}
    answer = prepared_here().run(request, 60)
    assert answer.returncode == 0, answer.stderr
    usual, kept = map(int, answer.stdout.split())
    assert usual > 8 * 32, "even in pages of 2 MiB"
    assert (kept < 0.1 * usual) is (not own_setting)
