"""The commands of a job's steps: srun with the options that the study adds, and its program in the study's container.

Every option of an srun here is one word, `--NAME` or `--NAME=VALUE`, so that its program begins at the first word
without dashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, shown
from vitscale.launchers.base import Spawn
from vitscale.launchers.mpirun import MpiKind, mpirun_name
from vitscale.machine.hardware import Machine
from vitscale.schedulers.job_settings import container_of
from vitscale.study.sections import SlurmSection

OPTION_WORD = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=.*)?")
"""An option of sbatch or srun as one word."""
_CPU_BIND = "cpu-bind"
"""The one option of ours that the study's replaces: ours binds nothing, and ranks that Slurm has bound stay so."""
_BINDING_OPTIONS = frozenset((_CPU_BIND, "mem-bind", "gpu-bind", "hint", "cpus-per-task", "threads-per-core"))
"""Options of srun that give each of its tasks a part of a node."""
_REFUSED_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"),
        "it follows from each trial's world",
    ),
    **dict.fromkeys(("nodelist", "exclude", "nodefile", "relative"), "say slurm.nodelist or slurm.exclude"),
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task"),
        "say slurm.gpus and slurm.gpu_type; each rank of a node sees the GPUs of all",
    ),
    **dict.fromkeys(
        (
            *("job-name", "jobid", "het-group", "multi-prog", "distribution", "overlap", "exclusive", "exact"),
            *("mpi", "export", "kill-on-bad-exit", "wait", "chdir", "output", "error", "input", "label", "pty"),
            *("unbuffered", "no-kill", "test-only", "preserve-env", "immediate"),
        ),
        "vitscale sets what concerns it, to start ranks in their order and to end them",
    ),
    **dict.fromkeys(
        ("container-image", "container-mounts", "container-workdir", "container-entrypoint"), "say slurm.container"
    ),
}
"""Options that `slurm.srun_options` may not have -> why, or what to use instead."""


class _Srun(NamedTuple):
    """An srun's argv in two parts."""

    options: tuple[str, ...]
    program: tuple[str, ...]


def step_commands(spawn: Spawn, slurm: SlurmSection, *, python: str, gpus_per_node: int) -> tuple[tuple[str, ...], ...]:
    """Return a launcher's commands as they start a run's job steps.

    An srun is a step, and mpirun starts steps by itself. The command of each host of another launcher becomes an srun
    of its own, with a host agent around it. Steps have the run's name, by which they are ended.

    Args:
        spawn: the launcher's commands.
        slurm: the study's section.
        python: interpreter of the host agents, on the nodes or in the container.
        gpus_per_node: GPUs that each step asks for on each of its nodes; 0: it asks for none.

    Raises:
        RequestError: an option may not be set, or a folder cannot be mounted in the container.
    """
    launched = _agents_on_hosts(spawn, python) if spawn.per_host else spawn.commands
    results = spawn.run_folder.parents[1]
    commands = []
    for command in launched:
        is_step = command[0] == "srun"
        if is_step:
            command = step_command(command, slurm, gpus_per_node=gpus_per_node, folders=(results,), cwd=spawn.cwd)
        commands.append(command)
    return tuple(commands)


def _agents_on_hosts(spawn: Spawn, python: str) -> tuple[tuple[str, ...], ...]:
    """Return an srun for each host, which runs the host's command under a host agent."""
    agent = python_module("vitscale.processes.host_agent", str(spawn.run_folder), "--", interpreter=python)
    step_name = spawn.run_folder.name
    return tuple(
        srun_on_host(host.name, step_name, (*agent, *command))
        for host, command in zip(spawn.hosts, spawn.commands, strict=True)
    )


def step_command(
    srun: Sequence[str], slurm: SlurmSection, *, gpus_per_node: int, folders: Sequence[Path], cwd: Path
) -> tuple[str, ...]:
    """Return an srun argv with its GPUs, with the further options of [slurm], and with its program in the container.

    Args:
        srun: `srun`, its options, then the program.
        slurm: the study's section.
        gpus_per_node: GPUs that it asks for on each node; 0: it asks for none.
        folders: folders mounted in the container under the same paths, besides `slurm.container_mounts`.
        cwd: the program's working directory, also mounted.

    Raises:
        RequestError: an option may not be set, or a path cannot be mounted.
    """
    parts = _parts(srun)
    our_options = ("srun", *gpu_options(gpus_per_node), *parts.options)
    options = (*_without_replaced(our_options, slurm.srun_options), *_checked_options(slurm.srun_options))
    container = container_of(slurm)
    if container is None:
        return (*options, *parts.program)
    return (*options, *container.srun_options(folders, cwd), *container.wrapped(parts.program, folders, cwd))


def gpu_options(gpus_per_node: int) -> tuple[str, ...]:
    """Return the option of srun by which a step gets GPUs, of which each rank of a node sees all; () for no GPUs.

    Binding (`--gpu-bind`, `--gpus-per-task`) would hide the GPUs of other ranks, which NCCL then cannot reach directly.
    """
    return (f"--gpus-per-node={gpus_per_node}",) if gpus_per_node else ()


def most_gpus(spawn: Spawn, node: Machine | None) -> int:
    """Return the GPUs that the ranks of a node can have: one each, and no more than the node has.

    Several ranks may share a GPU (launch.oversubscribe).

    Args:
        spawn: with the number of ranks on GPUs.
        node: one of the nodes; None, or without GPUs, where nobody says how many it has.
    """
    node_gpus = 0 if node is None else len(node.gpus)
    return min(spawn.gpus_per_node, node_gpus) if node_gpus else spawn.gpus_per_node


def srun_on_host(host: str, step_name: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Return an srun that runs `argv` on one host beside other steps, with all the job's CPUs there.

    Ranks bind themselves.
    """
    step_options = [f"--job-name={step_name}", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
    return ("srun", *step_options, "--cpu-bind=none", "--mpi=none", "--export=ALL", *argv)


def launcher_refusal(slurm: SlurmSection, launcher: str) -> str | None:
    """Return why a launcher does not go with the container or the srun options of [slurm]; None where it does."""
    mpi = mpirun_name()
    if launcher == "mpirun" and mpi not in (None, MpiKind.OPEN_MPI.value):
        # The step's name and GPUs reach Open MPI's srun by a variable that Hydra does not read, so that its steps would
        # not be found when they must end.
        return f"inside Slurm mpirun must be Open MPI's, and this is {mpi}'s; use launcher = 'srun' or 'torchrun'"
    if launcher == "mpirun" and slurm.container is not None:
        return "with slurm.container ranks are started by srun; use launcher = 'srun' or 'torchrun'"
    if launcher == "mpirun" and slurm.srun_options:
        return "mpirun starts its daemons by an srun without slurm.srun_options; use launcher = 'srun', or remove them"
    if launcher != "torchrun":
        return None
    binding = [option for option in slurm.srun_options if _option_name(option) in _BINDING_OPTIONS]
    if binding:
        return (
            f"slurm.srun_options has {shown(binding[0])}, which binds each task of srun, and torchrun is one task for "
            "all ranks of a node; use launcher = 'srun'"
        )
    return None


def _parts(srun: Sequence[str]) -> _Srun:
    """Return the two parts of an srun's argv, which has a program."""
    program_start = next(position for position in range(1, len(srun)) if not srun[position].startswith("--"))
    return _Srun(tuple(srun[1:program_start]), tuple(srun[program_start:]))


def _option_name(option: str) -> str | None:
    """Return "cpu-bind" for "--cpu-bind=none"; None for a word that is no option."""
    match = OPTION_WORD.fullmatch(option)
    return match["name"] if match is not None else None


def _without_replaced(options: Iterable[str], users_options: Sequence[str]) -> list[str]:
    """Return our options without `--cpu-bind`, where the user has one."""
    users_names = {_option_name(option) for option in users_options}
    if _CPU_BIND not in users_names:
        return list(options)
    return [option for option in options if _option_name(option) != _CPU_BIND]


def _checked_options(options: Sequence[str]) -> Sequence[str]:
    """Return the further options as they are.

    Raises:
        RequestError: a word is no option, or it would contradict one of ours.
    """
    for option in options:
        name = _option_name(option)
        if name is None or not option.isprintable():
            raise RequestError(
                f"slurm.srun_options has {shown(option)}",
                valid=["--NAME", "--NAME=VALUE"],
                next_step="Write one each, by its long name",
            )
        reason = _REFUSED_OPTIONS.get(name)
        if reason is not None:
            raise RequestError(f"slurm.srun_options has {shown(option)}", next_step=f"Remove it: {reason}")
    return options
