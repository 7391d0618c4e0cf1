"""A laboratory leaves nothing, and never touches what is not its own: ended in order, killed, or half made."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import needs
from driving import vitscale
from lab.outside import left_of, machine, namespaces_of
from processes import alive, pid_in, wait_until
from vitscale.errors import RequestError
from vitscale.lab import Laboratory, LabPlan, down, laboratories, laboratory, processes, state, up
from vitscale.lab.processes import Process, process
from vitscale.lab.state import Holder

NAME = f"test-{os.getpid()}"

# Sleepers of every kind that is hard to end: deaf, stopped, a daemon.
UNRULY = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
for how in ("deaf", "stopped", "daemon"):
    if os.fork() == 0:
        if how == "deaf":
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
        if how == "daemon":
            os.setsid()
            if os.fork():
                os._exit(0)
        (folder / how).write_text("1\\n")
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
time.sleep(600)
"""
KINDS = ("deaf", "stopped", "daemon")


@pytest.fixture(autouse=True)
def held() -> Iterator[contextlib.ExitStack]:
    """Holds namespaces open for a test, after which nothing may be left."""
    needs.root_and("ip", "tc", "unshare", "nsenter", "ssh", "sshd")
    before = machine()
    with contextlib.ExitStack() as held:
        yield held
    down(NAME)
    assert left_of(NAME) == []
    assert machine() == before


def start_unruly(lab: Laboratory, host: int, folder: Path) -> subprocess.Popen[bytes]:
    running = subprocess.Popen(lab.command(host, [sys.executable, "-S", "-c", UNRULY, str(folder)]))
    for how in KINDS:
        pid_in(folder / how)
    return running


def test_the_end_of_a_block_ends_everything_inside(tmp_path: Path, held: contextlib.ExitStack) -> None:
    before = machine()
    with laboratory(name=NAME, bandwidth_mbit=100.0, cores_per_host=0.5) as lab:
        assert machine() == before
        namespaces = namespaces_of(lab.state, held)
        running = start_unruly(lab, 1, tmp_path)
        waiting = subprocess.Popen(lab.command(0, ["sleep", "600"]))
        wait_until(lambda: lab.processes(0), "a command runs")
        waiting.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
        inside = lab.processes(1)
        assert len(inside) == 4
        assert len(left_of(NAME, namespaces)) > 8
    assert left_of(NAME, namespaces) == []
    assert not any(map(alive, inside))
    assert running.wait(60) == -signal.SIGKILL
    assert waiting.wait(60) == -signal.SIGKILL


def test_a_host_that_is_gone_is_gone_alone(tmp_path: Path) -> None:
    with laboratory(3, name=NAME) as lab:
        running = start_unruly(lab, 1, tmp_path)
        lab.kill(1)
        assert running.wait(60) == -signal.SIGKILL
        assert lab.processes(1) == []
        assert subprocess.run(lab.command(0, ["ssh", "host2", "true"]), check=False).returncode == 0
        late = subprocess.run(lab.command(1, ["true"]), capture_output=True, text=True, check=False)
        assert (late.returncode, late.stderr[:31]) == (126, "vitscale lab: the host is gone:")
        lab.kill(1)


def test_down_ends_what_up_made_and_what_hangs_inside(tmp_path: Path, held: contextlib.ExitStack) -> None:
    assert vitscale("lab", "up", "--name", NAME, "--cores-per-host", "0.5", "--bandwidth", "100mbit").returncode == 0
    lab = next(one for one in laboratories()[0] if one.state.name == NAME)
    namespaces = namespaces_of(lab.state, held)
    running = start_unruly(lab, 0, tmp_path)
    answer = vitscale("lab", "down", "--name", NAME, timeout=300)
    assert (answer.returncode, answer.stdout) == (0, f"Lab '{NAME}' is gone.\n")
    assert left_of(NAME, namespaces) == []
    assert running.wait(60) == -signal.SIGKILL
    again = vitscale("lab", "down", "--name", NAME)
    assert (again.returncode, again.stdout) == (0, f"There is no lab '{NAME}': nothing to do.\n")


def test_after_sigkill_of_all_that_up_started_nothing_runs_and_down_removes_the_rest(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    made = up(LabPlan(NAME, cores_per_host=0.5))
    namespaces = namespaces_of(made, held)
    running = start_unruly(Laboratory(made), 1, tmp_path)
    for holder in made.holders:
        os.kill(holder.outside.pid, signal.SIGKILL)
    assert running.wait(60) == -signal.SIGKILL
    wait_until(lambda: not [one for one in left_of(NAME, namespaces) if "process" in one], "all are gone")
    assert vitscale("lab", "exec", "--name", NAME, "host0", "--", "true").returncode == 2
    assert down(NAME)
    assert left_of(NAME, namespaces) == []


def test_a_recycled_process_id_is_never_killed() -> None:
    """The file names processes by when they started: of one of them another has the id now."""
    made = up(LabPlan(NAME, hosts=1))
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            now = process(bystander.pid)
            earlier = Process(pid=now.pid, start_ticks=now.start_ticks - 1)
            gone = Holder(name="host1", outside=earlier, first=earlier)
            state.write(made.model_copy(update={"hosts": (*made.hosts, gone)}))
            assert down(NAME)
            assert alive(bystander.pid)
        finally:
            bystander.kill()


IN_A_BLOCK = """
import sys, time
from vitscale.lab import laboratory
with laboratory(name=sys.argv[1], cores_per_host=0.5):
    print("made", flush=True)
    time.sleep(600)
"""


def test_a_block_whose_process_is_killed_leaves_nothing(held: contextlib.ExitStack) -> None:
    with subprocess.Popen([sys.executable, "-c", IN_A_BLOCK, NAME], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "made\n"
        namespaces = [
            name for lab in laboratories()[0] if lab.state.name == NAME for name in namespaces_of(lab.state, held)
        ]
        user.kill()
    assert len(namespaces) >= 15
    wait_until(lambda: left_of(NAME, namespaces) == [], "nothing is left")


def _holders() -> int:
    found = [one.state for one in laboratories()[0] if one.state.name == NAME]
    return len(found[0].hosts) + 1 if found else 0


@pytest.mark.parametrize("holders", [1, 4])
def test_an_up_that_is_killed_leaves_nothing(holders: int) -> None:
    argv = [sys.executable, "-m", "vitscale", "lab", "up", "--name", NAME, "--hosts", "8", "--cores-per-host", "0.5"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as making:
        wait_until(lambda: _holders() >= holders, "it has come so far")
        making.kill()
    wait_until(lambda: left_of(NAME) == [], "nothing is left")


def test_an_up_that_fails_half_way_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "tc"
    refusing.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not supported' >&2\nexit 2\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RequestError, match="RTNETLINK answers: Operation not supported"):
        up(LabPlan(NAME, bandwidth_mbit=100.0))
    assert left_of(NAME) == []


@pytest.mark.parametrize("using", [laboratory, lambda name: up(LabPlan(name))], ids=["block", "up"])
def test_a_name_that_is_taken_is_refused_and_its_lab_stays(using: Callable[..., object]) -> None:
    made = up(LabPlan(NAME, hosts=1))
    with pytest.raises(RequestError, match=f"a lab '{NAME}' exists already.*vitscale lab down --name {NAME}"):
        using(name=NAME).__enter__()  # type: ignore[attr-defined]  # a context manager, never left
    assert made.hosts[0].first.alive


def test_two_labs_know_nothing_of_each_other() -> None:
    with laboratory(1, name=NAME) as one, laboratory(1) as other:
        assert one.addresses == other.addresses
        subprocess.run(one.command(0, ["touch", "/run/of-the-first"]), check=True)
        seen = subprocess.run(other.command(0, ["ls", "/run"]), capture_output=True, text=True, check=True).stdout
        assert "of-the-first" not in seen
        assert NAME not in seen


def test_without_sshd_hosts_are_made_without_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ip", "tc", "unshare", "nsenter", "mount", "mkdir", "rmdir", "ssh", "ssh-keygen", "true"):
        (tmp_path / name).symlink_to(processes.find(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(processes, "_SYSTEM_FOLDERS", ())
    made = up(LabPlan(NAME))
    assert made.missing_for_ssh == ("openssh-server",)
    assert subprocess.run(Laboratory(made).command(0, ["true"]), check=False).returncode == 0
