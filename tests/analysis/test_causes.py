"""Trials with one cause come together in a finding."""

from __future__ import annotations

from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import analyse
from vitscale.analysis.quality.wording import by_cause


def test_trials_are_grouped_by_cause_in_their_order_and_those_without_one_are_left_out() -> None:
    trials = [make_trial(micro_batch=size) for size in (2, 4, 8, 16)]
    runs = [steady_run(trial, 0.1) for trial in trials]
    results = list(analyse(make_results([(make_curve([trial]), [trial]) for trial in trials], runs)).trials.values())
    causes = {2: "small", 4: "middling", 16: "small"}
    grouped = by_cause(results, lambda result: causes.get(result.trial.train.micro_batch))
    assert {cause: [result.trial.train.micro_batch for result in members] for cause, members in grouped.items()} == {
        "small": [2, 16],
        "middling": [4],
    }
    assert list(grouped) == ["small", "middling"]


def test_a_cause_that_is_false_counts_and_no_trials_have_no_cause() -> None:
    trial = make_trial()
    results = list(analyse(make_results([(make_curve([trial]), [trial])], [steady_run(trial, 0.1)])).trials.values())
    assert by_cause(results, lambda _: 0) == {0: results}
    assert by_cause([], lambda _: 0) == {}
