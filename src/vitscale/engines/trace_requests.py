"""Which trials need a card, and which one: the dtypes in which the engine keeps weights and multiplies."""

from __future__ import annotations

from vitscale.engines.dtypes import weight_bytes
from vitscale.trial.known_models import counted_part
from vitscale.trial.model_card import ComputeDtype, TraceRequest
from vitscale.trial.model_cost import has_formula, vit_shape
from vitscale.trial.trial import Trial


def needs_card(trial: Trial) -> bool:
    """Whether the counts of a trial come from a card of its model, because no formula gives them.

    Raises:
        ValueError: the model was never resolved.
        VitscaleError: the configuration of its model is gone.
    """
    builds_own_model = trial.train.script is not None
    is_unknown_model = trial.model.unknown  # of an imported log that does not say which model it was
    if builds_own_model or is_unknown_model:
        return False  # nobody but the training itself can build the model, to trace it
    if not has_formula(trial.model):
        return True
    return not _formula_holds(trial) and not _is_split(trial)


def _formula_holds(trial: Trial) -> bool:
    """Whether the formula of the trial's model counts what is kept in its precision and on its device.

    What autocast keeps on a GPU has a formula for ViTs that classify, and for no Swin and no UperNet.
    """
    if trial.train.device != "cuda" or not is_autocast(trial):
        return True
    return vit_shape(trial.model) is not None and trial.model.task == "classification"


def _is_split(trial: Trial) -> bool:
    """Whether ranks share one copy of the model. A card counts a whole model, and not a rank's share of it."""
    return trial.parallel.ranks_per_model > 1


def is_autocast(trial: Trial) -> bool:
    """Whether the trial multiplies in 16 bits and keeps its weights in fp32."""
    return trial.train.precision in ("bf16", "fp16") and weight_bytes(trial.train) == 4


def trace_request(trial: Trial, *, model_digest: str | None = None) -> TraceRequest:
    """Return the request for a trial's card.

    Args:
        trial: resolved.
        model_digest: digest of the factory's module; None: that of the trial's configuration, where it has one.
    """
    return TraceRequest(
        model=counted_part(trial.model),
        model_digest=model_digest or trial.model_digest,
        device=trial.train.device,
        weight_dtype=_weight_dtype(trial),
        autocast_dtype=_16_bit_dtype(trial) if is_autocast(trial) else None,
        checkpointing=trial.train.activation_checkpointing,
    )


def _weight_dtype(trial: Trial) -> ComputeDtype:
    """Return the dtype in which the model holds its weights."""
    return _16_bit_dtype(trial) if weight_bytes(trial.train) == 2 else "fp32"


def _16_bit_dtype(trial: Trial) -> ComputeDtype:
    """Return the dtype of what the trial has in 16 bits, if anything."""
    return "fp16" if trial.train.precision == "fp16" else "bf16"
