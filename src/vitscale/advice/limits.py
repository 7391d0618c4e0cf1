"""Limits held against what is expected: by the interval of a future run, not by the expected value alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vitscale.advice.forecast_table import ForecastTable, Mask
from vitscale.advice.option import VERDICTS, Option, Verdict, of_a_run
from vitscale.advice.request import Request
from vitscale.prediction.step.model import Array

Limits = Mapping[str, tuple[Array, Array]]
"""Limit -> (share of it that the expected value takes, that the far end of the interval takes): 1.0 is exactly at the
limit, more misses it. Efficiency is turned round: least allowed / expected."""


def limits(view: ForecastTable, asked: Request) -> Limits:
    """Every limit that was given, over all candidates."""
    found: dict[str, tuple[Array, Array]] = {}
    value, _, far = view.time
    if asked.deadline_seconds is not None:
        most = asked.deadline_seconds
        found["deadline"] = (value / most, far / most)
    if asked.budget is not None:
        per_second = view.gpus / 3600 * view.price_per_gpu_hour / asked.budget
        found["budget"] = (value * per_second, far * per_second)
    if asked.min_efficiency is not None:
        least = asked.min_efficiency
        found["efficiency"] = (least / view.efficiency[0], least / view.efficiency[1])
    return found


def grades(found: Limits, count: int) -> NDArray[np.int64]:
    """Of each candidate its worst verdict, as its place in `VERDICTS`; without a limit the best one. NaN misses."""
    worst = np.full(count, len(VERDICTS) - 1)
    for value, far in found.values():
        worst = np.minimum(worst, np.where(far <= 1.0, 2, np.where(value <= 1.0, 1, 0)))
    return worst


def overshoot(found: Limits, count: int) -> Array:
    """Of each candidate the largest share that its expected value takes of any limit."""
    largest = np.zeros(count)
    for value, _ in found.values():
        largest = np.maximum(largest, np.where(np.isnan(value), np.inf, value))
    return largest


def option_at(view: ForecastTable, asked: Request, found: Limits, place: int) -> Option:
    """One candidate, taken out of the arrays."""

    def known(values: Array) -> float | None:
        return float(values[place]) if np.isfinite(values[place]) else None

    candidate = view.candidates[place]
    seconds, training, efficiency = (
        of_a_run(*map(float, each[:, place])) for each in (view.time, view.training, view.efficiency)
    )
    gpu_hours = seconds.times(candidate.gpus / 3600)
    price = float(view.price_per_gpu_hour[place]) if asked.priced else None
    starts = view.startups[place]
    return Option(
        candidate=candidate,
        series=view.series[place],
        label=view.labels[place],
        measured_engine=bool(view.measured[place]),
        global_batch=int(view.global_batch[place]),
        keeps_batch=bool(view.keeps_batch[place]),
        large_batch=bool(view.large_batch[place]),
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
        verdicts={name: _verdict(*(float(each[place]) for each in shares)) for name, shares in found.items()},
    )


def _verdict(value: float, far: float) -> Verdict:
    return "meets" if far <= 1.0 else "probably" if value <= 1.0 else "misses"


def _rounded(key: Array) -> Array:
    """To ten digits: what differs in the last bits alone is equal, and the other cost decides."""
    mantissa, exponent = np.frexp(key)
    rounded: Array = np.ldexp(np.round(mantissa, 10), exponent)
    return rounded


def best(mask: Mask, *keys: Array) -> int | None:
    """The place of the smallest first key in `mask`; of equals, of the smallest second, and so on. None: mask empty."""
    places = np.flatnonzero(mask)
    if not len(places):
        return None
    order = np.lexsort([_rounded(key[places]) for key in reversed(keys)])
    return int(places[order[0]])


def front(mask: Mask, first: Array, second: Array) -> list[int]:
    """Places in `mask` that no other one beats in one of two costs without losing in the other, by rising `first`.

    Of equals in both only one is kept.
    """
    places = np.flatnonzero(mask)
    first, second = _rounded(first), _rounded(second)
    order = places[np.lexsort((second[places], first[places]))]
    kept: list[int] = []
    lowest = np.inf
    for place in order:
        if second[place] < lowest:
            kept.append(int(place))
            lowest = float(second[place])
    return kept
