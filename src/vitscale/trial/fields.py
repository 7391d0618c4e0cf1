"""The base class of all that a user may write down, and the traits that a field declares beside its type.

Code that treats fields by kind (names of curves, identities, refusals, sweeps) asks for these traits, and lists no
fields of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

Role = Literal["", "wrapper", "batch", "execution", "duration", "rate", "location"]
"""What a field decides. All roles but "" change the losses of the first steps only by rounding.

"": what is computed. wrapper: how training is distributed. execution: how the same is computed. (Of these two an engine
says which fields it reads.) batch: how a global batch is cut. duration: when training ends. rate: part of
`Trial.peak_learning_rate`. location: where data lie, which is no part of an identity."""


class Spec(BaseModel):
    """Base of everything a user may write down: immutable, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


@dataclass(frozen=True)
class FieldTraits:
    """Traits of a field, declared beside its type: `momentum: Annotated[float, FieldTraits(...)] = 0.9`.

    A field that narrows the type of a base's field keeps the traits of that one.
    """

    role: Role = ""
    affects_step_time: bool = False
    """Whether it decides how long a step takes although its role is neither wrapper nor batch."""
    needs: tuple[str, tuple[str | bool, ...]] | None = None
    """Another field of its section, and the values of that one with which this one has a meaning: ("optimizer",
    ("sgd",)) for the momentum."""
    swept: bool = True
    """Whether [sweep] may vary it."""
    curve_words: str | tuple[str, str] | Mapping[str, str] = ""
    """Words in a curve's name: "{} MiB buckets" for any value, (true, false) for a switch, or value -> words. "" gives
    the field's name and its value."""


def wrapper_option(curve_words: str | tuple[str, str] | Mapping[str, str] = "") -> FieldTraits:
    """Traits of a field that says how training is distributed; `EngineFacts.options` say which engines read it."""
    return FieldTraits(role="wrapper", curve_words=curve_words)


def switch_words(name: str) -> tuple[str, str]:
    """Words for a switch in a curve's name, on and off: ("overlap", "no overlap"). See `FieldTraits.curve_words`."""
    return name, f"no {name}"


@cache
def traits_of(section: type[BaseModel], field: str) -> FieldTraits:
    """Return the traits that a section declares for a field, else those of its base's field, else the default ones."""
    for base in section.__mro__:
        declared_fields = getattr(base, "model_fields", {})
        if field not in declared_fields:
            continue
        for annotation in declared_fields[field].metadata:
            if isinstance(annotation, FieldTraits):
                return annotation
    return FieldTraits()


def sections_of(spec: type[BaseModel]) -> dict[str, type[Spec]]:
    """Return name -> type for the fields that hold other fields, also where None is allowed instead."""
    sections: dict[str, type[Spec]] = {}
    for name, field in spec.model_fields.items():
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, Spec):
                sections[name] = candidate
    return sections


def fields_where(section: type[BaseModel], condition: Callable[[FieldTraits], Any]) -> tuple[str, ...]:
    """Return the fields whose traits meet the condition, in the order in which they are declared."""
    return tuple(field for field in section.model_fields if condition(traits_of(section, field)))
