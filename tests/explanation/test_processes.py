"""The command's processes, by real ones: whatever they do, they are found and ended, and nobody else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processes import alive, pid_in, wait_until
from vitscale.explanation.processes import CommandProcesses

IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FORKS_A_DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    write("daemon")
    wait_for_ever()
os.wait()
"""
LEAVES_WITH_A_CLEARED_ENVIRONMENT = """
wait = "import os, pathlib, time; pathlib.Path('leaver').write_text(f'{os.getpid()}\\\\n'); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", wait], env={}, start_new_session=True)
"""
PROGRAM = """
import os, pathlib, signal, subprocess, sys, time

def write(name):
    pathlib.Path(name).write_text(f"{{os.getpid()}}\\n")

def wait_for_ever():
    while True:
        time.sleep(600)

{body}
write("command")
wait_for_ever()
"""


class Started:
    """A command in a session of its own, with a folder in its PYTHONPATH."""

    def __init__(self, folder: Path, body: str) -> None:
        self.hook = folder / "hook"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=body)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(self.hook)},
            start_new_session=True,
        )
        self.pid = pid_in(folder / "command")
        self.processes = CommandProcesses(self.pid, self.hook)


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Commands that a test starts; those that it leaves are killed."""
    commands: list[Started] = []
    yield commands
    for command in commands:
        command.processes.kill(10.0)
        command.process.wait()


def start(started: list[Started], folder: Path, body: str = "") -> Started:
    started.append(Started(folder, body))
    return started[-1]


def test_sigterm_ends_a_command_that_heeds_it(started: list[Started], tmp_path: Path) -> None:
    command = start(started, tmp_path)
    assert [process.pid for process in command.processes.live()] == [command.pid]
    assert command.processes.end(grace_seconds=60.0) == []
    assert command.process.wait() == -signal.SIGTERM
    assert not command.processes.killed


def test_sigkill_ends_a_command_that_ignores_sigterm(started: list[Started], tmp_path: Path) -> None:
    command = start(started, tmp_path, IGNORES_SIGTERM)
    assert command.processes.end(grace_seconds=0.3) == []
    assert command.process.wait() == -signal.SIGKILL
    assert command.processes.killed


def test_a_stopped_command_is_ended(started: list[Started], tmp_path: Path) -> None:
    command = start(started, tmp_path)
    os.kill(command.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(command.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    assert command.processes.end(grace_seconds=60.0) == []
    assert command.process.wait() == -signal.SIGTERM


def test_a_daemon_that_left_the_session_is_found_by_its_search_path(started: list[Started], tmp_path: Path) -> None:
    command = start(started, tmp_path, FORKS_A_DAEMON)
    daemon = pid_in(tmp_path / "daemon")
    assert os.getsid(daemon) != command.pid
    assert {process.pid for process in command.processes.live()} == {command.pid, daemon}
    assert command.processes.end(grace_seconds=60.0) == []
    assert not alive(daemon)


def test_a_descendant_that_keeps_neither_session_nor_environment_is_known(
    started: list[Started], tmp_path: Path
) -> None:
    command = start(started, tmp_path, LEAVES_WITH_A_CLEARED_ENVIRONMENT)
    leaver = pid_in(tmp_path / "leaver")
    command.processes.note_descendants()
    os.kill(command.pid, signal.SIGKILL)
    command.process.wait()
    assert alive(leaver)
    assert [process.pid for process in command.processes.live()] == [leaver]
    assert command.processes.end(grace_seconds=60.0) == []
    assert not alive(leaver)


def test_another_command_is_left_alone(started: list[Started], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    command = start(started, tmp_path)
    other = start(started, tmp_path / "other")
    command.processes.end(grace_seconds=60.0)
    assert alive(other.pid)


def test_this_process_is_never_of_the_command(tmp_path: Path) -> None:
    """Not even where it is in the session that is looked at."""
    processes = CommandProcesses(os.getsid(0), tmp_path / "hook")
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    assert ours.isdisjoint(process.pid for process in processes.live())


def test_a_process_is_described_by_its_program(started: list[Started], tmp_path: Path) -> None:
    command = start(started, tmp_path)
    (described,) = command.processes.described()
    assert described.pid == command.pid
    assert described.program == Path(sys.executable).name
