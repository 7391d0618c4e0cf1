"""What the charts of predictions draw, as plain rows: measured, predicted, and three bounds to hold them against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis
from vitscale.prediction.evidence import Point, Series
from vitscale.prediction.results import Prediction
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.trial.trial import Mode

_SAMPLES = 40
IDEAL, AMDAHL, TRANSFERS = "ideal", "Amdahl, fitted to what was measured", "ideal and the transfers"


@dataclass(frozen=True)
class Drawn:
    """One series' chart as rows; times in seconds."""

    of_epoch: bool
    """Of an epoch; else of a step, where the images are unknown."""
    measured: tuple[Row, ...]
    predicted: tuple[Row, ...]
    bounds: tuple[Row, ...]
    """Curves that hold on a model of their own: `bound` names it."""


def drawn(analysis: Analysis, series: Series, predictions: Sequence[Prediction]) -> Drawn:
    """The rows of one series, whose `predictions` are in rising order of ranks."""
    of_epoch = all(one.epoch_seconds is not None for one in predictions) and all(
        point.steps_per_epoch is not None for point in series.points
    )
    measured = tuple(_measured_row(analysis, point, of_epoch) for point in series.points)
    return Drawn(
        of_epoch,
        measured,
        tuple(_predicted_row(one, of_epoch) for one in predictions),
        tuple(_bounds(series.mode, measured, predictions, of_epoch)),
    )


def _measured_row(analysis: Analysis, point: Point, of_epoch: bool) -> Row:
    """With the report's interval of 95 %, where it has one."""
    trial = analysis.trials[point.trial_id]
    interval = trial.epoch_seconds if of_epoch else trial.step_seconds
    centre = interval.centre if interval else _median_seconds(point, of_epoch)
    return {
        "gpus": point.gpus,
        "value": centre,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "shown": words.seconds(centre),
        "mean": "",
        "run": "",
        "told": "measured",
        "trial": point.trial_id,
    }


def _predicted_row(one: Prediction, of_epoch: bool) -> Row:
    estimate = one.epoch_seconds if of_epoch and one.epoch_seconds else one.step_seconds
    return {
        "gpus": one.gpus,
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "future_low": estimate.future_low,
        "future_high": estimate.future_high,
        "shown": words.seconds(estimate.value),
        "mean": f"{words.seconds(estimate.low)} to {words.seconds(estimate.high)}",
        "run": f"{words.seconds(estimate.future_low)} to {words.seconds(estimate.future_high)}",
        "told": one.label,
    }


def _bounds(mode: Mode, measured: Sequence[Row], predictions: Sequence[Prediction], of_epoch: bool) -> list[Row]:
    base: int = measured[0]["gpus"]
    seconds: float = measured[0]["value"]
    last = max(predictions[-1].gpus, measured[-1]["gpus"])
    shrinks = (of_epoch and mode != "weak") or mode == "strong-global"

    def ideal(gpus: float) -> float:
        return seconds * base / gpus if shrinks else seconds

    counts = [base * (last / base) ** (sample / _SAMPLES) for sample in range(_SAMPLES + 1)]
    rows = [{"gpus": gpus, "value": ideal(gpus), "bound": IDEAL} for gpus in counts]
    if shrinks and (fitted := _amdahl(measured)) is not None:
        serial, parallel = fitted
        rows += [{"gpus": gpus, "value": serial + parallel / gpus, "bound": AMDAHL} for gpus in counts]
    return rows + [
        {"gpus": gpus, "value": ideal(gpus) + more, "bound": TRANSFERS}
        for gpus, more in _further_transfers(base, predictions, of_epoch)
    ]


def _further_transfers(base: int, predictions: Sequence[Prediction], of_epoch: bool) -> list[tuple[int, float]]:
    """By rank count, exposed transfer beyond that of the smallest measured count, whose time has its own in it."""
    seconds = {
        one.gpus: one.wire_seconds.value + (one.norm_seconds.value if one.norm_seconds is not None else 0.0)
        for one in predictions
        if one.wire_seconds is not None
    }
    if base not in seconds:
        return []
    steps = {
        one.gpus: one.epoch_seconds.value / one.step_seconds.value if of_epoch and one.epoch_seconds else 1.0
        for one in predictions
    }
    return [(gpus, max(0.0, wire - seconds[base]) * steps[gpus]) for gpus, wire in seconds.items() if gpus >= base]


def _amdahl(measured: Sequence[Row]) -> tuple[float, float] | None:
    """Serial seconds and parallel rank-seconds, least squares of relative errors; None below two rank counts.

    `T(N) = serial + parallel / N` (Amdahl, AFIPS 1967), neither below 0: where the fit would have it so, the other
    alone is fitted.
    """
    rows = [(row["gpus"], row["value"]) for row in measured]
    if len({gpus for gpus, _ in rows}) < 2:
        return None
    # Relative: serial * (1 / T) + parallel * (1 / (N T)) = 1.
    terms = [(1 / seconds, 1 / (gpus * seconds)) for gpus, seconds in rows]
    aa, bb = sum(a * a for a, _ in terms), sum(b * b for _, b in terms)
    ab, a1, b1 = sum(a * b for a, b in terms), sum(a for a, _ in terms), sum(b for _, b in terms)
    serial, parallel = (a1 * bb - b1 * ab) / (aa * bb - ab * ab), (b1 * aa - a1 * ab) / (aa * bb - ab * ab)
    if serial < 0:
        return 0.0, b1 / bb
    return (a1 / aa, 0.0) if parallel < 0 else (serial, parallel)


def _median_seconds(point: Point, of_epoch: bool) -> float:
    return statistics.median(point.step_seconds) * (point.steps_per_epoch or 1 if of_epoch else 1)
