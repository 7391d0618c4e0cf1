"""The answers: fastest, cheapest, most ranks, the knee; each from the surest candidates that there are.

Limits are held against the interval of a future run, not against the expected value alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitscale.advice.forecast_table import ForecastTable
from vitscale.advice.request import VERDICTS, Option, Request, of_a_run
from vitscale.base.arrays import BoolArray, FloatArray

QuestionKind = Literal["fastest", "cheapest", "most", "knee"]
_QUESTIONS: Mapping[str, QuestionKind] = {"budget": "fastest", "deadline": "cheapest", "efficiency": "most"}
"""Limit -> the question that it asks."""


@dataclass(frozen=True)
class Answer:
    """One question and what answers it."""

    kind: QuestionKind
    option: Option
    riskier: Option | None = None
    """A better option that less surely meets the limits, or whose engine nobody measured."""
    at_the_end: bool = False
    """Whether the knee lies at the largest count looked at, so that the real one may lie beyond."""


@dataclass(frozen=True)
class Choosing:
    """What all answers are chosen by."""

    view: ForecastTable
    asked: Request
    limits: Limits
    seconds: FloatArray
    """What is to be short: the time of the work, or the time to the same loss where the global batch may change."""

    @property
    def shown(self) -> BoolArray:
        """Candidates that are told of."""
        return self.view.contends & (self.view.keeps_batch | self.asked.any_batch)

    @property
    def pool(self) -> BoolArray:
        """Candidates that may be an answer: large batches only where they are asked for or nothing else is left."""
        moderate = self.shown & ~self.view.large_batch
        return moderate if moderate.any() and not self.asked.large_batch else self.shown

    @property
    def preferred(self) -> BoolArray:
        """Candidates of the pool whose engine was measured; all of it, where there is none."""
        return measured_first(self.view, self.pool)

    @property
    def spent(self) -> FloatArray:
        """Money, or GPU-hours, for `seconds`."""
        return self.view.gpus * self.seconds / 3600 * self.view.price_per_gpu_hour

    def option(self, index: int) -> Option:
        """One candidate, taken out of the arrays."""
        view = self.view

        def known(values: FloatArray) -> float | None:
            return float(values[index]) if np.isfinite(values[index]) else None

        candidate = view.candidates[index]
        seconds, training, efficiency = (
            of_a_run(*map(float, each[:, index])) for each in (view.time, view.training, view.efficiency)
        )
        gpu_hours = seconds.times(candidate.gpus / 3600)
        price = float(view.price_per_gpu_hour[index]) if self.asked.priced else None
        starts = view.startups[index]
        return Option(
            candidate=candidate,
            series=view.series[index],
            label=view.labels[index],
            measured_engine=bool(view.measured[index]),
            global_batch=int(view.global_batch[index]),
            keeps_batch=bool(view.keeps_batch[index]),
            large_batch=bool(view.large_batch[index]),
            seconds=seconds,
            training=training,
            startup=None if starts is None else starts.seconds.one_run,
            startup_assumed=None if starts is None else starts.assumption,
            gpu_hours=gpu_hours,
            cost=None if price is None else gpu_hours.times(price),
            efficiency=efficiency,
            same_loss_seconds=known(view.same_loss_seconds),
            memory_bytes=known(view.memory_bytes),
            oom_chance=known(view.oom_chance),
            verdicts={
                name: VERDICTS[int(_grade(value[index], far[index]))] for name, (value, far) in self.limits.items()
            },
        )


def measured_first(view: ForecastTable, mask: BoolArray) -> BoolArray:
    """Candidates in `mask` whose engine was measured; all, where there is none."""
    measured: BoolArray = mask & view.measured
    return measured if measured.any() else mask


def answers(choosing: Choosing) -> tuple[Answer, ...]:
    """One answer for each question that the limits ask, unless nothing meets them; and the knee.

    Without a limit: the fastest, the cheapest and the knee.
    """
    wanted = [kind for limit, kind in _QUESTIONS.items() if limit in choosing.limits] or ["fastest", "cheapest"]
    within_limits = [answer for kind in wanted if (answer := _within_limits(choosing, kind)) is not None]
    knee = _knee(choosing)
    return (*within_limits, knee) if knee is not None else tuple(within_limits)


def closest(choosing: Choosing) -> Option | None:
    """The possible answer that misses its worst limit by least; None where nothing may be an answer."""
    beyond = overshoot(choosing.limits, len(choosing.view.candidates))
    index = best(choosing.preferred, beyond, choosing.seconds)
    return None if index is None else choosing.option(index)


def each_alone(choosing: Choosing) -> dict[str, Option]:
    """Limit -> the best under it alone; limits that nothing meets are left out."""
    options = {}
    for limit, shares in choosing.limits.items():
        answer = _within_limits(replace(choosing, limits={limit: shares}), _QUESTIONS[limit])
        if answer is not None:
            options[limit] = answer.option
    return options


def _within_limits(choosing: Choosing, kind: QuestionKind) -> Answer | None:
    """The best of the surest: of all that meet every limit, else of those that probably do; measured engines first."""
    grade = grades(choosing.limits, len(choosing.view.candidates))
    pick = _PICKS[kind]
    tiers = [mask & (grade >= level) for level in (2, 1) for mask in (choosing.preferred, choosing.pool)]
    indices = [pick(choosing, mask) for mask in tiers]
    chosen = next((index for index in indices if index is not None), None)
    if chosen is None:
        return None
    # First the best that only probably meets the limits, then the best that surely does, with any engine.
    others = [index for index in (indices[2], indices[1]) if index is not None and index != chosen]
    riskier = next((index for index in others if _gains(choosing, kind, index, chosen)), None)
    return Answer(kind, choosing.option(chosen), None if riskier is None else choosing.option(riskier))


_WORTH_TELLING = 0.05
"""Share by which a riskier answer must be better."""


def _gains(choosing: Choosing, kind: QuestionKind, other: int, chosen: int) -> bool:
    if kind == "most":
        return bool(choosing.view.gpus[other] > choosing.view.gpus[chosen])
    cost = choosing.seconds if kind == "fastest" else choosing.spent
    return bool(cost[other] < (1 - _WORTH_TELLING) * cost[chosen])


def _most(choosing: Choosing, mask: BoolArray) -> int | None:
    """Most ranks, as far as more of them make it faster: beyond that, more would be paid for a longer time."""
    worth = np.zeros(len(mask), dtype=bool)
    worth[front(mask, choosing.seconds, choosing.spent)] = True
    return best(worth, -choosing.view.gpus, choosing.seconds)


_PICKS: dict[QuestionKind, Callable[[Choosing, BoolArray], int | None]] = {
    "fastest": lambda choosing, mask: best(mask, choosing.seconds, choosing.spent),
    "cheapest": lambda choosing, mask: best(mask, choosing.spent, choosing.seconds),
    "most": _most,
}


def _knee(choosing: Choosing) -> Answer | None:
    """The largest efficiency / time, which is the smallest ranks x time^2. Start-up is paid once, and left out.

    Where a rank's hour costs more on one instance than on another, its price stands for the rank.

    Eager, Zahorjan & Lazowska, "Speedup Versus Efficiency in Parallel Systems" (IEEE Transactions on Computers 38(3),
    1989), section 4. Up to there one per cent less time costs less than one per cent more GPU-hours, beyond it more.
    """
    view = choosing.view
    training = view.training[0] + (choosing.seconds - view.seconds)
    index = best(choosing.preferred, view.gpus * view.price_per_gpu_hour * training**2, view.gpus)
    if index is None:
        return None
    last = view.gpus[measured_first(view, choosing.shown)].max()  # large batches that are no answer were looked at too
    return Answer("knee", choosing.option(index), at_the_end=bool(view.gpus[index] == last))


Limits = Mapping[str, tuple[FloatArray, FloatArray]]
"""Limit -> (share of it that the expected value takes, share that the far end of the interval takes). 1.0 is exactly at
the limit, and more misses it. Efficiency is turned round: least allowed / expected."""


def limits(view: ForecastTable, asked: Request) -> Limits:
    """Every limit that was given, over all candidates."""
    taken_shares: dict[str, tuple[FloatArray, FloatArray]] = {}
    value, _, far = view.time
    if asked.deadline_seconds is not None:
        most = asked.deadline_seconds
        taken_shares["deadline"] = (value / most, far / most)
    if asked.budget is not None:
        per_second = view.gpus / 3600 * view.price_per_gpu_hour / asked.budget
        taken_shares["budget"] = (value * per_second, far * per_second)
    if asked.min_efficiency is not None:
        least = asked.min_efficiency
        taken_shares["efficiency"] = (least / view.efficiency[0], least / view.efficiency[1])
    return taken_shares


def grades(limits: Limits, count: int) -> NDArray[np.int64]:
    """Each candidate's worst verdict, as its place in `VERDICTS`; without a limit the best one. NaN misses."""
    worst = np.full(count, len(VERDICTS) - 1)
    for value, far in limits.values():
        worst = np.minimum(worst, _grade(value, far))
    return worst


def _grade(value: FloatArray, far: FloatArray) -> NDArray[np.int64]:
    """Places in `VERDICTS` by the shares of one limit."""
    return np.where(far <= 1.0, 2, np.where(value <= 1.0, 1, 0))


def overshoot(limits: Limits, count: int) -> FloatArray:
    """The largest share of any limit that each candidate's expected value takes; infinite where it is NaN."""
    largest = np.zeros(count)
    for value, _ in limits.values():
        largest = np.maximum(largest, np.where(np.isnan(value), np.inf, value))
    return largest


def _rounded(key: FloatArray) -> FloatArray:
    """Keys to ten digits: those that differ in the last bits alone are equal, and the other cost decides."""
    mantissa, exponent = np.frexp(key)
    rounded: FloatArray = np.ldexp(np.round(mantissa, 10), exponent)
    return rounded


def best(mask: BoolArray, *keys: FloatArray) -> int | None:
    """Place in `mask` of the smallest first key; among equals of the smallest second, and so on. None: mask empty."""
    indices = np.flatnonzero(mask)
    if not len(indices):
        return None
    order = np.lexsort([_rounded(key[indices]) for key in reversed(keys)])
    return int(indices[order[0]])


def front(mask: BoolArray, first: FloatArray, second: FloatArray) -> list[int]:
    """Places in `mask` that no other one beats in one of two costs without losing in the other, by rising `first`.

    Where several are equal in both only one is kept.
    """
    indices = np.flatnonzero(mask)
    first, second = _rounded(first), _rounded(second)
    order = indices[np.lexsort((second[indices], first[indices]))]
    kept: list[int] = []
    lowest = np.inf
    for index in order:
        if second[index] < lowest:
            kept.append(int(index))
            lowest = float(second[index])
    return kept
