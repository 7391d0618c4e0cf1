"""Reads a results folder: strictly, naming what it leaves out and why."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from vitscale.errors import StoreError, shown
from vitscale.store.lines import RankLine
from vitscale.store.rank_log import first_reason, parse_lines, rank_files, read_lines
from vitscale.store.records import FORMAT, RankRecord, StepLine
from vitscale.store.results import Outcome, Results, Run, RunHeader, StudyRecord
from vitscale.store.steps import STEP_PREFIX, parse_steps

_RUN_FOLDER = re.compile(r"(?P<trial>[0-9a-f]{12})-r(?P<repeat>\d{1,6})-a(?P<attempt>\d{1,6})")

Model = TypeVar("Model", bound=BaseModel)


def _read_json(path: Path, model: type[Model]) -> Model:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise StoreError(
                f"{path} has record format {content['format']}, newer than this vitscale's {FORMAT}",
                next_step="Update vitscale to read it",
            )
        return model.model_validate_json(text)
    except (OSError, RecursionError, ValueError) as error:  # ValueError: not UTF-8, not JSON, not the model
        raise StoreError(f"{path} cannot be read: {first_reason(error)}") from error


def read_study(results: Path) -> StudyRecord | None:
    """The study that `results` holds, or None where there is none yet.

    Raises:
        StoreError: study.json is there but cannot be read.
    """
    path = results / "study.json"
    try:
        held = path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise StoreError(f"{shown(str(results))} cannot be read: {error.strerror}") from None
    return _read_json(path, StudyRecord) if held else None


def read_rank(path: Path) -> RankRecord:
    """Reads one rank's lines. A line that is broken, or cut off by a crash, is named and left out."""
    steps: list[bytes] = []
    others: list[tuple[int, bytes]] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.startswith(STEP_PREFIX) and raw.endswith(b"\n"):
                steps.append(raw)
            else:
                others.append((number, raw))
    columns = parse_steps(b"".join(steps))
    strays = []

    def refuse(raw: bytes, line: RankLine) -> None:
        _refuse_wild_numbers(raw, line)
        if isinstance(line, StepLine):
            strays.append(line)

    record = parse_lines(path, others, RankRecord, refuse, steps=columns or ())
    if columns is None or strays:
        # A line is broken, or not as a rank writes it: each by itself, so that its number is told, and in their order.
        record = read_lines(path, RankRecord, _refuse_wild_numbers)
    if not record.broken:
        return record
    return record.model_copy(update={"broken": tuple(f"{path.parent.name}/{line}" for line in record.broken)})


def _refuse_wild_numbers(_raw: bytes, line: RankLine) -> None:
    """Refuses what this program never writes: NaN and infinity, which are no JSON, and integers beyond 64 bits."""
    for key, value in line:
        if (isinstance(value, float) and not math.isfinite(value)) or (
            isinstance(value, int) and value.bit_length() > 63
        ):
            raise ValueError(f"{key}: {shown(value)} is no number of vitscale's")


def read_ranks(folder: Path) -> tuple[RankRecord, ...]:
    """The records of all ranks of one run, by rank."""
    return tuple(map(read_rank, rank_files(folder).values()))


class RunIndex:
    """What is in `runs/`, by trial and repeat, from the folders' names and outcomes alone (no rank files are read)."""

    def __init__(self, results: Path) -> None:
        self.attempts: dict[tuple[str, int], int] = {}
        """Highest attempt number in use, finished or not."""
        self.finished: dict[tuple[str, int], tuple[Path, Outcome]] = {}
        """The last attempt that has an outcome."""
        self.problems: list[str] = []
        self.earlier: dict[tuple[str, int], list[tuple[Path, Outcome]]] = {}
        """The attempts before the last one that have an outcome too: tries whose cause was passing, or mended."""
        runs = results / "runs"
        folders = sorted(runs.iterdir()) if runs.is_dir() else []
        told: dict[tuple[str, int], list[tuple[int, Path, Outcome]]] = {}
        for folder in folders:
            match = _RUN_FOLDER.fullmatch(folder.name)
            if match is None:
                self.problems.append(f"runs/{folder.name} is no run of vitscale: left out")
                continue
            key, attempt = (match["trial"], int(match["repeat"])), int(match["attempt"])
            self.attempts[key] = max(attempt, self.attempts.get(key, -1))
            if not (folder / "outcome.json").exists():
                continue
            try:
                outcome = _read_json(folder / "outcome.json", Outcome)
            except StoreError as error:
                self.problems.append(f"{error}: left out")
            else:
                told.setdefault(key, []).append((attempt, folder, outcome))
        for key, attempts in told.items():
            *before, last = sorted(attempts, key=lambda each: each[0])
            self.finished[key] = last[1:]
            self.earlier[key] = [each[1:] for each in before]


def load(results: Path, only: str | None = None) -> Results:
    """Reads a results folder back.

    Only runs of trials of the present study count; what is left out is named in `problems`.

    Args:
        results: the folder.
        only: the trial whose runs are wanted; None: of all.

    Raises:
        StoreError: the folder does not exist, cannot be read or holds no study.
    """
    study = read_study(results)
    if study is None:
        raise StoreError(
            f"{shown(str(results))} holds no results of vitscale (study.json is missing)",
            next_step="Give the folder that `vitscale run STUDY.toml -o FOLDER` wrote to",
        )
    index = RunIndex(results)
    problems = list(index.problems)
    if study.imported is not None:
        problems += study.imported.problems
    runs = []
    for (trial_id, repeat), (folder, outcome) in sorted(index.finished.items()):
        if only is not None and trial_id != only:
            continue
        if trial_id not in study.trials:
            problems.append(f"runs/{folder.name} belongs to an earlier form of this study: left out")
            continue
        try:
            header = _read_json(folder / "trial.json", RunHeader)
            ranks = read_ranks(folder)
        except (StoreError, OSError) as error:
            problems.append(f"{error}: run left out")
            continue
        if (header.trial_id, header.repeat) != (trial_id, repeat):
            problems.append(f"runs/{folder.name}/trial.json is of another run ({header.trial_id}): run left out")
            continue
        problems += [f"{line}: line left out" for record in ranks for line in record.broken]
        runs.append(Run(header=header, outcome=outcome, ranks=ranks))
    for key, tries in index.earlier.items():
        if key[0] in study.trials and only in (None, key[0]):
            problems += [
                f"runs/{folder.name} is not used, for it was tried again: {outcome.reason}" for folder, outcome in tries
            ]
    interrupted = sum(1 for key in index.attempts if key not in index.finished and key[0] in study.trials)
    if interrupted:
        problems.append(f"{interrupted} run(s) were interrupted; `vitscale run` does them again")
    return Results(study=study, runs=tuple(runs), problems=tuple(problems))
