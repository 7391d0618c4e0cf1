"""A figure with its interval: the one type of a value that is not known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from vitscale.present import units


class Ends(NamedTuple):
    """The ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval in which it lies with the confidence `level`.

    `low` and `high` are None where there is no interval.
    """

    value: float
    low: float | None = None
    high: float | None = None
    level: float = 0.95
    of: Literal["the mean", "a future run"] = "the mean"
    """What lies in the interval with that confidence."""
    note: str = ""
    """Why there is no interval, or why the interval decides nothing (too few runs); empty for a sound interval."""
    future_low: float | None = None
    """Lower end of the interval in which one future run will lie, at the same level; only for an estimate of the mean.
    """
    future_high: float | None = None
    """Upper end of that interval."""

    def times(self, factor: float) -> Estimate:
        """Return the same in another unit: every number multiplied by a positive exact `factor`."""
        return self._with_numbers(lambda number: number * factor)

    def into(self, amount: float) -> Estimate:
        """Return `amount` divided by this figure, such as bytes by seconds. Both must be positive.

        The low end of the result comes from the high end of this figure. An end of 0 gives an unknown end.
        """
        with_swapped_ends = replace(
            self,
            low=_none_if_zero(self.high),
            high=_none_if_zero(self.low),
            future_low=_none_if_zero(self.future_high),
            future_high=_none_if_zero(self.future_low),
        )
        return with_swapped_ends._with_numbers(lambda number: amount / number)

    def _with_numbers(self, change: Callable[[float], float]) -> Estimate:
        """Return a copy with `change` applied to the value and to each end that is not None."""
        changed: dict[str, Any] = {}
        for name in ("value", "low", "high", "future_low", "future_high"):
            number = getattr(self, name)
            if number is not None:
                changed[name] = change(number)
        return replace(self, **changed)

    def side_of(self, value: float) -> Literal["above", "below"] | None:
        """Return the side of `value` on which the interval lies; None where it holds `value`, or runs are too few."""
        if self.low is None or self.high is None or self.note:
            return None
        if self.low > value:
            return "above"
        return "below" if self.high < value else None

    @property
    def ends(self) -> Ends:
        """The ends of the interval.

        Raises:
            ValueError: there is no interval.
        """
        return _checked_ends(self.low, self.high)

    @property
    def future_ends(self) -> Ends:
        """The ends of the interval in which one future run will lie.

        Raises:
            ValueError: there is no such interval.
        """
        return _checked_ends(self.future_low, self.future_high)

    @property
    def one_run(self) -> Estimate:
        """The interval of one future run as an estimate of its own; without bounds where that is unknown."""
        if self.of == "a future run":
            return self
        return Estimate(self.value, self.future_low, self.future_high, self.level, "a future run", self.note)

    def bounds(self, form: Callable[[float], str] = units.number) -> str:
        """Return the interval as text, "1.90-2.05"; empty where there is none, or it holds nothing but the value."""
        return "" if self.low == self.high else units.bounds(self.low, self.high, form)


def _none_if_zero(end: float | None) -> float | None:
    return end or None


def _checked_ends(low: float | None, high: float | None) -> Ends:
    if low is None or high is None:
        raise ValueError("this figure has no such interval")
    return Ends(low, high)
