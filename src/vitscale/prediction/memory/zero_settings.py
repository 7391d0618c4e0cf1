"""What of DeepSpeed's `zero_optimization` decides on memory: the study's, the user's file's, or DeepSpeed's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitscale.prediction.memory.holding import communicated_bytes, weight_bytes
from vitscale.trial.trial import TrainSpec


class ZeroSettings(NamedTuple):
    """Of `zero_optimization`, in elements; the defaults are those of runtime/zero/config.py of DeepSpeed 0.19."""

    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_kept: int
    overlap: bool


def zero_settings(train: TrainSpec) -> ZeroSettings:
    """The study's settings, or the user's file's, or DeepSpeed's defaults."""
    zero = _section(train.deepspeed_config or {}, "zero_optimization")

    def elements(key: str, default: int) -> int:
        value = zero.get(key)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    reduce_bucket = elements("reduce_bucket_size", 500_000_000)
    prefetch = elements("stage3_prefetch_bucket_size", 50_000_000)
    if train.bucket_mib is not None:
        reduce_bucket = train.bucket_mib * 2**20 // communicated_bytes(train)
    if train.gather_bucket_mib is not None:
        prefetch = train.gather_bucket_mib * 2**20 // weight_bytes(train)
    overlap = zero.get("overlap_comm") is True if train.overlap_comm is None else train.overlap_comm
    live = elements("stage3_max_live_parameters", 10**9)
    reuse = elements("stage3_max_reuse_distance", 10**9)
    threshold = elements("stage3_param_persistence_threshold", 100_000)
    return ZeroSettings(reduce_bucket, prefetch, threshold, min(live, reuse), overlap)


def modelled(train: TrainSpec) -> bool:
    """Whether the user's own file leaves alone what would hold something else than `zero` says."""
    config = train.deepspeed_config or {}
    zero = _section(config, "zero_optimization")
    offloads = any(
        _section(zero, key).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param")
    )
    return not offloads and zero.get("contiguous_gradients") is not False and "data_types" not in config


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}
