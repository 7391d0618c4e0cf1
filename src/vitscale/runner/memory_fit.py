"""Whether a planned trial will fit in memory, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich import filesize

from vitscale.errors import RequestError
from vitscale.prediction import forecast_bytes
from vitscale.runner.planning import Plan
from vitscale.schedulers.local import Local
from vitscale.trial.trial import Trial

_ROOM_FOR_ALL_ELSE = 4 * 10**9
"""With so much beside twice the forecast nothing is left to chance."""
_WILL_NOT, _MAY_NOT = 0.5, 0.05
"""From which chance on a trial is said not to fit, or perhaps not to."""
_LARGEST_IMAGE = 8192


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


class LargestImages(NamedTuple):
    """Of trials that differ in the size of images and in activation checkpointing alone: the largest that fits."""

    trial_ids: tuple[str, ...]
    trial: Trial
    """One of them."""
    kept: int | None
    """Pixels a side with activations kept; None: no size fits."""
    recomputed: int | None
    """The same with activation checkpointing."""


def largest_images(trials: Mapping[str, Trial], fits: Mapping[str, MemoryFit]) -> list[LargestImages]:
    """The largest `model.image_size` that fits, where a study varies it or a trial of its may not fit.

    Sizes are multiples of a ViT's patches, or of the patches of Swin's last stage, up to 8,192; a size fits unless it
    is more likely than not that it does not.
    """
    alike: dict[tuple[str, int | None], list[str]] = {}
    for trial_id, trial in trials.items():
        if trial_id in fits and fits[trial_id].oom_chance is not None and trial.model.patch_size is not None:
            capacity = fits[trial_id].capacity_bytes
            alike.setdefault((_of_size(trial, 1, checkpointing=False).identity(), capacity), []).append(trial_id)
    found = []
    for (_, capacity), trial_ids in alike.items():
        several = len({trials[trial_id].model.image_size for trial_id in trial_ids}) > 1
        if several or any(fits[trial_id].unfit or fits[trial_id].unsure for trial_id in trial_ids):
            trial = trials[trial_ids[0]]
            sizes = [_largest(trial, capacity, checkpointing=again) for again in (False, True)]
            found.append(LargestImages(tuple(trial_ids), trial, *sizes))
    return found


def _largest(trial: Trial, capacity: int | None, *, checkpointing: bool) -> int | None:
    unit = (trial.model.patch_size or 1) << (len(trial.model.depths or (1,)) - 1)
    fitting, too_large = 0, _LARGEST_IMAGE // unit + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if _fit(_of_size(trial, middle * unit, checkpointing=checkpointing), capacity).unfit:
            too_large = middle
        else:
            fitting = middle
    return fitting * unit or None


def _of_size(trial: Trial, image_size: int, *, checkpointing: bool) -> Trial:
    model = trial.model.model_copy(update={"image_size": image_size})
    train = trial.train.model_copy(update={"activation_checkpointing": checkpointing})
    return trial.model_copy(update={"model": model, "train": train})


def unfit(fits: Mapping[str, MemoryFit]) -> dict[str, str]:
    """Trials that will not fit -> why."""
    return {trial_id: fit.reason for trial_id, fit in fits.items() if fit.unfit}


def _fit(trial: Trial, capacity: int | None) -> MemoryFit:
    forecast = forecast_bytes(trial)
    if forecast is None or capacity is None:
        return MemoryFit(forecast, capacity, None)
    if 2 * forecast + _ROOM_FOR_ALL_ELSE < capacity:
        return MemoryFit(forecast, capacity, 0.0)
    from vitscale.prediction.memory.forecast import oom_chance

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
