"""The folder of one explanation, which is the only place that is written to.

RESULTS/hook/sitecustomize.py    the hook's entry, which Python imports because PYTHONPATH begins with RESULTS/hook
RESULTS/hook/vitscale_hook/*.py  the hook itself: a copy of `vitscale.hook`
RESULTS/hook/settings.json       where the ranks write
RESULTS/hook/plan.json           which steps are profiled, and after which one the ranks end
RESULTS/ranks/HOST-PID.jsonl     lines of a rank
RESULTS/traces/                  profiled steps
RESULTS/output.log               the command's output, its middle left out where it is long
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitscale import hook
from vitscale.base.files import whole_file
from vitscale.errors import RequestError, shown
from vitscale.hook.lines import (
    HOOK_FOLDER,
    PLAN_FILE,
    RANKS_FOLDER,
    SETTINGS_FILE,
    TRACES_FOLDER,
    HookPlan,
    HookSettings,
)

PATH_VARIABLE = "PYTHONPATH"
"""The only variable that is changed for the command."""
_DEFAULT_NAME = "vitscale-explain-{number}"
_MOST_DEFAULT_FOLDERS = 10_000
_HOOK_SOURCES = Path(hook.__file__).parent
_ENTRY_FILE = "sitecustomize.py"
_PACKAGE_NAME = "vitscale_hook"
"""Name of the hook's package in the command's processes, where vitscale may not be installed."""


@dataclass(frozen=True)
class ExplainFolder:
    """Paths inside the results folder of one explanation."""

    root: Path
    """The results folder, absolute."""

    @property
    def hook(self) -> Path:
        """The folder that PYTHONPATH begins with."""
        return self.root / HOOK_FOLDER

    @property
    def settings(self) -> Path:
        """The hook's settings."""
        return self.hook / SETTINGS_FILE

    @property
    def plan(self) -> Path:
        """The plan that all ranks follow."""
        return self.hook / PLAN_FILE

    @property
    def ranks(self) -> Path:
        """The folder of the ranks' files."""
        return self.root / RANKS_FOLDER

    @property
    def traces(self) -> Path:
        """The folder of the profiled steps' traces."""
        return self.root / TRACES_FOLDER

    @property
    def output_log(self) -> Path:
        """The command's output."""
        return self.root / "output.log"


def make_results_folder(output: Path | None) -> ExplainFolder:
    """Make the results folder of an explanation, with its empty subfolders.

    Args:
        output: the folder, which must be missing or empty; None: ./vitscale-explain-1, or the next free number.

    Raises:
        RequestError: the folder has something in it, cannot be made, or cannot be named in PYTHONPATH.
    """
    try:
        root = _make_default_folder() if output is None else _make_chosen_folder(output)
        folder = ExplainFolder(root.absolute())
        for path in (folder.hook, folder.ranks, folder.traces):
            path.mkdir()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"the results folder {shown(str(output or Path.cwd()))} cannot be made: {reason}",
            next_step="Name another with --output",
        ) from None
    return folder


def check_nameable(output: Path | None) -> None:
    """Refuse a results folder whose path cannot stand in PYTHONPATH, which separates paths by a colon.

    Raises:
        RequestError: the absolute path has that separator.
    """
    path = str((output or Path()).absolute())
    if os.pathsep in path:
        raise RequestError(
            f"the results folder {shown(path)} has {os.pathsep!r} in its path, which separates paths in PYTHONPATH",
            next_step="Name another with --output",
        )


def _make_default_folder() -> Path:
    """Make ./vitscale-explain-N with the lowest number N that is free.

    Raises:
        OSError: the current folder cannot be written to.
        RequestError: all numbers are taken.
    """
    for number in range(1, _MOST_DEFAULT_FOLDERS + 1):
        folder = Path(_DEFAULT_NAME.format(number=number))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise RequestError(
        f"there are {_MOST_DEFAULT_FOLDERS:,} folders vitscale-explain-N here", next_step="Name another with --output"
    )


def _make_chosen_folder(output: Path) -> Path:
    """Make the folder that the user named, or take it where it is empty.

    Raises:
        OSError: it cannot be made.
        RequestError: something is in it, or it is no folder.
    """
    output.mkdir(parents=True, exist_ok=output.is_dir())
    if any(output.iterdir()):
        raise RequestError(
            f"the results folder {shown(str(output))} has something in it", next_step="Name a new one with --output"
        )
    return output


def place_hook(folder: ExplainFolder) -> None:
    """Copy the hook into the results folder, with its settings and a plan that asks for nothing.

    Raises:
        OSError: a file cannot be read or written.
    """
    package = folder.hook / _PACKAGE_NAME
    package.mkdir()
    for source in sorted(_HOOK_SOURCES.glob("*.py")):
        target_folder = folder.hook if source.name == _ENTRY_FILE else package
        (target_folder / source.name).write_bytes(source.read_bytes())
    write_plan(folder, HookPlan())
    # The last file that is written before the command starts: its time stands for the command's start.
    settings = HookSettings(results=str(folder.root))
    folder.settings.write_text(json.dumps(settings.to_dict(), indent=1) + "\n", encoding="utf-8")


def write_plan(folder: ExplainFolder, plan: HookPlan) -> None:
    """Replace the plan: a rank reads the old one or the new one, never a mix.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(folder.plan, follow_links=False) as file:
        file.write(json.dumps(plan.to_dict()).encode())


def environment_with_hook(environment: Mapping[str, str], hook: Path) -> dict[str, str]:
    """Return an environment in which every Python finds the hook first.

    An empty PYTHONPATH is left out, for an empty entry would stand for the current folder.
    """
    search_path = environment.get(PATH_VARIABLE, "")
    entries = [str(hook), search_path] if search_path else [str(hook)]
    return {**environment, PATH_VARIABLE: os.pathsep.join(entries)}
