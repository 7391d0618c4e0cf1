"""`make test` runs the checks and all of its parts whatever the others gave, and its exit code tells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import needs

ROOT = Path(__file__).parent.parent
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$(basename "$0") $*" in
    *"tests/vision"*) echo "seen, $VISION_TESTS"; exit $VISION_TESTS ;;
    *"not alone"*) exit $FIRST ;;
    *"-m alone"*) exit $SECOND ;;
    *"-m computing"*) echo "computed, $THIRD"; exit $THIRD ;;
    mypy*) echo "mypy says $FOURTH"; exit $FOURTH ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Programs that only note how they were called, in place of the virtual environment's."""
    needs.programs("make")
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "lint-imports"):
        (tmp_path / "venv/bin" / name).write_text(PROGRAM)
        (tmp_path / "venv/bin" / name).chmod(0o755)
    (tmp_path / "venv/.installed").touch()
    return {"PATH": "/usr/bin:/bin", "LOG": str(tmp_path / "log")}


@pytest.mark.parametrize(
    ("first", "second", "third", "checks"),
    [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)],
)
def test_all_parts_run_and_each_fails_the_whole(
    tmp_path: Path, environment: dict[str, str], first: int, second: int, third: int, checks: int
) -> None:
    make = subprocess.run(
        [str(shutil.which("make")), "test", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env=environment | {"FIRST": str(first), "SECOND": str(second), "THIRD": str(third), "FOURTH": str(checks)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (make.returncode != 0) == (first + second + third + checks > 0), make.stdout + make.stderr
    assert f"computed, {third}" in make.stdout
    assert f"mypy says {checks}" in make.stdout
    log = (tmp_path / "log").read_text().splitlines()
    parts = [line.rpartition("-m ")[2].split(" tests/") for line in log if "-m pytest" in line]
    # Those that compute begin beside those that measure: which is noted first is chance.
    assert [part[0] for part in parts[:1]] == ["not alone and not computing"]
    assert sorted(part[0] for part in parts[1:]) == ["alone", "computing"]
    (lone,) = (part for part in parts if part[0] == "alone")
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark[.]alone", path.read_text())]
    assert sorted(f"tests/{path}" for path in lone[1:]) == sorted(str(path.relative_to(ROOT)) for path in marked)
    assert log.index("mypy ") < log.index(next(line for line in log if "-m alone" in line))


@pytest.mark.parametrize("code", [0, 1])
def test_models_of_other_libraries_are_tested_where_their_environment_could_be_made(
    tmp_path: Path, environment: dict[str, str], code: int
) -> None:
    (tmp_path / "venv-vision/bin").mkdir(parents=True)
    shutil.copy(tmp_path / "venv/bin/python", tmp_path / "venv-vision/bin/python")
    (tmp_path / "venv-vision/.installed").touch()
    others = dict.fromkeys(("FIRST", "SECOND", "THIRD", "FOURTH"), "0")
    make = subprocess.run(
        [str(shutil.which("make")), "test", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env=environment | others | {"VISION_TESTS": str(code)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (make.returncode != 0) == (code > 0), make.stdout + make.stderr
    assert f"seen, {code}" in make.stdout


def test_what_yields_takes_its_share_of_a_busy_machine_when_it_is_told() -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user cannot leave SCHED_IDLE")
    script = """
import os, signal, subprocess
import conftest
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
signal.signal(signal.SIGUSR1, conftest._yield_no_more)
with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
    print(os.sched_getscheduler(0) == os.sched_getscheduler(child.pid) == os.SCHED_IDLE)
    os.kill(os.getpid(), signal.SIGUSR1)
    print(os.sched_getscheduler(0) == os.sched_getscheduler(child.pid) == os.SCHED_OTHER)
"""
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "tests", capture_output=True, text=True, check=False
    )
    assert told.stdout.split() == ["True", "True"], told.stderr
