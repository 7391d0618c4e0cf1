"""Naming engine, parameters and network on tables that others published: it does not mislead, and hardly widens."""

from __future__ import annotations

import csv
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evidence_factory import make_evidence, make_point
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import fit
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.network.links import declared_link
from vitscale.prediction.predicting import Question, predict
from vitscale.trial.model_spec import ModelSpec

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "external"
FIRST_TABLES = 36
"""Those of the first collection, whose models have their parameters below."""
TABLES = json.loads((FOLDER / "index.json").read_text())["series"][:FIRST_TABLES:2] if FOLDER.exists() else []
MILLIONS = {
    "resnet50": 25.6, "rn50": 25.6, "bert": 110, "inception3": 23.9, "resnet152": 60.2, "vgg16": 138, "alexnet": 61,
    "gnmt": 160, "transformer": 210, "jasper": 333,
}  # fmt: skip
"""Parameters of the tables' models, as their papers say."""


def points_of(table: dict[str, Any], named: bool) -> list[MeasuredPoint]:
    steps: dict[int, list[float]] = {}
    with (FOLDER / table["file"]).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpus = int(row["gpus"])
            steps.setdefault(gpus, []).append(gpus * table["micro_batch"] / float(row["images_per_second"]))
    count = next(int(1e6 * millions) for name, millions in MILLIONS.items() if name in table["name"])
    model = ModelSpec(parameter_count=count) if named else ModelSpec()
    found = [
        make_point(
            gpus, steps[gpus], per_node=table["per_node"], model=None, engine="ddp" if named else "unknown",
            micro_batch=table["micro_batch"], precision="fp32" if table["precision"] == "fp32" else "bf16",
            devices=(table["gpu"],), images=None,
        )
        for gpus in sorted(steps)
    ]  # fmt: skip
    changes = {"model": model, "origin": table["file"]}  # as of an import
    return [replace(one, trial=one.trial.model_copy(update=changes)) for one in found]


def answers(table: dict[str, Any], *, named: bool, network: str | None = None) -> list[tuple[float, float]]:
    """(distance to the truth, width), both of logarithms, at each count held back."""
    points = points_of(table, named)
    known = network_of(None, declared_link(network) if network else None)
    fitted = fit(make_evidence([one for one in points if one.gpus in table["fit"]], known))
    truth = {one.gpus: statistics.median(one.step_seconds) for one in points}
    return [
        (
            abs(math.log(one.step_seconds.value / truth[one.gpus])),
            math.log(one.step_seconds.future_ends[1] / one.step_seconds.future_ends[0]),
        )
        for one in predict(fitted, Question(tuple(table["held"]), nodes_of=table["per_node"]))
    ]


@pytest.mark.skipif(not TABLES, reason="the published tables are not here (../shared/external)")
def test_naming_more_does_not_move_away_from_the_truth_and_with_the_network_does_not_widen() -> None:
    """On every second table; docs/log.md has the others. An engine without its network opens what the network does."""
    with_engine, with_all = [], []
    for table in TABLES:
        untold, named = answers(table, named=False), answers(table, named=True)
        with_engine += list(zip(untold, named, strict=True))
        if table["network"]:
            told = answers(table, named=True, network=table["network"])
            with_all += list(zip(untold, told, strict=True))
    for pairs, most_in_the_mean in ((with_engine, 0.002), (with_all, 0.007)):
        assert len(pairs) > 15
        nearer = [after[0] - before[0] for before, after in pairs]
        assert statistics.median(nearer) < 0.002
        assert statistics.fmean(nearer) < most_in_the_mean
    assert statistics.fmean(after[0] for _, after in with_all) < 0.08
    assert statistics.median(after[1] - before[1] for before, after in with_all) < 0.01
