"""Whether a planned trial will fit in memory, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich import filesize

from vitscale.errors import RequestError
from vitscale.prediction import forecast_bytes
from vitscale.runner.planning import Plan
from vitscale.schedulers.local import Local
from vitscale.trial import Trial

_ROOM_FOR_ALL_ELSE = 4 * 10**9
"""With so much beside twice the forecast nothing is left to chance."""
_WILL_NOT, _MAY_NOT = 0.5, 0.05
"""From which chance on a trial is said not to fit, or perhaps not to."""


@dataclass(frozen=True)
class MemoryFit:
    """Of one trial; None where it cannot be known before the model is built, or the memory is not known."""

    forecast_bytes: int | None
    """Of one rank's tensors at their peak."""
    capacity_bytes: int | None
    """Of one rank's device; on CPU its share of the host's memory."""
    oom_chance: float | None
    """In [0, 1]."""

    @property
    def unfit(self) -> bool:
        """More likely than not it will not fit."""
        return self.oom_chance is not None and self.oom_chance >= _WILL_NOT

    @property
    def unsure(self) -> bool:
        """It may not fit, though it probably will."""
        return self.oom_chance is not None and _MAY_NOT <= self.oom_chance < _WILL_NOT

    @property
    def reason(self) -> str:
        """Why it is unfit, for a record."""
        forecast, capacity = (filesize.decimal(size or 0) for size in (self.forecast_bytes, self.capacity_bytes))
        return (
            f"will not fit in memory: forecast {forecast} of tensors on a rank that has {capacity} "
            f"(chance {self.oom_chance or 0.0:.0%})"
        )


def memory_fits(plan: Plan, capacity_bytes: int | None = None) -> dict[str, MemoryFit]:
    """Each trial's fit, by its identity.

    Args:
        plan: the study.
        capacity_bytes: of one device. None: of the smallest GPU of the host that plans; on CPU, where ranks run on this
            machine, their share of its memory.
    """
    capacities: dict[tuple[str, int], int | None] = {}
    found = {}
    for trial_id, trial in plan.record.trials.items():
        key = (trial.train.device, trial.world.ranks_per_node)
        if key not in capacities:
            capacities[key] = capacity_bytes if capacity_bytes is not None else _capacity(plan, trial)
        found[trial_id] = _fit(trial, capacities[key])
    return found


def unfit(fits: Mapping[str, MemoryFit]) -> dict[str, str]:
    """Trials that will not fit -> why."""
    return {trial_id: fit.reason for trial_id, fit in fits.items() if fit.unfit}


def _fit(trial: Trial, capacity: int | None) -> MemoryFit:
    forecast = forecast_bytes(trial)
    if forecast is None or capacity is None:
        return MemoryFit(forecast, capacity, None)
    if 2 * forecast + _ROOM_FOR_ALL_ELSE < capacity:
        return MemoryFit(forecast, capacity, 0.0)
    from vitscale.prediction.memory.chance import oom_chance  # numpy: only where there is something to compare

    return MemoryFit(forecast, capacity, float(oom_chance(forecast, capacity, trial.train.device)))


def _capacity(plan: Plan, trial: Trial) -> int | None:
    if trial.train.device == "cuda":
        try:
            known = [gpu.memory_bytes for gpu in plan.scheduler.machine().gpus if gpu.memory_bytes is not None]
        except RequestError:
            return None
        return min(known, default=None)
    if not isinstance(plan.scheduler, Local):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // trial.world.ranks_per_node
