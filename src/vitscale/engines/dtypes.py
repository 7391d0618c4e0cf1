"""Bytes of a weight, and of a gradient that travels, as the trial's engine keeps and sends them."""

from __future__ import annotations

from vitscale.engines import wrapper_facts
from vitscale.trial.trial import TrainSpec


def weight_bytes(train: TrainSpec) -> int:
    """Return the bytes of a weight as the model holds it: autocast casts fp32 weights."""
    has_bf16_weights = train.precision == "bf16-params"
    has_fp16_weights = train.precision == "fp16" and wrapper_facts(train).fp16_weights
    return 2 if has_bf16_weights or has_fp16_weights else 4


def communicated_bytes(train: TrainSpec) -> int:
    """Return the bytes of a gradient's element as it travels: in the weights' dtype unless the study names another."""
    if train.gradient_dtype is None:
        return weight_bytes(train)
    return {"fp32": 4, "bf16": 2, "fp16": 2}[train.gradient_dtype]
