"""From the fitted parts to any rank count: figures, intervals, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitscale.prediction.fitting import Fitted
from vitscale.prediction.results import Label, Prediction

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    """What is asked of the fitted parts."""

    gpus: tuple[int, ...]
    nodes_of: int | None = None
    """Ranks per host. None: as the series' measured points have them, where all of them lie on one host as many as the
    largest point has, and more hosts beyond."""
    series: str | None = None
    """One series by name; None: each."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What is to differ from the measured series: fields of `TrainSpec` by name (micro_batch, grad_accum, engine,
    zero_stage, precision, activation_checkpointing), or `model` with a resolved ModelSpec."""
    price_per_gpu_hour: float | None = None
    memory_capacity_bytes: int | None = None
    """Of a device; None: as it was recorded, else unavailable."""


@dataclass(frozen=True)
class Candidate:
    """One configuration to look at beside thousands of others. Its other fields are the series' own."""

    gpus: int
    ranks_per_node: int
    engine: str
    zero_stage: int
    micro_batch: int
    grad_accum: int
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Forecasts:
    """One place per candidate; NaN is unavailable."""

    candidates: tuple[Candidate, ...]
    step_seconds: Array
    step_low: Array
    """Of the mean, 90 %; so `step_high`."""
    step_high: Array
    step_future_low: Array
    step_future_high: Array
    epoch_seconds: Array
    epoch_future_low: Array
    epoch_future_high: Array
    images_per_second: Array
    efficiency: Array
    """Against one rank of the same micro-batch, accumulation and engine, as predicted."""
    memory_bytes: Array
    oom_chance: Array
    labels: tuple[Label, ...]


def predict(fitted: Fitted, question: Question) -> tuple[Prediction, ...]:
    """Each series at each rank count asked for, series by series in rising order of ranks.

    Raises:
        RequestError: the question names something that cannot be: a series that is not there, a rank count of 0, an
            engine that refuses the options.
    """
    raise AssertionError


def forecast_candidates(fitted: Fitted, series: str, candidates: Sequence[Candidate]) -> Forecasts:
    """Many configurations of one series at once: 10,000 take less than a second."""
    raise AssertionError
