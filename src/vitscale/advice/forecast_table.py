"""Forecasts of every candidate, as arrays: time, efficiency, memory; and which candidates may be advised."""

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
"""(series, candidates, whether a rough forecast will do): `prediction.workloads.evaluate_all` with all else settled."""

MOST_OOM_CHANCE = 0.05
"""Chance of not fitting in memory above which a candidate is dropped."""


@dataclass(frozen=True)
class ForecastTable:
    """One place per candidate. NaN is unavailable."""

    candidates: tuple[Candidate, ...]
    series: tuple[str, ...]
    """Which measured series each was worked out from."""
    labels: tuple[Label, ...]
    time: FloatArray
    """Seconds of the whole work with start-up, and the ends of the 90 % interval of a future run: (3, candidates)."""
    training: FloatArray
    """The same without start-up, and in the ends without luck with failures: what the knee is looked for in, and what
    measurements can narrow."""
    startups: tuple[StartUpForecast | None, ...]
    """Start-up of one run; None: not known, and not in the time."""
    efficiency: FloatArray
    """Efficiency against one rank, and the ends of the interval of the mean: (3, candidates)."""
    same_loss_seconds: FloatArray
    memory_bytes: FloatArray
    oom_chance: FloatArray
    gpus: FloatArray
    price_per_gpu_hour: FloatArray
    """1 where GPU-hours are all that is counted."""
    global_batch: FloatArray
    keeps_batch: BoolArray
    large_batch: BoolArray
    """Whether it is large-batch training: see `_large_batch`."""
    measured: BoolArray
    """Whether its engine was measured."""
    known: BoolArray
    """Whether its time could be predicted."""
    fits: BoolArray
    """Whether it fits in memory, or may where that is unknown; ranks that share a model must be known to fit."""
    needless: BoolArray
    """Whether it recomputes activations though it would fit without; where memory is unknown, whether it does not do as
    the study does."""
    contends: BoolArray
    """Whether it may be advised. What is NaN or None for other candidates is known for these."""
    memory_known: bool
    """Whether it is known of any candidate that it fits, or that it does not."""

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
    """Works out every candidate from the measured series nearest to it.

    All are worked out roughly, and with all draws those that no other of their engine and rank count clearly beats.

    Args:
        comparable: the series asked for, and those comparable with it.
        candidates: the configurations to look at.
        forecaster: makes the forecasts.
        work: the work to be done.
        noise: the gradient noise scale.
        study_batch: the global batch whose loss `same_loss_seconds` is held against.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.
        price_per_gpu_hour: the price of candidates that are no instance with a price of its own.
    """
    combinations = candidates.combinations
    series = _nearest_series(comparable, combinations)
    forecasts = _Forecasts(combinations, series, forecaster)
    rough_forecast = forecasts.of(range(len(combinations)), rough=True)
    rough = _rough_forecast_of_all(comparable, candidates, rough_forecast, work, noise, study_batch)

    indices = np.flatnonzero(rough.contends)
    contenders = [combinations[index] for index in indices]
    exact = forecasts.of([int(index) for index in indices], rough=False)
    startups = _start_ups(comparable, contenders)
    epoch_ends = np.stack([exact.step.value, exact.step.future_low, exact.step.future_high]) * rough.steps[indices]
    failures = [(interrupted or {}).get(series[index]) for index in indices]
    times = _run_times(contenders, work.epochs * epoch_ends, startups, failures)
    startup_seconds = np.array([_startup_seconds(startup) for startup in startups])
    same_loss_seconds = startup_seconds + times.training[0] * rough.images_to_same_loss[indices]

    def spread(values: FloatArray) -> FloatArray:
        """Values of contenders as those of all candidates: NaN for the others."""
        values_of_all = np.full((*values.shape[:-1], len(combinations)), np.nan)
        values_of_all[..., indices] = values
        return values_of_all

    labels = list(rough_forecast.labels)
    startup_by_index: dict[int, StartUpForecast | None] = {}
    for index, label, startup in zip(indices, exact.labels, startups, strict=True):
        labels[index] = label
        startup_by_index[int(index)] = startup
    return ForecastTable(
        candidates=combinations,
        series=_origins(comparable, combinations, series),
        labels=tuple(labels),
        time=spread(times.seconds),
        training=spread(times.training),
        startups=tuple(startup_by_index.get(index) for index in range(len(combinations))),
        efficiency=spread(np.stack([exact.speed.value, exact.speed.low, exact.speed.high])),
        same_loss_seconds=spread(same_loss_seconds),
        memory_bytes=rough_forecast.memory_bytes,
        oom_chance=rough_forecast.oom_chance,
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
    )


@dataclass(frozen=True)
class _RoughForecast:
    """Which candidates contend by their rough forecast, and why: an array for each column, (candidates,).

    Columns of the same name are described at `ForecastTable`.
    """

    steps: FloatArray
    """Steps of an epoch."""
    global_batch: FloatArray
    images_to_same_loss: FloatArray
    """As the function of this name has it."""
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
    """Finds the candidates that contend. `forecast` is the rough one; the others are those of `forecast_table`."""
    combinations = candidates.combinations
    batch = column(combinations, "global_batch")
    micro_batch = column(combinations, "micro_batch")
    steps = whole_steps(np.full(len(combinations), float(work.images)), batch, micro_batch, work.drop_last)
    keeps_batch = np.array(candidates.keeps_batch, dtype=bool)
    large_batch = _large_batch(work.images / batch, batch, study_batch, noise)
    to_same_loss = images_to_same_loss(batch, study_batch, noise)
    epoch_seconds = steps * forecast.step.value
    known = np.isfinite(epoch_seconds)
    # Models are shared so that they fit: where nobody can say what a rank holds there is no answer.
    shares_model = np.array([candidate.parallel.ranks_per_model > 1 for candidate in combinations], dtype=bool)
    fits = ~(forecast.oom_chance > MOST_OOM_CHANCE) & ~(shares_model & np.isnan(forecast.memory_bytes))
    needless = _needless(combinations, forecast.oom_chance, comparable.trial.train.activation_checkpointing)
    measured = np.array([candidate.variant in comparable.variants for candidate in combinations], dtype=bool)
    kinds = [
        (candidate.variant, candidate.gpus, bool(keeps), bool(is_large), candidate.instance)
        for candidate, keeps, is_large in zip(combinations, keeps_batch, large_batch, strict=True)
    ]
    contends = _contends(
        known & fits & ~needless,
        np.where(measured, _CLEARLY, 1.0),  # the best of the others is a hint, and no answer
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


def _nearest_series(comparable: ComparableSeries, combinations: Sequence[Candidate]) -> list[str]:
    """The name of the series that each candidate is worked out from."""
    name_by_origin: dict[tuple[object, ...], str] = {}
    names: list[str] = []
    for candidate in combinations:
        # All that decides which series it is worked out from.
        origin = (candidate.variant, candidate.micro_batch, candidate.parallel)
        if origin not in name_by_origin:
            name_by_origin[origin] = comparable.nearest(candidate).name
        names.append(name_by_origin[origin])
    return names


def _origins(
    comparable: ComparableSeries, combinations: Sequence[Candidate], nearest: Sequence[str]
) -> tuple[str, ...]:
    """The name of each candidate's series: the one that has it, if it was measured, else the nearest."""
    names = []
    for candidate, nearest_name in zip(combinations, nearest, strict=True):
        series = comparable.measured.get(candidate)
        names.append(nearest_name if series is None else series.name)
    return tuple(names)


def _price_per_gpu_hour(candidate: Candidate, price_given: float | None) -> float:
    """The price of the candidate's instance, else the one that was given, else 1."""
    if candidate.instance is not None:
        return candidate.instance.price_per_gpu_hour
    return price_given or 1.0


@dataclass(frozen=True)
class _Forecasts:
    """Makes forecasts of candidates, those of one series together."""

    combinations: Sequence[Candidate]
    series: Sequence[str]
    """The series that each candidate is worked out from."""
    forecaster: Forecaster

    def of(self, indices: Sequence[int], *, rough: bool) -> Evaluated:
        """The forecasts of the candidates at these places, in this order."""
        indices_by_series: dict[str, list[int]] = {}
        for index in indices:
            indices_by_series.setdefault(self.series[index], []).append(index)

        def piece(name: str) -> tuple[list[int], Evaluated]:
            members = indices_by_series[name]
            return members, self.forecaster(name, [self.combinations[index] for index in members], rough)

        return gathered(forks.spread(piece, list(indices_by_series), fewest=_MANY_SERIES))


class _RunTimes(NamedTuple):
    """Expected seconds of the whole work, and the ends of the interval of a future run: (3, candidates)."""

    seconds: FloatArray
    """With start-up and failures."""
    training: FloatArray
    """Without start-up, and in the ends without luck with failures."""


def _run_times(
    candidates: Sequence[Candidate],
    step_seconds: FloatArray,
    startups: Sequence[StartUpForecast | None],
    failures: Sequence[Interruptions | None],
) -> _RunTimes:
    """The times of some candidates.

    Args:
        candidates: the candidates.
        step_seconds: seconds of all steps of the work, and the ends of their interval: (3, candidates).
        startups: the start-up of each; None: not known, and not in the time.
        failures: the failures and checkpoints of each; None: left out of the time.
    """
    training = np.full((3, len(candidates)), np.nan)
    seconds = training.copy()
    for index, (candidate, startup, interruptions) in enumerate(zip(candidates, startups, failures, strict=True)):
        expected, soonest, latest = map(float, step_seconds[:, index])
        work = (expected, soonest, latest)
        training[:, index] = work
        if interruptions is not None:
            nodes = max(1, candidate.gpus // candidate.ranks_per_node)
            restart_seconds = _startup_seconds(startup)
            training[:, index] = [interruptions.wall(each, nodes, restart_seconds).wall_seconds for each in work]
            finish, soonest, latest = interruptions.of_a_run(work, nodes, restart_seconds)
            expected = finish.wall_seconds
        seconds[:, index] = with_start_up(startup.seconds if startup else None, expected, soonest, latest)
    return _RunTimes(seconds, training)


def _startup_seconds(startup: StartUpForecast | None) -> float:
    """Expected seconds of a start-up; 0 where it is unknown."""
    return startup.seconds.value if startup is not None else 0.0


_MANY_SERIES = 4
"""Number of series from which forks of this process are worth their cost."""
_CLEARLY = 1.15
"""How many times as long as the best of its engine and rank count a candidate may take and still be an answer."""
_FEW_STEPS = 100
"""Steps an epoch below which a global batch is a large one."""
_TIMES_THE_NOISE = 10
"""Times the gradient noise scale above which a global batch is a large one."""


def _large_batch(steps_per_epoch: FloatArray, batch: FloatArray, study_batch: int, noise: NoiseScale) -> BoolArray:
    """Large-batch training: beyond the smallest batch of the study, and few steps an epoch or far above the noise.

    From ten times the noise scale on, one more image in a batch saves less than a tenth of the steps that it should
    (McCandlish et al. 2018, section 2.3).
    """
    is_beyond_noise = np.zeros(len(batch), dtype=bool)
    if noise.images is not None:
        is_beyond_noise = batch > _TIMES_THE_NOISE * noise.images
    large: BoolArray = (batch > study_batch) & (is_beyond_noise | (steps_per_epoch < _FEW_STEPS))
    return large


def _contends(usable: BoolArray, times: FloatArray, kinds: Sequence[Hashable], *costs: FloatArray) -> BoolArray:
    """Candidates that cost at most `times` as much as the cheapest of their kind, in any of the costs.

    Args:
        usable: which candidates may contend.
        times: the factor of each candidate.
        kinds: the kind of each candidate.
        costs: one or more costs of each candidate.
    """
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind_numbers = np.array([numbers[kind] for kind in kinds], dtype=int)
    contending = np.zeros(len(usable), dtype=bool)
    for cost in costs:
        cheapest = np.full(len(numbers), np.inf)
        np.minimum.at(cheapest, kind_numbers[usable], cost[usable])
        contending |= usable & (cost <= times * cheapest[kind_numbers])
    return contending


def _start_ups(comparable: ComparableSeries, combinations: Sequence[Candidate]) -> tuple[StartUpForecast | None, ...]:
    """Each candidate's start-up, from all runs of comparable series; candidates with unmeasured batches share one."""
    points = [point for series in comparable.members for point in series.points]
    batches = {(point.trial.train.micro_batch, point.trial.train.grad_accum) for point in points}
    startup_by_key: dict[tuple[object, ...], StartUpForecast | None] = {}
    startups = []
    for candidate in combinations:
        batch = (candidate.micro_batch, candidate.grad_accum)
        hosts = (candidate.gpus, candidate.ranks_per_node)
        wrapper = (candidate.variant, candidate.activation_checkpointing, candidate.parallel)
        key = (*hosts, *wrapper, batch if batch in batches else None)
        if key not in startup_by_key:
            nearest_points = comparable.nearest(replace(candidate, instance=None)).points
            startup_by_key[key] = start_up(points, _started_trial(nearest_points, candidate))
        startups.append(startup_by_key[key])
    return tuple(startups)


def _started_trial(points: Sequence[MeasuredPoint], candidate: Candidate) -> Trial:
    """The trial that a candidate would start, where it is worked out from the series of these points."""
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
    """Images that another global batch needs for a loss, over those that the study's needs; NaN: unknown.

    McCandlish et al. 2018 (arXiv 1812.06162), section 2.3: steps = S_min (1 + B_noise/B), so that the images B x steps
    grow as B + B_noise. It holds where each batch size has its own best learning rate.
    """
    if noise.images is None:
        return np.full(len(batch), np.nan)
    ratio: FloatArray = (batch + noise.images) / (study_batch + noise.images)
    return ratio


def _needless(combinations: Sequence[Candidate], oom: FloatArray, as_measured: bool) -> BoolArray:
    """Whether a candidate recomputes without need; where memory is unknown, whether it differs from what was measured.

    Candidates come in pairs, without checkpointing and with it, except for a script that only does as it was measured:
    see `candidates`.
    """
    checkpointed = np.array([candidate.activation_checkpointing for candidate in combinations], dtype=bool)
    are_pairs = 2 * checkpointed.sum() == len(combinations)
    if not are_pairs:
        return np.zeros(len(combinations), dtype=bool)
    oom_without = oom[::2].repeat(2)  # of each pair, without checkpointing
    fits_without = ~(oom_without > MOST_OOM_CHANCE)
    return np.where(np.isnan(oom_without), checkpointed != as_measured, checkpointed & fits_without)
