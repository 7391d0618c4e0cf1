from __future__ import annotations

import dataclasses

from prediction_factory import NETWORK, make_forecast, make_prediction, study
from vitscale.pages.predicted import predict_document, predict_fields
from vitscale.prediction.finishing import Finish
from vitscale.present.terminal import lines

DAY = 86_400.0
ENDS = Finish(100, 2 * DAY, 3 * DAY, 2.5 * DAY, 4 * DAY, 1.25, 1 / 3, 1800.0, 420.0, (NETWORK,))
NEVER = Finish(100, 2 * DAY, None, 9 * DAY, None, None, None, 1800.0, None, (NETWORK,), "hosts fail too often")
UNKNOWN = Finish(100, None, None, None, None, None, None, None, None, (), "no images")


def printed(*ends: Finish, series: tuple[str, ...] = ("ddp",)) -> str:
    rows = [make_prediction(8, series=series[place % len(series)]) for place in range(len(ends))]
    text = "\n".join(line.plain for line in lines(predict_document(make_forecast(study(), rows), ends), verbose=True))
    return text.partition("Time to finish")[2].partition("\n\n")[0]


def test_a_line_for_each_prediction_and_what_is_assumed_once() -> None:
    said = printed(ENDS, dataclasses.replace(ENDS, cost=None))
    (line, second) = [line for line in said.splitlines() if " 8 " in line]
    assert line.split()[-13:] == [
        "8", "2.00", "d", "3.00", "d", "2.50\u20134.00", "d", "1.2", "33", "%", "30.0", "min", "420",
    ]  # fmt: skip
    assert second.split()[-1] == "\u2013"
    assert said.count("Assumed: network between hosts") == 1
    assert said.startswith(" 100 epochs (prior-driven)")


def test_what_never_ends_or_is_unknown_is_told() -> None:
    said = printed(NEVER, UNKNOWN)
    assert "never" in said
    assert "9.00 d\u2013never" in said
    assert "Time to finish unavailable: hosts fail too often." in said
    assert "Time to finish unavailable: no images." in said
    assert "cost" not in said


def test_series_are_told_apart_where_there_are_several() -> None:
    assert "fsdp2" in printed(ENDS, ENDS, series=("ddp", "fsdp2"))


def test_fields_of_the_json() -> None:
    forecast = make_forecast(study(), [make_prediction(8), make_prediction(16)])
    fields, never = predict_fields(forecast, (ENDS, NEVER))["predictions"]
    assert (fields["gpus"], never["gpus"]) == (8, 16)
    assert (fields["finish_seconds"], fields["finish_seconds_low"], fields["finish_seconds_high"]) == (
        3 * DAY, 2.5 * DAY, 4 * DAY,
    )  # fmt: skip
    assert (fields["finish_label"], fields["finish_reason"]) == ("prior-driven", None)
    assert fields["finish_assumptions"][0]["part"] == NETWORK.part
    assert list(never) == list(fields)
    assert never["finish_reason"] == "hosts fail too often"
