from __future__ import annotations

import numpy as np
import pytest

from results_factory import failed_run, make_environment, make_trial, one_curve, steady_run
from verdict_finder import kinds, of_one_trial, verdict
from vitscale.analysis import Verdict, analyse
from vitscale.analysis.statistics import FEWEST_REPEATS, Interval, interval
from vitscale.analysis.target_ci import Standing, half_width, standing
from vitscale.analysis.trials import summarise
from vitscale.record import Results, Run, StudyRecord
from vitscale.study_file import FEWEST_FOR_TARGET

TRIAL = make_trial()
# Logarithms -d, 0, d: a standard error of d / sqrt(3), and Student's t of 4.3027 with 2 degrees of freedom, so that
# d = 0.01 reaches from exp(0) up to exp(0.02484).
THREE = [float(np.exp(k * 0.01)) for k in (-1, 0, 1)]


def stands(runs: list[Run], target_ci: float, max_repeats: int) -> Standing:
    return standing(summarise(TRIAL.identity(), TRIAL, runs, combine_unlike=False), target_ci, max_repeats)


def steady(*seconds: float) -> list[Run]:
    return [steady_run(TRIAL, value, repeat) for repeat, value in enumerate(seconds)]


def test_the_half_width_is_that_of_the_longer_side() -> None:
    assert half_width(Interval(10.0, 9.0, 12.0)) == pytest.approx(0.2)
    assert half_width(Interval(10.0, 7.0, 12.0)) == pytest.approx(0.3)
    assert half_width(Interval(10.0, None, None)) is None
    assert half_width(None) is None


def test_a_trial_is_open_until_its_interval_is_within_the_target() -> None:
    assert stands(steady(*THREE), 0.0252, 10) == "reached"
    assert stands(steady(*THREE), 0.0251, 10) == "open"
    assert stands(steady(*THREE), 0.0251, 4) == "open"
    assert stands(steady(*THREE), 0.0251, 3) == "stopped"


def test_two_runs_reach_nothing_for_they_may_agree_by_chance() -> None:
    assert stands(steady(1.0, 1.0), 0.5, 10) == "open"
    assert stands(steady(1.0, 1.0, 1.0), 0.5, 10) == "reached"
    assert stands([], 0.5, 10) == "open"
    assert FEWEST_FOR_TARGET == FEWEST_REPEATS


def test_a_trial_with_a_run_that_failed_gets_no_more() -> None:
    assert stands([*steady(1.0, 1.0, 1.0), failed_run(TRIAL, "failed", "boom", repeat=3)], 0.5, 10) == "failed"
    assert stands([failed_run(TRIAL, "oom", "boom")], 0.5, 10) == "failed"


def test_a_trial_that_tells_no_epoch_time_gets_no_more() -> None:
    silent = [run.model_copy(update={"ranks": ()}) for run in steady(1.0, 1.0)]
    assert stands(silent, 0.5, 10) == "untimed"


def test_runs_that_may_not_be_combined_do_not_count_for_the_interval() -> None:
    other = make_environment(versions={"torch": "2.12.0"})
    unlike = [steady_run(TRIAL, 1.0, repeat, environments=[other]) for repeat in (2, 3)]
    assert stands([*steady(1.0, 1.0), *unlike], 0.5, 10) == "open"
    assert stands([*steady(1.0, 1.0), *unlike], 0.5, 4) == "stopped"


# --- what the report says ------------------------------------------------------------------------------------------


def asked(results: Results, target_ci: float, max_repeats: int) -> Results:
    """The results of a study that had asked for this."""
    fields = {"target_ci": target_ci, "max_repeats": max_repeats}
    return results.model_copy(update={"study": results.study.model_copy(update=fields)})


def test_without_a_target_nothing_is_said_of_it() -> None:
    assert not [kind for kind in kinds(one_curve({1: THREE}, repeats=3)) if kind.startswith("target-ci")]


def test_which_trials_reached_it_and_which_stopped_at_the_limit() -> None:
    results = asked(one_curve({1: [1.0] * 3, 2: [1.0, 1.2] * 2, 4: [1.0] * 4}, repeats=3), 0.02, 4)
    one, two, four = (point.trial_id for point in results.study.curves[0].points)
    missed, reached = verdict(results, "target-ci-missed"), verdict(results, "target-ci-reached")
    # Logarithms 0 and 0.18232 twice: standard error 0.05263, t 3.1824 with 3 degrees of freedom: 18.2 %.
    assert missed.message == (
        f"target_ci missed: 2 of 3 trials known within 2 %; stopped at max_repeats = 4: {two} (within 18 %)"
    )
    assert (missed.level, missed.trials) == ("warning", (two,))
    assert "Raise measure.max_repeats" in missed.advice
    assert reached.message == (
        f"target_ci reached: 2 of 3 trials known within 2 %, after 3 to 4 runs: {one} (within 0 %), {four} (within 0 %)"
    )
    assert (reached.level, reached.trials) == ("note", (one, four))
    assert "89 to 95 % of cases" in reached.advice
    assert "repeats = 4 and no target_ci" in reached.advice
    assert "unfinished" not in kinds(results)


def test_a_trial_with_failed_runs_missed_it_and_is_not_unfinished() -> None:
    runs = [*steady(1.0, 1.1, 1.2), failed_run(TRIAL, "failed", "boom", repeat=3)]
    results = asked(of_one_trial(TRIAL, *runs, repeats=3), 0.02, 10)
    assert "no runs added, for a run failed" in verdict(results, "target-ci-missed").message
    assert "unfinished" not in kinds(results)


def unfinished(results: Results) -> Verdict:
    return verdict(results, "unfinished")


def test_what_may_still_be_added_is_unfinished() -> None:
    # Both have all of their three runs; the second may get seven more, after which it stops.
    results = asked(one_curve({1: [1.0] * 3, 2: [1.0, 1.2, 1.1]}, repeats=3), 0.02, 10)
    assert unfinished(results).message == ("unfinished: up to 7 more may follow until epoch times are known within 2 %")
    assert unfinished(results).trials == (results.study.curves[0].points[1].trial_id,)
    # One run is missing of the first, which then may get seven more too.
    results = asked(one_curve({1: [1.0] * 2, 2: [1.0, 1.2, 1.1, 1.3]}, repeats=3), 0.02, 10)
    assert unfinished(results).message == (
        "unfinished: 1 of 6 runs are still to be done, "
        "and up to 13 more may follow until epoch times are known within 2 %"
    )


def test_added_runs_do_not_make_up_for_missing_ones() -> None:
    results = one_curve({1: [1.0] * 9, 2: [1.0]}, repeats=3)
    assert unfinished(results).message == "unfinished: 2 of 6 runs are still to be done"


def test_many_trials_are_not_all_named() -> None:
    results = asked(one_curve({gpus: [1.0] * 3 for gpus in (1, 2, 3, 4, 5, 6)}, repeats=3), 0.02, 10)
    assert verdict(results, "target-ci-reached").message.endswith("(within 0 %) and 2 more")


def test_a_study_recorded_before_there_was_a_target_reads_as_one_without() -> None:
    fields = one_curve({1: [1.0]}).study.model_dump(mode="json")
    del fields["target_ci"], fields["max_repeats"]
    study = StudyRecord.model_validate(fields)
    assert (study.target_ci, study.max_repeats) == (None, None)
    assert analyse(Results(study=study, runs=(), problems=())).trials


# --- what stopping early does to an interval ------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.01, 0.02, 0.03])
def test_intervals_of_added_runs_hold_the_truth_in_89_to_95_percent_of_cases(sigma: float) -> None:
    """3 to 30 runs with log-normal effects, until within 2 %: what the verdict and the docs say of it."""
    held = 0
    studies = np.exp(sigma * np.random.default_rng(4).standard_normal((1_500, 30))).tolist()
    for study in studies:
        count = next(
            (n for n in range(3, 30) if (width := half_width(interval(study[:n]))) is not None and width <= 0.02), 30
        )
        found = interval(study[:count])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    assert 0.885 <= held / len(studies) <= 0.955
