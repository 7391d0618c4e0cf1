"""Errors as one message without traceback: what failed, the bad value, the valid ones, and what to do next.

Also puts what pydantic finds wrong with a value into the words of a study file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_LONGEST_VALUE = 200
"""Characters of a value that are shown: enough for most paths, which are of use only when whole."""


class VitscaleError(Exception):
    """Something the user can act on. The command line prints it and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, what: str, *, valid: Iterable[object] = (), next_step: str = "", hint: str = "") -> None:
        """Makes the message with `explain`; the `hint`, from `nearest`, comes before the valid values."""
        # No escape sequence from a value, a path or a library's message may reach the terminal.
        super().__init__(
            printable(explain(f"{what.rstrip('.')}.{hint}" if hint else what, valid=valid, next_step=next_step))
        )


class RequestError(VitscaleError):
    """The request was wrong: nothing was started, nothing was written (exit code 2)."""


class StoreError(VitscaleError):
    """A results folder cannot be used as asked (exit code 2)."""


def printable(text: str) -> str:
    """`text` with all characters escaped but printable ones and line breaks.

    Escaped are control and bidirectional characters, and lone surrogates.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shown(value: object) -> str:
    """`value` for a message: text quoted, all on one line, at most 200 characters (a longer value's two ends).

    Lists and tables that are too large or too deep to write out are named by their type.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an int of more than 4,300 digits; nesting
        return f"({type(value).__name__} too large to show)"
    whole = len(text)
    if whole > _LONGEST_VALUE:
        text = f"{text[: _LONGEST_VALUE - 30]}...{text[-27:]}"
    line = printable(text).replace("\n", "\\n")
    quoted = f"'{line}'" if isinstance(value, str) else line
    return f"{quoted} ({whole:,} characters)" if whole > _LONGEST_VALUE else quoted


def explain(what: str, *, valid: Iterable[object] = (), next_step: str = "") -> str:
    """Puts a message together: `what` failed (with the bad value in it), the valid values, the next step."""
    parts = [what if what.endswith("?") else what.rstrip(".") + "."]
    choices = [str(choice) for choice in valid]
    if choices:
        parts.append(f"Valid: {', '.join(choices)}.")
    if next_step:
        parts.append(next_step.rstrip(".") + ".")
    return " ".join(parts)


def nearest(bad: str, valid: Sequence[str]) -> str:
    """`" Did you mean 'x'?"` for the valid name closest to `bad`, or an empty string; capitals count for nothing."""
    names = {name.lower(): name for name in valid}
    close = difflib.get_close_matches(bad[:_LONGEST_VALUE].lower(), names, n=1, cutoff=0.6)
    return f" Did you mean '{names[close[0]]}'?" if close else ""


def unknown(kind: str, bad: object, valid: Iterable[str], next_step: str = "") -> RequestError:
    """An error for a name that is not among the valid ones, with the nearest suggested."""
    names = sorted(valid)
    hint = nearest(bad, names) if isinstance(bad, str) else ""
    return RequestError(f"unknown {kind} {shown(bad)}", valid=names, next_step=next_step, hint=hint)


def check_within(option: str, value: float | None, least: float, most: float) -> None:
    """Refuses a value that was given and lies outside its limits.

    Raises:
        RequestError: the value lies outside.
    """
    if value is not None and not least <= value <= most:
        raise RequestError(f"{option} is {value}", valid=[f"{least:,} to {most:,}"])


_EXPECTED = {
    "model_type": "a table",
    "dict_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "text of at least {min_length} character(s)",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
_UNQUOTED = frozenset({"int_type", "float_type", "bool_type"})


_MEANT = dict.fromkeys(("true", "yes", "on", "1"), "true") | dict.fromkeys(("false", "no", "off", "0"), "false")
"""What people write for true and false -> TOML's word."""


def _dotted_field(problem: ErrorDetails) -> str:
    """The dotted field ("train.micro_batch"), with users' own unusual keys quoted and shortened."""
    return ".".join(_bare(str(part)) for part in problem["loc"])


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[\w.-]{1,80}", key) else shown(key)


def wrong_value(problem: ErrorDetails, *, next_step: str = "") -> str:
    """One message: the field, its value, what it should be, and what to do."""
    kind, value = problem["type"], problem["input"]
    field = _dotted_field(problem)
    if kind == "missing":
        return explain(f"{field} is missing", next_step=next_step)
    if kind in _UNQUOTED and isinstance(value, str):
        meant = _MEANT.get(value.lower())
        if kind == "bool_type" and meant is not None:
            next_step = f"Write {meant}"
        elif kind != "bool_type" and re.fullmatch(r"[+-]?(\d[\d_]*)?\.?\d+(e[+-]?\d+)?", value, re.IGNORECASE):
            next_step = "Write it without quotes"
    limits = problem.get("ctx", {})
    expected = _EXPECTED.get(kind, "").format_map(limits) or problem["msg"].removeprefix("Input should be ")
    hint = ""
    if kind == "literal_error" and isinstance(value, str) and not next_step.startswith("Write "):
        hint = nearest(value, re.findall(r"'([^']*)'", str(limits.get("expected", ""))))
    written = list(value) if isinstance(value, tuple) else value  # as in TOML and JSON
    return explain(f"{field} is {shown(written)}, but should be {expected}", next_step=next_step) + hint
