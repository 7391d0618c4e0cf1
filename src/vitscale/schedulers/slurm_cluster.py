"""A Slurm cluster: trials are planned for its nodes and submitted as jobs; and why a job ended, in Slurm's words.

Writes a job's batch script from everything that [slurm] says, quoted once for sbatch and once for bash.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, shown
from vitscale.launchers.base import Spawn
from vitscale.machine.batch_systems import SLURM
from vitscale.machine.hosts import Host
from vitscale.schedulers.base import BatchJob, Cause, JobState, OwnJob, SchedulerError, Submitter, described
from vitscale.schedulers.job_script import preparing_lines, refuse_module_names
from vitscale.schedulers.job_settings import (
    KEYS_BY_SIZE,
    WARNING_SECONDS,
    limit_seconds,
    named_nodes,
    planned_hosts,
    settings_for,
    time_span_seconds,
    warning_seconds,
)
from vitscale.schedulers.slurm import (
    SlurmAllocation,
    ask,
    is_preempted,
    job_fields,
    overriding_variables,
    own_job_id,
)
from vitscale.schedulers.slurm_steps import OPTION_WORD, launcher_refusal, most_gpus, step_commands
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_GPU_TYPE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REFUSED_OPTIONS: Mapping[str, str] = {
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
    """Return the whole batch script; `sbatch` gets no further options.

    Raises:
        RequestError: a value cannot stand in a script, or the user may not set an option.
    """
    _refuse_unwritable_values(slurm, job)
    _refuse_options(slurm)
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_quoted_for_sbatch(option)}" for option in _sbatch_options(slurm, job)]
    lines.append("")
    lines += preparing_lines(slurm.modules, slurm.setup)
    # exec, because Slurm signals the batch shell.
    lines.append(f"exec {shlex.join(_driver_command(slurm, job))}")
    lines.append("")
    return "\n".join(lines)


def _node_options(slurm: SlurmSection, nodes: int) -> list[str]:
    """Return the options that name the nodes which a job takes, or does not take.

    Raises:
        RequestError: too few nodes are named.
    """
    options = []
    names = named_nodes(slurm, nodes)
    if names:
        options.append(f"--nodelist={','.join(names)}")
    if slurm.exclude is not None:
        options.append(f"--exclude={slurm.exclude}")
    return options


def _sbatch_options(slurm: SlurmSection, job: BatchJob) -> list[str]:
    """Return the options for sbatch: vitscale's own, then those of [slurm], then the user's further ones.

    Raises:
        RequestError: slurm.nodelist or slurm.exclude cannot be used.
    """
    settings = settings_for(slurm, job.world.nodes)
    # sbatch replaces %j and the like by job numbers anywhere in the path.
    jobs_folder = str(job.results / "jobs").replace("%", "%%")
    job_number = "%A_%a" if job.elements is not None else "%j"
    options = [
        f"--job-name={job.name}",
        f"--chdir={job.cwd}",
        f"--output={jobs_folder}/{job.name}-{job_number}.out",
        "--open-mode=append",
        # A run that a broken node cut short is recorded, and the next `vitscale run` does it again.
        "--no-requeue",
        f"--signal=B:TERM@{warning_seconds(limit_seconds(settings))}",
    ]
    if job.elements is not None:
        at_a_time = f"%{job.at_a_time}" if job.at_a_time is not None else ""
        options.append(f"--array=0-{job.elements - 1}{at_a_time}")
    options += [
        f"--nodes={job.world.nodes}",
        f"--ntasks-per-node={job.world.ranks_per_node}",
        f"--cpus-per-task={job.world.threads_per_rank}",
        *_gpu_options(slurm, job),
    ]
    for key in KEYS_BY_SIZE:
        value = getattr(settings, key)
        if value is not None:
            options.append(f"--{key}={value}")
    return [*options, *_node_options(slurm, job.world.nodes), *slurm.options]


def _driver_command(slurm: SlurmSection, job: BatchJob) -> Sequence[str]:
    """Return the command that does the job's runs."""
    # In a container only the ranks run: the job's driver needs srun.
    python = sys.executable if slurm.container is not None else slurm.python or sys.executable
    return python_module("vitscale.runner.job", str(job.results), job.name, interpreter=python)


def _gpu_options(slurm: SlurmSection, job: BatchJob) -> list[str]:
    """Return the options that ask for a GPU for each rank: ["--gres=gpu:a100:4"]; none for ranks on CPUs."""
    if not job.on_gpus or slurm.gpus == "none":
        return []
    count = str(job.world.ranks_per_node)
    if slurm.gpu_type is not None:
        count = f"{slurm.gpu_type}:{count}"
    if slurm.gpus == "gpus-per-node":
        return [f"--gpus-per-node={count}"]
    return [f"--gres=gpu:{count}"]


def _quoted_for_sbatch(option: str) -> str:
    """Return an option quoted for sbatch's reader of `#SBATCH` lines; no shell sees these lines.

    Outside double quotes spaces part words and `#` begins a comment; inside a backslash escapes the next character.
    """
    key, equals, value = option.partition("=")
    if not equals or _NEEDS_NO_QUOTES.fullmatch(value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _refuse_unwritable_values(slurm: SlurmSection, job: BatchJob) -> None:
    """Refuse values that would break a line of the script, or that Slurm would change.

    Raises:
        RequestError: for the first of them.
    """
    texts = {f"slurm.{field}": value for field, value in slurm if isinstance(value, str)}
    for field in ("modules", "container_mounts", "options", "srun_options"):
        texts |= {f"slurm.{field}[{number}]": text for number, text in enumerate(getattr(slurm, field))}
    for number, size in enumerate(slurm.sizes):
        texts |= {f"slurm.sizes[{number}].{field}": value for field, value in size if isinstance(value, str)}
    texts["the results folder"] = str(job.results)
    texts["the working directory"] = str(job.cwd)
    for subject, text in texts.items():
        if not text.isprintable() or not text.strip():
            raise RequestError(
                f"{subject} is {shown(text)}, which cannot stand in a batch script",
                next_step="Write one line of printable characters",
            )
    if "\\" in str(job.results):
        raise RequestError(
            f"the results folder {shown(str(job.results))} has a backslash in its path",
            next_step="Slurm drops backslashes from paths: use a folder without one",
        )
    refuse_module_names(slurm.modules, "slurm")
    if slurm.gpu_type is not None and not _GPU_TYPE_NAME.fullmatch(slurm.gpu_type):
        raise RequestError(f"slurm.gpu_type is {shown(slurm.gpu_type)}", valid=["a name such as a100"])


def _refuse_options(slurm: SlurmSection) -> None:
    """Refuse words in `slurm.options` that are no options, or that would contradict the script's own.

    Raises:
        RequestError: for the first of them.
    """
    keys_of_nodes = {key: f"say slurm.{key}" for key in ("nodelist", "exclude") if getattr(slurm, key) is not None}
    refused_options = {**_REFUSED_OPTIONS, **keys_of_nodes}
    for option in slurm.options:
        match = OPTION_WORD.fullmatch(option)
        if match is None:
            raise RequestError(
                f"slurm.options has {shown(option)}", valid=["--NAME", "--NAME=VALUE"], next_step="Write one each"
            )
        reason = refused_options.get(match["name"])
        if reason is not None:
            raise RequestError(f"slurm.options has {shown(option)}", next_step=f"Remove it: {reason}")


_TIME_SPAN = re.compile(r"(\d+-)?\d{1,6}(:\d{2}){0,2}")
_MOST_EARLY_SECONDS = 60
"""Seconds by which Slurm may send a warning early ("sbatch --signal")."""
_LIVE_STATES = frozenset(
    (
        *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING"),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE"),
    )
)
"""States of `squeue` ("JOB STATE CODES") in which a job may still do something."""
_SQUEUE_FIELDS = 5
"""Number of fields in `_SQUEUE_FORMAT`."""
_SQUEUE_FORMAT = "%i|%j|%K|%T|%r"
"""Job id, name, element of the array, state, reason: the last one may have a bar in it."""
_MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d{1,9})", re.MULTILINE)
_PREEMPTED = "preempted by a job of higher priority"
_REASON_BY_STATE = {
    "PREEMPTED": _PREEMPTED,
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job's deadline came",
    "OUT_OF_MEMORY": "a node had no memory left for the job; ask for more (slurm.options)",
    "REVOKED": "the job was taken over by another cluster",
}


class SlurmCluster(Submitter):
    """Slurm seen from outside a job: hosts are known only once a job runs, where `vitscale.runner.job` uses them."""

    facts = SLURM
    title = SLURM.title
    default_launcher = "srun"

    def __init__(self, slurm: SlurmSection, node: NodeSection | None) -> None:
        """`node`: what one of the nodes offers."""
        self.python = slurm.python or sys.executable
        self.arrays = slurm.jobs != "job"
        self.trial_per_element = slurm.jobs == "trial-array"
        self._most_elements: int | None = None
        self._slurm = slurm
        self.node = node

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return the nodes that slurm.nodelist names, else names that stand for those that only a job knows.

        Raises:
            RequestError: slurm.nodelist names fewer nodes than the world has.
        """
        return planned_hosts(self._slurm, world.nodes)

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse launchers other than srun, and than torchrun, whose agents are started by srun."""
        del world
        if launcher in ("srun", "torchrun"):
            return launcher_refusal(self._slurm, launcher)
        return "jobs of Slurm start their ranks by srun, or by torchrun; use launcher = 'srun' or 'torchrun'"

    def adapt(self, spawn: Spawn) -> Spawn:
        """Return the commands as a job starts them; the names of nodes that only the job knows are stand-ins.

        Raises:
            RequestError: an option of srun may not be set, or a folder cannot be mounted in the container.
        """
        gpus = most_gpus(spawn, described(self.node)) if _asks_for_gpus(self._slurm) else 0
        commands = step_commands(spawn, self._slurm, python=self.python, gpus_per_node=gpus)
        return replace(spawn, commands=commands)

    def own_job(self) -> OwnJob | None:
        """Return the allocation around this process; None where there is none.

        Raises:
            RequestError: it is a heterogeneous one.
        """
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        job_id = os.environ.get("SLURM_JOB_ID")
        if job_id and "SLURM_HET_SIZE" in os.environ:
            # Its nodes are listed by component, and a step runs on those of one.
            raise RequestError(
                f"job {job_id} is heterogeneous (SLURM_HET_SIZE), and ranks run on nodes that are all asked for alike",
                next_step="Ask salloc or sbatch for them without ':'",
            )
        if not job_id or not nodes:
            return None
        own_id = own_job_id()
        _, _, element = own_id.partition("_")
        placement = SlurmAllocation(self._slurm, self.node, lambda: self.cause(own_id, [nodes]))
        return OwnJob(own_id, int(element) if element else None, nodes, placement)

    def script(self, job: BatchJob) -> str:
        """See `batch_script`."""
        return batch_script(self._slurm, job)

    def submit(self, script: Path) -> str:
        """Submit a script by sbatch and return the job's number.

        sbatch prints JOB or JOB;CLUSTER; a site's plugins may print lines before that.

        Raises:
            SchedulerError: sbatch refuses the script, or does not say the job's number.
        """
        overriding = overriding_variables(script.read_text(encoding="utf-8"))
        printed = ask("sbatch", "--parsable", str(script), without=overriding)
        last_line = printed.strip().rpartition("\n")[2]
        job_id, _, _ = last_line.partition(";")
        if not job_id.isdecimal():
            raise SchedulerError(f"sbatch does not say the job's number, but {shown(printed)}")
        return job_id

    def most_elements(self) -> int:
        """Return one less than Slurm's MaxArraySize, which is asked for once."""
        if self._most_elements is None:
            match = _MAX_ARRAY_SIZE.search(ask("scontrol", "show", "config"))
            self._most_elements = max(1, int(match[1]) - 1) if match else super().most_elements()
        return self._most_elements

    def states(self, names: Sequence[str]) -> list[JobState]:
        """Return states from squeue; ended jobs for as long as slurmctld keeps them (MinJobAge)."""
        if not names:
            return []
        lines = ask(
            *("squeue", "--noheader", "--array", "--states=all"),
            *(f"--format={_SQUEUE_FORMAT}", f"--name={','.join(names)}"),
        ).splitlines()
        states = []
        for line in lines:
            fields = line.strip().split("|", _SQUEUE_FIELDS - 1)
            if len(fields) == _SQUEUE_FIELDS:
                states.append(_job_state(*fields))
        return states

    def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
        """Return why a job ended; where Slurm has forgotten the job, that nobody knows.

        Args:
            job_id: 12, or 12_3 for element 3 of array 12.
            nodes: nodes of the job, as far as known: Slurm drops failed ones from its own list.
        """
        try:
            return _cause_of_end(job_id, job_fields(job_id), ",".join(nodes))
        except SchedulerError:
            return Cause("failed", f"job {job_id} ended before this run was done; Slurm does not say why (any more)")


def _asks_for_gpus(slurm: SlurmSection) -> bool:
    """Whether jobs are given GPUs, so that their steps have to ask for some: by slurm.gpus or an option (--gres)."""
    if slurm.gpus != "none":
        return True
    gres_options = [option for option in slurm.options if option.startswith(("--gres=", "--tres-per-"))]
    return any("gpu" in option for option in gres_options)


def _job_state(job_id: str, name: str, element: str, state: str, reason: str) -> JobState:
    """Return the state in one line of squeue (`_SQUEUE_FORMAT`)."""
    return JobState(
        job_id,
        name,
        element=int(element) if element.isdecimal() else None,
        state=state,
        reason="" if reason in ("None", "(null)") else reason,
        over=state not in _LIVE_STATES,
    )


def _cause_of_end(job_id: str, fields: Mapping[str, str], nodes: str) -> Cause:
    """Return why a job ended, or is ending.

    The surest signs come first: a job that is being ended is RUNNING or COMPLETING for a while, whatever the cause.

    Args:
        job_id: the job's id for users.
        fields: of `job_fields`.
        nodes: names of its nodes, with commas; empty where unknown.
    """
    state = fields.get("JobState", "")
    reason = fields.get("Reason", "")
    if is_preempted(fields) and state not in ("TIMEOUT", "NODE_FAIL"):
        return Cause("failed", f"{_PREEMPTED} (job {job_id})")
    runs_near_limit = state == "RUNNING" and _is_warned_of_limit(fields)
    if state == "TIMEOUT" or reason == "TimeLimit" or runs_near_limit:
        limit = fields.get("TimeLimit", "unknown")
        return Cause("timeout", f"the job's time limit of {limit} was reached (slurm.time, job {job_id})")
    if state == "NODE_FAIL" or reason == "NodeDown":
        return _node_failure(job_id, nodes or fields.get("NodeList", ""))
    if state in _REASON_BY_STATE:
        return Cause("failed", f"{_REASON_BY_STATE[state]} (job {job_id})")
    is_interactive = fields.get("BatchFlag") == "0"  # of salloc or srun, without a batch script
    if is_interactive and state in ("COMPLETING", "COMPLETED", "FAILED"):
        end = "cancelled, or given back" if state == "COMPLETING" else "given back"
        return Cause("failed", f"the allocation was {end} (job {job_id})")
    if state in ("CANCELLED", "COMPLETING"):
        return Cause("failed", f"cancelled by scancel (job {job_id})")
    if state == "RUNNING":
        return Cause("failed", f"the job's driver was ended by a signal from outside Slurm (job {job_id})")
    code, _, signal_number = fields.get("ExitCode", "unknown").partition(":")
    end = f"ended with exit code {code}" if signal_number in ("", "0") else f"was ended by signal {signal_number}"
    return Cause("failed", f"the driver of job {job_id} {end} before this run was done")


def _is_warned_of_limit(fields: Mapping[str, str]) -> bool:
    """Whether the warning before the time limit (`sbatch --signal`) has just come."""
    limit = fields.get("TimeLimit", "")
    run_time = fields.get("RunTime", "")
    are_spans = _TIME_SPAN.fullmatch(limit) and _TIME_SPAN.fullmatch(run_time)
    if not are_spans:
        return False  # UNLIMITED
    remaining_seconds = time_span_seconds(limit) - time_span_seconds(run_time)
    return remaining_seconds <= WARNING_SECONDS + _MOST_EARLY_SECONDS


def _node_failure(job_id: str, nodes: str) -> Cause:
    """Return the failure of a node as the cause, with Slurm's reasons where it says which of the nodes failed."""
    try:
        lines = ask(
            *("sinfo", "--noheader", "--Node", f"--nodes={nodes}"), *("--states=down,fail,no_respond", "--format=%N|%E")
        ).splitlines()
    except SchedulerError:
        lines = []
    reason_by_node: dict[str, str] = {}
    for line in lines:
        name, _, reason = line.strip().partition("|")
        reason_by_node[name] = reason
    if not reason_by_node:
        return Cause("failed", f"a node of the job failed (job {job_id} on {nodes})")
    failures = [name if reason in ("", "none") else f"{name} ({reason})" for name, reason in reason_by_node.items()]
    return Cause("failed", f"node failed: {', '.join(failures)} (job {job_id})", next(iter(reason_by_node)))
