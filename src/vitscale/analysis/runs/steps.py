"""The steps of a run on all its ranks: what each adds to the time that passed, which are alike, and which are slow.

All ranks' clocks start together, at a barrier. From there the time that has passed by the end of step k is the largest
over ranks of the sum of their steps, and a step is what it adds to that:

    T(k) = max over ranks of (d(r, 1) + ... + d(r, k))          elapsed(k) = T(k) - T(k - 1)

so that any stretch of consecutive steps adds up to the time that passed. The maxima over ranks of each step would not:
collectives tie the ranks' pace, so that a rank which stamps late in one step is short in the next. The sum of such
maxima is more than the time that passed, the more ranks the more.

A preemption, a page-cache miss or a kernel compiled anew makes a step slow beyond all others of its run. One such step
of eight seconds among 80 would decide what all 80 say. What recurs is the machine's nature, and counts at its long-run
rate. Which of the two a slow step is shows only among all runs of a trial: the single one of them all is set aside, and
two or more stay in every figure (`one_off`). Runs that decided alone would set aside every step that comes about once a
run, and read too fast by all of them.

How fast a run goes follows from its timed steps, or for an imported run from whole epochs shared out over their steps.

An epoch of K optimizer steps, of which the last one holds the images that are left, takes

    epoch = K_eff x step         K_eff = K - 1 + t_last / step          images/s = images trained in an epoch / epoch

with `step` the mean of whole steps. The one that begins an epoch, which may wait for the loader, counts once in K where
it was timed. t_last is the mean of the short steps that were timed, else its slots' share of a whole step
(`trial.last_step_share`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitscale.store.lines import COLUMNS, WINDOWS, Steps
from vitscale.store.records import ModelLine, RankRecord
from vitscale.store.results import Run
from vitscale.trial.trial import Trial, last_step_share, samples_used

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

WHOLE, FIRST, SHORT = range(3)
"""Kinds of steps. Whole: a full global batch. First: it begins an epoch after the first one, and may wait for the
loader. Short: it ends an epoch, with the images that are left."""
LIGHT, EXPLAINED, ATTACHED = (WINDOWS.index(name) for name in ("light", "explained", "attached"))

FEWEST_STEPS = 8
"""Fewest steps that tell what is usual; of fewer, none is set aside."""
SLOWER_TIMES = 1.5
DEVIATIONS = 6.0
"""Deviations of the logarithms. With both limits, chance sets a step aside in at most 2 % of log-normal runs."""
MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation of normal noise to its standard deviation."""
_OF_LIKE_SIZE = 0.25
"""Share of the largest excess from which another slow step is one of its kind. Recurring steps differ among themselves,
by a factor of two easily; benchmarks/slow_steps.py shows what each choice costs."""


@dataclass(frozen=True, eq=False)
class RunSteps:
    """The steps that every needed rank recorded, in rising order: arrays of S steps, or of R ranks x S steps.

    They may belong to B runs that differ in seconds and losses alone, as runs of a trial mostly do.
    """

    step: Integers
    """Step numbers, (S,)."""
    epoch: Integers
    """Shape (R, S), as images, warmup and window."""
    seconds: Floats
    """Shape (B, R, S)."""
    images: Integers
    loss: Floats
    """Shape (B, R, S); NaN where a line has null."""
    warmup: Flags
    window: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, runs: Sequence[Sequence[Steps]]) -> RunSteps:
        """The steps that all ranks have; where a rank has several lines of one number, the last one counts.

        Args:
            runs: each run's steps by rank, with the same columns in all runs but for `seconds` and `loss`.
        """
        if not _alike(runs[0]):
            places = _common_places(runs[0])
            runs = [[steps.at(own) for steps, own in zip(ranks, places, strict=True)] for ranks in runs]
        ranks = runs[0]
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, kind in COLUMNS.items():
            of_all = name in _OF_EACH_RUN
            rows = [getattr(steps, name) for some in (runs if of_all else runs[:1]) for steps in some]
            shape = (len(runs), len(ranks), -1) if of_all else (len(ranks), -1)
            # This is np.stack in a third of the time.
            columns[name] = np.concatenate(rows).reshape(shape) if rows else np.empty((*shape[:-1], 0), dtype=kind)
        step = columns.pop("step")
        return cls(step[0] if ranks else np.array([], dtype=np.int64), **columns)

    def in_window(self, window: int) -> Flags:
        """Which steps lie after warm-up and in `window` on all ranks, (S,)."""
        return np.asarray(((self.window == window) & ~self.warmup).all(axis=0))

    def __len__(self) -> int:
        return len(self.step)


_OF_EACH_RUN = ("seconds", "loss")


def _alike(ranks: Sequence[Steps]) -> bool:
    """Whether all ranks have the same steps, each once and in rising order."""
    first = ranks[0].step if ranks else np.array([])
    rest = [steps.step for steps in ranks[1:]]
    rising = bool((first[1:] > first[:-1]).all())
    return rising and all(len(step) == len(first) and bool((step == first).all()) for step in rest)


def _common_places(ranks: Sequence[Steps]) -> list[Integers]:
    """For each rank the places of the steps that all ranks have, in rising order; of lines of one number the last."""
    numbers, places = zip(*(np.unique(steps.step[::-1], return_index=True) for steps in ranks), strict=True)
    common = functools.reduce(functools.partial(np.intersect1d, assume_unique=True), numbers)
    return [
        (len(steps) - 1 - own)[np.isin(number, common, assume_unique=True)]
        for steps, number, own in zip(ranks, numbers, places, strict=True)
    ]


def recorded_steps(run: Run) -> list[Steps]:
    """The steps of each rank as it recorded them; empty if a rank is missing."""
    complete = run.ranks and len(run.ranks) >= len(run.ranks_needed)
    return [Steps.of(rank.steps) for rank in run.ranks] if complete else []


def in_like_groups(runs: Sequence[Sequence[Steps]]) -> list[list[int]]:
    """The places in `runs`, grouped for `RunSteps.of`, of runs whose steps differ in seconds and losses alone."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    columns = [name for name in COLUMNS if name not in _OF_EACH_RUN]
    for index, ranks in enumerate(runs):
        key = tuple(getattr(steps, name).tobytes() for steps in ranks for name in columns)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def elapsed_seconds(steps: RunSteps) -> Floats:
    """Seconds that each step adds to the time that passed, (B, S): see the module's docstring.

    Clocks start together where an epoch or an explained block begins, and after such a block. They are taken to start
    together after marked warm-up too, and after a step that is missing in the record.
    """
    elapsed = np.empty((len(steps.seconds), len(steps)))
    if not len(steps):
        return elapsed
    epoch, warmup, explained = steps.epoch[0], steps.warmup[0], steps.window[0] == EXPLAINED
    together = (
        (steps.step[1:] - steps.step[:-1] != 1)
        | (epoch[1:] != epoch[:-1])
        | (warmup[1:] != warmup[:-1])
        | (explained[1:] != explained[:-1])
    )
    edges = [0, *(np.flatnonzero(together) + 1).tolist(), len(steps)]
    with np.errstate(over="ignore", invalid="ignore"):
        for begin, end in itertools.pairwise(edges):
            passed = np.cumsum(steps.seconds[:, :, begin:end], axis=2).max(axis=1)
            elapsed[:, begin] = passed[:, 0]
            np.subtract(passed[:, 1:], passed[:, :-1], out=elapsed[:, begin + 1 : end])
    return elapsed


def step_kinds(steps: RunSteps) -> npt.NDArray[np.uint8]:
    """The kind of each step, by its images and its place, (S,): WHOLE, FIRST or SHORT.

    The run's very first step counts as a whole one: if it is slow, that is warm-up.
    """
    kinds = np.full(len(steps), WHOLE, dtype=np.uint8)
    if len(steps):
        images = steps.images.sum(axis=0, dtype=np.float64)
        _, begins, counts = np.unique(steps.epoch[0], return_index=True, return_counts=True)
        kinds[begins[(counts > 1) & (begins > 0)]] = FIRST
        kinds[images < images.max()] = SHORT
    return kinds


def medians(values: Floats) -> Floats:
    """Medians along the last axis of the values that are not NaN; NaN where there are none.

    `np.nanmedian` gives the same, and takes 3 to 40 times as long for the arrays of a study.
    """
    ordered = np.sort(values, axis=-1)
    known = values.shape[-1] - np.isnan(values).sum(axis=-1, keepdims=True)
    below = np.take_along_axis(ordered, np.maximum(known - 1, 0) // 2, axis=-1)
    above = np.take_along_axis(ordered, known // 2, axis=-1)
    with np.errstate(over="ignore"):
        return np.asarray(np.where(known % 2, below, (below + above) / 2)[..., 0])


class SlowStep(NamedTuple):
    """A step that is slow beyond the others of its run."""

    step: int
    excess_seconds: float
    """Its seconds beyond the usual ones of its kind."""


@dataclass(frozen=True)
class SlowSteps:
    """The slow steps of one run, by number."""

    set_aside: tuple[int, ...] = ()
    """Steps that are in no figure of the run but its tails (p95, p99) and its elapsed epochs."""
    kept: tuple[int, ...] = ()
    """Steps of a kind that recurs in the trial's runs; they are in every figure."""


def slow_steps(numbers: Integers, seconds: Floats, kinds: npt.NDArray[np.uint8]) -> list[list[SlowStep]]:
    """Finds the slow steps among each run's light steps after warm-up, in their order.

    A step is slow where it takes more than 1.5 times the median whole step, and lies more than 6 scaled median absolute
    deviations of the logarithms beyond it. A step that begins an epoch is compared with the shortest of its kind
    instead, where there are two or more and that is longer: waiting for the loader is part of every epoch.

    Args:
        numbers: numbers of the steps, (S,).
        seconds: elapsed seconds (`elapsed_seconds`), (B, S).
        kinds: kinds of the steps (`step_kinds`), (S,).
    """
    slow: list[list[SlowStep]] = [[] for _ in seconds]
    if len(numbers) < FEWEST_STEPS:
        return slow
    whole, firsts = seconds[:, kinds == WHOLE], seconds[:, kinds == FIRST]
    usual = medians(whole if whole.shape[1] >= FEWEST_STEPS else seconds)
    some = whole if whole.shape[1] else seconds
    logs = np.log(np.where(some > 0, some, math.nan))
    with np.errstate(invalid="ignore"):
        noise = MAD_TO_SIGMA * medians(np.abs(logs - medians(logs)[:, None]))
    margin = np.fmax(math.log(SLOWER_TIMES), DEVIATIONS * noise)
    of_a_first = np.fmax(usual, firsts.min(axis=1)) if firsts.shape[1] > 1 else usual
    level = np.where(kinds == FIRST, of_a_first[:, None], usual[:, None])
    runs, positions = np.nonzero((seconds > level) & (usual > 0)[:, None])
    step_seconds = seconds[runs, positions]
    usual_seconds = level[runs, positions]
    is_far = np.log(step_seconds) - np.log(usual_seconds) > margin[runs]
    excess_seconds = (step_seconds - usual_seconds)[is_far].tolist()
    steps = numbers[positions[is_far]].tolist()
    for run, step, excess in zip(runs[is_far].tolist(), steps, excess_seconds, strict=True):
        slow[run].append(SlowStep(step, excess))
    return slow


def decide_slow_steps(slow_by_run: Sequence[Sequence[SlowStep]], new_shapes: Sequence[int | None]) -> list[SlowSteps]:
    """Decides once for all runs of a trial which of their slow steps are set aside.

    Set aside are the single event of all runs (`one_off`), and in each run the first step of a new shape: a short last
    step for which kernels are compiled or chosen anew. That comes once a run, not once in so many steps.

    Args:
        slow_by_run: the slow steps of each run (`slow_steps`).
        new_shapes: the number of each run's first short step; None where it has none, or had it in its warm-up.
    """
    recurring_by_run = []
    for slow_steps_of_run, new_shape in zip(slow_by_run, new_shapes, strict=True):
        recurring_by_run.append([slow for slow in slow_steps_of_run if slow.step != new_shape])
    event = one_off(recurring_by_run)
    decided = []
    for run, (slow_steps_of_run, new_shape) in enumerate(zip(slow_by_run, new_shapes, strict=True)):
        event_step = event.step if event is not None and event.run == run else None
        exceptional_steps = (new_shape, event_step)
        set_aside = [slow.step for slow in slow_steps_of_run if slow.step in exceptional_steps]
        kept = [slow.step for slow in slow_steps_of_run if slow.step not in exceptional_steps]
        decided.append(SlowSteps(tuple(sorted(set_aside)), tuple(kept)))
    return decided


class OneOff(NamedTuple):
    """The one slow step of its size in all runs of a trial."""

    run: int
    """Position of its run among the runs."""
    step: int
    """Its number in the run."""


def one_off(slow_by_run: Sequence[Sequence[SlowStep]]) -> OneOff | None:
    """Finds the slow step that is alone of its size in all runs of a trial; None where there is none, or it recurs.

    Alone is a step where every other slow step exceeds the usual by less than a quarter as much. A step that recurs
    with probability p is mistaken for a single event only where the runs' N steps show it once. So the mean over many
    studies lacks exp(-N p) of what such steps add: 22 % at N p = 1.5, 5 % at 3. There no rule can tell the two apart.
    """
    events = []
    for run, slow_steps_of_run in enumerate(slow_by_run):
        events += [_SlowEvent(run, slow.step, slow.excess_seconds) for slow in slow_steps_of_run]
    if not events:
        return None
    largest = max(events, key=lambda event: event.excess_seconds)
    of_like_size = [event for event in events if event.excess_seconds >= _OF_LIKE_SIZE * largest.excess_seconds]
    if len(of_like_size) > 1:
        return None
    return OneOff(largest.run, largest.step)


class _SlowEvent(NamedTuple):
    """A slow step of one of several runs, by the position of its run."""

    run: int
    step: int
    excess_seconds: float


class _OfAStep(Protocol):
    @property
    def step(self) -> int: ...


Line = TypeVar("Line", bound=_OfAStep)


def common_steps(run: Run, lines_of: Callable[[RankRecord], Sequence[Line]]) -> list[tuple[Line, ...]]:
    """The lines, one per rank, of each step that every needed rank has, in order; empty if a rank is missing.

    Args:
        run: the record.
        lines_of: the lines of one rank, each with a `step`.
    """
    by_rank = [{line.step: line for line in lines_of(rank)} for rank in explained_ranks(run)]
    if not by_rank or len(run.ranks) < len(run.ranks_needed):
        return []
    common = set.intersection(*(set(lines) for lines in by_rank))
    return [tuple(lines[step] for lines in by_rank) for step in sorted(common)]


def explained_ranks(run: Run) -> tuple[RankRecord, ...]:
    """All ranks of a run; for a script without a Probe only those that left traces."""
    if run.header.trial.train.script is None or not whole_epochs_alone(run):
        return tuple(run.ranks)
    return tuple(rank for rank in run.ranks if rank.explained)


PaceSource = Literal["steps", "epochs"]
"""steps: timed steps. epochs: whole epochs of an imported log that records no step."""
LastStepSource = Literal["measured", "share"]
"""measured: the short last step of an epoch was timed. share: its slots' share of a whole step."""


@dataclass(frozen=True)
class Pace:
    """What a run's figures of time derive from; None where unknown."""

    step_seconds: float | None = None
    """Mean elapsed seconds of a whole step, such that `effective_steps` of them are an epoch."""
    epoch_seconds: float | None = None
    images_per_second: float | None = None
    """Real images of all ranks."""
    source: PaceSource | None = None
    effective_steps: float | None = None
    """K_eff of the module's docstring."""
    last_step_source: LastStepSource | None = None
    """None where the last step is a whole one."""
    epoch_images: int | None = None
    """Images trained in one epoch, without those that drop_last leaves out."""


NO_PACE = Pace()
"""The pace of a run that records neither steps nor epochs."""


def of_steps(
    run: Run, elapsed: Floats, kinds: npt.NDArray[np.uint8], images: Integers, model: ModelLine | None
) -> Pace:
    """The pace of a run by its T timed steps, at least one.

    Args:
        run: the record.
        elapsed: `elapsed_seconds` of these steps, (T,).
        kinds: `step_kinds` of these steps, (T,).
        images: images of these steps on R ranks, (R, T).
        model: the model that was built.
    """
    trial = run.header.trial
    seconds: dict[int, list[float]] = {kind: elapsed[kinds == kind].tolist() for kind in (WHOLE, FIRST, SHORT)}
    mean = {kind: _mean(values) for kind, values in seconds.items() if values}
    trained, count = of_an_epoch(trial, model)
    told = run.header.imported
    of_images = told is not None and told.batch_told is False and bool((images == 1).all())
    if of_images or not trained or not count or count == 1:
        # If an epoch has one step, this is the whole epoch. In an unknown dataset no step is known as an epoch's last.
        whole = [*seconds[WHOLE], *seconds[FIRST]] or seconds[SHORT]
        step = _mean(whole)
        if count == 1 and trained and not of_images:
            return _pace(step, 1.0, None, trained)
        # An imported log may hold some ranks only: the others take as many images, and a step is everybody's.
        of_each = trial.layout.data / len(run.ranks_needed)
        passed = sum(elapsed.tolist())
        rate = of_each * float(images.sum(dtype=np.float64)) / passed if passed > 0 else None
        if of_images:  # a table of rates without a batch: its "steps" stand for one image per GPU
            epoch = cost(trained / rate) if trained and rate else None
            return Pace(None, epoch, cost(rate), "steps", epoch_images=trained)
        return Pace(cost(step), None, cost(rate), "steps")
    share = last_step_share(trial, trained)
    wholes = count if share is None else count - 1
    step = _whole_step(mean, wholes, share)
    if share is None or step <= 0:
        return _pace(step, float(count), None, trained)
    source: LastStepSource = "measured" if SHORT in mean else "share"
    return _pace(step, wholes + (mean[SHORT] / step if source == "measured" else share), source, trained)


def _whole_step(mean: Mapping[int, float], wholes: int, share: float | None) -> float:
    """The mean over the `wholes` whole steps of an epoch, one of which begins it, from the means of the timed ones."""
    if WHOLE not in mean and FIRST not in mean:
        return mean[SHORT] / (share or 1.0)
    inner = mean.get(WHOLE, mean.get(FIRST, 0.0))
    return inner + (mean.get(FIRST, inner) - inner) / wholes


def _mean(values: Sequence[float]) -> float:
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def _pace(step: float, effective_steps: float, source: LastStepSource | None, trained: int) -> Pace:
    if cost(step) is None:
        return NO_PACE
    rate = trained / effective_steps / step
    return Pace(step, cost(effective_steps * step), cost(rate), "steps", effective_steps, source, trained)


def of_epochs(trial: Trial, model: ModelLine | None, epoch_seconds: float | None) -> Pace:
    """The pace of a run that records whole epochs alone. Its step is known where the images of an epoch are."""
    if cost(epoch_seconds) is None or epoch_seconds is None:
        return NO_PACE
    trained, count = of_an_epoch(trial, model)
    if not trained or not count:
        return Pace(epoch_seconds=epoch_seconds, source="epochs")
    share = last_step_share(trial, trained)
    steps = float(count) if share is None or count == 1 else count - 1 + share
    return Pace(
        step_seconds=cost(epoch_seconds / steps),
        epoch_seconds=epoch_seconds,
        images_per_second=cost(trained / epoch_seconds),
        source="epochs",
        effective_steps=steps,
        last_step_source=None if share is None or count == 1 else "share",
        epoch_images=trained,
    )


def of_an_epoch(trial: Trial, model: ModelLine | None) -> tuple[int | None, int | None]:
    """Images trained in an epoch and its optimizer steps; None where the size of the dataset is not known."""
    if model is None or model.train_samples is None:
        return None, None
    samples = samples_used(model.train_samples, trial.data.fraction)
    steps = trial.steps_per_epoch(samples)
    return steps * trial.global_batch if trial.train.drop_last else samples, steps


def whole_epochs_alone(run: Run) -> bool:
    """Whether an imported run records epochs and no step, or a user's own script only its whole time."""
    from_elsewhere = run.header.imported is not None or run.header.trial.train.script is not None
    return from_elsewhere and not any(rank.steps for rank in run.ranks)


def cost(value: float | None) -> float | None:
    """`value` if statistics can work with it: positive and finite. Records are input, and may hold anything."""
    return value if value is not None and math.isfinite(value) and value > 0 else None
