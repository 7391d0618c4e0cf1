from __future__ import annotations

import math
from dataclasses import replace

import pytest

from advice_factory import ASKED, advised, evidence
from evidence_factory import MEASURED, UNKNOWN
from vitscale.advice.next_measurement import CHECKED_SPREAD, measurements
from vitscale.advice.request import Option, future_run_estimate
from vitscale.prediction.fitting import fit
from vitscale.prediction.gpu_types import gpu_type
from vitscale.prediction.instances import Instance
from vitscale.prediction.predicting import spread_by_part
from vitscale.prediction.variants import variant

SHARES = {
    "compute": 0.1, "network inside hosts": 0.0, "network between hosts": 0.8, "overlap": 0.0, "optimizer": 0.0,
    "stragglers": 0.0, "job-to-job": 0.1,
}  # fmt: skip


def across_hosts() -> Option:
    """8 ranks on 2 hosts, whose time is known within a factor of 2."""
    option = advised(replace(ASKED, gpus=(8,), ranks_per_node=4)).answers[0].option
    return replace(option, training=future_run_estimate(1000.0, 700.0, 1400.0))


def test_an_unknown_network_is_checked_first_and_the_width_is_that_of_the_root_of_the_variances() -> None:
    found = measurements(across_hosts(), evidence().series[0], UNKNOWN, SHARES)

    best = next(one for one in found if "--hostfile" in one.what)
    left = (CHECKED_SPREAD / UNKNOWN.across.bandwidth_spread) ** 2
    assert best.spread_before == pytest.approx(2.0)
    assert math.log(best.spread_after) == pytest.approx(math.log(2.0) * math.sqrt(0.2 + 0.8 * left))
    # 2 hosts of 4 ranks for two minutes.
    assert best.gpu_minutes == pytest.approx(16.0)
    assert "vitscale check --hostfile" in best.what


def test_start_up_is_not_what_is_uncertain() -> None:
    option = replace(across_hosts(), seconds=future_run_estimate(1500.0, 1200.0, 1900.0))

    assert measurements(option, evidence().series[0], UNKNOWN, SHARES)[0].spread_before == pytest.approx(2.0)


def test_what_was_checked_is_not_advised_again() -> None:
    found = measurements(across_hosts(), evidence().series[0], MEASURED, SHARES)

    assert not any("check" in one.what for one in found)


def test_a_check_on_two_hosts_tells_of_both_levels() -> None:
    shares = SHARES | {"network between hosts": 0.4, "network inside hosts": 0.4}
    left = [(CHECKED_SPREAD / link.bandwidth_spread) ** 2 for link in (UNKNOWN.inside, UNKNOWN.across)]

    found = measurements(across_hosts(), evidence().series[0], UNKNOWN, shares)

    both = next(one for one in found if "--hostfile" in one.what)
    assert both.part == "network inside and between hosts"
    assert math.log(both.spread_after) == pytest.approx(math.log(2.0) * math.sqrt(0.2 + 0.4 * sum(left)))


def test_ranked_by_gain_for_a_gpu_minute() -> None:
    found = measurements(across_hosts(), evidence().series[0], UNKNOWN, SHARES | {"compute": 0.4})

    gains = [one.gain_per_gpu_minute for one in found]
    assert len(gains) > 1
    assert gains == sorted(gains, reverse=True)


def test_job_to_job_variation_is_nothing_that_a_measurement_takes_away() -> None:
    only_jobs = dict.fromkeys(SHARES, 0.0) | {"job-to-job": 1.0}

    assert measurements(across_hosts(), evidence().series[0], UNKNOWN, only_jobs) == ()


def test_inside_one_host_the_network_between_hosts_does_not_matter() -> None:
    option = replace(across_hosts(), candidate=replace(across_hosts().candidate, gpus=4))

    found = measurements(option, evidence().series[0], UNKNOWN, SHARES)

    assert not any("--hostfile" in one.what for one in found)


def test_on_another_gpu_a_run_on_one_of_it_comes_first() -> None:
    a10g = replace(evidence(), series=(replace(evidence().series[0], points=tuple(
        replace(point, devices=("NVIDIA A10G",) * point.gpus) for point in evidence().series[0].points
    )),))  # fmt: skip
    instance = Instance("g6", gpu_type("L4"), 4, 3.0)
    fitted = fit(a10g).series["ddp"]
    option = across_hosts()
    candidate = replace(option.candidate, gpus=4, ranks_per_node=4, instance=instance)
    shares = spread_by_part(variant(fitted, {"gpu": instance.gpu}), candidate)

    best = measurements(replace(option, candidate=candidate), a10g.series[0], MEASURED, shares)[0]

    assert shares["compute"] > 0.5
    assert best.what.startswith("2 short runs on 1 rank of g6 ")
    assert math.log(best.spread_after) < 0.8 * math.log(best.spread_before)


def test_two_runs_of_noisy_ones_narrow_no_further_than_they_agree() -> None:
    """Runs that differ by half of their time: two more do not tell an answer within a few per cent."""
    (series,) = evidence().series
    noisy = replace(series, points=tuple(replace(point, step_seconds=(0.1, 0.16, 0.25)) for point in series.points))
    offered = [
        any("themselves" in one.what for one in measurements(across_hosts(), own, MEASURED, SHARES))
        for own in (series, noisy)
    ]
    assert offered == [True, False]
