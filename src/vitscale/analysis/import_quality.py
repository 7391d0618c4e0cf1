"""What a reader must know of results that were imported: where they come from, and what they do not tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vitscale.analysis.one_rank_logs import OneRankBounds, one_rank_bounds
from vitscale.analysis.trials import TrialResult
from vitscale.analysis.verdict import Verdict, count, note
from vitscale.store.records import Run, StudyRecord

_MOST_FILES = 3


def imported_results(study: StudyRecord) -> Iterable[Verdict]:
    """Which files the results are, and what had to be assumed."""
    if study.imported is None:
        return
    files = [one.name for one in study.imported.files]
    more = f" and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
    assumed = "".join(f"; {note}" for note in study.imported.notes)
    yield note(
        "imported",
        f"imported as {study.imported.log_format} from {', '.join(files[:_MOST_FILES])}{more}{assumed}",
        "What is assumed can be told: `vitscale import --help` names the options.",
    )


def steps_from_epochs(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    """Trials whose step times are shares of an epoch."""
    found = [trial for trial in measured if any(run.pace.source == "epochs" and run.step_seconds for run in trial.runs)]
    if found:
        yield note(
            "steps-from-epochs",
            f"step times from epochs: in {count(found)} a step is the epoch's time shared out over its steps, and "
            "holds all that lies between them",
            "Compare them with each other, not with steps that were timed one by one.",
            found,
        )


def some_ranks(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    """Trials of which the files tell some ranks alone."""
    partly = [trial for trial in measured if any(_partly(run) for run in trial.records)]
    if partly:
        first = partly[0].records[0].ranks_needed
        bounds = "".join(f"; {_told(found)}" for found in [_bounds(partly[0])] if found is not None)
        ranks = ", ".join(map(str, first[:4])) + (", ..." if len(first) > 4 else "")
        yield note(
            "some-ranks",
            f"not all ranks are told of: of {count(partly)} the files hold some ranks alone (rank {ranks} of "
            f"{partly[0].trial.world.size} in {partly[0].trial_id}); each step is theirs, and who was waited for is "
            f"not known{bounds}",
            "Import the logs of all ranks together, where there are any.",
            partly,
        )


def _bounds(trial: TrialResult) -> OneRankBounds | None:
    return one_rank_bounds(trial.records[0], trial.runs[0].steady_from or 0)


def _told(found: OneRankBounds) -> str:
    return (
        f"of the {1000 * found.exchange_seconds:.1f} ms that a step exchanges gradients there at most "
        f"{1000 * found.transfer_high:.1f} ms (the quickest step) are transfer, and at least "
        f"{1000 * found.wait_low:.1f} ms waiting"
    )


def _partly(run: Run) -> bool:
    imported = run.header.imported
    return imported is not None and not imported.of_the_run and len(imported.ranks) < run.header.trial.world.size
