"""Memory and time by image size, measured and by arithmetic, for studies that vary the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.runs.compute import flops_per_image
from vitscale.analysis.scaling import curve_name
from vitscale.pages.tables import interval_cell
from vitscale.prediction.memory.forecast import LEFT_OUT, forecast_bytes, unavailable
from vitscale.present import units
from vitscale.present.data import attributes, estimate_fields
from vitscale.present.document import Cell, Column, Row, RowGroup, Table
from vitscale.trial.trial import Mode

_FIELD = "model.image_size"


@dataclass(frozen=True)
class AtSize:
    """One trial of a series; None where unavailable."""

    image_size: int
    result: TrialResult
    tensor_bytes: int | None
    """One rank's tensors at their peak, by arithmetic."""
    forecast_bytes: int | None
    """The measured peak that arithmetic expects: on a GPU the tensors; on a CPU, where all resident memory counts, also
    what a rank typically takes beside them (`prediction.memory.forecast`)."""
    by_flops_seconds: float | None
    """Seconds of a step, by the next smaller image that was measured and the ratio of FLOPs."""


@dataclass(frozen=True)
class SizeSeries:
    """Trials that differ in the size of images alone."""

    name: str
    mode: Mode
    gpus: int
    points: tuple[AtSize, ...]
    """Two or more points, by image size."""


def by_resolution(analysis: Analysis) -> tuple[SizeSeries, ...]:
    """Every such series of a study, in the order of its curves; none where the size was not varied."""
    trials: dict[tuple[Mode, int, str], dict[int, TrialResult]] = {}
    for curve, point, result in analysis.along(analysis.curves):
        if _FIELD in curve.labels:
            series = trials.setdefault((curve.mode, point.gpus, _name(curve, result)), {})
            series[result.trial.model.image_size] = result
    several = len({gpus for _, gpus, _ in trials}) > 1
    return tuple(
        SizeSeries(f"{name}, {units.ranks(gpus)}" if several else name, mode, gpus, _points(by_size))
        for (mode, gpus, name), by_size in trials.items()
        if len(by_size) > 1
    )


def _name(curve: CurveResult, result: TrialResult) -> str:
    return curve_name({field: value for field, value in curve.labels.items() if field != _FIELD}, result.trial)


def _points(by_size: dict[int, TrialResult]) -> tuple[AtSize, ...]:
    points: list[AtSize] = []
    for size, result in sorted(by_size.items()):
        below = next((point.result for point in reversed(points) if point.result.step_seconds is not None), None)
        tensors = forecast_bytes(result.trial)
        points.append(AtSize(size, result, tensors, _measurable(tensors, result), _by_flops(below, result)))
    return tuple(points)


def _measurable(tensors: int | None, result: TrialResult) -> int | None:
    if tensors is None or result.trial.train.device == "cuda":
        return tensors
    beside = LEFT_OUT["cpu"]
    return round(tensors * beside.factor + beside.fixed_bytes)


def _by_flops(below: TrialResult | None, result: TrialResult) -> float | None:
    if below is None or below.step_seconds is None:
        return None
    known, asked = flops_per_image(below.trial), flops_per_image(result.trial)
    return None if isinstance(known, str) or isinstance(asked, str) else below.step_seconds.value * asked / known


_TITLE = "Memory and time by image size"


def resolution_table(analysis: Analysis) -> Table | None:
    """A row per size of each series; None where the size was not varied."""
    series = by_resolution(analysis)
    points = [point for curve in series for point in curve.points]
    if not points:
        return None
    unit = units.time_unit(p.result.step_seconds.value for p in points if p.result.step_seconds is not None)
    columns = (
        "image size", f"step ({unit.sign})", "by FLOPs", "peak memory", "forecast", "of it tensors",
        "measured / forecast", "outcome",
    )  # fmt: skip
    groups = tuple(RowGroup(curve.name, tuple(_line(point, unit) for point in curve.points)) for curve in series)
    return Table(tuple(map(Column, columns)), groups, tuple(_notes(points)), title=_TITLE, label="curve")


def _line(point: AtSize, unit: units.Unit) -> Row:
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


def _notes(points: Sequence[AtSize]) -> list[str]:
    on_cpu = any(point.result.trial.train.device == "cpu" for point in points)
    beside = f"{LEFT_OUT['cpu'].fixed_bytes / 1e9:g} GB for Python and libraries, of which ranks share some"
    reasons = [why for point in points if (why := unavailable(point.result.trial))]
    notes = [
        "Forecast: one rank's tensors by arithmetic"
        + (f"; on a CPU, where all that is resident is measured, with {beside}." if on_cpu else "."),
        "By FLOPs: the step of the next smaller size measured, times the ratio of FLOPs.",
    ]
    if reasons:
        told = "; ".join(dict.fromkeys(reasons))
        notes.append(f"Memory forecast: unavailable in {len(reasons)} of {len(points)} trials: {told}.")
    return notes


def as_json(analysis: Analysis) -> list[dict[str, Any]]:
    """The series for the contract; unavailable is null."""
    return [
        {
            "curve": curve.name,
            **attributes(curve, "mode", "gpus"),
            "points": [
                {
                    "image_size": point.image_size,
                    "trial": point.result.trial_id,
                    "outcome": point.result.outcome,
                    **estimate_fields("step_seconds", point.result.step_seconds),
                    "step_seconds_by_flops": point.by_flops_seconds,
                    "peak_bytes": point.result.peak_bytes,
                    "forecast_bytes": point.forecast_bytes,
                    "forecast_tensor_bytes": point.tensor_bytes,
                }
                for point in curve.points
            ],
        }
        for curve in by_resolution(analysis)
    ]
