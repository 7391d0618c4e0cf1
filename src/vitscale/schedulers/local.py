"""This machine."""

from __future__ import annotations

from vitscale.machine.hardware import Machine, this_machine
from vitscale.schedulers.base import Placement
from vitscale.trial.trial import World


class Local(Placement):
    """One host: this one, with as many ranks as its cores and GPUs allow."""

    default_launcher = "local"

    def machine(self) -> Machine:
        """This machine."""
        return this_machine()

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
