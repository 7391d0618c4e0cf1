from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from altair.vegalite.v6.schema.core import Root

from explained_factory import batch_study
from results_factory import make_curve, make_rank, make_results, make_run, make_trial, one_curve, rich_study
from vitscale.analysis import analyse
from vitscale.errors import RequestError
from vitscale.report import chart_data, write_figures
from vitscale.report.charts import figures
from vitscale.report.figure import Figure
from vitscale.report.style import SERIES_COLOURS, SERIES_SHAPES
from vitscale.store.results import Results


def names(results: Results) -> set[str]:
    return {figure.name for figure in figures(analyse(results))}


def marks(spec: Any) -> list[str]:
    """All mark types of a chart, at any depth."""
    if isinstance(spec, dict):
        own = [spec["mark"]["type"]] if isinstance(spec.get("mark"), dict) else []
        return own + [mark for value in spec.values() for mark in marks(value)]
    if isinstance(spec, list):
        return [mark for value in spec for mark in marks(value)]
    return []


@functools.cache
def rich_figures() -> dict[str, Figure]:
    """They are drawn once and only read."""
    return {figure.name: figure for figure in figures(analyse(rich_study()))}


@functools.cache
def explained_figures() -> tuple[Figure, ...]:
    return tuple(figures(analyse(batch_study([16, 64], [1, 2], engines=["ddp", "deepspeed"], device="cuda"))))


def figure(results: Results, name: str) -> Figure:
    return next(one for one in figures(analyse(results)) if one.name == name)


def test_a_rich_study_has_every_chart_for_every_mode() -> None:
    kinds = ("epoch-seconds", "speedup", "efficiency", "throughput", "loss", "accuracy")
    modes = ("strong-micro", "strong-global", "weak")
    expected = {f"{mode}-{kind}" for mode in modes for kind in (*kinds, "accuracy-by-ranks")}
    # Under strong-global all its trials have one global batch.
    expected |= {"strong-micro-accuracy-by-batch", "weak-accuracy-by-batch"}
    assert {*rich_figures()} == expected | {"start-up"}


def test_an_explained_study_has_the_charts_that_explain_it() -> None:
    found = {figure.name for figure in explained_figures()}
    assert {
        "strong-micro-breakdown", "strong-micro-breakdown-share", "strong-micro-waterfall", "timeline-1", "timeline-2",
        "utilisation", "memory", "energy",
    } <= found  # fmt: skip


def test_every_chart_of_a_study_has_a_name_of_its_own() -> None:
    found = [figure.name for figure in explained_figures()]
    assert len(found) == len(set(found))


def test_only_charts_with_data_are_drawn() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    assert names(make_results([(make_curve(trials), trials)], [])) == set()
    one_rank = names(one_curve({1: [0.1]}))
    assert "strong-micro-epoch-seconds" in one_rank
    assert not {"strong-micro-speedup", "strong-micro-efficiency"} & one_rank


def test_measured_rows_carry_value_interval_and_repeats() -> None:
    analysis = analyse(one_curve({1: [0.1, 0.1], 2: [0.125]}))
    rows = chart_data.measured(analysis, analysis.curves, chart_data.QUANTITIES[0])
    assert [(row["series"], row["gpus"], row["runs"]) for row in rows] == [("ddp", 1, 2), ("ddp", 2, 1)]
    assert [row["value"] for row in rows] == pytest.approx([12.8, 8.0])
    assert rows[0]["low"] == pytest.approx(12.8)
    assert (rows[1]["low"], rows[1]["bounds"]) == (None, "one run: no interval")


@pytest.mark.parametrize(
    ("mode", "ends"),
    [
        # epoch seconds, speedup, efficiency, images/s at the baseline and at four times its ranks
        ("strong-micro", [(12.8, 3.2), (1, 4), (1, 1), (80, 320)]),
        ("weak", [(0.8, 0.8), (1, 4), (1, 1), (80, 320)]),
    ],
)
def test_ideal_lines_start_at_the_baseline_and_scale_perfectly(mode: Any, ends: list[tuple[float, float]]) -> None:
    analysis = analyse(one_curve({1: [0.1], 4: [0.2]}, mode=mode))
    for quantity, (first, last) in zip(chart_data.QUANTITIES, ends, strict=True):
        rows = chart_data.ideal(analysis, analysis.curves, quantity)
        assert (rows[0]["gpus"], rows[-1]["gpus"]) == pytest.approx((1, 4))
        assert (rows[0]["value"], rows[-1]["value"]) == pytest.approx((first, last))


def test_curves_differ_in_colour_and_in_shape() -> None:
    spec = rich_figures()["strong-micro-speedup"].spec
    points = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "point")
    for channel in ("color", "shape"):
        scale = points["encoding"][channel]["scale"]
        assert scale["domain"] == ["ddp", "deepspeed", "plain (no wrapper)"]
        assert len(set(scale["range"])) == 3
    assert points["encoding"]["shape"]["field"] == points["encoding"]["color"]["field"] == "series"
    pairs = {(k % len(SERIES_COLOURS), k % len(SERIES_SHAPES)) for k in range(56)}
    assert len(pairs) == 56


def test_intervals_axis_units_and_tooltips() -> None:
    spec = rich_figures()["strong-micro-epoch-seconds"].spec
    assert {"rule", "tick", "line", "point"} <= set(marks(spec))
    points = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "point")
    assert points["encoding"]["y"]["title"] == "epoch time (s)"
    assert points["encoding"]["x"]["title"] == "ranks"
    assert [tip["title"] for tip in points["encoding"]["tooltip"]] == [
        "curve", "ranks", "epoch time", "95 % interval", "runs", "trial",
    ]  # fmt: skip


def drawn_rows(spec: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    """The rows behind the first layer with a mark."""
    layer = next(layer for layer in spec["layer"] if layer["mark"]["type"] == mark)
    rows: list[dict[str, Any]] = (
        spec["datasets"][layer["data"]["name"]] if "name" in layer["data"] else layer["data"]["values"]
    )
    return rows


def test_a_bar_far_wider_than_the_data_is_cut_and_has_no_cap() -> None:
    # Two runs that differ twofold: an interval of more than a thousandfold. Epochs of about 18 and 6 s.
    found = figure(one_curve({1: [0.1, 0.2], 2: [0.1, 0.1]}), "strong-micro-epoch-seconds")
    highest = max(row["high"] for row in drawn_rows(found.spec, "rule"))
    assert highest == pytest.approx(1.5 * 128 * (0.1 * 0.2) ** 0.5)
    assert [row["gpus"] for row in drawn_rows(found.spec, "rule") if not row["low_cut"]] == [2]
    assert "cut where no cap" in found.spec["title"]["subtitle"]
    assert "ddp, 1 rank: 18.1 s (221 ms to 24.7 min, too few repeats)" in found.text


def test_an_interval_beyond_all_floats_can_be_drawn() -> None:
    trial = make_trial()
    runs = [make_run(trial, [make_rank(trial, 0, [s] * 5, warmup=1)], r) for r, s in enumerate([1e-200, 1e200])]
    results = make_results([(make_curve([trial]), [trial])], runs)
    for one in figures(analyse(results)):
        json.dumps(one.spec, allow_nan=False)


def test_short_epochs_are_drawn_in_milliseconds() -> None:
    found = figure(one_curve({1: [0.001], 2: [0.001]}), "strong-micro-epoch-seconds")
    points = next(layer for layer in found.spec["layer"] if layer["mark"]["type"] == "point")
    assert points["encoding"]["y"]["title"] == "epoch time (ms)"
    assert [row["value"] for row in drawn_rows(found.spec, "point")] == pytest.approx([128.0, 64.0])


def test_a_curve_without_drawntakes_no_place_in_the_legend() -> None:
    ddp, deepspeed = make_trial("ddp"), make_trial("deepspeed")
    run = make_run(deepspeed, [make_rank(deepspeed, 0, [0.1] * 5)])
    spec = figure(
        make_results([(make_curve([t]), [t]) for t in (ddp, deepspeed)], [run]), "strong-micro-throughput"
    ).spec
    assert spec["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["deepspeed"]


def test_a_wide_range_of_ranks_is_logarithmic_and_a_narrow_one_starts_at_zero() -> None:
    def scales(results: Results, name: str) -> tuple[Any, Any]:
        encoding = figure(results, name).spec["layer"][1]["encoding"]
        return encoding["x"]["scale"].get("type"), encoding["y"]["scale"].get("type")

    wide, narrow = one_curve({1: [0.1], 8: [0.2]}), one_curve({1: [0.1], 4: [0.2]})
    assert scales(wide, "strong-micro-epoch-seconds") == ("log", "log")
    assert scales(narrow, "strong-micro-epoch-seconds") == (None, None)
    assert scales(wide, "strong-micro-efficiency") == ("log", None)


def test_training_is_solid_and_held_out_dashed() -> None:
    spec = rich_figures()["weak-loss"].spec
    lines = [layer for layer in spec["spec"]["layer"] if layer["mark"]["type"] == "line"]
    assert len(lines) == 2  # one per curve
    scale = lines[0]["encoding"]["strokeDash"]["scale"]
    assert scale["domain"] == ["train", "held-out"]
    assert scale["range"][0] == [1, 0]
    assert scale["range"][1] != [1, 0]


def test_loss_by_step_where_no_trial_has_two_epochs() -> None:
    trial = make_trial(epochs=1)
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 1000, warmup=3)])
    results = make_results([(make_curve([trial]), [trial])], [run])
    (loss,) = [one for one in figures(analyse(results)) if one.name == "strong-micro-loss"]
    assert loss.title == "Training loss by step"
    analysis = analyse(results)
    rows = chart_data.by_step(analysis, analysis.curves)
    assert len(rows) <= 300
    assert rows[0]["x"] == 1


def test_trials_with_one_label_do_not_stack_on_one_bar() -> None:
    trials = [make_trial(), make_trial(learning_rate=0.5)]
    runs = [make_run(trial, [make_rank(trial, 0, [0.1] * 5)]) for trial in trials]
    rows, left_out = chart_data.startup(
        analyse(make_results([(make_curve([trial]), [trial]) for trial in trials], runs))
    )
    assert len({row["trial"] for row in rows}) == 2
    assert left_out == 0


def test_every_chart_is_what_vega_lite_allows() -> None:
    drawn = [one for one in (*rich_figures().values(), *explained_figures()) if one.mode in (None, "strong-micro")]
    for one in drawn:  # the charts of other modes are made by the same lines
        Root.validate(one.spec)
    wrong = rich_figures()["start-up"].spec | {"width": "broad"}
    with pytest.raises(Exception, match="'broad' is not of type 'number'"):
        Root.validate(wrong)


def test_every_chart_has_words() -> None:
    for one in [*rich_figures().values(), *explained_figures()]:
        assert one.text
        assert one.spec["description"]
        assert len(one.text) == len(set(one.text))


def test_pictures_are_written_in_every_format(tmp_path: Path) -> None:
    analysis = analyse(one_curve({1: [0.1]}))
    written = write_figures(analysis, tmp_path / "new" / "figures", ["png", "svg", "pdf"])
    heads = {"png": b"\x89PNG\r\n", "svg": b"<svg", "pdf": b"%PDF-"}
    assert len(written) == 3 * len(figures(analysis)) > 0
    for path in written:
        assert path.read_bytes().startswith(heads[path.suffix.removeprefix(".")])
    assert sorted(written) == sorted((tmp_path / "new" / "figures").iterdir())


def test_a_picture_really_shows_its_data(tmp_path: Path) -> None:
    write_figures(analyse(rich_study()), tmp_path, ["svg"])
    svg = (tmp_path / "strong-micro-speedup.svg").read_text(encoding="utf-8")
    assert "deepspeed" in svg
    assert "Speedup against ideal" in svg
    assert svg.count('aria-roledescription="point"') == 8  # 4 ddp, 3 deepspeed (one OOM), 1 plain


def test_an_unknown_format_is_named_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"unknown figure format 'gif'\. Valid: pdf, png, svg"):
        write_figures(analyse(one_curve({1: [0.1]})), tmp_path / "figures", ["png", "gif"])
    assert not (tmp_path / "figures").exists()
