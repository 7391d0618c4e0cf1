"""Quantities as text: the one family of formatters, three significant digits, nothing unknown shown as 0.

Sizes (memory, files, messages) are binary, as memory is counted: 1 GiB is 2^30 bytes. Rates are decimal, as networks
and processors are sold: 1 GB/s is 10^9 bytes per second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

DASH = "\N{EN DASH}"
UNKNOWN = DASH
"""The unknown in a table's cell."""
UNAVAILABLE = "unavailable"
"""The unknown in a sentence."""
NOT_FINITE = "not finite"

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z%=])|(?<==) (?=\d)")
"""The blank in "12 ms", "7 %", "64 =" and "= 2"."""
_ROUNDED_UP_SHARE = 0.9995
"""Share of a unit from which a value is shown as 1.00 of it, not as 1,000 of the unit below."""


@dataclass(frozen=True)
class Unit:
    """The factor that takes a quantity from its base unit to the shown one, and the sign that follows the number."""

    factor: float
    sign: str

    def text(self, value: float | None) -> str:
        """Return `value`, given in the base unit, as text without the sign: for a column whose heading has it."""
        return UNKNOWN if value is None else number(value * self.factor)


# From the smallest unit up, each with the number of base units from which it is used.
_TIME_UNITS = (
    (0.0, Unit(1e6, "us")),
    (1e-3, Unit(1e3, "ms")),
    (1.0, Unit(1.0, "s")),
    (600.0, Unit(1 / 60, "min")),
    (7_200.0, Unit(1 / 3_600, "h")),
    (172_800.0, Unit(1 / 86_400, "d")),
)
_SIZE_UNITS = tuple(
    (1024.0**power if power else 0.0, Unit(1024.0**-power, sign))
    for power, sign in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
)
_DECIMAL_UNITS = tuple(
    (1000.0**power if power else 0.0, Unit(1000.0**-power, prefix))
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))
)


def _largest_unit_reached(value: float, scale: tuple[tuple[float, Unit], ...]) -> Unit:
    """Return the largest unit of a scale that `value`, in the base unit, reaches."""
    return next(unit for least, unit in reversed(scale) if value >= _ROUNDED_UP_SHARE * least)


def _largest_magnitude(values: Iterable[float | None], otherwise: float) -> float:
    """Return the largest absolute value; `otherwise` where there is no number."""
    numbers = [value for value in values if value is not None]
    return max((abs(value) for value in numbers if math.isfinite(value)), default=otherwise)


def time_unit(values: Iterable[float | None]) -> Unit:
    """Return the unit that suits the largest of some times in seconds: "s" below 10 minutes, "min" below 2 hours.

    It is at least a millisecond: columns of times are never in microseconds.
    """
    return _largest_unit_reached(max(1e-3, _largest_magnitude(values, 1.0)), _TIME_UNITS)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with three significant digits: "0.0123", "1.50", "12,346"; a dash for the unknown.

    Whole thousands are in full. Only numbers below 0.0001, and from 10^10 on, have an exponent.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    magnitude = int(rounded.partition("e")[2])
    if not -4 <= magnitude <= 9:
        return rounded
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def seconds(value: float | None) -> str:
    """Return a time: "85.0 us", "12.0 ms", "120 s", "15.0 min", "2.50 h", "3.00 d"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    unit = _largest_unit_reached(abs(value), _TIME_UNITS) if value else Unit(1.0, "s")
    return f"{unit.text(value)} {unit.sign}"


def size(value: float | None) -> str:
    """Return a number of bytes: "512 B", "4 MiB" where it is whole, "11.8 GiB"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    unit = _largest_unit_reached(abs(value), _SIZE_UNITS)
    scaled = value * unit.factor
    return f"{scaled:,.0f} {unit.sign}" if scaled == int(scaled) else f"{number(scaled)} {unit.sign}"


def rate(value: float | None, sign: str) -> str:
    """Return an amount per second: 2.5e7 and "B/s" as "25.0 MB/s", 4e12 and "FLOP/s" as "4.00 TFLOP/s"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    unit = _largest_unit_reached(abs(value), _DECIMAL_UNITS)
    return f"{unit.text(value)} {unit.sign}{sign}"


def share(value: float | None) -> str:
    """Return a ratio (speedup, efficiency) with two decimals: "0.97"; below 0.095 with two digits: "0.0034"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return number(value, 2) if 0 < abs(value) < 0.095 else f"{value:,.2f}"


_MOST_DECIMALS = 12


def ratio_end(value: float | None) -> str:
    """Return the end of a ratio's interval as `share` does, with more decimals where it would be "1.00" but is not 1.

    Example: "0.998" for 0.998.
    """
    text = share(value)
    if value is None or value == 1 or text != "1.00":
        return text
    for decimals in range(3, _MOST_DECIMALS + 1):
        text = f"{value:.{decimals}f}"
        if float(text) != 1:
            break
    return text


def percent(value: float | None, decimals: int = 0) -> str:
    """Return a share in percent: "7 %"; "<1 %" for a share above 0 that would be shown as 0 %."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    least = 10.0**-decimals
    return f"<{least:g} %" if 0 < 100 * value < least / 2 else f"{100 * value:.{decimals}f} %"


def rough_percent(value: float) -> str:
    """Return a share in percent with two digits: "0.12 %", "2 %", "14 %"; "under 0.01 %" for smaller ones above 0."""
    if 0 < abs(value) < 1e-4:
        return "under 0.01 %"
    return f"{100 * value:.0f} %" if abs(value) >= 0.0995 else f"{100 * value:.2g} %"


def relative(difference: float | None) -> str:
    """Return a relative difference: "1.0 %", "3.1e-07"; "not finite" where a loss is not."""
    if difference is None:
        return UNKNOWN
    if not math.isfinite(difference):
        return NOT_FINITE
    if difference == 0:
        return "0"
    return f"{100 * difference:.2g} %" if difference >= 1e-3 else f"{difference:.1e}"


def money(value: float | None) -> str:
    """Return an amount of money, without its currency."""
    return number(value)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun: "1 rank", "8 ranks", "1,024 ranks", "2 batches"."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def ranks_time(device: str, unit: str = "hours") -> str:
    """Return the name of a unit of the time of all ranks together: "GPU-hours", or "rank-hours" on a CPU.

    Args:
        device: cuda or cpu, as `TrainSpec.device` has it.
        unit: "hours", "minutes", "seconds" or, where there is little room, "h", "min", "s".
    """
    return f"{'GPU' if device == 'cuda' else 'rank'}-{unit}"


def rank_time_unit(hours: Iterable[float | None], device: str, *, short: bool = False) -> Unit:
    """Return the unit of `ranks_time` that suits the largest of some hours of all ranks together.

    Seconds below 10 minutes, minutes below 2 hours, else hours; for a column that says its unit once.

    Args:
        hours: hours of all ranks together; None: unknown.
        device: cuda or cpu, as `TrainSpec.device` has it.
        short: whether there is little room: "GPU-s", "GPU-min", "GPU-h".
    """
    largest_hours = _largest_magnitude(hours, 1.0)
    unit = next(unit for unit in reversed(_RANK_TIMES) if largest_hours >= _ROUNDED_UP_SHARE * unit.least_hours)
    return Unit(unit.per_hour, ranks_time(device, unit.short if short else unit.name))


class _RankTime(NamedTuple):
    """A unit of the time of all ranks together."""

    least_hours: float
    """Hours from which it is used."""
    per_hour: float
    name: str
    short: str


_RANK_TIMES = (
    _RankTime(0.0, 3600.0, "seconds", "s"),
    _RankTime(1 / 6, 60.0, "minutes", "min"),
    _RankTime(2.0, 1.0, "hours", "h"),
)


def rank_time(hours: float | None, device: str) -> str:
    """Return the time of all ranks together: "0.269 rank-seconds", "25.0 GPU-minutes", "12.0 GPU-hours"."""
    unit = rank_time_unit([hours], device)
    return f"{unit.text(hours)} {unit.sign}"


def ranks(count: int) -> str:
    """Return "1 rank", "8 ranks"."""
    return counted(count, "rank")


def bounds(low: float | None, high: float | None, form: Callable[[float], str] = number) -> str:
    """Return an interval: "1.90-2.05" with an en dash; empty where an end is unknown. `form`: prints the value."""
    form = form_of_ends(form)
    return "" if low is None or high is None else f"{form(low)}{DASH}{form(high)}"


def form_of_ends(form: Callable[[float], str]) -> Callable[[float], str]:
    """Return the function that prints the ends of an interval whose value `form` prints: `ratio_end` for `share`."""
    return ratio_end if form is share else form


def listed(things: Iterable[object], most: int = 8) -> str:
    """Return a list in words: "a, b and c"; of more than `most` things "a, b and 4 more"; of no things "none"."""
    texts = [str(thing) for thing in things]
    if len(texts) > most:
        texts = [*texts[:most], f"{len(texts) - most:,} more"]
    if not texts:
        return "none"
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return the distinct numbers in rising order, consecutive ones in one list: [[1, 2], [4]] for 4, 1, 2."""
    runs: list[list[int]] = []
    for number_ in sorted(set(numbers)):
        if runs and number_ == runs[-1][-1] + 1:
            runs[-1].append(number_)
        else:
            runs.append([number_])
    return runs


def unbroken(text: str) -> str:
    """Return `text` with no-break spaces between numbers and their units, so that both stay on one line."""
    return _NUMBER_AND_UNIT.sub(NO_BREAK_SPACE, text)
