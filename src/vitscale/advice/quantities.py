"""Durations and limits as a command line has them, and figures as a reader wants them."""

from __future__ import annotations

import math
import re

from vitscale.errors import RequestError, explain, shown

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})([smhd])")


def seconds_of(text: str, option: str) -> float:
    """The seconds of "90s", "30m", "2h" or "1.5d".

    Args:
        text: as the user gave it.
        option: which option it was given to, for the message.

    Raises:
        RequestError: it is no duration, or none that is longer than nothing.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if seconds <= 0.0:
        raise RequestError(
            explain(f"{option}: {shown(text)} is no duration", next_step='Write "90s", "30m", "2h" or "1.5d"')
        )
    return seconds


def positive(value: float | None, option: str, most: float = math.inf) -> float | None:
    """`value`, where it is a number above 0 and at most `most`, or not given.

    Raises:
        RequestError: it is neither.
    """
    if value is not None and not (0 < value <= most and math.isfinite(value)):
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise RequestError(explain(f"{option}: {value:g} cannot be", valid=[f"numbers above 0{upper}"]))
    return value


def duration(seconds: float) -> str:
    """In the largest unit of which there is one at least, to three figures: "2.50 h", "31.0 s"; days from two on."""
    for unit, length, least in (("d", 86_400.0, 2), ("h", 3600.0, 1), ("min", 60.0, 1)):
        if seconds >= length * least:
            return f"{figures(seconds / length)} {unit}"
    return f"{figures(seconds)} s"


def figures(value: float) -> str:
    """To three figures, without an exponent: "0.0123", "1.20", "12.3", "12,346"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(12, max(0, places))}f}"
