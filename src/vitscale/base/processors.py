"""The processors that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> frozenset[int]:
    """Numbers of the logical cores that this process may run on; all of the machine's where processes have no CPU mask
    (macOS).

    Example: frozenset({0, 1, 2, 3}).
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
