"""Advice as changes of the file, so that it can be tried before it is given.

A rule names what may be done in the order in which it would advise it; `vitscale.lint.lint` gives the first that raises
no error or warning of its own beside the rest of the file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from vitscale.present.document import Finding

Place: TypeAlias = str | tuple[str, ...]
"""A dotted key, or the names one by one where a name has dots."""
Changes: TypeAlias = Mapping[Any, Any]
"""`Place` -> the value to write there, or `REMOVED`."""


class _Removed:
    """The value of a key that is taken out."""


REMOVED = _Removed()


class Advice(NamedTuple):
    """What to do, in words and as changes of the file."""

    text: str
    changes: Changes | None = None
    """None where it is not the file that is to change, or the value is the reader's to choose."""


@dataclass(frozen=True)
class FileFinding(Finding):
    """A finding on a file, with all that may be done about it."""

    options: tuple[Advice, ...] = field(default=(), compare=False, repr=False)
    """The best first; `advice` is the text of the first."""
    changes: Changes | None = field(default=None, compare=False, repr=False)
    """What `advice` changes."""


def options_of(fix: str | Advice | Sequence[Advice]) -> tuple[Advice, ...]:
    """What a rule says to do as options; a text alone changes nothing in the file."""
    if isinstance(fix, str):
        return (Advice(fix),)
    return (fix,) if isinstance(fix, Advice) else tuple(fix)


def remove(place: Place, text: str = "Remove it") -> Advice:
    """Advice to take a key out."""
    return Advice(text, {place: REMOVED})


def changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of the configuration after the changes; a part that a new key needs is made."""
    result = copy.deepcopy(config)
    for place, value in changes.items():
        *above, name = place.split(".") if isinstance(place, str) else place
        part = result
        for outer in above:
            inner = part.get(outer)
            if not isinstance(inner, dict):
                if value is REMOVED:
                    break
                # The old form of zero_optimization is true or false, for stage 1 or 0.
                is_old_form = part is result and outer == "zero_optimization" and isinstance(inner, bool)
                inner = part[outer] = {"stage": int(bool(inner))} if is_old_form else {}
            part = inner
        else:
            if value is REMOVED:
                part.pop(name, None)
            else:
                part[name] = copy.deepcopy(value)
    return result
