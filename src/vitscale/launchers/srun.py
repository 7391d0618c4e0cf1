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
        """One step; each option is one word. Slurm binds nothing, for ranks pin themselves; one that fails ends all."""
        named = [f"--nodelist={','.join(host.name for host in spawn.hosts)}"] if spawn.hosts else []
        command = [
            "srun",
            # The scheduler finds the step by this name.
            f"--job-name={spawn.run_folder.name}",
            f"--nodes={world.nodes}",
            f"--ntasks={world.size}",
            f"--ntasks-per-node={world.ranks_per_node}",
            *named,
            # Rank by rank on the first node, then on the second, as every launcher does here.
            "--distribution=block",
            # Beside the step that the driver itself may run in. With all cores that the job has on the node: Slurm
            # counts hardware threads, and ranks take whole physical cores of them.
            "--overlap",
            "--cpu-bind=none",
            "--mpi=none",
            # sbatch --export=NONE would otherwise hold back what modules have set.
            "--export=ALL",
            "--kill-on-bad-exit=1",
            *spawn.rank_command,
        ]
        return replace(spawn, commands=(tuple(command),))

    def unavailable(self) -> str | None:
        """Needs Slurm's programs."""
        if shutil.which("srun") is None:
            return "srun not found: use it on a Slurm cluster, or use launcher = 'torchrun'"
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Any world; the scheduler knows whether the allocation is large enough."""
        del world, hosts
        return None
