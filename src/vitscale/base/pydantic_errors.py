"""What pydantic finds wrong with a value, in the words of a study file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vitscale.errors import explain, nearest, shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

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


def place_of(problem: ErrorDetails) -> str:
    """The dotted field ("train.micro_batch") with keys that a user wrote shortened."""
    return ".".join(_bare(str(part)) for part in problem["loc"])


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[\w.-]{1,80}", key) else shown(key)


def wrong_value(problem: ErrorDetails, *, next_step: str = "") -> str:
    """One message: the field, its value, what it should be, and what to do."""
    kind, value = problem["type"], problem["input"]
    place = place_of(problem)
    if kind == "missing":
        return explain(f"{place} is missing", next_step=next_step)
    if kind in _UNQUOTED and isinstance(value, str):
        next_step = "Write it without quotes"
    limits = problem.get("ctx", {})
    expected = _EXPECTED.get(kind, "").format_map(limits) or problem["msg"].removeprefix("Input should be ")
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = nearest(value, re.findall(r"'([^']*)'", str(limits.get("expected", ""))))
    written = list(value) if isinstance(value, tuple) else value  # as TOML and JSON have it
    return explain(f"{place} is {shown(written)}, but should be {expected}", next_step=next_step) + hint
