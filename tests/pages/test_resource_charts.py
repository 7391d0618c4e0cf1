"""Utilisation, memory and energy by ranks: from records on, by hand; what is unavailable has no chart and a reason."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from explained_factory import NO_ENERGY, NO_GPU, batch_study
from results_factory import one_curve
from vitscale.analysis import Analysis, analyse
from vitscale.pages.charts.resources import RESOURCES, Resource, rank_rows, resource_chart, resource_rows
from vitscale.store.results import Run

BY_NAME = {one.name: one for one in RESOURCES}
UTILISATION, MEMORY, ENERGY = BY_NAME["cpu-utilisation"], BY_NAME["memory-rss"], BY_NAME["energy"]
ALLOCATED = BY_NAME["memory"]


def on_cpu() -> Analysis:
    return analyse(batch_study([16], [1, 2]))


def on_gpu(*gpus: int) -> Analysis:
    return analyse(batch_study([16], gpus or (1, 2), device="cuda"))


def rows(analysis: Analysis, resource: Resource) -> list[tuple[Any, ...]]:
    return [
        (row["gpus"], pytest.approx(row["value"]), row["low"], row["high"])
        for row in resource_rows(analysis, analysis.curves, resource)
    ]


def test_utilisation_of_processors_is_the_mean_over_ranks_from_the_lowest_to_the_highest() -> None:
    """Rank 0 computes 80 % of the time, rank 1 70 %."""
    assert rows(on_cpu(), UTILISATION) == [
        (1, 0.8, None, None),
        (2, 0.75, pytest.approx(0.7), pytest.approx(0.8)),
    ]
    two = resource_rows(on_cpu(), on_cpu().curves, UTILISATION)[1]
    assert (two["shown"], two["spread"]) == ("75 %", "ranks: 70 % to 80 %")


def test_memory_on_cpu_is_resident_memory_of_the_rank_that_needs_most() -> None:
    assert rows(on_cpu(), MEMORY) == [
        (1, 1.0, None, None),
        (2, 2.0, 1.0, 2.0),
    ]


def test_memory_on_gpus_is_allocated_reserved_and_of_the_whole_device() -> None:
    assert rows(on_gpu(2), ALLOCATED) == [(2, 2.0, 1.0, 2.0)]
    assert rows(on_gpu(2), BY_NAME["memory-reserved"]) == [(2, 4.0, None, None)]
    assert rows(on_gpu(2), BY_NAME["memory-device"]) == [(2, 10.0, None, None)]
    assert rows(on_gpu(2), MEMORY) == []


def test_energy_is_drawn_where_it_is_known() -> None:
    assert [row[:2] for row in rows(on_gpu(), ENERGY)] == [(1, 0.5), (2, 0.5)]
    assert rows(on_cpu(), ENERGY) == []
    found = resource_chart(on_cpu(), on_cpu().curves)
    assert found is not None
    assert [view.choices["measure"].value for view in found.views] == ["cpu-utilisation", "memory-rss"]


@pytest.mark.parametrize("repeats", [2, 3])
def test_energy_per_image_has_an_interval_over_three_runs(repeats: int) -> None:
    """0.5 J an image times a factor of each run: the interval is of Student's t with two degrees, of logarithms."""
    factors = (0.96, 1.0, 1.04)[:repeats]

    def heat(run: Run) -> Run:
        def line(own: Any) -> Any:
            joules = own.energy.joules * factors[run.header.repeat]
            return own.model_copy(update={"energy": own.energy.model_copy(update={"joules": joules})})

        ranks = tuple(r.model_copy(update={"resources": tuple(map(line, r.resources))}) for r in run.ranks)
        return run.model_copy(update={"ranks": ranks})

    study = batch_study([16], [1, 2], device="cuda", repeats=repeats)
    analysis = analyse(study.model_copy(update={"runs": tuple(map(heat, study.runs))}))
    logs = [math.log(0.5 * factor) for factor in factors]
    half = 4.303 * statistics.stdev(logs) / math.sqrt(3)
    ends = [pytest.approx(math.exp(statistics.fmean(logs) + side * half), rel=1e-4) for side in (-1, 1)]
    for _, value, *own in rows(analysis, ENERGY):
        assert own == (ends if repeats == 3 else [None, None])
        assert value == pytest.approx(math.exp(statistics.fmean(logs)))


def test_every_rank_is_a_point_and_of_many_only_the_ends() -> None:
    analysis = on_gpu(1, 4)
    points = [row for row in rank_rows(analysis, analysis.curves, ALLOCATED) if row["gpus"] == 4]
    assert [(row["rank"], row["value"]) for row in points] == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    assert not [row for row in rank_rows(analysis, analysis.curves, ALLOCATED) if row["gpus"] == 1]
    crowd = analyse(batch_study([8], [17], epochs=6))
    ends = rank_rows(crowd, crowd.curves, MEMORY)
    assert [(row["rank"], row["value"]) for row in ends] == [(0, 1.0), (16, 17.0)]


def test_the_figures_say_in_words_what_they_show() -> None:
    found = resource_chart(on_gpu(), on_gpu().curves)
    assert found is not None
    by_name = {view.choices["measure"].value: view for view in found.views}
    assert "ddp; 2; 85 %; ranks: 80 % to 90 %" in by_name["gpu-utilisation"].text
    assert by_name["energy"].text == ("ddp; 1; 0.500 J", "ddp; 2; 0.500 J")
    assert by_name["energy"].summary == "Energy per image: highest 0.500 J (ddp, 1 rank)."


def test_batch_policies_are_choices() -> None:
    results = batch_study([16], [1, 2], device="cuda")
    weak = results.study.curves[0].model_copy(update={"mode": "weak"})
    study = results.study.model_copy(update={"curves": (results.study.curves[0], weak)})
    both = analyse(results.model_copy(update={"study": study}))
    found = resource_chart(both, both.curves)
    assert found is not None
    assert [option.label for option in found.controls["batch policy"]] == ["strong-micro", "weak"]


def test_runs_that_recorded_nothing_have_no_chart() -> None:
    analysis = analyse(one_curve({1: [0.1], 2: [0.1]}))
    assert resource_chart(analysis, analysis.curves) is None


def test_the_reasons_come_from_the_records() -> None:
    told = next(iter(on_cpu().trials.values())).resources
    assert told is not None
    assert (told.energy_reason, told.gpu_reason) == (NO_ENERGY, NO_GPU)
