"""Predictions as tables, one per series, for the page and Markdown.

The contract's JSON objects of predictions and their scores are made here too; `vitscale predict --json` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from vitscale.engines.names import option_if_read
from vitscale.pages import prediction_words, sentences
from vitscale.prediction.results import Forecast, Prediction, Score
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import Cell, Column, Table, table
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Mode

_WIDE_RANGE = 100


def prediction_tables(forecast: Forecast) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """One table for each series, in the order of the predictions, and the notes that hold for all series.

    A row is a rank count; small in a cell stand the 90 % intervals of the mean and of one run. Notes say what is
    assumed, which measurement would replace most of it, and what is unavailable.
    """
    series = dict.fromkeys((prediction.series, prediction.mode) for prediction in forecast.predictions)
    tables = [_table([p for p in forecast.predictions if (p.series, p.mode) == key], forecast) for key in series]
    several = tables if len(tables) > 1 else []
    alike = tuple(note for own in several[:1] for note in own.notes if all(note in other.notes for other in several))
    return tuple(replace(own, notes=tuple(note for note in own.notes if note not in alike)) for own in tables), alike


def _table(predictions: Sequence[Prediction], forecast: Forecast) -> Table:
    first = predictions[0]
    own = next((series for series in forecast.evidence.series if series.name == first.series), None)
    title = prediction_words.title(first.series, first.mode)
    if changed := prediction_words.changed(first, own) if own else "":
        title = f"{title}; {changed}"
    columns = dict(
        (
            (Column("ranks"), [Cell(sentences.ranks_on_hosts(prediction.trial.world)) for prediction in predictions]),
            _seconds("step", [known(prediction, "step_seconds") for prediction in predictions]),
            _seconds("epoch", [prediction.epoch_seconds for prediction in predictions]),
            _figures("images/s", [prediction.images_per_second for prediction in predictions]),
            _figures("speedup", [prediction.speedup for prediction in predictions]),
            _figures("efficiency", [prediction.efficiency for prediction in predictions], prediction_words.efficiency),
            *_parts(predictions),
            _memory([prediction.memory_bytes for prediction in predictions]),
            (Column("chance of OOM"), [Cell(prediction_words.chance(each.oom_chance)) for each in predictions]),
            _energy([prediction.joules_per_epoch for prediction in predictions]),
            _figures("cost/epoch", [prediction.cost_per_epoch for prediction in predictions]),
            (Column("label", words=True), [Cell(prediction.label) for prediction in predictions]),
        )
    )
    notes = (
        *prediction_words.assumptions(predictions),
        prediction_words.measure_next(predictions),
        *prediction_words.unavailable(predictions),
    )
    return table(
        tuple(columns),
        list(zip(*columns.values(), strict=True)),
        title=f"{title}: {prediction_words.measured(own)}" if own else title,
        notes=[note for note in notes if note],
        folded=True,
    )


_Figures = tuple[Column, list[Cell]]
"""One figure at all rank counts."""


def known(predicted: Prediction, field: str) -> Estimate | None:
    """A figure of a prediction; None where a reason says that it is unavailable."""
    figure: Estimate | None = None if field in predicted.reasons else getattr(predicted, field)
    return figure


def _memory(sizes: Sequence[int | None]) -> _Figures:
    large = max((size for size in sizes if size is not None), default=0) >= 2**30
    texts = (units.UNKNOWN if size is None else units.number(size / (2**30 if large else 2**20)) for size in sizes)
    return Column("memory", "GiB" if large else "MiB"), list(map(Cell, texts))


def _seconds(name: str, estimates: Sequence[Estimate | None]) -> _Figures:
    return _in_unit(name, estimates, _unit([estimate.value for estimate in estimates if estimate is not None]))


def _unit(values: Sequence[float]) -> units.Unit:
    """The unit in which the largest value reads best; over a wide range, the one in which the middle does."""
    if not values or max(values) <= _WIDE_RANGE * min(values):
        return units.time_unit(values)
    return units.time_unit([math.sqrt(min(values) * max(values))])


def _parts(predictions: Sequence[Prediction]) -> list[_Figures]:
    """What a step is made of, all in one unit, so that the columns compare."""
    parts = {
        "compute": [known(prediction, "compute_seconds") for prediction in predictions],
        "exposed wait": [known(prediction, "wait_seconds") for prediction in predictions],
        "exposed wire": [known(prediction, "wire_seconds") for prediction in predictions],
    }
    rare = {
        "synchronised norm": [known(prediction, "norm_seconds") for prediction in predictions],
        "bubble": [known(prediction, "bubble_seconds") for prediction in predictions],
    }
    parts |= {name: part for name, part in rare.items() if any(each is not None and each.value > 0 for each in part)}
    if any(map(prediction_words.tells_rest, predictions)):
        parts["the rest"] = [known(prediction, "rest_seconds") for prediction in predictions]
    unit = _unit([each.value for part in parts.values() for each in part if each is not None and each.value > 0])
    return [_in_unit(name, estimates, unit) for name, estimates in parts.items()]


def _energy(estimates: Sequence[Estimate | None]) -> _Figures:
    factor, sign = prediction_words.energy_unit(
        max((estimate.value for estimate in estimates if estimate is not None), default=0.0)
    )
    return _in_unit("energy/epoch", estimates, units.Unit(1 / factor, sign))


def _in_unit(name: str, estimates: Sequence[Estimate | None], unit: units.Unit) -> _Figures:
    _, cells = _figures(name, [estimate.times(unit.factor) if estimate else None for estimate in estimates])
    return Column(name, unit.sign), cells


def _figures(name: str, estimates: Sequence[Estimate | None], show: Callable[[float], str] = units.number) -> _Figures:
    return Column(name), [
        Cell(show(each.value), each.bounds(show), run=each.one_run.bounds(show)) if each else Cell(units.UNKNOWN)
        for each in estimates
    ]


Object = dict[str, Any]


def scores(forecast: Forecast) -> list[Object]:
    """How well such predictions did, where this is known."""
    modes = {series.name: series.mode for series in forecast.evidence.series}
    return [_score(score, modes.get(score.series)) for score in forecast.scores]


def prediction(predicted: Prediction) -> Object:
    """One series at one rank count; unavailable figures are null, and `reasons` says why."""
    train = predicted.trial.train
    return {
        **attributes(predicted, "series", "mode"),
        "labels": dict(predicted.labels),
        **attributes(predicted, "gpus", "nodes", "gpu", "label"),
        "engine": train.engine,
        "zero_stage": option_if_read(train, "zero_stage"),
        **attributes(train, "precision", "micro_batch", "grad_accum"),
        "global_batch": predicted.trial.global_batch,
        "image_size": predicted.trial.model.image_size,
        **attributes(predicted, "images", "steps_per_epoch"),
        **_estimates(predicted, "epoch_seconds", "step_seconds", "images_per_second", "speedup", "efficiency"),
        **_estimates(predicted, *(f"{part}_seconds" for part in ("compute", "wait", "wire", "norm", "bubble", "rest"))),
        **attributes(predicted, "memory_bytes", "memory_capacity_bytes", "oom_chance"),
        **_estimates(predicted, "joules_per_epoch", "cost_per_epoch", "startup_seconds"),
        "effective_draws": round(predicted.effective_draws),
        "assumptions": [asdict(assumed) for assumed in predicted.assumptions],
        "reasons": dict(predicted.reasons),
    }


def _estimates(predicted: Prediction, *names: str) -> dict[str, float | None]:
    """These figures, each with the interval of a future run (`_low`, `_high`) and that of the mean."""
    parts = {"": "value", "_low": "future_low", "_high": "future_high", "_mean_low": "low", "_mean_high": "high"}
    figures = {name: known(predicted, name) for name in names}
    return {
        f"{name}{end}": getattr(figure, part) if figure else None
        for name, figure in figures.items()
        for end, part in parts.items()
    }


def _score(score: Score, mode: Mode | None) -> Object:
    """One score, with its sentence."""
    return {
        **asdict(score),
        "fitted_gpus": list(score.fitted_gpus),
        "held_out_gpus": list(score.held_out_gpus),
        "sentence": prediction_words.score(score, mode),
    }
