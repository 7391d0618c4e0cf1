"""Scaling tables that others published: each is one curve, however it says where its GPUs lay."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from vitscale.importers import plain_csv
from vitscale.importers.contents import ImportOptions
from vitscale.importers.curves import curves_of
from vitscale.importers.records import trial_of

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "external"
TABLES = json.loads((FOLDER / "index.json").read_text())["series"] if FOLDER.exists() else []


@pytest.mark.skipif(not TABLES, reason="the published tables are not here (../shared/external)")
@pytest.mark.parametrize("hosts_told", [False, True], ids=["layout", "nodes"])
def test_each_table_is_one_curve(tmp_path: Path, hosts_told: bool) -> None:
    curves = {}
    for one in TABLES:
        path = FOLDER / one["file"]
        if hosts_told:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            path = tmp_path / one["file"]
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ("nodes", *(name for name in rows[0] if name != "layout")))
                writer.writeheader()
                for row in rows:
                    del row["layout"]
                    writer.writerow(row | {"nodes": -(-int(row["gpus"]) // one["per_node"])})
        runs = plain_csv.read([path], ImportOptions()).runs
        trials = [(run.setting, trial_of(run, ImportOptions())) for run in runs]
        found = curves_of(list({trial.identity(): (setting, trial) for setting, trial in trials}.values()))
        curves[one["name"]] = [(curve.mode, [point.gpus for point in curve.points]) for curve in found]
    assert curves == {one["name"]: [expected_curve(one)] for one in TABLES}


LARGEST_MICRO_BATCH = 1_000_000
"""Rows above it are left out and named."""


def expected_curve(table: dict[str, Any]) -> tuple[str, list[int]]:
    """How the batch grows with the GPUs, and the GPU counts, by the file's own columns."""
    with (FOLDER / table["file"]).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    batches = {int(row["gpus"]) * int(row["micro_batch"]) * int(row["grad_accum"]) for row in rows}
    mode = "strong-global" if len(batches) == 1 else "strong-micro"
    counts = {int(row["gpus"]) for row in rows if int(row["micro_batch"]) <= LARGEST_MICRO_BATCH}
    return mode, sorted(counts)
