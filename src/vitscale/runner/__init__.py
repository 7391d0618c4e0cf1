"""The runner: from a study file to finished runs in a results folder."""

from vitscale.runner.driver import RunOptions, run
from vitscale.runner.planning import Plan, Report, plan
from vitscale.runner.todo import done_before
from vitscale.store.reading import RunKey

__all__ = ["Plan", "Report", "RunKey", "RunOptions", "done_before", "plan", "run"]
