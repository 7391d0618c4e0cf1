"""What [sweep] varies: a field and its values, or a section and tables of its fields that go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitscale.errors import RequestError, explain, nearest, shown
from vitscale.study.sections import SECTIONS
from vitscale.trial.facts import fields_where

Choice = dict[str, Any]
"""Dotted fields and the values they take together."""


_SECTIONS = ("data", "launch", "model", "parallel", "scaling", "train")
SWEEPABLE = sorted(
    f"{section}.{key}"
    for section in _SECTIONS
    for key in fields_where(SECTIONS[section], lambda fact: fact.swept and fact.role != "found")
)
"""The dotted fields that [sweep] may vary: not those along a curve, nor where images are found and where it may run."""


def choices(sweep: Mapping[str, Sequence[Any]]) -> list[list[Choice]]:
    """For each key of [sweep] what it may be: one field each, or the fields of one table.

    Values are not judged here: each point of the sweep is validated as a study of its own.

    Raises:
        RequestError: a field that cannot be swept, is swept twice, or has no value or one value twice.
    """
    varied = [_choices_of(key, values) for key, values in sweep.items()]
    by_field: dict[str, str] = {}
    for key, its_choices in zip(sweep, varied, strict=True):
        for field in dict.fromkeys(field for choice in its_choices for field in choice):
            if field in by_field:
                both = f"sweep.{shown(by_field[field])} and sweep.{shown(key)}"
                raise RequestError(
                    f"{both} both vary {field}", next_step="Give all values of a field under one of the two"
                )
            by_field[field] = key
    return varied


def swept_fields(sweep: Mapping[str, Sequence[Any]]) -> frozenset[str]:
    """The dotted fields that vary, those in tables too; of a sweep that `choices` takes."""
    return frozenset(field for its_choices in choices(sweep) for choice in its_choices for field in choice)


def _choices_of(key: str, values: Sequence[Any]) -> list[Choice]:
    named = f"sweep.{shown(key)}"
    if key not in SWEEPABLE and key not in _SECTIONS:
        section = key.partition(".")[0]
        valid = [field for field in SWEEPABLE if section in (field.partition(".")[0], field.rpartition(".")[2])]
        valid = valid or [f"{section}.FIELD" for section in _SECTIONS]
        raise RequestError(explain(f"{named} is no field that can be swept", valid=valid) + nearest(key, SWEEPABLE))
    if not values:
        raise RequestError(f"{named} is an empty list", next_step="Give at least one value")
    if any(value in values[:number] for number, value in enumerate(values)):
        raise RequestError(f"{named} holds a value twice: {shown(values)}", next_step="Name each value once")
    if key in SWEEPABLE:
        return [{key: value} for value in values]
    return [_of_table(key, value) for value in values]


def _of_table(section: str, table: Any) -> Choice:
    named = f"sweep.{shown(section)}"
    fields = [field.partition(".")[2] for field in SWEEPABLE if field.startswith(f"{section}.")]
    if not isinstance(table, dict):
        raise RequestError(
            f"{named} names a section, and holds {shown(table)}",
            next_step=f"Give tables of fields that go together, as {{{fields[0]} = ...}}, or sweep one field, as "
            f'"{section}.{fields[0]}" = [...]',
        )
    if not table:
        raise RequestError(
            f"{named} holds an empty table", next_step="Give each table at least one field, or leave it out"
        )
    for key in table:
        if key not in fields:
            raise RequestError(
                explain(f"{named}: {shown(key)} is no field of [{section}] that can be swept", valid=fields)
                + nearest(key, fields)
            )
    return {f"{section}.{key}": value for key, value in table.items()}
