"""The likelihood of a series with many runs, in coordinates in which it is easily drawn from.

Ten points of 50 runs leave each step a few tenths of a percent. What explains them all is a thin, curved sheet among
the parameters, and a mixture of multivariate t covers it badly. Here a row holds, in place of the compute, its distance
from the compute that meets the measured steps, given all other parameters. That takes most of the curvature away, and
changes no volume (the Jacobian is 1), so that densities stay what they are.
"""

from __future__ import annotations

import math
from functools import partial

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
_COMPONENTS = 3


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
        """The rows as `Likelihood` takes them."""
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
        """The most probable row and the covariance there, by Newton's steps with differences for derivatives."""
        tried = np.vstack([self._prior.centre, self._prior.draw(np.random.default_rng(_SEED), _TRIED - 1)])
        best: Array = tried[np.argmax(self._known_density(tried))]
        covariance: Array = np.diag(self._prior.scales**2)
        size = len(best)
        first, second = np.tril_indices(size, -1)
        along = _STEP * np.eye(size)
        both = along[first] + along[second]
        around = np.vstack([np.zeros(size), along, -along, both, -both])
        shorter = 0.5 ** np.arange(8)[:, None]
        # Beyond the largest scale of jobs there is no density to take differences of.
        largest_scale = math.log(self.likelihood.most_job_to_job) - 3 * _STEP
        best[-1] = min(best[-1], largest_scale)
        for _ in range(_ITERATIONS):
            (here,), up, down, above, below = np.split(
                self._known_density(best + around), np.cumsum([1, size, size, len(first)])
            )
            curvature = np.diag(2 * here - up - down)
            mixed = (up + down)[first] + (up + down)[second] - above - below - 2 * here
            curvature[first, second] = curvature[second, first] = mixed / 2
            if not np.isfinite(curvature).all():
                break
            values, vectors = np.linalg.eigh(curvature / _STEP**2)
            covariance = vectors / np.clip(np.abs(values), *_CURVED) @ vectors.T
            moved = best + shorter * (covariance @ (up - down) / (2 * _STEP))
            moved[:, -1] = np.minimum(moved[:, -1], largest_scale)
            densities = self._known_density(moved)
            if not densities.max() > here + _CLOSE:
                break
            best = moved[np.argmax(densities)]
        return best, covariance

    def _known_density(self, rows: Array) -> Array:
        """The log density, -inf also where it is no number."""
        return np.nan_to_num(self.log_density(rows), nan=-np.inf, posinf=-np.inf, neginf=-np.inf)
