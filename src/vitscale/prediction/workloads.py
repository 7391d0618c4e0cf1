"""Trials that train the same: what the runs of one say of another, and configurations answered from the nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitscale.base.forks import spread
from vitscale.engines.checks import computation
from vitscale.errors import unknown
from vitscale.prediction.configurations import Candidate, Evaluated, gathered
from vitscale.prediction.evaluating import evaluate
from vitscale.prediction.evidence import MeasuredPoint, Series
from vitscale.prediction.fitting import DRAWS, Fitted, FittedSeries
from vitscale.prediction.variants import PredictionVariant, variant
from vitscale.trial.fields import fields_where
from vitscale.trial.trial import LOCATION_FIELDS, WRAPPER_FIELDS, TrainSpec, Trial

_MANY, _MANY_KINDS = 1 << 17, 24
"""Draws x configurations, or kinds of configurations, from which forks of this process are worth their cost."""


def evaluate_all(
    fitted: Fitted,
    series: str,
    candidates: Sequence[Candidate],
    *,
    with_memory: bool = True,
    hosts_assumed: bool = False,
    memory_capacity_bytes: int | None = None,
    draws: int = DRAWS,
) -> Evaluated:
    """Evaluates configurations of any engine, each from a series of the same workload that measured its engine, if any.

    Configurations that were measured are answered from their own runs. `memory_capacity_bytes` is that of the measured
    type of GPU.

    Raises:
        RequestError: there is no such series, or an engine refuses the series' options.
    """
    if series not in fitted.series:
        raise unknown("series", series, fitted.series)
    base = fitted.series[series]
    by_kind: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for n, candidate in enumerate(candidates):
        by_kind.setdefault(tuple(candidate.changes.items()), []).append(n)
    # Before any fork: a series is fitted when it is first asked for, and what a fork has fitted is lost.
    kinds = [
        ([candidates[n] for n in members], _variant_of(fitted, base, dict(changes)))
        for changes, members in by_kind.items()
    ]

    def piece(kind: tuple[list[Candidate], tuple[PredictionVariant, tuple[MeasuredPoint, ...]]]) -> Evaluated:
        own, (asked, points) = kind
        return evaluate(
            asked,
            own,
            with_memory=with_memory,
            measured=points,
            hosts_assumed=hosts_assumed,
            memory_capacity_bytes=memory_capacity_bytes if asked.gpu is None else None,  # another type has its own
            draws=draws,
        )

    pieces = spread(piece, kinds, fewest=2 if draws * len(candidates) >= _MANY else _MANY_KINDS)
    return gathered(list(zip(by_kind.values(), pieces, strict=True)))


def _variant_of(
    fitted: Fitted, base: FittedSeries, changes: Mapping[str, Any]
) -> tuple[PredictionVariant, tuple[MeasuredPoint, ...]]:
    """(the variant to work from, all points of its workload that were measured with its wrapper and split).

    It continues a series of the workload that was measured with the wrapper, one with as many ranks to a model before
    others. Where none was, arithmetic makes it from `base`, and there are no points. `changes`: a candidate's.
    """
    work, own = workload(base.points[-1].trial), base.series
    ranked = sorted(
        fitted.evidence.series,
        key=lambda series: (
            series.points[-1].trial.parallel != changes["parallel"],
            series.name != own.name,
            series.mode != own.mode,
        ),
    )
    alike = [
        series for series in ranked
        if workload(trial := series.points[-1].trial) == work
        and all(getattr(trial.train, name) == changes[name] for name in changes if name in TrainSpec.model_fields)
    ]  # fmt: skip
    asked = variant(fitted.series[alike[0].name] if alike else base, changes)
    return asked, measured_like(alike, asked.trial)


def measured_like(series: Sequence[Series], trial: Trial) -> tuple[MeasuredPoint, ...]:
    """Points of the same workload that differ from a trial in world and batch alone."""
    same = (workload(trial), _of_a_step(trial))
    points = (point for each in series for point in each.points if not point.trial.train.micro_batches)
    return tuple(point for point in points if (workload(point.trial), _of_a_step(point.trial)) == same)


def _of_a_step(trial: Trial) -> dict[str, object]:
    """All of the training that decides how long a step takes, but its batches."""
    return trial.train.model_dump(include={*WRAPPER_FIELDS, *_OF_A_STEP}) | {"parallel": trial.parallel}


_OF_A_STEP = fields_where(TrainSpec, lambda traits: traits.affects_step_time)


def workload(trial: Trial) -> tuple[object, ...]:
    """What must be alike for one trial's step to say something of another's.

    Wrapper, batch, activation checkpointing and how many ranks share a model may differ.
    """
    return (
        trial.model,
        trial.data.model_dump(exclude={"fraction", *LOCATION_FIELDS}),
        *(getattr(trial.train, name) for name in _OF_A_STEP if name != "activation_checkpointing"),
        trial.world.threads_per_rank,
        trial.origin,
        computation(trial),
    )
