"""Many curves stay readable, and a trial that trains something else is marked wherever it is shown."""

from __future__ import annotations

import dataclasses
import functools
import html
import math

import pytest

from report_forms import markdown, terminal, views
from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.pages import sentences
from vitscale.pages.answers import engine_sentences, scaling_of
from vitscale.pages.charts.scaling import MEASURES, measured_rows
from vitscale.pages.contract import trial_rows
from vitscale.pages.tables import comparison_tables, mode_tables
from vitscale.present import units
from vitscale.present.document import FigureView

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
    return analyse(make_results(curves, runs))


EQUAL = study()
DRIFTING = study(("deepspeed", 2, 2))


@functools.cache
def drifting_views() -> dict[str, FigureView]:
    """They are drawn once and only read."""
    return views(DRIFTING)


# --- many curves ---------------------------------------------------------------------------------------------------


def test_the_table_holds_every_curve_against_one() -> None:
    (table,) = comparison_tables(EQUAL)
    assert table.title == "strong-micro: times as fast as ddp"
    assert [column.name for column in table.columns] == ["curve", "1 rank", "2 ranks"]
    assert [row[0].text for _, row in table.rows] == [
        "fsdp2", "deepspeed ZeRO-0", "deepspeed ZeRO-1", "deepspeed ZeRO-2", "deepspeed ZeRO-3", "plain (no wrapper)",
    ]  # fmt: skip
    fsdp2, *_, plain = (row[1:] for _, row in table.rows)
    assert str(fsdp2[1]) == f"0.99x (slower, 0.99{units.DASH}0.99)"
    assert str(plain[0]).startswith("1.01x (faster, ")
    assert str(plain[1]) == units.UNKNOWN


def test_what_is_no_difference_is_called_so() -> None:
    assert "0.99x (one run)" in markdown(study(repeats=1))
    (alike,) = comparison_tables(study(slower=0.0, scatter=0.05))
    assert str(next(alike.rows)[1][1]).startswith(f"1.00x (no difference, 0.90{units.DASH}1.1")


def test_of_many_curves_one_sentence_says_who_is_faster() -> None:
    (first,) = engine_sentences(EQUAL)
    assert first.startswith(
        "strong-micro, 2 ranks, against ddp: slower: fsdp2 (0.99x, 0.99 to 0.99); "
        "deepspeed ZeRO-0 (0.98x, 0.98 to 0.98); "
    )


def test_markdown_has_the_comparisons_as_a_table() -> None:
    text = markdown(EQUAL)
    assert (
        "### strong-micro: times as fast as ddp\n\n| curve | 1 rank | 2 ranks |\n|:--|--:|--:|\n| fsdp2 | 0.99x "
        in text
    )
    assert text.count("as fast as deepspeed") == 0


def test_of_many_curves_one_ideal_time_is_drawn_and_said_whose() -> None:
    epoch = views(EQUAL)["strong-micro-epoch-seconds"]
    assert "dashed: ideal of ddp" in epoch.subtitle
    assert {row["series"] for row in epoch.spec["datasets"]["ideal"]} == {"ddp"}


# --- equality ------------------------------------------------------------------------------------------------------


def test_that_all_agree_is_said() -> None:
    sentence = (
        "Equality: over the first 20 steps the losses of 11 trials are those of a trial that must compute the same, "
        "exactly."
    )
    assert sentences.equality_sentence(EQUAL) == sentence
    assert sentence in html.unescape(markdown(EQUAL))
    assert sentences.equality_sentence(DRIFTING) == sentence.replace("11", "10").replace("exactly", "exactly; 1 drifts")


def test_a_drift_stands_in_the_table_beside_its_own_times() -> None:
    table = mode_tables(DRIFTING)["strong-micro"]
    rows = [row for label, row in table.rows if label == "deepspeed ZeRO-2" and row[0].text == "2"]
    cells = dict(zip((column.heading for column in table.columns), rows[0], strict=True))
    assert str(cells["speedup"]) == "drifts (1 % off)"
    assert cells["efficiency"].text == units.UNKNOWN
    assert cells["epoch (s)"].text != units.UNKNOWN
    assert "drifts (1 % off)" in markdown(DRIFTING)


def test_a_drift_fits_into_a_narrow_terminal() -> None:
    """The first screen warns of it, whichever curves it has room for; with all curves its row says so too."""
    first_screen, whole = terminal(DRIFTING), terminal(DRIFTING, verbose=True)
    assert max(map(len, first_screen)) <= 80
    assert "1 trial of 13 did not train the same. deepspeed ZeRO-2" in " ".join(" ".join(first_screen).split())
    assert len([line for line in whole if "drifts (1 % off)" in line]) == 1


def test_a_loss_that_is_not_finite_is_said_to_be() -> None:
    found = {
        trial_id: dataclasses.replace(trial, drift=dataclasses.replace(trial.drift, difference=math.inf))
        for trial_id, trial in DRIFTING.trials.items()
    }
    assert "drifts (not finite)" in markdown(dataclasses.replace(DRIFTING, trials=found))


def test_a_drift_is_in_no_comparison_and_no_headline() -> None:
    (table,) = comparison_tables(DRIFTING)
    row = next(row for _, row in table.rows if row[0].text == "deepspeed ZeRO-2")
    assert [cell.text == units.UNKNOWN for cell in row[1:]] == [False, True]
    assert "ZeRO-2" not in engine_sentences(DRIFTING)[0]
    assert not any(curve.name == "deepspeed ZeRO-2" and scaling_of(DRIFTING, curve) for curve in DRIFTING.curves)


@pytest.mark.parametrize(("name", "drawn"), [("epoch-seconds", 1), ("throughput", 1), ("speedup", 0)])
def test_a_drift_is_a_hollow_point_off_every_line(name: str, drawn: int) -> None:
    view = drifting_views()[f"strong-micro-{name}"]
    hollow = [layer for layer in view.spec["layer"] if layer["mark"]["type"] == "point" and not layer["mark"]["filled"]]
    assert len(hollow) == drawn
    assert ("hollow: drifts" in view.subtitle) is bool(drawn)
    assert len([text for text in view.text if "loss differs: 1 %" in text]) == drawn


def test_rows_of_charts_say_what_drifts() -> None:
    epoch = next(measure for measure in MEASURES if measure.name == "epoch-seconds")
    rows, _ = measured_rows(DRIFTING, DRIFTING.curves, epoch)
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
