"""Charts of resources: utilisation, memory and energy by ranks; time and memory by image size; the start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitscale.analysis import Analysis, CurveResult, TrialResult, by_mode
from vitscale.analysis.runs.figures import PHASES
from vitscale.analysis.runs.resources import RankResources, ResourceFigures
from vitscale.pages.charts import axes
from vitscale.pages.resolutions import SizePoint, by_resolution
from vitscale.pages.tables import start_up_notes, trial_label
from vitscale.prediction.start_up import FORKED_RANKS
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import DeviceName, Mode

MOST_RANKS_DRAWN = 16
"""Number of ranks of a trial that are drawn one by one; of a larger trial only the lowest and the highest are."""
_MOST_STARTS_DRAWN = 40
_BYTES_PER_GIB = 2.0**30


@dataclass(frozen=True)
class Resource:
    """One figure of a trial's resources, such as its peak memory."""

    name: str
    label: str
    axis: str
    figure: Callable[[ResourceFigures], float | Estimate | None]
    """The trial's figure, with its interval over runs where it has one."""
    show: Callable[[float], str]
    rank_figure: Callable[[RankResources], float | None] | None = None
    """The figure of one rank; None where ranks have none."""
    device: DeviceName | None = None
    """Kind of device of the trials that have the figure; None: any kind."""
    scale: float = 1.0
    """Factor from a value to its axis."""
    axis_format: str = "~r"
    joined: str = ""
    """The value through which the line goes where ranks differ: "their mean", "the highest"."""

    def trial_estimate(self, trial: TrialResult) -> Estimate | None:
        """Return the figure of a trial; None where it is unknown, or the trial's device is of another kind."""
        has_device = self.device in (None, trial.trial.train.device)
        if trial.resources is None or not has_device:
            return None
        value = self.figure(trial.resources)
        return Estimate(value) if isinstance(value, int | float) else value

    def by_rank(self, trial: TrialResult) -> dict[int, float]:
        """Return rank -> its figure, for ranks that have one."""
        if trial.resources is None or self.rank_figure is None or self.trial_estimate(trial) is None:
            return {}
        figures = {rank.rank: self.rank_figure(rank) for rank in trial.resources.by_rank}
        return {rank: value for rank, value in figures.items() if value is not None}


def _memory_resource(
    name: str,
    label: str,
    device: DeviceName,
    figure: Callable[[ResourceFigures], float | None],
    rank_figure: Callable[[RankResources], float | None] | None = None,
) -> Resource:
    """Return a resource of peak memory, drawn in GiB. `label`: whose memory it is, "GPU, allocated"."""
    return Resource(
        name=name,
        label=f"peak memory: {label}",
        axis=f"{label} (GiB)",
        figure=figure,
        show=lambda value: units.size(round(value)),
        rank_figure=rank_figure,
        device=device,
        scale=1 / _BYTES_PER_GIB,
        joined="the highest",
    )


RESOURCES = (
    Resource(
        name="gpu-utilisation",
        label="GPU utilisation",
        axis="a kernel runs",
        figure=lambda used: used.gpu_utilisation,
        show=units.percent,
        rank_figure=lambda rank: rank.gpu_utilisation,
        axis_format="%",
        joined="their mean",
    ),
    Resource(
        name="cpu-utilisation",
        label="CPU utilisation",
        axis="threads that compute",
        figure=lambda used: used.cpu_utilisation,
        show=units.percent,
        rank_figure=lambda rank: rank.cpu_utilisation,
        axis_format="%",
        joined="their mean",
    ),
    _memory_resource(
        "memory", "GPU, allocated", "cuda", lambda used: used.cuda_allocated_bytes, lambda rank: rank.peak_bytes
    ),
    _memory_resource("memory-reserved", "GPU, reserved", "cuda", lambda used: used.cuda_reserved_bytes),
    _memory_resource("memory-device", "GPU, whole device", "cuda", lambda used: used.cuda_device_bytes),
    _memory_resource("memory-rss", "process", "cpu", lambda used: used.peak_rss_bytes, lambda rank: rank.peak_bytes),
    Resource(
        name="energy",
        label="energy per image",
        axis="J per image",
        figure=lambda used: used.joules_per_image,
        show=lambda value: f"{units.number(value)} J",
    ),
)


def resource_chart(
    analysis: Analysis, curves: Sequence[CurveResult], resources: Sequence[Resource] = RESOURCES
) -> Figure | None:
    """Draw a view for each batch policy and resource with anything known."""
    views = []
    for mode, mode_curves in by_mode(curves).items():
        for resource in resources:
            rows = resource_rows(analysis, mode_curves, resource)
            if rows:
                points = rank_rows(analysis, mode_curves, resource)
                views.append(_resource_view(resource, mode, rows, points))
    return axes.series_figure("resources", "What each trial used", views)


def resource_rows(analysis: Analysis, curves: Sequence[CurveResult], resource: Resource) -> list[axes.ChartRow]:
    """Return a row for each trial with a known figure.

    `low` and `high` are its lowest and highest rank; where ranks have no figures, they are its 95 % interval.
    """
    rows = []
    for row, trial in _trial_rows(analysis, curves):
        estimate = resource.trial_estimate(trial)
        if estimate is not None:
            rows.append(row | _used_fields(resource, estimate, resource.by_rank(trial)))
    return rows


def _used_fields(resource: Resource, estimate: Estimate, by_rank: Mapping[int, float]) -> axes.ChartRow:
    """Return the fields of a trial's row. `by_rank`: rank -> its figure, for ranks that have one."""
    are_ranks_known = len(by_rank) > 1
    low = None if estimate.note else estimate.low
    high = None if estimate.note else estimate.high
    if are_ranks_known:
        low = min(by_rank.values())
        high = max(by_rank.values())
    spread = ""
    if low is not None:
        kind = "ranks:" if are_ranks_known else "95 % interval"
        spread = f"{kind} {resource.show(low)} to {resource.show(high or 0)}"
    return {
        "value": estimate.value * resource.scale,
        "low": None if low is None else low * resource.scale,
        "high": None if high is None else high * resource.scale,
        "of_runs": not are_ranks_known,
        "shown": resource.show(estimate.value),
        "spread": spread,
    }


def rank_rows(analysis: Analysis, curves: Sequence[CurveResult], resource: Resource) -> list[axes.ChartRow]:
    """Return a row for each rank of each trial with several; of many ranks only for the lowest and the highest."""
    rows = []
    for row, trial in _trial_rows(analysis, curves):
        by_rank = resource.by_rank(trial)
        if len(by_rank) < 2:
            continue
        lowest_first = sorted(by_rank, key=lambda rank: by_rank[rank])
        drawn = lowest_first
        if len(lowest_first) > MOST_RANKS_DRAWN:
            drawn = [lowest_first[0], lowest_first[-1]]
        for rank in drawn:
            value = by_rank[rank]
            rows.append(row | {"value": value * resource.scale, "shown": resource.show(value), "rank": rank})
    return rows


class _TrialRow(NamedTuple):
    """A trial, and the fields of its rows."""

    row: axes.ChartRow
    trial: TrialResult


def _trial_rows(analysis: Analysis, curves: Sequence[CurveResult]) -> list[_TrialRow]:
    """Return the trials along some curves, with the fields that their rows have in common."""
    return [
        _TrialRow({"series": curve.name, "gpus": point.gpus, "trial": point.trial_id}, trial)
        for curve, point, trial in analysis.along(curves)
    ]


def _resource_view(
    resource: Resource, mode: Mode, rows: list[axes.ChartRow], points: list[axes.ChartRow]
) -> FigureView:
    """Draw a resource by ranks.

    Args:
        resource: what is drawn.
        mode: the batch policy.
        rows: the trials.
        points: their ranks; empty where no trial has several.
    """
    plot = _resource_plot(resource, rows, points)
    notes = ""
    if points:
        notes = f"small points: ranks; line: {resource.joined}"
    elif "bounded" in plot.datasets:
        notes = "bars: 95 % intervals"
    label = axes.capitalised(resource.label)
    highest = max(rows, key=lambda row: row["value"])
    location = f"{highest['series']}, {units.ranks(highest['gpus'])}"
    summary = f"{label}: highest {highest['shown']} ({location})."
    return FigureView(
        name=f"{mode}-{resource.name}",
        choices={"batch policy": ControlOption(mode, mode), "measure": ControlOption(resource.name, resource.label)},
        title=f"{label}, {mode}",
        subtitle=notes,
        spec=plot.spec(summary, 200),
        columns={"series": "curve", "gpus": "ranks", "shown": resource.label, "spread": "spread"},
        summary=summary,
    )


def _resource_plot(resource: Resource, rows: list[axes.ChartRow], points: list[axes.ChartRow]) -> axes.Plot:
    """Draw a line through the trials of each curve, with bars of their ranks or runs, and small points of ranks."""
    names = axes.series_names(rows)
    colour = axes.colour_encoding(names)
    x = axes.ticked_axis("gpus", "ranks", [row["gpus"] for row in rows])
    y_axis = {"format": resource.axis_format, "tickCount": 5}
    y = axes.quantity("value", resource.axis, scale={"zero": True}, axis=y_axis)
    plot = axes.Plot({"rows": rows})
    if points:
        plot.datasets["ranks"] = points
        rule = {"type": "rule", "strokeWidth": 1.2, "opacity": 0.7}
        is_range = "datum.low != null && !datum.of_runs"
        plot.add("rows", rule, is_range, x=x, color=colour, y=axes.quantity("low"), y2={"field": "high"})
    rows_of_runs = [row for row in rows if row["of_runs"]]
    if axes.has_intervals(rows_of_runs):
        plot.datasets["bounded"] = rows_of_runs
        axes.add_bars(plot, "bounded", x, colour)
    plot.add("rows", {"type": "line", "strokeWidth": 2}, x=x, y=y, color=colour)
    if points:
        plot.add("ranks", {"type": "circle", "size": 22, "opacity": 0.75}, x=x, y=y, color=colour)
    point = {"type": "point", "size": 60, "filled": True, "opacity": 1}
    shape = axes.shape_encoding(names)
    point_tooltip = axes.tooltip(series="curve", gpus="ranks", shown=resource.label, spread="bar", trial="trial")
    plot.add("rows", point, x=x, y=y, color=colour, shape=shape, tooltip=point_tooltip)
    return plot


class _ResolutionPanel(NamedTuple):
    """A quantity by image size: the time of a step, or the peak memory."""

    name: Literal["step", "memory"]
    """As rows name it."""
    label: str
    view_name: str
    axis: str
    scale: float
    """Factor from a row's value to the axis."""


def resolution_chart(analysis: Analysis) -> Figure | None:
    """Draw time and memory by image size, measured and by arithmetic; None where the size was not varied."""
    rows = resolution_rows(analysis)
    unit = units.time_unit(row["value"] for row in rows if row["panel"] == "step")
    panels = (
        _ResolutionPanel("step", "step time", "resolution", f"step ({unit.sign})", unit.factor),
        _ResolutionPanel(
            "memory", "peak memory", "resolution-memory", "peak memory of a rank (GiB)", 1 / _BYTES_PER_GIB
        ),
    )
    views = []
    for panel in panels:
        panel_rows = [row for row in rows if row["panel"] == panel.name]
        if panel_rows:
            views.append(_resolution_view(panel, axes.scaled(panel_rows, panel.scale)))
    return axes.series_figure("resolution", "Time and memory by image size", views)


def resolution_rows(analysis: Analysis) -> list[axes.ChartRow]:
    """Return a row of seconds or bytes for each known figure: of each image size, measured or by arithmetic."""
    rows: list[axes.ChartRow] = []
    for curve in by_resolution(analysis):
        for point in curve.points:
            row = {"series": curve.name, "size": point.image_size, "trial": point.result.trial_id}
            rows += [row | figure for figure in _resolution_figures(point)]
    return rows


def _resolution_figures(point: SizePoint) -> Iterator[axes.ChartRow]:
    """Yield a row for each known figure of an image size; the measured step has an interval if runs suffice for one."""
    step = point.result.step_seconds
    if step is not None:
        interval = (None, None) if step.note else (step.low, step.high)
        yield _resolution_fields("step", "measured", step.value, units.seconds(step.value), *interval)
    if point.by_flops_seconds is not None:
        yield _resolution_fields("step", "by FLOPs", point.by_flops_seconds, units.seconds(point.by_flops_seconds))
    if point.result.peak_bytes is not None:
        peak_bytes = point.result.peak_bytes
        yield _resolution_fields("memory", "measured", peak_bytes, units.size(peak_bytes))
    if point.forecast_bytes is not None:
        yield _resolution_fields("memory", "forecast", point.forecast_bytes, units.size(point.forecast_bytes))


def _resolution_fields(
    panel: str, kind: str, value: float, shown: str, low: float | None = None, high: float | None = None
) -> axes.ChartRow:
    """Return the fields of a row. `kind`: "measured", "by FLOPs" or "forecast"."""
    return {
        "panel": panel,
        "kind": kind,
        "measured": kind == "measured",
        "value": value,
        "low": low,
        "high": high,
        "shown": shown,
    }


def _resolution_view(panel: _ResolutionPanel, rows: list[axes.ChartRow]) -> FigureView:
    """Draw a panel by image size. `rows`: those of the panel, in the unit of its axis."""
    plot = _resolution_plot(rows, panel.axis)
    measured = [row for row in rows if row["measured"]]
    largest = max(measured, key=lambda row: row["size"], default=rows[-1])
    summary = f"{largest['series']}, {largest['size']:,} pixels: {largest['shown']}."
    return FigureView(
        name=panel.view_name,
        choices={"measure": ControlOption(panel.name, panel.label)},
        title=f"{axes.capitalised(panel.label)} by image size",
        subtitle="dashed, hollow: time by FLOPs from the next smaller size; memory by arithmetic",
        spec=plot.spec(summary),
        columns={"series": "curve", "size": "pixels", "kind": "kind", "shown": panel.name},
        summary=summary,
    )


def _resolution_plot(rows: list[axes.ChartRow], y_title: str) -> axes.Plot:
    """Draw measured values as filled points and full lines, values by arithmetic as hollow and dashed ones."""
    names = axes.series_names(rows)
    colour = axes.colour_encoding(names)
    shape = axes.shape_encoding(names)
    x = axes.ticked_axis("size", "image size (pixels)", [row["size"] for row in rows])
    y = axes.quantity("value", y_title, scale={"type": "log"}, axis={"format": "~g", "tickCount": 5})
    point_tooltip = axes.tooltip(series="curve", size="pixels", kind="kind", shown=y_title, trial="trial")
    plot = axes.Plot({"rows": rows})
    dashed = {"type": "line", "strokeDash": axes.DASHED, "strokeWidth": 1.2}
    plot.add("rows", dashed, "!datum.measured", x=x, y=y, color=colour)
    hollow = {"type": "point", "size": 40, "filled": False, "opacity": 0.9}
    plot.add("rows", hollow, "!datum.measured", x=x, y=y, color=colour, shape=shape, tooltip=point_tooltip)
    plot.add("rows", {"type": "line", "strokeWidth": 2}, "datum.measured", x=x, y=y, color=colour)
    if axes.has_intervals(rows):
        axes.add_bars(plot, "rows", x, colour)
    filled = {"type": "point", "size": 60, "filled": True, "opacity": 1}
    plot.add("rows", filled, "datum.measured", x=x, y=y, color=colour, shape=shape, tooltip=point_tooltip)
    return plot


class StartUps(NamedTuple):
    """The start-up phases of the trials that take longest to start."""

    rows: list[axes.ChartRow]
    """The seconds of each phase of each of these trials."""
    without_room: int
    """Number of trials that start faster and are left out."""


def longest_start_ups(analysis: Analysis) -> StartUps:
    """Return the start-up phases of the trials that are drawn, in the order of the trials."""
    started = [trial for trial in analysis.trials.values() if trial.startup]
    longest_first = sorted(started, key=lambda trial: -(trial.startup_seconds or 0.0))
    drawn_ids = {trial.trial_id for trial in longest_first[:_MOST_STARTS_DRAWN]}
    drawn = [trial for trial in started if trial.trial_id in drawn_ids]
    labels = [trial_label(analysis, trial) for trial in drawn]
    rows: list[axes.ChartRow] = []
    for trial, label in zip(drawn, labels, strict=True):
        bar = label if labels.count(label) == 1 else f"{label} ({trial.trial_id})"
        rows += [{"bar": bar} | row for row in _phase_rows(trial)]
    return StartUps(rows, without_room=len(started) - len(drawn))


def _phase_rows(trial: TrialResult) -> Iterator[axes.ChartRow]:
    """Yield a row for each known phase of a start-up, in the order in which they follow one another."""
    for order, phase in enumerate(PHASES):
        if phase in trial.startup:
            seconds = trial.startup[phase]
            yield {
                "phase": phase.replace("_", " "),
                "order": order,
                "seconds": seconds,
                "shown": units.seconds(seconds),
                "whole": trial.startup_seconds or sum(trial.startup.values()),
            }


def startup_chart(analysis: Analysis) -> Figure | None:
    """Draw start-up phases stacked, one bar per trial; None where no run recorded them."""
    start_ups = longest_start_ups(analysis)
    if not start_ups.rows:
        return None
    bars = list(dict.fromkeys(row["bar"] for row in start_ups.rows))
    rows = [row | {"place": bars.index(row["bar"])} for row in start_ups.rows]
    plot = _startup_plot(rows)
    seconds_by_bar = {row["bar"]: row["whole"] for row in rows}
    longest = max(seconds_by_bar, key=lambda bar: seconds_by_bar[bar])
    summary = f"The longest start-up: {longest}, {units.seconds(seconds_by_bar[longest])}."
    notes = ["each phase's median over runs, which need not add up to the whole's", "in no step or epoch time"]
    if start_ups.without_room:
        notes.append(f"{start_ups.without_room} trials with a shorter start-up not drawn")
    if start_up_notes(list(analysis.trials.values())):
        notes.append(f"of {FORKED_RANKS}")
    view = FigureView(
        name="start-up",
        choices={},
        title="Start-up",
        subtitle="; ".join(notes),
        spec=plot.spec(summary, {"step": 20}),
        columns={"bar": "trial", "phase": "phase", "shown": "time"},
        summary=summary,
    )
    return Figure("start-up", "Start-up", (view,))


def _startup_plot(rows: list[axes.ChartRow]) -> axes.Plot:
    """Draw a bar for each trial, stacked by phase."""
    phases = list(dict.fromkeys(row["phase"] for row in sorted(rows, key=lambda row: int(row["order"]))))
    colours = list(axes.ORDERED_COLOURS[: len(phases)])
    legend = {"title": None, "orient": "top", "columns": 6}
    plot = axes.Plot({"rows": rows})
    plot.add(
        "rows",
        {"type": "bar", "stroke": "#80808080", "strokeWidth": 0.5},
        x=axes.quantity("seconds", "start-up (s)", aggregate="sum", axis={"tickCount": 6}),
        y=axes.nominal("bar", sort=axes.IN_ORDER, axis={"labelLimit": 360}),
        color=axes.nominal("phase", scale={"domain": phases, "range": colours}, legend=legend),
        order={"field": "order", "type": "quantitative"},
        tooltip=axes.tooltip(bar="trial", phase="phase", shown="time"),
    )
    return plot
