"""mpirun: the launcher of whichever MPI is installed, over ssh or what it was built for.

Open MPI, MPICH, Intel MPI and Cray's PALS take other options and give ranks other variables
(`vitscale.processes.launch_file`). Which one it is, `mpirun --version` says.
"""

from __future__ import annotations

import enum
import functools
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitscale.base.commands import answer_to
from vitscale.errors import shown
from vitscale.launchers.base import Launcher, Spawn, hostfile, this_machine_first
from vitscale.trial.trial import World

_HOSTFILE = "mpirun.hostfile"
_ANSWER_SECONDS = 30.0
_PALS_FOLDER = "/cray/pals/"
"""Part of the path of every release of PALS, whose `--version` names no product: /opt/cray/pals/1.8/bin/mpiexec."""


class MpiKind(enum.Enum):
    """The MPI that a program belongs to; its name in messages."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"
    PALS = "Cray's PALS"


class Mpirun(Launcher):
    """The installed MPI numbers the ranks: `launch_file.OPEN_MPI`, `HYDRA` and `PALS` name its variables."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command of one mpirun for all hosts.

        It binds nothing, for ranks pin themselves. A rank that fails ends all; not so under Intel MPI, which waits for
        the others where no rank calls MPI (2021.18): there the driver ends them, seconds later. Where no mpirun is
        installed (a plan for another machine), the command is Open MPI's.
        """
        program = _installed_program()
        if program is None:
            return _open_mpi_launch("mpirun", world, spawn)
        kind = _identified(program).kind
        if kind is MpiKind.MPICH:
            # MPICH binds nothing by default, but HYDRA_BINDING in the environment can.
            return _hydra_launch(program, ("-bind-to", "none"), world, spawn)
        if kind is MpiKind.INTEL:
            # Intel MPI binds each process to its share of the cores, also one that never calls MPI (2021.18).
            return _hydra_launch(program, ("-genv", "I_MPI_PIN", "0"), world, spawn)
        if kind is MpiKind.PALS:
            return _pals_launch(program, world, spawn)
        return _open_mpi_launch(program, world, spawn)

    def unavailable(self) -> str | None:
        """Return why mpirun cannot be used: it is missing, or of an MPI that is not known here; else None."""
        program = _installed_program()
        if program is None:
            return "mpirun not found: install Open MPI, or use launcher = 'torchrun'"
        return _identified(program).refusal


def mpirun_name() -> str | None:
    """Return the name of the MPI whose mpirun is installed; None where there is none that can be used."""
    program = _installed_program()
    kind = None if program is None else _identified(program).kind
    return None if kind is None else kind.value


def _installed_program() -> str | None:
    """Return the full path of mpirun, else of mpiexec, which PALS alone has; None where neither is installed."""
    return shutil.which("mpirun") or shutil.which("mpiexec")


class _Identity(NamedTuple):
    """The kind of an mpirun, or why it cannot be used; one of the two is None."""

    kind: MpiKind | None
    refusal: str | None


@functools.cache
def _identified(program: str) -> _Identity:
    """Return the kind of an mpirun. Cached, because every trial asks."""
    if _PALS_FOLDER in str(Path(program).resolve()):
        return _Identity(MpiKind.PALS, None)
    try:
        answer = answer_to([program, "--version"], _ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        refusal = f"{program} does not say its version ({error}); repair the MPI, or use launcher = 'torchrun'"
        return _Identity(None, refusal)
    version_text = (answer.stdout or answer.stderr).strip()
    if "Open MPI" in version_text:
        return _Identity(MpiKind.OPEN_MPI, None)
    if "Intel(R) MPI" in version_text:
        return _Identity(MpiKind.INTEL, None)
    if "HYDRA" in version_text:
        return _Identity(MpiKind.MPICH, None)
    first_line, _, _ = version_text.partition("\n")
    names = ", ".join(kind.value for kind in MpiKind)
    refusal = (
        f"{program} is of an MPI that is not known here: {shown(first_line)}; known are {names}: put one of them first "
        "in PATH, or use launcher = 'srun' or 'torchrun'"
    )
    return _Identity(None, refusal)


def _open_mpi_launch(program: str, world: World, spawn: Spawn) -> Spawn:
    """Return the command for Open MPI 4 and 5.

    A hostfile is written for this machine too: without it mpirun refuses more ranks than cores, which is for the
    study to decide (`launch.oversubscribe`).
    """
    # mpirun gives the first ranks to its own host, wherever the hostfile has that; ranks are told to meet on the
    # first of these hosts.
    hosts = this_machine_first(spawn.hosts)
    names = [host.name for host in hosts] or ["localhost"]
    command = [
        # Called by its full path, Open MPI looks for its daemon under the same prefix on the other hosts.
        program,
        *("-np", str(world.size)),
        *("--hostfile", str(spawn.run_folder / _HOSTFILE)),
        *("--map-by", f"ppr:{world.ranks_per_node}:node"),
        *("--bind-to", "none"),
    ]
    if spawn.interface is not None and hosts:
        for component in ("btl", "oob"):
            command += ["--mca", f"{component}_tcp_if_include", spawn.interface]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    files = ((_HOSTFILE, hostfile(world, names)),)
    return replace(spawn, commands=((*command, *spawn.rank_command),), hosts=hosts, files=files)


def _hydra_launch(program: str, unbound: tuple[str, ...], world: World, spawn: Spawn) -> Spawn:
    """Return the command for Hydra, the process manager of MPICH and of Intel MPI.

    Hydra numbers the ranks in the order of its host file, wherever that has this machine.

    Args:
        program: its mpirun.
        unbound: options by which it binds no rank to cores.
        world: the ranks.
        spawn: what every rank runs, and where.
    """
    names = [host.name for host in spawn.hosts] or ["localhost"]
    command = [
        program,
        *("-f", str(spawn.run_folder / _HOSTFILE)),
        *("-n", str(world.size)),
        *("-ppn", str(world.ranks_per_node)),
        *unbound,
    ]
    if spawn.interface is not None and spawn.hosts:
        command += ["-iface", spawn.interface]
    lines = "".join(f"{name}:{world.ranks_per_node}\n" for name in names)
    return replace(spawn, commands=((*command, *spawn.rank_command),), files=((_HOSTFILE, lines),))


def _pals_launch(program: str, world: World, spawn: Spawn) -> Spawn:
    """Return the command for PALS, which starts ranks inside a job of PBS Pro.

    Never run here: its options are those of public job scripts.
    """
    command = [program, *("-n", str(world.size)), *("--ppn", str(world.ranks_per_node))]
    if spawn.hosts:
        command += ["--hosts", ",".join(host.name for host in spawn.hosts)]
    command += ["--cpu-bind", "none"]
    return replace(spawn, commands=((*command, *spawn.rank_command),))
