"""Student's t and F by the incomplete beta function.

SciPy has them too, and takes a fifth of a second to import, which pays from some thousand values on alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from statistics import NormalDist

_TINY = 1e-300
_TERMS = 10_000
_MOST_FREEDOM = 1e7
"""Beyond it the distribution is the normal one, and the fraction loses digits."""


_FEW = 2_000
_asked = itertools.count()


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), for x in [0, 1].

    By its continued fraction (NIST Digital Library of Mathematical Functions, 8.17.22), evaluated as Lentz does, on the
    side on which it converges fast.
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1.0 / max(_TINY, 1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1.0 / ((1.0 + term * d) or _TINY), (1.0 + term / c) or _TINY
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return math.exp(log_front) * fraction / a


def t_below(freedom: float, value: float) -> float:
    """The chance that Student's t of so many degrees of freedom is below `value`."""
    if next(_asked) > _FEW:
        from scipy.special import stdtr

        return float(stdtr(freedom, value))
    freedom = min(freedom, _MOST_FREEDOM)
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))
    return tail if value < 0 else 1.0 - tail


def f_above(freedom: float, other: float, value: float) -> float:
    """The chance that F of so many degrees of freedom is above `value`, which is at least 0."""
    return incomplete_beta(other / 2, freedom / 2, other / (other + freedom * value))


@functools.lru_cache(4096)
def t_quantile(freedom: float, share: float) -> float:
    """The value below which `share` of Student's t lies: Newton's method on a bracket, from the normal quantile."""
    if next(_asked) > _FEW:
        from scipy.special import stdtrit

        return float(stdtrit(freedom, share))
    if share > 0.5:
        return -t_quantile(freedom, 1.0 - share)
    freedom = min(freedom, _MOST_FREEDOM)
    log_peak = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    low, high = -math.inf, 0.0
    value = NormalDist().inv_cdf(share)
    for _ in range(200):
        above = t_below(freedom, value) - share
        low, high = (low, value) if above > 0 else (value, high)
        density = math.exp(log_peak - (freedom + 1) / 2 * math.log1p(value * value / freedom))
        near = value - above / density if density > 0 else math.nan
        if not low < near < high:  # the tails are so flat that Newton's step leaves the bracket
            near = 2 * value if low == -math.inf else (low + high) / 2
        if abs(near - value) <= 1e-13 * abs(near):
            break
        value = near
    return value
