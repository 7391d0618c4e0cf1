"""How it scales: epoch time, speedup, efficiency, throughput and GPU-hours, along ranks or any swept number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from vitscale.analysis import Analysis, CurveResult, ScalingPoint, TrialResult, by_mode
from vitscale.analysis.scaling import curve_name
from vitscale.pages import sentences
from vitscale.pages.charts import axes
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Mode

_IDEAL_SAMPLES = 24
_MOST_IDEAL_LINES = 6
"""Most curves whose ideals are all drawn. Of more curves only the first one's is, or dashed lines would hide them."""
_WIDE_RANGE = 8
"""Ratio of the largest to the smallest rank count from which both axes are logarithmic."""
_BAR_HEADROOM = 1.5
"""How far beyond the outermost point or ideal a bar may reach, as a factor."""
_FEWEST_RUNS_FOR_INTERVAL = 3
"""With fewer runs the runs themselves are drawn: the interval of two runs is twelve times as wide as their gap."""
_MOST_SWEPT_AXES = 3
"""Number of swept fields that have axes."""
_MOST_CURVES_NAMED = 3
"""Number of curves that a summary names."""
_MOST_BARS = 40
"""Most curves of one rank count that are drawn as bars below one another; more would be longer than a page."""
_BAR_STEP_PIXELS = 20
"""Pixels from one curve to the next where they stand below one another."""


@dataclass(frozen=True)
class Measure:
    """One figure along a curve, with its ideal."""

    name: str
    label: str
    title: str
    """Title of the axis, without the unit if it is a time."""
    value: Callable[[TrialResult, ScalingPoint], Estimate | None]
    ideal: Callable[[Estimate, bool, float], float]
    """Returns the value under perfect scaling.

    Its arguments are the baseline's value, whether the curve is of weak scaling, and the ratio of ranks N / N_base.
    """
    show: Callable[[float | None], str]
    slower_is_more: bool = False
    """Whether the figure rises with an epoch's seconds, so that less is better."""
    relative: bool = False
    """Whether it is relative to the baseline. All curves then share one ideal, and one rank count shows nothing."""
    is_time: bool = False


def _gpu_hours(trial: TrialResult, point: ScalingPoint) -> Estimate | None:
    """Return the hours of all ranks together for an epoch of all images; None where the epoch time is unknown.

    The images that `drop_last` leaves out are included, as where the cheapest trial is chosen.
    """
    if trial.epoch_seconds is None:
        return None
    hours_per_second = point.gpus / 3600 / (1 - trial.images_left_out)
    return trial.epoch_seconds.times(hours_per_second)


def _ideal_epoch(base: Estimate, is_weak: bool, rank_ratio: float) -> float:
    return base.value if is_weak else base.value / rank_ratio


def _ideal_gpu_hours(base: Estimate, is_weak: bool, rank_ratio: float) -> float:
    return base.value * (rank_ratio if is_weak else 1.0)


MEASURES = (
    Measure(
        name="speedup",
        label="speedup",
        title="speedup",
        value=lambda _trial, point: point.speedup,
        ideal=lambda _base, _is_weak, rank_ratio: rank_ratio,
        show=units.share,
        relative=True,
    ),
    Measure(
        name="efficiency",
        label="efficiency",
        title="efficiency",
        value=lambda _trial, point: point.efficiency,
        ideal=lambda _base, _is_weak, _rank_ratio: 1.0,
        show=units.share,
        relative=True,
    ),
    Measure(
        name="epoch-seconds",
        label="epoch time",
        title="epoch time",
        value=lambda trial, _point: trial.epoch_seconds,
        ideal=_ideal_epoch,
        show=units.seconds,
        slower_is_more=True,
        is_time=True,
    ),
    Measure(
        name="throughput",
        label="images/s",
        title="images per second",
        value=lambda trial, _point: trial.images_per_second,
        ideal=lambda base, _is_weak, rank_ratio: base.value * rank_ratio,
        show=units.number,
    ),
    Measure(
        name="gpu-hours",
        label="GPU-hours",
        title="GPU-hours of an epoch",
        value=_gpu_hours,
        ideal=_ideal_gpu_hours,
        show=units.number,
        slower_is_more=True,
    ),
)


def _measures_with_units(analysis: Analysis) -> list[Measure]:
    """Return the measures; the time of all ranks together has the unit that suits these results."""
    is_on_cpu_alone = all(trial.trial.train.device == "cpu" for trial in analysis.trials.values())
    hours = [_gpu_hours(trial, point) for _, point, trial in analysis.along(analysis.curves)]
    known_hours = [estimate.value for estimate in hours if estimate is not None]
    unit = units.rank_time_unit(known_hours, "cpu" if is_on_cpu_alone else "cuda")

    def rank_time(trial: TrialResult, point: ScalingPoint) -> Estimate | None:
        estimate = _gpu_hours(trial, point)
        return None if estimate is None else estimate.times(unit.factor)

    return [
        replace(measure, label=unit.sign, title=f"{unit.sign} of an epoch", value=rank_time)
        if measure.name == "gpu-hours"
        else measure
        for measure in MEASURES
    ]


@dataclass(frozen=True)
class ScalingAxis:
    """The horizontal axis of a view: rank counts, or the values of a swept field at one rank count."""

    value: str
    """Its name as an option of the page's control: "ranks", "train.micro_batch-8"."""
    label: str
    """Its name for a reader: "micro-batch, 8 ranks"."""
    title: str
    field: str = ""
    """The swept field; empty: ranks."""
    gpus: int = 0
    """The rank count of all points, where a field is swept; 0: any."""
    is_even: bool = False
    """Whether it is never logarithmic, because its values follow in equal steps, as epochs do."""


RANKS = ScalingAxis("ranks", "ranks", "ranks")
YScale = Literal["from zero", "as x", "log2 by log2"]
"""Scale of the vertical axis.

"from zero": linear from 0, for what ideally stays constant.
"as x": logarithmic where the axis of ranks is, which has a wide range then; else linear from 0.
"log2 by log2": both axes are logarithmic to base 2, so that what grows in proportion to the ranks is a straight line.
"""


def scaling_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Return a figure with a view for each batch policy, axis and measure; None where nothing is known."""
    measures = _measures_with_units(analysis)
    views: list[FigureView] = []
    for mode, mode_curves in by_mode(curves).items():
        for axis in (RANKS, *swept_axes(mode_curves)):
            for measure in measures:
                view = _scaling_view(analysis, mode, mode_curves, measure, axis)
                if view is not None:
                    views.append(view)
    if views:
        front = _front_view(views)
        views.sort(key=lambda view: view is not front)
    return axes.series_figure("scaling", "How it scales", views)


def _front_view(views: Sequence[FigureView]) -> FigureView:
    """Return the view that is shown first: the speedup if any, else images/s along a swept field, else the first."""
    for view in views:
        if view.choices["measure"].value == "speedup":
            return view
    throughput = [view for view in views if view.choices["measure"].value == "throughput"]
    for view in throughput:
        if view.choices["along"].value != "ranks":
            return view
    return (throughput or views)[0]


def swept_axes(curves: Sequence[CurveResult]) -> list[ScalingAxis]:
    """Return an axis for each pair of a swept numeric field and a rank count; of at most three fields."""
    values_by_field: dict[str, set[float]] = {}
    for curve in curves:
        for field, value in curve.labels.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and field != "train.zero_stage":
                values_by_field.setdefault(field, set()).add(value)
    fields = [field for field, values in values_by_field.items() if len(values) > 1][:_MOST_SWEPT_AXES]
    rank_counts = sorted({point.gpus for curve in curves for point in curve.points})
    return [_swept_axis(field, gpus) for field, gpus in itertools.product(fields, rank_counts)]


def _swept_axis(field: str, gpus: int) -> ScalingAxis:
    name = _field_name(field)
    return ScalingAxis(f"{field}-{gpus}", label=f"{name}, {units.ranks(gpus)}", title=name, field=field, gpus=gpus)


def _field_name(field: str) -> str:
    name = field.rpartition(".")[2].replace("_", " ")
    return {"micro batch": "micro-batch"}.get(name, name)


class MeasuredRows(NamedTuple):
    """The rows of a measure along some curves."""

    points: list[axes.ChartRow]
    """A row for each point where the measure is known."""
    runs: list[axes.ChartRow]
    """A row for each run of a point that has too few for an interval."""


def measured_rows(
    analysis: Analysis, curves: Sequence[CurveResult], measure: Measure, axis: ScalingAxis = RANKS
) -> MeasuredRows:
    """Return the points of a measure along an axis, and the single runs of points with few runs.

    The field `drift` of a row is "loss differs: 3 %" where the trial did other work than those of the same settings,
    else empty.
    """
    points: list[axes.ChartRow] = []
    run_rows: list[axes.ChartRow] = []
    for curve, point, trial in analysis.along(curves):
        if axis.gpus not in (0, point.gpus):
            continue
        value = measure.value(trial, point)
        x = curve.labels.get(axis.field) if axis.field else point.gpus
        if value is None or x is None:
            continue
        position = {"series": _series_name(curve, axis, trial), "x": x, "gpus": point.gpus}
        runs = len(trial.run_figures)
        drift = f"loss differs: {units.relative(trial.drift.difference)}" if trial.drifts else ""
        points.append(position | point_row(value, measure.show, runs) | {"trial": trial.trial_id, "drift": drift})
        if _has_few_runs(value, runs):
            run_rows += [position | row for row in _run_rows(trial, value, measure)]
    if axis.field:
        points.sort(key=lambda row: (row["series"], row["x"]))
    return MeasuredRows(points, run_rows)


def point_row(value: Estimate, show: Callable[[float | None], str], runs: int) -> axes.ChartRow:
    """Return the fields of a chart's row with a value.

    With few runs, `low` and `high` are None and `bounds` is their number: "2 runs". Else `bounds` is the interval.
    """
    has_few_runs = _has_few_runs(value, runs)
    low = None if has_few_runs else value.low
    high = None if has_few_runs else value.high
    bounds = units.counted(runs, "run")
    if low is not None and high is not None:
        show_end = units.form_of_ends(show)
        bounds = f"{show_end(low)} to {show_end(high)}"
    return {"value": value.value, "low": low, "high": high, "shown": show(value.value), "bounds": bounds, "runs": runs}


def _has_few_runs(value: Estimate, runs: int) -> bool:
    """Whether a value has too few runs for an interval that decides anything."""
    return bool(value.note) or runs < _FEWEST_RUNS_FOR_INTERVAL


def _series_name(curve: CurveResult, axis: ScalingAxis, trial: TrialResult) -> str:
    """Return the name of a curve without the field that the axis shows."""
    if not axis.field:
        return curve.name
    return curve_name({name: value for name, value in curve.labels.items() if name != axis.field}, trial.trial)


def _run_rows(trial: TrialResult, value: Estimate, measure: Measure) -> list[axes.ChartRow]:
    """Return a row with the value of each run; none where the trial has one run alone.

    A run's value is the trial's `value` in proportion to the run's epoch time. The trial's value is the geometric mean
    of them.
    """
    if trial.epoch_seconds is None or len(trial.run_figures) < 2:
        return []
    rows = []
    for number, run in enumerate(trial.run_figures, 1):
        if run.epoch_seconds:
            share = run.epoch_seconds / trial.epoch_seconds.value
            factor = share if measure.slower_is_more else 1 / share
            rows.append({"value": value.value * factor, "run": number})
    return rows


def ideal_rows(analysis: Analysis, curves: Sequence[CurveResult], measure: Measure) -> list[axes.ChartRow]:
    """Return the rows of perfect scaling, from each curve's baseline to its largest rank count."""
    rows = []
    for curve in curves:
        base = curve.baseline
        if base is None:
            continue
        value = measure.value(analysis.trials[base.trial_id], base)
        if value is not None:
            largest = max(point.gpus for point in curve.points)
            rows += ideal_line(curve.name, base.gpus, largest, partial(measure.ideal, value, curve.mode == "weak"))
    return rows


def ideal_line(series: str, base: int, largest: int, level: Callable[[float], float]) -> list[axes.ChartRow]:
    """Return rows of perfect scaling from `base` ranks to `largest`, evenly spaced on a logarithmic axis.

    Return none where `largest` is not above `base`.

    Args:
        series: the curve's name.
        base: the rank count of its baseline.
        largest: its largest rank count.
        level: returns the ideal value at a multiple of the baseline's ranks: of 2.0 for twice as many.
    """
    if largest <= base:
        return []
    multiples = [(largest / base) ** (sample / _IDEAL_SAMPLES) for sample in range(_IDEAL_SAMPLES + 1)]
    return [{"series": series, "x": base * multiple, "value": level(multiple)} for multiple in multiples]


class _IdealRows(NamedTuple):
    """The rows of perfect scaling in a view."""

    rows: list[axes.ChartRow]
    only_series: str = ""
    """The series whose ideal alone is drawn; empty where all are, or where all share one."""


class _ViewRows(NamedTuple):
    """The rows of a view; times are in the unit of its axis."""

    points: list[axes.ChartRow]
    runs: list[axes.ChartRow]
    ideal: _IdealRows
    y_title: str
    """Title of the vertical axis, with the unit of times."""


def _scaling_view(
    analysis: Analysis, mode: Mode, curves: Sequence[CurveResult], measure: Measure, axis: ScalingAxis
) -> FigureView | None:
    """Draw one measure along one axis; None where it would show nothing (`_is_worth_a_view`)."""
    rows = _view_rows(analysis, curves, measure, axis)
    if rows is None:
        return None
    levels = [row["value"] for row in (*rows.points, *rows.ideal.rows)]
    are_cut = axes.cut_bars(rows.points, lowest=min(levels) / _BAR_HEADROOM, highest=max(levels) * _BAR_HEADROOM)
    is_side_by_side = _is_side_by_side(rows.points)
    plot = _side_by_side_plot(rows, measure, axis) if is_side_by_side else _curves_plot(rows, mode, measure, axis)
    notes = _view_notes(plot, rows.ideal.only_series, are_cut=are_cut, is_side_by_side=is_side_by_side)
    summary = _view_summary(rows.points, mode, measure, axis)
    last_column = "drift" if any(row["drift"] for row in rows.points) else "trial"
    return FigureView(
        name=_view_name(mode, measure, axis),
        choices={
            "batch policy": ControlOption(mode, mode),
            "measure": ControlOption(measure.name, measure.label),
            "along": ControlOption(axis.value, axis.label),
        },
        title=_view_title(mode, measure, axis),
        subtitle="; ".join(notes),
        spec=plot.spec(summary, {"step": _BAR_STEP_PIXELS} if is_side_by_side else axes.HEIGHT),
        columns={
            "series": "curve",
            "x": axis.title,
            "shown": measure.label,
            "bounds": "95 % interval",
            last_column: last_column,
        },
        summary=summary,
    )


def _view_rows(
    analysis: Analysis, curves: Sequence[CurveResult], measure: Measure, axis: ScalingAxis
) -> _ViewRows | None:
    """Return the rows of a view; None where they are not worth one."""
    points, runs = measured_rows(analysis, curves, measure, axis)
    if not _is_worth_a_view(points, measure, axis):
        return None
    ideals = _ideal_rows(analysis, curves, measure, axis)
    if not measure.is_time:
        return _ViewRows(points, runs, ideals, y_title=measure.title)
    unit = units.time_unit(row["value"] for row in points)
    return _ViewRows(
        points=axes.scaled(points, unit.factor),
        runs=axes.scaled(runs, unit.factor),
        ideal=ideals._replace(rows=axes.scaled(ideals.rows, unit.factor)),
        y_title=f"{measure.title} ({unit.sign})",
    )


def _is_side_by_side(points: Sequence[axes.ChartRow]) -> bool:
    """Whether the points are drawn as bars below one another, because all stand at one place of the axis."""
    has_one_position = len({row["x"] for row in points}) == 1
    return has_one_position and 1 < len(points) <= _MOST_BARS


def _plot_with_rows(points: list[axes.ChartRow], rows: _ViewRows) -> axes.Plot:
    """Return a plot with these points and the other rows of a view, without layers."""
    plot = axes.Plot({"rows": points})
    if rows.ideal.rows:
        plot.datasets["ideal"] = rows.ideal.rows
    if rows.runs:
        plot.datasets["runs"] = rows.runs
    return plot


def _curves_plot(rows: _ViewRows, mode: Mode, measure: Measure, axis: ScalingAxis) -> axes.Plot:
    """Draw a curve for each series, with its ideal."""
    plot = _plot_with_rows(rows.points, rows)
    x, y = both_axes(rows.points, rows.y_title, axis, _y_scale(measure, mode))
    axes.add_curves(plot, x, y, _tooltips(measure, axis), one_ideal=measure.relative)
    return plot


def _side_by_side_plot(rows: _ViewRows, measure: Measure, axis: ScalingAxis) -> axes.Plot:
    """Draw a bar for each series, the best at the top."""
    best_first = sorted(rows.points, key=lambda row: row["value"], reverse=not measure.slower_is_more)
    plot = _plot_with_rows(best_first, rows)
    _add_side_by_side(plot, rows.y_title, _tooltips(measure, axis))
    return plot


def _tooltips(measure: Measure, axis: ScalingAxis) -> list[axes.ChartSpec]:
    return axes.tooltip(
        series="curve", x=axis.title, shown=measure.label, bounds="95 % interval", runs="runs", trial="trial"
    )


def _is_worth_a_view(points: Sequence[axes.ChartRow], measure: Measure, axis: ScalingAxis) -> bool:
    """Whether the points of a measure show anything.

    Along a swept field they do at two values or more. A relative measure does unless all of its points are baselines.
    """
    if not points:
        return False
    if axis.field and len({row["x"] for row in points}) < 2:
        return False
    has_one_rank_count = len({row["gpus"] for row in points}) < 2
    are_baselines = all(row["value"] == 1.0 for row in points)
    return not (measure.relative and are_baselines and has_one_rank_count)


def _ideal_rows(analysis: Analysis, curves: Sequence[CurveResult], measure: Measure, axis: ScalingAxis) -> _IdealRows:
    """Return the rows of perfect scaling by ranks: of each curve, or of the first one alone of many; none else."""
    if axis.field:
        return _IdealRows([])
    rows = ideal_rows(analysis, curves, measure)
    if not rows or measure.relative or len(curves) <= _MOST_IDEAL_LINES:
        return _IdealRows(rows)
    first = rows[0]["series"]
    return _IdealRows([row for row in rows if row["series"] == first], only_series=first)


def _view_summary(points: Sequence[axes.ChartRow], mode: Mode, measure: Measure, axis: ScalingAxis) -> str:
    """Return a sentence on the best curves; by ranks with another on the meaning of the batch policy."""
    best = best_at_largest(points, measure.label, axis, less_is_better=measure.slower_is_more)
    if axis.field:
        return best
    meaning = sentences.MODE_MEANINGS[mode]
    return f"{best} {mode}: {meaning[:1].lower()}{meaning[1:]}"


def _view_notes(plot: axes.Plot, only_series: str, *, are_cut: bool, is_side_by_side: bool) -> list[str]:
    """Return notes on the meaning of a view's marks: "dashed: ideal".

    Args:
        plot: the view.
        only_series: the series whose ideal alone is drawn; empty where all are.
        are_cut: whether intervals end at the picture's edge.
        is_side_by_side: whether points are bars.
    """
    points = plot.datasets["rows"]
    notes = []
    if any(row["low"] for row in points):
        notes.append("bars: 95 % intervals (cut where no cap)" if are_cut else "bars: 95 % intervals")
    if "runs" in plot.datasets:
        notes.append("small: single runs")
    if "ideal" in plot.datasets:
        notes.append(f"dashed: ideal of {only_series}" if only_series else "dashed: ideal")
    if any(row["drift"] for row in points):
        notes.append("pale: drifts" if is_side_by_side else "hollow: drifts")
    return notes


def _view_name(mode: Mode, measure: Measure, axis: ScalingAxis) -> str:
    """Return the name of a view's file: "weak-throughput-by-micro-batch-8"."""
    if not axis.field:
        return f"{mode}-{measure.name}"
    return f"{mode}-{measure.name}-by-{axis.value.rpartition('.')[2].replace('_', '-')}"


def _view_title(mode: Mode, measure: Measure, axis: ScalingAxis) -> str:
    """Return the title of a view: "Images/s, weak, by micro-batch, 8 ranks"."""
    title = f"{axes.capitalised(measure.label)}, {mode}"
    return f"{title}, by {axis.label}" if axis.field else title


def _add_side_by_side(plot: axes.Plot, title: str, point_tooltip: list[axes.ChartSpec]) -> None:
    """Add a bar for each of a plot's `rows`, below one another in their order.

    Args:
        plot: the plot. Its `rows` and `runs` get a field `place`, the number of their bar from 0.
        title: title of the horizontal axis.
        point_tooltip: the tooltip of a bar.
    """
    rows = plot.datasets["rows"]
    places = {row["series"]: index for index, row in enumerate(rows)}
    for row in (*rows, *plot.datasets.get("runs", ())):
        row["place"] = places[row["series"]]
    # Fonts of a page may be wider than those by which the labels are laid out.
    label_pixels = min(axes.WIDTH // 2, 6 * max(len(row["series"]) for row in rows))
    label_axis = {"labelLimit": label_pixels, "minExtent": label_pixels}
    y = axes.nominal("series", sort=axes.IN_ORDER, axis=label_axis)
    x = axes.quantity("value", title, scale={"zero": True, "nice": True}, axis={"tickCount": 6, "format": "~r"})
    bar = {"type": "bar", "height": _BAR_STEP_PIXELS // 2}
    plot.add("rows", bar, "!datum.drift", x=x, y=y, tooltip=point_tooltip)
    if any(row["drift"] for row in rows):
        pale_bar = bar | {"fillOpacity": 0.15}
        plot.add("rows", pale_bar, "datum.drift", x=x, y=y, tooltip=[*point_tooltip, *axes.tooltip(drift="drift")])
    if plot.datasets.get("runs"):
        plot.add("runs", axes.SINGLE_RUN, x=x, y=y)
    axes.add_bars(plot, "rows", y, colour=None, upright=False)


def _y_scale(measure: Measure, mode: Mode) -> YScale:
    if measure.name == "speedup":
        return "log2 by log2"
    is_ideally_constant = measure.name == "efficiency" or (mode == "weak" and measure.is_time)
    return "from zero" if is_ideally_constant else "as x"


class BothAxes(NamedTuple):
    """The axes of a plot."""

    x: axes.ChartSpec
    y: axes.ChartSpec


def both_axes(rows: Sequence[axes.ChartRow], title: str, axis: ScalingAxis, y_scale: YScale) -> BothAxes:
    """Return both axes of points at the `x` of these rows.

    Args:
        rows: the points.
        title: title of the vertical axis.
        axis: the horizontal axis.
        y_scale: scale of the vertical axis along ranks. Along anything else it begins at zero.
    """
    positions = sorted({row["x"] for row in rows})
    lowest = positions[0]
    highest = positions[-1]
    is_wide = lowest > 0 and highest >= _WIDE_RANGE * lowest
    if axis.field:
        x_is_log = True
        y_is_log = False
    elif axis.is_even:
        x_is_log = False
        y_is_log = False
    else:
        y_is_log = y_scale == "log2 by log2" or (y_scale == "as x" and is_wide)
        x_is_log = y_is_log or is_wide
    are_whole = all(isinstance(position, int) for position in positions)
    x = axes.ticked_axis("x", axis.title, positions, log=x_is_log, number="d" if are_whole else "~g")
    scale = {"type": "log", "base": 2} if y_is_log else {"zero": True, "nice": True}
    return BothAxes(x, axes.quantity("value", title, scale=scale, axis={"tickCount": 6, "format": "~r"}))


def best_at_largest(rows: Sequence[axes.ChartRow], label: str, axis: ScalingAxis, *, less_is_better: bool) -> str:
    """Return the best series at the largest position: "Speedup at 8 ranks: 7.01 for ddp; 6.20 for deepspeed."."""
    last_position = max(row["x"] for row in rows)
    last_rows = [row for row in rows if row["x"] == last_position]
    by_value = sorted(last_rows, key=lambda row: row["value"])
    best_first = by_value if less_is_better else by_value[::-1]
    best = "; ".join(f"{row['shown']} for {row['series']}" for row in best_first[:_MOST_CURVES_NAMED])
    further = f"; and {len(best_first) - _MOST_CURVES_NAMED} more" if len(best_first) > _MOST_CURVES_NAMED else ""
    return f"{axes.capitalised(label)} at {_position_text(axis, last_position)}: {best}{further}."


def _position_text(axis: ScalingAxis, position: float) -> str:
    """Return a position on an axis: "8 ranks", or of a swept field "micro-batch 64 on 8 ranks"."""
    if not axis.field:
        return units.counted(int(position), axis.title.removesuffix("s"))
    on_ranks = f" on {units.ranks(axis.gpus)}" if axis.gpus else ""
    return f"{axis.title} {position:g}{on_ranks}"
