"""Takes in what a script without a Probe has left: a trainer_state.json and profiler traces in its run's own
`{output}`, and lines of a known training loop in its log (`train_logs`).

The state's epochs, or else the steps of those lines, replace the script's time as a whole, which includes its imports
and its end. Steps of traces are explained ones, beside that time: each includes the profiler's cost, so none is a timed
step. The run's log says what was used, and what was not and why. No link is followed: a script may leave any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vitscale.errors import RequestError, StoreError
from vitscale.importers import train_logs, trainer_state
from vitscale.importers.contents import ImportOptions, LogRun
from vitscale.importers.traces import RankTrace, explained, rank_trace
from vitscale.profiles.trace_json import is_trace
from vitscale.store import read_ranks, write_record
from vitscale.store.lines import RankLine, rank_files
from vitscale.trial.script import OUTPUT
from vitscale.trial.trial import Trial

_STATE, _LOG = "trainer_state.json", "log.txt"
_TRACE = re.compile(r".*\.json(\.gz)?", re.IGNORECASE)
_MOST_FOLDERS = 1000
"""Folders to look into. A Trainer keeps its state in the folder that it was given, and in its checkpoints' folders."""
_MOST_FILES = 10_000
_MOST_TRACE_BYTES = 1 << 30
"""Size of all traces together, as stored: half a minute of reading before the next run begins."""
_MOST_NOTES = 20


def take_in(folder: Path, trial: Trial) -> None:
    """Puts what the script left into the ranks' records; they stay as they are where nothing can be used.

    Args:
        folder: folder of a run whose ranks have ended, and which has no outcome yet.
        trial: what it ran.

    Raises:
        OSError: a record cannot be written.
    """
    told = read_ranks(folder)
    if trial.train.script is None or not all(rank.ended and not rank.steps and len(rank.epochs) == 1 for rank in told):
        return  # a Probe told more than any file
    files = sorted(_files(folder / OUTPUT), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    states = [path for path in files if path.name == _STATE]
    used, notes = _take_in_state(folder, trial, states[0]) if states else (False, [])
    if not used:
        notes += _take_in_lines(folder, trial)
    notes += _take_in_traces(folder, trial, [path for path in files if path.name != _STATE])
    if notes:
        more = [f"{len(notes) - _MOST_NOTES} more files were not used"] if len(notes) > _MOST_NOTES else []
        with (folder / _LOG).open("a", encoding="utf-8", errors="replace") as log:
            log.writelines(f"vitscale: {note}\n" for note in [*notes[:_MOST_NOTES], *more])


def _files(output: Path) -> Iterator[Path]:
    """The JSON files below `output`, which may be a state or a trace; no links are followed."""
    if output.is_symlink():
        return
    count = 0
    for folder_count, (where, folders, files) in enumerate(os.walk(output)):
        folders.sort()
        for path in (Path(where) / name for name in sorted(files) if _TRACE.fullmatch(name)):
            if path.is_file() and not path.is_symlink():
                yield path
                count += 1
        if folder_count >= _MOST_FOLDERS or count >= _MOST_FILES:
            return


def _take_in_state(folder: Path, trial: Trial, path: Path) -> tuple[bool, list[str]]:
    """Takes in a trainer_state.json: (whether it was used, notes for the log)."""
    name = path.relative_to(folder)
    try:
        contents = trainer_state.read([path], _options(trial))
    except (RequestError, StoreError) as error:
        return False, [f"{name} was not used: {error}"]
    if not contents.runs or not contents.runs[0].ranks[0].epochs:
        return False, [f"{name} was not used: {'; '.join(contents.problems) or 'it has no whole epoch'}"]
    _rewrite(folder, lambda _, lines: _with_times(lines, contents.runs[0]))
    return True, [f"{name} stands for the time of the script as a whole"]


def _take_in_lines(folder: Path, trial: Trial) -> list[str]:
    """Takes in the lines that the script printed into the run's own log; returns notes for the log."""
    contents = train_logs.read([folder / _LOG], _options(trial))
    if not contents.runs:
        return []
    (run,) = contents.runs
    if run.setting.gpus != trial.world.size:
        return [f"{_LOG} was not used: its loop tells of {run.setting.gpus} ranks, and these are {trial.world.size}"]
    if all(step.warmup for step in run.ranks[0].steps):
        return [f"{_LOG} was not used: its loop tells of no step after its first ones"]
    _rewrite(folder, lambda _, lines: _with_times(lines, run))
    notes = [note for note in contents.notes if "(--" not in note]  # without the hints at options of `vitscale import`
    return [*notes, f"{_LOG}: these steps stand for the time of the script as a whole"]


def _options(trial: Trial) -> ImportOptions:
    return ImportOptions(gpus=trial.world.size, micro_batch=trial.train.micro_batch)


def _with_times(lines: Iterable[str], run: LogRun) -> Iterator[str]:
    """A rank's record with the whole run's steps or epochs in place of its epoch: each ends on all ranks at once."""
    samples = run.setting.train_samples
    for line in lines:
        if line.startswith('{"kind":"model"') and samples is not None:
            line = re.sub(r'"train_samples":null', f'"train_samples":{samples}', line, count=1)
        if not line.startswith('{"kind":"epoch"'):
            yield line
            continue
        yield from map(_text, (*run.ranks[0].steps, *run.ranks[0].epochs))


def _take_in_traces(folder: Path, trial: Trial, files: Sequence[Path]) -> list[str]:
    """Takes in the newest readable trace of each rank; returns notes for the log."""
    size, read_bytes = trial.world.size, 0
    traces: dict[int, RankTrace] = {}
    notes: list[str] = []
    for path in filter(is_trace, files):
        name = path.relative_to(folder)
        read_bytes += path.stat().st_size
        if len(traces) == size:
            notes.append(f"{name} was not used: each rank has a newer trace")
        elif read_bytes > _MOST_TRACE_BYTES:
            notes.append(f"{name} was not used: with newer ones it is more than {_MOST_TRACE_BYTES >> 30} GiB")
        else:
            try:
                trace = rank_trace(path)
            except (StoreError, MemoryError) as error:
                notes.append(f"{name} was not used: {error or 'it does not fit into memory'}")
                continue
            rank = 0 if trace.rank is None and size == 1 else trace.rank
            if rank is None:
                notes.append(f'{name} was not used: it does not tell its rank (name it "rank0.json")')
            elif not 0 <= rank < size or trace.world_size not in (None, size):
                notes.append(
                    f"{name} was not used: it is of rank {rank} of {trace.world_size or 'a world'}, not of {size}"
                )
            elif rank in traces:
                notes.append(f"{name} was not used: rank {rank} has a newer trace")
            else:
                traces[rank] = trace
                notes.append(f"{name} explains {len(trace.lines)} steps of rank {rank}, told {trace.found_by}")
    if traces:
        _rewrite(folder, lambda rank, lines: _with_trace(rank, lines, traces.get(rank), some=len(traces) < size))
    return notes


def _with_trace(rank: int, lines: Iterable[str], trace: RankTrace | None, *, some: bool) -> Iterator[str]:
    for line in lines:
        if trace is not None and line.startswith('{"kind":"end"'):
            yield from map(_text, (*explained(rank, trace, some=some), *trace.traffic))
        yield line


def _rewrite(folder: Path, change: Callable[[int, list[str]], Iterable[str]]) -> None:
    for rank, file in rank_files(folder).items():
        write_record(file, "".join(change(rank, file.read_text(encoding="utf-8").splitlines(keepends=True))))


def _text(line: RankLine) -> str:
    return f"{line.model_dump_json()}\n"
