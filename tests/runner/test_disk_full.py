"""A disk that fills up under a run: the reason is told, nothing written is harmed, and the study goes on later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from driving import TINY_MODEL, start, tree, until, vitscale
from vitscale import store

pytestmark = pytest.mark.ranks

STUDY = f"""
name = "disk-full"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 1
[scaling]
gpus = [1]
[launch]
launcher = "in-process"
[measure]
steps = STEPS
repeats = 2
evaluate = false
"""


def fill(file: IO[bytes]) -> None:
    """Writes until the disk has no room."""
    while True:
        file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_with_that_reason_and_harms_nothing(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace("STEPS", "100000"))
    results = small_disk / "results"
    driver = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", str(results), cwd=tmp_path)
    until(lambda: any(b'"kind":"step"' in path.read_bytes() for path in results.glob("runs/*/rank-0.jsonl")))
    before = {name: content for name, content in tree(results).items() if name.endswith(".json")}
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        fill(file)
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert "disk full: rank 0 could not write its record" in output
    assert "Traceback" not in output

    (run,) = store.load(results).runs
    assert (run.outcome.kind, run.outcome.external) == ("failed", True)
    assert "disk full" in run.outcome.reason
    steps = [step.step for step in run.ranks[0].steps]
    assert steps == list(range(len(steps)))
    after = tree(results)
    assert {name: after[name] for name in before} == before

    # With space again the run is done anew, without being asked to retry.
    filler.unlink()
    (small_disk / "study.toml").write_text(STUDY)
    study = tmp_path / "study.toml"
    shorter = study.read_text().replace("100000", "5")
    study.write_text(shorter)
    other = small_disk / "other"
    assert vitscale("run", study, "-o", other).returncode == 0
    assert len(store.load(other).runs) == 2
