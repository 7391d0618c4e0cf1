"""How this program starts Python: the one place that decides where such a process looks for modules.

`python -c` and `python -m` put the current folder ahead of the standard library. So a verb that starts one of them in a
folder that somebody else has written would run a `gzip.py` that lies there. Processes started from here look into no
current folder (`-P`), and neither do those that they start in turn (PYTHONSAFEPATH). What a user's model may need from
a folder of the study is found there last, behind all that is installed (`append_to_search_path`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Python's own variable (3.11): set to any text, it does what `-P` does."""
_SET_HERE = "vitscale"
"""The text that says that this program has set the variable, and not the user."""
_SAFE_PATH = "-P"


class ModuleCommand(NamedTuple):
    """What `python_module` has put together, taken apart again."""

    interpreter: str
    module: str
    arguments: tuple[str, ...]


def python_module(module: str, *arguments: str, interpreter: str | None = None) -> tuple[str, ...]:
    """The argv that runs a module as a program.

    Args:
        module: its name.
        arguments: the program's own arguments.
        interpreter: path of another Python than this process's own.
    """
    return (interpreter or sys.executable, _SAFE_PATH, "-m", module, *arguments)


def python_code(code: str, *arguments: str) -> tuple[str, ...]:
    """The argv that runs a line of Python with this process's interpreter."""
    return (sys.executable, _SAFE_PATH, "-c", code, *arguments)


def taken_apart(argv: Sequence[str]) -> ModuleCommand:
    """Interpreter, module and arguments of an argv of `python_module`.

    Raises:
        ValueError: it is no such argv.
    """
    interpreter, *options, module = argv[:4]
    if options != [_SAFE_PATH, "-m"]:
        raise ValueError(f"no command that runs a module: {' '.join(argv[:4])}")
    return ModuleCommand(interpreter, module, tuple(argv[4:]))


def safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which all Pythons below a process leave its current folder out; a user's own value stays."""
    return {SAFE_PATH_VARIABLE: environment.get(SAFE_PATH_VARIABLE) or _SET_HERE}


def forget_safe_path(environment: MutableMapping[str, str]) -> None:
    """Takes the variable away again where this program has set it: for a user's script, whose own processes find
    modules as Python always does."""
    if environment.get(SAFE_PATH_VARIABLE) == _SET_HERE:
        del environment[SAFE_PATH_VARIABLE]


def append_to_search_path(folders: Iterable[str]) -> None:
    """Lets this process find modules in these folders too, behind all that is installed."""
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def leave_out_current_folder() -> None:
    """Takes the current folder from this process's search path, where `python -m` has put it."""
    if not sys.flags.safe_path and sys.path and _is_current_folder(sys.path[0]):
        del sys.path[0]


def _is_current_folder(entry: str) -> bool:
    return not entry or os.path.realpath(entry) == os.path.realpath(Path.cwd())
