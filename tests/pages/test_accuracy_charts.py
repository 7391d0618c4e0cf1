"""Accuracy at the end, after equal images and after equal seconds; the noise scale; what a target took."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from explained_factory import NOISE_SCALE, batch_study
from results_factory import ended_in, make_curve, make_results, make_trial, one_curve, steady_run
from vitscale.analysis import Analysis, TrialResult, analyse
from vitscale.analysis.learning.convergence import Convergence, TargetRun
from vitscale.pages.charts import accuracy as accuracy_data
from vitscale.pages.charts.accuracy import accuracy_chart
from vitscale.pages.contract import run_rows, to_json
from vitscale.pages.detail_tables import accuracy_table
from vitscale.pages.tables import mode_tables
from vitscale.present.document import FigureView
from vitscale.present.drawing import picture
from vitscale.present.estimate import Estimate


def figures(analysis: Analysis) -> dict[str, FigureView]:
    found = accuracy_chart(analysis, analysis.curves)
    return {view.name.removeprefix("strong-micro-"): view for view in (found.views if found else ())}


def changed(analysis: Analysis, change: Callable[[TrialResult, Convergence], Convergence]) -> Analysis:
    trials = {
        name: dataclasses.replace(trial, convergence=change(trial, trial.convergence) if trial.convergence else None)
        for name, trial in analysis.trials.items()
    }
    return dataclasses.replace(analysis, trials=trials)


def rows_of(analysis: Analysis) -> list[tuple[Any, ...]]:
    return [
        (row["panel"], row["gpus"], row["batch"], pytest.approx(row["value"]))
        for row in accuracy_data.accuracy_rows(analysis, analysis.curves)
    ]


def test_accuracy_at_the_end_and_after_equal_seconds_by_hand() -> None:
    """Held-out accuracy is 35, 50 and 65 % after each epoch. One rank: 12.8 s an epoch, two: 8.0 s, three epochs.

    All are trained 24 s: two ranks are done; one rank is at 24 / 12.8 = 1.875 epochs, 35 + 0.875 x 15 %.
    """
    analysis = analyse(one_curve({1: [0.1], 2: [0.125]}))
    assert rows_of(analysis) == [
        ("at the end of training", 1, 8, 0.65),
        ("after 24.0 s of training", 1, 8, 0.48125),
        ("at the end of training", 2, 16, 0.65),
        ("after 24.0 s of training", 2, 16, 0.65),
    ]


def test_equal_images_are_a_panel_where_trials_were_trained_on_unlike_many() -> None:
    """Three epochs against five of 1,024 images: compared after 3,072."""
    trials = [make_trial("ddp", 1, epochs=3), make_trial("ddp", 2, epochs=5)]
    runs = [steady_run(trial, 0.1) for trial in trials]
    rows = rows_of(analyse(make_results([(make_curve(trials), trials)], runs)))
    assert ("at the end of training", 2, 16, 0.9) in rows
    assert ("after 3,072 images", 1, 8, 0.65) in rows
    assert ("after 3,072 images", 2, 16, 0.65) in rows


def test_bars_reach_from_the_lowest_to_the_highest_run() -> None:
    trial = make_trial("ddp", 1)
    low, high = steady_run(trial, 0.1, 0), steady_run(trial, 0.1, 1)
    better = tuple(epoch.model_copy(update={"held_out_accuracy": 0.75}) for epoch in high.ranks[0].epochs)
    high = high.model_copy(update={"ranks": (high.ranks[0].model_copy(update={"epochs": better}),)})
    analysis = analyse(make_results([(make_curve([trial]), [trial])], [low, high]))
    (row,) = [row for row in accuracy_data.accuracy_rows(analysis, analysis.curves) if row["place"] == 0]
    assert (row["low"], row["high"], row["value"]) == (
        pytest.approx(0.65),
        pytest.approx(0.75),
        pytest.approx(0.7),
    )


def told_at_the_end(analysis: Analysis) -> list[tuple[str, ...]]:
    """Of each trial the held-out accuracy in the scaling table, the accuracies' table, the JSON and its chart."""
    scaling = mode_tables(analysis)["strong-micro"]
    at = [column.name for column in scaling.columns].index("held-out accuracy")
    own = accuracy_table(analysis, analysis.curves)
    assert own is not None
    headings = [column.name for column in own.columns]
    drawn = {row["trial"]: row for row in accuracy_data.accuracy_rows(analysis, analysis.curves) if row["place"] == 0}
    trials = json.loads(to_json(analysis))["trials"]
    told = []
    for (_, line), (_, other), trial in zip(scaling.rows, own.rows, trials, strict=True):
        row = drawn.get(trial["trial"], {})
        cells = (line[at].text, other[headings.index("held-out accuracy")].text, f"{trial['held_out_accuracy']:.1%}")
        told.append((*cells, other[headings.index("epochs")].text, *(row[key] for key in ("shown", "panel") if row)))
    return told


def test_where_runs_end_at_their_target_the_end_is_each_runs_own() -> None:
    """Runs end with 72, 71 and 70 % after 3, 5 and 4 epochs: 71 %. After 3, which all have, 72, 55 and 60 %: 62.3 %."""
    trials = [make_trial("ddp", gpus, epochs=10, target_accuracy=0.7) for gpus in (1, 2)]
    courses = ([0.5, 0.6, 0.72], [0.4, 0.5, 0.55, 0.6, 0.71], [0.45, 0.55, 0.6, 0.7])
    runs = [ended_in(steady_run(trials[0], 0.1, repeat), course) for repeat, course in enumerate(courses)]
    runs += [ended_in(steady_run(trials[1], 0.1, repeat), [0.5, 0.6, 0.73]) for repeat in range(3)]
    analysis = analyse(make_results([(make_curve(trials), trials)], runs))
    assert told_at_the_end(analysis) == [
        ("71.0%", "71.0%", "71.0%", "3 to 5", "71.0%", "at the end of training"),
        ("73.0%", "73.0%", "73.0%", "3", "73.0%", "at the end of training"),
    ]
    ends, alike, *_ = accuracy_data.accuracy_rows(analysis, analysis.curves)
    assert (ends["low"], ends["value"], ends["high"]) == pytest.approx((0.7, 0.71, 0.72))
    # The runs of one trial went on to unlike ends, so that equal images are another panel.
    assert (alike["panel"], alike["shown"]) == ("after 3,072 images", "62.3%")
    one, _ = json.loads(to_json(analysis))["trials"]
    assert [(epoch["epoch"], epoch["runs"]) for epoch in one["epochs"]] == [(0, 3), (1, 3), (2, 3), (3, 2), (4, 1)]
    assert one["epochs"][3]["held_out_accuracy"] == pytest.approx(0.65)
    drawn = accuracy_data.epoch_rows(analysis, analysis.curves, "accuracy")
    held_out = [row["shown"] for row in drawn if row["split"] == "held-out" and row["gpus"] == 1]
    assert held_out[2:] == ["0.6233", "0.65 (2 of 3 runs)", "0.71 (1 of 3 runs)"]


def test_a_part_of_an_epoch_is_no_end_that_tables_and_json_tell_apart() -> None:
    """Whole epochs of 35 and 50 %, then half of one with 65 %; and half of an epoch alone, which has 35 %."""
    trials = [make_trial("ddp", 1), make_trial("ddp", 2)]
    runs = [
        ended_in(steady_run(trials[0], 0.1), [0.35, 0.5, 0.65], fragment=True),
        ended_in(steady_run(trials[1], 0.1), [0.35], fragment=True),
    ]
    analysis = analyse(make_results([(make_curve(trials), trials)], runs))
    assert told_at_the_end(analysis) == [
        ("50.0%", "50.0%", "50.0%", "2", "50.0%", "after the last whole epoch"),
        ("35.0%", "35.0%", "35.0%", "less than 1"),
    ]
    assert [row["held_out_accuracy"] for row in run_rows(analysis)] == [0.5, 0.35]
    losses = [trial["loss"] for trial in json.loads(to_json(analysis))["trials"]]
    assert [row["loss"] for row in run_rows(analysis)] == losses
    drawn = accuracy_data.epoch_rows(analysis, analysis.curves, "accuracy")
    held_out = [row["shown"] for row in drawn if row["split"] == "held-out"]
    assert held_out == ["0.35", "0.5", "0.65, the epoch unfinished", "0.35, the epoch unfinished"]
    training = accuracy_data.training_chart(analysis, analysis.curves)
    assert training is not None
    view = next(view for view in training.views if view.name.endswith("accuracy-1"))
    assert view.summary == "Held-out accuracy at epoch 3, which is unfinished in some runs, on 1 rank: 0.65."
    assert view.subtitle == "solid: train, dashed: held-out; last: a part of an epoch"


@pytest.mark.parametrize(
    ("accuracies", "ticks"),
    [((0.1, 0.104), ["10.0%", "10.1%", "10.2%", "10.3%", "10.4%"]), ((0.2, 0.6), ["20%", "30%", "40%", "50%", "60%"])],
)
def test_the_ticks_of_an_accuracy_axis_are_told_apart(accuracies: tuple[float, float], ticks: list[str]) -> None:
    trials = [make_trial("ddp", gpus, epochs=1) for gpus in (1, 2)]
    runs = [ended_in(steady_run(trial, 0.1), [accuracy]) for trial, accuracy in zip(trials, accuracies, strict=True)]
    chart = figures(analyse(make_results([(make_curve(trials), trials)], runs)))["accuracy-by-ranks"]
    assert re.findall(r">([\d.]+%)<", picture(chart, "svg").decode()) == ticks


def test_a_batch_sweep_is_joined_along_the_batch_and_a_lone_curve_along_itself() -> None:
    def lines(results: Any) -> set[str]:
        return {row["line"] for row in figures(analyse(results))["accuracy-by-batch"].rows}

    assert lines(batch_study([16, 64], [1, 2])) == {"ddp 1 rank", "ddp 2 ranks"}
    assert lines(one_curve({1: [0.1], 2: [0.1], 4: [0.1]})) == {"ddp"}


def test_the_noise_scale_is_marked_where_it_is_near_and_told_where_it_is_far() -> None:
    """It is known on two ranks only: one has no gradient of fewer images than its step."""
    analysis = analyse(batch_study([16, 64], [1, 2]))
    assert accuracy_data.noise_scale_rows(analysis, analysis.curves) == [
        {"series": "ddp", "batch": pytest.approx(NOISE_SCALE), "trials": 2}
    ]
    near = figures(analysis)["accuracy-by-batch"]
    assert "dotted: gradient noise scale" in near.subtitle
    assert "Gradient noise scale (images, median of trials): ddp 100." in near.summary
    far = changed(
        analysis,
        lambda trial, found: dataclasses.replace(found, noise_scale_images=Estimate(1e6)),
    )
    told = figures(far)["accuracy-by-batch"]
    assert "dotted" not in told.subtitle
    assert "Gradient noise scale (images, median of trials): ddp 1,000,000." in told.summary


def test_charts_are_drawn_only_along_what_varies() -> None:
    both = [name for name in figures(analyse(one_curve({1: [0.1], 2: [0.1]}))) if "accuracy-1" not in name]
    assert both == ["accuracy-by-batch", "accuracy-by-ranks"]
    assert all(name.endswith("by-batch") for name in figures(analyse(batch_study([16, 64], [1]))))
    assert figures(analyse(one_curve({1: [0.1]}))) == {}


def with_target(analysis: Analysis) -> Analysis:
    def change(trial: TrialResult, found: Convergence) -> Convergence:
        reached = TargetRun(0, 0, 2, 2048, 10.0)
        missed = TargetRun(1, 1, None, None, None)
        seconds = Estimate(20.0 / trial.trial.world.size, 5.0, 25.0)
        return dataclasses.replace(
            found, target_accuracy=0.5, target_runs=(reached, missed), images_to_target=Estimate(2048),
            seconds_to_target=seconds,
        )  # fmt: skip

    return changed(analysis, change)


def test_time_to_a_target_names_the_runs_that_reached_it() -> None:
    found = figures(with_target(analyse(one_curve({1: [0.1], 2: [0.1]}))))
    assert found["time-to-target-by-batch"].title == "time to an accuracy of 50.0 %, strong-micro"
    assert found["time-to-target-by-batch"].text == (
        "ddp; 1 rank; 8; 20.0 s; reached by 1 of 2 runs",
        "ddp; 2 ranks; 16; 10.0 s; reached by 1 of 2 runs",
    )
    assert found["target-images-by-batch"].text[0] == "ddp; 1 rank; 8; 2,048; reached by 1 of 2 runs"
    assert "time-to-target-by-batch" not in figures(analyse(one_curve({1: [0.1], 2: [0.1]})))


def test_a_target_that_no_run_reached_has_no_chart() -> None:
    def missed(trial: TrialResult, found: Convergence) -> Convergence:
        return dataclasses.replace(found, target_accuracy=0.99, target_runs=(TargetRun(0, 0, None, None, None),))

    analysis = changed(analyse(one_curve({1: [0.1], 2: [0.1]})), missed)
    assert "time-to-target-by-batch" not in figures(analysis)
    assert accuracy_data.runs_that_reached_target(next(iter(analysis.trials.values()))) == "0 of 1 runs"


def test_no_name_that_a_user_wrote_is_in_an_expression() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    curve = make_curve(trials, train__note="');alert(1)//")
    analysis = analyse(make_results([(curve, trials)], [steady_run(trial, 0.1) for trial in trials]))
    for figure in figures(with_target(analysis)).values():
        assert not [one for one in expressions(figure.spec) if "alert" in one]


def expressions(spec: Any) -> list[str]:
    """Every filter, calculation and test of a chart, as text."""
    if isinstance(spec, list):
        return [text for one in spec for text in expressions(one)]
    if not isinstance(spec, dict):
        return []
    own = [str(spec[key]) for key in ("filter", "calculate", "test", "expr", "signal") if key in spec]
    return own + [text for value in spec.values() for text in expressions(value)]
