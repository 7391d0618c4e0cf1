"""Where the time of the first answer's steps goes: as `predict` says of the same configuration, on the first screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import cli
from vitscale.prediction.step_shares import shares_in_words


def test_the_largest_part_is_named_first_and_what_is_below_a_per_cent_is_not() -> None:
    shares = {"compute": 0.30, "wait": 0.004, "wire": 0.62, "norm": 0.0, "bubble": 0.0, "rest": 0.076}
    assert shares_in_words(shares, "the first answer") == (
        "In each step of the first answer: 62 % exposed wire, 30 % compute, 8 % the rest."
    )
    assert shares_in_words({}, "the first answer") == ""


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["vitscale", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().out


def test_the_shares_are_those_of_the_predicted_step_and_stand_on_the_first_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "results")
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.14, 0.141], 4: [0.17, 0.171]}), Path(folder))
    asked = ("advise", folder, "--gpus", "8", "--nodes-of", "8", "--epochs", "3")
    advice = json.loads(said(monkeypatch, capsys, *asked, "--json"))
    shares: dict[str, float] = advice["step_shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=0.011)

    first: dict[str, Any] = advice["answers"][0]
    changes = ("--micro-batch", str(first["micro_batch"]), "--engine", first["engine"])
    predicted = json.loads(said(monkeypatch, capsys, "predict", folder, *asked[2:6], *changes, "--json"))
    (prediction,) = predicted["predictions"]
    for part in ("compute", "wire", "wait"):
        seconds = prediction[f"{part}_seconds"]
        assert shares[part] == pytest.approx(seconds / prediction["step_seconds"], rel=1e-6), part

    lines = said(monkeypatch, capsys, *asked).splitlines()
    assert len(lines) <= 25
    assert shares_in_words(shares, "the first answer") in " ".join(lines)
