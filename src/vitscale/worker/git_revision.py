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

from vitscale.base.commands import answer_to

_TIMEOUT_SECONDS = 10.0
_SAFE_SETTINGS = {
    "core.fsmonitor": "",  # not `false`, which git before 2.36 takes for a program's name
    "core.hooksPath": os.devnull,
    "submodule.recurse": "false",
}
"""Settings with which git runs no program; they take the place of the repository's own."""
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` would write the index, upon which a hook runs
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_FILTER_SETTINGS = r"^filter\..*\.(clean|smudge|process)$"
_NO_MATCH = 1
"""Exit code of `git config --get-regexp` where no setting matches."""


def git_revision(folder: Path) -> str | None:
    """Returns the revision that is checked out around a folder, with "+changes" where tracked files differ from it.

    Returns None where there is no git, no repository or no answer. Git runs up to three times: for the revision, for
    the names of filters, and for changes without these filters. As no filter is run, a file whose content one changes
    (Git LFS) counts as changed once its time or size differs from git's index.
    """
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(folder), *_setting_options(_SAFE_SETTINGS)]
    try:
        revision = _git_output([*command, "rev-parse", "HEAD"])
        find_filters = ("config", "--null", "--name-only", "--get-regexp", _FILTER_SETTINGS)
        null_separated = _git_output([*command, *find_filters], code_without_output=_NO_MATCH)
        filters = [name for name in null_separated.split("\0") if name]
        if any("=" in name for name in filters):
            return None  # git would take the first "=" for the end of the name, and run the filter
        without_filters = _setting_options(dict.fromkeys(filters, ""))
        # Of a submodule only its revision is looked at: its own configuration would count inside it.
        status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        changes = _git_output([*command, *without_filters, *status])
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{revision}+changes" if changes else revision


def _setting_options(settings: dict[str, str]) -> list[str]:
    """Returns options of git that set these for one command: ["-c", "core.fsmonitor="]."""
    options = []
    for name, value in settings.items():
        options += ["-c", f"{name}={value}"]
    return options


def _git_output(command: Sequence[str], code_without_output: int = 0) -> str:
    """Returns what a git command prints, without white space around it.

    Args:
        command: the program and its arguments.
        code_without_output: an exit code that is no failure, beside 0.

    Raises:
        OSError: it cannot be run.
        subprocess.SubprocessError: it fails, or takes too long.
    """
    answer = answer_to(command, _TIMEOUT_SECONDS, os.environ | _ENVIRONMENT, undecodable="surrogateescape")
    if answer.returncode not in (0, code_without_output):
        raise subprocess.CalledProcessError(answer.returncode, command)
    return answer.stdout.strip()
