"""Latency and bandwidth of collectives, fitted to measurements, with bus bandwidth by nccl-tests' convention."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.store import checks

LARGE_MESSAGE_BYTES = 64 << 20
"""A bandwidth of messages as large as this is judged, and a check without any was a quick one."""
_LARGE_SIZE_RATIO = 16
"""Bandwidth is fitted to sizes from the largest down to a 16th of it: smaller messages may go in a burst, through a
cache or by another protocol."""


@dataclass(frozen=True)
class TimedSize:
    """One size of one operation in one group, over all ranks and repeats."""

    size_bytes: int
    bus_bytes: float
    """Bytes that each link carries: the size times the operation's bus factor."""
    seconds: float


class GroupPoints(NamedTuple):
    """The points of one operation in the groups of one kind."""

    ranks: int
    """Ranks of a group; 0 where nothing was measured."""
    points: list[TimedSize]
    """In the order of sizes; a point's time is the slowest rank's, median over repeats."""


def points(ranks: Sequence[checks.CheckedRank], group: checks.CheckGroup, operation: checks.Operation) -> GroupPoints:
    """Return the measured points of an operation in the groups of one kind.

    There may be several groups: one on each host inside nodes, or several along an axis of ranks that share a model.
    Then the slowest group counts, at the sizes that all groups measured. Smaller groups than the largest are left out:
    hosts with fewer ranks have other sizes, and other factors.
    """
    lines = _collective_lines(ranks, group, operation)
    if not lines:
        return GroupPoints(0, [])
    group_ranks = max(line.ranks for line in lines)
    lines_of_largest = [line for line in lines if line.ranks == group_ranks]
    bus_factor = checks.bus_factor(operation, group_ranks)
    timed_sizes = []
    for size_bytes, lines_of_size in _lines_by_complete_size(lines_of_largest).items():
        seconds = _slowest_rank_seconds(lines_of_size)
        if seconds > 0:
            timed_sizes.append(TimedSize(size_bytes, bus_factor * size_bytes, seconds))
    return GroupPoints(group_ranks, timed_sizes)


def _collective_lines(
    ranks: Sequence[checks.CheckedRank], group: checks.CheckGroup, operation: checks.Operation
) -> list[checks.CollectiveLine]:
    """Return what all ranks recorded of one operation in the groups of one kind: a line for each rank and size."""
    lines: list[checks.CollectiveLine] = []
    for rank in ranks:
        lines += [line for line in rank.collectives if line.group == group and line.operation == operation]
    return lines


def _lines_by_complete_size(lines: Sequence[checks.CollectiveLine]) -> dict[int, list[checks.CollectiveLine]]:
    """Return size in bytes -> its lines, in the order of sizes, without sizes that only some ranks measured."""
    lines_by_size: dict[int, list[checks.CollectiveLine]] = {}
    for line in lines:
        lines_by_size.setdefault(line.size_bytes, []).append(line)
    lines_of_complete_size = max(len(lines_of_size) for lines_of_size in lines_by_size.values())
    complete = {}
    for size_bytes, lines_of_size in sorted(lines_by_size.items()):
        if len(lines_of_size) == lines_of_complete_size:
            complete[size_bytes] = lines_of_size
    return complete


def _slowest_rank_seconds(lines: Sequence[checks.CollectiveLine]) -> float:
    """Return the time of the slowest rank, the median over the repeats that all ranks have."""
    seconds_by_repeat = zip(*(line.seconds for line in lines), strict=False)  # as many repeats as all ranks have
    slowest_by_repeat: list[float] = [max(seconds_of_ranks) for seconds_of_ranks in seconds_by_repeat]
    return statistics.median(slowest_by_repeat)


class LinkFit(NamedTuple):
    """The model `seconds = latency + bus_bytes / bandwidth`."""

    latency_seconds: float
    bandwidth_bytes_per_second: float

    def seconds(self, bus_bytes: float) -> float:
        """Return the time that a message takes by this model."""
        return self.latency_seconds + bus_bytes / self.bandwidth_bytes_per_second


def fit(measured: Sequence[TimedSize]) -> LinkFit | None:
    """Fit latency and bandwidth to points, both at least 0, by least squares of relative residuals.

    Large sizes show the bandwidth, small ones the latency. So both are fitted to the large sizes first, and only the
    bandwidth is kept. Then the latency is fitted to the other sizes, where there are any.

    Returns None for fewer than two sizes, and for times that do not grow with the size.
    """
    if len(measured) < 2:
        return None
    large = _large_points(measured)
    line = _fit_line(large)
    if line.seconds_per_byte <= 0:
        return None
    small = [point for point in measured if point not in large]
    latency = _fit_latency(small, line.seconds_per_byte) if small else line.latency_seconds
    return LinkFit(latency, 1 / line.seconds_per_byte)


def _large_points(measured: Sequence[TimedSize]) -> list[TimedSize]:
    """Return the points from the largest down to a 16th of it; the two largest where these would be fewer than two."""
    largest = max(point.bus_bytes for point in measured)
    large = [point for point in measured if point.bus_bytes * _LARGE_SIZE_RATIO >= largest]
    if len(large) >= 2:
        return large
    return sorted(measured, key=lambda point: point.bus_bytes)[-2:]


def _fit_latency(measured: Sequence[TimedSize], seconds_per_byte: float) -> float:
    """Return the latency, at least 0, that minimises the relative residuals at a given bandwidth.

    With the time t of a point and its remainder r = t - bus_bytes * seconds_per_byte, the sum of ((latency - r) / t)^2
    is least at the mean of r, weighted by 1 / t^2. So the smallest messages count most.
    """
    weights = [1 / (point.seconds * point.seconds) for point in measured]
    remainders = [point.seconds - point.bus_bytes * seconds_per_byte for point in measured]
    weighted_sum = sum(weight * remainder for weight, remainder in zip(weights, remainders, strict=True))
    return max(0.0, weighted_sum / sum(weights))


class _Line(NamedTuple):
    latency_seconds: float
    seconds_per_byte: float


def _fit_line(measured: Sequence[TimedSize]) -> _Line:
    """Return the line, with neither figure negative, that minimises the relative residuals.

    With a = latency_seconds, b = seconds_per_byte, x = bus_bytes and t = seconds of each point, this is the sum of
    ((a + b x - t) / t)^2 = (a / t + b x / t - 1)^2.
    """
    import numpy as np  # here: `vitscale run`, which fits nothing, need not wait for these
    from scipy.optimize import nnls

    coefficients = np.array([(1 / point.seconds, point.bus_bytes / point.seconds) for point in measured])  # [points, 2]
    targets = np.ones(len(measured))
    # The columns, of 1 / t and of x / t, differ by many powers of ten: each is scaled to a norm of 1.
    column_norms = np.linalg.norm(coefficients, axis=0)  # [2]
    scaled_solution, _ = nnls(coefficients / column_norms, targets)
    latency, seconds_per_byte = scaled_solution / column_norms
    return _Line(float(latency), float(seconds_per_byte))


def _fit_bandwidth_alone(measured: Sequence[TimedSize]) -> LinkFit | None:
    """Return the highest rate of all points as the bandwidth, with no latency; None where there are no points."""
    if not measured:
        return None
    return LinkFit(0.0, max(point.bus_bytes / point.seconds for point in measured))


def fits(ranks: Sequence[checks.CheckedRank]) -> tuple[checks.CollectiveFit, ...]:
    """Return the fit of each operation in each group that was swept."""
    collective_fits = []
    for group in checks.GROUPS:
        for operation in checks.OPERATIONS:
            collective_fit = _collective_fit(ranks, group, operation)
            if collective_fit is not None:
                collective_fits.append(collective_fit)
    return tuple(collective_fits)


def _collective_fit(
    ranks: Sequence[checks.CheckedRank], group: checks.CheckGroup, operation: checks.Operation
) -> checks.CollectiveFit | None:
    """Return the fit of one operation in the groups of one kind; None where none can be made."""
    group_ranks, measured = points(ranks, group, operation)
    # Neither a single size nor a stream of messages (rdma) tells latency from bandwidth.
    is_latency_known = operation != "rdma" and len(measured) != 1
    fitted = fit(measured) if is_latency_known else _fit_bandwidth_alone(measured)
    if fitted is None:
        return None
    bandwidth = fitted.bandwidth_bytes_per_second
    if not 0 < bandwidth <= checks.MOST_RATE:  # a clock that stood still measured nothing
        return None
    residuals = [abs(fitted.seconds(point.bus_bytes) - point.seconds) / point.seconds for point in measured]
    return checks.CollectiveFit(
        group=group,
        operation=operation,
        ranks=group_ranks,
        latency_seconds=fitted.latency_seconds,
        bandwidth_bytes_per_second=bandwidth,
        largest_size_bytes=measured[-1].size_bytes,
        largest_seconds=measured[-1].seconds,
        worst_residual=max(residuals) if is_latency_known else 0.0,
        latency_known=is_latency_known,
    )
