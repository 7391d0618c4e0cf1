"""Advice from the evidence of a results folder: fits it once, asks it for every candidate, and what would narrow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitscale.advice.advising import Advice, advise, noise_of
from vitscale.advice.narrowing import measurements
from vitscale.advice.option import Option
from vitscale.advice.request import Request
from vitscale.analysis import Analysis
from vitscale.prediction.candidates import Candidate, Forecasts, forecast_candidates, spread_by_part
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import FittedSeries, fit
from vitscale.prediction.labels import assumptions
from vitscale.prediction.layouts import Place, host_size
from vitscale.prediction.results import Assumption
from vitscale.prediction.variants import variant
from vitscale.trial import World


def advised_from(evidence: Evidence, analysis: Analysis, asked: Request) -> Advice:
    """The advice, with what its first answer assumes and what would narrow it.

    Raises:
        RequestError: what is asked cannot be answered from these results.
    """
    noise = noise_of(analysis, evidence, asked.series)
    fitted = fit(evidence)

    def forecaster(series: str, candidates: Sequence[Candidate]) -> Forecasts:
        return forecast_candidates(fitted, series, candidates, memory_capacity_bytes=asked.memory_capacity_bytes)

    advice = advise(evidence, asked, noise, forecaster)
    option = advice.chosen
    if option is None:
        return advice
    own = fitted.series[option.series]
    shares = spread_by_part(own, option.gpus, option.candidate.ranks_per_node)
    return replace(
        advice,
        measurements=measurements(option, own.series, evidence.network, shares),
        assumptions=(*_assumptions(own, option, advice), *((starts,) if (starts := option.startup_assumed) else ())),
    )


def _assumptions(fitted: FittedSeries, option: Option, advice: Advice) -> tuple[Assumption, ...]:
    """Of the option as it would be run."""
    candidate, train = option.candidate, fitted.points[-1].trial.train
    wanted = {
        "engine": candidate.engine,
        "zero_stage": candidate.zero_stage,
        "activation_checkpointing": candidate.activation_checkpointing,
    }
    changed = variant(fitted, {name: value for name, value in wanted.items() if getattr(train, name) != value})
    world = World(nodes=option.nodes, ranks_per_node=candidate.ranks_per_node, threads_per_rank=1)
    beyond = candidate.gpus > max(point.gpus for point in fitted.points)
    assumed_hosts = advice.asked.ranks_per_node is None and host_size(fitted.points)[1] and beyond
    there = Place(changed.trial.model_copy(update={"world": world}), None, None, assumed_hosts)
    return assumptions(changed, there)
