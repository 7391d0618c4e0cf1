"""What launchers really printed when rank 1 came to grief (each text was recorded), and what is read from it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import needs
from vitscale.runner.evidence import read_reports

# torchrun (torch 2.13), rank 1 ended by os._exit(3).
TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
============================================================
r.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_15:45:04
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 5060)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 5060
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:45:04
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 5061) \n\
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""

# mpirun (Open MPI 4.1.4).
_ABORTED = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
"""
MPIRUN_EXIT = f"""\
{_ABORTED}\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[26815,1],1]
  Exit code:    3
--------------------------------------------------------------------------
"""
MPIRUN_KILLED = f"""\
{_ABORTED}\
mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
MPIRUN_WRAPPED = f"""\
{_ABORTED}\
mpirun noticed that process rank 1 with PID 0 on node gpu-node-with-a-rather-long-name exited on
signal 11 (Segmentation fault).
--------------------------------------------------------------------------
"""
MPIRUN_NO_HOST = """\
ssh: Could not resolve hostname nosuchhost: Name or service not known\r
--------------------------------------------------------------------------
ORTE was unable to reliably start one or more daemons.
This usually is caused by:
"""

# srun (Slurm 22.05), one task on each of two nodes; and with two on each.
SRUN_KILLED = """\
srun: error: node1: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-node0: error: *** STEP 1.0 ON node0 CANCELLED AT 2026-11-21T15:44:42 ***
srun: error: node0: task 0: Terminated
srun: Force Terminated StepId=1.0
"""
SRUN_SEVERAL = SRUN_KILLED.replace("task 1", "tasks 2-3").replace("task 0", "tasks 0-1")
SRUN_EXIT = SRUN_KILLED.replace("Killed", "Exited with exit code 3")
SRUN_SEVERAL_EXIT = SRUN_SEVERAL.replace("Killed", "Exited with exit code 7")
SRUN_SEGMENTATION_FAULT = SRUN_KILLED.replace("Killed", "Segmentation fault")
SRUN_ABORTED = "srun: job 3 queued and waiting for resources\n" + SRUN_KILLED.replace("Killed", "Aborted")
SRUN_ALL_FAILED = """\
srun: error: node1: task 1: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-node1: error: execve(): /no/such: No such file or directory
srun: error: node0: task 0: Exited with exit code 2
"""
# As the handbooks of clusters that limit memory by cgroups show it.
SRUN_OUT_OF_MEMORY = """\
slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some of your processes may have been \
killed by the cgroup out-of-memory handler.
srun: error: o0616: task 1: Out Of Memory
"""


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("", []),
        (TORCHRUN, [(1, 3), (0, -15)]),
        (MPIRUN_EXIT, [(1, 3)]),
        (MPIRUN_KILLED, [(1, -9)]),
        (MPIRUN_WRAPPED, [(1, -11)]),
        (SRUN_KILLED, [(1, -9)]),
        (SRUN_SEVERAL, [(2, -9)]),
        (SRUN_EXIT, [(1, 3)]),
        (SRUN_SEVERAL_EXIT, [(2, 7)]),
        (SRUN_SEGMENTATION_FAULT, [(1, -11)]),
        (SRUN_ABORTED, [(1, -6)]),
        (SRUN_ALL_FAILED, [(1, 2), (0, 2)]),
        (SRUN_OUT_OF_MEMORY, [(1, -9)]),
    ],
)
def test_the_first_that_failed_and_how(text: str, codes: list[tuple[int, int]]) -> None:
    """Those that srun calls "Terminated" it has ended itself."""
    found = read_reports("chatter of the ranks\n" + text)
    assert found.codes == tuple(codes)
    assert found.lists_all_failures == (text == TORCHRUN), "torchrun alone lists all"
    assert found.out_of_memory == (text == SRUN_OUT_OF_MEMORY)
    assert (found.launcher_killed, found.unreached) == (False, ())


@pytest.mark.parametrize(
    ("text", "unreached"),
    [
        (MPIRUN_NO_HOST, ("nosuchhost", "ssh: Could not resolve hostname nosuchhost: Name or service not known")),
        (
            "ssh: connect to host 10.77.0.2 port 22: No route to host\r\n",
            ("10.77.0.2", "ssh: connect to host 10.77.0.2 port 22: No route to host"),
        ),
        (
            "pdsh@host0: node1: ssh exited with exit code 255\nssh: connect to host node1 port 22: Connection refused",
            ("node1", "ssh: connect to host node1 port 22: Connection refused"),
        ),
    ],
)
def test_a_host_that_ssh_did_not_reach(text: str, unreached: tuple[str, str]) -> None:
    found = read_reports(text)
    assert found.unreached == (unreached,)
    assert not found.codes


def test_what_ranks_print_is_not_taken_for_a_report() -> None:
    chatter = (
        "task 1: Killed\nerror: node1: task 1: Killed\nrank 1 exited on signal 9\nExit code:    3\n"
        "my ssh: connect to host node1 failed\nProcess name: [[1,1],x]\n  Exit code:    3\n"
        "srun: error: node1: task 1: Terminated\nsrun: error: node1: task one: Killed\n"
    )
    found = read_reports(chatter)
    assert (found.codes, found.unreached, found.lists_all_failures, found.out_of_memory) == ((), (), False, False)


@given(st.text(alphabet=st.sampled_from("srun: error:\n task1234567890Kiled[],-()rankexitcodepid"), max_size=300))
def test_any_log_is_read(text: str) -> None:
    for rank, code in read_reports(text).codes:
        assert 0 <= rank < 10**6
        assert -1000 < code < 1000


@pytest.mark.parametrize(
    "unit",
    ["srun: error: ", "  rank : 1 (local_rank: 0)\n", "process rank 1 with PID 0 on node vm exited on ", "a: ssh: a"],
)
def test_a_long_log_is_read_in_no_time(unit: str) -> None:
    """No pattern goes over the same text again and again."""
    short, long = unit * (2_000 // len(unit)), unit * (64_000 // len(unit))
    assert seconds(long) < 200 * seconds(short) + 0.05


def seconds(text: str) -> float:
    best = 60.0
    for _ in range(3):
        began = time.process_time()
        read_reports(text)
        best = min(best, time.process_time() - began)
    return best


RANK = """
import os, signal, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else os._exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("exits", 3)])
def test_mpirun_still_words_its_report_so(tmp_path: Path, how: str, code: int) -> None:
    """The real launcher."""
    needs.programs("mpirun")
    argv = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", sys.executable, "-c"]
    answer = subprocess.run([*argv, RANK, how], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert read_reports(answer.stdout + answer.stderr).codes == ((1, code),)
