"""Every engine that runs on CPU against one process, in every combination: the whole of what the tests take a part of.

    python benchmarks/equality.py [--segmentation [--folder FOLDER]]

Both optimizers, accumulation 1 and 3, clipping off and on, 1, 2 and 3 ranks, in fp32, and autocast to bf16 with AdamW.
Segmentation, in fp32 with synchronised norms: three optimizers, and checkpoints of two ranks that go on on 1, 2 and 3.
Starts the ranks of tests/engines/curve_ranks.py on this machine (gloo) and writes the table into docs/equality.md
between its marks. Seven minutes on two cores; segmentation a quarter of an hour. With `--folder` what each engine
trained on each number of ranks stays there, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

from between_marks import write_between

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engines.curves import Curve, Job, curves_in, largest_difference, train  # noqa: E402 - the path to it stands above
from engines.jobs import (  # noqa: E402 - so does this
    ACCUMULATED,
    ADAMW,
    AUTOCAST,
    CLIPPED,
    ENGINES,
    FAST,
    FINE_TUNED,
    GROWN,
    LOCAL,
    MICRO_BATCHES,
    SEGMENTED,
    SGD,
    Train,
)
from forks import prepared_here, share_forks  # noqa: E402 - so does this

PAGE = ROOT / "docs/equality.md"
PACKAGES = ("torch", "deepspeed", "accelerate")
WORLDS = (1, 2, 3)
STEPS = 20

EXACT: dict[str, tuple[str, Train]] = {
    f"{optimizer} {clipping} {accumulation}": (f"{optimizer} {clipping}", base | clipped | accumulated)
    for (optimizer, base), (clipping, clipped), (accumulation, accumulated) in product(
        (("adamw", ADAMW), ("sgd", SGD)), (("free", {}), ("clipped", CLIPPED)), (("1", {}), ("3", ACCUMULATED))
    )
}
"""Name -> (the reference that it must equal, its fields)."""
ROUNDED: dict[str, Train] = {"autocast 1": AUTOCAST, "autocast 3": AUTOCAST | ACCUMULATED}


def job(name: str, fields: Train) -> Job:
    return {"name": name, "train": fields, "steps": STEPS}


def references() -> list[Job]:
    """One process without an engine."""
    none: Train = {"engine": "none"}
    exact = {reference: none | fields for reference, fields in EXACT.values() if "grad_accum" not in fields}
    split = {f"autocast {parts}": none | AUTOCAST | {"grad_accum": parts} for parts in MICRO_BATCHES}
    return [job(name, fields) for name, fields in (exact | split).items()]


def of_classification(folder: Path) -> list[str]:
    """Lines of the table of all combinations."""
    settings = {name: fields for name, (_, fields) in EXACT.items()} | ROUNDED
    jobs = [
        job(f"{engine}: {name}", ENGINES[engine] | fields) for engine in ENGINES for name, fields in settings.items()
    ]
    alone = train(references(), 1, folder / "alone", timeout=3600)
    curves = {ranks: train(jobs, ranks, folder / str(ranks), timeout=3600) for ranks in WORLDS}
    runs = [alone[f"autocast {parts}"].losses for parts in MICRO_BATCHES]
    bound = 2 * max(largest_difference(left, right) for left in runs for right in runs)
    lines = [
        f"{_versions()}; {STEPS} steps. fp32: the "
        f"largest of {len(EXACT)} combinations of optimizer, clipping and accumulation. bf16: the largest of "
        f"{len(ROUNDED)}; twice the largest difference among the single process's own runs is {bound:.1e}.",
        "",
        f"| engine | {' | '.join(f'{kind}, {_ranks(ranks)}' for kind in ('fp32', 'bf16') for ranks in WORLDS)} |",
        "| --- |" + " ---: |" * 2 * len(WORLDS),
    ]
    for engine in ENGINES:
        exact = [max(_exact(curves[ranks], alone, engine)) for ranks in WORLDS]
        rounded = [max(_rounded(curves[ranks], runs[0], engine)) for ranks in WORLDS]
        lines.append(f"| {engine} | {' | '.join(f'{value:.1e}' for value in (*exact, *rounded))} |")
    return lines


SEGMENTATION: dict[str, Train] = {"SGD": SEGMENTED, "AdamW at 6e-5": FINE_TUNED, "AdamW at 1e-3": FAST}
GONE_ON = "AdamW at 6e-5, gone on from two ranks"
SAVED_BEFORE = STEPS // 2


def of_segmentation(folder: Path) -> list[str]:
    """Lines of the table of Swin V2 with UperNet; two ranks come first, for they leave the checkpoints."""
    own_norms = {f"{name}, torch's norms": fields | LOCAL for name, fields in SEGMENTATION.items()}
    alone = _once(
        [_segmenting(name, {"engine": "none"} | fields) for name, fields in (SEGMENTATION | own_norms).items()],
        1, folder / "alone",
    )  # fmt: skip
    curves: dict[int, dict[str, Curve]] = {ranks: {} for ranks in WORLDS}
    for ranks, (engine, facts) in product((2, 1, 3), ENGINES.items()):
        jobs = [_segmenting(f"{engine}: {name}", facts | fields) for name, fields in SEGMENTATION.items()]
        if ranks == 2:
            jobs[1]["save_before"] = SAVED_BEFORE
        jobs.append(_segmenting(f"{engine}: {GONE_ON}", facts | FINE_TUNED))
        jobs[-1]["load"] = str(folder / f"{engine} on 2" / f"{engine}: AdamW at 6e-5")
        curves[ranks] |= _once(jobs, ranks, folder / f"{engine} on {ranks}")
    spreads = [f"{name} {largest_difference(alone[own].losses, alone[name].losses):.1e}" for name, own in
               zip(SEGMENTATION, own_norms, strict=True)]  # fmt: skip
    lines = [
        f"{_versions()}; {STEPS} steps; on 1, 2 and 3 ranks. One process with torch's own norms in place of "
        f"vitscale's is apart from itself by: {', '.join(spreads)}.",
        "",
        f"| engine | {' | '.join((*SEGMENTATION, GONE_ON))} |",
        "| --- |" + " --- |" * (len(SEGMENTATION) + 1),
    ]
    for engine in ENGINES:
        cells = []
        for name in (*SEGMENTATION, GONE_ON):
            whole = alone["AdamW at 6e-5" if name == GONE_ON else name].losses
            of_ranks = [curves[ranks][f"{engine}: {name}"] for ranks in WORLDS]
            cells.append(
                ", ".join(f"{largest_difference(curve.losses, whole[curve.first :]):.1e}" for curve in of_ranks)
            )
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return lines


def _once(jobs: list[Job], ranks: int, folder: Path) -> dict[str, Curve]:
    """As `train`, unless that came to its end in this folder before."""
    if found := curves_in(folder, ranks):
        return found
    shutil.rmtree(folder, ignore_errors=True)
    return train(jobs, ranks, folder, prepared_here(), 3600)


def _segmenting(name: str, fields: Train) -> Job:
    segmenting = job(name, fields)
    segmenting["segments"] = "swin"
    if fields["learning_rate"] == FINE_TUNED["learning_rate"]:
        segmenting["grown"] = GROWN
    return segmenting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segmentation", action="store_true")
    parser.add_argument("--folder", type=Path, help="keeps what was trained for segmentation")
    options = parser.parse_args()
    segmentation = options.segmentation
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as forks:
        if segmentation:
            forks.callback(share_forks())
            folder = options.folder or Path(own)
            folder.mkdir(parents=True, exist_ok=True)
            lines = of_segmentation(folder)
        else:
            lines = of_classification(Path(own))
    table = "\n".join(lines)
    print(table)
    write_between(PAGE, "equality of segmentation" if segmentation else "equality", f"\n{table}\n")


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _exact(curves: dict[str, Curve], alone: dict[str, Curve], engine: str) -> list[float]:
    return [
        largest_difference(curves[f"{engine}: {name}"].losses, alone[reference].losses)
        for name, (reference, _) in EXACT.items()
    ]


def _rounded(curves: dict[str, Curve], reference: list[float], engine: str) -> list[float]:
    return [largest_difference(curves[f"{engine}: {name}"].losses, reference) for name in ROUNDED]


if __name__ == "__main__":
    main()
