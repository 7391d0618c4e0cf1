"""Launchers: how ranks are started. One short class per file; the table below is the whole list."""

from __future__ import annotations

from vitscale.errors import RequestError, explain, unknown
from vitscale.launchers.base import Launcher
from vitscale.launchers.in_process import InProcess
from vitscale.launchers.torchrun import Torchrun
from vitscale.trial import Trial

LAUNCHERS: dict[str, Launcher] = {"in-process": InProcess(), "torchrun": Torchrun()}


def launcher_for(trial: Trial) -> Launcher:
    """The trial's launcher.

    Raises:
        RequestError: it is unknown, not available here, or cannot start this many ranks.
    """
    if trial.launcher not in LAUNCHERS:
        raise unknown("launcher", trial.launcher, LAUNCHERS)
    launcher = LAUNCHERS[trial.launcher]
    reason = launcher.unavailable() or launcher.unfit(trial.world)
    if reason is not None:
        raise RequestError(explain(f"launch.launcher = '{trial.launcher}' cannot be used: {reason}"))
    return launcher


__all__ = ["LAUNCHERS", "Launcher", "launcher_for"]
