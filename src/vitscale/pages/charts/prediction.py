"""Predicted times: measured points, the predicted band beyond them, and three bounds for comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis
from vitscale.pages import prediction_words
from vitscale.pages.charts import axes
from vitscale.prediction.amdahl import serial_and_parallel
from vitscale.prediction.evidence import MeasuredPoint, Series
from vitscale.prediction.results import Forecast, Prediction
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.trial.trial import Mode

_SAMPLES = 40
IDEAL, AMDAHL, TRANSFERS = "ideal", "Amdahl, fitted to what was measured", "ideal and the transfers"


@dataclass(frozen=True)
class SeriesChart:
    """One series' chart as rows; times in seconds."""

    of_epoch: bool
    """Whether times are those of an epoch; else of a step, where the images are unknown."""
    measured: tuple[axes.ChartRow, ...]
    predicted: tuple[axes.ChartRow, ...]
    bounds: tuple[axes.ChartRow, ...]
    """Curves that follow from a model of their own: `bound` names it."""


def drawn(analysis: Analysis, series: Series, predictions: Sequence[Prediction]) -> SeriesChart:
    """The rows of one series, whose `predictions` are in rising order of ranks."""
    of_epoch = all(prediction.epoch_seconds is not None for prediction in predictions) and all(
        point.steps_per_epoch is not None for point in series.points
    )
    measured = tuple(_measured_row(analysis, point, of_epoch) for point in series.points)
    return SeriesChart(
        of_epoch,
        measured,
        tuple(_predicted_row(prediction, of_epoch) for prediction in predictions),
        tuple(_bounds(series.mode, measured, predictions, of_epoch)),
    )


def _measured_row(analysis: Analysis, point: MeasuredPoint, of_epoch: bool) -> axes.ChartRow:
    """A measured point, with the report's 95 % interval where it has one."""
    trial = analysis.trials[point.trial_id]
    interval = trial.epoch_seconds if of_epoch else trial.step_seconds
    centre = interval.value if interval else _median_seconds(point, of_epoch)
    return {
        "gpus": point.gpus,
        "value": centre,
        "low": interval.low if interval and not interval.note else None,
        "high": interval.high if interval and not interval.note else None,
        "shown": units.seconds(centre),
        "mean": "",
        "run": "",
        "told": "measured",
        "trial": point.trial_id,
    }


def _predicted_row(prediction: Prediction, of_epoch: bool) -> axes.ChartRow:
    estimate = prediction.epoch_seconds if of_epoch and prediction.epoch_seconds else prediction.step_seconds
    return {
        "gpus": prediction.gpus,
        **attributes(estimate, "value", "low", "high", "future_low", "future_high"),
        "shown": units.seconds(estimate.value),
        "mean": f"{units.seconds(estimate.low)} to {units.seconds(estimate.high)}",
        "run": f"{units.seconds(estimate.future_low)} to {units.seconds(estimate.future_high)}",
        "told": prediction.label,
    }


def _bounds(
    mode: Mode, measured: Sequence[axes.ChartRow], predictions: Sequence[Prediction], of_epoch: bool
) -> list[axes.ChartRow]:
    base: int = measured[0]["gpus"]
    seconds: float = measured[0]["value"]
    last = max(predictions[-1].gpus, measured[-1]["gpus"])
    shrinks = (of_epoch and mode != "weak") or mode == "strong-global"

    def ideal(gpus: float) -> float:
        return seconds * base / gpus if shrinks else seconds

    counts = [base * (last / base) ** (sample / _SAMPLES) for sample in range(_SAMPLES + 1)]
    rows = [{"gpus": gpus, "value": ideal(gpus), "bound": IDEAL} for gpus in counts]
    fitted = serial_and_parallel([row["gpus"] for row in measured], [row["value"] for row in measured])
    if shrinks and fitted is not None:
        serial, parallel = fitted
        rows += [{"gpus": gpus, "value": serial + parallel / gpus, "bound": AMDAHL} for gpus in counts]
    return rows + [
        {"gpus": gpus, "value": ideal(gpus) + more, "bound": TRANSFERS}
        for gpus, more in _further_transfers(base, predictions, of_epoch)
    ]


def _further_transfers(base: int, predictions: Sequence[Prediction], of_epoch: bool) -> list[tuple[int, float]]:
    """Rank count to exposed transfer beyond that of the smallest measured count, whose time contains its own."""
    seconds = {
        prediction.gpus: prediction.wire_seconds.value
        + (prediction.norm_seconds.value if prediction.norm_seconds is not None else 0.0)
        for prediction in predictions
        if prediction.wire_seconds is not None and "wire_seconds" not in prediction.reasons
    }
    if base not in seconds:
        return []
    steps = {
        prediction.gpus: prediction.epoch_seconds.value / prediction.step_seconds.value
        if of_epoch and prediction.epoch_seconds
        else 1.0
        for prediction in predictions
    }
    return [(gpus, max(0.0, wire - seconds[base]) * steps[gpus]) for gpus, wire in seconds.items() if gpus >= base]


def _median_seconds(point: MeasuredPoint, of_epoch: bool) -> float:
    return statistics.median(point.step_seconds) * (point.steps_per_epoch or 1 if of_epoch else 1)


_MOST = 12
"""Number of series that are drawn; the tables have all."""
_BLUE, _VERMILION, _GREEN = axes.SERIES_COLOURS[:3]
_BAND_COLOUR = axes.SERIES_COLOURS[5]
_BOUND_DASHES = {IDEAL: axes.DASHED, AMDAHL: [2, 3], TRANSFERS: [8, 3, 2, 3]}
_BOUND_COLOURS = {IDEAL: axes.IDEAL_COLOUR, AMDAHL: _VERMILION, TRANSFERS: _GREEN}
_SHAPES = {
    "measured": "circle",
    "interpolated": "square",
    "extrapolated": "diamond",
    "prior-driven": "triangle-up",
    "does not fit": "cross",
}
_FURTHEST = 30
"""How far beyond the outermost point a band or a bound may reach before the axis cuts it, as a factor."""
_TIMES = ("value", "low", "high", "future_low", "future_high")


def prediction_chart(analysis: Analysis, forecast: Forecast) -> Figure | None:
    """A view for each series with a measured point, by batch policy, but for those of rates whose step is unknown."""
    by_series: dict[tuple[str, Mode], list[Prediction]] = {}
    for prediction in forecast.predictions:
        if "step_seconds" not in prediction.reasons:
            by_series.setdefault((prediction.series, prediction.mode), []).append(prediction)
    drawable = [series for series in forecast.evidence.series if (series.name, series.mode) in by_series][:_MOST]
    numbers: dict[Mode, int] = {}
    views = []
    for series in drawable:
        numbers[series.mode] = number = numbers.get(series.mode, 0) + 1
        rows = drawn(analysis, series, by_series[series.name, series.mode])
        name = f"{series.mode}-prediction{'' if number == 1 else f'-{number}'}"
        choice = ControlOption(
            str(number), prediction_words.title(series.name, series.mode).removesuffix(f", {series.mode}")
        )
        views.append(_view(name, series.mode, choice, rows))
    return Figure("prediction", "Predicted time", tuple(views)) if views else None


def _view(name: str, mode: Mode, series: ControlOption, rows: SeriesChart) -> FigureView:
    unit = units.time_unit(row["value"] for row in (*rows.measured, *rows.predicted))
    measured, predicted, bounds = (
        axes.scaled(some, unit.factor, *_TIMES) for some in (rows.measured, rows.predicted, rows.bounds)
    )
    points = [*measured, *(row for row in predicted if row["gpus"] not in {point["gpus"] for point in measured})]
    lowest = min(row["value"] for row in points) / _FURTHEST
    highest = max(row["value"] for row in points) * _FURTHEST
    span = [row["value"] for row in (*points, *bounds)] + [row[key] for row in predicted for key in _TIMES[3:]]
    what = "epoch" if rows.of_epoch else "step"
    x = axes.ticked_axis("gpus", "ranks", _ticks(points), number="~s")
    top, bottom = min(max(span) * 1.1, highest), max(min(span) / 1.1, lowest)
    scale: axes.ChartSpec = {"domain": [0, top]} if mode == "weak" else {"type": "log", "domain": [bottom, top]}
    axis = {"tickCount": 6, "format": "~r"}
    y = axes.quantity("value", f"{what} time ({unit.sign})", scale={**scale, "nice": False, "clamp": True}, axis=axis)
    plot = axes.Plot({"rows": points, "predicted": predicted, "bounds": bounds})
    for low, high, opacity in (("future_low", "future_high", 0.2), ("low", "high", 0.3)):
        area = {"type": "area", "color": _BAND_COLOUR, "opacity": opacity, "clip": True}
        plot.add("predicted", area, x=x, y=axes.quantity(low, y["title"], scale=y["scale"]), y2={"field": high})
    names = list(dict.fromkeys(row["bound"] for row in bounds))
    legend = {"title": None, "orient": "bottom", "columns": 2, "symbolSize": 160, "symbolOpacity": 1}
    colours = {"domain": names, "range": [_BOUND_COLOURS[each] for each in names]}
    dashes = {"domain": names, "range": [_BOUND_DASHES[each] for each in names]}
    bound: axes.ChartSpec = {
        "color": axes.nominal("bound", scale=colours, legend=legend),
        "strokeDash": axes.nominal("bound", scale=dashes, legend=legend),
    }
    plot.add("bounds", {"type": "line", "strokeWidth": 1.4, "clip": True}, x=x, y=y, **bound)
    plot.add("predicted", {"type": "line", "strokeWidth": 1.6, "color": _BLUE}, x=x, y=y)
    _add_points(plot, points, x, y)
    last = rows.predicted[-1]
    summary = (
        f"{series.label}: {last['shown']} {'an epoch' if rows.of_epoch else 'a step'} on {units.ranks(last['gpus'])} "
        f"(90 % of one run {last['run']}; {last['told']})."
    )
    return FigureView(
        name,
        {"batch policy": ControlOption(mode, mode), "series": series},
        f"Predicted {what} time, {series.label}, {mode}",
        "dark: 90 % of the mean; light: of one run; bars: measured, 95 %",
        plot.spec(summary, 280),
        {"gpus": "ranks", "shown": f"{what} time", "mean": "90 % of the mean", "run": "90 % of one run",
         "told": "how it is known"},
        summary,
    )  # fmt: skip


def _add_points(plot: axes.Plot, points: list[axes.ChartRow], x: axes.ChartSpec, y: axes.ChartSpec) -> None:
    """Adds measured points filled and with bars, predicted ones hollow; the shape tells how sure a point is."""
    told = [name for name in _SHAPES if name in {row["told"] for row in points}]
    legend = {"title": None, "orient": "top", "columns": 4}
    filled = [_BLUE if name == "measured" else _BAND_COLOUR for name in told]
    shape = axes.nominal("told", scale={"domain": told, "range": [_SHAPES[name] for name in told]}, legend=legend)
    fill = axes.nominal("told", scale={"domain": told, "range": filled}, legend=legend)
    rule = {"type": "rule", "strokeWidth": 1.5, "color": _BLUE}
    bounded = "datum.told == 'measured' && datum.low != null"
    plot.add("rows", rule, bounded, x=x, y=axes.quantity("low"), y2={"field": "high"})
    what = axes.tooltip(
        gpus="ranks", shown="time", told="how it is known", mean="90 % of the mean", run="90 % of one run"
    )
    mark = {"type": "point", "size": 60, "opacity": 1, "stroke": _BLUE, "strokeWidth": 1.5}
    plot.add("rows", mark, x=x, y=y, shape=shape, fill=fill, tooltip=what)


def _ticks(points: list[axes.ChartRow]) -> list[int]:
    """Doublings of the smallest count, up to the largest."""
    counts = sorted({row["gpus"] for row in points})
    ticks = [counts[0]]
    while ticks[-1] * 2 <= counts[-1]:
        ticks.append(ticks[-1] * 2)
    return ticks
