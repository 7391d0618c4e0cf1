"""`report --json` of small results, against what it said when the file beside this was written: what makes it faster
changes no answer. Where the file is missing it is written anew: a change of answers is one that somebody reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from json_values import apart
from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import store
from vitscale.analysis import analyse
from vitscale.base import program
from vitscale.pages.contract import to_json
from vitscale.prediction.answering import forecast
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit

GOLDEN = Path(__file__).parent / "golden/report.json"
STEPS = {1: [0.1, 0.103, 0.099], 2: [0.112, 0.11, 0.111], 4: [0.124, 0.13, 0.127, 0.125]}


def told(folder: Path) -> str:
    write_results(resolved_study(STEPS), folder)
    results = store.load(folder)
    analysis = analyse(results)
    return to_json(analysis, forecast(fit(evidence_of(folder, analysis)))) + "\n"


def test_the_json_of_small_results_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    now = told(tmp_path / "results")
    if not GOLDEN.exists():
        GOLDEN.write_text(now, encoding="utf-8")
        pytest.fail(f"{GOLDEN} is written: read what is new in it")
    content = json.loads(now)
    assert content.pop("program") == program.identity()  # which differs from commit to commit
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    golden.pop("program", None)
    assert list(apart(content, golden)) == []
