"""The protocol of launchers, which turn ranks and their hosts into the commands that start them; and helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vitscale.machine.hosts import Host, is_this_machine
from vitscale.trial.trial import World

_LOOPBACK_PREFIXES = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class Spawn:
    """The processes of one run, before they are started: commands, and what these need.

    A launcher gets it with the one command that every rank runs, and returns it with the commands that start all ranks.
    The scheduler adapts these to where they are started, and the driver adds the token and the ranks' variables.
    """

    commands: tuple[tuple[str, ...], ...]
    """Argvs: one to run where the driver is (`per_host` False), or one for each host, to run there.
    A launcher gets what every rank runs: `PYTHON -P -m vitscale.worker FOLDER`."""
    run_folder: Path
    """The run's folder, shared by all hosts."""
    hosts: tuple[Host, ...] = ()
    """One host for each node of the world, in order of ranks; empty: the machine on which the commands are run.
    A launcher that orders them otherwise returns them in its order."""
    master_port: int = 29500
    """A port on the first host, for launchers that need one; free as far as the driver can see."""
    interface: str | None = None
    """Network interface through which ranks communicate."""
    gpus_per_node: int = 0
    """GPUs that the ranks of one node compute on, one each; 0: they compute on CPUs."""
    per_host: bool = False
    files: tuple[tuple[str, str], ...] = ()
    """Files that the commands read: (name in the run's folder, text)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the commands themselves need; the ranks' are in the run's launch file."""
    drop_variables: tuple[str, ...] = ()
    """Prefixes of variables that the commands must not see."""
    kill_at_once: bool = False
    """Whether to send SIGKILL without SIGTERM first, because what the commands do on SIGTERM affects other runs."""
    from_prepared: bool = False
    """Whether a process that has imported what ranks need may run the command (`vitscale.worker.prepared`)."""
    token: str = ""
    """Identifies this run: every process of the run carries the token in its environment."""
    cwd: Path = field(default_factory=Path.cwd)

    @property
    def rank_command(self) -> tuple[str, ...]:
        """The command of every rank. It is only there until a launcher has changed the commands."""
        return self.commands[0]

    @property
    def log(self) -> Path:
        """File for what all commands print."""
        return self.run_folder / "log.txt"


class Launcher(Protocol):
    """Turns a world (a number of ranks on a number of nodes) into the commands that start its ranks."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return `spawn` with the exact argvs that start all ranks, and what these need. No shell is involved."""

    def unavailable(self) -> str | None:
        """Return why the launcher cannot be used on this machine, and what to do instead; None where it can."""
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Return why the launcher cannot start this world on these hosts, and what to do instead; None where it can."""
        return hosts_refusal(world, hosts)


def hosts_refusal(world: World, hosts: Sequence[Host]) -> str | None:
    """Return why a world cannot start on these hosts, and what to do; None where it can.

    A world needs a host for each of its nodes, by a name that all of them understand alike.
    """
    if world.nodes == 1 and not hosts:
        return None
    if len(hosts) != world.nodes:
        return (
            f"{world.nodes} nodes need {world.nodes} hosts, and {len(hosts) or 'none'} are named; "
            "name them with launch.hostfile = 'FILE' (or --hostfile FILE), or run inside a job of a batch system"
        )
    loopback_names = [host.name for host in hosts if host.name.startswith(_LOOPBACK_PREFIXES)]
    if world.nodes > 1 and loopback_names:
        return (
            f"'{loopback_names[0]}' is another machine on each of {world.nodes} hosts; "
            "name it in the hostfile as the other hosts reach it"
        )
    return None


def hostfile(world: World, names: Sequence[str]) -> str:
    """Return the text of a hostfile for DeepSpeed and Open MPI: lines `NAME slots=4`, with as many slots as ranks."""
    return "".join(f"{name} slots={world.ranks_per_node}\n" for name in names)


def this_machine_first(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts with this machine, if it is among them, before the others, which keep their order."""
    return tuple(sorted(hosts, key=lambda host: not is_this_machine(host.name)))
