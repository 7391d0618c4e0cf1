"""Predictions as tables, one per series, for the page and Markdown.

The contract's JSON objects of predictions and their scores are made here too; `vitscale predict --json` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from vitscale.engines.names import option_if_read
from vitscale.pages import prediction_words, sentences
from vitscale.pages.contract_details import JsonObject
from vitscale.prediction.evidence import Series
from vitscale.prediction.results import Forecast, Prediction, Score
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import Cell, Column, Table, table
from vitscale.present.estimate import Estimate
from vitscale.trial.model_words import parameter_fields
from vitscale.trial.trial import Mode

_WIDE_TIME_RATIO = 100
"""Largest over smallest time from which a unit that suits the largest shows too little of the smallest."""
_BYTES_PER_GIB = 2**30
_BYTES_PER_MIB = 2**20


class _SeriesKey(NamedTuple):
    """Name and batch policy of a series, whose predictions are one table."""

    series: str
    mode: Mode


class _FigureColumn(NamedTuple):
    """One column of a table: a figure at all rank counts, in the order of the predictions."""

    column: Column
    cells: list[Cell]


class PredictionTables(NamedTuple):
    """The predictions of all series."""

    tables: tuple[Table, ...]
    """One for each series, in the order of the predictions."""
    shared_notes: tuple[str, ...]
    """Notes that hold for all of several series, and stand below none of the tables."""


def prediction_tables(forecast: Forecast) -> PredictionTables:
    """Return one table for each series, and the notes that hold for all series.

    A row is a rank count; a cell also has the 90 % intervals of the mean and of one run. Notes are on what is assumed,
    which measurement would replace most of it, and what is unavailable.
    """
    by_series: dict[_SeriesKey, list[Prediction]] = {}
    for prediction in forecast.predictions:
        by_series.setdefault(_SeriesKey(prediction.series, prediction.mode), []).append(prediction)
    tables = [_series_table(predictions, forecast) for predictions in by_series.values()]
    shared_notes = _shared_notes(tables)
    without_shared = []
    for series_table in tables:
        notes = tuple(note for note in series_table.notes if note not in shared_notes)
        without_shared.append(replace(series_table, notes=notes))
    return PredictionTables(tuple(without_shared), shared_notes)


def _shared_notes(tables: Sequence[Table]) -> tuple[str, ...]:
    """Return the notes that all tables have; none for a single table."""
    if len(tables) < 2:
        return ()
    shared = list(tables[0].notes)
    for other in tables:
        shared = [note for note in shared if note in other.notes]
    return tuple(shared)


def _series_table(predictions: Sequence[Prediction], forecast: Forecast) -> Table:
    """Return the table of one series; `predictions` has at least one."""
    figures = _all_columns(predictions)
    notes = (
        *prediction_words.assumption_sentences(predictions),
        prediction_words.next_measurement(predictions),
        *prediction_words.unavailable_sentences(predictions),
    )
    return table(
        columns=tuple(figure.column for figure in figures),
        rows=list(zip(*(figure.cells for figure in figures), strict=True)),
        title=_table_title(predictions[0], _series_named(predictions[0].series, forecast)),
        notes=[note for note in notes if note],
        folded=True,
    )


def _series_named(name: str, forecast: Forecast) -> Series | None:
    for series in forecast.evidence.series:
        if series.name == name:
            return series
    return None


def _table_title(prediction: Prediction, series: Series | None) -> str:
    """Return the name of a series, what the predictions change in it, and where it was measured.

    Where there is no evidence of the series, it is the name alone.
    """
    name = prediction_words.series_title(prediction.series, prediction.mode)
    if series is None:
        return name
    changed = prediction_words.changed_settings(prediction, series)
    name_and_changes = f"{name}; {changed}" if changed else name
    return f"{name_and_changes}: {prediction_words.measured_counts(series)}"


def _all_columns(predictions: Sequence[Prediction]) -> list[_FigureColumn]:
    """Return the columns of a table, in their order."""
    ranks = [Cell(sentences.ranks_on_hosts(prediction.trial.world)) for prediction in predictions]
    efficiencies = [prediction.efficiency for prediction in predictions]
    oom_chances = [Cell(prediction_words.chance_text(prediction.oom_chance)) for prediction in predictions]
    labels = [Cell(prediction.label) for prediction in predictions]
    return [
        _FigureColumn(Column("ranks"), ranks),
        _time_column("step", [known(prediction, "step_seconds") for prediction in predictions]),
        _time_column("epoch", [prediction.epoch_seconds for prediction in predictions]),
        _figure_column("images/s", [prediction.images_per_second for prediction in predictions]),
        _figure_column("speedup", [prediction.speedup for prediction in predictions]),
        _figure_column("efficiency", efficiencies, show=prediction_words.efficiency_text),
        *_step_part_columns(predictions),
        _memory_column([prediction.memory_bytes for prediction in predictions]),
        _FigureColumn(Column("chance of OOM"), oom_chances),
        *_host_memory_columns(predictions),
        _energy_column([prediction.joules_per_epoch for prediction in predictions]),
        _figure_column("cost/epoch", [prediction.cost_per_epoch for prediction in predictions]),
        _FigureColumn(Column("label", words=True), labels),
    ]


def known(predicted: Prediction, field: str) -> Estimate | None:
    """Return a figure of a prediction; None where a reason says that it is unavailable."""
    figure: Estimate | None = None if field in predicted.reasons else getattr(predicted, field)
    return figure


def _memory_column(sizes: Sequence[int | None]) -> _FigureColumn:
    """Return the column of memory in GiB, or in MiB where the largest is below 1 GiB."""
    largest = max((size for size in sizes if size is not None), default=0)
    unit = units.Unit(1 / _BYTES_PER_GIB, "GiB") if largest >= _BYTES_PER_GIB else units.Unit(1 / _BYTES_PER_MIB, "MiB")
    return _FigureColumn(Column("memory", unit.sign), [Cell(unit.text(size)) for size in sizes])


def _host_memory_columns(predictions: Sequence[Prediction]) -> list[_FigureColumn]:
    """Return the columns of what is offloaded to a host; none where no prediction offloads anything."""
    sizes = [prediction.host_memory_bytes for prediction in predictions]
    if not any(sizes):
        return []
    chances = [Cell(prediction_words.chance_text(prediction.host_oom_chance)) for prediction in predictions]
    return [
        _FigureColumn(Column("offloaded to a host"), [Cell(units.size(size)) for size in sizes]),
        _FigureColumn(Column("chance of the host's OOM"), chances),
    ]


def _time_column(name: str, estimates: Sequence[Estimate | None]) -> _FigureColumn:
    """Return a column of times in one unit."""
    unit = _time_unit([estimate.value for estimate in estimates if estimate is not None])
    return _column_in_unit(name, estimates, unit)


def _time_unit(seconds: Sequence[float]) -> units.Unit:
    """Return the unit that suits the largest time; where times range widely, that of their geometric middle."""
    if not seconds or max(seconds) <= _WIDE_TIME_RATIO * min(seconds):
        return units.time_unit(seconds)
    return units.time_unit([math.sqrt(min(seconds) * max(seconds))])


def _step_part_columns(predictions: Sequence[Prediction]) -> list[_FigureColumn]:
    """Return a column for each part of a step, all in one unit, so that they can be compared.

    Rare parts are left out where no prediction has any.
    """

    def estimates_of(field: str) -> list[Estimate | None]:
        return [known(prediction, field) for prediction in predictions]

    parts = {
        "compute": estimates_of("compute_seconds"),
        "exposed wait": estimates_of("wait_seconds"),
        "exposed wire": estimates_of("wire_seconds"),
    }
    rare_parts = {
        "synchronised norm": estimates_of("norm_seconds"),
        "bubble": estimates_of("bubble_seconds"),
    }
    for name, estimates in rare_parts.items():
        if _positive_values(estimates):
            parts[name] = estimates
    if any(map(prediction_words.has_rest, predictions)):
        parts["the rest"] = estimates_of("rest_seconds")
    seconds: list[float] = []
    for estimates in parts.values():
        seconds += _positive_values(estimates)
    unit = _time_unit(seconds)
    return [_column_in_unit(name, estimates, unit) for name, estimates in parts.items()]


def _positive_values(estimates: Iterable[Estimate | None]) -> list[float]:
    return [estimate.value for estimate in estimates if estimate is not None and estimate.value > 0]


def _energy_column(estimates: Sequence[Estimate | None]) -> _FigureColumn:
    """Return the column of energy in the unit that suits the largest."""
    largest = max((estimate.value for estimate in estimates if estimate is not None), default=0.0)
    energy_unit = prediction_words.energy_unit(largest)
    return _column_in_unit("energy/epoch", estimates, units.Unit(1 / energy_unit.joules, energy_unit.sign))


def _column_in_unit(name: str, estimates: Sequence[Estimate | None], unit: units.Unit) -> _FigureColumn:
    """Return a column of figures, given in a base unit (seconds, joules), in `unit`, which its heading has."""
    scaled = [estimate.times(unit.factor) if estimate is not None else None for estimate in estimates]
    return _FigureColumn(Column(name, unit.sign), _figure_column(name, scaled).cells)


def _figure_column(
    name: str, estimates: Sequence[Estimate | None], show: Callable[[float], str] = units.number
) -> _FigureColumn:
    """Return a column of figures with the intervals of the mean and of one run; a dash for unknown ones."""
    return _FigureColumn(Column(name), [_estimate_cell(estimate, show) for estimate in estimates])


def _estimate_cell(estimate: Estimate | None, show: Callable[[float], str]) -> Cell:
    if estimate is None:
        return Cell(units.UNKNOWN)
    return Cell(show(estimate.value), estimate.bounds(show), run=estimate.one_run.bounds(show))


def scores(forecast: Forecast) -> list[JsonObject]:
    """Return how well such predictions did, where this is known, as objects of the JSON."""
    mode_by_series = {series.name: series.mode for series in forecast.evidence.series}
    return [_score_object(score, mode_by_series.get(score.series)) for score in forecast.scores]


def prediction(predicted: Prediction) -> JsonObject:
    """Return one series at one rank count as an object of the JSON.

    Unavailable figures are null, and `reasons` says why.
    """
    train = predicted.trial.train
    return {
        **attributes(predicted, "series", "mode"),
        "labels": dict(predicted.labels),
        **attributes(predicted, "gpus", "nodes", "gpu", "label"),
        "model": predicted.trial.model_name,
        **parameter_fields(predicted.parameters),
        "engine": train.engine,
        "zero_stage": option_if_read(train, "zero_stage"),
        **attributes(train, "precision", "micro_batch", "grad_accum"),
        "global_batch": predicted.trial.global_batch,
        "image_size": predicted.trial.model.image_size,
        **attributes(predicted, "images", "steps_per_epoch"),
        **_estimate_fields(predicted, "epoch_seconds", "step_seconds", "images_per_second", "speedup", "efficiency"),
        **_estimate_fields(
            predicted, *(f"{part}_seconds" for part in ("compute", "wait", "wire", "norm", "bubble", "rest"))
        ),
        **attributes(predicted, "memory_bytes", "memory_capacity_bytes", "oom_chance"),
        **attributes(predicted, "host_memory_bytes", "host_memory_capacity_bytes", "host_oom_chance"),
        **_estimate_fields(predicted, "joules_per_epoch", "cost_per_epoch", "startup_seconds"),
        "effective_draws": round(predicted.effective_draws),
        "assumptions": [asdict(assumption) for assumption in predicted.assumptions],
        "reasons": dict(predicted.reasons),
    }


def _estimate_fields(predicted: Prediction, *names: str) -> dict[str, float | None]:
    """Return these figures with the intervals of a future run (`_low`, `_high`) and of the mean (`_mean_low`, ...)."""
    fields: dict[str, float | None] = {}
    for name in names:
        estimate = known(predicted, name)
        fields[name] = estimate.value if estimate is not None else None
        fields[f"{name}_low"] = estimate.future_low if estimate is not None else None
        fields[f"{name}_high"] = estimate.future_high if estimate is not None else None
        fields[f"{name}_mean_low"] = estimate.low if estimate is not None else None
        fields[f"{name}_mean_high"] = estimate.high if estimate is not None else None
    return fields


def _score_object(score: Score, mode: Mode | None) -> JsonObject:
    """Return one score with its sentence; `mode` is that of its series, None where there is no evidence of it."""
    return {
        **asdict(score),
        "fitted_gpus": list(score.fitted_gpus),
        "held_out_gpus": list(score.held_out_gpus),
        "sentence": prediction_words.score_sentence(score, mode),
    }
