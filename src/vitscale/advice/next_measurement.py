"""Which one measurement would narrow an answer most for what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vitscale.advice.request import Option
from vitscale.prediction.evidence import Series
from vitscale.prediction.likelihood import scale_of_jobs
from vitscale.prediction.network.links import Network
from vitscale.prediction.results import REACH

CHECKED_SPREAD = 0.1
"""Standard deviation of the logarithm of a bandwidth that a check measured."""
_CHECK_SECONDS = 120.0
"""What `vitscale check` takes on all its ranks, starting them included."""
_SHORT_STEPS = 60
"""Steps of a short run, warm-up included."""
_UNKNOWN_STARTUP_SECONDS = 60.0
_OVERLAP_LEFT = 0.25
"""Share of the overlap's variance that is left once runs of two ranks and more are there: (0.15 / 0.30)^2, from the two
priors of `prediction.parameters`."""


@dataclass(frozen=True)
class Measurement:
    """One more measurement, and how much narrower an answer would be with it."""

    what: str
    """What to do, as a command or a study."""
    part: str
    """The part of the step that it tells more of."""
    gpu_minutes: float
    spread_before: float
    """Upper over lower end of the 90 % interval of a future run, start-up and luck with failures aside."""
    spread_after: float

    @property
    def gain_per_gpu_minute(self) -> float:
        """Reduction of the interval's width, as a logarithm."""
        return (math.log(self.spread_before) - math.log(self.spread_after)) / self.gpu_minutes


def measurements(
    option: Option, series: Series, network: Network, shares: Mapping[str, float]
) -> tuple[Measurement, ...]:
    """Measurements that would narrow an option's interval by a tenth or more, the most for a GPU-minute first.

    The variance of the logarithm of a future run's step is the sum of its parts' (`variance_by_part`). A measurement
    leaves a known share of its part's variance; the interval's width goes as the root of the sum.

    Args:
        option: the answer.
        series: the measured series it was worked out from.
        network: what is known of the network.
        shares: each part's share of that variance; "job-to-job" is never the whole.
    """
    low, high = option.training.ends
    if not low > 0:
        return ()
    width = math.log(high / low)
    if not (math.isfinite(width) and width > 0):
        return ()
    variance = (width / (2 * REACH)) ** 2
    startup = _UNKNOWN_STARTUP_SECONDS if option.startup is None else option.startup.value
    possible = []
    runs = _runs(option, series, shares, variance, startup)
    for part, what, gpu_minutes, left in (*_checks(option, series, network), *runs):
        kept = math.sqrt(max(0.0, 1 - sum(shares.get(part, 0.0) * (1 - rest) for part, rest in left.items())))
        possible.append(Measurement(what, part, gpu_minutes, math.exp(width), math.exp(width * kept)))
    worth = [part for part in possible if math.log(part.spread_after) <= 0.9 * width]
    return tuple(sorted(worth, key=lambda part: -part.gain_per_gpu_minute))


_Possible = tuple[str, str, float, Mapping[str, float]]
"""(part, what to do, GPU-minutes, part -> share of its variance that is left)."""


def _checks(option: Option, series: Series, network: Network) -> Iterator[_Possible]:
    per_node = option.candidate.ranks_per_node

    def left(spread: float) -> float:
        return min(1.0, (CHECKED_SPREAD / spread) ** 2) if spread > 0 else 1.0

    inside = {}
    if option.gpus > 1 and per_node > 1 and network.inside.source != "check":
        ranks = min(per_node, max(2, max(point.trial.world.ranks_per_node for point in series.points)))
        inside = {"network inside hosts": left(network.inside.bandwidth_spread)}
        what = f"vitscale check, on one host with {ranks} ranks"
        yield "network inside hosts", what, ranks * _CHECK_SECONDS / 60, inside
    if option.nodes > 1 and network.across.source != "check":
        what = f"vitscale check --hostfile HOSTS, on 2 hosts with {per_node} rank{'s' if per_node > 1 else ''} each"
        # It measures both levels at once.
        both = inside | {"network between hosts": left(network.across.bandwidth_spread)}
        yield (
            "network inside and between hosts" if inside else "network between hosts",
            what,
            (2 * per_node * _CHECK_SECONDS / 60),
            both,
        )


def _runs(
    option: Option, series: Series, shares: Mapping[str, float], variance: float, startup: float
) -> Iterator[_Possible]:
    """Short runs: of the answer itself, and of smaller counts where a part was never measured."""
    candidate = option.candidate
    step = max(seconds for point in series.points for seconds in point.step_seconds)
    of_a_run = scale_of_jobs(series.points) ** 2

    def gpu_minutes(ranks: int, runs: int) -> float:
        return runs * ranks * (startup + _SHORT_STEPS * step) / 60

    def compute_to(runs: int) -> float:
        """Share of its variance that is left: runs measure compute directly, so it is known as far as they agree."""
        own = shares.get("compute", 0.0) * variance
        return min(1.0, of_a_run / runs / own) if own > 0 else 1.0

    measured = {point.trial.train.micro_batch for point in series.points}
    where = "" if candidate.instance is None else f" of {candidate.instance.name}"
    if candidate.micro_batch not in measured or not option.measured_engine or where:
        yield (
            "compute",
            f"2 short runs on 1 rank{where} at micro-batch {candidate.micro_batch} (measure.steps = 50, repeats = 2)",
            gpu_minutes(1, 2),
            {"compute": compute_to(2)},
        )
    if option.gpus > 1 and (max(point.gpus for point in series.points) == 1 or not option.measured_engine):
        yield (
            "overlap",
            f"2 short runs of {candidate.engine} on 2 ranks (measure.steps = 50, measure.explain = true)",
            gpu_minutes(2, 2),
            {"overlap": _OVERLAP_LEFT, "stragglers": 1.0},
        )
    few = min(len(point.step_seconds) for point in series.points)
    if few < 3:
        counts = sorted({point.gpus for point in series.points})
        more, on = 3 - few, ", ".join(map(str, counts))
        yield (
            "compute",
            f"{more} more run{'s' if more > 1 else ''} of what was measured, on {on} ranks (measure.repeats = 3)",
            sum(gpu_minutes(count, more) for count in counts),
            {"compute": compute_to(3), "optimizer": few / 3},
        )
    if option.gpus not in {point.gpus for point in series.points}:
        everything = [part for part in shares if part != "job-to-job"]
        yield (
            "all but job-to-job",
            f"2 short runs on {option.gpus} ranks themselves (measure.steps = 50, repeats = 2)",
            gpu_minutes(option.gpus, 2),
            dict.fromkeys(everything, min(1.0, of_a_run / 2 / variance)),
        )
