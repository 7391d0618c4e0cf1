"""Predictions as tables of text, one per series: what the page, Markdown and the terminal lay out alike.

Predictions and their scores as the contract's JSON says them; `vitscale predict --json` prints the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitscale.prediction.results import Forecast, Label, Prediction, Score
from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.present.units import UNKNOWN, number
from vitscale.report import prediction_words, sentences
from vitscale.trial.trial import Mode

_WIDE_RANGE = 100


@dataclass(frozen=True)
class PredictedCell:
    """A figure as text, with its two intervals of 90 % where it has them."""

    text: str
    mean: str = ""
    run: str = ""


@dataclass(frozen=True)
class Column:
    """One figure of all rank counts."""

    key: str
    heading: str
    unit: str
    """Empty where the figure has none, or each cell its own."""
    cells: tuple[PredictedCell, ...]


@dataclass(frozen=True)
class SeriesTable:
    """One series, a line per rank count; columns of which anything is known."""

    name: str
    mode: Mode
    title: str
    measured: str
    """In words, what it was fitted to; empty for a series that is not in the evidence."""
    gpus: tuple[int, ...]
    nodes: tuple[int, ...]
    labels: tuple[Label, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]
    """Sentences: what is assumed, what would replace most of it, what is unavailable; what holds of all series alike
    is in `shared_notes`."""
    all_notes: tuple[str, ...]
    """With what holds of all alike."""

    def column(self, key: str) -> Column | None:
        """By key; None where nothing of it is known."""
        return next((column for column in self.columns if column.key == key), None)

    @property
    def headings(self) -> tuple[str, ...]:
        """Of all columns, with their units, and the label's."""
        return (
            *(f"{column.heading} ({column.unit})" if column.unit else column.heading for column in self.columns),
            "label",
        )


def prediction_tables(outlook: Forecast) -> tuple[SeriesTable, ...]:
    """One table for each series, in the order of the predictions."""
    series = dict.fromkeys((prediction.series, prediction.mode) for prediction in outlook.predictions)
    tables = [
        _table(
            [prediction for prediction in outlook.predictions if (prediction.series, prediction.mode) == key], outlook
        )
        for key in series
    ]
    alike = set(shared_notes(tables))
    return tuple(replace(table, notes=tuple(note for note in table.all_notes if note not in alike)) for table in tables)


def shared_notes(tables: Sequence[SeriesTable]) -> tuple[str, ...]:
    """What holds of all series alike, where there are several: told once."""
    if len(tables) < 2:
        return ()
    return tuple(note for note in tables[0].all_notes if all(note in table.all_notes for table in tables))


def _table(predictions: Sequence[Prediction], outlook: Forecast) -> SeriesTable:
    first = predictions[0]
    known = next((one for one in outlook.evidence.series if one.name == first.series), None)
    title = prediction_words.title(first.series, first.mode)
    notes = (*prediction_words.assumptions(predictions), prediction_words.measure_next(predictions))
    columns = [
        Column("ranks", "ranks", "", tuple(PredictedCell(_ranks(prediction)) for prediction in predictions)),
        _seconds("step", "step", [prediction.step_seconds for prediction in predictions]),
        _seconds("epoch", "epoch", [prediction.epoch_seconds for prediction in predictions]),
        _figures("images", "images/s", [prediction.images_per_second for prediction in predictions], number),
        _figures("speedup", "speedup", [prediction.speedup for prediction in predictions], number),
        _figures(
            "efficiency",
            "efficiency",
            [prediction.efficiency for prediction in predictions],
            prediction_words.efficiency,
        ),
        *_parts(predictions),
        _memory([prediction.memory_bytes for prediction in predictions]),
        _texts("oom", "chance of OOM", [prediction_words.chance(prediction.oom_chance) for prediction in predictions]),
        _energy([prediction.joules_per_epoch for prediction in predictions]),
        _figures("cost", "cost/epoch", [prediction.cost_per_epoch for prediction in predictions], number),
    ]
    return SeriesTable(
        name=first.series,
        mode=first.mode,
        title="; ".join(part for part in (title, prediction_words.changed(first, known) if known else "") if part),
        measured=prediction_words.measured(known) if known else "",
        gpus=tuple(prediction.gpus for prediction in predictions),
        nodes=tuple(prediction.nodes for prediction in predictions),
        labels=tuple(prediction.label for prediction in predictions),
        columns=tuple(column for column in columns if any(cell.text != UNKNOWN for cell in column.cells)),
        notes=(),
        all_notes=tuple(note for note in (*notes, *prediction_words.unavailable(predictions)) if note),
    )


def _ranks(prediction: Prediction) -> str:
    return sentences.ranks_on_hosts(prediction.trial.world)


def _memory(sizes: Sequence[int | None]) -> Column:
    large = max((size for size in sizes if size is not None), default=0) >= 2**30
    cells = (UNKNOWN if size is None else number(size / (2**30 if large else 2**20)) for size in sizes)
    return Column("memory", "memory", "GiB" if large else "MiB", tuple(map(PredictedCell, cells)))


def _seconds(key: str, heading: str, estimates: Sequence[Estimate | None]) -> Column:
    return _in_unit(key, heading, estimates, _unit([estimate.value for estimate in estimates if estimate is not None]))


def _unit(values: Sequence[float]) -> units.Unit:
    """In which the largest reads best; over a wide range, in which the middle does."""
    if not values or max(values) <= _WIDE_RANGE * min(values):
        return units.time_unit(values)
    return units.time_unit([math.sqrt(min(values) * max(values))])


def _parts(predictions: Sequence[Prediction]) -> list[Column]:
    """What a step is made of, all in one unit, so that the columns compare."""
    parts = {
        "compute": [prediction.compute_seconds for prediction in predictions],
        "exposed wait": [prediction.wait_seconds for prediction in predictions],
        "exposed wire": [prediction.wire_seconds for prediction in predictions],
    }
    if any(prediction.norm_seconds is not None and prediction.norm_seconds.value > 0 for prediction in predictions):
        parts["synchronised norm"] = [prediction.norm_seconds for prediction in predictions]
    if any(one.bubble_seconds is not None and one.bubble_seconds.value > 0 for one in predictions):
        parts["bubble"] = [one.bubble_seconds for one in predictions]
    unit = _unit([one.value for some in parts.values() for one in some if one is not None and one.value > 0])
    return [_in_unit(name.split()[-1], name, estimates, unit) for name, estimates in parts.items()]


def _in_unit(key: str, heading: str, estimates: Sequence[Estimate | None], unit: units.Unit) -> Column:
    cells = tuple(_cell(estimate.times(unit.factor) if estimate else None, number) for estimate in estimates)
    return Column(key, heading, unit.sign, cells)


def _energy(estimates: Sequence[Estimate | None]) -> Column:
    factor, sign = prediction_words.energy_unit(
        max((estimate.value for estimate in estimates if estimate is not None), default=0.0)
    )
    return _in_unit("energy", "energy/epoch", estimates, units.Unit(1 / factor, sign))


def _figures(key: str, heading: str, estimates: Sequence[Estimate | None], show: Callable[[float], str]) -> Column:
    return Column(key, heading, "", tuple(_cell(estimate, show) for estimate in estimates))


def _texts(key: str, heading: str, texts: Sequence[str]) -> Column:
    return Column(key, heading, "", tuple(PredictedCell(text) for text in texts))


def _cell(estimate: Estimate | None, show: Callable[[float], str]) -> PredictedCell:
    if estimate is None:
        return PredictedCell(UNKNOWN)
    return PredictedCell(show(estimate.value), estimate.bounds(show), estimate.one_run.bounds(show))


Object = dict[str, Any]


def scores(outlook: Forecast) -> list[Object]:
    """How well such predictions did where it is known."""
    modes = {series.name: series.mode for series in outlook.evidence.series}
    return [_score(score, modes.get(score.series)) for score in outlook.scores]


def prediction(predicted: Prediction) -> Object:
    """One series at one rank count; what is unavailable is null, and `reasons` says why."""
    train = predicted.trial.train
    return {
        "series": predicted.series,
        "mode": predicted.mode,
        "labels": dict(predicted.labels),
        "gpus": predicted.gpus,
        "nodes": predicted.nodes,
        "gpu": predicted.gpu,
        "label": predicted.label,
        "engine": train.engine,
        "zero_stage": train.zero_stage if train.wrapper == "deepspeed" else None,
        "precision": train.precision,
        "micro_batch": train.micro_batch,
        "grad_accum": train.grad_accum,
        "global_batch": predicted.trial.global_batch,
        "image_size": predicted.trial.model.image_size,
        "images": predicted.images,
        "steps_per_epoch": predicted.steps_per_epoch,
        **estimate_fields("epoch_seconds", predicted.epoch_seconds),
        **estimate_fields("step_seconds", predicted.step_seconds),
        **estimate_fields("images_per_second", predicted.images_per_second),
        **estimate_fields("speedup", predicted.speedup),
        **estimate_fields("efficiency", predicted.efficiency),
        **estimate_fields("compute_seconds", predicted.compute_seconds),
        **estimate_fields("wait_seconds", predicted.wait_seconds),
        **estimate_fields("wire_seconds", predicted.wire_seconds),
        **estimate_fields("norm_seconds", predicted.norm_seconds),
        **estimate_fields("bubble_seconds", predicted.bubble_seconds),
        "memory_bytes": predicted.memory_bytes,
        "memory_capacity_bytes": predicted.memory_capacity_bytes,
        "oom_chance": predicted.oom_chance,
        **estimate_fields("joules_per_epoch", predicted.joules_per_epoch),
        **estimate_fields("cost_per_epoch", predicted.cost_per_epoch),
        **estimate_fields("startup_seconds", predicted.startup_seconds),
        "effective_draws": round(predicted.effective_draws),
        "assumptions": [asdict(assumed) for assumed in predicted.assumptions],
        "reasons": dict(predicted.reasons),
    }


def estimate_fields(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """A figure, the interval of a future run (`_low`, `_high`), and that of the mean."""
    return {
        name: estimate.value if estimate else None,
        f"{name}_low": estimate.future_low if estimate else None,
        f"{name}_high": estimate.future_high if estimate else None,
        f"{name}_mean_low": estimate.low if estimate else None,
        f"{name}_mean_high": estimate.high if estimate else None,
    }


def _score(score: Score, mode: Mode | None) -> Object:
    """One score, with its sentence."""
    return {
        **asdict(score),
        "fitted_gpus": list(score.fitted_gpus),
        "held_out_gpus": list(score.held_out_gpus),
        "sentence": prediction_words.score(score, mode),
    }
