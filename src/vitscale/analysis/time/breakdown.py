"""The parts of a step's time, per rank: they never overlap, and add up to the step.

    data_wait    the loader is not ready
    h2d          copying the batch to the device, where nothing else goes on meanwhile
    forward      preprocessing on the device, the model, the loss
    backward     backward computation
    bubble       on ranks that hold stages: neither, because other stages have not handed on yet
    wait         exposed: waiting for the slowest rank to arrive at a collective
    wire         exposed: the transfer of a collective
    norm         exposed: the same where synchronised norms exchange their sums
    optimizer    clipping and update
    launch_gaps  the device has nothing to do inside a phase (GPU only)
    other        what is left

Only explained steps count: their slowdown against the timed steps beside them is `overhead`. On a GPU those are
attached steps, whose own slowdown against the light ones before is `attached_overhead`, and both are taken out of the
parts: the profiler keeps the host from launching, and a device that is always busy would seem to be idle.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitscale.analysis.runs import steps as step_figures
from vitscale.analysis.runs.repeats import Clusters, observations
from vitscale.analysis.statistics import known_median, mean_interval, whole_mean
from vitscale.analysis.time.exposure import RankExposure, explained, exposures, step_parts, unprofiled
from vitscale.base.time_spans import length
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION, EXPOSED, PARTS, ExplainedLine
from vitscale.store.results import Run

COMPUTE = ("h2d", "forward", "backward")
_LEAST_WAIT_SHARE = 0.02
"""Share of a step that a wait must exceed: below it nobody is waited for."""
_FEWEST_STEPS_TO_NAME = 3
_NEIGHBOURS = 4
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
        """The sum of those parts that are known."""
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
    """The mean explained step of each rank, on a GPU without what explaining adds."""

    ranks: tuple[RankParts, ...]
    steps: int
    """Number of explained steps in the mean, over all runs."""
    reasons: Mapping[str, str]
    """Part to why it is unknown."""
    overhead: float | None
    """How much longer explained steps take than the timed ones beside them: 0.03 is 3 % slower."""
    straggler: Straggler | None
    """None: nobody is waited for in most steps, or this is unknown."""
    by_run: tuple[Breakdown | None, ...] = ()
    """Breakdown of each run, in the order of `TrialResult.run_figures`, all with the same ranks; None for a run without
    explained steps, or without those of these ranks."""
    clusters: Clusters = None
    """The runs of each observation."""
    typical_rank: int | None = None
    """Number of the typical rank, where it is fixed."""
    attached_overhead: float | None = None
    """How much longer timed steps take after the profiler than before it; None where there are none."""
    left_out: tuple[str, ...] = ()
    """What the profiler lost of each explained step that is in no mean, because others are whole."""

    @property
    def slowdown(self) -> float:
        """Explained steps / light steps, where that is above 1: what the profiler costs and what it leaves behind."""
        return max(1.0, (1 + (self.overhead or 0.0)) * (1 + (self.attached_overhead or 0.0)))

    def over_runs(self, figure: Callable[[Breakdown], float | None], most: float = math.inf) -> Estimate | None:
        """A figure's mean over the observations that have it, with a 95 % interval from 3 of them; None without any.

        Args:
            figure: what to take from one run's breakdown; not negative.
            most: the largest possible value.
        """
        of_runs = [figure(run) if run is not None else None for run in self.by_run]
        known = observations(of_runs, self.clusters, statistics.fmean)
        return mean_interval(known, most=most) if known else None

    @property
    def exposed_share(self) -> Estimate | None:
        """Exposed communication of the typical rank, as a share of its step, with its interval over runs."""
        share, number = self.typical.exposed_share, self.typical.rank
        of_runs = self.over_runs(lambda run: run.rank(number).exposed_share, most=1.0)
        if share is None:
            return None
        return Estimate(share) if of_runs is None else Estimate(share, of_runs.low, of_runs.high, note=of_runs.note)

    def part_seconds(self, number: int, part: str | None) -> Estimate | None:
        """Seconds of a part of one rank's step over runs; those of the whole step where `part` is None."""

        def of_run(run: Breakdown) -> float | None:
            own = run.rank(number)
            if part is None:
                return own.seconds
            return own.exposed_seconds if part == COMMUNICATION else own.parts[part]

        return self.over_runs(of_run)

    def rank(self, number: int) -> RankParts:
        """The parts of one rank."""
        return next(rank for rank in self.ranks if rank.rank == number)

    @property
    def typical(self) -> RankParts:
        """The rank with the (upper) median wait: with one slow rank it is one of those that wait for it.

        Where waiting is unknown, it is the rank with the median exposed communication: transfer is the same on all.
        """
        if self.typical_rank is not None:
            return self.rank(self.typical_rank)
        return sorted(self.ranks, key=_idleness)[len(self.ranks) // 2]

    @property
    def wait_known(self) -> bool:
        """Whether wait and wire could be told apart."""
        return self.typical.parts["wait"] is not None


def _idleness(rank: RankParts) -> float:
    wait = rank.parts["wait"]
    return rank.exposed_seconds or 0.0 if wait is None else wait


def breakdown(run: Run, steady_from: int = 0) -> Breakdown | None:
    """The breakdown of one run; None where no step was explained on all its ranks.

    Args:
        run: the run, with the records of all ranks.
        steady_from: the first step after warm-up (`RunFigures.steady_from`); those before it are left out.
    """
    steps = [_step(lines) for lines in explained(run, steady_from)]
    if not steps:
        return None
    whole = [step for step in steps if _is_whole(step[0])] or steps
    reasons = {part: why for _, of_step, _ in whole for part, why in of_step.items()}
    lossy = [of_step for ranks, of_step, _ in steps if not _is_whole(ranks)] if whole is not steps else []
    means = tuple(_mean(same) for same in zip(*(ranks for ranks, _, _ in whole), strict=True))
    overhead, attached, light_seconds = _overheads(run, steady_from)
    if light_seconds is not None and run.header.trial.train.device == "cuda":
        share = light_seconds / max(rank.seconds for rank in means)
        means = tuple(_light(rank, share * rank.seconds) for rank in means)
    straggler = _straggler(means, [waits for _, _, waits in whole])
    return Breakdown(
        means,
        len(whole),
        reasons,
        overhead,
        straggler,
        attached_overhead=attached,
        left_out=tuple(_loss(own, reasons) for own in lossy),
    )


def _light(rank: RankParts, seconds: float) -> RankParts:
    """A rank's explained step on a GPU as a light one of `seconds`. Where its gaps or exchanges are unknown so is what
    explaining added to each part: those that are known stand, and less of the step is unknown."""
    exposed, told_apart = rank.exposed_seconds, rank.parts["wait"] is not None
    known = {name: own for name, own in rank.parts.items() if own is not None}
    if not 0 < seconds < rank.seconds:
        return rank
    if exposed is None or rank.parts["launch_gaps"] is None:
        return replace(rank, seconds=max(seconds, sum(known.values())))
    light = unprofiled(known if told_apart else {**known, COMMUNICATION: exposed}, seconds, "cuda")
    exposed = sum(light[name] for name in EXPOSED) if told_apart else light[COMMUNICATION]
    return RankParts(rank.rank, seconds, {name: light.get(name) for name in rank.parts}, exposed)


def _step(lines: Sequence[tuple[int, ExplainedLine]]) -> tuple[list[RankParts], dict[str, str], dict[int, float]]:
    """(Parts of each rank, why some are unknown, how long each rank waited where this is known) of one step."""
    reasons: dict[str, str] = {}
    exposed = exposures(lines)
    for (_, line), exposure in zip(lines, exposed, strict=True):
        reasons |= {part: why for part, why in line.unknown.items() if part in PARTS}
        reasons |= {part: exposure.reason for part in EXPOSED if getattr(exposure, part) is None}
    waits = {own.rank: own.late_by_seconds for own in exposed if own.late_by_seconds is not None}
    return [_parts(line, own) for (_, line), own in zip(lines, exposed, strict=True)], reasons, waits


def _is_whole(ranks: Sequence[RankParts]) -> bool:
    """Whether the profiler lost nothing of a step or run; else not even exposed communication is known.

    What a step is made of, such as a CUDA graph, may make other parts unknown: the mean of steps without one would be
    of another kind of step.
    """
    return all(rank.exposed_seconds is not None for rank in ranks)


def _loss(reasons: Mapping[str, str], known: Mapping[str, str]) -> str:
    return next((why for why in reasons.values() if why not in known.values()), "parts of them are unknown")


def mean_breakdown(
    by_run: Sequence[Breakdown | None], clusters: Clusters = None, typical_rank: int | None = None
) -> Breakdown | None:
    """The mean over the explained observations of one trial; None where none was explained.

    Args:
        by_run: breakdown of each run; their ranks may differ (`_of_same_ranks`), and some may have lost events.
        clusters: the runs of each observation.
        typical_rank: number of the typical rank, where it is fixed.
    """
    by_run = _of_same_ranks(by_run)
    every = [run for run in by_run if run is not None]
    if not every:
        return None
    explained = [run for run in every if _is_whole(run.ranks)] or every
    lossy = [run for run in every if run not in explained]
    by_run = [None if run in lossy else run for run in by_run]
    reasons = {part: why for run in explained for part, why in run.reasons.items()}
    each = [[run] for run in range(len(by_run))] if clusters is None else clusters
    together = [[known.ranks for run in own if (known := by_run[run]) is not None] for own in each]
    means = [[_mean(same) for same in zip(*ranks, strict=True)] for ranks in together if ranks]
    return Breakdown(
        ranks=tuple(_mean(same) for same in zip(*means, strict=True)),
        steps=sum(run.steps for run in explained),
        reasons=reasons,
        overhead=known_median(run.overhead for run in explained),
        straggler=_common_straggler(by_run, clusters),
        by_run=tuple(by_run),
        clusters=clusters,
        typical_rank=typical_rank,
        attached_overhead=known_median(run.attached_overhead for run in explained),
        left_out=(
            *(why for run in every for why in run.left_out),
            *(_loss(run.reasons, reasons) for run in lossy for _ in range(run.steps)),
        ),
    )


def _of_same_ranks(by_run: Sequence[Breakdown | None]) -> Sequence[Breakdown | None]:
    """The same runs with the ranks that all of them explained, so that their means are of the same ranks.

    A script without a Probe may leave usable traces of other ranks in each run. Where no rank is in all runs, those
    without the rank that most runs have are None.
    """
    numbers = [{rank.rank for rank in run.ranks} for run in by_run if run is not None]
    if all(own == numbers[0] for own in numbers):
        return by_run
    most = max(sorted(set.union(*numbers)), key=lambda rank: sum(rank in own for own in numbers))
    common = set.intersection(*(own for own in numbers if most in own))

    def alike(run: Breakdown | None) -> Breakdown | None:
        ranks = tuple(rank for rank in run.ranks if rank.rank in common) if run is not None else ()
        if run is None or len(ranks) < len(common):
            return None
        straggler = run.straggler if run.straggler is not None and run.straggler.rank in common else None
        return replace(run, ranks=ranks, straggler=straggler)

    return [alike(run) for run in by_run]


def _parts(line: ExplainedLine, exposure: RankExposure) -> RankParts:
    where = step_parts(line, exposure)
    parts: dict[str, float | None] = {name: length(where.get(name, ())) for name in PARTS}
    parts |= dict.fromkeys(set(line.unknown) & set(PARTS) - set(EXPOSED))
    parts |= {name: None for name in EXPOSED if getattr(exposure, name) is None}
    exposed = None if COMMUNICATION in line.unknown else length(exposure.exposed)
    return RankParts(exposure.rank, line.seconds, parts, exposed)


def _mean(some: Sequence[RankParts]) -> RankParts:
    parts = {name: whole_mean([rank.parts[name] for rank in some]) for name in PARTS}
    return RankParts(
        some[0].rank,
        statistics.fmean(rank.seconds for rank in some),
        parts,
        whole_mean([rank.exposed_seconds for rank in some]),
    )


def _straggler(means: Sequence[RankParts], earliness: Sequence[Mapping[int, float]]) -> Straggler | None:
    """The rank that waits least, where it keeps the others waiting more often than chance and by more than noise.

    Args:
        means: mean parts of every rank.
        earliness: per step, how long each rank waited.
    """
    if len(means) < 2 or any(len(waits) < len(means) for waits in earliness):
        return None
    noticeable = _LEAST_WAIT_SHARE * max(mean.seconds for mean in means)
    guilty = [
        min(waits, key=waits.__getitem__) if max(waits.values()) - min(waits.values()) > noticeable else None
        for waits in earliness
    ]
    named = [rank for rank in guilty if rank is not None]
    if not named:
        return None
    rank = max(sorted(set(named)), key=named.count)
    share = named.count(rank) / len(guilty)
    margins = [statistics.median(s for other, s in waits.items() if other != rank) - waits[rank] for waits in earliness]
    if share <= 1 / len(means) or len(margins) < _FEWEST_STEPS_TO_NAME or not _beyond_noise(margins):
        return None
    own = {mean.rank: mean.seconds - (mean.exposed_seconds or 0.0) for mean in means}
    others = statistics.median(seconds for other, seconds in own.items() if other != rank)
    return Straggler(rank, share, own[rank] / others - 1 if others > 0 else None)


def _beyond_noise(margins: Sequence[float]) -> bool:
    """Whether their mean is more than three standard errors above 0: a rank picked from many needs that much."""
    return statistics.fmean(margins) > 3 * statistics.stdev(margins) / math.sqrt(len(margins))


def _common_straggler(by_run: Sequence[Breakdown | None], clusters: Clusters) -> Straggler | None:
    by_explained_run = [run.straggler for run in by_run if run is not None]
    named = [straggler for straggler in by_explained_run if straggler is not None]
    if 2 * len(named) <= len(by_explained_run):
        return None
    ranks = [straggler.rank for straggler in named]
    rank = max(sorted(set(ranks)), key=ranks.count)
    same = [straggler for straggler in named if straggler.rank == rank]
    of_runs = [
        (run.straggler.share_of_steps if run.straggler and run.straggler.rank == rank else 0.0) if run else None
        for run in by_run
    ]
    share = mean_interval(observations(of_runs, clusters, statistics.fmean), most=1.0)
    return Straggler(rank, share.value, known_median(straggler.slower_by for straggler in same), share)


def _overheads(run: Run, steady_from: int) -> tuple[float | None, float | None, float | None]:
    """What explaining costs, and what it leaves behind, by the estimator of all times (`analysis.runs.steps`).

    Returns:
        The median over blocks of the explained steps' mean against that of the timed steps of their kind beside them,
            attached ones where there are any; the mean whole attached step against that of as many light ones, the last
            before the profiler; and the seconds of the mean light one. Explained steps that nothing marks, as in
            traces, are none of these.
    """
    steps = step_figures.RunSteps.of([step_figures.recorded_steps(run)])
    (elapsed,), kinds = step_figures.elapsed_seconds(steps), step_figures.step_kinds(steps)

    explained = [line.step for line in run.ranks[0].explained]

    def timed(window: int) -> step_figures.Integers:
        own = np.flatnonzero(steps.in_window(window) & (steps.step >= steady_from) & ~np.isin(steps.step, explained))
        # Within this run alone: neighbours of a block are compared with it, and a long run is not spoken of.
        event = step_figures.one_off(step_figures.slow_steps(steps.step[own], elapsed[None, own], kinds[own]))
        return own[steps.step[own] != event.step] if event is not None else own

    def slower(some: step_figures.Integers, against: step_figures.Integers) -> float | None:
        usual = float(elapsed[against].mean()) if len(against) else 0.0
        return float(elapsed[some].mean()) / usual - 1 if len(some) and usual > 0 else None

    place_of = dict(zip(steps.step.tolist(), range(len(steps)), strict=True))
    blocks: dict[tuple[int, int], list[int]] = {}
    for line in run.ranks[0].explained:
        if line.step >= steady_from and (index := place_of.get(line.step)) is not None:
            blocks.setdefault((line.block, int(kinds[index])), []).append(index)
    light, attached = timed(step_figures.LIGHT), timed(step_figures.ATTACHED)
    ratios = []
    for (_, kind), block in blocks.items():
        some = attached if len(attached) else light
        beside = some[kinds[some] == kind]
        around = [*beside[beside < min(block)][-_NEIGHBOURS:], *beside[beside > max(block)][:_NEIGHBOURS]]
        ratios.append(slower(np.array(block), np.array(around, dtype=np.int64)))
    light, attached = (some[kinds[some] == step_figures.WHOLE] for some in (light, attached))
    seconds = float(elapsed[light].mean()) if len(light) else None
    return known_median(ratios), slower(attached, light[-len(attached) :]), seconds
