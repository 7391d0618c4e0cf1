"""Where ranks lie: as measured, as asked, or as assumed and said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evidence_factory import make_point
from vitscale.prediction.evidence import MeasuredPoint, Series
from vitscale.prediction.layouts import equal_hosts, host_size, ranks_per_node

ONE_HOST = [make_point(1, 1.0), make_point(2, 1.0)]
SPREAD = [make_point(1, 1.0, per_node=1), make_point(2, 1.0, per_node=1)]
FULL_HOSTS = [make_point(n, 1.0, per_node=4) for n in (1, 2, 4, 8)]
LARGE_HOST = [make_point(n, 1.0, per_node=16) for n in (4, 16)]


def series(points: Sequence[MeasuredPoint]) -> Series:
    return Series("ddp", "strong-micro", {}, tuple(points))


@pytest.mark.parametrize(
    ("points", "expected"),
    [(ONE_HOST, (8, True)), (SPREAD, (1, False)), (FULL_HOSTS, (4, False)), (LARGE_HOST, (16, True))],
)
def test_a_host_takes_what_it_took_where_several_were_measured_and_else_at_least_eight(
    points: list[MeasuredPoint], expected: tuple[int, bool]
) -> None:
    assert host_size(points) == expected


@pytest.mark.parametrize(
    ("points", "gpus", "nodes_of", "expected"),
    [
        (ONE_HOST, 2, None, (2, False)),
        (ONE_HOST, 4, None, (4, True)),
        (ONE_HOST, 12, None, (8, True)),
        (ONE_HOST, 12, 4, (4, False)),
        (ONE_HOST, 2, 4, (2, False)),
        (SPREAD, 4, None, (1, False)),
        (FULL_HOSTS, 2, None, (2, False)),
        (FULL_HOSTS, 6, None, (4, False)),
        (LARGE_HOST, 8, None, (8, False)),
        (LARGE_HOST, 32, None, (16, True)),
    ],
)
def test_ranks_of_a_host(
    points: list[MeasuredPoint], gpus: int, nodes_of: int | None, expected: tuple[int, bool]
) -> None:
    assert ranks_per_node(series(points), gpus, nodes_of) == expected


def test_a_count_that_was_measured_lies_as_it_did_though_larger_ones_do_not() -> None:
    mixed = [make_point(2, 1.0, per_node=1), make_point(8, 1.0, per_node=4)]

    assert ranks_per_node(series(mixed), 2, None) == (1, False)
    assert ranks_per_node(series(mixed), 4, None) == (4, False)


@given(st.integers(1, 2000), st.integers(1, 64))
def test_equal_hosts_are_full_and_no_larger_ones_would_be(gpus: int, host: int) -> None:
    each = equal_hosts(gpus, host)

    assert gpus % each == 0
    assert each <= min(gpus, host)
    assert all(gpus % more for more in range(each + 1, min(gpus, host) + 1))
