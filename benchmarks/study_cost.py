"""What a study with `steps = "auto"` takes of one that trains five epochs a point, and whether it says the same.

    python benchmarks/study_cost.py FOLDER [--samples 50000] [--image-size 32] [--precision fp32] [--ranks 1 2]
                                           [--write PAGE]

Both train the same model, and evaluate nothing. GPU time is what all runs of a trial took, start-up included, times
its ranks; that of the published method is one run of five epochs, without an interval of its own. `--write` puts the
table between the marks `study cost` of this page. A quarter of an hour with what is declared, on two cores that do
nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from between_marks import write_between

from vitscale import store
from vitscale.analysis import analyse
from vitscale.present import units
from vitscale.present.estimate import Estimate

STUDY = """name = "study-cost"
[model]
name = "vit-ti16"
image_size = {image_size}
[data]
name = "synthetic"
samples = {samples}
source_size = {image_size}
[train]
engine = "ddp"
precision = "{precision}"
micro_batch = 32
{epochs}
[scaling]
gpus = {ranks}
[launch]
threads_per_rank = 1
[measure]
explain = false
evaluate = false
{measure}
"""
WHOLE = ("epochs = 5", "repeats = 1")
GOAL = 0.05
AUTO = ("", 'steps = "auto"\ntarget_ci = 0.03')


@dataclass(frozen=True)
class Cost:
    """One trial of a study."""

    runs: int
    gpu_seconds: float
    epoch_seconds: Estimate
    efficiency: Estimate | None


def costs(folder: Path, name: str, text: str) -> dict[int, Cost]:
    """Runs a study, or goes on with it; its trials by rank count."""
    study, results = folder / f"{name}.toml", folder / name
    study.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "vitscale", "run", str(study), "-o", str(results)], check=True)
    analysis = analyse(store.load(results))
    told = {}
    for point in analysis.curves[0].points:
        trial = analysis.trials[point.trial_id]
        seconds = sum(run.outcome.wall_seconds for run in trial.recorded_runs)
        if trial.epoch_seconds is None:
            raise SystemExit(f"{study}: no run of {point.gpus} ranks completed: {trial.reason}")
        told[point.gpus] = Cost(len(trial.recorded_runs), point.gpus * seconds, trial.epoch_seconds, point.efficiency)
    return told


def table(auto: dict[int, Cost], whole: dict[int, Cost]) -> list[str]:
    """A row for each rank count, and all together."""
    lines = [
        '| ranks | five epochs: GPU time, an epoch, efficiency | `steps = "auto"`: runs, GPU time | an epoch | off by '
        "| efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for ranks, own in auto.items():
        other = whole[ranks]
        off = own.epoch_seconds.value / other.epoch_seconds.value - 1
        epoch = units.seconds(other.epoch_seconds.value)
        cells = (
            f"{ranks}",
            f"{units.seconds(other.gpu_seconds)}, {epoch}, {_share(other.efficiency)}",
            f"{own.runs}, {units.seconds(own.gpu_seconds)}",
            _interval(own.epoch_seconds),
            f"{100 * off:+.1f} %",
            _share(own.efficiency),
        )
        lines.append(f"| {' | '.join(cells)} |")
    spent, all_of = (sum(cost.gpu_seconds for cost in of.values()) for of in (auto, whole))
    least = units.seconds(spent / GOAL / len(auto))
    return [
        *lines,
        "",
        f"All together {100 * spent / all_of:.1f} % of the GPU time (goal {100 * GOAL:.0f} %, which it is where five "
        f"epochs take {least} of GPU time a point).",
    ]


def _interval(seconds: Estimate) -> str:
    low, high = (units.seconds(end) if end is not None else units.UNKNOWN for end in (seconds.low, seconds.high))
    return f"{units.seconds(seconds.value)} ({low} to {high})"


def _share(efficiency: Estimate | None) -> str:
    if efficiency is None:
        return units.UNKNOWN
    ends = f" ({efficiency.low:.3f} to {efficiency.high:.3f})" if efficiency.low and efficiency.high else ""
    return f"{efficiency.value:.3f}{ends}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    auto, whole = (
        costs(
            asked.folder,
            name,
            STUDY.format(
                image_size=asked.image_size,
                samples=asked.samples,
                precision=asked.precision,
                ranks=asked.ranks,
                epochs=epochs,
                measure=measure,
            ),
        )
        for name, (epochs, measure) in (("auto", AUTO), ("whole", WHOLE))
    )
    ranks = " ".join(map(str, asked.ranks))
    options = f"--samples {asked.samples} --image-size {asked.image_size} --precision {asked.precision} --ranks {ranks}"
    machine = f"vit-ti16, DDP, {os.cpu_count()} cores, a load of {os.getloadavg()[0]:.0f}"
    head = f"`python benchmarks/study_cost.py FOLDER {options}`: {machine}."
    text = "\n".join([head, "", *table(auto, whole)])
    print(text)
    if asked.write:
        write_between(asked.write, "study cost", text)


if __name__ == "__main__":
    main()
