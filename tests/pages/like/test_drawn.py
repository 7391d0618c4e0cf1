"""All figures: each drawn with its data, or a frame that says what it lacks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from explained_factory import batch_study
from like_paper_factory import paper_curve, paper_study, whole_study
from results_factory import ended_in, rich_study
from vitscale.analysis import analyse
from vitscale.pages.like import MeasuredData
from vitscale.pages.like.outputs import FigureOutcome, draw_all, draw_one
from vitscale.pages.like.paper import FIGURES, PAPER
from vitscale.store.results import Results

CELLS = {1: [0.8], 2: [0.8]}


@functools.cache
def whole() -> dict[int, FigureOutcome]:
    """All figures of the whole study: they are made once and only read."""
    drawn = draw_all(PAPER, MeasuredData.of(analyse(whole_study())))
    return {one.study_figure.number or 0: one for one in drawn}


def figure(number: int, results: Results) -> FigureOutcome:
    paper = next(paper for paper in FIGURES if paper.number == number)
    return draw_one(PAPER, paper, MeasuredData.of(analyse(results)))


def layers(spec: Any) -> list[dict[str, Any]]:
    """Every layer with a mark, at any depth."""
    if isinstance(spec, dict):
        own = [spec] if isinstance(spec.get("mark"), dict) else []
        return own + [layer for value in spec.values() for layer in layers(value)]
    return [layer for value in spec for layer in layers(value)] if isinstance(spec, list) else []


def rows(spec: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    data = layer["data"]
    found: list[dict[str, Any]] = spec["datasets"][data["name"]] if "name" in data else data["values"]
    return found


def points(one: FigureOutcome, *, filled: bool) -> list[dict[str, Any]]:
    """Of all views, one after the other."""
    return [
        row
        for view in one.figure.views
        for layer in layers(view.titled)
        if layer["mark"]["type"] == "point" and layer["mark"]["filled"] is filled
        for row in rows(view.titled, layer)
    ]


def test_every_figure_is_there_and_has_data_or_says_what_it_lacks() -> None:
    found = whole()
    assert list(found) == [*range(4, 18)]
    assert {number for number, one in found.items() if one.lack} == {4, 5, 17}
    for one in found.values():
        json.dumps(one.figure.views[0].titled, allow_nan=False)
        assert f"Figure {one.study_figure.number}." in one.figure.views[0].title
        assert one.figure.views[0].text
        texts = [row["text"] for layer in layers(one.figure.views[0].titled) if layer["mark"]["type"] == "text"
                 for row in rows(one.figure.views[0].titled, layer) if "text" in row]  # fmt: skip
        if one.lack is not None:
            said = " ".join(" ".join(texts).split())
            assert said.startswith(" ".join(f"Would show: {one.study_figure.draws}. {one.lack}".split()))
            assert "vitscale run STUDY.toml" in texts[-2]
            assert f"vitscale report --like {one.study_figure.study}" in texts[-1]
        else:
            assert texts == []


@pytest.mark.parametrize("study", [rich_study, lambda: batch_study([16, 64], [1, 2])], ids=["rich", "batches"])
def test_other_studies_are_drawn_with_their_own_workloads(study: Callable[[], Results]) -> None:
    results = study()
    own = figure(8, results)
    assert own.lack is None
    assert "in place of CIFAR-10" in own.figure.views[0].subtitle


def test_epoch_times_and_speedups_by_hand() -> None:
    # 1024 images at 64 a GPU: 16, 8 steps; then 8 GPUs take 2 steps.
    study = paper_study(paper_curve({1: [4.0], 2: [5.0], 8: [8.0]}, micro_batch=64))
    found = points(figure(8, study), filled=True)
    assert [(row["x"], row["value"]) for row in found] == [
        (1, 64.0), (2, 40.0), (8, 16.0), (1, 1.0), (2, pytest.approx(1.6)), (8, pytest.approx(4.0)),
    ]  # fmt: skip


@pytest.mark.parametrize(("mode", "number", "last"), [("strong-micro", 8, 4.0), ("weak", 9, 2.0)])
def test_the_ideal_falls_with_every_gpu_or_stays(mode: Any, number: int, last: float) -> None:
    # 16 steps of a second on one GPU; weak: a tenth of the images, 103 of them in 2 steps.
    one = figure(number, paper_study(paper_curve({1: [1.0], 4: [1.5]}, mode=mode, micro_batch=64)))
    dashed = [layer for layer in layers(one.figure.views[0].titled) if "strokeDash" in layer["mark"]]
    ideal = rows(one.figure.views[0].titled, dashed[0])
    assert ideal[-1]["x"] == pytest.approx(4)
    assert ideal[-1]["value"] == pytest.approx(last)


def test_single_runs_have_no_bar_and_repeated_ones_have() -> None:
    found = whole()
    repeated, single = found[12].figure.views[0].titled, found[14].figure.views[0].titled
    bars = [row for layer in layers(repeated) if layer["mark"]["type"] == "rule"
            for row in rows(repeated, layer) if row["low"] is not None]  # fmt: skip
    assert {row["series"] for row in bars} == {"CIFAR-10, micro-batch 16"}
    assert not [layer for layer in layers(single) if layer["mark"]["type"] == "rule"]
    assert "one run each: no intervals" in single["title"]["subtitle"]


def test_published_points_stand_beside_the_same_workload() -> None:
    hollow = points(whole()[16], filled=False)
    assert [row["value"] for row in hollow][:2] == [1813.93, 892.55]
    assert {row["x"] for row in hollow} == set(range(1, 9))
    assert "Tesla T4" in hollow[0]["what"]
    subtitle = whole()[16].figure.views[0].titled["title"]["subtitle"]
    assert "hollow grey: published (arXiv 2602.21081), Tesla T4, fp32; other hardware" in subtitle


@pytest.mark.parametrize(
    "change", [{"model": "vit-ti16"}, {"image_size": 32}, {"fraction": 0.5}, {"micro_batch": 48}, {"dataset": "digits"}]
)
def test_no_published_point_stands_beside_other_work(change: dict[str, Any]) -> None:
    study = paper_study(paper_curve(CELLS, **{"dataset": "cifar10", "micro_batch": 16, **change}))
    assert points(figure(8, study), filled=False) == []


def test_the_ideal_of_unlike_hosts_is_said_to_be_none() -> None:
    study = paper_study(paper_curve(CELLS, spread=True, devices=("Slow GPU", "Fast GPU")))
    one = figure(4, study)
    assert one.lack is None
    assert "ideal, were every host like the first" in one.figure.views[0].titled["title"]["subtitle"]
    assert "not held against 1: device: Slow GPU against" in one.figure.views[0].summary


def test_hosts_are_compared_count_by_count() -> None:
    one = whole()[15]
    ratios = {row["x"]: row["value"] for row in one.figure.views[0].rows}
    assert ratios == pytest.approx({2: 0.83 / 0.82, 4: 1.0, 8: 0.92 / 0.9})
    assert {row["low"] for row in one.figure.views[0].rows} == {None}


def test_hosts_measured_at_no_common_count_are_not_compared() -> None:
    workload: dict[str, Any] = {"dataset": "cifar100", "micro_batch": 64}
    inside, spread = paper_curve({1: [0.8], 2: [0.8]}, **workload), {4: [0.8], 8: [0.8]}
    one = figure(15, paper_study(inside, paper_curve(spread, spread=True, **workload)))
    assert one.lack is not None
    assert "both in one host and over several" in one.lack


def test_strong_scaling_by_batch_size_has_a_curve_for_each_and_the_parts_of_explained_steps() -> None:
    one = figure(6, batch_study([16, 64], [1, 2]))
    assert one.lack is None
    assert {row["series"] for row in one.figure.views[0].rows} == {"micro-batch 16", "micro-batch 64"}
    (measures, *_) = one.figure.controls.values()
    assert [choice.label for choice in measures] == ["epoch time", "speedup", "parts of a step"]
    parts = [view for view in one.figure.views if view.choices["measure"].value == "parts"]
    assert all(view.title.startswith("Figure 6. Nebula strong scaling by batch size: ") for view in parts)
    assert all("bar" in {layer["mark"]["type"] for layer in layers(view.titled)} for view in parts)
    assert {view.choices["batch"].label for view in parts} == {"micro-batch 16", "micro-batch 64"}


def test_one_batch_size_alone_is_said_to_be_one() -> None:
    assert figure(6, paper_study(paper_curve(CELLS))).lack == (
        "These results hold strong scaling at one micro-batch only: 16."
    )


def test_accuracy_has_both_datasets_in_one_picture_and_loss_a_curve_per_count() -> None:
    found = whole()
    (view,) = found[10].figure.views
    curves = {f"{dataset}, {gpus}" for dataset in ("CIFAR-10", "CIFAR-100") for gpus in ("1 GPU", "4 GPUs", "8 GPUs")}
    assert {(row["series"], row["x"]) for row in view.rows} == {(curve, e) for curve in curves for e in (1, 2, 3)}
    # The factory's held-out accuracy: 0.35, 0.50, 0.65.
    assert {row["epoch"]: row["value"] for row in view.rows} == pytest.approx({1: 0.35, 2: 0.5, 3: 0.65})
    assert "held-out figures" in found[11].figure.views[0].subtitle
    assert {view.choices["measure"].value for view in found[11].figure.views} == {"loss", "accuracy"}
    assert {row["series"] for row in found[11].figure.views[0].rows} == {"1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"}


def test_accuracy_by_micro_batch_is_of_an_epoch_that_all_have() -> None:
    study = paper_study(paper_curve(CELLS, micro_batch=16, epochs=3), paper_curve(CELLS, micro_batch=64, epochs=2))
    one = figure(7, study)
    assert one.lack is None
    assert [(row["series"], row["x"]) for row in one.figure.views[0].rows] == [
        ("1 GPU", 16), ("1 GPU", 64), ("2 GPUs", 16), ("2 GPUs", 64),
    ]  # fmt: skip
    assert {(row["shown"], row["bounds"]) for row in one.figure.views[0].rows} == {("50.0 %", "after epoch 2, 1 run")}
    assert figure(7, paper_study(paper_curve(CELLS))).lack is not None


def test_a_part_of_an_epoch_is_drawn_as_no_epoch() -> None:
    """Two whole epochs and half of a third: there images are no longer equal at equal epochs."""
    study = paper_study(
        *(paper_curve(CELLS, micro_batch=size) for size in (16, 64)),
        paper_curve(CELLS, micro_batch=64, dataset="cifar100"),
    )
    cut = [ended_in(run, [0.35, 0.5, 0.65], fragment=True) for run in study.runs]
    found = study.model_copy(update={"runs": tuple(cut)})
    by_dataset, by_epoch = figure(10, found).figure.views, figure(11, found).figure.views
    assert {row["x"] for view in by_dataset for row in view.rows} == {1, 2}
    assert {row["x"] for view in by_epoch for row in view.rows} == {1, 2}
    (by_batch,) = figure(7, found).figure.views
    assert {(row["shown"], row["bounds"]) for row in by_batch.rows} == {("50.0 %", "after epoch 2, 1 run")}
    none = [ended_in(run, [0.35], fragment=True) for run in study.runs]
    lack = figure(10, study.model_copy(update={"runs": tuple(none)})).lack
    assert lack is not None
    assert lack == "No trial of these results has recorded an accuracy after a whole epoch."


def test_results_without_accuracy_say_so() -> None:
    study = paper_study(*(paper_curve(CELLS, micro_batch=64, dataset=name) for name in ("cifar10", "cifar100")))
    blind = study.model_copy(
        update={
            "runs": tuple(
                run.model_copy(
                    update={
                        "ranks": tuple(
                            rank.model_copy(
                                update={
                                    "epochs": tuple(
                                        line.model_copy(update={"held_out_accuracy": None, "train_accuracy": None})
                                        for line in rank.epochs
                                    )
                                }
                            )
                            for rank in run.ranks
                        )
                    }
                )
                for run in study.runs
            )
        }
    )
    for number in (7, 10, 11):
        lack = figure(number, blind).lack
        assert lack is not None
        assert lack == "No trial of these results has recorded an accuracy after a whole epoch."


def test_records_of_impossible_times_can_be_drawn() -> None:
    study = paper_study(
        paper_curve({1: [1e-200], 2: [1e200, 1e-200], 4: [1.0]}, micro_batch=64),
        paper_curve({1: [1e-200], 2: [1e200, 1e-200], 4: [1.0]}, micro_batch=64, dataset="cifar100"),
        paper_curve({2: [1e200], 4: [1e-200, 1e200]}, micro_batch=64, dataset="cifar100", spread=True),
    )
    for number in (8, 10, 13, 14, 15, 16):
        assert figure(number, study).lack is None
        json.dumps(figure(number, study).figure.views[0].titled, allow_nan=False)
