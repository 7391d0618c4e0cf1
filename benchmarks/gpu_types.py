"""One GPU type predicted from another, on programs that published tables time on both.

python benchmarks/gpu_types.py FOLDER [--study epochs.csv] [--write docs/predicting.md]

FOLDER: tables as `benchmarks/published_tables.py` takes them. The study: epochs.csv of arXiv 2602.21081.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from between_marks import write_between
from product import Row, predicted
from published_folder import gpu_pairs, read

from vitscale.analysis.statistics import t_quantile
from vitscale.errors import RequestError

MARK = "gpu-types"
STUDY = ("ViT-B/16, fp32", "Tesla T4", "NVIDIA GeForce RTX 3070")
"""Of the study: one GPU, micro-batch 16, all of CIFAR-10."""


@dataclass(frozen=True)
class Held:
    """One rank count of one type, predicted from the other."""

    program: str
    measured_on: str
    asked: str
    gpus: int
    error: float
    """ln(predicted / true) of seconds of a step."""
    inside: bool
    """Whether the true one lies in the 90 % interval of a run."""
    label: str


def tables(folder: Path, study: Path | None) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """(program, rows of one type, rows of the other)."""
    for program, one, other in gpu_pairs(read(folder)):
        yield program, list(one.rows), list(other.rows)
    if study is not None:
        program, old, new = STUDY
        yield program, _of_the_study(study, old), _of_the_study(study, new)


def held(program: str, measured: Sequence[Row], true: Sequence[Row]) -> list[Held]:
    """Every rank count that both have, or that the other type has on one rank."""
    rates = {int(row["gpus"]): float(row["images_per_second"]) for row in true}
    counts = [gpus for gpus in rates if gpus in {int(row["gpus"]) for row in measured}]
    old, new = measured[0]["gpu"], true[0]["gpu"]
    found = []
    for answer in predicted(measured, counts, predict_options=["--device", new]):
        seconds = answer["gpus"] * int(true[0]["micro_batch"]) / rates[answer["gpus"]]
        inside = answer["step_seconds_low"] <= seconds <= answer["step_seconds_high"]
        error = math.log(answer["step_seconds"] / seconds)
        found.append(Held(program, old, new, answer["gpus"], error, inside, answer["label"]))
    return found


def both_ways(folder: Path, study: Path | None) -> list[Held]:
    """Each pair, from either of its types; what cannot be predicted is told on stderr."""
    found: list[Held] = []
    for program, first, second in tables(folder, study):
        for measured, true in ((first, second), (second, first)):
            try:
                found += held(program, measured, true)
            except RequestError as error:
                print(f"{program}: {error}", file=sys.stderr)
    return found


def left_out_holds(found: Sequence[Held]) -> Mapping[str, tuple[float, float]]:
    """Program -> (its error on one rank, the end of the interval that the other programs' errors give by t)."""
    alone = {one.program: one.error for one in found if one.gpus == 1}
    ends = {}
    for program, error in alone.items() if len(alone) > 1 else ():
        others = [other for name, other in alone.items() if name != program]
        spread = math.sqrt(statistics.fmean(other**2 for other in others))
        ends[program] = (error, t_quantile(len(others), 0.95) * spread * math.sqrt(1 + 1 / len(others)))
    return ends


def told(found: Sequence[Held]) -> str:
    """The table, and what it comes to."""
    if not found:
        return "No two series differ in GPU type alone."
    columns = ("program", "measured on", "asked", "ranks", "predicted / true", "in the interval")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for one in found:
        cells = (one.program, one.measured_on, one.asked, one.gpus, f"{math.exp(one.error):.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} | {'yes' if one.inside else 'no'} |")
    errors = [100 * abs(one.error) for one in found]
    ends = "; ".join(
        f"{name}: {100 * abs(error):.0f} % of {100 * end:.0f} %" for name, (error, end) in left_out_holds(found).items()
    )
    lines += [
        "",
        f"In the median {statistics.median(errors):.1f} %, at worst {max(errors):.1f} % off; "
        f"{sum(one.inside for one in found)} of {len(found)} in the interval of a run. Leaving one program out, what "
        f"Student's t of the others' errors on one rank allows it: {ends}.",
    ]
    return "\n".join(lines)


def _rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _of_the_study(path: Path, gpu: str) -> list[Row]:
    runs: dict[str, list[float]] = {}
    for row in _rows(path):
        if (row["gpu"], row["gpus"], row["micro_batch"], row["fraction"], row["dataset"]) == (
            gpu, "1", "16", "1.0", "cifar10"
        ):  # fmt: skip
            runs.setdefault(row["run"], []).append(float(row["epoch_seconds"]))
    return [
        {"gpus": "1", "images_per_second": f"{50_000 / statistics.fmean(seconds):.3f}", "micro_batch": "16",
         "precision": "fp32", "gpu": gpu, "run": run}
        for run, seconds in runs.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    text = told(both_ways(asked.folder, asked.study))
    print(text)
    if asked.write:
        write_between(asked.write, MARK, text)


if __name__ == "__main__":
    main()
