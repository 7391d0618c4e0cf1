"""Reads a results folder strictly, and names what it leaves out and why."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel

from vitscale.base.files import open_regular, read_record
from vitscale.errors import StoreError, printable, shown
from vitscale.present.units import counted
from vitscale.present.unread import Unread
from vitscale.store import lines
from vitscale.store.formats import refuse_unreadable
from vitscale.store.packs import (
    PACK_RUNS,
    RUN_FOLDER,
    finish_removing,
    is_pack_file,
    pack_files,
    pack_runs,
    read_each,
    read_outcomes,
    read_pack,
)
from vitscale.store.records import READABLE_RECORDS, RankRecord, StepLine
from vitscale.store.results import LaterRank, Outcome, Results, Run, RunHeader, StudyRecord

Model = TypeVar("Model", bound=BaseModel)
RESTORE_PACK = "put the file back from a copy, or delete it, and `vitscale run` does its runs again"
RESTORE_RUN = "put the file back from a copy, or delete its run's folder, and `vitscale run` does the run again"
RESTORE_IMPORT = "put the file back from a copy, or import again into a new folder"
RESTORE_BUNDLE = "ask for a bundle of whole results, for this one was made without them"
_LONGEST_REASON = 300
"""Letters of a reason that a bundle, which may be anybody's, gives."""


def _unread_pack(pack: Path, error: StoreError) -> Unread:
    return Unread(f"packs/{pack.name}", str(error).rstrip("."), RESTORE_PACK)


def _unread_run(folder: Path, error: StoreError | OSError) -> Unread:
    """What cannot be read of a run that has its own folder, `results/runs/NAME`."""
    name = f"runs/{folder.name}"
    if isinstance(error, OSError):
        file = Path(error.filename or "").name
        reason = f"{name}/{file} cannot be read: {lines.first_reason(error)}"
    else:
        reason = str(error).rstrip(".").replace(str(folder), name)
    return Unread(name, reason, RESTORE_RUN)


def _read_json(path: Path, model: type[Model]) -> Model:
    try:
        text = read_record(path)
        refuse_unreadable(json.loads(text), READABLE_RECORDS, path)
        return model.model_validate_json(text)
    except (OSError, RecursionError, ValueError) as error:  # ValueError: not UTF-8, not JSON, not the model
        raise StoreError(f"{path} cannot be read: {lines.first_reason(error)}") from error


def read_study(results: Path) -> StudyRecord | None:
    """The study that `results` holds, or None where there is none yet.

    Raises:
        StoreError: study.json is there but cannot be read.
    """
    path = results / "study.json"
    try:
        held = path.exists()
    except OSError as error:  # a name too long, or a folder that may not be entered
        raise StoreError(f"{shown(str(results))} cannot be read: {error.strerror}") from None
    return _read_json(path, StudyRecord) if held else None


def folder_of(results: Path) -> Path:
    """The folder that a user named; a bundle (`store.bundles`) is unpacked into one.

    Raises:
        StoreError: a file that is no bundle.
    """
    try:
        if not results.is_file():
            return results
    except OSError:  # a name that is too long
        return results
    from vitscale.store.bundles import unpacked  # brings the schemas of all records, which no rank needs

    return unpacked(results)


def read_rank(path: Path) -> RankRecord:
    """Reads one rank's lines. A line that is broken, or cut off by a crash, is named and left out."""
    step_lines = bytearray()
    strays = []

    def refuse(_raw: bytes, line: lines.RankLine) -> None:
        lines.refuse_unwritable_numbers(line)
        if isinstance(line, StepLine):
            strays.append(line)

    with open_regular(path) as file:
        record = lines.parse_lines(path, _without_steps(file, step_lines), RankRecord, refuse)
    columns = lines.parse_steps(bytes(step_lines))
    if columns is None or strays:
        # A line is broken, or not as a rank writes it: parse each by itself, to name it by number and keep the order.
        record = lines.read_lines(path, RankRecord, lambda _, line: lines.refuse_unwritable_numbers(line))
    else:
        record = record.model_copy(update={"steps": columns})
    if not record.broken:
        return record
    return record.model_copy(update={"broken": tuple(f"{path.parent.name}/{line}" for line in record.broken)})


def _without_steps(file: Iterable[bytes], step_lines: bytearray) -> Iterator[tuple[int, bytes]]:
    """Yields each line but those of steps and empty ones, with its number from 1; lines of steps go to `step_lines`.

    No line is kept beside these: a file of newlines alone would take a hundred times its size.
    """
    for number, raw in enumerate(file, start=1):
        if raw.startswith(lines.STEP_PREFIX) and raw.endswith(b"\n"):
            step_lines += raw
        elif raw != b"\n":
            yield number, raw


def read_ranks(folder: Path) -> tuple[RankRecord, ...]:
    """The records of all ranks of one run, by rank."""
    return tuple(map(read_rank, lines.rank_files(folder).values()))


class RunIndex:
    """The contents of `runs/` by trial and repeat, from the folders' names and outcomes only (no lines are read)."""

    def __init__(self, results: Path) -> None:
        self.attempts: dict[tuple[str, int], int] = {}
        """Highest attempt number in use, finished or not."""
        self.finished: dict[tuple[str, int], tuple[str, Outcome]] = {}
        """The folder's name and the outcome of the last attempt that has one."""
        self.problems: list[str] = []
        self.earlier: dict[tuple[str, int], list[tuple[str, Outcome]]] = {}
        """Earlier attempts with an outcome: their causes were passing, or were mended."""
        self.packs: dict[str, Path] = {}
        """Name of a packed run's folder to its pack."""
        self.unpacked: dict[str, Outcome | None] = {}
        """Name of every other run folder to its outcome; None where it has none that can be read."""
        self.damaged: list[str] = []
        """Why packs cannot be read; also in `problems`."""
        self.unread: list[Unread] = []
        """Packs that cannot be read, and runs that have ended with an outcome that cannot be; also in `problems`."""
        self._unread_outcomes: dict[str, Unread] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._results = results
        self._seen: set[Path] = set()
        runs = results / "runs"
        names = sorted(os.listdir(runs)) if runs.is_dir() else []  # noqa: PTH208 - a path for each takes ten times as long
        self._read_each()
        for name in names:
            if name not in self.packs and RUN_FOLDER.fullmatch(name):
                self.unpacked[name] = self._own_outcome(runs / name)
        if None in self.unpacked.values():
            self._read_each()  # it may just have been packed
        deleted = self.packs.keys() - names  # these runs are left out, and their numbers stay used
        told: dict[tuple[str, int], list[tuple[int, str, Outcome]]] = {}
        for name in (*names, *deleted):
            match = RUN_FOLDER.fullmatch(name)
            if match is None:
                self.problems.append(f"runs/{name} is no run of vitscale: left out")
                continue
            key, attempt = (match["trial"], int(match["repeat"])), int(match["attempt"])
            self.attempts[key] = max(attempt, self.attempts.get(key, -1))
            outcome = self._outcomes.get(name) or self.unpacked.get(name)
            if outcome is not None and name not in deleted:
                told.setdefault(key, []).append((attempt, name, outcome))
        for key, attempts in told.items():
            *before, last = sorted(attempts, key=lambda each: each[0])
            self.finished[key] = last[1:]
            self.earlier[key] = [each[1:] for each in before]
        for name, unread in self._unread_outcomes.items():
            match = RUN_FOLDER.fullmatch(name)
            is_done_again = match is not None and (match["trial"], int(match["repeat"])) in self.finished
            if not is_done_again:
                self.unread.append(unread)

    def _read_each(self) -> None:
        for path in pack_files(self._results):
            if path in self._seen:
                continue
            self._seen.add(path)
            try:
                outcomes = read_outcomes(path)
            except StoreError as error:
                unread = _unread_pack(path, error)
                self.damaged.append(str(error))
                self.unread.append(unread)
                self.problems.append(f"{unread.reason}: its runs are left out")
                continue
            self._outcomes |= outcomes
            self.packs |= dict.fromkeys(outcomes, path)
            for name in outcomes:
                self.unpacked.pop(name, None)

    def _own_outcome(self, folder: Path) -> Outcome | None:
        if not (folder / "outcome.json").exists():
            return None
        try:
            return _read_json(folder / "outcome.json", Outcome)
        except StoreError as error:
            self._unread_outcomes[folder.name] = unread = _unread_run(folder, error)
            self.problems.append(f"{unread.reason}: left out")
            return None

    def pack_of(self, name: str) -> Path | None:
        """The pack that holds a run, even if packed since; None where its folder still has its files."""
        if name not in self.packs and not (self._results / "runs" / name / "outcome.json").exists():
            self._read_each()
        return self.packs.get(name)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the search for cycles: records form none, and searching a million objects takes most of the time."""
    held = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if held:
            gc.enable()


@without_collection()
def load(
    results: Path, only: Collection[str] | None = None, known: Mapping[str, Run] = MappingProxyType({})
) -> Results:
    """Reads a results folder back.

    Only runs of trials of the present study count; what is left out is named in `problems`, and what cannot be read in
    `unread` too.

    Args:
        results: the folder, or a bundle of it.
        only: the trials whose runs are wanted; None: all.
        known: runs by their folders that were read before, and are not read again.

    Raises:
        StoreError: the folder does not exist, cannot be read or holds no study.
    """
    named, results = results, folder_of(results)
    study = read_study(results)
    if study is None:
        what = f"{shown(str(named))} holds no results of vitscale (study.json is missing)"
        raise StoreError(what, next_step="Give the folder that `vitscale run STUDY.toml -o FOLDER` wrote to")
    index = RunIndex(results)
    problems = list(index.problems)
    unread = [*_left_out_of_bundle(results), *index.unread]
    if study.imported is not None:
        problems += study.imported.problems
    runs = dict(known)
    wanted: list[str] = []
    for (trial_id, _), (name, outcome) in sorted(index.finished.items(), key=lambda item: item[0]):
        if trial_id not in study.trials:  # asked before `only`, which names trials of the study alone
            problems.append(f"runs/{name} belongs to an earlier form of this study: left out")
            continue
        if only is not None and trial_id not in only:
            continue
        wanted.append(name)
        if name in runs or name in index.packs:
            continue
        folder = results / "runs" / name
        try:
            run = Run(header=_read_json(folder / "trial.json", RunHeader), outcome=outcome, ranks=read_ranks(folder))
        except (StoreError, OSError) as error:
            if index.pack_of(name) is None:
                unread.append(_unread_run(folder, error))
                problems.append(f"{unread[-1].reason}: run left out")
            continue
        if index.pack_of(name) is None:
            broken = [line for record in run.ranks for line in record.broken]
            problems += [f"{line}: line left out" for line in broken]
            if outcome.kind == "completed":  # a rank that fails may well end within a line
                unread += [Unread(f"runs/{name}", f"runs/{line}", RESTORE_RUN) for line in broken[:1]]
            runs[name] = run
    asked = frozenset(wanted)
    packs = sorted({index.packs[name] for name in wanted if name in index.packs and name not in runs})
    for pack, packed in zip(packs, read_each(packs, asked), strict=True):
        if isinstance(packed, StoreError):
            unread.append(_unread_pack(pack, packed))
            problems.append(f"{unread[-1].reason}: its runs are left out")
        else:
            runs |= {name: run for name, run in packed.items() if name in asked and name not in runs}
    for name in [name for name in wanted if name in runs]:
        header = runs[name].header
        if not name.startswith(f"{header.trial_id}-r{header.repeat}-"):
            reason = f"runs/{name}/trial.json is of another run ({header.trial_id})"
            unread.append(Unread(f"runs/{name}", reason, RESTORE_RUN))
            problems.append(f"{reason}: run left out")
            del runs[name]
    for key, tries in index.earlier.items():
        if key[0] in study.trials and (only is None or key[0] in only):
            problems += [
                f"runs/{name} is not used, for it was tried again: {outcome.reason}" for name, outcome in tries
            ]
    begun = {(match["trial"], int(match["repeat"])) for name in index.unpacked if (match := RUN_FOLDER.fullmatch(name))}
    interrupted = sum(1 for key in begun if key not in index.finished and key[0] in study.trials)
    if interrupted:
        problems.append(f"{counted(interrupted, 'run')} interrupted; `vitscale run` does what is missing")
    if study.imported is not None:
        unread = [one if one.remedy == RESTORE_BUNDLE else one._replace(remedy=RESTORE_IMPORT) for one in unread]
    read_runs = tuple(runs[name] for name in wanted if name in runs)
    return Results(study=study, runs=read_runs, problems=tuple(problems), unread=tuple(unread))


def _left_out_of_bundle(results: Path) -> list[Unread]:
    """The packs that a bundle's manifest names as unread when it was made, in the folder that it was unpacked into."""
    path = results / "manifest.json"
    if not path.exists():
        return []
    try:
        manifest = json.loads(read_record(path))
    except (OSError, RecursionError, ValueError):  # somebody else's file
        return []
    left_out = manifest.get("left_out") if isinstance(manifest, dict) else None
    if not isinstance(left_out, dict):
        return []
    return [
        Unread(file, printable(str(reason))[:_LONGEST_REASON], RESTORE_BUNDLE)
        for file, reason in left_out.items()
        if is_pack_file(file) and not (results / file).exists()
    ]


def without_lines(results: Path, run: Run) -> Run:
    """The run without its ranks' lines, which are read again from the folder `results` when they are asked for."""
    read = partial(_ranks_again, results, run.header.folder)
    ranks = tuple(LaterRank.without_lines(rank, read) for rank in run.ranks)
    return Run.model_construct(header=run.header, outcome=run.outcome, ranks=ranks)


def _ranks_again(results: Path, folder: str) -> Sequence[RankRecord]:
    pack = _index_again(results).pack_of(folder)
    return read_ranks(results / "runs" / folder) if pack is None else _pack_again(pack)[folder].ranks


_index_again = lru_cache(maxsize=1)(RunIndex)
_pack_again = lru_cache(maxsize=1)(read_pack)


def pack_finished(results: Path) -> None:
    """Packs the finished runs of a folder whose lock is held, `PACK_RUNS` at a time; fewer stay unpacked.

    A run with a line that cannot be read is left as it is, and so are those of a folder that Slurm's jobs write to.

    Raises:
        OSError: the disk does not take it; nothing is lost.
    """
    finish_removing(results)
    folders = [name for name, outcome in RunIndex(results).unpacked.items() if outcome is not None]
    if (results / "jobs").is_dir():
        return
    runs: dict[str, Run] = {}
    for name in folders:
        folder = results / "runs" / name
        try:
            header, outcome = _read_json(folder / "trial.json", RunHeader), _read_json(folder / "outcome.json", Outcome)
            run = Run(header=header, outcome=outcome, ranks=read_ranks(folder))
        except (StoreError, OSError):
            continue
        if header.folder == name and not folder.is_symlink() and not any(record.broken for record in run.ranks):
            runs[name] = run
        if len(runs) == PACK_RUNS:
            pack_runs(results, runs)
            runs = {}
