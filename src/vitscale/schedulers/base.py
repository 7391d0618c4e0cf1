"""What a scheduler is: it knows the hosts, and runs a launcher's commands on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from vitscale.launchers.base import Launch
from vitscale.machine.hardware import Machine
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class Job(Protocol):
    """One run's processes, on all its hosts."""

    started_unix_seconds: float
    token: str

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended what was started."""
        ...

    @property
    def wall_seconds(self) -> float:
        """Since the start, on a clock that never goes back."""
        ...

    def wait(self, seconds: float) -> int | None:
        """Waits so long at most for the end."""
        ...

    def end(self) -> tuple[str, ...]:
        """Ends every process that is left on every host, and returns when all are gone; the hosts that did not answer
        are returned, whose ranks end by themselves when they hear nothing from the driver any more."""
        ...


class Scheduler(Protocol):
    """Where runs run."""

    python: str
    """The interpreter of the ranks: this one's path, unless ranks run where that is another."""
    default_launcher: str
    """The launcher of studies that name none."""

    def machine(self) -> Machine:
        """One of its hosts, as trials are planned for it.

        Raises:
            RequestError: what it offers cannot be known here, and the study does not say ([node]).
        """
        ...

    def slots(self) -> int | None:
        """Ranks that a host takes; None where nothing limits them but its cores and GPUs."""
        ...

    def hosts(self, world: World) -> tuple[Host, ...]:
        """The hosts that this world gets, one for each node; empty: this machine, or known only once a job runs.

        Raises:
            RequestError: there are too few, or they are too small.
        """
        ...

    def refuses(self, launcher: str, world: World) -> str | None:
        """Why this launcher cannot be used here, with what to do; None where it can."""
        ...

    def commands(self, launch: Launch, world: World, hosts: tuple[Host, ...], run_folder: Path) -> list[list[str]]:
        """The exact argv that the driver starts, one or one for each host."""
        ...

    def start(
        self,
        commands: list[list[str]],
        hosts: tuple[Host, ...],
        *,
        token: str,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str],
        without: tuple[str, ...] = (),
        ended_by_kill: bool = False,
    ) -> Job:
        """Starts them. `environment` is added to the driver's own; variables that begin with one of `without` are
        left out."""
        ...
