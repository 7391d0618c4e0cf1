"""What every launcher asks of the hosts of a world, and how it writes them down for programs that read a hostfile."""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.machine.hosts import Host
from vitscale.trial.trial import World

_LOOPBACK = ("localhost", "127.", "::1")


def lacking(world: World, hosts: Sequence[Host]) -> str | None:
    """Why a world of several nodes cannot start on these hosts, with what to do; None where it can."""
    if world.nodes == 1 and not hosts:
        return None
    if len(hosts) != world.nodes:
        return (
            f"{world.nodes} nodes need {world.nodes} hosts, and {len(hosts) or 'none'} are named; "
            "name them with launch.hostfile = 'FILE' (or --hostfile FILE), or run inside a Slurm allocation"
        )
    unclear = [host.name for host in hosts if host.name.startswith(_LOOPBACK)]
    if world.nodes > 1 and unclear:
        return (
            f"'{unclear[0]}' is another machine on each of {world.nodes} hosts; "
            "name it in the hostfile as the other hosts reach it"
        )
    return None


def hostfile(world: World, names: Sequence[str]) -> str:
    """`NAME slots=4` lines, as DeepSpeed and Open MPI read them: as many slots as a node has ranks."""
    return "".join(f"{name} slots={world.ranks_per_node}\n" for name in names)
