"""What a user asks for: limits, counts, a price; and the work that is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance


@dataclass(frozen=True)
class Request:
    """Limits and the choice of candidates. None: not given."""

    deadline_seconds: float | None = None
    budget: float | None = None
    """In money where `price_per_gpu_hour` is known, else in GPU-hours."""
    min_efficiency: float | None = None
    """In (0, 1]."""
    price_per_gpu_hour: float | None = None
    max_gpus: int | None = None
    gpus: tuple[int, ...] | None = None
    """Exactly these rank counts."""
    ranks_per_node: int | None = None
    epochs: int | None = None
    images: int | None = None
    """Of an epoch, where the results do not say."""
    series: str | None = None
    memory_capacity_bytes: int | None = None
    any_batch: bool = False
    """Whether the answers may train with another global batch than the study does."""
    large_batch: bool = False
    """Whether large-batch training may be an answer."""
    checkpoint_seconds: float | None = None
    """To save one."""
    node_mtbf_seconds: float | None = None
    instances: tuple[Instance, ...] = ()
    """To choose from, instead of hosts like the measured ones (those too, where `price_per_gpu_hour` is known)."""

    @property
    def priced(self) -> bool:
        """Whether money is spoken of."""
        return bool(self.instances) or self.price_per_gpu_hour is not None

    @property
    def limited(self) -> bool:
        """Whether there is any limit to meet."""
        return not (self.deadline_seconds is None and self.budget is None and self.min_efficiency is None)


@dataclass(frozen=True)
class Work:
    """What is to be done once, on whatever number of ranks."""

    images: int
    """Of an epoch."""
    epochs: int
    drop_last: bool


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale of the results, in images; None with the reason where it is unknown."""

    images: float | None
    low: float | None = None
    """The smallest and the largest that any trial of these results had."""
    high: float | None = None
    reason: str = ""

    @staticmethod
    def unknown(reason: str) -> NoiseScale:
        """No figure, and why."""
        return NoiseScale(None, reason=reason)
