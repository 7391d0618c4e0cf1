"""Which one measurement would narrow an answer most for what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.advice.request import Option
from vitscale.prediction.evidence import Series
from vitscale.prediction.likelihood import scale_of_jobs
from vitscale.prediction.network.links import Network
from vitscale.prediction.results import REACH

CHECKED_SPREAD = 0.1
"""Standard deviation of the logarithm of a bandwidth that a check measured."""
_CHECK_SECONDS = 120.0
"""Time that `vitscale check` takes on all its ranks, starting them included."""
_SHORT_STEPS = 60
"""Steps of a short run, warm-up included."""
_UNKNOWN_STARTUP_SECONDS = 60.0
"""Start-up of a run where none was measured."""
_FEWEST_RUNS = 3
"""Runs of each measured rank count from which no more are proposed."""
_MOST_WIDTH_LEFT = 0.9
"""Share of the interval's width that a measurement may leave to be worth it."""
_OVERLAP_VARIANCE_LEFT = 0.25
"""Share of the overlap's variance that is left once runs of two ranks and more are there: (0.15 / 0.30)^2, from the two
priors of `prediction.parameters`."""


@dataclass(frozen=True)
class Measurement:
    """One more measurement, and how much narrower an answer would be with it."""

    what: str
    """What to do, as a command or a study."""
    part: str
    """The part of the step that is then better known."""
    gpu_minutes: float
    spread_before: float
    """Upper over lower end of the 90 % interval of a future run, without start-up and with the expected failures."""
    spread_after: float
    """The same after the measurement."""

    @property
    def gain_per_gpu_minute(self) -> float:
        """Reduction of the interval's width per GPU-minute, as a logarithm."""
        return (math.log(self.spread_before) - math.log(self.spread_after)) / self.gpu_minutes


def measurements(
    option: Option, series: Series, network: Network, shares: Mapping[str, float]
) -> tuple[Measurement, ...]:
    """Return measurements that would narrow an option's interval by a tenth or more, the best for a GPU-minute first.

    The variance of the logarithm of a future run's step is the sum of the variances of its parts. A measurement leaves
    a known share of its parts' variances; the width of the interval is proportional to the root of the sum.

    Args:
        option: the answer.
        series: the measured series it was worked out from.
        network: what is known of the network.
        shares: part -> its share of that variance; "job-to-job" is how runs differ among themselves.
    """
    low, high = option.training.ends
    if not low > 0:
        return ()
    width = math.log(high / low)
    if not math.isfinite(width) or width <= 0:
        return ()
    variance = (width / (2 * REACH)) ** 2
    worthwhile = []
    for proposal in (*_check_proposals(option, series, network), *_run_proposals(option, series, shares, variance)):
        variance_left = proposal.variance_left
        removed_share = sum(shares.get(part, 0.0) * (1 - share_left) for part, share_left in variance_left.items())
        width_after = width * math.sqrt(max(0.0, 1 - removed_share))
        measurement = Measurement(
            what=proposal.what,
            part=proposal.part,
            gpu_minutes=proposal.gpu_minutes,
            spread_before=math.exp(width),
            spread_after=math.exp(width_after),
        )
        if math.log(measurement.spread_after) <= _MOST_WIDTH_LEFT * width:
            worthwhile.append(measurement)
    return tuple(sorted(worthwhile, key=lambda measurement: -measurement.gain_per_gpu_minute))


class _Proposal(NamedTuple):
    """A measurement that could be made."""

    part: str
    """The part of the step that it measures, in words."""
    what: str
    """What to do."""
    gpu_minutes: float
    variance_left: Mapping[str, float]
    """Part -> share of its variance that is left after it."""


def _check_proposals(option: Option, series: Series, network: Network) -> Iterator[_Proposal]:
    """Yields checks of the network levels that an option uses and no check has measured."""
    ranks_per_node = option.candidate.ranks_per_node
    variance_left_inside: dict[str, float] = {}  # by part; empty where no check inside a host is needed
    if option.gpus > 1 and ranks_per_node > 1 and network.inside.source != "check":
        most_measured = max(point.trial.world.ranks_per_node for point in series.points)
        ranks = min(ranks_per_node, max(2, most_measured))
        variance_left_inside["network inside hosts"] = _variance_left_by_check(network.inside.bandwidth_spread)
        yield _Proposal(
            part="network inside hosts",
            what=f"vitscale check, on one host with {ranks} ranks",
            gpu_minutes=ranks * _CHECK_SECONDS / 60,
            variance_left=variance_left_inside,
        )
    if option.nodes > 1 and network.across.source != "check":
        variance_left_across = {"network between hosts": _variance_left_by_check(network.across.bandwidth_spread)}
        plural = "s" if ranks_per_node > 1 else ""
        yield _Proposal(
            part="network inside and between hosts" if variance_left_inside else "network between hosts",
            what=f"vitscale check --hostfile HOSTS, on 2 hosts with {ranks_per_node} rank{plural} each",
            gpu_minutes=2 * ranks_per_node * _CHECK_SECONDS / 60,
            variance_left=variance_left_inside | variance_left_across,  # it measures both levels at once
        )


def _variance_left_by_check(bandwidth_spread: float) -> float:
    """Return the share of a network's variance that is left once a check has measured its bandwidth."""
    return min(1.0, (CHECKED_SPREAD / bandwidth_spread) ** 2) if bandwidth_spread > 0 else 1.0


class _ShortRuns(NamedTuple):
    """Short runs that could be made: what one of them takes, and how far runs differ."""

    run_seconds: float
    """Seconds of one run, with start-up."""
    run_variance: float
    """Variance of the logarithm of a run's step, over runs of one trial."""
    compute_variance: float
    """Variance that compute has in the logarithm of a future run's step; 0: none."""

    def gpu_minutes(self, ranks: int, runs: int) -> float:
        """Return the GPU-minutes of so many runs on so many ranks."""
        return runs * ranks * self.run_seconds / 60

    def compute_variance_left(self, runs: int) -> float:
        """Return the share of compute's variance that is left: afterwards that is the variance of the runs' mean."""
        if self.compute_variance <= 0:
            return 1.0
        return min(1.0, self.run_variance / runs / self.compute_variance)


def _run_proposals(option: Option, series: Series, shares: Mapping[str, float], variance: float) -> Iterator[_Proposal]:
    """Yields short runs: of the answer itself, and of smaller counts where a part was never measured.

    Args:
        option: the answer.
        series: the measured series it was worked out from.
        shares: each part's share of the variance.
        variance: that of the logarithm of a future run's step.
    """
    points = series.points
    all_step_seconds: list[float] = []
    for point in points:
        all_step_seconds += point.step_seconds
    longest_step_seconds = max(all_step_seconds)
    startup_seconds = _UNKNOWN_STARTUP_SECONDS if option.startup is None else option.startup.value
    short_runs = _ShortRuns(
        run_seconds=startup_seconds + _SHORT_STEPS * longest_step_seconds,
        run_variance=scale_of_jobs(points) ** 2,
        compute_variance=shares.get("compute", 0.0) * variance,
    )
    measured_batches = {point.trial.train.micro_batch for point in points}
    is_measured_batch = option.candidate.micro_batch in measured_batches
    if not is_measured_batch or not option.measured_engine or option.candidate.instance is not None:
        yield _runs_on_one_rank(option, short_runs)
    measured_counts = sorted({point.gpus for point in points})
    has_distributed_point = max(measured_counts) > 1
    if option.gpus > 1 and not (has_distributed_point and option.measured_engine):
        yield _runs_on_two_ranks(option, short_runs)
    fewest_runs = min(len(point.step_seconds) for point in points)
    if fewest_runs < _FEWEST_RUNS:
        yield _further_repeats(measured_counts, fewest_runs, short_runs)
    if option.gpus not in measured_counts:
        parts_of_a_step = [part for part in shares if part != "job-to-job"]
        yield _Proposal(
            part="all but job-to-job",
            what=f"2 short runs on {option.gpus} ranks themselves (measure.steps = 50, repeats = 2)",
            gpu_minutes=short_runs.gpu_minutes(option.gpus, runs=2),
            variance_left=dict.fromkeys(parts_of_a_step, min(1.0, short_runs.run_variance / 2 / variance)),
        )


def _runs_on_one_rank(option: Option, short_runs: _ShortRuns) -> _Proposal:
    """Return the proposal to measure the compute of an option, which needs one rank."""
    candidate = option.candidate
    rank = "1 rank" if candidate.instance is None else f"1 rank of {candidate.instance.name}"
    return _Proposal(
        part="compute",
        what=f"2 short runs on {rank} at micro-batch {candidate.micro_batch} (measure.steps = 50, repeats = 2)",
        gpu_minutes=short_runs.gpu_minutes(ranks=1, runs=2),
        variance_left={"compute": short_runs.compute_variance_left(runs=2)},
    )


def _runs_on_two_ranks(option: Option, short_runs: _ShortRuns) -> _Proposal:
    """Return the proposal to measure how far an option's engine hides its transfers, which needs two ranks."""
    return _Proposal(
        part="overlap",
        what=f"2 short runs of {option.candidate.engine} on 2 ranks (measure.steps = 50, measure.explain = true)",
        gpu_minutes=short_runs.gpu_minutes(ranks=2, runs=2),
        variance_left={"overlap": _OVERLAP_VARIANCE_LEFT, "stragglers": 1.0},
    )


def _further_repeats(measured_counts: Sequence[int], fewest_runs: int, short_runs: _ShortRuns) -> _Proposal:
    """Return the proposal to repeat what was measured, so that each rank count has `_FEWEST_RUNS` runs.

    Args:
        measured_counts: the measured rank counts, in rising order.
        fewest_runs: runs of the count with the fewest.
        short_runs: what a run takes.
    """
    missing_runs = _FEWEST_RUNS - fewest_runs
    plural = "s" if missing_runs > 1 else ""
    counts = ", ".join(map(str, measured_counts))
    return _Proposal(
        part="compute",
        what=f"{missing_runs} more run{plural} of what was measured, on {counts} ranks (measure.repeats = 3)",
        gpu_minutes=sum(short_runs.gpu_minutes(count, missing_runs) for count in measured_counts),
        variance_left={
            "compute": short_runs.compute_variance_left(_FEWEST_RUNS),
            "optimizer": fewest_runs / _FEWEST_RUNS,
        },
    )
