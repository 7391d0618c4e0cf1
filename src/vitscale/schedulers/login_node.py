"""A Slurm cluster seen from outside any allocation: trials are planned for its nodes, and submitted as jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from vitscale.errors import RequestError, explain
from vitscale.launchers.base import Launch
from vitscale.machine.hardware import Machine
from vitscale.machine.hosts import Host
from vitscale.trial.trial import World


class LoginNode:
    """Knows no hosts: Slurm names them once a job runs, and `vitscale.runner.job` runs trials on them there."""

    default_launcher = "torchrun"

    def __init__(self, machine: Machine | None, python: str | None) -> None:
        """`machine`: what [node] describes. `python`: the interpreter on the compute nodes."""
        self._machine = machine
        self.python = python or sys.executable

    def machine(self) -> Machine:
        """What [node] describes.

        Raises:
            RequestError: the study does not say.
        """
        if self._machine is None:
            raise RequestError(
                explain(
                    "launch.scheduler = 'slurm' submits jobs to nodes that this machine knows nothing of",
                    next_step="Describe one of them: add [node] with cores = 64 and gpus = 4, to the study or to the "
                    "file given with --site",
                )
            )
        return self._machine

    def slots(self) -> int | None:
        """Ranks that a node takes: one on each GPU; on nodes without, as many as the study says."""
        return len(self.machine().gpus) or None

    def hosts(self, world: World) -> tuple[Host, ...]:  # noqa: ARG002 - one signature for every scheduler
        """Known only once a job runs."""
        return ()

    def refuses(self, launcher: str, world: World) -> str | None:
        """In a job ranks are started by srun, on all of its nodes."""
        if launcher == "srun" or (launcher in ("in-process", "torchrun") and world.nodes == 1):
            return None
        return "jobs of Slurm start their ranks by srun; use launcher = 'srun'"

    def commands(
        self,
        launch: Launch,
        world: World,  # noqa: ARG002
        hosts: tuple[Host, ...],  # noqa: ARG002
        run_folder: Path,  # noqa: ARG002
    ) -> list[list[str]]:
        """As the job's own driver starts them."""
        return [list(command) for command in launch.commands]

    def start(
        self,
        commands: list[list[str]],  # noqa: ARG002
        hosts: tuple[Host, ...],  # noqa: ARG002
        *,
        token: str,  # noqa: ARG002
        log: Path,  # noqa: ARG002
        cwd: Path,  # noqa: ARG002
        environment: Mapping[str, str],  # noqa: ARG002
        without: tuple[str, ...] = (),  # noqa: ARG002
        ended_by_kill: bool = False,  # noqa: ARG002
    ) -> NoReturn:
        """Nothing starts here: `vitscale.runner.batch_jobs` submits."""
        raise RequestError("ranks are not started on a login node; submit jobs, or run inside an allocation (salloc)")
