"""Figures as a reader wants them."""

from __future__ import annotations

import math


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
