"""An engine with the fields of [train] that make it another one to a reader: DeepSpeed at each of its ZeRO stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vitscale.engines import ENGINES
from vitscale.engines.names import variant_name
from vitscale.trial.trial import TrainSpec

_DEFAULT_BY_FIELD: dict[str, Any] = {}
"""The fields of [train] that make variants, `EngineFacts.name_options` and `stands_for` of all engines -> default."""
for _facts in ENGINES.values():
    for _option in (*_facts.name_options, _facts.stands_for):
        if _option:
            _DEFAULT_BY_FIELD[_option] = TrainSpec.model_fields[_option].default


class EngineVariant(NamedTuple):
    """An engine and its variant; equal for equal training, and in the order of engine and values.

    Example: EngineVariant("deepspeed", (("zero_stage", 2),)).
    """

    engine: str
    fields: tuple[tuple[str, Any], ...] = ()
    """Fields of [train] with their values, those at their defaults left out."""

    @staticmethod
    def of_fields(engine: str, fields: Mapping[str, Any]) -> EngineVariant:
        """Return the variant of an engine whose fields are these of [train], and for others at their defaults."""
        values = ((name, fields.get(name, default)) for name, default in _DEFAULT_BY_FIELD.items())
        changed = tuple((name, value) for name, value in values if value != _DEFAULT_BY_FIELD[name])
        return EngineVariant(engine, changed)

    @staticmethod
    def of_train(train: TrainSpec) -> EngineVariant:
        """Return the variant that a [train] names."""
        return EngineVariant.of_fields(train.engine, {option: getattr(train, option) for option in _DEFAULT_BY_FIELD})

    @property
    def name(self) -> str:
        """The variant in tables and sentences: "deepspeed ZeRO-2"."""
        return variant_name(self.engine, dict(self.fields))

    @property
    def changes(self) -> dict[str, Any]:
        """All fields of [train] that make any other variant into this one, `engine` included."""
        return {"engine": self.engine, **_DEFAULT_BY_FIELD, **dict(self.fields)}


PROPOSED = tuple(EngineVariant.of_fields(name, fields) for name, facts in ENGINES.items() for fields in facts.variants)
"""Variants that `vitscale advise` considers even if no run used them. Engines say so themselves: one that only stands
for another, or needs more to be set up, leaves it out."""
