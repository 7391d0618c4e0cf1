"""What two published DeepSpeed logs say of communication: transfer and waiting, as far as rank 0's log can tell.

    .venv/bin/python benchmarks/published_logs.py [FOLDER] [--write]

FOLDER holds deepspeed-t4-2gpu.log and deepspeed-t4-4gpu.log of the published study (by default ../shared/paper). With
--write the table is put into docs/published-logs.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from between_marks import write_between

from vitscale import analysis, store
from vitscale.analysis.quality.imports import OneRankBounds, one_rank_bounds, ring_bytes
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import import_logs
from vitscale.store.results import Run
from vitscale.trial.model_cost import parameters

_ROOT = Path(__file__).parents[1]
_LOGS = ("deepspeed-t4-2gpu.log", "deepspeed-t4-4gpu.log")
_PCIE_3_X16 = 16 * 8e9 * (128 / 130) / 8
"""Bytes/s in one direction: 16 lanes of 8 GT/s with 128b/130b encoding. NVIDIA's T4 data sheet: x16 PCIe Gen3."""
_FP32_BYTES = 4


def main() -> None:
    """Prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=_ROOT.parent / "shared" / "paper")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    logs = [asked.folder / name for name in _LOGS]
    if missing := [path.name for path in logs if not path.is_file()]:
        raise SystemExit(f"{asked.folder} lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        import_logs(logs, "deepspeed", ImportOptions(model="vit-b16", image_size=224, train_samples=50_000), results)
        found = analysis.analyse(store.load(results))
    text = _table(
        [
            _row(run, trial.run_figures[0].steady_from or 0)
            for trial in found.trials.values()
            for run in trial.recorded_runs
        ]
    )
    print(text)
    if asked.write:
        write_between(_ROOT / "docs" / "published-logs.md", "published logs", text)


def _row(run: Run, steady_from: int) -> tuple[int, OneRankBounds]:
    trial = run.header.trial
    count = parameters(trial.model)
    sent = None if count is None else ring_bytes(_FP32_BYTES * count, trial.world.size)
    bounds = one_rank_bounds(run, steady_from, sent, _PCIE_3_X16)
    if bounds is None:
        raise SystemExit("the log has too few steps")
    return trial.world.size, bounds


def _table(rows: list[tuple[int, OneRankBounds]]) -> str:
    lines = [
        "| | " + " | ".join(f"{gpus} GPUs" for gpus, _ in rows) + " |",
        "|---|" + "---:|" * len(rows),
    ]

    def add(name: str, *cells: str) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    bounds = [one for _, one in rows]
    add("steady steps in the log", *(f"{one.steps}" for one in bounds))
    add("step, ms", *(f"{1000 * one.step_seconds:.1f}" for one in bounds))
    add("exchange of gradients (`bwd_allreduce`), ms, mean", *(f"{1000 * one.exchange_seconds:.1f}" for one in bounds))
    add("the same, median", *(f"{1000 * one.exchange_median_seconds:.1f}" for one in bounds))
    add("the same, share of a step", *(f"{one.exchange_seconds / one.step_seconds:.1%}" for one in bounds))
    add("transfer, ms", *(f"{1000 * one.transfer_low:.1f} to {1000 * one.transfer_high:.1f}" for one in bounds))
    add("waiting, ms, mean", *(f"{1000 * one.wait_low:.1f} to {1000 * one.wait_high:.1f}" for one in bounds))
    add("change of the exchange per change of own computing", *(_pace(one) for one in bounds))
    add("so in a typical step rank 0", *(_said(one) for one in bounds))
    return "\n".join(lines)


def _pace(one: OneRankBounds) -> str:
    return "unknown" if one.follows_own_pace is None else f"{one.follows_own_pace:+.3f}"


def _said(one: OneRankBounds) -> str:
    return {True: "waits", False: "does not wait", None: "cannot be told"}[one.waits]


if __name__ == "__main__":
    main()
