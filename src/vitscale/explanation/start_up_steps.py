"""Finds how many first steps are still slow: the first one, and those in which something is compiled or tuned.

At most `MOST` are left out, so that a training that becomes slower all the time is not taken for one that warms up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitscale.analysis.runs.warmup import warm_up
from vitscale.base.arrays import FloatArray
from vitscale.present.units import counted

MOST = 10
"""Most first steps that are left out."""
FEWEST_STEPS = 5
"""Fewest steps that must be there for the first one to be left out."""
_SLOW_FACTOR = 1.5
"""How many times as long as the usual step a step is in which something was compiled."""


@dataclass(frozen=True)
class StartUpSteps:
    """First steps that no figure rests on."""

    steps: int
    reason: str
    """A sentence: how many, and why."""


def start_up_steps(seconds: FloatArray, *, compiles: bool) -> StartUpSteps:
    """Return how many first steps to leave out.

    The first one always is (memory is allocated, workers start), unless there are fewer than `FEWEST_STEPS`. So are
    those up to the last very slow one of the first `MOST`, if no later step is as slow: what happens again and again,
    such as logging, is no start-up. So are slow ones at the beginning (`analysis.runs.warmup`).

    Args:
        seconds: the length of each step, (S,).
        compiles: whether the model is compiled.
    """
    total = len(seconds)
    if total < FEWEST_STEPS:
        return StartUpSteps(0, f"only {counted(total, 'step')}: even the first one counts, though it is slower")
    after_first = seconds[1:]
    slow_after_first = max(_slow_beginning(after_first), _last_very_slow(after_first))
    count = 1 + min(slow_after_first, MOST - 1, total // 2)
    if count == 1:
        return StartUpSteps(1, "the first step is left out: it allocates memory and starts the loader")
    why = "torch.compile compiles in them" if compiles else "they are slower than the later ones"
    return StartUpSteps(count, f"the first {count} steps are left out: {why}")


def _slow_beginning(seconds: FloatArray) -> int:
    """Return how many steps at the beginning are slow without a break; 0 where there are too few to say."""
    return warm_up(seconds[None, :])[0].steps


def _last_very_slow(seconds: FloatArray) -> int:
    """Return the number of steps up to the last very slow one of the first `MOST`; 0 where later ones are as slow."""
    is_very_slow = seconds > _SLOW_FACTOR * np.median(seconds[len(seconds) // 2 :])
    if is_very_slow[MOST - 1 :].any():
        return 0
    positions = np.flatnonzero(is_very_slow[: MOST - 1])
    return int(positions[-1]) + 1 if len(positions) else 0
