"""Forecasts of every candidate, as arrays: time, efficiency, memory; and which candidates may be advised.

    candidate    a configuration that could be trained: engine, ranks, micro-batch and so on
    series       a measured scaling curve, from which the forecasts of a candidate are worked out
    contender    a candidate that may be advised: predictable, fits in memory, close to the fastest of its kind

A rough forecast of all candidates finds the contenders; only these get an exact one. N candidates and C contenders have
arrays of shape (N,) and (C,). An array of shape (3, N) has three rows: the expected value, and the lower and the upper
end of its 90 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vitscale.advice.candidates import Candidates, as_configured
from vitscale.advice.comparable_series import ComparableSeries
from vitscale.advice.request import NoiseScale, Work
from vitscale.base import forks
from vitscale.base.arrays import BoolArray, FloatArray
from vitscale.prediction.configurations import Candidate, Evaluated, column, gathered
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.finishing import Interruptions, with_start_up
from vitscale.prediction.layouts import whole_steps
from vitscale.prediction.results import Label
from vitscale.prediction.start_up import StartUpForecast, launcher_of, start_up
from vitscale.trial.trial import Trial, World

Forecaster = Callable[[str, Sequence[Candidate], bool], Evaluated]
"""forecaster(series, candidates, is_rough) -> the forecasts of the candidates from that series, in the same order.

A rough forecast is made of fewer random draws, and is the one that has the memory of the candidates.
"""

MOST_OOM_CHANCE = 0.05
"""Chance of not fitting in memory above which a candidate is dropped."""


@dataclass(frozen=True)
class ForecastTable:
    """The forecasts of N candidates. Every column is in the order of `candidates`; NaN where it is unavailable."""

    candidates: tuple[Candidate, ...]
    series: tuple[str, ...]
    """The measured series that each was worked out from."""
    labels: tuple[Label, ...]
    time: FloatArray
    """Seconds of the whole work with start-up, (3, N): expected, soonest and latest end of a future run."""
    training: FloatArray
    """Seconds of the whole work without start-up, (3, N). Its interval leaves out that runs have more or fewer failures
    than expected. The knee is found by these seconds, and measurements can narrow their interval."""
    startups: tuple[StartUpForecast | None, ...]
    """Start-up of one run; None where it is unknown, and then it is not in `time`."""
    efficiency: FloatArray
    """Efficiency against one rank, (3, N): expected, and the ends of the interval of the mean."""
    same_loss_seconds: FloatArray
    memory_bytes: FloatArray
    oom_chance: FloatArray
    host_memory_bytes: FloatArray
    """Bytes that all ranks of a host offload to its memory together; 0 where none are offloaded."""
    host_oom_chance: FloatArray
    gpus: FloatArray
    price_per_gpu_hour: FloatArray
    """1 where no price is known: then costs are in GPU-hours."""
    global_batch: FloatArray
    keeps_batch: BoolArray
    large_batch: BoolArray
    """Whether it is large-batch training: see `_is_large_batch`."""
    measured: BoolArray
    """Whether its engine was measured."""
    known: BoolArray
    """Whether its time could be predicted."""
    fits: BoolArray
    """Whether it fits in memory. True where that is unknown, but for ranks that share a model: they must be known to
    fit."""
    needless: BoolArray
    """Whether it recomputes activations though it would fit without; see `_needless_checkpointing`."""
    contends: BoolArray
    """Whether it may be advised. Only these contenders have a time, a start-up and an efficiency."""
    memory_known: bool
    """Whether the memory of any candidate could be predicted."""
    host_memory_known: bool
    """Whether the hosts' memory is known, or no candidate offloads anything to it."""

    @property
    def seconds(self) -> FloatArray:
        """Expected time of the whole work."""
        expected: FloatArray = self.time[0]
        return expected


def forecast_table(
    comparable: ComparableSeries,
    candidates: Candidates,
    forecaster: Forecaster,
    work: Work,
    noise: NoiseScale,
    study_batch: int,
    interrupted: Mapping[str, Interruptions] | None = None,
    price_per_gpu_hour: float | None = None,
) -> ForecastTable:
    """Return the forecast of every candidate, from the measured series nearest to it.

    All candidates get a rough forecast. Only contenders get an exact one: those that no other candidate of their engine
    and rank count clearly beats.

    Args:
        comparable: the series asked for, and those comparable with it.
        candidates: the configurations to forecast.
        forecaster: makes the forecasts.
        work: the work to be done.
        noise: the gradient noise scale.
        study_batch: the global batch with which `same_loss_seconds` compares.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.
        price_per_gpu_hour: the price of candidates that are not on an instance with a price of its own.
    """
    combinations = candidates.combinations
    series = _nearest_series(comparable, combinations)
    forecasts = _Forecasts(combinations, series, forecaster)
    rough_forecast = forecasts.at_indices(range(len(combinations)), rough=True)
    rough = _rough_forecast_of_all(comparable, candidates, rough_forecast, work, noise, study_batch)

    indices = np.flatnonzero(rough.contends)
    contenders = [combinations[index] for index in indices]
    exact = forecasts.at_indices([int(index) for index in indices], rough=False)
    startups = _start_ups(comparable, contenders)
    epoch_seconds = rough.steps[indices] * np.stack([exact.step.value, exact.step.future_low, exact.step.future_high])
    interruptions = [(interrupted or {}).get(series[index]) for index in indices]
    times = _run_times(contenders, work.epochs * epoch_seconds, startups, interruptions)
    startup_seconds = np.array([_startup_seconds(startup) for startup in startups])
    expected_training = times.training[0]
    same_loss_seconds = startup_seconds + expected_training * rough.images_to_same_loss[indices]

    def for_all_candidates(contender_values: FloatArray) -> FloatArray:
        """Return values of all candidates, (..., N), from those of contenders, (..., C): NaN for the others."""
        values = np.full((*contender_values.shape[:-1], len(combinations)), np.nan)
        values[..., indices] = contender_values
        return values

    labels = list(rough_forecast.labels)
    startup_by_candidate: list[StartUpForecast | None] = [None] * len(combinations)
    for index, label, startup in zip(indices, exact.labels, startups, strict=True):
        labels[index] = label
        startup_by_candidate[index] = startup
    return ForecastTable(
        candidates=combinations,
        series=_origin_series(comparable, combinations, series),
        labels=tuple(labels),
        time=for_all_candidates(times.seconds),
        training=for_all_candidates(times.training),
        startups=tuple(startup_by_candidate),
        efficiency=for_all_candidates(np.stack([exact.speed.value, exact.speed.low, exact.speed.high])),
        same_loss_seconds=for_all_candidates(same_loss_seconds),
        memory_bytes=rough_forecast.memory_bytes,
        oom_chance=rough_forecast.oom_chance,
        host_memory_bytes=rough_forecast.host_memory_bytes,
        host_oom_chance=rough_forecast.host_oom_chance,
        gpus=column(combinations, "gpus"),
        price_per_gpu_hour=np.array([_price_per_gpu_hour(candidate, price_per_gpu_hour) for candidate in combinations]),
        global_batch=rough.global_batch,
        keeps_batch=rough.keeps_batch,
        large_batch=rough.large_batch,
        measured=rough.measured,
        known=rough.known,
        fits=rough.fits,
        needless=rough.needless,
        contends=rough.contends,
        memory_known=bool(np.isfinite(rough_forecast.oom_chance).any()),
        host_memory_known=_is_host_memory_known(rough_forecast),
    )


@dataclass(frozen=True)
class _RoughForecast:
    """Which candidates contend by their rough forecast, and why: arrays of shape (N,).

    `ForecastTable` describes the fields that it has too.
    """

    steps: FloatArray
    """Steps of an epoch."""
    global_batch: FloatArray
    images_to_same_loss: FloatArray
    """Images that it needs for the study's loss, over those that the study needs; NaN where unknown."""
    keeps_batch: BoolArray
    large_batch: BoolArray
    measured: BoolArray
    known: BoolArray
    fits: BoolArray
    needless: BoolArray
    contends: BoolArray


def _rough_forecast_of_all(
    comparable: ComparableSeries,
    candidates: Candidates,
    forecast: Evaluated,
    work: Work,
    noise: NoiseScale,
    study_batch: int,
) -> _RoughForecast:
    """Find the candidates that contend.

    Args:
        comparable: as for `forecast_table`, like the arguments that are not named here.
        candidates: the configurations to forecast.
        forecast: their rough forecast.
        work: the work to be done.
        noise: the gradient noise scale.
        study_batch: the global batch of the study that the loss is compared with.
    """
    combinations = candidates.combinations
    batch = column(combinations, "global_batch")
    micro_batch = column(combinations, "micro_batch")
    steps = whole_steps(np.full(len(combinations), float(work.images)), batch, micro_batch, work.drop_last)
    keeps_batch = np.array(candidates.keeps_batch, dtype=bool)
    large_batch = _is_large_batch(work.images / batch, batch, study_batch, noise)
    to_same_loss = images_to_same_loss(batch, study_batch, noise)
    epoch_seconds = steps * forecast.step.value
    known = np.isfinite(epoch_seconds)
    # Models are shared so that they fit: where the memory of a rank is unknown, they are not advised.
    shares_model = np.array([candidate.parallel.ranks_per_model > 1 for candidate in combinations], dtype=bool)
    is_shared_of_unknown_size = shares_model & np.isnan(forecast.memory_bytes)
    # False where a chance is NaN.
    is_too_large = (forecast.oom_chance > MOST_OOM_CHANCE) | (forecast.host_oom_chance > MOST_OOM_CHANCE)
    fits = ~is_too_large & ~is_shared_of_unknown_size
    needless = _needless_checkpointing(
        combinations, forecast.oom_chance, comparable.trial.train.activation_checkpointing
    )
    measured = np.array([comparable.has_trained(candidate) for candidate in combinations], dtype=bool)
    kinds = [
        (*_sharding_of(candidate), candidate.gpus, keeps, is_large, candidate.instance)
        for candidate, keeps, is_large in zip(combinations, keeps_batch.tolist(), large_batch.tolist(), strict=True)
    ]
    # Of an unmeasured engine only the best contends: a hint, not an answer.
    times_the_best = np.where(measured, _MOST_TIMES_THE_BEST, 1.0)
    contends = _contends(
        known & fits & ~needless,
        times_the_best,
        kinds,
        epoch_seconds,
        epoch_seconds * np.nan_to_num(to_same_loss, nan=1.0),
    )
    return _RoughForecast(
        steps=steps,
        global_batch=batch,
        images_to_same_loss=to_same_loss,
        keeps_batch=keeps_batch,
        large_batch=large_batch,
        measured=measured,
        known=known,
        fits=fits,
        needless=needless,
        contends=contends,
    )


def _is_host_memory_known(forecast: Evaluated) -> bool:
    """Whether each candidate that offloads to a host has a chance that the host's memory does not suffice."""
    offloads = forecast.host_memory_bytes > 0  # False where the bytes are NaN
    return not bool((offloads & np.isnan(forecast.host_oom_chance)).any())


def _sharding_of(candidate: Candidate) -> tuple[Hashable, ...]:
    """Return the engine variant, its replicas, and the ranks that share a second shard: candidates that differ in any
    of them compete with others of their own only."""
    return (candidate.variant, candidate.parallel.replicate, candidate.second_shard_ranks)


def _nearest_series(comparable: ComparableSeries, combinations: Sequence[Candidate]) -> list[str]:
    """Return for each candidate the name of the series that it is worked out from."""
    name_by_settings: dict[tuple[object, ...], str] = {}  # a search for each of many thousand candidates takes long
    names: list[str] = []
    for candidate in combinations:
        # All that decides the nearest series.
        settings = (candidate.variant, candidate.micro_batch, candidate.parallel, candidate.second_shard_ranks)
        if settings not in name_by_settings:
            name_by_settings[settings] = comparable.nearest(candidate).name
        names.append(name_by_settings[settings])
    return names


def _origin_series(
    comparable: ComparableSeries, combinations: Sequence[Candidate], nearest: Sequence[str]
) -> tuple[str, ...]:
    """Return for each candidate the name of the series that measured it, else of the one nearest to it.

    Args:
        comparable: the measured series.
        combinations: the candidates.
        nearest: the name of the nearest series of each.
    """
    names = []
    for candidate, nearest_name in zip(combinations, nearest, strict=True):
        measured_series = comparable.series_by_candidate.get(candidate)
        names.append(nearest_name if measured_series is None else measured_series.name)
    return tuple(names)


def _price_per_gpu_hour(candidate: Candidate, price_given: float | None) -> float:
    """Return the price of the candidate's instance, else the one that was given, else 1."""
    if candidate.instance is not None:
        return candidate.instance.price_per_gpu_hour
    return price_given or 1.0


@dataclass(frozen=True)
class _Forecasts:
    """Makes forecasts of candidates: one call of `forecaster` for all that are worked out from the same series."""

    combinations: Sequence[Candidate]
    series: Sequence[str]
    """The series that each candidate is worked out from."""
    forecaster: Forecaster

    def at_indices(self, indices: Sequence[int], *, rough: bool) -> Evaluated:
        """Return the forecasts of the candidates at these positions of `combinations`, in the order of `indices`."""
        indices_by_series: dict[str, list[int]] = {}
        for index in indices:
            indices_by_series.setdefault(self.series[index], []).append(index)

        def forecast_series(name: str) -> tuple[list[int], Evaluated]:
            members = indices_by_series[name]
            return members, self.forecaster(name, [self.combinations[index] for index in members], rough)

        return gathered(forks.spread(forecast_series, list(indices_by_series), fewest=_FEWEST_SERIES_FOR_FORKS))


class _RunTimes(NamedTuple):
    """Seconds of the whole work of C contenders, (3, C): expected, soonest and latest end of a future run."""

    seconds: FloatArray
    """With start-up, and with failures that may be more or fewer than expected."""
    training: FloatArray
    """Without start-up, and with the expected number of failures in all three rows."""


class _RunSeconds(NamedTuple):
    """One column of `_RunTimes`: the seconds of one candidate."""

    expected: float
    soonest: float
    """Lower end of the 90 % interval of a future run."""
    latest: float
    """Upper end of it."""


def _run_times(
    candidates: Sequence[Candidate],
    step_seconds: FloatArray,
    startups: Sequence[StartUpForecast | None],
    interruptions: Sequence[Interruptions | None],
) -> _RunTimes:
    """Return the times of C candidates.

    Args:
        candidates: the candidates.
        step_seconds: seconds of all steps of the work, (3, C).
        startups: the start-up of each; None where it is unknown, and then it is left out of the time.
        interruptions: the failures and checkpoints of each; None where they are left out of the time.
    """
    training = np.full((3, len(candidates)), np.nan)
    seconds = np.full((3, len(candidates)), np.nan)
    for index, (candidate, startup) in enumerate(zip(candidates, startups, strict=True)):
        steps = _RunSeconds(*map(float, step_seconds[:, index]))
        interruptions_of_candidate = interruptions[index]
        if interruptions_of_candidate is None:
            training[:, index] = steps
            without_start_up = steps
        else:
            job = _InterruptedJob(candidate, interruptions_of_candidate, _startup_seconds(startup))
            training[:, index] = job.with_expected_failures(steps)
            without_start_up = job.with_varying_failures(steps)
        seconds[:, index] = with_start_up(startup.seconds if startup else None, *without_start_up)
    return _RunTimes(seconds, training)


class _InterruptedJob(NamedTuple):
    """A candidate whose work is interrupted by checkpoints and by failures of hosts."""

    candidate: Candidate
    interruptions: Interruptions
    restart_seconds: float
    """The start-up after each failure."""

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return max(1, self.candidate.gpus // self.candidate.ranks_per_node)

    def with_expected_failures(self, steps: _RunSeconds) -> _RunSeconds:
        """Return each of the three times with the checkpoints and failures that are expected in so much work."""
        walls = [self.interruptions.wall(seconds, self.nodes, self.restart_seconds) for seconds in steps]
        return _RunSeconds(*(wall.wall_seconds for wall in walls))

    def with_varying_failures(self, steps: _RunSeconds) -> _RunSeconds:
        """Return the same with an interval that also holds how many failures one run has."""
        finish, soonest, latest = self.interruptions.of_a_run(steps, self.nodes, self.restart_seconds)
        return _RunSeconds(finish.wall_seconds, soonest, latest)


def _startup_seconds(startup: StartUpForecast | None) -> float:
    """Return the expected seconds of a start-up; 0 where it is unknown."""
    return startup.seconds.value if startup is not None else 0.0


_FEWEST_SERIES_FOR_FORKS = 4
"""Number of series from which forks of this process are worth their cost."""
_MOST_TIMES_THE_BEST = 1.15
"""How many times as long as the best of its engine and rank count a candidate may take and still be an answer."""
_FEWEST_STEPS = 100
"""Steps an epoch below which a global batch is a large one."""
_LARGE_TIMES_THE_NOISE = 10
"""Times the gradient noise scale above which a global batch is a large one."""


def _is_large_batch(steps_per_epoch: FloatArray, batch: FloatArray, study_batch: int, noise: NoiseScale) -> BoolArray:
    """Return which candidates are large-batch training, (N,).

    These have a larger batch than the study's smallest, and few steps an epoch or a batch far above the noise scale.

    From ten times the noise scale on, one more image in a batch saves less than a tenth of the steps that it should
    (McCandlish et al. 2018, section 2.3).
    """
    is_beyond_noise = np.zeros(len(batch), dtype=bool)
    if noise.images is not None:
        is_beyond_noise = batch > _LARGE_TIMES_THE_NOISE * noise.images
    large: BoolArray = (batch > study_batch) & (is_beyond_noise | (steps_per_epoch < _FEWEST_STEPS))
    return large


def _contends(
    usable: BoolArray, times_the_best: FloatArray, kinds: Sequence[Hashable], *costs: FloatArray
) -> BoolArray:
    """Return which candidates contend, (N,): those close to the cheapest of their kind in any of the costs.

    Args:
        usable: which candidates may contend.
        times_the_best: how many times the cheapest cost each candidate may have.
        kinds: the kind of each candidate; it competes with those of the same kind.
        costs: one or more costs of each candidate.
    """
    different_kinds = dict.fromkeys(kinds)
    number_by_kind = {kind: number for number, kind in enumerate(different_kinds)}
    kind_numbers = np.array([number_by_kind[kind] for kind in kinds], dtype=int)  # (N,)
    contending = np.zeros(len(usable), dtype=bool)
    for cost in costs:
        lowest_by_kind = np.full(len(different_kinds), np.inf)
        np.minimum.at(lowest_by_kind, kind_numbers[usable], cost[usable])
        lowest_of_kind = lowest_by_kind[kind_numbers]  # that of each candidate's own kind, (N,)
        contending |= usable & (cost <= times_the_best * lowest_of_kind)
    return contending


def _start_ups(comparable: ComparableSeries, combinations: Sequence[Candidate]) -> tuple[StartUpForecast | None, ...]:
    """Return each candidate's start-up, from all runs of comparable series; None where it is unknown.

    Candidates of one engine on equal hosts share a forecast, if their batches were not measured.
    """
    points = [point for series in comparable.members for point in series.points]
    batches = {(point.trial.train.micro_batch, point.trial.train.grad_accum) for point in points}
    startup_by_key: dict[tuple[object, ...], StartUpForecast | None] = {}
    startups = []
    for candidate in combinations:
        batch = (candidate.micro_batch, candidate.grad_accum)
        hosts = (candidate.gpus, candidate.ranks_per_node)
        wrapper = (*_sharding_of(candidate), candidate.activation_checkpointing, candidate.parallel)
        key = (*hosts, *wrapper, batch if batch in batches else None)
        if key not in startup_by_key:
            nearest_points = comparable.nearest(replace(candidate, instance=None)).points
            startup_by_key[key] = start_up(points, _started_trial(nearest_points, candidate))
        startups.append(startup_by_key[key])
    return tuple(startups)


def _started_trial(points: Sequence[MeasuredPoint], candidate: Candidate) -> Trial:
    """Return the trial that a candidate would start, if it is worked out from the series of these points."""
    trial = points[-1].trial
    ranks_per_node = min(candidate.gpus, candidate.ranks_per_node)
    world = World(
        nodes=candidate.gpus // ranks_per_node,
        ranks_per_node=ranks_per_node,
        threads_per_rank=trial.world.threads_per_rank,
    )
    train = as_configured(trial.train, candidate)
    launcher = launcher_of(points, candidate.gpus)
    return trial.model_copy(update={"train": train, "world": world, "launcher": launcher})


def images_to_same_loss(batch: FloatArray, study_batch: int, noise: NoiseScale) -> FloatArray:
    """Return the images that each global batch needs for a loss, over those that the study's batch needs.

    Example: 1.25 where a batch needs a quarter more images. NaN where the noise scale is unknown.

    McCandlish et al. 2018 (arXiv 1812.06162), section 2.3: steps = S_min (1 + B_noise/B), so that the images B x steps
    grow as B + B_noise. It holds where each batch size has its own best learning rate.
    """
    if noise.images is None:
        return np.full(len(batch), np.nan)
    ratio: FloatArray = (batch + noise.images) / (study_batch + noise.images)
    return ratio


def _needless_checkpointing(combinations: Sequence[Candidate], oom: FloatArray, as_measured: bool) -> BoolArray:
    """Return which candidates recompute activations without need, (N,).

    They would fit in memory without it. Where memory is unknown, needless are those that do otherwise than the study.

    Candidates come in pairs (`candidates`): [a without checkpointing, a with it, b without, b with, ...]. Only those of
    a user's script that cannot be asked for checkpointing do not, and none of these is needless.

    Args:
        combinations: the candidates.
        oom: their chance of not fitting in memory; NaN where unknown.
        as_measured: whether the study recomputes activations.
    """
    checkpointed = np.array([candidate.activation_checkpointing for candidate in combinations], dtype=bool)
    are_pairs = 2 * checkpointed.sum() == len(combinations)
    if not are_pairs:
        return np.zeros(len(combinations), dtype=bool)
    oom_without = oom[::2].repeat(2)  # both of a pair get the chance of the one without checkpointing
    fits_without = ~(oom_without > MOST_OOM_CHANCE)
    is_unknown = np.isnan(oom_without)
    return np.where(is_unknown, checkpointed != as_measured, checkpointed & fits_without)
