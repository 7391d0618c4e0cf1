"""Predictions in words: the meaning of labels, assumptions, unavailable figures, and how well such predictions did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from vitscale.engines.names import engine_name
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.layouts import share_of_global_batch
from vitscale.prediction.network.links import Link
from vitscale.prediction.results import BESIDE_STEPS, REST_TOLD, Assumption, Forecast, Label, Prediction, Score
from vitscale.present.units import counted, listed, number, percent, runs_of, share
from vitscale.trial.model_words import UNNAMED_MODEL, CountedModel, parameter_lines
from vitscale.trial.trial import Mode, TrainSpec, Trial

LABEL_MEANINGS: dict[Label, str] = {
    "interpolated": "between rank counts that were measured, on as many hosts",
    "extrapolated": "beyond what was measured; each part that decides it was measured or declared",
    "prior-driven": "a part that decides it was neither measured nor declared: it rests on arithmetic, or on "
    "clusters in general",
    "does not fit": "the model is far from measured points themselves; the intervals are wide enough to hold those",
}
INTERVALS_MEANING = (
    "Two intervals of 90 %: of the mean over many runs, and of one run still to be made, which also varies from run to "
    "run. Compare your own run with the second."
)
ASK_FOR_MORE = (
    "`vitscale predict` answers for other rank counts, models, engines and networks; the options named here are its."
)
FIELD_NAMES = {
    "step_seconds": "step time",
    "epoch_seconds": "epoch time",
    "images": "images",
    "steps_per_epoch": "steps per epoch",
    "images_per_second": "images/s",
    "speedup": "speedup",
    "efficiency": "efficiency",
    "compute_seconds": "compute",
    "wait_seconds": "exposed wait",
    "wire_seconds": "exposed wire",
    "norm_seconds": "synchronised norm",
    "bubble_seconds": "bubble",
    "rest_seconds": "the rest of a step",
    "memory_bytes": "memory",
    "memory_capacity_bytes": "the device's memory",
    "oom_chance": "the chance of running out of memory",
    "host_memory_bytes": "the host's memory",
    "host_oom_chance": "the chance that the host's memory does not suffice for what is offloaded",
    "joules_per_epoch": "energy",
    "cost_per_epoch": "cost",
    "startup_seconds": "start-up",
}


_MOST_LEFT_OUT = 4
_UNKNOWN_ENGINE = engine_name(TrainSpec.model_construct(engine="unknown"))
"""The name of a series whose import did not tell its engine."""


def measured_counts(series: Series) -> str:
    """Return the rank counts, hosts and traces of a series: "measured on 1, 2 and 4 ranks, 1 host"."""
    counts = _counted(sorted({point.gpus for point in series.points}))
    rank_noun = "rank" if counts == "1" else "ranks"
    hosts = sorted({point.nodes for point in series.points})
    host_range = f"{hosts[0]}" if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
    host_noun = "host" if hosts[-1] == 1 else "hosts"
    text = f"measured on {counts} {rank_noun}, {host_range} {host_noun}"
    trace_steps = sum(point.trace_steps for point in series.points)
    if not trace_steps:
        return text
    traces = "a trace" if len(series.points) == 1 else "traces"
    return f"{text}, in {counted(trace_steps, 'step')} of {traces}, profiler attached"


def trace_sentences(forecast: Forecast) -> tuple[str, ...]:
    """Return a sentence that predictions rest on traces alone, and what these cannot show.

    Empty where a point of the predicted series was measured otherwise.
    """
    predicted_names = {prediction.series for prediction in forecast.predictions}
    predicted_series = [series for series in forecast.evidence.series if series.name in predicted_names]
    if not predicted_series or not all(map(_is_of_traces, predicted_series)):
        return ()
    sentence = "Rests on profiler traces alone: a few steps, the profiler's cost in each."
    if all(map(_has_one_rank_count, predicted_series)):
        sentence += (
            " Each series has one rank count, so that nothing shows how its steps grow: import a trace of the same job "
            "on another count beside it."
        )
    return (sentence,)


def _is_of_traces(series: Series) -> bool:
    return all(point.trace_steps for point in series.points)


def _has_one_rank_count(series: Series) -> bool:
    return len({point.gpus for point in series.points}) == 1


def names_with_engine(evidence: Evidence) -> dict[str, str]:
    """Return name of each series -> the name to show.

    It has the engine that an option named in the place of the unknown engine of an import, unless another series
    already has that name.
    """
    names = {}
    for series in evidence.series:
        engine = engine_name(series.points[-1].trial.train)
        names[series.name] = series.name.replace(_UNKNOWN_ENGINE, engine)
    for old_name, new_name in names.items():
        if new_name in names:
            names[old_name] = old_name
    return names


def series_title(series: str, mode: Mode) -> str:
    """Name a series with its batch policy, unless its name ends in that already."""
    return series if series.endswith(mode) else f"{series}, {mode}"


def changed_settings(prediction: Prediction, series: Series) -> str:
    """Return what a prediction changes in the series that it continues: "with vit-b16, engine ddp"; "" for nothing."""
    measured_trial = series.points[-1].trial
    predicted_trial = prediction.trial
    changes = []
    if _model_names(predicted_trial) != _model_names(measured_trial):
        changes.append(predicted_trial.model.name or predicted_trial.model.hf or "another model")
    changes += _changed_training(predicted_trial, series)
    if predicted_trial.model.image_size != measured_trial.model.image_size:
        changes.append(f"{predicted_trial.model.image_size} pixels")
    if prediction.gpu is not None:
        changes.append(prediction.gpu)
    return f"with {', '.join(changes)}" if changes else ""


def _model_names(trial: Trial) -> tuple[str | None, ...]:
    return trial.model.name, trial.model.hf


def _changed_training(predicted_trial: Trial, series: Series) -> list[str]:
    """Return the fields of the training that differ from the series': "engine ddp", "micro_batch 16"."""
    fields = ["engine", "zero_stage", "precision", "micro_batch", "grad_accum"]
    usual = {name: getattr(series.points[-1].trial.train, name) for name in fields}
    if series.mode == "strong-global":
        usual |= share_of_global_batch(series, predicted_trial.layout.data)
        fields.remove("grad_accum")  # it follows from the micro-batch
    values = {name: getattr(predicted_trial.train, name) for name in fields}
    return [f"{name} {value}" for name, value in values.items() if value != usual[name]]


def has_rest(prediction: Prediction) -> bool:
    """Whether a share of a step that is not negligible is in none of its parts."""
    rest_seconds = prediction.rest_seconds
    return rest_seconds is not None and abs(rest_seconds.value) > REST_TOLD * prediction.step_seconds.value


def parameter_lines_of(predictions: Iterable[Prediction]) -> list[str]:
    """Return lines on the predicted models: "vit-b16: 85,806,346 parameters (measured)"; none for an unnamed model."""
    models: dict[CountedModel, None] = {}
    for prediction in predictions:
        trial = prediction.trial
        if prediction.parameters is not None or not trial.model.unknown:
            models[CountedModel(trial.model_name or UNNAMED_MODEL, prediction.parameters)] = None
    return parameter_lines(models)


def label_sentences(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Return the meaning of each label that occurs, once."""
    used = {prediction.label for prediction in predictions}
    return tuple(f"{label}: {meaning}." for label, meaning in LABEL_MEANINGS.items() if label in used)


def network_sentence(evidence: Evidence) -> str:
    """Return a sentence on the network, inside a host and between hosts, that predictions rest on, with its sources."""
    inside_host = _link_in_words(evidence.network.inside, "inside a host")
    between_hosts = _link_in_words(evidence.network.across, "between hosts")
    return f"Network: {inside_host}; {between_hosts}."


def _link_in_words(link: Link, location: str) -> str:
    """Return "between hosts 25GbE"; the description of an assumed link names its location already."""
    return link.described if link.source == "assumed" else f"{location} {link.described}"


def assumption_sentences(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Return a sentence for each assumption, with what it stands in for; each once."""
    return tuple(f"Assumed: {assumption.part}: {assumption.taken}." for assumption in distinct_assumptions(predictions))


def distinct_assumptions(predictions: Iterable[Prediction]) -> tuple[Assumption, ...]:
    """Return the different assumptions, in order of first mention."""
    distinct: dict[Assumption, None] = {}
    for prediction in predictions:
        distinct |= dict.fromkeys(prediction.assumptions)
    return tuple(distinct)


def next_measurement(predictions: Iterable[Prediction]) -> str:
    """Return a sentence on the measurement that would narrow the intervals most; empty where nothing is assumed.

    It is that of the first assumption about steps at the most ranks with one.
    """
    most_ranks_first = sorted(predictions, key=lambda prediction: prediction.gpus)[::-1]
    for prediction in most_ranks_first:
        for assumption in prediction.assumptions:
            if assumption.part not in BESIDE_STEPS:
                return f"What would narrow it most: {assumption.measurement}."
    return ""


class _Gap(NamedTuple):
    """A reason, and the rank counts at which figures are unavailable for it. Figures of one gap share a sentence."""

    reason: str
    gpus: tuple[int, ...]


def unavailable_sentences(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """Return sentences on the figures that are unavailable, and why, one for each reason.

    Example: "Energy and cost at 8 ranks: unavailable: no power was measured." The rank counts are left out where all
    predictions are affected.
    """
    figures_by_gap: dict[_Gap, list[str]] = {}
    for field, figure in FIELD_NAMES.items():
        for gap in _gaps(field, predictions):
            figures_by_gap.setdefault(gap, []).append(figure)
    all_gpus = tuple(prediction.gpus for prediction in predictions)
    sentences = []
    for gap, figures in figures_by_gap.items():
        counts = "" if gap.gpus == all_gpus else f" at {_counted_ranks(gap.gpus)}"
        sentence = f"{listed(figures, len(figures))}{counts}: unavailable: {gap.reason}."
        sentences.append(sentence[:1].upper() + sentence[1:])
    return tuple(sentences)


def _gaps(field: str, predictions: Sequence[Prediction]) -> list[_Gap]:
    """Return the reasons why one field is unavailable, each with the rank counts of the predictions that lack it."""
    gpus_by_reason: dict[str, list[int]] = {}
    for prediction in predictions:
        if field in prediction.reasons:
            gpus_by_reason.setdefault(prediction.reasons[field], []).append(prediction.gpus)
    return [_Gap(reason, tuple(gpus)) for reason, gpus in gpus_by_reason.items()]


def _counted_ranks(gpus: Sequence[int]) -> str:
    return f"{_counted(gpus)} rank{'' if tuple(gpus) == (1,) else 's'}"


def _counted(gpus: Sequence[int]) -> str:
    """Return rank counts in rising order, three or more consecutive ones as a range: "1 to 4 and 8"."""
    parts: list[str] = []
    for consecutive in runs_of(gpus):
        if len(consecutive) > 2:
            parts.append(f"{consecutive[0]:,} to {consecutive[-1]:,}")
        else:
            parts += [f"{count:,}" for count in consecutive]
    return listed(parts, len(parts))


def score_sentences(forecast: Forecast) -> tuple[str, ...]:
    """Return a sentence for each score; before three or more, one on all of them."""
    mode_by_series = {series.name: series.mode for series in forecast.evidence.series}
    shown_names = names_with_engine(forecast.evidence)
    sentences = []
    for scored in forecast.scores:
        renamed_score = replace(scored, series=shown_names.get(scored.series, scored.series))
        sentences.append(score_sentence(renamed_score, mode_by_series.get(scored.series)))
    if len(sentences) < 3:
        return tuple(sentences)
    return (_all_scores(forecast.scores), *sentences)


def _all_scores(scores: Sequence[Score]) -> str:
    """Return a sentence on the scores of all series, each with the weight of its runs."""
    runs = sum(scored.runs for scored in scores)
    summed_errors = sum(scored.runs * scored.mean_absolute_percentage_error for scored in scores)
    mean_error = summed_errors / runs
    runs_inside = sum(scored.held for scored in scores)
    return (
        f"Of {runs} runs on more ranks than were fitted, in {len(scores)} series, {runs_inside} lay inside the 90 % "
        f"interval of a run; predictions were off by {percent(mean_error, 1)} in the mean."
    )


def score_sentence(scored: Score, mode: Mode | None = None) -> str:
    """Return sentences on how far predictions from the smaller rank counts were off at the larger ones.

    The larger rank counts were measured, but held out of the fit. The second sentence is on the error of the simplest
    prediction, that a step lasts as long on any number of ranks. It is left out for a fixed global batch, where a
    rank's step shrinks.

    Example: "ddp: predicting 4 and 8 ranks from 1 and 2 was off by 2.7 % in the mean, by 4.1 % at worst; 5 of 6 runs
    lay inside the 90 % interval of a run. Constant seconds per step: 31.0 %."
    """
    sentence = (
        f"{scored.series}: predicting {_counted_ranks(scored.held_out_gpus)} from {_counted(scored.fitted_gpus)} "
        f"was off by {_error_in_words(scored)}; {_runs_inside_in_words(scored)} inside the 90 % interval of a run."
    )
    if mode == "strong-global":
        return sentence
    return f"{sentence} Constant seconds per step: {percent(scored.baseline_error, 1)}."


def _error_in_words(scored: Score) -> str:
    """Return "2.7 % in the mean, by 4.1 % at worst"; the error alone where there was one run only."""
    mean_error = percent(scored.mean_absolute_percentage_error, 1)
    if scored.runs <= 1:
        return mean_error
    return f"{mean_error} in the mean, by {percent(scored.worst_error, 1)} at worst"


def _runs_inside_in_words(scored: Score) -> str:
    """Return how many of the held-out runs lay inside their intervals: "5 of 6 runs lay", "the run lay"."""
    if scored.runs <= 1:
        return "the run lay" if scored.held else "no run lay"
    return f"{scored.held} of {scored.runs} runs lay"


def left_out_sentences(reasons: Sequence[str]) -> tuple[str, ...]:
    """Return sentences on what was requested and cannot be predicted: the first few reasons, and how many more."""
    sentences = [f"Left out: {reason}" for reason in reasons[:_MOST_LEFT_OUT]]
    further_reasons = len(reasons) - _MOST_LEFT_OUT
    if further_reasons > 0:
        sentences.append(f"Left out: {further_reasons} more of the kind.")
    return tuple(sentences)


def chance_text(value: float | None) -> str:
    """Format a chance of running out of memory: "<1 %", ">99 %"."""
    return ">99 %" if value is not None and 0.995 <= value < 1 else percent(value)


def efficiency_text(value: float) -> str:
    """Format an efficiency with two decimals; below 0.1 with two digits."""
    return share(value) if value >= 0.1 else number(value, 2)


class EnergyUnit(NamedTuple):
    """A unit of energy."""

    joules: float
    sign: str


_ENERGY_UNITS = (EnergyUnit(1e9, "GJ"), EnergyUnit(1e6, "MJ"), EnergyUnit(1e3, "kJ"), EnergyUnit(1.0, "J"))


def energy_unit(joules: float) -> EnergyUnit:
    """Return the unit in which `joules` reads best."""
    for unit in _ENERGY_UNITS:
        if joules >= unit.joules:
            return unit
    return _ENERGY_UNITS[-1]
