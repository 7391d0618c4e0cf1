"""Predicted times: measured points, the predicted band beyond them, and three bounds for comparison."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.analysis import Analysis
from vitscale.pages import prediction_words
from vitscale.pages.charts import axes
from vitscale.prediction.amdahl import serial_and_parallel
from vitscale.prediction.evidence import MeasuredPoint, Series
from vitscale.prediction.results import Forecast, Prediction
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Mode

_BOUND_SAMPLES = 40
"""Points along a bound, from the smallest measured rank count to the largest predicted one."""
IDEAL = "ideal"
AMDAHL = "Amdahl, fitted to what was measured"
TRANSFERS = "ideal and the transfers"


@dataclass(frozen=True)
class SeriesChart:
    """One series' chart as rows; times in seconds."""

    of_epoch: bool
    """Whether times are those of an epoch; else of a step, where the images are unknown."""
    measured: tuple[axes.ChartRow, ...]
    predicted: tuple[axes.ChartRow, ...]
    bounds: tuple[axes.ChartRow, ...]
    """Curves that follow from a model of their own: `bound` names it."""


def series_chart(analysis: Analysis, series: Series, predictions: Sequence[Prediction]) -> SeriesChart:
    """Return the rows of one series. `predictions`: those of the series, in rising order of ranks."""
    are_epochs_predicted = all(prediction.epoch_seconds is not None for prediction in predictions)
    are_epochs_measured = all(point.steps_per_epoch is not None for point in series.points)
    of_epoch = are_epochs_predicted and are_epochs_measured
    measured = [_measured_row(analysis, point, of_epoch=of_epoch) for point in series.points]
    predicted = [_predicted_row(prediction, of_epoch=of_epoch) for prediction in predictions]
    bounds = _bound_rows(series.mode, measured, predictions, of_epoch=of_epoch)
    return SeriesChart(of_epoch, tuple(measured), tuple(predicted), tuple(bounds))


def _measured_row(analysis: Analysis, point: MeasuredPoint, *, of_epoch: bool) -> axes.ChartRow:
    """Return the row of a measured point, with the report's 95 % interval where it has one."""
    trial = analysis.trials[point.trial_id]
    estimate = trial.epoch_seconds if of_epoch else trial.step_seconds
    if estimate is None:
        estimate = Estimate(_median_seconds(point, of_epoch=of_epoch))
    return {
        "gpus": point.gpus,
        "value": estimate.value,
        "low": None if estimate.note else estimate.low,
        "high": None if estimate.note else estimate.high,
        "shown": units.seconds(estimate.value),
        "mean": "",
        "run": "",
        "told": "measured",
        "trial": point.trial_id,
    }


def _median_seconds(point: MeasuredPoint, *, of_epoch: bool) -> float:
    step_seconds = statistics.median(point.step_seconds)
    return step_seconds * (point.steps_per_epoch or 1) if of_epoch else step_seconds


def _predicted_row(prediction: Prediction, *, of_epoch: bool) -> axes.ChartRow:
    """Return the row of a predicted point, with the 90 % intervals of the mean and of one run."""
    estimate = prediction.step_seconds
    if of_epoch and prediction.epoch_seconds:
        estimate = prediction.epoch_seconds
    return {
        "gpus": prediction.gpus,
        **attributes(estimate, "value", "low", "high", "future_low", "future_high"),
        "shown": units.seconds(estimate.value),
        "mean": f"{units.seconds(estimate.low)} to {units.seconds(estimate.high)}",
        "run": f"{units.seconds(estimate.future_low)} to {units.seconds(estimate.future_high)}",
        "told": prediction.label,
    }


def _bound_rows(
    mode: Mode, measured: Sequence[axes.ChartRow], predictions: Sequence[Prediction], *, of_epoch: bool
) -> list[axes.ChartRow]:
    """Return the points of the curves for comparison, which all begin at the smallest measured rank count.

    An epoch gets shorter with more ranks, unless each rank brings images of its own (weak scaling). A step does so only
    where all ranks share one global batch. Where the time does not shrink, the ideal is constant, and Amdahl's law is
    left out.
    """
    base: int = measured[0]["gpus"]
    base_seconds: float = measured[0]["value"]
    largest = max(predictions[-1].gpus, measured[-1]["gpus"])
    time_shrinks = (of_epoch and mode != "weak") or mode == "strong-global"

    def ideal_seconds(gpus: float) -> float:
        return base_seconds * base / gpus if time_shrinks else base_seconds

    counts = [base * (largest / base) ** (sample / _BOUND_SAMPLES) for sample in range(_BOUND_SAMPLES + 1)]
    rows = [{"gpus": gpus, "value": ideal_seconds(gpus), "bound": IDEAL} for gpus in counts]
    if time_shrinks:
        rows += _amdahl_rows(measured, counts)
    for gpus, transfer_seconds in _further_transfers(base, predictions, of_epoch=of_epoch).items():
        rows.append({"gpus": gpus, "value": ideal_seconds(gpus) + transfer_seconds, "bound": TRANSFERS})
    return rows


def _amdahl_rows(measured: Sequence[axes.ChartRow], counts: Sequence[float]) -> list[axes.ChartRow]:
    """Return the points of Amdahl's law fitted to the measured points, at these rank counts; none without a fit.

    By Amdahl's law the time on N ranks is that of a serial part plus that of a parallel part / N.
    """
    fitted = serial_and_parallel([row["gpus"] for row in measured], [row["value"] for row in measured])
    if fitted is None:
        return []
    serial_seconds, parallel_seconds = fitted
    return [{"gpus": gpus, "value": serial_seconds + parallel_seconds / gpus, "bound": AMDAHL} for gpus in counts]


def _further_transfers(base: int, predictions: Sequence[Prediction], *, of_epoch: bool) -> dict[int, float]:
    """Return rank count -> seconds of exposed transfer more than at the smallest measured count (`base`).

    The measured time at `base` has its own transfer in it. Empty where the transfer at `base` is unknown.
    """
    step_transfers = {prediction.gpus: _transfer_seconds(prediction) for prediction in predictions}
    base_transfer = step_transfers.get(base)
    if base_transfer is None:
        return {}
    further: dict[int, float] = {}
    for prediction in predictions:
        transfer = step_transfers[prediction.gpus]
        if transfer is not None and prediction.gpus >= base:
            steps = _steps_in_time(prediction, of_epoch=of_epoch)
            further[prediction.gpus] = max(0.0, transfer - base_transfer) * steps
    return further


def _transfer_seconds(prediction: Prediction) -> float | None:
    """Return the exposed transfer of a step, with that of synchronised norms; None where it is unknown."""
    if prediction.wire_seconds is None or "wire_seconds" in prediction.reasons:
        return None
    norm_seconds = prediction.norm_seconds.value if prediction.norm_seconds is not None else 0.0
    return prediction.wire_seconds.value + norm_seconds


def _steps_in_time(prediction: Prediction, *, of_epoch: bool) -> float:
    """Return the number of steps in a predicted time: those of an epoch, or 1."""
    if of_epoch and prediction.epoch_seconds:
        return prediction.epoch_seconds.value / prediction.step_seconds.value
    return 1.0


_MOST_SERIES_DRAWN = 12
_BLUE, _VERMILION, _GREEN = axes.SERIES_COLOURS[:3]
_BAND_COLOUR = axes.SERIES_COLOURS[5]
_BOUND_DASHES = {IDEAL: axes.DASHED, AMDAHL: [2, 3], TRANSFERS: [8, 3, 2, 3]}
_BOUND_COLOURS = {IDEAL: axes.IDEAL_COLOUR, AMDAHL: _VERMILION, TRANSFERS: _GREEN}
_SHAPE_BY_LABEL = {
    "measured": "circle",
    "interpolated": "square",
    "extrapolated": "diamond",
    "prior-driven": "triangle-up",
    "does not fit": "cross",
}
_FURTHEST_FACTOR = 30
"""How far beyond the outermost point a band or a bound may reach before the axis cuts it, as a factor."""
_FUTURE_END_FIELDS = ("future_low", "future_high")
_TIME_FIELDS = ("value", "low", "high", *_FUTURE_END_FIELDS)
"""Fields of a row that are times."""


class _SeriesKey(NamedTuple):
    """Name and batch policy of a series, which no two series have in common."""

    name: str
    mode: Mode


def prediction_chart(analysis: Analysis, forecast: Forecast) -> Figure | None:
    """Draw a view for each series, at most twelve; None where no step time is predicted.

    Series of images per second whose step is unknown are not drawn.
    """
    predictions_by_series: dict[_SeriesKey, list[Prediction]] = {}
    for prediction in forecast.predictions:
        if "step_seconds" not in prediction.reasons:
            key = _SeriesKey(prediction.series, prediction.mode)
            predictions_by_series.setdefault(key, []).append(prediction)
    series_by_mode: Counter[Mode] = Counter()
    views: list[FigureView] = []
    for series in forecast.evidence.series:
        predictions = predictions_by_series.get(_SeriesKey(series.name, series.mode))
        if predictions is not None and len(views) < _MOST_SERIES_DRAWN:
            series_by_mode[series.mode] += 1
            chart = series_chart(analysis, series, predictions)
            views.append(_series_view(series, series_by_mode[series.mode], chart))
    return Figure("prediction", "Predicted time", tuple(views)) if views else None


def _series_view(series: Series, number: int, chart: SeriesChart) -> FigureView:
    """Draw one series, the `number`th of its batch policy."""
    mode = series.mode
    subject = "epoch" if chart.of_epoch else "step"
    label = prediction_words.series_title(series.name, mode).removesuffix(f", {mode}")
    plot = _series_plot(mode, chart)
    last = chart.predicted[-1]
    time = f"{last['shown']} {'an epoch' if chart.of_epoch else 'a step'}"
    summary = f"{label}: {time} on {units.ranks(last['gpus'])} (90 % of one run {last['run']}; {last['told']})."
    return FigureView(
        name=f"{mode}-prediction" if number == 1 else f"{mode}-prediction-{number}",
        choices={"batch policy": ControlOption(mode, mode), "series": ControlOption(str(number), label)},
        title=f"Predicted {subject} time, {label}, {mode}",
        subtitle="dark: 90 % of the mean; light: of one run; bars: measured, 95 %",
        spec=plot.spec(summary, 280),
        columns={
            "gpus": "ranks",
            "shown": f"{subject} time",
            "mean": "90 % of the mean",
            "run": "90 % of one run",
            "told": "how it is known",
        },
        summary=summary,
    )


def _series_plot(mode: Mode, chart: SeriesChart) -> axes.Plot:
    """Draw the bands of the prediction, the bounds over them, and the points on top."""
    unit = units.time_unit(row["value"] for row in (*chart.measured, *chart.predicted))
    measured = axes.scaled(chart.measured, unit.factor, *_TIME_FIELDS)
    predicted = axes.scaled(chart.predicted, unit.factor, *_TIME_FIELDS)
    bounds = axes.scaled(chart.bounds, unit.factor, *_TIME_FIELDS)
    measured_counts = {row["gpus"] for row in measured}
    points = [*measured, *(row for row in predicted if row["gpus"] not in measured_counts)]
    x = axes.ticked_axis("gpus", "ranks", _doubled_counts(points), number="~s")
    y_title = f"{'epoch' if chart.of_epoch else 'step'} time ({unit.sign})"
    y_scale = _time_scale(mode, points, predicted, bounds)
    y = axes.quantity("value", y_title, scale=y_scale, axis={"tickCount": 6, "format": "~r"})
    plot = axes.Plot({"rows": points, "predicted": predicted, "bounds": bounds})
    for low, high, opacity in ((*_FUTURE_END_FIELDS, 0.2), ("low", "high", 0.3)):
        area = {"type": "area", "color": _BAND_COLOUR, "opacity": opacity, "clip": True}
        plot.add("predicted", area, x=x, y=axes.quantity(low, y_title, scale=y_scale), y2={"field": high})
    _add_bounds(plot, x, y)
    plot.add("predicted", {"type": "line", "strokeWidth": 1.6, "color": _BLUE}, x=x, y=y)
    _add_points(plot, x, y)
    return plot


def _time_scale(
    mode: Mode,
    points: Sequence[axes.ChartRow],
    predicted: Sequence[axes.ChartRow],
    bounds: Sequence[axes.ChartRow],
) -> axes.ChartSpec:
    """Return the scale of the time: from zero for weak scaling, else logarithmic.

    It holds all rows, but reaches no further than `_FURTHEST_FACTOR` times beyond the outermost point.
    """
    point_times = [row["value"] for row in points]
    all_times = [row["value"] for row in (*points, *bounds)]
    for row in predicted:
        all_times += [row[end] for end in _FUTURE_END_FIELDS]
    top = min(max(all_times) * 1.1, max(point_times) * _FURTHEST_FACTOR)
    bottom = max(min(all_times) / 1.1, min(point_times) / _FURTHEST_FACTOR)
    scale: axes.ChartSpec = {"type": "log", "domain": [bottom, top]}
    if mode == "weak":
        scale = {"domain": [0, top]}
    return {**scale, "nice": False, "clamp": True}


def _add_bounds(plot: axes.Plot, x: axes.ChartSpec, y: axes.ChartSpec) -> None:
    """Add the curves for comparison, which have a legend of their own."""
    names = list(dict.fromkeys(row["bound"] for row in plot.datasets["bounds"]))
    legend = {"title": None, "orient": "bottom", "columns": 2, "symbolSize": 160, "symbolOpacity": 1}
    colours = {"domain": names, "range": [_BOUND_COLOURS[name] for name in names]}
    dashes = {"domain": names, "range": [_BOUND_DASHES[name] for name in names]}
    plot.add(
        "bounds",
        {"type": "line", "strokeWidth": 1.4, "clip": True},
        x=x,
        y=y,
        color=axes.nominal("bound", scale=colours, legend=legend),
        strokeDash=axes.nominal("bound", scale=dashes, legend=legend),
    )


def _add_points(plot: axes.Plot, x: axes.ChartSpec, y: axes.ChartSpec) -> None:
    """Add measured points filled and with bars, predicted ones hollow; the shape says how sure a point is."""
    present = {row["told"] for row in plot.datasets["rows"]}
    labels = [label for label in _SHAPE_BY_LABEL if label in present]
    legend = {"title": None, "orient": "top", "columns": 4}
    shapes = {"domain": labels, "range": [_SHAPE_BY_LABEL[label] for label in labels]}
    fills = {"domain": labels, "range": [_BLUE if label == "measured" else _BAND_COLOUR for label in labels]}
    bar = {"type": "rule", "strokeWidth": 1.5, "color": _BLUE}
    is_bounded = "datum.told == 'measured' && datum.low != null"
    plot.add("rows", bar, is_bounded, x=x, y=axes.quantity("low"), y2={"field": "high"})
    point_tooltip = axes.tooltip(
        gpus="ranks", shown="time", told="how it is known", mean="90 % of the mean", run="90 % of one run"
    )
    point = {"type": "point", "size": 60, "opacity": 1, "stroke": _BLUE, "strokeWidth": 1.5}
    shape = axes.nominal("told", scale=shapes, legend=legend)
    fill = axes.nominal("told", scale=fills, legend=legend)
    plot.add("rows", point, x=x, y=y, shape=shape, fill=fill, tooltip=point_tooltip)


def _doubled_counts(points: Sequence[axes.ChartRow]) -> list[int]:
    """Return the doublings of the smallest rank count, up to the largest: 2, 4, 8 for counts from 2 to 12."""
    counts = [row["gpus"] for row in points]
    ticks = [min(counts)]
    while ticks[-1] * 2 <= max(counts):
        ticks.append(ticks[-1] * 2)
    return ticks
