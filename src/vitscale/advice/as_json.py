"""Advice as JSON: unavailable is null."""

from __future__ import annotations

from typing import Any

from vitscale.advice.pipeline import Advice
from vitscale.advice.request import Option
from vitscale.present.data import estimate_fields


def advice_fields(advice: Advice, study: str | None) -> dict[str, Any]:
    """One object.

    Args:
        advice: what was found.
        study: the text of the study that would run it; None where there is none.
    """
    asked = advice.asked
    return {
        "series": list(advice.origins),
        "limits": {
            "deadline_seconds": asked.deadline_seconds,
            "budget": asked.budget,
            "budget_unit": "money" if asked.priced else "GPU-hours",
            "min_efficiency": asked.min_efficiency,
        },
        "price_per_gpu_hour": asked.price_per_gpu_hour,
        "work": {"images_per_epoch": advice.work.images, "epochs": advice.work.epochs},
        "noise_scale_images": advice.noise.images,
        "noise_scale_reason": advice.noise.reason or None,
        "met": advice.met,
        "answers": [
            {
                "question": answer.kind,
                **_option(answer.option),
                "bolder": None if answer.riskier is None else _option(answer.riskier),
                "at_the_end": answer.at_the_end,
            }
            for answer in advice.answers
        ],
        "closest": None if advice.closest is None else _option(advice.closest),
        "each_limit_alone": {limit: _option(option) for limit, option in advice.alone.items()}
        | dict.fromkeys(advice.never),
        "other_batch": None if advice.other_batch is None else _option(advice.other_batch),
        "large_batch": None if advice.large_batch is None else _option(advice.large_batch),
        "pareto_front": [_option(option) for option in advice.front],
        "looked_at": advice.looked_at,
        "dropped": dict(advice.dropped),
        "refused": dict(advice.refused),
        "assumptions": [
            {"part": assumption.part, "taken": assumption.taken, "measurement": assumption.measurement}
            for assumption in advice.assumptions
        ],
        "measurements": [
            {
                "part": measurement.part,
                "what": measurement.what,
                "gpu_minutes": measurement.gpu_minutes,
                "interval_ratio_before": measurement.spread_before,
                "interval_ratio_after": measurement.spread_after,
            }
            for measurement in advice.measurements
        ],
        "study": study,
    }


def _option(option: Option) -> dict[str, Any]:
    candidate = option.candidate
    return {
        "gpus": option.gpus,
        "nodes": option.nodes,
        "instance": None if candidate.instance is None else candidate.instance.name,
        "gpu": None if candidate.instance is None else candidate.instance.gpu.name,
        "ranks_per_node": candidate.ranks_per_node,
        "engine": candidate.engine,
        "zero_stage": candidate.zero_stage,
        "micro_batch": candidate.micro_batch,
        "grad_accum": candidate.grad_accum,
        "activation_checkpointing": candidate.activation_checkpointing,
        "global_batch": option.global_batch,
        "keeps_global_batch": option.keeps_batch,
        "large_batch": option.large_batch,
        "label": option.label,
        "series": option.series,
        "engine_measured": option.measured_engine,
        **estimate_fields("seconds", option.seconds),
        **estimate_fields("startup_seconds", option.startup),
        **estimate_fields("gpu_hours", option.gpu_hours),
        **estimate_fields("cost", option.cost),
        **estimate_fields("efficiency", option.efficiency),
        "seconds_to_same_loss": option.same_loss_seconds,
        "memory_bytes": option.memory_bytes,
        "oom_chance": option.oom_chance,
        "verdicts": dict(option.verdicts),
        "verdict": option.verdict,
    }
