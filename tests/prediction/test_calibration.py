"""Intervals hold what they promise, and errors beat the peers', on simulated studies: a small run of the benchmark."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forks import Prepared

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "calibration.py"
STUDIES = 16
FIRST_SEED = 20_000
"""Neither those of the published table nor those that the model was looked at with."""


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, list[list[float]]]]:
    """By model: a row per study, with 4, 16 and 64 times the measured ranks."""
    argv = [str(BENCHMARK), "--studies", str(STUDIES), "--first-seed", str(FIRST_SEED), "--json"]
    told = Prepared.of_all("commands").run({"kind": "script", "argv": argv, "environment": dict(os.environ)}, 300)
    assert told.returncode == 0, told.stderr[-3000:]
    return {one["model"]: one for one in json.loads(told.stdout)}


@pytest.mark.parametrize("network", ["checked", "unknown"])
def test_ninety_percent_intervals_hold_about_that(
    answers: dict[str, dict[str, list[list[float]]]], network: str
) -> None:
    # The three predictions of a study share its cluster: 16 studies are worth 16 to 48 independent ones. Of 16 at 90 %
    # fewer than 12 hold once in 60 times, and all do once in 5: the table of 500 in docs/calibration.md tells more.
    ours = answers[f"vitscale, network {network}"]
    for held in ("future_held", "mean_held"):
        assert mean(ours[held]) >= 0.75, held


def test_intervals_are_no_wider_than_they_need_be(answers: dict[str, dict[str, list[list[float]]]]) -> None:
    # The width alone is part of the score: intervals of +-15 % that hold everything have 0.3.
    assert mean(answers["vitscale, network checked"]["scores"]) < 0.25


def test_a_checked_network_makes_predictions_closer(answers: dict[str, dict[str, list[list[float]]]]) -> None:
    checked, unknown = (answers[f"vitscale, network {network}"] for network in ("checked", "unknown"))
    assert mean(checked["errors"]) < 0.06
    assert mean(checked["errors"]) < 0.5 * mean(unknown["errors"])
    assert mean(checked["scores"]) < mean(unknown["scores"])


@pytest.mark.parametrize("peer", ["constant step x rounded steps", "Amdahl", "USL", "Ernest"])
def test_every_peer_errs_more_and_its_intervals_are_worse(
    answers: dict[str, dict[str, list[list[float]]]], peer: str
) -> None:
    checked, of_peer = answers["vitscale, network checked"], answers[peer]
    for column in range(3):
        assert mean([[row[column]] for row in checked["errors"]]) < mean([[row[column]] for row in of_peer["errors"]])
    assert mean(checked["scores"]) < mean(of_peer["scores"])


def test_what_rests_on_nothing_is_labelled(answers: dict[str, dict[str, list[list[str]]]]) -> None:
    checked, unknown = (answers[f"vitscale, network {network}"]["labels"] for network in ("checked", "unknown"))
    assert {label for row in checked for label in row} == {"extrapolated"}
    assert {label for row in unknown for label in row} == {"extrapolated", "prior-driven"}


def mean(rows: list[list[float]]) -> float:
    """Over all."""
    return sum(map(sum, rows)) / sum(map(len, rows))
