from __future__ import annotations

import math

import pytest

from vitscale.api.arguments import positive
from vitscale.cli.base import seconds_of
from vitscale.errors import RequestError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129_600), (".5h", 1800), (" 1h ", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, "--deadline") == seconds


@pytest.mark.parametrize("text", ["2x", "", "h", "-2h", "0s", "1e9h", "2 h", "2h30m", "inf", "2H", "9" * 400 + "s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(RequestError, match="--deadline") as error:
        seconds_of(text, "--deadline")

    assert '"90s", "30m", "2h" or "1.5d"' in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("value", [0.0, -5.0, math.nan, math.inf])
def test_limits_are_positive_numbers(value: float) -> None:
    with pytest.raises(RequestError, match="--budget"):
        positive(value, "--budget")


def test_an_efficiency_is_at_most_one() -> None:
    assert positive(1.0, "--min-efficiency", most=1.0) == 1.0
    assert positive(None, "--min-efficiency", most=1.0) is None
    with pytest.raises(RequestError, match="at most 1"):
        positive(1.01, "--min-efficiency", most=1.0)
