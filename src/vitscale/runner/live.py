"""A study's current state, read from its folder alone.

No lock is taken and nothing is written: a driver that runs, or just begins, notices nothing.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vitscale.base.files import open_regular
from vitscale.errors import StoreError, shown
from vitscale.present.document import Bullets, Document, Paragraph
from vitscale.present.units import counted, listed, percent, seconds
from vitscale.processes import launch_file
from vitscale.runner.progress import describe
from vitscale.runner.todo import may_be_added
from vitscale.store import RunIndex, folder_of, read_study
from vitscale.store.lines import STEP_PREFIX, parse_steps
from vitscale.store.packs import RUN_FOLDER
from vitscale.store.records import ModelLine, RankRecord, ResourcesLine, StartLine
from vitscale.store.results import StudyRecord
from vitscale.trial.trial import Trial, samples_used

_FRESH_SECONDS = 60.0
"""A run whose files changed this recently is alive: ranks give signs far more often, except while they compile."""
_PIECE_BYTES = 256 << 10
"""Bytes read from each end of a rank's file, so that even a run of a million steps takes no longer to read."""
_RATE_STEPS = 20
_STEADY = 0.05
"""Largest relative change of step time that still counts as steady."""

Driver = Literal["runs", "runs elsewhere", "gone", "none left to do"]


@dataclass(frozen=True)
class RunningRun:
    """A run without an outcome that is alive, or whose driver is. None: not recorded yet."""

    run: str
    """Its folder."""
    trial: str
    repeat: int
    hosts: tuple[str, ...]
    step: int | None
    """Optimizer steps that rank 0 has done."""
    steps: int | None
    """Optimizer steps of the whole run."""
    steps_per_second: float | None
    """Rate from the median of the last 20 steps that count."""
    trend: float | None
    """Share by which those 20 steps take longer (above 0) or shorter than the steps before them."""
    gpu_utilisation: float | None
    """Utilisation of rank 0's GPU in the last epoch recorded, in [0, 1]."""
    silent_seconds: float
    """Seconds since any of its files changed."""


@dataclass(frozen=True)
class StudyView:
    """What runs, what is left, and what came last."""

    study: str
    driver: Driver
    driver_process: int | None
    done: int
    runs: int
    """Runs in all, without those that `measure.target_ci` may add."""
    may_be_added: int
    """Most runs that `measure.target_ci` may still add."""
    outcomes: dict[str, int]
    left_seconds: float | None
    """Seconds left, from the mean duration of each trial's runs, or of all; None before the first has ended."""
    running: tuple[RunningRun, ...]
    interrupted: int
    """Runs that began and have neither an outcome nor a sign of life."""
    last: str
    """The newest outcome, in words; empty before the first."""
    last_seconds_ago: float | None
    damaged: tuple[str, ...]
    """Packs that cannot be read, and why: `vitscale run` begins nothing until each is put back or deleted."""


def study_view(results: Path, now_seconds: float) -> StudyView:
    """Reads a study's state once.

    Args:
        results: the folder.
        now_seconds: Unix time.

    Raises:
        StoreError: it holds no study, or cannot be read.
    """
    folder = folder_of(results)
    study = read_study(folder)
    if study is None:
        what = f"{shown(str(results))} holds no results of vitscale (study.json is missing)"
        raise StoreError(what, next_step="Give the folder that `vitscale run STUDY.toml -o FOLDER` writes to")
    index = RunIndex(folder)
    wanted = {(trial, repeat) for trial in study.trials for repeat in range(study.repeats)}
    finished = {key: own for key, own in index.finished.items() if key[0] in study.trials}
    left = [key for key in wanted if key not in finished or finished[key][1].external]
    holder = _lock_holder(folder / "lock")
    again = {key for key, (_, outcome) in finished.items() if outcome.external}
    # Which trials' runs are enough is in their lines, which are read only where nothing else tells what is left.
    more = may_be_added(study, finished, again, folder if not left and holder is None else None)
    open_runs = sorted(_open_runs(folder, index, study, now_seconds), key=lambda run: run.silent_seconds)
    fresh = tuple(run for run in open_runs if run.silent_seconds <= _FRESH_SECONDS)
    # A driver of this host may wait for a compiler, which is silent for minutes. Its run is the newest.
    running = fresh or (tuple(open_runs[:1]) if holder is not None else ())
    if holder is None and running and _drivers_gone(folder, running):
        running = ()  # their files are fresh, and their driver is not there any more
    driver: Driver = (
        "runs" if holder is not None else "runs elsewhere" if running else "gone" if left or more else "none left to do"
    )
    last, ago = "", None
    if finished:
        ends = {key: outcome.started_unix_seconds + outcome.wall_seconds for key, (_, outcome) in finished.items()}
        (trial_id, repeat), ended = max(ends.items(), key=lambda each: each[1])
        outcome = finished[trial_id, repeat][1]
        why = f": {outcome.reason}" if outcome.reason else ""
        took = seconds(outcome.wall_seconds)
        last = f"{outcome.kind} in {took}: {describe(study.trials[trial_id])}, repeat {repeat + 1}{why}"
        ago = max(0.0, now_seconds - ended)
    return StudyView(
        study=study.name,
        driver=driver,
        driver_process=holder,
        done=len(wanted) - len(left),
        runs=len(wanted),
        may_be_added=len(more),
        outcomes=dict(Counter(outcome.kind for _, outcome in finished.values())),
        left_seconds=_left_seconds(left, finished),
        running=running,
        interrupted=len(open_runs) - len(running),
        last=last,
        last_seconds_ago=ago,
        damaged=tuple(index.damaged),
    )


def _drivers_gone(folder: Path, running: Sequence[RunningRun]) -> bool:
    """Whether drivers of this host began all these runs and are there no more. Jobs of a batch system hold no lock."""
    if (folder / "jobs").is_dir():
        return False
    try:
        began = [launch_file.read(folder / "runs" / run.run) for run in running]
    except (OSError, ValueError):
        return False
    here = launch_file.host_id()
    if not here:  # no /proc, so nothing is known of other processes
        return False
    return all(
        launch is not None and launch.host_id == here and not Path(f"/proc/{launch.driver_pid}").exists()
        for launch in began
    )


def _lock_holder(lock: Path) -> int | None:
    """The process of this host that holds a lock, from the kernel's list: trying the lock would take it."""
    try:
        state = lock.stat()
        held = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == held:
                return int(fields[4])
    except (OSError, ValueError):
        pass
    return None


def _open_runs(folder: Path, index: RunIndex, study: StudyRecord, now_seconds: float) -> Iterator[RunningRun]:
    """The last attempt of each run that has no outcome."""
    for name, outcome in index.unpacked.items():
        match = RUN_FOLDER.fullmatch(name)
        if outcome is not None or match is None or match["trial"] not in study.trials:
            continue
        repeat = int(match["repeat"])
        if int(match["attempt"]) == index.attempts[match["trial"], repeat]:
            yield _open_run(folder / "runs" / name, study.trials[match["trial"]], repeat, now_seconds)


def _open_run(folder: Path, trial: Trial, repeat: int, now_seconds: float) -> RunningRun:
    changed = [folder.stat().st_mtime] if folder.is_dir() else []
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            changed.append(path.lstat().st_mtime)
        except OSError:  # a draft that was renamed just now
            continue
    begin, end = _pieces(folder / "rank-0.jsonl")
    raw_steps = [raw for raw in end if raw.startswith(STEP_PREFIX) and raw.endswith(b"\n")]
    steps = parse_steps(b"".join(raw_steps))
    counted_steps = [line.seconds for line in steps or () if line.window == "light" and not line.warmup]
    others = [line for raw in (*begin, *end) if not raw.startswith(STEP_PREFIX) and (line := _parsed(raw)) is not None]
    start = next((line for line in others if isinstance(line, StartLine)), None)
    model = next((line for line in others if isinstance(line, ModelLine)), None)
    used = [line.gpu for line in others if isinstance(line, ResourcesLine) and line.gpu is not None]
    rate, trend = pace(counted_steps)
    return RunningRun(
        run=folder.name,
        trial=describe(trial),
        repeat=repeat,
        hosts=(start.environment.host,) if start is not None else (),
        step=steps[-1].step + 1 if steps else None,
        steps=_steps(trial, model.train_samples if model is not None else None),
        steps_per_second=rate,
        trend=trend,
        gpu_utilisation=used[-1].utilisation if used else None,
        silent_seconds=max(0.0, now_seconds - max(changed, default=now_seconds)),
    )


def pace(step_seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Steps per second from the median of the last 20, and the share by which these take longer than all before them.

    None where there are too few steps.
    """
    last, before = step_seconds[-_RATE_STEPS:], step_seconds[:-_RATE_STEPS]
    typical = statistics.median(last) if last else 0.0
    if typical <= 0:
        return None, None
    earlier = statistics.median(before) if len(before) >= _RATE_STEPS else 0.0
    return 1 / typical, typical / earlier - 1 if earlier > 0 else None


def _steps(trial: Trial, train_samples: int | None) -> int | None:
    if trial.window.steps is not None:
        return trial.window.steps + trial.window.warmup_steps
    if train_samples is None or not trial.train.epochs:
        return None
    return trial.steps_per_epoch(samples_used(train_samples, trial.data.fraction)) * trial.train.epochs


def _pieces(path: Path) -> tuple[list[bytes], list[bytes]]:
    """The whole lines at the beginning and at the end of a file; a short file's are all in the second list."""
    if path.is_symlink() or not path.is_file():
        return [], []
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            first = file.read(_PIECE_BYTES)
            if size <= _PIECE_BYTES:
                return [], first.splitlines(keepends=True)
            file.seek(max(_PIECE_BYTES, size - _PIECE_BYTES))
            return first.splitlines(keepends=True)[:-1], file.read(_PIECE_BYTES).splitlines(keepends=True)[1:]
    except OSError:
        return [], []


def _parsed(raw: bytes) -> Any:
    """The record in a line; None where the line is broken or not yet complete."""
    try:
        return RankRecord.parse(raw)
    except (ValueError, RecursionError):
        return None


def _left_seconds(left: Sequence[tuple[str, int]], finished: Any) -> float | None:
    took: dict[str, list[float]] = {}
    for (trial, _), (_, outcome) in finished.items():
        if outcome.kind != "skipped":
            took.setdefault(trial, []).append(outcome.wall_seconds)
    if not took or not left:
        return None if left else 0.0
    overall = statistics.fmean(value for own in took.values() for value in own)
    return sum(statistics.fmean(took[trial]) if trial in took else overall for trial, _ in left)


def view_fields(view: StudyView) -> dict[str, Any]:
    """The view as JSON fields."""
    return asdict(view)


def view_document(view: StudyView, results: Path) -> Document:
    """The view as a document of a few lines."""
    others = ", ".join(f"{count} {kind}" for kind, count in sorted(view.outcomes.items()) if kind != "completed")
    head = f"{view.study}: {view.done} of {counted(view.runs, 'run')} done" + (f" ({others})" if others else "")
    if view.done < view.runs:
        left = "time left unknown yet" if view.left_seconds is None else f"about {seconds(view.left_seconds)} left"
        head += f"; {left}"
    if view.may_be_added:
        head += f"; up to {counted(view.may_be_added, 'more run')} may be added (measure.target_ci)"
    drivers = {
        "runs": f"Driver: process {view.driver_process} of this host.",
        "runs elsewhere": "Driver: on another host, or a batch job.",
        "gone": f"The driver is gone: no process of this host holds {results}, and no run gives a sign."
        + " The same vitscale run goes on." * (not view.damaged),
        "none left to do": "Nothing is left to do.",
    }
    told = [_running(run) for run in view.running]
    told += [f"put it back from a copy, or delete it to do its runs again: {damaged}" for damaged in view.damaged]
    if view.interrupted and not view.damaged:  # a pack may hold them, finished
        told.append(f"{counted(view.interrupted, 'run')} interrupted, to be done again")
    if view.last:
        told.append(f"last, {seconds(view.last_seconds_ago)} ago: {view.last}")
    tone: Any = "bad" if view.driver == "gone" else ""
    return Document("", (Paragraph(head), Paragraph(drivers[view.driver], tone), Bullets(tuple(told))))


def _running(run: RunningRun) -> str:
    where = f" on {listed(run.hosts)}" if run.hosts else ""
    parts = [f"{run.trial}, repeat {run.repeat + 1}{where}: "]
    if run.step is None:
        parts.append("starting")
    else:
        parts.append(f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else ""))
    if run.steps_per_second is not None:
        parts.append(f", {run.steps_per_second:.3g} steps/s")
    if run.trend is not None:
        direction = "slower" if run.trend > 0 else "faster"
        parts.append(
            ", steady" if abs(run.trend) <= _STEADY else f", {percent(abs(run.trend))} {direction} than before"
        )
    if run.gpu_utilisation is not None:
        parts.append(f", GPU {percent(run.gpu_utilisation)}")
    if run.silent_seconds > _FRESH_SECONDS / 2:
        parts.append(f"; no sign for {seconds(run.silent_seconds)}")
    return "".join(parts)
