"""Reads a trace file of the PyTorch profiler (Kineto's Chrome format), plain or gzipped, as a stream.

What a timeline is made of is kept: what ran on the device, the calls that launched it, ranges that the user or torch
marked, calls of collectives, and the products whose shapes were recorded. All else is passed over, so that memory
follows the device's events and not the file. Times are rebased: in nanoseconds since 1970 a float is off by 256 ns.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitscale.errors import StoreError, printable, shown
from vitscale.profiles.collectives import dtype_name, is_collective, operation
from vitscale.profiles.events import COMMUNICATION_CALL, KIND_OF_ACTIVITY, Event, Kind
from vitscale.profiles.flops import FLOPS_OF, product_flops

_BLOCK = 1 << 20
_LONGEST_EVENT = 64 << 20
"""Bytes that one event, or what stands before and after all of them, may take."""
_MOST_BYTES = 64 << 30
"""Of an unpacked file."""
_MOST_EVENTS = 20_000_000
_LONGEST_NS = 10**13
"""That a trace may last: 2.8 hours."""
_MOST_CUTS = 64
"""Places at which a block may be cut in two before more of the file is read."""
_CUT = re.compile(rb"\}\s*,\s*\{")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_KINDS: Mapping[str, Kind] = {**KIND_OF_ACTIVITY, "operator": "operator", "runtime": "launch", "driver": "launch",
                              "memcpy": "copy", "memset": "kernel"}  # fmt: skip
"""Of categories in small letters: torch 1.8 to 1.13 wrote "Kernel", "Runtime" and "Memcpy"."""
_PASSED_OVER = frozenset(
    (
        *("ac2g", "fwdbwd", "fwd_bwd", "async_cpu_to_gpu", "async_gpu", "python_function", "cpu_instant_event"),
        *("trace", "gpu_user_annotation", "cuda_sync", "cuda_event", "overhead", "cuda_profiler_range"),
    )
)
"""Of events that hold nothing of a timeline. A range on the device repeats one of the host."""
_BACKWARD = "autograd::engine::evaluate_function"
_MARKED = re.compile(r"ProfilerStep|Optimizer\.step|.*DataParallel\.forward|enumerate\(DataLoader\)")
"""Ranges that early releases wrote as operators."""


class Call(NamedTuple):
    """A collective as the host called it, in c10d's names; sizes of None are not told."""

    start_ns: int
    communicator: str
    operation: str
    ranks: int | None
    dtype: str | None
    input_elements: int | None
    output_elements: int | None


class Product(NamedTuple):
    """A matrix product or convolution whose shapes were recorded."""

    start_ns: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: int


@dataclass(frozen=True)
class Group:
    """A process group of the job."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Trace:
    """One file: one rank of a job."""

    path: Path
    rank: int | None
    world_size: int | None
    device: str | None
    """The name of the GPU that most of it ran on; None where the file does not name it."""
    trace_id: str | None
    backend: str | None
    versions: dict[str, str | None]
    groups: tuple[Group, ...]
    started_unix_seconds: float | None
    events: list[Event] = field(default_factory=list)
    """In no order. Of operators only torch's backward functions are kept."""
    calls: list[Call] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    """Events of categories that are not known here, and what cannot be an event, by what it is."""
    total_events: int = 0

    @property
    def on_device(self) -> list[Event]:
        """What ran on the GPU."""
        return [event for event in self.events if event.kind in ("kernel", "copy")]


_RENAMED = {
    "external": "External id", "operation": "Collective name", "group": "Process Group Name", "dtype": "dtype",
    "inputs": "In msg nelems", "outputs": "Out msg nelems", "ranks": "Group size", "dims": "Input Dims",
    "types": "Input type", "concrete": "Concrete Inputs",
}  # fmt: skip


class _Arguments(msgspec.Struct, rename=_RENAMED):
    correlation: Any = 0
    stream: Any = None
    device: Any = None
    external: Any = 0
    operation: Any = ""
    group: Any = ""
    dtype: Any = ""
    inputs: Any = None
    outputs: Any = None
    ranks: Any = None
    dims: Any = None
    types: Any = None
    concrete: Any = None


class _Raw(msgspec.Struct):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = 0
    tid: Any = 0
    ts: Any = None
    dur: Any = None
    args: Any = None


class _Typed(_Raw):
    args: _Arguments | None = None


_TYPED = msgspec.json.Decoder(list[_Typed])
_ARGUMENTS = {name: _RENAMED.get(name, name) for name in _Arguments.__struct_fields__}


def read_trace(path: Path) -> Trace:
    """The rank that a file holds.

    Raises:
        StoreError: it cannot be read, is cut off, is no trace, or is larger than what is read.
    """
    reader = _Reader(path)
    for some in reader.events():
        for raw in some:
            reader.take(raw)
    return reader.trace()


def is_trace(path: Path) -> bool:
    """Whether a file begins like a trace; of one that cannot be read, False."""
    try:
        begin = next(_blocks(path), b"")
    except StoreError:
        return False
    return b'"traceEvents"' in begin or b'"schemaVersion"' in begin or (begin.lstrip()[:1] == b"[" and b'"ph"' in begin)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._about: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._base_ns: int | None = None
        self._called: dict[int, Call] = {}
        self._launched_by: dict[int, int] = {}
        self._trace = Trace(path, None, None, None, None, None, {}, (), None)
        self._devices: Counter[int] = Counter()
        self._unlinked: list[int] = []

    def events(self) -> Iterator[list[Any]]:
        """Lists of events; what stands around them goes into `_about`."""
        blocks = _blocks(self._path)
        buffer = next(blocks, b"").lstrip(b"\xef\xbb\xbf \t\r\n")
        if buffer[:1] == b"[":  # the events alone
            buffer = buffer[1:]
        else:
            if buffer[:1] != b"{":
                raise self._no_trace("it is no JSON object")
            while (match := _LIST.search(buffer)) is None:
                if len(buffer) > _LONGEST_EVENT or not (more := next(blocks, b"")):
                    raise self._no_trace("it has no list of traceEvents")
                buffer += more
            self._learn(buffer[: match.start()].rstrip(b", \t\r\n") + b"}")
            buffer = buffer[match.end() :]
        for block in blocks:
            buffer += block
            cuts = [match.start() + 1 for match in _CUT.finditer(buffer)]
            for cut in cuts[: -_MOST_CUTS - 1 : -1]:
                if (some := _decoded(b"[" + buffer[:cut] + b"]")) is not None:
                    yield some
                    buffer = buffer[cut:].lstrip(b", \t\r\n")
                    break
            if len(buffer) > _LONGEST_EVENT:
                raise self._no_trace(f"more than {_LONGEST_EVENT >> 20} MiB of it are no events")
        yield self._rest(buffer)

    def _rest(self, buffer: bytes) -> list[Any]:
        try:
            text = "[" + buffer.decode("utf-8", errors="replace")
            last, end = json.JSONDecoder().raw_decode(text)
            after = text[end:].strip(" \t\r\n")
            if after.startswith(","):
                self._learn(("{" + after[1:]).encode())
        except (ValueError, RecursionError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{shown(self._path.name)} is cut off or broken after {self._trace.total_events:,} events",
                next_step="Copy it again from where it was written",
            ) from None
        return [_lenient(one) for one in last]

    def _learn(self, text: bytes) -> None:
        try:
            about = json.loads(text)
        except (ValueError, RecursionError):
            raise self._no_trace("what stands around its events is no JSON") from None
        if isinstance(about, dict):
            self._about |= about

    def _no_trace(self, why: str) -> StoreError:
        return StoreError(
            f"{shown(self._path.name)} is no trace of the PyTorch profiler: {why}",
            next_step="Give a file that profile.export_chrome_trace wrote",
        )

    def take(self, raw: Any) -> None:
        """One event of the file."""
        trace = self._trace
        trace.total_events += 1
        if raw.ph != "X":
            return
        category = raw.cat.lower() if isinstance(raw.cat, str) else ""
        kind = _KINDS.get(category)
        if kind is None:
            if category and category not in _PASSED_OVER:
                trace.unknown[f"category {printable(category)[:40]}"] += 1
            return
        name = raw.name
        if not isinstance(name, str):
            trace.unknown["events without a name"] += 1
            return
        arguments = raw.args
        if kind == "operator":
            if name.startswith(_BACKWARD):
                name = _BACKWARD
            elif _MARKED.match(name):
                kind = "annotation"
            elif name != COMMUNICATION_CALL and (name not in FLOPS_OF or arguments is None or not arguments.dims):
                return
        start_ns, end_ns = _nanoseconds(raw.ts), _nanoseconds(raw.dur)
        if start_ns is None or start_ns <= 0 or end_ns is None or not 0 <= end_ns < _LONGEST_NS:
            trace.unknown["events with impossible times"] += 1
            return
        if self._base_ns is None:
            self._base_ns = start_ns - _LONGEST_NS
        start_ns -= self._base_ns
        if not 0 < start_ns < 2 * _LONGEST_NS:
            trace.unknown["events with impossible times"] += 1
            return
        if kind == "operator" and name != _BACKWARD:
            if name == COMMUNICATION_CALL:
                self._call(start_ns, arguments)
            elif (product := _product(start_ns, name, arguments)) is not None:
                trace.products.append(product)
            return
        if len(trace.events) >= _MOST_EVENTS:
            raise StoreError(f"{shown(self._path.name)} has more than {_MOST_EVENTS:,} events of a timeline")
        name = self._names.setdefault(name, name)
        correlation = _integer(arguments.correlation) or 0 if arguments is not None else 0
        communicator = operation_name = ""
        if kind in ("kernel", "copy"):
            lane = _integer(arguments.stream) if arguments is not None else None
            lane = _integer(raw.tid) or 0 if lane is None else lane
            device = _integer(arguments.device) if arguments is not None else None
            self._devices[(_integer(raw.pid) or 0) if device is None else device] += 1
            if kind == "kernel" and is_collective(name):
                communicator, operation_name = _text(arguments, "group"), _text(arguments, "operation")
                if not operation_name:
                    self._unlinked.append(len(trace.events))
        else:
            lane = _integer(raw.tid) or 0
            if kind == "launch" and arguments is not None and (external := _integer(arguments.external)):
                self._launched_by[correlation] = external
        trace.events.append(
            Event(kind, name, start_ns, start_ns + end_ns, lane, correlation, communicator, operation_name)
        )

    def _call(self, start_ns: int, arguments: Any) -> None:
        if arguments is None:
            return
        called = _text(arguments, "operation")
        inputs, outputs = _integer(arguments.inputs), _integer(arguments.outputs)
        dtype = _text(arguments, "dtype")
        call = Call(
            start_ns,
            _text(arguments, "group"),
            operation(called) if called else "",
            _integer(arguments.ranks),
            dtype_name(dtype) if dtype else None,
            inputs,
            outputs,
        )
        if called == "wait":
            return
        self._trace.calls.append(call)
        if called and (external := _integer(arguments.external)):
            self._called[external] = call

    def trace(self) -> Trace:
        """All that was read."""
        about, trace = self._about, self._trace
        for place in self._unlinked:
            event = trace.events[place]
            call = self._called.get(self._launched_by.get(event.correlation, 0))
            if call is not None:
                trace.events[place] = event._replace(communicator=call.communicator, operation=call.operation)
        job = about.get("distributedInfo")
        job = job if isinstance(job, dict) else {}
        trace.rank, trace.world_size = _integer(job.get("rank")), _integer(job.get("world_size"))
        trace.backend = job.get("backend") if isinstance(job.get("backend"), str) else None
        trace.groups = tuple(_groups(job.get("pg_config")))
        trace.device = _device_name(about.get("deviceProperties"), self._devices)
        trace.trace_id = about["trace_id"] if isinstance(about.get("trace_id"), str) else None
        named = {"nccl": job.get("nccl_version"), "cuda": about.get("cuda_runtime_version"),
                 "hip": about.get("hip_runtime_version"), "driver": about.get("cuda_driver_version")}  # fmt: skip
        trace.versions = {name: printable(str(value))[:40] for name, value in named.items() if value is not None}
        since = _integer(about.get("baseTimeNanoseconds")) or 0
        trace.started_unix_seconds = None if self._base_ns is None else (self._base_ns + _LONGEST_NS + since) / 1e9
        return trace


def _blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked where it is gzipped, in blocks.

    Raises:
        StoreError: it cannot be read, is cut off, or is larger than what is read.
    """
    try:
        if path.exists() and not path.is_file():
            raise StoreError(f"{shown(str(path))} cannot be read: it is no file")
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            total = 0
            for block in _unpacked(file, path) if packed else iter(lambda: file.read(_BLOCK), b""):
                total += len(block)
                if total > _MOST_BYTES:
                    raise StoreError(
                        f"{shown(path.name)} has more than {_MOST_BYTES >> 30} GiB unpacked",
                        next_step="Profile fewer steps",
                    )
                yield block
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise StoreError(f"{shown(str(path))} cannot be read: {why}") from None


def _unpacked(file: Any, path: Path) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        while packed := file.read(_BLOCK // 16):
            while packed:
                if block := unpacker.decompress(packed, _BLOCK):
                    yield block
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # a file may be several, one after the other
                    packed, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)
                    packed = packed.lstrip(b"\0")
    except zlib.error as error:
        raise StoreError(f"{shown(path.name)} cannot be unpacked: {error}") from None


def _decoded(text: bytes) -> list[Any] | None:
    """The events of a list; None where it is none."""
    try:
        return _TYPED.decode(text)
    except msgspec.ValidationError:  # JSON, of another form
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return [_lenient(one) for one in found]
    except (msgspec.DecodeError, RecursionError):
        return None


def _lenient(value: object) -> Any:
    """An event of any JSON: what is none has no phase, and is passed over."""
    if not isinstance(value, dict):
        return _Raw()
    arguments = value.get("args")
    taken = None
    if isinstance(arguments, dict):
        taken = _Arguments(**{ours: arguments[name] for ours, name in _ARGUMENTS.items() if name in arguments})
    return _Raw(
        **{name: value[name] for name in _Raw.__struct_fields__ if name in value and name != "args"}, args=taken
    )


def _nanoseconds(microseconds: object) -> int | None:
    if isinstance(microseconds, str):
        try:
            microseconds = float(microseconds)
        except ValueError:
            return None
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float) or not abs(microseconds) < 1e18:
        return None
    return microseconds * 1000 if isinstance(microseconds, int) else round(microseconds * 1000)


def _integer(value: object) -> int | None:
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def _text(arguments: Any, name: str) -> str:
    value = getattr(arguments, name, "") if arguments is not None else ""
    return value.strip('"')[:100] if isinstance(value, str) else ""


def _product(start_ns: int, name: str, arguments: Any) -> Product | None:
    shapes = arguments.dims if isinstance(arguments.dims, list) else []
    plain = tuple(
        tuple(size for size in one if isinstance(size, int)) if isinstance(one, list) else () for one in shapes
    )
    flops = product_flops(name, plain, arguments.concrete if isinstance(arguments.concrete, list) else [])
    types = arguments.types if isinstance(arguments.types, list) else []
    dtype = next((dtype_name(one) for one in types if isinstance(one, str) and one), "")
    return None if flops is None else Product(start_ns, name, plain, dtype, flops)


def _groups(listed: object) -> Iterator[Group]:
    for one in listed if isinstance(listed, list) else []:
        ranks = one.get("ranks") if isinstance(one, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            yield Group(str(one.get("pg_name", ""))[:100], tuple(ranks))


def _device_name(properties: object, used: Counter[int]) -> str | None:
    number = used.most_common(1)[0][0] if used else 0
    named = {
        one.get("id"): one["name"]
        for one in (properties if isinstance(properties, list) else [])
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    }
    name = named.get(number) or (next(iter(named.values())) if len(set(named.values())) == 1 else None)
    return printable(name)[:100] if name else None
