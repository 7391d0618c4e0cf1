"""lab_status: the labs of this machine, and their hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from vitscale.lab import Laboratory, laboratories
from vitscale.present.document import Column, Document, table
from vitscale.present.units import counted
from vitscale.present.verb_result import VerbResult

_COLUMNS = ("lab", "host", "address", "slots", "Mbit/s", "cores", "state", "processes")
_WORD_COLUMNS = ("lab", "host", "state")
"""Columns of words; the others are figures."""


@dataclass(frozen=True, repr=False)
class LabResult(VerbResult):
    """The labs of this machine."""

    labs: tuple[Laboratory, ...]
    """Labs with their hosts."""
    unreadable: tuple[str, ...]
    """Why other labs cannot be read."""

    verb = "lab"
    unread = None

    @property
    @override
    def summary(self) -> str:
        hosts = sum(len(lab.names) for lab in self.labs)
        return f"{counted(len(self.labs), 'lab')}, {counted(hosts, 'host')}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return {"hostfiles": {lab.state.name: str(lab.hostfile) for lab in self.labs}, "hosts": self._host_rows()}

    @override
    def _answer_document(self) -> Document:
        """Return a table with a row for each host."""
        columns = [Column(name, words=name in _WORD_COLUMNS) for name in _COLUMNS]
        rows = []
        for fields in self._host_rows():
            rows.append([_cell(value) for value in fields.values()])
        return Document("", (table(columns, rows),))

    def _host_rows(self) -> list[dict[str, Any]]:
        """Return the fields of each host, in the order of `_COLUMNS`."""
        rows: list[dict[str, Any]] = []
        for lab in self.labs:
            rows += [_host_fields(lab, number) for number in range(len(lab.names))]
        return rows


def _host_fields(lab: Laboratory, number: int) -> dict[str, Any]:
    """Return what is known of one host of a lab.

    Args:
        lab: the lab.
        number: the host's number in it, from 0.
    """
    return {
        "lab": lab.state.name,
        "host": lab.names[number],
        "address": lab.addresses[number],
        "slots": lab.state.slots,
        "bandwidth_mbit": lab.state.bandwidth_mbit,
        "cores": lab.cores(number),
        "state": "up" if lab.state.hosts[number].first.alive else "gone",
        "processes": len(lab.processes(number)),
    }


def _cell(value: object) -> str:
    return "none" if value is None else str(value)


def lab_status() -> LabResult:
    """Looks at all labs of this machine: hosts, limits, and how many processes run on each."""
    labs, unreadable = laboratories()
    return LabResult(tuple(labs), tuple(map(str, unreadable)))
