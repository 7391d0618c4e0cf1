"""The runner: from a study file to finished runs in a results folder."""

from vitscale.runner.driver import Options, Report, run
from vitscale.runner.planning import Plan, Task, plan

__all__ = ["Options", "Plan", "Report", "Task", "plan", "run"]
