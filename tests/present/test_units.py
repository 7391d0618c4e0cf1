from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.present import units
from vitscale.present.units import DASH


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, DASH), (math.nan, DASH), (math.inf, DASH), (0.0, "0 s"), (8.5e-5, "85.0 us"), (0.012, "12.0 ms"),
        (0.99951, "1.00 s"), (31, "31.0 s"), (120, "120 s"), (599, "599 s"), (900, "15.0 min"), (7200, "2.00 h"),
        (9000, "2.50 h"), (100_000, "27.8 h"), (259_200, "3.00 d"),
    ],
)  # fmt: skip
def test_a_time_carries_the_unit_it_reads_best_in(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, DASH), (0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (4 * 2**20, "4 MiB"), (11_811_160_064, "11 GiB"),
        (11_800_000_000, "11.0 GiB"), (520_000_000, "496 MiB"), (2**40, "1 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_binary(value: int | None, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [(2.5e7, "B/s", "25.0 MB/s"), (3.125e9, "B/s", "3.12 GB/s"), (4e12, "FLOP/s", "4.00 TFLOP/s"), (None, "B/s", DASH),
     (999.9, "B/s", "1.00 kB/s"), (12, "B/s", "12.0 B/s")],
)  # fmt: skip
def test_rates_are_decimal(value: float | None, sign: str, text: str) -> None:
    assert units.rate(value, sign) == text


def test_what_is_there_is_never_shown_as_none() -> None:
    assert units.percent(0.0004) == "<1 %"
    assert units.percent(0.0004, 1) == "<0.1 %"
    assert units.percent(0.0) == "0 %"
    assert units.share(0.0034) == "0.0034"
    assert units.share(0.974) == "0.97"
    assert units.share(0.0) == "0.00"


def test_counts_agree_with_their_nouns() -> None:
    assert [units.ranks(1), units.ranks(2), units.ranks(1024)] == ["1 rank", "2 ranks", "1,024 ranks"]
    assert units.counted(2, "batch", "batches") == "2 batches"
    assert units.listed([]) == "none"
    assert units.listed(["a"]) == "a"
    assert units.listed("abc") == "a, b and c"
    assert units.listed(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def test_one_unit_for_a_column() -> None:
    unit = units.time_unit([0.3, None, 45.0])
    assert (unit.sign, unit.text(0.3), unit.text(None)) == ("s", "0.300", DASH)
    assert units.time_unit([]).sign == "s"
    assert units.time_unit([4e-5]).sign == "ms"


_FORMS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@given(st.floats(1e-6, 1e8))
def test_a_time_read_back_is_within_half_a_per_cent(value: float) -> None:
    figure, unit = units.seconds(value).split(" ")
    assert float(figure.replace(",", "")) * _FORMS[unit] == pytest.approx(value, rel=0.0051)


@given(st.floats(1.0, 1e14))
def test_a_size_read_back_is_within_half_a_per_cent(value: float) -> None:
    figure, unit = units.size(value).split(" ")
    scale = 1024.0 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert float(figure.replace(",", "")) * scale == pytest.approx(value, rel=0.0051)


def test_a_number_stays_with_its_unit() -> None:
    kept = units.unbroken("2 ranks at 86 % of 2.57 s = 3 for each").replace(units.NO_BREAK_SPACE, "_")
    assert kept == "2_ranks at 86_% of 2.57_s =_3_for each"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.9953, "0.995"), (0.99996, "0.99996"), (1.0, "1.00"), (1.0004, "1.0004"), (1.3, "1.30"), (0.94, "0.94")],
)
def test_the_end_of_a_ratios_interval_shows_its_side_of_1(value: float, text: str) -> None:
    assert units.ratio_end(value) == text
    assert units.bounds(value, 2.0, units.share) == f"{text}\N{EN DASH}2.00"


def test_ends_of_other_quantities_keep_their_form() -> None:
    assert units.bounds(0.9999, 2.0, units.number) == "1.00\N{EN DASH}2.00"
