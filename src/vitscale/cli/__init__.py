"""The command line: each verb is a paragraph that calls one function.

Exit codes: 0 done; 1 some trials failed (they are listed), `lint` or `check` found errors, or `advise` found nothing
that meets the limits; 2 the request was wrong (nothing was started); 130 interrupted.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from vitscale import __version__
from vitscale.cli import importing, laboratory, predicting, reporting, sharing, starting, studies  # noqa: F401 - verbs
from vitscale.cli.base import ProgramConsole, app, silence
from vitscale.errors import VitscaleError

__all__ = ["app", "main"]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"vitscale {__version__}\n")
        raise typer.Exit


def _program(words: Sequence[str]) -> typer.Typer:
    """The program; only one verb's where the first word names one, for building all takes a twentieth of a second."""
    of_verb = {
        command.name or getattr(command.callback, "__name__", ""): command for command in app.registered_commands
    }
    if not words or words[0] not in of_verb:
        return app
    program = copy.copy(app)
    program.registered_commands, program.registered_groups = [of_verb[words[0]]], []
    return program


def main() -> None:
    """Entry point: a user's mistake is one message and an exit code, never a traceback."""
    try:
        try:
            starting.answer_a_shell()
            _program(sys.argv[1:])(prog_name="vitscale")
        finally:
            sys.stdout.flush()  # here, where a full disk behind it can still be told
    except VitscaleError as error:
        ProgramConsole(stderr=True).print(f"vitscale: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        # Code that reads or writes files has its own messages; what is left is standard output itself.
        sys.stderr.write(f"vitscale: standard output cannot be written: {error.strerror or error}\n")
        silence(sys.stdout)
        sys.exit(1)
