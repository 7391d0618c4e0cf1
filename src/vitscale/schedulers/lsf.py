"""IBM Spectrum LSF 10.1: jobs by bsub, their states by bjobs, their nodes by $LSB_DJOB_HOSTFILE or $LSB_MCPU_HOSTS.

Options and fields are as in the command reference of LSF 10.1 (`bsub`, `bjobs -o -json`, `bhosts -o -json`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale.base.files import read_text
from vitscale.errors import RequestError, shown
from vitscale.machine.batch_systems import LSF
from vitscale.schedulers.base import BatchJob, OwnJob, SchedulerError
from vitscale.schedulers.batch_system import (
    BatchSystem,
    EndKind,
    JobReport,
    clock_seconds,
    exit_code_of_shell,
    host_names,
    json_object,
    number_of,
    text_of,
)
from vitscale.schedulers.job_settings import excluded_nodes, limit_seconds, named_nodes
from vitscale.study.sections import SlurmSection

_FIELDS = "jobid job_name stat exit_code exit_reason pend_reason exec_host run_time runtimelimit"
_NAMES_PATTERN = "vitscale-*"
"""Pattern of the names of all of vitscale's jobs, which one bjobs finds."""
_STATE_BY_WORD: Mapping[str, str] = {
    "PEND": "PENDING",
    "RUN": "RUNNING",
    "DONE": "COMPLETED",
    "EXIT": "FAILED",
    "WAIT": "PENDING",
    "PSUSP": "HELD",
    "USUSP": "SUSPENDED",
    "SSUSP": "SUSPENDED",
    "UNKWN": "NODE_UNREACHABLE",
    "ZOMBI": "NODE_UNREACHABLE",
    "PROV": "CONFIGURING",
}
_OVER_WORDS = ("DONE", "EXIT", "ZOMBI")
_END_BY_REASON: Mapping[str, EndKind] = {
    **dict.fromkeys(("TERM_RUNLIMIT", "TERM_DEADLINE", "TERM_WINDOW"), "time limit"),
    **dict.fromkeys(
        (
            "TERM_OWNER",
            "TERM_ADMIN",
            "TERM_FORCE_OWNER",
            "TERM_FORCE_ADMIN",
            "TERM_BUCKET_KILL",
        ),
        "cancelled",
    ),
    "TERM_PREEMPT": "preempted",
    "TERM_ZOMBIE": "node failure",
    "TERM_UNKNOWN": "exit",
    "TERM_EXTERNAL_SIGNAL": "exit",
}
"""Reasons of LSF ("LSF job termination reasons"); any other ended the job for a reason of its own words."""
_JOB_ID_ANSWER = re.compile(r"Job <(\d+)> is submitted")
_NO_JOB = re.compile(r"No matching job found|No (unfinished |pending |running )?job found|is not found", re.IGNORECASE)
_SELECTION = re.compile(r"[A-Za-z0-9_.=<>!&| ()*'-]+")
_OPTION = re.compile(r"-(?P<name>[A-Za-z_]+)( +\S.*)?")
_OUR_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("J", "o", "oo", "e", "eo", "r", "rn", "K", "H", "I", "Is", "Ip", "cwd", "env"),
                    "vitscale sets it, to find its jobs again"),
    **dict.fromkeys(("n", "nnodes"), "it follows from each trial's world"),
    "q": "say slurm.partition", "P": "say slurm.account", "W": "say slurm.time", "gpu": "say slurm.gpus",
    "U": "say slurm.reservation",
}  # fmt: skip
"""Options that `slurm.options` may not have -> why."""


class Lsf(BatchSystem):
    """LSF: a slot is a core, and a job takes as many slots on each host as its ranks have threads."""

    facts = LSF
    title = LSF.title
    directive = "#BSUB"
    job_id_in_shell = "$LSB_JOBID"
    keys = ("constraint", "reservation", "gpu_type")
    silence = re.compile(
        r"LSF is down|Cannot connect to LSF|Please wait|not responding|Connection (refused|timed out|reset)"
        r"|Communication time ?out|Failed in (sending|receiving)|master LIM is down",
        re.IGNORECASE,
    )

    def directives(self, job: BatchJob, settings: SlurmSection) -> list[str]:
        """Return the options of bsub. Arguments as of `BatchSystem.directives`.

        Raises:
            RequestError: slurm.constraint is no selection of hosts, or slurm.nodelist names too few nodes.
        """
        world = job.world
        slots_per_host = world.ranks_per_node * world.threads_per_rank
        options = [
            f"-J {job.name}",
            f"-o {self.output_of_system(job)}",
            # A run that a broken node cut short is recorded, and the next `vitscale run` does it again.
            "-rn",
            f"-n {world.nodes * slots_per_host}",
            f'-R "{_selection(settings)}span[ptile={slots_per_host}]"',
        ]
        names = named_nodes(settings, world.nodes)
        if names:
            options.append(f'-m "{" ".join(names)}"')
        gpus = self.gpus_per_node(job)
        if gpus:
            model = "" if settings.gpu_type is None else f":gmodel={settings.gpu_type}"
            # By host, and no other job's work on the same GPUs.
            options.append(f'-gpu "num={gpus}{model}:j_exclusive=yes"')
        limit = limit_seconds(settings)
        if limit is not None:
            minutes = -(-limit // 60)
            options.append(f"-W {minutes // 60}:{minutes % 60:02}")
        for letter, value in (("q", settings.partition), ("P", settings.account), ("U", settings.reservation)):
            if value is not None:
                options.append(f"-{letter} {value}")
        return options

    def refused_option(self, option: str) -> str | None:
        """Return why a line of `slurm.options` cannot stand in a script; None where it can."""
        match = _OPTION.fullmatch(option)
        if match is None:
            return 'it is no option of bsub, such as -x or -R "rusage[mem=4GB]"'
        if match["name"] == "R" and "span" in option:
            return "it follows from each trial's world"
        if match["name"] == "m" and self._slurm.nodelist is not None:
            return "say slurm.nodelist"
        return _OUR_OPTIONS.get(match["name"])

    def submit(self, script: Path) -> str:
        """Submit a script by bsub, which reads it, and return the job's number.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerError: bsub refuses, or does not say the number.
        """
        printed = self.ask("bsub", script=script.read_text(encoding="utf-8"))
        match = _JOB_ID_ANSWER.search(printed)
        if match is None:
            raise SchedulerError(f"bsub does not say the job's number, but {shown(printed.strip())}")
        return match[1]

    def reports(self, names: Sequence[str]) -> list[JobReport]:
        """Return all of vitscale's jobs, ended ones for as long as LSF keeps them (CLEAN_PERIOD)."""
        del names
        return self._jobs("-J", _NAMES_PATTERN)

    def report(self, job_id: str) -> JobReport | None:
        """Return the job with this number; None where LSF does not know it (any more)."""
        reports = self._jobs(job_id)
        return reports[0] if reports else None

    def _jobs(self, *selection: str) -> list[JobReport]:
        """Return the jobs that bjobs finds.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerError: bjobs refuses, or its answer cannot be read.
        """
        answer = self.answer("bjobs", "-a", "-json", "-o", _FIELDS, *selection)
        has_json = "{" in answer.stdout
        if not has_json and _NO_JOB.search(answer.stderr + answer.stdout):
            return []
        if not has_json and answer.returncode != 0:
            raise self.refusal("bjobs", answer)
        return [_report(record) for record in _records(answer.stdout, "bjobs") if text_of(record, "STAT")]

    def failed_hosts(self, names: Sequence[str]) -> list[str]:
        """Return which of these hosts LSF does not reach."""
        printed = self.ask("bhosts", "-json", "-o", "host_name status", *names)
        status_by_name = {text_of(each, "HOST_NAME"): text_of(each, "STATUS") for each in _records(printed, "bhosts")}
        return [name for name in names if status_by_name.get(name, "").startswith(("unavail", "unreach"))]

    def own_job(self) -> OwnJob | None:
        """Return the job around this process; None where there is none.

        Its slots are cores, so that they say nothing about ranks.

        Raises:
            RequestError: the host file cannot be read, or no host is named.
        """
        job_id = os.environ.get("LSB_JOBID")
        host_file = os.environ.get("LSB_DJOB_HOSTFILE")
        hosts_and_slots = os.environ.get("LSB_MCPU_HOSTS", "")  # "node1 8 node2 8"
        if not job_id or not (host_file or hosts_and_slots):
            return None
        if host_file:
            text = read_text(
                Path(host_file), "LSB_DJOB_HOSTFILE", next_step="Set launch.scheduler = 'local', or a hostfile"
            )
            words = text.split()
        else:
            words = hosts_and_slots.split()[::2]
        return self.job_around(job_id, host_names(words))


def _selection(settings: SlurmSection) -> str:
    """Return the part of `-R` that selects hosts, "select[model==XeonGold] "; empty where any will do.

    Raises:
        RequestError: slurm.constraint is no selection of hosts, or slurm.exclude is no list of nodes.
    """
    constraint = settings.constraint
    if constraint is not None and not _SELECTION.fullmatch(constraint):
        raise RequestError(
            f"slurm.constraint is {shown(constraint)}, and under LSF it selects hosts",
            next_step="Write what stands in select[...] of `bsub -R`, such as model==XeonGold && mem>200000",
        )
    # Those of slurm.nodelist are without the excluded ones already.
    excluded = excluded_nodes(settings) if settings.nodelist is None else []
    if not excluded:
        return "" if constraint is None else f"select[{constraint}] "
    # Where a selection compares texts, LSF takes hosts of any type, and else only those of the type of this machine.
    condition = "type==local" if constraint is None else f"({constraint})"
    exclusions = [f"hname!='{name}'" for name in excluded]
    return f"select[{' && '.join((condition, *exclusions))}] "


def _records(printed: str, program: str) -> list[dict[str, Any]]:
    """Return the records of a command's JSON.

    Raises:
        SchedulerError: it printed no JSON.
    """
    records = json_object(printed, program).get("RECORDS")
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []


def _report(record: Mapping[str, Any]) -> JobReport:
    """Return a job as `bjobs -json` describes it."""
    word = text_of(record, "STAT")
    exit_reason = text_of(record, "EXIT_REASON")
    limit = _limit_seconds(text_of(record, "RUNTIMELIMIT"))
    return JobReport(
        text_of(record, "JOBID"),
        name=text_of(record, "JOB_NAME"),
        state=_STATE_BY_WORD.get(word, word),
        is_over=word in _OVER_WORDS,
        end=_end(word, exit_reason),
        reason=exit_reason or text_of(record, "PEND_REASON").rstrip(";"),
        exit_code=0 if word == "DONE" else exit_code_of_shell(number_of(record, "EXIT_CODE")),  # LSF leaves out a 0
        time_limit=None if limit is None else f"{limit // 60} minutes",
        remaining_seconds=_remaining_seconds(limit, text_of(record, "RUN_TIME")) if word == "RUN" else None,
        hosts=_exec_hosts(text_of(record, "EXEC_HOST")),
    )


def _end(word: str, exit_reason: str) -> EndKind:
    """Return what ended a job. Example: ("EXIT", "TERM_OWNER: job killed by owner") is "cancelled"."""
    if word == "ZOMBI":  # given up with its host; under UNKWN the host may only be silent, and the job goes on
        return "node failure"
    reason = exit_reason.partition(":")[0].strip()
    if reason:
        return _END_BY_REASON.get(reason, "other")
    return "exit" if word in _OVER_WORDS else "unknown"


def _limit_seconds(text: str) -> int | None:
    """Return the seconds of a run limit: "90.0" minutes, or "01:30:00" where LSF shows times so; None for others."""
    if re.fullmatch(r"\d{1,8}(\.\d+)?", text):
        return round(float(text) * 60)
    return clock_seconds(text)


def _remaining_seconds(limit: int | None, run_time: str) -> int | None:
    """Return the time until a running job's limit; None without one, or where its run time is unknown.

    Args:
        limit: in seconds.
        run_time: "16038 second(s)", or "04:27:18" where LSF shows times so.
    """
    match = re.fullmatch(r"(\d{1,9}) second\(s\)", run_time)
    run_seconds = int(match[1]) if match else clock_seconds(run_time)
    if limit is None or run_seconds is None:
        return None
    return limit - run_seconds


def _exec_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of "8*node1:8*node2", each once."""
    names = [part.rpartition("*")[2] for part in text.split(":")]
    return tuple(dict.fromkeys(host_names(names)))
