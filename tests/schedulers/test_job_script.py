"""Lines of a batch script before the driver, done by bash: which failure ends a job, and what is said of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.schedulers.job_script import failed_line, preparing_lines, refuse_module_names

MODULE = 'module() { [ "$2" != missing/1 ] && echo "loaded $2"; }'
"""Environment Modules' function, as far as it is asked here."""


def run(folder: Path, setup: list[str], modules: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Does the lines as a job's script does, and prints "driver" where the driver would begin."""
    script = folder / "job script.sh"
    lines = ["#!/bin/bash", MODULE, *preparing_lines(modules or [], setup), "exec echo driver", ""]
    script.write_text("\n".join(lines))
    return subprocess.run(["bash", str(script)], cwd=folder, capture_output=True, text=True, check=False)


def test_nothing_for_nothing() -> None:
    assert preparing_lines([], []) == []


def test_modules_come_first(tmp_path: Path) -> None:
    done = run(tmp_path, ["echo setup"], ["cuda/12", "openmpi"])
    assert (done.stdout, done.stderr, done.returncode) == ("loaded cuda/12\nloaded openmpi\nsetup\ndriver\n", "", 0)


@pytest.mark.parametrize(
    "setup",
    [
        ["[ -d /nowhere ] && echo there", "false || true", "! true"],
        ["if false; then", "  echo never", "fi"],
        ["cat <<END", "false", "END"],
        ["for word in a b; do", "  [ $word = b ] && echo $word", "done", "true \\", "  false"],
        ["source fails_within.sh"],
        ["f() { false; true; }", "f"],
        ["x=$(false; echo 1)"],
    ],
)
def test_what_is_no_failure(tmp_path: Path, setup: list[str]) -> None:
    (tmp_path / "fails_within.sh").write_text("false\ngrep -q x /dev/null\ntrue\n")
    done = run(tmp_path, setup)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("driver\n")


@pytest.mark.parametrize(
    ("setup", "modules", "code", "line"),
    [
        (["echo before", "source nowhere.sh", "echo after"], [], 1, "source nowhere.sh"),
        (["ls '/no such'  # \"quoted\" %s"], [], 2, "ls '/no such'  # \"quoted\" %s"),
        (["nonsense-of-a-site"], [], 127, "nonsense-of-a-site"),
        (["(exit 7)"], [], 7, "(exit 7)"),
        (["source fails.sh"], [], 3, "source fails.sh"),
        (["if true; then", "  false", "fi"], [], 1, "  false"),
        (["echo never"], ["cuda/12", "missing/1"], 1, "module load missing/1"),
    ],
)
def test_a_line_that_fails_ends_the_job_and_is_named(
    tmp_path: Path, setup: list[str], modules: list[str], code: int, line: str
) -> None:
    (tmp_path / "fails.sh").write_text("true\nreturn 3\n")
    done = run(tmp_path, setup, modules)
    assert done.returncode == code
    assert "driver" not in done.stdout
    assert "after" not in done.stdout
    output = tmp_path / "job.out"
    output.write_text(done.stdout + done.stderr)
    said = failed_line(output) or ""
    script_lines = (tmp_path / "job script.sh").read_text().splitlines()
    number = script_lines.index(line) + 1
    assert said == f"line {number} of its script failed with exit code {code}: {line}"


def test_where_the_shell_has_no_module_it_asks_the_login_shells_profile(tmp_path: Path) -> None:
    """And where that has none either, the line that loads one is named."""
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["unset -f module", *preparing_lines(["cuda"], []), "exec echo driver"]))
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 127
    assert done.stdout.endswith("failed with exit code 127: module load cuda\n")


@pytest.mark.parametrize("text", ["", "a driver's words\n", "vitscale: the job ends: line 99999999 of its script\n"])
def test_outputs_that_name_no_line(tmp_path: Path, text: str) -> None:
    output = tmp_path / "job.out"
    output.write_text(text)
    assert failed_line(output) is None
    assert failed_line(tmp_path / "none.out") is None


def test_bytes_that_are_no_text_before_the_line(tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    output.write_bytes(
        b"\xff\xfe\n" * 700_000 + b"vitscale: the job ends: line 9 of its script failed with exit code 1: x\n"
    )
    assert failed_line(output) == "line 9 of its script failed with exit code 1: x"


def test_a_failed_line_is_printable_and_short(tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    output.write_text(f"vitscale: the job ends: line 9 of its script failed with exit code 1: \x1b[2J\t{'x' * 999}\n")
    said = failed_line(output) or ""
    assert said.startswith("line 9 of its script failed with exit code 1: ?[2J?xxx")
    assert said.endswith("x...")
    assert len(said) == 303


@pytest.mark.parametrize("name", ["cuda; rm -rf /", "-h", "", "$(x)"])
def test_names_that_no_module_has(name: str) -> None:
    with pytest.raises(RequestError, match=r"pbs\.modules has"):
        refuse_module_names([name], "pbs")
