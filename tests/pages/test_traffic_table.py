"""What a step sends, in the table and in the JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from explained_factory import WIRE, batch_study
from pages.test_detail_tables import DASH, lines
from report_forms import page
from results_factory import one_curve
from vitscale.analysis import analyse
from vitscale.pages.contract import to_json, to_table, trial_rows
from vitscale.pages.detail_tables import NOTHING, traffic_table
from vitscale.store.records import Collective, TrafficLine
from vitscale.store.results import Results

MILLION = 1_000_000


def counted(results: Results, reason: str | None = None) -> Results:
    """Two ranks send 1 M gradients in bf16 and a norm; one rank sends nothing. Or it is unknown for a reason."""

    def lines_of(ranks: int) -> tuple[TrafficLine, ...]:
        if ranks == 1:
            return (TrafficLine(step=9, backend="none", collectives=()),)
        if reason:
            return (TrafficLine(step=9, backend="gloo", collectives=None, reason=reason),)
        fields: dict[str, Any] = {"communicator": "0", "ranks": ranks, "operation": "all_reduce"}
        norm = Collective(**fields, dtype="float32", input_elements=1, output_elements=1)
        gradients = Collective(**fields, dtype="bfloat16", input_elements=MILLION, output_elements=MILLION)
        return (TrafficLine(step=9, backend="gloo", collectives=(norm, gradients)),)

    runs = [
        run.model_copy(
            update={
                "ranks": tuple(
                    rank.model_copy(update={"traffic": lines_of(run.header.trial.world.size)}) for rank in run.ranks
                )
            }
        )
        for run in results.runs
    ]
    return results.model_copy(update={"runs": tuple(runs)})


def test_the_table_of_one_rank_and_two() -> None:
    table = traffic_table(analyse(counted(batch_study([16], [1, 2]))))
    alone, two = lines(table)
    assert alone["collectives"] == NOTHING
    assert (alone["logical (MB)"], alone["on the wire per rank (MB)"], alone["reached (MB/s)"]) == ("0", "0", DASH)
    assert two == {
        "ranks": "2", "batch": "32 = 2 x 16", "collectives": "1 all_reduce bfloat16 + 1 all_reduce float32",
        "logical (MB)": "4.00", "on the wire per rank (MB)": "2.00", "transfer (ms)": "10.0", "reached (MB/s)": "200",
        "gradients in": "bfloat16",
    }  # fmt: skip


def test_what_is_unknown_is_a_dash_with_its_reason() -> None:
    table = traffic_table(analyse(counted(batch_study([16], [2]), "the ring is too small")))
    (two,) = lines(table)
    assert two == {"ranks": "2", "batch": "32 = 2 x 16", "collectives": DASH}
    assert table is not None
    assert "Bytes: unavailable in 1 of 1 trials: the ring is too small." in table.notes


def test_a_study_of_before_has_no_table() -> None:
    assert traffic_table(analyse(one_curve({1: [0.1], 2: [0.1]}))) is None


def test_the_page_has_it() -> None:
    text = page(analyse(counted(batch_study([16], [1, 2])))).replace("\N{NO-BREAK SPACE}", " ")
    assert "What an optimizer step sends" in text
    assert "1 all_reduce bfloat16 + 1 all_reduce float32" in text


def test_the_json_and_the_csv() -> None:
    analysis = analyse(counted(batch_study([16], [1, 2])))
    alone, two = json.loads(to_json(analysis))["trials"]
    assert (alone["collectives_per_step"], alone["logical_bytes_per_step"]) == (0, 0)
    assert (alone["wire_bytes_per_second"], alone["sent_gradient_dtype"]) == (None, None)
    assert (two["collectives_per_step"], two["logical_bytes_per_step"]) == (2, 4 * MILLION + 8)
    assert two["physical_bytes_per_step"] == 2 * MILLION + 4
    assert two["wire_bytes_per_second"] == pytest.approx((2 * MILLION + 4) / WIRE)
    assert two["sent_gradient_dtype"] == "bfloat16"
    assert two["traffic"]["sent"][1] == {
        "operation": "all_reduce", "dtype": "bfloat16", "ranks": 2, "calls": 1, "elements": MILLION,
        "logical_bytes": 4 * MILLION, "physical_bytes": 2.0 * MILLION,
    }  # fmt: skip
    assert (two["traffic"]["backend"], two["traffic"]["reason"]) == ("gloo", None)
    rows = list(csv.DictReader(io.StringIO(to_table(trial_rows(analysis), "csv").decode())))
    assert rows[1]["logical_bytes_per_step"] == str(4 * MILLION + 8)
    assert "traffic" not in rows[1]


def test_in_the_json_the_unknown_is_null() -> None:
    (two,) = json.loads(to_json(analyse(counted(batch_study([16], [2]), "the ring is too small"))))["trials"]
    assert two["collectives_per_step"] is None
    assert two["logical_bytes_per_step"] is None
    assert (two["traffic"]["sent"], two["traffic"]["gradient_dtypes"]) == (None, None)
    assert two["traffic"]["reason"] == "the ring is too small"
    (before,) = json.loads(to_json(analyse(batch_study([16], [2]))))["trials"]
    assert before["traffic"] is None
