"""Results as frames: what was written is in them, and nothing is worked out before it is asked for."""

from __future__ import annotations

import math
import pydoc
from pathlib import Path
from typing import Any

import altair
import polars
import pytest

import vitscale
from prediction_factory import resolved_study
from results_factory import failed_run, make_curve, make_results, make_trial, rich_study, write_results
from vitscale import store
from vitscale.errors import StoreError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "results"
    write_results(resolved_study({1: [0.1, 0.102], 2: [0.104, 0.105]}), path)
    return path


def test_steps_are_those_of_the_record(folder: Path) -> None:
    steps = vitscale.load(folder).steps.collect()
    runs = store.load(folder).runs
    assert steps.height == sum(len(rank.steps) for run in runs for rank in run.ranks)
    run = runs[-1]
    for rank in run.ranks:
        mine = steps.filter(
            (polars.col("trial") == run.header.trial_id)
            & (polars.col("repeat") == run.header.repeat)
            & (polars.col("rank") == rank.rank)
        )
        assert mine["step"].to_list() == [line.step for line in rank.steps]
        assert mine["seconds"].to_list() == [line.seconds for line in rank.steps]
        assert mine["window"].to_list() == [line.window for line in rank.steps]
        assert mine["loss"].to_list() == [line.loss for line in rank.steps]


def test_runs_and_trials_have_the_report_s_figures(folder: Path) -> None:
    loaded = vitscale.load(str(folder))
    assert loaded.runs.collect().height == 4
    trials = loaded.trials.collect()
    by_gpus = dict(zip(trials["gpus"], trials["step_seconds"], strict=True))
    assert by_gpus[1] == pytest.approx(math.sqrt(0.1 * 0.102), rel=1e-6)
    assert isinstance(loaded.trials, polars.LazyFrame)


def test_frames_of_any_results_have_the_same_columns_and_types(folder: Path, tmp_path: Path) -> None:
    """Nothing was measured in one, and no step was told; what is unknown of one is known of another."""
    trial = make_trial()
    failed = make_results([(make_curve([trial], train__bucket=5), [trial])], [failed_run(trial, "failed", "no room")])
    write_results(failed, tmp_path / "failed")
    write_results(rich_study(), tmp_path / "rich")
    bare, rich, plain = (vitscale.load(path) for path in (tmp_path / "failed", tmp_path / "rich", folder))
    assert bare.steps.filter(window="light").collect().height == 0
    assert bare.runs.collect().shape == (0, len(plain.runs.collect_schema()) + 1)
    assert bare.runs.collect_schema()["swept.train.bucket"] == polars.Int64
    for name in ("trials", "runs", "steps"):
        frames = [getattr(each, name).collect() for each in (bare, rich, plain)]
        whole = polars.concat(frames, how="diagonal")
        assert whole.height == sum(frame.height for frame in frames)
        assert polars.Null not in whole.dtypes
    joined = rich.steps.join(rich.runs, on=["trial", "repeat"]).collect()
    assert joined.height == rich.steps.join(rich.runs, on=["trial", "repeat"], how="semi").collect().height > 0


def test_what_the_page_shows_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    folder.with_name("main").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own page
    assert {*names["steps"].collect()["warmup"]} == {False}  # as in every time of the report


def test_a_notebook_shows_its_tables(folder: Path) -> None:
    loaded = vitscale.load(folder)
    assert "2 of 2 trials completed, 4 runs" in repr(loaded)
    assert "| " in loaded._repr_markdown_()


def test_a_notebook_shows_its_charts(folder: Path) -> None:
    charts = vitscale.load(folder).charts
    assert {"scaling", "start-up"} <= {*charts}
    drawn = charts["scaling"]._repr_svg_()
    assert drawn.startswith("<svg")
    assert "Speedup" in drawn
    assert altair.Chart.from_dict(charts["scaling"].spec).to_dict()["datasets"]["rows"]
    assert repr(charts["scaling"]).startswith("<chart scaling: ")


def test_a_wrong_chart_is_answered_with_the_nearest(folder: Path) -> None:
    charts = vitscale.load(folder).charts
    with pytest.raises(KeyError, match=r"unknown chart 'scalin'\. Did you mean 'scaling'"):
        charts["scalin"]
    assert charts.get("scalin") is None


def test_home_is_a_folder_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert repr(vitscale.load(f"~/{folder.name}")) == repr(vitscale.load(folder))


def test_the_package_shows_what_it_offers() -> None:
    assert {"load", "Probe", "lightning_callback"} <= {*dir(vitscale)}
    assert "load(results" in pydoc.plain(pydoc.render_doc(vitscale))


def test_what_holds_no_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        vitscale.load(tmp_path)


def test_the_package_offers_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'loads'"):
        vitscale.loads  # noqa: B018
