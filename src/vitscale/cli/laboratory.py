"""The verbs for several hosts on this machine: lab up, down, exec, status.

Also tells how to use a lab, and the state of its hosts.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitscale.base.interpreter import python_module
from vitscale.cli.base import JsonOption, ProgramConsole, answer, app, option
from vitscale.present.document import Column, Document, table

if TYPE_CHECKING:
    from vitscale.lab import Laboratory

lab_app = typer.Typer(
    help="Several hosts on this machine, to learn and to test with (root, Linux).", no_args_is_help=True
)
app.add_typer(lab_app, name="lab")
LabName = Annotated[str, option("--name", "NAME", "Which lab; there may be several at once.")]


@lab_app.command("up")
def lab_up(
    hosts: Annotated[int, option("--hosts", "N", "Number of hosts.")] = 2,
    bandwidth: Annotated[
        str | None, option("--bandwidth", "RATE", "Rate of every host's link: 100mbit, 1gbit.  [default: no limit]")
    ] = None,
    cores_per_host: Annotated[
        float | None, option("--cores-per-host", "CORES", "CPU quota: 0.4.  [default: no limit]")
    ] = None,
    slots: Annotated[int, option("--slots", "RANKS", "Ranks per host, in the hostfile.")] = 1,
    name: LabName = "default",
) -> None:
    """Make hosts, and print the hostfile and how to use it. They stay until `lab down`, or a restart of the machine."""
    from vitscale.lab import Laboratory, Plan, parse_bandwidth, up

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

    labs, wrong = laboratories()
    for error in wrong:
        ProgramConsole(stderr=True).print(f"note: {error}", markup=False, highlight=False, soft_wrap=True)
    if not (labs or wrong or json):
        ProgramConsole().print("There is no lab. Make one: vitscale lab up", highlight=False)
    elif labs or json:
        answer("lab", lambda: status_fields(labs), lambda: status_document(labs), unread=None, json=json, verbose=True)


def up_lines(lab: Laboratory) -> list[str]:
    """Lines that tell what was made, and the commands to use it."""
    from vitscale.lab.state import DEFAULT_NAME

    name = lab.state.name
    named = "" if name == DEFAULT_NAME else f" --name {name}"
    vitscale = _this_program()
    study, missing = f"{vitscale} run STUDY.toml", lab.state.missing_for_ssh
    if not missing:
        study += f" --hostfile {shlex.quote(str(lab.hostfile))}" + " --launcher mpirun" * (
            shutil.which("mpirun") is not None
        )
    lines = [
        f"Lab {name!r}: {', '.join(lab.names)}; {_limits(lab)}.",
        f"Hostfile: {lab.hostfile}",
        f"A study:  {vitscale} lab exec{named} host0 -- {study}",
        f"A shell:  {vitscale} lab exec{named} host0 -- bash",
        f"The end:  {vitscale} lab down{named}",
    ]
    if missing:
        lines.append(
            f"note: without {' and '.join(missing)} the hosts have no ssh, and a study runs on one of them alone. "
            f"For several: apt-get install {' '.join(missing)}, then lab down and lab up again"
        )
    return lines


def status_document(labs: Sequence[Laboratory]) -> Document:
    """A table with a row per host."""
    names = ("lab", "host", "address", "slots", "Mbit/s", "cores", "state", "processes")
    columns = [Column(name, words=name in ("lab", "host", "state")) for name in names]
    rows = [["none" if value is None else str(value) for value in row.values()] for row in _rows(labs)]
    return Document("", (table(columns, rows),))


def status_fields(labs: Sequence[Laboratory]) -> dict[str, Any]:
    """JSON fields of all hosts, and the labs' hostfiles."""
    return {"hostfiles": {lab.state.name: str(lab.hostfile) for lab in labs}, "hosts": _rows(labs)}


def _rows(labs: Sequence[Laboratory]) -> list[dict[str, Any]]:
    return [
        {
            "lab": lab.state.name,
            "host": name,
            "address": lab.addresses[number],
            "slots": lab.state.slots,
            "bandwidth_mbit": lab.state.bandwidth_mbit,
            "cores": lab.cores(number),
            "state": "up" if lab.state.hosts[number].first.alive else "gone",
            "processes": len(lab.processes(number)),
        }
        for lab in labs
        for number, name in enumerate(lab.names)
    ]


def _this_program() -> str:
    """The command for this program: under sudo the PATH may lack a virtual environment's programs."""
    return "vitscale" if shutil.which("vitscale") else shlex.join(python_module("vitscale"))


def _limits(lab: Laboratory) -> str:
    megabits, cores = lab.state.bandwidth_mbit, lab.cores(0)
    links = "links as fast as they are" if megabits is None else f"{megabits:g} Mbit/s to and from each"
    shares = "no limit on cores" if cores is None else f"{cores:g} {'core' if cores == 1 else 'cores'} for each"
    return f"{links}, {shares}"
