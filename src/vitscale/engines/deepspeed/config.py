"""The user's own DeepSpeed configuration: reading it, and checking it against the study.

The study cannot vary what the file fixes. A field that the study leaves open is taken from the file; a field that both
set must agree. Batch sizes are the study's to set, so the file leaves them out or says "auto".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitscale.base.files import read_text
from vitscale.errors import RequestError, shown, wrong_value
from vitscale.trial.trial import TrainSpec, ZeroStage

_DEEPEST_NESTING = 20
"""Deepest nesting of a file."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MOST_DIGITS = 1000
"""Longest whole number of a file."""
_LONGEST_HJSON_LINE = 2000
"""Longest line of a file that is no JSON, in characters."""


class _Section(BaseModel):
    """Keys of a configuration that this program reads; DeepSpeed judges the others."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class _Switch(_Section):
    """A section that switches a precision on."""

    enabled: bool | None = None
    dtype: str | None = None


class _Zero(_Section):
    stage: ZeroStage | None = None


class _OptimizerParams(_Section):
    lr: float | None = Field(default=None, gt=0.0)
    weight_decay: float | None = Field(default=None, ge=0.0)
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)


class _Optimizer(_Section):
    type: str
    params: _OptimizerParams = _OptimizerParams()


class _ReadKeys(_Section):
    """All keys of a configuration that this program reads."""

    train_batch_size: int | None = Field(default=None, ge=1)
    train_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    gradient_clipping: float | None = Field(default=None, ge=0.0)
    communication_data_type: str | None = None
    zero_optimization: _Zero = _Zero()
    bf16: _Switch | None = None
    bfloat16: _Switch = _Switch()
    """The old name of `bf16`; DeepSpeed reads it where there is no `bf16` (`get_bfloat16_config`)."""
    fp16: _Switch = _Switch()
    torch_autocast: _Switch = _Switch()
    optimizer: _Optimizer | None = None
    wall_clock_breakdown: bool = False


def read(path: Path) -> dict[str, Any]:
    """Return the values of a DeepSpeed file for a study.

    Raises:
        RequestError: it cannot be read (see `load`), or gives a value of the wrong type to a key
            that this program looks at.
    """
    config = load(path, next_step="train.deepspeed_config names a JSON file").values
    _read_keys(config)
    return config


class File(NamedTuple):
    """A DeepSpeed file: its text, and the values that DeepSpeed makes of it."""

    text: str
    values: dict[str, Any]


def load(path: Path, *, next_step: str) -> File:
    """Return a DeepSpeed file of at most 1 MiB, whatever its keys and values.

    Raises:
        RequestError: it is missing, too large, no text, or `parse` refuses it.
    """
    text = read_text(path, "DeepSpeed configuration", next_step=next_step)
    return File(text, parse(text, shown(str(path))))


def parse(text: str, file_name: str) -> dict[str, Any]:
    """Return the values that DeepSpeed makes of the text of its file.

    DeepSpeed reads a file with `hjson.load` and refuses a key that stands twice (`DeepSpeedConfig.__init__` in
    deepspeed/runtime/config.py, all releases since 0.8.1). Hjson is JSON with comments, commas that trail or lack,
    and texts without quotes; a number without a fraction becomes an int below 1e10, so that 5e8 is 500000000.

    Raises:
        RequestError: it is no Hjson (with line and column where they are known), holds a key twice, is nested too
            deeply, or is no object.
    """
    try:
        config = _values(text)
        _check_storable(config)
    except RecursionError:
        raise RequestError(f"{file_name} is nested too deeply", valid=[f"{_DEEPEST_NESTING} levels"]) from None
    except IndexError:  # what hjson 3.1 raises where a comment or a text of several lines never ends
        raise RequestError(f"{file_name} is no JSON or Hjson: a comment or a text in it has no end") from None
    except ValueError as error:
        raise RequestError(f"{file_name} is no JSON or Hjson{_place_and_reason(error)}") from None
    if not isinstance(config, dict):
        raise RequestError(f"{file_name} holds {shown(config)}", valid=["one object: { ... }"])
    return config


def is_json(text: str) -> bool:
    """Return whether a text that `parse` reads is JSON too, which is all that Transformers and Accelerate read."""
    try:
        json.loads(text, parse_int=_whole_number, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


class _RefusedValue(ValueError):
    """A value in the file that this program does not take, in whatever form it is written."""


def _values(text: str) -> Any:
    """Return the values of a text: of JSON by the parser for it, which is a hundred times as fast, else of Hjson.

    Raises:
        ValueError: it is neither; where JSON fails for NaN or Infinity alone, the error is JSON's.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, **_PARSING_HOOKS)
    except _RefusedValue:
        raise
    except ValueError as error:
        json_error = error
    # hjson looks at a text without quotes again at each comma in it, which takes time by the square of its length.
    longest = max(map(len, text.splitlines()), default=0)
    if longest > _LONGEST_HJSON_LINE:
        reason = f"a line of {longest:,} characters is too long for Hjson, and as JSON it is wrong"
        raise ValueError(f"{reason}{_place_and_reason(json_error)}")
    import hjson

    try:
        return hjson.loads(text, **_PARSING_HOOKS)
    except hjson.HjsonDecodeError:
        if isinstance(json_error, json.JSONDecodeError):
            raise
        raise json_error from None  # NaN or Infinity


def _place_and_reason(error: ValueError) -> str:
    """Return the place and reason of a parser's error: " at line 3, column 5: ..."; ": ..." where it has no place."""
    line = getattr(error, "lineno", None)
    column = getattr(error, "colno", None)
    if line is None or column is None:
        return f": {error}"
    message = str(getattr(error, "msg", error))
    without_hint = message.partition(" (")[0]  # hjson adds hints in brackets
    reason = without_hint.replace("%r", "").strip().removesuffix("at").strip()
    return f" at line {line}, column {column}: {reason}"


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dict; a key that stands twice is refused."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _RefusedValue(f"key {shown(key)} stands twice in one object")
        content[key] = value
    return content


def _whole_number(text: str) -> int:
    """Return a whole number, unless it has more digits than `_MOST_DIGITS`."""
    if len(text) > _MOST_DIGITS:
        raise _RefusedValue(f"a whole number in it has {len(text):,} digits")
    return int(text)


def _number(text: str) -> int | float:
    """Return a number as hjson does: below 1e10 one without a fraction becomes an int."""
    number = float(text)
    if not math.isfinite(number):
        raise _RefusedValue("a number in it is too large for a float")
    return int(number) if abs(number) < 1e10 and number.is_integer() else number


_PARSING_HOOKS: dict[str, Any] = {
    "object_pairs_hook": _object_of_unique_keys,
    "parse_int": _whole_number,
    "parse_float": _number,
}
"""Arguments that json and hjson share."""


def _refuse_constant(name: str) -> float:
    """Refuse NaN, Infinity and -Infinity, which Python's parser takes."""
    raise ValueError(f"{name} is no JSON number")


def _check_storable(value: object, depth: int = 0) -> None:
    """Check that a value is read back as it is stored.

    Raises:
        RecursionError: it is nested too deeply.
        ValueError: it holds infinity (1e999), or half of a character.
    """
    if depth > _DEEPEST_NESTING:
        raise RecursionError
    if isinstance(value, dict):
        for key, item in value.items():
            _check_storable(key)
            _check_storable(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_storable(item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number in it is too large for a float")
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{shown(value)} holds half of a character")


def _read_keys(config: dict[str, Any]) -> _ReadKeys:
    """Return the keys that this program reads; those that are "auto" count as absent.

    Raises:
        RequestError: one has a value of the wrong type.
    """
    try:
        return _ReadKeys.model_validate(_without_auto(config))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise RequestError(
            "the DeepSpeed configuration: " + wrong_value(problem, next_step="Correct it there, or take it out")
        ) from None


def _without_auto(value: Any) -> Any:
    """Return a value without the keys that Hugging Face's integration sets to "auto", as if they were not there."""
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(item) for key, item in value.items() if item != "auto"}


def fixed_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the study fields that the file decides, by dotted name ("train.precision"), with the file's value.

    Raises:
        RequestError: two precisions are enabled at once, or autocast to another type than bfloat16.
    """
    keys = _read_keys(config)
    fixed: dict[str, Any] = {
        "train.gradient_clipping": keys.gradient_clipping,
        "train.zero_stage": keys.zero_optimization.stage,
        "train.precision": _precision(keys),
        "train.gradient_dtype": keys.communication_data_type and keys.communication_data_type.lower(),
    }
    if keys.optimizer is not None:
        params = keys.optimizer.params
        fixed["train.optimizer"] = keys.optimizer.type
        fixed["train.learning_rate"] = params.lr
        fixed["train.weight_decay"] = params.weight_decay
        fixed["train.momentum"] = params.momentum
    return {field: value for field, value in fixed.items() if value is not None}


def _precision(keys: _ReadKeys) -> str | None:
    """Return the precision that the file switches on; None where it says nothing."""
    switches = {"bf16-params": keys.bf16 or keys.bfloat16, "fp16": keys.fp16, "bf16": keys.torch_autocast}
    enabled = [precision for precision, switch in switches.items() if switch.enabled]
    if len(enabled) > 1:
        what = f"the DeepSpeed configuration enables {' and '.join(enabled)} at once"
        raise RequestError(what, valid=["one of bf16.enabled, fp16.enabled and torch_autocast.enabled"])
    if not enabled:
        # Autocast is refused and nothing else asked for, which leaves fp32.
        return "fp32" if keys.torch_autocast.enabled is False else None
    dtype = keys.torch_autocast.dtype
    if enabled == ["bf16"] and dtype not in (None, "bfloat16", "bf16", "torch.bfloat16"):
        raise RequestError(f"torch_autocast.dtype is {shown(dtype)} in the DeepSpeed configuration", valid=["bfloat16"])
    return enabled[0]


def contradictions(config: dict[str, Any], study_values: Mapping[str, Any]) -> list[str]:
    """Return how file and study disagree: one sentence for each field, naming both values.

    Args:
        config: the file.
        study_values: the fields set by hand in the study, by dotted name, with their values.
    """
    file_values = fixed_fields(config)
    disagreements = (_contradiction(config, file_values, field, value) for field, value in study_values.items())
    return [sentence for sentence in disagreements if sentence is not None]


def _contradiction(
    config: dict[str, Any], file_values: Mapping[str, Any], field: str, study_value: object
) -> str | None:
    """Return how the file disagrees with a field of the study; None where it does not.

    It may give the field another value; set the same by a key of its own, in another unit; or describe an optimizer
    without the key, so that DeepSpeed's default would count.
    """
    if field in file_values:
        file_value = file_values[field]
        if _is_same(field, study_value, file_value):
            return None
        return f"{field} is {shown(study_value)} in the study but {shown(file_value)} in the DeepSpeed configuration"
    key = _key_set_too(config, field)
    if key is not None:
        return f"{field} is {shown(study_value)} in the study, and the DeepSpeed configuration sets {key} too"
    describes_optimizer = "train.optimizer" in file_values
    key = _OPTIMIZER_KEY_BY_FIELD.get(field)
    if describes_optimizer and key is not None and not _optimizer_says_auto(config, key):
        return (
            f"{field} is {shown(study_value)} in the study, but the DeepSpeed configuration describes the optimizer "
            f'and leaves {key} to DeepSpeed (say "{key}": "auto" there to take the study\'s)'
        )
    return None


def _is_same(field: str, study_value: object, file_value: object) -> bool:
    """Whether study and file give a field the same value; the file may write "AdamW" for adamw."""
    if field == "train.optimizer":
        return str(study_value).lower() == str(file_value).lower()
    return study_value == file_value


_ZERO_KEYS_BY_FIELD: dict[str, tuple[str, ...]] = {
    "train.offload": ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"),
    "train.overlap_comm": ("overlap_comm",),
    "train.bucket_mib": ("reduce_bucket_size",),
    "train.gather_bucket_mib": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
}
"""Fields of a study that are keys of the file's zero_optimization too, under other names or in other units: only one
may set them."""
_SCHEDULED_FIELDS = ("train.learning_rate_warmup_steps", "train.learning_rate_scaling")
"""Fields of a study that the file's scheduler sets too."""


def _key_set_too(config: dict[str, Any], field: str) -> str | None:
    """Return the key of the file that sets what `field` of the study sets; None: there is none."""
    zero = config.get("zero_optimization")
    for key in _ZERO_KEYS_BY_FIELD.get(field, ()):
        if isinstance(zero, dict) and zero.get(key, "auto") != "auto":
            return f"zero_optimization.{key}"
    has_scheduler = config.get("scheduler", "auto") != "auto"
    return "scheduler" if has_scheduler and field in _SCHEDULED_FIELDS else None


_OPTIMIZER_KEY_BY_FIELD = {
    "train.learning_rate": "lr",
    "train.learning_rate_scaling": "lr",
    "train.weight_decay": "weight_decay",
}
"""Field of a study -> the parameter of the file's optimizer that sets the same."""


def _optimizer_says_auto(config: dict[str, Any], key: str) -> bool:
    """Whether the file leaves a parameter of its optimizer, such as "lr", to the study."""
    params = config["optimizer"].get("params")
    return isinstance(params, dict) and params.get(key) == "auto"


def batch_values(config: dict[str, Any]) -> dict[str, int]:
    """Return the keys among `BATCH_KEYS` to which the file gives a number, with that number."""
    return _read_keys(config).model_dump(include={*BATCH_KEYS}, exclude_none=True)


def check_batch(config: dict[str, Any], mode: str, trial_values: dict[str, int]) -> None:
    """Check that the file's numeric batch keys agree with one trial.

    Args:
        config: the file.
        mode: the batch policy; a numeric `train_batch_size` fits strong-global only.
        trial_values: each of `BATCH_KEYS` with this trial's value.

    Raises:
        RequestError: they do not; the error names both values, and the keys to remove.
    """
    file_values = batch_values(config)
    problems = []
    for key, value in file_values.items():
        if key == "train_batch_size" and mode != "strong-global":
            problems.append(
                f"{key} is {value}, but under scaling.mode = '{mode}' the global batch follows the rank count"
            )
        elif value != trial_values[key]:
            problems.append(f"{key} is {value} in the file but {trial_values[key]} in the study")
    if problems:
        raise RequestError(
            f"the DeepSpeed configuration contradicts the study: {'; '.join(problems)}",
            next_step=f'Remove {", ".join(file_values)} from the file (or set to "auto"): the study sets them',
        )


def synchronised(config: dict[str, Any] | None) -> bool:
    """Return whether the file asks for timers that wait for the device; these slow the step that they measure."""
    return config is not None and config.get("wall_clock_breakdown") is True


def flag(train: TrainSpec, key: str) -> bool | None:
    """Return a switch of `zero_optimization` in the user's file; None where that does not set it."""
    return as_flag(section(train.deepspeed_config, "zero_optimization").get(key))


def section(config: dict[str, Any] | None, key: str) -> dict[str, Any]:
    """Return a section of a DeepSpeed file; {} where it has none, or something else in its place."""
    value = (config or {}).get(key)
    return value if isinstance(value, dict) else {}


_FLAG_BY_WORD = dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True) | dict.fromkeys(
    ("false", "f", "no", "n", "off", "0"), False
)
"""Words of https://docs.pydantic.dev/latest/concepts/conversion_table/"""
_LARGEST_WHOLE_NUMBER = 2**63


def as_flag(value: object) -> bool | None:
    """Return the boolean that pydantic, and so DeepSpeed's models, makes of `value`; None where it refuses."""
    if isinstance(value, str):
        return _FLAG_BY_WORD.get(value.lower())
    is_flag = isinstance(value, bool | int | float) and value in (0, 1)
    return bool(value) if is_flag else None


def as_number(value: object, kind: str = "int") -> int | float | None:
    """Return the number that pydantic makes of `value` for an "int" or a "float"; None where it refuses.

    Example: " 5.00 " is the int 5, and "5.5" is none.
    """
    if isinstance(value, str):
        value = _number_in_text(value, kind)
    if isinstance(value, float):
        is_taken = kind == "float" or (value.is_integer() and abs(value) < _LARGEST_WHOLE_NUMBER)
        return value if is_taken else None
    if isinstance(value, int):
        return min(max(value, -_LARGEST_WHOLE_NUMBER), _LARGEST_WHOLE_NUMBER)
    return None


def _number_in_text(text: str, kind: str) -> int | float | None:
    """Return the number that pydantic reads in a text for an "int" or a "float": 5 for " 5.00 "; None without one."""
    try:
        if kind == "float":
            return float(text)
        whole_part, _, decimals = text.strip().partition(".")
        has_inner_blank = whole_part != whole_part.strip()
        has_fraction = decimals.strip("0") != ""
        if not text.isascii() or has_inner_blank or has_fraction:
            return None
        return int(whole_part)
    except ValueError:
        return None
