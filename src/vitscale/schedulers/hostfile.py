"""Hosts named in a file, reached by ssh: each launcher's command runs here, or an agent of it on every host."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitscale.base.commands import answer_to
from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError
from vitscale.launchers.base import Spawn
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import Host, address_of, is_this_machine
from vitscale.processes.launch_file import name_of
from vitscale.schedulers.base import Placement
from vitscale.trial.trial import World

_SSH_COMMAND = (
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
_UNREACHED_CODE = 255
"""ssh's own exit code for failure, and `pod_shell`'s; any other is the command's, and so the host has answered."""
_END_SECONDS = 40.0
"""More than ssh needs to give a host up (`_SSH_COMMAND`): what takes longer has begun, on a host that is slow."""


def on_host(host: str, argv: Sequence[str]) -> list[str]:
    """Return the argv that runs `argv` on a host, quoted because ssh hands it to a shell there."""
    return [*_SSH_COMMAND, "--", host, shlex.join(argv)]


class Hostfile(Placement):
    """The hosts of a hostfile, used in the file's order. Paths are the same on all of them."""

    def __init__(self, hosts: tuple[Host, ...], machine: Machine | None = None) -> None:
        """`machine`: what one host offers, where this machine differs; None: the same as this machine."""
        self._hosts = hosts
        self._machine = machine

    def machine(self) -> Machine:
        """Return the machine that the study describes ([node]), else this one: hosts count as alike until they run."""
        return self._machine or this_machine()

    def slots(self) -> int | None:
        """Return the slots of the smallest host; None where the file gives none."""
        return min((host.slots for host in self._hosts if host.slots is not None), default=None)

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return one host for each node of the world, each with room for the node's ranks.

        Raises:
            RequestError: there are too few.
        """
        fitting = [host for host in self._hosts if host.slots is None or host.slots >= world.ranks_per_node]
        if len(fitting) < world.nodes:
            noun = "ranks" if world.ranks_per_node > 1 else "rank"
            raise RequestError(
                f"{world.nodes} hosts with room for {world.ranks_per_node} {noun} each are needed, and the hostfile "
                f"has {len(fitting)}",
                valid=[f"{host.name} slots={host.slots or 'any'}" for host in self._hosts[:16]],
                next_step="Add hosts or slots, or use fewer ranks in scaling.gpus",
            )
        return tuple(fitting[: world.nodes])

    def pool(self) -> tuple[Host, ...]:
        """Return all hosts of the file.

        Raises:
            RequestError: two names lead to the same host, as far as can be seen from here.
        """
        name_by_machine: dict[str, str] = {}
        for host in self._hosts:
            machine = _machine_identity(host.name)
            if machine in name_by_machine:
                raise RequestError(
                    f"the hostfile names one machine twice, as {name_by_machine[machine]} and as {host.name}: runs "
                    "side by side would share it",
                    next_step="Name each host once, or leave out measure.parallel_runs",
                )
            name_by_machine[machine] = host.name
        return self._hosts

    def limited_to(self, hosts: Sequence[Host]) -> Hostfile:
        """Return a placement with only these hosts."""
        return Hostfile(tuple(hosts), self._machine)

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse srun, which has hosts of its own, and where ssh is missing all launchers that need it."""
        del world
        if launcher == "srun":
            return "srun takes its hosts from Slurm, not from a hostfile; use torchrun, deepspeed or mpirun"
        if shutil.which("ssh") is None and not all(is_this_machine(host.name) for host in self._hosts):
            return "ssh is not found, by which the hosts of a hostfile are reached; install an OpenSSH client"
        return None

    def adapt(self, spawn: Spawn) -> Spawn:
        """Wrap the command of each other host in ssh and a host agent; other commands stay as they are."""
        if not spawn.per_host:
            return spawn
        commands = []
        for host, command in zip(spawn.hosts, spawn.commands, strict=True):
            if is_this_machine(host.name):
                commands.append(command)
            else:
                agent = python_module("vitscale.processes.host_agent", str(spawn.run_folder), "--", *command)
                commands.append(self.reach(host.name, agent))
        return replace(spawn, commands=tuple(commands))

    def reach(self, host: str, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the argv that runs `argv` on another host, in this process's working folder.

        It ends with the exit code of `argv`, or with `_UNREACHED_CODE`.
        """
        return (*_SSH_COMMAND, "--", host, _in_folder(argv))

    def reach_anywhere(self, host: str, argv: Sequence[str]) -> Sequence[str]:
        """Return the argv that runs `argv` on another host, whether or not it has this process's working folder."""
        return on_host(host, argv)

    def end_elsewhere(self, spawn: Spawn, exit_code: int | None) -> tuple[str, ...]:
        """End what is left on all other hosts at once; returns those that were not reached."""
        del exit_code
        unreached: list[str] = []

        def end_on(host: str) -> None:
            end_run = python_module("vitscale.processes.host_agent", "--end", name_of(spawn.token))
            argv = self.reach_anywhere(host, end_run)
            try:
                answer = answer_to(argv, _END_SECONDS, own_session=True)  # a second Ctrl-C must not end it
            except (OSError, subprocess.TimeoutExpired):
                return  # ranks there end with their heartbeats, which also tell of a host that has fallen silent
            if answer.returncode == _UNREACHED_CODE:
                unreached.append(host)

        remote = [host.name for host in spawn.hosts if not is_this_machine(host.name)]
        threads = [threading.Thread(target=end_on, args=(host,)) for host in remote]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tuple(sorted(unreached))


def _machine_identity(name: str) -> str:
    """Return a text that is the same for two names of one machine, as far as can be seen from here."""
    if is_this_machine(name):
        return "this machine"
    return address_of(name) or name


def _in_folder(argv: Sequence[str]) -> str:
    """Return a shell command that runs `argv` in the driver's working directory.

    A user's paths may be relative to it.
    """
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(argv)}"
