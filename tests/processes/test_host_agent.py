"""The host agent as a remote shell starts it: a module of its own, with a driver that is a real listener."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heartbeats import TOKEN, write_launch
from processes import alive, pid_in, wait_until
from vitscale.processes import launch_file
from vitscale.processes.heartbeat import LOST_DRIVER_EXIT_CODE
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.host_agent import processes_of_run
from vitscale.processes.launch_file import TOKEN_VARIABLE, name_of

KEEPER = [sys.executable, "-m", "vitscale.processes.host_agent"]

# An agent that ends when it is asked to, with two generations of ranks that do not: deaf, and one of them stopped.
AGENT = """
import os, signal, subprocess, sys, time
folder, generation = sys.argv[1], int(sys.argv[2])
if generation:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if generation < 2:
    subprocess.Popen([sys.executable, "-c", open(f"{folder}/agent").read(), folder, str(generation + 1)],
                     start_new_session=True)
with open(f"{folder}/{generation}.draft", "w") as file:
    file.write(f"{os.getpid()}\\n")
os.rename(f"{folder}/{generation}.draft", f"{folder}/{generation}")
if generation == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


@pytest.fixture
def heartbeats() -> Iterator[HeartbeatServer]:
    heartbeats = HeartbeatServer(TOKEN, "127.0.0.1")
    yield heartbeats
    heartbeats.close()
    for process in processes_of_run(TOKEN):
        process.kill()


def keep(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KEEPER, str(folder), "--", *command], capture_output=True, text=True, timeout=300)


def start_agent(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A host agent with its command and two generations of ranks below that; nobody reads what it says."""
    (folder / "agent").write_text(AGENT)
    argv = [*KEEPER, str(folder), "--", sys.executable, "-c", AGENT, str(folder), "0"]
    host_agent = subprocess.Popen(argv, stderr=subprocess.PIPE)
    assert host_agent.stderr is not None
    host_agent.stderr.close()
    return host_agent, [pid_in(folder / str(generation)) for generation in range(3)]


def test_everything_ends_when_the_driver_is_gone(tmp_path: Path, heartbeats: HeartbeatServer) -> None:
    """The agent goes first, its ranks do not want to, and the other end of the remote shell is gone."""
    write_launch(tmp_path, heartbeats.port)
    host_agent, pids = start_agent(tmp_path)
    heartbeats.close()
    assert host_agent.wait(60.0) == LOST_DRIVER_EXIT_CODE
    assert [alive(pid) for pid in pids] == [False] * 3


def test_the_agent_ends_with_a_host_agent_that_is_killed(tmp_path: Path, heartbeats: HeartbeatServer) -> None:
    write_launch(tmp_path, heartbeats.port)
    host_agent, pids = start_agent(tmp_path)
    host_agent.kill()
    host_agent.wait()
    wait_until(lambda: not alive(pids[0]), "the agent is gone")
    # Those that are no children of the agent's are found by their token.
    assert subprocess.run([*KEEPER, "--end", name_of(TOKEN)], timeout=300).returncode == 0
    assert [alive(pid) for pid in pids] == [False] * 3


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = subprocess.Popen(asleep, env=os.environ | {TOKEN_VARIABLE: "another"})
    try:
        assert subprocess.run([*KEEPER, "--end", name_of("anothe")], timeout=300).returncode == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_its_exit_code_is_the_command_s_as_a_shell_tells_it(
    tmp_path: Path, heartbeats: HeartbeatServer, program: str, code: int
) -> None:
    write_launch(tmp_path, heartbeats.port)
    answer = keep(tmp_path, sys.executable, "-c", program)
    assert (answer.returncode, answer.stdout, answer.stderr) == (code, "", "")
    assert not heartbeats.statuses(), "it is no rank"


def test_the_command_gets_its_words_as_they_are_and_the_run_s_environment(
    tmp_path: Path, heartbeats: HeartbeatServer
) -> None:
    write_launch(tmp_path, heartbeats.port, environment={"COLOUR": "it's $(blue)"})
    program = "import os, sys; print(sys.argv[1:], os.environ['COLOUR'], os.environ['VITSCALE_JOB'])"
    answer = keep(tmp_path, sys.executable, "-c", program, "two words", "--end", "$HOME")
    assert answer.stdout == f"['two words', '--end', '$HOME'] it's $(blue) {TOKEN}\n"


def test_a_folder_that_is_not_shared_is_said(tmp_path: Path) -> None:
    answer = keep(tmp_path / "runs", "true")
    assert (answer.returncode, answer.stderr) == (
        1,
        f"vitscale: {tmp_path}/runs is not seen on this host: is the results folder shared by all hosts?\n",
    )


def test_what_cannot_be_kept_is_one_message(tmp_path: Path, heartbeats: HeartbeatServer) -> None:
    (tmp_path / launch_file.NAME).write_text("{}")
    assert "launch.json cannot be read on this host: " in refused(keep(tmp_path, "true"))
    write_launch(tmp_path, heartbeats.port)
    assert refused(keep(tmp_path, "no-such-program")) == (
        "vitscale: no-such-program cannot be run: No such file or directory\n"
    )
    write_launch(tmp_path, heartbeats.port, lifeline=None)
    assert "the driver at None is not reached from this host: this run has no heartbeat" in refused(
        keep(tmp_path, "true")
    )
    write_launch(tmp_path, 1)
    assert "the driver at 127.0.0.1:1 is not reached from this host: " in refused(keep(tmp_path, "true"))


def refused(answer: subprocess.CompletedProcess[str]) -> str:
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("vitscale: ")
    assert "Traceback" not in answer.stderr
    return answer.stderr


@pytest.mark.parametrize("arguments", [[], ["folder"], ["folder", "--"], ["--end"], ["--end", "a", "b"]])
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    answer = subprocess.run([*KEEPER, *arguments], capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == "usage: python -m vitscale.processes.host_agent FOLDER -- COMMAND... | --end NAME\n"
