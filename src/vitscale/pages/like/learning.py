"""Figures of loss and accuracy: by epoch, by micro-batch, and of datasets beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from vitscale.analysis.runs.figures import EpochFigures
from vitscale.pages.charts.axes import ChartRow, Plot, quantity
from vitscale.pages.charts.scaling import ScalingAxis
from vitscale.pages.like.curves import curves_view, gpus_text
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import (
    DATASET_NAMES,
    FigureSeries,
    Member,
    distinct_series_names,
    sets_differing_in_dataset,
    sets_differing_in_micro_batch,
)
from vitscale.pages.like.study import StudyFigure
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView

_EPOCH_AXIS = ScalingAxis("epochs", "epoch", "epochs", is_even=True)
_MICRO_BATCH_AXIS = ScalingAxis("micro-batch", "micro-batch", "micro-batch (images per GPU)", "train.micro_batch")
_MOST_PANELS = 6
_MOST_COMPARED_COUNTS = 3
"""Most GPU counts at which datasets are drawn beside one another."""
LearningSplit = Literal["held_out", "train"]
Metric = Literal["loss", "accuracy"]
_METRICS: tuple[Metric, ...] = ("loss", "accuracy")
_SPLIT_NAMES: dict[LearningSplit, str] = {"held_out": "held-out", "train": "training"}
_NO_ACCURACY = "No trial of these results has recorded an accuracy after a whole epoch."


def accuracy_of_datasets(figure: StudyFigure, selection: Selection) -> Figure | str:
    """Draw accuracy by epoch, a curve for each dataset and GPU count.

    There is a view for each set of series that differ only in dataset. Where nothing can be drawn, return a sentence
    on what is missing.
    """
    recorded = _recorded_accuracy(selection.series)
    if not recorded.series:
        return _NO_ACCURACY
    datasets = {series.dataset for series in selection.series}
    sets = sets_differing_in_dataset(recorded.series)
    complete_sets = [(panel, series) for panel, series in sets if _datasets(series) == datasets]
    if not complete_sets:
        dataset_names = units.listed(_dataset_name(dataset) for dataset in sorted(datasets))
        return f"Accuracies of {dataset_names} were not recorded at one micro-batch and in like places."
    rows: list[ChartRow] = []
    for panel, series in complete_sets[:_MOST_PANELS]:
        rows += _rows_at_common_counts(figure, series, panel, recorded.split)
    if not rows:
        return "Accuracies of both datasets were recorded at no common GPU count."
    views = _views_by_panel(rows, recorded.split, "accuracy", _EPOCH_AXIS, ordered=False)
    return Figure(figure.name, figure.heading, tuple(views))


def _datasets(series_list: Sequence[FigureSeries]) -> set[str]:
    return {series.dataset for series in series_list}


def _rows_at_common_counts(
    figure: StudyFigure, series_list: Sequence[FigureSeries], panel: str, split: LearningSplit
) -> list[ChartRow]:
    """Return the rows of the accuracy by epoch of these series, at GPU counts that all of them have."""
    rows_by_series = [_learning_rows(series, panel, split, "accuracy") for series in series_list]
    counts_by_series = [{row["gpus"] for row in rows} for rows in rows_by_series]
    common_counts = set.intersection(*counts_by_series)
    compared_counts = _compared_counts(sorted(common_counts), figure.gpus)
    plotted = []
    for series, rows in zip(series_list, rows_by_series, strict=True):
        for row in rows:
            if row["gpus"] in compared_counts:
                name = f"{_dataset_name(series.dataset)}, {gpus_text(row['gpus'])}"
                plotted.append(row | {"series": name, "x": row["epoch"]})
    return plotted


def _compared_counts(common_counts: Sequence[int], figure_counts: Sequence[int]) -> set[int]:
    """Return the figure's GPU counts where all series have them; else up to three common ones.

    Of more than three these are the smallest, the middle and the largest.

    Args:
        common_counts: the GPU counts that all series have, sorted.
        figure_counts: the GPU counts that the study's figure shows.
    """
    if set(figure_counts) <= set(common_counts):
        return set(figure_counts)
    if len(common_counts) <= _MOST_COMPARED_COUNTS:
        return set(common_counts)
    middle = common_counts[len(common_counts) // 2]
    return {common_counts[0], middle, common_counts[-1]}


def _dataset_name(dataset: str) -> str:
    return DATASET_NAMES.get(dataset, dataset)


def loss_and_accuracy(figure: StudyFigure, selection: Selection) -> Figure | str:
    """Draw loss and accuracy by epoch, one curve per GPU count; where none is recorded, return a sentence on that."""
    recorded = _recorded_accuracy(_first_panels(selection.series))
    if not recorded.series:
        return _NO_ACCURACY
    panels = distinct_series_names(recorded.series)
    views = []
    for metric in _METRICS:
        rows: list[ChartRow] = []
        for series, panel in zip(recorded.series, panels, strict=True):
            rows += _learning_rows(series, panel, recorded.split, metric)
        plotted = [row | {"series": gpus_text(row["gpus"]), "x": row["epoch"]} for row in rows]
        views += _views_by_panel(plotted, recorded.split, metric, _EPOCH_AXIS)
    return Figure(figure.name, figure.heading, tuple(views))


def accuracy_by_micro_batch(figure: StudyFigure, selection: Selection) -> Figure | str:
    """Draws accuracy by micro-batch, one curve per GPU count; a view for each set of otherwise like series.

    The accuracy is that after the last epoch that all series of a set have. Returns a sentence on what is missing where
    nothing can be drawn.
    """
    recorded = _recorded_accuracy(selection.series)
    if not recorded.series:
        return _NO_ACCURACY
    sets = sets_differing_in_micro_batch(recorded.series)
    if not sets:
        return "Accuracy after whole epochs was recorded at one micro-batch only of any workload."
    rows: list[ChartRow] = []
    for panel, series in sets[:_MOST_PANELS]:
        rows += _rows_after_common_epoch(series, panel, recorded.split)
    plotted = [row | {"series": gpus_text(row["gpus"]), "x": row["micro_batch"]} for row in rows]
    plotted.sort(key=lambda row: (row["panel"], row["gpus"], row["x"]))
    views = _views_by_panel(plotted, recorded.split, "accuracy", _MICRO_BATCH_AXIS)
    return Figure(figure.name, figure.heading, tuple(views))


def _first_panels(series_list: Sequence[FigureSeries]) -> list[FigureSeries]:
    """Return the six series for which there is room.

    Series with several GPU counts come first, and among them those in one host.
    """
    return sorted(series_list, key=lambda series: (len(series.members) < 2, series.hosts != "one host"))[:_MOST_PANELS]


class _RecordedAccuracy(NamedTuple):
    """Series that have an accuracy after a whole epoch, all measured on one split of the images."""

    series: list[FigureSeries]
    split: LearningSplit


def _recorded_accuracy(series_list: Sequence[FigureSeries]) -> _RecordedAccuracy:
    """Return the series with an accuracy on held-out images; where none has it, those with one on training images."""
    held_out = [series for series in series_list if _has_accuracy(series, "held_out")]
    if held_out:
        return _RecordedAccuracy(held_out, "held_out")
    return _RecordedAccuracy([series for series in series_list if _has_accuracy(series, "train")], "train")


def _has_accuracy(series: FigureSeries, split: LearningSplit) -> bool:
    return any(_means_by_epoch(member, split, "accuracy") for member in series.members)


def _means_by_epoch(member: Member, split: LearningSplit, metric: Metric) -> dict[int, float]:
    """Return epoch, counted from 1 -> the mean of a metric over the runs of a trial.

    Epochs without it are left out, and so is a fragment of an epoch at a run's end, which holds fewer images.
    """
    means: dict[int, float] = {}
    for epoch in member.trial.epochs:
        mean = _metric_of_epoch(epoch, split, metric)
        if epoch.complete and mean is not None:
            means[epoch.epoch + 1] = float(mean)
    return means


def _metric_of_epoch(epoch: EpochFigures, split: LearningSplit, metric: Metric) -> float | None:
    value: float | None = getattr(epoch, f"{split}_{metric}")
    return value


def _values_of_runs(member: Member, epoch_number: int, split: LearningSplit, metric: Metric) -> list[float]:
    """Return a metric of each run of a trial after an epoch, counted from 1; runs without it are left out."""
    values = []
    for run in member.trial.run_figures:
        for epoch in run.epochs:
            value = _metric_of_epoch(epoch, split, metric)
            if epoch.epoch + 1 == epoch_number and value is not None:
                values.append(value)
    return values


def _learning_rows(series: FigureSeries, panel: str, split: LearningSplit, metric: Metric) -> list[ChartRow]:
    """Return a row for each GPU count and epoch: the mean of a metric over runs, with the lowest and highest run."""
    rows = []
    for member in series.members:
        for epoch_number, mean in _means_by_epoch(member, split, metric).items():
            values = _values_of_runs(member, epoch_number, split, metric)
            is_repeated = len(values) > 1
            rows.append(
                {
                    "panel": panel,
                    "gpus": member.gpus,
                    "micro_batch": series.micro_batch,
                    "epoch": epoch_number,
                    "value": mean,
                    "low": min(values) if is_repeated else None,
                    "high": max(values) if is_repeated else None,
                    "runs": len(values),
                    "shown": f"{mean:.3f}" if metric == "loss" else units.percent(mean, 1),
                    "bounds": f"after epoch {epoch_number}, {units.counted(len(values), 'run')}",
                }
            )
    return rows


class _MeasuredPoint(NamedTuple):
    """The micro-batch and GPU count of a trial."""

    micro_batch: int
    gpus: int


def _rows_after_common_epoch(series_list: Sequence[FigureSeries], panel: str, split: LearningSplit) -> list[ChartRow]:
    """Return rows of the accuracy after the last epoch that all trials of these series have.

    After the same epoch all have seen the same images. Return none where the trials have no epoch in common.
    """
    rows_by_epoch: dict[int, list[ChartRow]] = {}
    for series in series_list:
        for row in _learning_rows(series, panel, split, "accuracy"):
            rows_by_epoch.setdefault(row["epoch"], []).append(row)
    points_by_epoch = {epoch: _measured_points(rows) for epoch, rows in rows_by_epoch.items()}
    all_points = set[_MeasuredPoint]().union(*points_by_epoch.values())
    common_epochs = [epoch for epoch, points in points_by_epoch.items() if points == all_points]
    return rows_by_epoch[max(common_epochs)] if common_epochs else []


def _measured_points(rows: Sequence[ChartRow]) -> set[_MeasuredPoint]:
    return {_MeasuredPoint(row["micro_batch"], row["gpus"]) for row in rows}


def _views_by_panel(
    rows: Sequence[ChartRow], split: LearningSplit, metric: Metric, axis: ScalingAxis, *, ordered: bool = True
) -> list[FigureView]:
    """Return a view for each workload, which the field "panel" of a row names. `ordered`: see `curves_view`."""
    y = quantity("value", f"{_SPLIT_NAMES[split]} {metric}", scale={"zero": False},
                 axis={"format": "%" if metric == "accuracy" else "~r", "tickCount": 5})  # fmt: skip
    measure = ControlOption(metric, metric)
    views = []
    for number, panel in enumerate(dict.fromkeys(row["panel"] for row in rows), start=1):
        panel_rows = [row for row in rows if row["panel"] == panel]
        is_repeated = any(row["low"] is not None for row in panel_rows)
        notes = [
            f"{_SPLIT_NAMES[split]} figures; equal images at equal epochs, but the global batch grows with the GPUs",
            "bars: lowest and highest run" if is_repeated else "one run each: nothing is known of other seeds",
        ]
        choices = {"workload": ControlOption(f"workload-{number}", panel), "measure": measure}
        view = curves_view(
            choices,
            plot=Plot({"rows": panel_rows}),
            y_title="",
            notes=notes,
            axis=axis,
            y=y,
            less_is_better=metric == "loss",
            ordered=ordered,
        )
        views.append(view)
    return views
