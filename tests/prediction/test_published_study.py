"""The published study's 5 to 8 GPUs, predicted from its 1 to 4 by the commands a user has, beside every peer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forks import Prepared

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("VITSCALE_PAPER_DATA") or ROOT.parent / "shared" / "paper")

Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """One per model and series."""
    epochs = FOLDER / "epochs.csv"
    if not epochs.is_file():
        pytest.skip(f"the published study's measurements are not at {FOLDER}; VITSCALE_PAPER_DATA names another folder")
    argv = [str(ROOT / "benchmarks" / "published_study.py"), str(epochs), "--json", "--no-extra-p"]
    told = Prepared.of_all("commands").run({"kind": "script", "argv": argv, "environment": dict(os.environ)}, 300)
    assert told.returncode == 0, told.stderr[-3000:]
    found: list[Row] = json.loads(told.stdout)
    return found


def test_the_baseline_is_the_one_whose_errors_are_known(rows: Sequence[Row]) -> None:
    assert error(of("constant", rows)) == pytest.approx(0.027, abs=0.0005)
    assert max(error([row]) for row in of("constant", rows)) == pytest.approx(0.041, abs=0.0005)


def test_the_error_is_no_worse_than_the_baselines_and_of_no_series_above_five_percent(rows: Sequence[Row]) -> None:
    ours = of("vitscale", rows)
    assert len(ours) == 4
    assert error(ours) <= error(of("constant", rows))
    assert max(error([row]) for row in ours) <= 0.05


def test_future_runs_lie_within_the_intervals(rows: Sequence[Row]) -> None:
    held = [inside for row in of("vitscale", rows) for inside in row["held"][0]]
    assert len(held) == 16
    assert sum(held) >= 13


def test_the_interval_score_is_better_than_every_peers(rows: Sequence[Row]) -> None:
    ours = score(of("vitscale", rows), 0)
    peers = {row["model"] for row in rows} - {"vitscale"}
    assert len(peers) == 5
    for peer in peers:
        for spread in (0, 1):  # from the peer's residuals alone, and with the spread of runs elsewhere known
            assert ours < score(of(peer, rows), spread), (peer, spread)


def of(model: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of the model whose name begins so."""
    return [row for row in rows if row["model"].startswith(model)]


def error(rows: Sequence[Row]) -> float:
    """Mean absolute error, as a share of the run."""
    errors: list[float] = [each for row in rows for each in row["errors"]]
    return sum(errors) / len(errors)


def score(rows: Sequence[Row], spread: int) -> float:
    """Mean interval score under one of the two spreads that peers are given."""
    scores: list[float] = [each for row in rows for each in row["scores"][spread]]
    return sum(scores) / len(scores)
