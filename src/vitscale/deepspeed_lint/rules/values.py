"""Values: of the wrong type, or left open for the Hugging Face integration to fill in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from vitscale.deepspeed_lint.advice import REMOVED, Advice, FileFinding, remove
from vitscale.deepspeed_lint.integrations import DEEPSPEEDS_OWN, FILLED, TRAINER
from vitscale.deepspeed_lint.view import View, finding, keys_of
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import shown

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


def wrong_types(view: View) -> Iterator[FileFinding]:
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
                Advice(f"Write {value:.0f}", {key: int(value)}), view.source("runtime/engine.py (deepspeed_io)"),
            )  # fmt: skip
    for key, _, _, value in keys_of(view, view.config):
        fact = view.release.fact(key) or ""
        if fact.partition(" ")[0] in _HELD and key not in _READ_AS_THEY_ARE and value != "auto":
            yield from _in_model(view, key, value, fact)


def _in_model(view: View, key: str, value: object, fact: str) -> Iterator[FileFinding]:
    """Checks a value as pydantic does, against the type and limits in `fact` ("int gt=0"), or several valid values."""
    may_be_null, fact = fact.endswith(" or null"), fact.removesuffix(" or null")
    if value is None and may_be_null:
        return
    if fact.startswith("one of "):
        valid = fact.removeprefix("one of ").split(", ")
        number = deepspeed_config.as_number(value) if all(name.isdigit() for name in valid) else None
        if (str(value) if number is None else f"{number:g}") not in valid:
            message = f"It is {shown(value)}, but should be one of {', '.join(valid)}"
            fix = [remove(key, "Write one of these, or leave it out"), Advice("Write one of these")]
            yield finding("wrong-value", "error", key, message, fix, view.source("runtime/config.py"))
        return
    kind, *limits = fact.split()
    if not _converts(value, kind):
        yield _wrong(view, key, value, kind)
        return
    number = deepspeed_config.as_number(value, kind)
    for limit in limits if number is not None else ():
        name, _, bound = limit.partition("=")
        holds, words = _LIMITS[name]
        if not holds(number, float(bound)):
            message = f"It is {shown(value)}, but should be {words} {bound}"
            text = f"Write a number {words} {bound}"
            fix = [remove(key, f"{text}, or leave it out"), Advice(text)]
            yield finding("wrong-value", "error", key, message, fix, view.source("runtime/config.py"))


def _may_stand_for_a_part(part: str, value: object) -> bool:
    if part == "zero_optimization":
        return isinstance(value, bool)  # the old form
    return (value is None and part in _MAY_BE_NULL) or value == "auto"


def _wrong(view: View, key: str, value: object, kind: str) -> FileFinding:
    quoted = isinstance(value, str) and kind in ("int", "float", "bool")
    taken = ": DeepSpeed takes any text for true, or fails on it" if quoted and key in _SWITCHES else ""
    return finding(
        "wrong-type", "error", key, f"It is {shown(value)}, but should be {_IN_WORDS[kind]}{taken}",
        _right_type(view, key, value, kind, quoted=quoted), view.source("runtime/config.py"),
    )  # fmt: skip


def _right_type(view: View, key: str, value: object, kind: str, *, quoted: bool) -> list[Advice]:
    """Advice for a value of a wrong type: the same value in the right one, else none, which is the default."""
    text = f"Write {_IN_WORDS[kind]}" + (" without quotes" if quoted else "")
    meant = (
        deepspeed_config.as_flag(value)
        if kind == "bool"
        else deepspeed_config.as_number(value, kind)
        if quoted
        else None
    )
    written = [] if meant is None else [Advice(text, {key: meant})]
    if kind == "part" and isinstance(value, bool) and view.release.fact(f"{key}.enabled") is not None:
        written = [Advice(f'Write {{"enabled": {str(value).lower()}}}', {key: {"enabled": value}})]
    if kind == "part" and isinstance(value, str) and key in ("optimizer", "scheduler"):
        written = [Advice(f'Write {{"type": "{value[:40]}", "params": {{}}}}', {key: {"type": value, "params": {}}})]
    return [*written, remove(key, f"{text}, or leave it out"), Advice(text)]


def _is(value: object, kind: str) -> bool:
    """Whether DeepSpeed can compute with `value` as it is: with 0 and 1 for switches, and with 4.0 for 4."""
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


def _left_open(part: dict[str, Any]) -> list[str]:
    """Dotted names of a part's values that are "auto", at any depth."""
    inside = [name for name, value in part.items() if value == "auto"]
    deeper = [(name, _left_open(value)) for name, value in part.items() if isinstance(value, dict)]
    return inside + [f"{name}.{rest}" for name, names in deeper for rest in names]


_MOST_AUTO = 20
"""Most findings on values that nothing fills in."""


def values_left_to_an_integration(view: View) -> Iterator[FileFinding]:
    """Values "auto": which the Hugging Face integrations fill in, and on which they fail."""
    keys = [key for key in _left_open(view.config) if key not in view.setting.settled and key not in DEEPSPEEDS_OWN]
    if view.setting.in_a_study:
        yield from _left_to_vitscale(keys)
        return
    unfilled = [key for key in keys if key not in FILLED]
    for key in unfilled[:_MOST_AUTO]:
        yield _not_filled(view, key)
    filled = [key for key in keys if key in FILLED]
    if filled:
        of_the_trainer = [key for key in filled if FILLED[key] == (TRAINER,)]
        alone = f"; Accelerate alone does not fill in {' and '.join(of_the_trainer)}" if of_the_trainer else ""
        yield finding(
            "auto-value", "note", filled[0] if len(filled) == 1 else "",
            f'"auto" stands at {_several(filled)}. The Hugging Face Trainer and Accelerate fill this in{alone}. '
            'DeepSpeed itself takes "auto" for its default in zero_optimization, bf16 and fp16, and elsewhere fails on '
            "it or takes it for true",
            "Without that integration write the values out", _INTEGRATIONS,
        )  # fmt: skip


_INTEGRATIONS = (
    "integrations/deepspeed.py of transformers 5.23, utils/dataclasses.py (fill_match) and accelerator.py "
    "(_prepare_deepspeed) of accelerate 1.15, and https://huggingface.co/docs/transformers/main/en/deepspeed"
)


def _several(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def _not_filled(view: View, key: str) -> FileFinding:
    """A value "auto" under a name that no integration fills in, so that they end with an error at the start."""
    part, _, name = key.rpartition(".")
    other = f"{part}.stage3_{name}" if part else key
    fixes = [remove(key, "Write the value out, or leave the key out for DeepSpeed's default")]
    if other in FILLED and not view.has(other):
        fixes.insert(
            0,
            Advice(f'Write "{other.rpartition(".")[2]}": "auto", which they do fill in', {key: REMOVED, other: "auto"}),
        )
    return finding(
        "auto-value", "error", key,
        '"auto" stands under a name that no integration fills in: the Hugging Face Trainer and Accelerate end at the '
        'start with "not found in kwargs"; DeepSpeed itself takes "auto" for its default in zero_optimization, bf16 '
        "and fp16, and elsewhere fails on it or takes it for true",
        fixes, _INTEGRATIONS,
    )  # fmt: skip


def _left_to_vitscale(keys: list[str]) -> Iterator[FileFinding]:
    """Values "auto" in the file of a study, which vitscale itself hands to DeepSpeed."""
    if keys:
        yield finding(
            "auto-value", "note", keys[0] if len(keys) == 1 else "",
            f'"auto" stands at {_several(keys)}. vitscale takes lr and weight_decay of the optimizer from the study, '
            "and leaves the rest to DeepSpeed's default",
            "Write the values out where the defaults do not suit", "docs/study-file.md",
        )  # fmt: skip
