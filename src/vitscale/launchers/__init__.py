"""Launchers: how ranks are started. One short class per file; `LAUNCHERS` lists all of vitscale's own."""

from __future__ import annotations

from vitscale.base.plugins import answer, known
from vitscale.errors import RequestError
from vitscale.launchers import deepspeed, local, mpirun, srun, torchrun
from vitscale.launchers.base import Launcher, Spawn
from vitscale.machine.hosts import Host
from vitscale.trial.hints import meant_value
from vitscale.trial.trial import World

LOCAL = "local"
LAUNCHERS: dict[str, Launcher] = {
    LOCAL: local.Local(),
    "torchrun": torchrun.Torchrun(),
    "deepspeed": deepspeed.DeepSpeed(),
    "mpirun": mpirun.Mpirun(),
    "srun": srun.Srun(),
}


def find_launcher(name: str) -> Launcher:
    """Return the launcher called `name`, a built-in one or an installed package's, whether or not it can be used here.

    Raises:
        RequestError: there is none, or the package that offers it is broken.
    """
    next_step = meant_value("launch.launcher", name)
    return known("launcher", name, LAUNCHERS, "launch", "unavailable", "unfit", next_step=next_step)


def usable_launcher(name: str, world: World, hosts: tuple[Host, ...] = ()) -> Launcher:
    """Return the launcher called `name`, which can start this world (a number of ranks) on these hosts.

    Raises:
        RequestError: it is unknown, not available here, or cannot start this many ranks on these hosts.
    """
    launcher = find_launcher(name)
    reason = answer(
        "launcher", name, LAUNCHERS, lambda: launcher.unavailable() or launcher.unfit(world, hosts), str, type(None)
    )
    if reason is not None:
        raise RequestError(f"launch.launcher = '{name}' cannot be used: {reason}")
    return launcher


def with_launch_commands(name: str, launcher: Launcher, world: World, spawn: Spawn) -> Spawn:
    """Return `spawn` with the commands that `launcher`, which is called `name`, starts all ranks by.

    Raises:
        RequestError: a package's launcher failed.
    """
    return answer("launcher", name, LAUNCHERS, lambda: launcher.launch(world, spawn), Spawn)


__all__ = ["LAUNCHERS", "LOCAL", "Launcher", "Spawn", "find_launcher", "usable_launcher", "with_launch_commands"]
