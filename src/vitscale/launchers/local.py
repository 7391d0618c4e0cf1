"""Local: ranks on this machine, started without another launcher; forks of a prepared process where there is one."""

from __future__ import annotations

from dataclasses import replace

from vitscale.base.interpreter import parse_module_command, python_module
from vitscale.launchers.base import Launcher, Spawn, hosts_refusal
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class Local(Launcher):
    """Starts any number of ranks.

    The command starts them cold. The driver has a process that has imported everything run the command instead
    (`vitscale.schedulers.prepared`); nothing differs but the seconds that imports take.
    """

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command `python -m vitscale.processes.local_ranks N PORT MODULE FOLDER`."""
        rank = parse_module_command(spawn.rank_command)
        ranks = python_module(
            "vitscale.processes.local_ranks",
            *(str(world.size), str(spawn.master_port), rank.module, *rank.arguments),
            interpreter=rank.interpreter,
        )
        return replace(spawn, commands=(ranks,), from_prepared=True)

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Return why the world cannot start: hosts are named, if only this one, or it has several nodes; else None."""
        if hosts:
            return "it starts ranks on this machine alone, and hosts are named; use launcher = 'torchrun'"
        return hosts_refusal(world, hosts)
