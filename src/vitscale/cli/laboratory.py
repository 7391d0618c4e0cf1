"""The verbs for several hosts on this machine: lab up, down, exec, status; and the lines on how to use a lab."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.base.interpreter import python_module
from vitscale.cli.base import JsonOption, ProgramConsole, app, option, show_result

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
    from vitscale.lab import Laboratory, LabPlan, parse_bandwidth, up

    bandwidth_mbit = None if bandwidth is None else parse_bandwidth(bandwidth)
    lab = Laboratory(up(LabPlan(name, hosts, bandwidth_mbit, cores_per_host, slots)))
    for line in up_lines(lab):
        ProgramConsole().print(line, markup=False, highlight=False, soft_wrap=True)


@lab_app.command("down")
def lab_down(name: LabName = "default") -> None:
    """End everything that runs on the hosts, and the hosts. Nothing of them is left."""
    from vitscale.lab import down

    sentence = f"Lab {name!r} is gone." if down(name) else f"There is no lab {name!r}: nothing to do."
    ProgramConsole().print(sentence, markup=False, highlight=False)


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
    from vitscale.api.laboratory import lab_status as status_of_labs

    result = status_of_labs()
    for error in result.unreadable:
        ProgramConsole(stderr=True).print(f"note: {error}", markup=False, highlight=False, soft_wrap=True)
    if result.labs or json:
        show_result(result, json=json, verbose=True)
    elif not result.unreadable:
        ProgramConsole().print("There is no lab. Make one: vitscale lab up", highlight=False)


def up_lines(lab: Laboratory) -> list[str]:
    """Return lines on what was made, and the commands to use it."""
    from vitscale.lab.state import DEFAULT_NAME

    name = lab.state.name
    name_option = "" if name == DEFAULT_NAME else f" --name {name}"
    vitscale = _this_program()
    lines = [
        f"Lab {name!r}: {', '.join(lab.names)}; {_limits(lab)}.",
        f"Hostfile: {lab.hostfile}",
        f"A study:  {vitscale} lab exec{name_option} host0 -- {vitscale} run STUDY.toml{_run_options(lab)}",
        f"A shell:  {vitscale} lab exec{name_option} host0 -- bash",
        f"The end:  {vitscale} lab down{name_option}",
    ]
    missing = lab.state.missing_for_ssh
    if missing:
        lines.append(
            f"note: without {' and '.join(missing)} the hosts have no ssh, and a study runs on one of them alone. "
            f"For several: apt-get install {' '.join(missing)}, then lab down and lab up again"
        )
    return lines


def _run_options(lab: Laboratory) -> str:
    """Return the options of `run` for all hosts of a lab; empty where they have no ssh, so that one host has to do."""
    if lab.state.missing_for_ssh:
        return ""
    launcher = " --launcher mpirun" if shutil.which("mpirun") is not None else ""
    return f" --hostfile {shlex.quote(str(lab.hostfile))}{launcher}"


def _this_program() -> str:
    """Return the command for this program: under sudo the PATH may lack a virtual environment's programs."""
    return "vitscale" if shutil.which("vitscale") else shlex.join(python_module("vitscale"))


def _limits(lab: Laboratory) -> str:
    """Return the limits of a lab's hosts in words: "100 Mbit/s to and from each, 0.4 cores for each"."""
    megabits = lab.state.bandwidth_mbit
    links = "links as fast as they are" if megabits is None else f"{megabits:g} Mbit/s to and from each"
    cores = lab.cores(0)
    if cores is None:
        return f"{links}, no limit on cores"
    return f"{links}, {cores:g} {'core' if cores == 1 else 'cores'} for each"
