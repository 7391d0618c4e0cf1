"""Which series a figure draws, what stands in for what, and what is said where there is none."""

from __future__ import annotations

import tomllib

import pytest

from like_paper_factory import paper_curve, paper_study, whole_study
from vitscale.analysis import analyse
from vitscale.pages.like.paper import FIGURES
from vitscale.pages.like.selection import Selection, select, steps_for
from vitscale.pages.like.series import all_series
from vitscale.pages.like.study import StudyFigure
from vitscale.store.results import Results
from vitscale.study.sections import ScalingSection

BY_NUMBER = {figure.number: figure for figure in FIGURES}
CELLS = {1: [0.8], 2: [0.8]}


def chosen(number: int | None, results: Results) -> Selection | str:
    return select(BY_NUMBER[number], all_series(analyse(results)))


def workloads(number: int, results: Results) -> list[tuple[str, int, str]]:
    found = chosen(number, results)
    assert isinstance(found, Selection)
    return [(one.dataset, one.micro_batch, one.hosts) for one in found.series]


def test_the_catalogue_has_every_figure_once_and_says_what_it_draws() -> None:
    assert list(BY_NUMBER) == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert all(figure.draws for figure in FIGURES)


def test_each_figure_gets_its_own_workloads() -> None:
    study = whole_study()
    assert workloads(8, study) == [("cifar10", 64, "one host")]
    assert workloads(9, study) == [("cifar10", 64, "one host")]
    assert workloads(12, study) == [("cifar10", 16, "one host")]
    assert workloads(13, study) == [("cifar10", 64, "one host")]
    assert workloads(14, study) == [("cifar100", 64, "one GPU a host")]
    assert workloads(15, study) == [("cifar100", 64, "one host"), ("cifar100", 64, "one GPU a host")]
    assert workloads(16, study) == [("cifar100", 64, "one host")]


@pytest.mark.parametrize("number", [4, 5])
def test_what_is_lacking_is_named_with_what_there_is_and_what_to_do(number: int) -> None:
    found = chosen(number, whole_study())
    assert isinstance(found, str)
    assert "over several hosts" in found
    assert "strong scaling in one host on CIFAR-10 (micro-batch 16 and 64)" in found.partition(" They hold ")[2]
    steps = steps_for(BY_NUMBER[number])
    assert steps[-1] == "# vitscale report --like paper RESULTS"
    assert any("--hostfile" in step for step in steps)


def test_own_datasets_stand_in_where_there_is_none_of_the_studys() -> None:
    study = paper_study(*(paper_curve(CELLS, dataset=name, micro_batch=64) for name in ("digits", "synthetic")))
    first, second = chosen(8, study), chosen(16, study)
    assert isinstance(first, Selection)
    assert isinstance(second, Selection)
    assert ([one.dataset for one in first.series], first.notes) == (["digits"], ("digits in place of CIFAR-10",))
    assert ([one.dataset for one in second.series], second.notes) == (
        ["synthetic"],
        ("synthetic in place of CIFAR-100",),
    )


def test_one_dataset_of_ones_own_has_none_beside_it() -> None:
    study = paper_study(paper_curve(CELLS, dataset="digits", micro_batch=64))
    assert chosen(10, study) == "These results hold one dataset only, digits: there is none to set beside it."
    two = paper_study(*(paper_curve(CELLS, dataset=name, micro_batch=64) for name in ("digits", "synthetic")))
    found = chosen(10, two)
    assert isinstance(found, Selection)
    assert found.notes == ("digits in place of CIFAR-10", "synthetic in place of CIFAR-100")


def test_nothing_stands_in_for_a_dataset_where_the_results_hold_another_of_the_studys() -> None:
    assert isinstance(chosen(16, paper_study(paper_curve(CELLS, dataset="cifar10", micro_batch=64))), str)


def test_the_smallest_and_the_largest_micro_batch_stand_in_for_16_and_64() -> None:
    study = paper_study(*(paper_curve(CELLS, micro_batch=size) for size in (8, 32, 128)))
    assert workloads(12, study) == [("cifar10", 8, "one host")]
    assert workloads(13, study) == [("cifar10", 128, "one host")]
    alone = paper_study(paper_curve(CELLS, micro_batch=8))
    assert workloads(12, alone) == workloads(13, alone) == [("cifar10", 8, "one host")]


def test_16_does_not_stand_in_for_64_of_the_studys_datasets() -> None:
    study = paper_study(paper_curve(CELLS, micro_batch=16))
    assert chosen(13, study) == (
        "These results hold no strong scaling in one host on CIFAR-10 at micro-batch 64. They hold strong scaling in "
        "one host on CIFAR-10 (micro-batch 16)."
    )
    others = chosen(13, paper_study(paper_curve(CELLS, dataset="digits", micro_batch=16)))
    assert isinstance(others, Selection)
    assert others.notes == ("digits in place of CIFAR-10", "16 in place of 64")


def test_one_gpu_count_is_no_scaling() -> None:
    assert chosen(8, paper_study(paper_curve({2: [0.8]}, micro_batch=64))) == (
        "These results hold no strong scaling in one host on CIFAR-10 at micro-batch 64. They hold strong scaling in "
        "one host on CIFAR-10 (micro-batch 64, 2 GPUs alone)."
    )


def test_results_without_runs_lack_everything() -> None:
    empty = whole_study().model_copy(update={"runs": ()})
    for figure in FIGURES:
        found = chosen(figure.number, empty)
        assert isinstance(found, str)
        assert found == "No trial of these results has completed."


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: str(figure.number))
def test_what_to_write_into_the_study_file_is_valid(figure: StudyFigure) -> None:
    read = tomllib.loads("\n".join(steps_for(figure)))
    ScalingSection.model_validate(read["scaling"])
    assert read["scaling"]["mode"] == figure.mode
    datasets = read.get("sweep", {}).get("data.name") or [read[key]["name"] for key in ("data",) if key in read]
    assert datasets == list(figure.datasets)
    assert read.get("train", {}).get("micro_batch") == figure.micro_batch
