"""How many images an epoch has, where the dataset is a known one or the user says it."""

from __future__ import annotations

from vitscale.importers.findings import Setting
from vitscale.importers.options import Options
from vitscale.trial.trial import samples_used, steps_per_epoch

# Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009): both have 50,000 training images.
_TRAIN_SAMPLES = {"cifar10": 50_000, "cifar100": 50_000}


def train_samples(setting: Setting, options: Options) -> int | None:
    """Training images of the whole dataset; None where nobody says."""
    if options.train_samples is not None:
        return options.train_samples
    if setting.train_samples is not None:
        return setting.train_samples
    return _TRAIN_SAMPLES.get("".join(c for c in (setting.dataset or "").lower() if c.isalnum()))


def an_epoch(setting: Setting, options: Options) -> tuple[int | None, int | None]:
    """(Optimizer steps, images of all ranks) of one epoch; None where unknown."""
    whole = train_samples(setting, options)
    if whole is None:
        return None, None
    images = samples_used(whole, setting.fraction)
    micro_batch = setting.micro_batch or options.micro_batch
    if micro_batch is None:
        return None, images
    return steps_per_epoch(images, setting.gpus, micro_batch, setting.grad_accum, drop_last=False), images
