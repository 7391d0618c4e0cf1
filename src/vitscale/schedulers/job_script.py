"""The part of a batch script that prepares the driver: modules, then a site's own lines; the same for every scheduler.

The line that fails ends the job. A failure is an exit code that the shell's `-e` would end a script for: so `if`, `&&`
and `||` work as ever, and what fails inside a sourced file or a function does not count, but only the line that called
it. Bash runs these lines, in a script file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from vitscale.errors import RequestError, shown

_MODULE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+:@=~-]*")
_FAILURE = "vitscale: the job ends: line %s of its script failed with exit code %s: %s"
"""What a job prints as it ends, for `printf`: the line's number, its exit code, and the line itself."""
_FAILURE_LINE = re.compile(r"^vitscale: the job ends: (line \d{1,6} of its script failed with exit code \d{1,3}: .*)$")
_MOST_PRINTED_BYTES = 1_000_000
"""How much of the end of a job's output is searched."""
_LONGEST_LINE = 300
"""Most characters of a failed line that are kept."""
_WITH_MODULE_COMMAND = "command -v module > /dev/null || source /etc/profile"
"""`module` is a function that login shells have; a batch script's shell is none."""
_END_WHERE_A_LINE_FAILS = f"""\
vitscale_ends_at() {{ # code, line; called from deeper where something fails in a sourced file, which may be meant
  [ "${{#BASH_SOURCE[@]}}" -eq 2 ] || return 0
  printf '{_FAILURE}\\n' \\
    "$2" "$1" "$(sed -n "$2p" "$0")"
  exit "$1"
}}
trap 'vitscale_ends_at $? $LINENO' ERR"""


def preparing_lines(modules: Sequence[str], setup: Sequence[str]) -> list[str]:
    """Return the lines of a batch script that load modules and then do what a site needs; none for neither.

    Args:
        modules: names for `module load`, as `refuse_module_names` takes them.
        setup: lines of shell, as the study has them.
    """
    if not modules and not setup:
        return []
    find_module = [_WITH_MODULE_COMMAND] if modules else []
    loads = [f"module load {shlex.quote(module)}" for module in modules]
    return [*find_module, _END_WHERE_A_LINE_FAILS, *loads, *setup]


def refuse_module_names(modules: Sequence[str], section: str) -> None:
    """Refuse what is no name of a module. Args: section: the study's section that has them: "slurm".

    Raises:
        RequestError: for the first of them.
    """
    for module in modules:
        if not _MODULE_NAME.fullmatch(module):
            raise RequestError(f"{section}.modules has {shown(module)}", valid=["NAME", "NAME/VERSION"])


def failed_line(output: Path) -> str | None:
    """Return which line of its script ended a job, by what the job printed; None where none did, or nobody knows.

    Example: "line 14 of its script failed with exit code 1: module load cuda/13".

    Args:
        output: the file with what the job printed.
    """
    try:
        with output.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_PRINTED_BYTES))
            lines = file.read(_MOST_PRINTED_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        match = _FAILURE_LINE.match(line)
        if match is not None:
            return _printable(match[1])
    return None


def _printable(text: str) -> str:
    """Return a text without what is no printable character, and not longer than a line of a table may be."""
    shortened = text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."
    return "".join(character if character.isprintable() else "?" for character in shortened)
