"""`make test` runs both of its parts whatever the first gave, and its exit code tells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import needs

ROOT = Path(__file__).parent.parent
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$*" in
    *"not alone"*) exit $FIRST ;;
    *"-m alone"*) exit $SECOND ;;
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


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_both_parts_run_and_either_fails_all(
    tmp_path: Path, environment: dict[str, str], first: int, second: int
) -> None:
    make = subprocess.run(
        [str(shutil.which("make")), "test", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env=environment | {"FIRST": str(first), "SECOND": str(second)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (make.returncode != 0) == (first + second > 0), make.stdout + make.stderr
    parts = [line for line in (tmp_path / "log").read_text().splitlines() if "pytest" in line]
    assert [line.rpartition("-m ")[2] for line in parts] == ["not alone", "alone"]
