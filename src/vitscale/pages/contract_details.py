"""Fields of the report's JSON that explain a trial: breakdown, resources, convergence, traffic; and waterfalls."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vitscale.analysis import TrialResult, Waterfall
from vitscale.analysis.learning.convergence import Convergence
from vitscale.analysis.runs.resources import ResourceFigures
from vitscale.analysis.time.breakdown import Breakdown, RankParts, Straggler
from vitscale.analysis.time.traffic import Traffic
from vitscale.pages.statements import WATERFALL, claim
from vitscale.present.data import attributes, estimate_fields, estimates
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION

JsonObject = dict[str, Any]
_FIGURES_WITH_INTERVAL = ("achieved_flops_per_second", "share_of_matmul", "mfu", "joules_per_image")


def flat(result: TrialResult) -> JsonObject:
    """Return the most useful of these figures as fields of the trial itself, which CSV has too."""
    breakdown = result.breakdown
    used = result.resources
    traffic = result.traffic
    return {
        **estimates(breakdown, "exposed_share"),
        "data_wait_share": _data_wait_share(breakdown),
        "explaining_overhead": breakdown.overhead if breakdown else None,
        **attributes(used, "flops_per_image", "flops_source"),
        **estimates(used, "mfu", "share_of_matmul", "joules_per_image"),
        **attributes(used, "peak_rss_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_device_bytes"),
        **estimates(result.convergence, "noise_scale_images", "seconds_to_target"),
        "collectives_per_step": traffic.calls if traffic else None,
        "logical_bytes_per_step": traffic.logical_bytes if traffic else None,
        "physical_bytes_per_step": traffic.physical_bytes if traffic else None,
        **estimate_fields("wire_bytes_per_second", traffic.bytes_per_second if traffic else None),
        "sent_gradient_dtype": traffic.gradient_dtype if traffic else None,
        **attributes(result.checkpoint, "save_seconds", "load_seconds", "bytes", prefix="checkpoint_"),
    }


def _data_wait_share(breakdown: Breakdown | None) -> float | None:
    """Return the share of the typical rank's step in which it waits for data; None where that is unknown."""
    if breakdown is None or not breakdown.typical.seconds:
        return None
    data_wait = breakdown.typical.parts.get("data_wait")
    return None if data_wait is None else data_wait / breakdown.typical.seconds


def nested(result: TrialResult) -> JsonObject:
    """Return all of these figures, an object for each subject; None where nothing is known of it."""
    return {
        "breakdown": _breakdown_object(result.breakdown) if result.breakdown else None,
        "resources": _resources_object(result.resources) if result.resources else None,
        "convergence": _convergence_object(result.convergence) if result.convergence else None,
        "traffic": _traffic_object(result.traffic) if result.traffic else None,
    }


def waterfall(split: Waterfall) -> JsonObject:
    """Return one waterfall, with its sentence."""
    factors = []
    for factor in split.factors:
        fields = {"name": factor.name, "factor": factor.factor, "points": factor.points}
        factors.append(fields | _interval_end_fields("points", factor.interval))
    return {
        **attributes(split, "curve", "mode", "gpus"),
        "trial": split.trial_id,
        "baseline": split.baseline_trial,
        "baseline_gpus": split.baseline_gpus,
        **estimate_fields("efficiency", split.interval),
        "efficiency": split.efficiency,
        "factors": factors,
        "straggler": _straggler_object(split.straggler),
        **attributes(split, "reason", "work_per_rank", "images_left_out"),
        "sentence": claim(WATERFALL, split).text,
    }


def _interval_end_fields(name: str, interval: Estimate | None) -> JsonObject:
    """Return the fields `name_low` and `name_high`, the ends of an interval; both are None without one."""
    return {f"{name}_low": interval.low if interval else None, f"{name}_high": interval.high if interval else None}


def _part_fields(breakdown: Breakdown, rank: RankParts) -> JsonObject:
    """Return the seconds of the parts of a rank's step, and the ends of their intervals under the same part names."""
    over_runs = {part: breakdown.part_seconds(rank.rank, part) for part in rank.parts}
    return {
        "parts": dict(rank.parts),
        "parts_low": {part: seconds.low if seconds else None for part, seconds in over_runs.items()},
        "parts_high": {part: seconds.high if seconds else None for part, seconds in over_runs.items()},
    }


def _breakdown_object(breakdown: Breakdown) -> JsonObject:
    """Return the JSON object of the parts of a step, on each rank."""
    return {
        "steps": breakdown.steps,
        "steps_left_out": len(breakdown.left_out),
        "typical_rank": breakdown.typical.rank,
        "wait_known": breakdown.wait_known,
        "ranks": [
            {
                "rank": rank.rank,
                "seconds": rank.seconds,
                **_interval_end_fields("seconds", breakdown.part_seconds(rank.rank, None)),
                **_part_fields(breakdown, rank),
                "exposed_seconds": rank.exposed_seconds,
                **_interval_end_fields("exposed_seconds", breakdown.part_seconds(rank.rank, COMMUNICATION)),
            }
            for rank in breakdown.ranks
        ],
        "reasons": dict(breakdown.reasons),
        **attributes(breakdown, "overhead", "attached_overhead"),
        "straggler": _straggler_object(breakdown.straggler),
    }


def _resources_object(used: ResourceFigures) -> JsonObject:
    """Return all figures under their names.

    A figure that may have an interval has also its ends. An empty reason is None.
    """
    content: JsonObject = {}
    for name, value in asdict(used).items():
        figure = getattr(used, name)  # asdict makes a dict of an Estimate
        is_empty_reason = name.endswith("_reason") and not value
        if isinstance(figure, Estimate) or name in _FIGURES_WITH_INTERVAL:
            content |= estimate_fields(name, figure)
        else:
            content[name] = None if is_empty_reason else value
    return content


def _traffic_object(traffic: Traffic) -> JsonObject:
    """Return all figures under their names; the messages are None where they were not counted."""
    content = asdict(traffic)
    del content["wire_seconds"]
    is_counted = traffic.calls is not None
    return {
        **content,
        **estimate_fields("wire_seconds", traffic.wire_seconds),
        "reason": traffic.reason or None,
        "sent": [asdict(message) for message in traffic.sent] if is_counted else None,
        "gradient_dtypes": dict(traffic.gradient_dtypes) if is_counted else None,
    }


def _straggler_object(straggler: Straggler | None) -> JsonObject | None:
    """Return the JSON object of the rank that the others wait for; None without one."""
    if straggler is None:
        return None
    return {
        **attributes(straggler, "rank", "share_of_steps", "slower_by"),
        **_interval_end_fields("share_of_steps", straggler.interval),
    }


def _convergence_object(convergence: Convergence) -> JsonObject:
    """Return the JSON object of how a trial learned."""
    return {
        **estimates(convergence, "noise_scale_images", "images_to_target", "seconds_to_target"),
        **attributes(convergence, "noise_reason", "target_accuracy"),
        **attributes(convergence, "images_to_target_at_least", "seconds_to_target_at_least"),
        "target_runs": [asdict(run) for run in convergence.target_runs],
        "points": [asdict(point) for point in convergence.points],
    }
