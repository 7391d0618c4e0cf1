"""Families: curves that differ in batch size alone, under one name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.curve_names import curve_name

_BATCH_FIELDS = ("train.micro_batch", "train.global_batch", "train.grad_accum")


def families(analysis: Analysis, curves: Sequence[CurveResult]) -> list[str]:
    """Each curve's name without its batch size; in full, and numbered, where two would be one at the same batch."""
    trials = [analysis.trials[curve.points[-1].trial_id] for curve in curves]
    batches = [kept_batch(curve, trial) for curve, trial in zip(curves, trials, strict=True)]
    short = [
        curve_name({field: value for field, value in curve.labels.items() if field not in _BATCH_FIELDS}, trial.trial)
        for curve, trial in zip(curves, trials, strict=True)
    ]
    unclear = {panel for panel, count in Counter(zip(short, batches, strict=True)).items() if count > 1}
    panels = [
        (curve.name if (name, batch) in unclear else name, batch)
        for curve, name, batch in zip(curves, short, batches, strict=True)
    ]
    return [
        f"{panel[0]} ({panels[: place + 1].count(panel)})" if panels.count(panel) > 1 else panel[0]
        for place, panel in enumerate(panels)
    ]


def kept_batch(curve: CurveResult, trial: TrialResult) -> tuple[str, int]:
    """What a curve keeps of its batch, in words and as a number of images."""
    train = trial.trial.train
    if curve.mode == "strong-global":
        return f"global batch {trial.trial.global_batch:,}", trial.trial.global_batch
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    return f"micro-batch {train.micro_batch:,}{accumulated}", train.micro_batch * train.grad_accum
