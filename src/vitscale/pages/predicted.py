"""What `predict` says: one table of all series, the time to finish, and what the figures rest on; the same as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from vitscale.pages import prediction_table, prediction_words
from vitscale.pages.contract_details import JsonObject
from vitscale.pages.prediction_table import known
from vitscale.prediction.finishing import Finish
from vitscale.prediction.remarks import NO_REMARKS, Remarks
from vitscale.prediction.results import Forecast, Prediction
from vitscale.prediction.start_up import OF_FORKS, started_as_forks
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import Block, Bullets, Cell, Column, Document, Row, Section, Table, table
from vitscale.present.estimate import Estimate

_NEVER = "never"
_LIKELY_ENOUGH = 0.05
"""Chance of running out of memory from which it is shown unfolded."""

_AS_IT_IS = units.Unit(1.0, "")

Show = Callable[[Prediction], Cell]


def predict_fields(forecast: Forecast, finishes: Sequence[Finish] = (), remarks: Remarks = NO_REMARKS) -> JsonObject:
    """An object for each series and rank count, with its time to finish where that was asked for."""
    objects = [prediction_table.prediction(prediction) for prediction in forecast.predictions]
    if finishes:
        objects = [fields | _finish_fields(end) for fields, end in zip(objects, finishes, strict=True)]
    return {
        **remarks.fields,
        "predictions": objects,
        "prediction_scores": prediction_table.scores(forecast),
        "left_out": list(forecast.left_out),
    }


def predict_document(forecast: Forecast, finishes: Sequence[Finish] = (), remarks: Remarks = NO_REMARKS) -> Document:
    """How long each rank count takes, to finish too where that was asked for, and what would narrow it most."""
    predictions = forecast.predictions
    times = _table(forecast, _how_long(predictions), notes=(prediction_words.INTERVALS_MEANING,))
    blocks: list[Block] = [*remarks.blocks, times]
    if finishes:
        blocks.append(_finish_table(forecast, finishes))
    asked = any(p.cost_per_epoch is not None or (p.oom_chance or 0.0) >= _LIKELY_ENOUGH for p in predictions)
    blocks.append(_table(forecast, _RESOURCES, title="Memory, energy and cost", folded=not asked))
    said = (
        *prediction_words.traces(forecast),
        *prediction_words.left_out(forecast.left_out),
        *prediction_words.scores(forecast),
    )
    blocks += [Bullets(said)] if said else []
    blocks.append(_table(forecast, _STEP, title="What a step is made of", folded=True))
    rests = (
        *_measured(forecast),
        *prediction_words.assumptions(predictions),
        prediction_words.network(forecast.evidence),
        *prediction_words.unavailable(predictions),
        *prediction_words.labels(predictions),
    )
    blocks.append(Section("What this rests on", (Bullets(rests),), folded=True))
    shown = tuple(block for block in blocks if not isinstance(block, Table) or len(block.columns) > 1)
    return Document("", shown, tuple(filter(None, [prediction_words.measure_next(predictions)])))


def _measured(forecast: Forecast) -> tuple[str, ...]:
    asked = dict.fromkeys(prediction.series for prediction in forecast.predictions)
    known = {series.name: series for series in forecast.evidence.series}
    shown = prediction_words.names_with_engine(forecast.evidence)
    return tuple(f"{shown[name]}: {prediction_words.measured(known[name])}." for name in asked if name in known)


def _table(
    forecast: Forecast,
    columns: Sequence[tuple[Column, Show]],
    notes: Sequence[str] = (),
    title: str = "",
    folded: bool = False,
) -> Table:
    """A row for each prediction, a group for each series; columns of which nothing is known are left out."""
    known = {series.name: series for series in forecast.evidence.series}
    names = prediction_words.names_with_engine(forecast.evidence)
    groups: dict[str, list[Row]] = {}
    for prediction in forecast.predictions:
        series = known.get(prediction.series)
        name = prediction_words.title(names.get(prediction.series, prediction.series), prediction.mode)
        if series is not None and (changed := prediction_words.changed(prediction, series)):
            name = f"{name}; {changed}"
        cells = (show(prediction) for _, show in columns)
        groups.setdefault(name, []).append((Cell(f"{prediction.gpus:,}"), *cells))
    if len(groups) == 1:
        ((name, rows),) = groups.items()
        title, groups = title or name, {"": rows}
    named = (Column("ranks"), *(column for column, _ in columns))
    return table(named, groups, title=title, notes=notes, folded=folded)


def _seconds(estimate: Estimate | None, bounded: bool = True, unit: units.Unit | None = None) -> Cell:
    """A time, or what else is in this unit, with the interval of its mean."""
    if estimate is None:
        return Cell(units.UNKNOWN)
    unit = unit or units.time_unit([estimate.value])
    certain = estimate.future_low == estimate.future_high
    bounds = "" if certain or not bounded else units.bounds(estimate.low, estimate.high, unit.text)
    return Cell(f"{unit.text(estimate.value)} {unit.sign}".strip(), bounds)


def _if_any(estimate: Estimate | None) -> Cell:
    """A time that most steps have none of."""
    return _seconds(estimate if estimate and estimate.value else None, bounded=False)


def _one_run(estimate: Estimate | None, unit: units.Unit | None = None) -> Cell:
    """The interval of one future run."""
    if estimate is None or estimate.future_low == estimate.future_high:
        return Cell(units.UNKNOWN)
    unit = unit or units.time_unit([estimate.value])
    return Cell(f"{units.bounds(estimate.future_low, estimate.future_high, unit.text)} {unit.sign}".strip())


def _figure(estimate: Estimate | None, form: Callable[[float], str] = units.number) -> Cell:
    return Cell(units.UNKNOWN if estimate is None else form(estimate.value))


def _how_long(predictions: Sequence[Prediction]) -> list[tuple[Column, Show]]:
    """Step and epoch; the intervals are of the epoch, or of the step where the images are unknown, or of images/s where
    the batch is unknown too."""
    epochs = any(prediction.epoch_seconds is not None for prediction in predictions)
    rates = not epochs and all("step_seconds" in prediction.reasons for prediction in predictions)
    bounded = "epoch" if epochs else "images/s" if rates else "step"
    unit = _AS_IT_IS if rates else None

    def own(p: Prediction) -> Estimate | None:
        return p.epoch_seconds if epochs else p.images_per_second if rates else known(p, "step_seconds")

    return [
        (Column("hosts"), lambda p: Cell(f"{p.nodes:,}")),
        (Column("step"), lambda p: _seconds(known(p, "step_seconds"), not epochs)),
        (Column("epoch"), lambda p: _seconds(p.epoch_seconds)),
        (Column("images/s"), lambda p: _seconds(p.images_per_second if rates else None, unit=unit)),
        (Column(f"{bounded}, one run"), lambda p: _one_run(own(p), unit)),
        (Column("efficiency", narrow="eff."), lambda p: _figure(p.efficiency, units.share)),
        (Column("label", words=True), lambda p: Cell(p.label)),
    ]


_STEP: list[tuple[Column, Show]] = [
    (Column("images/s"), lambda p: _figure(p.images_per_second)),
    (Column("speedup"), lambda p: _figure(p.speedup)),
    (Column("compute"), lambda p: _seconds(known(p, "compute_seconds"), bounded=False)),
    (Column("exposed wait"), lambda p: _seconds(known(p, "wait_seconds"), bounded=False)),
    (Column("exposed wire"), lambda p: _seconds(known(p, "wire_seconds"), bounded=False)),
    (Column("synchronised norm", narrow="sync. norm"), lambda p: _if_any(known(p, "norm_seconds"))),
    (Column("bubble"), lambda p: _if_any(known(p, "bubble_seconds"))),
    (Column("the rest"), lambda p: _if_any(known(p, "rest_seconds") if prediction_words.has_rest(p) else None)),
]
_RESOURCES: list[tuple[Column, Show]] = [
    (Column("memory"), lambda p: Cell(units.size(p.memory_bytes))),
    (Column("OOM chance"), lambda p: Cell(prediction_words.chance(p.oom_chance))),
    (Column("energy an epoch"), lambda p: _figure(p.joules_per_epoch, lambda joules: units.rate(joules, "J"))),
    (Column("cost an epoch"), lambda p: _figure(p.cost_per_epoch, units.money)),
]


def _finish_fields(end: Finish) -> JsonObject:
    """The time to finish beside its prediction; null where it is unavailable."""
    return {
        **attributes(end, "epochs", "work_seconds", "checkpoint_interval_seconds"),
        "finish_seconds": end.wall_seconds,
        **attributes(end, "low", "high", prefix="finish_seconds_"),
        **attributes(end, "failures", "lost_share", "cost", "reason", prefix="finish_"),
        "finish_label": "prior-driven",
        "finish_assumptions": [asdict(assumed) for assumed in end.assumptions],
    }


def _finish_table(forecast: Forecast, finishes: Sequence[Finish]) -> Table:
    """A row for each prediction; the notes say what all of it assumes."""
    by_prediction = {id(prediction): end for prediction, end in zip(forecast.predictions, finishes, strict=True)}
    # Assumptions about hosts differ with their number: those of the most hosts stand for all.
    assumed = {
        (prediction.series, taken.part): taken
        for prediction, end in zip(forecast.predictions, finishes, strict=True)
        for taken in end.assumptions
    }
    told = [f"Assumed: {taken.part}: {taken.taken}." for taken in assumed.values()]
    started = [prediction.trial for prediction in forecast.predictions if prediction.startup_seconds is not None]
    told += [OF_FORKS] if any(started_as_forks(trial) for trial in started) else []
    reasons = [f"Time to finish unavailable: {end.reason}." for end in finishes if end.reason]
    columns: list[tuple[str, Callable[[Finish], str]]] = [
        ("epochs alone", lambda end: units.seconds(end.work_seconds)),
        (
            "to finish",
            lambda end: _NEVER if end.wall_seconds is None and end.work_seconds else units.seconds(end.wall_seconds),
        ),
        ("90 % for one run", _finish_bounds),
        ("failures", lambda end: units.number(end.failures, 2)),
        ("lost", lambda end: units.percent(end.lost_share)),
        ("checkpoint every", lambda end: units.seconds(end.checkpoint_interval_seconds)),
        ("cost", lambda end: units.money(end.cost)),
    ]
    shown = [(Column(name), _of_finish(by_prediction, form)) for name, form in columns]
    title = f"Time to finish {units.counted(finishes[0].epochs, 'epoch')} (prior-driven)"
    return _table(forecast, shown, tuple(dict.fromkeys([*told, *reasons])), title)


def _of_finish(by_prediction: dict[int, Finish], form: Callable[[Finish], str]) -> Show:
    return lambda p: Cell(form(by_prediction[id(p)]))


def _finish_bounds(end: Finish) -> str:
    """The interval in the unit of its upper end, which may be never."""
    if end.work_seconds is None:
        return units.UNKNOWN
    if end.low is None or end.high is None:
        return f"{_NEVER if end.low is None else units.seconds(end.low)}{units.DASH}{_NEVER}"
    unit = units.time_unit([end.high])
    return f"{units.bounds(end.low, end.high, unit.text)} {unit.sign}"
