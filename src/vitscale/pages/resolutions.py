"""Memory and time by image size, measured and by arithmetic, for studies that vary the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.runs.compute import flops_per_image
from vitscale.analysis.scaling import curve_name
from vitscale.pages.tables import interval_cell
from vitscale.prediction.memory.forecast import LEFT_OUT, forecast_bytes, unavailable
from vitscale.present import units
from vitscale.present.data import attributes, estimate_fields
from vitscale.present.document import Cell, Column, Row, RowGroup, Table
from vitscale.trial.trial import Mode

_SIZE_FIELD = "model.image_size"


@dataclass(frozen=True)
class SizePoint:
    """One trial of a series, measured and by arithmetic; a field is None where it is unavailable."""

    image_size: int
    result: TrialResult
    tensor_bytes: int | None
    """One rank's tensors at their peak, by arithmetic."""
    forecast_bytes: int | None
    """The peak to be measured, by arithmetic. On a GPU it is the tensors; on a CPU, where all resident memory counts,
    it includes what a rank typically takes beside them (`prediction.memory.forecast`)."""
    by_flops_seconds: float | None
    """Seconds of a step: those of the next smaller image size that was measured, times the ratio of FLOPs."""


@dataclass(frozen=True)
class SizeSeries:
    """Trials that differ in the size of images alone."""

    name: str
    mode: Mode
    gpus: int
    points: tuple[SizePoint, ...]
    """Two or more points, by image size."""


def by_resolution(analysis: Analysis) -> tuple[SizeSeries, ...]:
    """Return the series of a study, in the order of its curves; none where the size was not varied."""
    trial_by_size_by_series: dict[_SeriesKey, dict[int, TrialResult]] = {}
    for curve, point, result in analysis.along(analysis.curves):
        if _SIZE_FIELD in curve.labels:
            key = _SeriesKey(curve.mode, point.gpus, _name_without_size(curve, result))
            trial_by_size_by_series.setdefault(key, {})[result.trial.model.image_size] = result
    has_several_rank_counts = len({key.gpus for key in trial_by_size_by_series}) > 1
    series = []
    for key, trial_by_size in trial_by_size_by_series.items():
        if len(trial_by_size) > 1:
            name = f"{key.name}, {units.ranks(key.gpus)}" if has_several_rank_counts else key.name
            series.append(SizeSeries(name, key.mode, key.gpus, _points_by_size(trial_by_size)))
    return tuple(series)


class _SeriesKey(NamedTuple):
    """The properties that trials of one series have in common."""

    mode: Mode
    gpus: int
    name: str
    """Name of their curves without the size."""


def _name_without_size(curve: CurveResult, result: TrialResult) -> str:
    return curve_name({field: value for field, value in curve.labels.items() if field != _SIZE_FIELD}, result.trial)


def _points_by_size(trial_by_size: dict[int, TrialResult]) -> tuple[SizePoint, ...]:
    """Return the points of a series in the order of image sizes. `trial_by_size`: image size -> its trial."""
    points = []
    smaller: TrialResult | None = None
    for size, result in sorted(trial_by_size.items()):
        tensor_bytes = forecast_bytes(result.trial)
        measurable_bytes = _measurable_peak_bytes(tensor_bytes, result)
        points.append(SizePoint(size, result, tensor_bytes, measurable_bytes, _seconds_by_flops(smaller, result)))
        if result.step_seconds is not None:
            smaller = result
    return tuple(points)


def _measurable_peak_bytes(tensor_bytes: int | None, result: TrialResult) -> int | None:
    """Return the peak to be measured where tensors take `tensor_bytes` (`SizePoint.forecast_bytes`)."""
    if tensor_bytes is None or result.trial.train.device == "cuda":
        return tensor_bytes
    overhead = LEFT_OUT["cpu"]
    return round(tensor_bytes * overhead.factor + overhead.fixed_bytes)


def _seconds_by_flops(smaller: TrialResult | None, result: TrialResult) -> float | None:
    """Return the seconds of a step of `result` by those of a smaller size; None where FLOPs or seconds are unknown."""
    if smaller is None or smaller.step_seconds is None:
        return None
    smaller_flops = flops_per_image(smaller.trial)
    flops = flops_per_image(result.trial)
    if isinstance(smaller_flops, str) or isinstance(flops, str):
        return None
    return smaller.step_seconds.value * flops / smaller_flops


_TITLE = "Memory and time by image size"


def resolution_table(analysis: Analysis) -> Table | None:
    """Return a table with a row for each image size of each series; None where the size was not varied."""
    series = by_resolution(analysis)
    if not series:
        return None
    points: list[SizePoint] = []
    for curve in series:
        points += curve.points
    unit = units.time_unit(p.result.step_seconds.value for p in points if p.result.step_seconds is not None)
    groups = []
    for curve in series:
        groups.append(RowGroup(curve.name, tuple(_size_row(point, unit) for point in curve.points)))
    headings = (
        "image size", f"step ({unit.sign})", "by FLOPs", "peak memory", "forecast", "of it tensors",
        "measured / forecast", "outcome",
    )  # fmt: skip
    return Table(
        columns=tuple(map(Column, headings)),
        groups=tuple(groups),
        notes=(_forecast_note(points), _FLOPS_NOTE, *_unavailable_notes(points)),
        title=_TITLE,
        label="curve",
    )


def _size_row(point: SizePoint, unit: units.Unit) -> Row:
    """Return the row of one image size."""
    result = point.result
    share = result.peak_bytes / point.forecast_bytes if result.peak_bytes and point.forecast_bytes else None
    return (
        Cell(f"{point.image_size:,}"),
        interval_cell(result.step_seconds, unit.text),
        Cell(unit.text(point.by_flops_seconds)),
        Cell(units.size(result.peak_bytes)),
        Cell(units.size(point.forecast_bytes)),
        Cell(units.size(point.tensor_bytes)),
        Cell(units.share(share)),
        Cell("" if result.outcome == "completed" else result.outcome or "not run yet"),
    )


_FLOPS_NOTE = "By FLOPs: the step of the next smaller size measured, times the ratio of FLOPs."


def _forecast_note(points: Sequence[SizePoint]) -> str:
    """Return a note on what the forecast of memory includes."""
    note = "Forecast: one rank's tensors by arithmetic"
    if not any(point.result.trial.train.device == "cpu" for point in points):
        return f"{note}."
    overhead = f"{LEFT_OUT['cpu'].fixed_bytes / 1e9:g} GB for Python and libraries, of which ranks share some"
    return f"{note}; on a CPU, where all that is resident is measured, with {overhead}."


def _unavailable_notes(points: Sequence[SizePoint]) -> list[str]:
    """Return a note on the trials whose memory cannot be forecast, with each reason once; an empty list without any."""
    reason_by_point = [unavailable(point.result.trial) for point in points]
    reasons = [reason for reason in reason_by_point if reason]
    if not reasons:
        return []
    distinct_reasons = "; ".join(dict.fromkeys(reasons))
    return [f"Memory forecast: unavailable in {len(reasons)} of {len(points)} trials: {distinct_reasons}."]


def as_json(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the series as objects of the report's JSON; unavailable figures are None."""
    return [
        {
            "curve": series.name,
            **attributes(series, "mode", "gpus"),
            "points": [_point_fields(point) for point in series.points],
        }
        for series in by_resolution(analysis)
    ]


def _point_fields(point: SizePoint) -> dict[str, Any]:
    """Return the JSON object of one image size."""
    return {
        "image_size": point.image_size,
        "trial": point.result.trial_id,
        "outcome": point.result.outcome,
        **estimate_fields("step_seconds", point.result.step_seconds),
        "step_seconds_by_flops": point.by_flops_seconds,
        "peak_bytes": point.result.peak_bytes,
        "forecast_bytes": point.forecast_bytes,
        "forecast_tensor_bytes": point.tensor_bytes,
    }
