"""PBS Pro and OpenPBS: jobs by qsub, their states by qstat, their nodes by $PBS_NODEFILE.

Options and answers are as in OpenPBS 23's manual pages and source (`qsub.1B`, `qselect.1B`, `qstat.1B`, `job.h`,
`svr_jobfunc.c`). Torque, of the same command names, has other options and no JSON.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale.base.files import read_text
from vitscale.errors import RequestError, shown
from vitscale.machine.batch_systems import PBS
from vitscale.schedulers.base import BatchJob, OwnJob, SchedulerError
from vitscale.schedulers.batch_system import (
    BatchSystem,
    EndKind,
    JobReport,
    clock_seconds,
    clock_text,
    exit_code_of_shell,
    host_names,
    json_object,
    number_of,
    object_of,
    text_of,
)
from vitscale.schedulers.job_settings import limit_seconds, named_nodes
from vitscale.study.sections import SlurmSection

_STATE_BY_LETTER: Mapping[str, str] = {
    "Q": "PENDING",
    "H": "HELD",
    "W": "WAITING",
    "T": "MOVING",
    "M": "MOVED",
    "R": "RUNNING",
    "B": "RUNNING",
    "S": "SUSPENDED",
    "U": "SUSPENDED",
    "E": "EXITING",
    "F": "FINISHED",
    "X": "FINISHED",
}
_OVER_LETTERS = ("F", "X")
_KILLED_BY_WALLTIME = -29
_NODE_FAILURES = (-4, -5, -6, -20, -30)
"""Exit statuses of jobs whose execution daemon restarted, was not reached, or could not join (`job.h`)."""
_SUBSTATE_TERMINATED = 91
_SUBSTATE_FAILED = 93
_NO_HISTORY = "not configured to maintain job history"
_UNKNOWN_JOB = re.compile(r"Unknown Job|Job has finished", re.IGNORECASE)
_EXCEEDED = re.compile(r"exceeded resource (\w+)")
_JOB_ID = re.compile(r"\d+(\[\d*\])?(\.[A-Za-z0-9._-]+)?")
_CHUNK = re.compile(r"[A-Za-z_]\w*=[A-Za-z0-9_.-]+(:[A-Za-z_]\w*=[A-Za-z0-9_.-]+)*")
_OPTION = re.compile(r"-(?P<letter>[A-Za-z])( +(?P<value>\S.*))?")
_OUR_LETTERS: Mapping[str, str] = {
    **dict.fromkeys("NojeSrIzJC", "vitscale sets it, to find its jobs again"),
    "q": "say slurm.partition",
    "A": "say slurm.account",
}
"""Options that `slurm.options` may not have -> why."""
_OUR_RESOURCES: Mapping[str, str] = {
    **dict.fromkeys(("select", "nodes", "ncpus", "ngpus", "mpiprocs"), "it follows from each trial's world"),
    "walltime": "say slurm.time",
}
"""Resources of `-l` that `slurm.options` may not have -> why."""


class Pbs(BatchSystem):
    """PBS Pro: each node of a world is a chunk, on a host of its own."""

    facts = PBS
    title = PBS.title
    directive = "#PBS"
    job_id_in_shell = "$PBS_JOBID"
    keys = ("constraint",)
    silence = re.compile(
        r"cannot connect to server|Communication failure|Connection (refused|timed out|reset)|No route to host"
        r"|Premature end of message|End of File|Server (is )?(busy|shutting down)",
        re.IGNORECASE,
    )

    def refuse_foreign_settings(self) -> None:
        """Refuse settings that are Slurm's alone, and slurm.exclude by itself: a chunk of PBS cannot leave hosts out.

        Raises:
            RequestError: for the first of them.
        """
        super().refuse_foreign_settings()
        if self._slurm.exclude is not None and self._slurm.nodelist is None:
            raise RequestError(
                f"slurm.exclude = {shown(self._slurm.exclude)} has no meaning under launch.scheduler = "
                f"'{self.facts.name}' without slurm.nodelist: qsub can name the hosts of a job, and none to leave out",
                next_step="Name those to take in slurm.nodelist, or a resource that they have in slurm.constraint",
            )

    def directives(self, job: BatchJob, settings: SlurmSection) -> list[str]:
        """Return the options of qsub. Arguments as of `BatchSystem.directives`.

        Raises:
            RequestError: slurm.constraint is no list of resources, or slurm.nodelist names too few nodes.
        """
        options = [
            f"-N {job.name}",
            "-S /bin/bash",
            "-j oe",
            f"-o {self.output_of_system(job)}",
            # A run that a broken node cut short is recorded, and the next `vitscale run` does it again.
            "-r n",
            f"-l select={self._chunks(job, settings)}",
        ]
        sets_place = any(option.startswith("-l place=") for option in settings.options)
        if not sets_place:
            options.append("-l place=scatter")
        limit = limit_seconds(settings)
        if limit is not None:
            options.append(f"-l walltime={clock_text(limit)}")
        if settings.partition is not None:
            options.append(f"-q {settings.partition}")
        if settings.account is not None:
            options.append(f"-A {settings.account}")
        return options

    def _chunks(self, job: BatchJob, settings: SlurmSection) -> str:
        """Return the chunks that a job asks for, one for each node.

        They are "2:ncpus=32:mpiprocs=4:ngpus=4"; where nodes are named, each has a chunk with its `host`, which is a
        resource of every node (`pbs_resources.7B`): "1:ncpus=32:mpiprocs=4:host=node1+1:...:host=node2".

        Raises:
            RequestError: slurm.constraint is no list of resources, or slurm.nodelist names too few nodes.
        """
        resources = self._resources_of_node(job, settings.constraint)
        names = named_nodes(settings, job.world.nodes)
        if not names:
            return f"{job.world.nodes}:{resources}"
        return "+".join(f"1:{resources}:host={name}" for name in names)

    def _resources_of_node(self, job: BatchJob, constraint: str | None) -> str:
        """Return the resources of one node: "ncpus=32:mpiprocs=4:ngpus=4". Args: constraint: slurm.constraint.

        Raises:
            RequestError: the constraint is no list of resources.
        """
        world = job.world
        cores = world.ranks_per_node * world.threads_per_rank
        resources = f"ncpus={cores}:mpiprocs={world.ranks_per_node}"
        gpus = self.gpus_per_node(job)
        if gpus:
            resources += f":ngpus={gpus}"
        if constraint is None:
            return resources
        if not _CHUNK.fullmatch(constraint):
            raise RequestError(
                f"slurm.constraint is {shown(constraint)}, and under PBS it is added to each chunk of `-l select`",
                valid=["NAME=VALUE", "NAME=VALUE:NAME=VALUE"],
                next_step="Write resources of one chunk, such as gpu_model=a100:mem=200gb",
            )
        return f"{resources}:{constraint}"

    def refused_option(self, option: str) -> str | None:
        """Return why a line of `slurm.options` cannot stand in a script; None where it can."""
        match = _OPTION.fullmatch(option)
        if match is None:
            return "it is no option of qsub, such as -l place=scatter:excl or -W group_list=vit"
        if match["letter"] != "l":
            return _OUR_LETTERS.get(match["letter"])
        for resource in (match["value"] or "").split(","):
            reason = _OUR_RESOURCES.get(resource.partition("=")[0].strip())
            if reason is not None:
                return reason
        return None

    def submit(self, script: Path) -> str:
        """Submit a script by qsub and return the job's id: "12.server".

        Raises:
            SchedulerSilentError: no answer.
            SchedulerError: qsub refuses, or does not say the id.
        """
        printed = self.ask("qsub", str(script))
        job_id = printed.strip().rpartition("\n")[2]  # hooks of a site may print lines before
        if not _JOB_ID.fullmatch(job_id):
            raise SchedulerError(f"qsub does not say the job's id, but {shown(printed.strip())}")
        return job_id

    def reports(self, names: Sequence[str]) -> list[JobReport]:
        """Return the jobs that have these names; ended ones where the server keeps a history."""
        job_ids: list[str] = []
        for name in names:
            job_ids += self._with_history("qselect", "-N", name).split()
        return self._reports_of(job_ids) if job_ids else []

    def report(self, job_id: str) -> JobReport | None:
        """Return the job with this id; None where PBS does not know it (any more)."""
        reports = self._reports_of([job_id])
        return reports[0] if reports else None

    def _reports_of(self, job_ids: Sequence[str]) -> list[JobReport]:
        """Return the jobs with these ids, without those that PBS does not know."""
        printed = self._with_history("qstat", "-f", "-F", "json", *job_ids)
        if not printed.strip():
            return []
        jobs = object_of(json_object(printed, "qstat"), "Jobs")
        return [_report(job_id, fields) for job_id, fields in jobs.items() if isinstance(fields, dict)]

    def _with_history(self, program: str, *arguments: str) -> str:
        """Return what qselect or qstat prints with ended jobs; without them where the server keeps no history.

        Jobs that it does not know are missing.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerError: it refuses.
        """
        answer = self.answer(program, "-x", *arguments)
        if _NO_HISTORY in answer.stderr:  # qselect ends with code 0 then, as if there were no job
            answer = self.answer(program, *arguments)
        is_refused = answer.returncode != 0 and not _UNKNOWN_JOB.search(answer.stderr)
        if is_refused:
            raise self.refusal(program, answer)
        return answer.stdout

    def failed_hosts(self, names: Sequence[str]) -> list[str]:
        """Return which of these nodes are down, or of unknown state."""
        down = set()
        for line in self.ask("pbsnodes", "-l").splitlines():
            words = line.split()
            if len(words) > 1 and re.search(r"down|unknown|offline", words[1]):
                down.add(words[0].partition(".")[0])
        return [name for name in names if name.partition(".")[0] in down]

    def own_job(self) -> OwnJob | None:
        """Return the job around this process; None where there is none.

        A node that stands several times in the node file takes as many ranks: its chunk has `mpiprocs`. Once is what
        every node stands there without it, so that then its cores and GPUs limit the ranks.

        Raises:
            RequestError: the node file cannot be read, or names no node.
        """
        job_id = os.environ.get("PBS_JOBID")
        node_file = os.environ.get("PBS_NODEFILE")
        if not job_id or not node_file:
            return None
        text = read_text(Path(node_file), "PBS_NODEFILE", next_step="Set launch.scheduler = 'local', or a hostfile")
        names = host_names(text.split())
        fewest = min((names.count(name) for name in set(names)), default=0)
        return self.job_around(job_id, names, fewest if fewest > 1 else None)


def _report(job_id: str, fields: Mapping[str, Any]) -> JobReport:
    """Return a job as `qstat -f -F json` describes it."""
    letter = text_of(fields, "job_state")
    limit = text_of(object_of(fields, "Resource_List"), "walltime") or None
    exit_status = number_of(fields, "Exit_status")
    comment = text_of(fields, "comment")
    end = _end(fields, is_over=letter in _OVER_LETTERS)
    exceeded = _EXCEEDED.search(comment)
    return JobReport(
        job_id,
        name=text_of(fields, "Job_Name"),
        state=_STATE_BY_LETTER.get(letter, letter or "UNKNOWN"),
        is_over=letter in _OVER_LETTERS,
        end=end,
        reason=exceeded[0] if exceeded else comment,
        exit_code=_exit_code(exit_status),
        time_limit=limit,
        remaining_seconds=_remaining_seconds(fields, limit) if letter == "R" else None,
        hosts=_exec_hosts(text_of(fields, "exec_host")),
    )


def _end(fields: Mapping[str, Any], *, is_over: bool) -> EndKind:
    """Return what ended a job, the surest signs first.

    A job that is over without an exit status, though it ran, is one whose execution daemon is gone.
    """
    exit_status = number_of(fields, "Exit_status")
    substate = number_of(fields, "substate")
    comment = text_of(fields, "comment")
    exceeded = _EXCEEDED.search(comment)
    if exit_status == _KILLED_BY_WALLTIME or (exceeded and exceeded[1] == "walltime"):
        return "time limit"
    if exceeded:
        return "other"
    if exit_status in _NODE_FAILURES:
        return "node failure"
    if substate == _SUBSTATE_TERMINATED or "terminated" in comment:
        return "cancelled"
    lost_its_daemon = is_over and exit_status is None and substate == _SUBSTATE_FAILED
    if lost_its_daemon and text_of(fields, "exec_host"):
        return "node failure"
    if exit_status is not None and exit_status < 0:
        return "other"
    return "exit" if is_over else "unknown"


def _exit_code(exit_status: int | None) -> int | None:
    """Return an exit code; negative: the number of the signal that ended the job's shell; None for None.

    PBS adds 256 to a signal's number, and a shell 128.
    """
    if exit_status is not None and exit_status >= 256:
        return 256 - exit_status
    return exit_code_of_shell(exit_status)


def _remaining_seconds(fields: Mapping[str, Any], limit: str | None) -> float | None:
    """Return the time until a running job's limit; None without a limit, or where its start is unknown.

    `resources_used.walltime` is up to two minutes old: the start ("Sat Nov 28 11:16:46 2026", of this machine's time
    zone) is surer.
    """
    limit_seconds = clock_seconds(limit or "")
    if limit_seconds is None:
        return None
    try:
        started = time.mktime(time.strptime(text_of(fields, "stime"), "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        return None
    return limit_seconds - (time.time() - started)


def _exec_hosts(text: str) -> tuple[str, ...]:
    """Return the nodes of "node1/0*4+node2/1*4", each once."""
    names = [part.partition("/")[0] for part in text.split("+")]
    return tuple(dict.fromkeys(host_names(names)))
