"""Which card a trial needs: the dtypes in which its engine keeps weights and multiplies."""

from __future__ import annotations

from vitscale.engines.dtypes import weight_bytes
from vitscale.trial.known_models import counted_part
from vitscale.trial.model_card import ComputeDtype, TraceRequest
from vitscale.trial.trial import Trial


def trace_request(trial: Trial, *, model_digest: str | None = None) -> TraceRequest:
    """Return the request for a trial's card.

    Args:
        trial: resolved.
        model_digest: digest of the factory's module; None: that of the trial's configuration, where it has one.
    """
    train = trial.train
    narrow_dtype: ComputeDtype = "fp16" if train.precision == "fp16" else "bf16"
    has_narrow_weights = weight_bytes(train) == 2
    is_autocast = train.precision != "fp32" and not has_narrow_weights
    return TraceRequest(
        model=counted_part(trial.model),
        model_digest=model_digest or trial.model_digest,
        device=train.device,
        weight_dtype=narrow_dtype if has_narrow_weights else "fp32",
        autocast_dtype=narrow_dtype if is_autocast else None,
        checkpointing=train.activation_checkpointing,
    )
