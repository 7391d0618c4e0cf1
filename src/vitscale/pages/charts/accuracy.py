"""Loss and accuracy: by epoch, by global batch and by ranks, and what a target accuracy takes.

A family is the curves of the results that differ only in batch size; its name leaves the batch size out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from vitscale.analysis import Analysis, CurveResult, TrialResult, by_mode
from vitscale.analysis.learning.convergence import (
    Convergence,
    Reach,
    accuracy_at_images,
    accuracy_at_seconds,
    common_reach,
)
from vitscale.pages.charts import axes
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Mode

AT_THE_END = "at the end of training"
_AFTER_WHOLE_EPOCHS = "after the last whole epoch"
_UNFINISHED_REMARK = ", the epoch unfinished"
_DOTTED_DASHES = [2, 3]
_FURTHEST_NOISE_FACTOR = 8
"""A noise scale further than this factor from the batches is only named in words: drawn, it would squeeze them."""
_MOST_STEPS_DRAWN = 200
TrainingFigure = Literal["loss", "accuracy"]


class _CourseOfTraining(NamedTuple):
    """A figure over the training of some curves."""

    figure: TrainingFigure
    x_title: Literal["epoch", "optimizer step"]
    rows: list[axes.ChartRow]


def training_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Draw loss and accuracy by epoch, a view for each batch policy and rank count.

    Where no trial has a second epoch, draw the loss by optimizer step.
    """
    views: list[FigureView] = []
    for mode, mode_curves in by_mode(curves).items():
        for course in _courses_of_training(analysis, mode_curves):
            for gpus in sorted({row["gpus"] for row in course.rows}):
                rows = [row for row in course.rows if row["gpus"] == gpus]
                views.append(_training_view(mode, course._replace(rows=rows), gpus))
    return axes.series_figure("training", "Loss and accuracy", views)


def _courses_of_training(analysis: Analysis, curves: Sequence[CurveResult]) -> list[_CourseOfTraining]:
    """Return loss and accuracy by epoch, without one that has no second epoch; where none has, the loss by step."""
    figures: tuple[TrainingFigure, ...] = ("loss", "accuracy")
    courses = []
    for figure in figures:
        rows = epoch_rows(analysis, curves, figure)
        has_second_epoch = any(row["x"] > 1 for row in rows)
        if has_second_epoch:
            courses.append(_CourseOfTraining(figure, "epoch", rows))
    return courses or [_CourseOfTraining("loss", "optimizer step", step_rows(analysis, curves))]


def epoch_rows(analysis: Analysis, curves: Sequence[CurveResult], figure: TrainingFigure) -> list[axes.ChartRow]:
    """Return a row for each epoch and split of the images on which the figure is known; epochs count from 1."""
    rows = []
    for curve, point, trial in analysis.along(curves):
        for epoch in trial.epochs:
            remark = ""
            if epoch.runs < len(trial.run_figures):
                remark += f" ({epoch.runs} of {len(trial.run_figures)} runs)"
            if not epoch.complete:
                remark += _UNFINISHED_REMARK
            for split, prefix in (("train", "train"), ("held-out", "held_out")):
                value = getattr(epoch, f"{prefix}_{figure}")
                if value is not None:
                    row = {"series": curve.name, "gpus": point.gpus, "x": epoch.epoch + 1, "split": split}
                    rows.append(row | {"value": value, "shown": f"{value:.4g}{remark}"})
    return rows


def step_rows(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """Return a row with the training loss of each of at most 200 evenly spaced steps of a trial; steps count from 1."""
    rows = []
    for curve, point, trial in analysis.along(curves):
        known_losses = [(step, loss) for step, loss in trial.loss_by_step if loss is not None]
        stride = max(1, math.ceil(len(known_losses) / _MOST_STEPS_DRAWN))
        for step, loss in known_losses[::stride]:
            row = {"series": curve.name, "gpus": point.gpus, "x": step + 1, "split": "train"}
            rows.append(row | {"value": loss, "shown": f"{loss:.4g}"})
    return rows


def _training_view(mode: Mode, course: _CourseOfTraining, gpus: int) -> FigureView:
    """Draw a figure over training at one rank count."""
    figure, x_title, rows = course
    splits = list(dict.fromkeys(row["split"] for row in rows))
    is_unfinished = any(row["shown"].endswith(_UNFINISHED_REMARK) for row in rows)
    plot = _training_plot(course, splits)
    summary = _training_summary(course, splits[-1], gpus, is_unfinished=is_unfinished)
    notes = []
    if len(splits) > 1:
        notes.append("solid: train, dashed: held-out")
    if is_unfinished:
        notes.append("last: a part of an epoch")
    kind = "" if x_title == "epoch" else "-by-step"
    return FigureView(
        name=f"{mode}-{figure}{kind}-{gpus}",
        choices={
            "batch policy": ControlOption(mode, mode),
            "measure": ControlOption(figure, f"{figure} by {x_title}"),
            "ranks": ControlOption(str(gpus), units.ranks(gpus)),
        },
        title=f"{axes.capitalised(figure)} by {x_title}, {mode}, {units.ranks(gpus)}",
        subtitle="; ".join(notes),
        spec=plot.spec(summary, 220),
        columns={"series": "curve", "split": "data", "x": x_title, "shown": figure},
        summary=summary,
    )


def _training_plot(course: _CourseOfTraining, splits: Sequence[str]) -> axes.Plot:
    """Draw a line for each curve, solid on training images and dashed on held-out ones.

    The rows get a field `weight`, the width of their line.
    """
    figure, x_title, rows = course
    names = axes.series_names(rows)
    last_x = max(int(row["x"]) for row in rows)
    multiples = range(0, last_x + 1, max(1, round(last_x / 5)))
    ticks = sorted({1, *multiples} - {0})  # 1, 2, 4, 6, 8, 10 of 10 epochs
    x = axes.quantity("x", x_title, axis={"values": ticks, "format": "d", "grid": False}, scale={"nice": False})
    is_accuracy = figure == "accuracy"
    y_axis = {"format": "%" if is_accuracy else "~r", "tickCount": 5}
    y = axes.quantity("value", figure, scale={"zero": is_accuracy}, axis=y_axis)
    legend = {"title": None, "orient": "top", "symbolType": "stroke", "symbolSize": 250, "symbolStrokeWidth": 2}
    scale = {"domain": ["train", "held-out"], "range": [axes.SOLID, axes.DASHED]}
    dash = axes.nominal("split", scale=scale, legend=legend if len(splits) > 1 else None)
    # Engines that compute the same have the same curve: each later one is drawn thinner, so that none hides another.
    series_after_first = max(1, len(names) - 1)
    for row in rows:
        row["weight"] = 1.6 + 2.4 * _series_drawn_later(row["series"], names) / series_after_first
    weight = axes.quantity("weight", scale=None, legend=None)
    colour = axes.colour_encoding(names)
    plot = axes.Plot({"rows": rows})
    plot.add("rows", {"type": "line"}, x=x, y=y, color=colour, strokeDash=dash, strokeWidth=weight)
    if x_title == "epoch":
        point_tooltip = axes.tooltip(series="curve", split="data", x=x_title, shown=figure)
        point = {"type": "point", "size": 32, "filled": True, "opacity": 1}
        plot.add("rows", point, x=x, y=y, color=colour, shape=axes.shape_encoding(names), tooltip=point_tooltip)
    return plot


def _series_drawn_later(name: str, names: Sequence[str]) -> int:
    """Return the number of series that are drawn after the named one."""
    return len(names) - 1 - names.index(name)


def _training_summary(course: _CourseOfTraining, split: str, gpus: int, *, is_unfinished: bool) -> str:
    """Return the range of a figure over the curves at the end: "Held-out loss at epoch 3 on 2 ranks: 0.31 to 0.34."."""
    last_x = max(int(row["x"]) for row in course.rows)
    values = sorted(row["value"] for row in course.rows if row["x"] == last_x and row["split"] == split)
    if not values:
        spread = units.UNKNOWN
    elif len(values) == 1:
        spread = f"{values[0]:.4g}"
    else:
        spread = f"{values[0]:.4g} to {values[-1]:.4g}"
    unfinished = ", which is unfinished in some runs," if is_unfinished else ""
    moment = f"{course.x_title} {last_x}{unfinished}"
    return axes.capitalised(f"{split} {course.figure} at {moment} on {units.ranks(gpus)}: {spread}.")


def accuracy_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Draw held-out accuracy by global batch and by ranks, each where it varies.

    Where a target accuracy was reached, also draw the seconds and images that it took.
    """
    views: list[FigureView] = []
    for mode, mode_curves in by_mode(curves).items():
        rows = accuracy_rows(analysis, mode_curves)
        noise = noise_scale_rows(analysis, mode_curves)
        for along in (_BATCH_AXIS, _RANK_AXIS):
            if len({row[along.field] for row in rows}) > 1:
                views += _panel_views(mode, along, rows, noise if along is _BATCH_AXIS else [])
        views += _target_views(mode, target_rows(analysis, mode_curves))
    return axes.series_figure("accuracy", "Held-out accuracy", views)


class _AccuracyAxis(NamedTuple):
    """The horizontal axis of a view: global batch or ranks."""

    field: Literal["batch", "gpus"]
    title: str


_BATCH_AXIS = _AccuracyAxis("batch", "global batch")
_RANK_AXIS = _AccuracyAxis("gpus", "ranks")


def _panel_views(
    mode: Mode, along: _AccuracyAxis, rows: Sequence[axes.ChartRow], noise: Sequence[axes.ChartRow]
) -> list[FigureView]:
    """Draw the accuracy at the end, after equal images and after equal seconds, a view each."""
    panels = sorted({(row["place"], row["panel"]) for row in rows})
    views = []
    for number, panel in panels:
        measure = ControlOption(f"accuracy-{number}", panel)
        panel_rows = [row for row in rows if row["panel"] == panel]
        views.append(_accuracy_view(mode, along, measure, panel_rows, noise))
    return views


def _target_views(mode: Mode, rows: Sequence[axes.ChartRow]) -> list[FigureView]:
    """Draw the time and the images that the target accuracy took, a view each."""
    views = []
    for quantity, subject in (("seconds", "time"), ("images", "images")):
        quantity_rows = [row for row in rows if row["quantity"] == quantity]
        if quantity_rows:
            label = f"{subject} to an accuracy of {quantity_rows[0]['target']}"
            measure = ControlOption(f"target-{quantity}", label)
            views.append(_accuracy_view(mode, _BATCH_AXIS, measure, quantity_rows, noise=[]))
    return views


def common_reach_of_curves(analysis: Analysis, curves: Sequence[CurveResult]) -> Reach:
    """Return the most images and the most seconds that all trials of these curves reached."""
    trial_ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    courses = [analysis.trials[trial_id].convergence for trial_id in trial_ids]
    return common_reach(course for course in courses if course is not None)


def accuracy_rows(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """Return a row for each trial and panel with an accuracy.

    The panels are the end of training, equal images (where trials were trained on different numbers), equal seconds.
    """
    common = common_reach_of_curves(analysis, curves)
    limits = common if have_unequal_images(analysis, curves) else replace(common, images=None)
    end_panel = _end_panel(analysis, curves)
    rows = []
    for row, trial in _trial_rows(analysis, curves):
        if trial.convergence is None:
            continue
        for index, panel in enumerate(_panels(trial, trial.convergence, end_panel, limits)):
            if panel.value is not None:
                rows.append(row | _panel_fields(panel, index))
    return rows


class _Panel(NamedTuple):
    """The accuracy of a trial at one moment of its training."""

    title: str
    value: float | None
    lowest: float | None = None
    """The accuracy of the trial's lowest run; None where only one is known."""
    highest: float | None = None


def _panels(trial: TrialResult, course: Convergence, end_panel: str, limits: Reach) -> list[_Panel]:
    """Return the accuracies of a trial: at the end, and after the images and seconds of `limits` that are not None."""
    over_runs = _range_over_runs(trial)
    end = _Panel(end_panel, _accuracy_at_end(trial, end_panel), over_runs.lowest, over_runs.highest)
    panels = [end]
    if limits.images is not None:
        panels.append(_Panel(after_images_title(limits.images), accuracy_at_images(course, limits.images)))
    if limits.seconds is not None:
        panels.append(_Panel(after_seconds_title(limits.seconds), accuracy_at_seconds(course, limits.seconds)))
    return panels


def _accuracy_at_end(trial: TrialResult, end_panel: str) -> float | None:
    """Return the held-out accuracy after the last epoch; None where it is unknown.

    It is also unknown after a part of an epoch, where the panel is of whole epochs.
    """
    last = trial.last_epoch
    if last is None or not (last.complete or end_panel == AT_THE_END):
        return None
    return last.held_out_accuracy


def _panel_fields(panel: _Panel, index: int) -> axes.ChartRow:
    """Return the fields of a row on an accuracy. `index`: number of the panel, from 0."""
    bounds = ""
    if panel.lowest is not None and panel.highest is not None:
        bounds = f"{panel.lowest:.1%} to {panel.highest:.1%} over runs"
    return {
        "panel": panel.title,
        "place": index,
        "value": panel.value,
        "low": panel.lowest,
        "high": panel.highest,
        "shown": f"{panel.value:.1%}",
        "bounds": bounds,
    }


class _TrialRow(NamedTuple):
    """A trial, and the fields of its rows."""

    row: axes.ChartRow
    trial: TrialResult


def _trial_rows(analysis: Analysis, curves: Sequence[CurveResult]) -> list[_TrialRow]:
    """Return the trials along some curves, each with the fields of its rows; `series` is the family."""
    trial_rows = []
    for curve, family in zip(curves, axes.families(analysis, curves), strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            row = {
                "series": family,
                "curve": curve.name,
                "gpus": point.gpus,
                "ranks": units.ranks(point.gpus),
                "batch": trial.trial.global_batch,
                "trial": trial.trial_id,
            }
            trial_rows.append(_TrialRow(row, trial))
    return trial_rows


def _end_panel(analysis: Analysis, curves: Sequence[CurveResult]) -> str:
    """Return the title of the panel of the end of training.

    Where a run went on for a part of an epoch, it says that the accuracy is that after the last whole epoch.
    """
    for curve in curves:
        for point in curve.points:
            for run in analysis.trials[point.trial_id].run_figures:
                if run.epochs and run.last_epoch is not run.epochs[-1]:
                    return _AFTER_WHOLE_EPOCHS
    return AT_THE_END


def after_images_title(images: int) -> str:
    """Return "after 3,072 images"."""
    return f"after {images:,} images"


def after_seconds_title(seconds: float) -> str:
    """Return "after 12.8 s of training"."""
    return f"after {units.seconds(seconds)} of training"


def noise_scale_rows(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """Return a row with the median gradient noise scale of each family's trials, where any is known."""
    scale_by_family_and_trial: dict[str, dict[str, float]] = {}
    for row, trial in _trial_rows(analysis, curves):
        course = trial.convergence
        if course is not None and course.noise_scale_images is not None:
            scale_by_trial = scale_by_family_and_trial.setdefault(row["series"], {})
            scale_by_trial[trial.trial_id] = course.noise_scale_images.value
    return [
        {"series": family, "batch": statistics.median(scales.values()), "trials": len(scales)}
        for family, scales in scale_by_family_and_trial.items()
    ]


def target_rows(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """Return a row with the seconds and a row with the images that each trial took to reach the target accuracy."""
    rows = []
    for row, trial in _trial_rows(analysis, curves):
        course = trial.convergence
        if course is None or course.target_accuracy is None:
            continue
        target = {"target": units.percent(course.target_accuracy, 1), "reached": runs_that_reached_target(trial)}
        if course.seconds_to_target is not None:
            rows.append(row | target | _target_fields("seconds", trial, course.seconds_to_target, units.seconds))
        if course.images_to_target is not None:
            rows.append(row | target | _target_fields("images", trial, course.images_to_target, units.number))
    return rows


def _target_fields(
    quantity: str, trial: TrialResult, interval: Estimate, show: Callable[[float], str]
) -> axes.ChartRow:
    """Return the fields of a row on what the target accuracy took: "seconds" or "images"."""
    return {
        "quantity": quantity,
        "panel": "",
        "shown": show(interval.value),
        "bounds": f"reached by {runs_that_reached_target(trial)}",
        "value": interval.value,
        "low": None if interval.note else interval.low,
        "high": None if interval.note else interval.high,
        "note": interval.note,
    }


def runs_that_reached_target(trial: TrialResult) -> str:
    """Return how many runs reached the target accuracy: "2 of 3 runs"; a dash where no target was set."""
    course = trial.convergence
    if course is None or course.target_accuracy is None:
        return units.UNKNOWN
    runs = [run for run in course.target_runs if run.epochs is not None]
    return f"{len(runs)} of {len(course.target_runs)} runs"


class _AccuracyRange(NamedTuple):
    """The lowest and the highest value over runs; both None where one run alone has a value."""

    lowest: float | None = None
    highest: float | None = None


def _range_over_runs(trial: TrialResult) -> _AccuracyRange:
    """Return the range of the accuracy over runs, at the end of their training."""
    accuracies_at_end = [run.last_epoch.held_out_accuracy for run in trial.run_figures if run.last_epoch]
    known_accuracies = [accuracy for accuracy in accuracies_at_end if accuracy is not None]
    return (
        _AccuracyRange(min(known_accuracies), max(known_accuracies)) if len(known_accuracies) > 1 else _AccuracyRange()
    )


def have_unequal_images(analysis: Analysis, curves: Sequence[CurveResult]) -> bool:
    """Whether some runs trained on more images than others. If not, accuracies at the end are at equal images."""
    image_counts: set[int] = set()
    for curve in curves:
        for point in curve.points:
            course = analysis.trials[point.trial_id].convergence
            if course is not None:
                image_counts.update(course.trained_images)
    return len(image_counts) > 1


def _accuracy_view(
    mode: Mode,
    along: _AccuracyAxis,
    measure: ControlOption,
    rows: Sequence[axes.ChartRow],
    noise: Sequence[axes.ChartRow],
) -> FigureView:
    """Draw the accuracies of trials, or what a target accuracy took.

    Args:
        mode: the batch policy.
        along: the horizontal axis (`_line_fields` says which points a line joins).
        measure: "target-seconds", "target-images" or "accuracy-" and a number.
        rows: the points.
        noise: the noise scales, which are drawn where they are near the batches.
    """
    is_to_target = measure.value.startswith("target")
    y_title, scaled_rows = _in_shown_unit(measure, rows)
    points = [row | _line_fields(row, along, scaled_rows) for row in scaled_rows]
    positions = [row[along.field] for row in points]
    near_noise = _noise_near(positions, noise)
    x_title = f"{along.title} (images)" if along is _BATCH_AXIS else along.title
    x = axes.ticked_axis(along.field, x_title, positions, number=",d")
    y_axis = {"format": "~s" if is_to_target else "%", "tickCount": 5}  # with as many decimals as tell ticks apart
    y = axes.quantity("value", y_title, scale={"zero": is_to_target}, axis=y_axis)
    plot = _accuracy_plot(points, near_noise, measure, x, y)
    notes = []
    if axes.has_intervals(points):
        notes.append("bars: 95 % intervals" if is_to_target else "bars: lowest and highest run")
    if near_noise:
        notes.append("dotted: gradient noise scale")
    if is_to_target:
        title = f"{measure.label}, {mode}"
    else:
        title = f"Held-out accuracy, {measure.label}, by {along.title}, {mode}"
    summary = _accuracy_summary(measure, rows, noise)
    return FigureView(
        name=_accuracy_view_name(mode, along, measure),
        choices={
            "batch policy": ControlOption(mode, mode),
            "measure": measure,
            "along": ControlOption(along.field, along.title),
        },
        title=title,
        subtitle="; ".join(notes),
        spec=plot.spec(summary, 220),
        columns={
            "series": "curve",
            "ranks": "ranks",
            "batch": "global batch",
            "shown": measure.label,
            "bounds": "runs",
        },
        summary=summary,
    )


class _ScaledRows(NamedTuple):
    """The rows of a view in the unit of its vertical axis, and the axis' title."""

    y_title: str
    rows: Sequence[axes.ChartRow]


def _in_shown_unit(measure: ControlOption, rows: Sequence[axes.ChartRow]) -> _ScaledRows:
    """Return the rows with times in a unit that suits them; other figures stay as they are."""
    if measure.value == "target-seconds":
        unit = units.time_unit(row["value"] for row in rows)
        return _ScaledRows(f"time of training ({unit.sign})", axes.scaled(rows, unit.factor))
    is_to_target = measure.value.startswith("target")
    return _ScaledRows("images trained on" if is_to_target else measure.label, rows)


def _noise_near(positions: Sequence[float], noise: Sequence[axes.ChartRow]) -> list[axes.ChartRow]:
    """Return the noise scales that are near enough to the points to be drawn."""
    lowest = min(positions) / _FURTHEST_NOISE_FACTOR
    highest = max(positions) * _FURTHEST_NOISE_FACTOR
    return [row for row in noise if lowest <= row["batch"] <= highest]


def _line_fields(row: axes.ChartRow, along: _AccuracyAxis, rows: Sequence[axes.ChartRow]) -> axes.ChartRow:
    """Return the fields that say which line joins a point to others, among all points of the view (`rows`).

    By ranks it is the line of its curve. By batch it is that of its family and rank count, or of its family alone
    where the rank count has one batch only.
    """
    if along is _RANK_AXIS:
        return {"line": row["curve"], "series": row["curve"]}
    same_ranks = [other for other in rows if (other["series"], other["ranks"]) == (row["series"], row["ranks"])]
    has_several_batches = len({other["batch"] for other in same_ranks}) > 1
    return {"line": f"{row['series']} {row['ranks']}" if has_several_batches else str(row["series"])}


def _accuracy_plot(
    rows: list[axes.ChartRow],
    noise: list[axes.ChartRow],
    measure: ControlOption,
    x: axes.ChartSpec,
    y: axes.ChartSpec,
) -> axes.Plot:
    """Draw points and the lines that join them, with bars and noise scales.

    The rows get the fields `weight`, the width of their line, and `size`, that of their point.
    """
    names = axes.series_names(rows)
    # Engines that compute the same have the same accuracy: each later one is drawn smaller, so that none hides another.
    series_after_first = max(1, len(names) - 1)
    for row in rows:
        share_of_later = _series_drawn_later(row["series"], names) / series_after_first
        row["weight"] = 1.6 + 1.8 * share_of_later
        row["size"] = 50 + 80 * share_of_later
    colour = axes.colour_encoding(names)
    plot = axes.Plot({"rows": rows})
    if noise:
        plot.datasets["noise"] = noise
        plot.add("noise", {"type": "rule", "strokeDash": _DOTTED_DASHES, "strokeWidth": 1.6}, x=x, color=colour)
    if axes.has_intervals(rows):
        axes.add_bars(plot, "rows", x, colour)
    weight = axes.quantity("weight", scale=None, legend=None)
    line = {"field": "line", "type": "nominal"}
    plot.add("rows", {"type": "line"}, x=x, y=y, color=colour, detail=line, strokeWidth=weight)
    point_tooltip = axes.tooltip(
        series="curve", ranks="ranks", batch="global batch", shown=measure.label, trial="trial"
    )
    size = axes.quantity("size", scale=None, legend=None)
    point = {"type": "point", "filled": True, "opacity": 1}
    shape = axes.shape_encoding(names)
    plot.add("rows", point, x=x, y=y, color=colour, shape=shape, size=size, tooltip=point_tooltip)
    return plot


def _accuracy_view_name(mode: Mode, along: _AccuracyAxis, measure: ControlOption) -> str:
    """Return the name of a view's file: "weak-accuracy-1-by-ranks", "strong-micro-time-to-target-by-batch"."""
    kind = measure.value.replace("accuracy-0", "accuracy").replace("target-seconds", "time-to-target")
    return f"{mode}-{kind}-by-{'ranks' if along is _RANK_AXIS else along.field}"


def _accuracy_summary(measure: ControlOption, rows: Sequence[axes.ChartRow], noise: Sequence[axes.ChartRow]) -> str:
    """Return the range of a view: "At the end of training: 61.2% to 71.0%. Gradient noise scale (...): ddp 512."."""
    by_value = sorted(rows, key=lambda row: row["value"])
    spread = by_value[0]["shown"]
    if len(by_value) > 1:
        spread += f" to {by_value[-1]['shown']}"
    summary = f"{axes.capitalised(measure.label)}: {spread}."
    if noise:
        scales = ", ".join(f"{row['series']} {units.number(row['batch'])}" for row in noise)
        summary += f" Gradient noise scale (images, median of trials): {scales}."
    return summary
