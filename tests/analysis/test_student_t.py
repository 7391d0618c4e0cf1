"""Student's t and F against SciPy's."""

from __future__ import annotations

import itertools

import pytest
from scipy.special import fdtrc, stdtr, stdtrit

from vitscale.analysis import statistics
from vitscale.analysis.statistics import f_above, t_below, t_quantile


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked before in this process."""
    monkeypatch.setattr(statistics, "_asked", itertools.count())


@pytest.mark.parametrize("freedom", [1, 2, 3, 5.5, 10, 33, 1234.5, 1e6])
def test_student_t(freedom: float) -> None:
    for share in (1e-9, 1e-4, 0.025, 0.2, 0.5, 0.6, 0.975, 0.9999):
        assert t_quantile(freedom, share) == pytest.approx(float(stdtrit(freedom, share)), rel=1e-6, abs=1e-9)
    for value in (-1e3, -5, -1, 0, 0.3, 9):
        assert t_below(freedom, value) == pytest.approx(float(stdtr(freedom, value)), rel=1e-6, abs=1e-300)


@pytest.mark.parametrize(("freedom", "other"), [(1, 1), (2, 8), (40, 3), (5, 200)])
def test_f(freedom: float, other: float) -> None:
    for value in (0.0, 0.1, 1.0, 20.0, 500.0):
        assert f_above(freedom, other, value) == pytest.approx(float(fdtrc(freedom, other, value)), rel=1e-9)
