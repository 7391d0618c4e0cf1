"""The answer of `predict`: tables of all series, the time to finish, and what the figures rest on; also as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from vitscale.pages import prediction_table, prediction_words
from vitscale.pages.contract_details import JsonObject
from vitscale.pages.prediction_table import known
from vitscale.prediction.evidence import Series
from vitscale.prediction.finishing import Finish
from vitscale.prediction.remarks import NO_REMARKS, Remarks
from vitscale.prediction.results import Assumption, Forecast, Prediction
from vitscale.prediction.start_up import OF_FORKS, started_as_forks
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import Block, Bullets, Cell, Column, Document, Row, Section, Table, table
from vitscale.present.estimate import Estimate

_NEVER_ENDS = "never"
"""In place of a time to finish where failures are too frequent for the work to end."""
_IMPORTANT_OOM_CHANCE = 0.05
"""Chance of running out of memory from which it is shown unfolded."""

_NO_UNIT = units.Unit(1.0, "")


class _PredictionColumn(NamedTuple):
    """A column of a table of predictions, and the function that makes its cell for one of them."""

    column: Column
    cell: Callable[[Prediction], Cell]


def predict_fields(forecast: Forecast, finishes: Sequence[Finish] = (), remarks: Remarks = NO_REMARKS) -> JsonObject:
    """Return an object for each series and rank count, with its time to finish where there are `finishes`."""
    objects = [prediction_table.prediction(prediction) for prediction in forecast.predictions]
    if finishes:
        objects = [fields | _finish_fields(finish) for fields, finish in zip(objects, finishes, strict=True)]
    return {
        **remarks.fields,
        "predictions": objects,
        "prediction_scores": prediction_table.scores(forecast),
        "left_out": list(forecast.left_out),
    }


def predict_document(forecast: Forecast, finishes: Sequence[Finish] = (), remarks: Remarks = NO_REMARKS) -> Document:
    """Return how long each rank count takes, and what would narrow it most.

    Args:
        forecast: the predictions.
        finishes: the time to finish of each prediction; empty where that was not requested.
        remarks: blocks that stand before the answer.
    """
    time_table = _predictions_table(
        forecast,
        _time_columns(forecast.predictions),
        notes=(prediction_words.INTERVALS_MEANING, *prediction_words.parameter_lines_of(forecast.predictions)),
    )
    finish_tables = [_finish_table(forecast, finishes)] if finishes else []
    tables = [time_table, *finish_tables, _resource_table(forecast)]
    blocks: list[Block] = [*remarks.blocks]
    blocks += [shown for shown in tables if _has_figures(shown)]
    sentences = (
        *prediction_words.trace_sentences(forecast),
        *prediction_words.left_out_sentences(forecast.left_out),
        *prediction_words.score_sentences(forecast),
    )
    if sentences:
        blocks.append(Bullets(sentences))
    step_table = _predictions_table(forecast, _STEP_COLUMNS, title="What a step is made of", folded=True)
    if _has_figures(step_table):
        blocks.append(step_table)
    blocks.append(_foundations(forecast))
    next_measurement = prediction_words.next_measurement(forecast.predictions)
    return Document("", tuple(blocks), last=(next_measurement,) if next_measurement else ())


def _resource_table(forecast: Forecast) -> Table:
    """Return the table of memory, energy and cost, folded unless some prediction makes it worth reading."""
    is_folded = not any(_has_important_resources(prediction) for prediction in forecast.predictions)
    offloads = any(prediction.host_memory_bytes for prediction in forecast.predictions)
    memory_columns = [*_MEMORY_COLUMNS, *_HOST_MEMORY_COLUMNS] if offloads else _MEMORY_COLUMNS
    columns = [*memory_columns, *_COST_COLUMNS]
    return _predictions_table(forecast, columns, title="Memory, energy and cost", folded=is_folded)


def _has_important_resources(prediction: Prediction) -> bool:
    """Whether a prediction has a cost, which was requested, or may run out of memory."""
    highest_chance = max(prediction.oom_chance or 0.0, prediction.host_oom_chance or 0.0)
    return prediction.cost_per_epoch is not None or highest_chance >= _IMPORTANT_OOM_CHANCE


def _has_figures(table: Table) -> bool:
    """Whether a table has columns beside that of the ranks."""
    return len(table.columns) > 1


def _foundations(forecast: Forecast) -> Section:
    """Return a section on what the figures rest on: measurements, assumptions, the network, and labels."""
    predictions = forecast.predictions
    sentences = (
        *_measured_sentences(forecast),
        *prediction_words.assumption_sentences(predictions),
        prediction_words.network_sentence(forecast.evidence),
        *prediction_words.unavailable_sentences(predictions),
        *prediction_words.label_sentences(predictions),
    )
    return Section("What this rests on", (Bullets(sentences),), folded=True)


def _measured_sentences(forecast: Forecast) -> list[str]:
    """Return a sentence for each predicted series of which there is evidence: "ddp: measured on 1 rank, 1 host."."""
    series_by_name = {series.name: series for series in forecast.evidence.series}
    shown_names = prediction_words.names_with_engine(forecast.evidence)
    sentences = []
    for name in dict.fromkeys(prediction.series for prediction in forecast.predictions):
        if name in series_by_name:
            sentences.append(f"{shown_names[name]}: {prediction_words.measured_counts(series_by_name[name])}.")
    return sentences


def _predictions_table(
    forecast: Forecast,
    columns: Sequence[_PredictionColumn],
    notes: Sequence[str] = (),
    title: str = "",
    folded: bool = False,
) -> Table:
    """Return a table with a row for each prediction, grouped by series, without columns of which nothing is known.

    Where there is one series only, its name is the title, unless another is given.
    """
    series_by_name = {series.name: series for series in forecast.evidence.series}
    shown_names = prediction_words.names_with_engine(forecast.evidence)
    rows_by_series: dict[str, list[Row]] = {}
    for prediction in forecast.predictions:
        shown_name = shown_names.get(prediction.series, prediction.series)
        series_title = _series_title(prediction, shown_name, series_by_name.get(prediction.series))
        cells = (Cell(f"{prediction.gpus:,}"), *(column.cell(prediction) for column in columns))
        rows_by_series.setdefault(series_title, []).append(cells)
    headings = (Column("ranks"), *(column.column for column in columns))
    if len(rows_by_series) == 1:
        ((only_series, rows),) = rows_by_series.items()
        return table(headings, rows, title=title or only_series, notes=notes, folded=folded)
    return table(headings, rows_by_series, title=title, notes=notes, folded=folded)


def _series_title(prediction: Prediction, shown_name: str, series: Series | None) -> str:
    """Name the series of a prediction, and what the prediction changes in it: "ddp, weak; with micro_batch 16"."""
    title = prediction_words.series_title(shown_name, prediction.mode)
    changed = prediction_words.changed_settings(prediction, series) if series is not None else ""
    return f"{title}; {changed}" if changed else title


def _estimate_cell(estimate: Estimate | None, unit: units.Unit | None = None, *, with_bounds: bool = True) -> Cell:
    """Return a cell with a figure and the interval of its mean.

    Args:
        estimate: the figure; None: unknown.
        unit: its unit; None: it is a time in seconds, and gets the unit that suits it.
        with_bounds: whether the interval is shown.
    """
    if estimate is None:
        return Cell(units.UNKNOWN)
    shown_unit = unit or units.time_unit([estimate.value])
    is_certain = estimate.future_low == estimate.future_high
    bounds = ""
    if with_bounds and not is_certain:
        bounds = units.bounds(estimate.low, estimate.high, shown_unit.text)
    return Cell(f"{shown_unit.text(estimate.value)} {shown_unit.sign}".strip(), bounds)


def _part_cell(estimate: Estimate | None) -> Cell:
    """Return a cell with a part of a step, without its interval."""
    return _estimate_cell(estimate, with_bounds=False)


def _rare_part_cell(estimate: Estimate | None) -> Cell:
    """Return a cell with a part that few steps have: a dash where it is 0, so that a column of 0s is left out."""
    return _part_cell(estimate if estimate is not None and estimate.value else None)


def _one_run_cell(estimate: Estimate | None, unit: units.Unit | None = None) -> Cell:
    """Return a cell with the interval of one future run; `unit` as for `_estimate_cell`."""
    if estimate is None or estimate.future_low == estimate.future_high:
        return Cell(units.UNKNOWN)
    shown_unit = unit or units.time_unit([estimate.value])
    interval = units.bounds(estimate.future_low, estimate.future_high, shown_unit.text)
    return Cell(f"{interval} {shown_unit.sign}".strip())


def _figure_cell(estimate: Estimate | None, form: Callable[[float], str] = units.number) -> Cell:
    """Return a cell with a figure without its interval."""
    return Cell(units.UNKNOWN if estimate is None else form(estimate.value))


def _step_seconds(prediction: Prediction) -> Estimate | None:
    return known(prediction, "step_seconds")


def _time_columns(predictions: Sequence[Prediction]) -> list[_PredictionColumn]:
    """Return the columns of the first table.

    One of them is the interval of one run. It is that of the epoch time; where the images of an epoch are unknown, that
    of the step time; where the batch is unknown too, that of images/s. Images/s have a column only in the last case.
    """
    has_epochs = any(prediction.epoch_seconds is not None for prediction in predictions)
    has_rates_alone = not has_epochs and all("step_seconds" in prediction.reasons for prediction in predictions)
    if has_epochs:
        one_run = _PredictionColumn(Column("epoch, one run"), lambda p: _one_run_cell(p.epoch_seconds))
    elif has_rates_alone:
        one_run = _PredictionColumn(Column("images/s, one run"), lambda p: _one_run_cell(p.images_per_second, _NO_UNIT))
    else:
        one_run = _PredictionColumn(Column("step, one run"), lambda p: _one_run_cell(_step_seconds(p)))
    columns = [
        _PredictionColumn(Column("hosts"), lambda p: Cell(f"{p.nodes:,}")),
        _PredictionColumn(Column("step"), lambda p: _estimate_cell(_step_seconds(p), with_bounds=not has_epochs)),
        _PredictionColumn(Column("epoch"), lambda p: _estimate_cell(p.epoch_seconds)),
    ]
    if has_rates_alone:
        columns.append(_PredictionColumn(Column("images/s"), lambda p: _estimate_cell(p.images_per_second, _NO_UNIT)))
    return [
        *columns,
        one_run,
        _PredictionColumn(Column("efficiency", narrow="eff."), lambda p: _figure_cell(p.efficiency, units.share)),
        _PredictionColumn(Column("label", words=True), lambda p: Cell(p.label)),
    ]


def _rest_seconds(prediction: Prediction) -> Estimate | None:
    """Return the time of a step that is in none of its parts; None where it is negligible."""
    return known(prediction, "rest_seconds") if prediction_words.has_rest(prediction) else None


def _joules_text(joules: float) -> str:
    return units.rate(joules, "J")


_STEP_COLUMNS = [
    _PredictionColumn(Column("images/s"), lambda p: _figure_cell(p.images_per_second)),
    _PredictionColumn(Column("speedup"), lambda p: _figure_cell(p.speedup)),
    _PredictionColumn(Column("compute"), lambda p: _part_cell(known(p, "compute_seconds"))),
    _PredictionColumn(Column("exposed wait"), lambda p: _part_cell(known(p, "wait_seconds"))),
    _PredictionColumn(Column("exposed wire"), lambda p: _part_cell(known(p, "wire_seconds"))),
    _PredictionColumn(
        Column("synchronised norm", narrow="sync. norm"), lambda p: _rare_part_cell(known(p, "norm_seconds"))
    ),
    _PredictionColumn(Column("bubble"), lambda p: _rare_part_cell(known(p, "bubble_seconds"))),
    _PredictionColumn(Column("the rest"), lambda p: _rare_part_cell(_rest_seconds(p))),
]
_MEMORY_COLUMNS = [
    _PredictionColumn(Column("memory"), lambda p: Cell(units.size(p.memory_bytes))),
    _PredictionColumn(Column("OOM chance"), lambda p: Cell(prediction_words.chance_text(p.oom_chance))),
]
_HOST_MEMORY_COLUMNS = [
    _PredictionColumn(Column("offloaded to a host"), lambda p: Cell(units.size(p.host_memory_bytes))),
    _PredictionColumn(Column("the host's OOM chance"), lambda p: Cell(prediction_words.chance_text(p.host_oom_chance))),
]
_COST_COLUMNS = [
    _PredictionColumn(Column("energy an epoch"), lambda p: _figure_cell(p.joules_per_epoch, _joules_text)),
    _PredictionColumn(Column("cost an epoch"), lambda p: _figure_cell(p.cost_per_epoch, units.money)),
]


def _finish_fields(finish: Finish) -> JsonObject:
    """Return the JSON fields of a time to finish; None where it is unavailable."""
    return {
        **attributes(finish, "epochs", "work_seconds", "checkpoint_interval_seconds"),
        "finish_seconds": finish.wall_seconds,
        **attributes(finish, "low", "high", prefix="finish_seconds_"),
        **attributes(finish, "failures", "lost_share", "cost", "reason", prefix="finish_"),
        "finish_label": "prior-driven",
        "finish_assumptions": [asdict(assumption) for assumption in finish.assumptions],
    }


def _finish_table(forecast: Forecast, finishes: Sequence[Finish]) -> Table:
    """Return the table of times to finish, with a row for each prediction and notes on what they assume.

    Args:
        forecast: the predictions.
        finishes: one for each prediction, at least one.
    """
    # Two predictions may be equal, so each is looked up by its identity.
    finish_by_id = {id(prediction): finish for prediction, finish in zip(forecast.predictions, finishes, strict=True)}

    def column(heading: str, form: Callable[[Finish], str]) -> _PredictionColumn:
        return _PredictionColumn(Column(heading), lambda prediction: Cell(form(finish_by_id[id(prediction)])))

    columns = [
        column("epochs alone", lambda finish: units.seconds(finish.work_seconds)),
        column("to finish", _wall_time_text),
        column("90 % for one run", _finish_bounds_text),
        column("failures", lambda finish: units.number(finish.failures, 2)),
        column("lost", lambda finish: units.percent(finish.lost_share)),
        column("checkpoint every", lambda finish: units.seconds(finish.checkpoint_interval_seconds)),
        column("cost", lambda finish: units.money(finish.cost)),
    ]
    title = f"Time to finish {units.counted(finishes[0].epochs, 'epoch')} (prior-driven)"
    return _predictions_table(forecast, columns, _finish_notes(forecast, finishes), title)


def _finish_notes(forecast: Forecast, finishes: Sequence[Finish]) -> tuple[str, ...]:
    """Return notes on what times to finish assume, and on why some are unavailable, each once."""
    # Assumptions about hosts differ with their number: those of the most hosts stand for all.
    assumption_by_part: dict[tuple[str, str], Assumption] = {}
    for prediction, finish in zip(forecast.predictions, finishes, strict=True):
        for assumption in finish.assumptions:
            assumption_by_part[prediction.series, assumption.part] = assumption
    notes = [f"Assumed: {assumption.part}: {assumption.taken}." for assumption in assumption_by_part.values()]
    with_start_up = [prediction.trial for prediction in forecast.predictions if prediction.startup_seconds is not None]
    if any(map(started_as_forks, with_start_up)):
        notes.append(OF_FORKS)
    notes += [f"Time to finish unavailable: {finish.reason}." for finish in finishes if finish.reason]
    return tuple(dict.fromkeys(notes))


def _wall_time_text(finish: Finish) -> str:
    """Return the time to finish; "never" where failures are too frequent for the work to end."""
    is_never = finish.wall_seconds is None and finish.work_seconds
    return _NEVER_ENDS if is_never else units.seconds(finish.wall_seconds)


def _finish_bounds_text(finish: Finish) -> str:
    """Return the interval of the time to finish, in the unit of its upper end; "never" for an end that is unknown."""
    if finish.work_seconds is None:
        return units.UNKNOWN
    if finish.low is None or finish.high is None:
        low = _NEVER_ENDS if finish.low is None else units.seconds(finish.low)
        return f"{low}{units.DASH}{_NEVER_ENDS}"
    unit = units.time_unit([finish.high])
    return f"{units.bounds(finish.low, finish.high, unit.text)} {unit.sign}"
