"""A study's current state, read from its folder alone.

No lock is taken and nothing is written: a driver that runs, or just begins, notices nothing.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitscale.base.files import open_regular
from vitscale.errors import StoreError, shown
from vitscale.present.document import Bullets, Document, Paragraph
from vitscale.present.units import counted, listed, percent, seconds
from vitscale.processes import launch_file
from vitscale.runner.one_run import RunTask
from vitscale.runner.progress import describe
from vitscale.runner.todo import may_be_added
from vitscale.store import RunIndex, folder_of, read_study
from vitscale.store.lines import STEP_PREFIX, parse_steps
from vitscale.store.packs import RUN_FOLDER
from vitscale.store.records import ModelLine, RankRecord, ResourcesLine, StartLine
from vitscale.store.results import Outcome, StudyRecord
from vitscale.trial.trial import Trial, samples_used

_FRESH_SECONDS = 60.0
"""A run whose files changed this recently is alive: ranks give signs far more often, except while they compile."""
_PIECE_BYTES = 256 << 10
"""Bytes read from each end of a rank's file, so that even a run of a million steps takes no longer to read."""
_RATE_STEPS = 20
"""Steps from whose median the rate is worked out."""
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
    """The runs under way, the work that is left, and the outcome that came last."""

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
    """Read a study's state once.

    Args:
        results: the folder.
        now_seconds: Unix time.

    Raises:
        StoreError: it holds no study, or cannot be read.
    """
    folder = folder_of(results)
    study = read_study(folder)
    if study is None:
        raise StoreError(
            f"{shown(str(results))} holds no results of vitscale (study.json is missing)",
            next_step="Give the folder that `vitscale run STUDY.toml -o FOLDER` writes to",
        )
    index = RunIndex(folder)
    finished = {run: last for run, last in index.finished.items() if RunTask(*run).trial_id in study.trials}
    outcomes = {run: outcome for run, (_, outcome) in finished.items()}
    again = {run for run, outcome in outcomes.items() if outcome.external}
    runs = _planned_runs(study)
    remaining = [run for run in runs if run not in outcomes or run in again]
    lock_holder = _lock_holder(folder / "lock")
    # Which trials' runs are enough is in their lines, which are read only where nothing else tells what is left.
    needs_lines = not remaining and lock_holder is None
    addable = may_be_added(study, finished, again, results=folder if needs_lines else None)
    open_runs = sorted(_open_runs(folder, index, study, now_seconds), key=lambda run: run.silent_seconds)
    running = _running_runs(folder, open_runs, lock_holder)
    last = _last_outcome(study, outcomes)
    return StudyView(
        study=study.name,
        driver=_driver_state(lock_holder, running, has_work=bool(remaining or addable)),
        driver_process=lock_holder,
        done=len(runs) - len(remaining),
        runs=len(runs),
        may_be_added=len(addable),
        outcomes=dict(Counter(outcome.kind for outcome in outcomes.values())),
        left_seconds=_remaining_seconds(remaining, outcomes),
        running=running,
        interrupted=len(open_runs) - len(running),
        last=last.words if last is not None else "",
        last_seconds_ago=max(0.0, now_seconds - last.end_unix_seconds) if last is not None else None,
        damaged=tuple(index.damaged),
    )


def _planned_runs(study: StudyRecord) -> list[RunTask]:
    """Return the study's runs without those that `measure.target_ci` may add."""
    runs: list[RunTask] = []
    for trial_id in study.trials:
        runs += [RunTask(trial_id, repeat) for repeat in range(study.repeats)]
    return runs


def _running_runs(folder: Path, open_runs: Sequence[RunningRun], lock_holder: int | None) -> tuple[RunningRun, ...]:
    """Return the open runs that are alive, or whose driver is.

    Args:
        folder: of the results.
        open_runs: runs without an outcome, the newest sign of life first.
        lock_holder: process id of the driver on this host; None: there is none.
    """
    fresh = tuple(run for run in open_runs if run.silent_seconds <= _FRESH_SECONDS)
    if lock_holder is not None:
        # A driver of this host may wait for a compiler, which is silent for minutes. Its run is the newest.
        return fresh or tuple(open_runs[:1])
    if fresh and _drivers_gone(folder, fresh):
        return ()  # their files are fresh, and their driver is not there any more
    return fresh


def _driver_state(lock_holder: int | None, running: Sequence[RunningRun], *, has_work: bool) -> Driver:
    """Return where the study's driver is. Args: has_work: whether a run is left to do, or may be added."""
    if lock_holder is not None:
        return "runs"
    if running:
        return "runs elsewhere"
    return "gone" if has_work else "none left to do"


class _LastOutcome(NamedTuple):
    words: str
    end_unix_seconds: float


def _last_outcome(study: StudyRecord, outcomes: Mapping[tuple[str, int], Outcome]) -> _LastOutcome | None:
    """Return the outcome of the run that ended last; None before the first."""
    if not outcomes:
        return None
    end_by_run = {run: outcome.started_unix_seconds + outcome.wall_seconds for run, outcome in outcomes.items()}
    last_run = max(end_by_run, key=lambda run: end_by_run[run])
    trial_id, repeat = last_run
    outcome = outcomes[last_run]
    reason = f": {outcome.reason}" if outcome.reason else ""
    words = (
        f"{outcome.kind} in {seconds(outcome.wall_seconds)}: {describe(study.trials[trial_id])}, "
        f"repeat {repeat + 1}{reason}"
    )
    return _LastOutcome(words, end_by_run[last_run])


def _drivers_gone(folder: Path, running: Sequence[RunningRun]) -> bool:
    """Whether drivers of this host began all these runs and are there no more. Jobs of a batch system hold no lock."""
    if (folder / "jobs").is_dir():
        return False
    try:
        launches = [launch_file.read(folder / "runs" / run.run) for run in running]
    except (OSError, ValueError):
        return False
    own_host_id = launch_file.host_id()
    if not own_host_id:  # no /proc, so nothing is known of other processes
        return False
    for launch in launches:
        is_of_this_host = launch is not None and launch.host_id == own_host_id
        if launch is None or not is_of_this_host or Path(f"/proc/{launch.driver_pid}").exists():
            return False
    return True


def _lock_holder(lock: Path) -> int | None:
    """Return the process of this host that holds a lock, from the kernel's list: trying the lock would take it.

    A line of /proc/locks, as proc(5) has it: "1: FLOCK ADVISORY WRITE 4321 08:01:1234 0 EOF" (process, device:inode).
    """
    try:
        state = lock.stat()
        device_and_inode = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == device_and_inode:
                return int(fields[4])
    except (OSError, ValueError):
        pass
    return None


def _open_runs(folder: Path, index: RunIndex, study: StudyRecord, now_seconds: float) -> Iterator[RunningRun]:
    """Yield the last attempt of each run that has no outcome."""
    for name, outcome in index.unpacked.items():
        match = RUN_FOLDER.fullmatch(name)
        if outcome is not None or match is None or match["trial"] not in study.trials:
            continue
        repeat = int(match["repeat"])
        if int(match["attempt"]) == index.attempts[match["trial"], repeat]:
            yield _open_run(folder / "runs" / name, study.trials[match["trial"]], repeat, now_seconds)


def _open_run(folder: Path, trial: Trial, repeat: int, now_seconds: float) -> RunningRun:
    """Return the state of one attempt, from the ends of rank 0's record and the times of all its files."""
    last_change = _last_change(folder)
    rank_lines = _read_ends(folder / "rank-0.jsonl")
    raw_steps = [raw for raw in rank_lines.end if raw.startswith(STEP_PREFIX) and raw.endswith(b"\n")]
    steps = parse_steps(b"".join(raw_steps))
    measured_seconds = [line.seconds for line in steps or () if line.window == "light" and not line.warmup]
    start: StartLine | None = None
    model: ModelLine | None = None
    gpu_utilisation: float | None = None
    for record in _other_records(rank_lines):
        if isinstance(record, StartLine) and start is None:
            start = record
        if isinstance(record, ModelLine) and model is None:
            model = record
        if isinstance(record, ResourcesLine) and record.gpu is not None:
            gpu_utilisation = record.gpu.utilisation
    rate, trend = pace(measured_seconds)
    return RunningRun(
        run=folder.name,
        trial=describe(trial),
        repeat=repeat,
        hosts=(start.environment.host,) if start is not None else (),
        step=steps[-1].step + 1 if steps else None,
        steps=_total_steps(trial, model.train_samples if model is not None else None),
        steps_per_second=rate,
        trend=trend,
        gpu_utilisation=gpu_utilisation,
        silent_seconds=max(0.0, now_seconds - last_change) if last_change is not None else 0.0,
    )


def _last_change(folder: Path) -> float | None:
    """Return when the folder or a file in it was last changed, in Unix time; None where there is no folder."""
    if not folder.is_dir():
        return None
    last = folder.stat().st_mtime
    for path in folder.iterdir():
        try:
            last = max(last, path.lstat().st_mtime)
        except OSError:  # a draft that was renamed just now
            continue
    return last


def _other_records(rank_lines: _FileEnds) -> Iterator[Any]:
    """Yield the records in the lines that are no steps; broken and incomplete lines are passed over."""
    for raw in (*rank_lines.begin, *rank_lines.end):
        record = None if raw.startswith(STEP_PREFIX) else _parsed(raw)
        if record is not None:
            yield record


class StepPace(NamedTuple):
    """The pace of a run's latest steps. None: too few steps."""

    steps_per_second: float | None
    trend: float | None
    """Share by which the latest steps take longer (above 0) or shorter than all before them."""


def pace(step_seconds: Sequence[float]) -> StepPace:
    """Return the pace of the last 20 steps, by their median, against the median of at least 20 steps before them."""
    latest = step_seconds[-_RATE_STEPS:]
    earlier = step_seconds[:-_RATE_STEPS]
    latest_median = statistics.median(latest) if latest else 0.0
    if latest_median <= 0:
        return StepPace(None, None)
    earlier_median = statistics.median(earlier) if len(earlier) >= _RATE_STEPS else 0.0
    trend = latest_median / earlier_median - 1 if earlier_median > 0 else None
    return StepPace(1 / latest_median, trend)


def _total_steps(trial: Trial, train_samples: int | None) -> int | None:
    """Return the optimizer steps of a whole run; None where it does not say how many images it trains on."""
    if trial.window.steps is not None:
        return trial.window.steps + trial.window.warmup_steps
    if train_samples is None or not trial.train.epochs:
        return None
    return trial.steps_per_epoch(samples_used(train_samples, trial.data.fraction)) * trial.train.epochs


class _FileEnds(NamedTuple):
    """Whole lines at the begin and at the end of a file; a short file's are all in `end`."""

    begin: list[bytes]
    end: list[bytes]


def _read_ends(path: Path) -> _FileEnds:
    """Read `_PIECE_BYTES` from each end of a regular file; no lines where it is none, or cannot be read."""
    if path.is_symlink() or not path.is_file():
        return _FileEnds([], [])
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            begin = file.read(_PIECE_BYTES)
            if size <= _PIECE_BYTES:
                return _FileEnds([], begin.splitlines(keepends=True))
            file.seek(max(_PIECE_BYTES, size - _PIECE_BYTES))
            end = file.read(_PIECE_BYTES)
    except OSError:
        return _FileEnds([], [])
    # The last line of the first piece and the first of the last one are parts of lines.
    return _FileEnds(begin.splitlines(keepends=True)[:-1], end.splitlines(keepends=True)[1:])


def _parsed(raw: bytes) -> Any:
    """Return the record in a line; None where the line is broken or not yet complete."""
    try:
        return RankRecord.parse(raw)
    except (ValueError, RecursionError):
        return None


def _remaining_seconds(remaining: Sequence[RunTask], outcomes: Mapping[tuple[str, int], Outcome]) -> float | None:
    """Return how long the remaining runs will take, from the mean time of each trial's runs, or of all.

    None where no run has ended yet.
    """
    if not remaining:
        return 0.0
    times_by_trial: dict[str, list[float]] = {}
    for (trial_id, _), outcome in outcomes.items():
        if outcome.kind != "skipped":
            times_by_trial.setdefault(trial_id, []).append(outcome.wall_seconds)
    if not times_by_trial:
        return None
    mean_of_all = statistics.fmean(chain.from_iterable(times_by_trial.values()))
    mean_by_trial = {trial_id: statistics.fmean(times) for trial_id, times in times_by_trial.items()}
    return sum(mean_by_trial.get(run.trial_id, mean_of_all) for run in remaining)


def view_fields(view: StudyView) -> dict[str, Any]:
    """Return the view as JSON fields."""
    return asdict(view)


def view_document(view: StudyView, results: Path) -> Document:
    """Return the view as a document of a few lines."""
    bullets = [_running_words(run) for run in view.running]
    bullets += [f"put it back from a copy, or delete it to do its runs again: {damaged}" for damaged in view.damaged]
    if view.interrupted and not view.damaged:  # a pack may hold them, finished
        bullets.append(f"{counted(view.interrupted, 'run')} interrupted, to be done again")
    if view.last:
        bullets.append(f"last, {seconds(view.last_seconds_ago)} ago: {view.last}")
    tone: Any = "bad" if view.driver == "gone" else ""
    return Document(
        "", (Paragraph(_progress_words(view)), Paragraph(_driver_words(view, results), tone), Bullets(tuple(bullets)))
    )


def _progress_words(view: StudyView) -> str:
    """Return "example: 4 of 6 runs done (1 oom); about 40.0 s left"."""
    words = f"{view.study}: {view.done} of {counted(view.runs, 'run')} done"
    not_completed = [f"{count} {kind}" for kind, count in sorted(view.outcomes.items()) if kind != "completed"]
    if not_completed:
        words += f" ({', '.join(not_completed)})"
    if view.done < view.runs:
        time_left = "time left unknown yet" if view.left_seconds is None else f"about {seconds(view.left_seconds)} left"
        words += f"; {time_left}"
    if view.may_be_added:
        words += f"; up to {counted(view.may_be_added, 'more run')} may be added (measure.target_ci)"
    return words


def _driver_words(view: StudyView, results: Path) -> str:
    """Return a sentence on where the driver is."""
    match view.driver:
        case "runs":
            return f"Driver: process {view.driver_process} of this host."
        case "runs elsewhere":
            return "Driver: on another host, or a batch job."
        case "gone":
            sentence = f"The driver is gone: no process of this host holds {results}, and no run gives a sign."
            return sentence if view.damaged else f"{sentence} The same vitscale run goes on."
        case "none left to do":
            return "Nothing is left to do."


def _running_words(run: RunningRun) -> str:
    """Return "vit-ti16 ddp, 4 ranks, batch 8, repeat 1 on node1: step 41 of 96, 10 steps/s, steady"."""
    hosts = f" on {listed(run.hosts)}" if run.hosts else ""
    parts = [f"{run.trial}, repeat {run.repeat + 1}{hosts}: "]
    if run.step is None:
        parts.append("starting")
    else:
        total_steps = f" of {run.steps:,}" if run.steps else ""
        parts.append(f"step {run.step:,}{total_steps}")
    if run.steps_per_second is not None:
        parts.append(f", {run.steps_per_second:.3g} steps/s")
    if run.trend is not None:
        parts.append(f", {_trend_words(run.trend)}")
    if run.gpu_utilisation is not None:
        parts.append(f", GPU {percent(run.gpu_utilisation)}")
    if run.silent_seconds > _FRESH_SECONDS / 2:
        parts.append(f"; no sign for {seconds(run.silent_seconds)}")
    return "".join(parts)


def _trend_words(trend: float) -> str:
    if abs(trend) <= _STEADY:
        return "steady"
    direction = "slower" if trend > 0 else "faster"
    return f"{percent(abs(trend))} {direction} than before"
