"""The stacked bars: heights by hand, one panel per batch size, and what is unknown is absent and said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explained_factory import batch_study, run_of
from results_factory import NOT_TOLD_APART, make_curve, make_results, make_trial, one_curve
from vitscale.analysis import analyse
from vitscale.report import breakdown_charts, breakdown_data, words
from vitscale.report.breakdown_charts import breakdown_figures
from vitscale.report.breakdown_data import PART_NAMES
from vitscale.report.figure import Figure
from vitscale.report.style import COMMUNICATION_COLOUR, PART_COLOURS
from vitscale.store.records import PARTS
from vitscale.store.results import Results

MILLISECONDS = words.Unit(1000.0, "ms")


def drawn(results: Results) -> list[Figure]:
    analysis = analyse(results)
    return breakdown_figures(analysis, analysis.curves[0].mode, analysis.curves)


def bars_of(results: Results) -> list[breakdown_data.Bar]:
    analysis = analyse(results)
    return breakdown_data.bars(analysis, analysis.curves)


def layers(spec: Any) -> list[dict[str, Any]]:
    """All layers of a chart, in whatever concatenation or facet they lie."""
    if isinstance(spec, list):
        return [layer for one in spec for layer in layers(one)]
    if not isinstance(spec, dict):
        return []
    own = [spec] if isinstance(spec.get("mark"), dict) else []
    return own + [layer for key, value in spec.items() if key != "datasets" for layer in layers(value)]


def panels(spec: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Title and rows of each panel of a concatenation."""
    found = []
    for panel in spec["concat"]:
        data = panel["data"]
        found.append((panel["title"]["text"], spec["datasets"][data["name"]] if "name" in data else data["values"]))
    return found


def test_the_parts_of_a_bar_stand_on_each_other_in_their_order() -> None:
    """Micro-batch 16 on two ranks: 2 + 16 + 32 + 12 + 10 + 4 + 1 = 77 ms on the rank that waits."""
    (bar,) = bars_of(batch_study([16], [2]))
    rows = breakdown_data.stacked([bar], unit=MILLISECONDS)
    found: list[tuple[Any, ...]] = [
        (row["part"], pytest.approx(row["start"]), pytest.approx(row["end"])) for row in rows
    ]
    assert found == [
        ("data wait", 0, 2), ("forward", 2, 18), ("backward", 18, 50), ("exposed wait", 50, 62),
        ("exposed wire", 62, 72), ("optimizer", 72, 76), ("other", 76, 77),
    ]  # fmt: skip
    shares = breakdown_data.stacked([bar])
    assert [row["end"] for row in shares] == pytest.approx([2 / 77, 18 / 77, 50 / 77, 62 / 77, 72 / 77, 76 / 77, 1])
    assert [row["share"] for row in shares] == pytest.approx([x / 77 for x in (2, 16, 32, 12, 10, 4, 1)])


def test_the_order_of_the_stack_is_that_of_the_breakdown() -> None:
    assert [part for part in PART_NAMES if part in PARTS] == list(PARTS)
    assert set(PART_NAMES) - set(PARTS) == {"communication"}


def test_batch_sizes_stand_side_by_side_and_ranks_within_them() -> None:
    found = {figure.name: figure.spec for figure in drawn(batch_study([16, 32, 64], [1, 2]))}
    assert set(found) == {"strong-micro-breakdown", "strong-micro-breakdown-share"}
    for spec in found.values():
        named = panels(spec)
        assert [title for title, _ in named] == ["micro-batch 16", "micro-batch 32", "micro-batch 64"]
        assert all({row["gpus"] for row in rows} == {1, 2} for _, rows in named)
    # One rank: 2 + 3 x batch + 5 ms.
    heights = [
        max(row["end"] for row in rows if row["gpus"] == 1) for _, rows in panels(found["strong-micro-breakdown"])
    ]
    assert heights == pytest.approx([55, 103, 199])


def test_shares_have_one_axis_and_times_one_for_each_batch_size() -> None:
    times, shares = drawn(batch_study([16, 64], [1, 2]))

    def axes(figure: Figure) -> list[tuple[Any, str]]:
        bars = [layer for layer in layers(figure.spec["concat"]) if layer["mark"]["type"] == "bar"]
        return [(layer["encoding"]["y"]["scale"]["domain"], layer["encoding"]["y"]["title"]) for layer in bars]

    # 77 and 257 ms at the highest: axes in steps of 20 and 100 ms.
    assert axes(times) == [([0, 80], "step (ms)"), ([0, 300], "step (ms)")]
    assert axes(shares) == [([0, 1], "share of the step")] * 2


def test_sixteen_to_256_on_one_and_two_ranks_is_one_figure() -> None:
    figure = drawn(batch_study([16, 32, 64, 128, 256], [1, 2]))[1]
    assert [title for title, _ in panels(figure.spec)] == [f"micro-batch {size}" for size in (16, 32, 64, 128, 256)]
    assert figure.spec["columns"] == 5
    assert all(len({row["gpus"] for row in rows}) == 2 for _, rows in panels(figure.spec))


def test_engines_are_rows_of_the_same_batch_sizes() -> None:
    spec = drawn(batch_study([16, 64], [1, 2], engines=["ddp", "deepspeed"]))[0].spec
    assert [panel["facet"]["row"]["field"] for panel in spec["concat"]] == ["family", "family"]
    for _, rows in panels(spec):
        assert {row["family"] for row in rows} == {"ddp", "deepspeed"}


def test_with_one_batch_size_the_engines_stand_side_by_side() -> None:
    spec = drawn(batch_study([16], [1, 2], engines=["ddp", "deepspeed"]))[0].spec
    assert spec["facet"]["field"] == "family"
    assert spec["columns"] == 2


def test_each_part_has_its_colour_and_a_readable_name() -> None:
    spec = drawn(batch_study([16], [2]))[0].spec
    scale = next(layer for layer in layers(spec) if layer["mark"]["type"] == "bar")["encoding"]["color"]["scale"]
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
    figure = drawn(results)[0]
    name = "exposed communication (wait and wire not told apart)"
    scale = next(layer for layer in layers(figure.spec) if layer["mark"]["type"] == "bar")["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True))[name] == COMMUNICATION_COLOUR
    assert f"Unknown in 1 of 1 trials: exposed wait, exposed wire: {NOT_TOLD_APART}." in figure.text


def test_unknown_parts_are_absent_and_each_reason_is_said_once() -> None:
    results = batch_study([16], [1, 2])
    assert all("h2d" not in bar.parts and "launch_gaps" not in bar.parts for bar in bars_of(results))
    text = drawn(results)[0].text
    assert text[0] == (
        "ddp, micro-batch 16, 1 rank: 55.0 ms: data wait 2.00 ms (4 %), forward 16.0 ms (29 %), backward 32.0 ms "
        "(58 %), optimizer 4.00 ms (7 %), other 1.00 ms (2 %)"
    )
    assert text[2:] == (
        "Unknown in 2 of 2 trials: copy to device: the device is the host.",
        "Unknown in 2 of 2 trials: launch gaps: a host launches no kernels.",
    )


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
    bars = bars_of(make_results([(curve, trials)], [run_of(trial) for trial in trials]))
    assert [(bar.family, bar.batch, bar.gpus) for bar in bars] == [
        ("ddp", "global batch 32", 1),
        ("ddp", "global batch 32", 2),
    ]


def test_batch_fields_name_a_curve_where_they_do_not_set_its_batch() -> None:
    """One global batch of 64 by two micro-batches: short names would put both curves on one panel."""
    trials = [make_trial("ddp", 1, micro_batch=size, grad_accum=64 // size, epochs=6) for size in (16, 32)]
    curves = [
        (make_curve([trial], "strong-global", train__micro_batch=trial.train.micro_batch), [trial]) for trial in trials
    ]
    bars = bars_of(make_results(curves, [run_of(trial) for trial in trials]))
    assert [(bar.family, bar.batch) for bar in bars] == [
        ("ddp, micro_batch 16", "global batch 64"),
        ("ddp, micro_batch 32", "global batch 64"),
    ]


def test_panels_that_are_not_drawn_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown_charts, "_MOST_PANELS", 2)
    figure = drawn(batch_study([16, 32, 64], [1]))[0]
    assert [title for title, _ in panels(figure.spec)] == ["micro-batch 16", "micro-batch 32"]
    assert "not drawn: 1 of 3 panels (see the table)" in figure.spec["title"]["subtitle"]
    assert any("micro-batch 64" in line for line in figure.text)


def test_a_study_without_explained_steps_has_no_breakdown() -> None:
    assert drawn(one_curve({1: [0.1], 2: [0.1]})) == []


@given(st.floats(1e-6, 1e6))
def test_an_axis_has_few_round_ticks_and_holds_its_bars(highest: float) -> None:
    ticks = breakdown_charts._ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest * (1 - 1e-9)
    assert ticks[-2] < highest
    assert 2 <= len(ticks) <= 7
    assert float(f"{ticks[1]:.6e}".partition("e")[0]) in (1, 2, 2.5, 5)
