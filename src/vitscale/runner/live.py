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
from typing import Any, Literal, NamedTuple, TypeVar

from vitscale.base.files import open_regular
from vitscale.errors import StoreError, shown
from vitscale.present.document import Bullets, Document, Paragraph
from vitscale.present.units import counted, listed, percent, seconds
from vitscale.processes import launch_file
from vitscale.runner.progress import describe
from vitscale.runner.todo import addable_runs
from vitscale.store import RunIndex, folder_of, read_study
from vitscale.store.lines import STEP_PREFIX, parse_steps
from vitscale.store.packs import RUN_FOLDER
from vitscale.store.reading import EndedAttempt, RunKey
from vitscale.store.records import ModelLine, RankRecord, ResourcesLine, StartLine
from vitscale.store.results import Outcome, StudyRecord
from vitscale.trial.trial import Trial, samples_used

_FRESH_SECONDS = 60.0
"""A run whose files changed this recently is alive: ranks give signs far more often, except while they compile."""
_END_BYTES = 256 << 10
"""Bytes read from each end of a rank's file, so that even a run of a million steps takes no longer to read."""
_LATEST_STEPS = 20
"""Steps from whose median the rate is worked out."""
_LARGEST_STEADY_TREND = 0.05
"""Largest relative change of step time that still counts as steady."""

_RecordType = TypeVar("_RecordType")

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
    study = _stored_study(folder, results)
    index = RunIndex(folder)
    runs = _study_runs(study, index)
    driver_pid = _lock_holder(folder / "lock")
    addable_count = _addable_count(folder, study, runs, driver_pid)
    unfinished = _unfinished_runs(folder, index, study, now_seconds)
    running = _running_runs(folder, unfinished, driver_pid)
    last = _last_outcome(study, runs.outcomes)
    last_seconds_ago = max(0.0, now_seconds - last.end_unix_seconds) if last is not None else None
    return StudyView(
        study=study.name,
        driver=_driver_state(driver_pid, running, has_work=bool(runs.remaining or addable_count)),
        driver_process=driver_pid,
        done=len(runs.planned) - len(runs.remaining),
        runs=len(runs.planned),
        may_be_added=addable_count,
        outcomes=dict(Counter(outcome.kind for outcome in runs.outcomes.values())),
        left_seconds=_remaining_seconds(runs.remaining, runs.outcomes),
        running=running,
        interrupted=len(unfinished) - len(running),
        last=last.words if last is not None else "",
        last_seconds_ago=last_seconds_ago,
        damaged=tuple(index.damaged),
    )


def _stored_study(folder: Path, results: Path) -> StudyRecord:
    """Return the study that is recorded in a folder.

    Args:
        folder: the folder to read.
        results: the path that the user gave, for the message.

    Raises:
        StoreError: the folder holds no study, or cannot be read.
    """
    study = read_study(folder)
    if study is None:
        raise StoreError(
            f"{shown(str(results))} holds no results of vitscale (study.json is missing)",
            next_step="Give the folder that `vitscale run STUDY.toml -o FOLDER` writes to",
        )
    return study


class _StudyRuns(NamedTuple):
    """The runs of a study: those that it plans, and those that have an outcome."""

    planned: list[RunKey]
    """All runs without those that `measure.target_ci` may add."""
    remaining: list[RunKey]
    """The planned runs that are still to be done, for the first time or again."""
    ended: dict[RunKey, EndedAttempt]
    """Runs with an outcome, those that `measure.target_ci` added among them."""

    @property
    def outcomes(self) -> dict[RunKey, Outcome]:
        """The outcomes of the runs that have ended."""
        return {run: attempt.outcome for run, attempt in self.ended.items()}


def _study_runs(study: StudyRecord, index: RunIndex) -> _StudyRuns:
    """Return the study's runs, with the outcomes that its folder has of them."""
    planned: list[RunKey] = []
    for trial_id in study.trials:
        planned += [RunKey(trial_id, repeat) for repeat in range(study.repeats)]
    ended = {run: attempt for run, attempt in index.finished.items() if run.trial_id in study.trials}
    remaining = [run for run in planned if run not in ended or _is_done_again(ended[run])]
    return _StudyRuns(planned, remaining, ended)


def _is_done_again(attempt: EndedAttempt) -> bool:
    """Whether the next `vitscale run` repeats this run: it failed for a cause outside the trial."""
    return attempt.outcome.external


def _addable_count(folder: Path, study: StudyRecord, runs: _StudyRuns, driver_pid: int | None) -> int:
    """Return how many runs `measure.target_ci` may still add at most.

    Trials that have enough runs are left out of the count only where all planned runs are done and no driver of this
    host runs: then the count alone shows whether work is left. To find these trials takes reading all steps of runs.
    """
    is_only_sign_of_work = not runs.remaining and driver_pid is None
    repeated_runs = frozenset(run for run, attempt in runs.ended.items() if _is_done_again(attempt))
    results = folder if is_only_sign_of_work else None
    return len(addable_runs(study, runs.ended, repeated_runs, results))


def _running_runs(folder: Path, unfinished: Sequence[RunningRun], driver_pid: int | None) -> tuple[RunningRun, ...]:
    """Return the unfinished runs that are alive, or whose driver is.

    Args:
        folder: folder of the results.
        unfinished: runs without an outcome; the one whose files changed last comes first.
        driver_pid: process id of the driver on this host; None: there is none.
    """
    fresh = tuple(run for run in unfinished if run.silent_seconds <= _FRESH_SECONDS)
    if driver_pid is not None:
        # A driver of this host may wait for a compiler, which is silent for minutes. Its run is the newest.
        return fresh or tuple(unfinished[:1])
    if fresh and _have_drivers_gone(folder, fresh):
        return ()  # their files are fresh, and their driver is not there any more
    return fresh


def _driver_state(driver_pid: int | None, running: Sequence[RunningRun], *, has_work: bool) -> Driver:
    """Return where the study's driver is.

    Args:
        driver_pid: process id of the driver on this host; None: there is none.
        running: the runs under way.
        has_work: whether a run is left to do, or may be added.
    """
    if driver_pid is not None:
        return "runs"
    if running:
        return "runs elsewhere"
    return "gone" if has_work else "none left to do"


class _LastOutcome(NamedTuple):
    """The outcome that came last, in words, and when its run ended."""

    words: str
    end_unix_seconds: float


def _last_outcome(study: StudyRecord, outcomes: Mapping[RunKey, Outcome]) -> _LastOutcome | None:
    """Return the outcome of the run that ended last; None before the first."""
    if not outcomes:
        return None
    end_by_run = {run: outcome.started_unix_seconds + outcome.wall_seconds for run, outcome in outcomes.items()}
    last_run = max(end_by_run, key=lambda run: end_by_run[run])
    outcome = outcomes[last_run]
    reason = f": {outcome.reason}" if outcome.reason else ""
    words = (
        f"{outcome.kind} in {seconds(outcome.wall_seconds)}: {describe(study.trials[last_run.trial_id])}, "
        f"repeat {last_run.repeat + 1}{reason}"
    )
    return _LastOutcome(words, end_by_run[last_run])


def _have_drivers_gone(folder: Path, running: Sequence[RunningRun]) -> bool:
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
        if launch is None or launch.host_id != own_host_id:
            return False
        is_alive = Path(f"/proc/{launch.driver_pid}").exists()
        if is_alive:
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


def _unfinished_runs(folder: Path, index: RunIndex, study: StudyRecord, now_seconds: float) -> list[RunningRun]:
    """Return the state of each run whose last attempt has no outcome; the one whose files changed last comes first."""
    unfinished: list[RunningRun] = []
    for folder_name, outcome in index.unpacked.items():
        match = RUN_FOLDER.fullmatch(folder_name)
        if outcome is not None or match is None or match["trial"] not in study.trials:
            continue
        run = RunKey(match["trial"], int(match["repeat"]))
        is_last_attempt = int(match["attempt"]) == index.attempts[run]
        if is_last_attempt:
            trial = study.trials[run.trial_id]
            unfinished.append(_attempt_state(folder / "runs" / folder_name, trial, run.repeat, now_seconds))
    return sorted(unfinished, key=lambda run: run.silent_seconds)


def _attempt_state(folder: Path, trial: Trial, repeat: int, now_seconds: float) -> RunningRun:
    """Return the state of one attempt, from the ends of rank 0's record and the times of all its files."""
    rank_lines = _read_ends(folder / "rank-0.jsonl")
    whole_lines = [raw for raw in rank_lines.end if raw.endswith(b"\n")]
    steps = parse_steps(b"".join(raw for raw in whole_lines if raw.startswith(STEP_PREFIX)))
    # Steps in the light window run without the profiler; those of warm-up do not count.
    light_steps = [line for line in steps or () if line.window == "light"]
    measured_seconds = [line.seconds for line in light_steps if not line.warmup]
    steps_per_second, trend = pace(measured_seconds)
    other_records = list(_other_records(rank_lines))
    start = _first_of_type(StartLine, other_records)
    model = _first_of_type(ModelLine, other_records)
    train_samples = model.train_samples if model is not None else None
    last_change = _last_change(folder)
    silent_seconds = max(0.0, now_seconds - last_change) if last_change is not None else 0.0
    return RunningRun(
        run=folder.name,
        trial=describe(trial),
        repeat=repeat,
        hosts=(start.environment.host,) if start is not None else (),
        step=steps[-1].step + 1 if steps else None,
        steps=_total_steps(trial, train_samples),
        steps_per_second=steps_per_second,
        trend=trend,
        gpu_utilisation=_last_gpu_utilisation(other_records),
        silent_seconds=silent_seconds,
    )


def _first_of_type(line_type: type[_RecordType], records: Sequence[Any]) -> _RecordType | None:
    """Return the first record of this type; None where there is none."""
    for record in records:
        if isinstance(record, line_type):
            return record
    return None


def _last_gpu_utilisation(records: Sequence[Any]) -> float | None:
    """Return the GPU utilisation, in [0, 1], that was recorded last; None where none was."""
    for record in reversed(records):
        if isinstance(record, ResourcesLine) and record.gpu is not None:
            return record.gpu.utilisation
    return None


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
        record = None if raw.startswith(STEP_PREFIX) else _parse_record(raw)
        if record is not None:
            yield record


class StepPace(NamedTuple):
    """The pace of a run's latest steps. None: too few steps."""

    steps_per_second: float | None
    trend: float | None
    """Share by which the latest steps take longer (above 0) or shorter than all before them."""


def pace(step_seconds: Sequence[float]) -> StepPace:
    """Return the pace of the last 20 steps, by their median, against the median of at least 20 steps before them."""
    latest = step_seconds[-_LATEST_STEPS:]
    earlier = step_seconds[:-_LATEST_STEPS]
    latest_median = statistics.median(latest) if latest else 0.0
    if latest_median <= 0:
        return StepPace(None, None)
    earlier_median = statistics.median(earlier) if len(earlier) >= _LATEST_STEPS else 0.0
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
    """Whole lines from both ends of a file, with their line feeds."""

    begin: list[bytes]
    """Lines at the begin; empty for a file of at most `_END_BYTES`, whose lines are all in `end`."""
    end: list[bytes]


def _read_ends(path: Path) -> _FileEnds:
    """Return the lines that lie whole in the first or in the last `_END_BYTES` of a regular file.

    Returns no lines where the path is no regular file, or cannot be read.
    """
    no_lines = _FileEnds(begin=[], end=[])
    if path.is_symlink() or not path.is_file():
        return no_lines
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            first_piece = file.read(_END_BYTES)
            if size <= _END_BYTES:
                return _FileEnds(begin=[], end=first_piece.splitlines(keepends=True))
            last_piece_start = max(_END_BYTES, size - _END_BYTES)  # so that the pieces share no byte
            file.seek(last_piece_start)
            last_piece = file.read(_END_BYTES)
    except OSError:
        return no_lines
    lines_at_begin = first_piece.splitlines(keepends=True)
    lines_at_end = last_piece.splitlines(keepends=True)
    # Each piece is cut inside a line: the first one in its last line, the last one in its first line.
    return _FileEnds(begin=lines_at_begin[:-1], end=lines_at_end[1:])


def _parse_record(raw: bytes) -> Any:
    """Return the record in a line; None where the line is broken or not yet complete."""
    try:
        return RankRecord.parse(raw)
    except (ValueError, RecursionError):
        return None


def _remaining_seconds(remaining: Sequence[RunKey], outcomes: Mapping[RunKey, Outcome]) -> float | None:
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
    """Return "steady", or "12 % slower than before" for a trend of 0.12."""
    if abs(trend) <= _LARGEST_STEADY_TREND:
        return "steady"
    direction = "slower" if trend > 0 else "faster"
    return f"{percent(abs(trend))} {direction} than before"
