"""Quantities with units, three significant digits; what is unknown is "unavailable"."""

from __future__ import annotations

UNAVAILABLE = "unavailable"
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def seconds(value: float | None) -> str:
    """0.00123 as "1.23 ms"."""
    if value is None:
        return UNAVAILABLE
    scale, unit = next((pair for pair in _SECONDS if value >= 0.9995 * pair[0]), _SECONDS[-1])
    return f"{three_digits(value / scale)} {unit}"


def rate(value: float | None, unit: str) -> str:
    """2.5e7 and "B/s" as "25.0 MB/s"."""
    if value is None:
        return UNAVAILABLE
    scale, prefix = next((pair for pair in _DECIMAL if value >= 0.9995 * pair[0]), _DECIMAL[-1])
    return f"{three_digits(value / scale)} {prefix}{unit}"


def size(value: int | None) -> str:
    """Of a message: powers of 1024, 4194304 as "4 MiB"."""
    if value is None:
        return UNAVAILABLE
    scale, unit = next((pair for pair in _BINARY if value >= pair[0]), _BINARY[-1])
    return f"{value / scale:.4g} {unit}"


def three_digits(value: float) -> str:
    """1234.5 as "1,230"; 12.345 as "12.3"; 0.5 as "0.500"."""
    if value >= 999.5:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
