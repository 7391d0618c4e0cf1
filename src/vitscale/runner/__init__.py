"""The runner: from a study file to finished runs in a results folder."""

from vitscale.runner.driver import RunOptions, run
from vitscale.runner.one_run import RunTask
from vitscale.runner.planning import Plan, Report, plan
from vitscale.runner.todo import done_before

__all__ = ["Plan", "Report", "RunOptions", "RunTask", "done_before", "plan", "run"]
