"""Batch systems other than Slurm: what is the same in PBS Pro, LSF and Flux.

Each has a file of its own, with its options, its commands and how its answers are read. Here is the rest: the script
around the driver, the cause of a job's end, and the nodes of a job, which are reached by ssh as those of a hostfile.

All read the study's section [slurm], as far as its keys have a meaning there.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from vitscale.base.commands import answer_to
from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, shown
from vitscale.launchers.base import Spawn
from vitscale.machine.hardware import Machine
from vitscale.machine.hosts import Host
from vitscale.schedulers.base import (
    BatchJob,
    Cause,
    JobState,
    OwnJob,
    SchedulerError,
    SchedulerMissingError,
    SchedulerSilentError,
    Submitter,
    described,
)
from vitscale.schedulers.containers import PYXIS, RankContainer
from vitscale.schedulers.hostfile import Hostfile
from vitscale.schedulers.job_script import preparing_lines, refuse_module_names
from vitscale.schedulers.job_settings import (
    KEYS_BY_SIZE,
    WARNING_SECONDS,
    container_of,
    limit_seconds,
    planned_hosts,
    settings_for,
    warning_seconds,
)
from vitscale.study.sections import ContainerFields, ContainerRuntime, NodeSection, SlurmSection
from vitscale.trial.trial import World

_ANSWER_SECONDS = 120.0
"""Limit for a command; LSF's repeat a question for ever while its daemon is down."""
_LATE_WARNING_SECONDS = 30
"""How much later than planned a job's warning may come: its clock begins with the script, not with the job."""
_SAFE_PATH = re.compile(r"/[A-Za-z0-9_./+@=-]*")
"""Paths that every batch system takes in a directive, without quotes, commas or colons."""
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_SAFE_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:+@=-]*")
_COMMON_KEYS = frozenset(
    (
        *("partition", "account", "time", "sizes", "nodelist", "exclude", "gpus", "modules", "python", "options"),
        *("setup", *ContainerFields.model_fields),
    )
)
"""Keys of [slurm] that have a meaning in every batch system."""
_HINT_BY_KEY: Mapping[str, str] = {
    "jobs": "Leave it out: there is one job for each world",
    "srun_options": "They are options of Slurm's srun; write the jobs' own in slurm.options",
    "reservation": "Name the reservation's queue in slurm.partition, or its option in slurm.options",
    "qos": "Name the queue in slurm.partition, or write the site's own option in slurm.options",
    "gpu_type": "Ask for the GPUs' model by slurm.constraint, or by slurm.options",
}
"""Keys that some batch systems refuse -> what to do instead."""

EndKind = Literal["time limit", "cancelled", "preempted", "node failure", "exit", "other", "unknown"]
"""What ended a job. exit: its driver ended by itself; other: the batch system ended it for the reason it gives."""


@dataclass(frozen=True)
class JobReport:
    """A job, as its batch system describes it."""

    job_id: str
    name: str
    state: str
    """RUNNING, PENDING, ... in Slurm's words where the state is the same; else the batch system's own."""
    is_over: bool
    """Whether nothing of it runs now or later."""
    end: EndKind = "unknown"
    """What ended it, or is ending it; unknown while it runs."""
    reason: str = ""
    """Why it waits or has ended, in the batch system's words; empty where it gives none."""
    exit_code: int | None = None
    """The driver's; negative: the number of the signal that ended it."""
    time_limit: str | None = None
    """In the batch system's notation."""
    remaining_seconds: float | None = None
    """Time until its limit, while it runs; None where there is no limit, or nobody says."""
    hosts: tuple[str, ...] = ()
    """Its nodes, as far as known."""


class BatchSystem(Submitter):
    """A batch system that takes scripts with directives, and in whose jobs ranks are started by ssh or mpirun."""

    directive: str
    """Beginning of a directive's line: "#PBS"."""
    job_id_in_shell: str
    """Bash words that give the job's id, inside a job."""
    keys: tuple[str, ...] = ()
    """Keys of [slurm] that it takes besides those which all take."""
    silence: re.Pattern[str]
    """Words of its commands while its server is down, restarting or overloaded, which passes."""

    def __init__(self, slurm: SlurmSection, node: NodeSection | None) -> None:
        """Take the settings of jobs, and what one of the nodes offers.

        Raises:
            RequestError: a setting has no meaning in this batch system.
        """
        self.python = slurm.python or sys.executable
        self._slurm = slurm
        self.node = node
        self.refuse_foreign_settings()
        self._container = container_of(slurm)

    # --- planning ---------------------------------------------------------------------------------------------------

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return the nodes that slurm.nodelist names, else names that stand for those that only a job knows.

        Raises:
            RequestError: slurm.nodelist names fewer nodes than the world has.
        """
        return planned_hosts(self._slurm, world.nodes)

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse srun, which is Slurm's; and in a container all launchers but torchrun."""
        del world
        return _launcher_refusal(launcher, self.title, self._container)

    def adapt(self, spawn: Spawn) -> Spawn:
        """Return the commands of each host in the study's container; in a job other hosts are reached by ssh."""
        return _wrapped_in_container(spawn, self._container)

    # --- the script -------------------------------------------------------------------------------------------------

    @abstractmethod
    def directives(self, job: BatchJob, settings: SlurmSection) -> list[str]:
        """Return the options for the batch system, without those of `slurm.options`.

        Args:
            job: what is to be submitted.
            settings: the study's section, with what an entry of `slurm.sizes` replaces for so many nodes.

        Raises:
            RequestError: a setting has another form than the batch system takes.
        """

    @abstractmethod
    def refused_option(self, option: str) -> str | None:
        """Return why a line of `slurm.options` cannot stand in a script; None where it can."""

    def script(self, job: BatchJob) -> str:
        """Return the whole batch script.

        Bash runs it from the results folder: some batch systems feed it to a shell, which then knows no name of it,
        and what the job prints would be seen only after its end.

        Raises:
            RequestError: a value cannot stand in a script, or the user may not set an option.
        """
        settings = settings_for(self._slurm, job.world.nodes)
        self._refuse_unwritable_values(job, settings)
        path = job.results / "jobs" / f"{job.name}.sh"
        output = f'{job.results / "jobs" / job.name}-"{self.job_id_in_shell}".out'
        driver = (*_warning_words(limit_seconds(settings)), *self._driver_command(job))
        lines = ["#!/bin/bash"]
        lines += [f"{self.directive} {option}" for option in (*self.directives(job, settings), *settings.options)]
        lines += [
            "",
            f'[ "$0" = {path} ] || exec /bin/bash {path}',
            f"exec >> {output} 2>&1",
            f"cd {job.cwd} || exit 1",
            *preparing_lines(settings.modules, settings.setup),
            # exec, because the batch system signals the shell.
            f"exec {shlex.join(driver)}",
            "",
        ]
        return "\n".join(lines)

    def output_of_system(self, job: BatchJob) -> str:
        """Return the path of the file for what the batch system says, and a shell before the script's first line."""
        return str(job.results / "jobs" / f"{job.name}.{self.facts.name}.out")

    def _driver_command(self, job: BatchJob) -> list[str]:
        """Return the command that does the job's runs; outside the container, in which only ranks run."""
        python = self.python if self._container is None else sys.executable
        return list(python_module("vitscale.runner.job", str(job.results), job.name, interpreter=python))

    def gpus_per_node(self, job: BatchJob) -> int:
        """Return the GPUs that a job asks for on each node; 0 for ranks on CPUs, or where none are to be asked for."""
        return job.world.ranks_per_node if job.on_gpus and self._slurm.gpus != "none" else 0

    def refuse_foreign_settings(self) -> None:
        """Refuse keys of [slurm] that have no meaning here, and values that only Slurm has.

        Raises:
            RequestError: for the first of them.
        """
        for setting in _used_settings(self._slurm):
            has_meaning = setting.key in _COMMON_KEYS or setting.key in self.keys
            if not has_meaning:
                raise RequestError(
                    f"{setting.field} = {shown(setting.value)} has no meaning under launch.scheduler = "
                    f"'{self.facts.name}'",
                    next_step=_HINT_BY_KEY.get(setting.key, "Leave it out"),
                )
        if self._slurm.gpus == "gres":
            raise RequestError(
                f"slurm.gpus = 'gres' is a form of Slurm's, and launch.scheduler is '{self.facts.name}'",
                valid=["gpus-per-node", "none"],
            )
        if self._slurm.container is not None and self._slurm.container_runtime == PYXIS:
            raise RequestError(
                f"slurm.container_runtime = '{PYXIS}' is a plug-in of Slurm's srun, and launch.scheduler is "
                f"'{self.facts.name}'",
                valid=[runtime for runtime in get_args(ContainerRuntime) if runtime != PYXIS],
            )

    def _refuse_unwritable_values(self, job: BatchJob, settings: SlurmSection) -> None:
        """Refuse values that would break a line of the script, or that the batch system would read otherwise.

        Raises:
            RequestError: for the first of them.
        """
        for subject, path in (("the results folder", job.results), ("the working directory", job.cwd)):
            if not _SAFE_PATH.fullmatch(str(path)):
                raise RequestError(
                    f"{subject} is {shown(str(path))}, which cannot stand in a script of {self.title}",
                    next_step="Use a folder whose path has only letters, digits and _./+@=-",
                )
        for key in ("partition", "account", "reservation", "gpu_type"):
            value = getattr(settings, key)
            if value is not None and not _SAFE_VALUE.fullmatch(value):
                raise RequestError(
                    f"slurm.{key} is {shown(value)}, which cannot stand in a script of {self.title}",
                    next_step="Write a name of letters, digits and _./:+@=-",
                )
        constraint = settings.constraint
        if constraint is not None and not (constraint.isprintable() and constraint.strip()):
            raise RequestError(
                f"slurm.constraint is {shown(constraint)}, which cannot stand in a batch script",
                next_step="Write one line of printable characters",
            )
        refuse_module_names(settings.modules, "slurm")
        for option in settings.options:
            is_line = option.isprintable()
            reason = self.refused_option(option) if is_line else "it is no line of printable characters"
            if reason is not None:
                raise RequestError(f"slurm.options has {shown(option)}", next_step=f"Remove it: {reason}")

    # --- jobs -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reports(self, names: Sequence[str]) -> list[JobReport]:
        """Return the jobs that have these names; ended ones for as long as the batch system knows them."""

    @abstractmethod
    def report(self, job_id: str) -> JobReport | None:
        """Return the job with this id; None where the batch system does not know it (any more)."""

    @abstractmethod
    def failed_hosts(self, names: Sequence[str]) -> list[str]:
        """Return which of these nodes are down, by the batch system; none where it does not say."""

    def states(self, names: Sequence[str]) -> list[JobState]:
        """Return the states of the jobs with these names.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerMissingError: the batch system is not installed here.
            SchedulerError: its answer cannot be read.
        """
        given_names = set(names)
        states = []
        for report in self.reports(names) if names else []:
            if report.name in given_names:
                state = JobState(report.job_id, report.name, None, report.state, report.reason, report.is_over)
                states.append(state)
        return states

    def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
        """Return why a job ended; where the batch system has forgotten the job, that nobody knows.

        Args:
            job_id: the job's id.
            nodes: nodes of the job, as far as known.
        """
        try:
            report = self.report(job_id)
        except SchedulerError:
            report = None
        if report is None:
            return Cause(
                "failed", f"job {job_id} ended before this run was done; {self.title} does not say why (any more)"
            )
        return self._cause_by_report(report, nodes)

    def _cause_by_report(self, report: JobReport, nodes: Sequence[str]) -> Cause:
        """Return why a job ended, or is ending. Args: nodes: of the job, where the report has none."""
        job = f"job {report.job_id}"
        if report.end == "time limit" or self._is_warned_of_limit(report):
            limit = report.time_limit or "unknown"
            return Cause("timeout", f"the job's time limit of {limit} was reached (slurm.time, {job})")
        if report.end == "node failure":
            return self._node_failure(report, nodes)
        if report.end == "preempted":
            return Cause("failed", f"preempted by a job of higher priority ({job})")
        if report.end == "cancelled":
            return Cause("failed", f"cancelled by {self.facts.cancel_program} ({job})")
        if report.end == "other":
            return Cause("failed", f"{self.title} ended it: {report.reason} ({job})")
        if not report.is_over:
            return Cause(
                "failed",
                f"cancelled by {self.facts.cancel_program}, or ended by a signal from outside {self.title} ({job})",
            )
        if report.exit_code is None:
            return Cause("failed", f"{job} ended before this run was done; {self.title} does not say why")
        end = f"ended with exit code {report.exit_code}"
        if report.exit_code < 0:
            end = f"was ended by signal {-report.exit_code}"
        return Cause("failed", f"the driver of {job} {end} before this run was done")

    def _is_warned_of_limit(self, report: JobReport) -> bool:
        """Whether the warning before the time limit has just come to a job that still runs."""
        if report.is_over or report.remaining_seconds is None:
            return False
        return report.remaining_seconds <= WARNING_SECONDS + _LATE_WARNING_SECONDS

    def _node_failure(self, report: JobReport, nodes: Sequence[str]) -> Cause:
        """Return the failure of a node as the cause, with its name where the batch system says which is down."""
        names = report.hosts or tuple(nodes)
        try:
            failed = self.failed_hosts(names) if len(names) > 1 else list(names)
        except SchedulerError:
            failed = []
        words = f" ({report.reason})" if report.reason else ""
        if not failed:
            return Cause("failed", f"a node of the job failed{words} (job {report.job_id} on {', '.join(names)})")
        return Cause("failed", f"node failed: {', '.join(failed)}{words} (job {report.job_id})", failed[0])

    def job_around(self, job_id: str, names: Sequence[str], slots: int | None = None) -> OwnJob:
        """Return the job around this process.

        Args:
            job_id: its id.
            names: its nodes, in the batch system's order.
            slots: ranks that each of them takes; None: only their cores and GPUs limit them.

        Raises:
            RequestError: the batch system names no nodes.
        """
        if not names:
            raise RequestError(
                f"{self.title} names no nodes of job {job_id}",
                next_step="Set launch.scheduler = 'local', or launch.hostfile",
            )
        hosts = tuple(Host(name, slots) for name in dict.fromkeys(names))
        lost = partial(self._lost, job_id)
        placement = NodesOfJob(self.title, job_id, hosts, described(self.node), lost, self._container)
        placement.python = self.python
        return OwnJob(job_id, element=None, nodes=" ".join(host.name for host in hosts), placement=placement)

    def _lost(self, job_id: str) -> Cause | None:
        """Return why a job takes no more runs; None where it does, or where the batch system does not say.

        Raises:
            SchedulerSilentError: no answer.
        """
        try:
            report = self.report(job_id)
        except SchedulerSilentError:
            raise
        except SchedulerError:
            return None
        if report is None or (not report.is_over and report.end == "unknown"):
            return None
        return self._cause_by_report(report, ())

    # --- its commands -----------------------------------------------------------------------------------------------

    def answer(self, *argv: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run one of its commands and return the answer, also where it is a refusal.

        Args:
            argv: the command.
            script: what it reads; None: nothing.

        Raises:
            SchedulerSilentError: the server does not answer.
            SchedulerMissingError: the command is not installed.
        """
        try:
            answer = answer_to(argv, _ANSWER_SECONDS, dict(os.environ), input_text=script)
        except subprocess.TimeoutExpired:
            raise SchedulerSilentError(f"{argv[0]} has not answered within {_ANSWER_SECONDS:g} s") from None
        except OSError as error:
            raise SchedulerMissingError(
                f"{argv[0]} cannot be run: {error.strerror}",
                next_step=f"Work on a machine where {self.title} is installed",
            ) from None
        if answer.returncode != 0 and self.silence.search(answer.stderr + answer.stdout):
            raise SchedulerSilentError(f"{self.title} does not answer: {_words(answer)}")
        return answer

    def ask(self, *argv: str, script: str | None = None) -> str:
        """Return what one of its commands prints. For the arguments see `answer`.

        Raises:
            SchedulerError: it refuses; or as `answer` says.
        """
        answer = self.answer(*argv, script=script)
        if answer.returncode != 0:
            raise self.refusal(argv[0], answer)
        return answer.stdout

    def refusal(self, program: str, answer: subprocess.CompletedProcess[str]) -> SchedulerError:
        """Return the error for a refusal, in the batch system's words."""
        return SchedulerError(f"{self.title} refuses `{program}`: {_words(answer)}")


class NodesOfJob(Hostfile):
    """The nodes of the job around this process, in the batch system's order, reached by ssh."""

    def __init__(
        self,
        title: str,
        job_id: str,
        hosts: tuple[Host, ...],
        machine: Machine | None,
        lost: Callable[[], Cause | None],
        container: RankContainer | None,
    ) -> None:
        """Take the nodes.

        Args:
            title: the batch system's name in messages.
            job_id: id of the job.
            hosts: its nodes.
            machine: what one of them offers; None: the same as this machine.
            lost: returns why the job takes no more runs; None where it does.
            container: in which ranks run; None: in none.
        """
        super().__init__(hosts, machine)
        self.title = title
        self._job_id = job_id
        self._lost = lost
        self._container = container

    def lost(self) -> Cause | None:
        """Return why the job takes no more runs; None where it does."""
        return self._lost()

    def limited_to(self, hosts: Sequence[Host]) -> NodesOfJob:
        """Return a placement with only these nodes of the job."""
        limited = copy.copy(self)
        limited._hosts = tuple(hosts)
        return limited

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return one node for each node of the world.

        Raises:
            RequestError: the job has too few, or too few with room for the ranks.
        """
        slots = self.slots()
        has_room = slots is None or world.ranks_per_node <= slots
        if len(self._hosts) >= world.nodes and has_room:
            return self._hosts[: world.nodes]
        room = "" if slots is None else f", with {slots} ranks on each"
        raise RequestError(
            f"{world.nodes} nodes with {world.ranks_per_node} ranks each are needed, and job {self._job_id} of "
            f"{self.title} has {len(self._hosts)}{room}",
            next_step="Ask for more nodes or more ranks on each, or use fewer ranks in scaling.gpus",
        )

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse what its batch system refuses, and the launchers that a hostfile's hosts refuse."""
        return _launcher_refusal(launcher, self.title, self._container) or super().refuses(launcher, world)

    def adapt(self, spawn: Spawn) -> Spawn:
        """Put each host's command into the container, and those of other hosts into ssh and a host agent."""
        return super().adapt(_wrapped_in_container(spawn, self._container))


def json_object(text: str, program: str) -> dict[str, Any]:
    """Return the JSON object that a command printed; lines before it are passed over.

    Raises:
        SchedulerError: it printed none.
    """
    start = text.find("{")
    try:
        value = json.loads(text[start:], strict=False) if start >= 0 else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SchedulerError(
            f"the answer of `{program}` is no JSON: {shown(text.strip())}", next_step="Try the command by itself"
        )
    return value


def text_of(fields: Mapping[str, Any], key: str) -> str:
    """Return a field's text or number as text; empty where it is missing, or is neither."""
    value = fields.get(key)
    is_text_or_number = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if is_text_or_number else ""


def number_of(fields: Mapping[str, Any], key: str) -> int | None:
    """Return a field's whole number, also one written as text; None where it has none."""
    text = text_of(fields, key)
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None


def object_of(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a field's object; an empty one where it is missing, or is none."""
    value = fields.get(key)
    return value if isinstance(value, dict) else {}


def clock_text(seconds: int) -> str:
    """Return a time span as hours, minutes and seconds: "26:00:00"."""
    return f"{seconds // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"


def clock_seconds(text: str) -> int | None:
    """Return the seconds of "26:00:00"; None where a text is not of this form."""
    match = re.fullmatch(r"(\d{1,6}):(\d{2}):(\d{2})", text)
    if match is None:
        return None
    hours, minutes, seconds = map(int, match.groups())
    return hours * 3600 + minutes * 60 + seconds


def host_names(words: Iterable[str]) -> list[str]:
    """Return those of the words that can be names of hosts, in their order."""
    return [word for word in words if _HOST_NAME.fullmatch(word)]


def exit_code_of_shell(code: int | None) -> int | None:
    """Return a job's exit code; negative: the number of the signal that ended its command, to which shells add 128.

    None stays None.
    """
    if code is not None and 128 < code <= 192:
        return 128 - code
    return code


class UsedSetting(NamedTuple):
    """A key of [slurm] that a study sets."""

    key: str
    """Its name: "qos"."""
    field: str
    """Where the study has it, for messages: "slurm.sizes[0].qos"."""
    value: object


def _used_settings(slurm: SlurmSection) -> Iterator[UsedSetting]:
    """Yield the keys of [slurm] that are not at their defaults, also those in the entries of slurm.sizes."""
    defaults = dict(SlurmSection())
    for key, value in slurm:
        if value != defaults[key]:
            yield UsedSetting(key, f"slurm.{key}", value)
    for number, size in enumerate(slurm.sizes):
        for key in KEYS_BY_SIZE:
            value = getattr(size, key)
            if value is not None:
                yield UsedSetting(key, f"slurm.sizes[{number}].{key}", value)


def _warning_words(limit: int | None) -> tuple[str, ...]:
    """Return the words that warn a driver before its job's time limit, in seconds; none for None, which is no limit.

    `timeout` of GNU's coreutils does it alike everywhere: PBS warns only as it ends a job, and Flux would end the
    script. In the foreground it signals the driver alone, not the ranks.
    """
    if limit is None:
        return ()
    return ("timeout", "--foreground", "--signal=TERM", f"{max(1, limit - warning_seconds(limit))}s")


def _launcher_refusal(launcher: str, title: str, container: RankContainer | None) -> str | None:
    """Return why a launcher cannot start ranks in jobs of a batch system other than Slurm; None where it can.

    Args:
        launcher: its name.
        title: the batch system's name in messages.
        container: in which ranks run; None: in none.
    """
    if launcher == "srun":
        return f"srun is Slurm's, and jobs of {title} start their ranks otherwise; use torchrun, mpirun or deepspeed"
    if container is not None and launcher != "torchrun":
        return "with slurm.container ranks are started by one command on each node; use launcher = 'torchrun'"
    return None


def _wrapped_in_container(spawn: Spawn, container: RankContainer | None) -> Spawn:
    """Return `spawn` with the command of each host in a container; unchanged where there is none.

    Raises:
        RequestError: a folder cannot be mounted.
    """
    if container is None:
        return spawn
    results = spawn.run_folder.parents[1]
    commands = tuple(container.wrapped(command, (results,), spawn.cwd) for command in spawn.commands)
    return replace(spawn, commands=commands)


def _words(answer: subprocess.CompletedProcess[str]) -> str:
    """Return what a command said as it failed, in one line."""
    return " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
