"""Runs of one rank count that differ much: how far they do is their own to say, and intervals hold further runs."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist, fmean

import numpy as np
import pytest

from evidence_factory import MEASURED, make_evidence, make_point
from vitscale.prediction.evidence import Evidence, MeasuredPoint, StepParts
from vitscale.prediction.fitting import fit
from vitscale.prediction.likelihood import MOST_JOB_TO_JOB, Likelihood, spread_of_runs
from vitscale.prediction.parameters import JOB_TO_JOB, priors
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.step.of_series import model_of

SECONDS = {1: 0.2, 2: 0.202, 4: 0.203, 8: 0.204, 16: 0.207}
"""Rank count -> seconds of a step in the geometric mean over runs; 8 ranks are a host."""
PARTS = StepParts(0.195, 0.13, 0.004, 0.0, 0.0005, 0.0005, 0.001)
STUDIES = 10


def noisy_study(spread: float, seed: int, *, explained: bool) -> Evidence:
    """Three runs of 1, 2 and 4 ranks, log-normal about the truth; parts of explained steps are of the same runs."""
    random = np.random.default_rng([seed, 41])
    points = []
    for gpus in (1, 2, 4):
        factors = np.exp(spread * random.standard_normal(3))
        mean_factor = float(np.exp(np.log(factors).mean()))
        parts = dataclasses.replace(
            PARTS, **{name: value * mean_factor for name, value in vars(PARTS).items() if value is not None}
        )
        alone = dataclasses.replace(parts, wait=0.0, wire=0.0, exposed=0.0) if gpus == 1 else parts
        points.append(make_point(gpus, (SECONDS[gpus] * factors).tolist(), parts=alone if explained else None))
    return make_evidence(points, MEASURED)


@pytest.mark.parametrize("explained", [False, True])
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.6])
def test_intervals_hold_further_runs_and_their_mean(spread: float, explained: bool) -> None:
    """Without the runs' own spread, a tenth to six tenths apart: 75, 45 and 30 % of further runs."""
    runs_held, means_held = [], []
    for seed in range(STUDIES):
        answers = predict(fit(noisy_study(spread, seed, explained=explained)), Question((1, 2, 4, 8, 16), nodes_of=8))
        for answered in answers:
            law = NormalDist(math.log(SECONDS[answered.gpus]), spread)
            low, high = answered.step_seconds.future_ends
            runs_held.append(law.cdf(math.log(high)) - law.cdf(math.log(low)))
            mean_low, mean_high = answered.step_seconds.ends
            means_held.append(mean_low <= SECONDS[answered.gpus] <= mean_high)
    assert fmean(runs_held) > 0.84
    assert fmean(means_held) > 0.75


def likelihood_of(points: list[MeasuredPoint]) -> Likelihood:
    return Likelihood(model_of(points, make_evidence(points)), points, priors(points, MEASURED, True))


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.04])
def test_runs_that_the_report_calls_stable_are_answered_by_the_prior_alone(spread: float) -> None:
    points = [make_point(gpus, (0.2, 0.2 * math.exp(spread), 0.2 * math.exp(-spread))) for gpus in (1, 2, 4)]
    quiet = likelihood_of(points)
    assert (quiet.noise, quiet.job_to_job, quiet.most_job_to_job) == (0.0, JOB_TO_JOB, MOST_JOB_TO_JOB)


def test_a_run_that_hung_is_not_how_far_runs_differ() -> None:
    hung = [make_point(1, (0.2, 0.201, 4.0)), *(make_point(gpus, (0.2, 0.201, 0.202)) for gpus in (2, 4))]
    assert spread_of_runs(hung) < 0.02
    assert likelihood_of(hung).noise == 0.0


def test_the_spread_is_that_of_many_runs() -> None:
    random = np.random.default_rng(3)
    points = [make_point(gpus, (0.2 * np.exp(0.3 * random.standard_normal(200))).tolist()) for gpus in (1, 2)]
    assert spread_of_runs(points) == pytest.approx(0.3, rel=0.1)
    assert spread_of_runs([make_point(1, (0.2, 0.4))]) == 0.0  # two runs decide nothing


def test_explained_steps_of_noisy_runs_do_not_tell_their_length_a_second_time() -> None:
    """They are of the same runs, and as lucky: with them a mean is no better known than without."""
    widths = []
    for explained in (False, True):
        (answered,) = predict(fit(noisy_study(0.3, 1, explained=explained)), Question((4,), nodes_of=8))
        low, high = answered.step_seconds.ends
        widths.append(math.log(high / low))
    assert widths[1] > 0.85 * widths[0]
