from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prediction_factory import estimate, make_forecast, make_prediction, series_of, study
from vitscale.pages.charts.prediction import AMDAHL, IDEAL, TRANSFERS, prediction_chart, series_chart
from vitscale.pages.document import charts
from vitscale.prediction.evidence import Evidence
from vitscale.present.document import FigureView


def prediction_figures(analysis: Any, forecast: Any) -> tuple[FigureView, ...]:
    found = prediction_chart(analysis, forecast)
    return found.views if found else ()


def bounds(rows: Any, name: str) -> dict[int, float]:
    return {row["gpus"]: row["value"] for row in rows.bounds if row["bound"] == name}


def nearest(values: dict[int, float], gpus: int) -> float:
    return next(value for at, value in values.items() if at == pytest.approx(gpus))


def test_ideal_and_amdahl_are_those_of_the_measured_points() -> None:
    # 128, 64 and 32 steps: epochs of 0.8 + 12 / N seconds, which Amdahl's law has exactly.
    steps = {gpus: [(0.8 + 12 / gpus) / (128 / gpus)] for gpus in (1, 2, 4)}
    analysis = study(steps)
    rows = series_chart(analysis, series_of(analysis), [make_prediction(gpus) for gpus in (1, 2, 4, 8, 16)])
    assert nearest(bounds(rows, IDEAL), 16) == pytest.approx(12.8 / 16)
    assert nearest(bounds(rows, AMDAHL), 16) == pytest.approx(0.8 + 12 / 16)
    assert [row["value"] for row in rows.measured] == pytest.approx([12.8, 6.8, 3.8])


def test_amdahl_has_no_negative_part() -> None:
    analysis = study({gpus: [0.1 * 0.9**gpus] for gpus in (1, 2, 4)})  # better than ideal
    rows = series_chart(analysis, series_of(analysis), [make_prediction(gpus) for gpus in (1, 16)])
    fitted = bounds(rows, AMDAHL)
    assert nearest(fitted, 16) == pytest.approx(nearest(fitted, 1) / 16)
    grows = study({gpus: [0.1 * 2**gpus] for gpus in (1, 2, 4)})  # more ranks take longer
    fitted = bounds(series_chart(grows, series_of(grows), [make_prediction(gpus) for gpus in (1, 16)]), AMDAHL)
    assert nearest(fitted, 16) == pytest.approx(nearest(fitted, 1))


def test_one_measured_count_has_no_amdahl_and_weak_scaling_a_level_ideal() -> None:
    one = study({4: [0.1]})
    assert bounds(series_chart(one, series_of(one), [make_prediction(8)]), AMDAHL) == {}
    weak = study({1: [0.1], 2: [0.11]}, mode="weak")
    rows = series_chart(weak, series_of(weak), [make_prediction(gpus, mode="weak") for gpus in (1, 8)])
    assert bounds(rows, AMDAHL) == {}
    assert set(bounds(rows, IDEAL).values()) == {rows.measured[0]["value"]}


def test_transfers_add_to_the_ideal_what_they_take_beyond_the_smallest_count() -> None:
    analysis = study()
    rows = series_chart(analysis, series_of(analysis), [make_prediction(gpus) for gpus in (1, 8)])
    ideal, transfers = bounds(rows, IDEAL), bounds(rows, TRANSFERS)
    assert transfers[1] == pytest.approx(nearest(ideal, 1))
    # 11 ms of exposed wire on one rank, 18 on eight: 7 ms more in each of 16 steps.
    assert transfers[8] == pytest.approx(nearest(ideal, 8) + 16 * 0.007)
    unknown = [make_prediction(gpus, wire_seconds=None) for gpus in (1, 8)]
    assert bounds(series_chart(analysis, series_of(analysis), unknown), TRANSFERS) == {}


def test_without_images_steps_are_drawn() -> None:
    analysis = study()
    rows = series_chart(analysis, series_of(analysis), [make_prediction(8, epoch_seconds=None)])
    assert not rows.of_epoch
    assert rows.measured[0]["value"] == pytest.approx(0.102, rel=1e-3)
    assert rows.predicted[0]["value"] == pytest.approx(0.136)
    forecast = make_forecast(analysis, [make_prediction(8, epoch_seconds=None)])
    assert prediction_figures(analysis, forecast)[0].title.startswith("Predicted step time")


def test_the_chart_shows_both_bands_and_never_a_measured_count_as_predicted() -> None:
    analysis = study()
    (figure,) = prediction_figures(analysis, make_forecast(analysis))
    assert figure.name == "strong-micro-prediction"
    areas = [layer for layer in figure.spec["layer"] if layer["mark"]["type"] == "area"]
    assert [(area["encoding"]["y"]["field"], area["encoding"]["y2"]["field"]) for area in areas] == [
        ("future_low", "future_high"),
        ("low", "high"),
    ]
    (points,) = [layer for layer in figure.spec["layer"] if layer["mark"]["type"] == "point"]
    told = {row["gpus"]: row["told"] for row in figure.spec["datasets"][points["data"]["name"]]}
    assert told == {1: "measured", 2: "measured", 4: "measured", 8: "extrapolated", 16: "prior-driven"}
    assert "16; 1.22 s; " in " ".join(figure.text)
    assert "vitscale" not in str(figure.spec.get("config"))


def test_series_have_a_chart_each_named_apart() -> None:
    analysis = study()
    forecast = make_forecast(analysis, [make_prediction(8), make_prediction(8, series="fsdp2")])
    two = (series_of(analysis), series_of(analysis, "fsdp2"))
    forecast = dataclasses.replace(forecast, evidence=Evidence(two, forecast.evidence.network))
    found = prediction_figures(analysis, forecast)
    assert [figure.name for figure in found] == ["strong-micro-prediction", "strong-micro-prediction-2"]


def test_a_prior_as_wide_as_the_world_does_not_squeeze_the_points() -> None:
    analysis = study()
    vast = make_prediction(8, epoch_seconds=dataclasses.replace(estimate(2.0), future_low=1e-6, future_high=1e9))
    (figure,) = prediction_figures(analysis, make_forecast(analysis, [vast]))
    (line,) = [
        layer
        for layer in figure.spec["layer"]
        if layer["mark"]["type"] == "line" and "strokeDash" not in layer["encoding"]
    ]
    low, high = line["encoding"]["y"]["scale"]["domain"]
    assert 2.0 / 100 < low < 2.0
    assert 13 < high < 1300


def test_with_an_outlook_the_report_has_the_charts() -> None:
    analysis = study({4: [0.1]})
    forecast = make_forecast(analysis, [make_prediction(8)])
    assert "prediction" in charts(analysis, forecast)
    assert "prediction" not in charts(analysis)
