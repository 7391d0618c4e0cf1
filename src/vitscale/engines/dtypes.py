"""Bytes of weights and of gradients on their way, as the trial's engine keeps and sends them."""

from __future__ import annotations

from vitscale.engines import wrapper_facts
from vitscale.trial.trial import TrainSpec


def weight_bytes(train: TrainSpec) -> int:
    """Bytes of a weight as the model holds it: autocast casts fp32 weights."""
    has_fp16_weights = train.precision == "fp16" and wrapper_facts(train).fp16_weights
    return 2 if train.precision == "bf16-params" or has_fp16_weights else 4


def communicated_bytes(train: TrainSpec) -> int:
    """Bytes of a gradient's element as it travels: in the weights' dtype unless the study names another."""
    return {"fp32": 4, "bf16": 2, "fp16": 2, None: weight_bytes(train)}[train.gradient_dtype]
