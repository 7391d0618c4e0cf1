"""Predictions in words: what labels mean, what was assumed, what is unavailable, how well such predictions did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from vitscale.engines.names import engine_name
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.layouts import share_of_global_batch
from vitscale.prediction.results import BESIDE_STEPS, REST_TOLD, Assumption, Forecast, Label, Prediction, Score
from vitscale.present.units import counted, listed, number, percent, runs_of, share
from vitscale.trial.trial import Mode, TrainSpec

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
    "joules_per_epoch": "energy",
    "cost_per_epoch": "cost",
    "startup_seconds": "start-up",
}


_MOST_LEFT_OUT = 4
_UNKNOWN_ENGINE = engine_name(TrainSpec.model_construct(engine="unknown"))
"""What a series is called whose import did not tell its engine."""


def measured(series: Series) -> str:
    """What a series was measured at: "measured on 1, 2 and 4 ranks of 1 host"."""
    counts = _counted(sorted({point.gpus for point in series.points}))
    hosts = sorted({point.nodes for point in series.points})
    of = f"{hosts[0]}" if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
    told = f"measured on {counts} rank{'' if counts == '1' else 's'}, {of} host{'' if hosts[-1] == 1 else 's'}"
    if steps := sum(point.trace_steps for point in series.points):
        told += (
            f", in {counted(steps, 'step')} of {'a trace' if len(series.points) == 1 else 'traces'}, profiler attached"
        )
    return told


def traces(forecast: Forecast) -> tuple[str, ...]:
    """A sentence that predictions rest on traces alone, and what these cannot say; empty where they do not."""
    asked = {prediction.series for prediction in forecast.predictions}
    series = [curve for curve in forecast.evidence.series if curve.name in asked]
    if not series or not all(point.trace_steps for curve in series for point in curve.points):
        return ()
    said = "Rests on profiler traces alone: a few steps, the profiler's cost in each."
    if all(len({point.gpus for point in curve.points}) == 1 for curve in series):
        said += (
            " Each series has one rank count, so that nothing shows how its steps grow: import a trace of the same job "
            "on another count beside it."
        )
    return (said,)


def names_with_engine(evidence: Evidence) -> dict[str, str]:
    """Series -> its name with the engine that an option named, in the place of the one that its import did not tell.

    A name that another series has already is not taken.
    """
    names = {}
    for series in evidence.series:
        engine = engine_name(series.points[-1].trial.train)
        names[series.name] = series.name.replace(_UNKNOWN_ENGINE, engine)
    return {name: name if shown != name and shown in names else shown for name, shown in names.items()}


def title(series: str, mode: Mode) -> str:
    """A series by name and batch policy; where names were not enough, they contain the policy already."""
    return series if series.endswith(mode) else f"{series}, {mode}"


def changed(prediction: Prediction, series: Series) -> str:
    """What a prediction changes in the series that it continues: "with vit-b16, engine ddp"; empty for nothing."""
    own, asked = series.points[-1].trial, prediction.trial
    fields = ["engine", "zero_stage", "precision", "micro_batch", "grad_accum"]
    usual = {name: getattr(own.train, name) for name in fields}
    if series.mode == "strong-global":
        usual |= share_of_global_batch(series, asked.layout.data)
        fields.remove("grad_accum")  # it follows from the micro-batch
    values = {name: getattr(asked.train, name) for name in fields}
    told = [f"{name} {value}" for name, value in values.items() if usual[name] != value]
    if (asked.model.name, asked.model.hf) != (own.model.name, own.model.hf):
        told.insert(0, asked.model.name or asked.model.hf or "another model")
    if asked.model.image_size != own.model.image_size:
        told.append(f"{asked.model.image_size} pixels")
    if prediction.gpu is not None:
        told.append(prediction.gpu)
    return f"with {', '.join(told)}" if told else ""


def tells_rest(prediction: Prediction) -> bool:
    """Whether what of a step no part has is more than next to nothing."""
    own = prediction.rest_seconds
    return own is not None and abs(own.value) > REST_TOLD * prediction.step_seconds.value


def labels(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """The meaning of each label that occurs, once."""
    used = {prediction.label for prediction in predictions}
    return tuple(f"{label}: {meaning}." for label, meaning in LABEL_MEANINGS.items() if label in used)


def network(evidence: Evidence) -> str:
    """What is taken for the network, and its source."""
    links = (("inside a host", evidence.network.inside), ("between hosts", evidence.network.across))
    told = [link.described if link.source == "assumed" else f"{where} {link.described}" for where, link in links]
    return f"Network: {'; '.join(told)}."


def assumptions(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Each assumption about what no measurement tells, and what was taken for it; each once."""
    return tuple(f"Assumed: {assumption.part}: {assumption.taken}." for assumption in distinct_assumptions(predictions))


def distinct_assumptions(predictions: Iterable[Prediction]) -> tuple[Assumption, ...]:
    """The different assumptions, in order of first mention."""
    return tuple(dict.fromkeys(assumed for prediction in predictions for assumed in prediction.assumptions))


def measure_next(predictions: Iterable[Prediction]) -> str:
    """The one measurement that would narrow the interval at the most ranks most; empty where nothing is assumed."""
    by_ranks = sorted(predictions, key=lambda prediction: prediction.gpus)
    of_steps = [[one for one in prediction.assumptions if one.part not in BESIDE_STEPS] for prediction in by_ranks]
    widest = [assumed[0] for assumed in of_steps if assumed]
    return f"What would narrow it most: {widest[-1].measurement}." if widest else ""


class _Gap(NamedTuple):
    """Figures that are unavailable for the same reason, at the same rank counts, share one sentence."""

    reason: str
    gpus: tuple[int, ...]


def unavailable(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """Sentences on the figures that are unavailable, and why, one for each reason.

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
        counts = "" if gap.gpus == all_gpus else f" at {_counts(gap.gpus)}"
        sentence = f"{listed(figures, len(figures))}{counts}: unavailable: {gap.reason}."
        sentences.append(sentence[:1].upper() + sentence[1:])
    return tuple(sentences)


def _gaps(field: str, predictions: Sequence[Prediction]) -> list[_Gap]:
    """The reasons why one field is unavailable, each with the rank counts of the predictions that lack it."""
    gpus_by_reason: dict[str, list[int]] = {}
    for prediction in predictions:
        if field in prediction.reasons:
            gpus_by_reason.setdefault(prediction.reasons[field], []).append(prediction.gpus)
    return [_Gap(reason, tuple(gpus)) for reason, gpus in gpus_by_reason.items()]


def _counts(gpus: Sequence[int]) -> str:
    return f"{_counted(gpus)} rank{'' if tuple(gpus) == (1,) else 's'}"


def _counted(gpus: Sequence[int]) -> str:
    """Rank counts in rising order; three or more neighbours as a range: "1 to 4 and 8"."""
    parts: list[str] = []
    for run in runs_of(gpus):
        parts += [f"{run[0]:,} to {run[-1]:,}"] if len(run) > 2 else [f"{count:,}" for count in run]
    return listed(parts, len(parts))


def scores(forecast: Forecast) -> tuple[str, ...]:
    """All scores as sentences; before three or more, what they come to."""
    modes = {series.name: series.mode for series in forecast.evidence.series}
    names = names_with_engine(forecast.evidence)
    single = tuple(
        score(replace(scored, series=names.get(scored.series, scored.series)), modes.get(scored.series))
        for scored in forecast.scores
    )
    if len(single) < 3:
        return single
    runs = sum(scored.runs for scored in forecast.scores)
    error = sum(scored.runs * scored.mean_absolute_percentage_error for scored in forecast.scores) / runs
    held = sum(scored.held for scored in forecast.scores)
    return (
        f"Of {runs} runs on more ranks than were fitted, in {len(single)} series, {held} lay inside the 90 % interval "
        f"of a run; predictions were off by {percent(error, 1)} in the mean.",
        *single,
    )


def score(scored: Score, mode: Mode | None = None) -> str:
    """How far predictions from the smaller counts were off at the larger ones, beside the simplest baseline's error.

    With a fixed global batch a rank's step shrinks, so that constant seconds per step are no baseline.
    """
    held_out = _counts(scored.held_out_gpus)
    off = f"was off by {percent(scored.mean_absolute_percentage_error, 1)}"
    if scored.runs > 1:
        off += f" in the mean, by {percent(scored.worst_error, 1)} at worst"
    inside = (
        f"{scored.held} of {scored.runs} runs lay" if scored.runs > 1 else f"{'the' if scored.held else 'no'} run lay"
    )
    return (
        f"{scored.series}: predicting {held_out} from {_counted(scored.fitted_gpus)} {off}; "
        f"{inside} inside the 90 % interval of a run."
        + ("" if mode == "strong-global" else f" Constant seconds per step: {percent(scored.baseline_error, 1)}.")
    )


def left_out(reasons: Sequence[str]) -> tuple[str, ...]:
    """What was asked for and cannot be predicted: the first few reasons, and how many more."""
    more = len(reasons) - _MOST_LEFT_OUT
    told = tuple(f"Left out: {reason}" for reason in reasons[:_MOST_LEFT_OUT])
    return (*told, f"Left out: {more} more of the kind.") if more > 0 else told


def chance(value: float | None) -> str:
    """A chance of running out of memory: "<1 %", ">99 %"."""
    return ">99 %" if value is not None and 0.995 <= value < 1 else percent(value)


def efficiency(value: float) -> str:
    """An efficiency with two decimals; with two digits where two decimals say nothing any more."""
    return share(value) if value >= 0.1 else number(value, 2)


def energy_unit(joules: float) -> tuple[float, str]:
    """Joules per unit of energy, and the sign of the unit in which `joules` reads best."""
    return next((unit for unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")) if joules >= unit[0]), (1.0, "J"))
