"""The factors of a waterfall in words: "17 points are waiting for rank 3"; whole points, which add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitscale.analysis import Factor, Waterfall
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP
from vitscale.analysis.time.waterfall import STEP_ROUNDING
from vitscale.store.records import COMMUNICATION

_LOST_TO = {
    STEP_ROUNDING: "step rounding",
    "data wait": "waiting for data",
    "loading": "waiting for images to be read",
    "decoding": "waiting for images to be decoded",
    START_UP: "start-up",
    EVALUATION: "evaluation",
    CHECKPOINT: "saving a checkpoint",
    "wire": "the transfer",
    "synchronised norm": "what synchronised norms exchange",
    COMMUNICATION: "waiting for ranks and the transfer, which could not be told apart",
    "optimizer": "the optimizer",
    "launch gaps": "gaps between kernels",
}
_GAINED_BY = {
    STEP_ROUNDING: "step rounding",
    "data wait": "less waiting for data",
    "loading": "less waiting for images to be read",
    "decoding": "less waiting for images to be decoded",
    START_UP: "a shorter start-up",
    EVALUATION: "a shorter evaluation",
    CHECKPOINT: "a checkpoint that is saved sooner",
    "straggler wait": "less waiting for the slowest rank",
    "wire": "a shorter transfer",
    "synchronised norm": "a shorter exchange of synchronised norms",
    COMMUNICATION: "less waiting for ranks and transfer, which could not be told apart",
    "optimizer": "a faster optimizer",
    "launch gaps": "shorter gaps between kernels",
}
_OTHER = "other things"
_MOST_NAMED = 4


def contributions(one: Waterfall) -> tuple[str, ...]:
    """The largest contributions of at least a point, at most four and the rest in one, largest first.

    Their numbers and the efficiency in whole percent add up to 100.
    """
    if one.efficiency is None:
        return ()
    by_size = sorted(one.factors, key=lambda factor: -abs(factor.points))
    named = [factor for factor in by_size if abs(factor.points) >= 0.01 and factor.name != "other"][:_MOST_NAMED]
    rest = sum(factor.points for factor in one.factors if factor not in named)
    exact = [100 * points for points in (*(factor.points for factor in named), rest)]
    rounded = whole(exact, 100 - round(100 * one.efficiency))
    found = [
        (points, _what(one, factor.name, points), _bounds(factor, points))
        for factor, points in zip(named, rounded, strict=False)
    ]
    said = [each for each in (*found, (rounded[-1], _OTHER, "")) if each[0]]
    return tuple(_clause(*each, first=place == 0) for place, each in enumerate(said))


def _bounds(factor: Factor, points: int) -> str:
    """ " (12 to 21)", the 95 % interval on the side that is told; nothing where it is no wider than a point."""
    if factor.interval is None or factor.interval.low is None or factor.interval.high is None:
        return ""
    ends = (100 * factor.interval.low, 100 * factor.interval.high)
    low, high = ends if points > 0 else (-ends[1], -ends[0])
    return f" ({low + 0.0:.0f} to {high + 0.0:.0f})" if high - low >= 1 else ""


def whole(values: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`, each within 1 of its own value: the largest remainders are rounded up.

    Args:
        values: at least one, their sum within 0.5 of `total`.
        total: what is to come out.
    """
    found = [math.floor(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda place: found[place] - values[place])
    for place in by_remainder[: total - sum(found)]:
        found[place] += 1
    return found


def _clause(points: int, what: str, bounds: str, *, first: bool) -> str:
    """ "17 points (12 to 21) are the transfer", "8 are the transfer", "1 is gained by step rounding"."""
    unit = f" point{'s' if abs(points) != 1 else ''}" if first else ""
    verb = "are" if abs(points) != 1 else "is"
    return f"{abs(points)}{unit}{bounds} {verb} {what if points > 0 else f'gained by {what}'}"


def _what(one: Waterfall, name: str, points: int) -> str:
    if name == "compute scaling":
        if one.work_per_rank is not None and one.work_per_rank < 1:
            return "smaller per-rank work"
        return "slower computing" if points > 0 else "faster computing"
    if name == "straggler wait" and points > 0:
        return _waiting(one)
    if name == STEP_ROUNDING and points < 0 and one.images_left_out >= 0.005:
        return f"step rounding, which leaves {100 * one.images_left_out:.0f} % of the images out"
    return (_LOST_TO if points > 0 else _GAINED_BY)[name]


def _waiting(one: Waterfall) -> str:
    """ "waiting for rank 3, which computes 21 % slower and comes last in 80 % of steps"."""
    if one.straggler is None:
        return "waiting for the slowest rank"
    slower, often = one.straggler.slower_by, one.straggler.share_of_steps
    known = [f"computes {100 * slower:.0f} % slower"] if slower is not None and slower >= 0.005 else []
    known += [f"comes last in {100 * often:.0f} % of steps"] if often < 0.995 else []
    return f"waiting for rank {one.straggler.rank}" + (f", which {' and '.join(known)}" if known else "")
