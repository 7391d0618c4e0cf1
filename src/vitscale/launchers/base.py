"""What a launcher is: a world and its hosts in, an argv out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


@dataclass(frozen=True)
class Start:
    """What is to be started, and where."""

    rank_command: tuple[str, ...]
    """Python and its arguments, the same for every rank: `PYTHON -m vitscale.worker FOLDER`."""
    run_folder: Path
    """Shared by all hosts; a launcher may write files of its own there (a hostfile)."""
    hosts: tuple[Host, ...] = ()
    """One for each node of the world, in order of ranks; empty: the machine on which the command is run."""
    master_port: int = 29500
    """A port on the first host, for launchers that want one; free as far as the driver can see."""
    interface: str | None = None
    """Network interface to talk over."""


@dataclass(frozen=True)
class Launch:
    """What a launcher wants run."""

    commands: tuple[tuple[str, ...], ...]
    """One argv, to be run once where the driver is (`per_host` False), or one for each host, to be run there."""
    per_host: bool = False
    files: tuple[tuple[str, str], ...] = ()
    """Files that the commands read: (name in the run's folder, text)."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the commands themselves need; what ranks need is in the run's launch file."""
    without_variables: tuple[str, ...] = ()
    """Beginnings of names of variables that the commands must not see."""
    ended_by_kill: bool = False
    """Whether the commands must not be asked to end (SIGTERM), for what they do then reaches beyond this run."""
    from_prepared: bool = False
    """Whether a process that has imported what ranks need may carry the command out (`vitscale.worker.prepared`)."""
    ranks_know_their_master: bool = True
    """Whether the launcher gives each rank RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; if not, see
    `vitscale.worker.place`."""


class Launcher(Protocol):
    """Turns a world into the command that starts its ranks."""

    def launch(self, world: World, start: Start) -> Launch:
        """The exact argv. No shell is involved."""
        ...

    def unavailable(self) -> str | None:
        """Why it cannot be used on this machine, with what to do; None where it can."""
        ...

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Why it cannot start this world on these hosts, with what to do; None where it can."""
        ...
