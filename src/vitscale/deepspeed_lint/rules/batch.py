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
    """Yield a finding where the batch sizes contradict one another or the number of GPUs, or are no batch sizes.

    DeepSpeed works out the sizes that are missing from the others. Nothing is checked where one of them is "auto"
    or is set by a study.
    """
    if any(view.leaves_open(key) for key in BATCH_KEYS):
        return
    sizes: dict[str, int] = {}
    for key in BATCH_KEYS:
        size = view.number(key)
        has_wrong_type = size is None and view.value(key) is not None
        if has_wrong_type:
            return  # another rule reports it
        if size is None:
            continue
        if size <= 0:
            message = f"It is {size:g}, but must be greater than 0"
            yield _finding(view, "error", key, message, Remedy("Write at least 1", {key: 1}))
            return
        sizes[key] = int(size)
    yield from _check_sizes(view, sizes)


class _Trainers(NamedTuple):
    """What trains different images: GPUs, or groups of GPUs that share sequences."""

    number: int | None
    """None where the number of GPUs is not known."""
    noun: str
    """Their name in messages: "GPUs"."""


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
    """Return the finding on a number of GPUs that does not divide into groups that share sequences."""
    message = f"{gpus:,} GPUs are no multiple of it"
    divisor = math.gcd(gpus, sequence_gpus)
    fix = Remedy(f"Take a divisor of the number of GPUs, such as {divisor}", {"sequence_parallel_size": divisor})
    return _finding(view, "error", "sequence_parallel_size", message, fix)


def _check_global_batch(view: ConfigurationView, sizes: dict[str, int], trainers: _Trainers) -> Iterator[FileFinding]:
    """Yield a finding where the global batch is not micro-batch x accumulation x trainers.

    Where the number of trainers is not known, yield a note on the one number for which it is.

    Args:
        view: the file.
        sizes: the batch sizes in the file, by key; the global batch is among them.
        trainers: what trains different images.
    """
    global_batch = sizes[GLOBAL]
    images_per_trainer = _images_per_trainer(sizes)
    per_trainer = _images_per_trainer_in_words(sizes)
    if global_batch % images_per_trainer:
        message = f"{global_batch:,} is no multiple of {per_trainer}: no number of GPUs makes it close"
        divisor = images_per_trainer * (trainers.number or 1)
        fix = _advice_to_take_multiple(global_batch, divisor, has_micro=MICRO in sizes)
        yield _finding(view, "error", GLOBAL, message, fix)
    elif trainers.number is not None:
        yield from _check_global_batch_on(trainers.number, trainers.noun, view, sizes)
    elif _has_all_sizes(sizes):
        fitting_number = global_batch // images_per_trainer
        message = f"With {per_trainer} the file runs on exactly {fitting_number:,} {trainers.noun}"
        fix = remove(GLOBAL, f"Leave {GLOBAL} out to run on any number, or say --gpus")
        yield _finding(view, "note", GLOBAL, message, fix)


def _check_global_batch_on(
    number: int, noun: str, view: ConfigurationView, sizes: dict[str, int]
) -> Iterator[FileFinding]:
    """Yield a finding where a global batch that divides into what trainers take does not suit their number.

    Args:
        number: how many trainers there are.
        noun: their name in messages: "GPUs".
        view: the file.
        sizes: the batch sizes in the file, by key; the global batch is among them.
    """
    global_batch = sizes[GLOBAL]
    images_per_trainer = _images_per_trainer(sizes)
    per_trainer = _images_per_trainer_in_words(sizes)
    images_of_all = images_per_trainer * number
    if global_batch % images_of_all:
        message = f"{global_batch:,} is no multiple of {per_trainer} on {number:,} {noun} ({images_of_all:,})"
        fix = _advice_to_take_multiple(global_batch, images_of_all, has_micro=MICRO in sizes)
        yield _finding(view, "error", GLOBAL, message, fix)
    elif _has_all_sizes(sizes) and global_batch != images_of_all:
        product = f"{per_trainer} x {number:,} {noun} = {images_of_all:,}"
        fitting_number = global_batch // images_per_trainer
        message = f"{global_batch:,} is not {product}; it closes on {fitting_number:,}"
        fix = remove(GLOBAL, f"Leave {GLOBAL} or {ACCUMULATION} out: it follows from the others")
        yield _finding(view, "error", GLOBAL, message, fix)


def _images_per_trainer(sizes: dict[str, int]) -> int:
    """Return micro-batch x accumulation; a size that the file does not have counts as 1."""
    micro_batch = sizes.get(MICRO) or 1  # 0.5 in the file is 0 here
    micro_steps = sizes.get(ACCUMULATION) or 1
    return micro_batch * micro_steps


def _has_all_sizes(sizes: dict[str, int]) -> bool:
    """Whether micro-batch and accumulation are both in the file, beside the global batch."""
    return MICRO in sizes and ACCUMULATION in sizes


def _advice_to_take_multiple(global_batch: int, divisor: int, *, has_micro: bool) -> Remedy:
    """Return advice for a global batch that is no multiple of `divisor` images: the nearest one that is.

    Args:
        global_batch: images.
        divisor: images.
        has_micro: whether the file has the micro-batch, so that the global batch may be left out.
    """
    multiple = max(round(global_batch / divisor), 1) * divisor
    text = f"Take a multiple of {divisor:,}, such as {multiple:,}"
    if has_micro:
        text += f", or leave {GLOBAL} out: it follows from the others"
    return Remedy(text, {GLOBAL: multiple})


def _images_per_trainer_in_words(sizes: dict[str, int]) -> str:
    """Return "4 per GPU x 2 accumulated", without a size that the file does not have; "1 per GPU" without both."""
    factors = []
    if MICRO in sizes:
        factors.append(f"{sizes[MICRO]:,} per GPU")
    if sizes.get(ACCUMULATION):
        factors.append(f"{sizes[ACCUMULATION]:,} accumulated")
    return " x ".join(factors) or "1 per GPU"


def _finding(view: ConfigurationView, severity: Severity, key: str, message: str, fix: Remedy) -> FileFinding:
    """Return a finding of the rule `batch_arithmetic`."""
    source = f"{_DOCS} and {view.source('runtime/config.py')} (_batch_assertion)"
    return finding("batch-arithmetic", severity, key, message, fix, source)
