"""Utilisation, memory and energy by ranks: from records on, by hand; what is unavailable has no chart and a reason."""

from __future__ import annotations

from typing import Any

import pytest

from explained_factory import NO_ENERGY, NO_GPU, batch_study
from results_factory import one_curve
from vitscale.analysis import Analysis, analyse
from vitscale.report import resource_data
from vitscale.report.resource_charts import resource_figures
from vitscale.report.resource_data import RESOURCES

UTILISATION, MEMORY, ENERGY = RESOURCES


def on_cpu() -> Analysis:
    return analyse(batch_study([16], [1, 2]))


def on_gpu(*gpus: int) -> Analysis:
    return analyse(batch_study([16], gpus or (1, 2), device="cuda"))


def rows(analysis: Analysis, resource: resource_data.Resource) -> list[tuple[Any, ...]]:
    return [
        (row["kind"], row["gpus"], pytest.approx(row["value"]), row["low"], row["high"])
        for row in resource_data.used(analysis, analysis.curves, resource)
    ]


def test_utilisation_of_processors_is_the_mean_over_ranks_from_the_lowest_to_the_highest() -> None:
    """Rank 0 computes 80 % of the time, rank 1 70 %."""
    kind = "CPU: threads that compute"
    assert rows(on_cpu(), UTILISATION) == [
        (kind, 1, 0.8, None, None),
        (kind, 2, 0.75, pytest.approx(0.7), pytest.approx(0.8)),
    ]
    two = resource_data.used(on_cpu(), on_cpu().curves, UTILISATION)[1]
    assert (two["shown"], two["spread"]) == ("75 %", "70 % (rank 1) to 80 % (rank 0)")


def test_memory_on_cpu_is_resident_memory_of_the_rank_that_needs_most() -> None:
    assert rows(on_cpu(), MEMORY) == [
        ("resident (RSS)", 1, 1.0, None, None),
        ("resident (RSS)", 2, 2.0, 1.0, 2.0),
    ]


def test_memory_on_gpus_is_allocated_reserved_and_of_the_whole_device() -> None:
    assert rows(on_gpu(2), MEMORY) == [
        ("GPU, allocated", 2, 2.0, 1.0, 2.0),
        ("GPU, reserved", 2, 4.0, None, None),
        ("GPU, whole device", 2, 10.0, None, None),
    ]


def test_energy_is_drawn_where_it_is_known() -> None:
    assert [row[:3] for row in rows(on_gpu(), ENERGY)] == [("energy", 1, 0.5), ("energy", 2, 0.5)]
    assert rows(on_cpu(), ENERGY) == []
    assert [figure.name for figure in resource_figures(on_cpu(), on_cpu().curves)] == ["utilisation", "memory"]


def test_every_rank_is_a_point_and_of_many_only_the_ends() -> None:
    analysis = on_gpu(1, 4)
    points = [row for row in resource_data.rank_points(analysis, analysis.curves, MEMORY) if row["gpus"] == 4]
    assert [(row["rank"], row["value"]) for row in points] == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    assert not [row for row in resource_data.rank_points(analysis, analysis.curves, MEMORY) if row["gpus"] == 1]
    crowd = analyse(batch_study([8], [17], epochs=6))
    ends = resource_data.rank_points(crowd, crowd.curves, MEMORY)
    assert [(row["rank"], row["value"]) for row in ends] == [(0, 1.0), (16, 17.0)]


def test_the_figures_say_in_words_what_they_show() -> None:
    found = {figure.name: figure for figure in resource_figures(on_gpu(), on_gpu().curves)}
    assert set(found) == {"utilisation", "memory", "energy"}
    assert (
        "strong-micro, ddp, 2 ranks, GPU: a kernel runs: 85 %; 80 % (rank 1) to 90 % (rank 0)"
        in found["utilisation"].text
    )
    assert found["energy"].text == (
        "strong-micro, ddp, 1 rank, energy: 0.500 J",
        "strong-micro, ddp, 2 ranks, energy: 0.500 J",
    )
    assert all(figure.section == "resources" for figure in found.values())


def test_kinds_stand_side_by_side_and_batch_policies_below_each_other() -> None:
    (figure,) = [one for one in resource_figures(on_gpu(), on_gpu().curves) if one.name == "memory"]
    assert figure.spec["facet"]["field"] == "kind"
    results = batch_study([16], [1, 2], device="cuda")
    weak = results.study.curves[0].model_copy(update={"mode": "weak"})
    both = analyse(
        results.model_copy(
            update={"study": results.study.model_copy(update={"curves": (results.study.curves[0], weak)})}
        )
    )
    (figure,) = [one for one in resource_figures(both, both.curves) if one.name == "memory"]
    assert figure.spec["facet"]["column"]["field"] == "kind"
    assert figure.spec["facet"]["row"]["sort"] == ["strong-micro", "weak"]


def test_runs_that_recorded_nothing_have_no_chart() -> None:
    analysis = analyse(one_curve({1: [0.1], 2: [0.1]}))
    assert resource_figures(analysis, analysis.curves) == []


def test_the_reasons_come_from_the_records() -> None:
    used = next(iter(on_cpu().trials.values())).resources
    assert used is not None
    assert (used.energy_reason, used.gpu_reason) == (NO_ENERGY, NO_GPU)
