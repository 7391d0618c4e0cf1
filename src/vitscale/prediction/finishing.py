"""From predicted epochs to the time to finish a job: checkpoints and failures included, and all that is assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis
from vitscale.analysis.runs.figures import CheckpointCost
from vitscale.errors import RequestError, explain
from vitscale.prediction import failures
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.failures import TimeToFinish
from vitscale.prediction.results import Assumption, Estimate, Prediction
from vitscale.trial import model_spec
from vitscale.trial.trial import Trial

_NOTICED_SECONDS = 600.0
"""From a failure until the job starts anew, beyond its start-up: noticing it, and another host."""
_CHECKPOINT_BYTES = 12
"""Of a parameter: itself and two moments of Adam, four bytes each."""
_WRITTEN_BYTES_PER_SECOND = 1e9
"""Of a checkpoint that nobody has timed."""


@dataclass(frozen=True)
class Horizon:
    """How long a job is to be, and what is known of its hosts."""

    epochs: int
    checkpoint_seconds: float | None = None
    """To save one; None: as recorded, else an assumption."""
    node_mtbf_seconds: float | None = None
    """None: the prior of `vitscale.prediction.failures`."""

    @staticmethod
    def of(epochs: int, checkpoint_seconds: float | None, node_mtbf_hours: float | None) -> Horizon:
        """From what a command line says.

        Raises:
            RequestError: a value cannot be.
        """
        for option, value, least, most in (
            ("--epochs", epochs, 1, 1_000_000),
            ("--checkpoint-seconds", checkpoint_seconds, 0, 1e9),
            ("--node-mtbf", node_mtbf_hours, 1e-3, 1e9),
        ):
            if value is not None and not least <= value <= most:
                raise RequestError(explain(f"{option} is {value}", valid=[f"{least:g} to {most:,g}"]))
        return Horizon(epochs, checkpoint_seconds, None if node_mtbf_hours is None else 3600 * node_mtbf_hours)


@dataclass(frozen=True)
class Finish:
    """One prediction's time to finish; prior-driven throughout, for no study measures how often hosts fail."""

    epochs: int
    work_seconds: float | None
    """Of the epochs alone; so the rest, None where `reason` says why."""
    wall_seconds: float | None
    """Expected."""
    low: float | None
    high: float | None
    """Where an epoch takes as long as the ends of the 90 % interval of a future run; None: it would never end."""
    failures: float | None
    """Expected while it runs."""
    lost_share: float | None
    """Of the wall time: what is not work."""
    checkpoint_interval_seconds: float | None
    """Of work, the best there is."""
    cost: float | None
    assumptions: tuple[Assumption, ...]
    reason: str = ""


def horizon(epochs: int | None, checkpoint_seconds: float | None, node_mtbf_hours: float | None) -> Horizon | None:
    """What the command line says of the job; None where it says nothing.

    Raises:
        RequestError: a value cannot be, or there are no epochs to apply it to.
    """
    if epochs is not None:
        return Horizon.of(epochs, checkpoint_seconds, node_mtbf_hours)
    for option, value in (("--checkpoint-seconds", checkpoint_seconds), ("--node-mtbf", node_mtbf_hours)):
        if value is not None:
            raise RequestError(explain(f"{option} says nothing without --epochs", next_step="Add --epochs 100"))
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
        """What a job of so much work takes on so many hosts, without its own start-up."""
        restart = _NOTICED_SECONDS + startup_seconds + self.load_seconds
        return failures.time_to_finish(work_seconds, nodes, self.checkpoint_seconds, restart, self.node_mtbf_seconds)

    def assumed(self, nodes: int) -> tuple[Assumption, ...]:
        """What is taken for granted on so many hosts."""
        return ((failures.assumption(nodes),) if self.mtbf_assumed else ()) + self.assumptions


def interruptions(
    trial: Trial,
    timed: CheckpointCost | None,
    *,
    checkpoint_seconds: float | None = None,
    node_mtbf_seconds: float | None = None,
) -> Interruptions | None:
    """Of a job that trains `trial`; None where nothing says what a checkpoint of it takes.

    Args:
        trial: for its model.
        timed: a checkpoint that was timed.
        checkpoint_seconds: as the user says.
        node_mtbf_seconds: of one host, as the user says.
    """
    found: list[Assumption] = []
    seconds = checkpoint_seconds
    if seconds is None:
        seconds = timed.save_seconds if timed else _assumed_checkpoint(trial, found)
    if seconds is None:
        return None
    found.append(
        Assumption(
            "restarts",
            f"{_NOTICED_SECONDS / 60:.0f} minutes to notice a failure and find a host, beside start-up and loading",
            "the cluster's own record of restarts",
        )
    )
    mtbf = failures.NODE_MTBF_SECONDS if node_mtbf_seconds is None else node_mtbf_seconds
    load = timed.load_seconds if timed else seconds
    return Interruptions(seconds, load, mtbf, node_mtbf_seconds is None, tuple(found))


def checkpoint_of(series: Series, analysis: Analysis) -> CheckpointCost | None:
    """That of the largest measured trial of the series that timed one."""
    results = (analysis.trials.get(point.trial_id) for point in series.points)
    timed = [one.checkpoint for one in results if one is not None and one.checkpoint is not None]
    return timed[-1] if timed else None


def with_start_up(startup: Estimate | None, middle: float, low: float, high: float) -> tuple[float, float, float]:
    """(seconds, and the ends of the interval of a future run) of start-up and what comes after it.

    The two vary by themselves: the distances from their middles add up as squares.
    """
    if startup is None:
        return middle, low, high
    whole = startup.value + middle
    return (
        whole,
        whole - math.hypot(startup.value - startup.future_low, middle - low),
        whole + math.hypot(startup.future_high - startup.value, high - middle),
    )


def finish(
    asked: Horizon, predictions: Sequence[Prediction], evidence: Evidence, analysis: Analysis
) -> tuple[Finish, ...]:
    """Of each prediction, in their order."""
    timed = {series.name: checkpoint_of(series, analysis) for series in evidence.series}
    return tuple(_finish(asked, one, timed.get(one.series)) for one in predictions)


def _finish(asked: Horizon, one: Prediction, timed: CheckpointCost | None) -> Finish:
    between = interruptions(
        one.trial,
        timed,
        checkpoint_seconds=asked.checkpoint_seconds,
        node_mtbf_seconds=asked.node_mtbf_seconds,
    )
    if one.epoch_seconds is None or between is None:
        reason = one.reasons.get("epoch_seconds", "") if one.epoch_seconds is None else ""
        return _unavailable(asked, reason or "the size of a checkpoint of this model is not known")
    starts, epoch = one.startup_seconds, one.epoch_seconds
    middle, low, high = (
        between.wall(asked.epochs * seconds, one.nodes, starts.value if starts else 0.0)
        for seconds in (epoch.value, epoch.future_low, epoch.future_high)
    )
    ends = math.isfinite(middle.wall_seconds)
    wall, least, most = with_start_up(starts, middle.wall_seconds, low.wall_seconds, high.wall_seconds)
    return Finish(
        epochs=asked.epochs,
        work_seconds=asked.epochs * epoch.value,
        wall_seconds=_finite(wall),
        low=_finite(least) if ends else _finite(low.wall_seconds),
        high=_finite(most),
        failures=_finite(middle.failures),
        lost_share=middle.lost_share if ends else None,
        checkpoint_interval_seconds=middle.interval_seconds,
        cost=one.cost_per_epoch.value * wall / epoch.value if one.cost_per_epoch and ends else None,
        assumptions=between.assumed(one.nodes),
        reason="" if ends else "hosts fail so often that it would practically never end",
    )


def _assumed_checkpoint(trial: Trial, found: list[Assumption]) -> float | None:
    parameters = model_spec.parameters(trial.model)
    if parameters is None:
        return None
    seconds = _CHECKPOINT_BYTES * parameters / _WRITTEN_BYTES_PER_SECOND
    found.append(
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
