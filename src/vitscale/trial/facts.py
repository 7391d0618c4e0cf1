"""Facts about fields of a trial or of a study, each stated once, for all code that treats fields by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

Role = Literal["", "wrapper", "batch", "execution", "duration", "rate", "location"]


class Spec(BaseModel):
    """Base of everything a user may write down: immutable, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


@dataclass(frozen=True)
class Fact:
    """Facts beside a field's type: `Annotated[int, Fact(...)]`. A field that narrows a base's keeps its facts."""

    role: Role = ""
    """What the field decides. "": what is computed. The other roles change the losses of the first steps only by
    rounding. wrapper: how training is distributed; execution: how the same is computed (of both an engine says which
    fields it reads); batch: how a global batch is cut; duration: when training ends; rate: part of
    `Trial.peak_learning_rate`. location: where data lie, no part of an identity."""
    step_seconds: bool = False
    """Whether it decides how long a step takes although it is neither wrapper nor batch."""
    needs: tuple[str, tuple[str | bool, ...]] | None = None
    """Another field of its section, and the values of it with which this one has a meaning."""
    swept: bool = True
    """Whether [sweep] may vary it."""
    short: str | tuple[str, str] | Mapping[str, str] = ""
    """Words in a curve's name: "{} MiB buckets" for any value, (true, false) for a switch, or value -> words. "" gives
    the field's name and its value."""


def wrapping(short: str | tuple[str, str] | Mapping[str, str] = "") -> Fact:
    """The facts of a field that says how training is distributed; `EngineFacts.options` say which engines read it."""
    return Fact(role="wrapper", short=short)


def switch(name: str) -> tuple[str, str]:
    """Words for a switch in a curve's name, on and off (`Fact.short`)."""
    return name, f"no {name}"


@cache
def fact_of(kind: type[BaseModel], field: str) -> Fact:
    """The facts of a field, or its base's where it has none of its own."""
    for base in kind.__mro__:
        declared = getattr(base, "model_fields", {}).get(field)
        for item in declared.metadata if declared is not None else ():
            if isinstance(item, Fact):
                return item
    return Fact()


def sections_of(kind: type[BaseModel]) -> dict[str, type[Spec]]:
    """The fields that hold other fields, each with its type."""
    return {
        name: part
        for name, field in kind.model_fields.items()
        for part in (field.annotation, *get_args(field.annotation))
        if isinstance(part, type) and issubclass(part, Spec)
    }


def fields_where(kind: type[BaseModel], holds: Callable[[Fact], Any]) -> tuple[str, ...]:
    """The fields for which `holds` is true of their facts, in the order in which they are declared."""
    return tuple(field for field in kind.model_fields if holds(fact_of(kind, field)))
