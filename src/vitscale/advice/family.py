"""Which measured series advice is about: the one asked for, and those that train the same under another wrapper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitscale.errors import RequestError, explain, unknown
from vitscale.prediction.candidates import Candidate
from vitscale.prediction.evidence import Evidence, Series
from vitscale.trial import HOW_FOUND, Trial

_OF_A_STEP = ("precision", "device", "optimizer", "gradient_clipping", "compile")
"""Fields of `TrainSpec` that decide how long a step takes, beside those in which candidates differ."""


@dataclass(frozen=True)
class Family:
    """A series, and others of the same batch policy that train the same model on the same data."""

    reference: Series
    members: tuple[Series, ...]
    """The reference first."""

    @property
    def trial(self) -> Trial:
        """Of the reference, at its largest rank count."""
        return self.reference.points[-1].trial

    @property
    def engines(self) -> frozenset[tuple[str, int]]:
        """(engine, ZeRO stage) of every member."""
        return frozenset(_engine(series) for series in self.members)

    def nearest(self, candidate: Candidate) -> Series:
        """The member to work a candidate out from: of its engine and stage, else the reference; of those the one with
        the nearest micro-batch."""
        same = [series for series in self.members if _engine(series) == (candidate.engine, candidate.zero_stage)]
        return min(same or [self.reference], key=lambda series: _apart(series, candidate.micro_batch))


def family(evidence: Evidence, name: str | None) -> Family:
    """The series called `name`, or the best measured one; and its kin.

    Best: the one with most rank counts, of these strong-micro before strong-global before weak, then with most runs.

    Raises:
        RequestError: there is no such series, or none at all.
    """
    if not evidence.series:
        raise RequestError(
            explain(
                "the results have no completed run to advise from",
                next_step="`vitscale report` on them says what happened to each trial",
            )
        )
    by_name = {series.name: series for series in evidence.series}
    if name is not None and name not in by_name:
        raise unknown("series", name, by_name, next_step="Name one of them with --series")
    reference = by_name[name] if name is not None else max(evidence.series, key=_standing)
    work = workload(reference.points[-1].trial)
    kin = [
        series
        for series in evidence.series
        if series is not reference and series.mode == reference.mode and _work(series) == work
    ]
    return Family(reference, (reference, *kin))


def _standing(series: Series) -> tuple[int, int, int]:
    policies = ("weak", "strong-global", "strong-micro")
    runs = sum(len(point.step_seconds) for point in series.points)
    return (len(series.points), policies.index(series.mode), runs)


def _engine(series: Series) -> tuple[str, int]:
    train = series.points[-1].trial.train
    return (train.engine, train.zero_stage)


def _apart(series: Series, micro_batch: int) -> float:
    return abs(math.log(series.points[-1].trial.train.micro_batch / micro_batch))


def _work(series: Series) -> tuple[Any, ...]:
    return workload(series.points[-1].trial)


def workload(trial: Trial) -> tuple[Any, ...]:
    """What must be alike for one trial's step to say something of another's; wrapper and batch may differ."""
    return (
        trial.model,
        trial.data.model_dump(exclude={"fraction", *HOW_FOUND}),
        *(getattr(trial.train, name) for name in _OF_A_STEP),
        trial.world.threads_per_rank,
        trial.origin,
    )


def measured_micro_batches(members: Sequence[Series]) -> frozenset[int]:
    """Of all points of some series."""
    return frozenset(point.trial.train.micro_batch for series in members for point in series.points)
