"""Scaling tables that others published: each is one curve, however it says where its GPUs lay."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from vitscale.importers import plain_csv
from vitscale.importers.contents import Options
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
        runs = plain_csv.read([path], Options()).runs
        trials = [(run.setting, trial_of(run, Options())) for run in runs]
        found = curves_of(list({trial.identity(): (setting, trial) for setting, trial in trials}.values()))
        curves[one["name"]] = [(curve.mode, [point.gpus for point in curve.points]) for curve in found]
    assert curves == {one["name"]: [("strong-micro", one["fit"] + one["held"])] for one in TABLES}
