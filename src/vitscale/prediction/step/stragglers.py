"""Waiting for the slowest: the expected largest of many ranks, lasting differences of devices, mixed devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def expected_slowest(ranks: Array) -> Array:
    """Expected largest of N independent standard normals: `Phi^-1((N - 0.375) / (N + 0.25))`; 0 at one rank.

    Blom, "Statistical Estimates and Transformed Beta-Variables" (1958). Within 0.03 of the exact value (Harter,
    Biometrika 48, 1961, table 1) from 2 to a million ranks.
    """
    counts, places = np.unique(np.asarray(ranks, dtype=np.float64), return_inverse=True)
    return np.array([_of_count(float(count)) for count in counts])[places].reshape(np.shape(ranks))


@lru_cache(maxsize=100_000)
def _of_count(ranks: float) -> float:
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def straggler_factor(ranks: Array, jitter_spread: Array | float, device_spread: Array | float) -> Array:
    """The mean step of N ranks that wait for one another, over that of one rank of mean speed: at least 1.

    `1 + hypot(jitter, devices) z(N)`, z as `expected_slowest`: jitter makes another rank late in every step, a device's
    own speed the same one always, and what is waited for is the largest of their sums. Over a run jitter averages out;
    which devices a job has got does not, and comes back as a difference between jobs.

    Args:
        ranks: N.
        jitter_spread: of like steps of a rank, standard deviation over mean.
        device_spread: between devices, of their mean steps, likewise.
    """
    return 1.0 + np.hypot(jitter_spread, device_spread) * expected_slowest(ranks)


def mixed_factor(speeds: Sequence[float]) -> tuple[float, float]:
    """The step on ranks of unlike speed, over that on as many ranks of the fastest's: (equal shares, balanced ones).

    Equal shares: all wait for the slowest, `max / min`. Balanced: each gets images in proportion to its speed, and all
    are done at once, `max / mean`.

    Args:
        speeds: of each rank, greater than 0; only their ratios count.
    """
    fastest = max(speeds)
    return fastest / min(speeds), fastest * len(speeds) / sum(speeds)
