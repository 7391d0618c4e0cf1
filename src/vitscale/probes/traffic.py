"""Counts the collectives of an optimizer step without waiting for anything.

A step that is counted notes when it begins and ends. Afterwards torch's flight recorder has the collectives that were
called in between. gloo needs two things more, for which calls pass through Python, so not in steps that are timed:

- It has no reduce-scatter: torch does an all-reduce in its place and keeps a part of the result, and the recorder sees
  the all-reduce. So calls of a reduce-scatter are noted, and the all-reduces inside one count as that reduce-scatter.
- It does not record a send or a recv: these are noted too.

torch's flight recorder is read as JSON. Every process group writes each collective it is given into the recorder's
ring, whoever calls it: DDP's reducer does so from C++, where no wrapper in Python would see it. An entry has when the
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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from vitscale.processes.launch_file import RECORDER_RING
from vitscale.profiles.flight_recorder import DUMP_OF_NCCL, DUMP_OF_OTHERS, VERSION
from vitscale.profiles.kernels import dtype_name, operation
from vitscale.store.records import Collective, TrafficLine

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # a text, which older releases do not name

_DUMP_BY_BACKEND = {"nccl": DUMP_OF_NCCL, "gloo": DUMP_OF_OTHERS}
"""Backend to the function that dumps the recorder into which it writes."""
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
    """What the recorder saw cannot be read; its message is the reason, as the end of a sentence."""


def size_ring() -> None:
    """Makes the recorder's ring large enough unless the user has set it; before the first process group is made."""
    os.environ.setdefault(*RECORDER_RING)


def too_small(entries: int) -> str:
    """Returns the message where a ring of `entries` entries has lost what was looked for."""
    return f"the recorder's ring of {entries:,} entries is too small: set {RECORDER_RING[0]} to more in the environment"


def entries(backend: str) -> tuple[Entry, ...]:
    """Returns all entries in the ring of the recorder that a backend writes into, oldest first.

    Takes about 50 us an entry: for a pause.

    Raises:
        Unreadable: there is no recorder, it is switched off, or it speaks a language of its own.
    """
    dump = getattr(c10d, _DUMP_BY_BACKEND.get(backend, ""), None)
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
    if not version.startswith(VERSION):
        raise Unreadable(f"the flight recorder writes version {version}, and vitscale reads {VERSION}x")
    parsed: list[Entry] = []
    try:
        for raw in content.get("entries", []):
            parsed += _parse_entry(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"an entry of the flight recorder cannot be read: {type(error).__name__} {error}") from None
    return tuple(sorted(parsed, key=lambda entry: entry.record))


def _parse_entry(raw: dict[str, Any]) -> Iterator[Entry]:
    """Yields an entry for each dtype in one entry of the dump, as several tensors of one call may have several.

    Args:
        raw: the entry as JSON. Its `profiling_name` is "nccl:all_reduce", for example.
    """
    name = str(raw["profiling_name"]).partition(":")[2]
    has_tensors = any((raw["input_sizes"], raw["output_sizes"]))
    if name == "coalesced" and not has_tensors:
        return  # the end of a group; its members have their own entries
    inputs = _elements_by_dtype(raw["input_sizes"], raw["input_dtypes"])
    outputs = _elements_by_dtype(raw["output_sizes"], raw["output_dtypes"])
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


def _elements_by_dtype(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> dict[str, int]:
    """Returns the number of elements by dtype.

    A list that is gathered into has one dtype for all its tensors, and one leading size.
    """
    elements: dict[str, int] = {}
    for size, dtype in zip(sizes, dtypes, strict=True):
        name = dtype_name(dtype)
        elements[name] = elements.get(name, 0) + math.prod(size)
    return elements


NO_GROUP = "none"
"""The backend of a rank without a process group, which sends nothing."""
FIRST_USUAL_STEP = 3
"""First step of a process that sends what later ones do.

DDP lays out its buckets again in the second step, and with a static graph in the third. ZeRO-3 learns in the first one
in which order weights are needed.
"""
_MESSAGES = ("send", "recv")
"""Methods of a process group that send from one rank to another."""
COUNTED_STEPS = 2
"""Number of counted steps, which must all send the same."""
_LARGEST_CLOCK_MOVE_NS = 1_000_000
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
    """A reading of the wall clock, and between which bounds it was ahead of the steady clock.

    The wall clock is read between two readings of the steady one. So the bounds hold even if this rank lost its core
    between two readings: they are only further apart.
    """

    wall_ns: int
    least_lead_ns: int
    most_lead_ns: int


def _read_clocks() -> _Clocks:
    """Reads the wall clock between two readings of the steady one."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    after = time.monotonic_ns()
    return _Clocks(wall_ns=wall, least_lead_ns=wall - after, most_lead_ns=wall - before)


def _was_set(before: _Clocks, after: _Clocks) -> bool:
    """Whether the wall clock has certainly moved against the steady one between two readings."""
    has_fallen_back = after.most_lead_ns < before.least_lead_ns - _LARGEST_CLOCK_MOVE_NS
    has_gained = after.least_lead_ns > before.most_lead_ns + _LARGEST_CLOCK_MOVE_NS
    return has_fallen_back or has_gained


class TrafficCounter:
    """Counts the collectives of some of this rank's optimizer steps."""

    def __init__(self) -> None:
        """Looks at the process group, which exists by now if there is to be one."""
        self._backends = _backends() if dist.is_initialized() else (NO_GROUP,)
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.backend = self._backends[0]
        """Backend of the device's tensors, or `NO_GROUP`."""
        self._steps: list[CountedStep] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Returns a context around one optimizer step that is to be counted; it is not if an exception leaves it."""
        scatters: list[ReduceScatter] = []
        messages: list[Entry] = []
        with ExitStack() as stack:
            if self.backend == "gloo":
                stack.enter_context(_noting_calls(scatters, messages))
            before = _read_clocks()
            yield
            after = _read_clocks()
        self._steps.append(
            CountedStep(
                number,
                began_ns=before.wall_ns,
                ended_ns=after.wall_ns,
                scatters=tuple(scatters),
                messages=tuple(messages),
                clock_set=_was_set(before, after),
            )
        )

    def lines(self) -> list[TrafficLine]:
        """Returns the record of each counted step's collectives.

        Reads the recorder's whole ring, which takes long: call it in a pause.
        """
        lines: list[TrafficLine] = []
        rings: list[tuple[Entry, ...]] = []
        for step in self._steps:
            traffic: tuple[Collective, ...] | None = None
            reason: str | None = None
            try:
                rings = rings or [entries(backend) for backend in self._backends]  # read once, for the first step
                traffic = tuple(collectives(rings, step, self._ranks, _size_of))
            except Unreadable as error:
                reason = str(error)
            lines.append(TrafficLine(step=step.number, backend=self.backend, collectives=traffic, reason=reason))
        return lines


def _backends() -> tuple[str, ...]:
    """Returns the backends of this rank's group; the one of its device's tensors comes first.

    A group may have a backend for each kind of device: "cpu:gloo,cuda:nccl".
    """
    config = dist.get_backend_config()  # get_backend says "undefined" where nobody named a backend
    names = {backend.rpartition(":")[2] for backend in config.split(",")}
    return tuple(sorted(names, key=lambda name: (name != "nccl", name)))


def collectives(
    rings: Sequence[Sequence[Entry]], step: CountedStep, ranks: int, size_of: Callable[[str], int]
) -> list[Collective]:
    """Returns the collectives of one step in the order of their calls, by the recorder and by noted calls.

    Args:
        rings: the entries of each recorder that the group writes into, oldest first.
        step: the step.
        ranks: ranks that train together: if there are several, no collective means that the recorder saw nothing.
        size_of: the ranks of a communicator by its name.

    Raises:
        Unreadable: some of the step's collectives are unknown.
    """
    if step.clock_set:
        raise Unreadable(CLOCK_SET)
    for ring in rings:
        if _may_have_lost_entries(step, ring):
            raise Unreadable(too_small(len(ring)))
    step_entries = _entries_in_step(step, rings)
    if not step_entries and ranks > 1:
        raise Unreadable(SAW_NOTHING.format(ranks=ranks))
    # A call is a reduce-scatter, recorded as the collectives that carry it out, or any other collective, recorded as
    # it is. In the order of their first entries.
    entries_by_call: dict[ReduceScatter | Entry, list[Entry]] = {}
    for entry in step_entries:
        call = _scatter_around(entry, step.scatters) or entry
        entries_by_call.setdefault(call, []).append(entry)
    missing = set(step.scatters) - entries_by_call.keys()
    if missing:
        raise Unreadable(f"of {len(missing)} reduce-scatters of gloo the recorder saw nothing")
    called: list[Entry] = []  # what was asked of the backend, in place of what carried it out
    for call, call_entries in entries_by_call.items():
        if isinstance(call, ReduceScatter):
            called += _as_reduce_scatter(call, call_entries, size_of)
        else:
            called += call_entries
    return [
        Collective(
            communicator=entry.communicator,
            ranks=size_of(entry.communicator),
            operation=entry.operation,
            dtype=entry.dtype,
            input_elements=entry.input_elements,
            output_elements=entry.output_elements,
        )
        for entry in called
    ]


def _may_have_lost_entries(step: CountedStep, ring: Sequence[Entry]) -> bool:
    """Whether entries of this step may have left the ring.

    So it is if some have left it (its oldest is not the process's first), and its oldest was made in the step or later.
    """
    if not ring:
        return False
    oldest = ring[0]
    return oldest.record > 0 and oldest.created_ns >= step.began_ns


def _entries_in_step(step: CountedStep, rings: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Returns the recorded entries and the noted messages of a step, in the order of their calls."""
    # A set: a later torch may have one recorder for both backends, and give it twice.
    all_entries = {entry for ring in rings for entry in ring}.union(step.messages)
    in_order = sorted(all_entries, key=lambda entry: (entry.created_ns, entry.record))
    return [entry for entry in in_order if step.began_ns <= entry.created_ns < step.ended_ns]


def _scatter_around(entry: Entry, scatters: Iterable[ReduceScatter]) -> ReduceScatter | None:
    """Returns the reduce-scatter in whose call a collective was called; None outside of all."""
    for scatter in scatters:
        if scatter.began_ns <= entry.created_ns < scatter.ended_ns:
            return scatter
    return None


class _ScatterPart(NamedTuple):
    """The part of a reduce-scatter that has one dtype; each part is carried out by collectives of its own."""

    communicator: str
    dtype: str


def _as_reduce_scatter(scatter: ReduceScatter, carriers: Sequence[Entry], size_of: Callable[[str], int]) -> list[Entry]:
    """Returns a reduce-scatter in place of the all-reduces that carry it out; one for each dtype if there are several.

    Raises:
        Unreadable: it is not carried out by all-reduces of as many elements.
    """
    names = sorted({carrier.operation for carrier in carriers})
    elements = sum(carrier.input_elements for carrier in carriers)
    if names != ["all_reduce"] or elements != scatter.elements:
        raise Unreadable(
            f"a reduce-scatter of {scatter.elements:,} elements was carried out as {' and '.join(names)} of "
            f"{elements:,}, and vitscale knows gloo to use an all_reduce of as many"
        )
    entries_by_part: dict[_ScatterPart, Entry] = {}
    for carrier in carriers:
        part = _ScatterPart(carrier.communicator, carrier.dtype)
        inputs = carrier.input_elements
        if part in entries_by_part:
            inputs += entries_by_part[part].input_elements
        outputs = inputs // size_of(carrier.communicator)
        entries_by_part[part] = replace(
            carrier, operation="reduce_scatter", input_elements=inputs, output_elements=outputs
        )
    return list(entries_by_part.values())


def _size_of(communicator: str) -> int:
    """Returns the number of ranks of one of this rank's process groups, by its name.

    Raises:
        Unreadable: torch knows no such group.
    """
    try:
        return int(c10d._resolve_process_group(cast("GroupName", communicator)).size())
    except (RuntimeError, ValueError):
        raise Unreadable(f"the ranks of process group {communicator!r} are unknown") from None


@contextmanager
def _noting_calls(scatters: list[ReduceScatter], messages: list[Entry]) -> Iterator[None]:
    """Adds each reduce-scatter that a process group is asked for to `scatters`, and each send and recv to `messages`.

    It does so inside of the `with` alone.
    """
    group = c10d.ProcessGroup
    # As they lie in the class, to be put back: what `getattr` returns would no longer bind to a group.
    originals = {
        name: attribute for name, attribute in vars(group).items() if "reduce_scatter" in name or name in _MESSAGES
    }
    for name in originals:
        method = getattr(group, name)
        wrapped = _noting_message(method, messages) if name in _MESSAGES else _noting_scatter(method, scatters)
        setattr(group, name, wrapped)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def _noting_scatter(original: Callable[..., Any], scatters: list[ReduceScatter]) -> Callable[..., Any]:
    """Returns a method of a process group that does the same, and adds its times and elements to `scatters`."""

    def call(group: Any, outputs: Any, *inputs: Any, **named: Any) -> Any:
        began = time.time_ns()
        work = original(group, outputs, *inputs, **named)
        elements = sum(tensor.numel() for tensor in _tensors_among([*inputs, *named.values()]))
        scatters.append(ReduceScatter(began, time.time_ns(), elements))
        return work

    return call


def _noting_message(original: Callable[..., Any], messages: list[Entry]) -> Callable[..., Any]:
    """Returns a `send` or `recv` of a process group that does the same, and adds an entry for each tensor."""
    is_send = original.__name__ == "send"

    def call(group: Any, tensors: Sequence[Tensor], *arguments: Any) -> Any:
        for tensor in tensors:
            entry = Entry(
                record=len(messages),
                created_ns=time.time_ns(),
                communicator=group.group_name,
                operation=original.__name__,
                dtype=dtype_name(str(tensor.dtype).removeprefix("torch.")),
                input_elements=tensor.numel() if is_send else 0,
                output_elements=0 if is_send else tensor.numel(),
            )
            messages.append(entry)
        return original(group, tensors, *arguments)

    return call


def _tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields all tensors in values, and in lists of values at any depth."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_among(value)
