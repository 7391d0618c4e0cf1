from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from prediction_factory import NETWORK, make_prediction
from vitscale.prediction.finishing import Finish
from vitscale.report.prediction_finish import finish_fields, finish_text

DAY = 86_400.0
ENDS = Finish(100, 2 * DAY, 3 * DAY, 2.5 * DAY, 4 * DAY, 1.25, 1 / 3, 1800.0, 420.0, (NETWORK,))
NEVER = Finish(100, 2 * DAY, None, 9 * DAY, None, None, None, 1800.0, None, (NETWORK,), "hosts fail too often")
UNKNOWN = Finish(100, None, None, None, None, None, None, None, None, (), "no images")


def printed(*ends: Finish, series: tuple[str, ...] = ("ddp",)) -> str:
    out = io.StringIO()
    rows = [make_prediction(8, series=series[place % len(series)]) for place in range(len(ends))]
    Console(file=out, width=80).print(finish_text(rows, ends))
    return out.getvalue()


def test_a_line_for_each_prediction_and_what_is_assumed_once() -> None:
    said = printed(ENDS, dataclasses.replace(ENDS, cost=None))
    (line, second) = [line for line in said.splitlines() if line.lstrip().startswith("8 ")]
    assert line.split() == [
        "8",
        "48.0",
        "h",
        "72.0",
        "h",
        "60.0\u201396.0",
        "h",
        "1.2",
        "33",
        "%",
        "30.0",
        "min",
        "420",
    ]
    assert second.split()[-1] == "\u2013"
    assert said.count("Assumed: network between hosts") == 1
    assert "Time to finish 100 epochs (prior-driven)" in said


def test_what_never_ends_or_is_unknown_is_told() -> None:
    said = printed(NEVER, UNKNOWN)
    assert "never" in said
    assert "9.00 d\u2013never" not in said
    assert "216 h\u2013never" in said
    assert "Time to finish unavailable: hosts fail too often." in said
    assert "Time to finish unavailable: no images." in said
    assert "cost" not in said


def test_series_are_told_apart_where_there_are_several() -> None:
    assert "fsdp2" in printed(ENDS, ENDS, series=("ddp", "fsdp2"))
    assert "ddp" not in printed(ENDS)


def test_fields_of_the_json() -> None:
    fields = finish_fields(ENDS)
    assert (fields["finish_seconds"], fields["finish_seconds_low"], fields["finish_seconds_high"]) == (
        3 * DAY, 2.5 * DAY, 4 * DAY,
    )  # fmt: skip
    assert (fields["finish_label"], fields["finish_reason"]) == ("prior-driven", None)
    assert fields["finish_assumptions"][0]["part"] == NETWORK.part
    assert list(finish_fields(NEVER)) == list(fields)
    assert finish_fields(NEVER)["finish_reason"] == "hosts fail too often"
