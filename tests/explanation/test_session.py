"""A session from its start to its end, by real processes: what it leaves as it is, and that nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from explanation.scripted_commands import python, scripted_ranks
from processes import alive, wait_until
from vitscale.errors import RequestError, VitscaleError
from vitscale.explanation import session
from vitscale.explanation.command_output import OutputTargets
from vitscale.explanation.command_run import CommandEnd, CommandRun, ExplainRequest
from vitscale.explanation.rank_files import read_rank_files
from vitscale.explanation.session import RunningCommand, lead_steps, no_step_error

SAID: list[str] = []


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a folder of its own, without the times that only real launchers need."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(session, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(session, "_LEAD_SECONDS", 0.3)
    monkeypatch.setattr(session, "_LAUNCHER_SECONDS", 1.0)
    monkeypatch.setattr(session, "_GRACE_SECONDS", 1.0)
    SAID.clear()


def explained(
    argv: list[str],
    *,
    steps: int = 5,
    seconds: float = 600.0,
    start_seconds: float = 600.0,
) -> CommandRun:
    request = ExplainRequest(tuple(argv), steps=steps, seconds=seconds, start_seconds=start_seconds)
    running = RunningCommand(request, OutputTargets(), SAID.append)
    run = running.finish(running.watch())
    assert running._processes.live() == []
    return run


def test_ranks_end_at_one_agreed_step_and_nothing_needs_force(tmp_path: Path) -> None:
    run = explained(scripted_ranks(tmp_path, 2))
    assert (run.end, run.exit_code, run.needed_force, run.survivors) == (CommandEnd.AGREED_STEP, 0, False, ())
    files = read_rank_files(run.folder)
    assert [rank.rank.rank for rank in files.ranks] == [0, 1]
    plan = json.loads(run.folder.plan.read_text())
    assert plan["profile_from"] >= 5 + session.WARM_UP_STEPS + 3
    assert plan["stop_after"] == plan["profile_from"] + plan["profile_steps"]
    assert {rank.steps[-1].number for rank in files.ranks} == {plan["stop_after"]}
    assert run.last_lines == ("launched [0, 0]",)
    assert run.written.number == 0


def test_a_launcher_that_stays_is_ended(tmp_path: Path) -> None:
    run = explained(scripted_ranks(tmp_path, 1, "stays"))
    assert (run.end, run.exit_code, run.needed_force) == (CommandEnd.AGREED_STEP, -signal.SIGTERM, True)


def test_ranks_that_follow_nothing_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_FEWEST_END_SECONDS", 0.5)
    run = explained(scripted_ranks(tmp_path, 2, "deaf"))
    assert (run.end, run.needed_force, run.survivors) == (CommandEnd.MISSED_STEP, True, ())
    assert len(read_rank_files(run.folder).ranks) == 2


def test_a_command_that_ends_earlier_is_explained_by_its_steps(tmp_path: Path) -> None:
    run = explained(scripted_ranks(tmp_path, 2, "short"), steps=1000)
    assert (run.end, run.exit_code, run.needed_force) == (CommandEnd.BY_ITSELF, 0, False)
    assert [len(rank.steps) for rank in read_rank_files(run.folder).ranks] == [40, 40]


def test_ranks_that_end_before_the_agreed_step_ended_by_themselves(tmp_path: Path) -> None:
    """Also where their launcher has not ended yet."""
    run = explained(scripted_ranks(tmp_path, 1, "short", "stays"))
    assert (run.end, run.needed_force) == (CommandEnd.BY_ITSELF, True)


def test_time_ends_what_takes_too_few_steps(tmp_path: Path) -> None:
    run = explained(scripted_ranks(tmp_path, 1), steps=100_000, seconds=0.5)
    assert run.end is CommandEnd.AGREED_STEP


def test_a_failure_before_the_first_step_is_said_with_its_last_lines() -> None:
    run = explained(python("import sys; print('reading'); sys.exit('no such data set')"))
    assert (run.end, run.exit_code, run.first_step_seconds) == (CommandEnd.BY_ITSELF, 1, None)
    error = no_step_error(run)
    assert error.exit_code == 1
    assert "ended with exit code 1" in str(error)
    assert "  no such data set\n" in str(error)


def test_a_command_that_ends_well_without_a_step_is_said_why() -> None:
    run = explained([sys.executable, "-E", "-c", "pass"])
    message = str(no_step_error(run))
    assert "ended with exit code 0" in message
    assert "python -E in " in message


def test_a_command_that_takes_no_step_is_ended_after_a_bound() -> None:
    run = explained(python("import time; print('waiting', flush=True); time.sleep(600)"), start_seconds=0.5)
    assert (run.end, run.needed_force, run.survivors) == (CommandEnd.STARTED_TOO_LONG, True, ())
    message = str(no_step_error(run))
    assert "took no optimizer step" in message
    assert "None of its processes on this host has loaded torch." in message
    assert "  waiting" in message


def test_what_keeps_the_hook_away_is_said_soon_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_NOTICE_SECONDS", 0.2)
    argv = [sys.executable, "-I", "-c", "import time; time.sleep(600)"]
    run = explained(argv, start_seconds=0.6)
    sign = "python -I in process"
    assert [line for line in SAID if sign in line and "Leave -I out" in line]
    assert sign in str(no_step_error(run))


def test_only_the_search_path_changes_for_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    code = "import json, os, pathlib; pathlib.Path('seen').write_text(json.dumps([os.getcwd(), dict(os.environ)]))"
    run = explained(python(code))
    folder, environment = json.loads((tmp_path / "seen").read_text())
    assert folder == str(tmp_path)
    expected = dict(os.environ) | {"PYTHONPATH": f"{run.folder.hook}:/somewhere"}
    assert {name: environment.get(name) for name in expected} == expected
    assert environment.keys() - expected.keys() <= {"LC_CTYPE"}  # Python's own


def test_nothing_is_written_outside_the_results_folder(tmp_path: Path) -> None:
    run = explained(python("pass"))
    assert [path.name for path in tmp_path.iterdir()] == ["vitscale-explain-1"]
    assert run.written.number == 0


def test_the_command_reads_the_input_of_vitscale(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"typed\n")
    os.close(writer)
    earlier = os.dup(0)
    os.dup2(reader, 0)
    try:
        run = explained(python("print('got', input())"))
    finally:
        os.dup2(earlier, 0)
        os.close(reader)
        os.close(earlier)
    assert run.last_lines == ("got typed",)


def test_secrets_are_in_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    code = "import os; print('key', os.environ['WANDB_API_KEY'])"
    run = explained([*python(code), "--hf_token", "hf_zyxw9876", "--api-key=qwerty12345", "0123456789abcdef0123"])
    assert run.argv[3:] == ("--hf_token", "(not shown)", "--api-key=(not shown)", "(not shown)")
    assert run.last_lines == ("key (not shown)",)
    for path in run.folder.root.rglob("*"):
        if path.is_file():
            assert b"0123456789abcdef0123" not in path.read_bytes(), path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks_at_a_step(tmp_path: Path, number: signal.Signals) -> None:
    request = ExplainRequest(tuple(scripted_ranks(tmp_path, 2)), steps=100_000)
    running = RunningCommand(request, OutputTargets(), SAID.append)

    def interrupt_after_steps() -> None:
        wait_until(lambda: running._progress.hindmost_step > 5, "steps are seen")
        os.kill(os.getpid(), number)

    interrupter = threading.Thread(target=interrupt_after_steps)
    interrupter.start()
    run = running.finish(running.watch())
    interrupter.join()
    assert (run.end, run.exit_code, run.needed_force) == (CommandEnd.INTERRUPTED, 0, False)
    assert {rank.end.reason for rank in read_rank_files(run.folder).ranks if rank.end} == {"agreed step"}


def test_ctrl_c_before_a_step_ends_the_command() -> None:
    running = RunningCommand(
        ExplainRequest(tuple(python("import time; time.sleep(600)"))), OutputTargets(), SAID.append
    )

    def interrupt_once_watched() -> None:
        wait_until(lambda: running._next_process_look, "it is watched")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_watched)
    interrupter.start()
    run = running.finish(running.watch())
    interrupter.join()
    assert run.end is CommandEnd.INTERRUPTED
    assert not alive(running._process.pid)
    assert no_step_error(run).exit_code == 130


def test_a_command_that_is_kept_runs_on_and_gets_the_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ExplainRequest(tuple(scripted_ranks(tmp_path, 2)), steps=5, keep=True)
    running = RunningCommand(request, OutputTargets(), SAID.append)
    run = running.finish(running.watch())
    assert (run.end, run.exit_code) == (CommandEnd.KEPT, None)
    assert len(running._processes.live()) == 3
    assert json.loads(run.folder.plan.read_text())["stop_after"] is None
    wait = running._process.wait
    interrupts = [KeyboardInterrupt(signal.SIGTERM)]

    def wait_once_interrupted() -> int:
        if interrupts:
            raise interrupts.pop()
        return wait()

    monkeypatch.setattr(running._process, "wait", wait_once_interrupted)
    assert running.wait() == 128 + signal.SIGTERM


def test_a_background_process_of_the_command_does_not_outlive_it() -> None:
    code = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True); sys.exit(3)"
    )
    run = explained(python(code))
    assert (run.end, run.exit_code, run.needed_force, run.survivors) == (CommandEnd.BY_ITSELF, 3, True, ())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no command is given"),
        (["no-such-program"], "'no-such-program' cannot be run"),
        (["python train.py"], "without quotes"),
        (["train.py"], "vitscale explain -- python train.py"),
        (["python", "a\0b"], "NUL"),
    ],
)
def test_what_cannot_be_run_is_refused_and_nothing_is_written(tmp_path: Path, argv: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        explained(argv)
    assert list(tmp_path.iterdir()) == []


def test_the_lead_is_some_time_and_three_steps_at_least() -> None:
    assert [lead_steps(seconds) for seconds in (0.0, 0.01, 0.3, 1.0, 60.0)] == [3, 31, 3, 3, 3]


def test_no_step_errors_are_of_the_family_that_the_command_line_prints() -> None:
    assert issubclass(session.ExplainFailed, VitscaleError)
