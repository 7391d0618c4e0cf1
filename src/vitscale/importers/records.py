"""Writes imported runs as a results folder: first under a name beside it, then renamed as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import StoreError, shown
from vitscale.importers.contents import LogRank, LogRun
from vitscale.store import read_study
from vitscale.store.lines import RankLine
from vitscale.store.records import FORMAT, Device, EndLine, Environment, ModelLine, StartLine
from vitscale.store.results import Imported, Outcome, RunHeader, StudyRecord
from vitscale.trial.model_cost import parameters
from vitscale.trial.trial import Trial

_UNKNOWN_HOST = "unknown host"


@dataclass(frozen=True)
class TrialRun:
    """One run, with its trial and its number among the trial's repeats."""

    run: LogRun
    trial: Trial
    repeat: int
    train_samples: int | None

    @property
    def folder(self) -> str:
        """Its folder under runs/."""
        return f"{self.trial.identity()}-r{self.repeat}-a0"


def write(results: Path, study: StudyRecord, runs: Sequence[TrialRun]) -> bool:
    """Writes the folder; returns False, and writes nothing, where it holds this import already.

    Raises:
        StoreError: the folder holds something else, or cannot be written.
    """
    results = results.resolve()  # "." has no name of its own
    if _held(results, study, runs):
        return False
    draft = results.with_name(f".{results.name}.{os.getpid()}.import")
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for run in runs:
            _write_run(draft / "runs" / run.folder, run, study)
        (draft / "study.json").write_text(study.model_dump_json(indent=1), encoding="utf-8")
        os.sync()
        draft.replace(results)  # takes the place of an empty folder too
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(
            f"{shown(str(results))} cannot be written: {why}", next_step="Give another folder with -o"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _held(results: Path, study: StudyRecord, runs: Iterable[TrialRun]) -> bool:
    """Whether the folder holds this import completely.

    Raises:
        StoreError: it holds something else, or only a part.
    """
    try:
        there = results.is_symlink() or (results.exists() and (not results.is_dir() or any(results.iterdir())))
    except OSError as error:
        raise StoreError(f"{shown(str(results))} cannot be read: {error.strerror}") from None
    if not there:
        return False
    held = read_study(results) if results.is_dir() else None
    other = "Give another folder with -o, or remove this one"
    if held is None or held.imported is None:
        what = "results of another kind" if held is not None else "something else than results"
        raise StoreError(f"{shown(str(results))} exists already and holds {what}", next_step=other)
    if held != study:
        files = ", ".join(file.name for file in held.imported.files)
        raise StoreError(f"{shown(str(results))} holds another import already (of {shown(files)})", next_step=other)
    if not all((results / "runs" / run.folder / "outcome.json").is_file() for run in runs):
        raise StoreError(f"{shown(str(results))} holds a part of this import only", next_step=other)
    return True


def _write_run(folder: Path, trial_run: TrialRun, study: StudyRecord) -> None:
    folder.mkdir(parents=True)
    run, trial = trial_run.run, trial_run.trial
    log_format = study.imported.log_format if study.imported else ""
    header = RunHeader(
        trial_id=trial.identity(),
        repeat=trial_run.repeat,
        attempt=0,
        trial=trial,
        command=(),
        dataset_fingerprint=study.dataset_fingerprints[trial.identity()],
        imported=Imported(
            log_format=log_format,
            files=run.files,
            ranks=tuple(rank.rank for rank in run.ranks),
            of_the_run=run.of_the_run,
        ),
    )
    (folder / "trial.json").write_text(header.model_dump_json(indent=1), encoding="utf-8")
    for rank in run.ranks:
        with (folder / f"rank-{rank.rank}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(f"{line.model_dump_json()}\n" for line in _lines(trial_run, rank))
    outcome = Outcome(
        kind="completed", reason="", started_unix_seconds=run.started_unix_seconds, wall_seconds=_wall_seconds(run)
    )
    (folder / "outcome.json").write_text(outcome.model_dump_json(indent=1), encoding="utf-8")


def _lines(trial_run: TrialRun, rank: LogRank) -> Iterable[RankLine]:
    if rank.device is not None:
        yield StartLine(
            format=FORMAT,
            trial=trial_run.trial.identity(),
            rank=rank.rank,
            world_size=trial_run.trial.world.size,
            environment=_environment(trial_run.run, rank.host, rank.device),
        )
    yield ModelLine(
        parameters=parameters(trial_run.trial.model),
        gradient_dtype=None,
        synchronised_timing=trial_run.run.synchronised,
        dataset_fingerprint=fingerprint(trial_run.trial),
        train_samples=trial_run.train_samples,
        held_out_samples=None,
    )
    yield from rank.steps
    yield from rank.explained
    yield from rank.traffic
    yield from rank.epochs
    yield EndLine()


def _environment(run: LogRun, host: str | None, device: str) -> Environment:
    versions: Mapping[str, str | None] = run.versions
    return Environment(
        host=host or _UNKNOWN_HOST,
        device=Device(type=run.setting.device, name=device),
        cores_allowed=(),
        threads=None,
        cpu_quota_cores=None,
        versions=dict(versions),
        backend=None,
        settings={},
        git_revision=None,
    )


def fingerprint(trial: Trial) -> str:
    """Stands in for the fingerprint of a dataset of which only the name is known."""
    return f"imported: {trial.data.name}"


def _wall_seconds(run: LogRun) -> float:
    """Wall seconds of the rank with the most, as far as they are told."""
    return max(
        max(sum(line.seconds for line in rank.epochs), sum(line.seconds for line in rank.steps)) for rank in run.ranks
    )
