from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.record import ErrorLine, Outcome, PhaseLine, RankRecord, StepLine
from vitscale.runner.classify import Ending, kernel_oom_kills, log_tail, outcome_of

# What torchrun (torch 2.13) printed when rank 1 of two was killed by SIGKILL, and when a rank's program ended with 3.
REPORT = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/usr/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
=======================================================
s.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_22:41:28
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 13089)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 13089
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_22:41:28
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 13090)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13090
=======================================================
"""
# The same, but rank 0 noticed so soon that torchrun saw both ends at once, and took its exit code 1 for the cause.
BOTH_AT_ONCE = """\
s2.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_22:41:30
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 13107)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13107
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_22:41:30
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 13106) \n\
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
EXIT_3 = BOTH_AT_ONCE[BOTH_AT_ONCE.index("Root") :].replace(": 1 (pid", ": 3 (pid")
FORCED = "Unable to shutdown process 13090 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL\n"


def ending(exit_code: int | None = 1, **changes: Any) -> Ending:
    fields: dict[str, Any] = {
        "stopped": None,
        "limit_seconds": None,
        "kernel_oom_kills": 0,
        "started_unix_seconds": 5.0,
        "wall_seconds": 7.0,
    }
    return Ending(exit_code, **(fields | changes))


def error(message: str = "bad pixel", at: float = 1.0, **changes: Any) -> ErrorLine:
    fields: dict[str, Any] = {
        "error_type": "ValueError",
        "message": message,
        "traceback": f"Traceback of {message}",
        "out_of_memory": False,
        "disk_full": False,
        "unix_seconds": at,
    }
    return ErrorLine(**(fields | changes))


def rank(number: int, steps: int = 3, *, ended: bool = False, **changes: Any) -> RankRecord:
    lines = (StepLine(step=n, epoch=0, seconds=0.1, images=1, loss=None, warmup=False) for n in range(steps))
    fields: dict[str, Any] = {"start": None, "model": None, "phases": (), "epochs": (), "error": None, "broken": ()}
    return RankRecord(**(fields | {"rank": number, "steps": tuple(lines), "ended": ended} | changes))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def outcome(log: Path, ends: Ending, *ranks: RankRecord, world_size: int = 2, text: str = "") -> Outcome:
    log.write_text(text)
    return outcome_of(ends, ranks, world_size, log)


def test_completed(log: Path) -> None:
    found = outcome(log, ending(0), rank(0, ended=True), rank(1, ended=True))
    assert (found.kind, found.reason, found.detail, found.rank, found.external) == ("completed", "", "", None, False)
    assert (found.started_unix_seconds, found.wall_seconds) == (5.0, 7.0)


def test_the_first_exception_is_the_cause(log: Path) -> None:
    found = outcome(
        log,
        ending(),
        rank(0, error=error("lost the other", at=2.0)),
        rank(1, error=error("bad pixel", at=1.9)),
        text=EXIT_3,
    )
    assert (found.kind, found.rank) == ("failed", 1)
    assert found.reason == "rank 1 raised ValueError: bad pixel"
    assert found.detail == "Traceback of bad pixel"
    assert not found.external


def test_an_exception_counts_even_where_everything_seems_to_have_ended_well(log: Path) -> None:
    assert outcome(log, ending(0), rank(0, ended=True), rank(1, ended=True, error=error())).kind == "failed"


def test_running_out_of_memory_is_its_own_outcome(log: Path) -> None:
    found = outcome(log, ending(), rank(0, error=error("CUDA out of memory", out_of_memory=True)), rank(1))
    assert (found.kind, found.rank) == ("oom", 0)


def test_a_full_disk_lies_outside_the_trial(log: Path) -> None:
    found = outcome(log, ending(), rank(0), rank(1, error=error("No space left on device", disk_full=True)))
    assert (found.kind, found.rank, found.external) == ("failed", 1, True)
    assert "disk full" in found.reason


def test_a_disk_too_full_for_the_last_word(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 100, 0))
    found = outcome(log, ending(), rank(0), rank(1), text=EXIT_3)
    assert (found.kind, found.external) == ("failed", True)
    assert found.reason.startswith("disk full")


def test_a_rank_killed_by_a_signal_is_named(log: Path) -> None:
    found = outcome(log, ending(), rank(0), rank(1), text=REPORT)
    assert (found.kind, found.rank) == ("failed", 1)
    assert found.reason == "rank 1 was ended by SIGKILL without a word"
    assert "Root Cause" in found.detail


@pytest.mark.parametrize("report", [REPORT, BOTH_AT_ONCE])
def test_what_the_others_say_of_a_killed_rank_is_not_the_cause(log: Path, report: str) -> None:
    lost = error("Connection closed by peer", error_type="RuntimeError")
    found = outcome(log, ending(), rank(0, error=lost), rank(1), text=report)
    assert (found.rank, found.reason) == (1, "rank 1 was ended by SIGKILL without a word")


def test_killed_by_the_kernel_for_memory(log: Path) -> None:
    lost = error("Connection closed by peer", error_type="RuntimeError")
    found = outcome(log, ending(kernel_oom_kills=1), rank(0, error=lost), rank(1), text=REPORT)
    assert (found.kind, found.rank) == ("oom", 1)
    assert found.reason == "rank 1 was ended by the kernel: out of memory"


def test_a_signal_other_than_sigkill_is_not_the_kernel_s_oom_killer(log: Path) -> None:
    segfault = REPORT.replace(": -9 ", ": -11 ")
    found = outcome(log, ending(kernel_oom_kills=1), rank(0), rank(1), text=segfault)
    assert (found.kind, found.reason) == ("failed", "rank 1 was ended by SIGSEGV without a word")


def test_a_rank_that_torchrun_killed_itself_is_not_the_cause(log: Path) -> None:
    """It does so 30 s after another has failed."""
    found = outcome(log, ending(), rank(0, error=error()), rank(1), text=FORCED + REPORT)
    assert (found.rank, found.reason) == (0, "rank 0 raised ValueError: bad pixel")


def test_a_rank_that_aborts_because_another_has_raised_is_not_the_cause(log: Path) -> None:
    aborted = REPORT.replace(": -9 ", ": -6 ")
    found = outcome(log, ending(), rank(0, error=error()), rank(1), text=aborted)
    assert (found.rank, found.reason) == (0, "rank 0 raised ValueError: bad pixel")
    found = outcome(log, ending(), rank(0), rank(1), text=aborted)
    assert (found.rank, found.reason) == (1, "rank 1 was ended by SIGABRT without a word")


def test_a_rank_that_leaves_early_is_the_cause_of_what_the_others_say(log: Path) -> None:
    """torchrun takes exit code 0 for success; it lists rank 0, which lost the connection."""
    lost = error("Connection closed by peer", error_type="RuntimeError")
    alone = "\nFailures:\n  <NO_OTHER_FAILURES>\n" + EXIT_3
    found = outcome(log, ending(), rank(0, error=lost), rank(1), text=alone)
    assert (found.kind, found.rank) == ("failed", 1)
    assert found.reason == "rank 1 ended with exit code 0 before its work was done"
    # One that torchrun ended itself is listed, and one that was done has said so.
    ended_by_torchrun = (
        REPORT.replace(": 0 (local", ": 7 (local").replace(": 1 (local", ": 0 (local").replace("-9", "1")
    )
    ended_by_torchrun = ended_by_torchrun.replace(": 7 (local", ": 1 (local")
    assert outcome(log, ending(), rank(0, error=lost), rank(1), text=ended_by_torchrun).rank == 0
    assert outcome(log, ending(), rank(0, error=lost), rank(1, ended=True), text=alone).rank == 0
    # Where the beginning of the list is cut off nothing can be said of those not on it.
    assert outcome(log, ending(), rank(0, error=lost), rank(1), text=EXIT_3).rank == 0


def test_an_exit_code_without_a_word(log: Path) -> None:
    found = outcome(log, ending(), rank(0), rank(1), text=EXIT_3)
    assert (found.rank, found.reason) == (0, "rank 0 ended with exit code 3 without a word")


def test_what_ranks_print_is_not_taken_for_torchrun_s_report(log: Path) -> None:
    chatter = "rank: 0 starting\nrank : 0 (local_rank: 0) is fine\nmy exitcode : -11\n"
    found = outcome(log, ending(), rank(0), rank(1), text=chatter + REPORT)
    assert (found.rank, found.reason) == (1, "rank 1 was ended by SIGKILL without a word")
    found = outcome(log, ending(), rank(0), rank(1), text=chatter)
    assert found.reason == "rank(s) 0, 1 did not finish; the launcher ended with exit code 1"


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (-signal.SIGKILL, "rank 0 was ended by SIGKILL without a word"),
        (-signal.SIGSEGV, "rank 0 was ended by SIGSEGV without a word"),
        (-200, "rank 0 was ended by signal 200 without a word"),
        (3, "rank 0 ended with exit code 3 without a word"),
    ],
)
def test_alone_the_process_is_the_rank(log: Path, exit_code: int, reason: str) -> None:
    found = outcome(log, ending(exit_code), rank(0), world_size=1, text="the last line")
    assert (found.kind, found.rank, found.reason, found.detail) == ("failed", 0, reason, "the last line")


def test_alone_and_killed_by_the_kernel_for_memory(log: Path) -> None:
    assert outcome(log, ending(-9, kernel_oom_kills=1), rank(0), world_size=1).kind == "oom"


@pytest.mark.parametrize(
    ("exit_code", "ranks", "reason"),
    [
        (1, (), "no rank started; the launcher ended with exit code 1"),
        (0, (rank(0, ended=True),), "rank(s) 1 did not finish; the launcher ended with exit code 0"),
        (0, (rank(0, ended=True), rank(1)), "rank(s) 1 did not finish; the launcher ended with exit code 0"),
        (2, (rank(0, ended=True), rank(1, ended=True)), "all ranks finished, but the launcher ended with exit code 2"),
    ],
)
def test_what_only_the_launcher_knows(log: Path, exit_code: int, ranks: tuple[RankRecord, ...], reason: str) -> None:
    found = outcome(log, ending(exit_code), *ranks)
    assert (found.kind, found.reason) == ("failed", reason)


def test_a_hang_tells_how_far_each_rank_came(log: Path) -> None:
    phase = PhaseLine(name="imports", seconds=1.0)
    found = outcome(
        log, ending(None, stopped="hang", limit_seconds=20.0), rank(0, steps=5), rank(1, steps=0, phases=(phase,)),
        rank(2, steps=0), world_size=3, text=REPORT,
    )  # fmt: skip
    assert found.kind == "hang"
    assert found.reason == (
        "no rank recorded anything for 20 s (rank 0: last step 4; rank 1: last start-up phase imports; "
        "rank 2: nothing recorded)"
    )


def test_a_hang_before_any_rank_has_started(log: Path) -> None:
    found = outcome(log, ending(None, stopped="hang", limit_seconds=20.0))
    assert found.reason == "no rank recorded anything for 20 s (no rank had started)"


def test_a_timeout(log: Path) -> None:
    found = outcome(log, ending(None, stopped="timeout", limit_seconds=90.5), rank(0), rank(1), text="x")
    assert (found.kind, found.detail) == ("timeout", "x")
    assert found.reason == "not finished after 90.5 s (measure.timeout_seconds)"


def test_an_exception_before_the_hang_is_its_reason(log: Path) -> None:
    found = outcome(log, ending(None, stopped="hang", limit_seconds=20.0), rank(0), rank(1, error=error()))
    assert (found.kind, found.rank) == ("failed", 1)


def test_a_launcher_that_hangs_when_all_ranks_are_done_is_a_hang(log: Path) -> None:
    ends = ending(None, stopped="hang", limit_seconds=20.0)
    assert outcome(log, ends, rank(0, ended=True), rank(1, ended=True)).kind == "hang"


def test_a_reason_is_one_short_line_without_escape_sequences(log: Path) -> None:
    found = outcome(log, ending(), rank(0, error=error("\x1b[2J" + "x" * 100_000 + "\nmore")), rank(1))
    assert found.reason.startswith(r"rank 0 raised ValueError: \x1b[2Jxxx")
    assert found.reason.isprintable()
    assert len(found.reason) < 500


@pytest.mark.parametrize("message", ["", "  \n ", "\n\n"])
def test_an_exception_without_a_message(log: Path, message: str) -> None:
    assert outcome(log, ending(), rank(0, error=error(message)), rank(1)).reason == "rank 0 raised ValueError"


def test_a_detail_is_the_end_of_the_log(log: Path) -> None:
    assert outcome(log, ending(), text="x" * 100_000 + "the end").detail == "x" * 15_993 + "the end"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.none() | st.integers(-64, 255), st.sampled_from([None, "hang", "timeout"]), st.integers(0, 2),
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3),
    st.sampled_from(["", REPORT, BOTH_AT_ONCE, EXIT_3]) | st.text(),
)  # fmt: skip
def test_every_ending_has_exactly_one_outcome_with_its_reason(
    log: Path, exit_code: int | None, stopped: Any, kills: int, said: list[tuple[bool, bool]], text: str
) -> None:
    ranks = [rank(n, ended=ended, error=error() if failed else None) for n, (ended, failed) in enumerate(said)]
    ends = ending(exit_code, stopped=stopped, limit_seconds=1.0, kernel_oom_kills=kills)
    log.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    found = outcome_of(ends, ranks, 3, log)
    well = exit_code == 0 and len(said) == 3 and all(ended and not failed for ended, failed in said)
    assert (found.kind == "completed") == well
    assert bool(found.reason) != well
    Outcome.model_validate_json(found.model_dump_json())


# --- the log and the kernel ----------------------------------------------------------------------------------------


def test_the_end_of_a_log_is_kept_whatever_it_holds(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"begin" + b"\xff" * 64_000 + b"end")
    tail = log_tail(tmp_path / "log.txt")
    assert len(tail) == 64_000
    assert tail.endswith("end")
    assert "begin" not in tail
    assert log_tail(tmp_path / "none.txt") == ""


@pytest.mark.parametrize(
    ("text", "kills"), [("pgfault 5\noom_kill 7\n", 7), ("pgfault 5\n", 0), ("oom_kill x\n", 0), ("", 0)]
)
def test_the_kernel_s_counter(tmp_path: Path, text: str, kills: int) -> None:
    (tmp_path / "vmstat").write_text(text)
    assert kernel_oom_kills(tmp_path / "vmstat") == kills
    assert kernel_oom_kills(tmp_path / "none") == 0


@pytest.mark.ranks
def test_torchrun_still_words_its_report_so(tmp_path: Path) -> None:
    """The real launcher, whose rank 1 is killed by SIGKILL."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    with (tmp_path / "log.txt").open("wb") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    found = outcome_of(ending(code), [rank(0), rank(1)], 2, tmp_path / "log.txt")
    assert (found.rank, found.reason) == (1, "rank 1 was ended by SIGKILL without a word")
