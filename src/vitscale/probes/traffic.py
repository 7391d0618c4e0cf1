"""Counts the collectives of an optimizer step without waiting for anything.

A step that is counted notes when it begins and ends, and afterwards the flight recorder tells which collectives were
called in between. gloo needs one thing more. It has no reduce-scatter: torch gives it an all-reduce and keeps a part of
the result, and the recorder sees the all-reduce. So that what was asked for stays known, calls of a reduce-scatter are
noted too, and the all-reduces inside one stand as the reduce-scatter they carry out. Nor does gloo tell the recorder of
a send or a recv: these are noted as well. Calls then pass through Python: not for steps that are timed.

torch's flight recorder is read as JSON. Every process group writes each collective it is given into the recorder's
ring, whoever calls it: DDP's reducer does so from C++, where no wrapper in Python would see it. An entry tells when the
collective was called, by the clock of `time.time_ns`, and its sizes; nothing waits for anything. The recorder's other
form of output is a pickle. Torch has two recorders: NCCL writes into one of its own, all other backends into the other.
A build with NCCL can read both, and the wrong one answers that it is empty.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from vitscale.processes.launch_file import RECORDER_RING
from vitscale.profiles.kernels import dtype_name, operation
from vitscale.store.records import Collective, TrafficLine

_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""Backend to the function that dumps the recorder into which it writes."""
_VERSION = "2."
"""Version of the dump: minor versions of 2 only add fields (FlightRecorder.hpp of torch 2.13 has 2.10)."""
NO_DTYPE = "none"
"""Dtype of a barrier, which has no tensor."""


@dataclass(frozen=True)
class Entry:
    """One collective in the ring; a coalesced one has an entry for each of its dtypes."""

    record: int
    """Its number in this process, counted from 0, whatever has left the ring since."""
    created_ns: int
    """When it was called, by the clock of `time.time_ns`."""
    communicator: str
    operation: str
    dtype: str
    input_elements: int
    output_elements: int


class Unreadable(Exception):
    """Why the recorder tells nothing, as the end of a sentence."""


def size_ring() -> None:
    """Makes the recorder's ring large enough unless the user has set it; before the first process group is made."""
    os.environ.setdefault(*RECORDER_RING)


def too_small(entries: int) -> str:
    """The message where a ring of `entries` entries has lost what was looked for."""
    return f"the recorder's ring of {entries:,} entries is too small: set {RECORDER_RING[0]} to more in the environment"


def entries(backend: str) -> tuple[Entry, ...]:
    """All entries in the ring of the recorder that a backend writes into, oldest first.

    Takes about 50 us an entry: for a pause.

    Raises:
        Unreadable: there is no recorder, it is switched off, or it speaks a language of its own.
    """
    dump = getattr(c10d, _DUMPS.get(backend, ""), None)
    if dump is None:
        raise Unreadable(f"this torch has no flight recorder of {backend} that can be read as JSON")
    if os.environ.get(RECORDER_RING[0]) == "0":
        raise Unreadable(f"the flight recorder is switched off ({RECORDER_RING[0]}=0)")
    return parse(dump(includeCollectives=True, onlyActive=False))


def parse(text: str) -> tuple[Entry, ...]:
    """Parses the entries of a dump.

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
        return  # the end of a group; its members have their own entries
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
    """Elements by dtype. A list that is gathered into has one dtype for all its tensors, and one leading size."""
    elements: dict[str, int] = {}
    for size, dtype in zip(sizes, dtypes, strict=True):
        name = dtype_name(dtype)
        elements[name] = elements.get(name, 0) + math.prod(size)
    return elements


NO_GROUP = "none"
"""The backend of a rank without a process group, which sends nothing."""
FIRST_USUAL_STEP = 3
"""First step of a process that sends what later ones do. DDP lays out its buckets anew in the second step, with a
static graph in the third; in the first ZeRO-3 learns in which order weights are needed."""
COUNTED_STEPS = 2
"""Number of counted steps, which must all send the same."""
_CLOCK_SET_NS = 1_000_000
"""Most ns by which the wall clock may move against the steady one in a step."""
CLOCK_SET = "the system's clock was set in the course of the step"
SAW_NOTHING = "the flight recorder saw no collective, though {ranks} ranks trained together"


@dataclass(frozen=True)
class ReduceScatter:
    """A reduce-scatter that gloo was asked for: its times by the clock of `time.time_ns`, and its elements in all."""

    began_ns: int
    ended_ns: int
    elements: int


@dataclass(frozen=True)
class CountedStep:
    """Times of a step by the clock of `time.time_ns`, and what the recorder does not tell of it."""

    number: int
    began_ns: int
    ended_ns: int
    scatters: tuple[ReduceScatter, ...] = ()
    messages: tuple[Entry, ...] = ()
    """Messages from one rank to another; gloo does not tell the recorder of them."""
    clock_set: bool = False


class _Clocks(NamedTuple):
    """The wall clock, and bounds of how far it was ahead of the steady one, however long this rank was kept from a core
    between two readings."""

    wall_ns: int
    earliest: int
    latest: int


def _read_clocks() -> _Clocks:
    before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return _Clocks(wall, wall - after, wall - before)


class TrafficCounter:
    """Counts the collectives of some of this rank's optimizer steps."""

    def __init__(self) -> None:
        self._backends = _backends() if dist.is_initialized() else (NO_GROUP,)
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.backend = self._backends[0]
        self._steps: list[CountedStep] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Counts one optimizer step, unless an exception leaves it."""
        scatters: list[ReduceScatter] = []
        messages: list[Entry] = []
        with ExitStack() as stack:
            if self.backend == "gloo":
                stack.enter_context(_noting(scatters, messages))
            before = _read_clocks()
            yield
            after = _read_clocks()
        clock_set = after.latest < before.earliest - _CLOCK_SET_NS or after.earliest > before.latest + _CLOCK_SET_NS
        noted = tuple(scatters), tuple(messages)
        self._steps.append(CountedStep(number, before.wall_ns, after.wall_ns, *noted, clock_set))

    def lines(self) -> list[TrafficLine]:
        """What each counted step sent. Reads the whole ring, so call it in a pause."""
        lines: list[TrafficLine] = []
        rings: list[tuple[Entry, ...]] = []
        for step in self._steps:
            sent, reason = None, None
            try:
                rings = rings or [entries(backend) for backend in self._backends]
                sent = tuple(collectives(rings, step, self._ranks, _size_of))
            except Unreadable as error:
                reason = str(error)
            lines.append(TrafficLine(step=step.number, backend=self.backend, collectives=sent, reason=reason))
        return lines


def _backends() -> tuple[str, ...]:
    """Backends of this rank's group; the one of its device's tensors comes first.

    A group may have a backend for each kind of device: "cpu:gloo,cuda:nccl".
    """
    config = dist.get_backend_config()  # get_backend says "undefined" where nobody named a backend
    names = {backend.rpartition(":")[2] for backend in config.split(",")}
    return tuple(sorted(names, key=lambda name: (name != "nccl", name)))


def collectives(
    rings: Sequence[Sequence[Entry]], step: CountedStep, ranks: int, size_of: Callable[[str], int]
) -> list[Collective]:
    """The collectives of one step in the order of their calls.

    Args:
        rings: the entries of each recorder that the group writes into, oldest first.
        step: the step.
        ranks: ranks that train together: if there are several, no collective means that the recorder saw nothing.
        size_of: the ranks of a communicator by its name.

    Raises:
        Unreadable: not all of the step can be told.
    """
    if step.clock_set:
        raise Unreadable(CLOCK_SET)
    for ring in rings:
        if ring and ring[0].record > 0 and ring[0].created_ns >= step.began_ns:
            raise Unreadable(too_small(len(ring)))
    # A set: a later torch may have one recorder for both backends, and give it twice.
    entries = {entry for ring in rings for entry in ring}.union(step.messages)
    recorded = sorted(entries, key=lambda entry: (entry.created_ns, entry.record))
    of_step = [entry for entry in recorded if step.began_ns <= entry.created_ns < step.ended_ns]
    if not of_step and ranks > 1:
        raise Unreadable(SAW_NOTHING.format(ranks=ranks))
    asked: dict[ReduceScatter | Entry, list[Entry]] = {}
    for entry in of_step:
        call = next((s for s in step.scatters if s.began_ns <= entry.created_ns < s.ended_ns), entry)
        asked.setdefault(call, []).append(entry)
    if missing := set(step.scatters) - asked.keys():
        raise Unreadable(f"of {len(missing)} reduce-scatters of gloo the recorder saw nothing")
    sent: list[Entry] = []
    for call, carriers in asked.items():
        sent += _carried_out(call, carriers, size_of) if isinstance(call, ReduceScatter) else carriers
    return [
        Collective(
            communicator=entry.communicator,
            ranks=size_of(entry.communicator),
            operation=entry.operation,
            dtype=entry.dtype,
            input_elements=entry.input_elements,
            output_elements=entry.output_elements,
        )
        for entry in sent
    ]


def _carried_out(scatter: ReduceScatter, carriers: Sequence[Entry], size_of: Callable[[str], int]) -> list[Entry]:
    """The reduce-scatter in place of the all-reduces that carry it out; one for each dtype if there are several."""
    names = sorted({carrier.operation for carrier in carriers})
    elements = sum(carrier.input_elements for carrier in carriers)
    if names != ["all_reduce"] or elements != scatter.elements:
        raise Unreadable(
            f"a reduce-scatter of {scatter.elements:,} elements was carried out as {' and '.join(names)} of "
            f"{elements:,}, and vitscale knows gloo to use an all_reduce of as many"
        )
    parts: dict[tuple[str, str], Entry] = {}
    for carrier in carriers:
        key = carrier.communicator, carrier.dtype
        own = carrier.input_elements + (parts[key].input_elements if key in parts else 0)
        ranks = size_of(carrier.communicator)
        parts[key] = replace(carrier, operation="reduce_scatter", input_elements=own, output_elements=own // ranks)
    return list(parts.values())


def _size_of(communicator: str) -> int:
    """Number of ranks of one of this rank's process groups, by its name."""
    try:
        return int(c10d._resolve_process_group(GroupName(communicator)).size())
    except (RuntimeError, ValueError):
        raise Unreadable(f"the ranks of process group {communicator!r} are unknown") from None


@contextmanager
def _noting(scatters: list[ReduceScatter], messages: list[Entry]) -> Iterator[None]:
    """Meanwhile adds reduce-scatters that Python asks of a group to `scatters`, and sends and recvs to `messages`."""
    group = c10d.ProcessGroup
    # As they lie in the class: if the class is asked for them, the answers no longer bind to a group.
    originals = {name: own for name, own in vars(group).items() if "reduce_scatter" in name or name in ("send", "recv")}
    for name in originals:
        original = getattr(group, name)
        point_to_point = name in ("send", "recv")
        setattr(group, name, _told(original, messages) if point_to_point else _noted(original, scatters))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def _noted(original: Callable[..., Any], scatters: list[ReduceScatter]) -> Callable[..., Any]:
    def call(group: Any, outputs: Any, *inputs: Any, **named: Any) -> Any:
        began = time.time_ns()
        work = original(group, outputs, *inputs, **named)
        elements = sum(tensor.numel() for tensor in _tensors([*inputs, *named.values()]))
        scatters.append(ReduceScatter(began, time.time_ns(), elements))
        return work

    return call


def _told(original: Callable[..., Any], messages: list[Entry]) -> Callable[..., Any]:
    def call(group: Any, tensors: Sequence[Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            sent = tensor.numel() if original.__name__ == "send" else 0
            dtype, received = dtype_name(str(tensor.dtype).removeprefix("torch.")), tensor.numel() - sent
            name = original.__name__
            messages.append(Entry(len(messages), time.time_ns(), group.group_name, name, dtype, sent, received))
        return original(group, tensors, *rest)

    return call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors in values and lists of values."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
