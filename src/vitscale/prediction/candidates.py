"""Thousands of configurations of one series at once: what `advise` chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from vitscale.errors import unknown
from vitscale.prediction.fitting import Fitted, FittedSeries, spread_out_normals
from vitscale.prediction.labels import assumptions, label
from vitscale.prediction.layouts import Place, images_at
from vitscale.prediction.memory.chance import oom_chance
from vitscale.prediction.memory.many import peak_bytes_of
from vitscale.prediction.parameters import PARTS
from vitscale.prediction.predicting import left_out_by_the_model, mixed_slowdown
from vitscale.prediction.results import Label
from vitscale.prediction.step.model import Array, Worlds
from vitscale.prediction.variants import Variant, variant
from vitscale.trial import Trial, World

_DRAWS = 64
"""Of each candidate: enough for a 90 % interval to a tenth of its width, and few enough for thousands."""


@dataclass(frozen=True)
class Candidate:
    """One configuration to look at beside thousands of others. Its other fields are the series' own."""

    gpus: int
    ranks_per_node: int
    engine: str
    zero_stage: int
    micro_batch: int
    grad_accum: int
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Forecasts:
    """One place per candidate; NaN is unavailable."""

    candidates: tuple[Candidate, ...]
    step_seconds: Array
    step_low: Array
    """Of the mean, 90 %; so `step_high`."""
    step_high: Array
    step_future_low: Array
    step_future_high: Array
    epoch_seconds: Array
    epoch_future_low: Array
    epoch_future_high: Array
    images_per_second: Array
    efficiency: Array
    """Against one rank of the same micro-batch, accumulation and engine, as predicted."""
    memory_bytes: Array
    oom_chance: Array
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class _Kind:
    """Candidates that differ in ranks and batch sizes alone share one model of a step."""

    engine: str
    zero_stage: int
    activation_checkpointing: bool


def forecast_candidates(
    fitted: Fitted, series: str, candidates: Sequence[Candidate], memory_capacity_bytes: int | None = None
) -> Forecasts:
    """Many configurations of one series at once: 10,000 take less than a second.

    A candidate whose engine another series of the same workload was measured with is worked out from that one.

    Args:
        fitted: all series.
        series: the one that candidates continue, by name.
        candidates: the configurations.
        memory_capacity_bytes: of a device; None: as it was recorded.

    Raises:
        RequestError: there is no such series, or an engine refuses the series' options.
    """
    if series not in fitted.series:
        raise unknown("series", series, fitted.series)
    base = fitted.series[series]
    columns = {name: np.full(len(candidates), np.nan) for name in _COLUMNS}
    labels: list[Label] = ["prior-driven"] * len(candidates)
    by_kind: dict[_Kind, list[int]] = {}
    for n, one in enumerate(candidates):
        by_kind.setdefault(_Kind(one.engine, one.zero_stage, one.activation_checkpointing), []).append(n)
    for kind, members in by_kind.items():
        some = [candidates[n] for n in members]
        asked = _variant_of(fitted, base, kind)
        _fill(columns, np.array(members), asked, some, memory_capacity_bytes)
        for n, found in zip(members, _labels(asked, some), strict=True):
            labels[n] = found
    return Forecasts(tuple(candidates), **columns, labels=tuple(labels))


_COLUMNS = (
    "step_seconds", "step_low", "step_high", "step_future_low", "step_future_high", "epoch_seconds",
    "epoch_future_low", "epoch_future_high", "images_per_second", "efficiency", "memory_bytes", "oom_chance",
)  # fmt: skip


def spread_by_part(fitted: FittedSeries, gpus: int, ranks_per_node: int) -> dict[str, float]:
    """Share of the variance of the logarithm of a future run's step time that each part's uncertainty makes.

    Each part's parameters vary as drawn while all others stay at their means; "job-to-job" is what runs differ by. The
    shares add up to 1; parts that trade off against each other are counted in each.
    """
    train = fitted.points[-1].trial.train
    world = Candidate(gpus, ranks_per_node, train.engine, train.zero_stage, train.micro_batch, train.grad_accum)
    worlds = _worlds(variant(fitted, {}), [world])
    still = {name: np.full_like(rows, rows.mean()) for name, rows in fitted.draws.items()}
    shares = {}
    for part, names in PARTS.items():
        varied = still | {name: fitted.draws[name] for name in names}
        shares[part] = float(np.log(fitted.model.times(varied, worlds).total).var())
    shares["job-to-job"] = float((fitted.job_spread**2).mean())
    whole = sum(shares.values())
    return {part: share / whole for part, share in shares.items()}


def _variant_of(fitted: Fitted, base: FittedSeries, kind: _Kind) -> Variant:
    """From the series that was measured with the engine, where one of the same workload was; else by arithmetic."""
    changes: dict[str, Any] = {
        "engine": kind.engine,
        "zero_stage": kind.zero_stage,
        "activation_checkpointing": kind.activation_checkpointing,
    }
    for other in (base, *fitted.series.values()):
        train = other.points[-1].trial.train
        if _workload(other) == _workload(base) and all(getattr(train, k) == v for k, v in changes.items()):
            return variant(other, {})
    wanted = base.points[-1].trial.train
    return variant(base, {name: value for name, value in changes.items() if getattr(wanted, name) != value})


def _workload(fitted: FittedSeries) -> tuple[object, ...]:
    trial = fitted.points[-1].trial
    return (
        trial.model, trial.data.name, trial.train.precision, trial.train.device, trial.origin, fitted.series.mode,
    )  # fmt: skip


def _worlds(asked: Variant, some: Sequence[Candidate]) -> Worlds:
    ranks = np.array([float(one.gpus) for one in some])
    return Worlds(
        ranks=ranks,
        ranks_per_node=np.minimum(ranks, np.array([float(one.ranks_per_node) for one in some])),
        micro_batch=np.array([float(one.micro_batch) for one in some]),
        grad_accum=np.array([float(one.grad_accum) for one in some]),
        slowdown=mixed_slowdown(asked.fitted, ranks),
    )


def _fill(columns: dict[str, Array], at: Any, asked: Variant, some: Sequence[Candidate], capacity: int | None) -> None:
    fitted, worlds = asked.fitted, _worlds(asked, some)
    rng = np.random.default_rng(13)
    chosen = _typical_draws(asked, worlds)
    draws = {name: rows[chosen] for name, rows in asked.draws.items()}
    beyond = left_out_by_the_model(fitted, worlds.ranks, spread_out_normals(rng, _DRAWS))
    mean = asked.model.times(draws, worlds).total * beyond
    alone = replace(worlds, ranks=np.ones_like(worlds.ranks), ranks_per_node=np.ones_like(worlds.ranks))
    one_rank = asked.model.times(draws, replace(alone, slowdown=mixed_slowdown(fitted, alone.ranks))).total
    future = mean * np.exp(fitted.job_spread[chosen] * spread_out_normals(rng, _DRAWS))
    low, middle, high = np.quantile(mean, [0.05, 0.5, 0.95], axis=0)
    future_low, future_high = np.quantile(future, [0.05, 0.95], axis=0)
    per_step = worlds.ranks * worlds.micro_batch * worlds.grad_accum
    steps, images = _effective_steps(fitted, worlds, per_step, asked.trial.train.drop_last)
    capacity = capacity or fitted.points[-1].memory_capacity_bytes
    memory = np.array([_memory(asked.trial, one) for one in some])
    found = {
        "step_seconds": middle, "step_low": low, "step_high": high,
        "step_future_low": np.minimum(low, future_low), "step_future_high": np.maximum(high, future_high),
        "images_per_second": np.where(np.isnan(steps), per_step, images / steps) / middle,
        "efficiency": np.median(one_rank / mean, axis=0),
        "memory_bytes": memory,
    }  # fmt: skip
    for name in ("seconds", "future_low", "future_high"):
        found[f"epoch_{name}"] = steps * found[f"step_{name}"]
    if capacity is not None:
        found["oom_chance"] = np.where(
            np.isnan(memory), np.nan, oom_chance(np.nan_to_num(memory), capacity, asked.trial.train.device)
        )
    for name, values in found.items():
        columns[name][at] = values


def _typical_draws(asked: Variant, worlds: Worlds) -> Array:
    """(_DRAWS,) places: one draw from each of so many equally likely ranges of the step on the most ranks, so that few
    draws have the tails of all."""
    most = int(np.argmax(worlds.ranks))
    at_most = Worlds(*(getattr(worlds, one.name)[[most]] for one in fields(worlds)))
    order = np.argsort(asked.model.times(asked.draws, at_most).total[:, 0], kind="stable")
    places: Array = order[((np.arange(_DRAWS) + 0.5) * len(order) / _DRAWS).astype(int)]
    return places


def _effective_steps(fitted: FittedSeries, worlds: Worlds, per_step: Array, drop_last: bool) -> tuple[Array, Array]:
    """(whole steps that an epoch comes to, images trained in them); NaN where the images of an epoch are unknown."""
    images_of = {int(n): images_at(fitted.series, int(n))[0] for n in np.unique(worlds.ranks)}
    images = np.array([np.nan if (found := images_of[int(n)]) is None else float(found) for n in worlds.ranks])
    steps = whole_steps(images, per_step, worlds.micro_batch, drop_last)
    return steps, np.where(drop_last, steps * per_step, images)


def whole_steps(images: Array, per_step: Array, micro_batch: Array, drop_last: bool) -> Array:
    """`trial.effective_steps` of many candidates; NaN where not one step is full under `drop_last`."""
    full = np.floor(images / per_step)
    if drop_last:
        return np.asarray(np.where(full > 0, full, np.nan))
    share = np.ceil(micro_batch * (images - full * per_step) / per_step) / micro_batch
    return np.asarray(np.where(full > 0, full + share, 1.0 + 0.0 * images))


def _memory(template: Trial, one: Candidate) -> float:
    found = peak_bytes_of(
        template,
        gpus=one.gpus,
        engine=one.engine,
        zero_stage=one.zero_stage,
        micro_batch=one.micro_batch,
        grad_accum=one.grad_accum,
        activation_checkpointing=one.activation_checkpointing,
    )
    return float("nan") if found is None else float(found)


def _labels(asked: Variant, some: Sequence[Candidate]) -> list[Label]:
    """They depend on where ranks lie alone: worked out once for each such place."""
    known: dict[tuple[int, int], Label] = {}
    found = []
    for one in some:
        key = (one.gpus, min(one.gpus, one.ranks_per_node))
        if key not in known:
            world = World(nodes=max(1, -(-one.gpus // key[1])), ranks_per_node=key[1], threads_per_rank=1)
            there = Place(asked.trial.model_copy(update={"world": world}), None, None, False)
            known[key] = label(asked, there, assumptions(asked, there))
        found.append(known[key])
    return found
