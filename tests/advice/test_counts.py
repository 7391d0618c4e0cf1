"""Which rank counts advice looks at, and how their ranks lie on hosts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evidence_factory import make_point
from vitscale.advice.candidates import rank_counts
from vitscale.errors import RequestError
from vitscale.prediction.evidence import Point, Series
from vitscale.prediction.layouts import ranks_per_node

ONE_HOST = [make_point(1, 1.0), make_point(2, 1.0)]
HOSTS_OF_TWO = [make_point(n, 1.0, per_node=2) for n in (1, 2, 6)]


def looked_at(
    points: Sequence[Point],
    gpus: tuple[int, ...] | None = None,
    max_gpus: int | None = None,
    nodes_of: int | None = None,
) -> tuple[tuple[int, int], ...]:
    series = Series("ddp", "strong-micro", {}, tuple(points))
    return rank_counts([series], gpus=gpus, max_gpus=max_gpus, ranks_per_node=nodes_of)


def test_powers_of_two_whole_hosts_and_what_was_measured_up_to_eight_times_as_many() -> None:
    found = looked_at(HOSTS_OF_TWO)

    assert [count for count, _ in found] == [1, *range(2, 33, 2), 40, 48]
    assert {each for count, each in found if count > 1} == {2}


def test_no_more_than_asked() -> None:
    assert looked_at(HOSTS_OF_TWO, max_gpus=6) == ((1, 1), (2, 2), (4, 2), (6, 2))


def test_hosts_are_as_large_as_predict_takes_them() -> None:
    series = Series("ddp", "strong-micro", {}, tuple(ONE_HOST))

    for count, each in looked_at(ONE_HOST, max_gpus=64):
        assert each == ranks_per_node(series, count, None)[0]
    assert looked_at(ONE_HOST, gpus=(8, 12, 16)) == ((8, 8), (12, 6), (16, 8))


def test_hosts_of_a_size_that_was_said() -> None:
    assert looked_at(ONE_HOST, gpus=(2, 4, 12), nodes_of=4) == ((2, 2), (4, 4), (12, 4))
    with pytest.raises(RequestError, match="12 ranks do not fill hosts of 8"):
        looked_at(ONE_HOST, gpus=(12,), nodes_of=8)


def test_no_count_left() -> None:
    with pytest.raises(RequestError, match="no rank count is left"):
        looked_at(ONE_HOST, gpus=(8,), max_gpus=4)
