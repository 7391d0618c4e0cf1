"""A figure with its interval: the one type of a value that is not known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from vitscale.present import units


@dataclass(frozen=True)
class Estimate:
    """A value and the interval in which it lies at `level`; `low` and `high` are None where there is no interval.

    With bounds, a note says why they still decide nothing (too few runs); without bounds, why there are none.
    """

    value: float
    low: float | None = None
    high: float | None = None
    level: float = 0.95
    of: Literal["the mean", "a future run"] = "the mean"
    """What lies in the interval with that confidence."""
    note: str = ""
    future_low: float | None = None
    """Lower end of where one run still to be made will lie, at the same level; only for an estimate of the mean."""
    future_high: float | None = None

    def times(self, factor: float) -> Estimate:
        """The same in another unit: every number multiplied by a positive exact `factor`."""
        return self._each(lambda value: value * factor)

    def into(self, whole: float) -> Estimate:
        """`whole` divided by this figure, such as bytes by seconds. Both positive; the ends change places."""
        turned = replace(self, low=self.high or None, high=self.low or None)
        turned = replace(turned, future_low=self.future_high or None, future_high=self.future_low or None)
        return turned._each(lambda value: whole / value)

    def _each(self, changed: Callable[[float], float]) -> Estimate:
        numbers = {name: getattr(self, name) for name in ("value", "low", "high", "future_low", "future_high")}
        known: dict[str, Any] = {name: changed(number) for name, number in numbers.items() if number is not None}
        return replace(self, **known)

    def side_of(self, value: float) -> Literal["above", "below"] | None:
        """The side of `value` on which the whole interval lies; None where it holds `value`, or runs are too few."""
        if self.low is None or self.high is None or self.note:
            return None
        return "above" if self.low > value else "below" if self.high < value else None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, (low, high).

        Raises:
            ValueError: there is no interval.
        """
        return _known(self.low, self.high)

    @property
    def future_ends(self) -> tuple[float, float]:
        """The ends of where one run still to be made will lie, (low, high).

        Raises:
            ValueError: there is no such interval.
        """
        return _known(self.future_low, self.future_high)

    @property
    def one_run(self) -> Estimate:
        """The interval of one future run as an estimate of its own; without bounds where that is unknown."""
        if self.of == "a future run":
            return self
        return Estimate(self.value, self.future_low, self.future_high, self.level, "a future run", self.note)

    def bounds(self, form: Callable[[float], str] = units.number) -> str:
        """The interval as text, "1.90-2.05"; empty where there is none, or where it holds nothing but the value."""
        return "" if self.low == self.high else units.bounds(self.low, self.high, form)


def _known(low: float | None, high: float | None) -> tuple[float, float]:
    if low is None or high is None:
        raise ValueError("this figure has no such interval")
    return low, high
