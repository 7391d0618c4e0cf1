"""Intervals of figures that rest on the steps of one run.

Neighbouring steps are not independent: a loader's queue and other programs act on several in a row. So the steps are
put into blocks of neighbours, and the means of blocks are the observations (batch means: Law & Carson, "A sequential
procedure for determining the length of a steady-state simulation", Operations Research 27, 1979, 1011-1025).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from vitscale.analysis.statistics import mean_interval, t_quantile
from vitscale.base.arrays import FloatArray
from vitscale.present.estimate import Estimate

_MOST_BLOCKS = 10
_FEWEST_BLOCKS = 3
_STEPS_PER_BLOCK = 2
"""Fewest steps of a block."""
TOO_FEW_STEPS = "too few steps for an interval"
_FALSE_ALARM = 0.002
"""How often a difference between equal sides may be taken for a real one."""


def block_means(values: FloatArray) -> list[float]:
    """Return the means of up to 10 blocks of neighbouring steps, (S,); of fewer than 6 steps none."""
    blocks = min(_MOST_BLOCKS, len(values) // _STEPS_PER_BLOCK)
    if blocks < _FEWEST_BLOCKS:
        return []
    return [float(block.mean()) for block in np.array_split(values, blocks)]


def step_interval(values: FloatArray) -> Estimate:
    """Return the mean over steps, (S,) and at least one, with its 95 % interval; without one for too few steps."""
    means = block_means(values)
    mean = float(values.mean())
    if not means:
        return Estimate(mean, note=TOO_FEW_STEPS)
    interval = mean_interval(means)
    return Estimate(mean, interval.low, interval.high)


def is_above_zero(values: FloatArray, comparisons: int = 1) -> bool:
    """Whether the mean over steps, (S,), is above 0 beyond chance; False for too few steps.

    Args:
        values: one for each step.
        comparisons: of how many such series this one is the largest; chance has as many tries.
    """
    means = block_means(values)
    return bool(means) and mean_is_above_zero(means, comparisons)


def mean_is_above_zero(means: Sequence[float], comparisons: int = 1) -> bool:
    """Whether the mean of independent values is above 0 beyond chance, by Student's t; see `is_above_zero`."""
    error = statistics.stdev(means) / math.sqrt(len(means))
    limit = t_quantile(len(means) - 1, 1 - _FALSE_ALARM / comparisons)
    return statistics.fmean(means) > limit * error
