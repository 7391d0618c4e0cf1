"""`report --json` of small results, against what it said when the file beside this was written: what makes it faster
changes no answer. Where the file is missing it is written anew: a change of answers is one that somebody reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import store
from vitscale.analysis import analyse
from vitscale.prediction.answering import forecast
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit
from vitscale.report.contract import to_json

GOLDEN = Path(__file__).parent / "golden/report.json"
STEPS = {1: [0.1, 0.103, 0.099], 2: [0.112, 0.11, 0.111], 4: [0.124, 0.13, 0.127, 0.125]}
CLOSE = 1e-9
"""Relative: processors differ in the last digits of a logarithm."""


def told(folder: Path) -> str:
    write_results(resolved_study(STEPS), folder)
    results = store.load(folder)
    analysis = analyse(results)
    return to_json(analysis, forecast(fit(evidence_of(folder, analysis)))) + "\n"


def apart(now: Any, before: Any, at: str = "") -> Iterator[str]:
    """Where two JSON values differ."""
    if isinstance(now, dict) and isinstance(before, dict) and [*now] == [*before]:
        for key in now:
            yield from apart(now[key], before[key], f"{at}.{key}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for n, (own, other) in enumerate(zip(now, before, strict=True)):
            yield from apart(own, other, f"{at}[{n}]")
    elif isinstance(now, float) and isinstance(before, float):
        if now != pytest.approx(before, rel=CLOSE, abs=0):
            yield f"{at}: {now!r}, not {before!r}"
    elif type(now) is not type(before) or now != before:
        yield f"{at}: {now!r}, not {before!r}"


def test_the_json_of_small_results_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    now = told(tmp_path / "results")
    if not GOLDEN.exists():
        GOLDEN.write_text(now, encoding="utf-8")
        pytest.fail(f"{GOLDEN} is written: read what is new in it")
    assert list(apart(json.loads(now), json.loads(GOLDEN.read_text(encoding="utf-8")))) == []
