"""Holds a check against what was promised of the machine: each promise, its measured figure, the ratio, pass or fail.

The slowest rank or host counts everywhere, for it sets the pace of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from vitscale.preflight.fit import points
from vitscale.preflight.link_rates import adapter_bytes_per_second
from vitscale.preflight.network_verdicts import facts_by_host
from vitscale.preflight.promises import Amount, Promise, PromisedQuantity, Promises
from vitscale.preflight.verdict import host_of
from vitscale.present import document as doc
from vitscale.present.units import UNKNOWN, counted, listed, number, rate, share, size
from vitscale.store.checks import CheckedRank, CheckGroup, CheckRecord, FactsLine, Operation

_SAVED_TOLERANCE = 0.1
"""Tolerance of a file that is written from a check: two checks of one machine differ by some percent."""

PromiseStatus = Literal["pass", "fail", "not measured"]


class PromiseFigure(NamedTuple):
    """A figure of a check in its base unit, or the reason why there is none."""

    value: float | None
    remark: str = ""
    """Where the slowest was, or why nothing was measured."""


@dataclass(frozen=True)
class HeldPromise:
    """A promise, and what the check measured of it."""

    promise: Promise
    measurement: PromiseFigure
    tolerance: float

    @property
    def ratio(self) -> float | None:
        """Measured over promised; None where it was not measured."""
        value = self.measurement.value
        return value / self.promise.least.value if value is not None else None

    @property
    def status(self) -> PromiseStatus:
        """Whether the promise is kept, within the tolerance."""
        if self.ratio is None:
            return "not measured"
        return "pass" if self.ratio >= 1.0 - self.tolerance else "fail"

    @property
    def is_broken(self) -> bool:
        """Whether it counts as a failure: it was missed, or was not measured though it is not optional."""
        if self.status == "not measured":
            return not self.promise.optional
        return self.status == "fail"


def held(record: CheckRecord, promises: Promises) -> tuple[HeldPromise, ...]:
    """Return each promise with what the check measured of it, in the file's order."""
    return tuple(
        HeldPromise(promise, _MEASURES[promise.quantity](record, promise), promises.tolerance)
        for promise in promises.promises
    )


def _bus_bandwidth(record: CheckRecord, promise: Promise) -> PromiseFigure:
    """Return the bus bandwidth of an operation: fitted, or of messages of one size."""
    if promise.group is None or promise.operation is None:
        return PromiseFigure(None, "no operation is named")
    _, measured = points(record.ranks, promise.group, promise.operation)
    if not measured:
        return PromiseFigure(None, _why_not_swept(record, promise.group, promise.operation))
    if promise.size_bytes is None:
        return _fitted_bandwidth(record, promise.group, promise.operation)
    for point in measured:
        if point.size_bytes == promise.size_bytes:
            return PromiseFigure(point.bus_bytes / point.seconds)
    sizes = listed([size(point.size_bytes) for point in measured], 16)
    return PromiseFigure(None, f"this size was not; measured: {sizes}")


def _fitted_bandwidth(record: CheckRecord, group: CheckGroup, operation: Operation) -> PromiseFigure:
    for fit in record.fits:
        if fit.group == group and fit.operation == operation:
            return PromiseFigure(fit.bandwidth_bytes_per_second)
    return PromiseFigure(None, "its times do not grow with the size, so that no bandwidth can be fitted")


def _why_not_swept(record: CheckRecord, group: CheckGroup, operation: Operation) -> str:
    """Return why an operation has no times in a group."""
    groups = {line.group for rank in record.ranks for line in rank.collectives}
    if not groups:
        return "no collectives were measured"
    if group not in groups:
        return f"no such group in this check; it measured {listed(sorted(groups))}"
    return f"{operation} was not measured {group}"


def _slowest_rank(record: CheckRecord, value_of: Callable[[CheckedRank], float | None], why_not: str) -> PromiseFigure:
    """Return the lowest value over all ranks, and which rank has it; none where one of them lacks it."""
    values: dict[int, float] = {}
    for rank in record.ranks:
        value = value_of(rank)
        if value is not None:
            values[rank.rank] = value
    missing = record.request.world.size - len(values)
    if not values:
        return PromiseFigure(None, why_not)
    if missing > 0:
        return PromiseFigure(None, f"{why_not} on {counted(missing, 'rank')}")
    slowest = min(values, key=lambda number: values[number])
    hosts = {rank.rank: host_of(rank) for rank in record.ranks}
    place = f" on {hosts[slowest]}" if hosts[slowest] else ""
    return PromiseFigure(values[slowest], f"rank {slowest}{place}" if len(values) > 1 else "")


def _matmul(record: CheckRecord, promise: Promise) -> PromiseFigure:
    """Return the matrix rate of the slowest rank."""
    dtypes = {rank.matmul.dtype for rank in record.ranks if rank.matmul is not None}
    if dtypes and promise.dtype not in dtypes:
        return PromiseFigure(None, f"the check measured {listed(sorted(dtypes))}: a study's train.precision sets it")

    def flops_per_second(rank: CheckedRank) -> float | None:
        is_measured = rank.matmul is not None and rank.matmul.dtype == promise.dtype
        return rank.matmul.flops_per_second if rank.matmul is not None and is_measured else None

    return _slowest_rank(record, flops_per_second, "no matrix rate")


def _loader(record: CheckRecord, promise: Promise) -> PromiseFigure:
    """Return the images a second of the slowest rank's loader."""
    del promise
    if record.request.trial is None:
        return PromiseFigure(None, "a loader is that of a study: vitscale check STUDY.toml")
    return _slowest_rank(
        record, lambda rank: rank.loader.images_per_second if rank.loader is not None else None, "no loader rate"
    )


def _storage(record: CheckRecord, promise: Promise) -> PromiseFigure:
    """Return the rate at which the slowest host writes to the results folder."""
    del promise
    rate_by_host: dict[str, float] = {}
    for rank in record.ranks:
        if rank.disk is not None and rank.disk.write_bytes_per_second is not None:
            rate_by_host[host_of(rank) or f"the host of rank {rank.rank}"] = rank.disk.write_bytes_per_second
    if len(rate_by_host) < record.request.world.nodes:
        return PromiseFigure(None, "no large file was written on every host: too little room, or the stage failed")
    slowest = min(rate_by_host, key=lambda host: rate_by_host[host])
    return PromiseFigure(rate_by_host[slowest], slowest if len(rate_by_host) > 1 else "")


def _network(record: CheckRecord, promise: Promise) -> PromiseFigure:
    """Return the fitted bandwidth of an all-reduce across nodes."""
    del promise
    if record.request.world.nodes < 2:
        return PromiseFigure(None, "there is one host")
    _, measured = points(record.ranks, "across nodes", "all_reduce")
    if not measured:
        return PromiseFigure(None, _why_not_swept(record, "across nodes", "all_reduce"))
    return _fitted_bandwidth(record, "across nodes", "all_reduce")


def _adapters(record: CheckRecord, promise: Promise) -> PromiseFigure:
    """Return the rate of the slowest of each host's fastest adapters; 0 where a host has fewer than promised.

    It is unknown where the kernel does not say the rate of an active port.
    """
    facts = facts_by_host(record)
    if len(facts) < record.request.world.nodes:
        return PromiseFigure(None, "not all hosts said which adapters they have")
    slowest = PromiseFigure(None, "no host")
    for host, host_facts in facts.items():
        active_ports = sum(port.active for port in host_facts.infiniband)
        if len(list(_port_rates(host_facts))) < active_ports:
            return PromiseFigure(None, f"{host} does not say the rate of every active port")
        rates = sorted(_port_rates(host_facts), reverse=True)
        rate_of_last = rates[promise.adapters - 1] if 0 < promise.adapters <= len(rates) else 0.0
        if slowest.value is None or rate_of_last < slowest.value:
            slowest = PromiseFigure(rate_of_last, f"{host}: {counted(len(rates), 'active port')}")
    return slowest


def _port_rates(facts: FactsLine) -> Iterator[float]:
    """Yield the rates of a host's active ports, in bytes per second."""
    for port in facts.infiniband:
        port_rate = adapter_bytes_per_second(port.rate) if port.active else None
        if port_rate is not None:
            yield port_rate


_MEASURES: dict[PromisedQuantity, Callable[[CheckRecord, Promise], PromiseFigure]] = {
    "bus_bandwidth": _bus_bandwidth,
    "matmul": _matmul,
    "loader": _loader,
    "storage": _storage,
    "network": _network,
    "adapters": _adapters,
}


def measured_promises(record: CheckRecord, path: Path) -> Promises:
    """Return the figures of a check as promises, with a tolerance, for a file that is to be edited.

    `path`: the file that they are for.
    """
    promises = [*_swept_promises(record), *_other_promises(record)]
    measured = []
    for promise in promises:
        value = _MEASURES[promise.quantity](record, promise).value
        if value:
            measured.append(replace(promise, least=Amount(value, promise.least.sign)))
    return Promises(path, _SAVED_TOLERANCE, tuple(measured))


def _swept_promises(record: CheckRecord) -> Iterator[Promise]:
    """Yield a promise without a figure for each fitted bandwidth, and for the largest size of each operation."""
    for fit in record.fits:
        key = f"bus_bandwidth.{fit.group.replace(' ', '_')}.{fit.operation}"
        for size_bytes in (None, fit.largest_size_bytes):
            yield Promise(
                key=key if size_bytes is None else f"{key} {size(size_bytes)}",
                quantity="bus_bandwidth",
                least=Amount(0.0, "B/s"),
                group=fit.group,
                operation=fit.operation,
                size_bytes=size_bytes,
            )


def _other_promises(record: CheckRecord) -> Iterator[Promise]:
    """Yield a promise without a figure for each other quantity."""
    dtypes = sorted({rank.matmul.dtype for rank in record.ranks if rank.matmul is not None})
    for dtype in dtypes:
        yield Promise(f"matmul.{dtype}", "matmul", Amount(0.0, "FLOP/s"), dtype=dtype)
    yield Promise("loader.rate", "loader", Amount(0.0, "images/s"))
    yield Promise("storage.write", "storage", Amount(0.0, "B/s"))
    yield Promise("network.bandwidth", "network", Amount(0.0, "B/s"))
    ports_by_host = [len(list(_port_rates(facts))) for facts in facts_by_host(record).values()]
    adapters = min(ports_by_host, default=0)
    if adapters:
        yield Promise("network.adapters", "adapters", Amount(0.0, "B/s"), adapters=adapters)


def delivery_blocks(promises: Sequence[HeldPromise], path: Path, *, quick: bool) -> tuple[doc.Block, ...]:
    """Return a sentence that counts what is kept, and a table with a row for each promise.

    Args:
        promises: what was promised, and measured.
        path: the file of the promises.
        quick: whether only small messages were measured.
    """
    counts = Counter(each.status for each in promises)
    clauses = [f"{counts[status]} {status}" for status in get_args(PromiseStatus) if counts[status]]
    columns = (
        doc.Column("promise", words=True),
        *map(doc.Column, ("measured", "promised", "ratio")),
        doc.Column("result", words=True),
    )
    rows = [tuple(map(doc.Cell, _row(each))) for each in promises]
    notes = [f"{_title(each.promise)}: {each.measurement.remark}." for each in promises if _has_note(each)]
    tolerance = promises[0].tolerance if promises else 0.0
    if tolerance:
        notes.append(f"A promise is kept down to {share(1.0 - tolerance)} of it (tolerance).")
    if quick:
        notes.append("Measured with --quick: bandwidths are those of small messages.")
    return (
        doc.Paragraph(f"{path.name}: {', '.join(clauses)}", "strong"),
        doc.Table(columns, (doc.RowGroup("", tuple(rows)),), tuple(notes)),
    )


def _has_note(each: HeldPromise) -> bool:
    """Whether a row needs its remark below the table: why it was not measured, or where it fails."""
    return each.status != "pass" and bool(each.measurement.remark)


def _title(promise: Promise) -> str:
    """Return a promise in words: "all-reduce inside nodes, 256 MiB", "matrix rate, bf16"."""
    if promise.operation is not None:
        of_size = f", {size(promise.size_bytes)}" if promise.size_bytes is not None else ""
        return f"{promise.operation.replace('_', '-')} {promise.group}{of_size}"
    if promise.dtype is not None:
        return f"matrix rate, {promise.dtype}"
    return _TITLES[promise.quantity]


_TITLES: dict[PromisedQuantity, str] = {
    "loader": "loader, of a rank",
    "storage": "storage, writing",
    "network": "network, of a host",
    "adapters": "adapters of a host",
}


def _row(each: HeldPromise) -> tuple[str, ...]:
    """Return the texts of a promise's row."""
    is_unmeasured = each.status == "not measured"
    result = f"{each.status} (optional)" if is_unmeasured and each.promise.optional else each.status
    return (
        _title(each.promise),
        _figure(each.promise, each.measurement.value),
        _figure(each.promise, each.promise.least.value),
        share(each.ratio),
        result,
    )


def _figure(promise: Promise, value: float | None) -> str:
    """Return a figure in words: "350 GB/s", "2,000 images/s", "8 x 50.0 GB/s"."""
    if value is None:
        return UNKNOWN
    sign = promise.least.sign
    text = f"{number(value)} {sign}" if sign == "images/s" else rate(value, sign)
    return f"{promise.adapters} x {text}" if promise.adapters and value > 0 else text


def delivery_fields(promises: Sequence[HeldPromise]) -> list[dict[str, Any]]:
    """Return the JSON fields of each promise; figures are in its base unit: bytes, FLOP or images a second."""
    return [
        {
            "promise": each.promise.key,
            "unit": each.promise.least.sign,
            "promised": each.promise.least.value,
            "measured": each.measurement.value,
            "ratio": each.ratio,
            "status": each.status,
            "optional": each.promise.optional,
            "remark": each.measurement.remark,
        }
        for each in promises
    ]
