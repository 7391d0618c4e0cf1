"""What a field of a trial or of a study says of itself, once; whatever treats fields by their kind reads it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Role = Literal["", "wrapper", "batch", "execution", "duration", "rate", "location"]


class Spec(BaseModel):
    """Base of everything a user may write down: immutable, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


@dataclass(frozen=True)
class Fact:
    """Beside a field's type: `Annotated[int, Fact(...)]`. A field that narrows a base's keeps the base's facts."""

    since: int = 1
    """Format of records (`store.records`) that has it first. After 1: at its default it is no part of an identity."""
    role: Role = ""
    """What it decides. "": what is computed. Of others the losses of the first steps do not depend, but for rounding:
    wrapper: how training is distributed; batch: how a global batch is cut; execution: how the same is computed;
    duration: when training ends; rate: part of `Trial.peak_learning_rate`. location: where data lie, and
    no part of an identity."""
    taken_by: tuple[str, ...] = ()
    """Of the wrapper: who has it (`TrainSpec.wrapper`); a later engine may name it among `EngineFacts.options`."""
    step_seconds: bool = False
    """Beside wrapper and batch: decides how long a step takes."""
    needs: tuple[str, tuple[str, ...]] | None = None
    """A field of its section, and the values without which this one has no meaning."""
    swept: bool = True
    """Whether [sweep] may vary it."""
    short: str | tuple[str, str] | Mapping[str, str] = ""
    """In a curve's name: "{} MiB buckets" for any value, (true, false) of a switch, or value -> words. "": its name and
    the value."""


def wrapping(since: int, *engines: str, short: str | tuple[str, str] | Mapping[str, str] = "") -> Fact:
    """Of a field that says how training is distributed, and that these engines take."""
    return Fact(since=since, role="wrapper", taken_by=engines, short=short)


def switch(name: str) -> tuple[str, str]:
    """What a field that is on or off is called in a curve's name (`Fact.short`)."""
    return name, f"no {name}"


def fact_of(kind: type[BaseModel], field: str) -> Fact:
    """The facts of a field, its base's where it has none of its own."""
    for base in kind.__mro__:
        declared = getattr(base, "model_fields", {}).get(field)
        for item in declared.metadata if declared is not None else ():
            if isinstance(item, Fact):
                return item
    return Fact()


def fields_where(kind: type[BaseModel], holds: Callable[[Fact], Any]) -> tuple[str, ...]:
    """The fields of which something holds, in the order in which they are declared."""
    return tuple(field for field in kind.model_fields if holds(fact_of(kind, field)))
