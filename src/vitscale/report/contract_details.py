"""What explains a trial, as the contract's JSON says it: breakdown, resources, convergence, traffic; waterfalls."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vitscale.analysis import TrialResult, Waterfall
from vitscale.analysis.learning.convergence import Convergence
from vitscale.analysis.runs.resources import ResourceFigures
from vitscale.analysis.time.breakdown import Breakdown, RankParts, Straggler
from vitscale.analysis.time.traffic import Traffic
from vitscale.present.data import estimate_fields
from vitscale.present.estimate import Estimate
from vitscale.report import sentences
from vitscale.store.records import COMMUNICATION

Object = dict[str, Any]
_WITH_INTERVAL = ("achieved_flops_per_second", "share_of_matmul", "mfu", "joules_per_image")


def flat(result: TrialResult) -> Object:
    """The most useful of it as values of their own, for CSV too."""
    typical = result.breakdown.typical if result.breakdown else None
    data_wait = typical.parts.get("data_wait") if typical else None
    used, found, sent = result.resources, result.convergence, result.traffic
    return {
        **estimate_fields("exposed_share", result.breakdown.exposed_share if result.breakdown else None),
        "data_wait_share": data_wait / typical.seconds
        if typical and typical.seconds and data_wait is not None
        else None,
        "explaining_overhead": result.breakdown.overhead if result.breakdown else None,
        **estimate_fields("mfu", used.mfu if used else None),
        **estimate_fields("share_of_matmul", used.share_of_matmul if used else None),
        **estimate_fields("joules_per_image", used.joules_per_image if used else None),
        "peak_rss_bytes": used.peak_rss_bytes if used else None,
        "cuda_allocated_bytes": used.cuda_allocated_bytes if used else None,
        "cuda_reserved_bytes": used.cuda_reserved_bytes if used else None,
        "cuda_device_bytes": used.cuda_device_bytes if used else None,
        **estimate_fields("noise_scale_images", found.noise_scale_images if found else None),
        **estimate_fields("seconds_to_target", found.seconds_to_target if found else None),
        "collectives_per_step": sent.calls if sent else None,
        "logical_bytes_per_step": sent.logical_bytes if sent else None,
        "physical_bytes_per_step": sent.physical_bytes if sent else None,
        **estimate_fields("wire_bytes_per_second", sent.bytes_per_second if sent else None),
        "sent_gradient_dtype": sent.gradient_dtype if sent else None,
        "checkpoint_save_seconds": result.checkpoint.save_seconds if result.checkpoint else None,
        "checkpoint_load_seconds": result.checkpoint.load_seconds if result.checkpoint else None,
        "checkpoint_bytes": result.checkpoint.bytes if result.checkpoint else None,
    }


def nested(result: TrialResult) -> Object:
    """All of it, as objects; null where nothing is known."""
    return {
        "breakdown": _breakdown(result.breakdown) if result.breakdown else None,
        "resources": _resources(result.resources) if result.resources else None,
        "convergence": _convergence(result.convergence) if result.convergence else None,
        "traffic": _traffic(result.traffic) if result.traffic else None,
    }


def waterfall(one: Waterfall) -> Object:
    """One waterfall, with its sentence."""
    return {
        "curve": one.curve,
        "mode": one.mode,
        "gpus": one.gpus,
        "trial": one.trial_id,
        "baseline": one.baseline_trial,
        "baseline_gpus": one.baseline_gpus,
        **estimate_fields("efficiency", one.interval),
        "efficiency": one.efficiency,
        "factors": [
            {"name": factor.name, "factor": factor.factor, "points": factor.points, **_ends("points", factor.interval)}
            for factor in one.factors
        ],
        "reason": one.reason or None,
        "straggler": _straggler(one.straggler),
        "work_per_rank": one.work_per_rank,
        "images_left_out": one.images_left_out,
        "sentence": sentences.waterfall(one),
    }


def _ends(name: str, interval: Estimate | None) -> Object:
    return {f"{name}_low": interval.low if interval else None, f"{name}_high": interval.high if interval else None}


def _parts(found: Breakdown, rank: RankParts) -> Object:
    """The parts of one rank's step, and the ends of their intervals under the same names."""
    over_runs = {part: found.part_seconds(rank.rank, part) for part in rank.parts}
    return {
        "parts": dict(rank.parts),
        "parts_low": {part: one.low if one else None for part, one in over_runs.items()},
        "parts_high": {part: one.high if one else None for part, one in over_runs.items()},
    }


def _breakdown(found: Breakdown) -> Object:
    return {
        "steps": found.steps,
        "typical_rank": found.typical.rank,
        "wait_known": found.wait_known,
        "ranks": [
            {
                "rank": rank.rank,
                "seconds": rank.seconds,
                **_ends("seconds", found.part_seconds(rank.rank, None)),
                **_parts(found, rank),
                "exposed_seconds": rank.exposed_seconds,
                **_ends("exposed_seconds", found.part_seconds(rank.rank, COMMUNICATION)),
            }
            for rank in found.ranks
        ],
        "reasons": dict(found.reasons),
        "overhead": found.overhead,
        "attached_overhead": found.attached_overhead,
        "straggler": _straggler(found.straggler),
    }


def _resources(used: ResourceFigures) -> Object:
    content: Object = {}
    for key, value in asdict(used).items():
        kept = getattr(used, key)
        if isinstance(kept, Estimate) or key in _WITH_INTERVAL:
            content |= estimate_fields(key, kept)
        else:
            content[key] = None if key.endswith("_reason") and not value else value
    return content


def _traffic(found: Traffic) -> Object:
    return {
        **{key: value for key, value in asdict(found).items() if key != "wire_seconds"},
        **estimate_fields("wire_seconds", found.wire_seconds),
        "reason": found.reason or None,
        "sent": [asdict(one) for one in found.sent] if found.calls is not None else None,
        "gradient_dtypes": dict(found.gradient_dtypes) if found.calls is not None else None,
    }


def _straggler(found: Straggler | None) -> Object | None:
    if found is None:
        return None
    return {
        "rank": found.rank,
        "share_of_steps": found.share_of_steps,
        **_ends("share_of_steps", found.interval),
        "slower_by": found.slower_by,
    }


def _convergence(found: Convergence) -> Object:
    return {
        **estimate_fields("noise_scale_images", found.noise_scale_images),
        "noise_reason": found.noise_reason or None,
        "target_accuracy": found.target_accuracy,
        "target_runs": [asdict(run) for run in found.target_runs],
        **estimate_fields("images_to_target", found.images_to_target),
        **estimate_fields("seconds_to_target", found.seconds_to_target),
        "images_to_target_at_least": found.images_to_target_at_least,
        "seconds_to_target_at_least": found.seconds_to_target_at_least,
        "points": [asdict(point) for point in found.points],
    }
