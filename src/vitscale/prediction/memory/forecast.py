"""How much memory a rank of a trial will take at its peak, part by part: the highest of a step's moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.hardware import multiplies_in_tiles
from vitscale.model_spec import ParameterShapes, recorded_shapes
from vitscale.prediction.memory.activations import AUTOCAST, Activations, activations
from vitscale.prediction.memory.holding import STATE_BYTES, Holding, Parts
from vitscale.prediction.memory.moments import moments
from vitscale.prediction.memory.replicated import ddp, plain
from vitscale.prediction.memory.sharded import fsdp2
from vitscale.prediction.memory.zero import deepspeed
from vitscale.prediction.memory.zero_settings import modelled
from vitscale.trial import Trial

_HOLDINGS = {"none": plain, "ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed}

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
    """The memory that a rank of a resolved trial takes at its peak; None where it cannot be known by arithmetic.

    Unknown: a model that only building it could count, an engine or an optimizer whose states are not modelled here,
    offloading, and what a DeepSpeed file of the user's own may ask for beyond bucket sizes (`zero_settings.modelled`).
    """
    shapes = recorded_shapes(trial.model)
    if shapes is None or not known(trial):
        return None
    missing = dict(NOT_COVERED)
    if trial.train.compile:
        missing["compile"] = "compiled blocks keep and fuse other activations than these, mostly fewer"
    return MemoryForecast(moments(held(trial, shapes), kept(trial, shapes), shapes), missing)


def forecast_bytes(trial: Trial) -> int | None:
    """`forecast(trial).peak_bytes`; None where unknown."""
    found = forecast(trial)
    return None if found is None else found.peak_bytes


def known(trial: Trial) -> bool:
    """Whether what its engine, its optimizer and its DeepSpeed file hold is modelled here."""
    train = trial.train
    if train.wrapper not in _HOLDINGS or train.optimizer not in STATE_BYTES:
        return False
    return train.offload == "none" and modelled(train)


def held(trial: Trial, shapes: ParameterShapes) -> Holding:
    """What the wrapper of a trial that is `known` holds, whatever the micro-batch."""
    return _HOLDINGS[trial.train.wrapper](trial, shapes)


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
