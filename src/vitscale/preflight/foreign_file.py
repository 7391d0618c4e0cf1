"""A file of another program as a study: DeepSpeed's JSON, and the YAML of `accelerate launch`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from vitscale.engines.accelerate.config import SUFFIXES, load
from vitscale.engines.accelerate.settings import carried_settings
from vitscale.engines.deepspeed import config as deepspeed_config


class ForeignSettings(NamedTuple):
    """The settings of another program's file."""

    fields: dict[str, object]
    """Dotted fields of a study, with their values."""
    uncarried: tuple[str, ...]
    """Settings that the study does not take over as they stand, each with the reason: a line each."""
    ranks: int | None
    """Ranks in all; None where the file does not say."""


def read_foreign(file: Path, study: Path) -> ForeignSettings:
    """Read another program's file for a study that is to be written.

    Args:
        file: DeepSpeed's JSON, or Accelerate's YAML by its suffix.
        study: the study file, in whose folder its paths begin.

    Raises:
        RequestError: the file, or the DeepSpeed file that it names, cannot be read.
    """
    if file.suffix.lower() not in SUFFIXES:
        return ForeignSettings(_deepspeed_fields(file, study), (), None)
    carried = carried_settings(load(file).values)
    fields: dict[str, object] = dict(carried.fields)
    if carried.deepspeed_file is not None:
        # Accelerate looks for it in the folder where it is started; such files are written to be started in their own.
        fields |= _deepspeed_fields(file.parent / carried.deepspeed_file, study)
    return ForeignSettings(fields, tuple(left.text for left in carried.uncarried), carried.processes)


def _deepspeed_fields(file: Path, study: Path) -> dict[str, object]:
    """Return the fields of a study that trains by a DeepSpeed file.

    Raises:
        RequestError: the file cannot be read.
    """
    config = deepspeed_config.read(file)
    relative_path = os.path.relpath(file.resolve(), study.parent.resolve())
    fields: dict[str, object] = {"train.engine": "deepspeed", "train.deepspeed_config": relative_path}
    # A study's own batch must be that of the file, or DeepSpeed would refuse it.
    batch = deepspeed_config.batch_values(config)
    for key, field in _FIELD_BY_BATCH_KEY.items():
        if key in batch:
            fields[field] = batch[key]
    if "train_batch_size" in batch:
        fields["scaling.mode"] = "strong-global"
    return fields


_FIELD_BY_BATCH_KEY = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.grad_accum",
}
"""Key of a DeepSpeed file to which it may give a number -> the same of a study."""
