"""Models that several ranks share against one process, in every split of up to eight ranks that the tests know.

    python benchmarks/split_equality.py [RANKS ...] [--missing]

20 steps in fp32, clipped: AdamW in one piece (of stages in six) and SGD in three; and autocast to bf16 with AdamW.
Starts gloo ranks here, as tests/engines/test_parallel.py does, and writes the rows of these RANKS, all by default, into
the table of docs/parallelism.md, with --missing those alone that it lacks. A quarter of an hour for each number of
ranks on two cores.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import tempfile
from pathlib import Path

from between_marks import write_between

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engines.curves import Curve, Job, largest_difference, train  # noqa: E402 - the path to it stands above
from engines.jobs import AUTOCAST  # noqa: E402 - so does this
from engines.test_parallel import (  # noqa: E402 - and this
    AT_NIGHT,
    BLOCKS,
    BY_DAY,
    OWN_AT_NIGHT,
    OWN_BY_DAY,
    PIPELINED,
    SEGMENTED_BY_DAY,
    SETTINGS,
    STEPS_AT_NIGHT,
    SWIN_BY_DAY,
    ZERO_BY_DAY,
    gradient_difference,
    in_each_setting,
    in_one_piece,
    job_of,
    reference_of,
)  # fmt: skip
from forks import prepared_here, share_forks  # noqa: E402 - sorted among them

KNOWN = (BY_DAY, PIPELINED, AT_NIGHT, {2: (*ZERO_BY_DAY, *OWN_BY_DAY, SWIN_BY_DAY, *OWN_AT_NIGHT, *SEGMENTED_BY_DAY)})
SPLITS = {
    ranks: tuple(dict.fromkeys(name for known in KNOWN for name in known.get(ranks, ())))
    for ranks in sorted(BY_DAY.keys() | AT_NIGHT.keys())
}
PARTS = (1, 2, 3, 4, 6)
"""Micro-batches of the single process in bf16, whose own runs differ by their rounding."""
PAGE, MARK = ROOT / "docs/parallelism.md", "split equality"
COLUMNS = (
    "| ranks | engine and split, the rest data parallel | losses, fp32 | last gradient, fp32 | losses, bf16 |\n"
    "| ---: | --- | ---: | ---: | ---: |"
)


def rounded(name: str, parts: int | None = None, layers: int | None = None) -> Job:
    """Under autocast to bf16; unclipped, for the largest difference is then that of products alone."""
    job = job_of(name, "adamw-clipped", STEPS_AT_NIGHT)
    job["name"], job["gradients"] = f"{'pipeline ' if layers else ''}{name} autocast-{parts}", False
    job["train"] = job["train"] | AUTOCAST | {"gradient_clipping": 0.0} | ({"grad_accum": parts} if parts else {})
    if layers:
        job["layers"] = layers
    return job


def main() -> None:
    counts = [int(argument) for argument in sys.argv[1:] if argument != "--missing"]
    rows, wanted = written(), dict[int, list[str]]()
    for ranks in counts or SPLITS:
        rows[ranks] = rows.get(ranks, []) if "--missing" in sys.argv else []
        has = {row.split("|")[2].strip() for row in rows[ranks]}
        wanted[ranks] = [name for name in SPLITS[ranks] if _told(name) not in has]
    needed = {reference_of(name, setting) for names in wanted.values() for name in names for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as forks:
        folder = Path(scratch)
        forks.callback(share_forks())
        alone = in_one_piece(folder / "1", STEPS_AT_NIGHT, prepared_here(), needed)
        references = [rounded("none", parts, layers) for parts in PARTS for layers in (None, BLOCKS)]
        alone |= train(references, 1, folder / "rounded", prepared_here(), timeout=3600)
        bounds = []
        for model in ("none", "pipeline none"):
            runs = [alone[f"{model} autocast-{parts}"].losses for parts in PARTS]
            bounds.append(2 * max(largest_difference(left, right) for left in runs for right in runs))
        said = (
            f"torch {importlib.metadata.version('torch')}; largest difference of a step's loss, as a share of it, and "
            "of the last step's whole gradient in the L2 norm. bf16 is autocast under AdamW, where twice the largest "
            f"difference among the single process's own runs in 1 to 6 micro-batches is {bounds[0]:.1e}, of the four "
            f"blocks of stages {bounds[1]:.1e}."
        )
        print(said, flush=True)
        for ranks, splits in wanted.items():
            world = folder / f"of-{ranks}"
            jobs = [*in_each_setting(splits, ranks), *(rounded(name) for name in splits if not _own(name))]
            curves = train(jobs, ranks, world, prepared_here(), timeout=3600)
            rows[ranks] += [_row(ranks, name, curves, alone, world) for name in splits]
            print("\n".join(rows[ranks]), flush=True)
    if any(len(rows[ranks]) > len(splits) for ranks, splits in wanted.items()):
        said = _between().strip().partition("\n")[0]  # most rows are of that run
    lines = [said, "", COLUMNS, *(row for ranks in sorted(rows) for row in rows[ranks])]
    write_between(PAGE, MARK, "\n" + "\n".join(lines) + "\n")


def written() -> dict[int, list[str]]:
    """The rows that the page has, by their number of ranks."""
    rows: dict[int, list[str]] = {}
    for line in _between().splitlines():
        cells = line.split("|")
        if len(cells) > 2 and cells[1].strip().isdecimal():
            rows.setdefault(int(cells[1]), []).append(line)
    return rows


def _between() -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"{MARK}: begin -->")[2].partition(f"<!-- {MARK}: end")[0]


def _own(name: str) -> bool:
    """Whether it is of a factory's model or Swin V2, which fp32 alone is held against."""
    return ":tiny " in name


def _row(ranks: int, name: str, curves: dict[str, Curve], alone: dict[str, Curve], world: Path) -> str:
    trained = [setting for setting in SETTINGS if f"{name} {setting}" in curves]
    losses = max(
        largest_difference(curves[f"{name} {setting}"].losses, alone[reference_of(name, setting)].losses)
        for setting in trained
    )
    gradient = max(gradient_difference(world, f"{name} {setting}", setting) for setting in trained)
    bf16 = "not trained"
    if not _own(name):
        reference = alone[f"{'pipeline ' if 'pipeline' in name else ''}none autocast-1"]
        bf16 = f"{largest_difference(curves[f'{name} autocast-None'].losses, reference.losses):.1e}"
    told = f"{gradient:.1e}" if gradient else "in parts of its own"
    return f"| {ranks} | {_told(name)} | {losses:.1e} | {told} | {bf16} |"


def _told(name: str) -> str:
    """Engine and split as the table has them."""
    split = name.replace("=", " ").replace(" shard_norms 1", ", sharded norms").replace(" schedule ", ", ")
    return split.replace(":tiny", ":")


if __name__ == "__main__":
    main()
