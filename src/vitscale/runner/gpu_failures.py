"""Failures of GPUs and of NCCL in what ranks print, by name.

NCCL's watchdog, a thread of torch (`ProcessGroupNCCL.cpp`), ends a rank by SIGABRT after it has printed why: a
collective that does not end, an error of the network, an error of CUDA. No exception is recorded then. The kernel's
driver reports what befalls a GPU as a numbered Xid, which a job's epilogue or a health check may print.

The forms are those of torch 2.1 to 2.13 and of NCCL 2.19 to 2.30.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from vitscale.present.units import counted, listed
from vitscale.profiles.kernels import operation

_MOST_WORDS_CHARACTERS = 200
"""Longest quotation of somebody else's words."""
_LOOK_BACK_CHARACTERS = 2_000
"""How far before a message its rank is looked for: a message of several lines names it in the first one."""


class FailureKind(IntEnum):
    """Kinds of failures; where a run has several, one with a lower number is the cause of the others."""

    GPU = 0
    """A GPU, or what runs on it, has failed."""
    NETWORK = 1
    """Ranks have lost one another: a link has failed, or a rank is gone."""
    TIMEOUT = 2
    """A collective did not end in time."""


class GpuFailure(NamedTuple):
    """One failure in a log, or in the message of an exception."""

    kind: FailureKind
    sentence: str
    """The failure by its name, with what to do: the reason of an outcome."""
    rank: int | None
    """The rank that it befell, or for which the others wait; None: the log does not say."""
    reporters: frozenset[int]
    """Ranks that printed it; empty where the log does not say."""
    is_transient: bool
    """Whether it may have passed when the run is tried again."""

    @property
    def may_follow(self) -> bool:
        """Whether another rank's end may have caused it."""
        return self.kind is not FailureKind.GPU


def gpu_failures(log: str) -> list[GpuFailure]:
    """Return the failures that a log names, of each kind the first one; the cause of the others stands first."""
    failures = [*_xids(log), *_cuda_errors(log), *_network_errors(log), *_nccl_errors(log), *_timeouts(log)]
    return sorted(failures, key=lambda failure: failure.kind)


# --- GPUs -----------------------------------------------------------------------------------------------------------


class _Remedy(NamedTuple):
    """What mends a failure of a GPU."""

    advice: str
    is_transient: bool = False
    """Whether it is enough to run again."""


_RUN_AGAIN = _Remedy("the GPU has contained it, and the run may be tried again", is_transient=True)
_RESET = _Remedy("the GPU must be reset (nvidia-smi --gpu-reset, or a reboot) before the run is tried again")
_REBOOT = _Remedy("the host must be rebooted before the run is tried again; where it recurs the GPU is broken")
_CHECK_PROGRAM = _Remedy("as a rule the program's own fault: compute-sanitizer finds it")
_SEE_CATALOGUE = _Remedy("NVIDIA's catalogue of Xids says what to do")


class _Xid(NamedTuple):
    """The meaning of an Xid, and what mends it."""

    meaning: str
    remedy: _Remedy


# NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (immediate action).
_XIDS: Mapping[int, _Xid] = {
    13: _Xid("an exception in a kernel", _CHECK_PROGRAM),
    31: _Xid("a kernel has used an invalid address", _CHECK_PROGRAM),
    43: _Xid("the GPU stopped a program", _CHECK_PROGRAM),
    48: _Xid("an uncorrectable memory error", _RESET),
    64: _Xid("a row of memory could not be remapped", _RESET),
    74: _Xid("an NVLink has failed", _RESET),
    79: _Xid("the GPU has fallen off the bus", _REBOOT),
    94: _Xid("a contained memory error", _RUN_AGAIN),
    95: _Xid("an uncontained memory error", _RESET),
    109: _Xid("a context switch timed out", _RESET),
    119: _Xid("the GPU's own processor (GSP) does not answer", _RESET),
    120: _Xid("an error of the GPU's own processor (GSP)", _RESET),
    140: _Xid("an unrecovered memory error", _RESET),
    145: _Xid("an NVLink has failed", _RESET),
    149: _Xid("an NVLink has failed", _RESET),
}
_XIDS_THAT_FOLLOW = frozenset({45, 63, 92})
"""Xids that end no program by themselves: clearing up after another one, a row remapped, many corrected errors."""
_RECOVERY_XID = 154
"""The driver says by it what a GPU now needs: "... changed from 0x0 (None) to 0x2 (Node Reboot Required)"."""
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<gpu>[0-9a-fA-F:.]{4,20})\): (?P<number>\d{1,4})(?P<words>[^\n]{0,300})")


def _xids(log: str) -> Iterator[GpuFailure]:
    """Yield the first Xid that ends a program; the driver's last word on what the GPU needs counts where there is one.

    Its lines name the GPU by its PCI address, and no rank.
    """
    matches = list(_XID_LINE.finditer(log))
    fatal = [match for match in matches if int(match["number"]) not in {*_XIDS_THAT_FOLLOW, _RECOVERY_XID}]
    if not fatal:
        return
    first = fatal[0]
    number = int(first["number"])
    xid = _XIDS.get(number, _Xid(first["words"].strip(" ,") or "unknown", _SEE_CATALOGUE))
    recovery_words = [match["words"] for match in matches if int(match["number"]) == _RECOVERY_XID]
    remedy = _stated_remedy(recovery_words) or xid.remedy
    meaning = xid.meaning[:_MOST_WORDS_CHARACTERS]
    sentence = f"GPU error: Xid {number} of GPU {first['gpu']} ({meaning}): {remedy.advice}"
    yield GpuFailure(FailureKind.GPU, sentence, None, frozenset(), remedy.is_transient)


def _stated_remedy(recovery_words: Sequence[str]) -> _Remedy | None:
    """Return what the driver itself says that a GPU needs; None where it says nothing.

    Args:
        recovery_words: the text of each Xid 154.
    """
    if not recovery_words:
        return None
    new_state = recovery_words[-1].rpartition(" to ")[2]
    if "Reboot" in new_state:
        return _REBOOT
    is_reset = "Reset" in new_state or "Drain" in new_state
    return _RESET if is_reset else None


# cudaGetErrorString of errors that end all work of a process on its GPU.
_CUDA_REMEDIES: Mapping[str, _Remedy] = {
    "uncorrectable ECC error encountered": _Remedy(
        "the kernel's log says which Xid it was: after 94 the run may be tried again, after 48 and 95 reset the GPU"
    ),
    "uncorrectable NVLink error detected during the execution": _RESET,
    "Invalid access of peer GPU memory over nvlink or a hardware error": _RESET,
    "hardware stack error": _RESET,
    "system not yet initialized": _Remedy("on hosts with NVSwitch the fabric manager must run (nvidia-fabricmanager)"),
    "unknown error": _Remedy("the kernel's log (dmesg) may have an Xid that says more"),
    "unspecified launch failure": _CHECK_PROGRAM,
    "an illegal memory access was encountered": _CHECK_PROGRAM,
    "an illegal instruction was encountered": _CHECK_PROGRAM,
    "misaligned address": _CHECK_PROGRAM,
    "device-side assert triggered": _CHECK_PROGRAM,
}
_CUDA_ERROR = re.compile(
    r"(?:CUDA error: |Cuda failure (?:\d{1,4} )?')(?P<words>" + "|".join(map(re.escape, _CUDA_REMEDIES)) + ")"
)
"""torch's form (CUDAException.cpp), and NCCL's (checks.h)."""


def _cuda_errors(log: str) -> Iterator[GpuFailure]:
    """Yield the first error of CUDA, of a GPU rather than of a program where there are both."""
    matches = list(_CUDA_ERROR.finditer(log))
    if not matches:
        return
    match = min(matches, key=lambda found: _CUDA_REMEDIES[found["words"]] is _CHECK_PROGRAM)
    remedy = _CUDA_REMEDIES[match["words"]]
    rank = _rank_before(log, match)
    sentence = f"GPU error: CUDA reports '{match['words']}'{_on_rank(rank)}: {remedy.advice}"
    yield GpuFailure(FailureKind.GPU, sentence, rank, _as_set(rank), remedy.is_transient)


# --- the network ----------------------------------------------------------------------------------------------------

_IB_COMPLETION = re.compile(
    r"NET/IB ?: Got completion from peer (?P<peer>\S{1,80}) with (?:error |status=)(?:[A-Z_]{1,40}\()?"
    r"(?P<status>\d{1,3})"
)
"""NCCL 2.19 says "with error 5,", later ones "with status=12 opcode=0" and "with status=IBV_WC_RETRY_EXC_ERR(12)"."""
_IB_EVENT = re.compile(
    r"NET/IB ?: (?P<port>[\w.-]{1,40}:\d{1,3}) (?P<kind>async fatal event|Got non-fatal async event)[^\n]{0,200}?: "
    r"(?P<event>[a-zA-Z][^\n]{0,80})"
)
_PORT_EVENT = re.compile(r"port (?:error|down)", re.IGNORECASE)
"""An event that comes where a link goes down. It is no error for NCCL by itself, which waits for the link."""


class _CompletionStatus(NamedTuple):
    """The meaning of a status of `ibv_wc_status`."""

    meaning: str
    is_link: bool
    """Whether a link or the other end has failed, so that the run may be tried again."""


_COMPLETION_STATUSES: Mapping[int, _CompletionStatus] = {
    4: _CompletionStatus("memory that the adapter may not use: PCIe access control (ACS) may be on", is_link=False),
    5: _CompletionStatus("flushed after an earlier error", is_link=True),
    10: _CompletionStatus("memory that the other end may not use", is_link=False),
    12: _CompletionStatus("no answer after all retries: a link or the other end is gone", is_link=True),
    13: _CompletionStatus("the other end was not ready after all retries", is_link=True),
}
_UNKNOWN_STATUS = _CompletionStatus("see ibv_wc_status", is_link=False)


def _network_errors(log: str) -> Iterator[GpuFailure]:
    """Yield the first InfiniBand or RoCE error: a failed transfer, or a fatal event of an adapter."""
    link_events = [match for match in _IB_EVENT.finditer(log) if _PORT_EVENT.search(match["event"])]
    completions = [(int(match["status"]), match["peer"]) for match in _IB_COMPLETION.finditer(log)]
    if completions:
        number, peer = _earliest_cause(completions)
        status = _COMPLETION_STATUSES.get(number, _UNKNOWN_STATUS)
        down = f"; {link_events[0]['port']} reported '{link_events[0]['event'].strip()}'" if link_events else ""
        sentence = f"InfiniBand error: a transfer with {peer} ended with status {number} ({status.meaning}){down}"
        yield GpuFailure(FailureKind.NETWORK, sentence, None, frozenset(), status.is_link or bool(link_events))
        return
    fatal = [match for match in _IB_EVENT.finditer(log) if match["kind"] == "async fatal event"]
    if fatal:
        event = fatal[0]
        sentence = f"InfiniBand error: adapter {event['port']} reported '{event['event'].strip()}'"
        yield GpuFailure(FailureKind.NETWORK, sentence, None, frozenset(), is_transient=False)


def _earliest_cause(completions: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Return (status, peer) of the first failed transfer that was not merely flushed; else of the first one."""
    causes = [completion for completion in completions if completion[0] != 5]
    return (causes or completions)[0]


_NCCL_ERROR = re.compile(
    r"(?P<result>nccl(?:RemoteError|SystemError|UnhandledCudaError|InternalError|InvalidUsage)): [^\n]{0,400}"
    r"(?:\n[^\n]{0,80}?Last error:[ \t]*\n(?:\[[\w ]{1,20}\]: ?)*(?P<words>[^\n]{1,400}))?"
)
"""torch's words for what NCCL returned, and below them NCCL's own (`getNcclErrorDetailStr`)."""
_NCCL_NAMES = {
    "ncclRemoteError": "NCCL remote error",
    "ncclSystemError": "NCCL system error",
    "ncclUnhandledCudaError": "NCCL met an error of CUDA",
    "ncclInternalError": "NCCL internal error",
    "ncclInvalidUsage": "NCCL was used wrongly",
}
_NETWORK_WORDS = re.compile(
    r"connect|timed? ?out|unreachable|no route|socket|NET/|ibv_|reset by peer|broken pipe", re.I
)
_LASTING_WORDS = re.compile(r"no space left|too many open files|shared memory|/dev/shm|permission|memlock", re.I)


def _nccl_errors(log: str) -> Iterator[GpuFailure]:
    """Yield the first error that NCCL returned; one that is not about a lost rank where there are both."""
    matches = list(_NCCL_ERROR.finditer(log))
    if not matches:
        return
    match = min(matches, key=lambda found: found["result"] == "ncclRemoteError")
    result = match["result"]
    words = (match["words"] or "").strip()
    rank = _rank_before(log, match)
    is_about_network = _NETWORK_WORDS.search(words) is not None and _LASTING_WORDS.search(words) is None
    is_transient = result == "ncclRemoteError" or (result == "ncclSystemError" and is_about_network)
    said = f": {words[:_MOST_WORDS_CHARACTERS]}" if words else ""
    sentence = f"{_NCCL_NAMES[result]} ({result}){_on_rank(rank)}{said}"
    if result == "ncclRemoteError":
        sentence += " (a link has failed, or another rank is gone)"
    reporters = frozenset(_ranks_before(log, matches))
    yield GpuFailure(FailureKind.NETWORK, sentence, rank, reporters, is_transient)


# --- collectives that do not end ------------------------------------------------------------------------------------

_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d{1,18}), "
    r"OpType=(?P<operation>\w{1,40}), NumelIn=(?P<elements>\d{1,18})[^\n]{0,200}?Timeout\(ms\)=(?P<limit>\d{1,15})\)"
)
# The status of the first group, that of all ranks, on a rank whose watchdog has found the failure, and on one that has
# heard of it from another rank. Its numbers are not those of other groups.
_FAILURE = re.compile(
    r"\[PG ID (?P<group>\d{1,6}) [^\n\]]{1,300}\]\s+failure detected by watchdog at work sequence id: "
    r"(?P<number>\d{1,18})"
)
_STATUS_AT_FAILURE = re.compile(
    r"\[PG ID 0 [^\n\]]{1,300}\]\s+failure detected by watchdog at work sequence id: \d{1,18},? "
    r"PG status: last enqueued work: (?P<enqueued>-?\d{1,18})"
)
_STATUS_AT_DUMP = re.compile(
    r"\[PG ID 0 [^\n\]]{1,300}\] Received a dump signal due to a collective timeout from [^\n]{0,200}?"
    r"Last enqueued NCCL work: (?P<enqueued>-?\d{1,18})"
)
_STUCK_WATCHDOG = re.compile(r"ProcessGroupNCCL's watchdog got stuck for (?P<seconds>\d{1,9}) seconds")


def _timeouts(log: str) -> Iterator[GpuFailure]:
    """Yield the first collective that did not end in time; else that the watchdog itself was stuck."""
    matches = list(_TIMEOUT.finditer(log))
    if matches:
        yield _timeout(log, matches)
        return
    stuck = _STUCK_WATCHDOG.search(log)
    if stuck is not None:
        rank = _rank_before(log, stuck)
        sentence = (
            f"NCCL timeout: a call of CUDA or NCCL did not return for {stuck['seconds']} s{_on_rank(rank)}, and "
            "torch's watchdog with it"
        )
        yield GpuFailure(FailureKind.TIMEOUT, sentence, rank, _as_set(rank), is_transient=False)


def _timeout(log: str, matches: Sequence[re.Match[str]]) -> GpuFailure:
    """Return the collective with the lowest number that did not end, with the ranks that have not entered it."""
    first = min(matches, key=lambda match: int(match["number"]))
    number = int(first["number"])
    calls = [
        match for match in matches if (match["number"], match["operation"]) == (first["number"], first["operation"])
    ]
    waiting = frozenset(_ranks_before(log, calls))
    absent = sorted(_absent_ranks(log, number) - waiting)
    elements = counted(int(first["elements"]), "element")
    collective = f"{operation(first['operation'].lower())} number {number} ({elements})"
    sentence = f"NCCL timeout: {collective} did not end within {int(first['limit']) / 1000:g} s"
    if waiting:
        sentence += f" on rank {listed(sorted(waiting))}"
    if absent:
        verb = "has" if len(absent) == 1 else "have"
        sentence += f"; rank {listed(absent)} {verb} not entered it"
    else:
        sentence += "; the log does not say which rank has not entered it, or whether the network or a GPU is at fault"
    rank = absent[0] if absent else None
    return GpuFailure(FailureKind.TIMEOUT, sentence, rank, waiting, is_transient=False)


def _absent_ranks(log: str, number: int) -> set[int]:
    """Return the ranks that say that they have not entered a collective; none where it is not one of all ranks.

    Args:
        log: the log.
        number: the collective's number in its group.
    """
    groups = {match["group"] for match in _FAILURE.finditer(log) if int(match["number"]) == number}
    if groups != {"0"}:
        return set()
    absent = set()
    for pattern in (_STATUS_AT_DUMP, _STATUS_AT_FAILURE):
        behind = [match for match in pattern.finditer(log) if int(match["enqueued"]) < number]
        absent |= _ranks_before(log, behind)
    return absent


# --- ranks ----------------------------------------------------------------------------------------------------------

_RANK_PREFIX = re.compile(r"\[rank(\d{1,6})\]")
"""torch's logger begins the lines of rank 3 with this, and so does its hook for exceptions."""


def _rank_before(log: str, match: re.Match[str]) -> int | None:
    """Return the rank whose message a match is in; None where no line before it names one."""
    before = log[max(0, match.start() - _LOOK_BACK_CHARACTERS) : match.start()]
    ranks = _RANK_PREFIX.findall(before)
    return int(ranks[-1]) if ranks else None


def _ranks_before(log: str, matches: Iterable[re.Match[str]]) -> set[int]:
    """Return the ranks whose messages matches are in."""
    ranks = {_rank_before(log, match) for match in matches}
    return {rank for rank in ranks if rank is not None}


def _as_set(rank: int | None) -> frozenset[int]:
    return frozenset() if rank is None else frozenset({rank})


def _on_rank(rank: int | None) -> str:
    """Return " on rank 3"; empty where the rank is not known."""
    return "" if rank is None else f" on rank {rank}"
