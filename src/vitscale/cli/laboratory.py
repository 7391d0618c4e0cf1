"""The verbs of several hosts on this machine: lab up, down, exec, status."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from vitscale.cli.base import JsonOption, ProgramConsole, app

lab_app = typer.Typer(
    help="Several hosts on this machine, to learn and to test with (root, Linux).", no_args_is_help=True
)
app.add_typer(lab_app, name="lab")
LabName = Annotated[str, typer.Option("--name", metavar="NAME", help="Which lab; there may be several at once.")]


@lab_app.command("up")
def lab_up(
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", help="How many.")] = 2,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", metavar="RATE", help="Of every host's link: 100mbit, 1gbit.  [default: no limit]"),
    ] = None,
    cores_per_host: Annotated[
        float | None, typer.Option("--cores-per-host", metavar="CORES", help="CPU quota: 0.4.  [default: no limit]")
    ] = None,
    slots: Annotated[int, typer.Option("--slots", metavar="RANKS", help="Ranks per host, in the hostfile.")] = 1,
    name: LabName = "default",
) -> None:
    """Make hosts, and print the hostfile and how to use it. They stay until `lab down`, or a restart of the machine."""
    from vitscale.lab import Laboratory, Plan, parse_bandwidth, up
    from vitscale.lab.printing import up_lines

    bandwidth_mbit = None if bandwidth is None else parse_bandwidth(bandwidth)
    made = Laboratory(up(Plan(name, hosts, bandwidth_mbit, cores_per_host, slots)))
    for line in up_lines(made):
        ProgramConsole().print(line, markup=False, highlight=False, soft_wrap=True)


@lab_app.command("down")
def lab_down(name: LabName = "default") -> None:
    """End everything that runs on the hosts, and the hosts. Nothing of them is left."""
    from vitscale.lab import down

    said = f"Lab {name!r} is gone." if down(name) else f"There is no lab {name!r}: nothing to do."
    ProgramConsole().print(said, markup=False, highlight=False)


@lab_app.command("exec", context_settings={"ignore_unknown_options": True})
def lab_exec(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Its name: host0.", show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
    name: LabName = "default",
) -> None:
    """Run a command on a host, in this folder and environment; its exit code is the command's."""
    from vitscale.lab import command_on

    argv = command_on(name, host, command)
    os.execv(argv[0], argv)  # noqa: S606 - no shell is wanted


@lab_app.command("status")
def lab_status(json: JsonOption = False) -> None:
    """All labs: hosts, limits, and how many processes run on each."""
    from vitscale.lab import laboratories
    from vitscale.lab.printing import status_json, status_table

    labs, wrong = laboratories()
    for error in wrong:
        ProgramConsole(stderr=True).print(f"note: {error}", markup=False, highlight=False, soft_wrap=True)
    if json:
        sys.stdout.write(status_json(labs) + "\n")
    elif labs:
        ProgramConsole().print(status_table(labs), highlight=False)
    elif not wrong:
        ProgramConsole().print("There is no lab. Make one: vitscale lab up", highlight=False)
