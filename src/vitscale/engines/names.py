"""Names of engines for readers: in curves and tables, in sentences, and with the options that decide most about them.

Two engines may take part in a name. The *engine* is `train.engine`, as a study has it. Its *wrapper* is the engine that
wraps the model, and whose options count: mostly the same engine, but Accelerate hands the model to another one. So
engine "accelerate" with wrapper "fsdp2" is called "accelerate (FSDP2)". A *variant* are options of the wrapper that are
part of its name, in words: "ZeRO-2".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vitscale.engines import of_engine
from vitscale.trial.fields import traits_of
from vitscale.trial.trial import OFFLOADED, TrainSpec

UNKNOWN = "unknown"
"""`train.engine` of a trial whose engine nobody recorded, as an imported one's."""


def engine_name(train: TrainSpec) -> str:
    """Return the name of the engine with its variant and its offload: "deepspeed ZeRO-2, optimizer offloaded"."""
    naming_options = of_engine(train.wrapper).name_options
    option_values = {option: getattr(train, option) for option in naming_options}
    variant = variant_in_words(train.wrapper, option_values, always=naming_options)
    name = composed_name(train.engine, train.wrapper, variant)
    if train.offload == "none":
        return name
    return f"{name}, {OFFLOADED[train.offload]}"


def engine_label(engine: str) -> str:
    """Return the engine in a curve or table: "plain (no wrapper)" where it is "none", which reads as no answer."""
    return of_engine(engine).label or engine


def variant_name(engine: str, options: Mapping[str, Any]) -> str:
    """Return an engine with its variant, where that is not the default one: "deepspeed ZeRO-2"."""
    return _with_variant(engine_label(engine), variant_in_words(engine, options))


def composed_name(engine: str | None, wrapper: str | None, variant: str) -> str:
    """Return the name of an engine, of its wrapper where that is another engine, and of the variant.

    Examples: composed_name("deepspeed", "deepspeed", "ZeRO-2") is "deepspeed ZeRO-2", and
    composed_name("accelerate", "deepspeed", "ZeRO-2") is "accelerate (DeepSpeed ZeRO-2)".

    Args:
        engine: `train.engine`; None or `UNKNOWN` where it is not known.
        wrapper: the engine that wraps the model: `engine` itself, or the one that Accelerate hands the model to. None
            where it is not known: then it is taken to be `engine`.
        variant: `variant_in_words` of the wrapper; empty if it has none.
    """
    if engine is None or engine == UNKNOWN:
        return "unknown engine"
    if wrapper is None or wrapper == engine:
        return _with_variant(engine_label(engine), variant)
    wrapper_title = of_engine(wrapper).title or wrapper
    return f"{engine} ({_with_variant(wrapper_title, variant)})"


def _with_variant(name: str, variant: str) -> str:
    """Return "deepspeed ZeRO-2", or the name alone where the variant is empty."""
    return f"{name} {variant}" if variant else name


def variant_in_words(engine: str, options: Mapping[str, Any], *, always: Collection[str] = ()) -> str:
    """Return the options of an engine that are part of its name: "ZeRO-2".

    Args:
        engine: the engine that wraps the model.
        options: fields of [train] with their values; one whose value is not known is None or missing.
        always: options that are named even at their defaults; all others only where they differ from these.

    Returns:
        The options in words, with spaces between; empty where none is named.
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
    """Return "ZeRO-2" for the option zero_stage; "bucket_mib 25" for an option that has no words of its own."""
    template = traits_of(TrainSpec, option).curve_words
    if isinstance(template, str) and template:
        return template.format(value)
    return f"{option} {value}"


def option_if_read(train: TrainSpec, option: str) -> Any:
    """Return the value of a field of [train] where the engine that wraps the model reads it; else None."""
    return getattr(train, option) if option in of_engine(train.wrapper).options else None
