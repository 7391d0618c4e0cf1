"""How curves are called: short, and no two alike that were swept apart ("deepspeed ZeRO-2, compile")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitscale.study.sections import fact_of_label
from vitscale.trial.engines import of_engine
from vitscale.trial.facts import Fact
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import NORMS, OFFLOADED, TrainSpec, Trial

_OF_THE_NAME = ("train.engine", "train.accelerate_backend", "train.zero_stage")
"""Fields that the engine's name holds."""
_LAYOUTS = {"one-gpu-per-node": "one GPU per node", "single-node": "one node", "": "layout not told"}
_BATCHES = {"train.micro_batch": "micro-batch", "train.global_batch": "global batch"}
_LOCAL_NORM = NORMS["local"]
_OF_AN_IMPORT: Mapping[str, Fact] = {"layout": Fact(short=_LAYOUTS)} | dict.fromkeys(
    ("series", "cluster", "device"), Fact(short="{}")
)
"""Labels of imports that are no fields of a study."""


def curve_name(labels: Mapping[str, Any], trial: Trial | None) -> str:
    """The engine, then what else was swept: "ddp", "deepspeed ZeRO-2", "accelerate (FSDP2), micro_batch 16".

    Args:
        labels: the swept fields and their values.
        trial: the one of the curve with the most ranks, for what was not swept.
    """
    train = trial.train if trial is not None else None
    named = {
        field: labels.get(field, getattr(train, field.partition(".")[2]) if train is not None else None)
        for field in _OF_THE_NAME
    }
    engine, backend, stage = (named[field] for field in _OF_THE_NAME)
    wrapper = backend if engine == "accelerate" else engine
    zero = f"ZeRO-{stage}" if wrapper == "deepspeed" and (stage or "train.zero_stage" in labels) else ""
    others = {field: value for field, value in labels.items() if field not in _OF_THE_NAME}
    if engine != "accelerate" and "train.accelerate_backend" in labels:
        others["train.accelerate_backend"] = backend
    if wrapper != "deepspeed" and "train.zero_stage" in labels:
        others["train.zero_stage"] = stage
    keys = [field.rpartition(".")[2] for field in others]
    imported = trial is not None and trial.origin is not None
    # Of an import the engine may be unknown, which says nothing where something else tells its curves apart.
    untold = imported and engine in (None, "unknown") and bool(others)
    return ", ".join(
        [
            *([] if untold else [_engine(engine, backend, zero)]),
            *(
                f"{_BATCHES[field]} {value}"
                if imported and field in _BATCHES
                else _swept(field, value, keys.count(field.rpartition(".")[2]) > 1)
                for field, value in others.items()
            ),
            *(["unequal shares"] if train and train.micro_batches and "train.rank_speeds" not in labels else []),
            *([_LOCAL_NORM] if trial and _norms_locally(trial) and "train.batch_norm" not in labels else []),
        ]
    )


def trial_name(trial: Trial) -> str:
    """The engine and the rank count of one trial, with its accumulation and the images of each rank where these differ:
    "ddp on 2 ranks, accumulation 3, shares 16 + 8".
    """
    train = trial.train
    ranks = f"{trial.world.size} rank{'s' if trial.world.size != 1 else ''}"
    accumulated = f", accumulation {train.grad_accum}" if train.grad_accum > 1 else ""
    shares = f", shares {in_words(train.micro_batches)}" if train.micro_batches else ""
    norm = f", {_LOCAL_NORM}" if _norms_locally(trial) else ""
    return f"{engine_name(train)} on {ranks}{accumulated}{shares}{norm}"


def _norms_locally(trial: Trial) -> bool:
    """Whether it computes another thing than one process for its batch norms; in classification that is no choice."""
    return trial.model.task == "segmentation" and trial.train.batch_norm == "local"


def engine_name(train: TrainSpec) -> str:
    """What distributes training, with what decides most about it: "deepspeed ZeRO-2, optimizer offloaded"."""
    zero = f"ZeRO-{train.zero_stage}" if train.wrapper == "deepspeed" else ""
    offload = f", {OFFLOADED[train.offload]}" if train.offload != "none" else ""
    return _engine(train.engine, train.accelerate_backend, zero) + offload


def _engine(engine: Any, backend: Any, zero: str) -> str:
    if engine in (None, "unknown"):
        return "unknown engine"
    if engine == "none":
        return of_engine(engine).title
    if engine == "accelerate" and backend is not None:
        inside = of_engine(str(backend)).title or str(backend)
        return f"accelerate ({f'{inside} {zero}' if zero else inside})"
    return f"{engine} {zero}" if zero else str(engine)


def _swept(field: str, value: Any, ambiguous: bool) -> str:
    """One swept value, with as little of its field's name as tells it apart from every other field's."""
    if ambiguous:
        return f"{field} {value}"
    if field == "train.rank_speeds" and isinstance(value, (list, tuple)):
        alike = "equal shares" if len(set(map(str, value))) == 1 else "shares"
        return f"{alike} {in_words(value, ' : ')}"
    short = (_OF_AN_IMPORT.get(field) or fact_of_label(field)).short
    if isinstance(short, tuple):
        return short[0 if value else 1] if isinstance(value, bool) else _plainly(field, value)
    if isinstance(short, str):
        return short.format(value) if short else _plainly(field, value)
    return short.get(str(value)) or (str(value) if field == "layout" else _plainly(field, value))


def _plainly(field: str, value: Any) -> str:
    return f"{field.rpartition('.')[2]} {value}"
