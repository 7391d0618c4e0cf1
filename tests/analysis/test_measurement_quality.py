from __future__ import annotations

from pathlib import Path

import pytest

from report_forms import terminal
from results_factory import make_curve, make_results, make_trial, steady_run
from verdict_finder import STEP, THREE, explained_study, kinds, of_one_trial, three_repeats, verdict
from vitscale.analysis import analyse
from vitscale.store.records import PARTS, MeterLine
from vitscale.store.results import Results


def test_synchronised_timing() -> None:
    found = verdict(three_repeats(model={"synchronised_timing": True}), "synchronised-timing")
    assert found.message == "synchronised timing: the DeepSpeed file's wall_clock_breakdown waits for the device"


def test_clocks_that_disagree_are_told_with_what_was_seen() -> None:
    trial = make_trial()
    runs = [steady_run(trial, seconds, repeat) for repeat, seconds in enumerate(THREE)]
    (rank,) = runs[1].ranks
    epochs = [line.model_copy(update={"seconds": line.seconds * 1.5}) for line in rank.epochs]
    runs[1] = runs[1].model_copy(update={"ranks": (rank.model_copy(update={"epochs": tuple(epochs)}),)})
    found = verdict(of_one_trial(trial, *runs), "clock-anomaly")
    assert found.severity == "warning"
    assert found.message == (
        "clock anomaly in 1 trial: the steps of epoch 0 on rank 0 add up to 33.3 % less than the epoch took "
        "(ddp on 1 rank)"
    )
    assert "virtual machine" in found.advice


def timed_as_a_whole(seconds: float) -> Results:
    """A script without a Probe, of so many seconds, run once."""
    trial = make_trial("script", script="hello.py")
    run = steady_run(trial, 1.0)
    (rank,) = run.ranks
    nothing = {"steps": None, "images": None, "seconds": seconds, "complete": True}
    rank = rank.model_copy(update={"steps": (), "epochs": (rank.epochs[0].model_copy(update=nothing),)})
    return of_one_trial(trial, run.model_copy(update={"ranks": (rank,)}))


def test_a_script_without_a_probe_is_said_to_be_timed_as_a_whole() -> None:
    results = timed_as_a_whole(3.0)
    found = verdict(results, "timed-as-a-whole")
    assert found.severity == "warning"
    assert found.message.startswith(
        "timed as a whole: the script of 1 trial tells of no step, so that 3.00 s are a whole run, imports included, "
        "and no epoch ("
    )
    assert "Put a Probe around its step" in found.advice
    said = " ".join(terminal(analyse(results), width=300))
    assert "3.00 s a run." in said
    assert "an epoch." not in said
    assert "timed as a whole" in said


def test_a_meter_that_told_nothing_is_a_note_with_its_reason() -> None:
    trial = make_trial("ddp")
    run = steady_run(trial, 0.1)
    (rank,) = run.ranks
    lines = [MeterLine(meter="meter", epoch=0, values={"watts": 2.0})]
    lines += [MeterLine(meter="meter", epoch=e, values={}, reason="meter 'power': end: unplugged") for e in (1, 2)]
    untold = run.model_copy(update={"ranks": (rank.model_copy(update={"meters": tuple(lines)}),)})
    found = verdict(of_one_trial(trial, untold), "meter-unavailable")
    assert found.severity == "note"
    assert found.message.startswith("meter unavailable: meter 'power': end: unplugged (epoch 1 of rank 0, ")
    assert found.message.endswith("; 2 readings in all")
    assert "meter-unavailable" not in kinds(of_one_trial(trial, run))


def test_a_profile_that_was_not_asked_for_is_a_note() -> None:
    trial = make_trial()
    trial = trial.model_copy(update={"window": trial.window.model_copy(update={"explain": False})})
    runs = [steady_run(trial, seconds, repeat) for repeat, seconds in enumerate(THREE)]
    found = verdict(of_one_trial(trial, *runs), "profile-missing")
    assert found.severity == "note"
    assert "1 trial ran with measure.explain = false" in found.message
    assert "Set measure.explain = true" in found.advice


def test_a_run_too_short_to_be_explained_is_a_note() -> None:
    found = verdict(three_repeats(), "profile-missing")
    assert found.severity == "note"
    assert "no step of 1 trial was explained on all ranks" in found.message
    assert "Train longer" in found.advice


@pytest.mark.parametrize(("slowdown", "told"), [(0.25, True), (0.08, False)])
def test_what_explaining_costs_is_told_above_a_tenth(slowdown: float, told: bool) -> None:
    results = explained_study(STEP, slowdown=slowdown)
    assert ("explaining-costs" in kinds(results)) is told
    assert "profile-missing" not in kinds(results)
    if told:
        found = verdict(results, "explaining-costs")
        assert found.severity == "note"
        assert "take more than 10 % longer than the timed ones beside them (up to 25 %" in found.message
        assert "compute parts are blown up" in found.advice


def test_on_a_gpu_what_explaining_adds_is_in_no_part() -> None:
    found = verdict(explained_study(STEP, slowdown=0.25, device="cuda"), "explaining-costs")
    assert "that is taken out of launch gaps" in found.advice
    assert "blown up" not in found.advice


@pytest.mark.parametrize(("slower", "told"), [(0.15, True), (0.03, False)])
def test_a_profiler_that_stays_attached_is_told_above_5_percent(slower: float, told: bool) -> None:
    results = explained_study(STEP, device="cuda")
    runs = []
    for run in results.runs:
        (rank,) = run.ranks
        steps = [
            line.model_copy(update={"seconds": line.seconds * (1 + slower)}) if line.window == "attached" else line
            for line in rank.steps
        ]
        runs.append(run.model_copy(update={"ranks": (rank.model_copy(update={"steps": tuple(steps)}),)}))
    results = results.model_copy(update={"runs": tuple(runs)})
    assert ("profiler-stays-attached" in kinds(results)) is told
    if told:
        found = verdict(results, "profiler-stays-attached")
        assert found.severity == "note"
        assert "more than 5 % longer than those before it started (up to 15 %" in found.message
        assert "all of their steps come before the profiler" in found.advice


def test_a_profile_of_which_no_part_is_known_says_why() -> None:
    results = explained_study(STEP)
    why = "the profiler saw none of the 900 launched kernels"
    runs = []
    for run in results.runs:
        (rank,) = run.ranks
        lines = [
            line.model_copy(update={"unknown": dict.fromkeys((*PARTS, "communication"), why)})
            for line in rank.explained
        ]
        runs.append(run.model_copy(update={"ranks": (rank.model_copy(update={"explained": tuple(lines)}),)}))
    found = verdict(results.model_copy(update={"runs": tuple(runs)}), "profile-missing")
    assert found.message.startswith(f"profile missing: no part of a step of 1 trial is known: {why}")


@pytest.mark.parametrize(("other", "told"), [(0.05, True), (0.02, False)])
def test_what_is_in_no_part_is_told_above_3_percent_of_any_rank(other: float, told: bool) -> None:
    # Of rank 1 alone: 0.05 of 1.05 s are 4.8 %.
    results = explained_study(STEP, STEP | {"other": other})
    assert ("unaccounted-time" in kinds(results)) is told
    if told:
        found = verdict(results, "unaccounted-time")
        assert found.severity == "note"
        assert '("other": 4.8 % in ddp on 2 ranks)' in found.message
        assert "measure.traces" in found.advice


def test_explaining_that_costs_half_a_step_is_a_warning() -> None:
    assert verdict(explained_study(STEP, slowdown=0.45), "explaining-costs").severity == "note"
    assert verdict(explained_study(STEP, slowdown=2.64), "explaining-costs").severity == "warning"


def test_a_fifth_of_a_step_in_no_part_is_a_warning() -> None:
    assert verdict(explained_study(STEP, STEP | {"other": 0.4}), "unaccounted-time").severity == "warning"


def test_a_script_that_does_not_say_what_it_is_at_is_told_how_to() -> None:
    found = verdict(explained_study(STEP, STEP | {"other": 20.0}, script="own.py"), "unaccounted-time")
    assert found.severity == "note"
    assert "probe.phase" in found.advice


def test_a_script_that_tells_of_no_step_is_told_of_a_probe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    results = three_repeats()
    runs = []
    for run in results.runs:
        train = run.header.trial.train.model_copy(update={"script": str(tmp_path / "train.py"), "engine": "script"})
        trial = run.header.trial.model_copy(update={"train": train})
        header = run.header.model_copy(update={"trial": trial, "trial_id": trial.identity()})
        ranks = tuple(rank.model_copy(update={"steps": ()}) for rank in run.ranks)
        runs.append(run.model_copy(update={"header": header, "ranks": ranks}))
    trial = runs[0].header.trial
    found = verdict(make_results([(make_curve([trial]), [trial])], runs), "profile-missing")
    assert "the script of 1 trial tells of no step" in found.message
    assert "Put a Probe around its step" in found.advice
