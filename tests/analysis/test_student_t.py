"""Student's t and F against their closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from vitscale.analysis.statistics import f_above, t_below, t_quantile

SHARES = (1e-9, 1e-4, 0.025, 0.2, 0.6, 0.975, 0.9999)


@pytest.mark.parametrize("share", SHARES)
def test_student_t_of_one_two_and_very_many_degrees_of_freedom(share: float) -> None:
    """Of one it is Cauchy's distribution, of very many the normal one."""
    assert t_quantile(1, share) == pytest.approx(math.tan(math.pi * (share - 0.5)), rel=1e-7)
    of_two = (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    assert t_quantile(2, share) == pytest.approx(of_two, rel=1e-7)
    assert t_quantile(1e9, share) == pytest.approx(NormalDist().inv_cdf(share), rel=1e-6)


@pytest.mark.parametrize("value", [-1e3, -5.0, -1.0, 0.0, 0.3, 9.0])
def test_the_chance_below_a_value(value: float) -> None:
    assert t_below(1, value) == pytest.approx(0.5 + math.atan(value) / math.pi, rel=1e-9)
    # Shorter forms cancel far below 0.
    of_two = 1 / (value**2 + 2 - value * math.sqrt(value**2 + 2))
    assert t_below(2, value) == pytest.approx(of_two, rel=1e-9)


@pytest.mark.parametrize("freedom", [2, 3, 5.5, 33, 1234.5])
def test_a_quantile_is_where_its_share_lies_below(freedom: float) -> None:
    for share in SHARES:
        assert t_below(freedom, t_quantile(freedom, share)) == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 20.0, 500.0])
def test_f_with_one_or_two_degrees_of_freedom_above(value: float) -> None:
    """F with one is the square of Student's t; with two it has a closed form."""
    for freedom in (1, 3, 8, 200):
        assert f_above(1, freedom, value) == pytest.approx(2 * t_below(freedom, -math.sqrt(value)), rel=1e-9)
        assert f_above(2, freedom, value) == pytest.approx((1 + 2 * value / freedom) ** (-freedom / 2), rel=1e-9)


def test_an_answer_is_the_same_whatever_was_asked_before() -> None:
    first = t_quantile(3.7), t_below(3.7, -2.2)
    for question in range(5_000):
        t_below(3.7 + question, -2.2)
    assert (t_quantile(3.7), t_below(3.7, -2.2)) == first
