"""Reads the published epoch times: facts by cluster, layout, dataset, micro-batch and GPU count."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_FILE = Path(__file__).parent / "facts.json"

Layout = Literal["single-node", "one-gpu-per-node"]
_LAYOUTS: tuple[Layout, ...] = ("single-node", "one-gpu-per-node")


@dataclass(frozen=True)
class Fact:
    """The epoch time of one published configuration."""

    cluster: str
    devices: tuple[str, ...]
    """Different GPU types, by name."""
    layout: Layout
    dataset: str
    """The dataset's name in vitscale: cifar10, cifar100."""
    fraction: float
    """Share of the dataset's 50,000 training images."""
    micro_batch: int
    """Images per GPU; there is no accumulation."""
    precision: str
    gpus: int
    runs: int
    epochs: int
    """Epochs of the shortest run."""
    epoch_seconds: float
    """Seconds per epoch of the slowest rank: median over a run's epochs, mean over runs."""


@dataclass(frozen=True)
class Source:
    """The publication that the facts come from."""

    title: str
    arxiv: str
    raw_data: str
    workload: str

    def __str__(self) -> str:
        return f"{self.title} (arXiv {self.arxiv})"


@dataclass(frozen=True)
class Published:
    """All facts, and their source."""

    source: Source
    unlike_clusters: tuple[str, ...]
    """Clusters whose hosts have GPUs of different kinds."""
    facts: tuple[Fact, ...]

    def of(
        self,
        *,
        dataset: str,
        micro_batch: int,
        layout: Layout | None = None,
        weak: bool = False,
        cluster: str | None = None,
    ) -> tuple[Fact, ...]:
        """The facts of one workload, by cluster, layout and number of GPUs.

        Args:
            dataset: cifar10 or cifar100; there are no facts for others.
            micro_batch: images per GPU.
            layout: all GPUs in one host, or one in each; None: either.
            weak: weak scaling, with a tenth of the images per GPU, instead of all images.
            cluster: name of a cluster; None: any.
        """
        facts = [
            fact
            for fact in self.facts
            if (fact.dataset, fact.micro_batch) == (dataset, micro_batch)
            and (layout is None or fact.layout == layout)
            and (cluster is None or fact.cluster == cluster)
            and abs(fact.fraction - (fact.gpus / 10 if weak else 1.0)) < 1e-9
        ]
        return tuple(sorted(facts, key=lambda fact: (fact.cluster, fact.layout, fact.gpus)))


@functools.cache
def published() -> Published:
    """The study of arXiv 2602.21081, read once.

    Raises:
        ValueError: the package's own file is damaged.
    """
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    source = content["source"]
    return Published(
        Source(*(str(source[key]) for key in ("title", "arxiv", "raw_data", "workload"))),
        tuple(str(name) for name, cluster in content["clusters"].items() if cluster["unlike"]),
        tuple(
            Fact(
                cluster=str(fact["cluster"]),
                devices=tuple(map(str, fact["devices"])),
                layout=_LAYOUTS[_LAYOUTS.index(fact["layout"])],
                dataset=str(fact["dataset"]),
                fraction=float(fact["fraction"]),
                micro_batch=int(fact["micro_batch"]),
                precision=str(fact["precision"]),
                gpus=int(fact["gpus"]),
                runs=int(fact["runs"]),
                epochs=int(fact["epochs"]),
                epoch_seconds=float(fact["epoch_seconds"]),
            )
            for fact in content["facts"]
        ),
    )
