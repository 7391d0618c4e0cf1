"""Estimates of a plan's trials before they run: memory and whether it suffices, time, GPU-hours, money."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from vitscale.runner.expectation import ROUGHLY, Expectations, Expected, ExpectedTotal
from vitscale.runner.planning import Plan
from vitscale.schedulers import LocalHost
from vitscale.trial.trial import DeviceName, TrainSpec, Trial

_MARGIN_BYTES = 4 * 10**9
"""Bytes that must be free beside twice the forecast for a trial to fit for certain."""
_WILL_NOT_FIT_CHANCE = 0.5
"""Chance of running out of memory from which a trial is said not to fit."""
_MAY_NOT_FIT_CHANCE = 0.05
"""Chance of running out of memory from which a trial is said perhaps not to fit."""
_LARGEST_IMAGE_SIZE = 8192
"""Pixels a side up to which sizes are looked at."""


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
        return self.oom_chance is not None and self.oom_chance >= _WILL_NOT_FIT_CHANCE

    @property
    def unsure(self) -> bool:
        """Whether it probably fits, but may not."""
        return self.oom_chance is not None and _MAY_NOT_FIT_CHANCE <= self.oom_chance < _WILL_NOT_FIT_CHANCE

    @property
    def reason(self) -> str:
        """Why it is unfit, for a record."""
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
    """
    capacities = _RankCapacities(plan, capacity_bytes)
    fit_by_memory_key: dict[str, MemoryFit] = {}  # a forecast takes long, and many trials share one
    fits = {}
    for trial_id, trial in plan.record.trials.items():
        key = _memory_key(trial)
        if key not in fit_by_memory_key:
            fit_by_memory_key[key] = _fit(trial, capacities.of_trial(trial))
        fits[trial_id] = fit_by_memory_key[key]
    return fits


class _DeviceUse(NamedTuple):
    """Trials with the same use of devices have the same memory for a rank."""

    device: DeviceName
    ranks_per_node: int


class _RankCapacities:
    """The memory of one rank's device, in each trial of a plan; worked out once for each use of devices."""

    def __init__(self, plan: Plan, capacity_bytes: int | None) -> None:
        """`capacity_bytes`: the same for all trials; None: by the plan's hosts."""
        self._plan = plan
        self._capacity_of_all = capacity_bytes
        self._by_use: dict[_DeviceUse, int | None] = {}

    def of_trial(self, trial: Trial) -> int | None:
        """Return the bytes of memory that a rank of the trial has; None where they are unknown."""
        if self._capacity_of_all is not None:
            return self._capacity_of_all
        use = _DeviceUse(trial.train.device, trial.world.ranks_per_node)
        if use not in self._by_use:
            self._by_use[use] = _capacity_on_hosts(self._plan, trial)
        return self._by_use[use]


def _memory_key(trial: Trial) -> str:
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
    capacity_bytes: int | None


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
            pixels = _largest_image(trial, group.capacity_bytes, checkpointing=False)
            pixels_with_checkpointing = _largest_image(trial, group.capacity_bytes, checkpointing=True)
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
        memory_key = _memory_key(_with_image_size(trial, 1, checkpointing=False))
        ids_by_group.setdefault(_ImageGroup(memory_key, fit.capacity_bytes), []).append(trial_id)
    return ids_by_group


def _largest_image(trial: Trial, capacity_bytes: int | None, *, checkpointing: bool) -> int | None:
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
        if _fit(sized_trial, capacity_bytes).unfit:
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


def _fit(trial: Trial, capacity_bytes: int | None) -> MemoryFit:
    """Return whether a trial fits. Args: capacity_bytes: memory of one rank's device; None: unknown."""
    forecast = forecast_bytes(trial)
    if forecast is None or capacity_bytes is None:
        return MemoryFit(forecast, capacity_bytes, oom_chance=None)
    if 2 * forecast + _MARGIN_BYTES < capacity_bytes:
        return MemoryFit(forecast, capacity_bytes, oom_chance=0.0)
    chance = oom_chance(forecast, capacity_bytes, trial.train.device)
    return MemoryFit(forecast, capacity_bytes, oom_chance=float(chance))


def _capacity_on_hosts(plan: Plan, trial: Trial) -> int | None:
    """Return the bytes of memory that a rank of the trial has; None where the plan's hosts do not say."""
    if trial.train.device == "cuda":
        try:
            gpus = plan.scheduler.machine().gpus
        except RequestError:
            return None
        return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)
    if not isinstance(plan.scheduler, LocalHost) or plan.scheduler.machine() != this_machine():
        return None  # of hosts elsewhere, and of a machine that [node] describes, the memory is not known
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // trial.world.ranks_per_node


_MOST_CONFIGURATIONS = 6
"""Most configurations whose largest image is shown."""


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
        """Return one trial's cells, by column; only columns in which some trial has a value."""
        fit = self.fits.get(trial_id)
        # A dash where the model must be built to know.
        cells = {"memory": units.size(forecast_bytes(trial) if fit is None else fit.forecast_bytes)}
        if self._shows_fits:
            cells["fits"] = _fits_word(fit)
        if self._shows_times:
            cells |= self._time_cells(self.expected.by_trial[trial_id], ranks=trial.world.size)
        return cells

    def _time_cells(self, expected: Expected, *, ranks: int) -> dict[str, str]:
        """Return the cells of time, GPU-hours and, where a price is known, cost."""
        price = self.expected.price_per_gpu_hour
        if expected.seconds is None:
            columns = ["time", "GPU-h"] if price is None else ["time", "GPU-h", "cost"]
            return dict.fromkeys(columns, units.UNKNOWN)
        about = "~" if expected.known_by == ROUGHLY else ""
        seconds = expected.seconds.value
        hours = seconds * ranks / 3600
        cells = {"time": about + units.seconds(seconds), "GPU-h": about + units.number(hours)}
        if price is not None:
            cells["cost"] = about + units.money(hours * price)
        return cells

    def lines(self, plan: Plan) -> list[str]:
        """Return lines on what all runs together take, and whether memory suffices; the most important ones first."""
        return [
            *self._time_lines(plan),
            *self._memory_lines(),
            *self._largest_lines(plan),
            *self._unavailable_lines(plan),
        ]

    def _largest_lines(self, plan: Plan) -> list[str]:
        """Return a line on each configuration whose largest image size is worked out, up to `_MOST_CONFIGURATIONS`."""
        largest = largest_images(plan.record.trials, self.fits)
        lines = [
            f"largest image_size that fits, {trial_name(group.trial)}, micro-batch {group.trial.train.micro_batch}: "
            f"{_pixels_in_words(group.pixels)}; with activation checkpointing "
            f"{_pixels_in_words(group.pixels_with_checkpointing)}"
            for group in largest[:_MOST_CONFIGURATIONS]
        ]
        omitted = len(largest) - len(lines)
        if omitted:
            lines.append(f"(and of {omitted} more configurations: --json has them)")
        return lines

    def _unavailable_lines(self, plan: Plan) -> list[str]:
        """Return a line on the trials whose memory arithmetic does not give, and why."""
        forecast_ids = {trial_id for trial_id, fit in self.fits.items() if fit.forecast_bytes is not None}
        without_forecast = [trial for trial_id, trial in plan.record.trials.items() if trial_id not in forecast_ids]
        reasons = [reason for reason in map(unavailable, without_forecast) if reason]
        if not reasons:
            return []
        trials = f"{len(reasons)} of {len(plan.record.trials)} trials"
        return [f"memory of {trials}: unavailable: {'; '.join(dict.fromkeys(reasons))}"]

    def largest_json(self, plan: Plan) -> list[dict[str, Any]]:
        """Return what `largest_images` finds, for the JSON; null where no size fits."""
        return [
            {
                "trials": list(group.trial_ids),
                "largest_image_size": group.pixels,
                "largest_image_size_with_activation_checkpointing": group.pixels_with_checkpointing,
            }
            for group in largest_images(plan.record.trials, self.fits)
        ]

    def _memory_lines(self) -> list[str]:
        """Return a line on how many trials fit in a rank's memory; none where that is unknown of all."""
        capacities = {fit.capacity_bytes for fit in self.fits.values()}
        known_capacities = sorted(size for size in capacities if size is not None)
        if not known_capacities or all(fit.oom_chance is None for fit in self.fits.values()):
            return []  # `_unavailable_lines` says why
        sizes = " or ".join(map(units.size, known_capacities))
        unfit = sum(fit.unfit for fit in self.fits.values())
        unsure = sum(fit.unsure for fit in self.fits.values())
        unknown = sum(fit.oom_chance is None for fit in self.fits.values())
        clauses = []
        if unfit:
            remedy = "" if self.skipped else " (--skip-unfit leaves them out)"
            clauses.append(f"{unfit} of {len(self.fits)} trials will not fit{remedy}")
        if unsure:
            clauses.append(f"{unsure} may not")
        if unknown:
            clauses.append(f"of {unknown} it is unknown")
        return [f"a rank has {sizes}: " + ("; ".join(clauses) or "all trials fit")]

    def _time_lines(self, plan: Plan) -> list[str]:
        """Return lines on the time of all runs that are to be done, and on what it does not include."""
        total = self.expected.total(plan, self.skipped, self.done)
        reasons = [expected.reason for expected in self.expected.by_trial.values() if expected.seconds is None]
        remaining = [run for run in plan.certain_runs if run not in self.done]
        if total is None:
            return [f"expected time: unavailable: {reasons[0]}"] if remaining and reasons else []
        lines = [self._total_line(total)]
        launchers = sorted({expected.without_start_up for expected in self.expected.by_trial.values()} - {""})
        if launchers:
            lines.append(f"not in it: start-up under {' and '.join(launchers)}, where none was measured")
        skipped = sum(run.trial_id in self.skipped for run in remaining)
        if skipped:
            lines.append(f"not in it: {skipped} runs that are skipped")
        if self.most_added(plan, plan.fewest_repeats):
            lines.append(f"not in it: runs beyond {plan.fewest_repeats} a trial, which measure.target_ci may add")
        unknown = len(remaining) - total.runs - skipped
        if unknown and reasons:
            lines.append(f"not in it: {unknown} runs, unavailable: {reasons[0]}")
        return lines

    def _total_line(self, total: ExpectedTotal) -> str:
        """Return "expected: 6 runs one after another 2.00 h (1.80 h to 2.30 h), ..."."""
        price = self.expected.price_per_gpu_hour
        cost = ""
        if price is not None:
            cost = f", cost {_with_interval(total.gpu_hours.times(price), units.money)}"
        runs = units.counted(total.runs, "run")
        time = _with_interval(total.seconds, units.seconds)
        gpu_hours = _with_interval(total.gpu_hours, units.number)
        return (
            f"expected: {runs} one after another {time}, {gpu_hours} GPU-hours{cost}; {self.expected.origin} "
            f"({self._known_by()})"
        )

    def most_added(self, plan: Plan, repeats: int) -> int:
        """Return the most runs that `measure.target_ci` may add to the first `repeats` of each trial."""
        added_repeats = range(repeats, plan.record.max_repeats or 0)
        runs = 0
        for trial_id in plan.record.trials.keys() - self.skipped:
            runs += sum((trial_id, repeat) not in self.done for repeat in added_repeats)
        return runs

    def _known_by(self) -> str:
        """Return "trials: 2 measured, 1 extrapolated"."""
        labels = [expected.known_by for expected in self.expected.by_trial.values() if expected.seconds is not None]
        counts = [f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)]
        noun = "trial" if len(labels) == 1 else "trials"
        return f"{noun}: {', '.join(counts)}"

    def as_json(self, trial_id: str, trial: Trial) -> dict[str, Any]:
        """Return one trial's estimates for the JSON; unavailable values are null."""
        fields = self._memory_fields(trial_id, trial)
        expected = self.expected.by_trial.get(trial_id) or Expected(None, "")
        hours = None
        if expected.seconds is not None:
            hours = expected.seconds.times(trial.world.size / 3600)
        return (
            fields
            | estimate_fields("expected_seconds", expected.seconds)
            | estimate_fields("gpu_hours", hours)
            | estimate_fields("cost", self._cost(hours))
            | {"known_by": expected.known_by or None}
            | {"expected_reason": expected.reason or None}
        )

    def _memory_fields(self, trial_id: str, trial: Trial) -> dict[str, Any]:
        """Return one trial's memory for the JSON; unavailable values are null."""
        fit = self.fits.get(trial_id)
        if fit is None:
            fit = MemoryFit(forecast_bytes(trial), capacity_bytes=None, oom_chance=None)
        return {
            "memory_bytes": fit.forecast_bytes,
            "memory_capacity_bytes": fit.capacity_bytes,
            "oom_chance": fit.oom_chance,
            "fits": None if fit.oom_chance is None else not fit.unfit,
        }

    def total_json(self, plan: Plan) -> dict[str, Any] | None:
        """Return sums over all runs that are to be done, for the JSON; null where nothing is known of any."""
        total = self.expected.total(plan, self.skipped, self.done)
        if total is None:
            return None
        return (
            {"runs": total.runs, "origin": self.expected.origin}
            | estimate_fields("seconds", total.seconds)
            | estimate_fields("gpu_hours", total.gpu_hours)
            | estimate_fields("cost", self._cost(total.gpu_hours))
        )

    def _cost(self, hours: Estimate | None) -> Estimate | None:
        """Return the price of so many GPU-hours; None where these or the price of one are unknown."""
        price = self.expected.price_per_gpu_hour
        if hours is None or price is None:
            return None
        return hours.times(price)


NOTHING_KNOWN = PlanEstimate()


class _LargestBuckets(NamedTuple):
    """The largest buckets at their default size that are most of what a rank holds.

    A bucket is the buffer in which an engine collects gradients or weights before it sends them.
    """

    bytes: int
    train: TrainSpec
    """The training that has them."""


def buckets_note(trials: Mapping[str, Trial]) -> str:
    """Return a note where buckets at their default size are most of what a rank holds; empty elsewhere."""
    largest = _largest_default_buckets(trials)
    if largest is None:
        return ""
    size = units.size(largest.bytes)
    title = wrapper_facts(largest.train).title or largest.train.wrapper
    zero = (largest.train.deepspeed_config or {}).get("zero_optimization")
    if isinstance(zero, dict) and zero.get("reduce_bucket_size", "auto") != "auto":
        return f"up to {size} of it are {title}'s buckets: make reduce_bucket_size smaller in the DeepSpeed file"
    return f"up to {size} of it are {title}'s buckets at their default size: set train.bucket_mib"


def _largest_default_buckets(trials: Mapping[str, Trial]) -> _LargestBuckets | None:
    """Return the largest buckets at their default size that are more than half of what a rank holds.

    None where there are none.
    """
    with_default = [
        trial
        for trial in trials.values()
        if "bucket_mib" in wrapper_facts(trial.train).options and trial.train.bucket_mib is None
    ]
    largest: _LargestBuckets | None = None
    for trial in {_memory_key(trial): trial for trial in with_default}.values():
        prediction = forecast(trial)
        parts = prediction.parts if prediction is not None else {}
        buckets = parts.get("buckets", 0)
        is_most = 2 * buckets > sum(parts.values())
        if is_most and (largest is None or buckets > largest.bytes):
            largest = _LargestBuckets(buckets, trial.train)
    return largest


def _fits_word(fit: MemoryFit | None) -> str:
    """Return "yes", "maybe" or "no"; a dash where it is unknown."""
    if fit is None or fit.oom_chance is None:
        return units.UNKNOWN
    if fit.unfit:
        return "no"
    return "maybe" if fit.unsure else "yes"


def _pixels_in_words(size: int | None) -> str:
    """Return "1,024"; "none" where no size fits."""
    return "none" if size is None else f"{size:,}"


def _with_interval(estimate: Estimate, in_words: Callable[[float], str]) -> str:
    """Return the value and, in brackets, the ends of its interval: "2.00 h (1.80 h to 2.30 h)"."""
    low, high = estimate.ends
    return f"{in_words(estimate.value)} ({in_words(low)} to {in_words(high)})"
