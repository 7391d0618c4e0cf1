"""mpirun: Open MPI's launcher, over ssh or whatever it was built for."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import replace

from vitscale.base.commands import answer_to
from vitscale.errors import shown
from vitscale.launchers.base import Launcher, Spawn, hostfile, this_machine_first
from vitscale.trial.trial import World

_HOSTFILE = "mpirun.hostfile"
_ANSWER_SECONDS = 30.0


class Mpirun(Launcher):
    """Open MPI numbers the ranks: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command of one mpirun for all hosts.

        It binds nothing, for ranks pin themselves. A rank that fails ends all.

        A hostfile is written for this machine too: without it mpirun refuses more ranks than cores, which is for the
        study to decide (`launch.oversubscribe`).
        """
        # mpirun gives the first ranks to its own host, wherever the hostfile has that; ranks are told to meet on the
        # first of these hosts.
        hosts = this_machine_first(spawn.hosts)
        names = [host.name for host in hosts] or ["localhost"]
        command = [
            # Called by its full path, Open MPI looks for its daemon under the same prefix on the other hosts.
            shutil.which("mpirun") or "mpirun",
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

    def unavailable(self) -> str | None:
        """Return why mpirun cannot be used: it is missing, or not Open MPI's, and has other options; else None."""
        program = shutil.which("mpirun")
        if program is None:
            return "mpirun not found: install Open MPI, or use launcher = 'torchrun'"
        return _open_mpi_refusal(program)


@functools.cache
def _open_mpi_refusal(program: str) -> str | None:
    """Return why an mpirun cannot be used as Open MPI's; None where it is. Cached, because every trial asks."""
    try:
        answer = answer_to([program, "--version"], _ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} does not say its version ({error}); repair Open MPI, or use launcher = 'torchrun'"
    version_text = (answer.stdout or answer.stderr).strip()
    if "Open MPI" in version_text:
        return None
    first_line, _, _ = version_text.partition("\n")
    origin = f"not Open MPI's: {shown(first_line)}"
    if "HYDRA" in version_text or "Intel" in version_text:
        origin = "MPICH's or Intel MPI's (hydra)"
    return f"{program} is {origin}; put Open MPI's first in PATH, or use launcher = 'srun' or 'torchrun'"
