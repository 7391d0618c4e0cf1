"""What the user says of imported files that they do not tell themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from vitscale.errors import RequestError, shown, unknown
from vitscale.importers.contents import Setting
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec, counted, parameters, resolve
from vitscale.trial.trial import Precision

LogFormat = Literal["epochs", "deepspeed", "trainer-state", "csv", "trace"]
LinkFormat = Literal["nccl-tests", "perftest"]
"""Those that tell of a network, and of no training."""
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
OF_LINKS: tuple[LinkFormat, ...] = get_args(LinkFormat)
MOST_GPUS = 1_000_000
_MOST_IMAGES = 10_000_000_000
_CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}
_CLASSES_ELSE = 1000
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Options:
    """What the user says of the files; None: they tell it themselves, or it is unknown."""

    model: str | None = None
    image_size: int | None = None
    engine: str | None = None
    zero_stage: int | None = None
    precision: str | None = None
    micro_batch: int | None = None
    train_samples: int | None = None
    gpus: int | None = None
    name: str | None = None
    parameters: str | None = None
    """Of a model that has no name here: "110M"."""

    def given(self) -> dict[str, str]:
        """Those that were given, as text."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: str(value) for name, value in values.items() if value is not None}


def check(options: Options) -> None:
    """Refuses values that no run can have.

    Raises:
        RequestError: names the option, the value and the valid ones.
    """
    _within("--gpus", options.gpus, 1, MOST_GPUS)
    _within("--micro-batch", options.micro_batch, 1, 1_000_000)
    _within("--train-samples", options.train_samples, 1, _MOST_IMAGES)
    _within("--image-size", options.image_size, 1, 8192)
    _within("--zero-stage", options.zero_stage, 0, 3)
    if options.precision is not None:
        precision(options.precision)
    for option, value in (("--engine", options.engine), ("--name", options.name)):
        if value is not None and not (value.strip() and value.isprintable() and len(value) <= _LONGEST_NAME):
            raise RequestError(f"{option} is {shown(value)}", valid=[f"1 to {_LONGEST_NAME} printable characters"])
    if options.image_size is not None and options.model is None:
        raise RequestError("--image-size is given without --model", next_step="Name the model too: --model vit-b16")
    spec = model_of(options, Setting(1))
    if options.model is not None and options.parameters is not None:
        known = parameters(spec)
        raise RequestError(
            f"--parameters {shown(options.parameters)} is for a model that has no name here",
            next_step=f"Leave it out: {options.model} has {known:,}" if known else "Give one of the two",
        )


def precision(text: str) -> Precision:
    """The precision of that name.

    Raises:
        RequestError: there is none.
    """
    known: tuple[Precision, ...] = get_args(Precision)
    for name in known:
        if text == name:
            return name
    raise unknown("precision", text, known)


def model_of(options: Options, setting: Setting) -> ModelSpec:
    """The resolved model; where none was named that is known here, one of which at most the parameters are known.

    Raises:
        RequestError: it cannot be built.
    """
    classes = _CLASSES.get(setting.dataset or "", _CLASSES_ELSE)
    name = options.model or (setting.model if setting.model in NAMED_MODELS else None)
    if name is None:
        told = counted(options.parameters) if options.parameters else setting.parameters
        return ModelSpec(parameter_count=told)
    if name not in NAMED_MODELS and not Path(name).is_dir():
        raise unknown("model", name, NAMED_MODELS, "Name one of these, a Hugging Face folder, or say --parameters 110M")
    spec = ModelSpec(name=name) if name in NAMED_MODELS else ModelSpec(hf=name)
    if options.image_size is not None:  # set by the constructor: a size that is left out is the configuration's
        spec = ModelSpec(name=spec.name, hf=spec.hf, image_size=options.image_size)
    return resolve(spec, classes)


def _within(option: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise RequestError(f"{option} is {value}", valid=[f"{least:,} to {most:,}"])
