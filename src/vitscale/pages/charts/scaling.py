"""How it scales: epoch time, speedup, efficiency, throughput and GPU-hours, along ranks or any swept number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from vitscale.analysis import Analysis, CurveResult, ScalingPoint, TrialResult, by_mode
from vitscale.analysis.scaling import curve_name
from vitscale.pages import sentences
from vitscale.pages.charts import axes
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Mode

_IDEAL_SAMPLES = 24
_MOST_IDEALS = 6
"""Number of curves above which only the first one's ideal is drawn: a dashed line for each would hide the curves."""
_WIDE_RANGE = 8
"""Ratio of the largest to the smallest rank count from which both axes are logarithmic."""
_HEADROOM = 1.5
"""How far beyond the outermost point or ideal a bar may reach, as a factor."""
_FEW_RUNS = 3
"""Number of runs below which the runs themselves are drawn: two runs' interval is twelve times as wide as their gap."""
_MOST_SWEPT = 3
_MOST_SIDE_BY_SIDE = 40
"""Number of curves of one rank count above which they are points again: bars would be longer than a page."""
_STEP = 20
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
    """What perfect scaling would give, from the baseline's value, whether the curve is weak, and N / N_base."""
    show: Callable[[float | None], str]
    slower_is_more: bool = False
    """Whether the figure rises with an epoch's seconds, so that less is better."""
    relative: bool = False
    """Whether it is relative to the baseline: one rank count then shows nothing, and all curves share one ideal."""
    is_time: bool = False


def _gpu_hours(trial: TrialResult, point: ScalingPoint) -> Estimate | None:
    """With the images that `drop_last` leaves out, as what is told to be cheapest."""
    whole = point.gpus / 3600 / (1 - trial.images_left_out)
    return None if trial.epoch_seconds is None else trial.epoch_seconds.times(whole)


MEASURES = (
    Measure(
        "speedup", "speedup", "speedup", lambda _trial, point: point.speedup, lambda _base, _weak, times: times,
        units.share, relative=True,
    ),
    Measure(
        "efficiency", "efficiency", "efficiency", lambda _trial, point: point.efficiency,
        lambda _base, _weak, _times: 1.0, units.share, relative=True,
    ),
    Measure(
        "epoch-seconds", "epoch time", "epoch time", lambda trial, _point: trial.epoch_seconds,
        lambda base, weak, times: base.value if weak else base.value / times, units.seconds, slower_is_more=True,
        is_time=True,
    ),
    Measure(
        "throughput", "images/s", "images per second", lambda trial, _point: trial.images_per_second,
        lambda base, _weak, times: base.value * times, units.number,
    ),
    Measure(
        "gpu-hours", "GPU-hours", "GPU-hours of an epoch", _gpu_hours,
        lambda base, weak, times: base.value * (times if weak else 1.0), units.number, slower_is_more=True,
    ),
)  # fmt: skip


def _measures(analysis: Analysis) -> list[Measure]:
    """The measures, with the time of all ranks in the unit that suits these results."""
    is_on_cpu_alone = all(trial.trial.train.device == "cpu" for trial in analysis.trials.values())
    hours = [_gpu_hours(trial, point) for _, point, trial in analysis.along(analysis.curves)]
    known_hours = [estimate.value for estimate in hours if estimate is not None]
    unit = units.rank_time_unit(known_hours, "cpu" if is_on_cpu_alone else "cuda")

    def in_unit(trial: TrialResult, point: ScalingPoint) -> Estimate | None:
        estimate = _gpu_hours(trial, point)
        return None if estimate is None else estimate.times(unit.factor)

    return [
        replace(measure, label=unit.sign, title=f"{unit.sign} of an epoch", value=in_unit)
        if measure.name == "gpu-hours"
        else measure
        for measure in MEASURES
    ]


@dataclass(frozen=True)
class ScalingAxis:
    """What the points of a view are placed along."""

    value: str
    label: str
    title: str
    field: str = ""
    """The swept field; empty: ranks."""
    gpus: int = 0
    """The rank count of its points, where a field is swept."""
    is_even: bool = False
    """Whether its values follow one another in equal steps, as epochs do: it is never logarithmic."""


RANKS = ScalingAxis("ranks", "ranks", "ranks")
YScale = Literal["from zero", "as x", "log2 by log2"]
"""How values stand along ranks: from zero, for what ideally stays level; logarithmic where ranks are, over a wide range
of these; or both always to base 2, so that what grows as the ranks do is a line."""


def scaling_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """A view for each batch policy, measure and axis with anything known."""
    views: list[FigureView] = []
    for mode, own in by_mode(curves).items():
        for axis in (RANKS, *swept_axes(own)):
            measures = _measures(analysis)
            views += [view for measure in measures if (view := _view(analysis, mode, own, measure, axis)) is not None]
    if views:
        front = _default(views)
        views.sort(key=lambda view: view is not front)
    return axes.series_figure("scaling", "How it scales", views)


def _default(views: Sequence[FigureView]) -> FigureView:
    """Speedup by ranks under the first policy; without a second rank count images/s by what was swept."""
    by_ranks = [view for view in views if view.choices["measure"].value == "speedup"]
    swept = [v for v in views if v.choices["along"].value != "ranks" and v.choices["measure"].value == "throughput"]
    throughput = [view for view in views if view.choices["measure"].value == "throughput"]
    return (by_ranks or swept or throughput or list(views))[0]


def swept_axes(curves: Sequence[CurveResult]) -> list[ScalingAxis]:
    """An axis for each swept number at each rank count, limited to the first fields."""
    numbers: dict[str, set[float]] = {}
    for curve in curves:
        for field, value in curve.labels.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and field != "train.zero_stage":
                numbers.setdefault(field, set()).add(value)
    fields = [field for field, values in numbers.items() if len(values) > 1][:_MOST_SWEPT]
    counts = sorted({point.gpus for curve in curves for point in curve.points})
    return [
        ScalingAxis(f"{field}-{gpus}", f"{_field_name(field)}, {units.ranks(gpus)}", _field_name(field), field, gpus)
        for field in fields
        for gpus in counts
    ]


def _field_name(field: str) -> str:
    name = field.rpartition(".")[2].replace("_", " ")
    return {"micro batch": "micro-batch"}.get(name, name)


def measured(
    analysis: Analysis, curves: Sequence[CurveResult], measure: Measure, axis: ScalingAxis = RANKS
) -> tuple[list[axes.ChartRow], list[axes.ChartRow]]:
    """One row per point with the figure, and one per run of each point with too few runs for an interval.

    `drift` in a row says how a point's work differs from that of the others; it is empty where it does not.
    """
    rows: list[axes.ChartRow] = []
    runs: list[axes.ChartRow] = []
    for curve, point, trial in analysis.along(curves):
        value = measure.value(trial, point)
        at = point.gpus if not axis.field else curve.labels.get(axis.field)
        if value is None or at is None or axis.gpus not in (0, point.gpus):
            continue
        where = {"series": _series(curve, axis, trial), "x": at, "gpus": point.gpus}
        drift = f"loss differs: {units.relative(trial.drift.difference)}" if trial.drifts else ""
        told = point_row(value, measure.show, len(trial.run_figures))
        rows.append(where | told | {"trial": trial.trial_id, "drift": drift})
        if _of_few(value, len(trial.run_figures)):
            runs += [where | {"value": each, "run": number} for number, each in _of_runs(trial, value, measure)]
    if axis.field:
        rows.sort(key=lambda row: (row["series"], row["x"]))
    return rows, runs


def point_row(value: Estimate, show: Callable[[float | None], str], runs: int) -> axes.ChartRow:
    """A figure for a chart: with its interval, or with the number of runs where these are few."""
    low, high = (None, None) if _of_few(value, runs) else (value.low, value.high)
    end = units.form_of_ends(show)
    bounds = f"{end(low)} to {end(high)}" if low is not None and high is not None else units.counted(runs, "run")
    figures = {"value": value.value, "low": low, "high": high}
    return figures | {"shown": show(value.value), "bounds": bounds, "runs": runs}


def _of_few(value: Estimate, runs: int) -> bool:
    return bool(value.note) or runs < _FEW_RUNS


def _series(curve: CurveResult, axis: ScalingAxis, trial: TrialResult) -> str:
    if not axis.field:
        return curve.name
    return curve_name({name: value for name, value in curve.labels.items() if name != axis.field}, trial.trial)


def _of_runs(trial: TrialResult, value: Estimate, measure: Measure) -> list[tuple[int, float]]:
    """Each run's own figure, in proportion to its epoch; the point is their geometric mean."""
    if trial.epoch_seconds is None or len(trial.run_figures) < 2:
        return []
    known = [(index, run.epoch_seconds) for index, run in enumerate(trial.run_figures, 1) if run.epoch_seconds]
    times = [(number, seconds / trial.epoch_seconds.value) for number, seconds in known]
    return [(number, value.value * (share if measure.slower_is_more else 1 / share)) for number, share in times]


def ideal(analysis: Analysis, curves: Sequence[CurveResult], measure: Measure) -> list[axes.ChartRow]:
    """Perfect scaling from each curve's baseline to its largest rank count."""
    rows = []
    for curve in curves:
        base = curve.baseline
        value = measure.value(analysis.trials[base.trial_id], base) if base else None
        if base is not None and value is not None:
            level = partial(measure.ideal, value, curve.mode == "weak")
            rows += ideal_line(curve.name, base.gpus, max(point.gpus for point in curve.points), level)
    return rows


def ideal_line(series: str, base: int, largest: int, level: Callable[[float], float]) -> list[axes.ChartRow]:
    """Perfect scaling from `base` ranks to `largest`, sampled finely enough to draw; `level`: N / N_base to a value."""
    factors = [(largest / base) ** (sample / _IDEAL_SAMPLES) for sample in range(_IDEAL_SAMPLES + 1)]
    return [{"series": series, "x": base * times, "value": level(times)} for times in factors if largest > base]


def _view(
    analysis: Analysis, mode: Mode, curves: Sequence[CurveResult], measure: Measure, axis: ScalingAxis
) -> FigureView | None:
    """None where nothing is known, or where a relative measure has only one rank count."""
    rows, runs = measured(analysis, curves, measure, axis)
    if not rows or (axis.field and len({row["x"] for row in rows}) < 2):
        return None
    if measure.relative and all(row["value"] == 1.0 for row in rows) and len({row["gpus"] for row in rows}) < 2:
        return None
    line = [] if axis.field else ideal(analysis, curves, measure)
    of_which = ""
    if line and not measure.relative and len(curves) > _MOST_IDEALS:
        of_which = line[0]["series"]
        line = [row for row in line if row["series"] == of_which]
    title = measure.title
    if measure.is_time:
        unit = units.time_unit(row["value"] for row in rows)
        rows, runs, line = (axes.scaled(some, unit.factor) for some in (rows, runs, line))
        title = f"{measure.title} ({unit.sign})"
    levels = [row["value"] for row in (*rows, *line)]
    cut = axes.cut_bars(rows, min(levels) / _HEADROOM, max(levels) * _HEADROOM)
    summary = far_end(rows, measure.label, axis, less_is_better=measure.slower_is_more)
    if not axis.field:
        meaning = sentences.MODE_MEANINGS[mode]
        summary = f"{summary} {mode}: {meaning[:1].lower()}{meaning[1:]}"
    shown = axes.tooltip(
        series="curve", x=axis.title, shown=measure.label, bounds="95 % interval", runs="runs", trial="trial"
    )
    side_by_side = 1 < len(rows) <= _MOST_SIDE_BY_SIDE and len({row["x"] for row in rows}) == 1
    if side_by_side:
        rows.sort(key=lambda row: row["value"], reverse=not measure.slower_is_more)
    plot = axes.Plot({"rows": rows, **({"ideal": line} if line else {}), **({"runs": runs} if runs else {})})
    if side_by_side:
        _add_side_by_side(plot, title, shown)
    else:
        x, y = both_axes(rows, title, axis, _y_scale(measure, mode))
        axes.add_curves(plot, x, y, shown, one_ideal=measure.relative)
    told = ["bars: 95 % intervals" + (" (cut where no cap)" if cut else "")] if any(r["low"] for r in rows) else []
    told += ["small: single runs"] if runs else []
    told += ["dashed: ideal" + (f" of {of_which}" if of_which else "")] if line else []
    told += [f"{'pale' if side_by_side else 'hollow'}: drifts"] if any(row["drift"] for row in rows) else []
    heading = f"{measure.label[:1].upper()}{measure.label[1:]}, {mode}"
    along_name = "" if not axis.field else f"-by-{axis.value.rpartition('.')[2].replace('_', '-')}"
    return FigureView(
        f"{mode}-{measure.name}{along_name}",
        {
            "batch policy": ControlOption(mode, mode),
            "measure": ControlOption(measure.name, measure.label),
            "along": ControlOption(axis.value, axis.label),
        },
        heading if not axis.field else f"{heading}, by {axis.label}",
        "; ".join(told),
        plot.spec(summary, {"step": _STEP} if side_by_side else axes.HEIGHT),
        {"series": "curve", "x": axis.title, "shown": measure.label, "bounds": "95 % interval", "drift": "drift"}
        if any(row["drift"] for row in rows)
        else {"series": "curve", "x": axis.title, "shown": measure.label, "bounds": "95 % interval", "trial": "trial"},
        summary,
    )


def _add_side_by_side(plot: axes.Plot, title: str, told: list[axes.ChartSpec]) -> None:
    """Adds curves that have one rank count, each a bar below the other in the order of `rows`."""
    rows = plot.datasets["rows"]
    order = {row["series"]: index for index, row in enumerate(rows)}
    for row in (*rows, *plot.datasets.get("runs", ())):
        row["place"] = order[row["series"]]
    # Fonts of a page may be wider than those by which the labels are laid out.
    widest = min(axes.WIDTH // 2, 6 * max(len(row["series"]) for row in rows))
    y = axes.nominal("series", sort=axes.IN_ORDER, axis={"labelLimit": widest, "minExtent": widest})
    x = axes.quantity("value", title, scale={"zero": True, "nice": True}, axis={"tickCount": 6, "format": "~r"})
    bar = {"type": "bar", "height": _STEP // 2}
    plot.add("rows", bar, "!datum.drift", x=x, y=y, tooltip=told)
    if any(row["drift"] for row in rows):
        faint = bar | {"fillOpacity": 0.15}
        plot.add("rows", faint, "datum.drift", x=x, y=y, tooltip=[*told, *axes.tooltip(drift="drift")])
    if plot.datasets.get("runs"):
        plot.add("runs", axes.SINGLE_RUN, x=x, y=y)
    axes.add_bars(plot, "rows", y, None, upright=False)


def _y_scale(measure: Measure, mode: Mode) -> YScale:
    if measure.name == "speedup":
        return "log2 by log2"
    ideally_level = measure.name == "efficiency" or (mode == "weak" and measure.is_time)
    return "from zero" if ideally_level else "as x"


def both_axes(
    rows: Sequence[axes.ChartRow], title: str, axis: ScalingAxis, y: YScale
) -> tuple[axes.ChartSpec, axes.ChartSpec]:
    """Both axes of points at the `x` of these rows; along anything but ranks, values stand from zero."""
    at = sorted({row["x"] for row in rows})
    along_ranks = not axis.field and not axis.is_even
    is_wide = at[0] > 0 and at[-1] >= _WIDE_RANGE * at[0]
    both_log = along_ranks and (y == "log2 by log2" or (y == "as x" and is_wide))
    x_is_log = bool(axis.field) or both_log or (along_ranks and is_wide)
    number = "d" if all(isinstance(value, int) for value in at) else "~g"
    scale = {"type": "log", "base": 2} if both_log else {"zero": True, "nice": True}
    x = axes.ticked_axis("x", axis.title, at, log=x_is_log, number=number)
    return x, axes.quantity("value", title, scale=scale, axis={"tickCount": 6, "format": "~r"})


def far_end(rows: Sequence[axes.ChartRow], label: str, axis: ScalingAxis, *, less_is_better: bool) -> str:
    """Who is best at the far end: "Speedup at 8 ranks: 7.01 for ddp; 6.20 for deepspeed"."""
    last = max(row["x"] for row in rows)
    there = sorted((row for row in rows if row["x"] == last), key=lambda row: row["value"])
    best = there if less_is_better else there[::-1]
    named = "; ".join(f"{row['shown']} for {row['series']}" for row in best[:3])
    more = f"; and {len(best) - 3} more" if len(best) > 3 else ""
    where = f"{axis.title} {last:g}" + (f" on {units.ranks(axis.gpus)}" if axis.gpus else "")
    if not axis.field:
        where = units.counted(int(last), axis.title.removesuffix("s"))
    return f"{label[:1].upper()}{label[1:]} at {where}: {named}{more}."
