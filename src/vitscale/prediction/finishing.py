"""From predicted epochs to the time to finish a job: checkpoints and failures included, and all that is assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale import model_spec
from vitscale.analysis import Analysis, TrialResult
from vitscale.errors import RequestError, explain
from vitscale.prediction import failures
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.results import Assumption, Prediction

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
    bounded = (("--checkpoint-seconds", checkpoint_seconds, 0.0), ("--node-mtbf", node_mtbf_hours, 1e-3))
    for option, value, least in bounded:
        if value is not None and not least <= value <= 1e9:
            raise RequestError(explain(f"{option} is {value}", valid=[f"{least:g} to 1e9"]))
        if value is not None and epochs is None:
            raise RequestError(explain(f"{option} says nothing without --epochs", next_step="Add --epochs 100"))
    if epochs is None:
        return None
    if not 1 <= epochs <= 1_000_000:
        raise RequestError(explain(f"--epochs is {epochs}", valid=["1 to 1,000,000"]))
    return Horizon(epochs, checkpoint_seconds, None if node_mtbf_hours is None else 3600 * node_mtbf_hours)


def finish(
    asked: Horizon, predictions: Sequence[Prediction], evidence: Evidence, analysis: Analysis
) -> tuple[Finish, ...]:
    """Of each prediction, in their order."""
    return tuple(_finish(asked, one, _recorded(one, evidence, analysis)) for one in predictions)


def _recorded(one: Prediction, evidence: Evidence, analysis: Analysis) -> TrialResult | None:
    """The largest measured trial of the series that timed a checkpoint."""
    points = next((series.points for series in evidence.series if series.name == one.series), ())
    timed = [found for point in points if (found := analysis.trials[point.trial_id]).checkpoint is not None]
    return timed[-1] if timed else None


def _finish(asked: Horizon, one: Prediction, recorded: TrialResult | None) -> Finish:
    saved = recorded.checkpoint if recorded else None
    found: list[Assumption] = []
    checkpoint = asked.checkpoint_seconds
    if checkpoint is None:
        checkpoint = saved.save_seconds if saved else _assumed_checkpoint(one, found)
    if one.epoch_seconds is None or checkpoint is None:
        reason = one.reasons.get("epoch_seconds", "") if one.epoch_seconds is None else ""
        return _unavailable(asked, reason or "the size of a checkpoint of this model is not known")
    starts = one.startup_seconds
    startup = starts.value if starts else 0.0
    restart = _NOTICED_SECONDS + startup + (saved.load_seconds if saved else checkpoint)
    found.append(
        Assumption(
            "restarts",
            f"{_NOTICED_SECONDS / 60:.0f} minutes to notice a failure and find a host, beside start-up and loading",
            "the cluster's own record of restarts",
        )
    )
    mtbf = failures.NODE_MTBF_SECONDS if asked.node_mtbf_seconds is None else asked.node_mtbf_seconds
    if asked.node_mtbf_seconds is None:
        found.insert(0, failures.assumption(one.nodes))
    epoch = one.epoch_seconds
    middle, low, high = (
        failures.time_to_finish(asked.epochs * seconds, one.nodes, checkpoint, restart, mtbf)
        for seconds in (epoch.value, epoch.future_low, epoch.future_high)
    )
    ends = math.isfinite(middle.wall_seconds)
    wall = startup + middle.wall_seconds if ends else None
    return Finish(
        epochs=asked.epochs,
        work_seconds=asked.epochs * epoch.value,
        wall_seconds=wall,
        low=_finite((starts.future_low if starts else 0.0) + low.wall_seconds),
        high=_finite((starts.future_high if starts else 0.0) + high.wall_seconds),
        failures=_finite(middle.failures),
        lost_share=middle.lost_share if ends else None,
        checkpoint_interval_seconds=middle.interval_seconds,
        cost=one.cost_per_epoch.value * wall / epoch.value if one.cost_per_epoch and wall is not None else None,
        assumptions=tuple(found),
        reason="" if ends else "hosts fail so often that it would practically never end",
    )


def _assumed_checkpoint(one: Prediction, found: list[Assumption]) -> float | None:
    parameters = model_spec.parameters(one.trial.model)
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
