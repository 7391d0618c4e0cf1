"""What the first screen says agrees with itself, or says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prediction_factory import resolved_study
from results_factory import rich_study
from vitscale.advice.pipeline import advised_from
from vitscale.advice.request import Request
from vitscale.analysis import analyse
from vitscale.prediction.fitting import fit
from vitscale.prediction.sources import evidence_of
from vitscale.present.document import Bullets, Section, Table
from vitscale.report.answers import what_next, what_to_choose
from vitscale.report.document import report_document
from vitscale.store.results import Results


def lines_of(section: Section) -> list[str]:
    return [item for block in section.blocks if isinstance(block, Bullets) for item in block.items]


def chosen_and_next(results: Results, tmp_path: Path, large_batch: bool = False) -> tuple[list[str], list[str]]:
    analysis = analyse(results)
    asked = Request(max_gpus=2, large_batch=large_batch)
    advice = advised_from(fit(evidence_of(tmp_path, results, analysis)), analysis, asked)
    return lines_of(what_to_choose(analysis)), lines_of(what_next(analysis, advice, tmp_path))


def test_where_advice_keeps_another_global_batch_it_says_why(tmp_path: Path) -> None:
    """1,024 images make 128 steps of 8 and 64 steps of 16: fewer than 100 are large-batch training."""
    results = resolved_study({1: [0.05, 0.05, 0.05], 2: [0.06, 0.06, 0.06]})
    chosen, then = chosen_and_next(results, tmp_path)
    assert chosen[0].startswith("Fastest measured: ddp, 2 ranks, micro-batch 8: 3.84 s an epoch")
    assert chosen[0].endswith(" (global batch 16, 3 runs).")
    assert " (global batch 8): " in then[0]
    assert then[0].endswith(
        " The fastest measured has a global batch of 16: only 64 steps an epoch (--large-batch allows it)."
    )

    chosen, then = chosen_and_next(results, tmp_path, large_batch=True)
    assert then[0].startswith("Fastest for 3 epochs with start-up: ddp, 2 ranks, micro-batch 8 (global batch 16): ")
    assert "The fastest measured" not in then[0]


def test_too_few_runs_come_before_what_they_cannot_settle(tmp_path: Path) -> None:
    _, then = chosen_and_next(resolved_study({1: [0.05, 0.05], 2: [0.06, 0.06]}), tmp_path)
    assert then[0] == "2 trials of 2 with fewer than 3 runs: set repeats = 3."
    assert then[1].startswith("Fastest for 3 epochs")


def test_every_run_stands_once_below_its_trial_also_where_trials_read_alike() -> None:
    analysis = analyse(rich_study())
    first = next(iter(analysis.trials.values())).trial
    alike = replace(
        analysis, curves=(), trials={key: replace(result, trial=first) for key, result in analysis.trials.items()}
    )
    for told in (analysis, alike):
        sections = [block for block in report_document(told).blocks if isinstance(block, Section)]
        ((table,),) = (section.blocks for section in sections if section.title == "Every run")
        assert isinstance(table, Table)
        logs = sorted(row[-1].text for _, row in table.rows)
        assert logs == sorted(record.header.log for trial in told.trials.values() for record in trial.records)
        for label, row in table.rows:
            trial = told.trials[row[-1].text.partition("/")[2][:12]]
            assert f"{trial.trial.world.size} rank" in label
            assert f"batch {trial.trial.global_batch}" in label
