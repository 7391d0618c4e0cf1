"""Works out the parts of a step's time, per rank: they never overlap, and add up to the step.

    data_wait    the loader is not ready
    h2d          copying the batch to the device, where nothing else goes on meanwhile
    forward      preprocessing on the device, the model, the loss
    backward     backward computation
    bubble       on ranks that hold stages: nothing to compute, because other stages have not handed on yet
    wait         exposed: waiting for the slowest rank to arrive at a collective
    wire         exposed: the transfer of a collective
    norm         exposed: the same where synchronised norms exchange their sums
    optimizer    clipping and update
    launch_gaps  the device has nothing to do inside a phase (GPU only)
    other        the remaining time

Exposed communication is wait, wire and norm together: the time in which a rank does nothing but communicate. It is
known also where the three cannot be told apart. A step or run from which the profiler lost events is lossy: not even
its exposed communication is known. Lossy ones are left out of means where others are complete.

    light steps      run without the profiler
    attached steps   run while the profiler is attached, but does not record (GPU only)
    explained steps  recorded by the profiler; only these have parts

`overhead` is how much longer explained steps take than the timed steps beside them. On a GPU those are attached steps;
how much longer these take than the light ones before is `attached_overhead`. There both are taken out of the parts: the
profiler keeps the host from launching, and a device that is always busy would seem to be idle.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitscale.analysis.runs import steps as step_figures
from vitscale.analysis.runs.repeats import Clusters, observations
from vitscale.analysis.statistics import known_median, mean_interval, whole_mean
from vitscale.analysis.time.exposure import RankExposure, explained, exposures, step_parts, unprofiled
from vitscale.base.arrays import FloatArray
from vitscale.base.time_spans import length
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION, EXPOSED, PARTS, ExplainedLine
from vitscale.store.results import Run

COMPUTE = ("h2d", "forward", "backward")
"""Parts of a step in which a rank works on its own batch, up to the update."""
_LEAST_WAIT_SHARE = 0.02
"""Share of a step that a wait must exceed: below it nobody is waited for."""
_FEWEST_STRAGGLER_STEPS = 3
"""Fewest explained steps after which a rank is named as the one that the others wait for."""
_NEIGHBOURS_PER_SIDE = 4
"""Number of timed steps on either side that an explained block is compared with."""


@dataclass(frozen=True)
class RankParts:
    """The parts of one rank's step in seconds; None where unknown, with the reason in `Breakdown.reasons`."""

    rank: int
    seconds: float
    """Seconds of the whole step: of an explained one, on a GPU without what explaining adds."""
    parts: Mapping[str, float | None]
    exposed_seconds: float | None
    """Exposed communication, known also where wait and wire cannot be told apart; None where the profile lacks it."""

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication, as a share of the step."""
        exposed = self.exposed_seconds
        return exposed / self.seconds if exposed is not None and self.seconds > 0 else None

    def sum_of(self, *names: str) -> float:
        """Return the sum of those parts that are known, in seconds."""
        return sum(self.parts[name] or 0.0 for name in names)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    share_of_steps: float
    """Share of steps in which the others waited for this rank."""
    slower_by: float | None
    """How much longer its own work takes than the median of the others': 0.21 is 21 %."""
    interval: Estimate | None = None
    """`share_of_steps` with its interval over runs; None in a single run."""


@dataclass(frozen=True)
class Breakdown:
    """The mean explained step of each rank, on a GPU without the seconds that explaining adds."""

    ranks: tuple[RankParts, ...]
    steps: int
    """Number of explained steps in the mean, over all runs."""
    reasons: Mapping[str, str]
    """Part to why it is unknown."""
    overhead: float | None
    """How much longer explained steps take than the timed ones beside them: 0.03 is 3 % slower."""
    straggler: Straggler | None
    """None where no rank keeps the others waiting more often than chance, or where this is unknown."""
    by_run: tuple[Breakdown | None, ...] = ()
    """Breakdown of each run, in the order of `TrialResult.run_figures`; all have the same ranks. None for a run without
    explained steps, or in which one of these ranks has none."""
    clusters: Clusters = None
    """The runs of each observation."""
    typical_rank: int | None = None
    """Number of the typical rank, where it is fixed."""
    attached_overhead: float | None = None
    """How much longer timed steps take after the profiler than before it; None where there are none."""
    left_out: tuple[str, ...] = ()
    """For each lossy step that is in no mean, the parts that the profiler lost, in words."""

    @property
    def slowdown(self) -> float:
        """Explained steps / light steps, at least 1: with the profiler's cost, and what it leaves behind."""
        return max(1.0, (1 + (self.overhead or 0.0)) * (1 + (self.attached_overhead or 0.0)))

    def over_runs(self, figure: Callable[[Breakdown], float | None], most: float = math.inf) -> Estimate | None:
        """Return a figure's mean over the observations that have it, with a 95 % interval from 3 of them.

        Args:
            figure: takes the value from one run's breakdown; not negative.
            most: the largest possible value.

        Returns:
            None where no observation has it.
        """
        values = [figure(run) if run is not None else None for run in self.by_run]
        known_values = observations(values, self.clusters, statistics.fmean)
        return mean_interval(known_values, most=most) if known_values else None

    @property
    def exposed_share(self) -> Estimate | None:
        """Exposed communication of the typical rank, as a share of its step, with its interval over runs."""
        typical = self.typical
        if typical.exposed_share is None:
            return None
        over_runs = self.over_runs(lambda run: run.rank(typical.rank).exposed_share, most=1.0)
        if over_runs is None:
            return Estimate(typical.exposed_share)
        return Estimate(typical.exposed_share, over_runs.low, over_runs.high, note=over_runs.note)

    def part_seconds(self, number: int, part: str | None) -> Estimate | None:
        """Return the seconds that a part of one rank's explained step takes: the mean over runs, with its interval.

        Args:
            number: number of the rank; it must be among `ranks`.
            part: one of PARTS; COMMUNICATION: all exposed communication; None: the whole step.

        Returns:
            None where the part is unknown in every run.
        """

        def seconds_in(run: Breakdown) -> float | None:
            """The part's seconds in one run."""
            rank = run.rank(number)
            if part is None:
                return rank.seconds
            if part == COMMUNICATION:
                return rank.exposed_seconds
            return rank.parts[part]

        return self.over_runs(seconds_in)

    def rank(self, number: int) -> RankParts:
        """Return the parts of the rank with this number, which must be among `ranks`."""
        return next(rank for rank in self.ranks if rank.rank == number)

    @property
    def typical(self) -> RankParts:
        """The rank with the (upper) median wait: with one slow rank it is one of those that wait for it.

        Where waiting is unknown, it is the rank with the median exposed communication: transfer is the same on all.
        """
        if self.typical_rank is not None:
            return self.rank(self.typical_rank)
        by_wait = sorted(self.ranks, key=_wait_or_exposed_seconds)
        return by_wait[len(by_wait) // 2]

    @property
    def wait_known(self) -> bool:
        """Whether wait and wire could be told apart."""
        return self.typical.parts["wait"] is not None


def _wait_or_exposed_seconds(rank: RankParts) -> float:
    """Return the seconds that a rank waited; where they are unknown those of its exposed communication."""
    wait_seconds = rank.parts["wait"]
    if wait_seconds is not None:
        return wait_seconds
    return rank.exposed_seconds or 0.0


class _ExplainedStep(NamedTuple):
    """One explained step on all ranks."""

    ranks: list[RankParts]
    reasons: dict[str, str]
    """Part -> why it is unknown on some rank."""
    wait_by_rank: dict[int, float]
    """Rank -> seconds for which it waited, exposed or not; lacks ranks of which this is unknown."""


class _SelectedSteps(NamedTuple):
    """The explained steps of one run, at least one, by whether they are in its means."""

    in_means: list[_ExplainedStep]
    left_out: list[_ExplainedStep]


def breakdown(run: Run, steady_from: int = 0) -> Breakdown | None:
    """Return the breakdown of one run; None where no step was explained on all its ranks.

    Args:
        run: the run, with the records of all ranks.
        steady_from: the first step after warm-up (`RunFigures.steady_from`); those before it are left out.
    """
    explained_steps = [_explained_step(lines) for lines in explained(run, steady_from)]
    if not explained_steps:
        return None
    steps_in_means, steps_left_out = _select_steps(explained_steps)
    reasons = _merged_reasons([step.reasons for step in steps_in_means])
    overheads = _overheads(run, steady_from)
    profiled_ranks = _mean_ranks([step.ranks for step in steps_in_means])
    if run.header.trial.train.device == "cuda":
        ranks = _without_profiling(profiled_ranks, overheads.light_seconds)
    else:
        ranks = profiled_ranks
    return Breakdown(
        ranks=ranks,
        steps=len(steps_in_means),
        reasons=reasons,
        overhead=overheads.explained_overhead,
        straggler=_straggler(ranks, [step.wait_by_rank for step in steps_in_means]),
        attached_overhead=overheads.attached_overhead,
        left_out=tuple(_lossy_reason(step.reasons, reasons) for step in steps_left_out),
    )


def _merged_reasons(all_reasons: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return part -> why it is unknown in some step or run; of several reasons for one part the last."""
    merged: dict[str, str] = {}
    for reasons in all_reasons:
        merged |= reasons
    return merged


def _select_steps(steps: list[_ExplainedStep]) -> _SelectedSteps:
    """Leave out the lossy steps. Where all are lossy none is left out: what they have in common is still known."""
    complete_steps = [step for step in steps if _is_complete(step.ranks)]
    lossy_steps = [step for step in steps if not _is_complete(step.ranks)]
    if not complete_steps:
        return _SelectedSteps(in_means=lossy_steps, left_out=[])
    return _SelectedSteps(in_means=complete_steps, left_out=lossy_steps)


def _without_profiling(ranks: tuple[RankParts, ...], light_seconds: float | None) -> tuple[RankParts, ...]:
    """Return the explained steps of all ranks without the time that the profiler adds to them on a GPU.

    The longest step then takes as long as a light one, and those of the other ranks are shortened by the same factor.

    Args:
        ranks: the mean explained step of each rank.
        light_seconds: seconds of the mean light step, which runs without the profiler; None where it is unknown, and
            then nothing is taken out.
    """
    if light_seconds is None:
        return ranks
    light_share = light_seconds / max(rank.seconds for rank in ranks)
    return tuple(_shortened_step(rank, light_share * rank.seconds) for rank in ranks)


def _shortened_step(rank: RankParts, seconds: float) -> RankParts:
    """Return a rank's explained step on a GPU as it would be if it took only `seconds`.

    The profiler lengthens some parts more than others (`unprofiled`). Where the gaps or the exchanges of the step are
    unknown, so is by how much: then the parts stay as they are, and only the time that is in no part becomes less.
    """
    if not 0 < seconds < rank.seconds:
        return rank
    known_parts = {name: part_seconds for name, part_seconds in rank.parts.items() if part_seconds is not None}
    if rank.exposed_seconds is None or rank.parts["launch_gaps"] is None:
        return replace(rank, seconds=max(seconds, sum(known_parts.values())))
    wait_is_known = rank.parts["wait"] is not None
    if not wait_is_known:
        known_parts[COMMUNICATION] = rank.exposed_seconds
    shortened = unprofiled(known_parts, seconds, "cuda")
    exposed_seconds = sum(shortened[name] for name in EXPOSED) if wait_is_known else shortened[COMMUNICATION]
    return RankParts(rank.rank, seconds, {name: shortened.get(name) for name in rank.parts}, exposed_seconds)


def _explained_step(lines: Sequence[tuple[int, ExplainedLine]]) -> _ExplainedStep:
    """Return the parts of one step on all ranks.

    Args:
        lines: (rank number, what the profiler recorded) of all ranks.
    """
    ranks = []
    reasons: dict[str, str] = {}
    wait_by_rank: dict[int, float] = {}
    for (_, line), exposure in zip(lines, exposures(lines), strict=True):
        ranks.append(_rank_parts(line, exposure))
        reasons |= {part: reason for part, reason in line.unknown.items() if part in PARTS}
        reasons |= dict.fromkeys(exposure.unknown_parts, exposure.reason)
        if exposure.waiting_seconds is not None:
            wait_by_rank[exposure.rank] = exposure.waiting_seconds
    return _ExplainedStep(ranks, reasons, wait_by_rank)


def _is_complete(ranks: Sequence[RankParts]) -> bool:
    """Whether the profiler lost no events of a step or run: then exposed communication is known on all ranks.

    Other parts may be unknown all the same because of what the step runs, such as a CUDA graph. Such steps are complete
    nevertheless: without them the mean would be of another kind of step.
    """
    return all(rank.exposed_seconds is not None for rank in ranks)


def _lossy_reason(reasons: Mapping[str, str], common_reasons: Mapping[str, str]) -> str:
    """Return in words what the profiler lost of a lossy step or run: its first reason that those in the mean lack.

    Args:
        reasons: part -> why it is unknown in the lossy one.
        common_reasons: part -> why it is unknown in those in the mean too.
    """
    for reason in reasons.values():
        if reason not in common_reasons.values():
            return reason
    return "parts of them are unknown"


def mean_breakdown(
    by_run: Sequence[Breakdown | None], clusters: Clusters = None, typical_rank: int | None = None
) -> Breakdown | None:
    """Return the mean over the explained observations of one trial; None where none was explained.

    Args:
        by_run: breakdown of each run; their ranks may differ (`_with_same_ranks`), and some may have lost events.
        clusters: the runs of each observation.
        typical_rank: number of the typical rank, where it is fixed.
    """
    explained_by_run = _with_same_ranks(by_run)
    explained_runs = [run for run in explained_by_run if run is not None]
    if not explained_runs:
        return None
    complete_by_run = _without_lossy(explained_by_run)
    complete_runs = [run for run in complete_by_run if run is not None]
    reasons = _merged_reasons([run.reasons for run in complete_runs])
    left_out = list(itertools.chain.from_iterable(run.left_out for run in explained_runs))
    for explained_run, complete_run in zip(explained_by_run, complete_by_run, strict=True):
        if explained_run is not None and complete_run is None:
            left_out += [_lossy_reason(explained_run.reasons, reasons)] * explained_run.steps
    return Breakdown(
        ranks=_mean_over_observations(complete_by_run, clusters),
        steps=sum(run.steps for run in complete_runs),
        reasons=reasons,
        overhead=known_median(run.overhead for run in complete_runs),
        straggler=_common_straggler(complete_by_run, clusters),
        by_run=tuple(complete_by_run),
        clusters=clusters,
        typical_rank=typical_rank,
        attached_overhead=known_median(run.attached_overhead for run in complete_runs),
        left_out=tuple(left_out),
    )


def _with_same_ranks(by_run: Sequence[Breakdown | None]) -> Sequence[Breakdown | None]:
    """Return the same runs with those ranks alone that all of them explained, so that means are of the same ranks.

    A user's script may leave usable traces of other ranks in each run. Where no rank is in all runs, the runs without
    the rank that most of them have become None.
    """
    ranks_by_run = [{rank.rank for rank in run.ranks} for run in by_run if run is not None]
    if all(ranks == ranks_by_run[0] for ranks in ranks_by_run):
        return by_run
    runs_by_rank = Counter(itertools.chain.from_iterable(ranks_by_run))  # rank -> number of runs that have it
    most_common = max(sorted(runs_by_rank), key=runs_by_rank.__getitem__)
    common = set.intersection(*(ranks for ranks in ranks_by_run if most_common in ranks))
    return [_only_ranks(run, common) if run is not None else None for run in by_run]


def _only_ranks(run: Breakdown, numbers: Collection[int]) -> Breakdown | None:
    """Return the breakdown of these ranks alone; None where it lacks one of them."""
    ranks = tuple(rank for rank in run.ranks if rank.rank in numbers)
    if len(ranks) < len(numbers):
        return None
    straggler = run.straggler
    if straggler is not None and straggler.rank not in numbers:
        straggler = None
    return replace(run, ranks=ranks, straggler=straggler)


def _without_lossy(by_run: Sequence[Breakdown | None]) -> list[Breakdown | None]:
    """Return the same runs with None for lossy ones; all of them where none is complete."""
    complete_by_run: list[Breakdown | None] = []
    for run in by_run:
        is_complete = run is not None and _is_complete(run.ranks)
        complete_by_run.append(run if is_complete else None)
    has_complete_run = any(run is not None for run in complete_by_run)
    return complete_by_run if has_complete_run else list(by_run)


def _mean_over_observations(by_run: Sequence[Breakdown | None], clusters: Clusters) -> tuple[RankParts, ...]:
    """Return the mean of each rank over observations; that of an observation is the mean over its runs.

    Args:
        by_run: breakdown of each run; None for those that do not count.
        clusters: the runs of each observation; None: each run is one.
    """
    observed_runs = [[run] for run in range(len(by_run))] if clusters is None else clusters
    ranks_by_observation = []
    for run_indices in observed_runs:
        runs = [by_run[index] for index in run_indices]
        ranks_by_run = [run.ranks for run in runs if run is not None]
        if ranks_by_run:
            ranks_by_observation.append(_mean_ranks(ranks_by_run))
    return _mean_ranks(ranks_by_observation)


def _mean_ranks(ranks_by_step: Sequence[Sequence[RankParts]]) -> tuple[RankParts, ...]:
    """Return the mean of each rank over several steps or runs.

    Args:
        ranks_by_step: for each step or run its ranks; all have the same ranks in the same order.
    """
    steps_by_rank = zip(*ranks_by_step, strict=True)
    return tuple(_mean_parts(steps) for steps in steps_by_rank)


def _mean_parts(steps: Sequence[RankParts]) -> RankParts:
    """Return the mean of several steps of one rank; a part that is unknown in one of them is unknown."""
    return RankParts(
        rank=steps[0].rank,
        seconds=statistics.fmean(step.seconds for step in steps),
        parts={name: whole_mean([step.parts[name] for step in steps]) for name in PARTS},
        exposed_seconds=whole_mean([step.exposed_seconds for step in steps]),
    )


def _rank_parts(line: ExplainedLine, exposure: RankExposure) -> RankParts:
    """Return the parts of one rank's step."""
    intervals = step_parts(line, exposure)
    parts: dict[str, float | None] = {}
    for name in PARTS:
        unknown_parts = exposure.unknown_parts if name in EXPOSED else line.unknown
        parts[name] = None if name in unknown_parts else length(intervals.get(name, ()))
    exposed_seconds = None if COMMUNICATION in line.unknown else length(exposure.exposed)
    return RankParts(exposure.rank, line.seconds, parts, exposed_seconds)


def _straggler(means: Sequence[RankParts], waits_by_step: Sequence[Mapping[int, float]]) -> Straggler | None:
    """Return the rank that waits least; None where it keeps the others waiting no more often than chance, or in noise.

    Of R ranks that arrive in random order each is the last one in 1 / R of the steps.

    Args:
        means: mean parts of every rank.
        waits_by_step: for each step, rank -> seconds for which it waited.
    """
    is_unknown = any(len(waits) < len(means) for waits in waits_by_step)
    if len(means) < 2 or is_unknown:
        return None
    noticeable_seconds = _LEAST_WAIT_SHARE * max(mean.seconds for mean in means)
    last_ranks = [_last_rank(waits, noticeable_seconds) for waits in waits_by_step]
    rank = _most_frequent([rank for rank in last_ranks if rank is not None])
    if rank is None:
        return None
    share_of_steps = last_ranks.count(rank) / len(last_ranks)
    chance = 1 / len(means)
    if share_of_steps <= chance or not _is_beyond_noise(_margins(rank, waits_by_step)):
        return None
    return Straggler(rank, share_of_steps, _slower_by(rank, means))


def _last_rank(waits: Mapping[int, float], noticeable_seconds: float) -> int | None:
    """Return the rank that waited least in a step; None where all waited about as long.

    Args:
        waits: rank -> seconds for which it waited.
        noticeable_seconds: difference of waits that counts.
    """
    if max(waits.values()) - min(waits.values()) <= noticeable_seconds:
        return None
    return min(waits, key=waits.__getitem__)


def _most_frequent(ranks: Sequence[int]) -> int | None:
    """Return the rank that occurs most often, of several the lowest; None where there is none."""
    return max(sorted(set(ranks)), key=ranks.count, default=None)


def _margins(rank: int, waits_by_step: Sequence[Mapping[int, float]]) -> list[float]:
    """Return for each step how many seconds less the rank waited than the median of the others."""
    margins = []
    for waits in waits_by_step:
        other_waits = [seconds for other, seconds in waits.items() if other != rank]
        margins.append(statistics.median(other_waits) - waits[rank])
    return margins


def _slower_by(rank: int, means: Sequence[RankParts]) -> float | None:
    """Return how much longer the rank's own work takes than the median of the others': 0.21 is 21 %."""
    work_by_rank = {mean.rank: mean.seconds - (mean.exposed_seconds or 0.0) for mean in means}
    usual_work = statistics.median(seconds for other, seconds in work_by_rank.items() if other != rank)
    return work_by_rank[rank] / usual_work - 1 if usual_work > 0 else None


def _is_beyond_noise(margins: Sequence[float]) -> bool:
    """Whether the mean of the margins is more than three standard errors above 0.

    Two would do for one rank, but this one was picked as the slowest of many.
    """
    if len(margins) < _FEWEST_STRAGGLER_STEPS:
        return False
    return statistics.fmean(margins) > 3 * statistics.stdev(margins) / math.sqrt(len(margins))


def _common_straggler(by_run: Sequence[Breakdown | None], clusters: Clusters) -> Straggler | None:
    """Return the straggler of most explained runs; None where most of them have none."""
    explained_runs = [run for run in by_run if run is not None]
    stragglers = [run.straggler for run in explained_runs if run.straggler is not None]
    rank = _most_frequent([straggler.rank for straggler in stragglers])
    if rank is None or 2 * len(stragglers) <= len(explained_runs):
        return None
    shares = [_share_of_steps(run, rank) if run is not None else None for run in by_run]
    share = mean_interval(observations(shares, clusters, statistics.fmean), most=1.0)
    slower_by = known_median(straggler.slower_by for straggler in stragglers if straggler.rank == rank)
    return Straggler(rank, share.value, slower_by, interval=share)


def _share_of_steps(run: Breakdown, rank: int) -> float:
    """Return the share of a run's steps in which the rank is its straggler; 0 where it is none."""
    straggler = run.straggler
    if straggler is None or straggler.rank != rank:
        return 0.0
    return straggler.share_of_steps


class _Overheads(NamedTuple):
    """How much longer steps take because of the profiler (0.03: 3 %); None where unknown.

    Explained steps that nothing marks, as in traces, are in none of these.
    """

    explained_overhead: float | None
    """The mean step of a block of explained steps, against that of the timed steps of the same kind beside it: attached
    ones where the run has any, else light ones. The median over blocks."""
    attached_overhead: float | None
    """The mean whole attached step, against that of as many light ones: the last before the profiler."""
    light_seconds: float | None
    """Seconds of the mean whole light step."""


class _BlockAndKind(NamedTuple):
    """The key of those steps of one explained block that are of one kind (`step_figures.step_kinds`)."""

    block: int
    kind: int


def _overheads(run: Run, steady_from: int) -> _Overheads:
    """Return the overheads of one run, by the estimator of all times (`analysis.runs.steps`)."""
    timing = _Timing.of(run, steady_from)
    # Positions of steps, in rising order.
    light = timing.timed_positions(step_figures.LIGHT)
    attached = timing.timed_positions(step_figures.ATTACHED)
    unexplained = attached if len(attached) else light
    block_slowdowns = []
    for key, block in timing.explained_blocks().items():
        neighbours = _neighbours(block, timing.positions_of_kind(unexplained, key.kind))
        block_slowdowns.append(timing.slowdown(block, neighbours))
    whole_light = timing.positions_of_kind(light, step_figures.WHOLE)
    whole_attached = timing.positions_of_kind(attached, step_figures.WHOLE)
    last_light = whole_light[-len(whole_attached) :]  # as many as there are attached ones; without any it is not used
    return _Overheads(
        explained_overhead=known_median(block_slowdowns),
        attached_overhead=timing.slowdown(whole_attached, last_light),
        light_seconds=float(timing.elapsed_seconds[whole_light].mean()) if len(whole_light) else None,
    )


def _neighbours(block: step_figures.Integers, positions: step_figures.Integers) -> step_figures.Integers:
    """Return the last four of some positions before a block, and the first four after it; fewer where there are fewer.

    Args:
        block: the positions of the block's steps.
        positions: those to choose from, in rising order.
    """
    positions_before = positions[positions < block.min()]
    positions_after = positions[positions > block.max()]
    return np.concatenate([positions_before[-_NEIGHBOURS_PER_SIDE:], positions_after[:_NEIGHBOURS_PER_SIDE]])


@dataclass(frozen=True, eq=False)
class _Timing:
    """The times of one run's S steps. A step's position is its index in these arrays."""

    steps: step_figures.RunSteps
    elapsed_seconds: FloatArray
    """Seconds that each step adds to the time that passed, (S,)."""
    kinds: npt.NDArray[np.uint8]
    """Kind of each step (`step_figures.step_kinds`), (S,)."""
    explained: tuple[ExplainedLine, ...]
    """Explained steps of the first rank."""
    steady_from: int
    """Number of the first step that counts."""

    @classmethod
    def of(cls, run: Run, steady_from: int) -> _Timing:
        """Read the times of a run's steps."""
        steps = step_figures.RunSteps.of([step_figures.recorded_steps(run)])
        (elapsed_seconds,) = step_figures.elapsed_seconds(steps)
        kinds = step_figures.step_kinds(steps)
        return cls(steps, elapsed_seconds, kinds, run.ranks[0].explained, steady_from)

    def timed_positions(self, window: int) -> step_figures.Integers:
        """Return the positions of the steps of a window that are not explained, without a one-off slow one.

        Args:
            window: `step_figures.LIGHT` or `step_figures.ATTACHED`.
        """
        explained_steps = [line.step for line in self.explained]
        is_timed = (
            self.steps.in_window(window)
            & (self.steps.step >= self.steady_from)
            & ~np.isin(self.steps.step, explained_steps)
        )
        positions = np.flatnonzero(is_timed)
        numbers = self.steps.step[positions]
        # Within this run alone: neighbours are compared with a block of this run, whatever other runs show.
        slow_by_run = step_figures.slow_steps(numbers, self.elapsed_seconds[None, positions], self.kinds[positions])
        one_off_step = step_figures.one_off(slow_by_run)
        if one_off_step is None:
            return positions
        without_one_off: step_figures.Integers = positions[numbers != one_off_step.step]
        return without_one_off

    def explained_blocks(self) -> dict[_BlockAndKind, step_figures.Integers]:
        """Return the positions of the explained steps that count, by block and kind of step."""
        position_by_number = {number: position for position, number in enumerate(self.steps.step.tolist())}
        positions_by_block: dict[_BlockAndKind, list[int]] = {}
        for line in self.explained:
            position = position_by_number.get(line.step)
            if position is not None and line.step >= self.steady_from:
                key = _BlockAndKind(line.block, int(self.kinds[position]))
                positions_by_block.setdefault(key, []).append(position)
        return {key: np.array(positions, dtype=np.int64) for key, positions in positions_by_block.items()}

    def positions_of_kind(self, positions: step_figures.Integers, kind: int) -> step_figures.Integers:
        """Return those positions whose steps are of one kind."""
        matching: step_figures.Integers = positions[self.kinds[positions] == kind]
        return matching

    def slowdown(self, slower: step_figures.Integers, usual: step_figures.Integers) -> float | None:
        """Return how much longer the mean step of `slower` is than that of `usual` (0.03: 3 %); None where unknown."""
        if not len(slower) or not len(usual):
            return None
        usual_seconds = float(self.elapsed_seconds[usual].mean())
        slower_seconds = float(self.elapsed_seconds[slower].mean())
        return slower_seconds / usual_seconds - 1 if usual_seconds > 0 else None
