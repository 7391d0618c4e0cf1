"""One configuration with what is expected of it, and its verdict on each limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitscale.prediction.results import CONFIDENCE, Assumption, Label
from vitscale.present.estimate import Estimate

if TYPE_CHECKING:
    from vitscale.prediction.configurations import Candidate

Verdict = Literal["meets", "probably", "misses"]
"""meets: the far end of the 90 % interval of a future run is within the limit, so that about 19 of 20 runs are.
probably: the expected value is. misses: it is not."""
VERDICTS: tuple[Verdict, ...] = ("misses", "probably", "meets")
"""From worst to best."""


def of_a_run(value: float, low: float, high: float) -> Estimate:
    """An expected value, and the 90 % interval of a future run."""
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
    """Whether it trains with a global batch that the study's own policy has at this rank count, or measured."""
    large_batch: bool
    """Whether it makes few steps an epoch, or has far more images in a batch than the gradient noise scale."""
    seconds: Estimate
    """Of the whole work, with start-up."""
    training: Estimate
    """Of the work without start-up."""
    startup: Estimate | None
    """Of one run on it; None: no run under its launcher measured one, and none is in `seconds`."""
    startup_assumed: Assumption | None
    """Where no run of its engine measured one."""
    gpu_hours: Estimate
    cost: Estimate | None
    """In the currency of the price that was given."""
    efficiency: Estimate
    same_loss_seconds: float | None
    """Until the loss that the study's own global batch would have after this work."""
    memory_bytes: float | None
    oom_chance: float | None
    verdicts: Mapping[str, Verdict]
    """Limit ("deadline", "budget", "efficiency") -> whether it is met; those that were given."""

    @property
    def gpus(self) -> int:
        """Ranks."""
        return self.candidate.gpus

    @property
    def nodes(self) -> int:
        """Hosts."""
        return self.candidate.gpus // self.candidate.ranks_per_node

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        return min(self.verdicts.values(), key=VERDICTS.index, default="meets")
