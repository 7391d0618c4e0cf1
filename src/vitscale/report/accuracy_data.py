"""Held-out accuracy as rows for its charts: at the end, after equal images and after equal seconds of training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from vitscale.analysis import Analysis, CurveResult, Interval, TrialResult
from vitscale.analysis.learning.convergence import Reach, accuracy_at_images, accuracy_at_seconds, common_reach
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.report.families import families

AT_THE_END = "at the end of training"


def reach(analysis: Analysis, curves: Sequence[CurveResult]) -> Reach:
    """How far all trials of these curves can be compared."""
    ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    return common_reach(found for one in ids if (found := analysis.trials[one].convergence) is not None)


def accuracies(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Row]:
    """One row per trial and panel that has an accuracy; equal images only where trials differ in their images."""
    limits = reach(analysis, curves)
    rows = []
    for curve, family in zip(curves, families(analysis, curves), strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            found = trial.convergence
            if found is None:
                continue
            base = {
                "series": family,
                "curve": curve.name,
                "gpus": point.gpus,
                "ranks": words.ranks(point.gpus),
                "batch": trial.trial.global_batch,
                "runs": len(trial.runs),
                "trial": trial.trial_id,
            }
            low, high = _range(trial)
            end = found.points[-1].held_out_accuracy if found.points else None
            panels = [(AT_THE_END, end, low, high)]
            if limits.images is not None and unlike_images(analysis, curves):
                panels.append((images_panel(limits.images), accuracy_at_images(found, limits.images), None, None))
            if limits.seconds is not None:
                panels.append((seconds_panel(limits.seconds), accuracy_at_seconds(found, limits.seconds), None, None))
            for place, (panel, value, lowest, highest) in enumerate(panels):
                if value is not None:
                    rows.append(base | {"panel": panel, "place": place, "value": value, "low": lowest, "high": highest})
    return rows


def images_panel(images: int) -> str:
    """ "after 3,072 images"."""
    return f"after {images:,} images"


def seconds_panel(seconds: float) -> str:
    """ "after 12.8 s of training"."""
    return f"after {words.seconds(seconds)} of training"


def noise_scales(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Row]:
    """Per family the median of its trials' gradient noise scales, where any is known."""
    found: dict[str, dict[str, float]] = {}
    for curve, family in zip(curves, families(analysis, curves), strict=True):
        for point in curve.points:
            convergence = analysis.trials[point.trial_id].convergence
            if convergence is not None and convergence.noise_scale_images is not None:
                found.setdefault(family, {})[point.trial_id] = convergence.noise_scale_images.centre
    return [
        {"series": family, "batch": statistics.median(scales.values()), "trials": len(scales)}
        for family, scales in found.items()
    ]


def targets(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Row]:
    """What it took to reach the target accuracy: a row per trial for the seconds and one for the images."""
    rows = []
    for curve, family in zip(curves, families(analysis, curves), strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            found = trial.convergence
            if found is None or found.target_accuracy is None:
                continue
            base = {
                "series": family,
                "gpus": point.gpus,
                "ranks": words.ranks(point.gpus),
                "batch": trial.trial.global_batch,
                "target": words.percent(found.target_accuracy, 1),
                "reached": reached(trial),
                "trial": trial.trial_id,
            }
            for place, (quantity, interval) in enumerate(
                (("seconds", found.seconds_to_target), ("images", found.images_to_target))
            ):
                if interval is not None:
                    rows.append(base | {"quantity": quantity, "place": place} | _bounds(interval))
    return rows


def reached(trial: TrialResult) -> str:
    """ "2 of 3 runs"; a dash where no target was set."""
    found = trial.convergence
    if found is None or found.target_accuracy is None:
        return words.UNKNOWN
    there = sum(run.epochs is not None for run in found.target_runs)
    return f"{there} of {len(found.target_runs)} runs"


def _bounds(interval: Interval) -> Row:
    return {"value": interval.centre, "low": interval.low, "high": interval.high, "note": interval.note}


def _range(trial: TrialResult) -> tuple[float | None, float | None]:
    """The lowest and the highest run at the end of its training."""
    last = [run.epochs[-1].held_out_accuracy for run in trial.runs if run.epochs]
    known = [value for value in last if value is not None]
    return (min(known), max(known)) if len(known) > 1 else (None, None)


def unlike_images(analysis: Analysis, curves: Sequence[CurveResult]) -> bool:
    """Whether some trials trained on more images than others; else the end is at equal images."""
    found = [analysis.trials[point.trial_id].convergence for curve in curves for point in curve.points]
    return len({one.points[-1].images for one in found if one is not None and one.points}) > 1
