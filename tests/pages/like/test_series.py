"""What the figures see in the curves: place, workload, and costs against one GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from like_paper_factory import beyond_one_host, paper_curve, paper_study, whole_study
from results_factory import rich_study
from vitscale.analysis import analyse
from vitscale.pages.like.series import FigureSeries, all_series, distinct_series_names, published_points
from vitscale.store.results import Results


def series(results: Results) -> list[FigureSeries]:
    return all_series(analyse(results))


def test_curves_are_placed_by_their_hosts() -> None:
    cells = {1: [0.8], 2: [0.8]}
    study = paper_study(
        paper_curve(cells, dataset="cifar10"),
        paper_curve(cells, dataset="cifar100", spread=True),
        paper_curve(cells, dataset="digits", spread=True, devices=("Slow GPU", "Fast GPU")),
    )
    assert [(one.dataset, one.hosts) for one in series(study)] == [
        ("cifar10", "one host"),
        ("cifar100", "one GPU a host"),
        ("digits", "several unlike hosts"),
    ]


def test_a_curve_that_grows_out_of_one_host_is_two_series() -> None:
    found = series(paper_study(beyond_one_host(paper_curve({1: [0.8], 2: [0.8], 4: [0.8]}), 2)))
    assert [(one.hosts, [member.gpus for member in one.members]) for one in found] == [
        ("one host", [1, 2]),
        ("several like hosts", [1, 2, 4]),
    ]
    assert distinct_series_names(found) == ["one host", "several hosts"]


def test_one_gpu_is_borrowed_from_the_twin_in_one_host() -> None:
    study = paper_study(
        paper_curve({1: [0.8], 2: [0.82]}, dataset="cifar100"),
        paper_curve({2: [0.84], 4: [1.0]}, dataset="cifar100", spread=True),
    )
    spread = series(study)[1]
    assert [member.gpus for member in spread.members] == [1, 2, 4]
    # 1024 images at 16 a GPU: 64, 32 and 16 steps.
    speedups = [member.speedup_over_base.value for member in spread.members if member.speedup_over_base is not None]
    assert speedups == pytest.approx([1, 64 * 0.8 / (32 * 0.84), 64 * 0.8 / 16])


def test_unlike_devices_are_not_held_against_each_other_and_the_reason_is_told() -> None:
    study = paper_study(paper_curve({1: [0.8], 2: [0.8]}, devices=("Slow GPU", "Fast GPU")))
    one, two = series(study)[0].members
    assert one.speedup_over_base is not None
    assert two.speedup_over_base is None
    assert "Fast GPU" in two.why_not_compared


def test_strong_series_have_speedups_and_weak_ones_efficiencies_as_the_analysis_has_them() -> None:
    analysis = analyse(whole_study())
    for one in all_series(analysis):
        if one.hosts != "one host":
            continue
        for member, point in zip(one.members, one.curve.points, strict=True):
            assert member.speedup_over_base == (point.efficiency if one.mode == "weak" else point.speedup)


def test_names_tell_what_differs_and_nothing_else() -> None:
    found = series(whole_study())
    assert distinct_series_names(found[:2]) == ["micro-batch 16", "micro-batch 64"]
    assert distinct_series_names(found[3:]) == ["one host", "several hosts"]
    assert distinct_series_names(found[:1]) == ["CIFAR-10, micro-batch 16"]
    assert distinct_series_names([found[0], found[0]]) == [f"{found[0].curve.name} (1)", f"{found[0].curve.name} (2)"]


def test_unlike_gpus_are_named_only_where_nothing_else_tells_curves_apart() -> None:
    """Two batch sizes, each on unlike GPUs of its own; then one batch size on both."""

    def pair(micro_batch: int, other: str) -> Any:
        return paper_curve({1: [0.8], 2: [0.8]}, spread=True, micro_batch=micro_batch, devices=("Slow GPU", other))

    assert distinct_series_names(series(paper_study(pair(16, "Fast GPU"), pair(64, "Old GPU")))) == [
        "micro-batch 16",
        "micro-batch 64",
    ]
    both = [series(paper_study(pair(16, other)))[0] for other in ("Fast GPU", "Old GPU")]
    assert distinct_series_names(both) == ["Slow GPU and Fast GPU", "Slow GPU and Old GPU"]


def test_names_of_all_curves_of_a_study_are_distinct() -> None:
    found = [one for one in series(rich_study()) if one.mode == "weak"]
    assert len(set(distinct_series_names(found))) == len(found) > 1


def test_what_was_published_of_one_gpu_a_host_is_not_of_hosts_with_several() -> None:
    cells = {1: [0.8], 2: [0.8], 4: [0.8]}
    workload: dict[str, Any] = {"dataset": "cifar100", "micro_batch": 64}
    _, over_pairs = series(paper_study(beyond_one_host(paper_curve(cells, **workload), 2)))
    assert (over_pairs.hosts, published_points([over_pairs]).facts) == ("several like hosts", ())
    (over_single,) = series(paper_study(paper_curve(cells, spread=True, **workload)))
    ((_, facts),) = published_points([over_single]).facts
    assert {fact.layout for fact in facts if fact.gpus > 1} == {"one-gpu-per-node"}


def test_curves_without_runs_are_no_series() -> None:
    study = whole_study()
    assert series(study.model_copy(update={"runs": ()})) == []


def test_published_measurements_of_unlike_hosts_are_known_though_their_devices_have_one_name() -> None:
    """Imported, they name one GPU for all ranks; their times give them away."""
    curve, trials, runs = paper_curve({1: [0.8], 2: [0.8]}, spread=True)
    curve = curve.model_copy(update={"labels": {**curve.labels, "cluster": "tesla"}})
    analysis = analyse(paper_study((curve, trials, runs)))
    assert [one.hosts for one in all_series(analysis)] == ["one GPU a host"]
    published = {1: 712.92, 2: 916.4}
    timed = {
        identity: dataclasses.replace(
            trial, epoch_seconds=dataclasses.replace(trial.epoch_seconds, value=published[trial.trial.world.size])
        )
        for identity, trial in analysis.trials.items()
        if trial.epoch_seconds is not None
    }
    known = all_series(dataclasses.replace(analysis, trials=timed))
    assert [one.hosts for one in known] == ["several unlike hosts"]
