"""Predictions and their scores as the contract's JSON says them; `vitscale predict --json` prints the same objects."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vitscale.prediction.results import Forecast, Prediction, Score
from vitscale.present.estimate import Estimate
from vitscale.report import prediction_words
from vitscale.trial.trial import Mode

Object = dict[str, Any]


def scores(outlook: Forecast) -> list[Object]:
    """How well such predictions did where it is known."""
    modes = {series.name: series.mode for series in outlook.evidence.series}
    return [_score(one, modes.get(one.series)) for one in outlook.scores]


def prediction(one: Prediction) -> Object:
    """One series at one rank count; what is unavailable is null, and `reasons` says why."""
    train = one.trial.train
    return {
        "series": one.series,
        "mode": one.mode,
        "labels": dict(one.labels),
        "gpus": one.gpus,
        "nodes": one.nodes,
        "gpu": one.gpu,
        "label": one.label,
        "engine": train.engine,
        "zero_stage": train.zero_stage if train.wrapper == "deepspeed" else None,
        "precision": train.precision,
        "micro_batch": train.micro_batch,
        "grad_accum": train.grad_accum,
        "global_batch": one.trial.global_batch,
        "image_size": one.trial.model.image_size,
        "images": one.images,
        "steps_per_epoch": one.steps_per_epoch,
        **estimate_fields("epoch_seconds", one.epoch_seconds),
        **estimate_fields("step_seconds", one.step_seconds),
        **estimate_fields("images_per_second", one.images_per_second),
        **estimate_fields("speedup", one.speedup),
        **estimate_fields("efficiency", one.efficiency),
        **estimate_fields("compute_seconds", one.compute_seconds),
        **estimate_fields("wait_seconds", one.wait_seconds),
        **estimate_fields("wire_seconds", one.wire_seconds),
        **estimate_fields("norm_seconds", one.norm_seconds),
        "memory_bytes": one.memory_bytes,
        "memory_capacity_bytes": one.memory_capacity_bytes,
        "oom_chance": one.oom_chance,
        **estimate_fields("joules_per_epoch", one.joules_per_epoch),
        **estimate_fields("cost_per_epoch", one.cost_per_epoch),
        **estimate_fields("startup_seconds", one.startup_seconds),
        "effective_draws": round(one.effective_draws),
        "assumptions": [asdict(assumed) for assumed in one.assumptions],
        "reasons": dict(one.reasons),
    }


def estimate_fields(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """A figure, the interval of a future run (`_low`, `_high`), and that of the mean."""
    return {
        name: estimate.value if estimate else None,
        f"{name}_low": estimate.future_low if estimate else None,
        f"{name}_high": estimate.future_high if estimate else None,
        f"{name}_mean_low": estimate.low if estimate else None,
        f"{name}_mean_high": estimate.high if estimate else None,
    }


def _score(one: Score, mode: Mode | None) -> Object:
    """One score, with its sentence."""
    return {
        **asdict(one),
        "fitted_gpus": list(one.fitted_gpus),
        "held_out_gpus": list(one.held_out_gpus),
        "sentence": prediction_words.score(one, mode),
    }
