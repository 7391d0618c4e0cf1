"""Amdahl's law fitted to what was measured on one host, and its share in predictions of others' programs on several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.prediction.configurations import Candidate, Estimates, column
from vitscale.prediction.variants import PredictionVariant

WEIGHT = 0.2
"""Weight of Amdahl's answer beside the fit's median, on logarithms. Each source of docs/calibration-tables.md was
predicted with the weight that the others choose by error: 0.2, or 0.3 under other priors (docs/log.md)."""
_DOUBLINGS = 3.0
"""Doublings that those tables reach beyond what was measured. Further out the weight falls, for the law grows without
end."""


def serial_and_parallel(gpus: Sequence[float], seconds: Sequence[float]) -> tuple[float, float] | None:
    """Serial seconds and parallel rank-seconds, by least squares of relative errors; None where these do not tell.

    That takes two rank counts, and times that are not so far apart that one of them alone decides.

    `T(N) = serial + parallel / N` for a fixed amount of work (Amdahl, AFIPS 1967). Where the fit would make one of them
    negative, that is 0 and the other alone is fitted.
    """
    if len(set(gpus)) < 2:
        return None
    # Relative: serial * (1 / T) + parallel * (1 / (N T)) = 1.
    terms = [(1 / each, 1 / (count * each)) for count, each in zip(gpus, seconds, strict=True)]
    aa, bb = sum(a * a for a, _ in terms), sum(b * b for _, b in terms)
    ab, a1, b1 = sum(a * b for a, b in terms), sum(a for a, _ in terms), sum(b for _, b in terms)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return None
    serial, parallel = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if serial < 0:
        return 0.0, b1 / bb
    return (a1 / aa, 0.0) if parallel < 0 else (serial, parallel)


def amdahl_of(asked: PredictionVariant) -> tuple[float, float] | None:
    """Serial and parallel seconds of an image; None where Amdahl's law has no share in answers across hosts.

    It has one where what is sent is unknown or somebody else's program was timed, all on one host, and nothing but
    batches and rank counts is to differ.
    """
    points = asked.fitted.points
    others = asked.model.messages is None or asked.trial.origin is not None
    if not others or asked.assumptions or max(point.nodes for point in points) > 1:
        return None
    images = column([Candidate.of(point.trial) for point in points], "global_batch")
    steps = [statistics.median(point.step_seconds) for point in points]
    return serial_and_parallel([point.gpus for point in points], [float(each) for each in steps / images])


def factor_towards(
    terms: tuple[float, float], largest: int, candidates: Sequence[Candidate], step: Estimates
) -> FloatArray:
    """Factor on the middle of each configuration's step, (configurations,); 1 inside a host.

    Across hosts it goes a share of the way to Amdahl's answer, which is taken no further than the interval of the mean.

    Args:
        terms: see `amdahl_of`.
        largest: the largest measured rank count.
        candidates: the configurations.
        step: their seconds of a step.
    """
    serial, parallel = terms
    gpus = column(candidates, "gpus")
    of_amdahl = column(candidates, "global_batch") * (serial + parallel / gpus)
    weight = WEIGHT / np.maximum(1.0, np.log2(gpus / largest) / _DOUBLINGS)
    factor = (np.clip(of_amdahl, step.low, step.high) / step.value) ** weight
    return np.where(gpus > column(candidates, "ranks_per_node"), factor, 1.0)
