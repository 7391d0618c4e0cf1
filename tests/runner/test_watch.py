"""Watching real processes that write what ranks write, at the pace the test sets."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

import pytest

from processes import alive, pid_in
from vitscale.launchers import Spawn
from vitscale.machine.hosts import Host
from vitscale.processes.heartbeat_server import HeartbeatServer, RankStatus
from vitscale.processes.host_agent import processes_of_run
from vitscale.runner import watch as watching
from vitscale.runner.watch import StepCounter, watch
from vitscale.schedulers import Job
from vitscale.store import RankLog
from vitscale.store.records import PhaseLine, StepLine

STEP = StepLine(step=0, epoch=0, seconds=0.1, images=8, loss=0.5, warmup=False).model_dump_json()
PHASE = PhaseLine(name="imports", seconds=1.0).model_dump_json()


def job(folder: Path, program: str) -> Job:
    command = (sys.executable, "-c", program, str(folder))
    token = secrets.token_hex(16)
    return Job(Spawn((command,), folder, token=token, cwd=folder), HeartbeatServer(token, "127.0.0.1"))


# --- counting ------------------------------------------------------------------------------------------------------


def append(folder: Path, rank: int, text: str) -> None:
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(text)


def test_only_whole_steps_of_rank_0_are_counted_and_each_once(tmp_path: Path) -> None:
    counter = StepCounter(tmp_path)
    assert not counter.update()
    append(tmp_path, 0, f"{PHASE}\n{STEP}\n{STEP[:20]}")
    assert counter.update()
    assert counter.steps == 1
    append(tmp_path, 0, f"{STEP[20:]}\n{STEP}\n")
    assert counter.update()
    assert counter.steps == 3
    assert not counter.update()
    assert counter.steps == 3


def test_any_rank_gives_a_sign_of_life(tmp_path: Path) -> None:
    counter = StepCounter(tmp_path)
    append(tmp_path, 7, f"{STEP}\n")
    assert counter.update()
    assert counter.steps == 0
    append(tmp_path, 7, "x")
    assert counter.update()
    (tmp_path / "log.txt").write_text("chatter")
    assert not counter.update()


# --- a run that ends by itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_ends_by_itself(tmp_path: Path, code: int) -> None:
    ending = watch(
        job(tmp_path, f"raise SystemExit({code})"), tmp_path, hang_seconds=60.0, timeout_seconds=None, on_progress=print
    )
    assert (ending.exit_code, ending.stopped, ending.limit_seconds) == (code, None, None)
    assert ending.wall_seconds > 0
    assert ending.started_unix_seconds > 1.7e9


def test_a_host_on_which_ssh_begins_nothing_is_told_with_what_was_said_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that this machine is, and not one where it did begin."""
    (tmp_path / "ssh").write_text(
        '#!/bin/sh\ntest "$1" = there || echo "Permission denied (publickey)." >&2\nexit $2\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    token = secrets.token_hex(16)
    commands = (("sh", "-c", "exit 127"), ("ssh", "there", "1"), ("ssh", "away", "255"))
    hosts = tuple(map(Host, ("here", "there", "away")))
    spawn = Spawn(commands, tmp_path, hosts, token=token, cwd=tmp_path, per_host=True)
    ending = watch(Job(spawn, HeartbeatServer(token, "127.0.0.1")), tmp_path, hang_seconds=60, timeout_seconds=None)
    assert (ending.not_begun, ending.last_words) == ((("away", 255),), "Permission denied (publickey).")


def test_steps_are_passed_on(tmp_path: Path) -> None:
    """The program goes on only when the driver has seen what it wrote."""
    program = (
        "import os, sys, time; folder = sys.argv[1]\n"
        "for n in (2, 3):\n"
        f"  with open(folder + '/rank-0.jsonl', 'a') as file: file.write(n * '{STEP}\\n')\n"
        "  while not os.path.exists(f'{folder}/seen-{n}'): time.sleep(0.01)\n"
    )
    told = []

    def on_progress(steps: int, _phase: str) -> None:
        told.append(steps)
        (tmp_path / {2: "seen-2", 5: "seen-3"}[steps]).touch()

    assert (
        watch(
            job(tmp_path, program), tmp_path, hang_seconds=60.0, timeout_seconds=None, on_progress=on_progress
        ).exit_code
        == 0
    )
    assert told == [2, 5]


def test_what_a_launcher_leaves_behind_is_ended(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open(sys.argv[1] + '/child', 'w').write(f'{child.pid}\\n')\n"
    )
    ending = watch(job(tmp_path, program), tmp_path, hang_seconds=60.0, timeout_seconds=None, on_progress=print)
    assert ending.exit_code == 0
    assert not alive(pid_in(tmp_path / "child"))


# --- a run that must be ended --------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when the test says so; every look costs `tick` seconds."""

    def __init__(self, tick: float) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Silent:
    """A listener whom nobody calls."""

    def statuses(self) -> dict[int, RankStatus]:
        return {}

    def ask_for_stacks(self) -> None: ...

    def close(self) -> None: ...


class FakeJob:
    """Stands in for a job whose launcher ends after `looks` looks; each look does what `at` holds for it."""

    started_unix_seconds = 1.0
    not_begun = ()

    def __init__(
        self, clock: Clock, looks: int, at: dict[int, object] | None = None, heartbeats: object = None
    ) -> None:
        self.clock, self.looks, self.at = clock, looks, at or {}
        self.heartbeats = heartbeats or Silent()
        self.looked = self.ended = 0

    def wait(self, seconds: float) -> int | None:
        action = self.at.get(self.looked)
        self.looked += 1
        if callable(action):
            action()
        return self.exit_code

    @property
    def exit_code(self) -> int | None:
        return 0 if self.looked > self.looks else None

    @property
    def wall_seconds(self) -> float:
        return self.clock.now

    def end(self) -> tuple[str, ...]:
        self.ended += 1
        return ()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(tick=1.0)
    monkeypatch.setattr(time, "monotonic", found)
    return found


def test_a_silent_run_is_a_hang_after_its_limit(tmp_path: Path, clock: Clock) -> None:
    stuck = FakeJob(clock, looks=10**9)
    ending = watch(stuck, tmp_path, hang_seconds=20.0, timeout_seconds=None, on_progress=print)  # type: ignore[arg-type]  # a stand-in for a job
    assert (ending.stopped, ending.limit_seconds, ending.exit_code) == ("hang", 20.0, None)
    assert stuck.looked == 21
    assert stuck.ended == 1


def test_any_record_of_any_rank_puts_the_hang_off(tmp_path: Path, clock: Clock) -> None:
    slow = FakeJob(clock, looks=50, at={n: lambda: append(tmp_path, 3, PHASE + "\n") for n in (15, 30, 45)})
    ending = watch(slow, tmp_path, hang_seconds=20.0, timeout_seconds=None, on_progress=print)  # type: ignore[arg-type]  # a stand-in for a job
    assert (ending.stopped, ending.exit_code) == (None, 0)
    assert slow.ended == 1


def test_a_step_that_is_told_over_the_line_puts_the_hang_off(tmp_path: Path, clock: Clock) -> None:
    """Before a network file system shows it."""

    class Telling(Silent):
        asked = 0

        def statuses(self) -> dict[int, RankStatus]:
            self.asked += 1
            return {3: RankStatus(host="host1", pid=1, heard_seconds=clock.now, step=min(self.asked, 40) // 15)}

    stuck = FakeJob(clock, looks=10**9, heartbeats=Telling())
    ending = watch(stuck, tmp_path, hang_seconds=20.0, timeout_seconds=None, on_progress=print)  # type: ignore[arg-type]  # a stand-in for a job
    assert ending.stopped == "hang"
    assert 30 + 20 <= stuck.looked <= 30 + 22  # its last new step came at the 30th look


def test_a_phase_of_start_up_is_passed_on_when_it_changes(tmp_path: Path, clock: Clock) -> None:
    class Starting(Silent):
        asked = 0

        def statuses(self) -> dict[int, RankStatus]:
            self.asked += 1
            phase = "start-up: engine" if self.asked < 5 else "compiling fused_adam"
            return {0: RankStatus(host="host1", pid=1, heard_seconds=clock.now, phase=phase)}

    told: list[tuple[int, str]] = []

    def tell(steps: int, phase: str) -> None:
        told.append((steps, phase))

    short = FakeJob(clock, looks=10, heartbeats=Starting())
    watch(short, tmp_path, hang_seconds=20.0, timeout_seconds=None, on_progress=tell)  # type: ignore[arg-type]  # a stand-in for a job
    assert told == [(0, "engine"), (0, "compiling fused_adam")]


def test_a_busy_run_is_ended_at_its_timeout(tmp_path: Path, clock: Clock) -> None:
    busy = FakeJob(clock, looks=10**9, at={n: lambda: append(tmp_path, 0, STEP + "\n") for n in range(1000)})
    ending = watch(busy, tmp_path, hang_seconds=20.0, timeout_seconds=90.0, on_progress=print)  # type: ignore[arg-type]  # a stand-in for a job
    assert (ending.stopped, ending.limit_seconds) == ("timeout", 90.0)
    assert ending.wall_seconds == pytest.approx(91.0, abs=2.0)


def test_a_real_hang_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open(sys.argv[1] + '/child', 'w').write(f'{child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    hanging = job(tmp_path, program)
    child = pid_in(tmp_path / "child")
    ending = watch(hanging, tmp_path, hang_seconds=0.3, timeout_seconds=None, on_progress=print)
    assert ending.stopped == "hang"
    assert not alive(child)
    assert hanging.exit_code == -9


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    running = job(
        tmp_path, f"import sys, time; open(sys.argv[1] + '/rank-0.jsonl', 'w').write('{STEP}\\n'); time.sleep(600)"
    )

    def on_progress(_steps: int, _phase: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(running, tmp_path, hang_seconds=60.0, timeout_seconds=None, on_progress=on_progress)
    assert running.exit_code is not None
    assert not processes_of_run(running.token)


def test_what_the_kernel_killed_meanwhile_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 7])
    monkeypatch.setattr(watching, "kernel_oom_kills", lambda: next(counts))
    ending = watch(job(tmp_path, "pass"), tmp_path, hang_seconds=60.0, timeout_seconds=None, on_progress=print)
    assert ending.kernel_oom_kills == 2


def test_a_rank_that_touches_its_record_is_alive_though_it_records_nothing(tmp_path: Path) -> None:
    """Evaluation writes no lines; it must not be taken for a hang."""
    log = RankLog(tmp_path, 0)
    counter = StepCounter(tmp_path)
    assert counter.update()
    assert not counter.update()
    os.utime(log.path, ns=(0, 0))
    assert counter.update()
    log.alive()
    assert counter.update()
    assert not counter.update()
    log.close()
