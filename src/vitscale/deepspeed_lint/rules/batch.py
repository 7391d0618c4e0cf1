"""Batch sizes: train_batch_size must be micro-batch x accumulation x GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitscale.deepspeed_lint.advice import Advice, FileFinding, remove
from vitscale.deepspeed_lint.view import View, finding
from vitscale.engines.deepspeed.config import BATCH_KEYS
from vitscale.present.document import Severity

GLOBAL, MICRO, ACCUMULATION = BATCH_KEYS
_DOCS = "https://www.deepspeed.ai/docs/config-json/#batch-size-related-parameters"


def batch_arithmetic(view: View) -> Iterator[FileFinding]:
    """Batch sizes from which DeepSpeed cannot work out all three, for the GPUs given or for any number of them."""
    if any(view.open(key) for key in BATCH_KEYS):
        return
    sizes: dict[str, int] = {}
    for key in BATCH_KEYS:
        value = view.number(key)
        if value is None and view.value(key) is not None:
            return  # a wrong type, which another rule tells
        if value is not None:
            if value <= 0:
                yield _finding(view, "error", key, f"It is {value:g}, but must be greater than 0",
                               Advice("Write at least 1", {key: 1}))  # fmt: skip
                return
            sizes[key] = int(value)
    yield from _closes(view, sizes)


def _closes(view: View, sizes: dict[str, int]) -> Iterator[FileFinding]:
    total, micro, accumulation = sizes.get(GLOBAL), sizes.get(MICRO), sizes.get(ACCUMULATION)
    gpus, shared = view.setting.gpus, int(view.number("sequence_parallel_size", 1) or 1)
    of_gpus = "GPUs"
    if shared > 1:  # those that share a sequence train the same images
        of_gpus = f"groups of {shared:,} GPUs that share sequences"
        if gpus is not None and gpus % shared:
            message = f"{gpus:,} GPUs are no multiple of it"
            divisor = math.gcd(gpus, shared)
            fix = Advice(
                f"Take a divisor of the number of GPUs, such as {divisor}", {"sequence_parallel_size": divisor}
            )
            yield _finding(view, "error", "sequence_parallel_size", message, fix)
            return
        gpus = None if gpus is None else gpus // shared
    if total is None:
        if micro is None:
            yield _finding(
                view, "error", "", f"Neither {GLOBAL} nor {MICRO} is given, and DeepSpeed needs one of them",
                Advice(f"Give {MICRO}, 1 or more (the Hugging Face Trainer fills in \"auto\")", {MICRO: 1}),
            )  # fmt: skip
        return
    per_gpu = (micro or 1) * (accumulation or 1)
    product = _product(micro, accumulation)
    if total % per_gpu:
        yield _finding(
            view, "error", GLOBAL, f"{total:,} is no multiple of {product}: no number of GPUs makes it close",
            _closing(total, per_gpu * (gpus or 1), has_micro=micro is not None),
        )  # fmt: skip
    elif gpus is not None and total % (per_gpu * gpus):
        yield _finding(
            view, "error", GLOBAL, f"{total:,} is no multiple of {product} on {gpus:,} {of_gpus} ({per_gpu * gpus:,})",
            _closing(total, per_gpu * gpus, has_micro=micro is not None),
        )  # fmt: skip
    elif micro is not None and accumulation is not None:
        if gpus is not None and total != per_gpu * gpus:
            yield _finding(
                view, "error", GLOBAL,
                f"{total:,} is not {product} x {gpus:,} {of_gpus} = {per_gpu * gpus:,}; it closes on "
                f"{total // per_gpu:,}",
                remove(GLOBAL, f"Leave {GLOBAL} or {ACCUMULATION} out: it follows from the others"),
            )  # fmt: skip
        elif gpus is None:
            yield _finding(
                view, "note", GLOBAL, f"With {product} the file runs on exactly {total // per_gpu:,} {of_gpus}",
                remove(GLOBAL, f"Leave {GLOBAL} out to run on any number, or say --gpus"),
            )  # fmt: skip


def _closing(total: int, step: int, *, has_micro: bool) -> Advice:
    """Advice for a global batch that is no multiple of `step`."""
    multiple = max(round(total / step), 1) * step
    text = f"Take a multiple of {step:,}, such as {multiple:,}"
    if has_micro:
        text += f", or leave {GLOBAL} out: it follows from the others"
    return Advice(text, {GLOBAL: multiple})


def _product(micro: int | None, accumulation: int | None) -> str:
    given = [f"{micro:,} per GPU" if micro is not None else "", f"{accumulation:,} accumulated" if accumulation else ""]
    return " x ".join(part for part in given if part) or "1 per GPU"


def _finding(view: View, severity: Severity, key: str, message: str, fix: Advice) -> FileFinding:
    source = f"{_DOCS} and {view.source('runtime/config.py')} (_batch_assertion)"
    return finding("batch-arithmetic", severity, key, message, fix, source)
