"""A scheduler knows the hosts, and starts processes on them now or submits jobs that will.

`LocalHost` is the scheduler of this machine.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitscale.errors import RequestError, VitscaleError
from vitscale.launchers.base import Spawn
from vitscale.machine.batch_systems import SLURM, BatchSystemFacts
from vitscale.machine.hardware import Gpu, Machine, this_machine
from vitscale.machine.hosts import Host
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.schedulers.prepared import Job, Prepared
from vitscale.store.results import OutcomeKind
from vitscale.study.sections import NodeSection
from vitscale.trial.trial import World


class Scheduler(ABC):
    """Answers for planning: which hosts there are, and how commands are started on them."""

    python: str = sys.executable
    """Path of the ranks' interpreter: this process's own, unless it lies elsewhere where ranks run."""
    title: str = "this machine"
    """Its name in messages."""
    default_launcher: str = "torchrun"
    """The launcher of studies that name none."""
    needs_manifest: bool = False
    """Whether its hosts begin only by a manifest that somebody hands to a cluster (`pod_manifests`)."""

    @abstractmethod
    def machine(self) -> Machine:
        """Return one of its hosts, for which trials are planned.

        Raises:
            RequestError: what a host offers cannot be known here, and the study does not say ([node]).
        """

    def slots(self) -> int | None:
        """Return the ranks that a host takes; None where only its cores and GPUs limit them."""
        return None

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return the hosts that this world gets, one for each node; empty: this machine, or hosts known only in a job.

        Raises:
            RequestError: there are too few, or they are too small.
        """
        del world
        return ()

    @abstractmethod
    def refuses(self, launcher: str, world: World) -> str | None:
        """Return why this launcher cannot be used here, and what to do instead; None where it can."""

    def own_job(self) -> OwnJob | None:
        """Return the job of this batch system around this process; None outside, or where this is no batch system."""
        return None

    def adapt(self, spawn: Spawn) -> Spawn:
        """Return a launcher's commands as they are started here, as exact argvs."""
        return spawn


class Placement(Scheduler):
    """Hosts that are there now: processes are started, and ended, on them."""

    def pool(self) -> tuple[Host, ...]:
        """Return all hosts, to be divided among runs side by side; empty where there is only one.

        Raises:
            RequestError: two names lead to one host.
        """
        return ()

    def lost(self) -> Cause | None:
        """Return why nothing can be started on these hosts any more; None where it can, or where nobody says.

        Raises:
            SchedulerSilentError: who gave the hosts does not answer at the moment.
        """
        return None

    def limited_to(self, hosts: Sequence[Host]) -> Placement:
        """Return the same placement with only these hosts, in this order."""
        del hosts
        return self

    def start(self, spawn: Spawn, heartbeats: HeartbeatServer, prepared: Prepared | None = None) -> Job:
        """Start a run's commands, which `adapt` has made.

        Args:
            spawn: the commands, with token and variables.
            heartbeats: server of this run's heartbeats; closed when the job has been ended.
            prepared: the process to fork the commands from; None: each is a new process.

        Raises:
            OSError: a command cannot be started.
            PreparedError: the prepared process is gone.
        """
        return Job(spawn, heartbeats, prepared, partial(self.end_elsewhere, spawn))

    def end_elsewhere(self, spawn: Spawn, exit_code: int | None) -> tuple[str, ...]:
        """End what is left of a run on other hosts, once nothing of it is left here.

        Args:
            spawn: what the run was started from.
            exit_code: that of the commands started here, before any was ended; None where they still ran.

        Returns:
            The hosts that did not answer; their ranks end by themselves when the driver falls silent.
        """
        del spawn, exit_code
        return ()


class SchedulerError(VitscaleError):
    """A batch system refuses what is asked."""


class SchedulerSilentError(SchedulerError):
    """A batch system does not answer at the moment; whether it did what was asked is unknown."""

    exit_code = 1


class SchedulerMissingError(SchedulerError):
    """A batch system is not installed here."""


@dataclass(frozen=True)
class BatchJob:
    """One job, or one array, to be submitted."""

    name: str
    """Name that vitscale gives it: letters, digits and dashes."""
    world: World
    on_gpus: bool
    results: Path
    cwd: Path
    elements: int | None = None
    """Number of elements of an array; None: one job."""
    at_a_time: int | None = None
    """Most elements that may run at the same time; None: as many as the batch system starts."""


@dataclass(frozen=True)
class JobState:
    """A job, or one element of an array, as the batch system knows it."""

    job_id: str
    """The job's id for users: 12, or 12_3 for element 3 of array 12."""
    name: str
    element: int | None
    state: str
    """The batch system's word: RUNNING, PENDING, TIMEOUT, ..."""
    reason: str
    """Why it waits or has ended, in the batch system's words; empty where there is no reason."""
    over: bool
    """Whether nothing of it runs now or later."""

    @property
    def array_id(self) -> str:
        """Id of the job or array, without the element."""
        return self.job_id if self.element is None else self.job_id.partition("_")[0]


@dataclass(frozen=True)
class Cause:
    """The cause for which a job ended before its runs were done."""

    kind: OutcomeKind
    reason: str
    host: str | None = None
    """The node that failed."""


@dataclass(frozen=True)
class OwnJob:
    """The job of a batch system that this process runs in."""

    job_id: str
    """The job's id for users: 12, or 12_3 for element 3 of array 12."""
    element: int | None
    nodes: str
    """Names of its nodes, in the batch system's notation."""
    placement: Placement


class Submitter(Scheduler):
    """A batch system that takes runs as jobs, each with a driver of its own (`vitscale.runner.job`)."""

    facts: BatchSystemFacts
    """Its name, which is its key in the table of schedulers and by which a job finds it, and its words for messages."""
    node: NodeSection | None = None
    """What one of its nodes offers; None where the study does not say."""
    arrays: bool = False
    """Whether each run is an element of an array."""
    trial_per_element: bool = False
    """Whether an element of an array does all runs of one trial, instead of one run."""

    def machine(self) -> Machine:
        """Return the machine that [node] describes.

        Raises:
            RequestError: the study does not describe one.
        """
        machine = described(self.node)
        if machine is None:
            raise RequestError(
                f"launch.scheduler = '{self.facts.name}' submits jobs to nodes that this machine knows nothing of",
                next_step="Describe one of them: add [node] with cores = 64 and gpus = 4, to the study or to the "
                "file given with --site",
            )
        return machine

    def slots(self) -> int | None:
        """Return the ranks that a node takes: one on each GPU; None on nodes without GPUs."""
        return len(self.machine().gpus) or None

    def most_elements(self) -> int:
        """Return how many elements one array may have; a number that most sites allow, where nobody says.

        Raises:
            SchedulerError: no answer, or a refusal.
        """
        return 1000

    @abstractmethod
    def script(self, job: BatchJob) -> str:
        """Return the whole batch script, whose driver is `python -m vitscale.runner.job RESULTS NAME`.

        Raises:
            RequestError: a value of the study cannot stand in a script.
        """

    @abstractmethod
    def submit(self, script: Path) -> str:
        """Submit a script and return the job's number.

        Raises:
            SchedulerSilentError: no answer; the job may have been taken nevertheless.
            SchedulerError: the script is refused.
        """

    @abstractmethod
    def states(self, names: Sequence[str]) -> list[JobState]:
        """Return all known states of the jobs with these names, one per element of an array; ended jobs while known.

        Raises:
            SchedulerSilentError: no answer.
            SchedulerMissingError: the batch system is not installed here.
        """

    @abstractmethod
    def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
        """Return why a job ended, or is ending; the cause says so where that is no longer known.

        Args:
            job_id: 12, or 12_3 for element 3 of array 12.
            nodes: nodes of the job, as far as known.
        """


def described(node: NodeSection | None) -> Machine | None:
    """Return the machine that [node] describes; None where the study has no such section."""
    if node is None:
        return None
    # As of the A100, the first whose tensor cores multiply bf16.
    capability = (8, 0) if node.fast_bf16 else None
    gpus = tuple(
        Gpu(f"gpu-{number}", "GPU of [node]", memory_bytes=None, driver=None, compute_capability=capability)
        for number in range(node.gpus)
    )
    memory_bytes = None if node.memory_gb is None else round(node.memory_gb * 1e9)
    return Machine(node.cores, None, gpus, node.fast_bf16, stated_memory_bytes=memory_bytes)


class LocalHost(Placement):
    """One host: this one, with as many ranks as its cores and GPUs allow."""

    default_launcher = "local"

    def __init__(self, machine: Machine | None = None) -> None:
        """`machine`: another machine to plan for; nothing is started for it here."""
        self._machine = machine

    def machine(self) -> Machine:
        """Return the machine that the study describes ([node]), else this machine."""
        return self._machine or this_machine()

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse srun, which needs an allocation, and several nodes, which need other hosts."""
        if launcher == "srun":
            return (
                "srun starts ranks in a Slurm allocation, and this is none; run inside one "
                f"({SLURM.allocation_command}), or set launch.scheduler = '{SLURM.name}' to submit jobs"
            )
        if world.nodes > 1:
            return f"{world.nodes} nodes are asked for, and this is one machine; name the others in launch.hostfile"
        return None
