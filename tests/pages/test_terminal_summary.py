"""The terminal's table: each curve that is shown stands with the baseline that its speedup refers to, however many."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from explained_factory import batch_study
from report_forms import terminal
from results_factory import make_curve, make_results, make_trial, rich_study, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.pages.answers import terminal_document
from vitscale.present.document import Section, Table
from vitscale.store.results import Results
from vitscale.trial.trial import Mode, Trial


def study_of_policies(*, engines: Sequence[str] = ("ddp", "deepspeed"), with_weak: bool = False) -> Results:
    """Engines on 1 and 2 ranks under two policies, of which one trial an engine is the baseline of both; or three."""
    by_policy: dict[Mode, list[list[Trial]]] = {"strong-micro": [], "strong-global": []}
    for engine in engines:
        alone = make_trial(engine, 1, micro_batch=8)
        by_policy["strong-micro"].append([alone, make_trial(engine, 2, micro_batch=8)])
        by_policy["strong-global"].append([alone, make_trial(engine, 2, micro_batch=4)])
    if with_weak:  # on one rank it has a share of the images
        by_policy["weak"] = [[make_trial(engine, gpus, fraction=gpus / 16) for gpus in (1, 2)] for engine in engines]
    curves = [(make_curve(trials, policy), trials) for policy, of_policy in by_policy.items() for trials in of_policy]
    trials = {trial.identity(): trial for _, members in curves for trial in members}
    runs = [
        steady_run(trial, 0.1 + 0.01 * number, repeat)
        for number, trial in enumerate(trials.values())
        for repeat in range(3)
    ]
    return make_results(curves, runs)


def summary_of(analysis: Analysis) -> Table:
    (table,) = (block for block in terminal_document(analysis).blocks if isinstance(block, Table))
    return table


def rows_of(table: Table) -> list[tuple[str, str, str]]:
    """(policy, curve, ranks) of each row."""
    return [(policy, str(row[0]), str(row[1])) for policy, row in table.rows]


def test_the_baseline_of_both_policies_stands_once_and_above_both() -> None:
    assert rows_of(summary_of(analyse(study_of_policies()))) == [
        ("both", "ddp", "1"),
        ("both", "deepspeed", "1"),
        ("strong-micro", "ddp", "2"),
        ("strong-micro", "deepspeed", "2"),
        ("strong-global", "ddp", "2"),
        ("strong-global", "deepspeed", "2"),
    ]


def test_a_baseline_of_some_policies_of_several_names_them() -> None:
    analysis = analyse(study_of_policies(engines=["ddp"], with_weak=True))
    assert rows_of(summary_of(analysis)) == [
        ("strong-micro, strong-global", "ddp", "1"),
        ("strong-micro", "ddp", "2"),
        ("strong-global", "ddp", "2"),
        ("weak", "ddp", "1"),
        ("weak", "ddp", "2"),
    ]


@pytest.mark.parametrize("batches", [4, 5, 9])
def test_every_curve_that_is_shown_has_its_baseline_and_the_others_are_counted(batches: int) -> None:
    analysis = analyse(batch_study([2**n for n in range(batches)], [1, 2]))
    document = terminal_document(analysis)
    rows = rows_of(summary_of(analysis))
    assert len(rows) == 8
    for baseline, scaled in zip(rows[::2], rows[1::2], strict=True):
        assert (baseline[1], baseline[2], scaled[2]) == (scaled[1], "1", "2")
    counted = {4: "", 5: " (1 more curve)", 9: " (5 more curves)"}[batches]
    assert f"each configuration{counted}" in [block.title for block in document.blocks if isinstance(block, Section)]
    assert f"each configuration{counted} and what else to know." in " ".join(terminal(analysis))


def test_the_fastest_trials_curve_comes_first_where_curves_are_left_out() -> None:
    """The largest of nine micro-batches is the fastest, and the last of the study."""
    analysis = analyse(batch_study([2**n for n in range(9)], [1, 2]))
    assert [row[1] for row in rows_of(summary_of(analysis))] == [
        *("ddp, micro_batch 256",) * 2,
        *("ddp, micro_batch 1",) * 2,
        *("ddp, micro_batch 2",) * 2,
        *("ddp, micro_batch 4",) * 2,
    ]


def test_failures_take_the_place_of_rows_but_not_of_baselines() -> None:
    """Three policies of two engines have 10 rows, and two trials failed: 6 rows, and all sentences on engines."""
    analysis = analyse(rich_study())
    rows = rows_of(summary_of(analysis))
    assert rows[:3] == [("both", "ddp", "1"), ("both", "deepspeed", "1"), ("strong-micro", "ddp", "8")]
    assert len(rows) == 6
    lines = terminal(analysis)
    assert len(lines) <= 25
    assert any("each configuration (3 more curves)" in line for line in lines)
    assert sum("too few repeats to tell ddp from deepspeed" in line for line in lines) == 3


def test_each_speedup_is_the_ratio_to_a_row_of_the_table() -> None:
    """In every study: epoch of its baseline's row / its own epoch."""
    for study in (study_of_policies(), batch_study([2**n for n in range(9)], [1, 2])):
        table = summary_of(analyse(study))
        baselines = {str(row[0]): float(row[3].text) for _, row in table.rows if str(row[1]) == "1"}
        scaled = [row for _, row in table.rows if str(row[1]) == "2"]
        assert scaled
        for row in scaled:
            speedup = float(re.split(r"[ x]", row[4].text)[0])
            assert baselines[str(row[0])] / float(row[3].text) == pytest.approx(speedup, rel=0.02)
