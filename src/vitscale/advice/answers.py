"""The answers: fastest, cheapest, most ranks, the knee; each from the surest candidates that there are.

Limits are compared with the interval of a future run, not with the expected value alone.

Arrays have one element for each of N candidates, (N,), in the order of `ForecastTable.candidates`. A candidate's index
is its position there. A mask is an array of booleans that selects candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.advice.forecast_table import ForecastTable
from vitscale.advice.request import VERDICTS, Option, Request, future_run_estimate
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
    """A clearly better option that meets the limits less surely, or whose engine was not measured."""
    at_the_end: bool = False
    """Whether the knee is at the largest rank count of any candidate, so that the real one may lie beyond."""


@dataclass(frozen=True)
class Choosing:
    """The candidates, and the limits and costs by which all answers are chosen."""

    forecasts: ForecastTable
    request: Request
    limits: Limits
    seconds: FloatArray
    """The cost in time: seconds of the work, or the time to the same loss where the global batch may change."""

    @property
    def shown(self) -> BoolArray:
        """The mask of the candidates that the tables show."""
        return self.forecasts.contends & (self.forecasts.keeps_batch | self.request.any_batch)

    @property
    def eligible(self) -> BoolArray:
        """The mask of the candidates that may be an answer.

        Large batches are among them only where they are asked for or nothing else is left.
        """
        moderate = self.shown & ~self.forecasts.large_batch
        return moderate if moderate.any() and not self.request.large_batch else self.shown

    @property
    def preferred(self) -> BoolArray:
        """The mask of the eligible candidates whose engine was measured; all eligible ones, where there is none."""
        return measured_first(self.forecasts, self.eligible)

    @property
    def cost(self) -> FloatArray:
        """The cost of each candidate for `seconds`: money, or GPU-hours where no price is known."""
        return self.forecasts.gpus * self.seconds / 3600 * self.forecasts.price_per_gpu_hour

    def option(self, index: int) -> Option:
        """Return one candidate with its forecast, read from the arrays."""
        forecasts = self.forecasts
        candidate = forecasts.candidates[index]
        seconds = _run_estimate(forecasts.time, index)
        gpu_hours = seconds.times(candidate.gpus / 3600)
        price = float(forecasts.price_per_gpu_hour[index]) if self.request.priced else None
        startup = forecasts.startups[index]
        grade_by_limit = {limit: int(grades[index]) for limit, grades in self._grades_by_limit.items()}
        return Option(
            candidate=candidate,
            series=forecasts.series[index],
            label=forecasts.labels[index],
            measured_engine=bool(forecasts.measured[index]),
            global_batch=int(forecasts.global_batch[index]),
            keeps_batch=bool(forecasts.keeps_batch[index]),
            large_batch=bool(forecasts.large_batch[index]),
            seconds=seconds,
            training=_run_estimate(forecasts.training, index),
            startup=None if startup is None else startup.seconds.one_run,
            startup_assumed=None if startup is None else startup.assumption,
            gpu_hours=gpu_hours,
            cost=None if price is None else gpu_hours.times(price),
            efficiency=_run_estimate(forecasts.efficiency, index),
            same_loss_seconds=_finite_value(forecasts.same_loss_seconds, index),
            memory_bytes=_finite_value(forecasts.memory_bytes, index),
            oom_chance=_finite_value(forecasts.oom_chance, index),
            host_memory_bytes=_finite_value(forecasts.host_memory_bytes, index),
            host_oom_chance=_finite_value(forecasts.host_oom_chance, index),
            verdicts={limit: VERDICTS[grade] for limit, grade in grade_by_limit.items()},
        )

    @cached_property
    def _grades_by_limit(self) -> dict[str, NDArray[np.int64]]:
        """Limit -> the grade of each candidate (`_grades_of_limit`)."""
        return {limit: _grades_of_limit(shares) for limit, shares in self.limits.items()}


def _run_estimate(values: FloatArray, index: int) -> Estimate:
    """Return one candidate's expected value with the interval of a future run.

    Args:
        values: expected values, lower ends and upper ends of all candidates, (3, N).
        index: the candidate's.
    """
    value, low, high = map(float, values[:, index])
    return future_run_estimate(value, low, high)


def _finite_value(values: FloatArray, index: int) -> float | None:
    """Return one candidate's value, out of (N,); None where it is not finite."""
    return float(values[index]) if np.isfinite(values[index]) else None


def measured_first(forecasts: ForecastTable, mask: BoolArray) -> BoolArray:
    """Return the mask of the candidates in `mask` whose engine was measured; `mask` itself, where there is none."""
    measured: BoolArray = mask & forecasts.measured
    return measured if measured.any() else mask


def answers(choosing: Choosing) -> tuple[Answer, ...]:
    """Return one answer for each question that the limits ask, and the knee; lacks questions without an answer.

    Without a limit the questions are the fastest and the cheapest.
    """
    questions = [kind for limit, kind in _QUESTIONS.items() if limit in choosing.limits] or ["fastest", "cheapest"]
    possible_answers = [*(_within_limits(choosing, kind) for kind in questions), _knee(choosing)]
    return tuple(answer for answer in possible_answers if answer is not None)


def closest(choosing: Choosing) -> Option | None:
    """Return the option that misses its worst limit by least; None where no candidate may be an answer."""
    largest_shares = largest_limit_shares(choosing.limits, len(choosing.forecasts.candidates))
    index = index_of_least(choosing.preferred, largest_shares, choosing.seconds)
    return None if index is None else choosing.option(index)


def best_under_each_limit(choosing: Choosing) -> dict[str, Option]:
    """Return limit -> the best option under this limit alone; lacks limits that nothing meets."""
    options = {}
    for limit, shares in choosing.limits.items():
        answer = _within_limits(replace(choosing, limits={limit: shares}), _QUESTIONS[limit])
        if answer is not None:
            options[limit] = answer.option
    return options


def _within_limits(choosing: Choosing, kind: QuestionKind) -> Answer | None:
    """Return the answer to a question within the limits; None where nothing even probably meets them.

    It is the best candidate of those that surely meet the limits, else of those that probably do. Of either those with
    measured engines come first.

    A riskier option is less sure in one way, and clearly better: it only probably meets the limits, or, where there is
    no such option, its engine was not measured.
    """
    grade = worst_grades(choosing.limits, len(choosing.forecasts.candidates))
    surely_meets = grade >= VERDICTS.index("meets")
    probably_meets = grade >= VERDICTS.index("probably")
    pick_best = _PICKS[kind]
    # Indices of candidates, None where a mask is empty.
    surely_measured = pick_best(choosing, choosing.preferred & surely_meets)
    surely_any_engine = pick_best(choosing, choosing.eligible & surely_meets)
    probably_measured = pick_best(choosing, choosing.preferred & probably_meets)
    probably_any_engine = pick_best(choosing, choosing.eligible & probably_meets)
    chosen = _first_known(surely_measured, surely_any_engine, probably_measured, probably_any_engine)
    if chosen is None:
        return None
    for riskier in (probably_measured, surely_any_engine):
        if riskier is None or riskier == chosen:
            continue
        if _is_worth_the_risk(choosing, kind, riskier, chosen):
            return Answer(kind, choosing.option(chosen), riskier=choosing.option(riskier))
    return Answer(kind, choosing.option(chosen))


def _first_known(*indices: int | None) -> int | None:
    """Return the first index that is not None; None where all are."""
    for index in indices:
        if index is not None:
            return index
    return None


_CLEARLY_BETTER = 0.05
"""Share by which a riskier answer must be better."""


def _is_worth_the_risk(choosing: Choosing, kind: QuestionKind, riskier: int, chosen: int) -> bool:
    """Whether a riskier candidate answers a question clearly better than the chosen one.

    Args:
        choosing: all candidates.
        kind: the question.
        riskier: index of the riskier candidate.
        chosen: index of the chosen one.
    """
    if kind == "most":
        return bool(choosing.forecasts.gpus[riskier] > choosing.forecasts.gpus[chosen])
    cost = choosing.seconds if kind == "fastest" else choosing.cost
    return bool(cost[riskier] < (1 - _CLEARLY_BETTER) * cost[chosen])


def _most_ranks(choosing: Choosing, mask: BoolArray) -> int | None:
    """Return the index of the candidate with most ranks; None where the mask is empty.

    Only candidates count that no other one beats in time and cost: beyond, more is paid for a longer time.
    """
    is_on_front = np.zeros(len(mask), dtype=bool)
    is_on_front[pareto_front(mask, choosing.seconds, choosing.cost)] = True
    return index_of_least(is_on_front, -choosing.forecasts.gpus, choosing.seconds)


def _fastest(choosing: Choosing, mask: BoolArray) -> int | None:
    """Return the index of the fastest candidate, of equals the cheapest; None where the mask is empty."""
    return index_of_least(mask, choosing.seconds, choosing.cost)


def _cheapest(choosing: Choosing, mask: BoolArray) -> int | None:
    """Return the index of the cheapest candidate, of equals the fastest; None where the mask is empty."""
    return index_of_least(mask, choosing.cost, choosing.seconds)


_PICKS: dict[QuestionKind, Callable[[Choosing, BoolArray], int | None]] = {
    "fastest": _fastest,
    "cheapest": _cheapest,
    "most": _most_ranks,
}
"""Question -> the function that picks the best candidate in a mask."""


def _knee(choosing: Choosing) -> Answer | None:
    """Return the knee of the curve: the candidate with the largest efficiency / time; None without a candidate.

    As efficiency is proportional to 1 / (ranks x time), this is the smallest ranks x time^2. Where a rank's hour costs
    more on one instance than on another, ranks count by their price. Start-up is paid once, and left out of the time.

    Eager, Zahorjan & Lazowska, "Speedup Versus Efficiency in Parallel Systems" (IEEE Transactions on Computers 38(3),
    1989), section 4. Up to there one per cent less time costs less than one per cent more GPU-hours, beyond it more.
    """
    forecasts = choosing.forecasts
    expected_training = forecasts.training[0]
    more_to_same_loss = choosing.seconds - forecasts.seconds  # 0 where `seconds` is the time of the work
    training = expected_training + more_to_same_loss
    priced_gpus = forecasts.gpus * forecasts.price_per_gpu_hour
    index = index_of_least(choosing.preferred, priced_gpus * training**2, forecasts.gpus)
    if index is None:
        return None
    # Of all that are shown: large batches may be no answer, but show what is beyond this count.
    largest_count = forecasts.gpus[measured_first(forecasts, choosing.shown)].max()
    return Answer("knee", choosing.option(index), at_the_end=bool(forecasts.gpus[index] == largest_count))


class LimitShares(NamedTuple):
    """The share of a limit that each candidate takes, (N,): 1.0 is exactly at the limit, and more misses it.

    Example: 30 h of a deadline of 24 h are 1.25. A share of the least efficiency is that efficiency / the candidate's.
    """

    expected: FloatArray
    """Share that the expected value takes."""
    far_end: FloatArray
    """Share that the worse end of its interval takes."""


Limits = Mapping[str, LimitShares]
"""Limit -> the shares of it that candidates take."""


def limit_shares(forecasts: ForecastTable, request: Request) -> Limits:
    """Return each limit of the request with the shares of it that all candidates take."""
    shares: dict[str, LimitShares] = {}
    expected_seconds, _, longest_seconds = forecasts.time
    if request.deadline_seconds is not None:
        shares["deadline"] = LimitShares(
            expected_seconds / request.deadline_seconds, longest_seconds / request.deadline_seconds
        )
    if request.budget is not None:
        share_per_second = forecasts.gpus / 3600 * forecasts.price_per_gpu_hour / request.budget
        shares["budget"] = LimitShares(expected_seconds * share_per_second, longest_seconds * share_per_second)
    if request.min_efficiency is not None:
        expected_efficiency, lowest_efficiency, _ = forecasts.efficiency
        shares["efficiency"] = LimitShares(
            request.min_efficiency / expected_efficiency, request.min_efficiency / lowest_efficiency
        )
    return shares


def worst_grades(limits: Limits, count: int) -> NDArray[np.int64]:
    """Return each candidate's worst verdict on any limit, as its position in `VERDICTS`, (N,).

    Without a limit it is the best verdict. A candidate with a share of NaN misses the limit.

    Args:
        limits: the limits.
        count: N, the number of candidates.
    """
    worst = np.full(count, len(VERDICTS) - 1)
    for shares in limits.values():
        worst = np.minimum(worst, _grades_of_limit(shares))
    return worst


def _grades_of_limit(shares: LimitShares) -> NDArray[np.int64]:
    """Return each candidate's verdict on one limit, as its position in `VERDICTS`, (N,)."""
    probably_or_misses = np.where(shares.expected <= 1.0, VERDICTS.index("probably"), VERDICTS.index("misses"))
    return np.where(shares.far_end <= 1.0, VERDICTS.index("meets"), probably_or_misses)


def largest_limit_shares(limits: Limits, count: int) -> FloatArray:
    """Return the largest share of any limit that each candidate's expected value takes, (N,); NaN counts as infinite.

    Args:
        limits: the limits.
        count: N, the number of candidates.
    """
    largest = np.zeros(count)
    for shares in limits.values():
        largest = np.maximum(largest, np.where(np.isnan(shares.expected), np.inf, shares.expected))
    return largest


def _rounded_keys(key: FloatArray) -> FloatArray:
    """Return keys rounded to ten digits, so that those which differ in the last bits alone are equal."""
    mantissa, exponent = np.frexp(key)
    rounded: FloatArray = np.ldexp(np.round(mantissa, 10), exponent)
    return rounded


def index_of_least(mask: BoolArray, *keys: FloatArray) -> int | None:
    """Return the index of the candidate in `mask` with the smallest first key; None where the mask is empty.

    Among equals the second key decides, and so on.
    """
    indices = np.flatnonzero(mask)
    if not len(indices):
        return None
    order = np.lexsort([_rounded_keys(key[indices]) for key in reversed(keys)])  # lexsort sorts by its last key first
    return int(indices[order[0]])


def pareto_front(mask: BoolArray, first_cost: FloatArray, second_cost: FloatArray) -> list[int]:
    """Return the Pareto front of two costs: the indices in `mask` of which no other one is as good in both costs.

    They come by rising `first_cost`. Of several that are equal in both only one is in the front.
    """
    indices = np.flatnonzero(mask)
    first = _rounded_keys(first_cost)
    second = _rounded_keys(second_cost)
    indices_by_first = indices[np.lexsort((second[indices], first[indices]))]
    front: list[int] = []
    lowest_second = np.inf
    for index in indices_by_first:
        if second[index] < lowest_second:
            front.append(int(index))
            lowest_second = float(second[index])
    return front
