"""Groups of ranks that share the study's model: does each lie on one host, and is one slower than the others?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from vitscale.preflight.verdict import host_of, hosts_of, note, warning
from vitscale.present.document import Finding
from vitscale.present.units import counted, listed, seconds, size
from vitscale.store.checks import CheckRecord, Operation, SplitGroup

_SLOW = 1.5
"""A group that takes this many times the median of the others is slow."""
_IN_EVERY_BLOCK: tuple[SplitGroup, ...] = ("tensor", "sequence")
"""Groups whose ranks exchange in every block of the model."""


def slow_groups(record: CheckRecord) -> Iterable[Finding]:
    """Groups whose exchange takes much longer than others' along the same axis, at the largest common size."""
    by_rank = {rank.rank: rank for rank in record.ranks}
    for name, operations in record.request.exchanges.items():
        told = set[tuple[int, ...]]()
        for operation in operations:
            size_bytes, took = _group_seconds(record, name, operation)
            for ranks, own in took.items():
                others = [other for group, other in took.items() if group != ranks]
                usual = statistics.median(others) if others else 0.0
                if usual <= 0 or own < _SLOW * usual or ranks in told:
                    continue
                told.add(ranks)
                hosts = hosts_of(by_rank[rank] for rank in ranks)
                yield warning(
                    "slow-group",
                    f"{name} {_joined(ranks)} ({listed(hosts)}): {operation.replace('_', '-')} of {size(size_bytes)} "
                    f"takes {seconds(own)}, {own / usual:.1f} times as long as in the other groups, which wait for it",
                    "See what else uses these hosts and their links; or leave them out",
                    ranks,
                    hosts,
                )


def _group_seconds(
    record: CheckRecord, name: SplitGroup, operation: Operation
) -> tuple[int, dict[tuple[int, ...], float]]:
    """(size in bytes, ranks of a group -> seconds of one call, of the slowest rank in the best repeat)."""
    lines = {
        (rank.rank, line.size_bytes): line.seconds
        for rank in record.ranks
        for line in rank.collectives
        if (line.group, line.operation) == (name, operation)
    }
    groups = record.request.split_groups(name)
    ranks = [rank for group in groups for rank in group]
    common = [size for _, size in lines if all((rank, size) in lines for rank in ranks)]
    if not common:
        return 0, {}
    largest = max(common)
    return largest, {
        group: min(map(max, zip(*(lines[rank, largest] for rank in group), strict=False))) for group in groups
    }


def groups_across_hosts(record: CheckRecord) -> Iterable[Finding]:
    """Groups that exchange between hosts in every block of the model."""
    host = {rank.rank: host_of(rank) for rank in record.ranks}
    each = record.request.world.ranks_per_node
    for name in _IN_EVERY_BLOCK:
        groups = record.request.split_groups(name)
        spread = [ranks for ranks in groups if len({host.get(rank) for rank in ranks} - {None}) > 1]
        if not spread:
            continue
        ranks = spread[0]
        more = f" ({len(spread)} of {len(groups)} such groups)" if len(groups) > 1 else ""
        advice = "Split the model over the ranks of a host alone, and raise data parallelism instead"
        if len(ranks) <= each:
            advice = f"Put a multiple of {len(ranks)} ranks on each host, so that a group lies on one"
        yield warning(
            "group-across-hosts",
            f"{name} {_joined(ranks)}{more} exchanges activations in every block, between the hosts "
            f"{listed(sorted(filter(None, {host.get(rank) for rank in ranks})))}",
            advice,
            ranks,
        )


def no_groups(record: CheckRecord) -> Iterable[Finding]:
    """A check on a number of ranks that cannot be divided into the study's groups, whose exchanges go unmeasured."""
    trial, ranks = record.request.trial, record.request.world.size
    if trial is not None and (shared := trial.parallel.ranks_per_model) > 1 and ranks % shared:
        yield note(
            "groups-unchecked",
            f"{shared} ranks share a model in this study, and {counted(ranks, 'rank')} were checked: what such groups "
            "exchange was not measured",
            f"Check on a multiple of {shared} ranks (--ranks-per-node, a longer hostfile)",
        )


def _joined(ranks: Iterable[int]) -> str:
    """Ranks of a group as "2+3", as in messages on lost ranks."""
    return "+".join(map(str, ranks))
