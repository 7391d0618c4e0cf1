"""Launchers: how ranks are started. One short class per file; the table below is the whole list of our own."""

from __future__ import annotations

from vitscale.base.plugins import known
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
_OLD: dict[str, Launcher] = {"in-process": local.InProcess()}
"""Names that results and studies of earlier versions have."""


def find_launcher(name: str) -> Launcher:
    """The launcher of that name, whether or not it can be used here: from the table, else from an installed package.

    Raises:
        RequestError: there is none, or the package that offers it is broken.
    """
    if name in _OLD:
        return _OLD[name]
    next_step = meant_value("launch.launcher", name)
    return known("launcher", name, LAUNCHERS, "launch", "unavailable", "unfit", next_step=next_step)


def launcher_named(name: str, world: World, hosts: tuple[Host, ...] = ()) -> Launcher:
    """The launcher of that name, for this world on these hosts.

    Raises:
        RequestError: it is unknown, not available here, or cannot start this many ranks on these hosts.
    """
    launcher = find_launcher(name)
    reason = launcher.unavailable() or launcher.unfit(world, hosts)
    if reason is not None:
        raise RequestError(f"launch.launcher = '{name}' cannot be used: {reason}")
    return launcher


__all__ = ["LAUNCHERS", "LOCAL", "Launcher", "Spawn", "find_launcher", "launcher_named"]
