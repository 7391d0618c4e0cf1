"""What a scheduler is: it knows the hosts, and either starts processes on them now or submits jobs that will.

This machine.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitscale.errors import VitscaleError
from vitscale.launchers.base import Spawn
from vitscale.machine.hardware import Gpu, Machine, this_machine
from vitscale.machine.hosts import Host
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.schedulers.prepared import Job, Prepared
from vitscale.store.results import OutcomeKind
from vitscale.study.sections import NodeSection
from vitscale.trial.trial import World


class Scheduler(ABC):
    """What planning asks: which hosts there are, and how commands look that are started there."""

    python: str = sys.executable
    """The interpreter of the ranks: this one's path, unless ranks run where that is another."""
    default_launcher: str = "torchrun"
    """The launcher of studies that name none."""

    @abstractmethod
    def machine(self) -> Machine:
        """One of its hosts, as trials are planned for it.

        Raises:
            RequestError: what it offers cannot be known here, and the study does not say ([node]).
        """

    def slots(self) -> int | None:
        """Ranks that a host takes; None where nothing limits them but its cores and GPUs."""
        return None

    def hosts(self, world: World) -> tuple[Host, ...]:
        """The hosts that this world gets, one for each node; empty: this machine, or known only once a job runs.

        Raises:
            RequestError: there are too few, or they are too small.
        """
        del world
        return ()

    @abstractmethod
    def refuses(self, launcher: str, world: World) -> str | None:
        """Why this launcher cannot be used here, with what to do; None where it can."""

    def own_job(self) -> OwnJob | None:
        """The job of a batch system around this process, where this is one; None outside."""
        return None

    def adapt(self, spawn: Spawn) -> Spawn:
        """What a launcher wants run, as it is started here: the exact argv."""
        return spawn


class Placement(Scheduler):
    """Hosts that are there now: processes are started, and ended, on them."""

    def pool(self) -> tuple[Host, ...]:
        """All hosts, of which runs may be given some each, to go on side by side; empty: there is but one.

        Raises:
            RequestError: two names lead to one host.
        """
        return ()

    def limited_to(self, hosts: Sequence[Host]) -> Placement:
        """The same with some of its hosts alone, in this order."""
        del hosts
        return self

    def start(self, spawn: Spawn, heartbeats: HeartbeatServer, prepared: Prepared | None = None) -> Job:
        """Starts what `adapt` has made of a run's commands.

        Args:
            spawn: with token and variables.
            heartbeats: of this run; closed when the job has been ended.
            prepared: what the commands are forks of; None: each is a new process.

        Raises:
            OSError: one cannot be started.
            PreparedError: the prepared process is gone.
        """
        return Job(spawn, heartbeats, prepared, partial(self.end_elsewhere, spawn))

    def end_elsewhere(self, spawn: Spawn, exit_code: int | None) -> tuple[str, ...]:
        """Ends what is left of a run on other hosts, once nothing of it is left here.

        Args:
            spawn: of the run.
            exit_code: of what was started here, before any of it was ended; None where it still ran.

        Returns:
            The hosts that did not answer; their ranks end by themselves when the driver falls silent.
        """
        del spawn, exit_code
        return ()


class SchedulerError(VitscaleError):
    """A batch system refuses what is asked."""


class SchedulerSilentError(SchedulerError):
    """It does not answer at the moment; nothing is known of what was asked."""

    exit_code = 1


class SchedulerMissingError(SchedulerError):
    """It is not installed here."""


@dataclass(frozen=True)
class BatchJob:
    """One job, or one array, to be submitted."""

    name: str
    """Of our own making: letters, digits and dashes."""
    world: World
    on_gpus: bool
    results: Path
    cwd: Path
    elements: int | None = None
    """Of an array; None: one job."""
    at_a_time: int | None = None
    """Elements of the array at most; None: as many as the batch system starts."""


@dataclass(frozen=True)
class JobState:
    """A job, or one element of an array, as the batch system knows it."""

    job_id: str
    """As a user names it: 12, or 12_3 for element 3 of array 12."""
    name: str
    element: int | None
    state: str
    """In the batch system's words: RUNNING, PENDING, TIMEOUT, ..."""
    reason: str
    """Why it waits or has ended, likewise; empty where there is none."""
    over: bool
    """Whether nothing of it runs any more, or will."""

    @property
    def array_id(self) -> str:
        """The number that it was submitted under."""
        return self.job_id.partition("_")[0]


@dataclass(frozen=True)
class Cause:
    """What ended a job before its runs were done."""

    kind: OutcomeKind
    reason: str
    host: str | None = None
    """The node that failed."""


@dataclass(frozen=True)
class OwnJob:
    """The job of a batch system that this process runs in."""

    job_id: str
    """As a user names it: 12, or 12_3 for element 3 of array 12."""
    element: int | None
    nodes: str
    """In the batch system's own notation."""
    placement: Placement


class Submitter(Scheduler):
    """A batch system: runs are submitted to it as jobs, each with a driver of its own (`vitscale.runner.job`)."""

    name: str
    """Of its row in the table of schedulers: by it a job finds its batch system."""
    title: str
    """In messages."""
    arrays: bool = False
    """Whether each run is an element of an array."""

    @abstractmethod
    def script(self, job: BatchJob) -> str:
        """The whole batch script, whose driver is `python -m vitscale.runner.job RESULTS NAME`.

        Raises:
            RequestError: a value of the study cannot stand in it.
        """

    @abstractmethod
    def submit(self, script: Path) -> str:
        """Submits a script; returns the job's number.

        Raises:
            SchedulerSilentError: no answer; the job may have been taken all the same.
            SchedulerError: it is refused.
        """

    @abstractmethod
    def states(self, names: Sequence[str]) -> list[JobState]:
        """All that is known of the jobs of these names, of each element of an array; ended ones too while it is.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerMissingError: the batch system is not installed here.
        """

    @abstractmethod
    def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
        """Why a job ended, or is ending; says so where that is no longer known.

        Args:
            job_id: 12, or 12_3 for element 3 of array 12.
            nodes: that the job had, as far as is known.
        """


def described(node: NodeSection | None) -> Machine | None:
    """The machine that [node] describes."""
    if node is None:
        return None
    capability = (8, 0) if node.fast_bf16 else None
    gpus = tuple(Gpu(f"gpu-{n}", "GPU of [node]", None, None, capability) for n in range(node.gpus))
    return Machine(node.cores, None, gpus, node.fast_bf16)


class Local(Placement):
    """One host: this one, with as many ranks as its cores and GPUs allow."""

    default_launcher = "local"

    def __init__(self, machine: Machine | None = None) -> None:
        """`machine`: what another one offers, that is planned for; nothing is started for it here."""
        self._machine = machine

    def machine(self) -> Machine:
        """What the study says ([node]), else this machine."""
        return self._machine or this_machine()

    def refuses(self, launcher: str, world: World) -> str | None:
        """srun needs an allocation, and several nodes other hosts."""
        if launcher == "srun":
            return (
                "srun starts ranks in a Slurm allocation, and this is none; run inside one (salloc), or set "
                "launch.scheduler = 'slurm' to submit jobs"
            )
        if world.nodes > 1:
            return f"{world.nodes} nodes are asked for, and this is one machine; name the others in launch.hostfile"
        return None
