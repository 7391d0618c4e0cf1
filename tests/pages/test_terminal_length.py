"""`run` and `report` end in 25 lines at most, whatever the study: no identity of a trial, no number broken."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from explained_factory import batch_study
from like_paper_factory import whole_study
from results_factory import rich_study, write_results
from vitscale import runner
from vitscale.analysis import analyse
from vitscale.cli import app
from vitscale.store.results import Results

MOST_LINES = 25


def nothing_ran() -> Results:
    return rich_study().model_copy(update={"runs": ()})


def everything_failed() -> Results:
    """A reason each, and a long one: a message of a library."""
    results = rich_study()
    reason = "rank 0 raised RuntimeError: " + "CUDA error: device-side assert triggered; " * 20
    outcome = {"kind": "failed", "reason": reason}
    runs = tuple(run.model_copy(update={"outcome": run.outcome.model_copy(update=outcome)}) for run in results.runs)
    return results.model_copy(update={"runs": runs})


@functools.cache
def studies() -> dict[str, Callable[[], Results]]:
    return {
        "engines": rich_study,
        "batches": lambda: batch_study([8, 16, 32, 64], [1, 2]),
        "imported": whole_study,
        "nothing ran": nothing_ran,
        "everything failed": everything_failed,
    }


@pytest.mark.parametrize("name", ["engines", "batches", "imported", "nothing ran", "everything failed"])
def test_run_and_report_end_in_25_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = studies()[name]()
    folder = tmp_path / "results"
    write_results(results, folder)
    monkeypatch.setenv("COLUMNS", "80")
    ended = [CliRunner().invoke(app, ["report", str(folder)])]

    outcomes = dict.fromkeys(range(240), "failed")
    done = SimpleNamespace(outcomes=outcomes, failures=outcomes, done_now=outcomes, skipped=outcomes, ended="")
    monkeypatch.setattr(runner, "run", lambda *_of, **_options: done)
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "end"\n[model]\nname = "vit-ti16"\n[data]\nname = "digits"\n[train]\nmicro_batch = 8\nepochs = 1\n'
        "[scaling]\ngpus = [1]\n"
    )
    ended.append(CliRunner().invoke(app, ["run", str(study), "-o", str(folder)]))

    for answer in ended:
        assert isinstance(answer.exception, SystemExit | None), answer.exception
        lines = answer.stdout.splitlines()
        assert "Report: " in " ".join(lines[-2:]), answer.output  # a long path has a line of its own
        assert len(lines) <= MOST_LINES, answer.stdout
        assert all(len(line) <= 80 for line in lines if str(folder) not in line)
        prose = re.sub(r"runs/[\w-]+/log\.txt", "", answer.stdout)
        assert not [trial for trial in results.study.trials if trial in prose]


def test_warnings_name_trials_as_a_reader_does() -> None:
    """Identities stand only in what a finding is about, which a page folds and JSON tells."""
    for make in studies().values():
        found: Any = analyse(make())
        told = [finding.message + finding.advice for finding in found.findings]
        assert not [trial for trial in found.trials for message in told if trial in message]
