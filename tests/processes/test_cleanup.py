"""Real processes of a run: see tests/schedulers/test_local.py for all that a tree of them can do."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processes import alive, pid_in, wait_until
from vitscale.processes.host_agent import end_all, processes_of_run
from vitscale.processes.launch_file import TOKEN_VARIABLE

ASLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def token() -> Iterator[str]:
    made = secrets.token_hex(16)
    yield made
    for process in processes_of_run(made):
        process.kill()


def test_those_that_carry_the_token_are_found_and_ended_and_no_others(token: str) -> None:
    mine = [subprocess.Popen(ASLEEP, env=os.environ | {TOKEN_VARIABLE: token}) for _ in range(2)]
    other = subprocess.Popen(ASLEEP, env=os.environ | {TOKEN_VARIABLE: token + "0"})
    try:
        wait_until(lambda: len(processes_of_run(token)) == 2, "both are there")
        assert {process.pid for process in processes_of_run(token)} == {process.pid for process in mine}
        end_all(token)
        assert not processes_of_run(token)
        assert other.poll() is None
        # Their exit codes are left to whoever started them.
        assert [process.wait() for process in mine] == [-15, -15]
    finally:
        other.kill()
        other.wait()
    assert not processes_of_run("a token that nobody carries")


STARTS_ANOTHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=sys.argv[1] == "apart")
import time; time.sleep(600)
"""


def test_a_session_is_ended_with_its_leader_and_what_left_it_is_not(token: str) -> None:
    """As forks of a prepared process are, which carry no token."""
    command = [sys.executable, "-c", STARTS_ANOTHER]
    session = subprocess.Popen([*command, "within"], start_new_session=True)
    not_yet_a_session = subprocess.Popen(ASLEEP)
    outside = subprocess.Popen([*command, "apart"], start_new_session=True)
    started = [session.pid, not_yet_a_session.pid]
    apart: list[psutil.Process] = []
    try:
        wait_until(lambda: len(processes_of_run(token, started)) == 3, "all three are there")
        wait_until(lambda: len(psutil.Process(outside.pid).children()) == 1, "it has started another")
        apart = psutil.Process(outside.pid).children()
        assert not processes_of_run(token)
        end_all(token, sessions=[*started, outside.pid])
        assert not processes_of_run(token, started)
        assert [session.wait(), not_yet_a_session.wait(), outside.wait()] == [-15, -15, -15]
        assert apart[0].is_running(), "it has left the session, and carries no token: it is not the run's"
    finally:
        for process in (session, not_yet_a_session, outside):
            process.kill()
            process.wait()
        for child in apart:
            child.kill()


# Asked to end, it starts another like itself in a session of its own, three times.
RESPAWNS = """
import os, signal, subprocess, sys, time
path, left = sys.argv[1], int(sys.argv[2])
def again(*_):
    subprocess.Popen([sys.executable, "-c", open(sys.argv[3]).read(), path, str(left - 1), sys.argv[3]],
                     start_new_session=True)
    os._exit(0)
if left:
    signal.signal(signal.SIGTERM, again)
with open(f"{path}-{left}.draft", "w") as file:
    file.write(f"{os.getpid()}\\n")
os.rename(f"{path}-{left}.draft", f"{path}-{left}")
time.sleep(600)
"""


def test_what_is_started_meanwhile_is_ended_too(tmp_path: Path, token: str) -> None:
    (tmp_path / "program").write_text(RESPAWNS)
    argv = [sys.executable, "-c", RESPAWNS, str(tmp_path / "pid"), "3", str(tmp_path / "program")]
    first = subprocess.Popen(argv, env=os.environ | {TOKEN_VARIABLE: token})
    pid_in(tmp_path / "pid-3")
    end_all(token)
    assert not processes_of_run(token)
    assert first.wait() == 0
    for path in tmp_path.glob("pid-?"):
        assert not alive(int(path.read_text()))


# Starts a child that carries its token, ends all that carry it, and says whether the child is gone.
ENDS_ITS_OWN = """
import os, subprocess, sys
from vitscale.processes.host_agent import end_all
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
end_all(os.environ["VITSCALE_JOB"])
print(child.wait())
"""


def test_the_caller_is_left_out(token: str) -> None:
    """A host agent carries what it ends."""
    answer = subprocess.run(
        [sys.executable, "-c", ENDS_ITS_OWN],
        env=os.environ | {TOKEN_VARIABLE: token},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (answer.returncode, answer.stdout) == (0, "-15\n"), answer.stderr
