"""Advice from the evidence of a results folder: fits it once, asks it for every candidate, and what would narrow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitscale.advice.advising import Advice, advise, noise_of
from vitscale.advice.narrowing import measurements
from vitscale.advice.option import Option
from vitscale.advice.request import Request
from vitscale.analysis import Analysis
from vitscale.prediction.evaluating import ROUGH, Candidate, Evaluated, evaluate_all, spread_by_part
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.finishing import Interruptions, checkpoint_of, interruptions
from vitscale.prediction.fitting import DRAWS, FittedSeries, fit
from vitscale.prediction.labels import assumptions
from vitscale.prediction.layouts import Place, host_size
from vitscale.prediction.results import Assumption
from vitscale.prediction.variants import Variant, variant
from vitscale.trial.trial import World


def advised_from(evidence: Evidence, analysis: Analysis, asked: Request) -> Advice:
    """The advice, with what its first answer assumes and what would narrow it.

    Raises:
        RequestError: what is asked cannot be answered from these results.
    """
    noise = noise_of(analysis, evidence, asked.series)
    fitted = fit(evidence)

    hosts_assumed = asked.ranks_per_node is None

    def forecaster(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        own = fitted.series[series]
        return evaluate_all(
            fitted,
            series,
            candidates,
            hosts_assumed=hosts_assumed and host_size(own.points)[1],
            memory_capacity_bytes=asked.memory_capacity_bytes,
            with_memory=rough,  # of all, so that it need not be asked again
            draws=ROUGH if rough else DRAWS,
        )

    found = {
        own.name: interruptions(
            own.points[-1].trial,
            checkpoint_of(own, analysis),
            checkpoint_seconds=asked.checkpoint_seconds,
            node_mtbf_seconds=asked.node_mtbf_seconds,
        )
        for own in evidence.series
    }
    interrupted = {name: one for name, one in found.items() if one is not None}
    advice = advise(evidence, asked, noise, forecaster, interrupted)
    option = advice.chosen
    if option is None:
        return advice
    own = fitted.series[option.series]
    changed = _as_run(own, option)
    shares = spread_by_part(changed, option.candidate)
    return replace(
        advice,
        measurements=measurements(option, own.series, evidence.network, shares),
        assumptions=(
            *_assumptions(changed, option, advice),
            *((starts,) if (starts := option.startup_assumed) else ()),
            *_of_failures(interrupted.get(option.series), option),
        ),
    )


_WORTH_TELLING = 0.01
"""Of the time: what failures and checkpoints must take for their assumptions to be told."""


def _of_failures(between: Interruptions | None, option: Option) -> tuple[Assumption, ...]:
    startup = 0.0 if option.startup is None else option.startup.value
    if between is None or between.wall(option.training.value, option.nodes, startup).lost_share < _WORTH_TELLING:
        return ()
    return between.assumed(option.nodes)


def _as_run(fitted: FittedSeries, option: Option) -> Variant:
    candidate = option.candidate
    changes: dict[str, Any] = {
        "engine": candidate.engine,
        "zero_stage": candidate.zero_stage,
        "activation_checkpointing": candidate.activation_checkpointing,
    }
    if candidate.instance is not None:
        changes["gpu"] = candidate.instance.gpu
        changes |= {} if candidate.instance.network is None else {"network": candidate.instance.network}
    return variant(fitted, changes)


def _assumptions(changed: Variant, option: Option, advice: Advice) -> tuple[Assumption, ...]:
    """Of the option as it would be run; none where it was."""
    if option.label == "measured":
        return ()
    candidate, points = option.candidate, changed.fitted.points
    world = World(nodes=option.nodes, ranks_per_node=candidate.ranks_per_node, threads_per_rank=1)
    beyond = candidate.gpus > max(point.gpus for point in points) and candidate.instance is None
    assumed_hosts = advice.asked.ranks_per_node is None and host_size(points)[1] and beyond
    there = Place(changed.trial.model_copy(update={"world": world}), None, None, assumed_hosts)
    return assumptions(changed, there)
