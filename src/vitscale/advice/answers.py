"""The answers: fastest, cheapest, most ranks, the knee; each from the surest candidates that there are.

Limits are held against the interval of a future run, not against the expected value alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.advice.forecast_table import ForecastTable
from vitscale.advice.request import VERDICTS, Option, Request, of_a_run
from vitscale.base.arrays import BoolArray, FloatArray
from vitscale.present.estimate import Estimate

QuestionKind = Literal["fastest", "cheapest", "most", "knee"]
_QUESTIONS: Mapping[str, QuestionKind] = {"budget": "fastest", "deadline": "cheapest", "efficiency": "most"}
"""Limit -> the question that it asks."""


@dataclass(frozen=True)
class Answer:
    """A question with the option that answers it."""

    kind: QuestionKind
    option: Option
    riskier: Option | None = None
    """A better option that less surely meets the limits, or whose engine nobody measured."""
    at_the_end: bool = False
    """Whether the knee lies at the largest count looked at, so that the real one may lie beyond."""


@dataclass(frozen=True)
class Choosing:
    """The candidates, and the limits and costs by which all answers are chosen."""

    view: ForecastTable
    request: Request
    limits: Limits
    seconds: FloatArray
    """The cost in time: that of the work, or the time to the same loss where the global batch may change."""

    @property
    def shown(self) -> BoolArray:
        """Candidates that the tables show."""
        return self.view.contends & (self.view.keeps_batch | self.request.any_batch)

    @property
    def pool(self) -> BoolArray:
        """Candidates that may be an answer: large batches only where they are asked for or nothing else is left."""
        moderate = self.shown & ~self.view.large_batch
        return moderate if moderate.any() and not self.request.large_batch else self.shown

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
        candidate = view.candidates[index]
        seconds = _estimate_at(index, view.time)
        gpu_hours = seconds.times(candidate.gpus / 3600)
        price = float(view.price_per_gpu_hour[index]) if self.request.priced else None
        startup = view.startups[index]
        return Option(
            candidate=candidate,
            series=view.series[index],
            label=view.labels[index],
            measured_engine=bool(view.measured[index]),
            global_batch=int(view.global_batch[index]),
            keeps_batch=bool(view.keeps_batch[index]),
            large_batch=bool(view.large_batch[index]),
            seconds=seconds,
            training=_estimate_at(index, view.training),
            startup=None if startup is None else startup.seconds.one_run,
            startup_assumed=None if startup is None else startup.assumption,
            gpu_hours=gpu_hours,
            cost=None if price is None else gpu_hours.times(price),
            efficiency=_estimate_at(index, view.efficiency),
            same_loss_seconds=_known_at(index, view.same_loss_seconds),
            memory_bytes=_known_at(index, view.memory_bytes),
            oom_chance=_known_at(index, view.oom_chance),
            verdicts={limit: VERDICTS[int(grades[index])] for limit, grades in self._grades_by_limit.items()},
        )

    @cached_property
    def _grades_by_limit(self) -> dict[str, NDArray[np.int64]]:
        """Limit -> the grade of each candidate (`_grade`)."""
        return {limit: _grade(shares) for limit, shares in self.limits.items()}


def _estimate_at(index: int, values: FloatArray) -> Estimate:
    """One candidate's value with the interval of a future run, out of (3, candidates)."""
    value, low, high = map(float, values[:, index])
    return of_a_run(value, low, high)


def _known_at(index: int, values: FloatArray) -> float | None:
    """One candidate's value; None where it is not finite."""
    return float(values[index]) if np.isfinite(values[index]) else None


def measured_first(view: ForecastTable, mask: BoolArray) -> BoolArray:
    """Candidates in `mask` whose engine was measured; all, where there is none."""
    measured: BoolArray = mask & view.measured
    return measured if measured.any() else mask


def answers(choosing: Choosing) -> tuple[Answer, ...]:
    """One answer for each question that the limits ask, unless nothing meets them; and the knee.

    Without a limit: the fastest, the cheapest and the knee.
    """
    questions = [kind for limit, kind in _QUESTIONS.items() if limit in choosing.limits] or ["fastest", "cheapest"]
    possible_answers = [*(_within_limits(choosing, kind) for kind in questions), _knee(choosing)]
    return tuple(answer for answer in possible_answers if answer is not None)


def closest(choosing: Choosing) -> Option | None:
    """The possible answer that misses its worst limit by least; None where nothing may be an answer."""
    largest_shares = overshoot(choosing.limits, len(choosing.view.candidates))
    index = best(choosing.preferred, largest_shares, choosing.seconds)
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
    surely = grade >= VERDICTS.index("meets")
    probably = grade >= VERDICTS.index("probably")
    surely_measured = pick(choosing, choosing.preferred & surely)
    surely_any_engine = pick(choosing, choosing.pool & surely)
    probably_measured = pick(choosing, choosing.preferred & probably)
    probably_any_engine = pick(choosing, choosing.pool & probably)
    chosen = _first_known(surely_measured, surely_any_engine, probably_measured, probably_any_engine)
    if chosen is None:
        return None
    # First the best that only probably meets the limits, then the best that surely does, with any engine.
    for other in (probably_measured, surely_any_engine):
        if other is not None and other != chosen and _is_worth_the_risk(choosing, kind, other, chosen):
            return Answer(kind, choosing.option(chosen), riskier=choosing.option(other))
    return Answer(kind, choosing.option(chosen))


def _first_known(*indices: int | None) -> int | None:
    """The first index that is not None."""
    for index in indices:
        if index is not None:
            return index
    return None


_WORTH_TELLING = 0.05
"""Share by which a riskier answer must be better."""


def _is_worth_the_risk(choosing: Choosing, kind: QuestionKind, other: int, chosen: int) -> bool:
    """Whether a riskier candidate answers a question clearly better than the chosen one.

    Args:
        choosing: all candidates.
        kind: the question.
        other: place of the riskier candidate.
        chosen: place of the chosen one.
    """
    if kind == "most":
        return bool(choosing.view.gpus[other] > choosing.view.gpus[chosen])
    cost = choosing.seconds if kind == "fastest" else choosing.spent
    return bool(cost[other] < (1 - _WORTH_TELLING) * cost[chosen])


def _most(choosing: Choosing, mask: BoolArray) -> int | None:
    """Most ranks, as far as more of them make it faster: beyond that, more would be paid for a longer time."""
    is_on_front = np.zeros(len(mask), dtype=bool)
    is_on_front[front(mask, choosing.seconds, choosing.spent)] = True
    return best(is_on_front, -choosing.view.gpus, choosing.seconds)


_PICKS: dict[QuestionKind, Callable[[Choosing, BoolArray], int | None]] = {
    "fastest": lambda choosing, mask: best(mask, choosing.seconds, choosing.spent),
    "cheapest": lambda choosing, mask: best(mask, choosing.spent, choosing.seconds),
    "most": _most,
}
"""Question -> picks the place of the best candidate in a mask; None where the mask is empty."""


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
    # Large batches that are no answer were looked at too.
    largest_count = view.gpus[measured_first(view, choosing.shown)].max()
    return Answer("knee", choosing.option(index), at_the_end=bool(view.gpus[index] == largest_count))


class LimitShares(NamedTuple):
    """Shares of a limit that each candidate takes: 1.0 is exactly at the limit, and more misses it.

    Efficiency is turned round: least allowed / expected.
    """

    expected: FloatArray
    """Share that the expected value takes."""
    far_end: FloatArray
    """Share that the far end of its interval takes."""


Limits = Mapping[str, LimitShares]
"""Limit -> the shares of it that candidates take."""


def limits(view: ForecastTable, request: Request) -> Limits:
    """Every limit that was given, over all candidates."""
    shares: dict[str, LimitShares] = {}
    expected_seconds, _, longest_seconds = view.time
    if request.deadline_seconds is not None:
        shares["deadline"] = LimitShares(
            expected_seconds / request.deadline_seconds, longest_seconds / request.deadline_seconds
        )
    if request.budget is not None:
        share_per_second = view.gpus / 3600 * view.price_per_gpu_hour / request.budget
        shares["budget"] = LimitShares(expected_seconds * share_per_second, longest_seconds * share_per_second)
    if request.min_efficiency is not None:
        expected_efficiency, lowest_efficiency, _ = view.efficiency
        shares["efficiency"] = LimitShares(
            request.min_efficiency / expected_efficiency, request.min_efficiency / lowest_efficiency
        )
    return shares


def grades(limits: Limits, count: int) -> NDArray[np.int64]:
    """Each candidate's worst verdict, as its position in `VERDICTS`; without a limit the best one. NaN misses.

    Args:
        limits: the limits.
        count: number of candidates.
    """
    worst = np.full(count, len(VERDICTS) - 1)
    for shares in limits.values():
        worst = np.minimum(worst, _grade(shares))
    return worst


def _grade(shares: LimitShares) -> NDArray[np.int64]:
    """Each candidate's verdict on one limit, as its position in `VERDICTS`."""
    probably_or_misses = np.where(shares.expected <= 1.0, VERDICTS.index("probably"), VERDICTS.index("misses"))
    return np.where(shares.far_end <= 1.0, VERDICTS.index("meets"), probably_or_misses)


def overshoot(limits: Limits, count: int) -> FloatArray:
    """The largest share of any limit that each candidate's expected value takes; infinite where it is NaN.

    Args:
        limits: the limits.
        count: number of candidates.
    """
    largest = np.zeros(count)
    for shares in limits.values():
        largest = np.maximum(largest, np.where(np.isnan(shares.expected), np.inf, shares.expected))
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
    first = _rounded(first)
    second = _rounded(second)
    order = indices[np.lexsort((second[indices], first[indices]))]
    unbeaten: list[int] = []
    lowest_second = np.inf
    for index in order:
        if second[index] < lowest_second:
            unbeaten.append(int(index))
            lowest_second = float(second[index])
    return unbeaten
