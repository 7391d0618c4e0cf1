"""A trial's result is made once: its figures from its own runs alone, and what takes all trials of the study beside."""

from __future__ import annotations

from dataclasses import MISSING, fields

import grimp
import pytest

from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import TrialResult, analyse
from vitscale.analysis.scaling import trial_names
from vitscale.analysis.summaries import summarise
from vitscale.analysis.trials import StartUp, TrialFigures
from vitscale.store.results import Results, Run

LOSSES = [2.0 / (1 + 0.1 * step) for step in range(400)]
PLAIN, DDP, DRIFTING = make_trial("none"), make_trial("ddp"), make_trial("fsdp2")
COMPILATION_SECONDS = 300.0


def with_compilation(run: Run, seconds: float) -> Run:
    """The run, whose ranks took `seconds` to build their engine, and compiled an extension."""
    compiling = {"seconds": seconds, "compiled": ("fused_adam",)}
    ranks = []
    for rank in run.ranks:
        phases = [p.model_copy(update=compiling) if p.name == "engine" else p for p in rank.phases]
        ranks.append(rank.model_copy(update={"phases": tuple(phases)}))
    return run.model_copy(update={"ranks": tuple(ranks)})


def study() -> Results:
    """Three engines that must compute the same: FSDP2 does not, and the first run of DDP compiled an extension."""
    runs = []
    for trial in (PLAIN, DDP, DRIFTING):
        factor = 1.01 if trial is DRIFTING else 1.0
        losses = [loss * (factor if step else 1.0) for step, loss in enumerate(LOSSES)]
        runs += [steady_run(trial, 0.1 * (1 + 0.001 * repeat), repeat, losses=losses) for repeat in range(3)]
    runs[3] = with_compilation(runs[3], COMPILATION_SECONDS)
    return make_results([(make_curve([trial]), [trial]) for trial in (PLAIN, DDP, DRIFTING)], runs)


def test_what_all_trials_say_changes_no_figure_of_a_trial() -> None:
    results = study()
    analysed = analyse(results).trials
    for trial in (PLAIN, DDP, DRIFTING):
        trial_id = trial.identity()
        own_runs = [run for run in results.runs if run.header.trial_id == trial_id]
        alone = summarise(trial_id, trial, own_runs, combine_unlike=False)
        for field in fields(TrialFigures):
            assert getattr(analysed[trial_id], field.name) == getattr(alone, field.name), field.name


def test_what_all_trials_say_is_in_every_result() -> None:
    trials = analyse(study()).trials
    assert {trial.name: trial.drift.status for trial in trials.values()} == {
        "plain (no wrapper) on 1 rank": "reference",
        "ddp on 1 rank": "agrees",
        "fsdp2 on 1 rank": "drifts",
    }
    compiled, *others = trials[DDP.identity()].start_ups
    assert compiled.one_off == {"engine": COMPILATION_SECONDS - others[0].phases["engine"]}
    assert compiled.seconds == pytest.approx(others[0].seconds)
    assert [start_up.one_off for start_up in others] == [{}, {}]


def test_a_figure_of_a_run_holds_what_it_recorded_a_compilation_too() -> None:
    compiled = analyse(study()).trials[DDP.identity()].run_figures[0]
    assert compiled.phase_seconds["engine"] == COMPILATION_SECONDS


def test_the_order_in_which_a_study_lists_its_trials_changes_no_result() -> None:
    results = study()
    turned = dict(reversed(results.study.trials.items()))
    curves = tuple(reversed(results.study.curves))
    again = results.model_copy(update={"study": results.study.model_copy(update={"trials": turned, "curves": curves})})
    assert dict(analyse(again).trials) == dict(analyse(results).trials)


@pytest.mark.parametrize("made", [TrialFigures, TrialResult, StartUp])
def test_no_field_has_a_value_before_it_is_known(made: type) -> None:
    unset = {field.name for field in fields(made) if (field.default, field.default_factory) == (MISSING, MISSING)}
    assert unset == {field.name for field in fields(made)}


def test_names_come_from_the_study_alone_and_tell_trials_apart() -> None:
    small, large, other = make_trial(micro_batch=8), make_trial(micro_batch=16), make_trial("fsdp2", 2)
    trials = {trial.identity(): trial for trial in (small, large, other)}
    assert list(trial_names(trials, [make_curve([trial]) for trial in trials.values()]).values()) == [
        "ddp on 1 rank, micro-batch 8", "ddp on 1 rank, micro-batch 16", "fsdp2 on 2 ranks",
    ]  # fmt: skip
    swept = make_curve([small], train__compile=True)
    assert trial_names(trials, [swept])[small.identity()] == "ddp on 1 rank, compile, micro-batch 8"


def test_what_one_run_says_rests_on_no_trial_not_even_for_types() -> None:
    graph = grimp.build_graph("vitscale", exclude_type_checking_imports=False, cache_dir=None)
    for imported in graph.find_modules_directly_imported_by("vitscale"):
        graph.remove_import(importer="vitscale", imported=imported)  # the package imports what is asked for, then
    for module in graph.find_descendants("vitscale.analysis.runs"):
        assert not graph.chain_exists(importer=module, imported="vitscale.analysis.trials"), module
