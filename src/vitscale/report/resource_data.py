"""Utilisation, memory and energy as rows for their charts: a trial's figure, and those of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveResult, Interval, TrialResult
from vitscale.analysis.runs.resources import RankResources, ResourceFigures
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.trial.trial import Device

MOST_RANKS_DRAWN = 16
"""Of a trial, each as a point of its own; of a larger one only the lowest and the highest."""


@dataclass(frozen=True)
class Kind:
    """One figure of a chart."""

    name: str
    whole: Callable[[ResourceFigures], float | Interval | None]
    """Of the trial, with its interval over runs where it has one."""
    of_rank: Callable[[RankResources], float | None] | None = None
    device: Device | None = None
    """Of the trials whose figure is of this kind; None: of any."""

    def of_trial(self, trial: TrialResult) -> Interval | None:
        """The figure of a trial, or None."""
        fits = self.device in (None, trial.trial.train.device)
        value = self.whole(trial.resources) if fits and trial.resources is not None else None
        return Interval(value, None, None) if isinstance(value, int | float) else value

    def of_ranks(self, trial: TrialResult) -> dict[int, float]:
        """Rank to its own figure, of those that have one."""
        if self.of_trial(trial) is None or self.of_rank is None or trial.resources is None:
            return {}
        return {rank.rank: value for rank in trial.resources.by_rank if (value := self.of_rank(rank)) is not None}


@dataclass(frozen=True)
class Resource:
    """One chart: its kinds below each other, batch policies side by side."""

    name: str
    title: str
    axis: str
    kinds: tuple[Kind, ...]
    show: Callable[[float], str]
    scale: float = 1.0
    """What a value is multiplied by for its axis."""
    axis_format: str = "~r"
    joined: str = ""
    """What the line goes through, where a trial's ranks differ."""


def _gibibytes(value: float) -> str:
    return words.bytes_text(round(value))


RESOURCES = (
    Resource(
        "utilisation",
        "Utilisation",
        "utilisation",
        (
            Kind("GPU: a kernel runs", lambda one: one.gpu_utilisation, lambda rank: rank.gpu_utilisation),
            Kind("CPU: threads that compute", lambda one: one.cpu_utilisation, lambda rank: rank.cpu_utilisation),
        ),
        words.percent,
        axis_format="%",
        joined="their mean",
    ),
    Resource(
        "memory",
        "Peak memory per rank",
        "GiB",
        (
            Kind("GPU, allocated", lambda one: one.cuda_allocated_bytes, lambda rank: rank.peak_bytes, "cuda"),
            Kind("GPU, reserved", lambda one: one.cuda_reserved_bytes, None, "cuda"),
            Kind("GPU, whole device", lambda one: one.cuda_device_bytes, None, "cuda"),
            Kind("resident (RSS)", lambda one: one.peak_rss_bytes, lambda rank: rank.peak_bytes, "cpu"),
        ),
        _gibibytes,
        scale=2.0**-30,
        joined="the highest",
    ),
    Resource(
        "energy",
        "Energy per image",
        "J per image",
        (Kind("energy", lambda one: one.joules_per_image),),
        lambda value: f"{words.number(value)} J",
    ),
)


def used(analysis: Analysis, curves: Sequence[CurveResult], resource: Resource) -> list[Row]:
    """One row per trial, mode and kind that is known, with its lowest and highest rank, else its 95 % interval."""
    rows = []
    for row, kind, trial in _places(analysis, curves, resource):
        value = kind.of_trial(trial)
        if value is None:
            continue
        ranks = kind.of_ranks(trial)
        ends = (min(ranks.values()), max(ranks.values())) if len(ranks) > 1 else (value.low, value.high)
        low, high = (None if end is None else end * resource.scale for end in ends)
        rows.append(
            row
            | {"value": value.centre * resource.scale, "low": low, "high": high}
            | {"of_runs": low is not None and not ranks, "shown": resource.show(value.centre)}
            | {"spread": _spread(ranks, resource) or _bounds(value, resource)}
        )
    return rows


def rank_points(analysis: Analysis, curves: Sequence[CurveResult], resource: Resource) -> list[Row]:
    """One row per rank of each trial that has several, as far as there is room."""
    rows = []
    for row, kind, trial in _places(analysis, curves, resource):
        ranks = kind.of_ranks(trial)
        in_order = sorted(ranks, key=lambda rank: ranks[rank])
        drawn = in_order if len(in_order) <= MOST_RANKS_DRAWN else [in_order[0], in_order[-1]]
        rows += [
            row | {"value": ranks[rank] * resource.scale, "shown": resource.show(ranks[rank]), "rank": rank}
            for rank in drawn
            if len(drawn) > 1
        ]
    return rows


def _places(
    analysis: Analysis, curves: Sequence[CurveResult], resource: Resource
) -> Iterator[tuple[Row, Kind, TrialResult]]:
    """Where each figure of each trial stands in the chart."""
    for curve in curves:
        for point in curve.points:
            where = {"series": curve.name, "mode": curve.mode, "gpus": point.gpus, "trial": point.trial_id}
            for place, kind in enumerate(resource.kinds):
                yield where | {"kind": kind.name, "kind_place": place}, kind, analysis.trials[point.trial_id]


def _spread(ranks: dict[int, float], resource: Resource) -> str:
    """ "62 % (rank 3) to 94 % (rank 0)"; empty where there are not two ranks that differ."""
    if not ranks or min(ranks.values()) == max(ranks.values()):
        return ""
    ends = [choose(sorted(ranks), key=lambda rank: ranks[rank]) for choose in (min, max)]
    return " to ".join(f"{resource.show(ranks[rank])} (rank {rank})" for rank in ends)


def _bounds(value: Interval, resource: Resource) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"95 % interval {resource.show(value.low)} to {resource.show(value.high)}"
