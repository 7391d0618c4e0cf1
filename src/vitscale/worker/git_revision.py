"""The git revision of a folder, found without running what the folder's own repository asks git to run.

A repository may come from somebody else, and its configuration names programs: monitors of its files, hooks, filters of
their content, transports of objects that are missing (git-config(1), gitattributes(5)). None of them is needed here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 10.0
_RUNS_NOTHING = {
    "core.fsmonitor": "",  # not `false`, which git before 2.36 takes for a program's name
    "core.hooksPath": os.devnull,
    "submodule.recurse": "false",
}
"""Settings that take the place of the repository's own."""
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` would write the index, upon which a hook runs
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_FILTERS = r"^filter\..*\.(clean|smudge|process)$"
_NO_MATCH = 1
"""Exit code of `git config --get-regexp` where no setting matches."""


def git_revision(folder: Path) -> str | None:
    """The revision that is checked out around a folder, with "+changes" where tracked files differ from it.

    A file whose content a filter changes (Git LFS) counts as changed once its time or size differs from git's index,
    for the filter is not run. None where there is no git, no repository or no answer.
    """
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(folder), *_options(_RUNS_NOTHING)]
    try:
        revision = _answer([*command, "rev-parse", "HEAD"])
        listed = _answer([*command, "config", "--null", "--name-only", "--get-regexp", _FILTERS], none=_NO_MATCH)
        filters = [name for name in listed.split("\0") if name]
        if any("=" in name for name in filters):
            return None  # git would take the first "=" for the end of the name, and run the filter
        unfiltered = _options(dict.fromkeys(filters, ""))
        # Of a submodule only its revision is looked at: its own configuration would count inside it.
        status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        changes = _answer([*command, *unfiltered, *status])
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{revision}+changes" if changes else revision


def _options(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def _answer(command: Sequence[str], none: int = 0) -> str:
    """What a git command prints; an exit code of `none` means that there is nothing to print.

    Raises:
        OSError: it cannot be run.
        subprocess.SubprocessError: it fails, or takes too long.
    """
    answer = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=_SECONDS,
        check=False,
        env=os.environ | _ENVIRONMENT,
    )
    if answer.returncode not in (0, none):
        raise subprocess.CalledProcessError(answer.returncode, command)
    return answer.stdout.strip()
