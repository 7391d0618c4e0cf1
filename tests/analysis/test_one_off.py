from __future__ import annotations

from results_factory import make_curve, make_results, make_trial, steady_run
from verdict_finder import verdict
from vitscale.analysis import TrialResult, analyse
from vitscale.record import RankRecord, Results, Run


def with_engine_seconds(run: Run, seconds: float) -> Run:
    def changed(rank: RankRecord) -> RankRecord:
        phases = tuple(p.model_copy(update={"seconds": seconds}) if p.name == "engine" else p for p in rank.phases)
        return rank.model_copy(update={"phases": phases})

    return run.model_copy(update={"ranks": tuple(changed(rank) for rank in run.ranks)})


def study(*engine_seconds: float) -> Results:
    trial = make_trial("ddp", 1)
    runs = [with_engine_seconds(steady_run(trial, 0.1, n), seconds) for n, seconds in enumerate(engine_seconds)]
    return make_results([(make_curve([trial]), [trial])], runs)


def analysed(*engine_seconds: float) -> TrialResult:

    (trial,) = analyse(study(*engine_seconds)).trials.values()
    return trial


def test_a_compilation_in_one_of_two_runs_is_in_no_start_up_and_is_told() -> None:
    compiled, usual = analysed(271.0, 9.7), analysed(9.7, 9.7)

    assert compiled.startup_seconds == usual.startup_seconds
    assert compiled.startup["engine"] == 9.7
    assert [run.one_off_seconds for run in compiled.runs] == [271.0 - 9.7, 0.0]
    found = verdict(study(271.0, 9.7), "one-off-compilation")
    assert "took 261 s longer to build" in found.message


def test_runs_that_differ_as_runs_do_are_left_as_they_are() -> None:
    # Four times as long, and 18 s longer: either may be a busy machine.
    assert analysed(30.0, 8.0, 8.0).startup["engine"] == 8.0
    assert not any(run.one_off_seconds for run in (*analysed(30.0, 8.0, 8.0).runs, *analysed(19.0, 1.0, 1.0).runs))


def test_a_run_alone_has_nothing_to_be_held_against() -> None:
    assert analysed(271.0).startup["engine"] == 271.0
