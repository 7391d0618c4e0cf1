"""The clock of the driver's host is set back by an hour, and forward by a day, in the middle of a study."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import needs
from kills import RUNS, STUDY
from processes import wait_until
from vitscale import store

DRIVE = (
    "import sys; from pathlib import Path; from runner.record_only import drive\n"
    "drive(sys.argv[3:], *map(Path, sys.argv[1:3]))"
)


def shim(folder: Path) -> Path:
    """What stands between Python and the wall clock; setting the machine's own would set everybody's."""
    needs.programs("cc")
    library = folder / "set_clock.so"
    source = Path(__file__).with_name("set_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def runs_are_done(results: Path, number: int) -> bool:
    return len(list(results.glob("runs/*/outcome.json"))) >= number


def test_a_clock_that_is_set_changes_no_duration_and_no_outcome(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY + "hang_seconds = 600\ntimeout_seconds = 600\n")
    clock = tmp_path / "clock"
    clock.write_text("0\n")
    results = tmp_path / "results"
    environment = {
        "LD_PRELOAD": str(shim(tmp_path)),
        "CLOCK_OFFSET": str(clock),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVE, tmp_path, tmp_path / "said.txt", "run", "study.toml", "-o", "results"],
        env=os.environ | environment,
    )
    for done, setting in ((1, "-3600"), (2, "+86400")):
        wait_until(functools.partial(runs_are_done, results, done), f"{done} runs are done")
        clock.write_text(f"{setting}\n")
    assert driver.wait(300) == 0
    outcomes = [run.outcome for run in store.load(results).runs]
    assert [outcome.kind for outcome in outcomes] == ["completed"] * RUNS
    assert all(0 < outcome.wall_seconds < 600 for outcome in outcomes)
    began = sorted(outcome.started_unix_seconds for outcome in outcomes)
    assert began[-1] - began[0] > 86_000, "the clock was not set while the study ran"
