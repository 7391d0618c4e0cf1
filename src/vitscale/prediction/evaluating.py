"""What configurations of a series take, over all that the fit leaves open: a few for `predict`, many for `advise`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from vitscale.analysis.statistics import t_quantile
from vitscale.errors import unknown
from vitscale.prediction.evidence import Point, Series
from vitscale.prediction.fitting import DRAWS, Fitted, FittedSeries
from vitscale.prediction.gpu_types import GpuType
from vitscale.prediction.labels import FURTHER_HOSTS, HOST_SIZE, assumptions, label, types_are_known
from vitscale.prediction.layouts import Place, images_at
from vitscale.prediction.memory.chance import oom_chance
from vitscale.prediction.memory.many import peak_bytes_of_many
from vitscale.prediction.network.links import Link
from vitscale.prediction.parameters import JOB_DEVIATION, JOB_TO_JOB_RUNS, PARTS, job_scale
from vitscale.prediction.results import CONFIDENCE, Estimate, Label
from vitscale.prediction.sampling import spread_out_jobs, spread_out_normals
from vitscale.prediction.step import of_series
from vitscale.prediction.step.model import Array, Worlds
from vitscale.prediction.step.of_series import device_factors, slowdown
from vitscale.prediction.variants import Variant, variant
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import HOW_FOUND, OF_THE_WRAPPER, Trial, World

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance  # with all importers

_SLOWER_HOSTS_CHANCE, _SLOWER_HOSTS_SPREAD = {False: 0.1, True: 0.5}, 0.35
"""That hosts beyond the measured ones hold slower GPUs, where no type is recorded and where unlike ones were measured;
and how much slower then: one side of a normal logarithm. No data chose them: added slower cards made steps 1.6 to 1.85
times as long, which is that side's 82nd to 92nd percentile."""
_TAIL = (1 - CONFIDENCE) / 2
_FUTURES = 4
"""Job effects drawn for each draw of the parameters."""
_AT_ONCE = 1 << 16
"""Draws x configurations: what stays in a core's cache."""
ROUGH = 32
"""Draws of which the middle tells a configuration within a few per cent: enough to leave out the hopeless."""


@dataclass(frozen=True)
class Candidate:
    """One configuration. Its other fields are the series' own."""

    gpus: int
    ranks_per_node: int
    engine: str
    zero_stage: int
    micro_batch: int
    grad_accum: int
    activation_checkpointing: bool = False
    instance: Instance | None = None
    """What it is rented as; None: hosts like the measured ones."""

    @staticmethod
    def of(trial: Trial) -> Candidate:
        """A trial's own; of unequal micro-batches the largest."""
        train, world = trial.train, trial.world
        return Candidate(
            world.size, world.ranks_per_node, train.engine, train.zero_stage, largest_micro_batch(train),
            train.grad_accum, train.activation_checkpointing,
        )  # fmt: skip

    @property
    def alone(self) -> Candidate:
        """The same on one rank."""
        return replace(self, gpus=1, ranks_per_node=1)


@dataclass(frozen=True)
class Estimates:
    """`results.Estimate` of many configurations: an array for each of its numbers."""

    value: Array
    low: Array
    high: Array
    future_low: Array
    future_high: Array

    def at(self, n: int) -> Estimate:
        """Of one configuration."""
        return Estimate(*(float(getattr(self, one.name)[n]) for one in fields(self)))


@dataclass(frozen=True)
class Evaluated:
    """What is expected of configurations, an array's place for each; NaN is unavailable."""

    candidates: tuple[Candidate, ...]
    step: Estimates
    """Seconds."""
    speed: Estimates
    """Seconds of the base's step over those of the configuration's own."""
    parts: dict[str, Estimates]
    """Seconds of compute (with the optimizer), wait, wire and norm; empty unless they were asked for."""
    images: Array
    """Of an epoch."""
    effective_steps: Array
    """Whole steps that an epoch comes to."""
    memory_bytes: Array
    oom_chance: Array
    labels: tuple[Label, ...]


def evaluate(
    asked: Variant,
    candidates: Sequence[Candidate],
    *,
    base: Candidate | None = None,
    with_parts: bool = False,
    with_memory: bool = True,
    measured: Sequence[Point] = (),
    micro_batches: frozenset[int] = frozenset(),
    hosts_assumed: bool = False,
    memory_capacity_bytes: int | None = None,
    draws: int = DRAWS,
) -> Evaluated:
    """Configurations of a series, each as if it were asked for alone: all share the draws and the job effects.

    Args:
        asked: the series, with what is to differ from it.
        candidates: of the engine, stage and checkpointing that `asked` has.
        base: that `speed` is held against. None: of each configuration one rank of the same batch.
        with_parts: whether the parts of a step are wanted too.
        with_memory: whether memory is.
        measured: points whose configurations are answered from their own runs, and labelled so.
        micro_batches: that were measured with this engine; empty: those of the series.
        hosts_assumed: nobody said, and nothing measured, how many ranks a host has.
        memory_capacity_bytes: of a device; None: as it was recorded.
        draws: of all `DRAWS` so many, evenly chosen. Of `ROUGH` only the middle of a step comes, all else is NaN.
    """
    every = _Draws(asked, base, measured, draws)
    at_once = max(1, _AT_ONCE // draws)
    pieces = [every.of(candidates[n : n + at_once], with_parts) for n in range(0, len(candidates), at_once)]
    images, steps = _epochs(asked, candidates)
    memory = _memory(asked.trial, candidates) if with_memory else np.full(len(candidates), np.nan)
    capacity = memory_capacity_bytes or asked.memory_capacity_bytes
    chance = np.full(len(candidates), np.nan)
    if capacity is not None and len(candidates):
        known = oom_chance(np.nan_to_num(memory), capacity, asked.trial.train.device)
        chance = np.where(np.isnan(memory), np.nan, known)
    return Evaluated(
        candidates=tuple(candidates),
        step=_joined([step for step, _, _ in pieces]),
        speed=_joined([speed for _, speed, _ in pieces]),
        parts={name: _joined([parts[name] for _, _, parts in pieces]) for name in (pieces[0][2] if pieces else ())},
        images=images,
        effective_steps=steps,
        memory_bytes=memory,
        oom_chance=chance,
        labels=_labels(asked, candidates, every.measured, micro_batches, hosts_assumed),
    )


class _Draws:
    """The draws of a series, and what they make of some of its configurations."""

    def __init__(self, asked: Variant, base: Candidate | None, measured: Sequence[Point], count: int) -> None:
        rng = np.random.default_rng(11)
        some = slice(None, None, DRAWS // count)
        self.asked, self.base = asked, base
        # Of points alike the first counts.
        self.measured = {Candidate.of(one.trial): measured_step(measured, one) for one in reversed(measured)}
        self.draws = {name: rows[some] for name, rows in asked.draws.items()}
        self.job_spread = asked.fitted.job_spread[some]
        count = len(self.job_spread)
        self.of_runs, self.of_misfit = spread_out_normals(rng, count), spread_out_normals(rng, count)
        self.jobs, self.jobs_of_base = (
            np.hstack([spread_out_jobs(rng, count) for _ in range(_FUTURES)]).T[:, :, None] for _ in range(2)
        )
        self.added = spread_out_normals(rng, count)

    def of(
        self, candidates: Sequence[Candidate], with_parts: bool
    ) -> tuple[Estimates, Estimates, dict[str, Estimates]]:
        """(seconds of a step, the base's over them, the parts)."""
        mean, parts = self._mean(candidates)
        if len(self.job_spread) <= ROUGH:
            unknown = np.full(len(candidates), np.nan)
            middles = Estimates(np.median(mean, axis=0), unknown, unknown, unknown, unknown)
            return middles, Estimates(unknown, unknown, unknown, unknown, unknown), {}
        bases = [one.alone for one in candidates] if self.base is None else [self.base]
        distinct = {one: n for n, one in enumerate(dict.fromkeys(bases))}
        of_base = self._mean(list(distinct))[0][:, [distinct[one] for one in bases]]
        future, future_of_base = self._future(mean, self.jobs), self._future(of_base, self.jobs_of_base)
        speed = _estimates(of_base / mean, future_of_base / future)
        itself = np.array([one == base for one, base in zip(candidates, bases * len(candidates), strict=False)])
        speed = Estimates(*(np.where(itself, 1.0, getattr(speed, one.name)) for one in fields(speed)))
        step = _estimates(mean, future)
        for n, one in enumerate(candidates):
            if one in self.measured:
                for field in fields(step):
                    getattr(step, field.name)[n] = getattr(self.measured[one], field.name)
        # A future run has a part of its step as the mean has it.
        return step, speed, {name: _estimates(part, part) for name, part in parts.items()} if with_parts else {}

    def _mean(self, candidates: Sequence[Candidate]) -> tuple[Array, dict[str, Array]]:
        """((draws, configurations) seconds of a step, in the mean over many runs; the parts likewise)."""
        fitted, worlds = self.asked.fitted, worlds_of(self.asked.fitted, candidates)
        model = self.asked.model
        times = model.times(self.draws, worlds)
        mean = times.total * model.left_out(self.draws, worlds, of_series.worlds_of(fitted.points))
        mean *= slower_added_hosts(fitted, worlds, self.added)
        mean *= np.exp(fitted.misfit_spread * self.of_misfit)
        if fitted.widening > 1:
            middle = np.median(mean, axis=0)
            mean = middle * (mean / middle) ** fitted.widening
        for n, one in enumerate(candidates):
            if one in self.measured:
                own = self.measured[one]
                spread = math.log(own.high / own.low) / (2 * _Z)
                mean[:, [n]] = own.value * np.exp(spread * self.of_runs)
        parts = {
            "compute": times.compute + times.optimizer, "wait": times.wait, "wire": times.wire, "norm": times.norm
        }  # fmt: skip
        return mean, parts

    def _future(self, mean: Array, jobs: Array) -> Array:
        """Of runs still to be made, (draws x job effects, configurations)."""
        runs: Array = (mean * np.exp(self.job_spread * jobs)).reshape(-1, mean.shape[1])
        return runs


_Z = 1.6449
"""Standard deviations on either side of a normal distribution's middle 90 %."""
_OF_A_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of many normal values (Kendall & Stuart, section 17.12)."""


def measured_step(points: Sequence[Point], point: Point) -> Estimate:
    """Seconds of a step as a point's own runs have it: their median, which no single run that hung moves.

    How far runs differ is what all runs of `points` say, with a prior as in `fitting`; intervals are of Student's t.
    """
    prior = JOB_DEVIATION * job_scale(point.trial)
    squares, freedom = JOB_TO_JOB_RUNS * prior**2, JOB_TO_JOB_RUNS
    for one in points:
        logs = [math.log(seconds) for seconds in one.step_seconds]
        squares += sum((log - statistics.fmean(logs)) ** 2 for log in logs)
        freedom += len(logs) - 1
    count = len(point.step_seconds)
    reach = t_quantile(freedom, 1 - _TAIL) * math.sqrt(squares / freedom)
    error = (_OF_A_MEDIAN if count > 2 else 1.0) / math.sqrt(count)
    middle = math.exp(statistics.median(math.log(seconds) for seconds in point.step_seconds))
    mean, future = math.exp(reach * error), math.exp(reach * math.hypot(1.0, error))
    return Estimate(middle, middle / mean, middle * mean, middle / future, middle * future)


def _estimates(mean: Array, future: Array) -> Estimates:
    low, middle, high = np.quantile(mean, [_TAIL, 0.5, 1 - _TAIL], axis=0)
    future_low, future_high = np.quantile(future, [_TAIL, 1 - _TAIL], axis=0)
    return Estimates(middle, low, high, np.minimum(low, future_low), np.maximum(high, future_high))


def _joined(pieces: Sequence[Estimates]) -> Estimates:
    columns = ([getattr(one, field.name) for one in pieces] for field in fields(Estimates))
    return Estimates(*(np.concatenate([np.empty(0), *column]) for column in columns))


def worlds_of(fitted: FittedSeries, candidates: Sequence[Candidate]) -> Worlds:
    """Where configurations lie, and their batches."""
    ranks, per_node, micro_batch, grad_accum = np.array(
        [(one.gpus, one.ranks_per_node, one.micro_batch, one.grad_accum) for one in candidates], dtype=float
    ).T
    return Worlds(ranks, np.minimum(ranks, per_node), micro_batch, grad_accum, mixed_slowdown(fitted, ranks))


def mixed_slowdown(fitted: FittedSeries, ranks: Array) -> Array:
    """Of unlike devices: the mixture stays that of the largest measured point; a rank alone is its first."""
    mixture = fitted.points[-1]
    factors = device_factors(fitted.points)
    alone = factors.get(mixture.devices[0], 1.0) if mixture.devices else 1.0
    return np.where(ranks > 1, slowdown(mixture, factors), alone)


def slower_added_hosts(fitted: FittedSeries, worlds: Worlds, normal: Array) -> Array:
    """Factor of 1 or more on a step for slower GPUs on hosts beyond the measured ones; 1 where the types are known, and
    alike, for then that further ones are so too is said (`labels.assumptions`)."""
    beyond = np.ceil(worlds.ranks / worlds.ranks_per_node) > max(point.nodes for point in fitted.points)
    if types_are_known(fitted) or not beyond.any():
        return np.ones_like(normal * worlds.ranks)
    chance = _SLOWER_HOSTS_CHANCE[any(point.devices for point in fitted.points)]
    one_sided = np.reshape([_one_sided(float(one), chance) for one in normal.flat], normal.shape)
    slower: Array = np.exp(_SLOWER_HOSTS_SPREAD * one_sided * beyond)
    return slower


@cache
def _one_sided(normal: float, chance: float) -> float:
    """A standard normal number as the absolute value of another one where it is among the highest `chance`, else 0."""
    far = min(1 - 1e-9, (NormalDist().cdf(normal) - (1 - chance)) / chance)
    return NormalDist().inv_cdf((1 + far) / 2) if far > 0 else 0.0


def _epochs(asked: Variant, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
    """(images of an epoch, whole steps that it comes to) of each."""
    series = asked.fitted.series
    known = {gpus: images_at(series, gpus)[0] for gpus in {one.gpus for one in candidates}}
    images = np.array([known[one.gpus] or np.nan for one in candidates], dtype=float)
    batch = np.array([one.gpus * one.micro_batch * one.grad_accum for one in candidates], dtype=float)
    micro_batch = np.array([one.micro_batch for one in candidates], dtype=float)
    return images, whole_steps(images, batch, micro_batch, asked.trial.train.drop_last)


def whole_steps(images: Array, per_step: Array, micro_batch: Array, drop_last: bool) -> Array:
    """`trial.effective_steps` of many configurations; NaN where not one step is full under `drop_last`."""
    full = np.floor(images / per_step)
    if drop_last:
        return np.asarray(np.where(full > 0, full, np.nan))
    share = np.ceil(micro_batch * (images - full * per_step) / per_step) / micro_batch
    return np.asarray(np.where(full > 0, full + share, 1.0 + 0.0 * images))


def _memory(template: Trial, candidates: Sequence[Candidate]) -> Array:
    """Peak bytes of a rank."""
    by_kind: dict[tuple[int, str, int, bool, bool], list[int]] = {}
    for n, one in enumerate(candidates):
        kind = (one.gpus, one.engine, one.zero_stage, one.grad_accum > 1, one.activation_checkpointing)
        by_kind.setdefault(kind, []).append(n)
    found = np.full(len(candidates), np.nan)
    for kind, members in by_kind.items():
        found[members] = peak_bytes_of_many(template, *kind, np.array([candidates[n].micro_batch for n in members]))
    return found


def _labels(
    asked: Variant,
    candidates: Sequence[Candidate],
    measured: Mapping[Candidate, Estimate],
    micro_batches: frozenset[int],
    hosts_assumed: bool,
) -> tuple[Label, ...]:
    """They depend on where ranks lie, and on whether a batch lies among those that were measured."""
    points = asked.fitted.points
    batches = micro_batches or frozenset(largest_micro_batch(point.trial.train) for point in points)
    largest = max(point.gpus for point in points)
    known: dict[tuple[int, int], Label] = {}
    found: list[Label] = []
    for one in candidates:
        if one in measured:
            found.append("measured")
            continue
        key = (one.gpus, min(one.gpus, one.ranks_per_node))
        if key not in known:
            world = World(nodes=-(-one.gpus // key[1]), ranks_per_node=key[1], threads_per_rank=1)
            there = Place(
                asked.trial.model_copy(update={"world": world}), None, None, hosts_assumed and one.gpus > largest
            )  # fmt: skip
            known[key] = label(asked, there, assumptions(asked, there))
        within = min(batches) <= one.micro_batch <= max(batches)
        found.append("extrapolated" if known[key] == "interpolated" and not within else known[key])
    return tuple(found)


def evaluate_all(
    fitted: Fitted,
    series: str,
    candidates: Sequence[Candidate],
    *,
    with_memory: bool = True,
    hosts_assumed: bool = False,
    memory_capacity_bytes: int | None = None,
    draws: int = DRAWS,
) -> Evaluated:
    """Configurations of any engine, worked out from one series or another of the same workload that measured theirs.

    What was measured is answered from its own runs.

    Raises:
        RequestError: there is no such series, or an engine refuses the series' options.
    """
    if series not in fitted.series:
        raise unknown("series", series, fitted.series)
    base = fitted.series[series]
    by_kind: dict[tuple[str, int, bool, GpuType | None, Link | None], list[int]] = {}
    for n, one in enumerate(candidates):
        gpu, network = (None, None) if one.instance is None else (one.instance.gpu, one.instance.network)
        kind = (one.engine, one.zero_stage, one.activation_checkpointing, gpu, network)
        by_kind.setdefault(kind, []).append(n)
    pieces: list[tuple[list[int], Evaluated]] = []
    for (engine, zero_stage, checkpointing, gpu, network), members in by_kind.items():
        changes = {"engine": engine, "zero_stage": zero_stage, "activation_checkpointing": checkpointing}
        hosts = {name: value for name, value in (("gpu", gpu), ("network", network)) if value is not None}
        asked, points = _variant_of(fitted, base, changes, hosts)
        batches = frozenset(largest_micro_batch(point.trial.train) for point in points)
        found = evaluate(
            asked,
            [candidates[n] for n in members],
            with_memory=with_memory,
            measured=points,
            micro_batches=batches,
            hosts_assumed=hosts_assumed,
            memory_capacity_bytes=memory_capacity_bytes,
            draws=draws,
        )
        pieces.append((members, found))
    return gathered(pieces)


def gathered(pieces: Sequence[tuple[list[int], Evaluated]]) -> Evaluated:
    """Pieces as one: (places of its configurations in the whole, a piece). Parts are left out."""
    order = np.argsort(np.array([n for members, _ in pieces for n in members], dtype=int))

    def column(of: Callable[[Evaluated], Array]) -> Array:
        return np.concatenate([np.empty(0), *(of(piece) for _, piece in pieces)])[order]

    def estimates(of: Callable[[Evaluated], Estimates]) -> Estimates:
        whole = _joined([of(piece) for _, piece in pieces])
        return Estimates(*(getattr(whole, one.name)[order] for one in fields(whole)))

    candidates = [one for _, piece in pieces for one in piece.candidates]
    labels = [label for _, piece in pieces for label in piece.labels]
    return Evaluated(
        candidates=tuple(candidates[n] for n in order),
        step=estimates(lambda one: one.step),
        speed=estimates(lambda one: one.speed),
        parts={},
        images=column(lambda one: one.images),
        effective_steps=column(lambda one: one.effective_steps),
        memory_bytes=column(lambda one: one.memory_bytes),
        oom_chance=column(lambda one: one.oom_chance),
        labels=tuple(labels[n] for n in order),
    )


def _variant_of(
    fitted: Fitted, base: FittedSeries, changes: Mapping[str, Any], hosts: Mapping[str, Any]
) -> tuple[Variant, tuple[Point, ...]]:
    """(from the series that was measured with the wrapper, where one of the same workload was, else by arithmetic; all
    points of that workload that were measured with it). `hosts`: what is to differ of the hosts."""
    work, own = workload(base.points[-1].trial), base.series
    ranked = sorted(fitted.evidence.series, key=lambda one: (one.name != own.name, one.mode != own.mode))
    alike = [
        one for one in ranked
        if workload(trial := one.points[-1].trial) == work
        and all(getattr(trial.train, name) == value for name, value in changes.items())
    ]  # fmt: skip
    if not alike:
        return variant(base, {**changes, **hosts}), ()
    asked = variant(fitted.series[alike[0].name], hosts)
    return asked, measured_like(alike, asked.trial)


def measured_like(series: Sequence[Series], trial: Trial) -> tuple[Point, ...]:
    """Points of the same workload that differ from a trial in world and batch alone."""
    same = (workload(trial), _of_a_step(trial))
    points = (point for one in series for point in one.points if not point.trial.train.micro_batches)
    return tuple(point for point in points if (workload(point.trial), _of_a_step(point.trial)) == same)


def _of_a_step(trial: Trial) -> dict[str, object]:
    """What of the training, beside its batches, decides how long a step takes."""
    return trial.train.model_dump(include={*OF_THE_WRAPPER, *_OF_A_STEP, "activation_checkpointing"})


_OF_A_STEP = ("precision", "device", "optimizer", "gradient_clipping", "compile")
"""Fields of `TrainSpec` that decide how long a step takes, beside those in which candidates differ."""


def workload(trial: Trial) -> tuple[object, ...]:
    """What must be alike for one trial's step to say something of another's; wrapper and batch may differ."""
    return (
        trial.model,
        trial.data.model_dump(exclude={"fraction", *HOW_FOUND}),
        *(getattr(trial.train, name) for name in _OF_A_STEP),
        trial.world.threads_per_rank,
        trial.origin,
    )


def variance_by_part(asked: Variant, candidates: Sequence[Candidate], hosts_assumed: bool = False) -> dict[str, Array]:
    """Variance of the logarithm of a future run's step time that each part's uncertainty makes, by configuration.

    Each part's parameters vary as drawn while all others stay at their means; "job-to-job" is what runs differ by, and
    hosts of an assumed size have half of it or twice as many ranks.
    """
    fitted, worlds = asked.fitted, worlds_of(asked.fitted, candidates)
    rows = {name: column[:: DRAWS // _FOR_VARIANCE] for name, column in asked.draws.items()}
    still = {name: np.full_like(column, column.mean()) for name, column in rows.items()}

    measured = of_series.worlds_of(fitted.points)

    def logs(draws: Mapping[str, Array], where: Worlds) -> Array:
        return np.log(asked.model.times(draws, where).total * asked.model.left_out(draws, where, measured))

    found = {
        part: logs(still | {name: rows[name] for name in names}, worlds).var(axis=0) for part, names in PARTS.items()
    }
    found["job-to-job"] = np.full(len(candidates), float((fitted.job_spread**2).mean()))
    normals = spread_out_normals(np.random.default_rng(11), _FOR_VARIANCE)
    found[FURTHER_HOSTS] = np.log(slower_added_hosts(fitted, worlds, normals)).var(axis=0)
    if hosts_assumed:
        middle = {name: column[:1] for name, column in still.items()}
        sizes = [replace(worlds, ranks_per_node=np.maximum(1.0, worlds.ranks_per_node * n)) for n in (0.5, 1.0, 2.0)]
        found[HOST_SIZE] = np.concatenate([logs(middle, one) for one in sizes]).var(axis=0)
    return found


_FOR_VARIANCE = 128
"""Draws: a variance to a tenth."""


def spread_by_part(asked: Variant, at: Candidate) -> dict[str, float]:
    """Share of each part of the variance, by `variance_by_part`. The shares add up to 1; parts that trade off against
    each other are counted in each."""
    found = variance_by_part(asked, [at])
    whole = sum(float(one[0]) for one in found.values())
    return {part: float(one[0]) / whole for part, one in found.items()}
