"""Studies like the published one with known truth: datasets, micro-batches, one host and several."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results_factory import make_environment, make_results, make_trial, steady_run
from vitscale.store.records import DeviceRecord
from vitscale.store.results import Curve, CurvePoint, Results, Run
from vitscale.trial.trial import Mode, Trial, World

Cells = Mapping[int, Sequence[float]]
"""GPU count to the step seconds of each run."""


def paper_trial(
    gpus: int,
    *,
    dataset: str = "cifar10",
    micro_batch: int = 16,
    spread: bool = False,
    fraction: float = 1.0,
    model: str = "vit-b16",
    image_size: int = 224,
    epochs: int = 3,
) -> Trial:
    """One point; `spread`: one GPU on each host."""
    plain = make_trial("deepspeed", gpus, micro_batch=micro_batch, fraction=fraction, epochs=epochs)
    return plain.model_copy(
        update={
            "model": plain.model.model_copy(update={"name": model, "image_size": image_size}),
            "data": plain.data.model_copy(update={"name": dataset}),
            "world": World(nodes=gpus if spread else 1, ranks_per_node=1 if spread else gpus, threads_per_rank=1),
        }
    )


def paper_curve(
    cells: Cells, mode: Mode = "strong-micro", devices: Sequence[str] = ("Example GPU",), **fields: Any
) -> tuple[Curve, list[Trial], list[Run]]:
    """A curve with its trials and runs; rank r has the device `devices[r % len(devices)]`."""
    trials = []
    for gpus in cells:
        own: dict[str, Any] = {"fraction": gpus / 10} if mode == "weak" else {}
        trials.append(paper_trial(gpus, **(own | fields)))
    labels = {
        "data.name": trials[0].data.name,
        "train.micro_batch": trials[0].train.micro_batch,
        "layout": "one-gpu-per-node" if fields.get("spread") else "single-node",
    }
    points = tuple(CurvePoint(gpus=trial.world.size, trial_id=trial.identity()) for trial in trials)
    runs = [
        steady_run(
            trial,
            seconds,
            repeat,
            environments=[
                make_environment(rank, device=DeviceRecord(type="cuda", name=devices[rank % len(devices)]))
                for rank in range(trial.world.size)
            ],
        )
        for trial in trials
        for repeat, seconds in enumerate(cells[trial.world.size])
    ]
    return Curve(mode=mode, labels=labels, points=points), trials, runs


def beyond_one_host(
    curve_of_one_host: tuple[Curve, list[Trial], list[Run]], most: int
) -> tuple[Curve, list[Trial], list[Run]]:
    """The same curve, with more than `most` GPUs on hosts of `most` each."""
    curve, trials, runs = curve_of_one_host
    placed = {}
    for trial in trials:
        gpus = trial.world.size
        update = {"nodes": max(1, gpus // most), "ranks_per_node": min(gpus, most)}
        placed[trial.identity()] = trial.model_copy(update={"world": trial.world.model_copy(update=update)})
    points = tuple(point.model_copy(update={"trial_id": placed[point.trial_id].identity()}) for point in curve.points)
    headers = (
        run.header.model_copy(update={"trial": trial, "trial_id": trial.identity()})
        for run in runs
        for trial in [placed[run.header.trial_id]]
    )
    moved = [run.model_copy(update={"header": header}) for run, header in zip(runs, headers, strict=True)]
    return curve.model_copy(update={"points": points}), list(placed.values()), moved


def paper_study(*curves: tuple[Curve, list[Trial], list[Run]]) -> Results:
    """Results of several curves."""
    runs = {(run.header.trial_id, run.header.repeat): run for _, _, some in curves for run in some}
    return make_results([(curve, trials) for curve, trials, _ in curves], list(runs.values()), name="paper", repeats=1)


def whole_study() -> Results:
    """One host and several, two datasets, two micro-batches, strong and weak; single runs but for one curve."""
    strong = {1: [0.8], 2: [0.82], 4: [0.85], 8: [0.9]}
    repeated = {1: [0.8, 0.81, 0.79], 2: [0.82, 0.83, 0.81], 4: [0.85, 0.86, 0.84], 8: [0.9, 0.91, 0.89]}
    return paper_study(
        paper_curve(repeated, dataset="cifar10", micro_batch=16),
        paper_curve({n: [4 * s for s in runs] for n, runs in strong.items()}, dataset="cifar10", micro_batch=64),
        paper_curve(strong, mode="weak", dataset="cifar10", micro_batch=64),
        paper_curve(strong, dataset="cifar100", micro_batch=64),
        paper_curve({2: [0.83], 4: [0.85], 8: [0.92]}, dataset="cifar100", micro_batch=64, spread=True),
    )


class EpochTime(NamedTuple):
    """One measurement of a table of epochs, in the columns that the study's own table has."""

    gpus: int
    seconds: float
    """Of each epoch."""
    cluster: str = "vector"
    dataset: str = "cifar10"
    micro_batch: int = 64
    one_gpu_a_host: bool = False
    is_weak: bool = False
    """Whether each GPU has a tenth of the images, else all GPUs have all together."""
    devices: Sequence[str] = ("Tesla T4",)
    """Rank r has the device `devices[r % len(devices)]`."""


_COLUMNS = (
    "cluster", "gpu", "layout", "dataset", "fraction", "micro_batch", "run", "gpus", "epoch", "rank", "epoch_seconds",
    "loss", "accuracy",
)  # fmt: skip


def write_epochs(path: Path, times: Iterable[EpochTime], *, epochs: int = 3) -> None:
    """A table with a row for each epoch and rank, of one run each; accuracy rises by a tenth an epoch."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for time in times:
            layout = "one-gpu-per-node" if time.one_gpu_a_host else "single-node"
            fraction = time.gpus / 10 if time.is_weak else 1.0
            for epoch in range(1, epochs + 1):
                for rank in range(time.gpus):
                    device = time.devices[rank % len(time.devices)]
                    workload = [time.cluster, device, layout, time.dataset, fraction, time.micro_batch]
                    table.writerow([*workload, 1, time.gpus, epoch, rank, time.seconds, 3 - epoch / 10, epoch / 10])
