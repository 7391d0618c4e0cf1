from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from prediction_factory import NETWORK, estimate, make_forecast, make_prediction, make_score, study
from vitscale.pages.contract import to_json
from vitscale.pages.predicted import predict_fields
from vitscale.prediction.results import Forecast
from vitscale.present.data import envelope

ESTIMATES = (
    "epoch_seconds", "step_seconds", "images_per_second", "speedup", "efficiency", "compute_seconds", "wait_seconds",
    "wire_seconds", "norm_seconds", "bubble_seconds", "rest_seconds", "joules_per_epoch", "cost_per_epoch",
)  # fmt: skip


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def told(forecast: Forecast) -> list[dict[str, Any]]:
    """The predictions that `vitscale predict --json` prints."""
    found: list[dict[str, Any]] = strict(envelope("predict", predict_fields(forecast)))["predictions"]
    return found


def objects(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [make_prediction(8, **change) for change in changes or ({},)]
    found: list[dict[str, Any]] = strict(envelope("predict", predict_fields(make_forecast(study(), rows))))[
        "predictions"
    ]
    return found


def test_an_object_for_each_series_and_rank_count() -> None:
    found = told(make_forecast(study()))
    assert [(one["series"], one["gpus"], one["nodes"], one["label"]) for one in found] == [
        ("ddp", 1, 1, "interpolated"), ("ddp", 2, 1, "interpolated"), ("ddp", 4, 1, "interpolated"),
        ("ddp", 8, 2, "extrapolated"), ("ddp", 16, 4, "prior-driven"),
    ]  # fmt: skip
    assert found[4]["assumptions"] == [
        {"part": NETWORK.part, "taken": NETWORK.taken, "measurement": NETWORK.measurement}
    ]
    assert all(list(one) == list(found[0]) for one in found)


def test_low_and_high_are_those_of_a_future_run() -> None:
    # 16 steps of 136 ms; 4 % about the mean, 10 % about a run.
    (one,) = objects()
    assert {key: one[key] for key in one if key.startswith("epoch_seconds")} == {
        "epoch_seconds": pytest.approx(2.176),
        "epoch_seconds_low": pytest.approx(2.176 * 0.9),
        "epoch_seconds_high": pytest.approx(2.176 * 1.1),
        "epoch_seconds_mean_low": pytest.approx(2.176 * 0.96),
        "epoch_seconds_mean_high": pytest.approx(2.176 * 1.04),
    }
    ends = ("", "_low", "_high", "_mean_low", "_mean_high")
    assert {f"{name}{end}" for name in ESTIMATES for end in ends} <= set(one)
    assert (one["steps_per_epoch"], one["global_batch"], one["images"]) == (16, 64, 1024)


def test_what_is_unavailable_is_null_with_its_reason_and_never_nan() -> None:
    wild = dataclasses.replace(estimate(1.0), value=math.nan, future_high=math.inf)
    found = objects({"epoch_seconds": None, "speedup": wild, "memory_bytes": None})
    (one,) = found
    assert (one["epoch_seconds"], one["epoch_seconds_low"], one["epoch_seconds_mean_high"]) == (None, None, None)
    assert (one["speedup"], one["speedup_high"], one["memory_bytes"]) == (None, None, None)
    assert one["speedup_low"] == pytest.approx(0.9)
    assert one["reasons"]["joules_per_epoch"] == "no run recorded it"


def test_the_report_holds_the_same_objects_and_the_scores() -> None:
    analysis = study()
    forecast = make_forecast(analysis, scores=[make_score(baseline_interval_score=math.inf)])
    content = strict(to_json(analysis, forecast))
    assert content["predictions"] == told(forecast)
    (score,) = content["prediction_scores"]
    assert (score["fitted_gpus"], score["held_out_gpus"], score["held"], score["runs"]) == ([1, 2, 4], [8], 3, 4)
    assert score["baseline_interval_score"] is None
    assert score["sentence"].startswith("ddp: predicting 8 ranks")
    without = strict(to_json(analysis))
    assert (without["predictions"], without["prediction_scores"]) == ([], [])
