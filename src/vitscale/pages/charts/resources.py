"""What trials used: utilisation, memory and energy by ranks; time and memory by image size; the start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitscale.analysis import Analysis, CurveResult, TrialResult, by_mode
from vitscale.analysis.runs.figures import PHASES
from vitscale.analysis.runs.resources import RankResources, ResourceFigures
from vitscale.pages.charts import axes
from vitscale.pages.resolutions import by_resolution
from vitscale.pages.tables import start_up_notes, trial_label
from vitscale.prediction.start_up import FORKED_RANKS
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import DeviceName, Mode

MOST_RANKS_DRAWN = 16
"""Number of ranks of a trial that are drawn one by one; of a larger trial only the lowest and the highest are."""
_MOST_STARTS_DRAWN = 40
_MIB, _GIB = 2.0**20, 2.0**30


@dataclass(frozen=True)
class Resource:
    """One figure of what a trial used."""

    name: str
    label: str
    axis: str
    whole: Callable[[ResourceFigures], float | Estimate | None]
    """The trial's figure, with its interval over runs where it has one."""
    show: Callable[[float], str]
    of_rank: Callable[[RankResources], float | None] | None = None
    device: DeviceName | None = None
    """Kind of device of the trials that have the figure; None: any kind."""
    scale: float = 1.0
    """Factor from a value to its axis."""
    axis_format: str = "~r"
    joined: str = ""
    """What the line goes through where a trial's ranks differ."""

    def of_trial(self, trial: TrialResult) -> Estimate | None:
        """The figure of a trial, or None."""
        fits = self.device in (None, trial.trial.train.device)
        value = self.whole(trial.resources) if fits and trial.resources is not None else None
        return Estimate(value) if isinstance(value, int | float) else value

    def of_ranks(self, trial: TrialResult) -> dict[int, float]:
        """Rank to its own figure, for ranks that have one."""
        if self.of_trial(trial) is None or self.of_rank is None or trial.resources is None:
            return {}
        return {rank.rank: value for rank in trial.resources.by_rank if (value := self.of_rank(rank)) is not None}


def _memory(
    name: str,
    label: str,
    whole: Callable[[ResourceFigures], float | None],
    device: DeviceName,
    *,
    by_rank: bool = False,
) -> Resource:
    of_rank: Callable[[RankResources], float | None] | None = (lambda rank: rank.peak_bytes) if by_rank else None
    show: Callable[[float], str] = lambda value: units.size(round(value))  # noqa: E731 - one expression
    return Resource(name, f"peak memory: {label}", f"{label} (GiB)", whole, show, of_rank, device, 1 / _GIB,
                    joined="the highest")  # fmt: skip


RESOURCES = (
    Resource(
        "gpu-utilisation", "GPU utilisation", "a kernel runs", lambda used: used.gpu_utilisation, units.percent,
        lambda rank: rank.gpu_utilisation, axis_format="%", joined="their mean",
    ),
    Resource(
        "cpu-utilisation", "CPU utilisation", "threads that compute", lambda used: used.cpu_utilisation, units.percent,
        lambda rank: rank.cpu_utilisation, axis_format="%", joined="their mean",
    ),
    _memory("memory", "GPU, allocated", lambda used: used.cuda_allocated_bytes, "cuda", by_rank=True),
    _memory("memory-reserved", "GPU, reserved", lambda used: used.cuda_reserved_bytes, "cuda"),
    _memory("memory-device", "GPU, whole device", lambda used: used.cuda_device_bytes, "cuda"),
    _memory("memory-rss", "process", lambda used: used.peak_rss_bytes, "cpu", by_rank=True),
    Resource(
        "energy", "energy per image", "J per image", lambda used: used.joules_per_image,
        lambda value: f"{units.number(value)} J",
    ),
)  # fmt: skip


def resource_chart(
    analysis: Analysis, curves: Sequence[CurveResult], resources: Sequence[Resource] = RESOURCES
) -> Figure | None:
    """A view for each resource and batch policy with anything known."""
    views = [
        _resource_view(resource, mode, rows, rank_points(analysis, own, resource))
        for mode, own in by_mode(curves).items()
        for resource in resources
        if (rows := used(analysis, own, resource))
    ]
    return axes.series_figure("resources", "What each trial used", views)


def used(analysis: Analysis, curves: Sequence[CurveResult], resource: Resource) -> list[axes.ChartRow]:
    """One row per trial with a known figure, with its lowest and highest rank, else its 95 % interval."""
    rows = []
    for row, trial in _trials(analysis, curves):
        value = resource.of_trial(trial)
        if value is None:
            continue
        ranks = resource.of_ranks(trial)
        over_runs = (None, None) if value.note else (value.low, value.high)
        ends = (min(ranks.values()), max(ranks.values())) if len(ranks) > 1 else over_runs
        low, high = (None if end is None else end * resource.scale for end in ends)
        spread = "" if ends[0] is None else f"{resource.show(ends[0])} to {resource.show(ends[1] or 0)}"
        told = "" if not spread else f"ranks: {spread}" if len(ranks) > 1 else f"95 % interval {spread}"
        figures = {"value": value.value * resource.scale, "low": low, "high": high, "of_runs": len(ranks) < 2}
        rows.append(row | figures | {"shown": resource.show(value.value), "spread": told})
    return rows


def rank_points(analysis: Analysis, curves: Sequence[CurveResult], resource: Resource) -> list[axes.ChartRow]:
    """One row per rank of each trial with several, as far as there is room."""
    rows = []
    for row, trial in _trials(analysis, curves):
        ranks = resource.of_ranks(trial)
        in_order = sorted(ranks, key=lambda rank: ranks[rank])
        drawn = in_order if len(in_order) <= MOST_RANKS_DRAWN else [in_order[0], in_order[-1]]
        if len(drawn) > 1:
            own = [{"value": ranks[rank] * resource.scale, "shown": resource.show(ranks[rank])} for rank in drawn]
            rows += [row | figures | {"rank": rank} for rank, figures in zip(drawn, own, strict=True)]
    return rows


def _trials(analysis: Analysis, curves: Sequence[CurveResult]) -> list[tuple[axes.ChartRow, TrialResult]]:
    return [
        ({"series": curve.name, "gpus": point.gpus, "trial": point.trial_id}, trial)
        for curve, point, trial in analysis.along(curves)
    ]


def _resource_view(
    resource: Resource, mode: Mode, rows: list[axes.ChartRow], points: list[axes.ChartRow]
) -> FigureView:
    names = list(dict.fromkeys(row["series"] for row in rows))
    colour, shape = axes.colour_encoding(names), axes.shape_encoding(names)
    x = axes.ticked_axis("gpus", "ranks", [row["gpus"] for row in rows])
    axis = {"format": resource.axis_format, "tickCount": 5}
    y = axes.quantity("value", resource.axis, scale={"zero": True}, axis=axis)
    told = axes.tooltip(series="curve", gpus="ranks", shown=resource.label, spread="bar", trial="trial")
    plot = axes.Plot({"rows": rows})
    if points:
        plot.datasets["ranks"] = points
        rule = {"type": "rule", "strokeWidth": 1.2, "opacity": 0.7}
        ends = {"y": axes.quantity("low"), "y2": {"field": "high"}}
        plot.add("rows", rule, "datum.low != null && !datum.of_runs", x=x, color=colour, **ends)
    if any(row["of_runs"] and row["low"] is not None for row in rows):
        plot.datasets["bounded"] = [row for row in rows if row["of_runs"]]
        axes.add_bars(plot, "bounded", x, colour)
    plot.add("rows", {"type": "line", "strokeWidth": 2}, x=x, y=y, color=colour)
    if points:
        plot.add("ranks", {"type": "circle", "size": 22, "opacity": 0.75}, x=x, y=y, color=colour)
    mark = {"type": "point", "size": 60, "filled": True, "opacity": 1}
    plot.add("rows", mark, x=x, y=y, color=colour, shape=shape, tooltip=told)
    highest = max(rows, key=lambda row: row["value"])
    summary = (
        f"{resource.label[:1].upper()}{resource.label[1:]}: highest {highest['shown']} "
        f"({highest['series']}, {units.ranks(highest['gpus'])})."
    )
    over_runs = any(row["of_runs"] and row["low"] is not None for row in rows)
    return FigureView(
        f"{mode}-{resource.name}",
        {"batch policy": ControlOption(mode, mode), "measure": ControlOption(resource.name, resource.label)},
        f"{resource.label[:1].upper()}{resource.label[1:]}, {mode}",
        f"small points: ranks; line: {resource.joined}" if points else "bars: 95 % intervals" if over_runs else "",
        plot.spec(summary, 200),
        {"series": "curve", "gpus": "ranks", "shown": resource.label, "spread": "spread"},
        summary,
    )


def resolution_chart(analysis: Analysis) -> Figure | None:
    """Time and memory by image size, measured and by arithmetic; None where the size was not varied."""
    rows = resolution_rows(analysis)
    unit = units.time_unit(row["value"] for row in rows if row["panel"] == "step")
    panels = {"step": (f"step ({unit.sign})", unit.factor), "memory": ("peak memory of a rank (GiB)", 1 / _GIB)}
    views = [
        _resolution_view(panel, own, title)
        for panel, (title, factor) in panels.items()
        if (own := axes.scaled([row for row in rows if row["panel"] == panel], factor))
    ]
    return axes.series_figure("resolution", "Time and memory by image size", views)


def resolution_rows(analysis: Analysis) -> list[axes.ChartRow]:
    """A row of seconds or bytes for each size, panel and kind that is known."""
    rows: list[axes.ChartRow] = []
    for curve in by_resolution(analysis):
        for point in curve.points:
            step, peak = point.result.step_seconds, point.result.peak_bytes
            told: tuple[tuple[str, str, float | None, Callable[[Any], str]], ...] = (
                ("step", "measured", step.value if step else None, units.seconds),
                ("step", "by FLOPs", point.by_flops_seconds, units.seconds),
                ("memory", "measured", peak, units.size),
                ("memory", "forecast", point.forecast_bytes, units.size),
            )
            where = {"series": curve.name, "size": point.image_size, "trial": point.result.trial_id}
            for panel, kind, value, show in told:
                if value is not None:
                    sure = (panel, kind) == ("step", "measured") and step is not None and not step.note
                    bounds = (step.low, step.high) if sure and step else (None, None)
                    row = where | {"panel": panel, "kind": kind, "measured": kind == "measured", "value": value}
                    rows.append(row | dict(zip(("low", "high"), bounds, strict=True)) | {"shown": show(value)})
    return rows


def _resolution_view(panel: str, rows: list[axes.ChartRow], title: str) -> FigureView:
    names = list(dict.fromkeys(row["series"] for row in rows))
    colour, shape = axes.colour_encoding(names), axes.shape_encoding(names)
    x = axes.ticked_axis("size", "image size (pixels)", [row["size"] for row in rows])
    y = axes.quantity("value", title, scale={"type": "log"}, axis={"format": "~g", "tickCount": 5})
    told = axes.tooltip(series="curve", size="pixels", kind="kind", shown=title, trial="trial")
    plot = axes.Plot({"rows": rows})
    forecast, measured = "!datum.measured", "datum.measured"
    plot.add("rows", {"type": "line", "strokeDash": axes.DASHED, "strokeWidth": 1.2}, forecast, x=x, y=y, color=colour)
    hollow = {"type": "point", "size": 40, "filled": False, "opacity": 0.9}
    plot.add("rows", hollow, forecast, x=x, y=y, color=colour, shape=shape, tooltip=told)
    plot.add("rows", {"type": "line", "strokeWidth": 2}, measured, x=x, y=y, color=colour)
    if any(row["low"] is not None for row in rows):
        axes.add_bars(plot, "rows", x, colour)
    filled = {"type": "point", "size": 60, "filled": True, "opacity": 1}
    plot.add("rows", filled, measured, x=x, y=y, color=colour, shape=shape, tooltip=told)
    largest = max((row for row in rows if row["measured"]), key=lambda row: row["size"], default=rows[-1])
    summary = f"{largest['series']}, {largest['size']:,} pixels: {largest['shown']}."
    return FigureView(
        "resolution" if panel == "step" else f"resolution-{panel}",
        {"measure": ControlOption(panel, {"step": "step time", "memory": "peak memory"}[panel])},
        f"{ {'step': 'Step time', 'memory': 'Peak memory'}[panel] } by image size",
        "dashed, hollow: time by FLOPs from the next smaller size; memory by arithmetic",
        plot.spec(summary),
        {"series": "curve", "size": "pixels", "kind": "kind", "shown": panel},
        summary,
    )


def startup(analysis: Analysis) -> tuple[list[axes.ChartRow], int]:
    """Seconds of each start-up phase of the trials that take longest to start, and how many trials were left out."""
    started = [trial for trial in analysis.trials.values() if trial.startup]
    longest = sorted(started, key=lambda trial: -(trial.startup_seconds or 0.0))[:_MOST_STARTS_DRAWN]
    drawn = [trial for trial in started if trial in longest]
    labels = [trial_label(analysis, trial) for trial in drawn]
    rows = []
    for trial, label in zip(drawn, labels, strict=True):
        name = label if labels.count(label) == 1 else f"{label} ({trial.trial_id})"
        for order, phase in enumerate(PHASES):
            if phase in trial.startup:
                seconds = trial.startup[phase]
                told = {
                    "phase": phase.replace("_", " "),
                    "order": order,
                    "seconds": seconds,
                    "shown": units.seconds(seconds),
                    "whole": trial.startup_seconds or sum(trial.startup.values()),
                }
                rows.append({"bar": name} | told)
    return rows, len(started) - len(drawn)


def startup_chart(analysis: Analysis) -> Figure | None:
    """Start-up phases stacked, one bar per trial; None where no run recorded them."""
    rows, left_out = startup(analysis)
    if not rows:
        return None
    trials = list(dict.fromkeys(row["bar"] for row in rows))
    rows = [row | {"place": trials.index(row["bar"])} for row in rows]
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
    wholes = {row["bar"]: row["whole"] for row in rows}
    longest = max(wholes, key=lambda trial: wholes[trial])
    more = f"; {left_out} trials with a shorter start-up not drawn" if left_out else ""
    more += f"; of {FORKED_RANKS}" if start_up_notes([*analysis.trials.values()]) else ""
    summary = f"The longest start-up: {longest}, {units.seconds(wholes[longest])}."
    view = FigureView(
        "start-up",
        {},
        "Start-up",
        f"each phase's median over runs, which need not add up to the whole's; in no step or epoch time{more}",
        plot.spec(summary, {"step": 20}),
        {"bar": "trial", "phase": "phase", "shown": "time"},
        summary,
    )
    return Figure("start-up", "Start-up", (view,))
