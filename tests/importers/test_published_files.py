"""The published study's files, imported whole."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest

from importers.logs import imported
from importers.paper import paper


def test_every_run_of_the_epochs(tmp_path: Path) -> None:
    path = paper("epochs.csv")
    found = imported(tmp_path, [path], "epochs", model="vit-b16")
    seconds: dict[tuple[str, ...], dict[str, dict[str, float]]] = {}
    keys = ("cluster", "layout", "dataset", "fraction", "micro_batch", "gpus", "run")
    with path.open() as file:
        for row in csv.DictReader(file):
            epochs = seconds.setdefault(tuple(row[key] for key in keys), {})
            epochs.setdefault(row["epoch"], {})[row["rank"]] = float(row["epoch_seconds"])
    truth = []
    for (*_, gpus, _), epochs in seconds.items():
        ranks = {rank for told in epochs.values() for rank in told}
        assert len(ranks) == int(gpus)
        truth.append(statistics.median(max(told.values()) for told in epochs.values() if len(told) == len(ranks)))
    costs = [cost for trial in found.trials.values() for cost in trial.epoch_costs]
    assert len(costs) == len(seconds)
    assert sorted(costs) == pytest.approx(sorted(truth))


def test_its_series(tmp_path: Path) -> None:
    found = imported(tmp_path, [paper("epochs.csv")], "epochs")
    series = {(curve.name, curve.mode): [point.gpus for point in curve.points] for curve in found.curves}
    all_eight = list(range(1, 9))
    assert series["vector, one node, cifar10, micro-batch 64", "strong-micro"] == all_eight
    assert series["vector, one node, cifar10, micro-batch 64", "weak"] == all_eight
    assert series["vector, one GPU per node, cifar100, micro-batch 64", "strong-micro"] == list(range(2, 9))
    assert series["tesla, one GPU per node, cifar10, micro-batch 16", "weak"] == [1, 2, 3]
    assert sum(len(points) for points in series.values()) == len(found.trials)
    spread = [t.trial.world for t in found.trials.values() if t.trial.world.nodes > 1]
    assert spread
    assert all(world.ranks_per_node == 1 for world in spread)


@pytest.mark.parametrize(("name", "gpus"), [("deepspeed-t4-2gpu.log", 2), ("deepspeed-t4-4gpu.log", 4)])
def test_the_logs_steps(tmp_path: Path, name: str, gpus: int) -> None:
    path = paper(name)
    found = imported(tmp_path, [path], "deepspeed", model="vit-b16")
    ((_, trial),) = found.trials.items()
    sums = [
        sum(map(float, match.groups())) / 1000
        for match in re.finditer(r"\| fwd: ([\d.]+) \| bwd: ([\d.]+) .*\| step: ([\d.]+)", path.read_text())
    ]
    assert trial.trial.world.size == gpus
    assert trial.trial.train.micro_batch == 64
    assert len(trial.recorded_runs[0].ranks[0].steps) == len(sums)
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(statistics.median(sums), rel=0.01)
    assert trial.breakdown is not None
    assert not trial.breakdown.wait_known
    assert trial.breakdown.typical.exposed_seconds == pytest.approx({2: 0.0972, 4: 0.1146}[gpus], rel=0.01)
