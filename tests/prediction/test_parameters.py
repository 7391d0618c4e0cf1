"""What is known before any step is looked at, and what little of the measurements it takes up."""

from __future__ import annotations

import math

import pytest

from evidence_factory import MEASURED, UNKNOWN, make_point
from vitscale.prediction.evidence import StepParts
from vitscale.prediction.parameters import NAMES, PARTS, Prior, priors


def test_every_parameter_has_a_prior_and_belongs_to_one_part() -> None:
    found = priors([make_point(1, 0.2)], UNKNOWN, known_messages=True)
    assert set(found) == set(NAMES)
    assert len(NAMES) == len(set(NAMES)) == sum(map(len, PARTS.values()))
    assert all(math.isfinite(prior.mean) and prior.spread > 0 for prior in found.values())


def test_links_are_as_sure_as_they_are_known() -> None:
    checked = priors([make_point(1, 0.2)], MEASURED, known_messages=True)
    blind = priors([make_point(1, 0.2)], UNKNOWN, known_messages=True)
    assert checked["bandwidth across"] == Prior(0.0, MEASURED.across.bandwidth_spread)
    assert blind["bandwidth across"] == Prior(0.0, UNKNOWN.across.bandwidth_spread)


@pytest.mark.parametrize(("gpus", "of_the_largest"), [(1, 1.0), (2, 0.826), (8, 0.611), (512, 0.443)])
def test_jitter_is_one_ranks_not_the_slowest_of_all(gpus: int, of_the_largest: float) -> None:
    """The largest of N normals varies less than one of them."""
    larger = make_point(1024, 0.3, step_spread=0.5)
    found = priors([make_point(gpus, 0.2, step_spread=0.02), larger], UNKNOWN, known_messages=True)
    assert found["jitter"].mean == pytest.approx(math.log(0.02 / of_the_largest))


def test_transfers_that_all_lay_between_hosts_need_no_second_share() -> None:
    spread = [make_point(n, 0.2, per_node=1) for n in (1, 2, 4)]
    packed = [make_point(n, 0.2) for n in (1, 2, 4)]
    both = [make_point(n, 0.2, per_node=2) for n in (1, 2, 4)]
    assert math.exp(priors(spread, UNKNOWN, known_messages=False)["across share"].mean) < 1e-4
    for points in (packed, both, packed[:1]):
        assert math.exp(priors(points, UNKNOWN, known_messages=False)["across share"].mean) > 0.01


def test_an_optimizer_that_nothing_tells_apart_is_left_in_the_rest() -> None:
    timed = make_point(1, 0.2, parts=StepParts(0.17, 0.1, 0.03, 0.0, 0.0, 0.0, 0.0))
    assert math.exp(priors([timed], UNKNOWN, known_messages=True)["optimizer"].mean) == pytest.approx(0.03)
    untold = priors([make_point(1, 0.2)], UNKNOWN, known_messages=False)["optimizer"]
    assert math.exp(untold.mean) < 1e-6
    assert untold.spread < 0.1


def test_a_rank_alone_on_a_cpu_may_compute_at_another_pace() -> None:
    on_gpu, on_cpu = (priors([make_point(1, 0.2, device=d)], UNKNOWN, known_messages=True) for d in ("cuda", "cpu"))
    assert on_cpu["alone"].spread > 3 * on_gpu["alone"].spread
