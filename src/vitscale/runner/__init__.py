"""The runner: from a study file to finished runs in a results folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitscale.runner.one_run import Task
from vitscale.runner.planning import Plan, Report, plan
from vitscale.runner.todo import done_before

if TYPE_CHECKING:
    from vitscale.runner.driver import Options, run

__all__ = ["Options", "Plan", "Report", "Task", "done_before", "plan", "run"]


def __getattr__(name: str) -> Any:
    """Imports the driver only when it is used: a plan need not wait for its progress and data modules."""
    if name not in ("Options", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vitscale.runner import driver

    return getattr(driver, name)
