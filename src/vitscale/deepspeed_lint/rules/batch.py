"""Batch sizes: train_batch_size must be micro-batch x accumulation x GPUs.

GPUs that share a sequence train the same images: then a group of them counts as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from vitscale.deepspeed_lint.advice import FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import ConfigurationView, finding
from vitscale.engines.deepspeed.config import BATCH_KEYS
from vitscale.present.document import Severity

GLOBAL, MICRO, ACCUMULATION = BATCH_KEYS
_DOCS = "https://www.deepspeed.ai/docs/config-json/#batch-size-related-parameters"


def batch_arithmetic(view: ConfigurationView) -> Iterator[FileFinding]:
    """Batch sizes from which DeepSpeed cannot work out all three, for the GPUs given or for any number of them."""
    if any(view.open(key) for key in BATCH_KEYS):
        return
    sizes: dict[str, int] = {}
    for key in BATCH_KEYS:
        value = view.number(key)
        has_wrong_type = value is None and view.value(key) is not None
        if has_wrong_type:
            return  # another rule names it
        if value is None:
            continue
        if value <= 0:
            message = f"It is {value:g}, but must be greater than 0"
            yield _finding(view, "error", key, message, Remedy("Write at least 1", {key: 1}))
            return
        sizes[key] = int(value)
    yield from _check_sizes(view, sizes)


class _Trainers(NamedTuple):
    """GPUs, or groups of GPUs that share sequences, that train different images."""

    count: int | None
    """None where the number of GPUs is not known."""
    noun: str


def _check_sizes(view: ConfigurationView, sizes: dict[str, int]) -> Iterator[FileFinding]:
    """Yield a finding where batch sizes, all above 0, contradict one another or the number of GPUs."""
    gpus = view.target.gpus
    sequence_gpus = int(view.number("sequence_parallel_size", 1) or 1)
    trainers = _Trainers(gpus, "GPUs")
    if sequence_gpus > 1:
        if gpus is not None and gpus % sequence_gpus:
            yield _no_multiple_of_sequence_gpus(view, gpus, sequence_gpus)
            return
        groups = None if gpus is None else gpus // sequence_gpus
        trainers = _Trainers(groups, f"groups of {sequence_gpus:,} GPUs that share sequences")
    if GLOBAL in sizes:
        yield from _check_global_batch(view, sizes, trainers)
    elif MICRO not in sizes:
        message = f"Neither {GLOBAL} nor {MICRO} is given, and DeepSpeed needs one of them"
        fix = Remedy(f'Give {MICRO}, 1 or more (the Hugging Face Trainer fills in "auto")', {MICRO: 1})
        yield _finding(view, "error", "", message, fix)


def _no_multiple_of_sequence_gpus(view: ConfigurationView, gpus: int, sequence_gpus: int) -> FileFinding:
    message = f"{gpus:,} GPUs are no multiple of it"
    divisor = math.gcd(gpus, sequence_gpus)
    fix = Remedy(f"Take a divisor of the number of GPUs, such as {divisor}", {"sequence_parallel_size": divisor})
    return _finding(view, "error", "sequence_parallel_size", message, fix)


def _check_global_batch(view: ConfigurationView, sizes: dict[str, int], trainers: _Trainers) -> Iterator[FileFinding]:
    """Yield a finding where the global batch is not micro-batch x accumulation x trainers, or fits one number only."""
    total = sizes[GLOBAL]
    per_trainer = (sizes.get(MICRO) or 1) * (sizes.get(ACCUMULATION) or 1)  # 0.5 in the file is 0 here
    product = _product(sizes)
    has_micro = MICRO in sizes
    has_all = has_micro and ACCUMULATION in sizes
    if total % per_trainer:
        message = f"{total:,} is no multiple of {product}: no number of GPUs makes it close"
        fix = _to_multiple(total, per_trainer * (trainers.count or 1), has_micro=has_micro)
        yield _finding(view, "error", GLOBAL, message, fix)
    elif trainers.count is None:
        if has_all:
            message = f"With {product} the file runs on exactly {total // per_trainer:,} {trainers.noun}"
            fix = remove(GLOBAL, f"Leave {GLOBAL} out to run on any number, or say --gpus")
            yield _finding(view, "note", GLOBAL, message, fix)
    elif total % (per_trainer * trainers.count):
        step = per_trainer * trainers.count
        message = f"{total:,} is no multiple of {product} on {trainers.count:,} {trainers.noun} ({step:,})"
        yield _finding(view, "error", GLOBAL, message, _to_multiple(total, step, has_micro=has_micro))
    elif has_all and total != per_trainer * trainers.count:
        message = (
            f"{total:,} is not {product} x {trainers.count:,} {trainers.noun} = {per_trainer * trainers.count:,}; it "
            f"closes on {total // per_trainer:,}"
        )
        fix = remove(GLOBAL, f"Leave {GLOBAL} or {ACCUMULATION} out: it follows from the others")
        yield _finding(view, "error", GLOBAL, message, fix)


def _to_multiple(total: int, step: int, *, has_micro: bool) -> Remedy:
    """Return advice for a global batch that is no multiple of `step` images."""
    multiple = max(round(total / step), 1) * step
    text = f"Take a multiple of {step:,}, such as {multiple:,}"
    if has_micro:
        text += f", or leave {GLOBAL} out: it follows from the others"
    return Remedy(text, {GLOBAL: multiple})


def _product(sizes: dict[str, int]) -> str:
    """Return "4 per GPU x 2 accumulated", without what the file does not say; "1 per GPU" where it says neither."""
    factors = []
    if MICRO in sizes:
        factors.append(f"{sizes[MICRO]:,} per GPU")
    if sizes.get(ACCUMULATION):
        factors.append(f"{sizes[ACCUMULATION]:,} accumulated")
    return " x ".join(factors) or "1 per GPU"


def _finding(view: ConfigurationView, severity: Severity, key: str, message: str, fix: Remedy) -> FileFinding:
    source = f"{_DOCS} and {view.source('runtime/config.py')} (_batch_assertion)"
    return finding("batch-arithmetic", severity, key, message, fix, source)
