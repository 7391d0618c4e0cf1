"""What every engine sends in an optimizer step, counted, beside what its paper or its documentation says.

    python benchmarks/traffic.py [--ranks 2] [--unlike-blocks [--folder FOLDER]] [--splits]

Starts the ranks of tests/engines/many_engines.py on this machine (CPU, gloo), analyses what they recorded, and writes
the table into docs/traffic.md between its marks. A minute or two. Or that of Swin V2 and UperNet, whose blocks are not
alike: on two ranks, and whether one and three send what arithmetic says. Of these `--folder` keeps what was counted of
each model on each number of ranks, and the same command goes on where it was stopped. Or that of models that two and
four ranks share.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from between_marks import write_between

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engines.curves import train  # noqa: E402 - the path to it stands above
from engines.many_engines import MODELS  # noqa: E402 - so does this
from engines.test_parallel import counted_of, job_of, planned_of, trial_of  # noqa: E402 - and this
from engines.test_traffic_volumes import (  # noqa: E402 - so does this
    BIG,
    NOTHING_KEPT,
    OTHERS,
    PSI,
    TO_OWNERS,
    Case,
    counted_in,
    fsdp2,
    launch,
    through_accelerate,
    unlike_arithmetic,
    zero,
)
from forks import share_forks  # noqa: E402 - so does this
from vitscale.analysis.time.traffic import Traffic  # noqa: E402 - sorted among them
from vitscale.trial.model_cost import parameters  # noqa: E402 - and this

PAGE = ROOT / "docs/traffic.md"
WORLDS = (1, 2, 3)
PACKAGES = ("torch", "deepspeed", "accelerate")

ALLREDUCE = "2 Ψ (ZeRO, 7.1)"
TWO = "2 Ψ (ZeRO, 7.2.1)"
THREE = "3 Ψ (ZeRO, 7.2.2)"
SHARDED = "3 Ψ (FSDP, 3.2.1)"

ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("DDP", {"engine": "ddp"}, ALLREDUCE),
    ("DDP, bf16", {"engine": "ddp", "precision": "bf16"}, ""),
    ("ZeRO-0", zero(0), ALLREDUCE),
    ("ZeRO-0, bf16", zero(0, precision="bf16"), ""),
    ("ZeRO-1", zero(1), TWO),
    ("ZeRO-1, bf16", zero(1, precision="bf16"), ""),
    ("ZeRO-1, `gradient_dtype = \"bf16\"`", zero(1, gradient_dtype="bf16"), ""),
    ("ZeRO-2", zero(2), TWO),
    ("ZeRO-2, `use_multi_rank_bucket_allreduce` off", zero(2, deepspeed_config=TO_OWNERS), TWO),
    ("ZeRO-3", zero(3), THREE),
    ("ZeRO-3, bf16", zero(3, precision="bf16"), ""),
    ("ZeRO-3, `gradient_dtype = \"bf16\"`", zero(3, gradient_dtype="bf16"), ""),
    ("ZeRO-3, nothing kept", zero(3, deepspeed_config=NOTHING_KEPT), THREE),
    ("FSDP2", fsdp2(), SHARDED),
    ("FSDP2, bf16", fsdp2(precision="bf16"), ""),
    ("FSDP2, bf16-params", fsdp2(precision="bf16-params"), ""),
    ("FSDP2, bf16-params with `master_weights`", fsdp2(precision="bf16-params", master_weights=True), ""),
    ("FSDP2, `reshard_after_forward` off", fsdp2(reshard_after_forward=False), ""),
    ("Accelerate, DDP", through_accelerate("ddp"), ""),
    ("Accelerate, ZeRO-2", through_accelerate("deepspeed", zero_stage=2), ""),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--unlike-blocks", action="store_true")
    parser.add_argument("--splits", action="store_true")
    parser.add_argument("--folder", type=Path, help="keeps what was counted of unlike blocks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as forks:
        forks.callback(share_forks())
        if options.unlike_blocks:
            lines = of_unlike_blocks(options.folder or Path(own))
        elif options.splits:
            lines = of_splits(Path(own))
        else:
            lines = of_engines(options.ranks, Path(own))
    table = "\n".join(lines)
    print(table)
    mark = "unlike blocks" if options.unlike_blocks else "splits" if options.splits else "traffic"
    write_between(PAGE, mark, f"\n{table}\n")


SPLITS = {
    2: (
        "fsdp2 tensor=2", "fsdp2 tensor=2 shard_norms=1", "fsdp2 tensor=2 activation_checkpointing=1",
        "ddp sequence=2", "fsdp2 sequence=2", "zero-1 sequence=2", "zero-2 sequence=2", "ddp pipeline=2",
        "ddp pipeline=2 schedule=interleaved", "swinv2:tiny fsdp2 tensor=2", "swinv2-odd:tiny ddp sequence=2",
        "swinv2-4:tiny ddp pipeline=2", "shared-vit:tiny ddp sequence=2", "shared-swin:tiny fsdp2 tensor=2",
    ),
    4: (
        "fsdp2 tensor=2", "fsdp2 tensor=4", "fsdp2 tensor=4 shard_norms=1", "ddp sequence=2", "ddp sequence=4",
        "fsdp2 sequence=2 tensor=2 shard_norms=1", "ddp pipeline=2", "fsdp2 pipeline=2 tensor=2",
    ),
}  # fmt: skip
"""Ranks -> engine and split, as tests/engines/test_parallel.py names them."""


def of_splits(folder: Path) -> list[str]:
    """Lines of the table of models that ranks share; the rank that sends most, without messages of under 400 bytes."""
    lines = [
        f"gloo; {_versions()}.",
        "",
        "| ranks | engine and split, the rest data parallel | counted | by arithmetic |",
    ]
    lines.append("| ---: | --- | --- | --- |")
    for ranks, names in SPLITS.items():
        jobs = [job_of(name, "adamw-clipped", 1) for name in names]
        for job in jobs:
            job["traffic"], job["gradients"] = True, False
        curves = train(jobs, ranks, folder / str(ranks))
        for name, job in zip(names, jobs, strict=True):
            planned = planned_of(trial_of(job, ranks))
            counted = [counted_of(of_rank[-1]) for of_rank in curves[job["name"]].traffic]
            most = max(counted, key=lambda own: sum(own[kind] for kind in own if "," not in kind))
            split = name.replace(":tiny ", ": ").replace("shard_norms=1", "sharded norms").replace("=", " ")
            same = "the same" if planned in counted else _in_calls(planned)
            lines.append(f"| {ranks} | {split} | {_in_calls(most)} | {same} |")
    return lines


def _in_calls(amounts: Mapping[str, int]) -> str:
    kinds = sorted(kind for kind in amounts if "," not in kind)
    return ", ".join(f"{amounts[f'{kind}, calls']} {kind} ({amounts[kind] / 1e6:.3f} MB)" for kind in kinds)


def of_engines(ranks: int, folder: Path) -> list[str]:
    """Lines of the table of all engines."""
    cases = [case | {"grad_accum": accumulation} for accumulation in (1, 3) for _, case, _ in ROWS]
    found = [told for told, _ in launch(cases, ranks, folder)]
    once, thrice = found[: len(ROWS)], found[len(ROWS) :]
    lines = [
        f"{ranks} ranks, gloo; {_versions()}. "
        f"Ψ = {PSI:,} parameters, {BIG:,} of them in tensors of more than 100,000 elements.",
        "",
        "| engine, fp32 unless said | its paper, A = 1 | counted, A = 1 | counted, A = 3 | collectives, A = 1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (name, _, claim), one, three in zip(ROWS, once, thrice, strict=True):
        lines.append(f"| {name} | {claim} | {in_psi(one)} | {in_psi(three)} | {kinds(one)} |")
    return lines


def of_unlike_blocks(folder: Path) -> list[str]:
    """Lines of the table of Swin V2, and of UperNet on it and on a ViT."""
    told: dict[tuple[str, int], list[Traffic]] = {}
    for ranks, model in product(WORLDS, MODELS):
        cases: list[Case] = [case | {"model": model} for case in OTHERS]
        own = folder / f"{model} on {ranks}"
        own.mkdir(parents=True, exist_ok=True)
        told[model, ranks] = [one for one, _ in counted_in(own, cases, ranks) or launch(cases, ranks, own, 3600)]
    sizes = {model: parameters(spec) or 0 for model, spec in MODELS.items()}
    lines = [
        f"gloo; {_versions()}. Norms are local.",
        "",
        f"| case | {' | '.join(f'{TITLES[model]}, Ψ = {size:,}' for model, size in sizes.items())} | as arithmetic "
        "says on |",
        "| --- |" + " --- |" * (len(sizes) + 1),
    ]
    for number, case in enumerate(OTHERS):
        cells = [kinds(told[model, 2][number], size) for model, size in sizes.items()]
        agree = [
            str(ranks)
            for ranks in WORLDS
            if not any(
                unlike_arithmetic(case | {"model": model}, told[model, ranks][number], ranks) for model in MODELS
            )
        ]
        lines.append(f"| {_said(case)} | {' | '.join(cells)} | {', '.join(agree) or 'none'} ranks |")
    return lines


TITLES = {"swin": "Swin V2, three stages", "upernet": "with UperNet", "pyramid": "ViT and pyramid with UperNet"}


def _said(case: Case) -> str:
    """ "deepspeed, `zero_stage = 2`, `grad_accum = 2`"; settings of a DeepSpeed file by its key."""
    told = [f"`{key} = {str(value).lower() if isinstance(value, bool) else value}`" for key, value in case.items()
            if key not in ("engine", "deepspeed_config")]  # fmt: skip
    return ", ".join([case["engine"], *told, *(["nothing kept"] if "deepspeed_config" in case else [])])


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)


def in_psi(told: Traffic) -> str:
    """The volume in elements, an all-reduce twice, as the papers count: whatever the dtype."""
    weights = {"all_reduce": 2}
    elements = sum(weights.get(one.operation, 1) * one.elements for one in told.sent)
    return f"{elements / PSI:.2f} Ψ"


def kinds(told: Traffic, psi: int = PSI) -> str:
    """ "1 all_reduce float32 (1.00 Ψ)", those of a few elements left out."""
    shown = [one for one in told.sent if one.elements >= psi / 1000]
    return ", ".join(f"{one.calls} {one.operation} {one.dtype} ({one.elements / psi:.2f} Ψ)" for one in shown)


if __name__ == "__main__":
    main()
