"""A request (limits, counts, a price), the work that is to be done, and an option with its verdict on each limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitscale.prediction.configurations import Candidate
from vitscale.prediction.results import CONFIDENCE, Assumption, Label
from vitscale.present.estimate import Estimate

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance  # with readers of tables


@dataclass(frozen=True)
class Request:
    """Limits and the choice of candidates. None: not given."""

    deadline_seconds: float | None = None
    budget: float | None = None
    """In money where prices are known (`priced`), else in GPU-hours."""
    min_efficiency: float | None = None
    """In (0, 1]."""
    price_per_gpu_hour: float | None = None
    max_gpus: int | None = None
    gpus: tuple[int, ...] | None = None
    """Exactly these rank counts."""
    ranks_per_node: int | None = None
    epochs: int | None = None
    images: int | None = None
    """Images of an epoch, where the results do not say."""
    series: str | None = None
    memory_capacity_bytes: int | None = None
    any_batch: bool = False
    """Whether the answers may train with another global batch than the study does."""
    large_batch: bool = False
    """Whether large-batch training may be an answer."""
    checkpoint_seconds: float | None = None
    """Seconds that saving a checkpoint takes."""
    node_mtbf_seconds: float | None = None
    split: bool = False
    """Whether ranks may share a model ([parallel])."""
    instances: tuple[Instance, ...] = ()
    """Instances to choose from instead of hosts like the measured ones (or beside them, if `price_per_gpu_hour` is
    known)."""

    @property
    def priced(self) -> bool:
        """Whether costs are in money."""
        return bool(self.instances) or self.price_per_gpu_hour is not None

    @property
    def limited(self) -> bool:
        """Whether there is any limit to meet."""
        return not (self.deadline_seconds is None and self.budget is None and self.min_efficiency is None)


@dataclass(frozen=True)
class Work:
    """What is to be done once, on whatever number of ranks."""

    images: int
    """Images of an epoch."""
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
        """A noise scale without a figure, and the reason."""
        return NoiseScale(None, reason=reason)


WishVerdict = Literal["meets", "probably", "misses"]
"""meets: the far end of the 90 % interval of a future run is within the limit, so that about 19 of 20 runs are.
probably: the expected value is. misses: it is not."""
VERDICTS: tuple[WishVerdict, ...] = ("misses", "probably", "meets")
"""Verdicts from worst to best."""


def future_run_estimate(value: float, low: float, high: float) -> Estimate:
    """An expected value with the 90 % interval of a future run."""
    return Estimate(value, low, high, CONFIDENCE, "a future run")


@dataclass(frozen=True)
class Option:
    """A candidate, and the whole work on it. None: unavailable."""

    candidate: Candidate
    series: str
    """Which measured series it was worked out from."""
    label: Label
    measured_engine: bool
    """Whether any run of these results used this engine at this stage."""
    global_batch: int
    keeps_batch: bool
    """Whether its global batch is one that the study's own policy has at this rank count, or that was measured."""
    large_batch: bool
    """Whether it makes few steps an epoch, or has far more images in a batch than the gradient noise scale."""
    seconds: Estimate
    """Time of the whole work, with start-up."""
    training: Estimate
    """Time of the work without start-up; its interval is that of the steps, without luck with failures."""
    startup: Estimate | None
    """Start-up of one run on it; None: no run under its launcher measured one, and none is in `seconds`."""
    startup_assumed: Assumption | None
    """What is assumed about start-up, where no run of its engine measured one."""
    gpu_hours: Estimate
    cost: Estimate | None
    """In the currency of the price that was given."""
    efficiency: Estimate
    same_loss_seconds: float | None
    """Time until the loss that the study's own global batch would have after this work."""
    memory_bytes: float | None
    oom_chance: float | None
    """Chance that a rank's device runs out of memory."""
    host_memory_bytes: float | None
    """Bytes that all ranks of a host offload to its memory together; 0 where none are offloaded."""
    host_oom_chance: float | None
    """Chance that a host's memory does not suffice for what is offloaded; 0 where nothing is."""
    verdicts: Mapping[str, WishVerdict]
    """Limit ("deadline", "budget", "efficiency") -> whether it is met; only limits that were given."""

    @property
    def gpus(self) -> int:
        """Ranks."""
        return self.candidate.gpus

    @property
    def nodes(self) -> int:
        """Hosts."""
        return self.candidate.gpus // self.candidate.ranks_per_node

    @property
    def verdict(self) -> WishVerdict:
        """The worst verdict of all."""
        return min(self.verdicts.values(), key=VERDICTS.index, default="meets")
