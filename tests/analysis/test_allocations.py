from __future__ import annotations

import math

import numpy as np
import pytest

from results_factory import (
    TRAIN_SAMPLES,
    explained_run,
    make_curve,
    make_environment,
    make_results,
    make_trial,
    steady_run,
    steps_of_epoch,
)
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.runs.repeats import components, groups, observations
from vitscale.analysis.statistics import interval, mean_interval
from vitscale.pages import sentences as words
from vitscale.store.records import ResourcesLine
from vitscale.store.results import Run

ONE = make_trial(gpus=1)


def study(*seconds_by_allocation: list[float]) -> Analysis:
    """Repeats of one trial, each list in an allocation of its own."""
    runs: list[Run] = []
    for number, seconds in enumerate(seconds_by_allocation):
        for value in seconds:
            around = [make_environment(allocation=f"slurm {number}")]
            runs.append(steady_run(ONE, value, len(runs), environments=around))
    return analyse(make_results([(make_curve([ONE]), [ONE])], runs))


def test_components_by_hand() -> None:
    # Logarithms 0, 0.2 | 0.4, 0.8: means 0.1 and 0.6, of all 0.35. Between: 2 x 0.25^2 x 2 = 0.25 with 1 degree of
    # freedom; within: 0.02 + 0.08 = 0.1 with 2, so 0.05; n0 = 4 - 8/4 = 2: (0.25 - 0.05) / 2 = 0.1. F = 5 with 1 and 2
    # degrees of freedom: p = 1 - sqrt(5 / 7).
    found = components([[1.0, math.exp(0.2)], [math.exp(0.4), math.exp(0.8)]])
    assert found is not None
    assert (found.between, found.within) == pytest.approx((math.sqrt(0.1), math.sqrt(0.05)))
    assert found.p == pytest.approx(1 - math.sqrt(5 / 7))
    assert found.clustered


def test_unequal_numbers_of_runs_by_hand() -> None:
    # Logarithms 0, 0, 0.3 | 0.3: means 0.1 and 0.3, of all 0.15: 3 x 0.05^2 + 0.15^2 = 0.03 between, with 1 degree of
    # freedom; 0.01 + 0.01 + 0.04 = 0.06 within, with 2. F = 1: p = 1 - sqrt(1 / 3).
    uneven = components([[1.0, 1.0, math.exp(0.3)], [math.exp(0.3)]])
    assert uneven is not None
    assert (uneven.between, uneven.within) == pytest.approx((0.0, math.sqrt(0.03)))
    assert uneven.p == pytest.approx(1 - math.sqrt(1 / 3))
    # One run each, or one allocation, tells no two spreads apart.
    assert components([[1.0], [1.1]]) is components([[1.0, 1.1]]) is None
    # 0, 0.2 | 0.1, 0.1, 0.4: n0 = 5 - 13/5 = 2.4; means 0.1 and 0.2, of all 0.16: 2 x 0.06^2 + 3 x 0.04^2 = 0.012
    # between, 0.02 + 0.06 within with 3 degrees of freedom: less between than within.
    found = components([[1.0, math.exp(0.2)], [math.exp(0.1)] * 2 + [math.exp(0.4)]])
    assert found is not None
    assert (found.between, found.within) == pytest.approx((0.0, math.sqrt(0.08 / 3)))
    assert not found.clustered


def test_groups_and_observations() -> None:
    assert groups(["a", "b", "a"]) == ((0, 2), (1,))
    assert observations([1.0, 5.0, 4.0], ((0, 2), (1,))) == pytest.approx([2.0, 5.0])
    assert observations([1.0, None, None], ((0, 2), (1,))) == [1.0]


def test_where_allocations_differ_each_counts_once() -> None:
    (trial,) = study([1.0, 1.01], [1.2, 1.21], [1.1, 1.11]).trials.values()
    assert trial.components is not None
    assert trial.components.clustered
    assert len(trial.observed_costs) == 3
    alone = study([1.0, 1.01, 1.2, 1.21, 1.1, 1.11]).trials[trial.trial_id]
    assert trial.epoch_seconds is not None
    assert alone.epoch_seconds is not None
    assert trial.epoch_seconds.value == pytest.approx(alone.epoch_seconds.value)
    assert (trial.epoch_seconds.high or 0) > (alone.epoch_seconds.high or math.inf)


def test_where_allocations_are_alike_each_run_counts() -> None:
    (trial,) = study([1.0, 1.1, 1.05], [1.1, 1.0, 1.06]).trials.values()
    assert len(trial.allocations) == 2
    assert len(trial.observed_costs) == 6


def test_what_explains_a_trial_counts_allocations_as_its_times_do() -> None:
    """Seven runs in three allocations: 1, 1.01 and 1.02 times a step, 1.2 and 1.21 times, 1.1 and 1.11 times."""
    trial, runs = make_trial(epochs=4), list[Run]()
    for number, factors in enumerate([[1.0, 1.01, 1.02], [1.2, 1.21], [1.1, 1.11]]):
        for factor in factors:
            parts = {"forward": 0.3 * factor, "backward": 0.6 * factor}
            around = [make_environment(allocation=f"slurm {number}")]
            run = explained_run(trial, [parts], repeat=len(runs), environments=around)
            energy = {"joules": TRAIN_SAMPLES * factor, "source": "NVML", "reason": None, "devices": ("GPU-a",)}
            memory = {"cpu_throttled_seconds": None, "rss_bytes": 1, "peak_rss_bytes": 1}
            line = {
                "epoch": 1,
                "steps": steps_of_epoch(run.ranks[0], 1),
                "seconds": 100.0,
                "cpu_seconds": 1.0,
                "energy": energy,
            } | memory
            resources = (ResourcesLine.model_validate(line),)
            runs.append(run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"resources": resources}),)}))
    (found,) = analyse(make_results([(make_curve([trial]), [trial])], runs)).trials.values()
    assert len(found.observed_costs) == 3
    assert found.breakdown is not None
    of_forward = mean_interval([0.3 * 1.01, 0.3 * 1.205, 0.3 * 1.105])
    forward = found.breakdown.over_runs(lambda one: one.rank(0).parts["forward"])
    assert forward is not None
    assert (forward.low, forward.high) == pytest.approx((of_forward.low, of_forward.high))
    assert found.breakdown.typical.parts["forward"] == pytest.approx(of_forward.value)
    joules = interval([(1.0 * 1.01 * 1.02) ** (1 / 3), math.sqrt(1.2 * 1.21), math.sqrt(1.1 * 1.11)])
    assert found.resources is not None
    assert found.resources.joules_per_image is not None
    assert found.resources.joules_per_image.low == pytest.approx(joules.low)


def test_what_the_intervals_cover_is_said() -> None:
    assert words.scope_sentence(study([1.0, 1.1, 1.05])) == (
        "The runs of each trial shared one allocation: intervals do not cover how allocations differ."
    )
    assert words.scope_sentence(study([1.0, 1.1, 1.05], [1.1, 1.0, 1.06])) == ""
    apart = study([1.0, 1.01], [1.2, 1.21])
    assert "an allocation with all its runs counts as one observation" in words.scope_sentence(apart)
    assert not [trial for trial in apart.trials if trial in words.scope_sentence(apart)]
    assert words.scope_sentence(study([1.0])) == ""
    one_host = [steady_run(ONE, seconds, repeat) for repeat, seconds in enumerate([1.0, 1.1])]
    analysis = analyse(make_results([(make_curve([ONE]), [ONE])], one_host))
    assert (
        words.scope_sentence(analysis)
        == "The runs of each trial shared their hosts: intervals do not cover how hosts differ."
    )


@pytest.mark.parametrize(
    ("runs", "between", "least", "naively", "seed"),
    [
        ((3, 3, 3, 3), 0.0, 0.92, 1.0, 1),
        ((3, 3, 3, 3), 0.05, 0.92, 0.8, 2),
        ((4, 1, 1, 1), 0.05, 0.9, 0.85, 3),  # an allocation of one run tells of the spread between allocations too
        ((5, 1), 0.05, 0.84, 0.7, 4),
        ((5, 1), 0.0, 0.92, 1.0, 5),
        ((5, 5), 0.02, 0.82, 0.8, 6),  # as far apart as runs inside
        ((2, 2, 2), 0.02, 0.88, 0.95, 7),
    ],
)
def test_intervals_over_allocations_hold_the_truth(
    runs: tuple[int, ...], between: float, least: float, naively: float, seed: int
) -> None:
    """Allocations of so many runs each, which vary by 2 %."""
    random, held, naive = np.random.default_rng(seed), 0, 0
    firsts = np.cumsum((0, *runs)).tolist()
    clusters = tuple(tuple(range(first, first + count)) for first, count in zip(firsts, runs, strict=False))
    for _ in range(600):
        costs = [
            np.exp(between * random.standard_normal() + 0.02 * random.standard_normal(count)).tolist() for count in runs
        ]
        found = components(costs)
        assert found is not None
        values = [cost for some in costs for cost in some]
        for clustered, counts in ((found.clustered, True), (False, False)):
            one = interval(observations(values, clusters if clustered else None))
            holds = (one.low or 0) <= 1 <= (one.high or 0)
            held, naive = held + (counts and holds), naive + (not counts and holds)
    assert held / 600 > least
    assert naive / 600 <= naively
