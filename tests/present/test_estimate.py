from __future__ import annotations

import pytest

from vitscale.present.document import Cell
from vitscale.present.estimate import Estimate
from vitscale.present.units import DASH, share


def test_every_number_takes_part_in_a_change_of_unit() -> None:
    estimate = Estimate(2.0, 1.5, 2.5, 0.9, future_low=1.0, future_high=4.0).times(1000.0)
    assert (estimate.value, estimate.low, estimate.high) == (2000.0, 1500.0, 2500.0)
    assert (estimate.future_low, estimate.future_high) == (1000.0, 4000.0)
    assert estimate.level == 0.9


def test_the_ends_change_places_in_a_quotient() -> None:
    rate = Estimate(2.0, 1.0, 4.0, future_low=0.5, future_high=8.0).into(8.0)
    assert (rate.value, rate.low, rate.high, rate.future_low, rate.future_high) == (4.0, 2.0, 8.0, 1.0, 16.0)
    assert Estimate(2.0).into(8.0) == Estimate(4.0)


@pytest.mark.parametrize(
    ("estimate", "side"),
    [
        (Estimate(1.5, 1.2, 1.8), "above"), (Estimate(0.5, 0.2, 0.8), "below"), (Estimate(1.0, 0.9, 1.1), None),
        (Estimate(1.5, 1.2, 1.8, note="too few runs"), None), (Estimate(1.5), None),
    ],
)  # fmt: skip
def test_a_side_is_told_of_a_whole_interval_alone(estimate: Estimate, side: str | None) -> None:
    assert estimate.side_of(1.0) == side


def test_a_cell_has_both_intervals_or_none() -> None:
    def told(estimate: Estimate) -> str:
        return str(Cell(share(estimate.value), estimate.bounds(share), run=estimate.one_run.bounds(share)))

    assert told(Estimate(1.0, 0.9, 1.1)) == f"1.00 (0.90{DASH}1.10)"
    both = Estimate(1.0, 0.9, 1.1, future_low=0.5, future_high=1.5)
    assert told(both) == f"1.00 (0.90{DASH}1.10; 0.50{DASH}1.50)"
    assert told(Estimate(1.0, 1.0, 1.0)) == "1.00"
    run = Estimate(3.0, 2.0, 4.0, 0.9, future_low=1.0, future_high=5.0).one_run
    assert (run.low, run.high, run.of, run.one_run) == (1.0, 5.0, "a future run", run)
