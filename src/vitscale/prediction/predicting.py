"""From the fitted parts to any rank count: figures with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitscale.errors import RequestError, explain, unknown
from vitscale.prediction.fitting import DRAWS, Fitted, FittedSeries, spread_out_normals
from vitscale.prediction.labels import assumptions, label
from vitscale.prediction.layouts import Place, place
from vitscale.prediction.memory import forecast_bytes
from vitscale.prediction.memory.chance import oom_chance
from vitscale.prediction.results import Estimate, Prediction
from vitscale.prediction.start_up import launcher_of, start_up
from vitscale.prediction.step.model import Array, StepTimes, Worlds
from vitscale.prediction.step.of_series import device_factors, slowdown
from vitscale.prediction.variants import Variant, variant
from vitscale.shares import largest_micro_batch

_PER_DOUBLING = 0.0035
"""Standard deviation of what the model itself leaves out, for each doubling beyond what was measured."""
_TAIL = 0.05
"""Outside either end of a 90 % interval."""
_FUTURES = 4
"""Job effects drawn for each draw of the parameters."""


@dataclass(frozen=True)
class Question:
    """What is asked of the fitted parts."""

    gpus: tuple[int, ...]
    nodes_of: int | None = None
    """Ranks per host; None: as `layouts.ranks_per_node` has it."""
    series: str | None = None
    """One series by name; None: each."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What is to differ from the measured series: see `variants.variant`."""
    price_per_gpu_hour: float | None = None
    memory_capacity_bytes: int | None = None
    """Of a device; None: as it was recorded, else unavailable."""


def predict(fitted: Fitted, question: Question) -> tuple[Prediction, ...]:
    """Each series at each rank count asked for, series by series in rising order of ranks.

    Raises:
        RequestError: the question names something that cannot be: a series that is not there, a rank count of 0, an
            engine that refuses the options.
    """
    if not fitted.series:
        raise RequestError(
            explain("no trial has a completed run to predict from", next_step="Run the study first: vitscale run")
        )
    if question.series is not None and question.series not in fitted.series:
        raise unknown("series", question.series, fitted.series)
    chosen = _chosen(fitted, question)
    if not chosen:
        raise RequestError(
            explain(
                "every measured series asked for is of engine 'none', which has no way to several ranks",
                next_step="Add --engine ddp, or run the study with an engine",
            )
        )
    return tuple(one for series in chosen for one in _of_series(series, question))


def _chosen(fitted: Fitted, question: Question) -> list[FittedSeries]:
    """The series that was named; else those that were measured with the changes, where there are any; else all. Without
    those that have no way to so many ranks."""
    named = [one for name, one in fitted.series.items() if question.series in (None, name)]
    able = [
        one
        for one in named
        if max(question.gpus) == 1 or question.changes.get("engine", one.points[-1].trial.train.engine) != "none"
    ]
    return [one for one in able if _has(one, question.changes)] or able


def _has(fitted: FittedSeries, changes: Mapping[str, Any]) -> bool:
    trial = fitted.points[-1].trial
    own = {"model": trial.model, **trial.train.model_dump(include=set(changes))}
    return all(own.get(name) == value for name, value in changes.items())


def _of_series(fitted: FittedSeries, question: Question) -> tuple[Prediction, ...]:
    asked = variant(fitted, question.changes)
    counts = sorted(set(question.gpus))
    places = [place(fitted.series, asked.trial, gpus, question.nodes_of) for gpus in counts]
    smallest = fitted.points[0].gpus
    base = place(fitted.series, asked.trial, smallest, fitted.points[0].trial.world.ranks_per_node)
    at = _Drawn(asked, [base, *places])
    return tuple(_prediction(asked, question, base, one, at, n + 1) for n, one in enumerate(places))


def worlds_of_places(fitted: FittedSeries, places: list[Place]) -> Worlds:
    """Where the places lie."""
    trials = [one.trial for one in places]
    return Worlds(
        ranks=np.array([float(t.world.size) for t in trials]),
        ranks_per_node=np.array([float(t.world.ranks_per_node) for t in trials]),
        micro_batch=np.array([float(largest_micro_batch(t.train)) for t in trials]),
        grad_accum=np.array([float(t.train.grad_accum) for t in trials]),
        slowdown=mixed_slowdown(fitted, np.array([float(t.world.size) for t in trials])),
    )


def mixed_slowdown(fitted: FittedSeries, ranks: Array) -> Array:
    """Of unlike devices: the mixture stays that of the largest measured point; a rank alone is its first."""
    mixture = fitted.points[-1]
    factors = device_factors(fitted.points)
    alone = factors.get(mixture.devices[0], 1.0) if mixture.devices else 1.0
    return np.where(ranks > 1, slowdown(mixture, factors), alone)


def left_out_by_the_model(fitted: FittedSeries, ranks: Array, normal: Array) -> Array:
    """Factor on a step for what no part of the model tells, the larger the further from what was measured."""
    largest = max(point.gpus for point in fitted.points)
    factor: Array = np.exp(_PER_DOUBLING * np.log2(np.maximum(1.0, ranks / largest)) * normal)
    return factor


class _Drawn:
    """Step seconds of places over draws: the mean of many runs, and runs still to be made."""

    def __init__(self, asked: Variant, places: list[Place]) -> None:
        rng = np.random.default_rng(11)
        worlds = worlds_of_places(asked.fitted, places)
        self.times: StepTimes = asked.model.times(asked.draws, worlds)
        factor = left_out_by_the_model(asked.fitted, worlds.ranks, spread_out_normals(rng, DRAWS))
        self.mean: Array = self.times.total * factor
        each = [[spread_out_normals(rng, DRAWS) for _ in places] for _ in range(_FUTURES)]
        jobs = np.array([np.hstack(normals) for normals in each])
        self.future: Array = (self.mean * np.exp(asked.fitted.job_spread * jobs)).reshape(-1, len(places))

    def part(self, seconds: Array, n: int) -> Estimate:
        """Of a part of a step: a future run has that part as the mean has it."""
        return _estimate(seconds[:, n], seconds[:, n])

    def step(self, n: int) -> Estimate:
        """Seconds of a step."""
        return _estimate(self.mean[:, n], self.future[:, n])

    def ratio_to_base(self, n: int) -> Estimate:
        """Seconds of the base's step (the first place) over this one's."""
        if n == 0 or np.array_equal(self.mean[:, 0], self.mean[:, n]):
            return Estimate(1.0, 1.0, 1.0, 1.0, 1.0)
        return _estimate(self.mean[:, 0] / self.mean[:, n], self.future[:, 0] / self.future[:, n])


def _estimate(mean: Array, future: Array) -> Estimate:
    low, middle, high = np.quantile(mean, [_TAIL, 0.5, 1 - _TAIL])
    future_low, future_high = np.quantile(future, [_TAIL, 1 - _TAIL])
    return Estimate(float(middle), float(low), float(high), float(min(future_low, low)), float(max(future_high, high)))


def _prediction(asked: Variant, question: Question, base: Place, at: Place, drawn: _Drawn, n: int) -> Prediction:
    fitted, reasons = asked.fitted, dict[str, str]()
    step = drawn.step(n)
    epoch = None if at.effective_steps is None else step.times(at.effective_steps)
    if epoch is None:
        reasons["epoch_seconds"] = "how many images an epoch has is not recorded"
    speedup, efficiency = _scaling(fitted, base, at, drawn, n)
    memory = forecast_bytes(at.trial)
    if memory is None:
        reasons["memory_bytes"] = "no forecast for this model or engine"
    capacity = question.memory_capacity_bytes or fitted.points[-1].memory_capacity_bytes
    chance = None
    if memory is not None and capacity is not None:
        chance = float(oom_chance(memory, capacity, at.trial.train.device))
    else:
        reasons["oom_chance"] = reasons.get("memory_bytes") or "the device's memory is not recorded: say --gpu-memory"
    images_per_step: float = at.trial.global_batch
    if at.images and at.effective_steps and not at.trial.train.drop_last:
        images_per_step = at.images / at.effective_steps
    joules = _joules_per_epoch(asked, at, epoch)
    if joules is None:
        reasons["joules_per_epoch"] = "energy was not measured" if epoch else reasons["epoch_seconds"]
    cost = None
    if question.price_per_gpu_hour is None:
        reasons["cost_per_epoch"] = "no price was given: say --price"
    elif epoch is None:
        reasons["cost_per_epoch"] = reasons["epoch_seconds"]
    else:
        cost = epoch.times(question.price_per_gpu_hour * at.gpus / 3600)
    launcher = launcher_of(fitted.points, at.gpus)
    starts = start_up(fitted.points, at.trial.model_copy(update={"launcher": launcher}))
    if starts is None:
        reasons["startup_seconds"] = "no run under its launcher measured it"
    assumed = assumptions(asked, at)
    if starts is not None and starts.assumption is not None:
        assumed = (*assumed, starts.assumption)
    return Prediction(
        series=fitted.series.name,
        mode=fitted.series.mode,
        labels=fitted.series.labels,
        trial=at.trial,
        gpus=at.gpus,
        nodes=at.trial.world.nodes,
        label=label(asked, at, assumed),
        images=at.images,
        steps_per_epoch=at.steps_per_epoch,
        step_seconds=step,
        epoch_seconds=epoch,
        images_per_second=_inverse(step, images_per_step),
        speedup=speedup,
        efficiency=efficiency,
        compute_seconds=drawn.part(drawn.times.compute + drawn.times.optimizer, n),
        wait_seconds=drawn.part(drawn.times.wait, n),
        wire_seconds=drawn.part(drawn.times.wire, n),
        norm_seconds=drawn.part(drawn.times.norm, n),
        memory_bytes=memory,
        memory_capacity_bytes=capacity,
        oom_chance=chance,
        joules_per_epoch=joules,
        cost_per_epoch=cost,
        startup_seconds=starts.seconds if starts else None,
        assumptions=assumed,
        reasons=reasons,
    )


def _scaling(fitted: FittedSeries, base: Place, at: Place, drawn: _Drawn, n: int) -> tuple[Estimate, Estimate]:
    """(speedup, efficiency) against the smallest measured rank count, by epochs; by images where epochs are unknown."""
    ratio = drawn.ratio_to_base(n)
    times_the_ranks = at.gpus / base.gpus
    if base.steps_of_all_images is not None and at.steps_of_all_images is not None:
        ratio = ratio.times(base.steps_of_all_images / at.steps_of_all_images)
    else:
        ratio = ratio.times(at.trial.global_batch / base.trial.global_batch)
        if fitted.series.mode == "weak":
            return ratio, ratio.times(1 / times_the_ranks)
    if fitted.series.mode == "weak":
        return ratio.times(times_the_ranks), ratio
    return ratio, ratio.times(1 / times_the_ranks)


def _inverse(seconds: Estimate, amount: float) -> Estimate:
    return Estimate(
        amount / seconds.value, amount / seconds.high, amount / seconds.low, amount / seconds.future_high,
        amount / seconds.future_low,
    )  # fmt: skip


def _joules_per_epoch(asked: Variant, at: Place, epoch: Estimate | None) -> Estimate | None:
    """At the power per rank of the largest measured point that tells it."""
    known = next((point for point in reversed(asked.fitted.points) if point.joules_per_image is not None), None)
    if known is None or known.joules_per_image is None or epoch is None:
        return None
    step = float(np.median(known.step_seconds))
    watts = known.joules_per_image * known.trial.global_batch / known.gpus / step
    return epoch.times(watts * at.gpus)
