# ruff: noqa: E501 - messages stand as they are printed
"""Failures of NCCL and of GPUs, in the forms in which torch, NCCL and NVIDIA's driver print them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_endings import EXIT_3, REPORT, ending, error, outcome, rank, status, statuses
from vitscale.runner.gpu_failures import FailureKind, gpu_failures


def watchdog(number: int, words: str, group: str = "0 PG GUID 0(default_pg)") -> str:
    """The last words of a rank's watchdog (ProcessGroupNCCL.cpp, `Watchdog::run`), as its logger begins each."""
    thrown = f"[PG ID {group} Rank {number}] Process group watchdog thread terminated with exception: {words}"
    return f"""\
[rank{number}]:[E810 03:05:11.145513712 ProcessGroupNCCL.cpp:744] [Rank {number}] Some NCCL operations have failed or \
timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
[rank{number}]:[E810 03:05:11.145572903 ProcessGroupNCCL.cpp:758] [Rank {number}] To avoid data inconsistency, we are \
taking the entire process down.
[rank{number}]:[E810 03:05:11.149121725 ProcessGroupNCCL.cpp:2057] {thrown}
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:676 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f57d0f6afad in /venv/lib/libc10.so)
frame #1: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0x95f (0x7f57d0f6afad in /venv/lib/libtorch_cuda.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {thrown}
"""


def timeout(number: int, sequence: int = 78, group: int = 0, last: int = 79) -> str:
    """A rank that waits in a collective for 600 s (`WorkNCCL::checkTimeout`, `Watchdog::runLoop`)."""
    words = (
        f"[Rank {number}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType=ALLREDUCE, "
        "NumelIn=9437184, NumelOut=9437184, Timeout(ms)=600000) ran for 600021 milliseconds before timing out."
    )
    guid = "0 PG GUID 0(default_pg)" if group == 0 else f"{group} PG GUID {group}"
    return f"""\
[rank{number}]:[E810 03:04:10.851000000 ProcessGroupNCCL.cpp:688] {words}
[rank{number}]:[E810 03:04:10.852091492 ProcessGroupNCCL.cpp:2241] [PG ID {guid} Rank {number}]  failure detected by \
watchdog at work sequence id: {sequence} PG status: last enqueued work: {last}, last completed work: {sequence - 1}
{watchdog(number, words, guid)}"""


def told_of_timeout(number: int, last: int) -> str:
    """A rank that heard of it from another one (`HeartbeatMonitor::runLoop`)."""
    return (
        f"[rank{number}]:[E810 03:04:11.063479079 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank "
        f"{number}] Received a dump signal due to a collective timeout from  rank 1 and we will try our best to dump "
        f"the debug info. Last enqueued NCCL work: {last}, last completed NCCL work: {last}.This is most likely caused "
        "by incorrect usages of collectives, e.g., wrong sizes used across ranks.\n"
    )


REMOTE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\n"
    "NET/IB: Got completion from peer 10.0.0.2<47534> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) "
    "vendor_err=129  hca mlx5_0"
)
NO_SPACE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n"
    "Error while creating shared memory segment /dev/shm/nccl-fGd0Zw (size 33030528), error: No space left on device (28)"
)
REFUSED = NO_SPACE.replace(
    "Error while creating shared memory segment /dev/shm/nccl-fGd0Zw (size 33030528), error: No space left on device (28)",
    "socketPollConnect: connect returned Connection timed out, exceeded error retry count (35)",
)
DUPLICATE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
)
ECC = (
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other "
    "API call, so the stacktrace below might be incorrect.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
    "assertions.\n"
)
IB_OLD = "node1:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<54862> with status={} opcode=0 len=0 vendor err 129 (Recv)\n"
IB_OLDEST = "NET/IB : Got completion from peer 10.42.0.2<47534> with error 5, opcode 48, len 32764, vendor err 244\n"
PORT_DOWN = "node1:77:99 [0] NCCL WARN NET/IB : mlx5_3:1 Got non-fatal async event: port error(10)\n"
FATAL_EVENT = "node1:77:99 [0] NCCL WARN NET/IB : mlx5_3:1 async fatal event: local catastrophic error\n"
STUCK = (
    "[rank3]:[F810 03:12:11.145 ProcessGroupNCCL.cpp:1575] [PG ID 0 PG GUID 0(default_pg) Rank 3] [PG ID 0 PG GUID "
    "0(default_pg) Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring "
    "enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog\n"
)


def xid(number: int, words: str, gpu: str = "0000:3b:00") -> str:
    return f"[Mon Aug 10 03:04:10 2026] NVRM: Xid (PCI:{gpu}): {number}, {words}\n"


@pytest.mark.parametrize(
    ("log", "reason", "transient", "rank_of"),
    [
        (
            timeout(0) + told_of_timeout(1, last=77),
            "NCCL timeout: all_reduce number 78 (9,437,184 elements) did not end within 600 s on rank 0; rank 1 has not "
            "entered it",
            False,
            1,
        ),
        (
            timeout(0) + timeout(1),
            "NCCL timeout: all_reduce number 78 (9,437,184 elements) did not end within 600 s on rank 0 and 1; the log does "
            "not say which rank has not entered it, or whether the network or a GPU is at fault",
            False,
            None,
        ),
        (
            # The numbers of a group of some ranks say nothing of the group of all.
            timeout(0, sequence=200, group=3) + told_of_timeout(1, last=77),
            "NCCL timeout: all_reduce number 200 (9,437,184 elements) did not end within 600 s on rank 0; the log does "
            "not say which rank has not entered it, or whether the network or a GPU is at fault",
            False,
            None,
        ),
        (
            STUCK,
            "NCCL timeout: a call of CUDA or NCCL did not return for 480 s on rank 3, and torch's watchdog with it",
            False,
            3,
        ),
        (
            watchdog(1, REMOTE),
            "InfiniBand error: a transfer with 10.0.0.2<47534> ended with status 12 (no answer after all retries: a link "
            "or the other end is gone)",
            True,
            None,
        ),
        (
            PORT_DOWN + IB_OLD.format(5) + IB_OLD.format(12),
            "InfiniBand error: a transfer with 10.0.0.2<54862> ended with status 12 (no answer after all retries: a link "
            "or the other end is gone); mlx5_3:1 reported 'port error(10)'",
            True,
            None,
        ),
        (
            IB_OLD.format(4),
            "InfiniBand error: a transfer with 10.0.0.2<54862> ended with status 4 (memory that the adapter may not use: "
            "PCIe access control (ACS) may be on)",
            False,
            None,
        ),
        (
            IB_OLDEST,
            "InfiniBand error: a transfer with 10.42.0.2<47534> ended with status 5 (flushed after an earlier error)",
            True,
            None,
        ),
        (FATAL_EVENT, "InfiniBand error: adapter mlx5_3:1 reported 'local catastrophic error'", False, None),
        (
            watchdog(
                1, REMOTE.rpartition("NET/IB")[0] + "socketProgress: Connection closed by remote peer node2<4711>"
            ),
            "NCCL remote error (ncclRemoteError) on rank 1: socketProgress: Connection closed by remote peer node2<4711> "
            "(a link has failed, or another rank is gone)",
            True,
            1,
        ),
        (
            watchdog(1, REFUSED),
            "NCCL system error (ncclSystemError) on rank 1: socketPollConnect: connect returned Connection timed out, "
            "exceeded error retry count (35)",
            True,
            1,
        ),
        (
            watchdog(0, NO_SPACE),
            "NCCL system error (ncclSystemError) on rank 0: Error while creating shared memory segment "
            "/dev/shm/nccl-fGd0Zw (size 33030528), error: No space left on device (28)",
            False,
            0,
        ),
        (
            watchdog(1, DUPLICATE),
            "NCCL was used wrongly (ncclInvalidUsage) on rank 1: Duplicate GPU detected : rank 1 and rank 0 both on CUDA "
            "device 1b000",
            False,
            1,
        ),
        (
            watchdog(0, REMOTE) + watchdog(1, ECC),
            "GPU error: CUDA reports 'uncorrectable ECC error encountered' on rank 1: the kernel's log says which Xid it "
            "was: after 94 the run may be tried again, after 48 and 95 reset the GPU",
            False,
            1,
        ),
        (
            "node1:1:2 [0] enqueue.cc:99 NCCL WARN Cuda failure 719 'unspecified launch failure'\n",
            "GPU error: CUDA reports 'unspecified launch failure': as a rule the program's own fault: compute-sanitizer "
            "finds it",
            False,
            None,
        ),
        (
            xid(79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.") + timeout(0),
            "GPU error: Xid 79 of GPU 0000:3b:00 (the GPU has fallen off the bus): the host must be rebooted before the "
            "run is tried again; where it recurs the GPU is broken",
            False,
            None,
        ),
        (
            xid(63, "pid=1896, Row Remapper: New row marked for remapping") + xid(94, "pid=77, Contained: SM (0x1)"),
            "GPU error: Xid 94 of GPU 0000:3b:00 (a contained memory error): the GPU has contained it, and the run may be "
            "tried again",
            True,
            None,
        ),
        (
            xid(94, "pid=77, Contained: SM")
            + xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset)"),
            "GPU error: Xid 94 of GPU 0000:3b:00 (a contained memory error): the GPU must be reset (nvidia-smi "
            "--gpu-reset, or a reboot) before the run is tried again",
            False,
            None,
        ),
        (
            xid(666, "something new"),
            "GPU error: Xid 666 of GPU 0000:3b:00 (something new): NVIDIA's catalogue of Xids says what to do",
            False,
            None,
        ),
    ],
)
def test_a_rank_that_its_watchdog_ended_ends_by_name(
    log_file: Path, log: str, reason: str, transient: bool, rank_of: int | None
) -> None:
    aborted = REPORT.replace(": -9 ", ": -6 ")
    found = outcome(log_file, ending(), rank(0), rank(1), text=log + aborted)
    assert (found.kind, found.reason, found.transient, found.rank) == ("failed", reason, transient, rank_of)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def test_the_first_words_of_many_ranks_are_found_far_before_the_end(log_file: Path) -> None:
    """Sixteen watchdogs print their stacks: the first cause lies more than 64 KB before the log's end."""
    stacks = "frame #1: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0x95f\n" * 2_000
    text = watchdog(3, ECC) + stacks + watchdog(0, REMOTE)
    assert outcome(log_file, ending(), rank(0), rank(1), text=text).reason.startswith("GPU error: CUDA reports 'uncorr")


def test_a_recorded_exception_of_nccl_is_named_and_tried_again(log_file: Path) -> None:
    recorded = error(REMOTE, error_type="DistBackendError")
    found = outcome(log_file, ending(), rank(0, error=recorded), rank(1))
    assert (found.rank, found.transient, found.detail) == (None, True, "")
    assert found.reason.startswith("InfiniBand error: a transfer with 10.0.0.2<47534> ended with status 12")
    socket_closed = REMOTE.rpartition("NET/IB")[0] + "socketProgress: Connection closed by remote peer node2<4711>"
    found = outcome(log_file, ending(), rank(0), rank(1, error=error(socket_closed)))
    assert (found.rank, found.transient, found.detail) == (1, True, f"Traceback of {socket_closed}")


@pytest.mark.parametrize("words", [REMOTE, timeout(0)])
def test_what_others_say_of_a_rank_that_is_gone_is_not_the_cause(log_file: Path, words: str) -> None:
    """A killed rank, one that raised, one that left, and a host that fell silent: links and collectives then fail."""
    said = watchdog(0, words)
    assert outcome(log_file, ending(), rank(0), rank(1), text=said + REPORT).reason == (
        "rank 1 was ended by SIGKILL without a word"
    )
    raised = outcome(log_file, ending(), rank(0), rank(1, error=error()), text=said)
    assert raised.reason == "rank 1 raised ValueError: bad pixel"
    left = EXIT_3.replace("rank      : 0", "rank      : 1")
    assert outcome(log_file, ending(), rank(0), rank(1), text=said + left).reason == (
        "rank 1 ended with exit code 3 without a word"
    )
    silent = ending(statuses=statuses(status(140.0, "ended"), status(130.0, "silent", host="node1")))
    assert outcome(log_file, silent, rank(0), rank(1), text=said).host == "node1"


@pytest.mark.parametrize(("first_seconds", "is_named"), [(100.0, False), (129.8, True)])
def test_a_rank_lost_long_before_those_that_say_so_is_the_cause(
    log_file: Path, first_seconds: float, is_named: bool
) -> None:
    ends = ending(statuses=statuses(status(130.0, "ended"), status(first_seconds, "ended", host="node1")))
    found = outcome(log_file, ends, rank(0), rank(1), text=watchdog(0, REFUSED))
    assert found.reason.startswith("NCCL system error" if is_named else "rank 1 ended without a word")


def test_a_shell_s_exit_code_for_an_abort_is_no_cause_of_its_own(log_file: Path) -> None:
    """As pdsh reports a rank that its watchdog ended."""
    aborted = "local: rank 1 ended with exit code 134\n"
    heard = ending(statuses=statuses(status(130.0, "ended"), status(130.1, "ended")))
    found = outcome(log_file, heard, rank(0), rank(1), text=watchdog(0, REFUSED) + aborted)
    assert found.reason.startswith("NCCL system error")


def test_a_hang_after_a_failure_has_its_name(log_file: Path) -> None:
    ends = ending(None, stopped="hang", limit_seconds=30.0)
    found = outcome(log_file, ends, rank(0), rank(1), text=IB_OLD.format(12))
    assert (found.kind, found.transient) == ("hang", True)
    assert found.reason.startswith("no rank recorded anything for 30 s, after a failure: InfiniBand error: a transfer")


def test_a_run_that_completed_has_no_failure(log_file: Path) -> None:
    """A link that came back in time, and an Xid of somebody else's GPU."""
    text = PORT_DOWN + xid(31, "pid=1")
    found = outcome(log_file, ending(0), rank(0, ended=True), rank(1, ended=True), text=text)
    assert (found.kind, found.reason) == ("completed", "")
    assert gpu_failures(PORT_DOWN) == []


def test_the_cause_stands_first() -> None:
    failures = gpu_failures(timeout(0) + watchdog(1, REMOTE) + xid(48, "pid=1, DBE"))
    kinds = [FailureKind.GPU, FailureKind.NETWORK, FailureKind.NETWORK, FailureKind.TIMEOUT]
    assert [failure.kind for failure in failures] == kinds


@given(
    st.text(), st.sampled_from([timeout(0), watchdog(1, REMOTE), xid(79, "x"), IB_OLD.format(12), STUCK, ""]), st.data()
)
def test_no_log_is_an_error(noise: str, words: str, data: Any) -> None:
    cut = data.draw(st.integers(0, len(words)))
    for failure in gpu_failures(noise + words[:cut] + noise + words[cut:]):
        assert failure.sentence
