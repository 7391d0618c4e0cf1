"""What a run takes until its first step is done, or beside all later steps: from runs of its engine, ranks, launcher
and device where measured.

Start-up times are lognormal about their median. How far runs of one configuration differ is taken from all
configurations together, drawn towards a prior; where one itself has no run, what its neighbours differ by comes on top.
Start-ups under different launchers say nothing of one another: a fork of a prepared process takes tenths of a second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitscale.analysis.statistics import spread_within, t_quantile
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.results import START_UP, Assumption, predicted
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import WRAPPER_FIELDS, Trial

_RUN_TO_RUN, _RUN_TO_RUN_WEIGHT = 0.35, 3
"""Prior of the standard deviation of the logarithm between runs of one configuration, and its degrees of freedom.

It and `_OF_BATCHES` were chosen on recorded start-ups and tried on others: docs/log.md."""
_PER_DOUBLING = 0.2
"""Standard deviation that each doubling of the rank count away from the nearest measured one adds."""
_OF_BATCHES = 0.3
"""Standard deviation that another batch adds: the first step is part of start-up."""
_ENGINES, _ENGINES_WEIGHT = 0.5, 2
"""Prior of the standard deviation between engines, and its degrees of freedom."""


SecondsOf = Callable[[MeasuredPoint], tuple[float, ...]]
"""Seconds of each run of a point that tells them."""


@dataclass(frozen=True)
class StartUpForecast:
    """Seconds of one run's start-up, and what they rest on."""

    seconds: Estimate
    known_by: str
    """measured, nearest (the same engine at other ranks or batches) or assumed (other engines)."""
    assumption: Assumption | None = None


def _until_the_first_step(point: MeasuredPoint) -> tuple[float, ...]:
    return point.startup_seconds


def beside_later_steps(point: MeasuredPoint) -> tuple[float, ...]:
    """What each of its runs took beside the steps after the first, in seconds."""
    return point.outside_seconds


def start_up(
    points: Sequence[MeasuredPoint], trial: Trial, seconds_of: SecondsOf = _until_the_first_step
) -> StartUpForecast | None:
    """The start-up of a trial from measured runs, or what else `seconds_of` tells of each run of a point; None where
    none was measured under its launcher and device.

    It is from its own runs, where there are any; else from those of its engine with its options at the nearest rank
    count; else from those of all engines, which is an assumption.
    """
    # A trial that stands on several curves ran once.
    alike = list({
        point.trial_id: point for point in points
        if seconds_of(point)
        and (point.trial.launcher, point.trial.train.device) == (trial.launcher, trial.train.device)
    }.values())  # fmt: skip
    if not alike:
        return None
    # How far runs of one configuration differ, from all configurations.
    spread, freedom = spread_within(map(seconds_of, alike), _RUN_TO_RUN, _RUN_TO_RUN_WEIGHT)
    same = _engine(trial)
    engine = [point for point in alike if _engine(point.trial) == same]
    if own := [point for point in engine if _batch(point.trial) == _batch(trial) and point.trial.world == trial.world]:
        return StartUpForecast(_estimate([*map(seconds_of, own)], spread, freedom, 0.0), "measured")
    if engine:
        least = min(_doublings(point, trial) for point in engine)
        nearest = [point for point in engine if _doublings(point, trial) == least]
        apart = math.hypot(_OF_BATCHES, _PER_DOUBLING * least)
        return StartUpForecast(_estimate([*map(seconds_of, nearest)], spread, freedom, apart), "nearest")
    least = min(_doublings(point, trial) for point in alike)
    apart = math.hypot(_between_engines(alike, seconds_of), _PER_DOUBLING * least)
    seconds = _estimate([*map(seconds_of, alike)], spread, freedom, apart)
    return StartUpForecast(
        seconds,
        "assumed",
        Assumption(
            START_UP,
            f"{seconds.value:.3g} s, as of other engines ({seconds.future_low:.3g} to {seconds.future_high:.3g} s)",
            "one short run of it (measure.steps = 10)",
        ),
    )


def evaluation_seconds(points: Sequence[MeasuredPoint], trial: Trial) -> float:
    """Seconds after an epoch of the trial, as of the nearest measured rank count; 0 where nothing was evaluated."""
    known = [point for point in points if point.evaluation_seconds is not None]
    return min(known, key=lambda point: _doublings(point, trial)).evaluation_seconds or 0.0 if known else 0.0


def _engine(trial: Trial) -> tuple[Any, ...]:
    train = trial.train
    # As text: a DeepSpeed file is a dict, which is no key.
    wrapper = train.model_dump_json(include=set(WRAPPER_FIELDS))
    return (trial.model.model_dump_json(), train.precision, train.compile, train.compile_mode, wrapper)


def _batch(trial: Trial) -> tuple[Any, ...]:
    return (trial.train.micro_batch, trial.train.grad_accum, trial.train.activation_checkpointing)


def _doublings(point: MeasuredPoint, trial: Trial) -> float:
    return abs(math.log2(point.gpus / trial.world.size))


def _between_engines(points: Sequence[MeasuredPoint], seconds_of: SecondsOf) -> float:
    by_engine: dict[tuple[Any, ...], list[float]] = {}
    for point in points:
        by_engine.setdefault(_engine(point.trial), []).extend(map(math.log, seconds_of(point)))
    medians = [statistics.median(logs) for logs in by_engine.values()]
    mean = statistics.fmean(medians)
    squares = _ENGINES**2 * _ENGINES_WEIGHT + sum((median - mean) ** 2 for median in medians)
    return math.sqrt(squares / (_ENGINES_WEIGHT + len(medians) - 1))


def _estimate(points: Sequence[Sequence[float]], spread: float, freedom: float, apart: float) -> Estimate:
    """The median of the points' runs; `spread`: from run to run, `apart`: from those to this configuration."""
    seconds = [each for of_point in points for each in of_point]
    middle = statistics.median(seconds)
    reach = t_quantile(freedom, 0.95)
    mean = math.exp(reach * math.hypot(spread / math.sqrt(len(seconds)), apart))
    future = math.exp(reach * math.hypot(spread * math.sqrt(1 + 1 / len(seconds)), apart))
    return predicted(middle, middle / mean, middle * mean, middle / future, middle * future)


FORKED_RANKS = "ranks that are forks of a process which has imported everything"
"""What the local launcher starts; their start-up lacks the imports."""
OF_FORKS = (
    "Start-up is in the time, as forks of a process that has imported everything take it (launcher local); others "
    "import anew, which takes seconds more."
)
"""Said wherever the start-up of such ranks is added."""


def started_as_forks(trial: Trial) -> bool:
    """Whether a trial's ranks are forks of a process that has imported everything: their start-up lacks the imports."""
    return trial.launcher == "local" and trial.train.script is None


def launcher_of(points: Sequence[MeasuredPoint], gpus: int) -> str:
    """The launcher that a series would start `gpus` ranks with: that of its nearest measured rank count."""
    return min(points, key=lambda point: abs(math.log2(point.gpus / gpus))).trial.launcher
