"""A Slurm allocation around this process: its nodes are the hosts, and whatever runs on them is a job step."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from vitscale.errors import RequestError, explain
from vitscale.launchers.base import Launch
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.schedulers.local import LocalJob
from vitscale.schedulers.slurm_commands import SlurmError, host_names, kill_steps, steps_named
from vitscale.schedulers.slurm_container import contained
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

_END_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_MPIRUN_OPTIONS = "OMPI_MCA_plm_slurm_args"
"""What Open MPI adds to the srun with which it starts its daemons in an allocation."""


class SlurmJob:
    """What runs here (srun), and the steps that it has started."""

    def __init__(self, local: LocalJob, job_id: str, step_name: str, hosts: tuple[str, ...]) -> None:
        self.token = local.token
        self.started_unix_seconds = local.started_unix_seconds
        self._local = local
        self._job_id = job_id
        self._step_name = step_name
        self._hosts = hosts

    @property
    def exit_code(self) -> int | None:
        """Of srun: its worst rank's."""
        return self._local.exit_code

    @property
    def wall_seconds(self) -> float:
        """Since the start."""
        return self._local.wall_seconds

    def wait(self, seconds: float) -> int | None:
        """Waits so long at most for the end."""
        return self._local.wait(seconds)

    def end(self) -> tuple[str, ...]:
        """Ends srun, then the steps: one whose srun was killed goes on alone. Returns the hosts where one is left."""
        done = self._local.exit_code == 0
        self._local.end()
        if done:
            return ()
        try:
            end = time.monotonic() + _END_SECONDS
            while steps := steps_named(self._job_id, self._step_name):
                if time.monotonic() > end:
                    return self._hosts
                kill_steps(steps)
                time.sleep(_LOOK_SECONDS)
        except SlurmError:
            return self._hosts
        return ()


def refused_in_a_job(launcher: str, slurm: SlurmSection) -> str | None:
    """Why this launcher cannot be used in a job of Slurm, with what to do; None where it can."""
    if launcher == "deepspeed":
        return "it starts ranks by ssh, past Slurm; use launcher = 'srun', 'torchrun' or 'mpirun' in Slurm's jobs"
    if launcher == "mpirun" and slurm.container is not None:
        return "with slurm.container ranks are started by srun; use launcher = 'srun' or 'torchrun'"
    return None


class SlurmAllocation:
    """The nodes that Slurm has given to this job, the first ones first. Paths are the same on all of them."""

    default_launcher = "torchrun"

    def __init__(self, slurm: SlurmSection, node: NodeSection | None) -> None:
        """`node`: what one of the nodes offers, where this machine is not like them."""
        self.python = slurm.python or sys.executable
        self._slurm = slurm
        self._node = node
        self._job_id = os.environ["SLURM_JOB_ID"]

    @staticmethod
    def here() -> bool:
        """Whether this process runs in an allocation."""
        return bool(os.environ.get("SLURM_JOB_ID") and os.environ.get("SLURM_JOB_NODELIST"))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return host_names(os.environ["SLURM_JOB_NODELIST"])

    def machine(self) -> Machine:
        """What [node] describes; else this machine where it is one of the nodes, with the cores that the job has there.

        Raises:
            RequestError: this is none of the nodes (salloc on a login node), and the study does not describe them.
        """
        from vitscale.schedulers import described

        if (machine := described(self._node)) is None:
            if os.environ.get("SLURMD_NODENAME") not in self._names and not any(map(is_this_machine, self._names)):
                raise RequestError(
                    explain(
                        f"this machine is none of the nodes of job {self._job_id} ({', '.join(self._names[:8])})",
                        next_step="Describe one of them: add [node] with cores = 64 and gpus = 4, in the study or in "
                        "the file given with --site",
                    )
                )
            machine = this_machine()
        cores = self._cores()
        return machine if cores is None else machine.limited_to(cores)

    def slots(self) -> int | None:
        """Tasks per node where the allocation was asked for by tasks; else as many as cores and GPUs allow."""
        asked = "SLURM_NTASKS" in os.environ or "SLURM_NTASKS_PER_NODE" in os.environ
        return _least(os.environ.get("SLURM_TASKS_PER_NODE", "")) if asked else None

    def hosts(self, world: World) -> tuple[Host, ...]:
        """As many as the world has nodes.

        Raises:
            RequestError: the allocation has fewer, or fewer cores on one than the ranks of a node have threads.
        """
        if len(self._names) < world.nodes:
            raise RequestError(
                explain(
                    f"{world.nodes} nodes are needed, and job {self._job_id} has {len(self._names)}",
                    next_step="Ask salloc for more nodes, or use fewer ranks in scaling.gpus",
                )
            )
        threads, cores = world.ranks_per_node * world.threads_per_rank, self._cores()
        if cores is not None and threads > cores:
            raise RequestError(
                explain(
                    f"{world.ranks_per_node} x {world.threads_per_rank} threads are needed on each node, and job "
                    f"{self._job_id} has {cores} CPUs there",
                    next_step="Ask Slurm for more (--cpus-per-task), or set launch.threads_per_rank",
                )
            )
        return tuple(Host(name) for name in self._names[: world.nodes])

    def refuses(self, launcher: str, world: World) -> str | None:  # noqa: ARG002 - one signature for every scheduler
        """See `refused_in_a_job`."""
        return refused_in_a_job(launcher, self._slurm)

    def commands(self, launch: Launch, world: World, hosts: tuple[Host, ...], run_folder: Path) -> list[list[str]]:  # noqa: ARG002
        """srun as the launcher gives it; a command of each host by an srun and a host agent; mpirun as it is."""
        if launch.per_host:
            host_agent = (self.python, "-m", "vitscale.processes.host_agent", str(run_folder), "--")
            agents = zip(hosts, launch.commands, strict=True)
            sruns = [_on_host(host.name, run_folder.name, (*host_agent, *command)) for host, command in agents]
        else:
            sruns = [list(command) for command in launch.commands]
        folders = (run_folder.parents[1],)
        return [contained(srun, self._slurm, folders, Path.cwd()) if srun[0] == "srun" else srun for srun in sruns]

    def start(
        self,
        commands: list[list[str]],
        hosts: tuple[Host, ...],
        *,
        token: str,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str],
        without: tuple[str, ...] = (),
        ended_by_kill: bool = False,
    ) -> SlurmJob:
        """Starts them; whatever they start is a step of the run's name, and ended by it."""
        step_name = log.parent.name
        mpirun = " ".join(filter(None, [os.environ.get(_MPIRUN_OPTIONS), f"--job-name={step_name}", "--overlap"]))
        own = {**environment, _MPIRUN_OPTIONS: mpirun}
        local = LocalJob(
            commands,
            token=token,
            log=log,
            cwd=cwd,
            environment=own,
            without=without,
            ended_by_kill=ended_by_kill,
        )
        return SlurmJob(local, self._job_id, step_name, tuple(host.name for host in hosts))

    def _cores(self) -> int | None:
        """CPUs that the job has on each node, of the node with the fewest; None where Slurm does not say."""
        return _least(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))


def _on_host(host: str, step_name: str, argv: tuple[str, ...]) -> list[str]:
    """Beside other steps, with all that the job has on that node: binding is left to the ranks."""
    step = [f"--job-name={step_name}", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
    return ["srun", *step, "--cpu-bind=none", "--mpi=none", "--export=ALL", *argv]


def _least(counts: str) -> int | None:
    """The smallest of Slurm's counts per node: "4(x2),3" is 4, 4 and 3."""
    numbers = [int(match[1]) for match in re.finditer(r"(?:^|,)(\d{1,6})(?=\(|,|$)", counts)]
    return min(numbers, default=None)
