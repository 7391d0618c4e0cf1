"""Checks of a cluster on disk: each rank's lines while it is measured, and whole checks to read back later.

FOLDER/ID.json          one check, written whole; FOLDER is RESULTS/checks, or the user's own folder of checks
FOLDER/.ID/             while it is measured: request.json, rank-K.jsonl
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.errors import StoreError, shown
from vitscale.store.check_records import FORMAT, CheckedRank, CheckRecord
from vitscale.store.rank_log import first_reason, rank_files, read_lines
from vitscale.store.writing import write_whole

_CHECK_FILE = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}\.json")
_LARGEST_BYTES = 256 << 20


@dataclass(frozen=True)
class Checks:
    """The checks of a folder, the newest first, and the files that were left out, with why."""

    records: tuple[CheckRecord, ...]
    problems: tuple[str, ...]


def check_folder(results: Path | None) -> Path:
    """Where checks lie: of a results folder, or the user's own (`$XDG_DATA_HOME`, else `~/.local/share`)."""
    if results is not None:
        return results / "checks"
    given = os.environ.get("XDG_DATA_HOME", "")
    # The XDG base directory specification: a relative path is to be ignored.
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "share"
    return base / "vitscale" / "checks"


def write_check(folder: Path, record: CheckRecord) -> Path:
    """Writes one check whole and returns its file.

    Raises:
        StoreError: the folder cannot be written.
    """
    path = folder / f"{record.id}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, record.model_dump_json(indent=1))
    except OSError as error:
        raise StoreError(
            f"the check cannot be written to {shown(str(folder))}: {error.strerror or error}",
            next_step="Give a folder you may write to with -o",
        ) from None
    return path


def read_check(path: Path) -> CheckRecord:
    """Reads one check back, strictly.

    Raises:
        StoreError: it cannot be read, is of a newer format, or not what this program writes.
    """
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"larger than {_LARGEST_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
        content = refuse_wild_numbers(json.loads(text))
        if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise StoreError(
                f"{path} has check format {content['format']}, newer than this vitscale's {FORMAT}",
                next_step="Update vitscale to read it",
            )
        return CheckRecord.model_validate_json(text)
    except (OSError, RecursionError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {first_reason(error)}") from error


def load_checks(folder: Path) -> Checks:
    """All checks of a folder (see `check_folder`); none where the folder is missing."""
    try:
        # Names begin with the time of the start.
        files = sorted((path for path in folder.iterdir() if _CHECK_FILE.fullmatch(path.name)), reverse=True)
    except OSError:
        files = []
    records: list[CheckRecord] = []
    problems: list[str] = []
    for path in files:
        try:
            records.append(read_check(path))
        except StoreError as error:
            problems.append(f"{error}: left out")
    return Checks(tuple(records), tuple(problems))


def latest(results: Path | None, hosts: tuple[str, ...] | None = None) -> CheckRecord | None:
    """The newest check of a results folder, else of the user's own folder; None where there is none that can be read.

    Args:
        results: the folder given with -o; None: the user's own folder of checks alone.
        hosts: only a check whose ranks ran on exactly these hosts, by the names they call themselves.
    """
    folders = [check_folder(results)] if results is None else [check_folder(results), check_folder(None)]
    for folder in folders:
        for record in load_checks(folder).records:
            if hosts is None or set(hosts) == {rank.facts.environment.host for rank in record.ranks if rank.facts}:
                return record
    return None


_LARGEST_NUMBER = 1e100
"""Sums and products of such numbers do not overflow."""


def read_checked_ranks(folder: Path, world_size: int) -> tuple[CheckedRank, ...]:
    """What all ranks of a check have written so far, by rank; lines that cannot be read are named in `broken`."""
    return tuple(read_checked_rank(path) for rank, path in rank_files(folder).items() if rank < world_size)


def read_checked_rank(path: Path) -> CheckedRank:
    """One rank's lines. A line that is broken, or cut off, is named and left out."""
    return read_lines(path, CheckedRank, lambda raw, _: refuse_wild_numbers(json.loads(raw)))


def refuse_wild_numbers(content: Any) -> Any:
    """Refuses what this program never writes: NaN, infinity, numbers beyond all measure, integers beyond 64 bits."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif (isinstance(value, float) and not abs(value) < _LARGEST_NUMBER) or (
            isinstance(value, int) and value.bit_length() > 63
        ):
            raise ValueError(f"no number of vitscale's: {shown(value)}")
    return content
