"""95 % intervals in charts: what is drawn is what the analysis and the JSON say, and nothing from fewer than 3 runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from explained_factory import batch_study
from results_factory import explained_run, make_curve, make_results, make_trial, one_curve
from vitscale.analysis import Analysis, analyse
from vitscale.report import resource_data
from vitscale.report.chart_data import QUANTITIES
from vitscale.report.contract import to_json
from vitscale.report.drawing import draw
from vitscale.report.figure import Figure
from vitscale.report.resource_charts import resource_figures
from vitscale.report.resource_data import RESOURCES
from vitscale.report.scaling_charts import scaling_figure
from vitscale.report.waterfall_charts import waterfall_figure
from vitscale.store.results import Run

FACTORS = [0.96, 1.0, 1.04]


def scattered(repeats: int) -> Analysis:
    """One rank and two, whose forward pass and transfer differ from run to run."""
    trials, runs = [make_trial(gpus=1), make_trial(gpus=2)], []
    for repeat, factor in enumerate(FACTORS[:repeats]):
        alone = {"forward": 0.03 * factor, "backward": 0.05}
        runs.append(explained_run(trials[0], [alone], repeat=repeat))
        runs.append(explained_run(trials[1], [alone | {"wire": 0.02 * factor**2}] * 2, repeat=repeat))
    return analyse(make_results([(make_curve(trials), trials)], runs))


def heated(repeats: int) -> Analysis:
    """Runs on GPUs of 0.5 J per image times a factor of each run."""

    def heat(run: Run) -> Run:
        def line(own: Any) -> Any:
            joules = own.energy.joules * FACTORS[run.header.repeat]
            return own.model_copy(update={"energy": own.energy.model_copy(update={"joules": joules})})

        ranks = tuple(r.model_copy(update={"resources": tuple(map(line, r.resources))}) for r in run.ranks)
        return run.model_copy(update={"ranks": ranks})

    study = batch_study([16], [1, 2], device="cuda", repeats=repeats)
    return analyse(study.model_copy(update={"runs": tuple(map(heat, study.runs))}))


def waterfall_of(analysis: Analysis) -> tuple[Figure, list[dict[str, Any]]]:
    """With its rows."""
    found = waterfall_figure(analysis, "strong-micro")
    assert found is not None
    (rows,) = found.spec["datasets"].values()
    return found, list(rows)


def energy_of(analysis: Analysis) -> tuple[Figure, list[dict[str, Any]]]:
    """With its rows."""
    (found,) = [one for one in resource_figures(analysis, analysis.curves) if one.name == "energy"]
    return found, resource_data.used(analysis, analysis.curves, RESOURCES[2])


def caps(figure: Figure, folder: Path) -> int:
    """How many ends of intervals a picture shows."""
    (path,) = draw([figure], folder, ["svg"])
    return len(re.findall('aria-roledescription="tick"', path.read_text(encoding="utf-8")))


def test_points_of_a_waterfall_have_the_intervals_that_json_says(tmp_path: Path) -> None:
    analysis = scattered(3)
    (told,) = json.loads(to_json(analysis))["waterfalls"]
    figure, drawn = waterfall_of(analysis)
    rows = {row["step"]: row for row in drawn}
    for factor in told["factors"]:
        row = rows[factor["name"]]
        assert row["low"] == pytest.approx(row["start"] - 100 * factor["points_high"])
        assert row["high"] == pytest.approx(row["start"] - 100 * factor["points_low"])
        assert row["right"] >= row["high"]  # the label stands beside it
    measured = rows["measured"]
    assert (measured["low"], measured["high"]) == pytest.approx(
        (100 * told["efficiency_low"], 100 * told["efficiency_high"])
    )
    assert rows["wire"]["high"] - rows["wire"]["low"] > 1
    assert rows["ideal"]["low"] is None
    assert caps(figure, tmp_path) == 2 * (len(rows) - 1)


def test_energy_per_image_has_the_interval_that_json_says(tmp_path: Path) -> None:
    analysis = heated(3)
    told = {trial["gpus"]: trial for trial in json.loads(to_json(analysis))["trials"]}
    figure, rows = energy_of(analysis)
    assert [row["gpus"] for row in rows] == [1, 2]
    for row in rows:
        of = told[row["gpus"]]
        ends = of["joules_per_image_low"], of["joules_per_image_high"]
        assert (row["low"], row["high"]) == pytest.approx(ends)
        assert row["low"] < 0.5 * 0.96  # Student's t of three runs is wider than they are
        assert row["spread"].startswith("95 % interval 0.4")
    assert caps(figure, tmp_path) == 4


@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_runs_have_no_bars(repeats: int, tmp_path: Path) -> None:
    for figure, rows in (waterfall_of(scattered(repeats)), energy_of(heated(repeats))):
        assert all(row["low"] is None for row in rows)
        assert caps(figure, tmp_path) == 0


def test_an_end_that_is_cut_has_no_cap(tmp_path: Path) -> None:
    # Two runs that differ twofold have an interval of more than a thousandfold; those of 2 ranks are alike.
    analysis = analyse(one_curve({1: [0.1, 0.2], 2: [0.1, 0.1]}))
    figure = scaling_figure(analysis, "strong-micro", analysis.curves, QUANTITIES[0])
    assert figure is not None
    assert caps(figure, tmp_path) == 2
