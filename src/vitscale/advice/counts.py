"""Rank counts worth looking at, and how their ranks lie on hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitscale.errors import RequestError, explain
from vitscale.prediction.asked_counts import MOST_RANKS
from vitscale.prediction.evidence import Series
from vitscale.prediction.layouts import equal_hosts, host_size

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance  # with all importers

BEYOND = 8
"""How many times the largest measured count is looked at, where the user does not say."""
_HOSTS_ONE_BY_ONE = 16
"""Up to so many hosts every count of hosts is looked at; beyond, four to each doubling."""


def counts(
    series: Sequence[Series], *, gpus: tuple[int, ...] | None, max_gpus: int | None, ranks_per_node: int | None
) -> tuple[tuple[int, int], ...]:
    """(ranks, ranks on each host) in rising order of ranks.

    Without `gpus`: powers of two, what was measured, and whole hosts, up to `max_gpus`.

    Args:
        series: the measured ones.
        gpus: exactly these.
        max_gpus: none beyond it. None: eight times the largest measured one.
        ranks_per_node: of a full host. None: as `layouts.host_size` has it, and a count of `gpus` that does not fill
            such hosts lies on smaller, equal ones.

    Raises:
        RequestError: a count of `gpus` does not fill its hosts, or no count is left.
    """
    points = [point for one in series for point in one.points]
    per_node = ranks_per_node or host_size(points)[0]
    measured = {point.gpus for point in points}
    if gpus is not None:
        uneven = [count for count in gpus if count > per_node and count % per_node]
        if uneven and ranks_per_node is not None:
            raise RequestError(
                explain(
                    f"{uneven[0]} ranks do not fill hosts of {per_node}",
                    valid=[f"multiples of {per_node}, or fewer than that"],
                    next_step="Say how many ranks a host has with --nodes-of",
                )
            )
        wanted = set(gpus)
    else:
        most = min(MOST_RANKS, BEYOND * max(measured) if max_gpus is None else max_gpus)
        wanted = {2**power for power in range(most.bit_length())} | measured
        wanted |= {per_node * hosts for hosts in _hosts(most // per_node)}
        wanted = {count for count in wanted if count <= most and (count <= per_node or count % per_node == 0)}
    if max_gpus is not None:
        wanted = {count for count in wanted if count <= max_gpus}
    if not wanted:
        raise RequestError(explain("no rank count is left", next_step="Raise --max-gpus, or leave --gpus out"))
    return tuple((count, equal_hosts(count, per_node)) for count in sorted(wanted))


def counts_of(instance: Instance, series: Sequence[Series], max_gpus: int | None) -> tuple[int, ...]:
    """Ranks on whole instances, up to `max_gpus`, else eight times the largest measured count; at least one."""
    largest = max(point.gpus for one in series for point in one.points)
    most = max(instance.gpus, min(MOST_RANKS, BEYOND * largest if max_gpus is None else max_gpus))
    hosts = _hosts(most // instance.gpus)
    return tuple(sorted(n * instance.gpus for n in hosts if n & (n - 1) == 0 or instance.gpus > 1))


def _hosts(most: int) -> set[int]:
    found = set(range(1, min(most, _HOSTS_ONE_BY_ONE) + 1))
    quarters = (4, 5, 6, 7)
    return found | {
        hosts for power in range(2, most.bit_length()) for four in quarters if (hosts := four * 2**power) <= most
    }
