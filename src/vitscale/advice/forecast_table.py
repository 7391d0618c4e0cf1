"""What is expected of every candidate, as arrays: time, GPU-hours, efficiency, memory; and who may be advised."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitscale.advice.candidates import Candidates, as_configured
from vitscale.advice.comparable_series import ComparableSeries
from vitscale.advice.request import NoiseScale, Work
from vitscale.base import forks
from vitscale.base.arrays import BoolArray, FloatArray
from vitscale.prediction.configurations import Candidate, Evaluated, column, gathered
from vitscale.prediction.finishing import Interruptions, with_start_up
from vitscale.prediction.layouts import whole_steps
from vitscale.prediction.results import Label
from vitscale.prediction.start_up import StartUpForecast, launcher_of, start_up
from vitscale.trial.trial import World

Forecaster = Callable[[str, Sequence[Candidate], bool], Evaluated]
"""(series, candidates, whether roughly will do): `prediction.workloads.evaluate_all` with all else settled."""

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
        candidates: what is looked at.
        forecaster: what they are expected to take.
        work: what is to be done.
        noise: the gradient noise scale.
        study_batch: the global batch whose loss `same_loss_seconds` is held against.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.
        price_per_gpu_hour: the price of candidates that are no instance with a price of its own.
    """
    every = candidates.combinations
    nearest: dict[tuple[object, ...], str] = {}
    series: list[str] = []
    for candidate in every:
        # All that decides which series it is worked out from.
        origin = (candidate.variant, candidate.micro_batch, candidate.parallel)
        if origin not in nearest:
            nearest[origin] = comparable.nearest(candidate).name
        series.append(nearest[origin])

    def forecast(wanted: Sequence[int], rough: bool) -> Evaluated:
        by_series: dict[str, list[int]] = {}
        for n in wanted:
            by_series.setdefault(series[n], []).append(n)

        def piece(name: str) -> tuple[list[int], Evaluated]:
            return by_series[name], forecaster(name, [every[n] for n in by_series[name]], rough)

        return gathered(forks.spread(piece, [*by_series], fewest=_MANY_SERIES))

    roughly = forecast(range(len(every)), True)
    gpus, batch, micro_batch = (column(every, name) for name in ("gpus", "global_batch", "micro_batch"))
    steps = whole_steps(np.full(len(every), float(work.images)), batch, micro_batch, work.drop_last)
    keeps_batch = np.array(candidates.keeps_batch, dtype=bool)
    large_batch = _large_batch(work.images / batch, batch, study_batch, noise)
    to_same_loss = images_to_same_loss(batch, study_batch, noise)
    known = np.isfinite(steps * roughly.step.value)
    # Models are shared so that they fit: where nobody can say what a rank holds there is no answer.
    sharing = np.array([candidate.parallel.ranks_per_model > 1 for candidate in every], dtype=bool)
    fits = ~(roughly.oom_chance > MOST_OOM_CHANCE) & ~(sharing & np.isnan(roughly.memory_bytes))
    needless = _needless(every, roughly.oom_chance, comparable.trial.train.activation_checkpointing)
    measured = np.array([candidate.variant in comparable.variants for candidate in every], dtype=bool)
    contends = _contends(
        known & fits & ~needless,
        np.where(measured, _CLEARLY, 1.0),  # the best of the others is a hint, and no answer
        [(candidate.variant, candidate.gpus, bool(kept), bool(large), candidate.instance)
         for candidate, kept, large in zip(every, keeps_batch, large_batch, strict=True)],
        steps * roughly.step.value,
        steps * roughly.step.value * np.nan_to_num(to_same_loss, nan=1.0),
    )  # fmt: skip
    indices = np.flatnonzero(contends)
    exactly = forecast([int(n) for n in indices], False)

    def spread(values: FloatArray) -> FloatArray:
        whole = np.full((*values.shape[:-1], len(every)), np.nan)
        whole[..., indices] = values
        return whole

    startups = _start_ups(comparable, [every[n] for n in indices])
    ends = np.stack([exactly.step.value, exactly.step.future_low, exactly.step.future_high]) * steps[indices]
    training = np.full((3, len(indices)), np.nan)
    seconds = training.copy()
    for position, (n, starts) in enumerate(zip(indices, startups, strict=True)):
        interruptions = (interrupted or {}).get(series[n])
        middle, soonest, latest = map(float, work.epochs * ends[:, position])
        whole = middle, soonest, latest
        training[:, position] = whole
        if interruptions is not None:
            nodes = max(1, every[n].gpus // every[n].ranks_per_node)
            own = starts.seconds.value if starts else 0.0
            training[:, position] = [interruptions.wall(each, nodes, own).wall_seconds for each in whole]
            expected, *bounds = interruptions.of_a_run(whole, nodes, own)
            whole = expected.wall_seconds, bounds[0], bounds[1]
        seconds[:, position] = with_start_up(starts.seconds if starts else None, *whole)
    labels = list(roughly.labels)
    for n, label in zip(indices, exactly.labels, strict=True):
        labels[n] = label
    startup_of: dict[int, StartUpForecast | None] = dict(zip(map(int, indices), startups, strict=True))
    started = np.array([starts.seconds.value if starts else 0.0 for starts in startups])
    return ForecastTable(
        candidates=every,
        series=tuple(
            name if (member := comparable.measured.get(candidate)) is None else member.name
            for candidate, name in zip(every, series, strict=True)
        ),
        labels=tuple(labels),
        time=spread(seconds),
        training=spread(training),
        startups=tuple(startup_of.get(n) for n in range(len(every))),
        efficiency=spread(np.stack([exactly.speed.value, exactly.speed.low, exactly.speed.high])),
        same_loss_seconds=spread(started + training[0] * to_same_loss[indices]),
        memory_bytes=roughly.memory_bytes,
        oom_chance=roughly.oom_chance,
        gpus=gpus,
        price_per_gpu_hour=np.array(
            [
                candidate.instance.price_per_gpu_hour if candidate.instance else price_per_gpu_hour or 1.0
                for candidate in every
            ]
        ),
        global_batch=batch,
        keeps_batch=keeps_batch,
        large_batch=large_batch,
        measured=measured,
        known=known,
        fits=fits,
        needless=needless,
        contends=contends,
        memory_known=bool(np.isfinite(roughly.oom_chance).any()),
    )


_MANY_SERIES = 4
"""Number of series from which forks of this process are worth their cost."""
_CLEARLY = 1.15
"""How many times as long as the best of its engine and rank count a candidate may take and still be an answer."""
_FEW_STEPS, _TIMES_THE_NOISE = 100, 10
"""Steps an epoch below which, and times the gradient noise scale above which, a global batch is a large one."""


def _large_batch(steps_per_epoch: FloatArray, batch: FloatArray, study_batch: int, noise: NoiseScale) -> BoolArray:
    """Large-batch training: beyond the smallest batch of the study, and few steps an epoch or far above the noise.

    From ten times the noise scale on, one more image in a batch saves less than a tenth of the steps that it should
    (McCandlish et al. 2018, section 2.3).
    """
    far = np.zeros(len(batch), dtype=bool) if noise.images is None else batch > _TIMES_THE_NOISE * noise.images
    large: BoolArray = (batch > study_batch) & (far | (steps_per_epoch < _FEW_STEPS))
    return large


def _contends(usable: BoolArray, times: FloatArray, kinds: Sequence[Hashable], *costs: FloatArray) -> BoolArray:
    """Candidates that cost at most `times` as much as the cheapest of their kind, in any of the costs."""
    numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    kind = np.array([numbers[key] for key in kinds], dtype=int)
    contending = np.zeros(len(usable), dtype=bool)
    for cost in costs:
        least = np.full(len(numbers), np.inf)
        np.minimum.at(least, kind[usable], cost[usable])
        contending |= usable & (cost <= times * least[kind])
    return contending


def _start_ups(comparable: ComparableSeries, every: Sequence[Candidate]) -> tuple[StartUpForecast | None, ...]:
    """Each candidate's start-up, from all runs of comparable series; candidates with unmeasured batches share one."""
    points = [point for series in comparable.members for point in series.points]
    batches = {(point.trial.train.micro_batch, point.trial.train.grad_accum) for point in points}
    known: dict[tuple[object, ...], StartUpForecast | None] = {}
    startups = []
    for candidate in every:
        batch = (candidate.micro_batch, candidate.grad_accum)
        hosts = (candidate.gpus, candidate.ranks_per_node)
        wrapper = (candidate.variant, candidate.activation_checkpointing, candidate.parallel)
        key = (*hosts, *wrapper, batch if batch in batches else None)
        if key not in known:
            own = comparable.nearest(replace(candidate, instance=None)).points
            trial = own[-1].trial
            per_node = min(candidate.gpus, candidate.ranks_per_node)
            world = World(
                nodes=candidate.gpus // per_node, ranks_per_node=per_node, threads_per_rank=trial.world.threads_per_rank
            )
            train, launcher = as_configured(trial.train, candidate), launcher_of(own, candidate.gpus)
            changes = {"train": train, "world": world, "launcher": launcher}
            known[key] = start_up(points, trial.model_copy(update=changes))
        startups.append(known[key])
    return tuple(startups)


def images_to_same_loss(batch: FloatArray, study_batch: int, noise: NoiseScale) -> FloatArray:
    """Images that another global batch needs for a loss, over those that the study's needs; NaN: unknown.

    McCandlish et al. 2018 (arXiv 1812.06162), section 2.3: steps = S_min (1 + B_noise/B), so that the images B x steps
    grow as B + B_noise. It holds where each batch size has its own best learning rate.
    """
    if noise.images is None:
        return np.full(len(batch), np.nan)
    ratio: FloatArray = (batch + noise.images) / (study_batch + noise.images)
    return ratio


def _needless(every: Sequence[Candidate], oom: FloatArray, as_measured: bool) -> BoolArray:
    """Whether a candidate recomputes without need; where memory is unknown, whether it differs from what was measured.

    Candidates come in pairs, without checkpointing and with it, except for a script that only does as it was measured:
    see `candidates`.
    """
    checkpointed = np.array([candidate.activation_checkpointing for candidate in every], dtype=bool)
    if 2 * checkpointed.sum() != len(every):
        return np.zeros(len(every), dtype=bool)
    without = oom[::2].repeat(2)
    return np.where(np.isnan(without), checkpointed != as_measured, checkpointed & ~(without > MOST_OOM_CHANCE))
