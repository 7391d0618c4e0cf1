"""Each part of a series' step fitted from what measured it; what nothing measured stays at its prior."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from vitscale.prediction.evidence import Evidence, Point, Series
from vitscale.prediction.likelihood import Likelihood, by_name
from vitscale.prediction.parameters import priors
from vitscale.prediction.sampling import sample
from vitscale.prediction.step.model import Draws, StepModel
from vitscale.prediction.step.of_series import fitted_points, model_of

Array = NDArray[np.float64]
DRAWS = 512


@dataclass(frozen=True)
class FittedSeries:
    """The parts of one series' step, as draws from what the evidence leaves open."""

    series: Series
    points: tuple[Point, ...]
    """Those that the fit rests on."""
    left_out: str
    """Why others were left out; empty where none was."""
    model: StepModel
    draws: Draws
    """Parameter -> (DRAWS, 1)."""
    job_spread: Array
    """(DRAWS, 1): scale of the logarithm of a run's step time about the mean of many, a t of `JOB_FREEDOM`."""
    effective_draws: float
    """Independent draws that `draws` are worth."""


@dataclass(frozen=True)
class Fitted:
    """All series of a results folder."""

    evidence: Evidence
    series: Mapping[str, FittedSeries]
    """By name."""


class _OnDemand(Mapping[str, FittedSeries]):
    """Each series fitted when it is first asked for."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.by_name = {series.name: series for series in evidence.series}
        self.known: dict[str, FittedSeries] = {}

    def __getitem__(self, name: str) -> FittedSeries:
        if name not in self.known:
            self.known[name] = fit_series(self.by_name[name], self.evidence)
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)


def fit(evidence: Evidence) -> Fitted:
    """Every series of the evidence, each fitted when it is first asked for."""
    return Fitted(evidence, _OnDemand(evidence))


def fit_series(series: Series, evidence: Evidence) -> FittedSeries:
    """Fits one series."""
    points, left_out = fitted_points(series)
    model = model_of(points, evidence)
    known = priors(points, evidence.network, model.messages is not None)
    draws, job_scale, effective = _posterior(Likelihood(model, points, known))
    return FittedSeries(series, points, left_out, model, draws, job_scale, effective)


def spread_out_normals(rng: np.random.Generator, count: int) -> Array:
    """(count, 1) standard normals, one from each of `count` equally likely parts of the line, in random order: tails
    differ less from one use to the next than with independent ones."""
    return rng.permutation(_normals(count))[:, None]


def spread_out_jobs(rng: np.random.Generator, count: int) -> Array:
    """(count, 1) effects of jobs in units of their scale, spread out alike: Student's t of four degrees of freedom, by
    its quantiles in closed form (Shaw, Journal of Computational Finance 2006, equation 36)."""
    below = (rng.permutation(count) + 0.5) / count
    alpha = 4 * below * (1 - below)
    quantile = 2 * np.sqrt(np.cos(np.arccos(np.sqrt(alpha)) / 3) / np.sqrt(alpha) - 1)
    return np.asarray(np.sign(below - 0.5) * quantile, dtype=np.float64)[:, None]


@cache
def _normals(count: int) -> Array:
    normal = NormalDist()
    return np.array([normal.inv_cdf((n + 0.5) / count) for n in range(count)])


def _posterior(likelihood: Likelihood) -> tuple[Draws, Array, float]:
    """(draws, job-to-job scale (DRAWS, 1), effective sample size)."""
    rng = np.random.default_rng(20260221)
    drawn = sample(likelihood.log_density, likelihood.proposals(), rng, DRAWS)
    rows = likelihood.rows(drawn.rows, rng)
    return by_name(rows), np.exp(drawn.rows[:, [-1]]), drawn.effective_size
