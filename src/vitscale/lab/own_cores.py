"""Which of the machine's cores each host computes on: its own where there are enough, so that no host slows another."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vitscale.lab.plan import Plan
from vitscale.lab.processes import Process


def own_cores(plan: Plan, cores: Sequence[int]) -> list[frozenset[int]] | None:
    """The cores of each host: equal shares of `cores`, or one each in turn where there are more hosts than cores.

    None, and no host is held to any, where a share would be too small: ranks pin themselves to a host's first cores,
    and those of two hosts that see the same ones would all sit on these.
    """
    share = max(1, len(cores) // plan.hosts)
    if share < max(plan.slots, plan.cores_per_host or 0):
        return None
    if plan.hosts > len(cores):
        return [frozenset({cores[number % len(cores)]}) for number in range(plan.hosts)]
    return [frozenset(cores[number * share : (number + 1) * share]) for number in range(plan.hosts)]


def hold_to_own(plan: Plan, firsts: Sequence[Process]) -> None:
    """Holds each host's first process to its cores; commands on the host take them from it (`enter.py`)."""
    shares = own_cores(plan, sorted(os.sched_getaffinity(0)))
    for first, cores in zip(firsts, shares or (), strict=False):
        os.sched_setaffinity(first.pid, cores)
