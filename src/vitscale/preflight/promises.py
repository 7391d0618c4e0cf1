"""The file of `vitscale check --expect`: what was promised of a machine, and the same file written from a check.

    tolerance = "5 %"                        # a promise is kept down to 0.95 of it; without this line to all of it

    [bus_bandwidth.inside_nodes]             # or across_nodes, all_ranks, tensor, ...
    all_reduce = "350 GB/s"                  # fitted to the largest messages
    "all_gather 256 MiB" = "300 GB/s"        # of this size

    [matmul]
    bf16 = "600 TFLOP/s"                     # of the slowest rank
    [loader]
    rate = { at_least = "2000 images/s", optional = true }
    [storage]
    write = "1 GB/s"
    [network]
    bandwidth = "360 Gbit/s"                 # an all-reduce across nodes, one rank of each host
    adapters = "8 x 400 Gbit/s"              # active ports of each host, and their rate

A promise that is not optional, and was not measured, is broken.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from vitscale.base.files import has_long_keys, read_text
from vitscale.errors import RequestError, nearest, shown
from vitscale.store.checks import GROUPS, OPERATIONS, CheckGroup, Operation

PromisedQuantity = Literal["bus_bandwidth", "matmul", "loader", "storage", "network", "adapters"]

_TABLE_KEYS = {
    "bus_bandwidth": {group.replace(" ", "_"): group for group in GROUPS},
    "matmul": ("bf16", "fp16", "tf32", "fp32"),
    "loader": ("rate",),
    "storage": ("write",),
    "network": ("bandwidth", "adapters"),
}
"""Table -> its keys; of `bus_bandwidth` the groups of ranks, each a table of its own."""
_TOP_KEYS = ("tolerance", *_TABLE_KEYS)
_PROMISE_KEYS = ("at_least", "optional")
_MOST_PROMISES = 500
_MOST_TOLERANCE = 0.9
_EXAMPLE = 'Write [bus_bandwidth.inside_nodes] and below it all_reduce = "350 GB/s"'


class Amount(NamedTuple):
    """A rate in its base unit: bytes, FLOP or images a second."""

    value: float
    sign: str
    """ "B/s", "FLOP/s" or "images/s"."""


@dataclass(frozen=True)
class Promise:
    """One figure that a machine was said to reach."""

    key: str
    """Where it stands in the file: "bus_bandwidth.inside_nodes.all_reduce 256 MiB"."""
    quantity: PromisedQuantity
    least: Amount
    optional: bool = False
    """Whether it is kept where it was not measured."""
    group: CheckGroup | None = None
    """The ranks of a bus bandwidth."""
    operation: Operation | None = None
    size_bytes: int | None = None
    """Size of a bus bandwidth's messages; None: it is fitted to the largest."""
    dtype: str | None = None
    """Arithmetic of a matrix rate: "bf16"."""
    adapters: int = 0
    """Number of adapters that each host has."""


@dataclass(frozen=True)
class Promises:
    """All promises of a file, in its order."""

    path: Path
    tolerance: float
    """Share by which a figure may be below its promise."""
    promises: tuple[Promise, ...]


def read_promises(path: Path) -> Promises:
    """Read a file of promises.

    Raises:
        RequestError: it cannot be read, has an unknown key, or a value without a unit that fits.
    """
    text = read_text(path, "file of promises", next_step="Give a file with --expect, as --save-expect FILE writes one")
    try:
        if has_long_keys(text):
            raise ValueError("it has keys of very many parts")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{shown(str(path))} is no TOML: {error}") from None
    reader = _Reader(path)
    reader.refuse_unknown_keys("", content, _TOP_KEYS)
    tolerance = reader.tolerance(content.get("tolerance", "0 %"))
    promises = list(reader.promises(content))
    if not promises:
        raise RequestError(f"{shown(str(path))} promises nothing", next_step=_EXAMPLE)
    if len(promises) > _MOST_PROMISES:
        raise RequestError(f"{shown(str(path))} has {len(promises):,} promises", valid=[f"at most {_MOST_PROMISES}"])
    return Promises(path, tolerance, tuple(promises))


class _Reader:
    """Reads the tables of one file, and names the file in every refusal."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def promises(self, content: Mapping[str, Any]) -> Iterator[Promise]:
        """Yield the promises of all tables.

        Raises:
            RequestError: one cannot be read.
        """
        for name in content:
            if name == "bus_bandwidth":
                yield from self._bus_bandwidths(self._table(name, content[name]))
            elif name != "tolerance":
                table = self._table(name, content[name])
                self.refuse_unknown_keys(name, table, tuple(_TABLE_KEYS[name]))
                for key, value in table.items():
                    yield self._promise(name, key, value)

    def _promise(self, table: str, key: str, value: object) -> Promise:
        """Return the promise of a key outside `bus_bandwidth`."""
        name = f"{table}.{key}"
        written = self._written(name, value)
        if key == "adapters":
            return self._adapters(name, written)
        sign = {"matmul": "FLOP/s", "loader": "images/s"}.get(table, "B/s")
        return Promise(
            key=name,
            quantity=cast(PromisedQuantity, table),
            least=self._amount(name, written.text, sign),
            optional=written.optional,
            dtype=key if table == "matmul" else None,
        )

    def _bus_bandwidths(self, groups: Mapping[str, Any]) -> Iterator[Promise]:
        group_by_key = cast(Mapping[str, CheckGroup], _TABLE_KEYS["bus_bandwidth"])
        self.refuse_unknown_keys("bus_bandwidth", groups, tuple(group_by_key))
        for group_key, value in groups.items():
            table_name = f"bus_bandwidth.{group_key}"
            for key, promise in self._table(table_name, value).items():
                name = f"{table_name}.{key}"
                operation, _, size = key.partition(" ")
                self.refuse_unknown_keys(table_name, {operation: promise}, OPERATIONS)
                written = self._written(name, promise)
                yield Promise(
                    key=name,
                    quantity="bus_bandwidth",
                    least=self._amount(name, written.text, "B/s"),
                    optional=written.optional,
                    group=group_by_key[group_key],
                    operation=cast(Operation, operation),
                    size_bytes=self._size(name, size) if size else None,
                )

    def _adapters(self, name: str, written: _Written) -> Promise:
        """Return the promise in "8 x 400 Gbit/s"."""
        match = _ADAPTERS.fullmatch(written.text.strip())
        if match is None:
            raise self._refused(name, written.text, 'Write "8 x 400 Gbit/s": their number on each host, and the rate')
        return Promise(
            key=name,
            quantity="adapters",
            least=self._amount(name, match["rate"], "B/s"),
            optional=written.optional,
            adapters=int(match["count"]),
        )

    def refuse_unknown_keys(self, table: str, content: Mapping[str, Any], valid: tuple[str, ...]) -> None:
        """Refuse a table with a key that is not among the valid ones.

        Raises:
            RequestError: it has one; the nearest valid one is suggested.
        """
        for key in content:
            if key not in valid:
                subject = f"[{table}]" if table else "the file"
                raise RequestError(
                    f"{shown(str(self._path))}: unknown key {shown(key)} in {subject}",
                    valid=valid,
                    hint=nearest(key, valid),
                )

    def _table(self, name: str, value: object) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        valid = ", ".join(_TABLE_KEYS[name]) if name in _TABLE_KEYS else ", ".join(OPERATIONS)
        raise RequestError(
            f"{shown(str(self._path))}: {name} is {shown(value)}, and has to be a table with the keys {valid}",
            next_step=_EXAMPLE,
        )

    def _written(self, name: str, value: object) -> _Written:
        """Return the text of a promise, which is a text or a table with at_least and optional."""
        optional: object = False
        text: object = value
        if isinstance(value, dict):
            self.refuse_unknown_keys(name, value, _PROMISE_KEYS)
            optional = value.get("optional", False)
            text = value.get("at_least")
        if not isinstance(optional, bool):
            raise self._refused(f"{name}.optional", optional, "Write true or false")
        if not isinstance(text, str):
            raise self._refused(name, text, 'Write a figure with its unit in quotes, as "400 GB/s"')
        return _Written(text, optional)

    def tolerance(self, value: object) -> float:
        """Return the share in "5 %".

        Raises:
            RequestError: it is no such text, or 90 % and more.
        """
        match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
        share = float(match["number"]) / 100 if match is not None else math.inf
        if share > _MOST_TOLERANCE:
            raise self._refused("tolerance", value, 'Write a share of at most 90 % in quotes, as "5 %"')
        return share

    def _amount(self, name: str, text: str, sign: str) -> Amount:
        """Return the rate in a text.

        Raises:
            RequestError: it is none, or has another unit than `sign`.
        """
        match = _AMOUNT.fullmatch(text.strip())
        written_sign = _sign(match["unit"]) if match is not None else None
        if match is None or written_sign is None or written_sign.sign != sign:
            raise self._refused(name, text, f"Write {_EXAMPLE_BY_SIGN[sign]}")
        value = float(match["number"].replace(",", "")) * written_sign.value
        if not 0 < value < 1e24:
            raise self._refused(name, text, f"Write {_EXAMPLE_BY_SIGN[sign]}")
        return Amount(value, sign)

    def _size(self, name: str, text: str) -> int:
        """Return the bytes of "256 MiB" or "256MB"."""
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise self._refused(name, text, 'Write the size of the messages as in "all_reduce 256 MiB"')
        base = 1024 if match["binary"] else 1000
        power = " KMG".index((match["prefix"] or " ").upper())
        size_bytes: int = int(match["number"]) * base**power
        return size_bytes

    def _refused(self, name: str, value: object, next_step: str) -> RequestError:
        return RequestError(f"{shown(str(self._path))}: {name} is {shown(value)}", next_step=next_step)


class _Written(NamedTuple):
    """A promise as the file has it."""

    text: str
    optional: bool


_NUMBER = r"(?P<number>[0-9]{1,3}(?:,[0-9]{3}){1,5}(?:\.[0-9]{1,9})?|[0-9]{1,15}(?:\.[0-9]{1,9})?)"
_AMOUNT = re.compile(rf"{_NUMBER}\s*(?P<unit>[A-Za-z/]{{1,12}})")
_PERCENT = re.compile(r"(?P<number>[0-9]{1,3}(?:\.[0-9]{1,3})?)\s*%")
_SIZE = re.compile(r"(?P<number>[0-9]{1,9})\s*(?:(?P<prefix>[kKMG])(?P<binary>i)?)?B")
_ADAPTERS = re.compile(r"(?P<count>[0-9]{1,3})\s*[xX*]\s*(?P<rate>.{1,40})")
_RATE_UNIT = re.compile(
    r"(?P<prefix>[kKMGTPE]?)(?P<binary>i?)(?P<unit>B|b|bit|bits|FLOP|FLOPS|FLOPs)(?P<per>/s|/sec|ps)?"
)
_EXAMPLE_BY_SIGN = {
    "B/s": 'a figure with its unit, as "400 GB/s" or "400 Gbit/s"',
    "FLOP/s": 'a figure with its unit, as "600 TFLOP/s"',
    "images/s": 'a figure with its unit, as "2000 images/s"',
}


def _sign(unit: str) -> Amount | None:
    """Return the base unit of a written one and its factor, "GB/s" as 10^9 B/s; None where it is not known.

    Bytes have a large B, bits a small one: "400 Gb/s" are 50 GB/s. "TFLOPS" are TFLOP/s.
    """
    if unit in ("images/s", "img/s", "images/sec"):
        return Amount(1.0, "images/s")
    match = _RATE_UNIT.fullmatch(unit)
    if match is None:
        return None
    base = 1024.0 if match["binary"] else 1000.0
    prefix = match["prefix"].upper()
    factor = base ** "KMGTPE".index(prefix) * base if prefix else 1.0
    if match["unit"].startswith("FLOP"):
        is_rate = bool(match["per"]) or match["unit"] != "FLOP"
        return Amount(factor, "FLOP/s") if is_rate else None
    if not match["per"]:
        return None
    return Amount(factor if match["unit"] == "B" else factor / 8, "B/s")


def promises_text(promises: Promises) -> str:
    """Return the TOML text of promises, which `read_promises` reads back."""
    lines = [
        "# What a machine was measured to reach, for `vitscale check --expect`. Edit it to what was promised.",
        f'tolerance = "{100 * promises.tolerance:g} %"    # a figure may be below its promise by this share',
    ]
    table_names: set[str] = set()
    for promise in promises.promises:
        table, _, key = promise.key.rpartition(".")
        if table not in table_names:
            table_names.add(table)
            lines += ["", f"[{table}]"]
        toml_key = f'"{key}"' if " " in key else key
        lines.append(f'{toml_key} = "{_amount_text(promise)}"')
    return "\n".join([*lines, ""])


_WRITTEN_UNITS = {
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1.0, "FLOP/s")),
    "images/s": ((1.0, "images/s"),),
}


def _amount_text(promise: Promise) -> str:
    """Return a promise's figure with three digits and its unit, rounded down: "351 GB/s", "8 x 50 GB/s"."""
    value, sign = promise.least
    factor, unit = next((pair for pair in _WRITTEN_UNITS[sign] if value >= pair[0]), _WRITTEN_UNITS[sign][-1])
    scaled = value / factor
    digits = max(0, 2 - math.floor(math.log10(scaled))) if scaled > 0 else 0
    rounded_down = math.floor(scaled * 10**digits + 1e-9) / 10**digits
    count = f"{promise.adapters} x " if promise.adapters else ""
    return f"{count}{rounded_down:.{digits}f} {unit}"
