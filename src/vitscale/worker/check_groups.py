"""Which ranks a check sweeps collectives over: inside each host, one of each host, and all."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from vitscale.probes.collective_sweep import sweep
from vitscale.store.check_records import CollectiveLine, Group, SweepPlan
from vitscale.worker import group
from vitscale.worker.place import Place


def sweep_groups(plan: SweepPlan, own: Place, device: torch.device) -> Iterator[CollectiveLine]:
    """Sweeps each group in its turn, those that are another set of ranks than the others. Called on all ranks at once.

    The groups inside hosts are swept at the same time, as training uses them.
    """
    hosts = _ranks_by_host(own, device)
    sharing = max(map(len, hosts))
    everybody = sorted(rank for ranks in hosts for rank in ranks)
    first_of_each = [ranks[0] for ranks in hosts]
    # Every rank has to make every group, those of others too.
    inside = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in hosts]
    across = dist.new_group(first_of_each) if len(hosts) > 1 and first_of_each != everybody else None
    for own_group, ranks in zip(inside, hosts, strict=True):
        if own_group is not None and own.rank in ranks:
            yield from sweep(plan, "inside nodes", own_group, device, sharing)
    group.barrier()
    if across is not None and own.rank in first_of_each:
        yield from sweep(plan, "across nodes", across, device, 1)
    group.barrier()
    if len(hosts) > 1 and dist.group.WORLD is not None:
        name: Group = "across nodes" if first_of_each == everybody else "all ranks"
        yield from sweep(plan, name, dist.group.WORLD, device, sharing)
    group.barrier()


def _ranks_by_host(own: Place, device: torch.device) -> list[list[int]]:
    """The ranks of each host, by what the hosts call themselves: where a launcher put them need not be asked."""
    digest = hashlib.sha256(socket.gethostname().encode("utf-8", errors="replace")).digest()
    name = torch.tensor([int.from_bytes(digest[:7])], dtype=torch.int64, device=device)
    names = [torch.zeros_like(name) for _ in range(own.world_size)]
    dist.all_gather(names, name)
    hosts: dict[int, list[int]] = {}
    for rank, other in enumerate(names):
        hosts.setdefault(int(other.item()), []).append(rank)
    return list(hosts.values())
