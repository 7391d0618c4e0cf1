"""The program, and what its verbs share: arguments, options, the console."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup
from typing_extensions import override

VERBS = ("plan", "run", "report", "predict", "advise", "import", "check", "lint", "lab")
"""In the order in which `--help` lists them."""


class _Program(TyperGroup):
    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=VERBS.index)


app = typer.Typer(
    name="vitscale",
    cls=_Program,
    help="How will my vision transformer scale, where does the time go, and what should I rent?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)

StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.", show_default=False)]
ResultsArgument = Annotated[Path, typer.Argument(metavar="RESULTS", help="A results folder.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ParametersOption = Annotated[
    str | None, typer.Option("--parameters", metavar="N", help="Of an imported model that has no name here: 110M.")
]
CheckpointOption = Annotated[
    float | None,
    typer.Option("--checkpoint-seconds", metavar="SECONDS", help="To save one checkpoint.  [default: as recorded]"),
]
NodeMtbfOption = Annotated[
    float | None,
    typer.Option("--node-mtbf", metavar="HOURS", help="Mean time between failures of a host.  [default: a prior]"),
]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Print everything, not the first 25 lines.")]
SiteOption = Annotated[
    Path | None,
    typer.Option("--site", metavar="FILE", help="Site file: [launch], [slurm] and [node] put over the study's own."),
]
LauncherOption = Annotated[
    str | None, typer.Option("--launcher", metavar="NAME", help="How ranks are started: local, torchrun, mpirun, ...")
]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", metavar="NAME", help="Where they run: local, hostfile or slurm.")
]
HostfileOption = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="Hosts to run on: one NAME slots=N a line.")
]


def compute_on_one_core() -> None:
    """For verbs that start no ranks, before numpy is imported: a fit's matrix products are so small that OpenBLAS's
    threads spend as much processor time on waiting for each other as it takes."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class ProgramConsole(Console):
    """A study goes on when nobody listens any more (`vitscale run ... | head`): what is left to say is dropped."""

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stdout)


def silence(stream: TextIO) -> None:
    """Points a stream that can no longer be written at nothing, so that leaving does not fail on it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
