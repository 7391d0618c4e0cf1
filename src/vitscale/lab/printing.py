"""What `vitscale lab` says: how to use a lab, and how its hosts are."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from vitscale.lab.laboratory import Laboratory
from vitscale.lab.plan import DEFAULT_NAME


def up_lines(lab: Laboratory) -> list[str]:
    """What was made, and the commands to use it with."""
    name = lab.state.name
    named = "" if name == DEFAULT_NAME else f" --name {name}"
    vitscale = _this_program()
    study = f"{vitscale} run STUDY.toml --hostfile {shlex.quote(str(lab.hostfile))} --launcher mpirun"
    lines = [
        f"Lab {name!r}: {', '.join(lab.names)}; {_limits(lab)}.",
        f"Hostfile: {lab.hostfile}",
        f"A study:  {vitscale} lab exec{named} host0 -- {study}",
        f"A shell:  {vitscale} lab exec{named} host0 -- bash",
        f"The end:  {vitscale} lab down{named}",
    ]
    if missing := lab.state.missing_for_ssh:
        lines.append(
            f"note: without {' and '.join(missing)} the hosts have no ssh: mpirun, pdsh and deepspeed cannot start "
            "anything on another host; 'vitscale lab exec' can"
        )
    return lines


def status_table(labs: Sequence[Laboratory]) -> Table:
    """One line per host."""
    table = Table("lab", "host", "address", "slots", "Mbit/s", "cores", "state", "processes", box=None)
    for row in _rows(labs):
        cells = ("none" if value is None else str(value) for value in row.values())
        table.add_row(*cells)
    return table


def status_json(labs: Sequence[Laboratory]) -> str:
    """The same as JSON, with the hostfiles."""
    hosts = list(_rows(labs))
    files = {lab.state.name: str(lab.hostfile) for lab in labs}
    return json.dumps({"hostfiles": files, "hosts": hosts}, indent=2)


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
    """Under sudo the PATH is another one, and a virtual environment's programs may not be on it."""
    return "vitscale" if shutil.which("vitscale") else shlex.join([sys.executable, "-m", "vitscale"])


def _limits(lab: Laboratory) -> str:
    megabits, cores = lab.state.bandwidth_mbit, lab.cores(0)
    links = "links as fast as they are" if megabits is None else f"{megabits:g} Mbit/s to and from each"
    shares = "no limit on cores" if cores is None else f"{cores:g} {'core' if cores == 1 else 'cores'} for each"
    return f"{links}, {shares}"
