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
from typing import NamedTuple, TypeVar

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
    read_outcomes,
    read_pack,
    read_packs,
)
from vitscale.store.records import READABLE_RECORDS, RankRecord, StepLine
from vitscale.store.results import LaterRank, Outcome, Results, Run, RunHeader, StudyRecord

Model = TypeVar("Model", bound=BaseModel)
RESTORE_PACK = "put the file back from a copy, or delete it, and `vitscale run` does its runs again"
RESTORE_RUN = "put the file back from a copy, or delete its run's folder, and `vitscale run` does the run again"
RESTORE_IMPORT = "put the file back from a copy, or import again into a new folder"
RESTORE_BUNDLE = "ask for a bundle of whole results, for this one was made without them"
_MOST_LETTERS_OF_REASON = 300
"""Letters that are shown of a reason in a bundle's manifest, which anybody may have written."""


class RunKey(NamedTuple):
    """A run of the plan, of which there may be several attempts."""

    trial_id: str
    repeat: int


class _FolderName(NamedTuple):
    """A run folder's name, taken apart: "0123456789ab-r2-a0" is the first attempt (0) at repeat 2."""

    key: RunKey
    attempt: int


def _parse_folder_name(name: str) -> _FolderName | None:
    """Take a run folder's name apart; None for any other name."""
    match = RUN_FOLDER.fullmatch(name)
    if match is None:
        return None
    return _FolderName(RunKey(match["trial"], int(match["repeat"])), int(match["attempt"]))


class EndedAttempt(NamedTuple):
    """An attempt that has an outcome."""

    folder: str
    """Its name in `runs/`."""
    outcome: Outcome


class _Attempt(NamedTuple):
    """An attempt at a run, ended or not."""

    number: int
    folder: str
    """Its name in `runs/`."""
    outcome: Outcome | None
    """None: it has none that can be read, or somebody has deleted its folder."""


def _unread_pack(pack: Path, error: StoreError) -> Unread:
    """Name a pack that cannot be read, and how to get it back."""
    return Unread(f"packs/{pack.name}", str(error).rstrip("."), RESTORE_PACK)


def _unread_run(folder: Path, error: StoreError | OSError) -> Unread:
    """Name what cannot be read of a run that has its own folder, `results/runs/NAME`, and how to get it back."""
    name = f"runs/{folder.name}"
    if isinstance(error, OSError):
        file = Path(error.filename or "").name
        reason = f"{name}/{file} cannot be read: {lines.first_reason(error)}"
    else:
        reason = str(error).rstrip(".").replace(str(folder), name)
    return Unread(name, reason, RESTORE_RUN)


def _read_json(path: Path, model: type[Model]) -> Model:
    """Read one record.

    Raises:
        StoreError: it cannot be read, is of a format that is not read, or is no such record.
    """
    try:
        text = read_record(path)
        refuse_unreadable(json.loads(text), READABLE_RECORDS, path)
        return model.model_validate_json(text)
    except (OSError, RecursionError, ValueError) as error:  # ValueError: not UTF-8, not JSON, not the model
        raise StoreError(f"{path} cannot be read: {lines.first_reason(error)}") from error


def read_study(results: Path) -> StudyRecord | None:
    """Return the study that `results` holds, or None where there is none yet.

    Raises:
        StoreError: study.json is there but cannot be read.
    """
    path = results / "study.json"
    try:
        is_there = path.exists()
    except OSError as error:  # a name too long, or a folder that may not be entered
        raise StoreError(f"{shown(str(results))} cannot be read: {error.strerror}") from None
    return _read_json(path, StudyRecord) if is_there else None


def folder_of(results: Path) -> Path:
    """Return the folder that a user named; a bundle (`store.bundles`) is unpacked into one.

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
    """Read one rank's lines. A line that is broken, or cut off by a crash, is named in `broken` and left out.

    Lines of steps are most of a file, and are parsed all at once. Where one of them is not as a rank writes it, each
    line of the file is parsed by itself.
    """
    step_lines = bytearray()
    unusual_steps = []  # steps whose lines do not begin as a rank begins them

    def refuse_and_note_unusual(_raw: bytes, line: lines.RankLine) -> None:
        lines.refuse_unwritable_numbers(line)
        if isinstance(line, StepLine):
            unusual_steps.append(line)

    with open_regular(path) as file:
        record = lines.parse_lines(path, _without_steps(file, step_lines), RankRecord, refuse_and_note_unusual)
    steps = lines.parse_steps(bytes(step_lines))
    if steps is not None and not unusual_steps:
        record = record.model_copy(update={"steps": steps})
    else:  # line by line, to name a broken one by its number, and to keep the order of all
        record = lines.read_lines(path, RankRecord, lambda _, line: lines.refuse_unwritable_numbers(line))
    if not record.broken:
        return record
    broken = tuple(f"{path.parent.name}/{line}" for line in record.broken)
    return record.model_copy(update={"broken": broken})


def _without_steps(file: Iterable[bytes], step_lines: bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield each line but those of steps and empty ones, with its number from 1; append lines of steps to `step_lines`.

    No line is kept beside these: a file of newlines alone would take a hundred times its size.
    """
    for number, raw in enumerate(file, start=1):
        if raw.startswith(lines.STEP_PREFIX) and raw.endswith(b"\n"):
            step_lines += raw
        elif raw != b"\n":
            yield number, raw


def read_ranks(folder: Path) -> tuple[RankRecord, ...]:
    """Return the records of all ranks of one run, in the order of ranks."""
    return tuple(map(read_rank, lines.rank_files(folder).values()))


class RunIndex:
    """The contents of `runs/` by trial and repeat, from the folders' names and outcomes only (no lines are read).

    Each attempt at a run has a folder in `runs/`. The files of finished runs move into packs, many runs into one pack;
    of a packed run only the log stays in its folder.
    """

    # By run.
    attempts: dict[RunKey, int]
    """Highest attempt number in use, finished or not."""
    finished: dict[RunKey, EndedAttempt]
    """The last attempt that has an outcome."""
    earlier: dict[RunKey, list[EndedAttempt]]
    """Earlier attempts with an outcome: their causes were passing, or were mended."""

    # By name of a run's folder.
    packs: dict[str, Path]
    """The pack of each packed run."""
    unpacked: dict[str, Outcome | None]
    """The outcome of each other run; None where it has none that can be read."""

    # What cannot be read.
    problems: list[str]
    """A sentence for each problem."""
    damaged: list[str]
    """Why packs cannot be read; also in `problems`."""
    unread: list[Unread]
    """Packs that cannot be read, and runs that have ended with an outcome that cannot be; also in `problems`."""

    def __init__(self, results: Path) -> None:
        """Read the index; a pack or an outcome that cannot be read is named in `problems`."""
        self._results = results
        self._seen_packs: set[Path] = set()
        self._packed_outcomes: dict[str, Outcome] = {}
        self.packs = {}
        self.unpacked = {}
        self.problems = []
        self.damaged = []
        self.unread = []
        folders = _names_in(results / "runs")
        # First the packs: the folders of packed runs need not be looked into.
        self._read_new_packs()
        unread_outcomes = self._read_unpacked_outcomes(folders)
        deleted = self.packs.keys() - folders  # a user who deletes a packed run's folder wants the run done again
        attempts = self._attempts_by_run(folders, deleted)
        self.attempts = {}
        self.finished = {}
        self.earlier = {}
        for run, attempts_at_run in attempts.items():
            self.attempts[run] = max(attempt.number for attempt in attempts_at_run)
            self._add_ended(run, attempts_at_run)
        self._report_unread_outcomes(unread_outcomes)

    def _read_new_packs(self) -> None:
        """Read the outcomes in packs that were not there at the last call, and move their runs out of `unpacked`."""
        for path in pack_files(self._results):
            if path in self._seen_packs:
                continue
            self._seen_packs.add(path)
            try:
                outcomes = read_outcomes(path)
            except StoreError as error:
                unread = _unread_pack(path, error)
                self.damaged.append(str(error))
                self.unread.append(unread)
                self.problems.append(f"{unread.reason}: its runs are left out")
                continue
            self._packed_outcomes |= outcomes
            self.packs |= dict.fromkeys(outcomes, path)
            for name in outcomes:
                self.unpacked.pop(name, None)

    def _read_unpacked_outcomes(self, folders: Iterable[str]) -> dict[str, Unread]:
        """Fill `unpacked` with the outcomes of the runs that no pack holds; return those that cannot be read."""
        unread_outcomes: dict[str, Unread] = {}
        for name in folders:
            if name in self.packs or not RUN_FOLDER.fullmatch(name):
                continue
            folder = self._results / "runs" / name
            try:
                self.unpacked[name] = _read_outcome(folder)
            except StoreError as error:
                self.unpacked[name] = None
                unread = _unread_run(folder, error)
                unread_outcomes[name] = unread
                self.problems.append(f"{unread.reason}: left out")
        if None in self.unpacked.values():
            self._read_new_packs()  # a run without an outcome may just have been packed
        return unread_outcomes

    def _attempts_by_run(self, folders: Iterable[str], deleted: Collection[str]) -> dict[RunKey, list[_Attempt]]:
        """Return all attempts at each run, in no order; name the folders in `problems` that are no run's.

        Args:
            folders: names of the folders in `runs/`.
            deleted: names of packed runs whose folders are no longer there. These attempts get no outcome, so that the
                runs count as not done; their numbers stay used.
        """
        attempts: dict[RunKey, list[_Attempt]] = {}
        for name in (*folders, *deleted):
            parsed = _parse_folder_name(name)
            if parsed is None:
                self.problems.append(f"runs/{name} is no run of vitscale: left out")
                continue
            outcome = None if name in deleted else self._outcome_of(name)
            attempts.setdefault(parsed.key, []).append(_Attempt(parsed.attempt, name, outcome))
        return attempts

    def _outcome_of(self, name: str) -> Outcome | None:
        """Return the outcome of the run in folder `name`, from its pack or from the folder; None where it has none."""
        if name in self._packed_outcomes:
            return self._packed_outcomes[name]
        return self.unpacked.get(name)

    def _add_ended(self, run: RunKey, attempts: Iterable[_Attempt]) -> None:
        """Put the attempts at a run that have an outcome into `finished`, the last one, and `earlier`, the others."""
        ended = [
            EndedAttempt(attempt.folder, attempt.outcome)
            for attempt in sorted(attempts, key=lambda attempt: attempt.number)
            if attempt.outcome is not None
        ]
        if ended:
            self.finished[run] = ended[-1]
            self.earlier[run] = ended[:-1]

    def _report_unread_outcomes(self, unread_outcomes: Mapping[str, Unread]) -> None:
        """Add outcomes that cannot be read to `unread`, unless another attempt at the run is finished."""
        for name, unread in unread_outcomes.items():
            parsed = _parse_folder_name(name)
            is_done_again = parsed is not None and parsed.key in self.finished
            if not is_done_again:
                self.unread.append(unread)

    def pack_of(self, name: str) -> Path | None:
        """Return the pack that holds the run in folder `name`; None where the folder still has the run's files.

        Another process may pack runs meanwhile: where the folder has lost its files, new packs are read first.
        """
        if name not in self.packs and not (self._results / "runs" / name / "outcome.json").exists():
            self._read_new_packs()
        return self.packs.get(name)


def _names_in(folder: Path) -> list[str]:
    """Return the sorted names of what lies in a folder; an empty list where it does not exist."""
    # A path for each takes ten times as long.
    return sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208


def _read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome in a run's folder; None where it has none.

    Raises:
        StoreError: it cannot be read.
    """
    path = folder / "outcome.json"
    return _read_json(path, Outcome) if path.exists() else None


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's search for reference cycles while records are read.

    Records form no cycles, and searching a million objects takes most of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_collection()
def load(
    results: Path, only: Collection[str] | None = None, known: Mapping[str, Run] = MappingProxyType({})
) -> Results:
    """Read a results folder back.

    Only runs of trials of the present study count; what is left out is named in `problems`, and what cannot be read in
    `unread` too.

    Args:
        results: the folder, or a bundle of it.
        only: ids of the trials whose runs are read; None: all.
        known: name of a run's folder -> the run, for runs that were read before. They are not read again.

    Raises:
        StoreError: the folder does not exist, cannot be read or holds no study.
    """
    folder = folder_of(results)
    study = read_study(folder)
    if study is None:
        message = f"{shown(str(results))} holds no results of vitscale (study.json is missing)"
        raise StoreError(message, next_step="Give the folder that `vitscale run STUDY.toml -o FOLDER` wrote to")
    return _Loading(folder, study, only, known).results()


class _Loading:
    """Reads one results folder: gathers its runs, and what of it cannot be read."""

    def __init__(
        self, folder: Path, study: StudyRecord, only: Collection[str] | None, known: Mapping[str, Run]
    ) -> None:
        """Read the index of the folder, and nothing of its runs yet; arguments as in `load`."""
        self._folder = folder
        self._study = study
        self._only = only
        self._index = RunIndex(folder)
        self._runs = dict(known)
        """Name of a run's folder -> the run; those in `known` that are not wanted are among them."""
        self._problems = list(self._index.problems)
        self._unread = [*_left_out_of_bundle(folder), *self._index.unread]

    def results(self) -> Results:
        """Read all runs that are wanted."""
        if self._study.imported is not None:
            self._problems += self._study.imported.problems
        names = self._read_unpacked_runs()
        self._read_packed_runs(names)
        self._drop_runs_of_other_headers(names)
        self._report_attempts()
        runs = tuple(self._runs[name] for name in names if name in self._runs)
        unread = tuple(self._with_remedy(item) for item in self._unread)
        return Results(study=self._study, runs=runs, problems=tuple(self._problems), unread=unread)

    def _with_remedy(self, unread: Unread) -> Unread:
        """Return `unread` with the remedy of this study: imported results are imported again, not run again."""
        if self._study.imported is None or unread.remedy == RESTORE_BUNDLE:
            return unread
        return unread._replace(remedy=RESTORE_IMPORT)

    def _is_wanted(self, trial_id: str) -> bool:
        return self._only is None or trial_id in self._only

    def _read_unpacked_runs(self) -> list[str]:
        """Read the wanted runs that no pack holds; return the folders of all wanted runs, packed ones too."""
        names = []
        for key in sorted(self._index.finished):
            ended = self._index.finished[key]
            name = ended.folder
            if key.trial_id not in self._study.trials:  # asked before `only`, which names trials of the study alone
                self._problems.append(f"runs/{name} belongs to an earlier form of this study: left out")
            elif self._is_wanted(key.trial_id):
                names.append(name)
                if name not in self._runs and name not in self._index.packs:
                    self._read_run(name, ended.outcome)
        return names

    def _read_run(self, name: str, outcome: Outcome) -> None:
        """Read a run from its own files. Where it has been packed meanwhile, leave it to its pack."""
        folder = self._folder / "runs" / name
        try:
            run = Run(header=_read_json(folder / "trial.json", RunHeader), outcome=outcome, ranks=read_ranks(folder))
        except (StoreError, OSError) as error:
            if self._index.pack_of(name) is None:
                unread = _unread_run(folder, error)
                self._unread.append(unread)
                self._problems.append(f"{unread.reason}: run left out")
            return
        if self._index.pack_of(name) is None:
            self._report_broken_lines(name, run)
            self._runs[name] = run

    def _report_broken_lines(self, name: str, run: Run) -> None:
        """Name the run's broken lines in `problems`, and those of a completed run in `unread` too."""
        broken: list[str] = []
        for record in run.ranks:
            broken += record.broken
        self._problems += [f"{line}: line left out" for line in broken]
        # A rank that fails may well end within a line.
        if broken and run.outcome.kind == "completed":
            self._unread.append(Unread(f"runs/{name}", f"runs/{broken[0]}", RESTORE_RUN))

    def _read_packed_runs(self, names: Sequence[str]) -> None:
        """Read the runs from packs that are not read yet. Args: names: the folders of all runs that are wanted."""
        not_read = [name for name in names if name not in self._runs]
        packs = sorted({self._index.packs[name] for name in not_read if name in self._index.packs})
        wanted = frozenset(names)
        for pack, content in zip(packs, read_packs(packs, wanted), strict=True):
            if isinstance(content, StoreError):
                unread = _unread_pack(pack, content)
                self._unread.append(unread)
                self._problems.append(f"{unread.reason}: its runs are left out")
                continue
            for name, run in content.items():
                if name in wanted and name not in self._runs:
                    self._runs[name] = run

    def _drop_runs_of_other_headers(self, names: Sequence[str]) -> None:
        """Leave out runs whose header is not that of the run that their folder is named after."""
        for name in names:
            run = self._runs.get(name)
            if run is None:
                continue
            header = run.header
            if not name.startswith(f"{header.trial_id}-r{header.repeat}-"):
                reason = f"runs/{name}/trial.json is of another run ({header.trial_id})"
                self._unread.append(Unread(f"runs/{name}", reason, RESTORE_RUN))
                self._problems.append(f"{reason}: run left out")
                del self._runs[name]

    def _report_attempts(self) -> None:
        """Name attempts that were tried again, and say how many runs were interrupted."""
        for key, attempts in self._index.earlier.items():
            if key.trial_id in self._study.trials and self._is_wanted(key.trial_id):
                self._problems += [
                    f"runs/{attempt.folder} is not used, for it was tried again: {attempt.outcome.reason}"
                    for attempt in attempts
                ]
        interrupted = set()
        for name in self._index.unpacked:
            parsed = _parse_folder_name(name)
            if parsed is None or parsed.key in self._index.finished:
                continue
            if parsed.key.trial_id in self._study.trials:
                interrupted.add(parsed.key)
        if interrupted:
            count = counted(len(interrupted), "run")
            self._problems.append(f"{count} interrupted; `vitscale run` does what is missing")


def _left_out_of_bundle(results: Path) -> list[Unread]:
    """Return the packs that a bundle lacks, since they could not be read when it was made.

    Its manifest names them. A pack that lies in the folder all the same is not returned.

    Args:
        results: the folder into which a bundle was unpacked; for any other folder the list is empty.
    """
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
    unread = []
    for file, reason in left_out.items():
        is_missing_pack = is_pack_file(file) and not (results / file).exists()
        if is_missing_pack:
            unread.append(Unread(file, printable(str(reason))[:_MOST_LETTERS_OF_REASON], RESTORE_BUNDLE))
    return unread


def without_lines(results: Path, run: Run) -> Run:
    """Return the run without its ranks' lines, which are read again from the folder `results` when they are used."""
    read_again = partial(_read_ranks_again, results, run.header.folder)
    ranks = tuple(LaterRank.without_lines(rank, read_again) for rank in run.ranks)
    return Run.model_construct(header=run.header, outcome=run.outcome, ranks=ranks)


def _read_ranks_again(results: Path, folder: str) -> Sequence[RankRecord]:
    """Read the ranks of a run from its folder, or from its pack where it is packed by now."""
    pack = _cached_index(results).pack_of(folder)
    if pack is None:
        return read_ranks(results / "runs" / folder)
    return _cached_pack(pack)[folder].ranks


_cached_index = lru_cache(maxsize=1)(RunIndex)
"""The index of the folder that was asked for last."""
_cached_pack = lru_cache(maxsize=1)(read_pack)
"""The runs of the pack that was asked for last."""


def pack_finished(results: Path) -> None:
    """Pack the finished runs of a folder whose lock is held, `PACK_RUNS` at a time; fewer stay unpacked.

    A run with a line that cannot be read is left as it is, and so are those of a folder that Slurm's jobs write to.

    Raises:
        OSError: the disk does not take it; nothing is lost.
    """
    finish_removing(results)
    unpacked = RunIndex(results).unpacked
    if (results / "jobs").is_dir():
        return
    runs: dict[str, Run] = {}
    for name, known_outcome in unpacked.items():
        if known_outcome is None:
            continue
        folder = results / "runs" / name
        try:
            header = _read_json(folder / "trial.json", RunHeader)
            outcome = _read_json(folder / "outcome.json", Outcome)
            run = Run(header=header, outcome=outcome, ranks=read_ranks(folder))
        except (StoreError, OSError):
            continue
        has_broken_line = any(record.broken for record in run.ranks)
        if header.folder == name and not has_broken_line and not folder.is_symlink():
            runs[name] = run
        if len(runs) == PACK_RUNS:
            pack_runs(results, runs)
            runs = {}
