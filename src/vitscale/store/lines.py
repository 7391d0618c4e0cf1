"""The base of all records, and how the lines of a rank's file are sorted by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter

from vitscale.errors import shown

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Record(BaseModel):
    """Base of everything stored. Unknown keys are refused: a record is read as it was meant, or not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RankLine(Record):
    """One line in a rank's file."""

    kind: str


@dataclass(frozen=True)
class IfThere:
    """Annotates a bool of `RankLines`: whether there is a line of a kind."""

    kind: type[RankLine]


class RankLines(Record):
    """All that one rank wrote, sorted by kind.

    The fields are the table of the kinds: a tuple of a kind takes all of its lines in order, a kind or None the last
    one, and a bool annotated with `IfThere` tells whether there is one.
    """

    @classmethod
    def parse(cls, line: bytes) -> RankLine:
        """One line of the kinds of this table.

        Raises:
            ValidationError: it is none of them.
        """
        return _parsers(cls)[0].validate_json(line)

    @classmethod
    def parse_all(cls, array: bytes) -> list[RankLine]:
        """The same of a JSON array of lines."""
        return _parsers(cls)[1].validate_json(array)

    @classmethod
    def of(cls, lines: Iterable[RankLine], **known: Any) -> Self:
        """The record of `lines`, with the fields that they do not tell, or that are `known` beside them.

        Nothing is checked again: lines were as they were read.
        """
        by_kind: dict[type[RankLine], list[RankLine]] = {}
        for line in lines:
            by_kind.setdefault(type(line), []).append(line)
        for name, (kind, takes) in _line_table(cls).items():
            if name not in known:
                known[name] = takes(by_kind.get(kind, []))
        return cls.model_construct(**known)


@cache
def _line_table(record: type[RankLines]) -> Mapping[str, tuple[type[RankLine], Callable[[list[RankLine]], object]]]:
    """Field to the kind of line it holds, and how it takes them."""
    table: dict[str, tuple[type[RankLine], Callable[[list[RankLine]], object]]] = {}
    for name, field in record.model_fields.items():
        for kind in get_args(field.annotation):
            if isinstance(kind, type) and issubclass(kind, RankLine):
                table[name] = kind, tuple if get_origin(field.annotation) in (tuple, Sequence) else _last
        for mark in field.metadata:
            if isinstance(mark, IfThere):
                table[name] = mark.kind, bool
            elif isinstance(mark, PlainValidator):
                table[name] = table[name][0], cast("Callable[[list[RankLine]], object]", mark.func)
    return table


def _last(lines: list[RankLine]) -> RankLine | None:
    return lines[-1] if lines else None


def refuse_wild_numbers(line: RankLine) -> None:
    """Refuses what this program never writes: NaN and infinity, which are no JSON, and integers beyond 64 bits.

    Raises:
        ValueError: the line holds one.
    """
    for key, value in line.__dict__.items():
        if (isinstance(value, float) and not math.isfinite(value)) or (
            isinstance(value, int) and value.bit_length() > 63
        ):
            raise ValueError(f"{key}: {shown(value)} is no number of vitscale's")


@cache
def _parsers(record: type[RankLines]) -> tuple[TypeAdapter[RankLine], TypeAdapter[list[RankLine]]]:
    """Of one line, and of an array of them."""
    union: Any = Union[tuple(kind for kind, _ in _line_table(record).values())]  # noqa: UP007 - of a table
    line = Annotated[union, Field(discriminator="kind")]
    return TypeAdapter(line), TypeAdapter(list[line])
