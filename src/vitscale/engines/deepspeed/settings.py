"""DeepSpeed's settings of ZeRO that decide what it sends and holds, as the study, the user's file and it set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vitscale.engines.deepspeed.config import as_number, flag, section
from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.trial.trial import TrainSpec

STAGE_0_BUCKET_ELEMENTS = 500_000_000
"""Elements that stage 0 flattens and sends at a time (`allreduce_gradients` in runtime/engine.py of DeepSpeed 0.19)."""
_MIB = 2**20
_MOST_ELEMENTS = 10**15
"""No more than what arrays can count in bytes."""


class ZeroSettings(NamedTuple):
    """Settings of `zero_optimization`, sizes in elements; defaults as in runtime/zero/config.py of DeepSpeed 0.19."""

    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    """Largest tensor that stage 3 keeps gathered on every rank."""
    max_live: int
    """Most elements that stage 3 has gathered when it fetches ahead."""
    max_reuse: int
    """Stage 3 releases weights whose next use is at least so many elements away."""
    overlap: bool
    """Whether gradients are exchanged beside backward, in stages 1 and 2."""


def zero_settings(train: TrainSpec) -> ZeroSettings:
    """Return the study's settings, or else those of the user's file, or else DeepSpeed's defaults."""
    file = section(train.deepspeed_config, "zero_optimization")
    reduce_bucket = _elements(file, "reduce_bucket_size", default=500_000_000)
    if train.bucket_mib is not None:
        reduce_bucket = train.bucket_mib * _MIB // communicated_bytes(train)
    prefetch_bucket = _elements(file, "prefetch_bucket_size", default=50_000_000)
    if train.gather_bucket_mib is not None:
        prefetch_bucket = train.gather_bucket_mib * _MIB // weight_bytes(train)
    overlap = train.overlap_comm
    if overlap is None:
        overlap = flag(train, "overlap_comm") is True
    return ZeroSettings(
        reduce_bucket=reduce_bucket,
        prefetch_bucket=prefetch_bucket,
        persistence_threshold=_elements(file, "param_persistence_threshold", default=100_000),
        max_live=_elements(file, "max_live_parameters", default=10**9),
        max_reuse=_elements(file, "max_reuse_distance", default=10**9),
        overlap=overlap,
    )


def _elements(file: Mapping[str, Any], key: str, *, default: int) -> int:
    """Return a size of the user's file, whose keys of stage 3 may have `stage3_` before them (`populate_by_name`)."""
    value = as_number(file.get(f"stage3_{key}", file.get(key)))
    return default if value is None else min(int(value), _MOST_ELEMENTS)
