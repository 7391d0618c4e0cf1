"""Flux: jobs by `flux batch`, their states by `flux jobs --json`; a job is a Flux instance of its own.

Options and fields are as in the manual pages and source of flux-core 0.8x (`flux-batch(1)`, `flux-jobs(1)`,
`flux-environment(7)`, `job/info.py`).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale.errors import shown
from vitscale.machine.batch_systems import FLUX
from vitscale.schedulers.base import BatchJob, OwnJob, SchedulerError
from vitscale.schedulers.batch_system import (
    BatchSystem,
    EndKind,
    JobReport,
    clock_text,
    exit_code_of_shell,
    host_names,
    json_object,
    number_of,
    object_of,
    text_of,
)
from vitscale.schedulers.job_settings import excluded_nodes, limit_seconds, named_nodes
from vitscale.study.sections import SlurmSection

_OVER_STATE = "INACTIVE"
_PENDING_STATES = ("NEW", "DEPEND", "PRIORITY", "SCHED")
_END_BY_EXCEPTION: Mapping[str, EndKind] = {
    "timeout": "time limit",
    "cancel": "cancelled",
    "preempt": "preempted",
    "node-failure": "node failure",
}
_FATAL = 0
"""Severity of an exception that ends its job."""
_FAILED_NODE = re.compile(r"node failure on ([A-Za-z0-9][A-Za-z0-9._-]*)")
_UNKNOWN_JOB = re.compile(r"unknown|not found|No such", re.IGNORECASE)
_DECIMAL_ID = re.compile(r"\d{1,20}")
_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(=.*)?|-[A-Za-z].*")
_OUR_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("job-name", "output", "error", "cwd", "wrap", "bg", "dry-run", "flags"),
                    "vitscale sets it, to find its jobs again"),
    **dict.fromkeys(("nodes", "nslots", "cores-per-slot", "gpus-per-slot"), "it follows from each trial's world"),
    "time-limit": "say slurm.time", "queue": "say slurm.partition", "bank": "say slurm.account",
    "requires": "say slurm.constraint",
}  # fmt: skip
"""Options that `slurm.options` may not have -> why."""


class Flux(BatchSystem):
    """Flux: a slot is a rank, with its cores and its GPU."""

    facts = FLUX
    title = FLUX.title
    directive = "# flux:"
    job_id_in_shell = '$(flux job id --to=dec "$(flux getattr jobid)")'
    keys = ("constraint",)
    silence = re.compile(
        r"Unable to connect to Flux|Connection (refused|timed out|reset)|Host is unreachable|Broken pipe"
        r"|Transport endpoint is not connected|lost connection",
        re.IGNORECASE,
    )

    def directives(self, job: BatchJob, settings: SlurmSection) -> list[str]:
        """Return the options of `flux batch`, which reads them as a shell would. See `BatchSystem.directives`.

        Raises:
            RequestError: slurm.nodelist or slurm.exclude is no list of nodes, or names too few.
        """
        world = job.world
        options = [
            f"--job-name={job.name}",
            f"--output={self.output_of_system(job)}",
            f"--nodes={world.nodes}",
            f"--nslots={world.size}",
            f"--cores-per-slot={world.threads_per_rank}",
        ]
        if self.gpus_per_node(job):
            options.append("--gpus-per-slot=1")
        limit = limit_seconds(settings)
        if limit is not None:
            options.append(f"--time-limit={limit}s")
        value_by_option = {
            "queue": settings.partition,
            "bank": settings.account,
            "requires": _required(settings, world.nodes),
        }
        for name, value in value_by_option.items():
            if value is not None:
                options.append(f"--{name}={shlex.quote(value)}")
        return options

    def refused_option(self, option: str) -> str | None:
        """Return why a line of `slurm.options` cannot stand in a script; None where it can."""
        match = _OPTION.fullmatch(option)
        if match is None or match["name"] is None:
            return "it is no long option of flux batch, such as --exclusive"
        return _OUR_OPTIONS.get(match["name"])

    def submit(self, script: Path) -> str:
        """Submit a script by `flux batch` and return the job's id as a decimal number, which names files everywhere.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerError: Flux refuses, or does not say the id.
        """
        printed = self.ask(*self._enclosing("batch"), str(script))
        return self._decimal(printed.strip().rpartition("\n")[2])

    def _decimal(self, job_id: str) -> str:
        """Return the decimal form of a job's id, which Flux prints in base 58: "ƒ2sFq1".

        Raises:
            SchedulerError: it is no id.
        """
        decimal = self.ask("flux", "job", "id", "--to=dec", "--", job_id).strip()
        if not _DECIMAL_ID.fullmatch(decimal):
            raise SchedulerError(f"flux does not say the job's id, but {shown(decimal)}")
        return decimal

    def reports(self, names: Sequence[str]) -> list[JobReport]:
        """Return the jobs that have these names; ended ones for as long as Flux keeps them."""
        reports = []
        for name in names:
            printed = self.ask(*self._enclosing("jobs"), "-a", "--json", f"--name={name}")
            jobs = json_object(printed, "flux jobs").get("jobs")
            reports += [_report(job) for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []
        return reports

    def report(self, job_id: str) -> JobReport | None:
        """Return the job with this id; None where Flux does not know it (any more).

        Raises:
            SchedulerSilentError: no answer.
            SchedulerError: Flux refuses, or its answer cannot be read.
        """
        answer = self.answer(*self._enclosing("jobs"), "--json", job_id)
        if answer.stdout.strip():
            job = json_object(answer.stdout, "flux jobs")
            return _report(job) if text_of(job, "state") else None
        if answer.returncode != 0 and not _UNKNOWN_JOB.search(answer.stderr):
            raise self.refusal("flux jobs", answer)
        return None

    def failed_hosts(self, names: Sequence[str]) -> list[str]:
        """Return which of these nodes are down, by the instance that gave them."""
        printed = self.ask(*self._enclosing("resource"), "list", "-n", "--states=down", "-o", "{nodelist}")
        down = set(self._expanded(printed.strip())) if printed.strip() else set()
        return [name for name in names if name in down]

    def own_job(self) -> OwnJob | None:
        """Return the job whose instance this process runs in; None where there is none.

        Raises:
            SchedulerError: Flux does not name its hosts.
        """
        job_id = self._own_id()
        if job_id is None:
            return None
        names = self._expanded(self.ask("flux", "getattr", "hostlist").strip())
        return self.job_around(self._decimal(job_id), names)

    def _own_id(self) -> str | None:
        """Return the id of the job whose instance this process runs in; None where there is none.

        Flux sets FLUX_ENCLOSING_ID in an instance that it started as a job; older versions answer `flux getattr jobid`.
        """
        if "FLUX_URI" not in os.environ:
            return None
        job_id = os.environ.get("FLUX_ENCLOSING_ID")
        if job_id:
            return job_id
        try:
            answer = self.answer("flux", "getattr", "jobid")
        except SchedulerError:
            return None
        return answer.stdout.strip() or None

    def _enclosing(self, command: str) -> tuple[str, ...]:
        """Return the words that ask the instance in which jobs are submitted: in a job that is not its own instance."""
        return ("flux", "--parent", command) if self._own_id() is not None else ("flux", command)

    def _expanded(self, host_list: str) -> list[str]:
        """Return the names of a list of hosts: three for "node[1-3]"."""
        words = self.ask("flux", "hostlist", "--expand", host_list).split()
        return host_names(words)


def _required(settings: SlurmSection, nodes: int) -> str | None:
    """Return what the nodes of a job must be, for `--requires`; None where any will do.

    Example: "host:node1,node2 and (a100|h100)", in Flux's syntax of constraints (RFC 35).

    Raises:
        RequestError: slurm.nodelist or slurm.exclude is no list of nodes, or names too few.
    """
    terms = []
    names = named_nodes(settings, nodes)
    # Named nodes are without the excluded ones already.
    excluded = [] if names else excluded_nodes(settings)
    if names:
        terms.append(f"host:{','.join(names)}")
    if excluded:
        terms.append(f"-host:{','.join(excluded)}")
    if settings.constraint is None:
        return terms[0] if terms else None
    return " and ".join((*terms, f"({settings.constraint})")) if terms else settings.constraint


def _report(job: Mapping[str, Any]) -> JobReport:
    """Return a job as `flux jobs --json` describes it."""
    state = text_of(job, "state")
    is_over = state == _OVER_STATE
    exception = object_of(job, "exception")
    duration = _seconds(job, "duration")
    return JobReport(
        text_of(job, "id"),
        name=text_of(job, "name"),
        state=_state_words(state, text_of(job, "result")),
        is_over=is_over,
        end=_end(job, is_over=is_over),
        reason=": ".join(filter(None, (text_of(exception, "type"), text_of(exception, "note")))),
        exit_code=exit_code_of_shell(number_of(job, "returncode")),
        time_limit=clock_text(int(duration)) if duration else None,
        remaining_seconds=_seconds(job, "t_remaining") if state == "RUN" and duration else None,
        hosts=_hosts(job),
    )


def _state_words(state: str, result: str) -> str:
    """Return a job's state in Slurm's words where it has one."""
    if state == _OVER_STATE:
        return result or "FINISHED"
    if state in _PENDING_STATES:
        return "PENDING"
    return {"RUN": "RUNNING", "CLEANUP": "COMPLETING"}.get(state, state)


def _end(job: Mapping[str, Any], *, is_over: bool) -> EndKind:
    """Return what ended a job: the exception that was fatal to it, else its result."""
    exception = object_of(job, "exception")
    is_fatal = exception.get("occurred") is True and number_of(exception, "severity") == _FATAL
    if is_fatal and _FAILED_NODE.search(text_of(exception, "note")):
        return "node failure"
    if is_fatal and text_of(exception, "type") != "exec":  # "exec": its exit code says it
        return _END_BY_EXCEPTION.get(text_of(exception, "type"), "other")
    by_result: Mapping[str, EndKind] = {"TIMEOUT": "time limit", "CANCELED": "cancelled"}
    return by_result.get(text_of(job, "result"), "exit" if is_over else "unknown")


def _hosts(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the node that failed, where the exception names it; else those of a list without brackets."""
    failed = _FAILED_NODE.search(text_of(object_of(job, "exception"), "note"))
    if failed:
        return (failed[1],)
    return tuple(host_names(text_of(job, "nodelist").split(",")))


def _seconds(job: Mapping[str, Any], key: str) -> float | None:
    """Return a field's seconds; None where it has none."""
    value = job.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
