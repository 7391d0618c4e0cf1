"""The likelihood of a series with many runs, in coordinates in which it is easily drawn from.

Ten points of 50 runs leave each step a few tenths of a percent. What explains them all is a thin, curved sheet among
the parameters, and a mixture of multivariate t covers it badly. Here a row holds, in place of the compute, its distance
from the compute that meets the measured steps, given all other parameters. That takes most of the curvature away, and
changes no volume (the Jacobian is 1), so that densities stay what they are.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from vitscale.prediction.likelihood import COMPUTE, Likelihood, meeting
from vitscale.prediction.sampling import Proposal, Sample, StudentT, sample
from vitscale.prediction.step.model import Array

_SEED = 11
_TRIED = 256
"""Draws of the prior of which the most probable is where the search for the maximum begins."""
_STEP = 1e-3
_ITERATIONS = 30
_CLOSE = 1e-3
"""Gain of log density below which the search ends: the maximum is only a place to begin at."""
_CURVED = 0.3, 1e10
"""Least and most curvature that the search believes: a prior has 1."""
_WIDER = (1.0, 2.0, 4.0)
"""Factors on the covariance at the maximum, for proposals around it."""
_STEP_SHARES: Array = np.asarray(0.5 ** np.arange(8), dtype=np.float64)
"""Shares of Newton's step that are tried at once."""
_COMPONENTS = 3


class _Quadratic(NamedTuple):
    """A log density around a row of `size`, to the second order."""

    value: float
    gradient: Array
    """(size,)."""
    curvature: Array
    """Second derivatives with the opposite sign, (size, size)."""


def draw_levelled(likelihood: Likelihood, rng: np.random.Generator, draws: int) -> tuple[Sample, Array]:
    """(the draws, their rows as `Likelihood` takes them), as `sampling.sample` draws them."""
    levelled = Levelled(likelihood)
    drawn = sample(levelled.log_density, levelled.proposals(), rng, draws, _COMPONENTS)
    return drawn, levelled.standard(drawn.rows)


class Levelled:
    """Density of rows that hold the parameters of `likelihood`, with the compute told from what meets the steps."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self._column = int(np.searchsorted(likelihood.active, COMPUTE))
        self._meeting = partial(meeting, likelihood.mean_residuals, self._column, likelihood.spread[COMPUTE])
        self._prior = likelihood.prior()

    def standard(self, rows: Array) -> Array:
        """Returns the rows as `Likelihood` takes them."""
        standard = rows.copy()
        standard[:, self._column] += self._meeting(rows)
        return standard

    def log_density(self, rows: Array) -> Array:
        """Log density of each row, as `Likelihood.log_density`."""
        return self.likelihood.log_density(self.standard(rows))

    def proposals(self) -> tuple[Proposal, ...]:
        """First proposals: around the maximum, ever wider, and the prior with a compute that meets the steps."""
        with np.errstate(over="ignore", invalid="ignore"):  # of steps that are too long, which are not taken
            best, covariance = self._maximum()
        return (*(StudentT(best, factor * covariance) for factor in _WIDER), self._prior)

    def _maximum(self) -> tuple[Array, Array]:
        """The most probable row and the covariance there, by Newton's steps that are shortened as far as they need.

        SciPy's `trust-exact` finds the same in twice the time, and searches with first derivatives alone end lower.
        """
        # Beyond the largest scale of jobs there is no density to take differences of.
        largest_scale = math.log(self.likelihood.most_job_to_job) - 3 * _STEP
        best = self._most_probable_draw()
        best[-1] = min(best[-1], largest_scale)
        covariance: Array = np.diag(self._prior.scales**2)
        for _ in range(_ITERATIONS):
            density = self._quadratic_around(best)
            if not np.isfinite(density.curvature).all():
                break
            covariance = _covariance(density.curvature)
            moved = best + _STEP_SHARES[:, None] * (covariance @ density.gradient)
            moved[:, -1] = np.minimum(moved[:, -1], largest_scale)
            densities = self._known_density(moved)
            if not densities.max() > density.value + _CLOSE:
                break
            best = moved[np.argmax(densities)]
        return best, covariance

    def _most_probable_draw(self) -> Array:
        """The most probable of the prior's centre and some draws of it."""
        draws = self._prior.draw(np.random.default_rng(_SEED), _TRIED - 1)
        tried = np.vstack([self._prior.centre, draws])
        return np.asarray(tried[np.argmax(self._known_density(tried))], dtype=np.float64)

    def _quadratic_around(self, row: Array) -> _Quadratic:
        """The log density around a row, by central differences that are all asked for at once."""
        size = len(row)
        first, second = np.tril_indices(size, -1)
        along = _STEP * np.eye(size)
        along_both = along[first] + along[second]
        around = np.vstack([np.zeros(size), along, -along, along_both, -along_both])
        edges = np.cumsum([1, size, size, len(first)])
        (value,), up, down, up_both, down_both = np.split(self._known_density(row + around), edges)
        curvature = np.diag(2 * value - up - down)
        mixed = (up + down)[first] + (up + down)[second] - up_both - down_both - 2 * value
        curvature[first, second] = curvature[second, first] = mixed / 2
        return _Quadratic(float(value), (up - down) / (2 * _STEP), curvature / _STEP**2)

    def _known_density(self, rows: Array) -> Array:
        """Log density of each row; -inf also where it is not a number."""
        return np.nan_to_num(self.log_density(rows), nan=-np.inf, posinf=-np.inf, neginf=-np.inf)


def _covariance(curvature: Array) -> Array:
    """The inverse of the curvature, whose values are taken for positive and within `_CURVED`."""
    values, vectors = np.linalg.eigh(curvature)
    return np.asarray(vectors / np.clip(np.abs(values), *_CURVED) @ vectors.T, dtype=np.float64)
