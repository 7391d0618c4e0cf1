"""What a prepared process is kept for, and what ends with the driver's hold of it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forks import fork_what_is_prepared
from launching import a_trial, world
from processes import alive
from vitscale.launchers import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.host_agent import processes_of_run
from vitscale.schedulers import Job
from vitscale.schedulers import prepared as own
from vitscale.schedulers.prepared import Prepared, PreparedError, PreparedProcesses, process_key
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import Trial

VARIABLES = {"PATH": "/bin", "COLOUR": "blue"}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return a_trial(tmp_path, "local", world(1, 2))


def of(trial: Trial, **train: object) -> Trial:
    return trial.model_copy(update={"train": trial.train.model_copy(update=train)})


def test_what_imports_read_asks_for_another_process(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = process_key(trial, VARIABLES, tmp_path)
    assert kept == process_key(trial, dict(reversed(VARIABLES.items())), tmp_path)
    for variables in (VARIABLES | {"COLOUR": "red"}, VARIABLES | {"MORE": "1"}, {"PATH": "/bin"}):
        assert process_key(trial, variables, tmp_path) != kept
    assert process_key(trial, VARIABLES, tmp_path / "elsewhere") != kept
    monkeypatch.setattr("sys.executable", "/other/python")
    assert process_key(trial, VARIABLES, tmp_path) != kept
    monkeypatch.undo()
    package = tmp_path / "packages"
    package.mkdir()
    monkeypatch.syspath_prepend(str(package))
    before = process_key(trial, VARIABLES, tmp_path)
    (package / "__pycache__").mkdir()  # as importing something there does
    (package / "results").mkdir()
    assert process_key(trial, VARIABLES, tmp_path) == before
    (package / "torch-2.14.0.dist-info").mkdir()  # as installing something there does
    assert process_key(trial, VARIABLES, tmp_path) != before


def test_engines_share_a_process_where_they_import_the_same(trial: Trial, tmp_path: Path) -> None:
    def kept(each: Trial) -> tuple[object, ...]:
        return process_key(each, VARIABLES, tmp_path)

    of_torch = {kept(of(trial, engine=engine)) for engine in ("none", "ddp", "fsdp2")}
    others = [
        of(trial, engine="deepspeed"),
        of(trial, engine="deepspeed", zero_stage=1),
        of(trial, engine="accelerate", accelerate_backend="ddp"),
        of(trial, engine="accelerate", accelerate_backend="deepspeed"),
        of(trial, engine="megatron"),
        of(trial, device="cuda"),
        trial.model_copy(update={"model": ModelSpec(hf="a/model", image_size=32)}),
    ]
    assert len(of_torch) == 1
    assert len({*map(kept, others)} | of_torch) == len(others) + 1
    assert kept(of(trial, micro_batch=7, zero_stage=2)) in of_torch
    assert kept(of(trial, engine="deepspeed", zero_stage=3)) == kept(others[1])


def start(process: Prepared, log: Path) -> Job:
    """Two ranks without a folder: both end with a message."""
    command = (
        "python",
        "-P",
        "-m",
        "vitscale.processes.local_ranks",
        "2",
        "1",
        "vitscale.worker",
        str(log.parent / "none"),
    )
    token = secrets.token_hex(16)
    return Job(Spawn((command,), log.parent, token=token, cwd=log.parent), HeartbeatServer(token, "127.0.0.1"), process)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared processes that need not import: those that import are in tests/worker/test_prepared.py, and below."""
    monkeypatch.setattr("subprocess.Popen", fork_what_is_prepared)


@pytest.mark.ranks
@pytest.mark.usefixtures("forked")
def test_one_is_kept_until_it_would_serve_a_trial_again_and_ends_with_the_driver(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = own.ranks_environment({})
    log = tmp_path / "log.txt"
    with PreparedProcesses() as processes:
        first = processes.ready("a", trial, variables, tmp_path, log)
        assert (first.cold, first.process is None, first.waited_seconds is None) == (None, False, False)
        second = processes.ready("b", trial, variables, tmp_path, log)
        assert (second.process, second.waited_seconds) == (first.process, None)
        assert first.process is not None
        job = start(first.process, log)
        assert job.wait(60.0) == 1
        job.end()
        assert log.read_text().count("is not seen on this host") == 2
        assert "local: rank 0 ended with exit code 1" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert not processes_of_run(job.token, job.sessions)
        before = len([*Path("/proc/self/fd").iterdir()])
        again = processes.ready("a", trial, variables, tmp_path, log)
        assert again.process is not first.process
        assert again.process is not None
        assert len([*Path("/proc/self/fd").iterdir()]) == before, "of the one that was ended something is open"
        with pytest.raises(PreparedError):
            first.process.fork(["python"], {}, log)
        # It has not served "b"; but what would be imported is another code now, for which nothing serves that is there.
        monkeypatch.setattr("vitscale.schedulers.prepared._code_state", lambda: ("another",))
        third = processes.ready("b", trial, variables, tmp_path, log)
        assert third.process not in (None, again.process)
        assert third.process is not None
        assert not alive(again.process._process.pid)
        pid = third.process._process.pid
        job = start(third.process, log)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr("vitscale.schedulers.prepared._REAP_SECONDS", 0.1)
        job.end()
        assert not alive(pid), "it could never tell how its fork ended"
        assert job.exit_code == -signal.SIGKILL
        fourth = processes.ready("a", trial, variables, tmp_path, log)
        assert fourth.process not in (None, third.process)
        assert fourth.process is not None
        pid = fourth.process._process.pid
    assert not alive(pid)
    assert log.read_text().count("Traceback") == 0


def test_a_library_of_the_driver_puts_nothing_into_the_ranks_environment() -> None:
    """polars does, for its allocator; a driver imports it when it packs runs, between one run and the next."""
    code = (
        "from vitscale.schedulers.prepared import ranks_environment\n"
        "before = ranks_environment({})\n"
        "import polars, os\n"
        "print(ranks_environment({}) == before)"
    )
    clean = {key: value for key, value in os.environ.items() if "_RJEM" not in key}
    answer = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n"


@pytest.mark.ranks
@pytest.mark.usefixtures("forked")
def test_what_a_round_needs_is_imported_at_the_same_time(trial: Trial, tmp_path: Path) -> None:
    """Not what ranks with another number of threads need: it is among their variables."""
    other, scripted = of(trial, device="cuda"), of(trial, script=("own.py",), engine="deepspeed")
    threads = other.model_copy(update={"world": trial.world.model_copy(update={"threads_per_rank": 5})})
    variables, waited = own.ranks_environment({}), list[bool]()
    with PreparedProcesses(upcoming_trials=lambda: [trial, other, threads, scripted]) as processes:

        def ready(name: str, each: Trial) -> Prepared:
            answer = processes.ready(name, each, variables, tmp_path, tmp_path / "log.txt")
            assert answer.cold is None
            assert answer.process is not None
            waited.append(answer.waited_seconds is not None)
            return answer.process

        first, second = ready("a", trial), ready("b", other)
        # The next round, in another order.
        third, fourth = ready("b", other), ready("a", trial)
        assert len({*map(id, (first, second, third, fourth))}) == 4
        assert waited == [True, False, True, False]
        assert len(processes._processes) == 2
        assert not alive(first._process.pid)
        assert not alive(second._process.pid)


@pytest.mark.ranks
def test_imports_that_start_threads_are_not_forked_and_that_is_told(trial: Trial, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    variables = own.ranks_environment({"PYTHONPATH": str(tmp_path)})
    told: list[str] = []
    with PreparedProcesses(told.append) as processes:
        answer = processes.ready("a", trial, variables, tmp_path, tmp_path / "log.txt")
    assert (answer.process, answer.cold) == (None, "importing started 1 thread, which a fork would lack")
    assert told == [answer.cold]
