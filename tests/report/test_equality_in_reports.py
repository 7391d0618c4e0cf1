"""Many curves stay readable, and a trial that trains something else is marked wherever it is shown."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import math

import pytest
from rich.console import Console

from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.comparisons import compare_curves
from vitscale.analysis.learning.drift import judged
from vitscale.analysis.scaling import scale
from vitscale.report import chart_data, terminal_table, to_markdown, words
from vitscale.report.charts import figures
from vitscale.report.comparison_tables import comparison_tables
from vitscale.report.contract import trial_rows
from vitscale.report.figure import Figure
from vitscale.report.tables import mode_tables

STAGES = [("none", 0), ("ddp", 0), ("fsdp2", 0), *(("deepspeed", stage) for stage in range(4))]


def study(
    drifting: tuple[str, int, int] | None = None, repeats: int = 3, slower: float = 0.01, scatter: float = 0.0001
) -> Analysis:
    """Seven curves; each is slower than the one before, repeats scatter. The loss of `drifting` is 1 % off."""
    curves, runs = [], []
    for place, (engine, stage) in enumerate(STAGES):
        trials = [make_trial(engine, gpus, zero_stage=stage) for gpus in ((1,) if engine == "none" else (1, 2))]
        labels = {"train.engine": engine} | ({"train.zero_stage": stage} if engine == "deepspeed" else {})
        curves.append((make_curve(trials).model_copy(update={"labels": labels}), trials))
        for trial in trials:
            off = 1.01 if (engine, stage, trial.world.size) == drifting else 1.0
            losses = [2.0 / (1 + 0.1 * step) * (off if step else 1.0) for step in range(400)]
            pace = 0.1 * (1 + slower) ** place
            runs += [
                steady_run(trial, pace * (1 + scatter * repeat), repeat, losses=losses) for repeat in range(repeats)
            ]
    found = analyse(make_results(curves, runs))
    trials_judged = judged(found.trials)
    scaled = tuple(scale(curve, trials_judged, False) for curve in found.study.curves)
    compared = compare_curves(scaled, trials_judged, False)
    return dataclasses.replace(found, trials=trials_judged, curves=scaled, comparisons=compared)


EQUAL = study()
DRIFTING = study(("deepspeed", 2, 2))


def lines(analysis: Analysis) -> list[str]:
    """What a terminal of 80 columns shows."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(terminal_table(analysis))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@functools.cache
def drifting_figures() -> list[Figure]:
    """They are drawn once and only read."""
    return figures(DRIFTING)


def terminal(analysis: Analysis) -> str:
    return " ".join(" ".join(lines(analysis)).split())


# --- many curves ---------------------------------------------------------------------------------------------------


def test_the_table_holds_every_curve_against_one() -> None:
    (table,) = comparison_tables(EQUAL)
    assert (table.title, table.columns) == ("strong-micro: times as fast as ddp", ("1 rank", "2 ranks"))
    assert [row.curve for row in table.rows] == [
        "fsdp2", "deepspeed ZeRO-0", "deepspeed ZeRO-1", "deepspeed ZeRO-2", "deepspeed ZeRO-3", "plain (no wrapper)",
    ]  # fmt: skip
    fsdp2, plain = table.rows[0].cells, table.rows[-1].cells
    assert str(fsdp2[1]) == f"0.99x (slower, 0.99{words.DASH}0.99)"
    assert str(plain[0]).startswith("1.01x (faster, ")
    assert str(plain[1]) == words.UNKNOWN


def test_what_is_no_difference_is_called_so() -> None:
    assert "0.99x (one run)" in to_markdown(study(repeats=1))
    (alike,) = comparison_tables(study(slower=0.0, scatter=0.05))
    assert str(alike.rows[0].cells[0]).startswith(f"1.00x (no difference, 0.90{words.DASH}1.1")


def test_of_many_curves_one_sentence_says_who_is_faster_and_comes_first() -> None:
    first, *others = words.headlines(EQUAL)
    assert first.startswith("strong-micro, 2 ranks, against ddp: slower: fsdp2 (0.99x); deepspeed ZeRO-0 (0.98x); ")
    assert [text.partition(",")[0] for text in others] == [
        "ddp", "fsdp2", "deepspeed ZeRO-0", "deepspeed ZeRO-1", "deepspeed ZeRO-2", "deepspeed ZeRO-3",
    ]  # fmt: skip


def test_markdown_has_the_comparisons_as_a_table() -> None:
    text = to_markdown(EQUAL)
    assert "| strong-micro: times as fast as ddp | 1 rank | 2 ranks |\n|:--|--:|--:|\n| fsdp2 | 0.99x " in text
    assert text.count("as fast as deepspeed") == 0


def test_of_many_curves_one_ideal_time_is_drawn_and_said_whose() -> None:
    epoch = next(figure for figure in figures(EQUAL) if figure.name == "strong-micro-epoch-seconds")
    assert "dashed: ideal of ddp" in epoch.spec["title"]["subtitle"]
    dashed = next(layer for layer in epoch.spec["layer"] if layer["mark"].get("strokeDash"))
    rows = epoch.spec["datasets"][dashed["data"]["name"]] if "name" in dashed["data"] else dashed["data"]["values"]
    assert {row["series"] for row in rows} == {"ddp"}


# --- equality ------------------------------------------------------------------------------------------------------


def test_that_all_agree_is_said() -> None:
    sentence = (
        "Equality: over the first 20 steps the losses of 11 trials are those of a trial that must compute the same, "
        "exactly."
    )
    assert words.equality(EQUAL) == sentence
    assert sentence in terminal(EQUAL)
    assert sentence in html.unescape(to_markdown(EQUAL))
    assert words.equality(DRIFTING) == sentence.replace("11", "10").replace("exactly", "exactly; 1 drifts")


def test_a_drift_stands_in_the_table_beside_its_own_times() -> None:
    (table,) = mode_tables(DRIFTING)
    row = next(row for row in table.rows if row.curve == "deepspeed ZeRO-2" and row.gpus == 2)
    cells = dict(zip(table.columns, row.cells, strict=True))
    assert str(cells["speedup"]) == "drifts (1 % off)"
    assert cells["efficiency"].text == words.UNKNOWN
    assert cells["epoch (s)"].text != words.UNKNOWN
    assert "drifts (1 % off)" in terminal(DRIFTING)
    assert "drifts (1 % off)" in to_markdown(DRIFTING)


def test_a_drift_fits_into_a_narrow_terminal() -> None:
    found = lines(DRIFTING)
    assert max(map(len, found)) <= 80
    (row,) = [line.split() for line in found if "drifts (" in line]
    assert row == ["2", "3", "x", "189", "105", "6.73", "152", "drifts", "(1", "%", "off)", words.UNKNOWN, "6.00"]


def test_a_loss_that_is_not_finite_is_said_to_be() -> None:
    found = {
        trial_id: dataclasses.replace(trial, drift=dataclasses.replace(trial.drift, difference=math.inf))
        for trial_id, trial in DRIFTING.trials.items()
    }
    assert "drifts (not finite)" in to_markdown(dataclasses.replace(DRIFTING, trials=found))


def test_a_drift_is_in_no_comparison_and_no_headline() -> None:
    (table,) = comparison_tables(DRIFTING)
    row = next(row for row in table.rows if row.curve == "deepspeed ZeRO-2")
    assert [cell.text == words.UNKNOWN for cell in row.cells] == [False, True]
    first, *others = words.headlines(DRIFTING)
    assert "ZeRO-2" not in first
    assert not [text for text in others if text.startswith("deepspeed ZeRO-2")]


@pytest.mark.parametrize(("name", "drawn"), [("epoch-seconds", 1), ("throughput", 1), ("speedup", 0)])
def test_a_drift_is_a_hollow_point_off_every_line(name: str, drawn: int) -> None:
    figure = next(figure for figure in drifting_figures() if figure.name == f"strong-micro-{name}")
    hollow = [
        layer for layer in figure.spec["layer"] if layer["mark"]["type"] == "point" and not layer["mark"]["filled"]
    ]
    assert len(hollow) == drawn
    assert ("hollow: drifts" in figure.spec["title"]["subtitle"]) is bool(drawn)
    assert len([text for text in figure.text if "loss differs: 1 %" in text]) == drawn


def test_rows_of_charts_say_what_drifts() -> None:
    rows = chart_data.measured(DRIFTING, DRIFTING.curves, chart_data.QUANTITIES[0])
    assert [(row["series"], row["gpus"]) for row in rows if row["drift"]] == [("deepspeed ZeRO-2", 2)]


def test_the_contract_carries_the_drift_of_every_trial() -> None:
    rows = trial_rows(DRIFTING)
    found = {(row["engine"], row["zero_stage"], row["gpus"]): row for row in rows}
    drifts, reference = found["deepspeed", 2, 2], found["ddp", None, 2]
    assert (drifts["drift"], drifts["drift_reference"], drifts["drift_tolerance"]) == (
        "drifts", reference["trial"], 1e-5,
    )  # fmt: skip
    assert drifts["drift_difference"] == pytest.approx(0.01)
    assert drifts["speedup"] is None
    assert (reference["drift"], reference["drift_difference"]) == ("reference", None)
    assert found["none", None, 1]["drift"] == "reference"
    assert {row["drift"] for row in rows} == {"reference", "agrees", "drifts"}


def test_the_contract_tells_what_accelerate_stands_for() -> None:
    trial = make_trial("accelerate", 2, accelerate_backend="deepspeed", zero_stage=3, offload="parameters")
    (row,) = trial_rows(analyse(make_results([(make_curve([trial]), [trial])], [steady_run(trial, 0.1)])))
    assert [row[key] for key in ("engine", "accelerate_backend", "zero_stage", "offload")] == [
        "accelerate", "deepspeed", 3, "parameters",
    ]  # fmt: skip
