"""Is a run warm? How many of its first steps are still slow, and whether its times still fall through the rest.

Steps marked as warm-up (`measure.warmup_steps`) have been left out before; this looks at what follows them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_STEPS = 12
"""Below it chance makes the first steps look slow too often, and nothing is looked for."""
_SLOWER_BY = 0.05
_DEVIATIONS = 3.0
_ALONE_SLOWER_BY = 0.5
_ALONE_DEVIATIONS = 10.0
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of normal noise to its standard deviation."""
_BLOCKS = 20
_FALL = 0.05
_Z = -2.33
"""One-sided 1 %: with the fall of 5 % that is asked for as well, chance alone is rarer still."""


@dataclass(frozen=True)
class WarmUp:
    """What a run's times say of its warm-up."""

    steps: int
    """So many of the first steps are slow; never more than half of all."""
    still_falling_by: float | None
    """By what share the times fall from the first to the last third of the other steps; None where they are steady."""


NONE_SEEN = WarmUp(0, None)


def warm_up(seconds: Sequence[float]) -> WarmUp:
    """Looks for a slow beginning in the times of like steps, in order.

    The steady level is the median of the later half, its noise the scaled median absolute deviation there: neither
    moves for a few outliers. A step is slow where it is beyond that level by 5 % and by 3 such deviations. Two or more
    slow steps at the beginning are warm-up; so is one alone that is beyond by half and by 10 deviations. What is slow
    later on is no warm-up.
    """
    if len(seconds) < FEWEST_STEPS:
        return NONE_SEEN
    half = len(seconds) // 2
    steady = statistics.median(seconds[half:])
    noise = _MAD_TO_SIGMA * statistics.median(abs(value - steady) for value in seconds[half:])

    def beyond(value: float, share: float, deviations: float) -> bool:
        return value > steady * (1 + share) and value > steady + deviations * noise

    slow = next((n for n, value in enumerate(seconds) if not beyond(value, _SLOWER_BY, _DEVIATIONS)), len(seconds))
    if slow == 1 and not beyond(seconds[0], _ALONE_SLOWER_BY, _ALONE_DEVIATIONS):
        slow = 0
    if slow > half:  # it did not get warm in time: what is left out is not all of it
        return WarmUp(half, 1 - steady / statistics.median(seconds[:half]))
    return WarmUp(slow, _fall(seconds[slow:]))


def _fall(seconds: Sequence[float]) -> float | None:
    """By what share the times fall, where they fall steadily: by 5 % and more than chance has it.

    Mann, "Nonparametric tests against trend" (Econometrica 13, 1945, 245-259), on the medians of up to 20 blocks of
    consecutive steps: noise that lasts a few steps stays inside a block.
    """
    count = min(_BLOCKS, len(seconds))
    edges = [len(seconds) * place // count for place in range(count + 1)]
    blocks = [statistics.median(seconds[start:end]) for start, end in itertools.pairwise(edges)]
    third = count // 3
    if third == 0:
        return None
    before, after = statistics.median(blocks[:third]), statistics.median(blocks[-third:])
    fall = 1 - after / before if before > 0 else 0.0
    score = sum((b > a) - (b < a) for place, a in enumerate(blocks) for b in blocks[place + 1 :])
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return fall if fall > _FALL and score / deviation < _Z else None
