"""A bundle that may be sent: a results folder's records and logs without what tells whose they are."""

from __future__ import annotations

import getpass
import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitscale import store
from vitscale.errors import StoreError, shown

_MOST_BYTES = 8 << 20
"""Of one file: the beginning is kept."""
_SECRETS = (
    (re.compile(r"\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*::[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*\b"), "ADDRESS"),
    (re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b"), "ADDRESS"),
    (re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"), "ADDRESS"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "UUID"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "MAIL"),
    (re.compile(r"(?<![\w.])~?(?:/[^\s/:\"',;()\[\]]+)+/?"), "PATH"),
)
"""What is taken out wherever it stands, and what stands in its place."""
_PLAIN = re.compile(r"[A-Za-z_]{1,20}|\d{1,6}|\d\.\d+")
"""Values of variables that are kept: words and numbers. Others may be names, paths or keys."""
_DROPPED = ("git_revision", "allocation", "uuid")
"""Fields of which only whether they are there is kept."""


def write_bundle(results: Path, answer: Mapping[str, Any]) -> Path:
    """What somebody else needs to judge these runs: an answer, the study, each run's records and log, redacted.

    Args:
        results: the folder, in which the bundle lies then: bundle.tar.gz.
        answer: what was said of the runs.

    Raises:
        StoreError: it cannot be written.
    """
    path, names = results / "bundle.tar.gz", stand_ins(results)
    try:
        with tarfile.open(path, "w:gz") as archive:
            _add(archive, "answer.json", json.dumps(redacted(answer, names), indent=1))
            patterns = (
                "study.json",
                *(f"runs/*/{name}" for name in ("trial.json", "outcome.json", "rank-*.jsonl", "log.txt")),
            )
            for file in sorted(file for pattern in patterns for file in results.glob(pattern) if file.is_file()):
                with file.open("rb") as opened:
                    text = opened.read(_MOST_BYTES).decode("utf-8", errors="replace")
                _add(archive, str(file.relative_to(results)), _of_file(text, file.suffix, names))
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(
            f"{shown(str(path))} cannot be written: {why}", next_step="Give another folder with -o"
        ) from None
    return path


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(f"vitscale-bundle/{name}")
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def stand_ins(results: Path) -> dict[str, str]:
    """Names of this user and of the hosts that took part, and what stands for each."""
    hosts: dict[str, None] = {}
    for run in store.load(results).runs:
        hosts |= dict.fromkeys(run.header.hosts)
        hosts |= dict.fromkeys(rank.start.environment.host for rank in run.ranks if rank.start is not None)
    names: dict[str, str] = {}
    for number, host in enumerate(hosts):
        names |= {host.partition(".")[0]: f"host-{number}", host: f"host-{number}"}
    names |= dict.fromkeys((getpass.getuser(), Path.home().name), "USER")
    return {name: stands for name, stands in names.items() if len(name) > 1}


def _of_file(text: str, suffix: str, names: Mapping[str, str]) -> str:
    """By its values where it is JSON, for keys are no secret; else, and what is broken, as text."""
    pieces = text.splitlines() if suffix == ".jsonl" else [text]
    told = []
    for piece in pieces:
        try:
            told.append(json.dumps(redacted(json.loads(piece), names)) if suffix != ".txt" else without(piece, names))
        except (ValueError, RecursionError):
            told.append(without(piece, names))
    return "\n".join(told)


def redacted(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value with all its texts redacted; of variables (`settings`) only plain words and numbers are kept."""
    if isinstance(value, str):
        return without(value, names)
    if isinstance(value, list | tuple):
        return [redacted(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    told: dict[str, Any] = {}
    for key, item in value.items():
        if key == "settings" and isinstance(item, dict):
            told[key] = {name: _of_variable(setting, names) for name, setting in item.items()}
        elif key in _DROPPED:
            told[key] = None if item is None else key.upper()
        else:
            # A host may be a key; a user who is called as a field is (root, name) must not make the file unreadable.
            told[names[key] if names.get(key, "USER") != "USER" else key] = redacted(item, names)
    return told


def _of_variable(setting: Any, names: Mapping[str, str]) -> Any:
    """GPU settings stand under the same name as variables do, as numbers and truths."""
    if not isinstance(setting, str):
        return redacted(setting, names)
    return without(setting, names) if _PLAIN.fullmatch(setting) else "VALUE"


def without(text: str, names: Mapping[str, str]) -> str:
    """A text without these names, and without addresses, paths, mail addresses and serial numbers."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", names[name], text)
    for pattern, stands in _SECRETS:
        text = pattern.sub(stands, text)
    return text
