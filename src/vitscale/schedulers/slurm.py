"""A Slurm allocation around this process: its nodes are the hosts, and whatever runs on them is a job step.

Also calls Slurm's commands, which answer in text; their refusals are passed on in Slurm's words.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from vitscale.base.commands import answer_to
from vitscale.errors import RequestError
from vitscale.launchers.base import Spawn
from vitscale.machine.batch_systems import SLURM
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.schedulers import Cause
from vitscale.schedulers.base import Placement, SchedulerError, SchedulerMissingError, SchedulerSilentError, described
from vitscale.schedulers.slurm_steps import gpu_options, launcher_refusal, most_gpus, step_commands
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

_ANSWER_SECONDS = 120.0
"""Limit for Slurm commands that hang; normally they give up by themselves, by default after some 10 s."""
_SILENCE_WORDS = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|timed out|reset)"
    r"|Zero Bytes were transmitted|standby mode|Unable to establish control|Slurm temporarily unable"
    r"|Resource temporarily unavailable|Unable to establish connection|Transport endpoint is not connected"
    r"|Communication connection failure",
    re.IGNORECASE,
)
"""Words of Slurm's commands while slurmctld is down, restarting or overloaded, which passes."""
_DROPPED_PREFIXES = ("SQUEUE_", "SCANCEL_", "SINFO_", "SLURM_TIME_FORMAT")
"""Prefixes of variables that are dropped: a user's defaults for looking at the queue would hide jobs, and times in
another form could not be compared."""
_DROPPED_VARIABLES = ("SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_REQUEUE", "SBATCH_WAIT")
"""Variables that are dropped whatever the script says: with them a job is not what it is taken for."""


def ask(*argv: str, without: Collection[str] = _DROPPED_VARIABLES) -> str:
    """Return what a Slurm command prints; it does not see the variables in `without`.

    Raises:
        SchedulerSilentError: slurmctld does not answer.
        SchedulerMissingError: the command is not installed.
        SchedulerError: the command refuses.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in without
    }
    try:
        answer = answer_to(argv, _ANSWER_SECONDS, environment)
    except subprocess.TimeoutExpired:
        raise SchedulerSilentError(f"{argv[0]} has not answered within {_ANSWER_SECONDS:g} s") from None
    except OSError as error:
        raise SchedulerMissingError(
            f"{argv[0]} cannot be run: {error.strerror}", next_step="Work on a machine where Slurm is installed"
        ) from None
    if answer.returncode == 0:
        return answer.stdout
    words = " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
    if _SILENCE_WORDS.search(words):
        raise SchedulerSilentError(f"slurmctld does not answer: {words}")
    raise SchedulerError(f"Slurm refuses `{argv[0]}`: {words}")


_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_EXCLUSIVE_OPTIONS = (
    {"gpus", "gpus-per-node", "gpus-per-task", "gres"},
    {"mem", "mem-per-cpu", "mem-per-gpu"},
)
"""Options that say the same in different ways, and contradict each other."""
_VARIABLE_BY_OPTION = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE"}
"""Options -> names of their variables after SBATCH_, where these are not the options' own names (sbatch(1), "INPUT
ENVIRONMENT VARIABLES")."""


def overriding_variables(script: str) -> frozenset[str]:
    """Return the names of variables by which sbatch would override what a script sets: {"SBATCH_TIMELIMIT", ...}.

    Variables for options that the script does not set (SBATCH_ACCOUNT) are the user's defaults, and are not returned.
    """
    options = set(_DIRECTIVE.findall(script))
    for exclusive in _EXCLUSIVE_OPTIONS:
        if exclusive & options:
            options |= exclusive
    if "switches" in options:
        options |= {"req-switch", "wait4switch"}
    names = {_VARIABLE_BY_OPTION.get(option, option.upper().replace("-", "_")) for option in options}
    return frozenset(_DROPPED_VARIABLES) | {f"SBATCH_{name}" for name in names}


def steps_named(job_id: str, name: str) -> list[str]:
    """Return the ids of a job's steps that have this name, as "12.3"."""
    steps = []
    for line in ask("squeue", "--noheader", "--steps", "--format=%i|%j", f"--job={job_id}").splitlines():
        step_id, _, step_name = line.strip().partition("|")
        if step_name == name:
            steps.append(step_id)
    return steps


def kill_steps(steps: Sequence[str]) -> None:
    """Send SIGKILL to every process of these steps, on all nodes."""
    ask("scancel", "--quiet", "--signal=KILL", *steps)


def silent_nodes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes that do not answer slurmctld, of those with these names, sorted.

    slurmctld asks each node three times in its `SlurmdTimeout`, so that it knows a minute or two late. sinfo(1) prints
    a star behind the state of such a node.
    """
    silent = set()
    for line in ask("sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={','.join(names)}").splitlines():
        name, _, state = line.partition(" ")
        if "*" in state:
            silent.add(name)
    return tuple(sorted(silent))


def host_names(compact: str) -> tuple[str, ...]:
    """Return the names that Slurm's short form stands for: four for `node[1-3,7]`."""
    return tuple(ask("scontrol", "show", "hostnames", compact).split())


def job_fields(job_id: str) -> dict[str, str]:
    """Return the fields that `scontrol show job` prints of a job, such as {"JobState": "RUNNING"}.

    Of a value with spaces it has only the first word.
    """
    fields = {}
    for word in ask("scontrol", "--oneliner", "show", "job", job_id).split():
        key, _, value = word.partition("=")
        fields[key] = value
    return fields


def own_job_id() -> str:
    """Return the id of the job around this process, as users write it: 12, or 12_3 for element 3 of array 12.

    An array's last element has the array's own number, under which scontrol shows all elements.
    """
    array_id = os.environ.get("SLURM_ARRAY_JOB_ID")
    element = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array_id and element:
        return f"{array_id}_{element}"
    return os.environ["SLURM_JOB_ID"]


_STATES_TAKING_STEPS = frozenset(("", "RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"))
"""States in which a job takes steps, now or again; empty: Slurm says nothing of it."""
_UNKNOWN_JOB = re.compile(r"Invalid job id|Job \S+ not found")
"""Words of scontrol on a job that slurmctld has forgotten."""


def takes_steps(job_id: str) -> bool:
    """Whether new steps can be started in a job: it is neither over, nor unknown, nor being ended.

    True also where Slurm refuses to say.

    Raises:
        SchedulerSilentError: slurmctld does not answer.
    """
    try:
        fields = job_fields(job_id)
    except SchedulerSilentError:
        raise
    except SchedulerError as error:
        return _UNKNOWN_JOB.search(str(error)) is None
    return fields.get("JobState", "") in _STATES_TAKING_STEPS and not is_preempted(fields)


def is_preempted(fields: Mapping[str, str]) -> bool:
    """Whether a job of higher priority has taken a job's nodes, or takes them after a grace time.

    During the grace time the job's state is RUNNING, though its steps have had SIGTERM. A job that was preempted, put
    back into the queue and started again is not preempted any more: it has started since.

    Args:
        fields: those of `job_fields`.
    """
    preempted_at = fields.get("PreemptTime", "")  # "2026-11-28T02:40:56", or "None"; such times compare as texts
    started_at = fields.get("StartTime", "")
    is_time = preempted_at[:1].isdecimal()
    return is_time and preempted_at >= started_at


_GPU_VARIABLES = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")
"""Variables that Slurm sets in a job with GPUs; a shell of `salloc --gres=gpu:4` has none of them."""
_STEP_GPU_PREFIXES = ("SLURM_GPUS", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK")
"""Prefixes of variables by which srun takes the job's request for GPUs as that of each step ("INPUT ENVIRONMENT
VARIABLES" of srun(1)): a step on one node would ask for the GPUs of all, and a rank see none but its own."""


def asks_for_gpus(fields: Mapping[str, str]) -> bool:
    """Whether a job was asked for with GPUs. Args: fields: those of `job_fields`: {"TresPerNode": "gres:gpu:4"}."""
    return any(name.startswith("TresPer") and "gpu" in value for name, value in fields.items())


_END_SECONDS = 30.0
"""Longest time until killed steps are over; a node that does not answer takes longer."""
_POLL_SECONDS = 0.2
"""Time from one look at the steps to the next."""
_MPIRUN_OPTIONS_VARIABLE = "OMPI_MCA_plm_slurm_args"
"""Variable whose options Open MPI adds to the srun that starts its daemons in an allocation."""


class SlurmAllocation(Placement):
    """The nodes that Slurm has given to this job, in their order. Paths are the same on all of them."""

    title = SLURM.title

    def __init__(self, slurm: SlurmSection, node: NodeSection | None, cause: Callable[[], Cause] | None = None) -> None:
        """Take the job around this process.

        Args:
            slurm: the study's section.
            node: what one of the nodes offers, where this machine differs from them.
            cause: returns why the job has ended, once it takes no more steps; None: the job is taken to go on.
        """
        self._cause = cause
        self.python = slurm.python or sys.executable
        self._slurm = slurm
        self._node = node
        self._job_id = os.environ["SLURM_JOB_ID"]

    def pool(self) -> tuple[Host, ...]:
        """Return all nodes of the job."""
        return tuple(map(Host, self._names))

    def lost(self) -> Cause | None:
        """Return why Slurm starts no step in this job any more: it is over, or is being ended; None where it does."""
        if self._cause is None or takes_steps(own_job_id()):
            return None
        return self._cause()

    def limited_to(self, hosts: Sequence[Host]) -> SlurmAllocation:
        """Return a placement with only these nodes of the job."""
        limited = copy.copy(self)
        limited._names = tuple(host.name for host in hosts)
        return limited

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The names of the job's nodes; `limited_to` replaces them by some of them."""
        return host_names(os.environ["SLURM_JOB_NODELIST"])

    def machine(self) -> Machine:
        """Return one node of the job, with the cores that the job has on it.

        It is the machine that [node] describes, else this machine.

        Raises:
            RequestError: this is none of the nodes (salloc on a login node), and the study does not describe them.
        """
        machine = described(self._node)
        if machine is None:
            self._require_node()
            machine = this_machine()
        cores = self._fewest_cores()
        return machine.limited_to(cores) if cores is not None else machine

    def _require_node(self) -> None:
        """Refuse to take this machine for a node of the job where it is none.

        Raises:
            RequestError: it is none.
        """
        is_node_by_slurm = os.environ.get("SLURMD_NODENAME") in self._names
        if is_node_by_slurm or any(map(is_this_machine, self._names)):
            return
        raise RequestError(
            f"this machine is none of the nodes of job {self._job_id} ({', '.join(self._names[:8])})",
            next_step="Describe one of them: add [node] with cores = 64 and gpus = 4, in the study or in "
            "the file given with --site",
        )

    def slots(self) -> int | None:
        """Return the tasks per node where the allocation was asked for by tasks; else None: cores and GPUs decide."""
        is_by_tasks = "SLURM_NTASKS" in os.environ or "SLURM_NTASKS_PER_NODE" in os.environ
        if not is_by_tasks:
            return None
        return _smallest_count(os.environ.get("SLURM_TASKS_PER_NODE", ""))

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return one host for each node of the world.

        Raises:
            RequestError: the allocation has too few nodes, or fewer cores on one than a node's ranks have threads.
        """
        if len(self._names) < world.nodes:
            raise RequestError(
                f"{world.nodes} nodes are needed, and job {self._job_id} has {len(self._names)}",
                next_step="Ask salloc for more nodes, or use fewer ranks in scaling.gpus",
            )
        threads = world.ranks_per_node * world.threads_per_rank
        cores = self._fewest_cores()
        if cores is not None and threads > cores:
            raise RequestError(
                f"{world.ranks_per_node} x {world.threads_per_rank} threads are needed on each node, and job "
                f"{self._job_id} has {cores} CPUs there",
                next_step="Ask Slurm for more (--cpus-per-task), or set launch.threads_per_rank",
            )
        return tuple(Host(name) for name in self._names[: world.nodes])

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse launchers that bypass Slurm, its containers, or the study's options of srun."""
        del world
        if launcher == "deepspeed":
            return "it starts ranks by ssh, past Slurm; use launcher = 'srun', 'torchrun' or 'mpirun' in Slurm's jobs"
        return launcher_refusal(self._slurm, launcher)

    def adapt(self, spawn: Spawn) -> Spawn:
        """Return the commands as they are started here: each is a job step, or starts job steps.

        Raises:
            RequestError: an option of srun may not be set, or a folder cannot be mounted in the container.
        """
        gpus = self._step_gpus(spawn)
        return replace(
            spawn,
            commands=step_commands(spawn, self._slurm, python=self.python, gpus_per_node=gpus),
            environment={**spawn.environment, _MPIRUN_OPTIONS_VARIABLE: _mpirun_options(spawn, gpus)},
            drop_variables=(*spawn.drop_variables, *_STEP_GPU_PREFIXES),
        )

    def _step_gpus(self, spawn: Spawn) -> int:
        """Return the GPUs that a step asks for on each node; 0: it asks for none.

        It is 0 also where Slurm has given the job no GPUs: it would refuse the step, and where it does not manage the
        nodes' GPUs ranks see them anyway.
        """
        if spawn.gpus_per_node == 0 or not self._has_gpus_of_slurm():
            return 0
        return most_gpus(spawn, self.machine())

    def _has_gpus_of_slurm(self) -> bool:
        """Whether Slurm has given the job GPUs; False also where slurmctld does not say."""
        if any(name in os.environ for name in _GPU_VARIABLES):
            return True
        try:
            return self._was_asked_for_with_gpus
        except SchedulerError:
            return False

    @cached_property
    def _was_asked_for_with_gpus(self) -> bool:
        """Whether the job was asked for with GPUs, by slurmctld, which is asked once."""
        return asks_for_gpus(job_fields(own_job_id()))

    def end_elsewhere(self, spawn: Spawn, exit_code: int | None) -> tuple[str, ...]:
        """End the run's steps, which outlive a killed srun.

        Returns:
            The hosts that do not answer, where a step does not end within `_END_SECONDS`; else none.
        """
        if exit_code == 0:
            return ()
        try:
            have_ended = self._end_steps(spawn.run_folder.name)
            return () if have_ended else silent_nodes([host.name for host in spawn.hosts])
        except SchedulerError:
            return ()  # Slurm does not answer: which of the hosts do is unknown

    def _end_steps(self, step_name: str) -> bool:
        """Kill the job's steps with this name until none is left, for `_END_SECONDS`; return whether none is left."""
        deadline = time.monotonic() + _END_SECONDS
        while True:
            steps = steps_named(self._job_id, step_name)
            if not steps:
                return True
            if time.monotonic() > deadline:
                return False
            kill_steps(steps)
            time.sleep(_POLL_SECONDS)

    def _fewest_cores(self) -> int | None:
        """Return the CPUs that the job has on the node with the fewest; None where Slurm does not say."""
        return _smallest_count(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))


def _mpirun_options(spawn: Spawn, gpus_per_node: int) -> str:
    """Return the options for the srun by which Open MPI starts its daemons, after those that the user has set.

    The daemons' step has the run's name, by which it is ended. Args: gpus_per_node: as of `gpu_options`.
    """
    users_options = os.environ.get(_MPIRUN_OPTIONS_VARIABLE, "")
    options = [users_options, f"--job-name={spawn.run_folder.name}", "--overlap", *gpu_options(gpus_per_node)]
    return " ".join(option for option in options if option)


def _smallest_count(counts: str) -> int | None:
    """Return the smallest of Slurm's counts per node; None without any. Example: "4(x2),3" is 4, 4 and 3, so 3."""
    numbers = [int(match[1]) for match in re.finditer(r"(?:^|,)(\d{1,6})(?=\(|,|$)", counts)]
    return min(numbers, default=None)
