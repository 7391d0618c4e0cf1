"""Real process trees, as unruly as launchers and ranks can be."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from processes import alive, pid_in, wait_until
from vitscale.launchers import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.schedulers import Job

# A process that says who it is, and sleeps. `how` is what it does first.
SLEEPER = """
import os, signal, sys, time
how, path = sys.argv[1:]
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "daemon":
    if os.fork():
        os._exit(0)
    os.setsid()
with open(path + ".draft", "w") as file:
    file.write(f"{os.getpid()}\\n")
os.rename(path + ".draft", path)
if how == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""

# Starts one sleeper of every kind in a session of its own, then does as its last argument says.
TREE = """
import os, subprocess, sys, time
folder, then = sys.argv[1:]
for how in ("plain", "deaf", "daemon", "stopped"):
    subprocess.Popen([sys.executable, os.path.join(folder, "sleeper.py"), how, os.path.join(folder, how)],
                     start_new_session=True)
while not all(os.path.exists(os.path.join(folder, how)) for how in ("plain", "deaf", "daemon", "stopped")):
    time.sleep(0.01)
if then == "leave":
    sys.exit(3)
time.sleep(600)
"""
KINDS = ("plain", "deaf", "daemon", "stopped")


def start(folder: Path, *commands: list[str], drop: tuple[str, ...] = (), **environment: str) -> Job:
    token = secrets.token_hex(16)
    argv = tuple(map(tuple, commands))
    spawn = Spawn(argv, folder, token=token, cwd=folder, environment=environment, drop_variables=drop)
    return Job(spawn, HeartbeatServer(token, "127.0.0.1"))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are deaf would be waited for in vain."""
    monkeypatch.setattr("vitscale.processes.host_agent._GRACE_SECONDS", 0.2)


def start_tree(folder: Path, then: str) -> tuple[Job, dict[str, int]]:
    (folder / "sleeper.py").write_text(SLEEPER)
    job = start(folder, [sys.executable, "-c", TREE, str(folder), then])
    pids = {how: pid_in(folder / how) for how in KINDS}
    wait_until(lambda: psutil.Process(pids["stopped"]).status() == psutil.STATUS_STOPPED, "one is stopped")
    return job, pids


def test_a_command_runs_with_its_folder_environment_and_log(tmp_path: Path) -> None:
    program = (
        "import os, sys; print(os.getcwd(), os.environ['COLOUR']); print('and errors', file=sys.stderr); sys.exit(5)"
    )
    job = start(tmp_path, [sys.executable, "-u", "-c", program], COLOUR="blue")
    assert job.wait(60.0) == 5
    job.end()
    assert job.exit_code == 5
    assert (tmp_path / "log.txt").read_text() == f"{tmp_path} blue\nand errors\n"
    assert job.wall_seconds > 0


def test_a_signal_is_a_negative_exit_code(tmp_path: Path) -> None:
    job = start(tmp_path, [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"])
    assert job.wait(60.0) == -signal.SIGSEGV
    job.end()


def test_waiting_ends_after_the_time_given(tmp_path: Path) -> None:
    job = start(tmp_path, [sys.executable, "-c", "import time; time.sleep(600)"])
    assert job.wait(0.01) is None
    assert job.exit_code is None
    job.end()
    assert job.exit_code == -signal.SIGTERM


@pytest.mark.parametrize("then", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)"])
def test_it_is_asked_before_it_is_killed_even_where_it_is_stopped(tmp_path: Path, then: str) -> None:
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('tidied up', flush=True), sys.exit(0)))\n"
        f"print('ready', flush=True)\n{then}"
    )
    job = start(tmp_path, [sys.executable, "-c", program])
    asleep = psutil.STATUS_STOPPED if "SIGSTOP" in then else psutil.STATUS_SLEEPING
    # Not before: while a process changes into another program it has no environment.
    wait_until(lambda: "ready" in (tmp_path / "log.txt").read_text(), "the program runs")
    (child,) = (p for p in psutil.Process().children() if p.environ().get("VITSCALE_JOB") == job.token)
    wait_until(lambda: child.status() == asleep, "the job is ready")
    job.end()
    assert (tmp_path / "log.txt").read_text() == "ready\ntidied up\n"


@pytest.mark.parametrize("then", ["stay", "leave"])
@pytest.mark.usefixtures("short_grace")
def test_the_whole_tree_is_ended_whatever_it_does(tmp_path: Path, then: str) -> None:
    """Own sessions, SIGTERM ignored, stopped; and when the launcher has left them to init."""
    job, pids = start_tree(tmp_path, then)
    if then == "leave":
        assert job.wait(60.0) == 3
    job.end()
    assert {how for how, pid in pids.items() if alive(pid)} == set()


@pytest.mark.usefixtures("short_grace")
def test_other_processes_and_other_jobs_are_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, first_pids = start_tree(tmp_path / "a", "stay")
    second, second_pids = start_tree(tmp_path / "b", "stay")
    try:
        first.end()
        assert not any(alive(pid) for pid in first_pids.values())
        assert all(alive(pid) for pid in second_pids.values())
        assert bystander.poll() is None
    finally:
        second.end()
        bystander.kill()
        bystander.wait()
    assert not any(alive(pid) for pid in second_pids.values())


def test_ending_twice_does_no_harm(tmp_path: Path) -> None:
    job = start(tmp_path, [sys.executable, "-c", "pass"])
    job.wait(60.0)
    job.end()
    job.end()
    assert job.exit_code == 0


def test_a_world_around_the_driver_is_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vitscale started by a launcher: its ranks must not join that launcher's world."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("COLOUR", "blue")
    program = f"import os; print([os.environ.get(n) for n in {(*names, 'COLOUR')!r}], os.environ['VITSCALE_JOB'])"
    job = start(tmp_path, [sys.executable, "-c", program])
    assert job.wait(60.0) == 0
    job.end()
    assert (tmp_path / "log.txt").read_text() == f"{[None] * 6 + ['blue']} {job.token}\n"


def test_several_commands_end_when_all_have_ended(tmp_path: Path) -> None:
    waits = f"import os, sys, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    job = start(tmp_path, [sys.executable, "-c", "pass"], [sys.executable, "-c", waits])
    assert job.wait(0.5) is None
    (tmp_path / "go").touch()
    assert job.wait(60.0) == 0
    job.end()


def test_of_several_commands_the_first_that_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get a while to say why; one that never ends is not waited for."""
    monkeypatch.setattr("vitscale.schedulers.prepared._OTHERS_SECONDS", 0.2)
    job = start(
        tmp_path, [sys.executable, "-c", "raise SystemExit(7)"], [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    assert job.wait(60.0) == 7
    job.end()
    assert job.exit_code == 7


def test_variables_that_a_command_must_not_see_are_kept_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("COLOUR", "blue")
    program = "import os; print(os.environ.get('NCCL_DEBUG'), os.environ.get('COLOUR'))"
    job = start(tmp_path, [sys.executable, "-c", program], drop=("NCCL",))
    assert job.wait(60.0) == 0
    assert (tmp_path / "log.txt").read_text() == "None blue\n"


DRIVER = """
import sys, time
from pathlib import Path
from vitscale.launchers import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.schedulers import Job
folder = Path(sys.argv[1])
command = (sys.executable, str(folder / "sleeper.py"), "deaf", str(folder / "launcher"))
job = Job(Spawn((command,), folder, token="0123", cwd=folder), HeartbeatServer("0123", "127.0.0.1"))
time.sleep(600)
"""


def test_the_launcher_dies_with_a_driver_killed_by_sigkill(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)])
    launcher = pid_in(tmp_path / "launcher")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not alive(launcher), "the launcher is gone")


def test_no_open_file_of_the_driver_is_inherited(tmp_path: Path) -> None:
    """A rank that outlives its driver must not keep the results folder locked."""
    held = (tmp_path / "lock").open("w")
    os.set_inheritable(held.fileno(), True)
    program = (
        "import os; print(sorted(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n != '3'))"
    )
    job = start(tmp_path, [sys.executable, "-c", program])
    job.wait(60.0)
    job.end()
    held.close()
    assert str(tmp_path / "lock") not in (tmp_path / "log.txt").read_text()
    assert str(tmp_path / "log.txt") in (tmp_path / "log.txt").read_text()
