"""How this program starts Python: the one place that decides where such a process looks for modules.

`python -c` and `python -m` put the current folder ahead of the standard library. So a verb that starts one of them in a
folder that somebody else has written would run a `gzip.py` that lies there. Processes started from here do not search
the current folder (`-P`), and neither do those that they start in turn (PYTHONSAFEPATH). Modules of a user's model in
the study's folder are searched for last, behind all that is installed (`append_to_search_path`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Python's own variable (3.11): set to any text, it does what `-P` does."""
_SET_BY_VITSCALE = "vitscale"
"""Value of the variable where this program has set it, and not the user."""
_SAFE_PATH = "-P"


class ModuleCommand(NamedTuple):
    """The parts of an argv that `python_module` made."""

    interpreter: str
    module: str
    arguments: tuple[str, ...]


def python_module(module: str, *arguments: str, interpreter: str | None = None) -> tuple[str, ...]:
    """Return the argv that runs a module as a program.

    Args:
        module: name of the module.
        arguments: arguments of the program.
        interpreter: path of a Python; None: the one that runs this process.
    """
    return (interpreter or sys.executable, _SAFE_PATH, "-m", module, *arguments)


def python_code(code: str, *arguments: str) -> tuple[str, ...]:
    """Return the argv that runs a line of Python with this process's interpreter."""
    return (sys.executable, _SAFE_PATH, "-c", code, *arguments)


def parse_module_command(argv: Sequence[str]) -> ModuleCommand:
    """Return interpreter, module and arguments of an argv that `python_module` made.

    Raises:
        ValueError: the argv has another form.
    """
    interpreter, *options, module = argv[:4]
    if options != [_SAFE_PATH, "-m"]:
        raise ValueError(f"no command that runs a module: {' '.join(argv[:4])}")
    return ModuleCommand(interpreter, module, tuple(argv[4:]))


def safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set for a process, by name, so that it and those it starts search no current folder.

    Args:
        environment: the process's variables; a value that a user has set in them stays.
    """
    return {SAFE_PATH_VARIABLE: environment.get(SAFE_PATH_VARIABLE) or _SET_BY_VITSCALE}


def forget_safe_path(environment: MutableMapping[str, str]) -> None:
    """Removes the variable of `safe_path` from an environment, unless a user has set it.

    For a user's script: processes that it starts find modules as Python always does.
    """
    if environment.get(SAFE_PATH_VARIABLE) == _SET_BY_VITSCALE:
        del environment[SAFE_PATH_VARIABLE]


def append_to_search_path(folders: Iterable[str]) -> None:
    """Lets this process find modules in these folders too, behind all that is installed."""
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)


def leave_out_current_folder() -> None:
    """Takes the current folder from this process's search path, where `python -m` has put it."""
    if sys.flags.safe_path or not sys.path:
        return
    if _is_current_folder(sys.path[0]):
        del sys.path[0]


def _is_current_folder(entry: str) -> bool:
    """Whether an entry of the search path is the current folder, which "" stands for too."""
    return not entry or os.path.realpath(entry) == os.path.realpath(Path.cwd())
