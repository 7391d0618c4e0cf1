"""How much memory a rank of a trial will take at its peak, part by part: the highest of a step's moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.errors import VitscaleError
from vitscale.hardware import multiplies_in_tiles
from vitscale.model_spec import ParameterShapes, parameters, recorded_shapes
from vitscale.prediction.memory.activations import AUTOCAST, Activations, activations
from vitscale.prediction.memory.holding import STATE_BYTES, Holding, Parts, sizes
from vitscale.prediction.memory.in_parts import moments_in_parts, pieces
from vitscale.prediction.memory.moments import moments
from vitscale.prediction.memory.replicated import ddp, plain
from vitscale.prediction.memory.sharded import fsdp2
from vitscale.prediction.memory.zero import deepspeed
from vitscale.prediction.memory.zero_settings import modelled
from vitscale.trial import Trial

_REPLICATED = {"none": plain, "ddp": ddp}
_SHARDED = {"fsdp2": fsdp2, "deepspeed": deepspeed}

NOT_COVERED: Mapping[str, str] = {
    "libraries": "a CUDA context, kernels, workspaces of cuBLAS or oneDNN; NCCL's or gloo's buffers; Python itself",
    "fragmentation": "what the caching allocator reserves beyond what tensors take",
    "data": "images that threads have prepared ahead",
    "start-up": "what building the engine takes for a moment, before the first step",
}
"""What no forecast holds, and is not 0: name -> what it is."""


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes of one rank's tensors; of the rank that takes most, where ranks differ."""

    moments: Mapping[str, Parts]
    """Moment of a step -> bytes by part; a part that is not named is not there."""
    not_covered: Mapping[str, str]
    """What is left out -> why, or what it is."""

    @property
    def peak_moment(self) -> str:
        """The moment that takes most."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        """Bytes by part at the peak."""
        return self.moments[self.peak_moment]

    @property
    def peak_bytes(self) -> int:
        """Of all parts together at the peak."""
        return sum(self.parts.values())


def forecast(trial: Trial) -> MemoryForecast | None:
    """The memory that a rank of a resolved trial takes at its peak; None where `unavailable` has a reason."""
    if unavailable(trial):
        return None
    missing = dict(NOT_COVERED)
    if trial.train.compile:
        missing["compile"] = "compiled blocks keep and fuse other activations than these, mostly fewer"
    shapes = recorded_shapes(trial.model)
    if shapes is not None:
        return MemoryForecast(moments(held(trial, shapes), kept(trial, shapes), shapes), missing)
    missing["convolutions"] = "what a convolution's backward takes for copies in another order of the axes"
    highest: dict[str, Parts] = {}
    for name, parts in in_parts(trial):
        if sum(parts.values()) > sum(highest.get(name, {}).values()):
            highest[name] = {part: size for part, size in parts.items() if size}
    return MemoryForecast(highest, missing)


def unavailable(trial: Trial) -> str:
    """Why arithmetic does not tell a trial's memory; empty where it does.

    A model that only building it could count; an engine or an optimizer whose states are not modelled here; offloading;
    what a DeepSpeed file of the user's own may ask for beyond bucket sizes (`zero_settings.modelled`).
    """
    train = trial.train
    if train.wrapper not in (*_REPLICATED, *_SHARDED):
        return f"what {train.wrapper} holds is not modelled"
    if train.optimizer not in STATE_BYTES:
        return f"the states of {train.optimizer} are not modelled"
    if train.offload != "none" or not modelled(train):
        return "offloading and these settings of the DeepSpeed file are not modelled"
    if recorded_shapes(trial.model) is not None:
        return ""
    try:
        counted = pieces(trial.model, train) is not None
    except (ValueError, VitscaleError):  # never resolved, or its configuration is not here any more
        counted = False
    if not counted:
        return "only building this model could count it"
    if train.wrapper not in _REPLICATED:
        return f"what {train.wrapper} gathers and scatters of Swin V2 and UperNet is not modelled"
    return (
        ""
        if train.device == "cpu" or train.precision not in AUTOCAST
        else "what autocast keeps of this model on a GPU is not modelled"
    )


def forecast_bytes(trial: Trial) -> int | None:
    """`forecast(trial).peak_bytes`; None where unknown."""
    found = forecast(trial)
    return None if found is None else found.peak_bytes


def held(trial: Trial, shapes: ParameterShapes) -> Holding:
    """What the wrapper of a ViT that classifies holds, whatever the micro-batch."""
    replicated = _REPLICATED.get(trial.train.wrapper)
    return replicated(trial, sizes(shapes).all) if replicated else _SHARDED[trial.train.wrapper](trial, shapes)


def in_parts(trial: Trial) -> list[tuple[str, Parts]]:
    """Moments of a trial whose model is counted part by part, several by one name; see `moments_in_parts`."""
    model = pieces(trial.model, trial.train)
    if model is None:
        return []
    holding = _REPLICATED[trial.train.wrapper](trial, parameters(trial.model) or 0)
    return moments_in_parts(model, trial.train, holding)


def kept(trial: Trial, shapes: ParameterShapes) -> Activations:
    """What forward and backward of its micro-batch keep."""
    train = trial.train
    through_deepspeed = train.wrapper == "deepspeed"
    autocast = train.precision in AUTOCAST and not (train.precision == "fp16" and through_deepspeed)
    return activations(
        trial.model,
        train,
        shapes,
        autocast=autocast,
        casts_kept=not (through_deepspeed and train.zero_stage == 3),
        tiles=multiplies_in_tiles(),
    )
