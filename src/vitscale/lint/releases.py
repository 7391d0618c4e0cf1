"""What a release of DeepSpeed does with each key of a configuration, from a generated table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata, resources
from typing import Any

from vitscale.errors import RequestError, shown

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.+-][\w.+-]*)?")


@cache
def _table() -> dict[str, Any]:
    """The table that `tools/make_deepspeed_keys.py` makes from DeepSpeed's source archives."""
    text = resources.files("vitscale.lint").joinpath("deepspeed_keys.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def known_releases() -> tuple[str, ...]:
    """The releases that the table holds, oldest first."""
    return tuple(_table()["releases"])


def installed_version() -> str | None:
    """DeepSpeed's installed version, found without importing it; None where it is not installed."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


class Release:
    """One release of DeepSpeed; for a version that the table lacks, the nearest release."""

    def __init__(self, wanted: str | None) -> None:
        """`wanted`: a version such as "0.16.9"; None takes the newest release of the table.

        Raises:
            RequestError: it is no version.
        """
        known = known_releases()
        self.wanted = known[-1] if wanted is None else wanted
        number = _numbers(self.wanted)
        if number is None:
            raise RequestError(f"{shown(self.wanted)} is no version of DeepSpeed", valid=known)
        self.version = _nearest(number)
        self.exact = self.version == self.wanted
        self._place = known.index(self.version)
        self._facts = {key: fact for key, history in _table()["keys"].items() if (fact := self._now(history))}
        self._children: dict[str, list[str]] = {}
        for key in self._facts:
            parent, _, name = key.rpartition(".")
            self._children.setdefault(parent, []).append(name)

    def fact(self, key: str) -> str | None:
        """What the release does with a dotted key; None where it does not know the key.

        The words are explained in the table's maker, `tools/deepspeed_reads.py`.
        """
        return self._facts.get(key)

    def children(self, part: str) -> list[str]:
        """Names of the known keys inside a part ("" for the whole)."""
        return self._children.get(part, [])

    def places(self, name: str) -> list[str]:
        """All known dotted keys that end in `name`."""
        return [key for key in self._facts if key.rpartition(".")[2] == name]

    def read_in(self, key: str) -> str | None:
        """The releases that read the key, in words ("from 0.9.5 to 0.19.2"); None where none in the table does."""
        history = _table()["keys"].get(key)
        return None if history is None else _said(span for fact, span in history.items() if fact != "refused")

    def default(self, key: str) -> float | None:
        """The release's default for a key whose default has changed; None for other keys."""
        value = self._now(_table()["defaults"].get(key, {}))
        return None if value is None else float(value)

    def since(self, part: str, name: str, fact: str) -> str:
        """The releases in which `fact` holds, in words."""
        return _said([_table()[part][name][fact]])

    def names(self, part: str) -> list[str]:
        """The "optimizers" or "schedulers" that the release knows."""
        return [name for name, history in _table()[part].items() if self._now(history)]

    def once_named(self, part: str, name: str) -> str | None:
        """The releases that know this optimizer or scheduler, in words; None where none does."""
        history = _table()[part].get(name)
        return None if history is None else _said(history.values())

    def _now(self, history: Mapping[str, str]) -> str | None:
        return next((fact for fact, spans in history.items() if self._within(spans)), None)

    def _within(self, spans: str) -> bool:
        known = known_releases()
        for span in spans.split(", "):
            first, _, last = span.partition("..")
            if known.index(first) <= self._place <= (known.index(last) if last else len(known) - 1):
                return True
        return False


def _said(spans: Any) -> str:
    """Spans of releases in words: "from 0.9.5 to 0.19.6", "since 0.19.3"."""
    said = []
    for span in ", ".join(spans).split(", "):
        first, _, last = span.partition("..")
        if not last:
            said.append(f"since {first}")
        else:
            said.append(f"in {first}" if first == last else f"from {first} to {last}")
    return " and ".join(said)


def _numbers(version: str) -> tuple[int, int, int] | None:
    match = _VERSION.fullmatch(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _nearest(number: tuple[int, int, int]) -> str:
    """The release of the same minor version with the nearest patch, else the newest earlier one, else the oldest."""
    known = {_numbers(version): version for version in known_releases()}
    same = [held for held in known if held is not None and held[:2] == number[:2]]
    if same:
        return known[min(same, key=lambda held: abs(held[2] - number[2]))]
    return known[max((held for held in known if held is not None and held < number), default=next(iter(known)))]
