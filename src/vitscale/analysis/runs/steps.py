"""The steps of a run on all its ranks: what each adds to the time that passed, which are alike, and which are slow.

All ranks' clocks start together, at a barrier. From there the time that has passed by the end of step k is the largest
over ranks of the sum of their steps, and a step is what it adds to that:

    T(k) = max over ranks of (d(r, 1) + ... + d(r, k))          elapsed(k) = T(k) - T(k - 1)

so that any stretch of consecutive steps adds up to what passed. The largest over ranks of each step would not:
collectives tie the ranks' pace, so that a rank which stamps late in one step is short in the next, and a sum of such
maxima is more than passed, the more ranks the more.

A step is slow beyond all others of its run by a preemption, a page-cache miss, a kernel compiled anew. One such step
among 80 that takes eight seconds would decide what all 80 say. It is set aside, on all ranks, where it is rare: at most
one step in a hundred. What comes more often is the machine's nature, and stays in every figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from vitscale.store.records import RankRecord, StepLine
from vitscale.store.results import Run

StepKind = Literal["whole", "first", "short"]
"""whole: a full global batch. first: one that begins an epoch after the first, and may wait for the loader. short: the
last of an epoch, with the images that are left."""

FEWEST_STEPS = 8
"""Below it nobody knows what is usual, and nothing is set aside."""
SLOWER_TIMES = 1.5
DEVIATIONS = 6.0
"""Of the logarithms: with both, chance alone sets a step aside in at most 2 % of runs of log-normal noise."""
ONE_IN = 100
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of normal noise to its standard deviation."""
_AS_LONG = 0.5


def elapsed_by_step(steps: Mapping[int, Sequence[StepLine]]) -> dict[int, float]:
    """Seconds that each step adds to the time that passed: see the module.

    Clocks start together where an epoch or an explained block begins and after such a block. After marked warm-up they
    are taken as together, and so they are after a step that is missing in the record.

    Args:
        steps: step number to one line per rank, in rising order.
    """
    elapsed: dict[int, float] = {}
    sums: list[float] = []
    before: StepLine | None = None
    for step, lines in steps.items():
        line = lines[0]
        if (
            before is None
            or (before.step + 1, before.epoch, before.warmup) != (step, line.epoch, line.warmup)
            or (before.window == "explained") != (line.window == "explained")
        ):
            sums = [0.0] * len(lines)
        passed = max(sums)
        sums = [total + own.seconds for total, own in zip(sums, lines, strict=True)]
        elapsed[step] = max(sums) - passed
        before = line
    return elapsed


def step_kinds(steps: Mapping[int, Sequence[StepLine]]) -> dict[int, StepKind]:
    """What work each step holds, by its images and its place.

    The run's very first step is a whole one: if it is slow, that is warm-up.
    """
    images = {step: sum(line.images for line in lines) for step, lines in steps.items()}
    whole = max(images.values(), default=0)
    by_epoch: dict[int, list[int]] = {}
    for step, lines in steps.items():
        by_epoch.setdefault(lines[0].epoch, []).append(step)
    begins = {same[0] for same in list(by_epoch.values())[1:] if len(same) > 1}
    return {step: "short" if images[step] < whole else "first" if step in begins else "whole" for step in steps}


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
        seconds: elapsed seconds by step (`elapsed_by_step`).
        kinds: of each step (`step_kinds`).
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


class _OfAStep(Protocol):
    @property
    def step(self) -> int: ...


Line = TypeVar("Line", bound=_OfAStep)


def common_steps(run: Run, lines_of: Callable[[RankRecord], Sequence[Line]]) -> list[tuple[Line, ...]]:
    """The lines, one per rank, of each step of which every rank needed has one, in order; empty if a rank is missing.

    Args:
        run: the record.
        lines_of: the lines of one rank, each with a `step`.
    """
    by_rank = [{line.step: line for line in lines_of(rank)} for rank in run.ranks]
    if not by_rank or len(by_rank) < len(run.ranks_needed):
        return []
    common = set.intersection(*(set(lines) for lines in by_rank))
    return [tuple(lines[step] for lines in by_rank) for step in sorted(common)]
