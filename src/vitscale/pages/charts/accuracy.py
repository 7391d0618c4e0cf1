"""Loss and accuracy: by epoch, by global batch and by ranks, and what a target accuracy takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from vitscale.analysis import Analysis, CurveResult, TrialResult, by_mode
from vitscale.analysis.learning.convergence import Reach, accuracy_at_images, accuracy_at_seconds, common_reach
from vitscale.pages.charts import axes
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.trial.trial import Mode

AT_THE_END = "at the end of training"
_AFTER_WHOLE_EPOCHS = "after the last whole epoch"
_UNFINISHED = ", the epoch unfinished"
_DOTTED = [2, 3]
_FURTHEST_NOISE = 8
"""A noise scale further than this factor from the batches is only told in words: drawn, it would squeeze them."""
_MOST_STEPS_DRAWN = 200


def training_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Loss and accuracy by epoch, a view for each batch policy and rank count; with only one epoch the loss by step."""
    views: list[FigureView] = []
    for mode, own in by_mode(curves).items():
        told = [(name, "epoch", by_epoch(analysis, own, name)) for name in ("loss", "accuracy")]
        told = [each for each in told if max((row["x"] for row in each[2]), default=0) > 1]
        for name, x_title, rows in told or [("loss", "optimizer step", by_step(analysis, own))]:
            for gpus in sorted({row["gpus"] for row in rows}):
                some = [row for row in rows if row["gpus"] == gpus]
                views.append(_training_view(mode, name, x_title, gpus, some))
    return axes.series_figure("training", "Loss and accuracy", views)


def by_epoch(analysis: Analysis, curves: Sequence[CurveResult], figure: str) -> list[axes.ChartRow]:
    """`loss` or `accuracy`, train and held-out, per epoch; epochs count from 1."""
    rows = []
    for curve, point, trial in analysis.along(curves):
        for epoch in trial.epochs:
            some = f" ({epoch.runs} of {len(trial.run_figures)} runs)" if epoch.runs < len(trial.run_figures) else ""
            some += "" if epoch.complete else _UNFINISHED
            for split, prefix in (("train", "train"), ("held-out", "held_out")):
                value = getattr(epoch, f"{prefix}_{figure}")
                if value is not None:
                    row = {"series": curve.name, "gpus": point.gpus, "x": epoch.epoch + 1, "split": split}
                    rows.append(row | {"value": value, "shown": f"{value:.4g}{some}"})
    return rows


def by_step(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """Training loss per optimizer step, for evenly spaced steps of each trial."""
    rows = []
    for curve, point, trial in analysis.along(curves):
        known = [(step, loss) for step, loss in trial.loss_by_step if loss is not None]
        for step, loss in known[:: -(-len(known) // _MOST_STEPS_DRAWN) or 1]:
            row = {"series": curve.name, "gpus": point.gpus, "x": step + 1, "split": "train"}
            rows.append(row | {"value": loss, "shown": f"{loss:.4g}"})
    return rows


def _training_view(mode: Mode, name: str, x_title: str, gpus: int, rows: list[axes.ChartRow]) -> FigureView:
    names = list(dict.fromkeys(row["series"] for row in rows))
    splits = list(dict.fromkeys(row["split"] for row in rows))
    last_x = max(int(row["x"]) for row in rows)
    ticks = sorted({1, *range(0, last_x + 1, max(1, round(last_x / 5)))} - {0})
    x = axes.quantity("x", x_title, axis={"values": ticks, "format": "d", "grid": False}, scale={"nice": False})
    format_ = {"format": "%" if name == "accuracy" else "~r", "tickCount": 5}
    y = axes.quantity("value", name, scale={"zero": name == "accuracy"}, axis=format_)
    stroke = {"title": None, "orient": "top", "symbolType": "stroke", "symbolSize": 250, "symbolStrokeWidth": 2}
    scale = {"domain": ["train", "held-out"], "range": [axes.SOLID, axes.DASHED]}
    dash = axes.nominal("split", scale=scale, legend=stroke if len(splits) > 1 else None)
    # Engines that compute the same have the same curve: each later one is drawn thinner, so that none hides another.
    for row in rows:
        index = names.index(row["series"])
        row["weight"] = 1.6 + 2.4 * (len(names) - 1 - index) / max(1, len(names) - 1)
    plot = axes.Plot({"rows": rows})
    weight = axes.quantity("weight", scale=None, legend=None)
    colour, shape = axes.colour_encoding(names), axes.shape_encoding(names)
    plot.add("rows", {"type": "line"}, x=x, y=y, color=colour, strokeDash=dash, strokeWidth=weight)
    if x_title == "epoch":
        told = axes.tooltip(series="curve", split="data", x=x_title, shown=name)
        mark = {"type": "point", "size": 32, "filled": True, "opacity": 1}
        plot.add("rows", mark, x=x, y=y, color=colour, shape=shape, tooltip=told)
    last = [row for row in rows if row["x"] == last_x and row["split"] == splits[-1]]
    values = sorted(row["value"] for row in last)
    spread = f"{values[0]:.4g}" + (f" to {values[-1]:.4g}" if len(values) > 1 else "") if values else units.UNKNOWN
    unfinished = any(row["shown"].endswith(_UNFINISHED) for row in rows)
    at = f"{x_title} {last_x}{', which is unfinished in some runs,' if unfinished else ''}"
    summary = f"{splits[-1]} {name} at {at} on {units.ranks(gpus)}: {spread}."
    summary = summary[:1].upper() + summary[1:]
    kind = "" if x_title == "epoch" else "-by-step"
    return FigureView(
        f"{mode}-{name}{kind}-{gpus}",
        {
            "batch policy": ControlOption(mode, mode),
            "measure": ControlOption(name, f"{name} by {x_title}"),
            "ranks": ControlOption(str(gpus), units.ranks(gpus)),
        },
        f"{name[:1].upper()}{name[1:]} by {x_title}, {mode}, {units.ranks(gpus)}",
        "; ".join(["solid: train, dashed: held-out"] * (len(splits) > 1) + ["last: a part of an epoch"] * unfinished),
        plot.spec(summary, 220),
        {"series": "curve", "split": "data", "x": x_title, "shown": name},
        summary,
    )


def accuracy_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Held-out accuracy by global batch and by ranks where these vary; what a target took where it was reached."""
    views: list[FigureView] = []
    for mode, own in by_mode(curves).items():
        rows = accuracies(analysis, own)
        for field, title in (("batch", "global batch"), ("gpus", "ranks")):
            if len({row[field] for row in rows}) > 1:
                for index, panel in sorted({(row["place"], row["panel"]) for row in rows}):
                    some = [row for row in rows if row["panel"] == panel]
                    noise = noise_scales(analysis, own) if field == "batch" else []
                    views.append(
                        _accuracy_view(mode, field, title, ControlOption(f"accuracy-{index}", panel), some, noise)
                    )
        for quantity_, what in (("seconds", "time"), ("images", "images")):
            if some := [row for row in targets(analysis, own) if row["quantity"] == quantity_]:
                choice = ControlOption(f"target-{quantity_}", f"{what} to an accuracy of {some[0]['target']}")
                views.append(_accuracy_view(mode, "batch", "global batch", choice, some, []))
    return axes.series_figure("accuracy", "Held-out accuracy", views)


def reach(analysis: Analysis, curves: Sequence[CurveResult]) -> Reach:
    """How far all trials of these curves can be compared."""
    ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    return common_reach(course for trial_id in ids if (course := analysis.trials[trial_id].convergence) is not None)


def accuracies(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """One row per trial and panel with an accuracy; equal images only where trials differ in their images."""
    limits, of_the_end = reach(analysis, curves), _end_panel(analysis, curves)
    rows = []
    for row, trial in _trials(analysis, curves):
        course = trial.convergence
        if course is None:
            continue
        low, high = _range(trial)
        last = trial.last_epoch
        end = last.held_out_accuracy if last and (last.complete or of_the_end == AT_THE_END) else None
        panels = [(of_the_end, end, low, high)]
        if limits.images is not None and unlike_images(analysis, curves):
            panels.append((images_panel(limits.images), accuracy_at_images(course, limits.images), None, None))
        if limits.seconds is not None:
            panels.append((seconds_panel(limits.seconds), accuracy_at_seconds(course, limits.seconds), None, None))
        for index, (panel, value, lowest, highest) in enumerate(panels):
            if value is not None:
                bounds = "" if lowest is None or highest is None else f"{lowest:.1%} to {highest:.1%} over runs"
                told = {"shown": f"{value:.1%}", "bounds": bounds}
                rows.append(
                    row | {"panel": panel, "place": index, "value": value, "low": lowest, "high": highest} | told
                )
    return rows


def _trials(analysis: Analysis, curves: Sequence[CurveResult]) -> list[tuple[axes.ChartRow, TrialResult]]:
    placed = []
    for curve, family in zip(curves, axes.families(analysis, curves), strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            where = {"series": family, "curve": curve.name, "gpus": point.gpus, "ranks": units.ranks(point.gpus)}
            placed.append((where | {"batch": trial.trial.global_batch, "trial": trial.trial_id}, trial))
    return placed


def _end_panel(analysis: Analysis, curves: Sequence[CurveResult]) -> str:
    """What accuracies of the end are of: where a run goes on for a part of an epoch, what that changed is not told."""
    runs = [run for curve in curves for point in curve.points for run in analysis.trials[point.trial_id].run_figures]
    return AT_THE_END if all(run.last_epoch is run.epochs[-1] for run in runs if run.epochs) else _AFTER_WHOLE_EPOCHS


def images_panel(images: int) -> str:
    """ "after 3,072 images"."""
    return f"after {images:,} images"


def seconds_panel(seconds: float) -> str:
    """ "after 12.8 s of training"."""
    return f"after {units.seconds(seconds)} of training"


def noise_scales(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """The median gradient noise scale of each family's trials, where any is known."""
    by_family: dict[str, dict[str, float]] = {}
    for row, trial in _trials(analysis, curves):
        convergence = trial.convergence
        if convergence is not None and convergence.noise_scale_images is not None:
            by_family.setdefault(row["series"], {})[trial.trial_id] = convergence.noise_scale_images.value
    return [
        {"series": family, "batch": statistics.median(scales.values()), "trials": len(scales)}
        for family, scales in by_family.items()
    ]


def targets(analysis: Analysis, curves: Sequence[CurveResult]) -> list[axes.ChartRow]:
    """What it took to reach the target accuracy: a row per trial for the seconds and one for the images."""
    rows = []
    for row, trial in _trials(analysis, curves):
        course = trial.convergence
        if course is None or course.target_accuracy is None:
            continue
        told = {"target": units.percent(course.target_accuracy, 1), "reached": reached(trial)}
        for quantity_, interval in (("seconds", course.seconds_to_target), ("images", course.images_to_target)):
            if interval is not None:
                shown = units.seconds(interval.value) if quantity_ == "seconds" else units.number(interval.value)
                low, high = (None, None) if interval.note else (interval.low, interval.high)
                figures = {"value": interval.value, "low": low, "high": high, "note": interval.note}
                of = {"quantity": quantity_, "panel": "", "shown": shown, "bounds": f"reached by {reached(trial)}"}
                rows.append(row | told | of | figures)
    return rows


def reached(trial: TrialResult) -> str:
    """ "2 of 3 runs"; a dash where no target was set."""
    course = trial.convergence
    if course is None or course.target_accuracy is None:
        return units.UNKNOWN
    there = sum(run.epochs is not None for run in course.target_runs)
    return f"{there} of {len(course.target_runs)} runs"


def _range(trial: TrialResult) -> tuple[float | None, float | None]:
    """The lowest and the highest run at the end of its training."""
    last = [run.last_epoch.held_out_accuracy for run in trial.run_figures if run.last_epoch]
    known = [value for value in last if value is not None]
    return (min(known), max(known)) if len(known) > 1 else (None, None)


def unlike_images(analysis: Analysis, curves: Sequence[CurveResult]) -> bool:
    """Whether some runs trained on more images than others; if not, the end is at equal images."""
    courses = [analysis.trials[point.trial_id].convergence for curve in curves for point in curve.points]
    return len({images for course in courses if course is not None for images in course.trained_images}) > 1


def _accuracy_view(
    mode: Mode,
    field: str,
    title: str,
    measure: ControlOption,
    rows: Sequence[axes.ChartRow],
    noise: Sequence[axes.ChartRow],
) -> FigureView:
    """A line per family and rank count where batches are swept, else per family; by ranks a line per curve."""
    of_time = measure.value == "target-seconds"
    unit = units.time_unit(row["value"] for row in rows)
    drawn = [row | {"line": _line(row, rows)} for row in (axes.scaled(rows, unit.factor) if of_time else rows)]
    if field == "gpus":
        drawn = [row | {"series": row["curve"], "line": row["curve"]} for row in drawn]
    names = list(dict.fromkeys(row["series"] for row in drawn))
    # Engines that compute the same have the same accuracy: each later one is drawn smaller, so that none hides another.
    for row in drawn:
        left = (len(names) - 1 - names.index(row["series"])) / max(1, len(names) - 1)
        row["weight"], row["size"] = 1.6 + 1.8 * left, 50 + 80 * left
    at = sorted({row[field] for row in drawn})
    x = axes.ticked_axis(field, f"{title} (images)" if field == "batch" else title, at, number=",d")
    to_target = measure.value.startswith("target")
    axis_title = f"time of training ({unit.sign})" if of_time else "images trained on" if to_target else measure.label
    axis = {"format": "~s" if to_target else "%", "tickCount": 5}  # with as many decimals as tell ticks apart
    y = axes.quantity("value", axis_title, scale={"zero": to_target}, axis=axis)
    colour, shape = axes.colour_encoding(names), axes.shape_encoding(names)
    near = [row for row in noise if at[0] / _FURTHEST_NOISE <= row["batch"] <= at[-1] * _FURTHEST_NOISE]
    plot = axes.Plot({"rows": drawn})
    if near:
        plot.datasets["noise"] = near
        plot.add("noise", {"type": "rule", "strokeDash": _DOTTED, "strokeWidth": 1.6}, x=x, color=colour)
    if any(row["low"] is not None for row in drawn):
        axes.add_bars(plot, "rows", x, colour)
    weight = axes.quantity("weight", scale=None, legend=None)
    line: axes.ChartSpec = {"detail": {"field": "line", "type": "nominal"}, "strokeWidth": weight}
    plot.add("rows", {"type": "line"}, x=x, y=y, color=colour, **line)
    told = axes.tooltip(series="curve", ranks="ranks", batch="global batch", shown=measure.label, trial="trial")
    size = axes.quantity("size", scale=None, legend=None)
    point = {"type": "point", "filled": True, "opacity": 1}
    plot.add("rows", point, x=x, y=y, color=colour, shape=shape, size=size, tooltip=told)
    values = sorted(rows, key=lambda row: row["value"])
    ends = values[0]["shown"] + (f" to {values[-1]['shown']}" if len(values) > 1 else "")
    summary = f"{measure.label[:1].upper()}{measure.label[1:]}: {ends}."
    if noise:
        scales = ", ".join(f"{row['series']} {units.number(row['batch'])}" for row in noise)
        summary += f" Gradient noise scale (images, median of trials): {scales}."
    kind = measure.value.replace("accuracy-0", "accuracy").replace("target-seconds", "time-to-target")
    return FigureView(
        f"{mode}-{kind}-by-{'ranks' if field == 'gpus' else field}",
        {"batch policy": ControlOption(mode, mode), "measure": measure, "along": ControlOption(field, title)},
        f"Held-out accuracy, {measure.label}, by {title}, {mode}" if not to_target else f"{measure.label}, {mode}",
        "; ".join(
            [*(["bars: 95 % intervals" if to_target else "bars: lowest and highest run"] if any(
                row["low"] is not None for row in drawn) else []),
             *(["dotted: gradient noise scale"] if near else [])]
        ),
        plot.spec(summary, 220),
        {"series": "curve", "ranks": "ranks", "batch": "global batch", "shown": measure.label, "bounds": "runs"},
        summary,
    )  # fmt: skip


def _line(row: axes.ChartRow, rows: Sequence[axes.ChartRow]) -> str:
    """The line of a row: its family at its rank count; its family alone where batches are not swept."""
    batches = {other["batch"] for other in rows if (other["series"], other["ranks"]) == (row["series"], row["ranks"])}
    return f"{row['series']} {row['ranks']}" if len(batches) > 1 else str(row["series"])
