"""SIGKILL of the driver under real ranks: all end within 10 seconds, and the study resumes."""

from __future__ import annotations

import functools
import random
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from driving import processes_naming, start, tree, vitscale
from processes import alive, wait_until
from vitscale import store

pytestmark = [pytest.mark.long(13), pytest.mark.ranks]

STUDY = """
name = "driver-death"
[model]
factory = "misbehaving:{model}"
image_size = 8
[data]
name = "digits"
[train]
engine = "ddp"
precision = "fp32"
micro_batch = 32
[scaling]
gpus = [2]
[measure]
steps = 20
repeats = 1
evaluate = false
"""


def _all_gone(processes: list[psutil.Process]) -> bool:
    return not any(alive(process.pid) for process in processes)


@pytest.mark.parametrize(
    ("launcher", "resumed"),
    [("local", True), ("torchrun", False), pytest.param("torchrun", True, marks=pytest.mark.nightly)],
)
def test_ranks_end_with_their_driver_and_the_study_resumes(tmp_path: Path, launcher: str, resumed: bool) -> None:
    """By day it resumes under one launcher, for what is done again is told by the folder alone."""
    shutil.copy(Path(__file__).with_name("misbehaving.py"), tmp_path)
    (tmp_path / "study.toml").write_text(STUDY.format(model="hangs"))
    results = tmp_path / "results"
    run_it = ("run", "study.toml", "-o", "results", "--launcher", launcher)
    driver = start(sys.executable, "-m", "vitscale", *run_it, cwd=tmp_path)
    # Rank 1 sleeps inside its forward, rank 0 waits for it inside a collective.
    wait_until(
        lambda: any(b'"kind":"step"' in path.read_bytes() for path in results.glob("runs/*/rank-1.jsonl")),
        "rank 1 has recorded a step",
    )
    assert len(processes_naming(results)) >= 3
    started = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.communicate()
    wait_until(lambda: _all_gone(started), "all it started is gone")
    assert not processes_naming(results)
    (attempt,) = results.glob("runs/*")
    assert not (attempt / "outcome.json").exists()
    if not resumed:
        return

    # The same results, resumed: that run was never finished, so it is done again, beside what is left of the first.
    study = (tmp_path / "study.toml").read_text()
    (tmp_path / "misbehaving.py").write_text(
        (tmp_path / "misbehaving.py").read_text().replace("time.sleep(3600)", "None")
    )
    assert "hangs" in study
    answer = vitscale(*run_it, cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = store.load(results).runs
    assert (run.outcome.kind, run.header.attempt) == ("completed", 1)


@pytest.mark.parametrize(("whom", "said"), [("prepared", "launcher was ended by SIGKILL"), ("supervisor", "launcher")])
def test_ranks_end_with_what_they_are_forks_of(tmp_path: Path, whom: str, said: str) -> None:
    """With the prepared process, and with its fork that started them; the study has that as the reason, and goes on."""
    shutil.copy(Path(__file__).with_name("misbehaving.py"), tmp_path)
    (tmp_path / "study.toml").write_text(STUDY.format(model="hangs"))
    results = tmp_path / "results"
    driver = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", "results", cwd=tmp_path)
    wait_until(
        lambda: any(b'"kind":"step"' in path.read_bytes() for path in results.glob("runs/*/rank-1.jsonl")),
        "rank 1 has recorded a step",
    )
    (prepared,) = [
        process for process in psutil.Process(driver.pid).children() if "vitscale.worker.prepared" in process.cmdline()
    ]
    (supervisor,) = prepared.children()
    ranks = supervisor.children()
    assert len(ranks) == 2
    (prepared if whom == "prepared" else supervisor).kill()
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1, out
    # None runs on; what was killed may still be giving its memory back.
    wait_until(functools.partial(_all_gone, [prepared, supervisor, *ranks]), "they and their ranks are gone")
    (run,) = store.load(results).runs
    assert run.outcome.kind == "failed"
    assert said in run.outcome.reason


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    """Seeded; from before the first import of torch to the last step. What was finished once is never touched again."""
    moments = random.Random(20261121)
    shutil.copy(Path(__file__).with_name("misbehaving.py"), tmp_path)
    (tmp_path / "study.toml").write_text(STUDY.format(model="well").replace("repeats = 1", "repeats = 2"))
    results = tmp_path / "results"
    kept: dict[str, bytes] = {}
    for _ in range(kills):
        driver = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", "results", cwd=tmp_path)
        try:
            driver.wait(moments.uniform(1.0, 10.0))
        except subprocess.TimeoutExpired:
            # The prepared process among them, and a fork of it that does not name its run's folder yet.
            started = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            wait_until(functools.partial(_all_gone, started), "all it started is gone")
        driver.communicate()
        wait_until(lambda: not processes_naming(results), "all ranks are gone")
        now = tree(results)
        assert {name: now[name] for name in kept} == kept
        finished = [path.parent for path in results.glob("runs/*/outcome.json")]
        kept = {
            f"{run.relative_to(results)}/{name}": content for run in finished for name, content in tree(run).items()
        }
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    runs = store.load(results).runs
    assert sorted((run.header.repeat, run.outcome.kind) for run in runs) == [(0, "completed"), (1, "completed")]
    assert all([line.step for line in rank.steps] == list(range(23)) for run in runs for rank in run.ranks)
