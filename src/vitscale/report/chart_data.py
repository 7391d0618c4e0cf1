"""What charts draw, as plain rows. User strings are values only, never field names or expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitscale.analysis import Analysis, CurveResult, Interval, Point, TrialResult
from vitscale.analysis.runs.figures import PHASES
from vitscale.report import words
from vitscale.report.tables import trial_label

Row = dict[str, Any]
Value = Callable[[TrialResult, Point], Interval | None]

_MOST_STEPS_DRAWN = 300
_MOST_TRIALS_DRAWN = 40
_IDEAL_SAMPLES = 40


@dataclass(frozen=True)
class Quantity:
    """One figure along a curve, with its ideal."""

    name: str
    heading: str
    title: str
    """Of the axis, without its unit where it is a time."""
    value: Value
    ideal: Callable[[Interval, float, bool], float]
    """From the baseline's value, N / N_base and whether the curve is weak: what perfect scaling would give."""
    show: Callable[[float | None], str]
    relative: bool = False
    """To the baseline: with one rank count there is nothing to see, and all curves have one ideal."""
    is_time: bool = False


QUANTITIES = (
    Quantity(
        "epoch-seconds",
        "Epoch time",
        "epoch time",
        lambda trial, _point: trial.epoch_seconds,
        lambda base, times, weak: base.centre if weak else base.centre / times,
        words.seconds,
        is_time=True,
    ),
    Quantity(
        "speedup",
        "Speedup against ideal",
        "speedup",
        lambda _trial, point: point.speedup,
        lambda _base, times, _weak: times,
        words.share,
        relative=True,
    ),
    Quantity(
        "efficiency",
        "Efficiency",
        "efficiency",
        lambda _trial, point: point.efficiency,
        lambda _base, _times, _weak: 1.0,
        words.share,
        relative=True,
    ),
    Quantity(
        "throughput",
        "Throughput",
        "images per second",
        lambda trial, _point: trial.images_per_second,
        lambda base, times, _weak: base.centre * times,
        words.number,
    ),
)


def measured(analysis: Analysis, curves: Sequence[CurveResult], quantity: Quantity) -> list[Row]:
    """One row per point that has the figure. `drift`: how a point's work differs from that of the others, or empty."""
    rows = []
    for curve in curves:
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            value = quantity.value(trial, point)
            if value is None:
                continue
            bounded = value.low is not None and value.high is not None
            bounds = f"{quantity.show(value.low)} to {quantity.show(value.high)}" if bounded else ""
            bounds = ", ".join(part for part in (bounds, value.note) if part)
            rows.append(
                {
                    "series": curve.name,
                    "gpus": point.gpus,
                    "value": value.centre,
                    "low": value.low,
                    "high": value.high,
                    "shown": quantity.show(value.centre),
                    "bounds": bounds,
                    "runs": len(trial.runs),
                    "trial": trial.trial_id,
                    "drift": f"loss differs: {words.relative(trial.drift.difference)}" if trial.drifts else "",
                }
            )
    return rows


def ideal(analysis: Analysis, curves: Sequence[CurveResult], quantity: Quantity) -> list[Row]:
    """Perfect scaling from each curve's baseline to its largest rank count, sampled finely enough to draw."""
    rows = []
    for curve in curves:
        base = curve.baseline
        value = quantity.value(analysis.trials[base.trial_id], base) if base else None
        largest = max((point.gpus for point in curve.points), default=0)
        if base is None or value is None or largest <= base.gpus:
            continue
        for sample in range(_IDEAL_SAMPLES + 1):
            times = (largest / base.gpus) ** (sample / _IDEAL_SAMPLES)
            level = quantity.ideal(value, times, curve.mode == "weak")
            rows.append({"series": curve.name, "gpus": base.gpus * times, "value": level})
    return rows


def by_epoch(analysis: Analysis, curves: Sequence[CurveResult], figure: str) -> list[Row]:
    """`loss` or `accuracy`, train and held-out, per epoch; epochs count from 1."""
    rows = []
    for curve in curves:
        for point in curve.points:
            for epoch in analysis.trials[point.trial_id].epochs:
                for split, prefix in (("train", "train"), ("held-out", "held_out")):
                    value = getattr(epoch, f"{prefix}_{figure}")
                    if value is not None:
                        row = {"series": curve.name, "panel": words.ranks(point.gpus), "gpus": point.gpus}
                        rows.append(row | {"x": epoch.epoch + 1, "split": split, "value": value})
    return rows


def by_step(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Row]:
    """Training loss per optimizer step, at most 300 evenly spaced steps of each trial."""
    rows = []
    for curve in curves:
        for point in curve.points:
            known = [(step, loss) for step, loss in analysis.trials[point.trial_id].loss_by_step if loss is not None]
            for step, loss in known[:: -(-len(known) // _MOST_STEPS_DRAWN) or 1]:
                row = {"series": curve.name, "panel": words.ranks(point.gpus), "gpus": point.gpus}
                rows.append(row | {"x": step + 1, "split": "train", "value": loss})
    return rows


def startup(analysis: Analysis) -> tuple[list[Row], int]:
    """Seconds of each start-up phase of the trials that take longest to start, and how many trials were left out."""
    started = [trial for trial in analysis.trials.values() if trial.startup]
    longest = sorted(started, key=lambda trial: -(trial.startup_seconds or 0.0))[:_MOST_TRIALS_DRAWN]
    drawn = [trial for trial in started if trial in longest]
    labels = [trial_label(analysis, trial) for trial in drawn]
    rows = []
    for trial, label in zip(drawn, labels, strict=True):
        name = label if labels.count(label) == 1 else f"{label} ({trial.trial_id})"
        for order, phase in enumerate(PHASES):
            if phase in trial.startup:
                rows.append({"trial": name, "phase": phase, "order": order, "seconds": trial.startup[phase]})
    return rows, len(started) - len(drawn)
