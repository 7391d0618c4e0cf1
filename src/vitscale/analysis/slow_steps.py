"""Steps that are slow beyond all others of their run: a preemption, a page-cache miss, a kernel compiled anew.

One such step among 80 that takes eight seconds would decide what all 80 say. It is set aside, on all ranks, where it
is rare: at most one step in a hundred. What comes more often is the machine's nature, and stays in every figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.analysis.pace import StepKind

FEWEST_STEPS = 8
"""Below it nobody knows what is usual, and nothing is set aside."""
SLOWER_TIMES = 1.5
DEVIATIONS = 6.0
"""Of the logarithms: with both, chance alone sets a step aside in at most 2 % of runs of log-normal noise."""
ONE_IN = 100
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of normal noise to its standard deviation."""
_AS_LONG = 0.5


@dataclass(frozen=True)
class SlowSteps:
    """The slow steps of one run, by number."""

    set_aside: tuple[int, ...] = ()
    """In no figure of the run but its tails (p95, p99) and its elapsed epochs."""
    kept: tuple[int, ...] = ()
    """They come too often to be set aside, and are in every figure."""


def slow_steps(seconds: Mapping[int, float], kinds: Mapping[int, StepKind]) -> SlowSteps:
    """Finds the slow ones among a run's light steps after warm-up.

    A step is slow where it takes 1.5 times the median whole step, and more than 6 scaled median absolute deviations of
    the logarithms beyond it. One that begins an epoch is held against the least of its like instead, where there are
    two or more and that is longer: waiting for the loader is part of every epoch.

    At most one in a hundred is set aside, and one in runs shorter than that: the slowest. One is not set aside where
    one more is at least half as long beyond the usual as it is: such steps come more often than that.

    Args:
        seconds: elapsed seconds by step (`pace.elapsed_by_step`).
        kinds: of each step (`pace.step_kinds`).
    """
    if len(seconds) < FEWEST_STEPS:
        return SlowSteps()
    whole = [value for step, value in seconds.items() if kinds[step] == "whole"]
    usual = statistics.median(whole if len(whole) >= FEWEST_STEPS else seconds.values())
    if usual <= 0:
        return SlowSteps()
    logs = [math.log(value) for value in whole or seconds.values() if value > 0]
    centre = statistics.median(logs)
    noise = _MAD_TO_SIGMA * statistics.median(abs(log - centre) for log in logs)
    margin = max(math.log(SLOWER_TIMES), DEVIATIONS * noise)
    firsts = sorted(value for step, value in seconds.items() if kinds[step] == "first")
    of_a_first = max(usual, firsts[0]) if len(firsts) > 1 else usual
    beyond = {
        step: value - level
        for step, value in seconds.items()
        if value > (level := of_a_first if kinds[step] == "first" else usual)
        and math.log(value) - math.log(level) > margin
    }
    slowest = sorted(beyond, key=beyond.__getitem__, reverse=True)
    most = max(1, len(seconds) // ONE_IN)
    count = next(
        count
        for count in range(min(most, len(slowest)), -1, -1)
        if count in (0, len(slowest)) or beyond[slowest[count]] < _AS_LONG * beyond[slowest[count - 1]]
    )
    return SlowSteps(tuple(sorted(slowest[:count])), tuple(sorted(slowest[count:])))
