"""Makes src/vitscale/published/facts.json from the raw measurements of the published study.

    python tools/make_published_facts.py EPOCHS.csv > src/vitscale/published/facts.json

EPOCHS.csv has one row per run, epoch and rank: cluster, gpu, layout, dataset, fraction, micro_batch, run, gpus, epoch,
rank, epoch_seconds, ... An epoch takes as long as its slowest rank, and counts where all ranks tell of it; a run's
epoch is the median over its epochs; a fact is the mean over the runs of one configuration.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

SOURCE = {
    "title": "Scaling Vision Transformers: Evaluating DeepSpeed for Image-Centric Workloads",
    "arxiv": "2602.21081",
    "raw_data": "the repository that the paper names holds the raw measurements",
    "made_by": "tools/make_published_facts.py",
    "epoch_seconds": "slowest rank of each epoch that all ranks tell of, median over a run's epochs, mean over runs",
    "workload": "ViT-B/16 at 224 x 224 pixels, AdamW, DeepSpeed without ZeRO; micro-batch per GPU, no accumulation",
}
CLUSTERS = {
    "vector": {"hosts": "8 Tesla T4 per host (PCIe), RoCE between hosts", "unlike": False},
    "tesla": {
        "hosts": "lone hosts with GPUs of unlike kinds, Ethernet; the raw data name one kind for all ranks",
        "unlike": True,
    },
}
CONFIGURATION = ("cluster", "layout", "dataset", "fraction", "micro_batch", "gpus")


def facts(path: Path) -> list[dict[str, Any]]:
    """One entry per configuration, in the order of the file."""
    seconds: dict[tuple[str, ...], dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    devices: dict[tuple[str, ...], set[str]] = defaultdict(set)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in CONFIGURATION)
            seconds[key][row["run"]][int(row["epoch"])].append(float(row["epoch_seconds"]))
            devices[key].add(row["gpu"])
    found = []
    for key, by_run in seconds.items():
        cluster, layout, dataset, fraction, micro_batch, gpus = key
        runs = [[max(ranks) for ranks in epochs.values() if len(ranks) == int(gpus)] for epochs in by_run.values()]
        found.append(
            {
                "cluster": cluster,
                "devices": sorted(devices[key]),
                "layout": layout,
                "dataset": dataset,
                "fraction": float(fraction),
                "micro_batch": int(micro_batch),
                "precision": "fp16" if cluster == "tesla" and micro_batch == "32" else "fp32",
                "gpus": int(gpus),
                "runs": len(runs),
                "epochs": min(map(len, runs)),
                "epoch_seconds": round(statistics.fmean(map(statistics.median, runs)), 2),
            }
        )
    return found


def main() -> None:
    """Prints the file."""
    if len(sys.argv) != 2:
        sys.exit("usage: make_published_facts.py EPOCHS.csv")
    lines = ",\n    ".join(json.dumps(one) for one in facts(Path(sys.argv[1])))
    source, clusters = (json.dumps(one, indent=4).replace("\n}", "\n  }") for one in (SOURCE, CLUSTERS))
    head = f'{{\n  "source": {source},\n  "clusters": {clusters},\n'
    sys.stdout.write(f'{head}  "facts": [\n    {lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
