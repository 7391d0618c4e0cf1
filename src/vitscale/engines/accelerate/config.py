"""Reads the file of `accelerate launch --config_file` (default_config.yaml) as plain values. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vitscale.base.files import read_text
from vitscale.errors import RequestError, shown

SUFFIXES = (".yaml", ".yml")
"""Suffixes by which a file is taken for Accelerate's; DeepSpeed's files are JSON."""
_DEEPEST_NESTING = 20
_NEXT_STEP = "Give the file that accelerate config writes"


class AccelerateFile(NamedTuple):
    """An Accelerate file."""

    values: dict[str, Any]
    """Its values as YAML has them: an unquoted `no` is False."""
    line_by_key: dict[str, int]
    """Dotted key -> its line, from 1."""


def load(path: Path) -> AccelerateFile:
    """Return an Accelerate file of at most 1 MiB, whatever its keys and values.

    Raises:
        RequestError: it is missing, too large, no YAML, no table, holds a key twice, is nested too deeply, or has
            aliases, by which a small file stands for a huge one.
    """
    # Here, because only a file of this kind needs it.
    import yaml

    file_name = shown(str(path))
    text = read_text(path, "Accelerate configuration", next_step=_NEXT_STEP)
    try:
        _refuse_deep_or_aliased(text, file_name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date such as 2024-99-99
        raise RequestError(f"{file_name} is no YAML: {_reason(error)}", next_step=_NEXT_STEP) from None
    if not isinstance(values, dict):
        raise RequestError(f"{file_name} holds {shown(values)}", valid=["a table of keys"], next_step=_NEXT_STEP)
    return AccelerateFile(values, _lines_of_keys(root, file_name))


def _refuse_deep_or_aliased(text: str, file_name: str) -> None:
    """Refuse a file that is nested too deeply or has aliases, before anything is built from it.

    Raises:
        RequestError: it is such a file.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise RequestError(f"{file_name} has aliases (*{event.anchor})", next_step="Write the values out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST_NESTING:
            raise RequestError(f"{file_name} is nested too deeply", valid=[f"{_DEEPEST_NESTING} levels"])


def _reason(error: Exception) -> str:
    """Return a parser's message on one line."""
    return shown(" ".join(str(error).split()))


def _lines_of_keys(root: Any, file_name: str) -> dict[str, int]:
    """Return the line of each key of the file and of its sections.

    Args:
        root: the file's node, as `yaml.compose` gives it.
        file_name: the file in messages.

    Raises:
        RequestError: a key stands twice in a table: YAML's readers take the last without a word.
    """
    import yaml

    line_by_key: dict[str, int] = {}
    for key_node, value_node in root.value:
        _add_line(line_by_key, str(key_node.value), key_node, file_name)
        if isinstance(value_node, yaml.MappingNode):
            for inner_node, _ in value_node.value:
                _add_line(line_by_key, f"{key_node.value}.{inner_node.value}", inner_node, file_name)
    return line_by_key


def _add_line(line_by_key: dict[str, int], key: str, node: Any, file_name: str) -> None:
    """Add a key with its line.

    Raises:
        RequestError: the key is there already.
    """
    line = node.start_mark.line + 1
    if key in line_by_key:
        raise RequestError(f"{file_name} holds {shown(key)} twice, in lines {line_by_key[key]} and {line}")
    line_by_key[key] = line


def flag(value: object) -> bool | None:
    """Return a switch as Accelerate reads it (`str_to_bool`); None where it is none."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True
    if word in ("n", "no", "f", "false", "off", "0"):
        return False
    return None


def whole_number(value: object) -> int | None:
    """Return a count of 1 or more; None where the value is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    text = str(value) if isinstance(value, str) or abs(value) < 10**9 else ""
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) > 0 else None


def section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section's values; empty where it is missing or no table."""
    found = values.get(name)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def word(value: object) -> str:
    """Return a name in capital letters, as Accelerate compares it. YAML's unquoted `no` is "NO"."""
    return "NO" if value is False else str(value).upper()


def fsdp_version(values: dict[str, Any]) -> int:
    """Return which FSDP of torch the file asks for: 1 by default, in all releases up to Accelerate 1.15."""
    return 2 if whole_number(section(values, "fsdp_config").get("fsdp_version")) == 2 else 1


SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's strategies, in the order of the numbers 1 to 5 that older files have."""


def sharding_strategy(values: dict[str, Any]) -> str | None:
    """Return FSDP1's strategy as `accelerate launch` passes it on; None where the file's is none of them.

    A file of version 1 may have it under `fsdp_reshard_after_forward`, where the questionnaire of Accelerate 1.15
    writes it; `FullyShardedDataParallelPlugin` does not read it there.
    """
    value = section(values, "fsdp_config").get("fsdp_sharding_strategy", "FULL_SHARD")
    number = whole_number(value)
    if number is not None:
        return SHARDING_STRATEGIES[number - 1] if number <= len(SHARDING_STRATEGIES) else None
    return word(value) if word(value) in SHARDING_STRATEGIES else None
