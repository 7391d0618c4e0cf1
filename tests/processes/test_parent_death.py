from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import alive, pid_in, wait_until

TIE = [sys.executable, "-m", "vitscale.processes.parent_death"]

# Starts a tied process and waits to be killed.
PARENT = """
import os, subprocess, sys, time
program = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
module = "vitscale.processes.parent_death"
child = subprocess.Popen([sys.executable, "-m", module, str(os.getpid()), "--", sys.executable, "-c", program],
                         stdout=open(sys.argv[1], "w"), start_new_session=True)
time.sleep(600)
"""


def test_it_becomes_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)",
        "two words",
        "$HOME",
    ]
    process = subprocess.Popen([*TIE, str(os.getpid()), "--", *command], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    assert output.strip() == f"{process.pid} ['two words', '$HOME']"
    assert process.returncode == 7


def test_it_dies_with_a_parent_killed_by_sigkill(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "pid")])
    tied = pid_in(tmp_path / "pid")
    assert alive(tied)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not alive(tied), "the tied process is gone")


def test_it_starts_nothing_when_the_parent_is_already_gone(tmp_path: Path) -> None:
    answer = subprocess.run(
        [*TIE, "1", "--", sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'w')"],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert answer.stderr == "vitscale: the driver is gone\n"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "arguments", [[], ["1"], ["1", "--"], ["1", "true"], ["x", "--", "true"], ["-1", "--", "true"]]
)
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    answer = subprocess.run([*TIE, *arguments], capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == "usage: python -m vitscale.processes.parent_death PID -- COMMAND...\n"


def test_a_command_that_cannot_be_run_is_one_message(tmp_path: Path) -> None:
    answer = subprocess.run([*TIE, str(os.getpid()), "--", "no-such-program"], capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == "vitscale: no-such-program cannot be run: No such file or directory\n"
