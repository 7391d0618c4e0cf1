"""Estimates of a plan's trials before they run: memory and whether it suffices, time, GPU-hours, money."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from vitscale.analysis.scaling import trial_name
from vitscale.engines import wrapper_facts
from vitscale.prediction.memory.forecast import forecast, forecast_bytes, unavailable
from vitscale.present import units
from vitscale.present.data import estimate_fields
from vitscale.present.estimate import Estimate
from vitscale.runner.expectation import ROUGHLY, Expectations, Expected, ExpectedTotal
from vitscale.runner.memory_fits import MOST_BATCH_IMAGES, MemoryFit, largest_images, memory_key
from vitscale.runner.planning import Plan
from vitscale.trial.trial import TrainSpec, Trial

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
    def shows_largest_batches(self) -> bool:
        """Whether a column says the largest micro-batch that fits."""
        return any(fit.largest is not None for fit in self.fits.values())

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
        if self.shows_largest_batches:
            cells["fits up to"] = _largest_batches_in_words(fit)
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
            *self._host_memory_lines(),
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
        if not any(fit.is_known for fit in self.fits.values()):
            return []  # `_host_memory_lines` and `_unavailable_lines` say why
        sizes = []
        rank_sizes = _sizes_in_words([fit.capacity_bytes for fit in self.fits.values()])
        if rank_sizes:
            sizes.append(f"a rank has {rank_sizes}")
        hosts = [fit.host for fit in self.fits.values() if fit.host is not None]
        host_sizes = _sizes_in_words([host.capacity_bytes for host in hosts])
        if host_sizes:
            sizes.append(f"a host has {host_sizes} for what its ranks offload")
        unfit = sum(fit.unfit for fit in self.fits.values())
        unsure = sum(fit.unsure for fit in self.fits.values())
        unknown = sum(not fit.is_known for fit in self.fits.values())
        clauses = []
        if unfit:
            remedy = "" if self.skipped else " (--skip-unfit leaves them out)"
            clauses.append(f"{unfit} of {len(self.fits)} trials will not fit{remedy}")
        if unsure:
            clauses.append(f"{unsure} may not")
        if unknown:
            clauses.append(f"of {unknown} it is unknown")
        return [f"{', '.join(sizes)}: " + ("; ".join(clauses) or "all trials fit")]

    def _host_memory_lines(self) -> list[str]:
        """Return a line on the trials that offload to a host whose memory nobody states; none where there are none."""
        lacking = [fit.host for fit in self.fits.values() if fit.host is not None and fit.lacks_host_memory]
        if not lacking:
            return []
        most = max(host.offloaded_bytes for host in lacking)
        trials = f"{len(lacking)} of {len(self.fits)} trials"
        return [
            f"whether the host's memory suffices for {trials}: unavailable: they offload up to {units.size(most)} a "
            "host, and nothing states how much it has: write memory_gb under [node]"
        ]

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
        largest = fit.largest
        return {
            "memory_bytes": fit.forecast_bytes,
            "memory_reason": None if fit.forecast_bytes is not None else unavailable(trial) or None,
            "memory_capacity_bytes": fit.capacity_bytes,
            "host_memory_bytes": None if fit.host is None else fit.host.offloaded_bytes,
            "host_memory_capacity_bytes": None if fit.host is None else fit.host.capacity_bytes,
            "oom_chance": fit.oom_chance,
            "largest_micro_batch": None if largest is None else largest.kept,
            "largest_micro_batch_with_activation_checkpointing": None if largest is None else largest.recomputed,
            "host_oom_chance": None if fit.host is None else fit.host.oom_chance,
            "fits": not fit.unfit if fit.is_known else None,
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
    for trial in {memory_key(trial): trial for trial in with_default}.values():
        prediction = forecast(trial)
        parts = prediction.parts if prediction is not None else {}
        buckets = parts.get("buckets", 0)
        is_most = 2 * buckets > sum(parts.values())
        if is_most and (largest is None or buckets > largest.bytes):
            largest = _LargestBuckets(buckets, trial.train)
    return largest


def _sizes_in_words(sizes: Sequence[int | None]) -> str:
    """Return the different sizes that are known, the smallest first: "80 GB or 141 GB"; empty where none is."""
    known_sizes = sorted({size for size in sizes if size is not None})
    return " or ".join(map(units.size, known_sizes))


def _fits_word(fit: MemoryFit | None) -> str:
    """Return "yes", "maybe" or "no"; a dash where it is unknown."""
    if fit is None:
        return units.UNKNOWN
    if fit.unfit:
        return "no"
    if fit.unsure:
        return "maybe"
    return "yes" if fit.is_known else units.UNKNOWN


def _largest_batches_in_words(fit: MemoryFit | None) -> str:
    """Return the largest micro-batch that fits and, in brackets, that with checkpointing: "96 (410)".

    A dash stands in either place for what is unknown.
    """
    largest = None if fit is None else fit.largest
    if largest is None:
        return units.UNKNOWN
    return f"{_batch_in_words(largest.kept)} ({_batch_in_words(largest.recomputed)})"


def _batch_in_words(images: int | None) -> str:
    """Return "1,024"; "none" where not one image fits, "≥ 65,536" where more may fit; a dash where it is unknown."""
    if images is None:
        return units.UNKNOWN
    if images >= MOST_BATCH_IMAGES:
        return f"≥ {images:,}"
    return f"{images:,}" if images else "none"


def _pixels_in_words(size: int | None) -> str:
    """Return "1,024"; "none" where no size fits."""
    return "none" if size is None else f"{size:,}"


def _with_interval(estimate: Estimate, in_words: Callable[[float], str]) -> str:
    """Return the value and, in brackets, the ends of its interval: "2.00 h (1.80 h to 2.30 h)"."""
    low, high = estimate.ends
    return f"{in_words(estimate.value)} ({in_words(low)} to {in_words(high)})"
