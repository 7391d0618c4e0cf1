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
    """The program; where `verb` is one, with that alone: to import and build all takes a twentieth of a second."""
    for module in [base.VERBS[verb]] if verb in base.VERBS else dict.fromkeys(base.VERBS.values()):
        import_module(f"vitscale.cli.{module}")
    if verb not in base.VERBS:
        return base.app
    of_verb = copy.copy(base.app)
    of_verb.registered_commands = [
        own for own in base.app.registered_commands if verb in (own.name, getattr(own.callback, "__name__", ""))
    ]
    of_verb.registered_groups = [group for group in base.app.registered_groups if group.name == verb]
    return of_verb


def _adapt_to_terminal() -> None:
    """Goes on where the terminal's width is told as nothing, or where it has no letters for what is printed."""
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isdecimal() and int(columns)):
        del os.environ["COLUMNS"]  # else every line would be laid out in no columns at all
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and stream.encoding.lower().replace("-", "").replace("_", "") != "utf8":
            reconfigure(errors="replace")


def main() -> None:
    """Entry point: a user's mistake is one message and an exit code, never a traceback."""
    _adapt_to_terminal()
    try:
        try:
            if base.COMPLETE in os.environ:  # a completing shell calls: typer has scripts for some shells
                from typer import completion

                completion.completion_init()  # type: ignore[attr-defined]  # typer does not say what it offers
            _program(*sys.argv[1:2])(prog_name="vitscale")
        finally:
            sys.stdout.flush()  # here, where a full disk behind it can still be told
    except VitscaleError as error:
        base.ProgramConsole(stderr=True).print(f"vitscale: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        base.silence(sys.stdout)
    except OSError as error:
        # Code that reads or writes files has its own messages. What is left is standard output itself, or a file that
        # another package's code could not use.
        if error.filename is None:
            what = "standard output cannot be written"
            base.silence(sys.stdout)
        else:
            number = isinstance(error.filename, int)
            named = f"file descriptor {error.filename}" if number else shown(os.fsdecode(error.filename))
            what = f"{named} cannot be used"
        sys.stderr.write(f"vitscale: {what}: {error.strerror or error}\n")
        sys.exit(1)
