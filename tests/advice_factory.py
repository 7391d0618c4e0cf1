"""A scaling law known by hand, for tests of advice.

One epoch has 6,400 images, a micro-batch is 64, so that N ranks take 100/N steps. A step on N ranks takes 0.9 + 0.1 N
seconds. A hundred epochs thus take 9,000/N + 1,000 seconds:

    ranks            1       2       4       5      10      20
    seconds     10,000   5,500   3,250   2,800   1,900   1,450
    GPU-s       10,000  11,000  13,000  14,000  19,000  29,000
    efficiency       1    0.91    0.77    0.71    0.53    0.34
    N T^2 / 1e6    100    60.5   42.25    39.2    36.1   42.05

A future run lies within 5 % of that, the mean within 1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evidence_factory import UNKNOWN, make_point
from vitscale.advice.forecast_table import Forecaster
from vitscale.advice.pipeline import Advice, advise
from vitscale.advice.request import NoiseScale, Request
from vitscale.base.arrays import FloatArray
from vitscale.prediction.configurations import Candidate, Estimates, Evaluated
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series
from vitscale.trial.trial import Mode

IMAGES, MICRO_BATCH, EPOCHS = 6400, 64, 100
COUNTS = (1, 2, 4, 5, 10, 20)
ASKED = Request(gpus=COUNTS, ranks_per_node=20, epochs=EPOCHS, large_batch=True)
NO_NOISE = NoiseScale.unknown("not measured")
FUTURE, MEAN = 0.05, 0.01

Step = Callable[[Candidate], float]
"""Expected seconds of a candidate's step."""


def step_seconds(candidate: Candidate) -> float:
    """Of DDP as above; every other engine takes 30 % longer, and each micro-step more than the first 2 % of one."""
    engine = 1.0 if candidate.engine == "ddp" else 1.3
    images = (0.3 + 0.7 * candidate.micro_batch / MICRO_BATCH) * candidate.grad_accum
    recomputing = 4 / 3 if candidate.activation_checkpointing else 1.0
    return engine * images * recomputing * (0.9 + 0.1 * candidate.gpus)


def forecaster(step: Step = step_seconds, *, memory: Step | None = None, capacity: float | None = None) -> Forecaster:
    """What `step` says, with known intervals; a candidate whose `memory` exceeds `capacity` surely does not fit."""

    def forecast(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        steps = np.array([step(one) for one in candidates])
        alone = np.array([step(_alone(one)) for one in candidates])
        peak = np.array([np.nan if memory is None else memory(one) for one in candidates])
        oom = np.full(len(candidates), np.nan) if capacity is None else (peak > capacity).astype(float)
        return Evaluated(
            step=_around(steps),
            speed=_around(alone / steps),
            parts={},
            memory_bytes=peak,
            oom_chance=oom,
            host_memory_bytes=np.zeros(len(candidates)),
            host_oom_chance=np.zeros(len(candidates)),
            labels=tuple("extrapolated" for _ in candidates),
        )

    return forecast


def _around(values: FloatArray) -> Estimates:
    return Estimates(values, *(values * ends for ends in (1 - MEAN, 1 + MEAN, 1 - FUTURE, 1 + FUTURE)))


def _alone(one: Candidate) -> Candidate:
    return Candidate(
        1, 1, one.variant, one.micro_batch, one.grad_accum, one.activation_checkpointing
    )  # fmt: skip


def points(counts: Sequence[int] = (1, 2, 4), engine: str = "ddp") -> tuple[MeasuredPoint, ...]:
    """Measured without start-up."""
    return tuple(
        make_point(gpus, 0.9 + 0.1 * gpus, engine=engine, micro_batch=MICRO_BATCH, images=IMAGES, per_node=20)
        for gpus in counts
    )


def evidence(mode: Mode = "strong-micro", engines: Sequence[str] = ("ddp",)) -> Evidence:
    """One series for each engine."""
    series = [Series(engine, mode, {}, points(engine=engine)) for engine in engines]
    return Evidence(tuple(series), UNKNOWN)


def advised(asked: Request = ASKED, forecast: Forecaster | None = None, noise: NoiseScale = NO_NOISE) -> Advice:
    """Advice on the law above."""
    return advise(evidence(), asked, noise, forecast or forecaster())
