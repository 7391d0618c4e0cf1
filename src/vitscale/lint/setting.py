"""What a configuration is judged for: the model, the GPUs, and the version of DeepSpeed"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError, shown, unknown
from vitscale.lint.releases import Release, installed_version
from vitscale.trial import model_spec
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec

_IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class Setting:
    """Rules that need what is None here say nothing."""

    model: str | None = None
    """Its name, for messages."""
    parameters: int | None = None
    """Of the model."""
    gpus: int | None = None
    """Ranks in all."""
    deepspeed: str | None = None
    """The version to judge for; None: the newest that the table knows."""
    installed: bool = True
    """Whether that version is installed here, or was asked for."""
    stage: int | None = None
    """The ZeRO stage, where a study sets it whatever the file says."""
    settled: frozenset[str] = frozenset()
    """Dotted keys that a study writes itself: a file that leaves them out leaves nothing open."""

    def described(self) -> str:
        """What the file was judged for, in a few words."""
        judged = Release(self.deepspeed).version
        model = f"{self.model} with {self.parameters:,} parameters" if self.parameters is not None else "no --model"
        gpus = "no --gpus" if self.gpus is None else "1 GPU" if self.gpus == 1 else f"{self.gpus:,} GPUs"
        return f"DeepSpeed {judged}; {model}; {gpus}"


def setting_of(model: str | None, gpus: int | None, deepspeed: str | None) -> Setting:
    """What the command line says, checked and with the installed version filled in.

    Args:
        model: a named model (counted with the 1,000 classes of ImageNet-1k), or the folder of a Hugging Face model.
        gpus: ranks in all.
        deepspeed: a version; None takes the installed one.

    Raises:
        RequestError: the model is not known, or its size is not.
    """
    version = installed_version() if deepspeed is None else deepspeed
    return Setting(
        model=model,
        parameters=None if model is None else _parameters(model),
        gpus=gpus,
        deepspeed=version,
        installed=version is not None,
    )


def _parameters(model: str) -> int:
    if model not in NAMED_MODELS and not _is_folder(model):
        raise unknown("model", model, NAMED_MODELS, next_step="Or give the folder of a Hugging Face model")
    spec = ModelSpec(name=model) if model in NAMED_MODELS else ModelSpec(hf=model)
    count = model_spec.parameters(model_spec.resolve(spec, _IMAGENET_CLASSES if model in NAMED_MODELS else 1))
    if count is None:
        raise RequestError(
            f"the size of {shown(model)} cannot be known without building it",
            valid=["a plain ViT or DeiT", *NAMED_MODELS],
            next_step="Leave --model out: the rules that need a size then say nothing",
        )
    return count


def _is_folder(model: str) -> bool:
    try:
        return Path(model).is_dir()
    except (OSError, ValueError):  # a NUL, a name too long
        return False
