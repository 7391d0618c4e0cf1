"""Folders as each older format wrote them: one of today without what came later reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results_factory import explained_run, make_curve, make_results, make_trial, write_results
from vitscale.analysis import analyse
from vitscale.store import load
from vitscale.store.records import FORMAT, MeterLine, RankRecord
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

PARTS = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}

# What the history at the top of `store/records.py` says came with each format.
KINDS_SINCE = {
    2: {"explained", "resources", "matmul", "gradient"}, 3: {"traffic", "checkpoint"}, 9: {"meter"},
}  # fmt: skip
FIELDS_SINCE = {
    2: {
        *("step.window", "start.environment.numa_nodes"),
        *("trial.json.seed", "study.json.target_ci", "study.json.max_repeats"),
    },
    4: {"outcome.json.host", "outcome.json.transient", "trial.json.hosts"},
    5: {"trial.json.imported", "study.json.imported"},
    6: {
        *(f"start.environment.{name}" for name in ("allocation", "tf32", "physical_cores", "cpu", "cpu_governor")),
        *(f"start.environment.{name}" for name in ("cpu_boost", "kernel", "gpus_unused", "network_adapters")),
        *("start.environment.device.numa_node", "start.environment.device.settings"),
        *("resources.steps", "phase.compiled", "epoch.evaluation_seconds"),
    },
    7: {
        *(f"epoch.loader_{name}" for name in ("images_per_second", "reading_seconds", "decoding_seconds")),
        *("epoch.mean_iou", "explained.norms"),
    },
    12: {"trial.json.vitscale", "study.json.vitscale"},
}  # fmt: skip


def later_than(since: dict[int, set[str]], version: int) -> set[str]:
    return {name for first, names in since.items() if first > version for name in names}


def without(content: dict[str, Any], path: str, gone: set[str]) -> dict[str, Any]:
    return {
        key: without(value, f"{path}.{key}", gone) if isinstance(value, dict) else value
        for key, value in content.items()
        if f"{path}.{key}" not in gone
    }


def as_written_by(version: int, folder: Path) -> None:
    """Rewrites a folder of today as that format had it."""
    gone, kinds = later_than(FIELDS_SINCE, version), later_than(KINDS_SINCE, version)
    for path in folder.rglob("*.json"):
        old = without(json.loads(path.read_text()), path.name, gone)
        path.write_text(json.dumps(old | {"format": version}))
    for path in folder.rglob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [without(line, line["kind"], gone) for line in lines if line["kind"] not in kinds]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def test_what_formats_9_to_11_call_probes_are_meters() -> None:
    line = RankRecord.parse(b'{"kind": "probe", "probe": "power", "epoch": 2, "values": {"watts": 3.5}}')
    assert isinstance(line, MeterLine)
    assert (line.meter, line.epoch, line.values) == ("power", 2, {"watts": 3.5})
    trial = make_trial("ddp", 2)
    window = trial.window.model_copy(update={"meters": ("power",)})
    content = trial.model_copy(update={"window": window}).model_dump(mode="json")
    content["window"]["probes"] = content["window"].pop("meters")
    assert Trial.model_validate(content).window.meters == ("power",)


def steps_of(run: Run) -> list[list[float]]:
    return [[step.seconds for step in rank.steps] for rank in run.ranks]


@pytest.mark.parametrize("version", range(1, FORMAT + 1))
def test_a_folder_of_each_format_reads_back(tmp_path: Path, version: int) -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [explained_run(trial, [PARTS] * trial.world.size, repeat=r) for trial in trials for r in range(3)]
    today = make_results([(make_curve(trials), trials)], runs, repeats=3)
    write_results(today, tmp_path)
    as_written_by(version, tmp_path)
    back = load(tmp_path)
    assert back.problems == ()
    assert len(back.runs) == len(runs)
    seconds = {(run.header.trial_id, run.header.repeat): steps_of(run) for run in runs}
    assert {(run.header.trial_id, run.header.repeat): steps_of(run) for run in back.runs} == seconds
    assert all(bool(rank.explained) is (version >= 2) for run in back.runs for rank in run.ranks)
    (curve,) = analyse(back).curves
    (now,) = analyse(today).curves
    # Format 1 knew no explained window, so that all of its steps count as timed.
    if version >= 2:
        assert [point.speedup for point in curve.points] == [point.speedup for point in now.points]
    assert all(point.efficiency is not None for point in curve.points)
