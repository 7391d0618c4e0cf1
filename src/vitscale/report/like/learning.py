"""Figures of loss and accuracy: by epoch, by micro-batch, and of datasets beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vitscale.present import units
from vitscale.present.document import Choice, Figure, View
from vitscale.report.charts.axes import Plot, Row, quantity
from vitscale.report.charts.scaling import Axis
from vitscale.report.like.curves import curves_view, gpus_text
from vitscale.report.like.selection import Selection
from vitscale.report.like.series import DATASET_NAMES, Member, Series, apart_in_dataset, apart_in_micro_batch, names
from vitscale.report.like.study import StudyFigure

_EPOCHS = Axis("epochs", "epoch", "epochs", is_even=True)
_MICRO_BATCHES = Axis("micro-batch", "micro-batch", "micro-batch (images per GPU)", "train.micro_batch")
_MOST_PANELS = 6
_MOST_COMPARED = 3
"""Most GPU counts at which datasets are drawn beside one another."""
Split = Literal["held_out", "train"]
_SPLIT_NAMES: dict[Split, str] = {"held_out": "held-out", "train": "training"}
_NOTHING = "No trial of these results has recorded an accuracy after a whole epoch."


def accuracy_of_datasets(figure: StudyFigure, chosen: Selection) -> Figure | str:
    """Accuracy by epoch, a curve for each dataset and GPU count; a view for each set of otherwise like series."""
    drawn, split = _with_accuracy(chosen.series)
    if not drawn:
        return _NOTHING
    wanted = {series.dataset for series in chosen.series}
    sets = apart_in_dataset([series for series, _ in drawn])
    complete = [(name, some) for name, some in sets if {series.dataset for series in some} == wanted]
    if not complete:
        datasets = units.listed(_dataset_name(dataset) for dataset in sorted(wanted))
        return f"Accuracies of {datasets} were not recorded at one micro-batch and in like places."
    rows = [row for name, some in complete[:_MOST_PANELS] for row in _beside_each_other(figure, some, name, split)]
    if not rows:
        return "Accuracies of both datasets were recorded at no common GPU count."
    return Figure(figure.name, figure.heading, tuple(_panels(rows, split, "accuracy", _EPOCHS, ordered=False)))


def _beside_each_other(figure: StudyFigure, some: Sequence[Series], panel: str, split: Split) -> list[Row]:
    """Rows of the accuracy of each of these series, at GPU counts that all have: the figure's, or three of those."""
    rows_of = [_learning_rows(series, panel, split, "accuracy") for series in some]
    common = set.intersection(*({row["gpus"] for row in rows} for rows in rows_of))
    counts = _compared_counts(sorted(common), figure.gpus)
    placed = []
    for series, rows in zip(some, rows_of, strict=True):
        for row in rows:
            if row["gpus"] in counts:
                name = f"{_dataset_name(series.dataset)}, {gpus_text(row['gpus'])}"
                placed.append(row | {"series": name, "x": row["epoch"]})
    return placed


def _compared_counts(common: Sequence[int], wanted: Sequence[int]) -> set[int]:
    """The wanted GPU counts, where all are there; else the smallest, the middle and the largest there are."""
    if set(wanted) <= set(common):
        return set(wanted)
    if len(common) <= _MOST_COMPARED:
        return set(common)
    return {common[0], common[len(common) // 2], common[-1]}


def _dataset_name(dataset: str) -> str:
    return DATASET_NAMES.get(dataset, dataset)


def loss_and_accuracy(figure: StudyFigure, chosen: Selection) -> Figure | str:
    """Loss and accuracy by epoch, one curve per GPU count."""
    drawn, split = _with_accuracy(_first(chosen.series))
    if not drawn:
        return _NOTHING
    views = []
    for what in ("loss", "accuracy"):
        rows = [row for series, name in drawn for row in _learning_rows(series, name, split, what)]
        placed = [row | {"series": gpus_text(row["gpus"]), "x": row["epoch"]} for row in rows]
        views += _panels(placed, split, what, _EPOCHS)
    return Figure(figure.name, figure.heading, tuple(views))


def accuracy_by_micro_batch(figure: StudyFigure, chosen: Selection) -> Figure | str:
    """Accuracy by micro-batch after one epoch, one curve per GPU count; a view per set of otherwise like series."""
    drawn, split = _with_accuracy(chosen.series)
    several = apart_in_micro_batch([series for series, _ in drawn])
    if not several:
        told = "Accuracy after whole epochs was recorded at one micro-batch only of any workload."
        return told if drawn else _NOTHING
    rows = [row for name, some in several[:_MOST_PANELS] for row in _at_common_epoch(some, name, split)]
    placed = [row | {"series": gpus_text(row["gpus"]), "x": row["micro_batch"]} for row in rows]
    placed.sort(key=lambda row: (row["panel"], row["gpus"], row["x"]))
    return Figure(figure.name, figure.heading, tuple(_panels(placed, split, "accuracy", _MICRO_BATCHES)))


def _first(series: Sequence[Series]) -> list[Series]:
    """The series for which there is room: those of several GPU counts first, those in one host before the others."""
    return sorted(series, key=lambda curve: (len(curve.members) < 2, curve.hosts != "one host"))[:_MOST_PANELS]


def _with_accuracy(series: Sequence[Series]) -> tuple[list[tuple[Series, str]], Split]:
    """The series that have accuracies, with names; held-out accuracies where any series has them."""
    splits: tuple[Split, ...] = ("held_out", "train")
    for split in splits:
        known = [curve for curve in series if any(_by_epoch(member, split, "accuracy") for member in curve.members)]
        if known:
            return list(zip(known, names(known), strict=True)), split
    return [], "train"


def _by_epoch(member: Member, split: str, what: str) -> dict[int, float]:
    """Epoch, counted from 1, to the mean over runs; a fragment at a run's end holds fewer images, and is none."""
    whole = [epoch for epoch in member.trial.epochs if epoch.complete]
    values = {epoch.epoch + 1: getattr(epoch, f"{split}_{what}") for epoch in whole}
    return {epoch: float(value) for epoch, value in values.items() if value is not None}


def _learning_rows(series: Series, name: str, split: Split, what: str) -> list[Row]:
    """Loss or accuracy of each GPU count and epoch, with the lowest and the highest run."""
    rows = []
    for member in series.members:
        for epoch, value in _by_epoch(member, split, what).items():
            runs = [
                getattr(e, f"{split}_{what}") for run in member.trial.runs for e in run.epochs if e.epoch + 1 == epoch
            ]
            known = [run for run in runs if run is not None]
            low, high = (min(known), max(known)) if len(known) > 1 else (None, None)
            shown = f"{value:.3f}" if what == "loss" else units.percent(value, 1)
            row = {"panel": name, "gpus": member.gpus, "micro_batch": series.micro_batch}
            row |= {"epoch": epoch, "value": value}
            told = f"after epoch {epoch}, {units.counted(len(known), 'run')}"
            rows.append(row | {"low": low, "high": high, "runs": len(known), "shown": shown, "bounds": told})
    return rows


def _at_common_epoch(some: Sequence[Series], name: str, split: Split) -> list[Row]:
    """The rows of the last epoch that all these trials have, after which all have seen the same images."""
    rows = [row for series in some for row in _learning_rows(series, name, split, "accuracy")]
    trials = {(row["micro_batch"], row["gpus"]) for row in rows}
    common = [
        epoch
        for epoch in {row["epoch"] for row in rows}
        if {(row["micro_batch"], row["gpus"]) for row in rows if row["epoch"] == epoch} == trials
    ]
    return [row for row in rows if common and row["epoch"] == max(common)]


def _panels(rows: Sequence[Row], split: Split, what: str, axis: Axis, *, ordered: bool = True) -> list[View]:
    """A view for each workload; `ordered`: whether its curves have an order."""
    y = quantity("value", f"{_SPLIT_NAMES[split]} {what}", scale={"zero": False},
                 axis={"format": "%" if what == "accuracy" else "~r", "tickCount": 5})  # fmt: skip
    measure = Choice(what, what)
    views = []
    for index, panel in enumerate(dict.fromkeys(row["panel"] for row in rows)):
        own = [row for row in rows if row["panel"] == panel]
        repeated = any(row["low"] is not None for row in own)
        notes = [
            f"{_SPLIT_NAMES[split]} figures; equal images at equal epochs, but the global batch grows with the GPUs",
            "bars: lowest and highest run" if repeated else "one run each: nothing is known of other seeds",
        ]
        choices = {"workload": Choice(f"workload-{index + 1}", panel), "measure": measure}
        views.append(
            curves_view(choices, Plot({"rows": own}), "", notes, axis=axis, y=y, less_is_better=what == "loss",
                        ordered=ordered)
        )  # fmt: skip
    return views
