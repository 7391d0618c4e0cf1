"""Figures with their intervals at any rank count, from the fitted parts; and what each part leaves open of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.engines import of_engine
from vitscale.errors import RequestError, unknown
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evaluating import evaluate, slower_added_hosts, worlds_of
from vitscale.prediction.evidence import IMAGE_SIZE, MICRO_BATCH, PRECISION, MeasuredPoint, Series
from vitscale.prediction.fitting import DRAWS, Fitted, FittedSeries
from vitscale.prediction.labels import ACROSS, FIT, FURTHER_HOSTS, HOST_SIZE, INSIDE, MODEL, WHAT_IS_SENT, assumptions
from vitscale.prediction.layouts import SeriesLayout, placement_of
from vitscale.prediction.parameters import PARTS
from vitscale.prediction.results import MEMORY, PART_FIELDS, REST_TOLD, STEP_FIELDS, Assumption, Prediction
from vitscale.prediction.sampling import spread_out_normals
from vitscale.prediction.start_up import launcher_of, start_up
from vitscale.prediction.step import of_series
from vitscale.prediction.step.model import Worlds
from vitscale.prediction.variants import PredictionVariant, differing, variant
from vitscale.prediction.workloads import workload
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class Question:
    """What is asked of the fitted parts."""

    gpus: tuple[int, ...]
    nodes_of: int | None = None
    """Ranks per host; None: as `layouts.ranks_per_node` has it."""
    series: str | None = None
    """One series by name; None: all."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What is to differ from the measured series: see `variants.variant`."""
    price_per_gpu_hour: float | None = None
    memory_capacity_bytes: int | None = None
    """Memory of a device; None: as it was recorded, else unavailable."""


def predict(fitted: Fitted, question: Question) -> tuple[Prediction, ...]:
    """Each series at each rank count asked for, series by series in rising order of ranks.

    Raises:
        RequestError: the question names something that cannot be: a series that is not there, a rank count of 0, an
            engine that refuses the options.
    """
    if not fitted.series:
        raise RequestError(
            "no trial has a completed run to predict from", next_step="Run the study first: vitscale run"
        )
    if question.series is not None and question.series not in fitted.series:
        raise unknown("series", question.series, fitted.series)
    chosen = _chosen(fitted, question)
    if not chosen:
        what = "every measured series asked for is of engine 'none', which has no way to several ranks"
        raise RequestError(what, next_step="Add --engine ddp, or run the study with an engine")
    works = [(workload(series.points[-1].trial), series.points) for series in fitted.evidence.series]
    return tuple(
        answered
        for series in chosen
        for answered in _of_series(series, question, _of_workload(works, series.points[-1].trial))
    )


def _of_workload(works: Sequence[tuple[object, Sequence[MeasuredPoint]]], trial: Trial) -> list[MeasuredPoint]:
    """The points of all series of a trial's workload: their start-ups tell of one another, in `advise` too."""
    own = workload(trial)
    return [point for work, points in works if work == own for point in points]


def _chosen(fitted: Fitted, question: Question) -> list[FittedSeries]:
    """The series that was named, else all, without those that cannot have several ranks if several are asked for.

    Where some of these were measured with the changes, those alone.
    """
    named = [fitted.series[name] for name in fitted.series if question.series in (None, name)]
    engine = question.changes.get("engine")
    able = [known for known in named if max(question.gpus) == 1 or can_grow(known.series, engine)]
    return [series for series in able if not differing(series.points, question.changes)] or able


def can_grow(series: Series, engine: str | None = None) -> bool:
    """Whether there is an engine for more ranks than one: the series' own, or the one it is to have instead."""
    return not of_engine(engine or series.points[-1].trial.train.engine).alone


def _of_series(fitted: FittedSeries, question: Question, started: Sequence[MeasuredPoint]) -> tuple[Prediction, ...]:
    asked = variant(fitted, question.changes)
    counts = sorted(set(question.gpus))
    most = question.changes.get("micro_batch")
    if fitted.series.mode == "strong-global" and "grad_accum" in question.changes:
        raise RequestError(
            f"--grad-accum is {question.changes['grad_accum']}, and all rank counts keep one global batch: "
            "accumulation follows from it and the micro-batch",
            next_step="Leave it out, or say --micro-batch, the most images that a rank takes at once",
        )
    placements = [placement_of(fitted.series, asked.trial, gpus, question.nodes_of, most) for gpus in counts]
    smallest = fitted.points[0].gpus
    base = placement_of(fitted.series, asked.trial, smallest, fitted.points[0].trial.world.ranks_per_node, most)
    candidates = [Candidate.of(placement.trial) for placement in placements]
    hosts_assumed = any(placement.host_size_assumed for placement in placements)
    evaluated = evaluate(
        asked,
        candidates,
        base=Candidate.of(base.trial),
        with_parts=True,
        hosts_assumed=hosts_assumed,
        memory_capacity_bytes=question.memory_capacity_bytes,
    )
    assumed = [assumptions(asked, placement) for placement in placements]
    if any(len(some) > 1 for some in assumed):
        variance = variance_by_part(asked, candidates, hosts_assumed)
        at = [{part: float(column[n]) for part, column in variance.items()} for n in range(len(placements))]
        assumed = [widest_first(some, own) for some, own in zip(assumed, at, strict=True)]
    return tuple(
        _prediction(asked, question, base, at, evaluated, n, assumed[n], started) for n, at in enumerate(placements)
    )


def _prediction(
    asked: PredictionVariant,
    question: Question,
    base: SeriesLayout,
    at: SeriesLayout,
    evaluated: Evaluated,
    n: int,
    assumed: tuple[Assumption, ...],
    started: Sequence[MeasuredPoint],
) -> Prediction:
    fitted, reasons = asked.fitted, dict[str, str]()
    step = evaluated.step.at(n)
    epoch = None if at.effective_steps is None else step.times(at.effective_steps)
    scaling: tuple[Estimate | None, Estimate | None] = _scaling(fitted, base, at, evaluated.speed.at(n))
    rate: Estimate | None = step.into(at.trial.global_batch)
    if epoch is None:
        reasons["epoch_seconds"] = "how many images an epoch has is not recorded"
    elif at.images and at.effective_steps and not at.trial.train.drop_last:
        rate = step.into(at.images / at.effective_steps)
    if not all(point.batch_known for point in fitted.points):
        untold = "the micro-batch is not told: import again with --micro-batch"
        if all(point.rate_known for point in fitted.points):  # what was fitted is the time of an image of each rank
            reasons |= dict.fromkeys(STEP_FIELDS, untold)
        else:
            rate, reasons["images_per_second"] = None, untold
    if at.images and epoch is None:
        scaling, rate = (None, None), None
        why = f"{at.images:,} images do not fill one batch of {at.trial.global_batch:,}, and drop_last leaves them out"
        reasons |= dict.fromkeys(("epoch_seconds", "images_per_second", "speedup", "efficiency"), why)
    parts = {f"{name}_seconds": part.at(n) for name, part in evaluated.parts.items()}
    parts["rest_seconds"] = Estimate(step.value - sum(part.value for part in parts.values()))
    if parts["rest_seconds"].value < -REST_TOLD * step.value:
        reasons = dict.fromkeys(PART_FIELDS, _PARTS_EXCEED) | reasons
    memory = None if np.isnan(evaluated.memory_bytes[n]) else int(evaluated.memory_bytes[n])
    if MICRO_BATCH in fitted.points[-1].assumed:
        memory, reasons["memory_bytes"] = None, "it depends on the micro-batch, which is not told"
    elif memory is None:
        reasons["memory_bytes"] = "no forecast for this model or engine"
    capacity = question.memory_capacity_bytes or asked.memory_capacity_bytes
    chance = None if memory is None or np.isnan(evaluated.oom_chance[n]) else float(evaluated.oom_chance[n])
    if chance is None:
        reasons["oom_chance"] = reasons.get("memory_bytes") or "the device's memory is not recorded: say --gpu-memory"
    offloaded = None if np.isnan(evaluated.host_memory_bytes[n]) else int(evaluated.host_memory_bytes[n])
    host_chance = None if np.isnan(evaluated.host_oom_chance[n]) else float(evaluated.host_oom_chance[n])
    if offloaded is None:
        reasons["host_memory_bytes"] = "no forecast for this model or engine"
    if host_chance is None:
        reasons["host_oom_chance"] = reasons.get("host_memory_bytes") or _why_no_host_memory(asked)
    joules = _joules_per_epoch(asked, at, epoch)
    if joules is None:
        reasons["joules_per_epoch"] = "energy was not measured" if epoch else reasons["epoch_seconds"]
    cost = None
    if question.price_per_gpu_hour is None:
        reasons["cost_per_epoch"] = "no price was given: say --price"
    elif epoch is None:
        reasons["cost_per_epoch"] = reasons["epoch_seconds"]
    else:
        cost = epoch.times(question.price_per_gpu_hour * at.gpus / 3600)
    launcher = launcher_of(fitted.points, at.gpus)
    starts = start_up([*fitted.points, *started], at.trial.model_copy(update={"launcher": launcher}))
    if starts is None:
        reasons["startup_seconds"] = "no run under its launcher measured it"
    if memory is not None:
        assumed = (*assumed, *_assumed_for_memory(at.trial, fitted.points[-1].assumed))
    if starts is not None and starts.assumption is not None:
        assumed = (*assumed, starts.assumption)
    return Prediction(
        series=fitted.series.name,
        mode=fitted.series.mode,
        labels=fitted.series.labels,
        trial=at.trial,
        gpu=None if asked.gpu is None else asked.gpu.name,
        parameters=asked.parameters,
        gpus=at.gpus,
        nodes=at.trial.world.nodes,
        label=evaluated.labels[n],
        images=at.images,
        steps_per_epoch=at.steps_per_epoch,
        step_seconds=step,
        epoch_seconds=epoch,
        images_per_second=rate,
        speedup=scaling[0],
        efficiency=scaling[1],
        **parts,
        memory_bytes=memory,
        memory_capacity_bytes=capacity,
        oom_chance=chance,
        host_memory_bytes=offloaded,
        host_memory_capacity_bytes=asked.host_memory_capacity_bytes,
        host_oom_chance=host_chance,
        joules_per_epoch=joules,
        cost_per_epoch=cost,
        startup_seconds=starts.seconds if starts else None,
        effective_draws=fitted.effective_draws,
        assumptions=assumed,
        reasons=reasons,
    )


def _why_no_host_memory(asked: PredictionVariant) -> str:
    """Return why the memory of the hosts, to which states are offloaded, is unknown."""
    if asked.gpu is not None:
        return f"the memory of hosts with {asked.gpu.name} is not known"
    return "the memory of the measured hosts is not recorded: measure once more"


_PARTS_EXCEED = "together they come to more than the step, whose middle is not the sum of theirs"
"""The middle of a step may lie between two models (`evaluating`); its parts are those of one."""


def _assumed_for_memory(trial: Trial, assumed_fields: Collection[str]) -> tuple[Assumption, ...]:
    """What a forecast of memory takes for granted where an import did not tell it."""
    options = {PRECISION: "--precision", IMAGE_SIZE: "--image-size"}
    values = {PRECISION: trial.train.precision, IMAGE_SIZE: f"{trial.model.image_size} pixels"}
    untold = [field for field in options if field in assumed_fields]
    if not untold:
        return ()
    taken = f"that of {' and '.join(values[field] for field in untold)}, which the import does not tell"
    return (Assumption(MEMORY, taken, f"say {' and '.join(options[field] for field in untold)}"),)


def _scaling(fitted: FittedSeries, base: SeriesLayout, at: SeriesLayout, ratio: Estimate) -> tuple[Estimate, Estimate]:
    """(speedup, efficiency) against the smallest measured rank count, by epochs; by images where epochs are unknown.

    `ratio`: seconds of the base's step over those of this count's step.
    """
    times_the_ranks = at.gpus / base.gpus
    if base.steps_of_all_images is not None and at.steps_of_all_images is not None:
        ratio = ratio.times(base.steps_of_all_images / at.steps_of_all_images)
    else:
        ratio = ratio.times(at.trial.global_batch / base.trial.global_batch)
        if fitted.series.mode == "weak":
            return ratio, ratio.times(1 / times_the_ranks)
    if fitted.series.mode == "weak":
        return ratio.times(times_the_ranks), ratio
    return ratio, ratio.times(1 / times_the_ranks)


def _joules_per_epoch(asked: PredictionVariant, at: SeriesLayout, epoch: Estimate | None) -> Estimate | None:
    """Energy of an epoch at the power per rank of the largest measured point that tells it; None: unavailable."""
    known = next((point for point in reversed(asked.fitted.points) if point.joules_per_image is not None), None)
    if known is None or known.joules_per_image is None or epoch is None:
        return None
    step = statistics.median(known.step_seconds)
    watts = known.joules_per_image * known.trial.global_batch / known.gpus / step
    return epoch.times(watts * at.gpus)


def variance_by_part(
    asked: PredictionVariant, candidates: Sequence[Candidate], hosts_assumed: bool = False
) -> dict[str, FloatArray]:
    """Variance of the logarithm of a future run's step time that each part's uncertainty makes, by configuration.

    Each part's parameters vary as drawn while all others stay at their means. "job-to-job" is what runs differ by.
    Hosts of an assumed size have half as many ranks, as many or twice as many.
    """
    fitted, worlds = asked.fitted, worlds_of(asked.fitted, candidates)
    rows = {name: column[:: DRAWS // _FOR_VARIANCE] for name, column in asked.draws.items()}
    still = {name: np.full_like(column, column.mean()) for name, column in rows.items()}

    measured = of_series.worlds_of(fitted.points)

    def logs(draws: Mapping[str, FloatArray], where: Worlds) -> FloatArray:
        return np.log(asked.model.times(draws, where).total * asked.model.left_out(draws, where, measured))

    variances = {
        part: logs(still | {name: rows[name] for name in names}, worlds).var(axis=0) for part, names in PARTS.items()
    }
    variances["job-to-job"] = np.full(len(candidates), float((fitted.job_spread**2).mean()))
    normals = spread_out_normals(np.random.default_rng(11), _FOR_VARIANCE)
    variances[FURTHER_HOSTS] = np.log(slower_added_hosts(fitted, worlds, normals)).var(axis=0)
    if hosts_assumed:
        middle = {name: column[:1] for name, column in still.items()}
        sizes = [replace(worlds, ranks_per_node=np.maximum(1.0, worlds.ranks_per_node * n)) for n in (0.5, 1.0, 2.0)]
        variances[HOST_SIZE] = np.concatenate([logs(middle, size) for size in sizes]).var(axis=0)
    return variances


_FOR_VARIANCE = 128
"""Draws that tell a variance to a tenth."""


def spread_by_part(asked: PredictionVariant, at: Candidate) -> dict[str, float]:
    """Each part's share of the variance, by `variance_by_part`.

    The shares add up to 1; what parts trade off against each other is counted in each.
    """
    variances = variance_by_part(asked, [at])
    whole = sum(float(variance[0]) for variance in variances.values())
    return {part: float(variance[0]) / whole for part, variance in variances.items()}


OPENED_BY: Mapping[str, tuple[str, ...]] = {
    ACROSS: ("network between hosts",),
    INSIDE: ("network inside hosts",),
    "network inside its hosts": ("network inside hosts",),
    WHAT_IS_SENT: ("overlap", "network between hosts"),
    "job-to-job variation": ("job-to-job",),
    "the mixture of devices": ("stragglers",),
    "compute of another model": ("compute",),
    "another precision": ("compute",),
    "another GPU": ("compute",),
    "activation checkpointing": ("compute",),
    "an engine that was not measured": ("overlap",),
    FURTHER_HOSTS: (FURTHER_HOSTS,),
    HOST_SIZE: (HOST_SIZE,),
}
"""An assumption (up to a bracket) -> what it leaves open (`variance_by_part`)."""


def widest_first(assumed: Sequence[Assumption], variance: Mapping[str, float]) -> tuple[Assumption, ...]:
    """Assumptions in falling order of the variance of a step's logarithm that they leave open."""

    def opened(assumption: Assumption) -> float:
        if assumption.part in (MODEL, FIT):  # all others are small beside it
            return math.inf
        return sum(variance.get(part, 0.0) for part in OPENED_BY.get(assumption.part.partition(" (")[0], ()))

    return tuple(sorted(assumed, key=opened, reverse=True))
