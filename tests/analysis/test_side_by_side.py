"""What runs beside one another lose: a known slowdown goes in, and comes out; where there is none, none is claimed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from results_factory import failed_run, make_curve, make_results, make_trial, steady_run
from vitscale import analysis
from vitscale.analysis.quality.side_by_side import Slowdown, concurrent_shares, side_by_side, slowdowns
from vitscale.present.document import Finding
from vitscale.store.results import Run
from vitscale.trial.trial import World

FIRST, LAST = range(2), range(2, 4)
"""Of the trials on one host, and of those on two: whose first run is alone, and whose last is."""
REPEATS = 3


def studied(
    seed: int, factors: Mapping[int, float], *, each: int = 8, noise: float = 0.01, of_host: float = 0.0
) -> tuple[list[Any], dict[str, float]]:
    """`each` trials on one host and as many on two, which take so many times as long for a step beside others; what
    `slowdowns` is given of them. `of_host`: by how much hosts differ, of which each run has another."""
    random = np.random.default_rng(seed)
    hosts = random.normal(0, of_host, 8)
    measured, beside = [], {}
    for nodes, factor in factors.items():
        for n in range(each):
            own, runs, records = random.uniform(0.1, 10.0), [], []
            for repeat in range(REPEATS):
                alone = (n in FIRST and repeat == 0) or (n in LAST and repeat == REPEATS - 1)
                folder = f"{nodes}-{n}-r{repeat}"
                beside[folder] = 0.0 if alone else random.uniform(0.9, 1.0)
                log = random.normal(0, noise) + random.choice(hosts) + np.log(factor) * beside[folder]
                runs.append(SimpleNamespace(step_seconds=own * np.exp(log)))
                records.append(SimpleNamespace(header=SimpleNamespace(folder=folder)))
            trial = SimpleNamespace(world=World(nodes=nodes, ranks_per_node=1, threads_per_rank=1))
            measured.append(SimpleNamespace(run_figures=runs, recorded_runs=records, trial=trial))
    return measured, beside


def test_a_known_slowdown_comes_out_apart_for_one_host_and_for_several() -> None:
    within, across = slowdowns(*studied(1, {1: 1.0, 2: 1.12}, noise=0.005))
    assert (within.hosts, across.hosts) == ("within one host", "over several hosts")
    assert within.low < 1.0 < within.high
    assert 1.0 < across.low < 1.12 < across.high
    assert across.high - across.low < 0.02
    assert across.p < 0.001 < within.p


def test_of_runs_without_noise_it_is_exact() -> None:
    within, across = slowdowns(*studied(1, {1: 1.05, 2: 1.2}, noise=0.0))
    assert (within.factor, across.factor) == pytest.approx((1.05, 1.2))
    assert across.high - across.low == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("noise", "of_host"), [(0.002, 0.0), (0.02, 0.0), (0.01, 0.03)])
def test_intervals_hold_the_truth_in_95_percent_of_studies(noise: float, of_host: float) -> None:
    """Where hosts differ too, for they are drawn for every run."""
    truth = {1: 1.0, 2: 1.03}
    studies = [slowdowns(*studied(seed, truth, each=4, noise=noise, of_host=of_host)) for seed in range(400)]
    for n, factor in enumerate(truth.values()):
        held = [told[n].low <= factor <= told[n].high for told in studies]
        assert 0.92 <= np.mean(held) <= 0.98


def at(run: Run, began: float, seconds: float, *hosts: str) -> Run:
    outcome = run.outcome.model_copy(update={"started_unix_seconds": 1.7e9 + began, "wall_seconds": seconds})
    return run.model_copy(update={"outcome": outcome, "header": run.header.model_copy(update={"hosts": hosts})})


def test_the_share_of_a_run_s_time_beside_others_follows_from_times_alone() -> None:
    run = steady_run(make_trial(), 0.1)
    runs = [at(run, 0, 10, "a"), at(run, 4, 2, "b"), at(run, 8, 4, "c"), at(run, 12, 5, "a"), at(run, 20, 0, "a")]
    assert list(concurrent_shares(runs)) == pytest.approx([0.4, 1.0, 0.5, 0.0, 0.0])


def told(slower: float, *, alone: bool = True, noise: float = 0.002) -> Finding | None:
    """Of a study of four trials of three runs on hosts of their own, of which two have a run alone: the first of the
    one, the last of the other. The others take `slower` times as long, in all that they were doing."""
    trials = [make_trial(seed=n) for n in range(4)]
    runs = []
    for n, trial in enumerate(trials):
        for repeat in range(REPEATS):
            own = alone and (n, repeat) in ((0, 0), (1, 2))
            off = 1 + noise * (-1) ** (n + repeat)
            began = 1000 * repeat + (300 * (1 + n) if own else 0)
            runs.append(at(steady_run(trial, 0.1 * off * (1 if own else slower), repeat), began, 100.0, f"node{n}"))
    results = make_results([(make_curve(trials[:1]), trials)], runs)
    findings = [found for found in analysis.analyse(results).findings if found.kind == "side-by-side"]
    return findings[0] if findings else None


def test_the_report_says_by_how_much_runs_beside_others_were_slower() -> None:
    found = told(slower=1.1)
    assert found is not None
    assert found.severity == "warning"
    assert found.message.startswith("10 of 12 runs had others of the study beside them, and took another time")
    assert "10 % (9.4 % to 11 %) longer within one host" in found.message


def test_what_is_faster_beside_others_is_told_as_shorter() -> None:
    found = told(slower=0.95)
    assert found is not None
    assert "5 % (4.5 % to 5.5 %) shorter within one host" in found.message
    assert "their hosts, clocks or power differed" in (found.advice or "")


def test_the_report_says_where_no_slowdown_is_seen() -> None:
    found = told(slower=1.0)
    assert found is not None
    assert found.severity == "note"
    assert "; no significant difference to steps of the same trials alone: " in found.message


def test_a_slowdown_that_drowns_in_noise_is_not_denied() -> None:
    """Steps that seem 2 % shorter, with noise of 3 %: the advice names the largest slowdown that is left, and not the
    largest gain."""
    found = told(slower=0.98, noise=0.03)
    assert found is not None
    (low,) = re.findall(r"no significant difference .*: 2 % \(-([\d.]+) % to [\d.]+ %\) shorter", found.message)
    assert found.advice == f"What these runs share may still slow them: by {low} % at most, by that interval."


def test_without_a_run_alone_it_is_unknown() -> None:
    found = told(slower=1.1, alone=False)
    assert found is not None
    assert found.severity == "note"
    assert "whether these slowed them is unknown" in found.message


def test_runs_on_one_host_at_a_time_are_told() -> None:
    """As jobs of Slurm may be placed; not where one begins when the other ends, nor on other hosts."""
    one, two, three = (make_trial(seed=n) for n in range(3))
    runs = [
        at(steady_run(one, 0.1), 0, 100, "a", "b"),
        at(steady_run(two, 0.1), 50, 100, "b", "c"),
        at(steady_run(three, 0.1), 100, 100, "a"),
    ]
    found = {finding.kind: finding for finding in side_by_side([], runs)}
    assert found["shared-host"].about.trials == (one.identity(), two.identity())
    assert "on one host (b) in 2 trials" in found["shared-host"].message
    assert "shared-host" not in {finding.kind for finding in side_by_side([], [runs[0], runs[2]])}


def test_of_runs_one_after_another_nothing_is_said() -> None:
    trial = make_trial()
    runs = [at(steady_run(trial, 0.1, repeat), 100 * repeat, 100.0, "node0") for repeat in range(REPEATS)]
    assert list(side_by_side([], runs)) == []
    # A run that failed was beside the other all the same.
    failed = at(failed_run(trial, "failed", "why", repeat=3), 210, 50.0, "node1")
    assert len(list(side_by_side([], [*runs, failed]))) == 1


def test_a_trial_of_one_run_and_one_without_step_times_say_nothing() -> None:
    measured, beside = studied(1, {1: 1.0})
    for trial in measured:
        del trial.run_figures[1:], trial.recorded_runs[1:]
    assert slowdowns(measured, beside) == list[Slowdown]()
