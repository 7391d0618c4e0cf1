"""The stacked bars: heights by hand, one panel per batch size, and what is unknown is absent and said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from explained_factory import batch_study, run_of
from results_factory import NOT_TOLD_APART, explained_run, make_curve, make_results, make_trial, one_curve
from vitscale.analysis import analyse
from vitscale.pages.charts.axes import COMMUNICATION_COLOUR, PART_COLOURS
from vitscale.pages.charts.time import PART_NAMES, Bar, bars, breakdown_chart, stacked_rows, unknown_parts
from vitscale.present.document import FigureView
from vitscale.present.units import Unit
from vitscale.store.records import PARTS
from vitscale.store.results import Results

MILLISECONDS = Unit(1000.0, "ms")


def drawn(results: Results) -> list[FigureView]:
    analysis = analyse(results)
    found = breakdown_chart(analysis, analysis.curves)
    return [] if found is None else list(found.views)


def bars_of(results: Results) -> list[Bar]:
    analysis = analyse(results)
    return bars(analysis, analysis.curves)


def reasons_of(results: Results) -> list[Mapping[str, str]]:
    return [trial.breakdown.reasons for trial in analyse(results).trials.values() if trial.breakdown]


def test_the_parts_of_a_bar_stand_on_each_other_in_their_order() -> None:
    """Micro-batch 16 on two ranks: 2 + 16 + 32 + 12 + 10 + 4 + 1 = 77 ms on the rank that waits."""
    (bar,) = bars_of(batch_study([16], [2]))
    rows = stacked_rows([bar], unit=MILLISECONDS)
    found: list[tuple[Any, ...]] = [
        (row["part"], pytest.approx(row["start"]), pytest.approx(row["end"])) for row in rows
    ]
    assert found == [
        ("data wait", 0, 2), ("forward", 2, 18), ("backward", 18, 50), ("exposed wait", 50, 62),
        ("exposed wire", 62, 72), ("optimizer", 72, 76), ("other", 76, 77),
    ]  # fmt: skip
    shares = stacked_rows([bar])
    assert [row["end"] for row in shares] == pytest.approx([2 / 77, 18 / 77, 50 / 77, 62 / 77, 72 / 77, 76 / 77, 1])
    assert [row["share"] for row in shares] == ["3 %", "21 %", "42 %", "16 %", "13 %", "5 %", "1 %"]


def test_the_order_of_the_stack_is_that_of_the_breakdown() -> None:
    assert [part for part in PART_NAMES if part in PARTS] == list(PARTS)
    assert set(PART_NAMES) - set(PARTS) == {"communication"}


def test_a_view_for_each_batch_size_as_times_and_as_shares() -> None:
    found = drawn(batch_study([16, 32, 64], [1, 2]))
    batches = ["micro-batch 16", "micro-batch 32", "micro-batch 64"]
    assert [(view.choices["batch"].label, view.choices["as"].label) for view in found] == [
        (batch, kind) for batch in batches for kind in ("time", "shares")
    ]
    assert all({row["gpus"] for row in view.rows} == {1, 2} for view in found)
    # One rank: 2 + 3 x batch + 5 ms.
    heights = [max(row["end"] for row in view.rows if row["gpus"] == 1) for view in found[::2]]
    assert heights == pytest.approx([55, 103, 199])
    assert [max(row["end"] for row in view.rows) for view in found[1::2]] == pytest.approx([1, 1, 1])
    assert [view.spec["layer"][0]["encoding"]["x"]["title"] for view in found[:2]] == ["step (ms)", "share of the step"]


def test_steps_of_unlike_lengths_are_shown_as_shares_first() -> None:
    trials = [make_trial("ddp", 1), make_trial("fsdp2", 1)]
    runs = [
        explained_run(trial, [{"forward": seconds, "backward": seconds}])
        for trial, seconds in zip(trials, (0.001, 1.0), strict=True)
    ]
    views = drawn(make_results([(make_curve([trial]), [trial]) for trial in trials], runs))
    assert [view.choices["as"].label for view in views] == ["shares", "time"]


def test_engines_are_bars_of_one_view() -> None:
    view = drawn(batch_study([16], [1, 2], engines=["ddp", "deepspeed"]))[0]
    assert list(dict.fromkeys(row["bar"] for row in sorted(view.rows, key=lambda row: int(row["place"])))) == [
        "ddp, 1 rank", "ddp, 2 ranks", "deepspeed, 1 rank", "deepspeed, 2 ranks",
    ]  # fmt: skip


def test_each_part_has_its_colour_and_a_readable_name() -> None:
    scale = drawn(batch_study([16], [2]))[0].spec["layer"][0]["encoding"]["color"]["scale"]
    colours = dict(zip(scale["domain"], scale["range"], strict=True))
    assert colours["exposed wait"] == PART_COLOURS["wait"]
    assert colours["data wait"] == PART_COLOURS["data_wait"]
    assert "copy to device" not in colours


def test_wait_and_wire_that_cannot_be_told_apart_are_one_part_and_the_text_says_why() -> None:
    results = batch_study([16], [2], told_apart=False)
    (bar,) = bars_of(results)
    assert "wait" not in bar.parts
    assert "wire" not in bar.parts
    # The typical rank is one of two that wait as far as anybody knows; its parts still add up to its step.
    assert bar.parts["communication"] > 0
    assert sum(bar.parts.values()) == pytest.approx(bar.seconds)
    scale = drawn(results)[0].spec["layer"][0]["encoding"]["color"]["scale"]
    name = "exposed communication"
    assert dict(zip(scale["domain"], scale["range"], strict=True))[name] == COMMUNICATION_COLOUR
    unknown = unknown_parts(reasons_of(results))
    assert f"Unknown in 1 of 1 trials: exposed wait, exposed wire: {NOT_TOLD_APART}." in unknown


def test_unknown_parts_are_absent_and_each_reason_is_said_once() -> None:
    results = batch_study([16], [1, 2])
    assert all("h2d" not in bar.parts and "launch_gaps" not in bar.parts for bar in bars_of(results))
    assert drawn(results)[0].text[:2] == (
        "ddp, 1 rank; data wait; 2.00 ms; 4 %",
        "ddp, 1 rank; forward; 16.0 ms; 29 %",
    )
    assert unknown_parts(reasons_of(results)) == [
        "Unknown in 2 of 2 trials: copy to device: the device is the host.",
        "Unknown in 2 of 2 trials: launch gaps: a host launches no kernels.",
    ]


def test_the_share_of_unknown_parts_is_said() -> None:
    """Forward is 16 of 77 ms."""
    trial = make_trial("ddp", 2, micro_batch=16)
    run = run_of(trial)
    ranks = tuple(
        rank.model_copy(
            update={"explained": tuple(own.model_copy(update={"unknown": {"forward": ""}}) for own in rank.explained)}
        )
        for rank in run.ranks
    )
    view, *_ = drawn(make_results([(make_curve([trial]), [trial])], [run.model_copy(update={"ranks": ranks})]))
    assert view.summary.endswith("77.0 ms a step: backward 42 %, exposed wait 16 %, exposed wire 13 %, unknown 21 %.")


def test_curves_that_differ_in_more_than_batch_size_never_share_a_bar() -> None:
    """Two curves with one name, one batch and one rank count: without a number they would be drawn over each other."""
    trials = [make_trial("ddp", 2, micro_batch=16, learning_rate=rate) for rate in (0.1, 0.2)]
    results = make_results([(make_curve([trial]), [trial]) for trial in trials], [run_of(trial) for trial in trials])
    assert [bar.family for bar in bars_of(results)] == ["ddp (1)", "ddp (2)"]
    named = make_results(
        [(make_curve([trial], train__learning_rate=trial.train.learning_rate), [trial]) for trial in trials],
        [run_of(trial) for trial in trials],
    )
    assert [bar.family for bar in bars_of(named)] == ["ddp, learning_rate 0.1", "ddp, learning_rate 0.2"]


def test_a_global_batch_is_the_batch_of_a_curve_that_keeps_it() -> None:
    trials = [make_trial("ddp", gpus, micro_batch=32 // gpus) for gpus in (1, 2)]
    curve = make_curve(trials, "strong-global", train__global_batch=32)
    found = bars_of(make_results([(curve, trials)], [run_of(trial) for trial in trials]))
    assert [(bar.family, bar.batch, bar.gpus) for bar in found] == [
        ("ddp", "global batch 32", 1),
        ("ddp", "global batch 32", 2),
    ]


def test_batch_fields_name_a_curve_where_they_do_not_set_its_batch() -> None:
    """One global batch of 64 by two micro-batches: short names would put both curves on one panel."""
    trials = [make_trial("ddp", 1, micro_batch=size, grad_accum=64 // size, epochs=6) for size in (16, 32)]
    curves = [
        (make_curve([trial], "strong-global", train__micro_batch=trial.train.micro_batch), [trial]) for trial in trials
    ]
    found = bars_of(make_results(curves, [run_of(trial) for trial in trials]))
    assert [(bar.family, bar.batch) for bar in found] == [
        ("ddp, micro_batch 16", "global batch 64"),
        ("ddp, micro_batch 32", "global batch 64"),
    ]


def test_a_study_without_explained_steps_has_no_breakdown() -> None:
    assert drawn(one_curve({1: [0.1], 2: [0.1]})) == []
