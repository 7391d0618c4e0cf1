"""Values: of the wrong type, or left open for the Hugging Face integration to fill in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.integrations import DEEPSPEEDS_OWN, FILLED, TRAINER
from vitscale.deepspeed_lint.view import ConfigurationView, KeyInFile, finding, keys_in
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import shown

_UNCONVERTED_SWITCHES = (
    *("wall_clock_breakdown", "memory_breakdown", "prescale_gradients", "dump_state", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "torch_autocast.enabled", "flops_profiler.enabled", "flops_profiler.detailed"),
    *("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"),
    *("activation_checkpointing.contiguous_memory_optimization",),
)
_UNCONVERTED_TYPES = {
    **dict.fromkeys((*deepspeed_config.BATCH_KEYS, "steps_per_print"), "int"),
    "gradient_clipping": "float",
    "gradient_predivide_factor": "float",
    **dict.fromkeys(_UNCONVERTED_SWITCHES, "bool"),
    "optimizer.type": "str",
    "scheduler.type": "str",
    "communication_data_type": "str",
    "optimizer.params.lr": "float",
    "optimizer.params.weight_decay": "float",
}
"""Types of values that DeepSpeed uses as they are, without a pydantic model that would convert or refuse them."""

_PARTS_TO_CHECK = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "optimizer", "scheduler", "timers", "flops_profiler"),
    *("comms_logger", "activation_checkpointing", "pipeline", "optimizer.params", "scheduler.params"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "timers.throughput"),
)

_PARTS_THAT_MAY_BE_NULL = (
    *("bf16", "optimizer.params"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
)
_FACTS_WITH_A_TYPE = ("int", "float", "bool", "str", "one")
"""First words of the facts on keys whose type a pydantic model checks."""


class _Limit(NamedTuple):
    """A kind of limit that pydantic knows for numbers."""

    is_within: Callable[[Any, Any], bool]
    """Takes a number and the bound."""
    words: str


_LIMIT_BY_NAME = {
    "gt": _Limit(operator.gt, "greater than"),
    "ge": _Limit(operator.ge, "at least"),
    "lt": _Limit(operator.lt, "less than"),
    "le": _Limit(operator.le, "at most"),
}
_TYPE_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text in quotes",
    "part": "an object: { ... }",
}


def wrong_types(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each value of a wrong type: a string for a number, a number for a switch, a value for a part.

    Yield one too for each value outside the limits or the choices that DeepSpeed's pydantic models declare.
    """
    yield from _wrong_parts(view)
    yield from _wrong_unconverted_values(view)
    yield from _values_that_pydantic_refuses(view)


def _wrong_parts(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each part of the file that is no object, where DeepSpeed needs one."""
    for part in _PARTS_TO_CHECK:
        value = view.value(part)
        if view.has(part) and not isinstance(value, dict) and not _may_stand_for_a_part(part, value):
            yield _wrong_type_finding(view, part, value, "part")


def _wrong_unconverted_values(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each value of a wrong type that DeepSpeed uses without converting it."""
    for key, kind in _UNCONVERTED_TYPES.items():
        value = view.value(key)
        is_to_check = view.has(key) and value is not None and value != "auto"
        if is_to_check and not _is_usable_unconverted(value, kind):
            yield _wrong_type_finding(view, key, value, kind)
        elif key in deepspeed_config.BATCH_KEYS and isinstance(value, float):
            yield _whole_number_as_float(view, key, value)


def _values_that_pydantic_refuses(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield findings on the values that DeepSpeed's pydantic models check."""
    for key in keys_in(view):
        fact = view.release.fact(key.dotted) or ""
        has_checked_type = fact.partition(" ")[0] in _FACTS_WITH_A_TYPE
        if has_checked_type and key.dotted not in _UNCONVERTED_TYPES and key.value != "auto":
            yield from _check_as_pydantic(view, key, fact)


def _whole_number_as_float(view: ConfigurationView, key: str, value: float) -> FileFinding:
    """Return the finding on a batch size such as 8.0."""
    return finding(
        "wrong-type",
        "note",
        key=key,
        message=f"It is {shown(value)}: DeepSpeed computes with it, but its data loader and its pipelines refuse it",
        fix=Remedy(f"Write {value:.0f}", {key: int(value)}),
        source=view.source("runtime/engine.py (deepspeed_io)"),
    )


def _check_as_pydantic(view: ConfigurationView, key: KeyInFile, fact: str) -> Iterator[FileFinding]:
    """Yield a finding where a pydantic model of DeepSpeed's refuses a value.

    Args:
        view: the file.
        key: the key, with its value.
        fact: the table's words on what the model accepts: "int gt=0 or null", "one of 0, 1, 2, 3".
    """
    may_be_null = fact.endswith(" or null")
    if key.value is None and may_be_null:
        return
    accepted = fact.removesuffix(" or null")
    if accepted.startswith("one of "):
        yield from _check_choice(view, key, accepted.removeprefix("one of ").split(", "))
        return
    kind, *limits = accepted.split()  # "int", ["gt=0"]
    if not _converts(key.value, kind):
        yield _wrong_type_finding(view, key.dotted, key.value, kind)
        return
    number = deepspeed_config.as_number(key.value, kind)
    if number is not None:
        yield from _check_limits(view, key, number, limits)


def _check_choice(view: ConfigurationView, key: KeyInFile, valid: list[str]) -> Iterator[FileFinding]:
    """Yield a finding where a value is none of the valid ones, which are words or numbers: ["0", "1", "2", "3"]."""
    are_numbers = all(name.isdigit() for name in valid)
    number = deepspeed_config.as_number(key.value) if are_numbers else None
    text = str(key.value) if number is None else f"{number:g}"
    if text not in valid:
        message = f"It is {shown(key.value)}, but should be one of {', '.join(valid)}"
        fixes = [remove(key.dotted, "Write one of these, or leave it out"), Remedy("Write one of these")]
        yield finding("wrong-value", "error", key.dotted, message, fixes, view.source("runtime/config.py"))


def _check_limits(view: ConfigurationView, key: KeyInFile, number: float, limits: list[str]) -> Iterator[FileFinding]:
    """Yield a finding for each limit that a number violates; limits are written as in the table: ["ge=0", "lt=1"]."""
    for limit in limits:
        name, _, bound = limit.partition("=")
        is_within, words = _LIMIT_BY_NAME[name]
        if not is_within(number, float(bound)):
            message = f"It is {shown(key.value)}, but should be {words} {bound}"
            text = f"Write a number {words} {bound}"
            fixes = [remove(key.dotted, f"{text}, or leave it out"), Remedy(text)]
            yield finding("wrong-value", "error", key.dotted, message, fixes, view.source("runtime/config.py"))


def _may_stand_for_a_part(part: str, value: object) -> bool:
    """Whether DeepSpeed takes a value that is no object in the place of a part."""
    if part == "zero_optimization":
        return isinstance(value, bool)  # the old form
    if value is None:
        return part in _PARTS_THAT_MAY_BE_NULL
    return value == "auto"


def _wrong_type_finding(view: ConfigurationView, key: str, value: object, kind: str) -> FileFinding:
    """Return the finding on a value of a wrong type.

    Args:
        view: the file.
        key: the dotted key.
        value: its value.
        kind: the right type, a key of `_TYPE_IN_WORDS`.
    """
    is_quoted = isinstance(value, str) and kind in ("int", "float", "bool")
    effect = ": DeepSpeed takes any text for true, or fails on it" if is_quoted and key in _UNCONVERTED_SWITCHES else ""
    return finding(
        "wrong-type",
        "error",
        key=key,
        message=f"It is {shown(value)}, but should be {_TYPE_IN_WORDS[kind]}{effect}",
        fix=_advice_for_right_type(view, key, value, kind, is_quoted=is_quoted),
        source=view.source("runtime/config.py"),
    )


def _advice_for_right_type(
    view: ConfigurationView, key: str, value: object, kind: str, *, is_quoted: bool
) -> list[Remedy]:
    """Return advice for a value of a wrong type: write the same value in the right type, or leave the key out."""
    text = f"Write {_TYPE_IN_WORDS[kind]}"
    if is_quoted:
        text += " without quotes"
    conversions = _advice_to_convert(view, key, value, kind, text)
    return [*conversions, remove(key, f"{text}, or leave it out"), Remedy(text)]


def _advice_to_convert(view: ConfigurationView, key: str, value: object, kind: str, text: str) -> list[Remedy]:
    """Return advice to write the same value in the right type; an empty list where that cannot be done.

    Args:
        view: the file.
        key: the dotted key.
        value: the value of a wrong type.
        kind: the right type, a key of `_TYPE_IN_WORDS`.
        text: words of the advice for numbers and switches.
    """
    if kind == "bool":
        flag = deepspeed_config.as_flag(value)
        return [] if flag is None else [Remedy(text, {key: flag})]
    if kind in ("int", "float") and isinstance(value, str):
        number = deepspeed_config.as_number(value, kind)
        return [] if number is None else [Remedy(text, {key: number})]
    if kind == "part" and isinstance(value, bool) and view.release.fact(f"{key}.enabled") is not None:
        return [Remedy(f'Write {{"enabled": {str(value).lower()}}}', {key: {"enabled": value}})]
    if kind == "part" and isinstance(value, str) and key in ("optimizer", "scheduler"):
        return [Remedy(f'Write {{"type": "{value[:40]}", "params": {{}}}}', {key: {"type": value, "params": {}}})]
    return []


def _is_usable_unconverted(value: object, kind: str) -> bool:
    """Whether DeepSpeed can compute with `value` as it is where it expects a `kind`.

    It can with 0 and 1 for switches, and with 4.0 for 4.
    """
    if kind == "bool":
        return isinstance(value, int) and value in (0, 1)
    if kind == "str":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return kind == "float" or deepspeed_config.as_number(value) is not None


def _converts(value: object, kind: str) -> bool:
    """Whether pydantic, unless strict, converts `value` to a `kind`."""
    if kind == "bool":
        return deepspeed_config.as_flag(value) is not None
    if kind == "str":
        return isinstance(value, str)
    return deepspeed_config.as_number(value, kind) is not None


def _auto_names(part: dict[str, Any]) -> list[str]:
    """Return the dotted names of a part's values that are "auto", at any depth, those of the part itself first."""
    names = [name for name, value in part.items() if value == "auto"]
    for name, value in part.items():
        if isinstance(value, dict):
            names += [f"{name}.{inner_name}" for inner_name in _auto_names(value)]
    return names


_MOST_AUTO_LISTED = 20
"""Most findings on values that nothing fills in."""


def values_left_to_an_integration(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield findings on values "auto": one for each that no Hugging Face integration fills in, one on all others.

    In a study vitscale itself hands the file to DeepSpeed: then yield one finding on all of them.
    """
    decided_keys = {*view.target.settled, *DEEPSPEEDS_OWN}
    auto_keys = [key for key in _auto_names(view.config) if key not in decided_keys]
    if view.target.in_a_study:
        yield from _left_to_vitscale(auto_keys)
        return
    unfilled_keys = [key for key in auto_keys if key not in FILLED]
    for key in unfilled_keys[:_MOST_AUTO_LISTED]:
        yield _filled_by_nobody(view, key)
    filled_keys = [key for key in auto_keys if key in FILLED]
    if filled_keys:
        yield _filled_by_integrations(filled_keys)


def _filled_by_integrations(keys: list[str]) -> FileFinding:
    """Return the finding on values "auto", one or more, that the Hugging Face integrations fill in."""
    keys_by_trainer_alone = [key for key in keys if FILLED[key] == (TRAINER,)]
    exception = ""
    if keys_by_trainer_alone:
        exception = f"; Accelerate alone does not fill in {' and '.join(keys_by_trainer_alone)}"
    return finding(
        "auto-value",
        "note",
        key=keys[0] if len(keys) == 1 else "",
        message=f'"auto" stands at {_first_three(keys)}. '
        f"The Hugging Face Trainer and Accelerate fill this in{exception}. "
        'DeepSpeed itself takes "auto" for its default in zero_optimization, bf16 and fp16, and elsewhere fails on '
        "it or takes it for true",
        fix="Without that integration write the values out",
        source=_SOURCE_ON_INTEGRATIONS,
    )


_SOURCE_ON_INTEGRATIONS = (
    "integrations/deepspeed.py of transformers 5.23, utils/dataclasses.py (fill_match) and accelerator.py "
    "(_prepare_deepspeed) of accelerate 1.15, and https://huggingface.co/docs/transformers/main/en/deepspeed"
)


def _first_three(keys: list[str]) -> str:
    """Return "a, b, c and 2 more"."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def _filled_by_nobody(view: ConfigurationView, key: str) -> FileFinding:
    """Return the finding on a value "auto" that no integration fills in, so that they fail when training starts.

    Args:
        view: the file.
        key: the dotted key of the value.
    """
    part, _, name = key.rpartition(".")
    fixes = []
    other_name = f"stage3_{name}"
    other_key = f"{part}.{other_name}"
    is_other_name_filled = part != "" and other_key in FILLED
    if is_other_name_filled and not view.has(other_key):
        text = f'Write "{other_name}": "auto", which they do fill in'
        fixes.append(Remedy(text, {key: REMOVED, other_key: "auto"}))
    fixes.append(remove(key, "Write the value out, or leave the key out for DeepSpeed's default"))
    return finding(
        "auto-value",
        "error",
        key=key,
        message=(
            '"auto" stands under a name that no integration fills in: the Hugging Face Trainer and Accelerate end '
            'at the start with "not found in kwargs"; DeepSpeed itself takes "auto" for its default in '
            "zero_optimization, bf16 "
            "and fp16, and elsewhere fails on it or takes it for true"
        ),
        fix=fixes,
        source=_SOURCE_ON_INTEGRATIONS,
    )


def _left_to_vitscale(keys: list[str]) -> Iterator[FileFinding]:
    """Yield the finding on values "auto", if any, in a study's file, which vitscale itself hands to DeepSpeed."""
    if keys:
        yield finding(
            "auto-value",
            "note",
            key=keys[0] if len(keys) == 1 else "",
            message=f'"auto" stands at {_first_three(keys)}. '
            "vitscale takes lr and weight_decay of the optimizer from the study, and leaves the rest to DeepSpeed's "
            "default",
            fix="Write the values out where the defaults do not suit",
            source="docs/study-file.md",
        )
