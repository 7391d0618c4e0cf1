"""Local: ranks on this machine, started by ourselves, as forks of a prepared process where one is at hand."""

from __future__ import annotations

from vitscale.launchers import several_hosts
from vitscale.launchers.base import Launch, Start
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class Local:
    """Any number of ranks. The command starts them cold; the driver has a process that has imported everything carry it
    out instead (`vitscale.schedulers.prepared`), and nothing differs but the seconds that imports take.
    """

    def launch(self, world: World, start: Start) -> Launch:
        """`python -m vitscale.processes.local_ranks N PORT MODULE FOLDER`."""
        python, _, *rank = start.rank_command
        ranks = (python, "-m", "vitscale.processes.local_ranks", str(world.size), str(start.master_port), *rank)
        return Launch(commands=(ranks,), from_prepared=True)

    def unavailable(self) -> str | None:
        """Always available."""
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Reaches no other host, nor this one by a name."""
        if hosts:
            return "it starts ranks on this machine alone, and hosts are named; use launcher = 'torchrun'"
        return several_hosts.lacking(world, hosts)
