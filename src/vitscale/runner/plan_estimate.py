"""What a plan says of its trials before they run: memory and whether it suffices, time, GPU-hours, money."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rich import filesize

from vitscale.analysis.scaling import trial_name
from vitscale.engines import wrapper_facts
from vitscale.errors import RequestError
from vitscale.machine.hardware import this_machine
from vitscale.prediction.memory.forecast import forecast, forecast_bytes, memory_inputs, oom_chance, unavailable
from vitscale.present import units
from vitscale.present.data import estimate_fields
from vitscale.present.estimate import Estimate
from vitscale.runner.expectation import ROUGHLY, Expectations
from vitscale.runner.planning import Plan
from vitscale.schedulers import Local
from vitscale.trial.trial import Trial

_ROOM_FOR_ALL_ELSE = 4 * 10**9
"""Bytes that must be free beside twice the forecast for a trial to fit for certain."""
_WILL_NOT, _MAY_NOT = 0.5, 0.05
"""Chances of running out of memory from which a trial is said not to fit, and perhaps not to fit."""
_LARGEST_IMAGE = 8192


@dataclass(frozen=True)
class MemoryFit:
    """Whether one trial fits; None where the model must be built to know, or the memory's size is unknown."""

    forecast_bytes: int | None
    """Peak of one rank's tensors."""
    capacity_bytes: int | None
    """Memory of one rank's device; on CPU the rank's share of the host's memory."""
    oom_chance: float | None
    """Chance that the trial runs out of memory, in [0, 1]."""

    @property
    def unfit(self) -> bool:
        """Whether it more likely than not does not fit."""
        return self.oom_chance is not None and self.oom_chance >= _WILL_NOT

    @property
    def unsure(self) -> bool:
        """Whether it probably fits, but may not."""
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
    """Each trial's fit, by its identity. It is worked out once for all trials with the same `memory_inputs`.

    Args:
        plan: the study.
        capacity_bytes: memory of one device. None: that of the smallest GPU of the host that plans; on CPU, where ranks
            run on this machine, a rank's share of its memory.
    """
    capacities: dict[tuple[str, int], int | None] = {}
    fits_by_inputs: dict[str, MemoryFit] = {}
    fits = {}
    for trial_id, trial in plan.record.trials.items():
        inputs = _memory_key(trial)
        if inputs not in fits_by_inputs:
            place = (trial.train.device, trial.world.ranks_per_node)
            if place not in capacities:
                capacities[place] = capacity_bytes if capacity_bytes is not None else _capacity(plan, trial)
            fits_by_inputs[inputs] = _fit(trial, capacities[place])
        fits[trial_id] = fits_by_inputs[inputs]
    return fits


def _memory_key(trial: Trial) -> str:
    """A text that is equal for trials that have the same forecast."""
    return memory_inputs(trial).model_dump_json()


class LargestImages(NamedTuple):
    """The largest images that fit, for trials whose memory differs only by image size and activation checkpointing."""

    trial_ids: tuple[str, ...]
    trial: Trial
    """One of them."""
    kept: int | None
    """Pixels a side with activations kept; None: no size fits."""
    recomputed: int | None
    """The same with activation checkpointing."""


def largest_images(trials: Mapping[str, Trial], fits: Mapping[str, MemoryFit]) -> list[LargestImages]:
    """The largest `model.image_size` that fits, where a study varies it or one of its trials may not fit.

    Sizes are multiples of a ViT's patches, or of the patches of Swin's last stage, up to 8,192. A size counts as
    fitting unless it more likely than not does not fit.
    """
    image_sizes = {trial.model.image_size for trial in trials.values()}
    all_fit = not any(fit.unfit or fit.unsure for fit in fits.values())
    if len(image_sizes) < 2 and all_fit:
        return []
    alike: dict[tuple[str, int | None], list[str]] = {}
    for trial_id, trial in trials.items():
        if trial_id in fits and fits[trial_id].oom_chance is not None and trial.model.patch_size is not None:
            capacity = fits[trial_id].capacity_bytes
            alike.setdefault((_memory_key(_of_size(trial, 1, checkpointing=False)), capacity), []).append(trial_id)
    largest = []
    for (_, capacity), trial_ids in alike.items():
        several = len({trials[trial_id].model.image_size for trial_id in trial_ids}) > 1
        if several or any(fits[trial_id].unfit or fits[trial_id].unsure for trial_id in trial_ids):
            trial = trials[trial_ids[0]]
            sizes = [_largest(trial, capacity, checkpointing=again) for again in (False, True)]
            largest.append(LargestImages(tuple(trial_ids), trial, *sizes))
    return largest


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
    return MemoryFit(forecast, capacity, float(oom_chance(forecast, capacity, trial.train.device)))


def _capacity(plan: Plan, trial: Trial) -> int | None:
    if trial.train.device == "cuda":
        try:
            known = [gpu.memory_bytes for gpu in plan.scheduler.machine().gpus if gpu.memory_bytes is not None]
        except RequestError:
            return None
        return min(known, default=None)
    if not isinstance(plan.scheduler, Local) or plan.scheduler.machine() != this_machine():
        return None  # of hosts elsewhere, and of a machine that [node] describes, the memory is not known
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // trial.world.ranks_per_node


_MOST_LARGEST = 6
"""Number of configurations whose largest image is shown."""


@dataclass(frozen=True)
class PlanEstimate:
    """Estimates by trial. Of a trial in neither `fits` nor `expected` only the memory forecast is shown."""

    fits: Mapping[str, MemoryFit] = field(default_factory=dict)
    expected: Expectations = field(default_factory=Expectations)
    skipped: frozenset[str] = frozenset()
    """Trials that will not be run; no sum includes them."""
    done: frozenset[tuple[str, int]] = frozenset()
    """Runs, as (trial, repeat), that will not be done (`todo.done_before`); no sum includes them."""

    @cached_property
    def _shows_fits(self) -> bool:
        """Whether a trial may not fit, which a column then says of each."""
        return any(fit.unfit or fit.unsure for fit in self.fits.values())

    @cached_property
    def _shows_times(self) -> bool:
        """Whether the time of a trial is known, which columns then say of each."""
        return any(expected.seconds is not None for expected in self.expected.by_trial.values())

    def cells(self, trial_id: str, trial: Trial) -> dict[str, str]:
        """One trial's cells, by column; only columns in which some trial has a value."""
        fit = self.fits.get(trial_id)
        # A dash where the model must be built to know.
        cells = {"memory": units.size(forecast_bytes(trial) if fit is None else fit.forecast_bytes)}
        if self._shows_fits:
            known = fit is not None and fit.oom_chance is not None
            cells["fits"] = (
                units.UNKNOWN if fit is None or not known else "no" if fit.unfit else "maybe" if fit.unsure else "yes"
            )
        if not self._shows_times:
            return cells
        own = self.expected.by_trial[trial_id]
        about = "~" if own.known_by == ROUGHLY else ""
        price = self.expected.price_per_gpu_hour
        hours = None if own.seconds is None else own.seconds.value * trial.world.size / 3600
        cells["time"] = units.UNKNOWN if own.seconds is None else about + units.seconds(own.seconds.value)
        cells["GPU-h"] = units.UNKNOWN if hours is None else about + units.number(hours)
        if price is not None:
            cells["cost"] = units.UNKNOWN if hours is None else about + units.money(hours * price)
        return cells

    def lines(self, plan: Plan) -> list[str]:
        """What all runs together take, and whether memory suffices; the most important lines first."""
        return [
            *self._time_lines(plan),
            *self._memory_lines(),
            *self._largest_lines(plan),
            *self._unavailable_lines(plan),
        ]

    def _largest_lines(self, plan: Plan) -> list[str]:
        largest = largest_images(plan.record.trials, self.fits)
        lines = [
            f"largest image_size that fits, {trial_name(group.trial)}, micro-batch {group.trial.train.micro_batch}: "
            f"{_pixels(group.kept)}; with activation checkpointing {_pixels(group.recomputed)}"
            for group in largest[:_MOST_LARGEST]
        ]
        more = len(largest) - len(lines)
        return [*lines, f"(and of {more} more configurations: --json has them)"] if more else lines

    def _unavailable_lines(self, plan: Plan) -> list[str]:
        """A line on the trials whose memory arithmetic does not tell, and why."""
        forecast_ids = {trial_id for trial_id, fit in self.fits.items() if fit.forecast_bytes is not None}
        others = [trial for trial_id, trial in plan.record.trials.items() if trial_id not in forecast_ids]
        reasons = [reason for reason in map(unavailable, others) if reason]
        if not reasons:
            return []
        trials = f"{len(reasons)} of {len(plan.record.trials)} trials"
        return [f"memory of {trials}: unavailable: {'; '.join(dict.fromkeys(reasons))}"]

    def largest_json(self, plan: Plan) -> list[dict[str, Any]]:
        """What `largest_images` finds; null where no size fits."""
        return [
            {
                "trials": list(group.trial_ids),
                "largest_image_size": group.kept,
                "largest_image_size_with_activation_checkpointing": group.recomputed,
            }
            for group in largest_images(plan.record.trials, self.fits)
        ]

    def _memory_lines(self) -> list[str]:
        capacities = {fit.capacity_bytes for fit in self.fits.values()}
        known = sorted(size for size in capacities if size is not None)
        if not known or all(fit.oom_chance is None for fit in self.fits.values()):
            return []  # `_unavailable` says why
        sizes = " or ".join(map(units.size, known))
        unfit = sum(fit.unfit for fit in self.fits.values())
        unsure = sum(fit.unsure for fit in self.fits.values())
        unknown = sum(fit.oom_chance is None for fit in self.fits.values())
        remedy = "" if self.skipped else " (--skip-unfit leaves them out)"
        told = [
            f"{unfit} of {len(self.fits)} trials will not fit{remedy}" if unfit else "",
            f"{unsure} may not" if unsure else "",
            f"of {unknown} it is unknown" if unknown else "",
        ]
        return [f"a rank has {sizes}: " + ("; ".join(filter(None, told)) or "all trials fit")]

    def _time_lines(self, plan: Plan) -> list[str]:
        whole = self.expected.total(plan, self.skipped, self.done)
        reasons = [own.reason for own in self.expected.by_trial.values() if own.seconds is None]
        left = [trial_id for trial_id, repeat in plan.certain_runs if (trial_id, repeat) not in self.done]
        if whole is None and not left:
            return []
        if whole is None:
            return [f"expected time: unavailable: {reasons[0]}"] if reasons else []
        seconds, runs, hours = whole
        price = self.expected.price_per_gpu_hour
        cost = "" if price is None else f", cost {_between(hours.times(price), units.money)}"
        line = (
            f"expected: {units.counted(runs, 'run')} one after another {_between(seconds, units.seconds)}, "
            f"{_between(hours, units.number)} GPU-hours{cost}; {self.expected.origin} ({self._known_by()})"
        )
        skipped = sum(trial_id in self.skipped for trial_id in left)
        unknown = len(left) - runs - skipped
        fewest = plan.fewest_repeats
        beyond = f"not in it: runs beyond {fewest} a trial, which measure.target_ci may add"
        launchers = sorted({own.without_start_up for own in self.expected.by_trial.values()} - {""})
        return [
            line,
            *([f"not in it: start-up under {' and '.join(launchers)}, where none was measured"] if launchers else []),
            *([f"not in it: {skipped} runs that are skipped"] if skipped else []),
            *([beyond] if self.most_added(plan, fewest) else []),
            *([f"not in it: {unknown} runs, unavailable: {reasons[0]}"] if unknown and reasons else []),
        ]

    def most_added(self, plan: Plan, repeats: int) -> int:
        """Most runs that `measure.target_ci` may add to the first `repeats` of each trial."""
        trials = plan.record.trials.keys() - self.skipped
        rounds = range(repeats, plan.record.max_repeats or 0)
        return sum((trial_id, repeat) not in self.done for trial_id in trials for repeat in rounds)

    def _known_by(self) -> str:
        labels = [own.known_by for own in self.expected.by_trial.values() if own.seconds is not None]
        counted = [f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)]
        return f"{'trial' if len(labels) == 1 else 'trials'}: {', '.join(counted)}"

    def as_json(self, trial_id: str, trial: Trial) -> dict[str, Any]:
        """One trial's estimates for the JSON; unavailable values are null."""
        fit = self.fits.get(trial_id)
        fields: dict[str, Any] = {
            "memory_bytes": forecast_bytes(trial) if fit is None else fit.forecast_bytes,
            "memory_capacity_bytes": None if fit is None else fit.capacity_bytes,
            "oom_chance": None if fit is None else fit.oom_chance,
            "fits": None if fit is None or fit.oom_chance is None else not fit.unfit,
        }
        own = self.expected.by_trial.get(trial_id)
        hours = None if own is None or own.seconds is None else own.seconds.times(trial.world.size / 3600)
        return (
            fields
            | estimate_fields("expected_seconds", None if own is None else own.seconds)
            | estimate_fields("gpu_hours", hours)
            | estimate_fields("cost", self._cost(hours))
            | {"known_by": (own.known_by or None) if own is not None else None}
            | {"expected_reason": (own.reason or None) if own is not None else None}
        )

    def total_json(self, plan: Plan) -> dict[str, Any] | None:
        """Sums over all runs that are to be done; null where nothing is known of any."""
        whole = self.expected.total(plan, self.skipped, self.done)
        if whole is None:
            return None
        seconds, runs, hours = whole
        return (
            {"runs": runs, "origin": self.expected.origin}
            | estimate_fields("seconds", seconds)
            | estimate_fields("gpu_hours", hours)
            | estimate_fields("cost", self._cost(hours))
        )

    def _cost(self, hours: Estimate | None) -> Estimate | None:
        price = self.expected.price_per_gpu_hour
        return None if hours is None or price is None else hours.times(price)


NOTHING_KNOWN = PlanEstimate()


def buckets_note(trials: Mapping[str, Trial]) -> str:
    """A note where buckets at their default size are most of what a rank holds; empty elsewhere."""
    most, of_most = 0, None
    with_default = [
        trial
        for trial in trials.values()
        if "bucket_mib" in wrapper_facts(trial.train).options and trial.train.bucket_mib is None
    ]
    for trial in {_memory_key(trial): trial for trial in with_default}.values():
        parts = predicted.parts if (predicted := forecast(trial)) is not None else {}
        buckets = parts.get("buckets", 0)
        if 2 * buckets > sum(parts.values()):
            most, of_most = max((most, of_most), (buckets, trial.train), key=lambda size_of: size_of[0])
    if of_most is None:
        return ""
    size, zero = units.size(most), (of_most.deepspeed_config or {}).get("zero_optimization")
    title = wrapper_facts(of_most).title or of_most.wrapper
    if isinstance(zero, dict) and zero.get("reduce_bucket_size", "auto") != "auto":
        return f"up to {size} of it are {title}'s buckets: make reduce_bucket_size smaller in the DeepSpeed file"
    return f"up to {size} of it are {title}'s buckets at their default size: set train.bucket_mib"


def _pixels(size: int | None) -> str:
    return "none" if size is None else f"{size:,}"


def _between(between: Estimate, form: Callable[[float], str]) -> str:
    low, high = between.ends
    return f"{form(between.value)} ({form(low)} to {form(high)})"
