"""Latency and bandwidth of collectives, fitted to measurements, with bus bandwidth by nccl-tests' convention."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.store import checks

_LARGE = 16
"""Bandwidth is fitted to sizes from the largest down to a 16th of it: smaller messages may go in a burst, through a
cache or by another protocol."""


@dataclass(frozen=True)
class TimedSize:
    """One size of one operation in one group, over all ranks and repeats."""

    size_bytes: int
    bus_bytes: float
    seconds: float


def points(
    ranks: Sequence[checks.CheckedRank], group: checks.CheckGroup, operation: checks.Operation
) -> tuple[int, list[TimedSize]]:
    """(ranks in the group, its points by rising size); a point's time is the slowest rank's, median over repeats.

    There may be several groups: one on each host inside nodes, or several along an axis of ranks that share a model.
    Then the slowest group counts, at the sizes that all groups measured.
    """
    by_size: dict[tuple[int, int], list[checks.CollectiveLine]] = {}
    for rank in ranks:
        for line in rank.collectives:
            if (line.group, line.operation) == (group, operation):
                by_size.setdefault((line.ranks, line.size_bytes), []).append(line)
    if not by_size:
        return 0, []
    most = max(count for count, _ in by_size)  # hosts with fewer ranks have other sizes, and other factors
    measured = []
    timed = max(len(lines) for (count, _), lines in by_size.items() if count == most)
    for (count, size), lines in sorted(by_size.items()):
        if len(lines) < timed:
            continue
        repeats = min(len(line.seconds) for line in lines)
        seconds = statistics.median(max(line.seconds[n] for line in lines) for n in range(repeats))
        if count == most and seconds > 0:
            measured.append(TimedSize(size, checks.bus_factor(operation, count) * size, seconds))
    return most, measured


def fit(measured: Sequence[TimedSize]) -> tuple[float, float] | None:
    """(latency in seconds, bandwidth in bytes per second) of `seconds = latency + bus_bytes / bandwidth`.

    Least squares of relative residuals, with neither figure negative. First both are fitted to the large sizes, and the
    bandwidth is kept. Then the latency is fitted to all other sizes, where relative residuals make the smallest count.
    None: fewer than two sizes, or times that do not grow with the size.
    """
    if len(measured) < 2:
        return None
    largest = max(point.bus_bytes for point in measured)
    large = [point for point in measured if point.bus_bytes * _LARGE >= largest]
    if len(large) < 2:
        large = sorted(measured, key=lambda point: point.bus_bytes)[-2:]
    latency, seconds_per_byte = _non_negative(large)
    if seconds_per_byte <= 0:
        return None
    small = [point for point in measured if point not in large]
    if small:
        weights = [1 / (point.seconds * point.seconds) for point in small]
        above = [point.seconds - point.bus_bytes * seconds_per_byte for point in small]
        latency = max(0.0, sum(w * a for w, a in zip(weights, above, strict=True)) / sum(weights))
    return latency, 1 / seconds_per_byte


def _non_negative(measured: Sequence[TimedSize]) -> tuple[float, float]:
    """(a, b) >= 0 that minimise the sum of ((a + b x - t) / t)^2."""
    import numpy as np  # here: `vitscale run`, which fits nothing, need not wait for these
    from scipy.optimize import nnls

    rows = np.array([(1 / point.seconds, point.bus_bytes / point.seconds) for point in measured])
    scale = np.linalg.norm(rows, axis=0)
    latency, seconds_per_byte = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return float(latency), float(seconds_per_byte)


def _of_the_fastest(measured: Sequence[TimedSize]) -> tuple[float, float] | None:
    return (0.0, max(point.bus_bytes / point.seconds for point in measured)) if measured else None


def fits(ranks: Sequence[checks.CheckedRank]) -> tuple[checks.CollectiveFit, ...]:
    """The fit of each operation in each group that was swept."""
    done = []
    for group in checks.GROUPS:
        for operation in checks.OPERATIONS:
            count, measured = points(ranks, group, operation)
            # One size, or a stream of messages, does not tell latency apart from the rest.
            known = operation != "rdma" and len(measured) != 1
            fitted = fit(measured) if known else _of_the_fastest(measured)
            if fitted is None:
                continue
            latency, bandwidth = fitted
            if not 0 < bandwidth <= checks.MOST_RATE:  # a clock that stood still measured nothing
                continue
            residuals = [abs(latency + p.bus_bytes / bandwidth - p.seconds) / p.seconds for p in measured]
            done.append(
                checks.CollectiveFit(
                    group=group,
                    operation=operation,
                    ranks=count,
                    latency_seconds=latency,
                    bandwidth_bytes_per_second=bandwidth,
                    largest_size_bytes=measured[-1].size_bytes,
                    largest_seconds=measured[-1].seconds,
                    worst_residual=max(residuals) if known else 0.0,
                    latency_known=known,
                )
            )
    return tuple(done)
