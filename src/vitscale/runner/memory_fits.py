"""Whether a plan's trials fit in memory, and the largest micro-batches and images that do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from rich import filesize

from vitscale.engines.trace_requests import needs_card
from vitscale.errors import RequestError
from vitscale.machine.hardware import this_machine
from vitscale.prediction.memory.forecast import forecast_bytes, memory_inputs, oom_chance
from vitscale.prediction.memory.on_host import host_oom_chance, offloaded_bytes
from vitscale.runner.planning import Plan
from vitscale.schedulers import LocalHost
from vitscale.trial.trial import DeviceName, Trial

_MARGIN_BYTES = 4 * 10**9
"""Bytes that must be free beside twice the forecast for a trial to fit for certain."""
_WILL_NOT_FIT_CHANCE = 0.5
"""Chance of running out of memory from which a trial is said not to fit."""
_MAY_NOT_FIT_CHANCE = 0.05
"""Chance of running out of memory from which a trial is said perhaps not to fit."""
_LARGEST_IMAGE_SIZE = 8192
"""Pixels a side up to which sizes are looked at."""
MOST_BATCH_IMAGES = 65_536
"""Images up to which micro-batches are looked at; a power of two."""


class Capacity(NamedTuple):
    """Bytes of memory that there are for a trial; None: unknown."""

    rank: int | None
    """Memory of one rank's device; on CPU the rank's share of the host's memory."""
    host: int | None
    """Memory of one host, for what all its ranks on GPUs offload together."""


class HostFit(NamedTuple):
    """Whether a host's memory suffices for what its ranks on GPUs offload to it."""

    ranks: int
    """Ranks of a full host."""
    offloaded_bytes: int
    """Bytes that they offload together."""
    capacity_bytes: int | None
    """Memory of the host; None: nobody states it."""
    oom_chance: float | None
    """Chance that the host runs out of memory, in [0, 1]; None where its memory is unknown."""

    @property
    def reason(self) -> str:
        """Why a trial does not fit, if the host is what it does not fit into."""
        offloaded = filesize.decimal(self.offloaded_bytes)
        capacity = filesize.decimal(self.capacity_bytes or 0)
        return (
            f"will not fit in the host's memory: forecast {offloaded} that its {self.ranks} ranks offload, on a host "
            f"that has {capacity} (chance {self.oom_chance or 0.0:.0%})"
        )


class LargestBatches(NamedTuple):
    """The largest micro-batches that fit, in images of each rank; 0 where not even one image fits."""

    kept: int
    """With activations kept."""
    recomputed: int | None
    """With activation checkpointing; None where that is unknown, as of a model without blocks."""


@dataclass(frozen=True)
class MemoryFit:
    """Whether one trial fits; None where the model must be built to know, or the memory's size is unknown."""

    forecast_bytes: int | None
    """Peak of one rank's tensors."""
    capacity_bytes: int | None
    """Memory of one rank's device; on CPU the rank's share of the host's memory."""
    oom_chance: float | None
    """Chance that a rank's device runs out of memory, in [0, 1]."""
    host: HostFit | None = None
    """Whether what is offloaded fits; None where nothing is offloaded, or that is unknown."""
    largest: LargestBatches | None = None
    """The largest micro-batches that fit; None where they are unknown, and where a CPU's memory suffices anyway."""

    @property
    def capacity(self) -> Capacity:
        """The memory that it was held against."""
        return Capacity(rank=self.capacity_bytes, host=None if self.host is None else self.host.capacity_bytes)

    @property
    def _chances(self) -> list[float | None]:
        """The chances of running out of each memory that it takes; None for one that is unknown."""
        return [self.oom_chance] if self.host is None else [self.oom_chance, self.host.oom_chance]

    @property
    def _highest_chance(self) -> float:
        """The highest of the chances that are known; 0 where none is."""
        return max((chance for chance in self._chances if chance is not None), default=0.0)

    @property
    def unfit(self) -> bool:
        """Whether it more likely than not does not fit."""
        return self._highest_chance >= _WILL_NOT_FIT_CHANCE

    @property
    def unsure(self) -> bool:
        """Whether it probably fits, as far as is known, but may not."""
        return _MAY_NOT_FIT_CHANCE <= self._highest_chance < _WILL_NOT_FIT_CHANCE

    @property
    def is_known(self) -> bool:
        """Whether it is known if it fits; what does not fit into one memory need not be held against another."""
        return self.unfit or None not in self._chances

    @property
    def lacks_host_memory(self) -> bool:
        """Whether it offloads to a host whose memory nobody states."""
        return self.host is not None and self.host.capacity_bytes is None

    @property
    def reason(self) -> str:
        """Why it is unfit, for a record."""
        if self.host is not None and self.host.oom_chance == self._highest_chance:
            return self.host.reason
        forecast = filesize.decimal(self.forecast_bytes or 0)
        capacity = filesize.decimal(self.capacity_bytes or 0)
        return (
            f"will not fit in memory: forecast {forecast} of tensors on a rank that has {capacity} "
            f"(chance {self.oom_chance or 0.0:.0%})"
        )


def memory_fits(plan: Plan, capacity_bytes: int | None = None) -> dict[str, MemoryFit]:
    """Return each trial's fit, by its identity.

    Args:
        plan: the study.
        capacity_bytes: memory of one device. None: that of the smallest GPU of the host that plans; on CPU, where ranks
            run on this machine, a rank's share of its memory.

    What ranks on GPUs offload is held against the memory of their host: that of [node], else of this machine where
    ranks run on it.
    """
    capacities = _Capacities(plan, capacity_bytes)
    largest_batches = _LargestBatchSearch()
    fit_by_memory_key: dict[str, MemoryFit] = {}  # a forecast takes long, and many trials share one
    fits = {}
    for trial_id, trial in plan.record.trials.items():
        key = memory_key(trial)
        if key not in fit_by_memory_key:
            capacity = capacities.of_trial(trial)
            fit = _fit(trial, capacity)
            # A CPU's memory, unless the user names it, is that of this machine, which mostly suffices.
            is_scarce = capacity_bytes is not None or trial.train.device == "cuda"
            if is_scarce or fit.unfit or fit.unsure:
                fit = replace(fit, largest=largest_batches.find(trial, capacity))
            fit_by_memory_key[key] = fit
        fits[trial_id] = fit_by_memory_key[key]
    return fits


class _BatchGroup(NamedTuple):
    """Trials in one group have the same memory, micro-batch and activation checkpointing apart."""

    memory_key: str
    capacity: Capacity


class _LargestBatchSearch:
    """Finds the largest micro-batches that fit, once for each group of trials.

    A micro-batch counts as fitting unless it more likely than not does not fit.
    """

    def __init__(self) -> None:
        self._by_group: dict[_BatchGroup, LargestBatches | None] = {}

    def find(self, trial: Trial, capacity: Capacity) -> LargestBatches | None:
        """Return the largest micro-batches of a trial; None where memory is unknown, or ranks have unequal ones."""
        if capacity.rank is None or trial.train.micro_batches:
            return None
        group = _BatchGroup(memory_key(_with_batch(trial, 1, checkpointing=False)), capacity)
        if group not in self._by_group:
            self._by_group[group] = _largest_batches(trial, capacity)
        return self._by_group[group]


def _largest_batches(trial: Trial, capacity: Capacity) -> LargestBatches | None:
    """Return the largest micro-batches that fit; None where the memory with activations kept is unknown."""
    with_activations = _largest_batch(trial, capacity, checkpointing=False)
    if with_activations is None:
        return None
    return LargestBatches(with_activations, _largest_batch(trial, capacity, checkpointing=True))


def _largest_batch(trial: Trial, capacity: Capacity, *, checkpointing: bool) -> int | None:
    """Return the largest micro-batch that fits, 0 where none does; None where its memory is unknown.

    Larger micro-batches need more memory: the micro-batch is doubled until one does not fit, and then the interval
    between the largest that fits and the smallest that does not is halved until the two are neighbours.
    """

    def fits(images: int) -> bool:
        return not _fit(_with_batch(trial, images, checkpointing=checkpointing), capacity).unfit

    if forecast_bytes(_with_batch(trial, 1, checkpointing=checkpointing)) is None:
        return None
    too_many = 1
    while fits(too_many):
        if too_many == MOST_BATCH_IMAGES:
            return MOST_BATCH_IMAGES
        too_many = min(2 * too_many, MOST_BATCH_IMAGES)
    fitting = too_many // 2
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def _with_batch(trial: Trial, micro_batch: int, *, checkpointing: bool) -> Trial:
    """Return the trial with this micro-batch, and with or without activation checkpointing."""
    changes = {"micro_batch": micro_batch, "activation_checkpointing": checkpointing}
    return trial.model_copy(update={"train": trial.train.model_copy(update=changes)})


class _DeviceUse(NamedTuple):
    """Trials with the same use of devices have the same memory for a rank."""

    device: DeviceName
    ranks_per_node: int


class _Capacities:
    """The memory that there is for each trial of a plan; worked out once for each use of devices."""

    def __init__(self, plan: Plan, capacity_bytes: int | None) -> None:
        """`capacity_bytes`: the same for all trials; None: by the plan's hosts."""
        self._plan = plan
        self._capacity_of_all = capacity_bytes
        self._host_bytes = _host_bytes(plan)
        self._by_use: dict[_DeviceUse, int | None] = {}

    def of_trial(self, trial: Trial) -> Capacity:
        """Return the memory that a rank and a host of the trial have."""
        return Capacity(rank=self._rank_bytes(trial), host=self._host_bytes)

    def _rank_bytes(self, trial: Trial) -> int | None:
        """Return the bytes of memory that a rank of the trial has; None where they are unknown."""
        if self._capacity_of_all is not None:
            return self._capacity_of_all
        use = _DeviceUse(trial.train.device, trial.world.ranks_per_node)
        if use not in self._by_use:
            self._by_use[use] = _rank_bytes_on_hosts(self._plan, trial, self._host_bytes)
        return self._by_use[use]


def memory_key(trial: Trial) -> str:
    """Return a text that is equal for trials whose forecasts of memory are equal: `memory_inputs` as JSON."""
    return memory_inputs(trial).model_dump_json()


class LargestImages(NamedTuple):
    """The largest images that fit, for trials whose memory differs only by image size and activation checkpointing."""

    trial_ids: tuple[str, ...]
    trial: Trial
    """One of them."""
    pixels: int | None
    """Pixels a side without activation checkpointing; None: no size fits."""
    pixels_with_checkpointing: int | None
    """The same with activation checkpointing."""


class _ImageGroup(NamedTuple):
    """Trials in one group have the same memory, image size and activation checkpointing apart."""

    memory_key: str
    capacity: Capacity


def largest_images(trials: Mapping[str, Trial], fits: Mapping[str, MemoryFit]) -> list[LargestImages]:
    """Return the largest `model.image_size` that fits, where a study varies it or one of its trials may not fit.

    Sizes are multiples of a ViT's patches, or of the patches of Swin's last stage, up to 8,192. A size counts as
    fitting unless it more likely than not does not fit.
    """
    if not _are_largest_images_of_use([*trials], trials, fits):
        return []
    largest = []
    for group, trial_ids in _ids_by_image_group(trials, fits).items():
        if _are_largest_images_of_use(trial_ids, trials, fits):
            trial = trials[trial_ids[0]]
            pixels = _largest_image(trial, group.capacity, checkpointing=False)
            pixels_with_checkpointing = _largest_image(trial, group.capacity, checkpointing=True)
            largest.append(LargestImages(tuple(trial_ids), trial, pixels, pixels_with_checkpointing))
    return largest


def _are_largest_images_of_use(
    trial_ids: Sequence[str], trials: Mapping[str, Trial], fits: Mapping[str, MemoryFit]
) -> bool:
    """Whether some of these trials differ in their image size, or one of them may not fit in memory."""
    image_sizes = {trials[trial_id].model.image_size for trial_id in trial_ids}
    known_fits = [fits[trial_id] for trial_id in trial_ids if trial_id in fits]
    may_not_fit = any(fit.unfit or fit.unsure for fit in known_fits)
    return len(image_sizes) > 1 or may_not_fit


def _ids_by_image_group(trials: Mapping[str, Trial], fits: Mapping[str, MemoryFit]) -> dict[_ImageGroup, list[str]]:
    """Return group -> ids of its trials; trials whose memory or whose patches are not known are left out."""
    ids_by_group: dict[_ImageGroup, list[str]] = {}
    for trial_id, trial in trials.items():
        fit = fits.get(trial_id)
        if fit is None or fit.oom_chance is None or trial.model.patch_size is None:
            continue
        if needs_card(trial):  # a card is of one image size
            continue
        group = _ImageGroup(memory_key(_with_image_size(trial, 1, checkpointing=False)), fit.capacity)
        ids_by_group.setdefault(group, []).append(trial_id)
    return ids_by_group


def _largest_image(trial: Trial, capacity: Capacity, *, checkpointing: bool) -> int | None:
    """Return the largest image size that fits, in pixels a side; None where none does.

    Sizes are counted in units of patches. Larger images need more memory: the interval between the largest size that
    fits and the smallest that does not is halved until the two are neighbours.
    """
    stages = len(trial.model.depths or (1,))
    unit_pixels = (trial.model.patch_size or 1) << (stages - 1)  # each later stage of a Swin doubles its patches
    fitting_units = 0
    too_many_units = _LARGEST_IMAGE_SIZE // unit_pixels + 1
    while too_many_units - fitting_units > 1:
        middle_units = (fitting_units + too_many_units) // 2
        sized_trial = _with_image_size(trial, middle_units * unit_pixels, checkpointing=checkpointing)
        if _fit(sized_trial, capacity).unfit:
            too_many_units = middle_units
        else:
            fitting_units = middle_units
    return fitting_units * unit_pixels or None


def _with_image_size(trial: Trial, image_size: int, *, checkpointing: bool) -> Trial:
    """Return the trial with images of this many pixels a side, and with or without activation checkpointing."""
    model = trial.model.model_copy(update={"image_size": image_size})
    train = trial.train.model_copy(update={"activation_checkpointing": checkpointing})
    return trial.model_copy(update={"model": model, "train": train})


def unfit(fits: Mapping[str, MemoryFit]) -> dict[str, str]:
    """Return trials that will not fit -> why."""
    return {trial_id: fit.reason for trial_id, fit in fits.items() if fit.unfit}


def _fit(trial: Trial, capacity: Capacity) -> MemoryFit:
    """Return whether a trial fits."""
    forecast = forecast_bytes(trial)
    if forecast is None:
        return MemoryFit(None, capacity.rank, oom_chance=None)
    device_chance = _device_chance(forecast, capacity.rank, trial.train.device)
    return MemoryFit(forecast, capacity.rank, oom_chance=device_chance, host=_host_fit(trial, capacity.host))


def _device_chance(forecast: int, capacity_bytes: int | None, device: DeviceName) -> float | None:
    """Return the chance that a rank's device runs out of memory; None where its memory is unknown.

    Args:
        forecast: bytes of the rank's tensors.
        capacity_bytes: memory of the rank's device; on CPU the rank's share of the host's.
        device: what the rank computes on.
    """
    if capacity_bytes is None:
        return None
    if 2 * forecast + _MARGIN_BYTES < capacity_bytes:
        return 0.0
    return float(oom_chance(forecast, capacity_bytes, device))


def _host_fit(trial: Trial, capacity_bytes: int | None) -> HostFit | None:
    """Return whether what a trial offloads fits in a host's memory; None where nothing is offloaded."""
    offloaded = offloaded_bytes(trial)
    if not offloaded:
        return None
    ranks = trial.world.ranks_per_node
    if capacity_bytes is None:
        return HostFit(ranks, offloaded, None, oom_chance=None)
    chance = host_oom_chance(np.array([float(offloaded)]), capacity_bytes, np.array([ranks]))
    return HostFit(ranks, offloaded, capacity_bytes, oom_chance=float(chance[0]))


def _host_bytes(plan: Plan) -> int | None:
    """Return the bytes of memory of a host of the plan; None where neither [node] nor this machine says.

    This machine's memory is that of a host only where ranks run on this machine.
    """
    try:
        machine = plan.scheduler.machine()
    except RequestError:
        return None
    if machine.stated_memory_bytes is not None:
        return machine.stated_memory_bytes
    if not isinstance(plan.scheduler, LocalHost) or machine != this_machine():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rank_bytes_on_hosts(plan: Plan, trial: Trial, host_bytes: int | None) -> int | None:
    """Return the bytes of memory that a rank of the trial has; None where the plan's hosts do not say.

    Args:
        plan: the study.
        trial: one of its trials.
        host_bytes: memory of a host, which on CPU all its ranks share; None: unknown.
    """
    if trial.train.device == "cpu":
        return None if host_bytes is None else host_bytes // trial.world.ranks_per_node
    try:
        gpus = plan.scheduler.machine().gpus
    except RequestError:
        return None
    return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)
