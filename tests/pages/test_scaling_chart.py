"""How it scales, as a chart: values by hand, intervals only of enough runs, a view for each measure and axis."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
from altair.vegalite.v6.schema.core import Root

from explained_factory import batch_study
from report_forms import layers, marks, views
from results_factory import make_curve, make_rank, make_results, make_run, make_trial, one_curve, rich_study, steady_run
from vitscale.analysis import analyse
from vitscale.pages.charts.axes import SERIES_COLOURS, SERIES_SHAPES
from vitscale.pages.charts.resources import longest_start_ups
from vitscale.pages.charts.scaling import MEASURES, ideal_rows, measured_rows, scaling_chart
from vitscale.pages.document import charts
from vitscale.present.document import FigureView
from vitscale.store.results import Results

BY_NAME = {measure.name: measure for measure in MEASURES}


@functools.cache
def rich() -> dict[str, FigureView]:
    """They are drawn once and only read."""
    return views(analyse(rich_study()))


@functools.cache
def explained() -> dict[str, FigureView]:
    return views(analyse(batch_study([16, 64], [1, 2], engines=["ddp", "deepspeed"], device="cuda")))


def view(results: Results, name: str) -> FigureView:
    return views(analyse(results))[name]


def test_a_rich_study_has_every_measure_for_every_policy() -> None:
    found = scaling_chart(analyse(rich_study()), analyse(rich_study()).curves)
    assert found is not None
    assert {(one.choices["batch policy"].value, one.choices["measure"].value) for one in found.views} == {
        (mode, name) for mode in ("strong-micro", "strong-global", "weak") for name in BY_NAME
    }
    assert found.views[0].name == "strong-micro-speedup"
    assert found.series == ("ddp", "deepspeed", "plain (no wrapper)")


def test_a_study_has_twelve_charts_at_most_and_every_view_a_name_of_its_own() -> None:
    for results in (rich_study(), batch_study([16, 64], [1, 2], engines=["ddp", "deepspeed"], device="cuda")):
        figures = charts(analyse(results))
        names = [one.name for figure in figures.values() for one in figure.views]
        assert len(figures) <= 12
        assert len(names) == len(set(names))


def test_only_charts_with_data_are_drawn() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    assert charts(analyse(make_results([(make_curve(trials), trials)], []))) == {}
    one_rank = views(analyse(one_curve({1: [0.1]})))
    assert "strong-micro-epoch-seconds" in one_rank
    assert not {"strong-micro-speedup", "strong-micro-efficiency"} & one_rank.keys()


def test_every_view_is_what_vega_lite_allows() -> None:
    for one in (*rich().values(), *explained().values()):
        if "weak" not in one.name and "strong-global" not in one.name:  # made by the same lines
            Root.validate(json.loads(json.dumps(one.titled)))
    wrong = dict(rich()["start-up"].spec) | {"width": "broad"}
    with pytest.raises(Exception, match="'broad' is not of type 'number'"):
        Root.validate(wrong)


def test_every_view_has_words_and_a_table() -> None:
    for one in (*rich().values(), *explained().values()):
        assert one.summary
        assert one.spec["description"] == one.summary
        assert one.rows
        assert one.text
        assert all(field in one.rows[0] for field in one.columns)


@pytest.mark.parametrize(
    ("mode", "ends"),
    [
        # speedup, efficiency, epoch seconds, images/s and GPU-hours at the baseline and at four times its ranks
        ("strong-micro", [(1, 4), (1, 1), (12.8, 3.2), (80, 320), (12.8 / 3600, 12.8 / 3600)]),
        ("weak", [(1, 4), (1, 1), (0.8, 0.8), (80, 320), (0.8 / 3600, 3.2 / 3600)]),
    ],
)
def test_ideal_lines_start_at_the_baseline_and_scale_perfectly(mode: Any, ends: list[tuple[float, float]]) -> None:
    analysis = analyse(one_curve({1: [0.1], 4: [0.2]}, mode=mode))
    for measure, (first, last) in zip(MEASURES, ends, strict=True):
        rows = ideal_rows(analysis, analysis.curves, measure)
        assert (rows[0]["x"], rows[-1]["x"]) == pytest.approx((1, 4))
        assert (rows[0]["value"], rows[-1]["value"]) == pytest.approx((first, last))


def test_gpu_hours_are_ranks_times_hours() -> None:
    analysis = analyse(one_curve({4: [0.2]}))
    rows, _ = measured_rows(analysis, analysis.curves, BY_NAME["gpu-hours"])
    (trial,) = analysis.trials.values()
    assert trial.epoch_seconds is not None
    assert rows[0]["value"] == pytest.approx(4 * trial.epoch_seconds.value / 3600)


def test_of_two_runs_the_runs_are_drawn_and_no_bar() -> None:
    """Two runs whose steps take 0.1 and 0.2 s: epochs of 12.8 and 25.6 s around their geometric mean."""
    one = view(one_curve({1: [0.1, 0.2], 2: [0.1, 0.1]}), "strong-micro-epoch-seconds")
    assert {"rule", "tick"} & marks(one) == set()
    assert [row["value"] for row in one.spec["datasets"]["runs"] if row["x"] == 1] == pytest.approx([12.8, 25.6])
    assert one.rows[0]["value"] == pytest.approx((12.8 * 25.6) ** 0.5)
    assert (one.rows[0]["low"], one.rows[0]["bounds"]) == (None, "2 runs")
    assert one.subtitle == "small: single runs; dashed: ideal"
    speedup = view(one_curve({1: [0.1, 0.1], 2: [0.1, 0.2]}), "strong-micro-speedup")
    # 12.8 s on one rank; 6.4 and 12.8 on two.
    assert [row["value"] for row in speedup.spec["datasets"]["runs"] if row["x"] == 2] == pytest.approx([2.0, 1.0])


def test_of_three_runs_the_interval_is_drawn_with_caps() -> None:
    one = view(one_curve({1: [0.1] * 3, 2: [0.1, 0.11, 0.12]}), "strong-micro-epoch-seconds")
    assert {"rule", "tick"} <= marks(one)
    assert "runs" not in one.spec["datasets"]
    assert one.rows[1]["low"] < one.rows[1]["value"] < one.rows[1]["high"]


def test_a_bar_far_wider_than_the_data_is_cut_and_has_no_cap() -> None:
    one = view(one_curve({1: [0.1, 0.2, 0.8], 2: [0.1] * 3}), "strong-micro-epoch-seconds")
    highest = max(row["high"] for row in one.rows)
    assert highest == pytest.approx(1.5 * max(row["value"] for row in one.rows))
    assert one.rows[0]["high_cut"]
    assert "cut where no cap" in one.subtitle
    caps = [layer["transform"][0]["filter"] for layer in layers(one, "tick")]
    assert caps == ["datum.low != null && !datum.low_cut", "datum.high != null && !datum.high_cut"]


def test_an_interval_beyond_all_floats_can_be_drawn() -> None:
    trial = make_trial()
    runs = [make_run(trial, [make_rank(trial, 0, [s] * 5, warmup=1)], r) for r, s in enumerate([1e-200, 1e200, 1.0])]
    for one in views(analyse(make_results([(make_curve([trial]), [trial])], runs))).values():
        json.dumps(one.spec, allow_nan=False)


def test_short_epochs_are_drawn_in_milliseconds_and_two_minutes_in_seconds() -> None:
    one = view(one_curve({1: [0.001], 2: [0.001]}), "strong-micro-epoch-seconds")
    assert layers(one, "point")[0]["encoding"]["y"]["title"] == "epoch time (ms)"
    assert [row["value"] for row in one.rows] == pytest.approx([128.0, 64.0])
    long = view(one_curve({1: [120 / 128]}), "strong-micro-epoch-seconds")
    assert long.rows[0]["shown"] == "120 s"


def test_curves_differ_in_colour_and_in_shape() -> None:
    point = layers(rich()["strong-micro-speedup"], "point")[-1]
    for channel in ("color", "shape"):
        scale = point["encoding"][channel]["scale"]
        assert scale["domain"] == ["ddp", "deepspeed", "plain (no wrapper)"]
        assert len(set(scale["range"])) == 3
    pairs = {(k % len(SERIES_COLOURS), k % len(SERIES_SHAPES)) for k in range(56)}
    assert len(pairs) == 56


def test_a_wide_range_of_ranks_is_logarithmic_and_a_narrow_one_starts_at_zero() -> None:
    def scales(results: Results, name: str) -> tuple[Any, Any]:
        encoding = layers(view(results, name), "point")[-1]["encoding"]
        return encoding["x"]["scale"].get("type"), encoding["y"]["scale"].get("type")

    wide, narrow = one_curve({1: [0.1], 8: [0.2]}), one_curve({1: [0.1], 4: [0.2]})
    assert scales(wide, "strong-micro-epoch-seconds") == ("log", "log")
    assert scales(narrow, "strong-micro-epoch-seconds") == (None, None)
    assert scales(wide, "strong-micro-efficiency") == ("log", None)


@pytest.mark.parametrize("mode", ["strong-micro", "weak"])
@pytest.mark.parametrize("cells", [{1: [0.1], 3: [0.2]}, {1: [0.1], 8: [0.2]}], ids=["narrow", "wide"])
def test_a_speedup_stands_on_axes_to_base_2_where_linear_is_a_line(cells: dict[int, list[float]], mode: Any) -> None:
    one = view(one_curve(cells, mode=mode), f"{mode}-speedup")
    encoding = layers(one, "point")[-1]["encoding"]
    assert [encoding[axis]["scale"].get("type") for axis in ("x", "y")] == ["log", "log"]
    assert [encoding[axis]["scale"].get("base") for axis in ("x", "y")] == [2, 2]
    ideal_rows = one.spec["datasets"]["ideal"]
    assert [row["value"] for row in ideal_rows] == pytest.approx([row["x"] for row in ideal_rows])


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        # GPU-hours grow with the ranks, ideally in proportion; an epoch's time and the efficiency stay level.
        ("weak-gpu-hours", ("log", "log")),
        ("weak-epoch-seconds", ("log", None)),
        ("weak-efficiency", ("log", None)),
    ],
)
def test_over_a_wide_range_what_grows_with_the_ranks_is_logarithmic_as_they_are(name: str, kinds: Any) -> None:
    encoding = layers(view(one_curve({1: [0.1], 8: [0.2]}, mode="weak"), name), "point")[-1]["encoding"]
    assert (encoding["x"]["scale"].get("type"), encoding["y"]["scale"].get("type")) == kinds


def test_curves_of_one_rank_count_stand_below_one_another_the_best_first() -> None:
    trials = {make_trial(engine): seconds for engine, seconds in (("ddp", 0.2), ("deepspeed", 0.1), ("fsdp2", 0.4))}
    runs = [
        steady_run(trial, seconds * share, repeat)
        for trial, seconds in trials.items()
        for repeat, share in enumerate((1.0, 1.02, 0.98))
    ]
    drawn = views(analyse(make_results([(make_curve([trial]), [trial]) for trial in trials], runs)))
    for name in ("throughput", "epoch-seconds"):  # the most images/s, and the least time
        one = drawn[f"strong-micro-{name}"]
        assert [row["series"] for row in one.rows] == ["deepspeed", "ddp", "fsdp2"]
        assert [row["place"] for row in one.rows] == [0, 1, 2]
        (bars,) = layers(one, "bar")
        assert (bars["encoding"]["y"]["field"], bars["encoding"]["y"]["sort"]["field"]) == ("series", "place")
        assert bars["encoding"]["x"]["scale"]["zero"]
        assert [layer["encoding"]["y"]["field"] for layer in layers(one, "rule")] == ["series"]
        assert one.spec["height"] == {"step": 20}
    several = views(analyse(rich_study()))["strong-micro-throughput"]
    assert not layers(several, "bar")


def test_a_batch_sweep_has_a_line_per_engine_along_the_batch_at_each_rank_count() -> None:
    results = batch_study([16, 32, 64], [1, 2], engines=["ddp", "deepspeed"])
    analysis = analyse(results)
    found = scaling_chart(analysis, analysis.curves)
    assert found is not None
    assert [option.label for option in found.controls["along"]] == [
        "ranks", "micro-batch, 1 rank", "micro-batch, 2 ranks",
    ]  # fmt: skip
    names = {one.name: one for one in found.views}
    for measure in ("throughput", "efficiency"):
        one = names[f"strong-micro-{measure}-by-micro-batch-2"]
        assert [(row["series"], row["x"]) for row in one.rows] == [
            (engine, batch) for engine in ("ddp", "deepspeed") for batch in (16, 32, 64)
        ]
        assert {row["gpus"] for row in one.rows} == {2}
        assert layers(one, "point")[-1]["encoding"]["x"]["title"] == "micro-batch"


def test_training_is_solid_and_held_out_dashed() -> None:
    one = rich()["weak-loss-1"]
    (line,) = layers(one, "line")
    scale = line["encoding"]["strokeDash"]["scale"]
    assert scale["domain"] == ["train", "held-out"]
    assert scale["range"][0] == [1, 0] != scale["range"][1]
    # A curve that lies under another is thicker.
    weights = {row["series"]: row["weight"] for row in one.rows}
    assert sorted(weights.values(), reverse=True) == list(weights.values())


def test_loss_by_step_where_no_trial_has_two_epochs() -> None:
    trial = make_trial(epochs=1)
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 1000, warmup=3)])
    one = view(make_results([(make_curve([trial]), [trial])], [run]), "strong-micro-loss-by-step-1")
    assert one.title == "Loss by optimizer step, strong-micro, 1 rank"
    assert len(one.rows) <= 200
    assert one.rows[0]["x"] == 1


def test_trials_with_one_label_do_not_stack_on_one_bar() -> None:
    trials = [make_trial(), make_trial(learning_rate=0.5)]
    runs = [make_run(trial, [make_rank(trial, 0, [0.1] * 5)]) for trial in trials]
    rows, left_out = longest_start_ups(
        analyse(make_results([(make_curve([trial]), [trial]) for trial in trials], runs))
    )
    assert len({row["bar"] for row in rows}) == 2
    assert left_out == 0


def test_no_name_that_a_user_wrote_is_in_an_expression() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    hostile = "');alert(1)//"
    curve = make_curve(trials, train__note=hostile)
    runs = [make_run(trial, [make_rank(trial, 0, [0.1] * 5)]) for trial in trials[:1]]
    for one in views(analyse(make_results([(curve, trials)], runs))).values():
        without_rows = dataclasses.asdict(one)["spec"]["layer"]
        assert all("alert" not in str(layer.get("transform", "")) for layer in without_rows)
