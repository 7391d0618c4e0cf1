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
        return f"{counted(len(self.labs), 'lab')}, {counted(sum(len(lab.names) for lab in self.labs), 'host')}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return {"hostfiles": {lab.state.name: str(lab.hostfile) for lab in self.labs}, "hosts": self._rows()}

    @override
    def _answer_document(self) -> Document:
        """A table with a row for each host."""
        columns = [Column(name, words=name in ("lab", "host", "state")) for name in _COLUMNS]
        rows = [["none" if value is None else str(value) for value in row.values()] for row in self._rows()]
        return Document("", (table(columns, rows),))

    def _rows(self) -> list[dict[str, Any]]:
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
            for lab in self.labs
            for number, name in enumerate(lab.names)
        ]


def lab_status() -> LabResult:
    """Looks at all labs of this machine: hosts, limits, and how many processes run on each."""
    labs, unreadable = laboratories()
    return LabResult(tuple(labs), tuple(map(str, unreadable)))
