"""Every engine that runs on CPU against one process, in every combination: the whole of what the tests take a part of.

    python benchmarks/equality.py

Both optimizers, accumulation 1 and 3, clipping off and on, 1, 2 and 3 ranks, in fp32, and autocast to bf16 with AdamW.
Starts the ranks of tests/engines/curve_ranks.py on this machine (gloo) and writes the table into docs/equality.md
between its marks. Seven minutes on two cores.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engines.curves import Curve, Job, largest_difference, train  # noqa: E402 - the path to it stands above
from engines.jobs import ACCUMULATED, ADAMW, AUTOCAST, CLIPPED, ENGINES, MICRO_BATCHES, SGD, Train  # noqa: E402 - the path to it stands above

PAGE = ROOT / "docs/equality.md"
BEGIN, END = "<!-- benchmarks/equality.py writes from here -->\n", "<!-- to here -->\n"
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


def main() -> None:
    settings = {name: fields for name, (_, fields) in EXACT.items()} | ROUNDED
    jobs = [
        job(f"{engine}: {name}", ENGINES[engine] | fields) for engine in ENGINES for name, fields in settings.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        alone = train(references(), 1, Path(folder) / "alone", timeout=3600)
        curves = {ranks: train(jobs, ranks, Path(folder) / str(ranks), timeout=3600) for ranks in WORLDS}
    runs = [alone[f"autocast {parts}"].losses for parts in MICRO_BATCHES]
    bound = 2 * max(largest_difference(left, right) for left in runs for right in runs)
    lines = [
        f"{', '.join(f'{name} {importlib.metadata.version(name)}' for name in PACKAGES)}; {STEPS} steps. fp32: the "
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
    table = "\n".join(lines)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}", encoding="utf-8")
    print(table)


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
