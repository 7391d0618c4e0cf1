"""Advice from a results folder and a user's limits: every candidate looked at, and what to measure next.

`advised_from` is the whole of it. `advise` forecasts all candidates and picks the answers; `advised_from` adds what the
first answer takes for granted, and which measurements would narrow its forecast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vitscale.advice.answers import (
    Answer,
    Choosing,
    answers,
    best_under_each_limit,
    closest,
    index_of_least,
    limit_shares,
    measured_first,
    pareto_front,
)
from vitscale.advice.candidates import (
    Candidates,
    candidates,
    candidates_on_instances,
    rank_counts,
    shared_model_candidates,
)
from vitscale.advice.comparable_series import ComparableSeries, comparable_series, noise_of, work_of
from vitscale.advice.forecast_table import MOST_OOM_CHANCE, Forecaster, forecast_table
from vitscale.advice.next_measurement import Measurement, measurements
from vitscale.advice.request import NoiseScale, Option, Request, Work
from vitscale.analysis import Analysis
from vitscale.engines.variants import EngineVariant
from vitscale.prediction import evaluating, finishing, labels, layouts, variants, workloads
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evidence import Evidence, MeasuredPoint
from vitscale.prediction.fitting import DRAWS, Fitted
from vitscale.prediction.predicting import spread_by_part
from vitscale.prediction.results import Assumption
from vitscale.prediction.step_shares import step_shares
from vitscale.trial.model_cost import ParameterCount
from vitscale.trial.trial import Trial, World


@dataclass(frozen=True)
class Advice:
    """The whole answer of `vitscale advise`."""

    asked: Request
    work: Work
    reference: str
    """Name of the series that advice is about."""
    origins: tuple[str, ...]
    """Names of the series that the answers were worked out from."""
    trial: Trial
    """The reference's trial at its largest measured rank count."""
    trials: Mapping[str, Trial]
    """Series -> its trial at its largest measured rank count, for every series that forecasts may be from."""
    study_batches: tuple[int, ...]
    """Global batches that the series was measured with, in rising order."""
    noise: NoiseScale
    answers: tuple[Answer, ...]
    """Fastest, cheapest, most ranks, the knee, as asked for. Where nothing meets the limits there is only the knee."""
    closest: Option | None
    """The option that misses the limits by least, where limits were given and nothing meets them; else None."""
    alone: Mapping[str, Option]
    """Limit -> the best option under this limit alone, where nothing meets all limits together."""
    never: tuple[str, ...]
    """Limits that nothing meets even by themselves."""
    front: tuple[Option, ...]
    """Options of measured engines for which nothing else is both faster and cheaper, by rising time."""
    by_count: tuple[Option, ...]
    """The fastest of each engine at each rank count, measured engines first."""
    other_batch: Option | None
    """The fastest that trains with another global batch than the study, where that is faster than all that keep it."""
    large_batch: Option | None
    """The option that is better than all others because it trains with large batches, where the request does not allow
    them (`_better_large_batch`)."""
    looked_at: int
    """Number of candidates."""
    dropped: Mapping[str, int]
    """Why candidates were left out -> how many."""
    refused: Mapping[str, str]
    """Engine -> why it cannot train this."""
    indivisible: tuple[int, ...]
    """Rank counts over which the study's global batch does not divide."""
    memory_known: bool
    host_memory_known: bool
    interruptions_known: bool
    """Whether failures and checkpoints are in the time."""
    assumptions: tuple[Assumption, ...] = ()
    """Assumptions behind `chosen` that no measurement supports."""
    measurements: tuple[Measurement, ...] = ()
    """Measurements that would narrow `chosen` most for what they cost, best first."""
    step_shares: Mapping[str, float] = field(default_factory=dict)
    """Part of a step of `chosen` -> its share of the time, as predicted; empty where unavailable."""
    parameters: ParameterCount | None = None
    """Parameters of the model, and how they are known."""

    @property
    def device(self) -> str:
        """The device that its ranks compute on: cuda or cpu."""
        return "cuda" if self.asked.instances else self.trial.train.device

    @property
    def met(self) -> bool:
        """Whether the limits, if any, are met by something."""
        return self.closest is None

    @property
    def chosen(self) -> Option | None:
        """The option that is written out as a study: the first answer; where nothing meets the limits, the nearest."""
        if self.closest is not None:
            return self.closest
        return self.answers[0].option if self.answers else None


def advise(
    evidence: Evidence,
    request: Request,
    noise: NoiseScale,
    forecaster: Forecaster,
    interrupted: Mapping[str, finishing.Interruptions] | None = None,
) -> Advice:
    """Forecast every candidate, and pick the answers to the request.

    Args:
        evidence: the measured series.
        request: limits and choices.
        noise: the gradient noise scale, where it is known.
        forecaster: makes the forecasts of candidates.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.

    Raises:
        RequestError: what is asked cannot be answered from these results: no such series, no epochs, uneven counts.
    """
    comparable = comparable_series(evidence, request.series)
    work = work_of(comparable, request)
    all_candidates = _candidates(comparable, request)
    batches = sorted({point.trial.global_batch for series in comparable.members_of_policy for point in series.points})
    forecasts = forecast_table(
        comparable,
        all_candidates,
        forecaster,
        work,
        noise,
        study_batch=batches[0],
        interrupted=interrupted,
        price_per_gpu_hour=request.price_per_gpu_hour,
    )
    counts_time_to_same_loss = request.any_batch and noise.images is not None
    seconds = forecasts.same_loss_seconds if counts_time_to_same_loss else forecasts.seconds
    choosing = Choosing(forecasts, request, limit_shares(forecasts, request), seconds)

    answers_to_limits = answers(choosing)
    options = [answer.option for answer in answers_to_limits]
    miss = _miss_of_limits(choosing, answers_to_limits)
    if miss.closest is not None:
        options.append(miss.closest)
    front = pareto_front(measured_first(forecasts, choosing.shown), choosing.seconds, choosing.cost)
    return Advice(
        asked=request,
        work=work,
        reference=comparable.reference.name,
        origins=tuple(dict.fromkeys(option.series for option in options)),
        trial=comparable.trial,
        trials={series.name: series.points[-1].trial for series in comparable.members},
        study_batches=tuple(batches),
        noise=noise,
        answers=answers_to_limits,
        closest=miss.closest,
        alone=miss.alone,
        never=miss.never,
        front=tuple(choosing.option(index) for index in front),
        by_count=_fastest_by_count(choosing),
        other_batch=_faster_other_batch(choosing),
        large_batch=_better_large_batch(choosing, nothing_meets_limits=miss.closest is not None),
        looked_at=len(all_candidates.combinations),
        dropped=_dropped_by_reason(choosing),
        refused=all_candidates.refused,
        indivisible=all_candidates.indivisible,
        memory_known=forecasts.memory_known,
        host_memory_known=forecasts.host_memory_known,
        parameters=comparable.reference.points[-1].parameters,
        interruptions_known=all(option.series in (interrupted or {}) for option in options),
    )


class _MissOfLimits(NamedTuple):
    """What comes nearest to limits that nothing meets; empty where something meets them. See `Advice`."""

    closest: Option | None = None
    alone: Mapping[str, Option] = {}
    never: tuple[str, ...] = ()


def _miss_of_limits(choosing: Choosing, answers_to_limits: Sequence[Answer]) -> _MissOfLimits:
    """Return what comes nearest to the limits, where the answers show that nothing meets them."""
    only_the_knee = all(answer.kind == "knee" for answer in answers_to_limits)
    if not choosing.request.limited or not only_the_knee:
        return _MissOfLimits()
    closest_option = closest(choosing)
    if closest_option is None:
        return _MissOfLimits()
    alone = best_under_each_limit(choosing)
    never = tuple(limit for limit in choosing.limits if limit not in alone)
    return _MissOfLimits(closest_option, alone, never)


def _candidates(comparable: ComparableSeries, request: Request) -> Candidates:
    """Return all candidates that a request allows, on hosts like the measured ones or on instances that are rented.

    Raises:
        RequestError: a rank count is uneven, or there are none.
    """
    counts = rank_counts(
        comparable.members, gpus=request.gpus, max_gpus=request.max_gpus, ranks_per_node=request.ranks_per_node
    )
    on_hosts = candidates(comparable, counts, hosts_given=request.ranks_per_node is not None)
    if request.split:
        on_hosts = on_hosts.joined_with(shared_model_candidates(comparable, counts))
    if not request.instances:
        return on_hosts
    on_instances = candidates_on_instances(comparable, request.instances, request.gpus, request.max_gpus)
    has_price_of_hosts = request.price_per_gpu_hour is not None
    return on_hosts.joined_with(on_instances) if has_price_of_hosts else on_instances


def _fastest_by_count(choosing: Choosing) -> tuple[Option, ...]:
    """Return the fastest option of each engine, split, second shard and instance at each rank count.

    Measured engines come first.
    """
    fastest: dict[_RowOrder, int] = {}
    for index in np.flatnonzero(choosing.shown):
        candidate = choosing.forecasts.candidates[index]
        row = _RowOrder(
            is_unmeasured=not choosing.forecasts.measured[index],
            instance="" if candidate.instance is None else candidate.instance.name,
            variant=candidate.variant,
            split=str(candidate.parallel),
            second_shard_ranks=candidate.second_shard_ranks,
            gpus=candidate.gpus,
        )
        if row not in fastest or choosing.seconds[index] < choosing.seconds[fastest[row]]:
            fastest[row] = int(index)
    return tuple(choosing.option(fastest[row]) for row in sorted(fastest))


class _RowOrder(NamedTuple):
    """What the candidates of one row of `Advice.by_count` have in common; rows are sorted by it."""

    is_unmeasured: bool
    instance: str
    """Name of the instance; empty for hosts like the measured ones."""
    variant: EngineVariant
    split: str
    second_shard_ranks: int
    gpus: int


def _faster_other_batch(choosing: Choosing) -> Option | None:
    """Return the fastest option with another global batch than the study's, where the answers must keep that one.

    Return None where it is not faster than all that keep it.
    """
    if choosing.request.any_batch:
        return None
    forecasts = choosing.forecasts
    allowed_batch = choosing.request.large_batch | ~forecasts.large_batch
    candidates_mask = forecasts.contends & forecasts.measured & allowed_batch
    keeping = np.flatnonzero(candidates_mask & forecasts.keeps_batch)
    changing = np.flatnonzero(candidates_mask & ~forecasts.keeps_batch)
    if len(keeping) == 0 or len(changing) == 0:
        return None
    fastest = int(changing[np.argmin(forecasts.seconds[changing])])
    is_faster = forecasts.seconds[fastest] < forecasts.seconds[keeping].min()
    return choosing.option(fastest) if is_faster else None


def _better_large_batch(choosing: Choosing, nothing_meets_limits: bool) -> Option | None:
    """Return the option that is better than all answers because it trains with large batches; None where none is.

    Where nothing meets the limits, it is the answer that meets them with large batches. Else it is the fastest
    candidate, where that is faster than every candidate that may be an answer.
    """
    if nothing_meets_limits:
        with_large_batches = replace(choosing, request=replace(choosing.request, large_batch=True))
        for answer in answers(with_large_batches):
            if answer.kind != "knee":
                return answer.option
        return None
    fastest = index_of_least(measured_first(choosing.forecasts, choosing.shown), choosing.seconds)
    fastest_answer = index_of_least(choosing.preferred, choosing.seconds)
    if fastest is None or fastest_answer is None:
        return None
    is_faster = choosing.seconds[fastest] < choosing.seconds[fastest_answer]
    return choosing.option(fastest) if is_faster else None


def _dropped_by_reason(choosing: Choosing) -> dict[str, int]:
    """Return reason -> number of candidates that were left out for it; lacks reasons without a candidate.

    Candidates that the request would not have shown in any case are not counted.
    """
    forecasts = choosing.forecasts
    would_be_shown = ~forecasts.needless & (forecasts.keeps_batch | choosing.request.any_batch)
    is_memory_known = np.isfinite(forecasts.memory_bytes)
    mask_by_reason = {
        f"more than a {100 * MOST_OOM_CHANCE:.0f} % chance that it will not fit in memory": (
            forecasts.known & ~forecasts.fits & is_memory_known
        ),
        "ranks share a model, and what they hold is not modelled": ~forecasts.fits & np.isnan(forecasts.memory_bytes),
        "its time cannot be predicted": ~forecasts.known,
    }
    counts = {reason: int((mask & would_be_shown).sum()) for reason, mask in mask_by_reason.items()}
    return {reason: count for reason, count in counts.items() if count > 0}


def advised_from(fitted: Fitted, analysis: Analysis, request: Request) -> Advice:
    """Return the advice, with the assumptions behind its first answer and the measurements that would narrow it.

    Raises:
        RequestError: what is asked cannot be answered from these results.
    """
    evidence = fitted.evidence
    noise = noise_of(analysis, evidence, request.series)
    interrupted = _interruptions_by_series(evidence, analysis, request)
    advice = advise(evidence, request, noise, _forecaster(fitted, request), interrupted)
    option = advice.chosen
    if option is None:
        return advice
    fitted_series = fitted.series[option.series]
    changed_series = variants.variant(fitted_series, option.candidate.changes)
    assumptions = list(_assumptions(changed_series, option, advice))
    if option.startup_assumed:
        assumptions.append(option.startup_assumed)
    assumptions += _assumptions_about_failures(interrupted.get(option.series), option)
    variance_shares = spread_by_part(changed_series, option.candidate)
    return replace(
        advice,
        measurements=measurements(option, fitted_series.series, evidence.network, variance_shares),
        step_shares=step_shares(changed_series, option.candidate),
        assumptions=tuple(assumptions),
    )


def _forecaster(fitted: Fitted, request: Request) -> Forecaster:
    """Return a function that forecasts candidates by the fitted models, with the hosts and the memory of a request."""

    def forecast(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        return workloads.evaluate_all(
            fitted,
            series,
            candidates,
            hosts_assumed=_is_host_size_assumed(request, fitted.series[series].points),
            memory_capacity_bytes=request.memory_capacity_bytes,
            with_memory=rough,  # the exact forecast needs none: the rough one has the memory of all candidates
            draws=evaluating.ROUGH if rough else DRAWS,
        )

    return forecast


def _is_host_size_assumed(request: Request, points: Sequence[MeasuredPoint]) -> bool:
    """Whether neither the request nor a measurement states how many ranks a full host has."""
    if request.ranks_per_node is not None:
        return False
    _, is_assumed = layouts.host_size(points)
    return is_assumed


def _interruptions_by_series(
    evidence: Evidence, analysis: Analysis, request: Request
) -> dict[str, finishing.Interruptions]:
    """Return series -> failures and checkpoints of its training; lacks series whose checkpoints have unknown cost."""
    interrupted = {}
    for series in evidence.series:
        interruptions = finishing.interruptions(
            series.points[-1].trial,
            finishing.checkpoint_of(series, analysis),
            checkpoint_seconds=request.checkpoint_seconds,
            node_mtbf_seconds=request.node_mtbf_seconds,
        )
        if interruptions is not None:
            interrupted[series.name] = interruptions
    return interrupted


_WORTH_REPORTING = 0.01
"""Share of the time that failures and checkpoints must take for their assumptions to be reported."""


def _assumptions_about_failures(
    interruptions: finishing.Interruptions | None, option: Option
) -> tuple[Assumption, ...]:
    """Return the assumptions about failures and checkpoints; none where these take next to no time, or are left out."""
    if interruptions is None:
        return ()
    startup_seconds = 0.0 if option.startup is None else option.startup.value
    time = interruptions.wall(option.training.value, option.nodes, startup_seconds)
    if time.lost_share < _WORTH_REPORTING:
        return ()
    return interruptions.assumed(option.nodes)


def _assumptions(changed_series: variants.PredictionVariant, option: Option, advice: Advice) -> tuple[Assumption, ...]:
    """Return the assumptions behind the forecast of an option; none where it was measured.

    Args:
        changed_series: the fitted series, with what the option changes of it.
        option: the option.
        advice: the advice, for the request.
    """
    if option.label == "measured":
        return ()
    candidate = option.candidate
    points = changed_series.fitted.points
    largest_measured = max(point.gpus for point in points)
    extends_measured_hosts = candidate.gpus > largest_measured and candidate.instance is None
    batch = {"micro_batch": candidate.micro_batch, "grad_accum": candidate.grad_accum, "micro_batches": None}
    world = World(nodes=option.nodes, ranks_per_node=candidate.ranks_per_node, threads_per_rank=1)
    train = changed_series.trial.train.model_copy(update=batch)
    trial = changed_series.trial.model_copy(update={"world": world, "train": train})
    layout = layouts.SeriesLayout(
        trial,
        images=None,
        steps_per_epoch=None,
        host_size_assumed=extends_measured_hosts and _is_host_size_assumed(advice.asked, points),
    )
    return labels.assumptions(changed_series, layout)
