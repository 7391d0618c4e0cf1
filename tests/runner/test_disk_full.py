"""A disk that fills up under a run: the reason is told, nothing written is harmed, and the study goes on later."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import IO

import pytest

from driving import start, tree, vitscale
from processes import wait_until
from small_disks import fill_with_files
from vitscale import store

pytestmark = pytest.mark.ranks

STUDY = """
name = "disk-full"
[model]
factory = "held:model"
image_size = 8
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 1
[scaling]
gpus = [1]
[launch]
launcher = "local"
[measure]
steps = 60
repeats = 1
evaluate = false
"""
"""What is recorded of so many steps takes several of the disk's pages."""
HELD = """
import os, time
from torch import nn

class Held(nn.Sequential):
    calls = 0

    def forward(self, images):
        self.calls += 1
        while self.calls == 3 and not os.path.exists("go"):
            time.sleep(0.01)
        return super().forward(images)

def model(num_classes, image_size):
    return Held(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
"""
"""A model that waits for a file before its third step."""


def fill(file: IO[bytes]) -> None:
    """Writes until the disk has no room."""
    while True:
        file.write(bytes(4096))


def test_a_full_disk_ends_the_run_with_that_reason_and_harms_nothing(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "held.py").write_text(HELD)
    results = small_disk / "results"
    driver = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", str(results), cwd=tmp_path)
    wait_until(
        lambda: any(b'"kind":"step"' in path.read_bytes() for path in results.glob("runs/*/rank-0.jsonl")),
        "rank 0 has recorded a step",
    )
    before = {name: content for name, content in tree(results).items() if name.endswith(".json")}
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        fill(file)
    (tmp_path / "go").touch()
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert "disk full: rank 0 has no room for its record" in output
    assert "Traceback" not in output

    (run,) = store.load(results).runs
    assert (run.outcome.kind, run.outcome.external) == ("failed", True)
    assert "disk full" in run.outcome.reason
    steps = [step.step for step in run.ranks[0].steps]
    assert steps == list(range(len(steps)))
    after = tree(results)
    assert {name: after[name] for name in before} == before

    # With space again the same command does that run anew, without being asked to retry.
    filler.unlink()
    again = vitscale("run", "study.toml", "-o", results, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    (run,) = store.load(results).runs
    assert (run.outcome.kind, run.header.attempt) == ("completed", 1)
    assert {name: tree(results)[name] for name in before if name.startswith("runs/")} == {
        name: content for name, content in before.items() if name.startswith("runs/")
    }


def test_a_disk_that_takes_no_more_files_ends_no_run(tmp_path: Path, disk_of_few_files: Path) -> None:
    """Whatever the run needs next, its ranks' records or its outcome, has a file that was made before."""
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "held.py").write_text(HELD)
    results = disk_of_few_files / "results"
    driver = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", str(results), cwd=tmp_path)
    wait_until(lambda: list(results.glob("runs/*/rank-0.jsonl")), "rank 0 has its record")
    files = fill_with_files(disk_of_few_files)
    (tmp_path / "go").touch()
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    (run,) = store.load(results).runs
    assert (run.outcome.kind, run.ranks[0].ended) == ("completed", True)

    # No further study can begin there: one message, and the same command does it once there is room.
    other = disk_of_few_files / "other"
    refused = vitscale("run", "study.toml", "-o", other, cwd=tmp_path)
    assert refused.returncode != 0
    assert "Traceback" not in refused.stdout + refused.stderr
    shutil.rmtree(files)
    again = vitscale("run", "study.toml", "-o", other, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
