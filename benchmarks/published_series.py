"""The published study's runs by series, and what the command line predicts of some of them from the others."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers.intervals import Told
from peers.runs import Array, Places, places
from product import Command, Row, in_process, predicted

TRAIN_IMAGES = 50_000
OF_A_SERIES = ("cluster", "layout", "dataset", "micro_batch")


@dataclass(frozen=True)
class PublishedSeries:
    """Runs that differ in rank count alone. One entry per run in `places` and `seconds`."""

    name: str
    weak: bool
    mixed_gpus: bool
    rows: tuple[Row, ...]
    places: Places
    seconds: Array
    """A run's epoch: the median over its epochs of the maximum over its ranks."""

    def only(self, counts: Sequence[int]) -> PublishedSeries:
        """The runs on these rank counts."""
        chosen = np.isin(self.places.gpus, counts)
        rows = tuple(row for row in self.rows if int(row["gpus"]) in counts)
        return PublishedSeries(
            self.name, self.weak, self.mixed_gpus, rows, self.places.take(chosen), self.seconds[chosen]
        )

    @property
    def counts(self) -> list[int]:
        """Rank counts, rising."""
        return sorted({int(count) for count in self.places.gpus})


def read(path: Path) -> list[PublishedSeries]:
    """All series of three rank counts or more: strong scaling (the whole dataset) and weak (a tenth of it per rank)."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        fraction, gpus = float(row["fraction"]), int(row["gpus"])
        modes = [*(["strong"] if fraction == 1 else []), *(["weak"] if math.isclose(fraction, 0.1 * gpus) else [])]
        for mode in modes:
            groups.setdefault((mode, *(row[key] for key in OF_A_SERIES)), []).append(row)
    found = [_series(key, tuple(of_it)) for key, of_it in groups.items()]
    return sorted((one for one in found if len(one.counts) >= 3), key=lambda one: (one.weak, one.mixed_gpus, one.name))


def _series(key: tuple[str, ...], rows: tuple[Row, ...]) -> PublishedSeries:
    mode, cluster, layout, dataset, micro_batch = key
    runs: dict[tuple[int, str], dict[int, float]] = {}
    fractions = {}
    for row in rows:
        run = (int(row["gpus"]), row["run"])
        fractions[run] = float(row["fraction"])
        epochs = runs.setdefault(run, {})
        epoch = int(row["epoch"])
        epochs[epoch] = max(epochs.get(epoch, 0.0), float(row["epoch_seconds"]))
    ordered = sorted(runs)
    images = [math.ceil(round(TRAIN_IMAGES * fractions[run], 6)) for run in ordered]
    steps = [
        math.ceil(math.ceil(count / run[0]) / int(micro_batch)) for run, count in zip(ordered, images, strict=True)
    ]
    return PublishedSeries(
        name=f"{cluster}, {layout}, {dataset}, micro-batch {micro_batch}",
        weak=mode == "weak",
        mixed_gpus=cluster == "tesla",
        rows=rows,
        places=places([run[0] for run in ordered], images, steps),
        seconds=np.array([statistics.median(runs[run].values()) for run in ordered]),
    )


def ours(fitted: PublishedSeries, counts: Sequence[int], command: Command = in_process) -> tuple[Told, list[str]]:
    """What `vitscale predict` says of `counts` from `fitted` alone, and its labels."""
    answers = predicted(fitted.rows, counts, import_options=["--format", "epochs"], command=command)
    by_count = {answer["gpus"]: answer for answer in answers}
    assert len(by_count) == len(answers) == len(counts), [answer.get("series") for answer in answers]
    told = [by_count[count] for count in counts]

    def column(name: str) -> Array:
        return np.array([answer.get(name, math.nan) for answer in told], dtype=float)

    future = (column("epoch_seconds_low"), column("epoch_seconds_high"))
    mean = (column("epoch_seconds_mean_low"), column("epoch_seconds_mean_high"))
    return Told(column("epoch_seconds"), *mean, *future), [answer["label"] for answer in told]
