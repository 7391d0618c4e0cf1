"""Values: of the wrong type, or left open for the Hugging Face integration to fill in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from vitscale.errors import shown
from vitscale.lint.view import View, finding, keys_of
from vitscale.present.document import Finding
from vitscale.trial import deepspeed_config, engines

_SWITCHES = (
    *("wall_clock_breakdown", "memory_breakdown", "prescale_gradients", "dump_state", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "torch_autocast.enabled", "flops_profiler.enabled", "flops_profiler.detailed"),
    *("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"),
    *("activation_checkpointing.contiguous_memory_optimization",),
)
_READ_AS_THEY_ARE = {
    **dict.fromkeys((*deepspeed_config.BATCH_KEYS, "steps_per_print"), "int"),
    "gradient_clipping": "float",
    "gradient_predivide_factor": "float",
    **dict.fromkeys(_SWITCHES, "bool"),
    "optimizer.type": "str",
    "scheduler.type": "str",
    "communication_data_type": "str",
    "optimizer.params.lr": "float",
    "optimizer.params.weight_decay": "float",
}
"""Types of values that DeepSpeed uses as they are, without a pydantic model that would convert or refuse them."""

_PARTS = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "optimizer", "scheduler", "timers", "flops_profiler"),
    *("comms_logger", "activation_checkpointing", "pipeline", "optimizer.params", "scheduler.params"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "timers.throughput"),
)

_MAY_BE_NULL = ("bf16", "optimizer.params", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_HELD = ("int", "float", "bool", "str", "one")
"""First words of the facts on keys whose type a pydantic model checks."""

_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "gt": (operator.gt, "greater than"),
    "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "less than"),
    "le": (operator.le, "at most"),
}
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text in quotes",
    "part": "an object: { ... }",
}


def wrong_types(view: View) -> Iterator[Finding]:
    """Values of a wrong type, such as a string for a number, a number for a switch, a value for a part."""
    for part in _PARTS:
        value = view.value(part)
        if view.has(part) and not isinstance(value, dict) and not _may_stand_for_a_part(part, value):
            yield _wrong(view, part, value, "part")
    for key, kind in _READ_AS_THEY_ARE.items():
        value = view.value(key)
        if view.has(key) and value is not None and value != "auto" and not _is(value, kind):
            yield _wrong(view, key, value, kind)
        elif key in deepspeed_config.BATCH_KEYS and isinstance(value, float):
            yield finding(
                "wrong-type", "note", key,
                f"It is {shown(value)}: DeepSpeed computes with it, but its data loader and its pipelines refuse it",
                f"Write {value:.0f}", view.source("runtime/engine.py (deepspeed_io)"),
            )  # fmt: skip
    for key, _, _, value in keys_of(view, view.config):
        fact = view.release.fact(key) or ""
        if fact.partition(" ")[0] in _HELD and key not in _READ_AS_THEY_ARE and value != "auto":
            yield from _in_model(view, key, value, fact)


def _in_model(view: View, key: str, value: object, fact: str) -> Iterator[Finding]:
    """Checks a value as pydantic does, against the type and limits in `fact` ("int gt=0"), or several valid values."""
    may_be_null, fact = fact.endswith(" or null"), fact.removesuffix(" or null")
    if value is None and may_be_null:
        return
    if fact.startswith("one of "):
        valid = fact.removeprefix("one of ").split(", ")
        number = engines.as_number(value) if all(name.isdigit() for name in valid) else None
        if (str(value) if number is None else f"{number:g}") not in valid:
            message, fix = f"It is {shown(value)}, but should be one of {', '.join(valid)}", "Write one of these"
            yield finding("wrong-value", "error", key, message, fix, view.source("runtime/config.py"))
        return
    kind, *limits = fact.split()
    if not _converts(value, kind):
        yield _wrong(view, key, value, kind)
        return
    number = engines.as_number(value, kind)
    for limit in limits if number is not None else ():
        name, _, bound = limit.partition("=")
        holds, words = _LIMITS[name]
        if not holds(number, float(bound)):
            message, fix = f"It is {shown(value)}, but should be {words} {bound}", f"Write a number {words} {bound}"
            yield finding("wrong-value", "error", key, message, fix, view.source("runtime/config.py"))


def _may_stand_for_a_part(part: str, value: object) -> bool:
    if part == "zero_optimization":
        return isinstance(value, bool)  # the old form
    return (value is None and part in _MAY_BE_NULL) or value == "auto"


def _wrong(view: View, key: str, value: object, kind: str) -> Finding:
    quoted = isinstance(value, str) and kind in ("int", "float", "bool")
    taken = ": DeepSpeed takes any text for true, or fails on it" if quoted and key in _SWITCHES else ""
    return finding(
        "wrong-type", "error", key, f"It is {shown(value)}, but should be {_IN_WORDS[kind]}{taken}",
        f"Write {_IN_WORDS[kind]}" + (" without quotes" if quoted else ""), view.source("runtime/config.py"),
    )  # fmt: skip


def _is(value: object, kind: str) -> bool:
    """Whether DeepSpeed can compute with `value` as it is: with 0 and 1 for switches, and with 4.0 for 4."""
    if kind == "bool":
        return isinstance(value, int) and value in (0, 1)
    if kind == "str":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return kind == "float" or engines.as_number(value) is not None


def _converts(value: object, kind: str) -> bool:
    """Whether pydantic, unless strict, converts `value` to a `kind`."""
    if kind == "bool":
        return engines.as_flag(value) is not None
    if kind == "str":
        return isinstance(value, str)
    return engines.as_number(value, kind) is not None


_NOT_FILLED_IN = ("wall_clock_breakdown", "steps_per_print", "communication_data_type", "flops_profiler")
"""What the Hugging Face Trainer leaves as it is: `fill_match` in transformers/integrations/deepspeed.py."""


def _left_open(part: dict[str, Any]) -> list[str]:
    """Dotted names of a part's values that are "auto", at any depth."""
    inside = [name for name, value in part.items() if value == "auto"]
    deeper = [(name, _left_open(value)) for name, value in part.items() if isinstance(value, dict)]
    return inside + [f"{name}.{rest}" for name, names in deeper for rest in names]


def _integrated(keys: list[str]) -> str:
    never = [key for key in keys if key.partition(".")[0] in _NOT_FILLED_IN]
    most = "The Hugging Face Trainer and Accelerate fill in what they have an argument for"
    return f"{most}, which {' and '.join(never[:2])} is not among" if never else most


def values_left_to_an_integration(view: View) -> Iterator[Finding]:
    """Values "auto", which the Hugging Face Trainer and Accelerate fill in, but not DeepSpeed itself."""
    keys = [key for key in _left_open(view.config) if key not in view.setting.settled]
    of_both = ("optimizer.params.", "scheduler.params.")
    known = [key for key in keys if view.release.fact(key) is not None or key.startswith(of_both)]
    if known:
        several = ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
        yield finding(
            "auto-value", "note", known[0] if len(known) == 1 else "",
            f'"auto" stands at {several}. {_integrated(known)}; DeepSpeed itself takes "auto" for its default in '
            "zero_optimization, bf16 and fp16, and elsewhere fails on it or takes it for true",
            "Without that integration write the values out",
            "https://huggingface.co/docs/transformers/main/en/deepspeed and "
            + view.source("runtime/config_utils.py"),
        )  # fmt: skip
