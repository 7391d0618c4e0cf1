"""Which variables of a study only its owner may read, and which ones a stored study sets."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vitscale.base.files import has_long_keys
from vitscale.base.secret_names import is_plain_value, is_secret_name
from vitscale.processes.launch_file import LIBRARY_SETTINGS

if TYPE_CHECKING:
    from vitscale.store.results import StudyRecord

_PATH_BEGINS = ("/", "~/", "./", "../")


def is_private(name: str, value: str) -> bool:
    """Whether a file with this variable is to be read by its owner alone.

    A variable with a secret's name is private. So is a value that is more than a word, a number or a path, unless
    libraries read it: these are settings (NCCL_SOCKET_IFNAME=ib0,ib1), which each rank records for whoever reads the
    results.
    """
    if is_secret_name(name):
        return True
    if name.startswith(LIBRARY_SETTINGS):
        return False
    is_path = value.startswith(_PATH_BEGINS)
    return not (is_path or is_plain_value(value))


def launch_variables(study: StudyRecord) -> dict[str, str]:
    """Return the variables of a study's [launch.environment]; what the command line sets replaces the file's."""
    variables: dict[str, str] = {}
    for table in study_tables(study.text, study.overrides):
        launch = table.get("launch")
        environment = launch.get("environment") if isinstance(launch, Mapping) else None
        if isinstance(environment, Mapping):
            variables |= {name: value for name, value in environment.items() if isinstance(value, str)}
    return variables


def study_tables(text: str, overrides: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """Yield a study's text, and each KEY=VALUE of the command line, as TOML tables; skip what is no TOML."""
    for toml in (text, *map(_override_as_toml, overrides)):
        if not has_long_keys(toml):
            with suppress(tomllib.TOMLDecodeError, RecursionError):
                yield tomllib.loads(toml)


def _override_as_toml(word: str) -> str:
    """Return a word of the command line as a line of TOML, whose value is a string unless it is TOML as it stands.

    Examples: "a.b=16" becomes `a.b = 16`, and "a.b=ib0,ib1" becomes `a.b = "ib0,ib1"`.
    """
    key, _, value = word.partition("=")
    try:
        tomllib.loads(f"value = {value}")
    except (tomllib.TOMLDecodeError, RecursionError):
        literal = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{key} = "{literal}"'
    return f"{key} = {value}"
