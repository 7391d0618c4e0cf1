"""The command line: each verb is arguments, one call of the Python API (`vitscale.api`), and printing.

Exit codes: 0 done; 1 some trials failed (they are listed), `lint` or `check` found errors, or `advise` found nothing
that meets the limits; 2 the request was wrong (nothing was started); 130 interrupted.
"""

from __future__ import annotations

import copy
import os
import sys
from importlib import import_module
from typing import Annotated

import typer
from typer.models import CommandInfo

from vitscale.base import program
from vitscale.cli import base
from vitscale.errors import VitscaleError, shown


@base.app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"vitscale {program.identity()}\n")
        raise typer.Exit


def __getattr__(name: str) -> typer.Typer:
    """`app`: the whole program."""
    if name == "app":
        return _program()
    raise AttributeError(name)


def _program(verb: str = "") -> typer.Typer:
    """Return the program with one verb alone, because it takes a twentieth of a second to import and build all.

    Args:
        verb: the verb; anything else (an option, a mistake, nothing) stands for the whole program.
    """
    if verb not in base.VERBS:
        return _whole_program()
    import_module(f"vitscale.cli.{base.VERBS[verb]}")  # which adds its verbs to `base.app`
    program_of_verb = copy.copy(base.app)  # a shallow copy, of which only the two lists below are replaced
    program_of_verb.registered_commands = [
        command for command in base.app.registered_commands if _is_command_of_verb(command, verb)
    ]
    program_of_verb.registered_groups = [group for group in base.app.registered_groups if group.name == verb]
    return program_of_verb


def _whole_program() -> typer.Typer:
    """Import the modules of all verbs, each of which adds its verbs to `base.app`; return `base.app`."""
    for module in dict.fromkeys(base.VERBS.values()):
        import_module(f"vitscale.cli.{module}")
    return base.app


def _is_command_of_verb(command: CommandInfo, verb: str) -> bool:
    """Whether a command is the verb's: by its name, or by that of its function where it was registered without one."""
    function_name = getattr(command.callback, "__name__", "")
    return verb in (command.name, function_name)


def _adapt_to_terminal() -> None:
    """Make printing possible where the environment gives no width, or the terminal has no letters for the text."""
    columns = os.environ.get("COLUMNS", "")
    is_width = columns.isdecimal() and int(columns) > 0
    if columns and not is_width:
        del os.environ["COLUMNS"]  # else every line would be laid out in no columns at all
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and not _is_utf8(stream.encoding):
            reconfigure(errors="replace")


def _is_utf8(encoding: str) -> bool:
    """Whether an encoding is UTF-8, as "utf-8", "UTF8" or "utf_8"."""
    return encoding.lower().replace("-", "").replace("_", "") == "utf8"


def main() -> None:
    """Run the command line: a user's mistake is one message and an exit code, never a traceback."""
    _adapt_to_terminal()
    try:
        try:
            _run_program()
        finally:
            sys.stdout.flush()  # here, where an error (a full disk) still gets its message
    except VitscaleError as error:
        base.ProgramConsole(stderr=True).print(f"vitscale: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        base.silence(sys.stdout)
    except OSError as error:
        # Code that reads or writes files has its own messages. What is left is standard output itself, or a file that
        # another package's code could not use.
        if error.filename is None:
            base.silence(sys.stdout)
        sys.stderr.write(f"vitscale: {_what_failed(error)}: {error.strerror or error}\n")
        sys.exit(1)


def _run_program() -> None:
    """Run the verb that the command line names; or, where a shell asks for completions, print these."""
    if base.COMPLETE in os.environ:  # a completing shell calls: typer has scripts for some shells
        from typer import completion

        completion.completion_init()  # type: ignore[attr-defined]  # typer does not say what it offers
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    _program(verb)(prog_name="vitscale")


def _what_failed(error: OSError) -> str:
    """Return the subject of an error of the system, as the beginning of a message."""
    if error.filename is None:
        return "standard output cannot be written"
    if isinstance(error.filename, int):
        return f"file descriptor {error.filename} cannot be used"
    return f"{shown(os.fsdecode(error.filename))} cannot be used"
