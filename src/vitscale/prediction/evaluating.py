"""What configurations of a series take, over all that the fit leaves open: a few for `predict`, many for `advise`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from vitscale.analysis.statistics import spread_within, t_quantile
from vitscale.base.arrays import FloatArray
from vitscale.prediction import amdahl, layouts, parameters, sampling, shares
from vitscale.prediction.configurations import Candidate, Estimates, Evaluated, column, joined
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import DRAWS, FittedSeries
from vitscale.prediction.labels import assumptions, label, types_are_known
from vitscale.prediction.memory.forecast import oom_chance, peak_bytes_of_many
from vitscale.prediction.memory.on_host import host_oom_chance, offloaded_bytes_of_many
from vitscale.prediction.results import CONFIDENCE, REACH, Label, predicted
from vitscale.prediction.step import of_series
from vitscale.prediction.step.model import Draws, StepModel, Worlds
from vitscale.prediction.step.of_series import device_factors, slowdown
from vitscale.prediction.variants import PredictionVariant
from vitscale.present.estimate import Estimate
from vitscale.trial.parallel import NO_SPLIT
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial, World

_SLOWER_HOSTS_CHANCE, _SLOWER_HOSTS_SPREAD = {False: 0.1, True: 0.5}, 0.35
"""Chance that hosts beyond the measured ones hold slower GPUs (False: no type is recorded; True: unlike ones were
measured), and spread of how much slower they then are, one side of a normal logarithm. No data chose them: added slower
cards made steps 1.6 to 1.85 times as long, which is that side's 82nd to 92nd percentile."""
_TAIL = (1 - CONFIDENCE) / 2
_FUTURES = 4
"""Job effects drawn for each draw of the parameters."""
_AT_ONCE = 1 << 15
"""Draws x configurations: what stays in a core's cache."""
ROUGH = 32
"""Draws whose median tells a configuration within a few per cent: enough to leave out the hopeless."""


def evaluate(
    asked: PredictionVariant,
    candidates: Sequence[Candidate],
    *,
    base: Candidate | None = None,
    with_parts: bool = False,
    with_memory: bool = True,
    measured: Sequence[MeasuredPoint] = (),
    hosts_assumed: bool = False,
    memory_capacity_bytes: int | None = None,
    draws: int = DRAWS,
) -> Evaluated:
    """Evaluates configurations of a series, each as if it were asked for alone: all share the draws and job effects.

    Args:
        asked: the series, with what is to differ from it.
        candidates: configurations with the engine, stage and checkpointing of `asked`.
        base: what `speed` is held against. None: for each configuration one rank with the same share of the batch;
            where the series keeps its global batch, one rank with all of it, image for image.
        with_parts: whether the parts of a step are wanted too.
        with_memory: whether memory is wanted.
        measured: points whose configurations are answered from their own runs, and labelled so.
        hosts_assumed: whether nobody said, and nothing measured, how many ranks a host has.
        memory_capacity_bytes: memory of a device; None: as it was recorded.
        draws: how many of all `DRAWS` to use, evenly chosen. With `ROUGH` only the middle of a step is worked out; its
            intervals and `speed` are NaN.
    """
    every = _Draws(asked, base, measured, draws)
    at_once = max(1, _AT_ONCE // draws)
    pieces = [every.of(candidates[n : n + at_once], with_parts) for n in range(0, len(candidates), at_once)]
    memory = _memory(asked.trial, candidates) if with_memory else np.full(len(candidates), np.nan)
    capacity = memory_capacity_bytes or asked.memory_capacity_bytes
    offloaded = _offloaded(asked.trial, candidates) if with_memory else np.full(len(candidates), np.nan)
    chance = np.full_like(memory, np.nan)
    if capacity is not None:
        chance = oom_chance(memory, capacity, asked.trial.train.device)
    step, speed = joined([step for step, _, _ in pieces]), joined([speed for _, speed, _ in pieces])
    if draws > ROUGH and (terms := amdahl.amdahl_of(asked)) is not None:
        factor = amdahl.factor_towards(terms, max(point.gpus for point in asked.fitted.points), candidates, step)
        step = replace(step, value=step.value * factor)
        speed = replace(speed, value=np.clip(speed.value / factor, speed.low, speed.high))
    if draws > ROUGH and (untold := asked.untold) is not None:
        # Two models of equal weight: on published tables nearer than either alone (docs/log.md).
        other = evaluate(untold, candidates, base=base, with_parts=with_parts, with_memory=False, measured=measured)
        step, speed = step.halfway(other.step), speed.halfway(other.speed)
    return Evaluated(
        step=step,
        speed=speed,
        parts={name: joined([parts[name] for _, _, parts in pieces]) for name in (pieces[0][2] if pieces else ())},
        memory_bytes=memory,
        oom_chance=chance,
        host_memory_bytes=offloaded,
        host_oom_chance=_host_oom_chance(offloaded, asked.host_memory_capacity_bytes, candidates),
        labels=_labels(asked, candidates, every.measured, hosts_assumed),
    )


class _Draws:
    """The draws of a series, and what they make of some of its configurations."""

    def __init__(
        self, asked: PredictionVariant, base: Candidate | None, measured: Sequence[MeasuredPoint], count: int
    ) -> None:
        rng = np.random.default_rng(11)
        some = slice(None, None, DRAWS // count)
        self.asked, self.base = asked, base
        # Where points are alike the first counts.
        self.measured = {Candidate.of(point.trial): measured_step(measured, point) for point in reversed(measured)}
        self.draws = {name: rows[some] for name, rows in asked.draws.items()}
        self.job_spread = asked.fitted.job_spread[some]
        count = len(self.job_spread)
        # Runs of one configuration say nothing of how lucky those of another were. (Drawn apart: all else stays the
        # same, whatever was measured.)
        lucky = np.random.default_rng(13)
        self.of_runs = {candidate: sampling.spread_out_normals(lucky, count) for candidate in self.measured}
        self.of_misfit = sampling.spread_out_normals(rng, count)
        self.jobs = _effects_of_jobs(rng, count)
        self.jobs_of_base = _effects_of_jobs(rng, count)
        self.added = sampling.spread_out_normals(rng, count)

    def of(
        self, candidates: Sequence[Candidate], with_parts: bool
    ) -> tuple[Estimates, Estimates, dict[str, Estimates]]:
        """(seconds of a step, the base's seconds over these, the parts)."""
        of_model, parts = self._mean(candidates, self.asked.model, self.draws)
        mean = self._with_own_runs(candidates, of_model)
        if len(self.job_spread) <= ROUGH:
            unknown = np.full(len(candidates), np.nan)
            middles = Estimates(np.median(mean, axis=0), unknown, unknown, unknown, unknown)
            return middles, Estimates(unknown, unknown, unknown, unknown, unknown), {}
        bases = [self._alone(candidate) if self.base is None else self.base for candidate in candidates]
        pairs = list(zip(candidates, bases, strict=True))
        distinct = {base: n for n, base in enumerate(dict.fromkeys(bases))}
        base_of_model = self._mean(list(distinct), *self._of_base())[0]
        of_base = self._with_own_runs(list(distinct), base_of_model)
        base_of_model, of_base = (each[:, [distinct[base] for base in bases]] for each in (base_of_model, of_base))
        if self.base is None:  # a rank's share of the images, against one rank's own
            more = [candidate.gpus * base.global_batch / candidate.global_batch for candidate, base in pairs]
            base_of_model, of_base = base_of_model / more, of_base / more
        future = self._future(mean, self.jobs)
        # A future run's speed is wanted only where parts are.
        speed = _estimates(of_base / mean, self._future(of_base, self.jobs_of_base) / future if with_parts else None)
        if own := [n for n, pair in enumerate(pairs) if not self.measured.keys().isdisjoint(pair)]:
            _narrow(speed, own, _estimates((base_of_model / of_model)[:, own]), a_run_too=False)
        itself = np.array([candidate == base for candidate, base in pairs])
        speed = Estimates(*(np.where(itself, 1.0, getattr(speed, field.name)) for field in fields(speed)))
        step = _estimates(mean, future)
        for n, of_runs in self._measured(candidates):
            for field in fields(step):
                getattr(step, field.name)[n] = getattr(of_runs, field.name)
        if own := [n for n, _ in self._measured(candidates)]:
            _narrow(step, own, _estimates(of_model[:, own], self._future(of_model[:, own], self.jobs)))
        # Parts of a future run are taken to be those of the mean.
        return step, speed, {name: _estimates(part) for name, part in parts.items()} if with_parts else {}

    def _alone(self, candidate: Candidate) -> Candidate:
        """One rank for itself: with the candidate's share, or with its whole batch where the series keeps that."""
        fitted = self.asked.fitted
        if fitted.series.mode != "strong-global":
            return candidate.alone
        most = max(candidate.micro_batch, *(largest_micro_batch(point.trial.train) for point in fitted.series.points))
        whole = candidate.global_batch
        micro_batch = next(images for images in range(min(most, whole), 0, -1) if whole % images == 0)
        return replace(candidate.alone, micro_batch=micro_batch, grad_accum=whole // micro_batch)

    def _of_base(self) -> tuple[StepModel, Draws]:
        """Model and draws for the base's step: where ranks share a model, one rank as base has all of it."""
        model = self.asked.model
        if self.base is not None or model.parallel == NO_SPLIT:
            return model, self.draws
        whole = self.draws["compute"] - math.log(shares.compute_share(self.asked.trial))
        return replace(model, messages=(), parallel=NO_SPLIT, filling=None), {**self.draws, "compute": whole}

    def _mean(
        self, candidates: Sequence[Candidate], model: StepModel, draws: Draws
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        """((draws, configurations) seconds of a step in the mean over many runs; the parts likewise)."""
        fitted, worlds = self.asked.fitted, worlds_of(self.asked.fitted, candidates)
        times = model.times(draws, worlds)
        mean = times.total * model.left_out(draws, worlds, of_series.worlds_of(fitted.points))
        mean *= slower_added_hosts(fitted, worlds, self.added)
        mean *= np.exp(fitted.misfit_spread * self.of_misfit)
        if fitted.widening > 1:
            middle = np.median(mean, axis=0)
            mean = middle * (mean / middle) ** fitted.widening
        parts = {
            "compute": times.compute + times.optimizer, "wait": times.wait, "wire": times.wire, "norm": times.norm,
            "bubble": times.bubble,
        }  # fmt: skip
        return mean, parts

    def _with_own_runs(self, candidates: Sequence[Candidate], of_model: FloatArray) -> FloatArray:
        """The mean of `_mean`, but from their own runs for those that are answered from these."""
        mean = of_model.copy() if self.measured else of_model
        for n, own in self._measured(candidates):
            low, high = own.ends
            spread = math.log(high / low) / (2 * REACH)
            mean[:, [n]] = own.value * np.exp(spread * self.of_runs[candidates[n]])
        return mean

    def _measured(self, candidates: Sequence[Candidate]) -> Iterator[tuple[int, Estimate]]:
        """(place, seconds of a step) of those that are answered from their own runs."""
        for n, candidate in enumerate(candidates if self.measured else ()):
            if candidate in self.measured:
                yield n, self.measured[candidate]

    def _future(self, mean: FloatArray, jobs: FloatArray) -> FloatArray:
        """Seconds of a step in runs still to be made, (draws x job effects, configurations)."""
        runs: FloatArray = (mean * np.exp(self.job_spread * jobs)).reshape(-1, mean.shape[1])
        return runs


_OF_A_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for many normal values (Kendall & Stuart, section 17.12)."""


def measured_step(points: Sequence[MeasuredPoint], point: MeasuredPoint) -> Estimate:
    """Seconds of a step from a point's own runs: their median, which no single run that hung moves.

    All runs of `points` say how far runs differ, with a prior as in `fitting`; intervals are Student's t.
    """
    prior = parameters.JOB_DEVIATION * parameters.job_scale(point.trial)
    spread, freedom = spread_within((each.step_seconds for each in points), prior, parameters.JOB_TO_JOB_RUNS)
    count = len(point.step_seconds)
    reach = t_quantile(freedom, 1 - _TAIL) * spread
    error = (_OF_A_MEDIAN if count > 2 else 1.0) / math.sqrt(count)
    middle = math.exp(statistics.median(math.log(seconds) for seconds in point.step_seconds))
    mean, future = math.exp(reach * error), math.exp(reach * math.hypot(1.0, error))
    return predicted(middle, middle / mean, middle * mean, middle / future, middle * future)


def _effects_of_jobs(rng: np.random.Generator, draws: int) -> FloatArray:
    """Effects of single runs' luck in units of their scale, (`_FUTURES`, draws, 1)."""
    freedom = parameters.JOB_FREEDOM
    columns = [sampling.spread_out_student_t(rng, draws, freedom=freedom) for _ in range(_FUTURES)]
    return np.hstack(columns).T[:, :, None]


def _estimates(mean: FloatArray, future: FloatArray | None = None) -> Estimates:
    """Middles and ends of (draws, configurations); without `future` a run's ends are those of the mean."""
    low, middle, high = np.quantile(mean, (_TAIL, 0.5, 1 - _TAIL), axis=0)
    if future is None:
        return Estimates(middle, low, high, low, high)
    future_low, future_high = np.quantile(future, (_TAIL, 1 - _TAIL), axis=0)
    return Estimates(middle, low, high, np.minimum(low, future_low), np.maximum(high, future_high))


def _narrow(estimates: Estimates, places: Sequence[int], of_model: Estimates, a_run_too: bool = True) -> None:
    """Takes ends in these places no further than the model's, whose fit has the same runs in it and all others too.

    A configuration that was run once would else be less surely known than one beside it that nobody ran. The middle
    stays where it was measured, and within.
    """
    middle = estimates.value[places]
    for side, outer, inner in (("low", np.maximum, np.minimum), ("high", np.minimum, np.maximum)):
        for name in (side, f"future_{side}") if a_run_too else (side,):
            ends = getattr(estimates, name)
            ends[places] = outer(ends[places], inner(middle, getattr(of_model, name)))


def worlds_of(fitted: FittedSeries, candidates: Sequence[Candidate]) -> Worlds:
    """The batches of configurations, and where their ranks lie."""
    ranks, per_node, micro_batch, grad_accum = (
        column(candidates, name) for name in ("gpus", "ranks_per_node", "micro_batch", "grad_accum")
    )
    return Worlds(ranks, np.minimum(ranks, per_node), micro_batch, grad_accum, mixed_slowdown(fitted, ranks))


def mixed_slowdown(fitted: FittedSeries, ranks: FloatArray) -> FloatArray:
    """Slowdown by unlike devices: the mixture stays that of the largest measured point; a rank alone is its first."""
    mixture = fitted.points[-1]
    factors = device_factors(fitted.points)
    alone = factors.get(mixture.devices[0], 1.0) if mixture.devices else 1.0
    return np.where(ranks > 1, slowdown(mixture, factors), alone)


def slower_added_hosts(fitted: FittedSeries, worlds: Worlds, normal: FloatArray) -> FloatArray:
    """Factor of 1 or more on a step for slower GPUs on hosts beyond the measured ones.

    It is 1 where the types are known and alike: `labels.assumptions` then says that further hosts have the same.
    """
    beyond = np.ceil(worlds.ranks / worlds.ranks_per_node) > max(point.nodes for point in fitted.points)
    if types_are_known(fitted) or not beyond.any():
        return np.ones_like(normal * worlds.ranks)
    chance = _SLOWER_HOSTS_CHANCE[any(point.devices for point in fitted.points)]
    one_sided = np.reshape([_one_sided(float(draw), chance) for draw in normal.flat], normal.shape)
    slower: FloatArray = np.exp(_SLOWER_HOSTS_SPREAD * one_sided * beyond)
    return slower


@cache
def _one_sided(normal: float, chance: float) -> float:
    """Absolute value of another standard normal number where `normal` is among the highest `chance`, else 0."""
    far = min(1 - 1e-9, (NormalDist().cdf(normal) - (1 - chance)) / chance)
    return NormalDist().inv_cdf((1 + far) / 2) if far > 0 else 0.0


def _memory(template: Trial, candidates: Sequence[Candidate]) -> FloatArray:
    """Peak bytes of a rank of each configuration; NaN: unavailable."""
    micro_steps = column(candidates, "grad_accum").astype(int)
    if template.parallel.pipeline == 1:
        micro_steps = np.minimum(micro_steps, 2)
    gpus = column(candidates, "gpus").astype(int)
    ranks_per_node = column(candidates, "ranks_per_node").astype(int)
    micro_batch = column(candidates, "micro_batch").astype(int)
    peaks = np.full(len(candidates), np.nan)
    for count in sorted(set(micro_steps.tolist())):
        here = micro_steps == count
        peaks[here] = peak_bytes_of_many(template, gpus[here], ranks_per_node[here], count, micro_batch[here])
    return peaks


def _offloaded(template: Trial, candidates: Sequence[Candidate]) -> FloatArray:
    """Return the bytes that all ranks of a host of each configuration offload, (configurations,); NaN: unavailable."""
    gpus = column(candidates, "gpus").astype(int)
    ranks_per_node = column(candidates, "ranks_per_node").astype(int)
    micro_steps = np.minimum(column(candidates, "grad_accum").astype(int), 2)
    offloaded = np.full(len(candidates), np.nan)
    for count in sorted(set(micro_steps.tolist())):
        here = micro_steps == count
        offloaded[here] = offloaded_bytes_of_many(template, gpus[here], ranks_per_node[here], count)
    return offloaded


def _host_oom_chance(offloaded: FloatArray, capacity_bytes: int | None, candidates: Sequence[Candidate]) -> FloatArray:
    """Return the chance that a host of each configuration runs out of memory, (configurations,); NaN: unavailable.

    Args:
        offloaded: bytes that all ranks of a host offload together, (configurations,).
        capacity_bytes: memory of a host; None: unknown.
        candidates: the configurations.
    """
    if capacity_bytes is None:
        return np.where(offloaded == 0, 0.0, np.nan)
    ranks = np.minimum(column(candidates, "gpus"), column(candidates, "ranks_per_node")).astype(int)
    return host_oom_chance(offloaded, capacity_bytes, ranks)


def _labels(
    asked: PredictionVariant,
    candidates: Sequence[Candidate],
    measured: Mapping[Candidate, Estimate],
    hosts_assumed: bool,
) -> tuple[Label, ...]:
    """Labels by where ranks lie, and by whether a batch lies among the measured ones; without any, the series' own."""
    points = asked.fitted.points
    batches = {each.micro_batch for each in measured or [Candidate.of(point.trial) for point in points]}
    largest = max(point.gpus for point in points)
    known: dict[tuple[int, int], Label] = {}
    labels: list[Label] = []
    counts_of_runs = {candidate.gpus for candidate in measured}
    smallest, most = min(batches), max(batches)
    for candidate in candidates:
        if candidate.gpus in counts_of_runs and candidate in measured:
            labels.append("measured")
            continue
        key = (candidate.gpus, min(candidate.gpus, candidate.ranks_per_node))
        if (there := known.get(key)) is None:
            world = World(nodes=-(-candidate.gpus // key[1]), ranks_per_node=key[1], threads_per_rank=1)
            placed = layouts.SeriesLayout(
                asked.trial.model_copy(update={"world": world}), None, None, hosts_assumed and candidate.gpus > largest
            )  # fmt: skip
            there = known[key] = label(asked, placed, assumptions(asked, placed))
        within = there != "interpolated" or smallest <= candidate.micro_batch <= most
        labels.append(there if within else "extrapolated")
    return tuple(labels)
