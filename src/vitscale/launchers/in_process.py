"""In-process: what one rank was started by before there was `local`; results that were begun so go on so."""

from __future__ import annotations

from vitscale.launchers import several_hosts
from vitscale.launchers.base import Launch, Start
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class InProcess:
    """One rank, nothing in between."""

    def launch(self, world: World, start: Start) -> Launch:  # noqa: ARG002 - one signature for every launcher
        """`python -m vitscale.worker FOLDER`."""
        return Launch(commands=(start.rank_command,), per_host=bool(start.hosts))

    def unavailable(self) -> str | None:
        """Always available."""
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Starts one rank only."""
        if world.size != 1:
            return f"it starts one rank, not {world.size}; use launcher = 'local', or scaling.gpus = [1]"
        return several_hosts.lacking(world, hosts)
