"""Models that several ranks share against one process, in every split of up to eight ranks that the tests know.

    python benchmarks/split_equality.py [RANKS ...]

fp32, clipped: AdamW in one piece and SGD in three; and autocast to bf16 with AdamW. Starts gloo ranks here, as
tests/engines/test_parallel.py does, and writes the table into docs/parallelism.md. Ten minutes on two cores.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

from between_marks import write_between

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engines.curves import Curve, Job, largest_difference, train  # noqa: E402 - the path to it stands above
from engines.jobs import AUTOCAST  # noqa: E402 - so does this
from engines.test_parallel import AT_NIGHT, BY_DAY, SETTINGS, gradient_difference, job_of  # noqa: E402 - and this

SPLITS = {
    ranks: tuple(dict.fromkeys((*BY_DAY.get(ranks, ()), *AT_NIGHT.get(ranks, ()))))
    for ranks in sorted(BY_DAY.keys() | AT_NIGHT.keys())
}
PARTS = (1, 2, 3, 4)


def jobs_of(name: str, autocast: tuple[int, ...] = (1,)) -> list[Job]:
    """In every setting; of autocast in so many micro-steps."""
    jobs = [job_of(name, setting) for setting in SETTINGS]
    for parts in autocast:
        rounded = job_of(name, next(iter(SETTINGS)))
        jobs.append(
            rounded | {"name": f"{name} autocast-{parts}", "train": rounded["train"] | {"gradient_clipping": 0.0}}
        )
        jobs[-1]["train"] |= AUTOCAST | {"grad_accum": parts}
        jobs[-1]["gradients"] = False
    return jobs


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        reference = jobs_of("none", PARTS)
        for job in reference:
            if "autocast" not in job["name"]:
                job["train"] |= {"grad_accum": 1}
        alone = train(reference, 1, folder / "1", timeout=3600)
        runs = [alone[f"none autocast-{parts}"].losses for parts in PARTS]
        bound = 2 * max(largest_difference(left, right) for left in runs for right in runs)
        lines = [
            f"torch {importlib.metadata.version('torch')}. bf16 is autocast under AdamW; twice the largest difference "
            f"among the single process's own runs in 1 to 4 micro-batches is {bound:.1e}.",
            "",
            "| ranks | engine and split, the rest data parallel | loss, fp32 | last gradient, fp32 | loss, bf16 |",
            "| ---: | --- | ---: | ---: | ---: |",
        ]
        for ranks in map(int, sys.argv[1:] or SPLITS):
            splits = SPLITS[ranks]
            world = folder / str(ranks)
            curves = train([job for name in splits for job in jobs_of(name)], ranks, world, timeout=3600)
            lines += [_row(ranks, name, curves, alone, world) for name in splits]
            print("\n".join(lines[-len(splits) :]), flush=True)
    write_between(ROOT / "docs/parallelism.md", "split equality", "\n" + "\n".join(lines) + "\n")


def _row(ranks: int, name: str, curves: dict[str, Curve], alone: dict[str, Curve], world: Path) -> str:
    losses = max(
        largest_difference(curves[f"{name} {setting}"].losses, alone[f"none {setting}"].losses) for setting in SETTINGS
    )
    gradient = max(gradient_difference(world, f"{name} {setting}", setting) for setting in SETTINGS)
    rounded = largest_difference(curves[f"{name} autocast-1"].losses, alone["none autocast-1"].losses)
    told = f"{gradient:.1e}" if gradient else "in parts of its own"
    split = name.replace("=", " ").replace(" shard_norms 1", ", sharded norms")
    return f"| {ranks} | {split} | {losses:.1e} | {told} | {rounded:.1e} |"


if __name__ == "__main__":
    main()
