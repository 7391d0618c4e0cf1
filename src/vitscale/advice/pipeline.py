"""Advice from a results folder and a user's limits: every candidate looked at, and what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vitscale.advice.answers import Answer, Choosing, answers, best, closest, each_alone, front, limits, measured_first
from vitscale.advice.candidates import Candidates, candidates, of_shared_models, rank_counts, rented
from vitscale.advice.comparable_series import ComparableSeries, comparable_series, noise_of, work_of
from vitscale.advice.forecast_table import MOST_OOM_CHANCE, Forecaster, ForecastTable, forecast_table
from vitscale.advice.next_measurement import Measurement, measurements
from vitscale.advice.request import NoiseScale, Option, Request, Work
from vitscale.analysis import Analysis
from vitscale.engines.variants import EngineVariant
from vitscale.prediction import evaluating, finishing, labels, layouts, variants, workloads
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import DRAWS, Fitted
from vitscale.prediction.predicting import spread_by_part
from vitscale.prediction.results import Assumption
from vitscale.prediction.step_shares import step_shares
from vitscale.trial.trial import Trial, World


@dataclass(frozen=True)
class Advice:
    """The whole answer of `vitscale advise`."""

    asked: Request
    work: Work
    reference: str
    """The series that advice is about."""
    origins: tuple[str, ...]
    """The series that the answers are from."""
    trial: Trial
    """The reference's trial at its largest measured rank count."""
    trials: Mapping[str, Trial]
    """Series -> its trial likewise, for every series that a candidate may be worked out from."""
    study_batches: tuple[int, ...]
    """Global batches that the series was measured with, in rising order."""
    noise: NoiseScale
    answers: tuple[Answer, ...]
    """Fastest, cheapest, most ranks, the knee, as asked for. Where nothing meets the limits there is only the knee."""
    closest: Option | None
    """The nearest option, where limits were given and nothing meets them."""
    alone: Mapping[str, Option]
    """Limit -> the option that meets it by itself, where nothing meets all limits."""
    never: tuple[str, ...]
    """Limits that nothing meets even by themselves."""
    front: tuple[Option, ...]
    """Options of measured engines for which nothing else is both faster and cheaper, by rising time."""
    by_count: tuple[Option, ...]
    """The fastest of each engine at each rank count, measured engines first."""
    other_batch: Option | None
    """The fastest that trains with another global batch than the study, where that is faster than all that keep it."""
    large_batch: Option | None
    """Where it was not asked for: what only large-batch training meets the limits with; else the fastest of all, where
    only that is so fast."""
    looked_at: int
    dropped: Mapping[str, int]
    """Why candidates were left out -> how many."""
    refused: Mapping[str, str]
    """Engine -> why it cannot train this."""
    indivisible: tuple[int, ...]
    """Rank counts over which the study's global batch does not divide."""
    memory_known: bool
    interruptions_known: bool
    """Whether failures and checkpoints are in the time."""
    assumptions: tuple[Assumption, ...] = ()
    """Assumptions behind `chosen` that no measurement supports."""
    measurements: tuple[Measurement, ...] = ()
    """Measurements that would narrow `chosen` most for what they cost, best first."""
    step_shares: Mapping[str, float] = field(default_factory=dict)
    """Part of a step of `chosen` -> its share of the time, as predicted; empty where unavailable."""

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
    """Looks at every candidate and answers.

    Args:
        evidence: the measured series.
        request: limits and choices.
        noise: the gradient noise scale, where it is known.
        forecaster: what candidates of a series are expected to take.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.

    Raises:
        RequestError: what is asked cannot be answered from these results: no such series, no epochs, uneven counts.
    """
    comparable = comparable_series(evidence, request.series)
    work = work_of(comparable, request)
    all_candidates = _candidates(comparable, request)
    batches = sorted({point.trial.global_batch for series in comparable.of_the_policy for point in series.points})
    view = forecast_table(
        comparable, all_candidates, forecaster, work, noise, batches[0], interrupted, request.price_per_gpu_hour
    )
    to_same_loss = request.any_batch and noise.images is not None
    seconds = view.same_loss_seconds if to_same_loss else view.seconds
    choosing = Choosing(view, request, limits(view, request), seconds)

    answers_to_limits = answers(choosing)
    nearest: Option | None = None
    alone: Mapping[str, Option] = {}
    never: tuple[str, ...] = ()
    nothing_meets_limits = all(answer.kind == "knee" for answer in answers_to_limits)
    if request.limited and nothing_meets_limits:
        nearest = closest(choosing)
    if nearest is not None:
        alone = each_alone(choosing)
        never = tuple(limit for limit in choosing.limits if limit not in alone)
    options = [answer.option for answer in answers_to_limits]
    if nearest is not None:
        options.append(nearest)
    pareto_front = front(measured_first(view, choosing.shown), choosing.seconds, choosing.spent)
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
        closest=nearest,
        alone=alone,
        never=never,
        front=tuple(choosing.option(index) for index in pareto_front),
        by_count=_by_count(choosing),
        other_batch=_other_batch(choosing),
        large_batch=_large_batch(choosing, nearest),
        looked_at=len(all_candidates.combinations),
        dropped=_dropped(view, choosing),
        refused=all_candidates.refused,
        indivisible=all_candidates.indivisible,
        memory_known=view.memory_known,
        interruptions_known=all(option.series in (interrupted or {}) for option in options),
    )


def _candidates(comparable: ComparableSeries, request: Request) -> Candidates:
    """All candidates that a request allows, on hosts like the measured ones or on instances.

    Raises:
        RequestError: a rank count is uneven, or there are none.
    """
    counts = rank_counts(
        comparable.members, gpus=request.gpus, max_gpus=request.max_gpus, ranks_per_node=request.ranks_per_node
    )
    on_hosts = candidates(comparable, counts, hosts_given=request.ranks_per_node is not None)
    if request.split:
        on_hosts = on_hosts.beside(of_shared_models(comparable, counts))
    if not request.instances:
        return on_hosts
    on_instances = rented(comparable, request.instances, request.gpus, request.max_gpus)
    has_price_of_hosts = request.price_per_gpu_hour is not None
    return on_hosts.beside(on_instances) if has_price_of_hosts else on_instances


def _by_count(choosing: Choosing) -> tuple[Option, ...]:
    """The fastest option of each engine, split and instance at each rank count, measured engines first."""
    fastest: dict[tuple[bool, str, EngineVariant, str, int], int] = {}
    for index in np.flatnonzero(choosing.shown):
        option = choosing.view.candidates[index]
        rented = "" if option.instance is None else option.instance.name
        split = str(option.parallel)
        key = (not choosing.view.measured[index], rented, option.variant, split, option.gpus)
        if key not in fastest or choosing.seconds[index] < choosing.seconds[fastest[key]]:
            fastest[key] = int(index)
    return tuple(choosing.option(fastest[key]) for key in sorted(fastest))


def _other_batch(choosing: Choosing) -> Option | None:
    """The fastest option with a larger or smaller global batch, where the answers must keep the study's.

    None where it is not faster than all that keep it.
    """
    view = choosing.view
    if choosing.request.any_batch:
        return None
    measured = view.contends & view.measured & (choosing.request.large_batch | ~view.large_batch)
    keeping = np.flatnonzero(measured & view.keeps_batch)
    changing = np.flatnonzero(measured & ~view.keeps_batch)
    if len(keeping) == 0 or len(changing) == 0:
        return None
    fastest = changing[np.argmin(view.seconds[changing])]
    return choosing.option(int(fastest)) if view.seconds[fastest] < view.seconds[keeping].min() else None


def _large_batch(choosing: Choosing, nearest: Option | None) -> Option | None:
    """The option that only large-batch training allows; None where it gains nothing.

    Args:
        choosing: all candidates.
        nearest: the option that misses the limits by least, where nothing meets them: then large-batch training counts
            where it meets them, else where it is the fastest.
    """
    if nearest is not None:
        allowed = replace(choosing, request=replace(choosing.request, large_batch=True))
        for answer in answers(allowed):
            if answer.kind != "knee":
                return answer.option
        return None
    fastest = best(measured_first(choosing.view, choosing.shown), choosing.seconds)
    fastest_answer = best(choosing.preferred, choosing.seconds)
    if fastest is None or fastest_answer is None:
        return None
    return choosing.option(fastest) if choosing.seconds[fastest] < choosing.seconds[fastest_answer] else None


def _dropped(view: ForecastTable, choosing: Choosing) -> dict[str, int]:
    """Reason -> number of candidates that were left out for it and would have been looked at."""
    in_question = ~view.needless & (view.keeps_batch | choosing.request.any_batch)
    masks = {
        f"more than a {100 * MOST_OOM_CHANCE:.0f} % chance that it will not fit in memory": view.known
        & ~view.fits
        & np.isfinite(view.memory_bytes),
        "ranks share a model, and what they hold is not modelled": ~view.fits & np.isnan(view.memory_bytes),
        "its time cannot be predicted": ~view.known,
    }
    counts = {reason: int((mask & in_question).sum()) for reason, mask in masks.items()}
    return {reason: count for reason, count in counts.items() if count > 0}


def advised_from(fitted: Fitted, analysis: Analysis, request: Request) -> Advice:
    """The advice, with what its first answer assumes and what would narrow it.

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
    """Makes forecasts by the fitted models, for the hosts and the memory that a request names."""

    def forecast(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        are_hosts_assumed = request.ranks_per_node is None and layouts.host_size(fitted.series[series].points)[1]
        return workloads.evaluate_all(
            fitted,
            series,
            candidates,
            hosts_assumed=are_hosts_assumed,
            memory_capacity_bytes=request.memory_capacity_bytes,
            with_memory=rough,  # the rough forecast has it for all candidates
            draws=evaluating.ROUGH if rough else DRAWS,
        )

    return forecast


def _interruptions_by_series(
    evidence: Evidence, analysis: Analysis, request: Request
) -> dict[str, finishing.Interruptions]:
    """Series -> failures and checkpoints of its training; lacks series of which the cost of a checkpoint is unknown."""
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


_WORTH_TELLING = 0.01
"""Share of the time that failures and checkpoints must take for their assumptions to be told."""


def _assumptions_about_failures(
    interruptions: finishing.Interruptions | None, option: Option
) -> tuple[Assumption, ...]:
    """Assumptions about failures and checkpoints; none where these take next to no time, or are left out of it."""
    if interruptions is None:
        return ()
    startup_seconds = 0.0 if option.startup is None else option.startup.value
    time = interruptions.wall(option.training.value, option.nodes, startup_seconds)
    if time.lost_share < _WORTH_TELLING:
        return ()
    return interruptions.assumed(option.nodes)


def _assumptions(changed_series: variants.PredictionVariant, option: Option, advice: Advice) -> tuple[Assumption, ...]:
    """Assumptions of the option as it would be run; none where it was measured.

    Args:
        changed_series: the fitted series, with what the option changes of it.
        option: the option.
        advice: the advice, for what was asked.
    """
    if option.label == "measured":
        return ()
    candidate = option.candidate
    points = changed_series.fitted.points
    largest_measured = max(point.gpus for point in points)
    extends_measured_hosts = candidate.gpus > largest_measured and candidate.instance is None
    are_hosts_assumed = extends_measured_hosts and advice.asked.ranks_per_node is None and layouts.host_size(points)[1]
    batch = {"micro_batch": candidate.micro_batch, "grad_accum": candidate.grad_accum, "micro_batches": None}
    world = World(nodes=option.nodes, ranks_per_node=candidate.ranks_per_node, threads_per_rank=1)
    train = changed_series.trial.train.model_copy(update=batch)
    trial = changed_series.trial.model_copy(update={"world": world, "train": train})
    layout = layouts.SeriesLayout(trial, images=None, steps_per_epoch=None, host_size_assumed=are_hosts_assumed)
    return labels.assumptions(changed_series, layout)
