"""What every engine sends in an optimizer step, counted, beside what its paper or its documentation says.

    python benchmarks/traffic.py [--ranks 2]

Starts the ranks of tests/engines/many_engines.py on this machine (CPU, gloo), analyses what they recorded, and writes
the table into docs/traffic.md between its marks. A minute or two.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from engines.test_traffic_volumes import (  # noqa: E402 - the path to it stands above
    BIG,
    NOTHING_KEPT,
    PSI,
    TO_OWNERS,
    fsdp2,
    launch,
    through_accelerate,
    zero,
)
from forks import share_forks  # noqa: E402 - so does this
from vitscale.analysis.time.traffic import Traffic  # noqa: E402 - sorted among them

PAGE = ROOT / "docs/traffic.md"
BEGIN, END = "<!-- benchmarks/traffic.py writes from here -->\n", "<!-- to here -->\n"
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    cases = [case | {"grad_accum": accumulation} for accumulation in (1, 3) for _, case, _ in ROWS]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as forks:
        forks.callback(share_forks())
        found = [told for told, _ in launch(cases, ranks, Path(folder))]
    once, thrice = found[: len(ROWS)], found[len(ROWS) :]
    lines = [
        f"{ranks} ranks, gloo; {', '.join(f'{name} {importlib.metadata.version(name)}' for name in PACKAGES)}. "
        f"Ψ = {PSI:,} parameters, {BIG:,} of them in tensors of more than 100,000 elements.",
        "",
        "| engine, fp32 unless said | its paper, A = 1 | counted, A = 1 | counted, A = 3 | collectives, A = 1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (name, _, claim), one, three in zip(ROWS, once, thrice, strict=True):
        lines.append(f"| {name} | {claim} | {in_psi(one)} | {in_psi(three)} | {kinds(one)} |")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}", encoding="utf-8")
    print(table)


def in_psi(told: Traffic) -> str:
    """The volume in elements, an all-reduce twice, as the papers count: whatever the dtype."""
    weights = {"all_reduce": 2}
    elements = sum(weights.get(one.operation, 1) * one.elements for one in told.sent)
    return f"{elements / PSI:.2f} Ψ"


def kinds(told: Traffic) -> str:
    """ "1 all_reduce float32 (1.00 Ψ)", those of a few elements left out."""
    shown = [one for one in told.sent if one.elements >= PSI / 1000]
    return ", ".join(f"{one.calls} {one.operation} {one.dtype} ({one.elements / PSI:.2f} Ψ)" for one in shown)


if __name__ == "__main__":
    main()
