"""The time to finish a job, from predicted epochs: hosts fail, and work since the last checkpoint is done again.

No study measures how often hosts fail. So the time to finish is a line of its own beside what is predicted, driven by a
prior until the user says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitscale.analysis import Analysis
from vitscale.analysis.trials import CheckpointCost
from vitscale.errors import RequestError, check_within
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.results import REACH, Assumption, Prediction
from vitscale.present.estimate import Estimate
from vitscale.trial import model_cost
from vitscale.trial.trial import Trial

_DAY = 86_400.0

NODE_MTBF_SECONDS = 160 * _DAY
"""Mean time between failures that end a job, for a host of eight GPUs: the geometric mean of four published figures.

- Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100, so on 2,048 hosts:
  264 days.
- Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025, arXiv
  2410.21680): 6.50 failures per thousand node-days on one A100 cluster and 2.34 on another: 154 and 427 days. Jobs of
  1,024 GPUs, 128 hosts, on the first of them lasted 7.9 hours in the mean: 42 days.
"""
_MTBF_WITHIN = 3.0
"""Factor either way within which that is taken to lie."""
_LARGEST_EXPONENT = 600.0
"""e^709 is the largest that a float holds."""


@dataclass(frozen=True)
class TimeToFinish:
    """A job that saves its state every so often and goes on from there when a host fails."""

    interval_seconds: float
    """Work between two checkpoints that makes the job shortest; no more than all of the work."""
    wall_seconds: float
    """Expected wall time with checkpoints, restarts and work done again; infinite where it would hardly ever end."""
    failures: float
    """Expected number of failures while it runs."""
    lost_share: float
    """Share of the wall time that is not work, in [0, 1]."""


def time_to_finish(
    work_seconds: float,
    nodes: int,
    checkpoint_seconds: float,
    restart_seconds: float,
    node_mtbf_seconds: float = NODE_MTBF_SECONDS,
) -> TimeToFinish:
    """The expected wall time of a job on hosts that fail independently, at the best interval between checkpoints.

    Failures come as a Poisson process, at M = MTBF of a host / hosts; checkpoints and restarts may fail too. With an
    interval of tau, a checkpoint of delta, a restart of R and work of T the job takes
    `M e^(R/M) (e^((tau + delta)/M) - 1) T/tau`. The best tau is about
    `sqrt(2 delta M) (1 + sqrt(delta/(2M))/3 + (delta/(2M))/9) - delta`, and M where delta is 2M or more. Both are from
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (2006), which refines Young, CACM 17 (1974).

    Args:
        work_seconds: what the job takes without failures and checkpoints.
        nodes: hosts.
        checkpoint_seconds: how long training stands still for each checkpoint.
        restart_seconds: from a failure until work goes on: noticing it, finding another host, loading the checkpoint.
        node_mtbf_seconds: mean time between failures of one host; see `NODE_MTBF_SECONDS`.

    Raises:
        ValueError: a time below 0, no host, or an MTBF of 0.
    """
    times = (work_seconds, checkpoint_seconds, restart_seconds, node_mtbf_seconds)
    if nodes < 1 or node_mtbf_seconds <= 0 or not all(time >= 0 and math.isfinite(time) for time in times):
        raise ValueError(f"no job of {nodes} hosts and these times: {times}")
    between = node_mtbf_seconds / nodes
    interval = min(work_seconds, best_interval(checkpoint_seconds, between))
    restarting, working = restart_seconds / between, (interval + checkpoint_seconds) / between
    if restarting + working > _LARGEST_EXPONENT:
        return TimeToFinish(interval, math.inf, math.inf, 1.0)
    # Where checkpoints cost nothing they are taken all the time, and only restarts lose time.
    pieces = between * math.expm1(working) / interval if interval > 0 else 1.0
    wall = math.exp(restarting) * pieces * work_seconds
    lost = 1.0 - work_seconds / wall if wall > 0 else 0.0
    return TimeToFinish(interval, wall, wall / between, max(0.0, lost))


def best_interval(checkpoint_seconds: float, between_failures_seconds: float) -> float:
    """Work between two checkpoints that makes a long job shortest: Daly (2006), as in `time_to_finish`."""
    delta, between = checkpoint_seconds, between_failures_seconds
    if delta >= 2 * between:
        return between
    ratio = delta / (2 * between)
    # Where a checkpoint is so short that the product underflows to 0, the formula would be negative.
    return max(0.0, math.sqrt(2 * delta * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta)


_HARDLY_ANY, _MANY = 0.005, 100.0
"""Expected failures below which no end of a 90 % interval tells of them, and above which their number is normal."""


def _with_failures(share: float, steps: float, of_each: float, spread: float, expected: float) -> float:
    """What such a share of jobs take at most, less the mean of all: normal steps, and failures as Poisson has them.

    Args:
        share: of jobs.
        steps: standard deviation of what the steps take.
        of_each: what a failure costs in the mean, and `spread` its standard deviation.
        spread: a failure comes at any time of the piece of work that is done again.
        expected: number of failures.
    """
    if expected > _MANY:
        deviation = math.hypot(steps, math.sqrt(expected) * math.hypot(of_each, spread))
        return math.copysign(REACH, share - 0.5) * deviation
    chances = [math.exp(-expected)]
    while sum(chances) < 1 - 1e-4:
        chances.append(chances[-1] * expected / len(chances))
    apart = [(math.sqrt(2) * max(1e-9, math.hypot(steps, spread * math.sqrt(count)))) for count in range(len(chances))]
    low, high = -expected * of_each - 6 * apart[0], len(chances) * of_each + 6 * apart[-1]
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(
            chance * (1 + math.erf((middle - (count - expected) * of_each) / apart[count])) / 2
            for count, chance in enumerate(chances)
        )
        low, high = (middle, high) if below < share else (low, middle)
    return high


def assumed_failures(nodes: int) -> Assumption:
    """What the answer takes for granted about failures, in words."""
    days, hours = NODE_MTBF_SECONDS / _DAY, NODE_MTBF_SECONDS / nodes / 3600
    hosts = "the host fails" if nodes == 1 else f"one of {nodes:,} hosts fails"
    every = f"{hours / 24:.3g} days" if hours > 48 else f"{hours:.3g} hours"
    return Assumption(
        part="failures of hosts",
        taken=f"a host fails every {days:.0f} days, within a factor of {_MTBF_WITHIN:g} either way, "
        f"so that {hosts} every {every}",
        measurement="the cluster's own record: node-days over the jobs that a host has ended",
    )


_NOTICED_SECONDS = 600.0
"""What noticing a failure and finding another host take, before the job's start-up."""
_CHECKPOINT_BYTES = 12
"""Bytes of a checkpoint for each parameter: itself and two moments of Adam, four bytes each."""
_WRITTEN_BYTES_PER_SECOND = 1e9
"""Assumed rate of writing a checkpoint that nobody has timed."""


@dataclass(frozen=True)
class Horizon:
    """How long a job is to be, and what is known of its hosts."""

    epochs: int
    checkpoint_seconds: float | None = None
    """What saving one takes; None: as recorded, else an assumption."""
    node_mtbf_seconds: float | None = None
    """Mean time between failures of a host; None: the prior, `NODE_MTBF_SECONDS`."""

    @staticmethod
    def of(epochs: int, checkpoint_seconds: float | None, node_mtbf_hours: float | None) -> Horizon:
        """The horizon that a command line asks for.

        Raises:
            RequestError: a value is out of range.
        """
        check_within("--epochs", epochs, 1, 1_000_000)
        check_within("--checkpoint-seconds", checkpoint_seconds, 0, 10**9)
        check_within("--node-mtbf", node_mtbf_hours, 0.001, 10**9)
        return Horizon(epochs, checkpoint_seconds, None if node_mtbf_hours is None else 3600 * node_mtbf_hours)


@dataclass(frozen=True)
class Finish:
    """One prediction's time to finish; prior-driven throughout, because no study measures how often hosts fail."""

    epochs: int
    work_seconds: float | None
    """What the epochs take alone. This and all figures below are None where `reason` says why."""
    wall_seconds: float | None
    """Expected wall time."""
    low: float | None
    high: float | None
    """Ends of the 90 % interval of one run, by its epochs and by how many failures it has; None: it would never end."""
    failures: float | None
    """Expected number of failures while it runs."""
    lost_share: float | None
    """Share of the wall time that is not work."""
    checkpoint_interval_seconds: float | None
    """Work between two checkpoints, at its best."""
    cost: float | None
    assumptions: tuple[Assumption, ...]
    reason: str = ""


def horizon(epochs: int | None, checkpoint_seconds: float | None, node_mtbf_hours: float | None) -> Horizon | None:
    """The horizon that the command line asks for; None where it asks for none.

    Raises:
        RequestError: a value is out of range, or there are no epochs to apply it to.
    """
    if epochs is not None:
        return Horizon.of(epochs, checkpoint_seconds, node_mtbf_hours)
    for option, value in (("--checkpoint-seconds", checkpoint_seconds), ("--node-mtbf", node_mtbf_hours)):
        if value is not None:
            raise RequestError(f"{option} says nothing without --epochs", next_step="Add --epochs 100")
    return None


@dataclass(frozen=True)
class Interruptions:
    """What comes between the steps of a job: checkpoints, failures of hosts, and restarts."""

    checkpoint_seconds: float
    load_seconds: float
    node_mtbf_seconds: float
    mtbf_assumed: bool
    assumptions: tuple[Assumption, ...]

    def wall(self, work_seconds: float, nodes: int, startup_seconds: float) -> TimeToFinish:
        """What a job of `work_seconds` takes on `nodes` hosts, without its own start-up."""
        restart = self._restart_seconds(startup_seconds)
        return time_to_finish(work_seconds, nodes, self.checkpoint_seconds, restart, self.node_mtbf_seconds)

    def of_a_run(
        self, work: tuple[float, float, float], nodes: int, startup_seconds: float
    ) -> tuple[TimeToFinish, float, float]:
        """What a job takes in the mean, and the ends of the interval of one run in wall seconds.

        Its steps, its luck with failures, and how often hosts fail where that is assumed are independent: the squares
        of what each moves an end by add up.

        Args:
            work: seconds that the job takes without failures and checkpoints, and the ends of one run's interval.
            nodes: hosts.
            startup_seconds: of each restart.
        """
        expected, *steps = (self.wall(seconds, nodes, startup_seconds) for seconds in work)
        whole, (low, high) = expected.wall_seconds, (bound.wall_seconds for bound in steps)
        if not math.isfinite(whole) or expected.failures < _HARDLY_ANY:
            return expected, low, high
        # A failure during a restart begins that again, and so does one in a piece of work: of either the number of
        # attempts is geometric. `later` is what a failure costs until work goes on, in the mean.
        between, restart = self.node_mtbf_seconds / nodes, self._restart_seconds(startup_seconds)
        piece, again = expected.interval_seconds + self.checkpoint_seconds, restart / between
        later = between * math.expm1(again)
        uneven = between * math.exp(again) * math.sqrt(max(0.0, -math.expm1(-2 * again) - 2 * again * math.exp(-again)))
        of_each = later + piece / 2
        spread = math.hypot(piece / math.sqrt(12), uneven, of_each * math.sqrt(math.expm1(piece / between)))
        at_work = expected.failures * math.exp(-again)
        low, high = (
            whole + _with_failures(share, abs(bound - whole) / REACH, of_each, spread, at_work)
            for share, bound in ((0.05, low), (0.95, high))
        )
        if self.mtbf_assumed:
            rare, often = (
                replace(self, node_mtbf_seconds=times * self.node_mtbf_seconds).wall(work[0], nodes, startup_seconds)
                for times in (_MTBF_WITHIN, 1 / _MTBF_WITHIN)
            )
            low = whole - math.hypot(whole - low, whole - rare.wall_seconds)
            high = whole + math.hypot(high - whole, often.wall_seconds - whole)
        # No run ends before its work; and where most have no failure, the mean of all may lie above nine of ten.
        return expected, max(low, work[1]), max(high, whole)

    def _restart_seconds(self, startup_seconds: float) -> float:
        return _NOTICED_SECONDS + startup_seconds + self.load_seconds

    def assumed(self, nodes: int) -> tuple[Assumption, ...]:
        """What is taken for granted on `nodes` hosts."""
        return ((assumed_failures(nodes),) if self.mtbf_assumed else ()) + self.assumptions


def interruptions(
    trial: Trial,
    timed: CheckpointCost | None,
    *,
    checkpoint_seconds: float | None = None,
    node_mtbf_seconds: float | None = None,
) -> Interruptions | None:
    """Interruptions of a job that trains `trial`; None where nothing says what a checkpoint of it takes.

    Args:
        trial: for its model.
        timed: a checkpoint that was timed.
        checkpoint_seconds: what a checkpoint takes, as the user says.
        node_mtbf_seconds: mean time between failures of one host, as the user says.
    """
    assumptions: list[Assumption] = []
    seconds = checkpoint_seconds
    if seconds is None:
        seconds = timed.save_seconds if timed else _assumed_checkpoint(trial, assumptions)
    if seconds is None:
        return None
    assumptions.append(
        Assumption(
            "restarts",
            f"{_NOTICED_SECONDS / 60:.0f} minutes to notice a failure and find a host, beside start-up and loading",
            "the cluster's own record of restarts",
        )
    )
    mtbf = NODE_MTBF_SECONDS if node_mtbf_seconds is None else node_mtbf_seconds
    load = timed.load_seconds if timed else seconds
    return Interruptions(seconds, load, mtbf, node_mtbf_seconds is None, tuple(assumptions))


def checkpoint_of(series: Series, analysis: Analysis) -> CheckpointCost | None:
    """The checkpoint of the series' largest measured trial that timed one; None: none did."""
    results = (analysis.trials.get(point.trial_id) for point in series.points)
    timed = [result.checkpoint for result in results if result is not None and result.checkpoint is not None]
    return timed[-1] if timed else None


def with_start_up(startup: Estimate | None, middle: float, low: float, high: float) -> tuple[float, float, float]:
    """(seconds, and the ends of the interval of a future run) of start-up and what comes after it, together.

    The two vary independently: the squares of the distances from their middles add up.
    """
    if startup is None:
        return middle, low, high
    whole, (soonest, latest) = startup.value + middle, startup.future_ends
    return (
        whole,
        whole - math.hypot(startup.value - soonest, middle - low),
        whole + math.hypot(latest - startup.value, high - middle),
    )


def finish(
    asked: Horizon, predictions: Sequence[Prediction], evidence: Evidence, analysis: Analysis
) -> tuple[Finish, ...]:
    """The time to finish of each prediction, in their order."""
    timed = {series.name: checkpoint_of(series, analysis) for series in evidence.series}
    return tuple(_finish(asked, prediction, timed.get(prediction.series)) for prediction in predictions)


def _finish(asked: Horizon, prediction: Prediction, timed: CheckpointCost | None) -> Finish:
    between = interruptions(
        prediction.trial, timed, checkpoint_seconds=asked.checkpoint_seconds, node_mtbf_seconds=asked.node_mtbf_seconds
    )
    if prediction.epoch_seconds is None or between is None:
        reason = prediction.reasons.get("epoch_seconds", "") if prediction.epoch_seconds is None else ""
        return _unavailable(asked, reason or "the size of a checkpoint of this model is not known")
    starts, epoch = prediction.startup_seconds, prediction.epoch_seconds
    soonest, latest = epoch.future_ends
    work = asked.epochs * epoch.value, asked.epochs * soonest, asked.epochs * latest
    middle, low, high = between.of_a_run(work, prediction.nodes, starts.value if starts else 0.0)
    ends = math.isfinite(middle.wall_seconds)
    wall, least, most = with_start_up(starts, middle.wall_seconds, low, high)
    return Finish(
        epochs=asked.epochs,
        work_seconds=asked.epochs * epoch.value,
        wall_seconds=_finite(wall),
        low=_finite(least if ends else low),
        high=_finite(most),
        failures=_finite(middle.failures),
        lost_share=middle.lost_share if ends else None,
        checkpoint_interval_seconds=middle.interval_seconds,
        cost=prediction.cost_per_epoch.value * wall / epoch.value if prediction.cost_per_epoch and ends else None,
        assumptions=between.assumed(prediction.nodes),
        reason="" if ends else "hosts fail so often that it would practically never end",
    )


def _assumed_checkpoint(trial: Trial, assumptions: list[Assumption]) -> float | None:
    parameters = model_cost.parameters(trial.model)
    if parameters is None:
        return None
    seconds = _CHECKPOINT_BYTES * parameters / _WRITTEN_BYTES_PER_SECOND
    assumptions.append(
        Assumption(
            "saving a checkpoint",
            f"{seconds:.2g} s: {_CHECKPOINT_BYTES} bytes a parameter at {_WRITTEN_BYTES_PER_SECOND / 1e9:g} GB/s",
            "a study with measure.checkpoint = true, or --checkpoint-seconds",
        )
    )
    return seconds


def _unavailable(asked: Horizon, reason: str) -> Finish:
    return Finish(asked.epochs, None, None, None, None, None, None, None, None, (), reason)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
