"""Why a job ended, in words: what Slurm knows of it, put as the reason of an outcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.schedulers.slurm_commands import SlurmError, ask, job_fields
from vitscale.schedulers.slurm_script import WARNING_SECONDS, seconds_of
from vitscale.store.results import OutcomeKind

_SPAN = re.compile(r"(\d+-)?\d{1,4}(:\d{2}){0,2}")
_EARLY_SECONDS = 60
"""Slurm may send a warning so much earlier than it was asked to ("sbatch --signal")."""
_OTHER_ENDS = {
    "PREEMPTED": "preempted by a job of higher priority",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job's deadline came",
    "OUT_OF_MEMORY": "a node had no memory left for the job; ask for more (slurm.options)",
    "REVOKED": "the job was taken over by another cluster",
}


@dataclass(frozen=True)
class Cause:
    """What ended a job before its runs were done."""

    kind: OutcomeKind
    reason: str
    host: str | None = None
    """The node that failed."""


def cause_of(job_id: str, nodes: Sequence[str] = ()) -> Cause:
    """Asks Slurm; says so where it no longer knows, or does not answer.

    Args:
        job_id: 12, or 12_3 for element 3 of array 12.
        nodes: that the job had, as far as is known: Slurm takes one that fails off the job's list.
    """
    try:
        fields = job_fields(job_id)
    except SlurmError:
        return Cause("failed", f"job {job_id} ended before this run was done; Slurm does not say why (any more)")
    state, reason = fields.get("JobState", ""), fields.get("Reason", "")
    if state == "TIMEOUT" or reason == "TimeLimit" or (state == "RUNNING" and _at_its_limit(fields)):
        limit = fields.get("TimeLimit", "unknown")
        return Cause("timeout", f"the job's time limit of {limit} was reached (slurm.time, job {job_id})")
    if state == "NODE_FAIL" or reason == "NodeDown":
        return _node_failure(job_id, ",".join(nodes) or fields.get("NodeList", ""))
    if state in _OTHER_ENDS:
        return Cause("failed", f"{_OTHER_ENDS[state]} (job {job_id})")
    if state in ("CANCELLED", "COMPLETING"):
        return Cause("failed", f"cancelled by scancel (job {job_id})")
    if state == "RUNNING":
        return Cause("failed", f"the job's driver was ended by a signal from outside Slurm (job {job_id})")
    code, _, number = fields.get("ExitCode", "unknown").partition(":")
    how = f"was ended by signal {number}" if number not in ("", "0") else f"ended with exit code {code}"
    return Cause("failed", f"the driver of job {job_id} {how} before this run was done")


def _at_its_limit(fields: dict[str, str]) -> bool:
    """Whether the warning before the time limit (`sbatch --signal`) has just come."""
    limit, spent = fields.get("TimeLimit", ""), fields.get("RunTime", "")
    if not (_SPAN.fullmatch(limit) and _SPAN.fullmatch(spent)):
        return False  # UNLIMITED
    return seconds_of(limit) - seconds_of(spent) <= WARNING_SECONDS + _EARLY_SECONDS


def _node_failure(job_id: str, nodes: str) -> Cause:
    try:
        lines = ask(
            *("sinfo", "--noheader", "--Node", f"--nodes={nodes}"),
            *("--states=down,fail,no_respond", "--format=%N|%E"),
        ).splitlines()
    except SlurmError:
        lines = []
    failed = dict(line.strip().partition("|")[::2] for line in lines)
    if not failed:
        return Cause("failed", f"a node of the job failed (job {job_id} on {nodes})")
    said = ", ".join(f"{name} ({why})" if why not in ("", "none") else name for name, why in failed.items())
    return Cause("failed", f"node failed: {said} (job {job_id})", next(iter(failed)))
