"""A study of many tiny trials: whether the driver's memory, handles and processes, or the time of a trial, grow.

    python benchmarks/soak.py FOLDER [--trials 1000] [--write docs/benchmarks/README.md]

FOLDER: empty, or not there. Each trial trains a ViT of 2 layers for 20 steps on one rank, at a learning rate of its
own. The driver is looked at from outside each time that a run begins. What grows is told by the slope over trials,
least squares, with its 95 % interval by moving blocks of 25 trials, which hang together; counted from the first pack of
finished runs on, which loads polars once. Rows are kept in FOLDER/rows.csv.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from between_marks import write_between

from vitscale.store.packs import PACK_RUNS

MARK = "soak"
STUDY = """
name = "soak"
[model]
name = "vit-ti16"
image_size = 16
patch_size = 8
layers = 2
hidden_size = 32
heads = 2
mlp_size = 64
[data]
name = "synthetic"
samples = 160
source_size = 16
[train]
engine = "none"
micro_batch = 8
precision = "fp32"
[scaling]
gpus = [1]
[launch]
threads_per_rank = 1
[measure]
steps = 20
repeats = 1
evaluate = false
explain = false
[sweep]
"train.learning_rate" = [{rates}]
"""
BLOCK, RESAMPLES = 25, 2000
QUANTITIES = {
    "memory of the driver (MiB)": 2**20,
    "open files of the driver": 1,
    "threads of the driver": 1,
    "processes below the driver": 1,
    "seconds from one run's end to the next": 1,
}
"""What is looked at, and its unit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    study, results = asked.folder / "study.toml", asked.folder / "results"
    rates = ", ".join(f"{1e-4 * (1 + n / 1000):.7f}" for n in range(asked.trials))
    study.write_text(STUDY.format(rates=rates), encoding="utf-8")
    command = [sys.executable, "-m", "vitscale", "run", str(study), "-o", str(results)]
    output = asked.folder / "output.txt"
    with output.open("w", encoding="utf-8") as file:
        driver = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        rows = watched(driver, output)
    if driver.returncode or len(rows) < asked.trials:
        tail = output.read_text(encoding="utf-8")[-2000:]
        sys.exit(f"{len(rows)} runs ended of {asked.trials}, exit code {driver.returncode}:\n{tail}")
    np.savetxt(asked.folder / "rows.csv", rows, fmt="%.9g", delimiter=",", header=",".join(QUANTITIES), comments="")
    load = os.getloadavg()[0]
    head = f"`python benchmarks/soak.py FOLDER --trials {asked.trials}`: {os.cpu_count()} cores, a load of {load:.0f}."
    text = "\n".join([head, "", *table(np.array(rows))])
    print(text)
    if asked.write:
        write_between(asked.write, MARK, text)


def watched(driver: subprocess.Popen[bytes], output: Path) -> list[list[float]]:
    """Of each run, when the next one began or the study was over: `QUANTITIES`."""
    process, rows, ended, last = psutil.Process(driver.pid), list[list[float]](), -1, time.monotonic()
    while driver.poll() is None:
        time.sleep(0.05)
        begun = output.read_text(encoding="utf-8", errors="replace").count("\nrun ") + 1
        if begun - 1 <= ended:
            continue
        now = time.monotonic()
        with suppress(psutil.NoSuchProcess), process.oneshot():
            facts = [
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
                len(process.children(recursive=True)),
                (now - last) / (begun - 1 - ended),
            ]
            rows += [list(map(float, facts))] * (begun - 1 - ended)
        ended, last = begun - 1, now
    return rows


def table(rows: np.ndarray) -> list[str]:
    """Of each quantity: at the beginning, at the end, and its slope."""
    lines = ["| | first 50 | last 50 | growth in 1,000 trials (95 %) |", "|---|---|---|---|"]
    for (name, unit), values in zip(QUANTITIES.items(), rows.T, strict=True):
        # The first runs load what all need, and so does the first pack of finished runs.
        values = values[(PACK_RUNS if len(values) > 2 * PACK_RUNS else 0) + 5 :] / unit
        slope, low, high = (1000 * each for each in growth(values))
        first, last = np.median(values[:50]), np.median(values[-50:])
        lines.append(f"| {name} | {first:.2f} | {last:.2f} | {slope:+.2f} ({low:+.2f} to {high:+.2f}) |")
    return lines


def growth(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Slope per trial with its 95 % interval: residuals resampled in blocks."""
    count = len(values)
    at = np.arange(count) - (count - 1) / 2
    weights = at / (at**2).sum()
    slope = float(weights @ np.asarray(values))
    left, rng = np.asarray(values) - np.mean(values) - slope * at, np.random.default_rng(0)
    block = min(BLOCK, count)
    starts = rng.integers(0, count - block + 1, (RESAMPLES, -(-count // block)))
    drawn = left[(starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count]]
    low, high = np.percentile(drawn @ weights, [2.5, 97.5])
    return slope, slope + float(low), slope + float(high)


if __name__ == "__main__":
    main()
