"""torch's flight recorder, read as JSON: each collective as it was called, in the field's names.

Every process group writes each collective it is given into the recorder's ring, whoever calls it: DDP's reducer does so
from C++, where no wrapper in Python would see it. An entry tells when the collective was called, by the clock of
`time.time_ns`, and its sizes; nothing waits for anything. The recorder's other form of output is a pickle.

Torch has two recorders: NCCL writes into one of its own, all other backends into the other. A build with NCCL can read
both, and the wrong one answers that it is empty.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

from vitscale.profiles.collectives import dtype_name, operation

_RING = "TORCH_FR_BUFFER_SIZE"
_RING_ENTRIES = 16_384
"""Of about 800 bytes each, taken as they come (torch 2.13). Two steps of ZeRO-3 that accumulates can exceed torch's own
2,000."""
_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""By backend: what reads the recorder it writes into."""
_VERSION = "2."
"""Of the dump: within 2 fields are only added (FlightRecorder.hpp of torch 2.13 has 2.10)."""
NO_DTYPE = "none"
"""Of a barrier, which has no tensor."""


@dataclass(frozen=True)
class Entry:
    """One collective in the ring; a coalesced one is an entry for each of its dtypes."""

    record: int
    """Counted from 0 in this process, whatever has left the ring since."""
    created_ns: int
    """When it was called, by the clock of `time.time_ns`."""
    communicator: str
    operation: str
    dtype: str
    input_elements: int
    output_elements: int


class Unreadable(Exception):
    """Why the recorder says nothing; its text is a sentence's end."""


def size_ring() -> None:
    """Makes the recorder's ring large enough unless the user has set it; before the first process group is made."""
    os.environ.setdefault(_RING, str(_RING_ENTRIES))


def too_small(entries: int) -> str:
    """What to say where a ring of so many entries has lost what was looked for."""
    return f"the recorder's ring of {entries:,} entries is too small: set {_RING} to more in the environment"


def entries(backend: str) -> tuple[Entry, ...]:
    """All that is in the ring of the recorder that a backend writes into, oldest first.

    Takes about 50 us an entry: for a pause.

    Raises:
        Unreadable: there is no recorder, it is switched off, or it speaks a language of its own.
    """
    dump = getattr(c10d, _DUMPS.get(backend, ""), None)
    if dump is None:
        raise Unreadable(f"this torch has no flight recorder of {backend} that can be read as JSON")
    if os.environ.get(_RING) == "0":
        raise Unreadable(f"the flight recorder is switched off ({_RING}=0)")
    return parse(dump(includeCollectives=True, onlyActive=False))


def parse(text: str) -> tuple[Entry, ...]:
    """The entries of a dump.

    Raises:
        Unreadable: it is not as this version of vitscale knows it.
    """
    content = json.loads(text)
    version = str(content.get("version"))
    if not version.startswith(_VERSION):
        raise Unreadable(f"the flight recorder writes version {version}, and vitscale reads {_VERSION}x")
    try:
        entries = [entry for raw in content.get("entries", []) for entry in _entries(raw)]
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"an entry of the flight recorder cannot be read: {type(error).__name__} {error}") from None
    return tuple(sorted(entries, key=lambda entry: entry.record))


def _entries(raw: dict[str, Any]) -> Iterator[Entry]:
    name = str(raw["profiling_name"]).partition(":")[2]
    sizes = raw["input_sizes"], raw["output_sizes"]
    if name == "coalesced" and not any(sizes):
        return  # the end of a group, whose members have entries of their own
    inputs = _elements(raw["input_sizes"], raw["input_dtypes"])
    outputs = _elements(raw["output_sizes"], raw["output_dtypes"])
    for dtype in dict.fromkeys([*inputs, *outputs]) or [NO_DTYPE]:
        yield Entry(
            record=int(raw["record_id"]),
            created_ns=int(raw["time_created_ns"]),
            communicator=str(raw["process_group"][0]),
            operation=operation(name),
            dtype=dtype,
            input_elements=inputs.get(dtype, 0),
            output_elements=outputs.get(dtype, 0),
        )


def _elements(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> dict[str, int]:
    """Elements by dtype. A list that is gathered into has one dtype for all its tensors, under one leading size."""
    elements: dict[str, int] = {}
    for size, dtype in zip(sizes, dtypes, strict=True):
        name = dtype_name(dtype)
        elements[name] = elements.get(name, 0) + math.prod(size)
    return elements
