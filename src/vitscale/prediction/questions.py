"""What is to differ from the measured series, as a user names it: another model, image size, batch, engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from vitscale.errors import RequestError, check_within, nearest, shown, unknown
from vitscale.prediction.answering import can_grow
from vitscale.prediction.evidence import Evidence, Point, Series
from vitscale.prediction.gpu_types import gpu_type
from vitscale.prediction.predicting import Question
from vitscale.prediction.variants import differing
from vitscale.trial.engines import ENGINES
from vitscale.trial.model_cost import counted
from vitscale.trial.model_spec import ModelSpec, fields_named, resolve
from vitscale.trial.trial import Precision

_IMAGENET_CLASSES = 1000
"""Classes of a model whose own number is not recorded."""
_MOST_A_PRICE = 1e9


@dataclass(frozen=True)
class Changes:
    """What is to differ, as on the command line; None: as measured."""

    model: str | None = None
    """A named model, or the folder of a Hugging Face model."""
    image_size: int | None = None
    engine: str | None = None
    zero_stage: int | None = None
    precision: str | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    device: str | None = None
    """Another type of GPU."""
    parameters: str | None = None
    """Number of parameters of a model that has no name here: "110M"."""


def told(evidence: Evidence, changes: Changes) -> tuple[Evidence, Changes]:
    """Takes facts that an import's files left out as if they were measured: its engine, its model or parameters.

    Returns:
        The evidence with these facts, and the changes; these still apply to what a series knows already.

    Raises:
        RequestError: the parameters are no number, or every model is known.
    """
    count = None if changes.parameters is None else counted(changes.parameters)
    if count is not None and not any(series.points[-1].trial.model.unknown for series in evidence.series):
        known = ", ".join(sorted({series.points[-1].trial.model.name or "a folder's" for series in evidence.series}))
        what = f"--parameters {shown(changes.parameters)}: the model is known ({known})"
        raise RequestError(what, next_step="Leave it out; --model NAME asks for another")
    _check(changes)
    series = [
        replace(own, points=tuple(_told(point, changes, count) for point in own.points)) for own in evidence.series
    ]
    return replace(evidence, series=tuple(series)), replace(changes, parameters=None)


def _told(point: Point, changes: Changes, count: int | None) -> Point:
    trial = point.trial
    train, model = trial.train, trial.model
    if trial.origin is not None and train.engine not in ENGINES and changes.engine is not None:
        stage = {"zero_stage": changes.zero_stage} if changes.engine == "deepspeed" and changes.zero_stage else {}
        train = train.model_copy(update={"engine": changes.engine, **stage})
    if model.unknown and changes.model is not None:
        model = _model(changes.model, changes.image_size or model.image_size, model)
    elif model.unknown and count is not None:
        model = model.model_copy(update={"parameter_count": count})
    return replace(point, trial=trial.model_copy(update={"train": train, "model": model}))


def counts_ahead(evidence: Evidence) -> tuple[int, ...]:
    """Rank counts asked about where the user names none: 2, 4 and 8 times the largest measured one."""
    most = max((point.gpus for series in evidence.series for point in series.points), default=1)
    return (2 * most, 4 * most, 8 * most)


def matching(names: Collection[str], series: str) -> list[str]:
    """The series of that name, or all that begin with it: "ddp" is "ddp, strong-micro" and "ddp, weak".

    Raises:
        RequestError: there is none.
    """
    matches = [series] if series in names else [name for name in names if name.startswith(f"{series}, ")]
    if not matches:
        valid = [shown(name) for name in sorted(names)]
        step = "Name one of them, or what it begins with, with --series"
        raise RequestError(
            f"unknown series {shown(series)}", valid=valid, next_step=step, hint=nearest(series, [*names])
        )
    return matches


def questions(
    evidence: Evidence,
    gpus: tuple[int, ...],
    changes: Changes,
    *,
    series: str | None = None,
    nodes_of: int | None = None,
    price_per_gpu_hour: float | None = None,
    memory_capacity_bytes: int | None = None,
) -> tuple[Question, ...]:
    """One question for each series asked about, because another model depends on what the series itself trains.

    Raises:
        RequestError: there is no such series, or a value cannot be.
    """
    if not evidence.series:
        raise evidence.refusal("to predict from")
    _check(changes)
    named = {each.name: each for each in evidence.series}
    asked = list(named) if series is None else matching(named, series)
    if nodes_of is not None and nodes_of < 1:
        raise RequestError(f"--nodes-of is {nodes_of}", valid=["1 or more"])
    if price_per_gpu_hour is not None and not 0 < price_per_gpu_hour <= _MOST_A_PRICE:
        raise RequestError(f"--price is {price_per_gpu_hour:g}", valid=["more than 0"])
    return tuple(
        Question(
            gpus=gpus,
            nodes_of=nodes_of,
            series=each.name,
            changes=_changed(each, changes),
            price_per_gpu_hour=price_per_gpu_hour,
            memory_capacity_bytes=memory_capacity_bytes,
        )
        for each in _chosen([named[name] for name in asked], gpus, changes)
    )


def _chosen(series: Sequence[Series], gpus: tuple[int, ...], changes: Changes) -> list[Series]:
    """The series that can have such rank counts; where some were measured with the changes, those alone."""
    able = [member for member in series if max(gpus) == 1 or can_grow(member, changes.engine)]
    if not able:
        names = ", ".join(shown(member.name) for member in series)
        raise RequestError(f"{names}: measured without an engine, so on one rank only", next_step="Add --engine ddp")
    return [member for member in able if not differing(member.points, _changed(member, changes))] or able


def _check(changes: Changes) -> None:
    if changes.engine is not None and changes.engine not in ENGINES:
        raise unknown("engine", changes.engine, ENGINES)
    if changes.precision is not None and changes.precision not in get_args(Precision):
        raise unknown("precision", changes.precision, get_args(Precision))
    check_within("--zero-stage", changes.zero_stage, 0, 3)
    check_within("--micro-batch", changes.micro_batch, 1, 1_000_000)
    check_within("--grad-accum", changes.grad_accum, 1, 1_000_000)
    check_within("--image-size", changes.image_size, 1, 8192)


def _changed(series: Series, changes: Changes) -> dict[str, Any]:
    """The changes by field of `TrainSpec`, with the model and the GPU resolved: see `variants.variant`."""
    trial = series.points[-1].trial
    given = {field.name: getattr(changes, field.name) for field in fields(changes)}
    asked = {name: value for name, value in given.items() if value is not None}
    if "device" in asked:
        asked["gpu"] = gpu_type(asked.pop("device"))
    if "model" in asked or "image_size" in asked:
        name, size = asked.pop("model", None), asked.pop("image_size", trial.model.image_size)
        asked["model"] = _model(name, size, trial.model)
    return asked


def _model(name: str | None, image_size: int, measured: ModelSpec) -> ModelSpec:
    """`measured` at another image size, or another model with as many classes."""
    classes = measured.num_classes or _IMAGENET_CLASSES
    if name is None:
        return resolve(measured.model_copy(update={"image_size": image_size}), classes)
    asked = ModelSpec(task=measured.task, image_size=image_size, num_classes=classes)
    return resolve(asked.model_copy(update=fields_named(name)), classes, measured.channels)
