"""Draws from a density that is known up to a factor, by importance sampling that adapts until enough draws count.

Proposals are made round after round; those of all rounds are weighted by the mixture of all proposals (adaptive
multiple importance sampling: Cornuet et al., Scandinavian Journal of Statistics 2012). The first round is the caller's;
each later one is a mixture of multivariate t, fitted to the weighted draws of the rounds before (compare West, J. R.
Stat. Soc. B 1993). Where few proposals carry all the weight, weights are tempered until more do (Koblents & Miguez,
Statistics and Computing 2015), so that a poor first round is walked away from and not believed. The effective sample
size is Kish's, (sum w)^2 / sum w^2. No random number differs from one call to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ENOUGH = 1200.0
"""Effective draws at which no further round is made."""
FEW = 400.0
"""Effective draws that suffice after the usual rounds."""
_EACH_ROUND = 1500
_USUAL_ROUNDS = 12
_MOST_ROUNDS = 36
_COMPONENTS = 6
_FITTED = 1000
_ITERATIONS = 6
_FREEDOM = 6
_LEAST_TEMPERED = 150.0
"""Least effective draws that a mixture is fitted to: weights are tempered until as many count."""


class Proposal(Protocol):
    """What proposals are drawn from."""

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Rows that are drawn, (count, size)."""

    def log_density(self, rows: Array) -> Array:
        """Normalised log density of each row, (rows,)."""


@dataclass(frozen=True)
class Sample:
    """Equally weighted draws."""

    rows: Array
    """(draws, size), in random order."""
    effective_size: float
    """Independent draws that the weighted proposals were worth."""
    log_evidence: float
    """Logarithm of the integral of the density as it was given."""


def sample(
    log_target: Callable[[Array], Array],
    first: Sequence[Proposal],
    rng: np.random.Generator,
    draws: int,
    components: int = _COMPONENTS,
) -> Sample:
    """Draws from `log_target`.

    Args:
        log_target: (rows, size) -> (rows,), up to a constant; -inf or NaN is impossible.
        first: proposals of the first round, in equal parts.
        rng: the caller's.
        draws: how many to return.
        components: number of t that each later round is a mixture of.
    """
    proposals: list[Proposal] = []
    counts: list[int] = []
    rows = np.empty((0, 0))
    target = np.empty(0)
    densities = np.empty((0, 0))
    log_weights = np.empty(0)
    fresh: list[tuple[Proposal, int]] = [(each, _EACH_ROUND // len(first)) for each in first]
    for number in range(1, _MOST_ROUNDS + 1):
        new = np.vstack([each.draw(rng, count) for each, count in fresh])
        rows = np.vstack([rows, new]) if len(rows) else new
        target = np.concatenate([target, np.nan_to_num(log_target(new), nan=-np.inf)])
        of_new = [each.log_density(new) for each in proposals]
        densities = np.column_stack([densities, of_new]) if proposals else np.empty((0, len(new)))
        densities = np.vstack([densities, *(each.log_density(rows) for each, _ in fresh)])
        proposals += [each for each, _ in fresh]
        counts += [count for _, count in fresh]
        mixture = _log_sum(densities + np.log(np.array(counts) / sum(counts))[:, None])
        log_weights = target - mixture
        if effective_size(log_weights) >= (ENOUGH if number < _USUAL_ROUNDS else FEW):
            break
        fresh = [(Mixture(rows, _tempered(log_weights), rng, components), _EACH_ROUND)]
    chosen = _resampled(log_weights, draws)
    rng.shuffle(chosen)
    log_evidence = float(np.logaddexp.reduce(log_weights)) - math.log(len(log_weights))
    return Sample(rows[chosen], effective_size(log_weights), log_evidence)


def effective_size(log_weights: Array) -> float:
    """Kish's effective sample size of weights that are known up to a factor."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum())


@dataclass(frozen=True)
class Normal:
    """Independent normals."""

    centre: Array
    scales: Array

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """See `Proposal`."""
        return np.asarray(self.centre + self.scales * rng.standard_normal((count, len(self.scales))), dtype=np.float64)

    def log_density(self, rows: Array) -> Array:
        """See `Proposal`."""
        density = -0.5 * (((rows - self.centre) / self.scales) ** 2).sum(axis=1)
        return np.asarray(density - float(np.log(self.scales * math.sqrt(2 * math.pi)).sum()), dtype=np.float64)


class StudentT:
    """A multivariate t of a centre (size,) and a covariance (size, size), or several, by leading axes."""

    def __init__(self, centre: Array, covariance: Array) -> None:
        self.centre = centre
        self.factor: Array = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        self._inverse: Array = np.asarray(np.linalg.inv(self.factor), dtype=np.float64)

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """See `Proposal`; of one."""
        return self.centre + _heavy_tailed(rng, count, len(self.centre)) @ self.factor.T

    def log_density(self, rows: Array) -> Array:
        """See `Proposal`; (..., rows) of several."""
        size = rows.shape[1]
        # One product for all, with a column for each row: a third of the time of a product for each.
        apart = self._inverse.reshape(-1, size) @ rows.T
        apart -= (self._inverse @ self.centre[..., None]).reshape(-1, 1)
        apart *= apart
        distance = apart.reshape(*self.centre.shape, len(rows)).sum(axis=-2)
        constant = (
            math.lgamma((_FREEDOM + size) / 2)
            - math.lgamma(_FREEDOM / 2)
            - size / 2 * math.log(_FREEDOM * math.pi)
            - np.log(np.diagonal(self.factor, axis1=-2, axis2=-1)).sum(axis=-1)[..., None]
        )
        return np.asarray(constant - (_FREEDOM + size) / 2 * np.log1p(distance / _FREEDOM), dtype=np.float64)


class Mixture:
    """Several multivariate t, each over a part of some weighted draws, fitted by expectation and maximisation."""

    def __init__(self, rows: Array, log_weights: Array, rng: np.random.Generator, components: int) -> None:
        chosen = rows[_resampled(log_weights, _FITTED)]
        size = rows.shape[1]
        self.scales = chosen.std(axis=0) + 1e-9
        standard = chosen / self.scales
        # Begin with the parts nearest to draws that lie far apart (k-means++).
        apart_from = [((standard - standard[0]) ** 2).sum(axis=1)]
        while len(apart_from) < components:
            distance = np.min(apart_from, axis=0) + 1e-12
            centre = standard[rng.choice(len(standard), p=distance / distance.sum())]
            apart_from.append(((standard - centre) ** 2).sum(axis=1))
        shares = np.eye(components)[:, np.argmin(apart_from, axis=0)]
        whole = np.cov(standard.T) + np.eye(size) * 1e-6
        self._parts, self._weights = _maximised(standard, shares, whole)
        for _ in range(_ITERATIONS - 1):
            logs = self._parts.log_density(standard) + np.log(self._weights)[:, None]
            self._parts, self._weights = _maximised(standard, np.exp(logs - _log_sum(logs)), whole)

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """See `Proposal`."""
        counts = rng.multinomial(count, self._weights)
        parts = zip(self._parts.centre, self._parts.factor, counts, strict=True)
        drawn = [centre + _heavy_tailed(rng, n, len(centre)) @ factor.T for centre, factor, n in parts]
        return np.asarray(np.vstack(drawn) * self.scales, dtype=np.float64)

    def log_density(self, rows: Array) -> Array:
        """See `Proposal`."""
        logs = self._parts.log_density(rows / self.scales) + np.log(self._weights)[:, None]
        return np.asarray(_log_sum(logs) - np.log(self.scales).sum(), dtype=np.float64)


def _maximised(rows: Array, shares: Array, whole: Array) -> tuple[StudentT, Array]:
    """The parts and their weights, by each part's shares (parts, rows) of the rows, whose covariance is `whole`."""
    size = rows.shape[1]
    total = shares.sum(axis=1)
    centres = shares @ rows / np.maximum(total, 1e-9)[:, None]
    apart = rows.T - centres[..., None]
    own = (shares[:, None] * apart) @ apart.transpose(0, 2, 1)
    # As if 0.1 x `size` more draws had the spread of all: few draws have no covariance of their own.
    parts = StudentT(centres, (own + 0.1 * size * whole) / (total + 0.1 * size)[:, None, None])
    return parts, (total + 1.0) / (total + 1.0).sum()


def _log_sum(logs: Array) -> Array:
    """Logarithm of the sum of exponentials over the rows: as `np.logaddexp.reduce`, in a third of the time."""
    most = np.maximum(logs.max(axis=0), -1e300)  # where all are -inf too
    return np.asarray(most + np.log(np.exp(logs - most).sum(axis=0)), dtype=np.float64)


def _heavy_tailed(rng: np.random.Generator, count: int, size: int) -> Array:
    wide = np.sqrt(_FREEDOM / rng.chisquare(_FREEDOM, (count, 1)))
    return np.asarray(rng.standard_normal((count, size)) * wide, dtype=np.float64)


def _tempered(log_weights: Array) -> Array:
    """The weights to the largest power in (0, 1] at which `_LEAST_TEMPERED` draws count, by bisection."""
    possible = np.where(np.isfinite(log_weights), log_weights, log_weights.max() - 700.0)
    low, high = 0.0, 1.0
    if effective_size(possible) >= _LEAST_TEMPERED:
        return possible
    for _ in range(20):
        power = (low + high) / 2
        low, high = (power, high) if effective_size(power * possible) >= _LEAST_TEMPERED else (low, power)
    return np.asarray(low * possible, dtype=np.float64)


def _resampled(log_weights: Array, draws: int) -> NDArray[np.int64]:
    """Indices of draws by systematic resampling: equal steps through the cumulated weights."""
    edges = np.cumsum(np.exp(log_weights - log_weights.max()))
    chosen = np.searchsorted(edges / edges[-1], (np.arange(draws) + 0.5) / draws)
    return np.asarray(np.minimum(chosen, len(log_weights) - 1), dtype=np.int64)


def spread_out_normals(rng: np.random.Generator, count: int) -> Array:
    """(count, 1) standard normals, one from each of `count` equally likely parts of the line, in random order.

    Tails differ less from one use to the next than those of independent normals.
    """
    return rng.permutation(_normals(count))[:, None]


def spread_out_student_t(rng: np.random.Generator, count: int, *, freedom: float) -> Array:
    """(count, 1) values of Student's t with `freedom` degrees of freedom, spread out likewise."""
    from scipy.special import stdtrit

    shares = (rng.permutation(count) + 0.5) / count
    return np.asarray(stdtrit(freedom, shares), dtype=np.float64)[:, None]


@cache
def _normals(count: int) -> Array:
    from scipy.special import ndtri

    return np.asarray(ndtri((np.arange(count) + 0.5) / count), dtype=np.float64)
