"""The outcomes of runs whose job has ended without giving them one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from vitscale.runner.batch_file import BatchTask, run_state
from vitscale.runner.classify import log_tail
from vitscale.runner.one_run import header_of
from vitscale.schedulers.slurm_causes import Cause
from vitscale.store import new_run_folder, write_outcome
from vitscale.store.results import Outcome, StudyRecord


def write_missing_outcomes(
    results: Path, study: StudyRecord, retries: int, tasks: Iterable[BatchTask], cause: Cause
) -> None:
    """Gives each run without an outcome the cause for one: the run that was under way, and those that never began.

    The next `vitscale run` does them again. Runs of trials that the study no longer has are passed over.
    """
    for task in tasks:
        state = run_state(results, task, retries)
        if state.outcome is not None or task.trial_id not in study.trials:
            continue
        folder = state.folder
        if not folder.exists():
            attempt = int(folder.name.rpartition("-a")[2])
            folder = new_run_folder(results, header_of(study, task.task, attempt, (), ()))
        write_outcome(folder, _outcome(folder, cause))


def _outcome(folder: Path, cause: Cause) -> Outcome:
    """Its time is that from the first to the last sign of life in the folder."""
    touched = [path.stat().st_mtime for path in folder.iterdir()]
    began = min(touched, default=time.time())
    return Outcome(
        kind=cause.kind,
        reason=cause.reason,
        detail=log_tail(folder / "log.txt"),
        host=cause.host,
        external=True,
        started_unix_seconds=began,
        wall_seconds=max(touched, default=began) - began,
    )
