"""Collectives over a range of sizes: how long each takes on this rank, one call right after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from vitscale.probes.matmul import seconds_of
from vitscale.store.checks import SWEPT, CheckGroup, CollectiveLine, Operation, SweepPlan

CollectiveCall = Callable[[], object]

# torch 2.13 gave two of them new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ELEMENT_BYTES = 4
_MOST_REPEATS = 7
_FEWEST_REPEATS = 3
_BATCH_SECONDS = 5e-3
"""Least seconds of a repeat, reached by several calls: a timer and a scheduler disturb a shorter one too much."""
_MOST_CALLS = 100
_SHORT_SECONDS = 0.1
_MEMORY_SHARE = 0.5
"""Share of the free memory that is used, for all ranks of a host together."""


def sweep(
    plan: SweepPlan,
    name: CheckGroup,
    group: dist.ProcessGroup,
    device: torch.device,
    sharing: int,
    operations: tuple[Operation, ...] = SWEPT,
) -> Iterator[CollectiveLine]:
    """Times each operation at every size that is short enough; called on all ranks of `group` at once.

    Args:
        plan: sizes and limits.
        name: name of the group, for the record.
        group: the ranks that take part, two at least.
        device: device of this rank.
        sharing: ranks that share this rank's memory.
        operations: the operations that are swept.
    """
    ranks = dist.get_world_size(group)
    room = -_agreed(-_free_bytes(device, sharing), group, device)
    for operation in operations:
        for size in plan.sizes_bytes:
            elements = max(1, size // _ELEMENT_BYTES // ranks) * ranks
            size_bytes = elements * _ELEMENT_BYTES
            # Memory for input and output, and for what the backend copies for itself.
            if 4 * size_bytes > room:
                break
            call = _call(operation, elements, ranks, group, device)
            once = _agreed(_timed(call, 1, device), group, device)
            if once < _SHORT_SECONDS:  # the first call was for warm-up, and another one may be disturbed
                once = _agreed(statistics.median(_timed(call, 1, device) for _ in range(5)), group, device)
            calls = max(1, min(_MOST_CALLS, int(_BATCH_SECONDS / max(once, 1e-9))))
            repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(plan.seconds_per_size / max(once * calls, 1e-9))))
            dist.barrier(group)
            seconds = tuple(_timed(call, calls, device) / calls for _ in range(repeats))
            yield CollectiveLine(
                group=name, operation=operation, ranks=ranks, size_bytes=size_bytes, calls=calls, seconds=seconds
            )
            following = next((larger for larger in plan.sizes_bytes if larger > size), size)
            # The quickest repeat counts: one call held up by a busy machine must not end the sweep.
            if _agreed(min(seconds), group, device) * following / size > plan.longest_seconds:
                break


def _call(
    operation: Operation, elements: int, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> CollectiveCall:
    """One call on `elements` elements in all. Its memory is really mapped; zeros keep sums as they are."""
    part = elements // ranks

    def zeros(count: int) -> Tensor:
        return torch.empty(count, device=device).fill_(0.0)  # torch.zeros may map pages without memory behind them

    if operation == "all_reduce":
        whole = zeros(elements)
        return lambda: dist.all_reduce(whole, group=group)
    if operation == "all_gather":
        own, gathered = zeros(part), zeros(elements)
        return lambda: _all_gather(gathered, own, group=group)
    if operation == "reduce_scatter":
        mine, all_of_it = zeros(part), zeros(elements)
        return lambda: _reduce_scatter(mine, all_of_it, group=group)
    sent, received = zeros(elements), zeros(elements)
    if operation == "send_recv":
        return lambda: _to_the_next(sent, received, group)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _to_the_next(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    """Each rank sends to the next one, and the last to the first."""
    ranks, rank = group.size(), group.rank()
    exchanged = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    for work in exchanged:
        work.wait()


def _timed(call: CollectiveCall, calls: int, device: torch.device) -> float:
    """Seconds of `calls` calls, one right after the other."""
    return seconds_of(lambda: [call() for _ in range(calls)], device)


def _agreed(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest value of all ranks, so that they make the same number of calls."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX, group)
    return float(box.item())


def _free_bytes(device: torch.device, sharing: int) -> float:
    if device.type == "cuda":
        return _MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]
    return _MEMORY_SHARE * float(psutil.virtual_memory().available) / sharing
