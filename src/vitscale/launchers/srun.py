"""srun: Slurm's own launcher, a job step over the nodes of an allocation."""

from __future__ import annotations

import shutil
from dataclasses import replace

from vitscale.launchers.base import Launcher, Spawn
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class Srun(Launcher):
    """Slurm numbers the ranks: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command of one job step.

        Each option is one word. Slurm binds nothing, for ranks pin themselves. A rank that fails ends all.
        """
        node_list = [f"--nodelist={','.join(host.name for host in spawn.hosts)}"] if spawn.hosts else []
        command = [
            "srun",
            # The scheduler finds the step by this name.
            f"--job-name={spawn.run_folder.name}",
            f"--nodes={world.nodes}",
            f"--ntasks={world.size}",
            f"--ntasks-per-node={world.ranks_per_node}",
            *node_list,
            # Fill the first node with ranks, then the second, as every launcher does here.
            "--distribution=block",
            # Run beside the step that the driver may run in, with all cores that the job has on the node: Slurm counts
            # hardware threads, and ranks take whole physical cores.
            "--overlap",
            "--cpu-bind=none",
            "--mpi=none",
            # Otherwise sbatch --export=NONE would hold back what modules have set.
            "--export=ALL",
            "--kill-on-bad-exit=1",
            *spawn.rank_command,
        ]
        return replace(spawn, commands=(tuple(command),))

    def unavailable(self) -> str | None:
        """Return why srun cannot be used, where Slurm's programs are missing; else None."""
        if shutil.which("srun") is None:
            return "srun not found: use it on a Slurm cluster, or use launcher = 'torchrun'"
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Return None: the scheduler knows whether the allocation is large enough."""
        del world, hosts
        return None
