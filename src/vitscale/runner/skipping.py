"""Runs that are skipped because their trial will not fit in memory: recorded, and done when that is no longer asked."""

from __future__ import annotations

import time
from collections.abc import Mapping

from vitscale.runner.one_run import Setting, Task, header_of
from vitscale.store import RunIndex, new_run_folder, write_outcome
from vitscale.store.results import Outcome


def skip_unfit(
    setting: Setting,
    todo: list[Task],
    unfit: Mapping[str, str],
    index: RunIndex,
    outcomes: dict[tuple[str, int], Outcome],
) -> list[Task]:
    """Records each run of an unfit trial as skipped, once, and returns the others.

    Args:
        setting: of the study.
        todo: what is to be done.
        unfit: trials to skip -> why.
        index: of what the folder holds.
        outcomes: gets theirs.
    """
    kept = []
    for task in todo:
        if (reason := unfit.get(task.trial_id)) is None:
            kept.append(task)
            continue
        key = (task.trial_id, task.repeat)
        _, before = index.finished.get(key, (None, None))
        if before is None or not (before.kind == "skipped" and before.external):
            before = _skipped(reason)
            attempt = index.attempts.get(key, -1) + 1
            write_outcome(new_run_folder(setting.results, header_of(setting.record, task, attempt, (), ())), before)
        outcomes[key] = before
    return kept


def _skipped(reason: str) -> Outcome:
    """`external`: nothing of the trial itself failed, so that the next `vitscale run` does it."""
    return Outcome(kind="skipped", reason=reason, external=True, started_unix_seconds=time.time(), wall_seconds=0.0)
