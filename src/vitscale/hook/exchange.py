"""DDP's own times of a backward: when the first bucket was handed to the exchange, when the last gradient was ready.

DDP's logger takes these times itself; a communication hook is not used, because there is only one and it may be the
program's. On a GPU its times are events that the host would have to wait for, so only CPU ranks are asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from time import monotonic_ns, time_ns
from typing import Any

from .steps import BackwardTimes

_FIRST_BUCKET = "backward_comm_time_start"
_LAST_GRADIENT = "backward_compute_time_end"
_EARLIEST_WALL_NS = 10**18
"""Larger times are of the wall clock (2001), smaller ones monotonic: releases of torch differ."""


class DdpTimes:
    """The logger of one DDP module, asked after each step."""

    def __init__(self, ddp: Any) -> None:
        """Have the logger take times in each iteration, not only in one of a hundred."""
        ddp._set_ddp_runtime_logging_sample_rate(1)
        self._logger = ddp.logger

    def read(self) -> BackwardTimes:
        """Times of the last backward that exchanged gradients, by the host's monotonic clock."""
        self._logger.set_runtime_stats_and_log()
        values = self._logger._get_ddp_logging_data().ints_map
        wall_minus_monotonic_ns = time_ns() - monotonic_ns()
        return BackwardTimes(
            first_bucket_ns=_monotonic(values.get(_FIRST_BUCKET), wall_minus_monotonic_ns),
            last_gradient_ns=_monotonic(values.get(_LAST_GRADIENT), wall_minus_monotonic_ns),
        )


def find_ddp(roots: Iterable[Any]) -> Any:
    """The only DDP module among the model's roots and below them; None without one, or where there are several.

    Several DDP modules each know when their own gradients were ready, and none when the rank's last one was.
    """
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    if distributed is None:
        return None
    modules = {id(module): module for root in roots for module in root.modules()}
    found = [module for module in modules.values() if isinstance(module, distributed.DistributedDataParallel)]
    return found[0] if len(found) == 1 else None


def ddp_times(ddp: Any) -> DdpTimes | None:
    """Access to the module's times; None on a GPU, or where this torch has no such logger."""
    is_on_cpu = getattr(ddp, "device_type", None) == "cpu"
    if not is_on_cpu or getattr(ddp, "logger", None) is None:
        return None
    return DdpTimes(ddp)


def _monotonic(moment_ns: int | None, wall_minus_monotonic_ns: int) -> int | None:
    if not moment_ns or moment_ns < 0:
        return None
    return moment_ns - wall_minus_monotonic_ns if moment_ns > _EARLIEST_WALL_NS else moment_ns
