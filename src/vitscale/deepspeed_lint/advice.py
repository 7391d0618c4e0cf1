"""Advice as changes of the file, so that lint can try it before a user reads it.

A rule names several ways out (`options`), the best first. `vitscale.deepspeed_lint.lint` makes the changes of one after
the other in a copy of the file, and advises the first that raises no new error or warning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from vitscale.present.document import Finding

Place: TypeAlias = str | tuple[str, ...]
"""A dotted key, or the names one by one where a name has dots."""
FileChanges: TypeAlias = Mapping[Any, Any]
"""`Place` -> the value to write there, or `REMOVED`."""


class _Removed:
    """The value of a key that is taken out."""


REMOVED = _Removed()


class Remedy(NamedTuple):
    """What to do, in words and as changes of the file."""

    text: str
    changes: FileChanges | None = None
    """None where it is not the file that is to change, or the value is the reader's to choose."""


@dataclass(frozen=True)
class FileFinding(Finding):
    """A finding on a file, with all ways out of it."""

    options: tuple[Remedy, ...] = field(default=(), compare=False, repr=False)
    """The best first; `advice` is the text of the first."""
    changes: FileChanges | None = field(default=None, compare=False, repr=False)
    """What `advice` changes."""


def options_of(fix: str | Remedy | Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Return the ways out that a rule names, as a tuple; a text alone is advice without changes of the file."""
    if isinstance(fix, str):
        return (Remedy(fix),)
    if isinstance(fix, Remedy):
        return (fix,)
    return tuple(fix)


def remove(place: Place, text: str = "Remove it") -> Remedy:
    """Return advice to take a key out."""
    return Remedy(text, {place: REMOVED})


def changed(config: dict[str, Any], changes: FileChanges) -> dict[str, Any]:
    """Return a copy of the configuration after the changes; tables that a new key needs are made."""
    result = copy.deepcopy(config)
    for place, value in changes.items():
        names = place.split(".") if isinstance(place, str) else place
        *tables, key = names
        if value is REMOVED:
            _remove_key(result, tables, key)
        else:
            table = _made_table(result, tables)
            table[key] = copy.deepcopy(value)
    return result


def _remove_key(config: dict[str, Any], tables: Sequence[str], key: str) -> None:
    """Remove a key from the table at the end of the path `tables`, if there is such a table."""
    table: Any = config
    for name in tables:
        table = table.get(name)
        if not isinstance(table, dict):
            return
    table.pop(key, None)


def _made_table(config: dict[str, Any], tables: Sequence[str]) -> dict[str, Any]:
    """Return the table at the end of the path `tables`; make the missing ones, in place of what is no table."""
    table = config
    for depth, name in enumerate(tables):
        content = table.get(name)
        if not isinstance(content, dict):
            is_zero_section = depth == 0 and name == "zero_optimization"
            table[name] = _zero_section(content) if is_zero_section else {}
        table = table[name]
    return table


def _zero_section(old_form: object) -> dict[str, Any]:
    """Return the table that zero_optimization's old form stands for: true is stage 1, false 0; empty for others."""
    return {"stage": int(old_form)} if isinstance(old_form, bool) else {}
