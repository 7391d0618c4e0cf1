"""Local: ranks on this machine, started by ourselves, as forks of a prepared process where one is at hand."""

from __future__ import annotations

from dataclasses import replace

from vitscale.launchers.base import Launcher, Spawn, lacking
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class Local(Launcher):
    """Any number of ranks. The command starts them cold; the driver has a process that has imported everything carry it
    out instead (`vitscale.schedulers.prepared`), and nothing differs but the seconds that imports take.
    """

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """`python -m vitscale.processes.local_ranks N PORT MODULE FOLDER`."""
        python, _, *rank = spawn.rank_command
        ranks = (python, "-m", "vitscale.processes.local_ranks", str(world.size), str(spawn.master_port), *rank)
        return replace(spawn, commands=(ranks,), from_prepared=True)

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Reaches no other host, nor this one by a name."""
        if hosts:
            return "it starts ranks on this machine alone, and hosts are named; use launcher = 'torchrun'"
        return lacking(world, hosts)


class InProcess(Launcher):
    """One rank, nothing in between: what one rank was started by before there was `local`. Results that were begun so
    go on so."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """`python -m vitscale.worker FOLDER`."""
        del world
        return replace(spawn, per_host=bool(spawn.hosts))

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Starts one rank only."""
        if world.size != 1:
            return f"it starts one rank, not {world.size}; use launcher = 'local', or scaling.gpus = [1]"
        return lacking(world, hosts)
