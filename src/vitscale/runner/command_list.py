"""The exact commands or batch scripts of a study, as text: for the curious, and for those who start them by hand."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from vitscale.runner.planning import Plan, check_folder
from vitscale.runner.preview import commands_of
from vitscale.runner.todo import outstanding
from vitscale.schedulers import Submitter
from vitscale.store import RunIndex

_PLACEHOLDER = Path("RESULTS")


def command_list(plan: Plan, results: Path | None, *, retry_failed: bool = False, unfit: Collection[str] = ()) -> str:
    """One block for each trial: what it is as a comment, then its commands. Jobs of Slurm: their scripts.

    Args:
        plan: the study.
        results: where it would run, of which only what is not done yet is listed; None: all, under a placeholder.
        retry_failed: list what did not complete too.
        unfit: trials to leave out.

    Raises:
        StoreError: the folder holds something else.
    """
    tasks = list(plan.tasks)
    attempts: Mapping[tuple[str, int], int] = {}
    if results is not None:
        check_folder(results, plan.record, allow_version_change=True)
        index = RunIndex(results)
        attempts = index.attempts
        tasks = outstanding(plan, index, retry_failed=retry_failed)
    tasks = [task for task in tasks if task.trial_id not in unfit]
    if not tasks:
        left_out = ", or is left out" if unfit else ""
        return f"# Nothing to do: every run of this study has its outcome{left_out}.\n"
    where = results.absolute() if results is not None else _PLACEHOLDER
    if isinstance(plan.scheduler, Submitter):
        from vitscale.runner.batch_jobs import script_for

        return "\n".join(script_for(plan.in_folder(where), plan.scheduler, tasks))
    blocks = []
    for trial_id in dict.fromkeys(task.trial_id for task in tasks):
        trial = plan.record.trials[trial_id]
        world = trial.world
        repeats = [task.repeat for task in tasks if task.trial_id == trial_id]
        attempt = attempts.get((trial_id, repeats[0]), -1) + 1
        commands = commands_of(plan, trial, where / "runs" / f"{trial_id}-r{repeats[0]}-a{attempt}")
        head = f"# {trial_id}: {world.nodes} x {world.ranks_per_node} ranks, {len(repeats)} run(s)"
        blocks.append("\n".join([head, *(shlex.join(command) for command in commands)]) + "\n")
    return "\n".join(blocks)
