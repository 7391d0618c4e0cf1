"""The runner: from a study file to finished runs in a results folder."""

from vitscale.runner.driver import Options, run
from vitscale.runner.one_run import Task
from vitscale.runner.planning import Plan, Report, plan
from vitscale.runner.todo import done_before

__all__ = ["Options", "Plan", "Report", "Task", "done_before", "plan", "run"]
