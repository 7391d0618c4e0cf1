"""What is expected of every candidate, as arrays: time, GPU-hours, efficiency, memory; and who may be advised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vitscale.advice.candidates import Candidates, with_engine
from vitscale.advice.family import Family
from vitscale.advice.request import NoiseScale, Work
from vitscale.prediction.candidates import Candidate, Forecasts, whole_steps
from vitscale.prediction.results import Label
from vitscale.prediction.start_up import StartUp, launcher_of, start_up
from vitscale.prediction.step.model import Array
from vitscale.trial import World

Mask = NDArray[np.bool_]
Forecaster = Callable[[str, Sequence[Candidate]], Forecasts]
"""Series and candidates in, forecasts out: `prediction.candidates.forecast_candidates` with all else settled."""

MOST_OOM_CHANCE = 0.05
"""A candidate that will more likely not fit is dropped."""


@dataclass(frozen=True)
class Landscape:
    """One place per candidate. NaN is unavailable."""

    candidates: tuple[Candidate, ...]
    series: tuple[str, ...]
    """Which measured series each was worked out from."""
    labels: tuple[Label, ...]
    seconds: Array
    """Of the whole work with start-up; `seconds_low` and `seconds_high`: 90 % interval of a future run."""
    seconds_low: Array
    seconds_high: Array
    training_seconds: Array
    """Without start-up: what the knee is looked for in."""
    training_low: Array
    training_high: Array
    startups: tuple[StartUp | None, ...]
    """Of one run; None: not known, and in no time."""
    efficiency: Array
    efficiency_low: Array
    efficiency_high: Array
    same_loss_seconds: Array
    memory_bytes: Array
    oom_chance: Array
    gpus: Array
    global_batch: Array
    keeps_batch: Mask
    measured: Mask
    """Whether its engine was measured."""
    known: Mask
    """Whether its time could be predicted."""
    fits: Mask
    """Whether it fits in memory, as far as that is known."""
    needless: Mask
    """Whether it recomputes activations though it would fit without, or differs in that from the study without need."""
    memory_known: bool
    """Whether for any of them it could be said that it fits, or does not."""

    @property
    def usable(self) -> Mask:
        """Who may be advised."""
        return self.known & self.fits & ~self.needless

    @property
    def gpu_hours(self) -> Array:
        """Of all ranks."""
        return self.gpus * self.seconds / 3600


def landscape(
    family: Family, found: Candidates, forecaster: Forecaster, work: Work, noise: NoiseScale, study_batch: int
) -> Landscape:
    """Works out every candidate from the measured series nearest to it.

    Args:
        family: of the series asked for.
        found: the candidates.
        forecaster: what they are expected to take.
        work: what is to be done.
        noise: the gradient noise scale.
        study_batch: the global batch whose loss `same_loss_seconds` is held against.
    """
    every = found.found
    series = tuple(family.nearest(one).name for one in every)
    place = {name: [n for n, own in enumerate(series) if own == name] for name in dict.fromkeys(series)}
    forecasts = {name: forecaster(name, [every[n] for n in places]) for name, places in place.items()}

    def gathered(values: Callable[[Forecasts], Array]) -> Array:
        whole = np.full(len(every), np.nan)
        for name, places in place.items():
            whole[places] = values(forecasts[name])
        return whole

    labels: dict[int, Label] = {
        n: label for name, places in place.items() for n, label in zip(places, forecasts[name].labels, strict=True)
    }
    gpus = np.array([one.gpus for one in every], dtype=float)
    batch = np.array([one.gpus * one.micro_batch * one.grad_accum for one in every], dtype=float)
    micro_batch = np.array([one.micro_batch for one in every], dtype=float)
    steps = whole_steps(np.full(len(every), float(work.images)), batch, micro_batch, work.drop_last)
    step, mean_low, mean_high = (gathered(lambda f: f.step_seconds), gathered(lambda f: f.step_low),
                                 gathered(lambda f: f.step_high))  # fmt: skip
    training, training_low, training_high = (
        work.epochs * steps * each
        for each in (step, gathered(lambda f: f.step_future_low), gathered(lambda f: f.step_future_high))
    )
    startups = _start_ups(family, every)
    startup, startup_low, startup_high = _columns(startups)
    efficiency = gathered(lambda f: f.efficiency)
    oom, memory = gathered(lambda f: f.oom_chance), gathered(lambda f: f.memory_bytes)
    return Landscape(
        candidates=every,
        series=series,
        labels=tuple(labels[n] for n in range(len(every))),
        seconds=startup + training,
        # The two vary by themselves: their distances from the middle add up as squares.
        seconds_low=startup + training - np.hypot(startup - startup_low, training - training_low),
        seconds_high=startup + training + np.hypot(startup_high - startup, training_high - training),
        training_seconds=training,
        training_low=training_low,
        training_high=training_high,
        startups=startups,
        efficiency=efficiency,
        # The one-rank step it is held against is uncertain too, mostly in the same parts, which cancel: this is wide.
        efficiency_low=efficiency * step / mean_high,
        efficiency_high=efficiency * step / mean_low,
        same_loss_seconds=startup + training * images_to_same_loss(batch, study_batch, noise),
        memory_bytes=memory,
        oom_chance=oom,
        gpus=gpus,
        global_batch=batch,
        keeps_batch=np.array(found.keeps_batch, dtype=bool),
        measured=np.array([(one.engine, one.zero_stage) in family.engines for one in every], dtype=bool),
        known=np.isfinite(training),
        fits=~(oom > MOST_OOM_CHANCE),
        needless=_needless(every, oom, family.trial.train.activation_checkpointing),
        memory_known=bool(np.isfinite(oom).any()),
    )


def _start_ups(family: Family, every: Sequence[Candidate]) -> tuple[StartUp | None, ...]:
    """Of each candidate, from all runs of the family; those with batches nobody measured share one."""
    points = [point for series in family.members for point in series.points]
    batches = {(point.trial.train.micro_batch, point.trial.train.grad_accum) for point in points}
    known: dict[Candidate, StartUp | None] = {}
    found = []
    for one in every:
        batch = (one.micro_batch, one.grad_accum)
        key = replace(one, micro_batch=0, grad_accum=0) if batch not in batches else one
        if key not in known:
            own = family.nearest(one).points
            trial = own[-1].trial
            per_node = min(one.gpus, one.ranks_per_node)
            world = World(
                nodes=one.gpus // per_node, ranks_per_node=per_node, threads_per_rank=trial.world.threads_per_rank
            )
            train = with_engine(trial.train, one.engine, one.zero_stage).model_copy(
                update={
                    "micro_batch": one.micro_batch,
                    "grad_accum": one.grad_accum,
                    "activation_checkpointing": one.activation_checkpointing,
                }
            )
            changes = {"train": train, "world": world, "launcher": launcher_of(own, one.gpus)}
            known[key] = start_up(points, trial.model_copy(update=changes))
        found.append(known[key])
    return tuple(found)


def _columns(startups: Sequence[StartUp | None]) -> tuple[Array, Array, Array]:
    """Seconds, and the ends of the interval of a future run; 0 where it is not known."""
    ends = [(s.seconds.value, s.seconds.future_low, s.seconds.future_high) if s else (0.0, 0.0, 0.0) for s in startups]
    values = np.array(ends)
    return values[:, 0], values[:, 1], values[:, 2]


def images_to_same_loss(batch: Array, study_batch: int, noise: NoiseScale) -> Array:
    """How many times the images that the study's global batch needs for a loss, another one needs; NaN: unknown.

    McCandlish et al. 2018 (arXiv 1812.06162), section 2.3: steps = S_min (1 + B_noise/B), so that the images B x steps
    grow as B + B_noise. It holds where each batch size has its own best learning rate.
    """
    if noise.images is None:
        return np.full(len(batch), np.nan)
    ratio: Array = (batch + noise.images) / (study_batch + noise.images)
    return ratio


def _needless(every: Sequence[Candidate], oom: Array, as_measured: bool) -> Mask:
    """Checkpointing where nothing asks for it; where memory is unknown, anything but what was measured.

    Candidates come in pairs, without checkpointing and with it: see `candidates`.
    """
    checkpointed = np.array([one.activation_checkpointing for one in every], dtype=bool)
    without = oom[::2].repeat(2)
    return np.where(np.isnan(without), checkpointed != as_measured, checkpointed & ~(without > MOST_OOM_CHANCE))
