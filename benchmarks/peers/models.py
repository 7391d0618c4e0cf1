"""Linear speedup, constant seconds per step, Amdahl, Gunther's Universal Scalability Law and Ernest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from peers.nonnegative import nonnegative_least_squares
from peers.runs import Array, Places

Fit = Callable[[Places, Array], Array]
"""Places of the runs and their epoch seconds (draws, runs) -> coefficients (draws, any number)."""
Ask = Callable[[Array, Places], Array]
"""Coefficients (draws, any number) and places -> epoch seconds (draws, places)."""


@dataclass(frozen=True)
class Peer:
    """A model of epoch seconds."""

    name: str
    source: str
    fit: Fit
    ask: Ask
    parameters: int
    """At most; coefficients of zero are not counted."""


def _linear() -> Peer:
    """Ideal: the seconds of an image on one rank, as the smallest rank count has it."""

    def fit(runs: Places, seconds: Array) -> Array:
        per_image = seconds * runs.gpus / runs.images
        return np.median(per_image[:, runs.gpus == runs.gpus.min()], axis=1, keepdims=True)

    def ask(found: Array, where: Places) -> Array:
        return np.asarray(found * where.images / where.gpus)

    return Peer("linear speedup", "ideal, from the smallest count", fit, ask, 1)


def _constant() -> Peer:
    """Seconds per step are the same at every rank count: their median over the counts; the steps are rounded.

    Each count weighs the same, however often it was run.
    """

    def fit(runs: Places, seconds: Array) -> Array:
        per_step = seconds / runs.steps
        counts = np.unique(runs.gpus)
        by_count = [np.median(per_step[:, runs.gpus == count], axis=1) for count in counts]
        return np.median(np.stack(by_count, axis=1), axis=1, keepdims=True)

    def ask(found: Array, where: Places) -> Array:
        return np.asarray(found * where.steps)

    return Peer("constant step x rounded steps", "median over the counts", fit, ask, 1)


def _least_squares(name: str, source: str, columns: Callable[[Places], list[Array]], relative: bool) -> Peer:
    """Epoch seconds as a sum of columns with coefficients of at least zero.

    `relative`: of the squared relative errors, else of the squared seconds.
    """

    def fit(runs: Places, seconds: Array) -> Array:
        return nonnegative_least_squares(
            np.stack(columns(runs), axis=1), seconds, 1 / seconds if relative else np.ones_like(seconds)
        )

    def ask(found: Array, where: Places) -> Array:
        return np.asarray(found @ np.stack(columns(where), axis=0))

    return Peer(name, source, fit, ask, len(columns(Places(*(np.ones(1),) * 3))))


def _amdahl() -> Peer:
    """T = work x (serial + parallel / N): Amdahl, AFIPS 1967. Work is the images of an epoch."""
    return _least_squares(
        "Amdahl", "AFIPS 1967", lambda at: [at.images, at.images / at.gpus], relative=True
    )  # fmt: skip


def _usl() -> Peer:
    """Throughput X = lambda N / (1 + alpha (N-1) + beta N (N-1)): Gunther, "Guerrilla Capacity Planning" (2007).

    Turned over: T = images / X = images / N x (1 + alpha (N-1) + beta N (N-1)) / lambda, which is linear in 1/lambda,
    alpha/lambda and beta/lambda.
    """
    return _least_squares(
        "USL",
        "Gunther 2007",
        lambda at: [at.images / at.gpus, at.images / at.gpus * (at.gpus - 1), at.images * (at.gpus - 1)],
        relative=True,
    )


def _ernest() -> Peer:
    """T = t0 + t1 work / N + t2 log N + t3 N by non-negative least squares: Venkataraman et al., NSDI 2016, 3."""
    return _least_squares(
        "Ernest",
        "NSDI 2016",
        lambda at: [np.ones_like(at.gpus), at.images / at.gpus, np.log(at.gpus), at.gpus],
        relative=False,
    )


LINEAR, CONSTANT, AMDAHL, USL, ERNEST = _linear(), _constant(), _amdahl(), _usl(), _ernest()
PEERS = (LINEAR, CONSTANT, AMDAHL, USL, ERNEST)
