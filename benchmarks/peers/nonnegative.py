"""Least squares with coefficients of at least zero, for many right-hand sides at once."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from peers.runs import Array


def nonnegative_least_squares(columns: Array, targets: Array, weights: Array) -> Array:
    """For each row y of `targets` (draws, points) the c >= 0 that minimises sum(w² (y - columns c)²): (draws, columns).

    The optimum is the unconstrained one over some subset of the columns that comes out non-negative there (Lawson &
    Hanson, "Solving Least Squares Problems", chapter 23, finds that subset step by step). With four columns all fifteen
    can be tried, the smallest first: of equally good ones the simplest is kept. `weights` is of the shape of `targets`.
    """
    draws, count = targets.shape[0], columns.shape[1]
    best = np.zeros((draws, count))
    whole = np.sum((weights * targets) ** 2, axis=1)
    least = whole
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            weighted = weights[:, :, None] * columns[None, :, subset]
            found = np.einsum("dcp,dp->dc", np.linalg.pinv(weighted), weights * targets)
            left = np.sum((weights * targets - np.einsum("dpc,dc->dp", weighted, found)) ** 2, axis=1)
            better = (found >= 0).all(axis=1) & (left < least - 1e-12 * whole)
            least = np.where(better, left, least)
            for place, column in enumerate(subset):
                best[better, column] = found[better, place]
            others = [column for column in range(count) if column not in subset]
            best[np.ix_(better, others)] = 0.0
    return best
