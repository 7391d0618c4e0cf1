"""Times collectives over a range of sizes on this rank, calls one right after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

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
"""Most calls of a repeat."""
_SHORT_CALL_SECONDS = 0.1
"""A first call that takes less is tried again, for it may have been disturbed."""
_MEMORY_SHARE = 0.5
"""Share of the free memory that is used, for all ranks of a host together."""


def sweep(
    plan: SweepPlan,
    name: CheckGroup,
    group: dist.ProcessGroup,
    device: torch.device,
    ranks_per_memory: int,
    operations: tuple[Operation, ...] = SWEPT,
) -> Iterator[CollectiveLine]:
    """Times each operation at one size after the other, until a call would take too long or too much memory.

    All ranks of `group` call it at once, and decide alike: by the slowest rank, and by the one with the least memory.

    Args:
        plan: sizes and limits.
        name: name of the group, for the record.
        group: the ranks that take part, two at least.
        device: device of this rank.
        ranks_per_memory: number of ranks that share this rank's memory, itself included.
        operations: the operations that are swept.
    """
    ranks = dist.get_world_size(group)
    # The highest of the negative values is the lowest of all ranks.
    least_free_bytes = -_highest_of_ranks(-_usable_bytes(device, ranks_per_memory), group, device)
    for operation in operations:
        for size in plan.sizes_bytes:
            elements = max(1, size // _ELEMENT_BYTES // ranks) * ranks
            size_bytes = elements * _ELEMENT_BYTES
            # Memory for input and output, and for what the backend copies for itself.
            if 4 * size_bytes > least_free_bytes:
                break
            call = _collective_call(operation, elements, ranks, group, device)
            repetition = _choose_repetition(call, plan, group, device)
            seconds = _seconds_per_call(call, repetition, group, device)
            yield CollectiveLine(
                group=name,
                operation=operation,
                ranks=ranks,
                size_bytes=size_bytes,
                calls=repetition.calls,
                seconds=seconds,
            )
            # The quickest repeat counts: one call held up by a busy machine must not end the sweep.
            call_seconds = _highest_of_ranks(min(seconds), group, device)
            expected_seconds = call_seconds * _next_larger(plan.sizes_bytes, size) / size
            if expected_seconds > plan.longest_seconds:
                break


def _next_larger(sizes_bytes: Iterable[int], size: int) -> int:
    """Returns the first of the sizes that is larger than `size`; after the largest one `size` itself."""
    for larger in sizes_bytes:
        if larger > size:
            return larger
    return size


class _Repetition(NamedTuple):
    """How often a collective is called to be timed."""

    calls: int
    """Calls that are timed together."""
    repeats: int
    """How often these are timed."""


def _seconds_per_call(
    call: CollectiveCall, repetition: _Repetition, group: dist.ProcessGroup, device: torch.device
) -> tuple[float, ...]:
    """Returns the mean seconds of a call in each repeat. All ranks begin together."""
    dist.barrier(group)
    calls = repetition.calls
    return tuple(_seconds_of_calls(call, calls, device) / calls for _ in range(repetition.repeats))


def _choose_repetition(
    call: CollectiveCall, plan: SweepPlan, group: dist.ProcessGroup, device: torch.device
) -> _Repetition:
    """Tries a collective, and returns how often to call it. All ranks of `group` do so at once, with the same result.

    As many calls are timed together as take `_BATCH_SECONDS`, and that as often as `plan.seconds_per_size` allows.
    """
    call_seconds = _highest_of_ranks(_seconds_of_calls(call, 1, device), group, device)
    if call_seconds < _SHORT_CALL_SECONDS:  # the first call was for warm-up, and another one may be disturbed
        median = statistics.median(_seconds_of_calls(call, 1, device) for _ in range(5))
        call_seconds = _highest_of_ranks(median, group, device)
    calls = max(1, min(_MOST_CALLS, int(_BATCH_SECONDS / max(call_seconds, 1e-9))))
    affordable_repeats = int(plan.seconds_per_size / max(call_seconds * calls, 1e-9))
    return _Repetition(calls, repeats=max(_FEWEST_REPEATS, min(_MOST_REPEATS, affordable_repeats)))


def _collective_call(
    operation: Operation, elements: int, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> CollectiveCall:
    """Returns a function that does one collective on buffers of fp32 zeros, which are made here.

    Their memory is mapped before the first call. Sums of zeros stay zeros, however often they are added.

    Args:
        operation: what ranks do together.
        elements: number of elements in all, a multiple of `ranks`.
        ranks: number of ranks in the group.
        group: the ranks that take part.
        device: device of this rank.
    """
    elements_of_rank = elements // ranks

    def zeros(count: int) -> Tensor:
        return torch.empty(count, device=device).fill_(0.0)  # torch.zeros may map pages without memory behind them

    if operation == "all_reduce":
        tensor = zeros(elements)
        return lambda: dist.all_reduce(tensor, group=group)
    if operation == "all_gather":
        part = zeros(elements_of_rank)
        full_tensor = zeros(elements)
        return lambda: _all_gather(full_tensor, part, group=group)
    if operation == "reduce_scatter":
        part = zeros(elements_of_rank)
        full_tensor = zeros(elements)
        return lambda: _reduce_scatter(part, full_tensor, group=group)
    source = zeros(elements)
    target = zeros(elements)
    if operation == "send_recv":
        return lambda: _send_to_next_rank(source, target, group)
    return lambda: dist.all_to_all_single(target, source, group=group)


def _send_to_next_rank(source: Tensor, target: Tensor, group: dist.ProcessGroup) -> None:
    """Sends `source` to the next rank, the last one's to the first, and receives `target` from the previous one."""
    ranks = group.size()
    rank = group.rank()
    transfers = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, source, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, target, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    for transfer in transfers:
        transfer.wait()


def _seconds_of_calls(call: CollectiveCall, calls: int, device: torch.device) -> float:
    """Returns the seconds that `calls` calls take together, one right after the other."""
    return seconds_of(lambda: [call() for _ in range(calls)], device)


def _highest_of_ranks(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the highest value of all ranks, so that they decide alike and make the same number of calls."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return float(tensor.item())


def _usable_bytes(device: torch.device, ranks_per_memory: int) -> float:
    """Returns the bytes of a GPU's or a host's memory that this rank may use; ranks share the host's."""
    if device.type == "cuda":
        free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
        return _MEMORY_SHARE * free_bytes
    return _MEMORY_SHARE * float(psutil.virtual_memory().available) / ranks_per_memory
