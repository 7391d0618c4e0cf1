"""Advice from a results folder and a user's limits: every candidate looked at, and what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vitscale.advice.answers import Answer, Choosing, answers, best, closest, each_alone, front, limits, measured_first
from vitscale.advice.candidates import candidates, of_shared_models, rank_counts, rented
from vitscale.advice.comparable_series import comparable_series, noise_of, work_of
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
    """All that `vitscale advise` says."""

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
    """What comes nearest, where limits were given and nothing meets them."""
    alone: Mapping[str, Option]
    """Limit -> what answers it by itself, where nothing meets all limits."""
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
    """What `chosen` rests on that nothing measured."""
    measurements: tuple[Measurement, ...] = ()
    """What would narrow `chosen` most for what it costs, best first."""
    step_shares: Mapping[str, float] = field(default_factory=dict)
    """Part of a step of `chosen` -> its share of the time, as predicted; empty where unavailable."""

    @property
    def device(self) -> str:
        """What its ranks compute on: cuda or cpu."""
        return "cuda" if self.asked.instances else self.trial.train.device

    @property
    def met(self) -> bool:
        """Whether the limits, if any, are met by something."""
        return self.closest is None

    @property
    def chosen(self) -> Option | None:
        """What is written out as a study: the first answer; where nothing meets the limits, what comes nearest."""
        if self.closest is not None:
            return self.closest
        return self.answers[0].option if self.answers else None


def advise(
    evidence: Evidence,
    asked: Request,
    noise: NoiseScale,
    forecaster: Forecaster,
    interrupted: Mapping[str, finishing.Interruptions] | None = None,
) -> Advice:
    """Looks at every candidate and answers.

    Args:
        evidence: the measured series.
        asked: limits and choices.
        noise: the gradient noise scale, where it is known.
        forecaster: what candidates of a series are expected to take.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.

    Raises:
        RequestError: what is asked cannot be answered from these results: no such series, no epochs, uneven counts.
    """
    comparable = comparable_series(evidence, asked.series)
    work = work_of(comparable, asked)
    counts = rank_counts(
        comparable.members, gpus=asked.gpus, max_gpus=asked.max_gpus, ranks_per_node=asked.ranks_per_node
    )  # fmt: skip
    every = candidates(comparable, counts, hosts_given=asked.ranks_per_node is not None)
    if asked.split:
        every = every.beside(of_shared_models(comparable, counts))
    if asked.instances:
        other = rented(comparable, asked.instances, asked.gpus, asked.max_gpus)
        every = every.beside(other) if asked.price_per_gpu_hour is not None else other
    batches = tuple(
        sorted({point.trial.global_batch for series in comparable.of_the_policy for point in series.points})
    )
    view = forecast_table(comparable, every, forecaster, work, noise, batches[0], interrupted, asked.price_per_gpu_hour)
    to_same_loss = asked.any_batch and noise.images is not None
    choosing = Choosing(view, asked, limits(view, asked), view.same_loss_seconds if to_same_loss else view.seconds)
    answered = answers(choosing)
    nearest = closest(choosing) if asked.limited and all(answer.kind == "knee" for answer in answered) else None
    single = each_alone(choosing) if nearest is not None else {}
    told = [answer.option for answer in answered] + ([nearest] if nearest is not None else [])
    return Advice(
        asked=asked,
        work=work,
        reference=comparable.reference.name,
        origins=tuple(dict.fromkeys(option.series for option in told)),
        trial=comparable.trial,
        trials={series.name: series.points[-1].trial for series in comparable.members},
        study_batches=batches,
        noise=noise,
        answers=answered,
        closest=nearest,
        alone=single,
        never=tuple(limit for limit in choosing.limits if limit not in single) if nearest is not None else (),
        front=tuple(
            choosing.option(index)
            for index in front(measured_first(view, choosing.shown), choosing.seconds, choosing.spent)
        ),
        by_count=_by_count(choosing),
        other_batch=_other_batch(choosing),
        large_batch=_large_batch(choosing, nearest),
        looked_at=len(every.combinations),
        dropped=_dropped(view, choosing),
        refused=every.refused,
        indivisible=every.indivisible,
        memory_known=view.memory_known,
        interruptions_known=all(option.series in (interrupted or {}) for option in told),
    )


def _by_count(choosing: Choosing) -> tuple[Option, ...]:
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
    """What a larger or smaller global batch would gain, where the answers must keep the study's."""
    view = choosing.view
    if choosing.asked.any_batch:
        return None
    measured = view.contends & view.measured & (choosing.asked.large_batch | ~view.large_batch)
    kept, changed = (np.flatnonzero(measured & mask) for mask in (view.keeps_batch, ~view.keeps_batch))
    if not len(changed) or not len(kept):
        return None
    fastest = changed[np.argmin(view.seconds[changed])]
    return choosing.option(int(fastest)) if view.seconds[fastest] < view.seconds[kept].min() else None


def _large_batch(choosing: Choosing, nearest: Option | None) -> Option | None:
    """What only large-batch training would gain; where nothing meets the limits, what meets them with it."""
    if nearest is not None:
        with_it = answers(replace(choosing, asked=replace(choosing.asked, large_batch=True)))
        return next((answer.option for answer in with_it if answer.kind != "knee"), None)
    fastest = best(measured_first(choosing.view, choosing.shown), choosing.seconds)
    kept = best(choosing.preferred, choosing.seconds)
    if fastest is None or kept is None or not choosing.seconds[fastest] < choosing.seconds[kept]:
        return None
    return choosing.option(fastest)


def _dropped(view: ForecastTable, choosing: Choosing) -> dict[str, int]:
    """How many candidates were left out that would have been looked at, by reason."""
    asked = ~view.needless & (view.keeps_batch | choosing.asked.any_batch)
    counted = {
        f"more than a {100 * MOST_OOM_CHANCE:.0f} % chance that it will not fit in memory": view.known
        & ~view.fits
        & np.isfinite(view.memory_bytes),
        "ranks share a model, and what they hold is not modelled": ~view.fits & np.isnan(view.memory_bytes),
        "its time cannot be predicted": ~view.known,
    }
    return {why: count for why, mask in counted.items() if (count := int((mask & asked).sum()))}


def advised_from(fitted: Fitted, analysis: Analysis, asked: Request) -> Advice:
    """The advice, with what its first answer assumes and what would narrow it.

    Raises:
        RequestError: what is asked cannot be answered from these results.
    """
    evidence = fitted.evidence
    noise = noise_of(analysis, evidence, asked.series)
    hosts_assumed = asked.ranks_per_node is None

    def forecaster(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        own = fitted.series[series]
        return workloads.evaluate_all(
            fitted,
            series,
            candidates,
            hosts_assumed=hosts_assumed and layouts.host_size(own.points)[1],
            memory_capacity_bytes=asked.memory_capacity_bytes,
            with_memory=rough,  # the rough forecast has it for all candidates
            draws=evaluating.ROUGH if rough else DRAWS,
        )

    by_series = {
        own.name: finishing.interruptions(
            own.points[-1].trial,
            finishing.checkpoint_of(own, analysis),
            checkpoint_seconds=asked.checkpoint_seconds,
            node_mtbf_seconds=asked.node_mtbf_seconds,
        )
        for own in evidence.series
    }
    interrupted = {name: failures for name, failures in by_series.items() if failures is not None}
    advice = advise(evidence, asked, noise, forecaster, interrupted)
    option = advice.chosen
    if option is None:
        return advice
    own = fitted.series[option.series]
    changed = variants.variant(own, option.candidate.changes)
    shares = spread_by_part(changed, option.candidate)
    return replace(
        advice,
        measurements=measurements(option, own.series, evidence.network, shares),
        step_shares=step_shares(changed, option.candidate),
        assumptions=(
            *_assumptions(changed, option, advice),
            *((starts,) if (starts := option.startup_assumed) else ()),
            *_of_failures(interrupted.get(option.series), option),
        ),
    )


_WORTH_TELLING = 0.01
"""Share of the time that failures and checkpoints must take for their assumptions to be told."""


def _of_failures(between: finishing.Interruptions | None, option: Option) -> tuple[Assumption, ...]:
    startup = 0.0 if option.startup is None else option.startup.value
    if between is None or between.wall(option.training.value, option.nodes, startup).lost_share < _WORTH_TELLING:
        return ()
    return between.assumed(option.nodes)


def _assumptions(changed: variants.PredictionVariant, option: Option, advice: Advice) -> tuple[Assumption, ...]:
    """Assumptions of the option as it would be run; none where it was measured."""
    if option.label == "measured":
        return ()
    candidate, points = option.candidate, changed.fitted.points
    world = World(nodes=option.nodes, ranks_per_node=candidate.ranks_per_node, threads_per_rank=1)
    beyond = candidate.gpus > max(point.gpus for point in points) and candidate.instance is None
    assumed_hosts = advice.asked.ranks_per_node is None and layouts.host_size(points)[1] and beyond
    batch = {"micro_batch": candidate.micro_batch, "grad_accum": candidate.grad_accum, "micro_batches": None}
    train = changed.trial.train.model_copy(update=batch)
    advised = changed.trial.model_copy(update={"world": world, "train": train})
    there = layouts.SeriesLayout(advised, None, None, assumed_hosts)
    return labels.assumptions(changed, there)
