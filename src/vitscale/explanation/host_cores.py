"""Counts the cores of a host that its ranks may use together: bound ranks have some each, others share all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from vitscale.explanation.rank_record import HookedRank
from vitscale.hook.lines import HookedRankLine

_MASK = re.compile(r"[0-9a-f]{1,1024}")


class HostCores(NamedTuple):
    """Cores of a host, and the ranks of the job that share them."""

    cores: int
    ranks: int

    @property
    def cores_of_rank(self) -> int:
        """Cores of one rank, at least 1, where they are shared evenly."""
        return max(1, self.cores // self.ranks)


def host_cores(records: Iterable[HookedRank], host: str) -> HostCores:
    """Return the cores that the ranks of a host may use: together, where each states which they are.

    Launchers may leave the number of a host's ranks open (mpirun), so that ranks with a record count too.

    Args:
        records: those of all ranks.
        host: its name, which one of them has at least.
    """
    ranks = [record.rank for record in records if record.rank.host == host]
    masks = [_mask_of(rank) for rank in ranks]
    known_masks = [mask for mask in masks if mask is not None]
    if len(known_masks) == len(ranks):
        all_cores = 0
        for mask in known_masks:
            all_cores |= mask
        cores = bin(all_cores).count("1")
    else:
        cores = max(rank.cpus for rank in ranks)
    stated_ranks = max(rank.local_world_size for rank in ranks)
    return HostCores(max(1, cores), max(1, stated_ranks, len(ranks)))


def _mask_of(rank: HookedRankLine) -> int | None:
    """Return the rank's cores as bits; None where they are not stated."""
    if rank.core_mask is None or _MASK.fullmatch(rank.core_mask) is None:
        return None
    return int(rank.core_mask, 16)
