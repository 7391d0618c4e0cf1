"""Hosts named in a file, reached by ssh: each launcher's command runs here, or an agent of it on every host."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitscale.errors import RequestError, explain
from vitscale.launchers.base import Launch
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.schedulers.local import LocalJob
from vitscale.trial.trial import World

_SSH = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=15",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=4",
)
_SSH_FAILED = 255
"""ssh's own exit code: any other is that of a command that ran on the host, which has answered then."""
_END_SECONDS = 40.0


def on_host(host: str, argv: Sequence[str]) -> list[str]:
    """The argv that runs `argv` on a host: quoted, for ssh hands it to a shell there."""
    return [*_SSH, "--", host, shlex.join(argv)]


class HostfileJob:
    """What runs here, and what it has started on the other hosts."""

    def __init__(self, local: LocalJob, remote: tuple[str, ...]) -> None:
        self.token = local.token
        self.started_unix_seconds = local.started_unix_seconds
        self._local = local
        self._remote = remote

    @property
    def exit_code(self) -> int | None:
        """Of the commands that run here, ssh's among them."""
        return self._local.exit_code

    @property
    def wall_seconds(self) -> float:
        """Since the start."""
        return self._local.wall_seconds

    def wait(self, seconds: float) -> int | None:
        """Waits so long at most for the end."""
        return self._local.wait(seconds)

    def end(self) -> tuple[str, ...]:
        """Ends what runs here, then what is left on all other hosts at once; returns those that did not answer."""
        self._local.end()
        silent: list[str] = []

        def end_on(host: str) -> None:
            argv = on_host(host, [sys.executable, "-m", "vitscale.processes.host_agent", "--end", self.token])
            try:
                answer = subprocess.run(
                    argv,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_END_SECONDS,
                    check=False,
                    # A second Ctrl-C must not reach it.
                    start_new_session=True,
                )
            except (OSError, subprocess.TimeoutExpired):
                silent.append(host)
            else:
                if answer.returncode == _SSH_FAILED:
                    silent.append(host)

        threads = [threading.Thread(target=end_on, args=(host,)) for host in self._remote]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tuple(sorted(silent))


class Hostfile:
    """The hosts of a hostfile, the first ones first. Paths are the same on all of them."""

    python = sys.executable
    default_launcher = "torchrun"

    def __init__(self, hosts: tuple[Host, ...], machine: Machine | None = None) -> None:
        """`machine`: what one host offers, where this one is not like it."""
        self._hosts = hosts
        self._machine = machine

    def machine(self) -> Machine:
        """What the study says of its hosts ([node]), else this machine: hosts are taken to be alike until they run."""
        return self._machine or this_machine()

    def slots(self) -> int | None:
        """Of the smallest host; None where the file says nothing."""
        return min((host.slots for host in self._hosts if host.slots is not None), default=None)

    def hosts(self, world: World) -> tuple[Host, ...]:
        """As many as the world has nodes, each with room for its ranks.

        Raises:
            RequestError: there are not so many.
        """
        fitting = [host for host in self._hosts if host.slots is None or host.slots >= world.ranks_per_node]
        if len(fitting) < world.nodes:
            ranks = f"{world.ranks_per_node} rank{'s' if world.ranks_per_node > 1 else ''}"
            raise RequestError(
                explain(
                    f"{world.nodes} hosts with room for {ranks} each are needed, and the hostfile has {len(fitting)}",
                    valid=[f"{host.name} slots={host.slots or 'any'}" for host in self._hosts[:16]],
                    next_step="Add hosts or slots, or use fewer ranks in scaling.gpus",
                )
            )
        return tuple(fitting[: world.nodes])

    def refuses(self, launcher: str, world: World) -> str | None:  # noqa: ARG002 - one signature for every scheduler
        """srun has hosts of its own; the others need ssh."""
        if launcher == "srun":
            return "srun takes its hosts from Slurm, not from a hostfile; use torchrun, deepspeed or mpirun"
        if shutil.which("ssh") is None and not all(is_this_machine(host.name) for host in self._hosts):
            return "ssh is not found, by which the hosts of a hostfile are reached; install an OpenSSH client"
        return None

    def commands(self, launch: Launch, world: World, hosts: tuple[Host, ...], run_folder: Path) -> list[list[str]]:  # noqa: ARG002
        """Each host's by ssh, under a host agent; on this machine without it. Other commands as they are."""
        if not launch.per_host:
            return [list(command) for command in launch.commands]
        commands = []
        for host, command in zip(hosts, launch.commands, strict=True):
            if is_this_machine(host.name):
                commands.append(list(command))
            else:
                host_agent = [sys.executable, "-m", "vitscale.processes.host_agent", str(run_folder), "--", *command]
                commands.append([*_SSH, "--", host.name, _in_folder(host_agent)])
        return commands

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
    ) -> HostfileJob:
        """Starts them; on other hosts whatever they start is ended there too."""
        local = LocalJob(
            commands,
            token=token,
            log=log,
            cwd=cwd,
            environment=environment,
            without=without,
            ended_by_kill=ended_by_kill,
        )
        return HostfileJob(local, tuple(host.name for host in hosts if not is_this_machine(host.name)))


def _in_folder(argv: Sequence[str]) -> str:
    """As the driver's own: in its working directory, where a factory's module may lie."""
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(argv)}"
