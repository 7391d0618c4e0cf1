"""A Slurm cluster: trials are planned for its nodes and submitted as jobs; and why a job ended, in Slurm's words.

Writes a job's batch script from everything that [slurm] says, quoted once for sbatch and once for bash.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, shown
from vitscale.machine.hardware import Machine
from vitscale.schedulers.base import BatchJob, Cause, JobState, OwnJob, SchedulerError, Submitter, described
from vitscale.schedulers.slurm import SlurmAllocation, ask, job_fields, overriding, own_job_id, preempted
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

WARNING_SECONDS = 60
"""Seconds before its time limit at which a job is warned, at the latest; Slurm may be up to a minute early."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=.*)?")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+:@=~-]*")
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLLOWS: Mapping[str, str] = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "cpus-per-task"), "it follows from each trial's world"),
    **dict.fromkeys(("array", "wait", "hold", "wrap"), "say slurm.jobs"),
    **dict.fromkeys(
        (
            *("job-name", "output", "chdir", "signal", "requeue", "no-requeue", "parsable", "test-only"),
            *("open-mode", "clusters"),
        ),
        "vitscale sets it, to find its jobs again",
    ),
    **{name: f"say slurm.{name}" for name in ("partition", "account", "qos", "time", "constraint", "reservation")},
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), "say slurm.gpus and slurm.gpu_type"),
}
"""Options that `slurm.options` may not have -> why, or what to use instead."""


def batch_script(slurm: SlurmSection, job: BatchJob) -> str:
    """The whole batch script; `sbatch` gets no further options.

    Raises:
        RequestError: a value cannot stand in a script, or the user may not set an option.
    """
    _check(slurm, job)
    numbered = "%A_%a" if job.elements is not None else "%j"
    # sbatch replaces %j and the like by job numbers anywhere in the path.
    at_a_time = f"%{job.at_a_time}" if job.at_a_time is not None else ""
    output = f"{str(job.results / 'jobs').replace('%', '%%')}/{job.name}-{numbered}.out"
    directives = [
        f"--job-name={job.name}",
        f"--chdir={job.cwd}",
        f"--output={output}",
        "--open-mode=append",
        # A run that a broken node cut short is recorded, and the next `vitscale run` does it again.
        "--no-requeue",
        f"--signal=B:TERM@{_warning_seconds(slurm.time)}",
        *([f"--array=0-{job.elements - 1}{at_a_time}"] if job.elements is not None else []),
        f"--nodes={job.world.nodes}",
        f"--ntasks-per-node={job.world.ranks_per_node}",
        f"--cpus-per-task={job.world.threads_per_rank}",
        *_gpus(slurm, job),
        *(
            f"--{key}={value}"
            for key in ("partition", "account", "qos", "time", "constraint", "reservation")
            if (value := getattr(slurm, key)) is not None
        ),
        *slurm.options,
    ]
    # In a container only the ranks run: the job's driver needs srun.
    python = sys.executable if slurm.container is not None else slurm.python or sys.executable
    driver = python_module("vitscale.runner.job", str(job.results), job.name, interpreter=python)
    body = [
        *slurm.setup,
        *(f"module load {shlex.quote(module)} || exit 1" for module in slurm.modules),
        # exec, because Slurm signals the batch shell.
        f"exec {shlex.join(driver)}",
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {_directive(text)}" for text in directives), "", *body, ""])


def _gpus(slurm: SlurmSection, job: BatchJob) -> list[str]:
    if not job.on_gpus or slurm.gpus == "none":
        return []
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type is not None else ""
    count = f"{kind}{job.world.ranks_per_node}"
    return [f"--gpus-per-node={count}"] if slurm.gpus == "gpus-per-node" else [f"--gres=gpu:{count}"]


def _directive(text: str) -> str:
    """An option quoted for sbatch's reader of `#SBATCH` lines; no shell sees these lines.

    Outside double quotes spaces part words and `#` begins a comment; inside a backslash escapes the next character.
    """
    key, equals, value = text.partition("=")
    if not equals or _PLAIN.fullmatch(value):
        return text
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _check(slurm: SlurmSection, job: BatchJob) -> None:
    """Refuses values that would break a line, and options that would contradict the script's own."""
    texts = {f"slurm.{field}": value for field, value in slurm if isinstance(value, str)}
    for field in ("modules", "container_mounts", "options"):
        texts |= {f"slurm.{field}[{n}]": text for n, text in enumerate(getattr(slurm, field))}
    texts |= {"the results folder": str(job.results), "the working directory": str(job.cwd)}
    for where, text in texts.items():
        if not text.isprintable() or not text.strip():
            what = f"{where} is {shown(text)}, which cannot stand in a batch script"
            raise RequestError(what, next_step="Write one line of printable characters")
    if "\\" in str(job.results):
        what = f"the results folder {shown(str(job.results))} has a backslash in its path"
        raise RequestError(what, next_step="Slurm drops backslashes from paths: use a folder without one")
    for module in slurm.modules:
        if not _MODULE.fullmatch(module):
            raise RequestError(f"slurm.modules has {shown(module)}", valid=["NAME", "NAME/VERSION"])
    if slurm.gpu_type is not None and not _GPU_TYPE.fullmatch(slurm.gpu_type):
        raise RequestError(f"slurm.gpu_type is {shown(slurm.gpu_type)}", valid=["a name such as a100"])
    for option in slurm.options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise RequestError(
                f"slurm.options has {shown(option)}", valid=["--NAME", "--NAME=VALUE"], next_step="Write one each"
            )
        if match["name"] in _FOLLOWS:
            raise RequestError(f"slurm.options has {shown(option)}", next_step=f"Remove it: {_FOLLOWS[match['name']]}")


def _warning_seconds(limit: str | None) -> int:
    """Seconds before the time limit at which to warn; fewer for short jobs, which are not warned as they begin."""
    return WARNING_SECONDS if limit is None else max(1, min(WARNING_SECONDS, seconds_of(limit) // 4))


def seconds_of(limit: str) -> int:
    """Seconds of a time span in Slurm's notation: `90` minutes, `1:30` minutes and seconds, `1-2` days and hours."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


_SPAN = re.compile(r"(\d+-)?\d{1,6}(:\d{2}){0,2}")
_EARLY_SECONDS = 60
"""Seconds by which Slurm may send a warning early ("sbatch --signal")."""
_UNDER_WAY = frozenset(
    (
        *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING"),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE"),
    )
)
"""States of `squeue` ("JOB STATE CODES") in which a job may still do something."""
_MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d{1,9})", re.MULTILINE)
_PREEMPTED = "preempted by a job of higher priority"
_OTHER_ENDS = {
    "PREEMPTED": _PREEMPTED,
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job's deadline came",
    "OUT_OF_MEMORY": "a node had no memory left for the job; ask for more (slurm.options)",
    "REVOKED": "the job was taken over by another cluster",
}


class SlurmCluster(Submitter):
    """Slurm seen from outside a job: hosts are known only once a job runs, where `vitscale.runner.job` uses them."""

    name = "slurm"
    title = "Slurm"
    default_launcher = "srun"

    def __init__(self, slurm: SlurmSection, node: NodeSection | None) -> None:
        """`node`: what one of the nodes offers."""
        self.python = slurm.python or sys.executable
        self.arrays = slurm.jobs == "array"
        self._most_elements: int | None = None
        self._slurm = slurm
        self._node = node

    def machine(self) -> Machine:
        """The machine that [node] describes.

        Raises:
            RequestError: the study does not describe one.
        """
        if (machine := described(self._node)) is None:
            raise RequestError(
                "launch.scheduler = 'slurm' submits jobs to nodes that this machine knows nothing of",
                next_step="Describe one of them: add [node] with cores = 64 and gpus = 4, to the study or to the "
                "file given with --site",
            )
        return machine

    def slots(self) -> int | None:
        """Ranks that a node takes: one on each GPU; None on nodes without GPUs."""
        return len(self.machine().gpus) or None

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuses launchers other than srun on several nodes: in a job srun starts ranks on all nodes."""
        if launcher == "srun" or (launcher == "torchrun" and world.nodes == 1):
            return None
        return "jobs of Slurm start their ranks by srun; use launcher = 'srun'"

    def own_job(self) -> OwnJob | None:
        """The allocation around this process.

        Raises:
            RequestError: it is a heterogeneous one.
        """
        nodes, job_id = os.environ.get("SLURM_JOB_NODELIST"), os.environ.get("SLURM_JOB_ID")
        if job_id and "SLURM_HET_SIZE" in os.environ:
            # Its nodes are told by component, and a step runs on those of one.
            raise RequestError(
                f"job {job_id} is heterogeneous (SLURM_HET_SIZE), and ranks run on nodes that are all asked for alike",
                next_step="Ask salloc or sbatch for them without ':'",
            )
        if not job_id or not nodes:
            return None
        named = own_job_id()
        _, _, element = named.partition("_")
        placement = SlurmAllocation(self._slurm, self._node, lambda: self.cause(named, [nodes]))
        return OwnJob(named, int(element) if element else None, nodes, placement)

    def script(self, job: BatchJob) -> str:
        """See `batch_script`."""
        return batch_script(self._slurm, job)

    def submit(self, script: Path) -> str:
        """Submits by sbatch, which prints JOB or JOB;CLUSTER; a site's plugins may print lines before that.

        Raises:
            SchedulerError: sbatch refuses the script, or does not say the job's number.
        """
        said = ask("sbatch", "--parsable", str(script), without=overriding(script.read_text(encoding="utf-8")))
        job_id = said.strip().rpartition("\n")[2].partition(";")[0]
        if not job_id.isdecimal():
            raise SchedulerError(f"sbatch does not say the job's number, but {shown(said)}")
        return job_id

    def most_elements(self) -> int:
        """One less than Slurm's MaxArraySize, which is asked for once."""
        if self._most_elements is None:
            size = _MAX_ARRAY_SIZE.search(ask("scontrol", "show", "config"))
            self._most_elements = max(1, int(size[1]) - 1) if size else super().most_elements()
        return self._most_elements

    def states(self, names: Sequence[str]) -> list[JobState]:
        """States from squeue; ended jobs for as long as slurmctld keeps them (MinJobAge)."""
        if not names:
            return []
        form = ("--format=%i|%j|%K|%T|%r", f"--name={','.join(names)}")
        lines = ask("squeue", "--noheader", "--array", "--states=all", *form).splitlines()
        states = []
        for words in (line.strip().split("|", 4) for line in lines):
            if len(words) == 5:
                job_id, name, element, state, reason = words
                number = int(element) if element.isdecimal() else None
                told = "" if reason in ("None", "(null)") else reason
                states.append(JobState(job_id, name, number, state, told, over=state not in _UNDER_WAY))
        return states

    def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
        """Why a job ended, from Slurm, which drops failed nodes from the job's list; says so where Slurm forgot."""
        try:
            return _told(job_id, job_fields(job_id), ",".join(nodes))
        except SchedulerError:
            return Cause("failed", f"job {job_id} ended before this run was done; Slurm does not say why (any more)")


def _told(job_id: str, fields: Mapping[str, str], nodes: str) -> Cause:
    """Why a job ended, or is ending, from what Slurm says of it and from the names of its nodes, as far as known."""
    state, reason = fields.get("JobState", ""), fields.get("Reason", "")
    if preempted(fields) and state not in ("TIMEOUT", "NODE_FAIL"):
        return Cause("failed", f"{_PREEMPTED} (job {job_id})")
    if state == "TIMEOUT" or reason == "TimeLimit" or (state == "RUNNING" and _at_its_limit(fields)):
        limit = fields.get("TimeLimit", "unknown")
        return Cause("timeout", f"the job's time limit of {limit} was reached (slurm.time, job {job_id})")
    if state == "NODE_FAIL" or reason == "NodeDown":
        return _node_failure(job_id, nodes or fields.get("NodeList", ""))
    if state in _OTHER_ENDS:
        return Cause("failed", f"{_OTHER_ENDS[state]} (job {job_id})")
    if fields.get("BatchFlag") == "0" and state in ("COMPLETING", "COMPLETED", "FAILED"):
        how = "cancelled, or given back" if state == "COMPLETING" else "given back"
        return Cause("failed", f"the allocation was {how} (job {job_id})")
    if state in ("CANCELLED", "COMPLETING"):
        return Cause("failed", f"cancelled by scancel (job {job_id})")
    if state == "RUNNING":
        return Cause("failed", f"the job's driver was ended by a signal from outside Slurm (job {job_id})")
    code, _, number = fields.get("ExitCode", "unknown").partition(":")
    how = f"was ended by signal {number}" if number not in ("", "0") else f"ended with exit code {code}"
    return Cause("failed", f"the driver of job {job_id} {how} before this run was done")


def _at_its_limit(fields: Mapping[str, str]) -> bool:
    """Whether the warning before the time limit (`sbatch --signal`) has just come."""
    limit, spent = fields.get("TimeLimit", ""), fields.get("RunTime", "")
    if not (_SPAN.fullmatch(limit) and _SPAN.fullmatch(spent)):
        return False  # UNLIMITED
    return seconds_of(limit) - seconds_of(spent) <= WARNING_SECONDS + _EARLY_SECONDS


def _node_failure(job_id: str, nodes: str) -> Cause:
    try:
        lines = ask(
            *("sinfo", "--noheader", "--Node", f"--nodes={nodes}"), *("--states=down,fail,no_respond", "--format=%N|%E")
        ).splitlines()
    except SchedulerError:
        lines = []
    failed = dict(line.strip().partition("|")[::2] for line in lines)
    if not failed:
        return Cause("failed", f"a node of the job failed (job {job_id} on {nodes})")
    said = ", ".join(f"{name} ({why})" if why not in ("", "none") else name for name, why in failed.items())
    return Cause("failed", f"node failed: {said} (job {job_id})", next(iter(failed)))
