"""Reads the published epoch times: facts by cluster, layout, dataset, micro-batch and GPU count."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

_FACTS_PATH = Path(__file__).parent / "facts.json"

ClusterLayout = Literal["single-node", "one-gpu-per-node"]


@dataclass(frozen=True)
class PublishedFact:
    """The epoch time of one published configuration."""

    cluster: str
    devices: tuple[str, ...]
    """Different GPU types, by name."""
    layout: ClusterLayout
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
class Publication:
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

    source: Publication
    unlike_clusters: tuple[str, ...]
    """Clusters whose hosts have GPUs of different kinds."""
    facts: tuple[PublishedFact, ...]

    def of(
        self,
        *,
        dataset: str,
        micro_batch: int,
        layout: ClusterLayout | None = None,
        weak: bool = False,
        cluster: str | None = None,
    ) -> tuple[PublishedFact, ...]:
        """Return the facts of one workload, sorted by cluster, layout and number of GPUs.

        Args:
            dataset: cifar10 or cifar100; there are no facts for others.
            micro_batch: images per GPU.
            layout: all GPUs in one host, or one in each; None: either.
            weak: whether weak scaling is meant, with a tenth of the images for each GPU; else all images are shared.
            cluster: name of a cluster; None: any.
        """
        facts = []
        for fact in self.facts:
            is_workload = fact.dataset == dataset and fact.micro_batch == micro_batch
            is_in_layout = layout is None or fact.layout == layout
            is_on_cluster = cluster is None or fact.cluster == cluster
            expected_fraction = fact.gpus / 10 if weak else 1.0
            has_fraction = abs(fact.fraction - expected_fraction) < 1e-9
            if is_workload and is_in_layout and is_on_cluster and has_fraction:
                facts.append(fact)
        return tuple(sorted(facts, key=lambda fact: (fact.cluster, fact.layout, fact.gpus)))


class _Cluster(msgspec.Struct):
    """A cluster in the file."""

    unlike: bool
    """Whether its hosts have GPUs of different kinds."""


class _FactsFile(msgspec.Struct):
    """The content of the file."""

    source: Publication
    clusters: dict[str, _Cluster]
    facts: tuple[PublishedFact, ...]


@functools.cache
def published() -> Published:
    """Return the facts of arXiv 2602.21081, which are read once.

    Raises:
        ValueError: the package's own file is damaged.
    """
    content = msgspec.json.decode(_FACTS_PATH.read_bytes(), type=_FactsFile)
    unlike_clusters = tuple(name for name, cluster in content.clusters.items() if cluster.unlike)
    return Published(content.source, unlike_clusters, content.facts)
