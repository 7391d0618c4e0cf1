"""A Slurm cluster: trials are planned for its nodes and submitted as jobs; and why a job ended, in Slurm's words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vitscale.errors import RequestError
from vitscale.machine.hardware import Machine
from vitscale.schedulers import slurm
from vitscale.schedulers.base import BatchJob, Cause, JobState, OwnJob, SchedulerError, Submitter, described
from vitscale.schedulers.slurm import SlurmAllocation, ask, job_fields
from vitscale.schedulers.slurm_script import WARNING_SECONDS, batch_script, seconds_of
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

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


class SlurmCluster(Submitter):
    """Knows no hosts: Slurm names them once a job runs, and `vitscale.runner.job` runs trials on them there."""

    name = "slurm"
    title = "Slurm"

    def __init__(self, slurm: SlurmSection, node: NodeSection | None) -> None:
        """`node`: what one of the nodes offers."""
        self.python = slurm.python or sys.executable
        self.arrays = slurm.jobs == "array"
        self._slurm = slurm
        self._node = node

    def machine(self) -> Machine:
        """What [node] describes.

        Raises:
            RequestError: the study does not say.
        """
        if (machine := described(self._node)) is None:
            raise RequestError(
                "launch.scheduler = 'slurm' submits jobs to nodes that this machine knows nothing of",
                next_step="Describe one of them: add [node] with cores = 64 and gpus = 4, to the study or to the "
                "file given with --site",
            )
        return machine

    def slots(self) -> int | None:
        """Ranks that a node takes: one on each GPU; on nodes without, as many as the study says."""
        return len(self.machine().gpus) or None

    def refuses(self, launcher: str, world: World) -> str | None:
        """In a job ranks are started by srun, on all of its nodes."""
        if launcher == "srun" or (launcher in ("in-process", "torchrun") and world.nodes == 1):
            return None
        return "jobs of Slurm start their ranks by srun; use launcher = 'srun'"

    def own_job(self) -> OwnJob | None:
        """The allocation around this process."""
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        if not (job_id := os.environ.get("SLURM_JOB_ID")) or not nodes:
            return None
        array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        named = f"{array}_{element}" if array and element else job_id
        placement = SlurmAllocation(self._slurm, self._node)
        return OwnJob(named, int(element) if element else None, nodes, placement)

    def script(self, job: BatchJob) -> str:
        """See `batch_script`."""
        return batch_script(self._slurm, job)

    def submit(self, script: Path) -> str:
        """By sbatch."""
        return slurm.submit(script)

    def states(self, names: Sequence[str]) -> list[JobState]:
        """By squeue, for as long as slurmctld keeps ended jobs (MinJobAge)."""
        return slurm.job_states(names)

    def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
        """Asks Slurm."""
        return cause_of(job_id, nodes)


def cause_of(job_id: str, nodes: Sequence[str] = ()) -> Cause:
    """Asks Slurm; says so where it no longer knows, or does not answer.

    Args:
        job_id: 12, or 12_3 for element 3 of array 12.
        nodes: that the job had, as far as is known: Slurm takes one that fails off the job's list.
    """
    try:
        fields = job_fields(job_id)
    except SchedulerError:
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
    except SchedulerError:
        lines = []
    failed = dict(line.strip().partition("|")[::2] for line in lines)
    if not failed:
        return Cause("failed", f"a node of the job failed (job {job_id} on {nodes})")
    said = ", ".join(f"{name} ({why})" if why not in ("", "none") else name for name, why in failed.items())
    return Cause("failed", f"node failed: {said} (job {job_id})", next(iter(failed)))
