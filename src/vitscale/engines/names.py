"""Names of engines for readers: in curves and tables, in sentences, and with what decides most about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vitscale.engines import of_engine
from vitscale.trial.fields import traits_of
from vitscale.trial.trial import OFFLOADED, TrainSpec

UNKNOWN = "unknown"
"""`train.engine` of a trial whose engine nobody recorded, as an imported one's."""


def engine_name(train: TrainSpec) -> str:
    """Return what distributes training, with what decides most: "deepspeed ZeRO-2, optimizer offloaded"."""
    options = of_engine(train.wrapper).name_options
    values = {option: getattr(train, option) for option in options}
    variant = variant_in_words(train.wrapper, values, always=options)
    offload = f", {OFFLOADED[train.offload]}" if train.offload != "none" else ""
    return composed_name(train.engine, train.wrapper, variant) + offload


def engine_label(engine: str) -> str:
    """Return the engine in a curve or table: "plain (no wrapper)" where it is "none", which reads as no answer."""
    return of_engine(engine).label or engine


def variant_name(engine: str, options: Mapping[str, Any]) -> str:
    """Return an engine with its variant, where that is not the default one: "deepspeed ZeRO-2"."""
    return " ".join(filter(None, (engine_label(engine), variant_in_words(engine, options))))


def composed_name(engine: str | None, wrapper: str | None, variant: str) -> str:
    """ "deepspeed ZeRO-2", "accelerate (FSDP2)".

    Args:
        engine: the engine that a study names; None or `UNKNOWN` where nobody says.
        wrapper: the engine that wraps the model: the same, or the one that it stands for; None: not said.
        variant: `variant_in_words` of the wrapper.
    """
    if engine is None or engine == UNKNOWN:
        return "unknown engine"
    if wrapper is None or wrapper == engine:
        return " ".join(filter(None, (engine_label(engine), variant)))
    inside = of_engine(wrapper).title or wrapper
    return f"{engine} ({' '.join(filter(None, (inside, variant)))})"


def variant_in_words(engine: str, options: Mapping[str, Any], *, always: Collection[str] = ()) -> str:
    """Return the options of an engine that are part of its name: "ZeRO-2".

    Args:
        engine: the engine that wraps the model.
        options: fields of [train] with their values; None where nobody says.
        always: options that are named even at their defaults; all others only where they differ from these.
    """
    words = []
    for option in of_engine(engine).name_options:
        value = options.get(option)
        is_default = value == TrainSpec.model_fields[option].default
        is_named = option in always or not is_default
        if value is not None and is_named:
            words.append(_option_in_words(option, value))
    return " ".join(words)


def _option_in_words(option: str, value: object) -> str:
    words = traits_of(TrainSpec, option).curve_words
    if isinstance(words, str) and words:
        return words.format(value)
    return f"{option} {value}"


def option_if_read(train: TrainSpec, option: str) -> Any:
    """Return the value of a field of [train] where the engine that wraps the model reads it; else None."""
    return getattr(train, option) if option in of_engine(train.wrapper).options else None
