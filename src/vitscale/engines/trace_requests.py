"""Which trials need a card, and which one: the dtypes in which the engine keeps weights and multiplies."""

from __future__ import annotations

from vitscale.engines.dtypes import weight_bytes
from vitscale.trial.known_models import counted_part
from vitscale.trial.model_card import ComputeDtype, TraceRequest
from vitscale.trial.model_cost import has_formula, vit_shape
from vitscale.trial.trial import Trial


def needs_card(trial: Trial) -> bool:
    """Whether a trial's counts come from a card: no formula counts its model, or not under autocast on a GPU.

    A script builds its own model, and an imported log does not say which model it was: these have no card.

    Raises:
        ValueError: the model was never resolved.
        VitscaleError: the configuration of its model is gone.
    """
    if trial.model.unknown or trial.train.script is not None:
        return False
    if not has_formula(trial.model):
        return True
    if trial.parallel.ranks_per_model > 1:
        return False
    is_plain_vit = vit_shape(trial.model) is not None and trial.model.task == "classification"
    return trial.train.device == "cuda" and is_autocast(trial) and not is_plain_vit


def is_autocast(trial: Trial) -> bool:
    """Whether the trial multiplies in 16 bits and keeps its weights in fp32."""
    return trial.train.precision in ("bf16", "fp16") and weight_bytes(trial.train) == 4


def trace_request(trial: Trial, *, model_digest: str | None = None) -> TraceRequest:
    """Return the request for a trial's card.

    Args:
        trial: resolved.
        model_digest: digest of the factory's module; None: that of the trial's configuration, where it has one.
    """
    train = trial.train
    narrow_dtype: ComputeDtype = "fp16" if train.precision == "fp16" else "bf16"
    has_narrow_weights = weight_bytes(train) == 2
    return TraceRequest(
        model=counted_part(trial.model),
        model_digest=model_digest or trial.model_digest,
        device=train.device,
        weight_dtype=narrow_dtype if has_narrow_weights else "fp32",
        autocast_dtype=narrow_dtype if is_autocast(trial) else None,
        checkpointing=train.activation_checkpointing,
    )
