"""Questions as a user asks them (another model, image size, batch, engine), answered from evidence.

Answers to what a report shows unasked; and how well such answers do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from vitscale.analysis.statistics import t_quantile
from vitscale.base.forks import spread
from vitscale.engines import ENGINES, of_engine
from vitscale.errors import RequestError, check_within, nearest, shown, unknown
from vitscale.prediction.evidence import HOSTS, IMAGE_SIZE, MICRO_BATCH, PRECISION, Evidence, MeasuredPoint, Series
from vitscale.prediction.fitting import Fitted, FittedSeries, fit_series
from vitscale.prediction.gpu_types import gpu_type
from vitscale.prediction.predicting import Question, can_grow, predict
from vitscale.prediction.results import CONFIDENCE, Forecast, Prediction, Score, predicted
from vitscale.prediction.variants import differing
from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.trial.model_cost import counted
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import Precision, TrainSpec, world_of_hosts

_FRACTIONS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""How many times the largest measured rank count a report looks ahead."""


_NO_MODELS: Mapping[str, ModelSpec] = MappingProxyType({})
_MANY_SERIES = 4
"""Number of series from which forks of this process are worth their cost."""


def answer(fitted: Fitted, questions: Sequence[Question]) -> Forecast:
    """Each question answered, and how well such answers did.

    With several questions, series that cannot have the rank counts asked for are left out and named.

    Raises:
        RequestError: no question can be answered.
    """
    evidence = fitted.evidence
    answered, left_out = predictions(fitted, questions)
    asked_about = {question.series for question in questions}
    judged = replace(evidence, series=tuple(series for series in evidence.series if asked_about & {series.name, None}))
    return Forecast(evidence, answered, score(judged), left_out)


def predictions(fitted: Fitted, questions: Sequence[Question]) -> tuple[tuple[Prediction, ...], tuple[str, ...]]:
    """(the predictions, why others cannot be made), as `answer` has them.

    Raises:
        RequestError: no question can be answered.
    """
    answered: list[Prediction] = []
    refused: list[RequestError] = []
    for asked in questions:
        possible, why = _as_far_as_possible(fitted, asked)
        answered += possible
        refused += why
        if why and len(questions) == 1:
            raise why[0]
    if refused and not answered:
        raise refused[0]
    return tuple(answered), tuple(dict.fromkeys([*fitted.evidence.left_out, *map(str, refused)]))


def forecast(fitted: Fitted) -> Forecast | None:
    """What a report shows unasked: each series from its smallest measured rank count to eight times its largest.

    None where nothing was measured, or nothing lies beyond it. Rank counts that a series cannot have (its global batch
    does not divide) are left out.
    """
    evidence = fitted.evidence

    def ahead(series: Series) -> tuple[FittedSeries | None, tuple[Prediction, ...], Score | None]:
        score = score_series(series, evidence)
        if not can_grow(series):
            return None, (), score
        asked = Question(gpus=_counts(series), series=series.name)
        return fitted.series[series.name], _as_far_as_possible(fitted, asked)[0], score

    answers = spread(ahead, evidence.series, fewest=_MANY_SERIES)
    fitted.keep([known for known, _, _ in answers if known is not None])
    predicted = [
        prediction
        for series, (_, of_series, _) in zip(evidence.series, answers, strict=True)
        if any(prediction.gpus > series.points[-1].gpus for prediction in of_series)
        for prediction in of_series
    ]
    scores = tuple(score for _, _, score in answers if score is not None)
    return Forecast(evidence, tuple(predicted), scores) if predicted else None


def _as_far_as_possible(fitted: Fitted, asked: Question) -> tuple[tuple[Prediction, ...], list[RequestError]]:
    """The predictions that can be made, and why others cannot."""
    try:
        return predict(fitted, asked), []
    except RequestError as error:
        if len(asked.gpus) == 1:
            return (), [RequestError(f"{asked.series}: {error}")]
    alone = [_as_far_as_possible(fitted, replace(asked, gpus=(gpus,))) for gpus in asked.gpus]
    return tuple(prediction for some, _ in alone for prediction in some), [error for _, why in alone for error in why]


def _counts(series: Series) -> tuple[int, ...]:
    """The measured counts, and beyond them multiples of the largest."""
    largest = series.points[-1].gpus
    beyond = {int(largest * times) for times in _FRACTIONS if (largest * times).is_integer()}
    return tuple(sorted(beyond | {point.gpus for point in series.points}))


_FEWEST = 2
"""Least rank counts to fit on, and to tell how constant seconds per step are."""


def score(evidence: Evidence) -> tuple[Score, ...]:
    """Scores of series with enough rank counts: counts up to half of the largest are fitted, the others held out."""
    return tuple(own for series in evidence.series if (own := score_series(series, evidence)) is not None)


def score_series(series: Series, evidence: Evidence) -> Score | None:
    """One series' score; None where fewer than two rank counts are at most half of the largest."""
    largest = max(point.gpus for point in series.points)
    known = tuple(point for point in series.points if 2 * point.gpus <= largest)
    if len({point.gpus for point in known}) < _FEWEST:
        return None
    held_out = [point for point in series.points if point not in known]
    fitted = fit_series(replace(series, points=known), evidence)
    baseline = constant_seconds_per_step(known)
    errors, base_errors, scores, base_scores, held = list[float](), list[float](), list[float](), list[float](), 0
    for point in held_out:
        asked = Question((point.gpus,), nodes_of=point.trial.world.ranks_per_node, series=series.name)
        said = predict(Fitted(evidence, {series.name: fitted}), asked)[0].step_seconds
        low, high = said.future_ends
        for seconds in point.step_seconds:
            errors.append(abs(said.value / seconds - 1))
            base_errors.append(abs(baseline.value / seconds - 1))
            scores.append(interval_score(low, high, seconds))
            base_scores.append(interval_score(*baseline.future_ends, seconds))
            held += low <= seconds <= high
    return Score(
        series=series.name,
        fitted_gpus=tuple(point.gpus for point in known),
        held_out_gpus=tuple(point.gpus for point in held_out),
        runs=len(errors),
        mean_absolute_percentage_error=statistics.fmean(errors),
        worst_error=max(errors),
        held=held,
        interval_score=statistics.fmean(scores),
        baseline_error=statistics.fmean(base_errors),
        baseline_interval_score=statistics.fmean(base_scores),
    )


def interval_score(low: float, high: float, actual: float) -> float:
    """The width of a 90 % interval and, for what lies outside, 20 times the distance to it, over the actual value.

    Gneiting & Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation" (2007), equation 43.
    """
    outside = max(0.0, low - actual) + max(0.0, actual - high)
    return (high - low + 2 / (1 - CONFIDENCE) * outside) / actual


def constant_seconds_per_step(points: Sequence[MeasuredPoint]) -> Estimate:
    """The simplest honest prediction: a step takes what it took; the interval is Student's t of the logarithms.

    It means something only where the micro-batch is the same at all points, as it is but for strong-global.
    """
    steps = [seconds for point in points for seconds in point.step_seconds]
    middle = statistics.median(steps)
    if len(steps) < 2:
        return predicted(middle, middle, middle, 0.0, math.inf)
    logs = [math.log(seconds) for seconds in steps]
    half = t_quantile(len(logs) - 1, (1 + CONFIDENCE) / 2) * statistics.stdev(logs)
    mean, future = half / math.sqrt(len(logs)), half * math.sqrt(1 + 1 / len(logs))
    return predicted(
        middle, middle * math.exp(-mean), middle * math.exp(mean), middle * math.exp(-future), middle * math.exp(future)
    )


_MOST_A_PRICE = 1e9


@dataclass(frozen=True)
class Changes:
    """What is to differ, as on the command line; None: as measured."""

    model: str | None = None
    """A model by name: of vitscale, timm, torchvision or the hub; or the folder of a Hugging Face model."""
    image_size: int | None = None
    """Pixels a side."""
    engine: str | None = None
    zero_stage: int | None = None
    """DeepSpeed's ZeRO stage, 0 to 3."""
    precision: str | None = None
    """fp32, bf16, bf16-params or fp16."""
    micro_batch: int | None = None
    """Images per rank and micro-step."""
    grad_accum: int | None = None
    """Micro-steps per optimizer step."""
    device: str | None = None
    """Another type of GPU: A100-SXM4-80GB, H100, L4."""
    parameters: str | None = None
    """Number of parameters of a model that nothing counts here: "110M"; of the one that `model` names, if any."""

    @property
    def asks_for_model(self) -> bool:
        """Whether they ask for another model, by its name or by the size of its images."""
        return self.model is not None or self.image_size is not None


class StatedFacts(NamedTuple):
    """Evidence with facts that a command line states of measured runs."""

    evidence: Evidence
    changes: Changes
    """What the command line still asks for beyond that evidence: another model, another batch."""


def stated_parameters(evidence: Evidence, changes: Changes) -> int | None:
    """Return the number of parameters that the options state; None where they state none.

    Raises:
        RequestError: it is no number, or every model is known; or another change cannot be.
    """
    count = None if changes.parameters is None else counted(changes.parameters)
    if count is not None and changes.model is None:
        _refuse_parameters_of_known_models(evidence, changes)
    _check(changes)
    return count


def _refuse_parameters_of_known_models(evidence: Evidence, changes: Changes) -> None:
    """Refuse `--parameters` where no import left its model open.

    Raises:
        RequestError: every model is known.
    """
    models = [series.points[-1].trial.model for series in evidence.series]
    if any(model.unknown for model in models):
        return
    known = ", ".join(sorted({model.name or "a folder's" for model in models}))
    what = f"--parameters {shown(changes.parameters or '')}: the model is known ({known})"
    raise RequestError(what, next_step="Leave it out; --model NAME asks for another")


def with_stated_facts(
    evidence: Evidence,
    changes: Changes,
    nodes_of: int | None = None,
    models: Mapping[str, ModelSpec] = _NO_MODELS,
) -> StatedFacts:
    """Takes facts that an import's files left out as if they were measured.

    These are its engine, its model or parameters, and what the import assumed: precision, image size, and that there
    was one host. An assumption is no measurement, so that nothing is converted from it.

    Args:
        evidence: what is recorded.
        changes: what the options say.
        nodes_of: ranks on a full host, if said.
        models: trial identity -> the model that `changes` state for it, found (`model_requests.requests_by_trial`).

    Returns:
        The evidence with these facts, and the changes; those still apply to what a series knows already.

    Raises:
        RequestError: the parameters are no number, or every model is known.
    """
    count = stated_parameters(evidence, changes)
    series = []
    for recorded in evidence.series:
        points = []
        for point in recorded.points:
            model = models.get(point.trial_id) or _with_stated_count(point.trial.model, count)
            points.append(_with_stated_facts(point, changes, model, nodes_of))
        series.append(replace(recorded, points=tuple(points)))
    if changes.model is None:
        changes = replace(changes, parameters=None)  # else they are those of that model
    return StatedFacts(replace(evidence, series=tuple(series)), changes)


def taken_as_measured(before: Evidence, after: Evidence, besides: Collection[str] = ()) -> str:
    """A sentence on what `with_stated_facts` made of assumptions; empty where it made nothing else of any.

    Args:
        before: what is recorded.
        after: the same with what the options say.
        besides: options of which something else is said.
    """
    facts = [fact for option, fact in facts_taken(before, after).items() if option not in besides]
    if not facts:
        return ""
    return (
        f"Taken for what was measured, which the import does not tell: {', '.join(facts)}. To ask for another one, "
        "import again and say what was measured."
    )


def facts_taken(before: Evidence, after: Evidence) -> dict[str, str]:
    """Option -> the fact that `with_stated_facts` took from it for measured runs: "--precision" -> "bf16"."""
    points_before = [point for series in before.series for point in series.points]
    points_after = [point for series in after.series for point in series.points]
    facts: dict[str, dict[str, None]] = {}
    for recorded, point in zip(points_before, points_after, strict=True):
        for option, fact in _facts_taken_of(recorded, point):
            facts.setdefault(option, {})[fact] = None
    return {option: ", ".join(of_option) for option, of_option in facts.items()}


def _facts_taken_of(recorded: MeasuredPoint, point: MeasuredPoint) -> Iterator[tuple[str, str]]:
    """(option, what it says of this point), for each fact that its import left open."""
    before, after = recorded.trial, point.trial
    if before.train.engine != after.train.engine:
        yield "--engine", after.train.engine
    named = after.model.name or after.model.hf
    if before.model.unknown and named:
        yield "--model", named
    if after.model.parameter_count not in (None, before.model.parameter_count):
        yield "--parameters", units.counted(after.model.parameter_count or 0, "parameter")
    taken = recorded.assumed - point.assumed
    if PRECISION in taken:
        yield "--precision", after.train.precision
    if IMAGE_SIZE in taken:
        yield "--image-size", f"{after.model.image_size} pixels"
    if HOSTS in taken and point.nodes > 1:
        yield "--nodes-of", f"{units.ranks(after.world.ranks_per_node)} on a full host"


def _with_stated_facts(point: MeasuredPoint, changes: Changes, model: ModelSpec, nodes_of: int | None) -> MeasuredPoint:
    """Return the point with the model, and with the training and hosts that options state for what was assumed.

    Args:
        point: as recorded.
        changes: what the options say.
        model: the recorded one, or the one that they state.
        nodes_of: ranks on a full host, if said.
    """
    train = _stated_training(point, changes)
    world = point.trial.world
    if HOSTS in point.assumed and nodes_of is not None and nodes_of > 0:
        world = world_of_hosts(world.size, nodes_of, world.threads_per_rank)
    says = {PRECISION: changes.precision, IMAGE_SIZE: changes.image_size, HOSTS: nodes_of}
    still_assumed = frozenset(field for field in point.assumed if says.get(field) is None)
    trial = point.trial.model_copy(update={"train": train, "model": model, "world": world})
    return replace(point, trial=trial, nodes=world.nodes, assumed=still_assumed)


def _stated_training(point: MeasuredPoint, changes: Changes) -> TrainSpec:
    """The point's training with the engine and precision that nobody recorded."""
    train = point.trial.train
    facts: dict[str, Any] = {}
    if point.trial.origin is not None and train.engine not in ENGINES and changes.engine is not None:
        facts["engine"] = changes.engine
        if changes.zero_stage and "zero_stage" in of_engine(changes.engine).options:
            facts["zero_stage"] = changes.zero_stage
    if PRECISION in point.assumed and changes.precision is not None:
        facts["precision"] = changes.precision
    return train.model_copy(update=facts)


def _with_stated_count(model: ModelSpec, count: int | None) -> ModelSpec:
    """Return a recorded model; one that nobody names with the number of parameters that options state, if any."""
    if count is None or not model.unknown:
        return model
    return model.model_copy(update={"parameter_count": count})


def counts_ahead(evidence: Evidence) -> tuple[int, ...]:
    """Rank counts asked about where the user names none: 2, 4 and 8 times the largest measured one."""
    most = max((point.gpus for series in evidence.series for point in series.points), default=1)
    return (2 * most, 4 * most, 8 * most)


def matching(names: Collection[str], series: str) -> list[str]:
    """The series of that name, or all that begin with it: "ddp" is "ddp, strong-micro" and "ddp, weak".

    Raises:
        RequestError: there is none.
    """
    matches = [series] if series in names else [name for name in names if name.startswith(f"{series}, ")]
    if not matches:
        valid = [shown(name) for name in sorted(names)]
        step = "Name one of them, or what it begins with, with --series"
        raise RequestError(
            f"unknown series {shown(series)}", valid=valid, next_step=step, hint=nearest(series, [*names])
        )
    return matches


def askable_series(
    evidence: Evidence,
    gpus: tuple[int, ...],
    changes: Changes,
    *,
    series: str | None = None,
    nodes_of: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> list[Series]:
    """Return the series that can have such rank counts: all, or those that `series` names.

    Raises:
        RequestError: there is no such series, or a value cannot be.
    """
    if not evidence.series:
        raise evidence.refusal("to predict from")
    _check(changes)
    series_by_name = {each.name: each for each in evidence.series}
    names = list(series_by_name) if series is None else matching(series_by_name, series)
    if nodes_of is not None and nodes_of < 1:
        raise RequestError(f"--nodes-of is {nodes_of}", valid=["1 or more"])
    asked = [series_by_name[name] for name in names]
    _check_batch(asked, changes)
    if price_per_gpu_hour is not None and not 0 < price_per_gpu_hour <= _MOST_A_PRICE:
        raise RequestError(f"--price is {price_per_gpu_hour:g}", valid=["more than 0"])
    able = [member for member in asked if max(gpus) == 1 or can_grow(member, changes.engine)]
    if not able:
        listed_names = ", ".join(shown(member.name) for member in asked)
        raise RequestError(
            f"{listed_names}: measured without an engine, so on one rank only", next_step="Add --engine ddp"
        )
    return able


def questions(
    evidence: Evidence,
    gpus: tuple[int, ...],
    changes: Changes,
    *,
    series: str | None = None,
    nodes_of: int | None = None,
    price_per_gpu_hour: float | None = None,
    memory_capacity_bytes: int | None = None,
    models: Mapping[str, ModelSpec] = _NO_MODELS,
) -> tuple[Question, ...]:
    """Return one question for each series asked about, because another model depends on what the series itself trains.

    Where some series were measured with the changes, they alone are asked about.

    Args:
        evidence: what is measured.
        gpus: the rank counts.
        changes: what is to differ.
        series: the name of one series, or what several begin with; None: all.
        nodes_of: ranks on a host; None: as measured.
        price_per_gpu_hour: in any currency; None: no cost is asked for.
        memory_capacity_bytes: of a device; None: as recorded.
        models: series -> the model that `changes` ask for there, found (`model_requests.requests_by_series`).

    Raises:
        RequestError: there is no such series, or a value cannot be.
    """
    askable = askable_series(
        evidence, gpus, changes, series=series, nodes_of=nodes_of, price_per_gpu_hour=price_per_gpu_hour
    )
    changes_by_series = {}
    for member in askable:
        model = models[member.name] if changes.asks_for_model else None
        changes_by_series[member.name] = _changed_fields(changes, model)
    measured_so = [member for member in askable if not differing(member.points, changes_by_series[member.name])]
    return tuple(
        Question(
            gpus=gpus,
            nodes_of=nodes_of,
            series=member.name,
            changes=changes_by_series[member.name],
            price_per_gpu_hour=price_per_gpu_hour,
            memory_capacity_bytes=memory_capacity_bytes,
        )
        for member in measured_so or askable
    )


def _check_batch(series: Sequence[Series], changes: Changes) -> None:
    """Refuses another micro-batch than one that was assumed: what a step took then is not known.

    Raises:
        RequestError: the import of a series assumed its micro-batch.
    """
    untold = [one.name for one in series if any(MICRO_BATCH in point.assumed for point in one.points)]
    if changes.micro_batch is not None and untold:
        what = f"--micro-batch {changes.micro_batch}: the measured one of {shown(untold[0])} is not told"
        raise RequestError(what, next_step="Import the files again with the --micro-batch that was measured")


def _check(changes: Changes) -> None:
    if changes.engine is not None and changes.engine not in ENGINES:
        raise unknown("engine", changes.engine, ENGINES)
    if changes.precision is not None and changes.precision not in get_args(Precision):
        raise unknown("precision", changes.precision, get_args(Precision))
    check_within("--zero-stage", changes.zero_stage, 0, 3)
    check_within("--micro-batch", changes.micro_batch, 1, 1_000_000)
    check_within("--grad-accum", changes.grad_accum, 1, 1_000_000)
    check_within("--image-size", changes.image_size, 1, 8192)


def _changed_fields(changes: Changes, model: ModelSpec | None) -> dict[str, Any]:
    """Return the changes by field, as `variants.variant` has them: of training, and "model" and "gpu".

    `model`: the one that the changes ask for by name or image size; None: they ask for none.

    Raises:
        RequestError: there is no such type of GPU.
    """
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    changed = {name: value for name, value in values.items() if value is not None}
    for name in ("model", "image_size", "parameters"):  # all three say which model it is
        changed.pop(name, None)
    if "device" in changed:
        changed["gpu"] = gpu_type(changed.pop("device"))
    if model is not None:
        changed["model"] = model
    return changed
