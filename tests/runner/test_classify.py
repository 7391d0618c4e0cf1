from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from run_endings import BOTH_AT_ONCE, EXIT_3, FORCED, REPORT, ending, error, outcome, rank, status, statuses
from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import RunEvidence, last_words, log_tail
from vitscale.runner.watch import kernel_oom_kills
from vitscale.store.records import PhaseLine, RankRecord
from vitscale.store.results import Outcome
from vitscale.trial.parallel import ParallelSpec, RankLayout


def test_a_rank_that_shares_a_model_is_named_with_its_groups(log: Path) -> None:
    """Two stages on two ranks each: of rank 3 the other stage is rank 1's, and the same one rank 2's."""
    log.write_text("")
    ranks = [rank(number, error=error() if number == 3 else None) for number in range(4)]
    for parallel, groups in (({"pipeline": 2}, " (rank 3 of pipeline 1+3, data 2+3)"), ({}, "")):
        layout = RankLayout.of(4, ParallelSpec.model_validate(parallel))
        found = outcome_of(RunEvidence(ending(), ranks, 4, log.parent, layout))
        assert (found.rank, found.reason) == (3, "rank 3 raised ValueError: bad pixel" + groups)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


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
    monkeypatch.setattr("vitscale.runner.classify.is_full", lambda _: True)
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


@pytest.mark.parametrize(
    "message",
    [
        "DataLoader worker (pid 1234) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 1234, 1235) exited unexpectedly",
    ],
)
@pytest.mark.parametrize(
    ("kills", "text", "kind"),
    [(1, "", "oom"), (0, "srun: error: n1: task 0: Out Of Memory\n", "oom"), (0, "", "failed")],
)
def test_a_loading_process_that_the_kernel_killed_for_memory(
    log: Path, message: str, kills: int, text: str, kind: str
) -> None:
    """Its rank lives on, and says only that it is gone."""
    raised = rank(0, error=error(message, error_type="RuntimeError"))
    found = outcome(log, ending(kernel_oom_kills=kills), raised, world_size=1, text=text)
    assert (found.kind, found.rank, found.detail) == (kind, 0, f"Traceback of {message}")
    assert ("out of memory" in found.reason) is (kind == "oom")


def test_another_failure_while_the_kernel_killed_elsewhere_is_none_of_memory(log: Path) -> None:
    assert outcome(log, ending(kernel_oom_kills=1), rank(0, error=error()), world_size=1).kind == "failed"


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
    assert found.reason == "ranks 0, 1 did not finish; the launcher ended with exit code 1"


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
        (0, (rank(0, ended=True),), "rank 1 did not finish; the launcher ended with exit code 0"),
        (0, (rank(0, ended=True), rank(1)), "rank 1 did not finish; the launcher ended with exit code 0"),
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


STATUSES = st.dictionaries(
    st.integers(0, 5),
    st.builds(
        RankStatus,
        host=st.sampled_from(["node0", "node1"]),
        pid=st.just(77),
        heard_seconds=st.floats(0.0, 130.0),
        step=st.integers(-1, 9),
        phase=st.sampled_from(["start-up", "forward", "somewhere"]),
        ended_seconds=st.none() | st.floats(0.0, 130.0),
        disconnection=st.sampled_from([None, "ended", "silent"]),
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.none() | st.integers(-64, 255), st.sampled_from([None, "hang", "timeout", "lost"]), st.integers(0, 2),
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3),
    st.sampled_from(["", REPORT, BOTH_AT_ONCE, EXIT_3]) | st.text(), STATUSES, st.sampled_from([(), ("node0",)]),
)  # fmt: skip
def test_every_ending_has_exactly_one_outcome_with_its_reason(
    log: Path,
    exit_code: int | None,
    stopped: Any,
    kills: int,
    said: list[tuple[bool, bool]],
    text: str,
    heard: dict[int, RankStatus],
    unreached: tuple[str, ...],
) -> None:
    ranks = [rank(n, ended=ended, error=error() if failed else None) for n, (ended, failed) in enumerate(said)]
    seen: dict[str, Any] = {"statuses": heard, "unreached": unreached, "seen_seconds": 130.0}
    ends = ending(exit_code, stopped=stopped, limit_seconds=1.0, kernel_oom_kills=kills, **seen)
    log.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    found = outcome_of(RunEvidence(ends, ranks, 3, log.parent))
    well = exit_code == 0 and len(said) == 3 and all(ended and not failed for ended, failed in said)
    assert (found.kind == "completed") == well
    assert bool(found.reason) != well
    Outcome.model_validate_json(found.model_dump_json())


# --- what the heartbeats tell --------------------------------------------------------------------------------------

LOST = error("gloo/transport/tcp/pair.cc: Connection closed by peer", error_type="RuntimeError")


def test_a_rank_lost_first_is_the_cause_and_is_told_with_its_host(log: Path) -> None:
    """mpirun and srun end the others, whose loss comes later."""
    ends = ending(
        statuses=statuses(status(102.0, "ended"), status(100.5, "ended", host="node1"), status(102.1, "ended"))
    )
    found = outcome(log, ends, rank(0), rank(1), rank(2), world_size=3)
    assert (found.kind, found.rank, found.host, found.transient) == ("failed", 1, "node1", False)
    assert found.reason == "rank 1 ended without a word before its work was done"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (REPORT, "rank 1 was ended by SIGKILL without a word"),
        (EXIT_3, "rank 1 ended without a word before its work was done"),
        (EXIT_3.replace("rank      : 0", "rank      : 1"), "rank 1 ended with exit code 3 before its work was done"),
        ("\nFailures:\n  <NO_OTHER_FAILURES>\n" + EXIT_3, "rank 1 ended with exit code 0 before its work was done"),
    ],
)
def test_what_its_peers_record_of_a_lost_rank_follows_from_its_loss(log: Path, text: str, reason: str) -> None:
    ends = ending(statuses=statuses(status(100.6), status(100.5, "ended", host="node1")))
    found = outcome(log, ends, rank(0, error=LOST), rank(1), text=text)
    assert (found.rank, found.host, found.reason) == (1, "node1", reason)


def test_a_lost_rank_may_have_been_out_of_memory(log: Path) -> None:
    lost = statuses(status(), status(100.5, "ended"))
    assert outcome(log, ending(statuses=lost, kernel_oom_kills=1), rank(0), rank(1), text=REPORT).kind == "oom"
    slurm = (
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0 cgroup.\n"
        "srun: error: node1: task 1: Out Of Memory\n"
    )
    found = outcome(log, ending(statuses=lost), rank(0), rank(1), text=slurm)
    assert (found.kind, found.rank) == ("oom", 1)


def test_an_error_recorded_before_the_loss_is_the_cause(log: Path) -> None:
    """The launcher ends the others once one has failed."""
    ends = ending(statuses=statuses(status(103.0, "ended"), status(100.5, host="node1")))
    found = outcome(log, ends, rank(0), rank(1, error=error()))
    assert (found.rank, found.host, found.reason) == (1, "node1", "rank 1 raised ValueError: bad pixel")


def test_an_error_recorded_long_after_the_loss_is_not(log: Path) -> None:
    ends = ending(statuses=statuses(status(104.0), status(100.5, "ended")))
    assert outcome(log, ends, rank(0, error=error("no such key")), rank(1)).rank == 1


@pytest.mark.parametrize("first", [100.500, 100.502])
def test_a_driver_that_hears_of_all_at_once_blames_none_that_the_launcher_has_ended(log: Path, first: float) -> None:
    """Held back by a CPU quota it reads the news of a while in any order."""
    both = statuses(status(100.501, "ended"), status(first, "ended"))
    found = outcome(log, ending(statuses=both), rank(0), rank(1), text=REPORT)
    assert (found.rank, found.reason) == (1, "rank 1 was ended by SIGKILL without a word")
    raised = statuses(status(100.501, "ended"), status(first))
    found = outcome(log, ending(statuses=raised), rank(0), rank(1, error=error()), text=REPORT.replace("-9 ", "1 "))
    assert (found.rank, found.reason) == (1, "rank 1 raised ValueError: bad pixel")


def test_one_that_has_recorded_why_it_ends_is_not_lost_though_its_last_word_was(log: Path) -> None:
    """The launcher may end it between its record and its word to the driver."""
    ends = ending(statuses=statuses(status(100.5, "ended"), status(100.6, "ended")))
    found = outcome(log, ends, rank(0, error=LOST), rank(1))
    assert found.rank == 1
    found = outcome(log, ends, rank(0, ended=True), rank(1))
    assert found.rank == 1
    found = outcome(log, ends, rank(0, error=LOST), rank(1, error=error()))
    assert found.reason == "rank 1 raised ValueError: bad pixel"


def test_a_rank_that_never_reached_the_driver_and_failed_comes_before_those_ended_for_it(log: Path) -> None:
    found = outcome(
        log, ending(statuses=statuses(status(102.0, "ended"))), rank(0), text=EXIT_3.replace(" : 0 (", " : 1 (")
    )
    assert (found.rank, found.reason) == (1, "rank 1 ended with exit code 3 without a word")


def test_a_host_that_falls_silent_is_the_cause_and_passing(log: Path) -> None:
    silent = statuses(status(), status(), status(120.0, "silent", host="node1"), status(120.1, "silent", host="node1"))
    ends = ending(None, stopped="lost", limit_seconds=10.0, statuses=silent)
    found = outcome(log, ends, rank(0), rank(1), rank(2), rank(3), world_size=4)
    assert (found.kind, found.rank, found.host, found.transient) == ("failed", 2, "node1", True)
    assert found.reason == "host node1 does not answer any more: it or its link is gone (rank 2, 3)"


def test_a_host_that_does_not_answer_at_the_end_is_the_cause_unless_a_rank_had_one(log: Path) -> None:
    there = statuses(status(100.6), status(host="node1"))
    ends = ending(statuses=there, unreached=("node1",))
    found = outcome(log, ends, rank(0, error=LOST), rank(1))
    assert (found.host, found.rank, found.transient) == ("node1", 1, True)
    assert outcome(log, ends, rank(0, error=error()), rank(1)).reason == "rank 0 raised ValueError: bad pixel"
    well = outcome(log, ending(0, statuses=there, unreached=("node1",)), rank(0, ended=True), rank(1, ended=True))
    assert well.kind == "completed"


def test_a_host_that_ssh_does_not_reach_is_named_and_passing(log: Path) -> None:
    text = "ssh: connect to host node1 port 22: No route to host\n"
    found = outcome(log, ending(255), text=text)
    assert (found.kind, found.host, found.rank, found.transient) == ("failed", "node1", None, True)
    assert found.reason == "host node1 could not be reached: ssh: connect to host node1 port 22: No route to host"


@pytest.mark.parametrize(
    ("code", "said", "reason", "passing"),
    [
        (255, "Host key verification failed.", "host host1 could not be reached: Host key verification failed.", False),
        (
            255,
            "root@host1: Permission denied (publickey).",
            "host host1 could not be reached: root@host1: Permission denied (publickey).",
            False,
        ),
        (
            255,
            "Connection timed out during banner exchange\nConnection to 10.77.0.2 port 22 timed out",
            "host host1 could not be reached: Connection to 10.77.0.2 port 22 timed out",
            True,
        ),
        (
            127,
            "bash: line 1: /opt/env/bin/python: No such file or directory",
            "nothing could be started on host host1: bash: line 1: /opt/env/bin/python: No such file or directory",
            False,
        ),
        (126, "", "nothing could be started on host host1: exit code 126", False),
    ],
)
def test_a_host_on_which_ssh_begins_nothing_is_named_with_the_last_words(
    log: Path, code: int, said: str, reason: str, passing: bool
) -> None:
    """As OpenSSH 9.2 and bash say it; torch's warnings of the first host's agent come between."""
    chatter = "[W1126 10:34:12.089956061 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved."
    text = f"{said}\n{chatter}\n"
    ends = ending(code, not_begun=(("host1", code), ("host2", 255)), last_words=last_words(text))
    found = outcome(log, ends, text=text)
    assert (found.kind, found.host, found.reason, found.transient) == ("failed", "host1", reason, passing)
    # Once a rank has been heard of, all hosts had begun: ssh's exit code says that its connection broke.
    heard = statuses(status(), status(100.5, "ended", host="host1"))
    assert "ended without a word" in outcome(log, dataclasses.replace(ends, statuses=heard), text=text).reason


NO_DAEMON = """\
{said}
--------------------------------------------------------------------------
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("said", "elsewhere", "reason", "host"),
    [
        ("Host key verification failed.", ("node1",), "on host node1: Host key verification failed.", "node1"),
        (
            "bash: orted: command not found",
            ("node1", "node2"),
            "on one or more of the hosts node1, node2: bash: orted: command not found",
            None,
        ),
        ("", ("node1",), "on host node1: mpirun does not say why", "node1"),
        ("Killed", (), "on one or more of the hosts: Killed", None),
        (
            "Killed",
            tuple(f"n{number}" for number in range(12)),
            "on one or more of the hosts n0, n1, n2, n3, n4, n5, n6, n7 and 4 more: Killed",
            None,
        ),
    ],
)
def test_a_host_on_which_mpirun_begins_nothing_is_named(
    log: Path, said: str, elsewhere: tuple[str, ...], reason: str, host: str | None
) -> None:
    """As Open MPI 4.1.4 prints it below ssh's words, which may name no host."""
    log.write_text(NO_DAEMON.format(said=said))
    found = outcome_of(RunEvidence(ending(255), (), 2, log.parent, elsewhere=elsewhere))
    assert (found.reason, found.host) == (f"nothing could be started {reason}", host)
    log.write_text(NO_DAEMON.format(said="ssh: connect to host node9 port 22: Connection refused"))
    named = outcome_of(RunEvidence(ending(255), (), 2, log.parent, elsewhere=elsewhere))
    assert named.host == "node9"


def test_a_step_that_slurm_refuses_for_memory_is_no_failure_of_the_trial(log: Path) -> None:
    """Slurm 22.05 gives a job no further step after its controller was restarted: retries would all end so."""
    refused = "Unable to create step for job 7: Memory required by task is not available"
    found = outcome(log, ending(1), text=f"srun: error: {refused}\n")
    assert (found.external, found.transient) == (True, False)
    assert refused in found.reason
    assert found.reason.endswith("goes on, unless [slurm] options ask for more memory than it has")
    # Where a step began all the same, its own words are the cause.
    begun = outcome(log, ending(1), text=f"srun: error: {refused}\nvitscale: n1 does not see the folder\n")
    assert begun.reason == "no rank started; the launcher ended with exit code 1: n1 does not see the folder"
    assert not begun.external
    busy = outcome(log, ending(1), text="srun: error: Unable to create step for job 7: Socket timed out\n")
    assert (busy.external, busy.transient) == (False, True)


def test_a_launcher_that_was_killed_is_the_cause_of_its_ranks_end(log: Path) -> None:
    """The kernel ends them with it, by SIGKILL and all at once."""
    ends = ending(-9, statuses=statuses(status(100.5, "ended"), status(100.5, "ended")))
    found = outcome(log, ends, rank(0), rank(1))
    assert (found.kind, found.rank, found.reason) == ("failed", None, "the launcher was ended by SIGKILL")
    alone = outcome(log, ending(-9, statuses=statuses(status(100.5, "ended"))), rank(0), world_size=1)
    assert (alone.rank, alone.reason) == (0, "rank 0 was ended by SIGKILL without a word")


def test_the_driver_s_clock_decides_what_came_first(log: Path) -> None:
    """Those of hosts differ, and may be set back: rank 1 says that it failed an hour before rank 0."""
    raised = (rank(0, error=error("the cause", at=5000.0)), rank(1, error=error("the consequence", at=1400.0)))
    assert "the cause" in outcome(log, ending(statuses=statuses(status(100.1), status(100.9))), *raised).reason
    # Where the driver has heard of one alone, the clocks are all there is.
    assert "the consequence" in outcome(log, ending(statuses=statuses(status(100.1))), *raised).reason


@pytest.mark.parametrize(
    ("message", "passing"),
    [
        ("The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", True),
        ("connect() to [10.0.0.2]:5432: No route to host", True),
        ("[Errno 110] Connection timed out", True),
        ("socket.gaierror: Temporary failure in name resolution", True),
        ("bad pixel", False),
        ("Connection closed by peer", False),
    ],
)
def test_what_may_be_gone_when_it_is_tried_again(log: Path, message: str, passing: bool) -> None:
    found = outcome(log, ending(), rank(0, error=error(message)), rank(1))
    assert (found.kind, found.transient) == ("failed", passing)
    from_outside = outcome(log, ending(1), text=f"RuntimeError: {message}\n")
    assert (from_outside.reason, from_outside.transient) == (
        "no rank started; the launcher ended with exit code 1",
        passing,
    )
    memory = outcome(log, ending(), rank(0, error=error(message, out_of_memory=True)), rank(1))
    assert (memory.kind, memory.transient) == ("oom", False)


def test_what_a_host_agent_or_a_rank_says_that_cannot_begin_is_in_the_reason(log: Path) -> None:
    text = "chatter\nvitscale: the driver at 10.0.0.1:4567 is not reached from this host: timed out\nmore\n"
    found = outcome(log, ending(1), text=text)
    assert found.reason == (
        "no rank started; the launcher ended with exit code 1: the driver at 10.0.0.1:4567 is not reached from this "
        "host: timed out"
    )
    text = "vitscale: /results is not seen on this host: is the results folder shared by all hosts?\n"
    assert "no rank started: " in outcome(log, ending(1), text=text).reason
    text = "vitscale: rank 0 cannot reach the driver at 10.0.0.1:4567: timed out\n" + EXIT_3
    found = outcome(log, ending(1), rank(0), rank(1), text=text)
    assert (found.rank, found.reason) == (
        0, "rank 0 ended with exit code 3: rank 0 cannot reach the driver at 10.0.0.1:4567: timed out",
    )  # fmt: skip


def test_a_rank_is_lost_and_its_launcher_does_nothing(log: Path) -> None:
    """The driver ends the run, and what the others raise then is no cause."""
    ends = ending(
        None, stopped="lost", limit_seconds=10.0, statuses=statuses(status(), status(100.5, "ended", host="node1"))
    )
    found = outcome(log, ends, rank(0, error=error("interrupted")), rank(1))
    assert (found.kind, found.rank, found.host) == ("failed", 1, "node1")


# --- who the others wait for in a hang -----------------------------------------------------------------------------


def hanging(log: Path, *each: RankStatus, stopped_ranks: frozenset[int] = frozenset()) -> Outcome:
    """The outcome of a hang that the driver saw at 130 s."""
    ends = ending(
        None,
        stopped="hang",
        limit_seconds=30.0,
        statuses=statuses(*each),
        seen_seconds=130.0,
        stopped_ranks=stopped_ranks,
    )
    return outcome(log, ends, *(rank(number) for number in range(len(each))), world_size=len(each), text="the log")


def test_a_stopped_rank(log: Path) -> None:
    (log.parent / "stack-rank-1.txt").write_text("Thread 0x01: in recv")
    beating = status(heard_seconds=129.5)
    found = hanging(log, beating, status(phase="forward", host="node1"), beating, stopped_ranks=frozenset({1}))
    assert (found.kind, found.rank, found.host, found.detail) == ("hang", 1, "node1", "Thread 0x01: in recv")
    assert found.reason == (
        "no rank recorded anything for 30 s: rank 1 is stopped (SIGSTOP), in forward of step 4, "
        "and the others wait for it"
    )


def test_a_starved_rank(log: Path) -> None:
    """On another host, whose processes the driver cannot look at."""
    found = hanging(log, status(heard_seconds=129.5), status(host="node1"))
    assert (found.rank, found.host, found.detail) == (1, "node1", "the log")
    assert "rank 1 is stopped or starved: no sign of life for 30 s, last seen in backward of step 4" in found.reason


@pytest.mark.parametrize(
    ("places", "behind", "where"),
    [
        ([(4, "backward"), (4, "forward")], "1", "forward of step 4"),
        ([(4, "forward"), (3, "optimizer"), (4, "forward")], "1", "optimizer of step 3"),
        ([(0, "data"), (-1, "start-up")], "1", "start-up"),
        ([(4, "data"), (4, "backward"), (4, "data"), (4, "h2d")], "0, 2", "data of step 4"),
    ],
)
def test_ranks_that_are_behind(log: Path, places: list[tuple[int, str]], behind: str, where: str) -> None:
    found = hanging(log, *(status(heard_seconds=129.5, step=step, phase=phase) for step, phase in places))
    assert found.rank == int(behind[0])
    waited_for = "them" if "," in behind else "it"
    assert found.reason == (
        f"no rank recorded anything for 30 s: rank {behind} stands in {where}, and the others wait for {waited_for}"
    )


def test_where_all_stand_alike_none_is_blamed(log: Path) -> None:
    (log.parent / "stack-rank-0.txt").write_text("Thread 0x01: in all_reduce")
    found = hanging(log, status(heard_seconds=129.5), status(heard_seconds=129.4))
    assert (found.kind, found.rank, found.host, found.detail) == ("hang", None, None, "Thread 0x01: in all_reduce")
    assert found.reason == "no rank recorded anything for 30 s (rank 0: last step 2; rank 1: last step 2)"
    # All cut off alike says nothing of any of them.
    assert hanging(log, status(), status()).rank is None


def test_nobody_waits_for_a_rank_that_has_left(log: Path) -> None:
    """Where it was last heard of is not where it is."""
    found = hanging(log, status(heard_seconds=129.5, phase="optimizer"), status(ended=100.0, phase="forward"))
    assert (found.rank, "rank 0 stands in optimizer of step 4" in found.reason) == (0, True)
    assert hanging(log, status(ended=100.0), status(ended=100.0, phase="forward")).rank is None


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
    found = outcome_of(RunEvidence(ending(code), [rank(0), rank(1)], 2, tmp_path))
    assert (found.rank, found.reason) == (1, "rank 1 was ended by SIGKILL without a word")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_rank_that_could_make_no_file_of_its_run_is_done_again(tmp_path: Path, error: int) -> None:
    """A quota of a user's files is in no count of free ones: what the rank has printed tells."""
    said = f"OSError: [Errno {error}] {os.strerror(error)}: '{{}}/rank-1.jsonl'\n"
    for where, external in ((tmp_path, True), (Path("/dev/shm"), False)):
        (tmp_path / "log.txt").write_text(said.format(where))
        verdict = outcome_of(RunEvidence(ending(), (), 2, tmp_path))
        assert (verdict.kind, verdict.external, "disk full" in verdict.reason) == ("failed", external, external)
