"""What is known before any step is looked at, and what little of the measurements it takes up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from evidence_factory import MEASURED, UNKNOWN, make_evidence, make_point, make_trial
from vitscale.prediction.evaluating import measured_step
from vitscale.prediction.evidence import StepParts
from vitscale.prediction.fitting import fit
from vitscale.prediction.labels import assumptions
from vitscale.prediction.layouts import placement_of
from vitscale.prediction.likelihood import Likelihood
from vitscale.prediction.parameters import JOB_TO_JOB, NAMES, OF_UNKNOWN_JOBS, PARTS, Prior, priors
from vitscale.prediction.step.model import ALIKE_ACROSS
from vitscale.prediction.variants import variant
from vitscale.trial.trial import Trial


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


def test_the_same_bytes_are_a_larger_share_of_a_shorter_step() -> None:
    """The share between hosts is that prior over the root of the one inside, so both together go with 1 / step."""

    def shares(step: float, accum: int = 1, batch_known: bool = True) -> tuple[float, float]:
        points = [make_point(n, step, grad_accum=accum) for n in (1, 2)]
        known = priors([replace(one, batch_known=batch_known) for one in points], UNKNOWN, known_messages=False)
        inside, across = (math.exp(known[name].mean) for name in ("transfer share", "across share"))
        return inside, across * inside**ALIKE_ACROSS

    usual, short = shares(0.3), shares(0.15)
    assert short == pytest.approx([2 * share for share in usual])
    assert shares(0.6, accum=4) == pytest.approx(short)
    # Tokens a second with batches of sentences make steps of milliseconds: no more than 0.1 s is believed.
    assert shares(0.002) == pytest.approx([3 * share for share in usual])
    assert shares(0.002, batch_known=False) == pytest.approx(usual)
    assert shares(60.0) == pytest.approx([share / 10 for share in usual])


def test_an_optimizer_that_nothing_tells_apart_is_left_in_the_rest() -> None:
    timed = make_point(1, 0.2, parts=StepParts(0.17, 0.1, 0.03, 0.0, 0.0, 0.0, 0.0))
    assert math.exp(priors([timed], UNKNOWN, known_messages=True)["optimizer"].mean) == pytest.approx(0.03)
    untold = priors([make_point(1, 0.2)], UNKNOWN, known_messages=False)["optimizer"]
    assert math.exp(untold.mean) < 1e-6
    assert untold.spread < 0.1


def test_a_rank_alone_on_a_cpu_may_compute_at_another_pace() -> None:
    on_gpu, on_cpu = (priors([make_point(1, 0.2, device=d)], UNKNOWN, known_messages=True) for d in ("cuda", "cpu"))
    assert on_cpu["alone"].spread > 3 * on_gpu["alone"].spread


@pytest.mark.parametrize(
    ("trial", "scale"),
    [
        (make_trial(2), JOB_TO_JOB),
        (make_trial(2, model=None), OF_UNKNOWN_JOBS),
        (make_trial(2, engine="mine"), OF_UNKNOWN_JOBS),
        # What it sends is known, but not all that its log has timed.
        (make_trial(2).model_copy(update={"origin": "table.csv"}), OF_UNKNOWN_JOBS),
    ],
)
def test_fit_label_measured_answer_and_next_measurement_go_by_one_job_to_job_scale(trial: Trial, scale: float) -> None:
    point = replace(make_point(2, 0.2), trial=trial)
    evidence = make_evidence([point], MEASURED)
    fitted = fit(evidence).series["ddp"]
    asked = variant(fitted, {})
    told = next(
        one for one in assumptions(asked, placement_of(fitted.series, trial, 4, 8)) if one.part.startswith("job-to")
    )
    measured = measured_step([point], point)

    assert Likelihood(fitted.model, [point], priors([point], MEASURED, True)).job_to_job == scale
    assert told.taken == f"about {100 * scale:.2g} % from one run to the next"
    # Of one run that the prior alone says something of: 2.13 is t(4) at 95 %, and sqrt(2) the deviation of a t(4).
    assert math.log(measured.ends[1] / measured.value) == pytest.approx(2.1318 * math.sqrt(2) * scale, rel=1e-3)
