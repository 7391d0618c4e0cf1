"""Works out the steps of a run on all its ranks: the time that each adds, which are alike, and which are slow.

All ranks' clocks start together, at a barrier. From there the time that has passed by the end of step k is the largest
over ranks of the sum of their steps, and a step is what it adds to that:

    T(k) = max over ranks of (d(r, 1) + ... + d(r, k))          elapsed(k) = T(k) - T(k - 1)

with d(r, k) the seconds that rank r recorded for step k,
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

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitscale.base.arrays import FloatArray
from vitscale.store.lines import COLUMNS, WINDOWS, Steps
from vitscale.store.records import ModelLine, RankRecord
from vitscale.store.results import Run
from vitscale.trial.trial import Trial, last_step_share, samples_used

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

WHOLE, FIRST, SHORT = range(3)
"""Kinds of steps. Whole: a full global batch. First: it begins an epoch after the first one, and may wait for the
loader. Short: it ends an epoch, with the images that are left."""
LIGHT, EXPLAINED, ATTACHED = (WINDOWS.index(name) for name in ("light", "explained", "attached"))
"""How a step was recorded. Light: timed alone. Explained: with the times of its kernels and collectives. Attached: not
explained itself, but slowed by a profiler that was attached."""

FEWEST_STEPS = 8
"""Fewest steps whose median shows what is usual; of fewer, none is set aside."""
SLOWER_TIMES = 1.5
"""Times the usual seconds that a slow step takes, at least."""
DEVIATIONS = 6.0
"""Deviations of the logarithms by which it exceeds them too. With both limits, chance sets a step aside in at most 2 %
of log-normal runs."""
MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation of normal noise to its standard deviation."""
_SAME_SIZE_SHARE = 0.25
"""Share of the largest excess from which another slow step counts as of the same size. Steps that recur differ among
themselves, by a factor of two easily; benchmarks/slow_steps.py shows what each choice costs."""


@dataclass(frozen=True, eq=False)
class RunSteps:
    """The steps that every needed rank recorded, in rising order: arrays of S steps, or of R ranks x S steps.

    They may belong to B runs that differ in seconds and losses alone, as runs of a trial mostly do. A step's position
    is its index in these arrays, its number the one that was recorded.
    """

    step: Integers
    """Step numbers, (S,)."""
    epoch: Integers
    """Shape (R, S), as images, warmup and window."""
    seconds: FloatArray
    """Shape (B, R, S)."""
    images: Integers
    loss: FloatArray
    """Shape (B, R, S); NaN where a line has null."""
    warmup: Flags
    window: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, runs: Sequence[Sequence[Steps]]) -> RunSteps:
        """Return the steps that all ranks have; where a rank has several lines of one number, the last one counts.

        Args:
            runs: each run's steps by rank, with the same columns in all runs but for `seconds` and `loss`.
        """
        if _have_same_numbers(runs[0]):
            aligned_runs = runs
        else:
            positions_by_rank = _common_positions(runs[0])
            aligned_runs = [_steps_at(ranks, positions_by_rank) for ranks in runs]
        ranks_of_first_run = aligned_runs[0]
        columns = {name: _column(name, aligned_runs) for name in COLUMNS if name != "step"}
        step = ranks_of_first_run[0].step if ranks_of_first_run else np.array([], dtype=np.int64)
        return cls(step, **columns)

    def in_window(self, window: int) -> Flags:
        """Return which steps lie after marked warm-up and in `window` on all ranks, (S,)."""
        return np.asarray(((self.window == window) & ~self.warmup).all(axis=0))

    def __len__(self) -> int:
        return len(self.step)


_COLUMNS_BY_RUN = ("seconds", "loss")
"""Columns in which the runs of one `RunSteps` may differ."""


def _column(name: str, runs: Sequence[Sequence[Steps]]) -> npt.NDArray[Any]:
    """Return a column of `RunSteps`: (R, S) where all runs have the same values, (B, R, S) where they may differ."""
    rank_count = len(runs[0])
    shape: tuple[int, ...]  # without the steps
    if name in _COLUMNS_BY_RUN:
        shape = (len(runs), rank_count)
        rows = [getattr(steps, name) for steps in itertools.chain.from_iterable(runs)]
    else:
        shape = (rank_count,)
        rows = [getattr(steps, name) for steps in runs[0]]
    if not rows:
        return np.empty((*shape, 0), dtype=COLUMNS[name])
    return np.concatenate(rows).reshape(*shape, -1)  # np.stack in a third of the time


def _have_same_numbers(ranks: Sequence[Steps]) -> bool:
    """Whether all ranks have the same steps, each once and in rising order."""
    if not ranks:
        return True
    first = ranks[0].step
    is_rising = bool((first[1:] > first[:-1]).all())
    return is_rising and all(np.array_equal(steps.step, first) for steps in ranks[1:])


def _common_positions(ranks: Sequence[Steps]) -> list[Integers]:
    """Return for each rank the positions of the steps that all ranks have, in rising order of their numbers.

    Where a rank has several lines of one number, the last one counts.
    """
    last_lines = [_last_lines(steps) for steps in ranks]
    common = last_lines[0].numbers
    for lines in last_lines[1:]:
        common = np.intersect1d(common, lines.numbers, assume_unique=True)
    return [lines.positions[np.isin(lines.numbers, common, assume_unique=True)] for lines in last_lines]


class _LastLines(NamedTuple):
    """The last line of each number in one rank's steps, in rising order of the numbers."""

    numbers: Integers
    positions: Integers


def _last_lines(steps: Steps) -> _LastLines:
    """Return the last line of each number."""
    # np.unique returns the first position of each number, which in the reversed steps is the last one.
    numbers, positions_from_the_end = np.unique(steps.step[::-1], return_index=True)
    return _LastLines(numbers, len(steps) - 1 - positions_from_the_end)


def _steps_at(ranks: Sequence[Steps], positions_by_rank: Sequence[Integers]) -> list[Steps]:
    return [steps.at(positions) for steps, positions in zip(ranks, positions_by_rank, strict=True)]


def recorded_steps(run: Run) -> list[Steps]:
    """Return the steps of each rank as it recorded them; empty if a rank is missing."""
    if len(run.ranks) < len(run.ranks_needed):
        return []
    return [Steps.of(rank.steps) for rank in run.ranks]


def group_runs_by_steps(runs: Sequence[Sequence[Steps]]) -> list[list[int]]:
    """Return the indices of `runs` in groups whose steps differ in seconds and losses alone, as `RunSteps.of` needs.

    Example: of three runs, of which the last one recorded fewer steps, [[0, 1], [2]].

    Args:
        runs: each run's steps by rank.
    """
    shared_columns = [name for name in COLUMNS if name not in _COLUMNS_BY_RUN]
    runs_by_columns: dict[tuple[bytes, ...], list[int]] = {}
    for run, ranks in enumerate(runs):
        columns: list[bytes] = []
        for steps in ranks:
            columns += [getattr(steps, name).tobytes() for name in shared_columns]
        runs_by_columns.setdefault(tuple(columns), []).append(run)
    return list(runs_by_columns.values())


def elapsed_seconds(steps: RunSteps) -> FloatArray:
    """Return the seconds that each step adds to the time that passed, (B, S): see the module's docstring.

    The ranks' clocks start together where an epoch or a block of explained steps begins, and after such a block. They
    are taken to start together after marked warm-up too, and after a step that is missing in the record.
    """
    elapsed = np.empty((len(steps.seconds), len(steps)))
    if not len(steps):
        return elapsed
    clocks_restart = (
        (np.diff(steps.step) != 1)
        | _changes(steps.epoch[0])
        | _changes(steps.warmup[0])
        | _changes(steps.window[0] == EXPLAINED)
    )
    restarts = (np.flatnonzero(clocks_restart) + 1).tolist()  # positions of the steps before which clocks restart
    stretch_bounds = [0, *restarts, len(steps)]  # [0, 3, 8]: steps 0 to 2, and 3 to 7
    with np.errstate(over="ignore", invalid="ignore"):
        for begin, end in itertools.pairwise(stretch_bounds):
            passed_by_rank = np.cumsum(steps.seconds[:, :, begin:end], axis=2)  # (B, R, steps)
            passed = passed_by_rank.max(axis=1)  # T(k) of the module's docstring, (B, steps)
            elapsed[:, begin] = passed[:, 0]
            np.subtract(passed[:, 1:], passed[:, :-1], out=elapsed[:, begin + 1 : end])
    return elapsed


def _changes(values: npt.NDArray[Any]) -> Flags:
    """Return which values differ from the one before, without the first one: (S,) gives (S - 1,)."""
    return np.asarray(values[1:] != values[:-1])


def step_kinds(steps: RunSteps) -> npt.NDArray[np.uint8]:
    """Return the kind of each step, by its images and its position, (S,): WHOLE, FIRST or SHORT.

    The run's very first step counts as a whole one: if it is slow, that is warm-up.
    """
    kinds = np.full(len(steps), WHOLE, dtype=np.uint8)
    if not len(steps):
        return kinds
    # For each epoch the position of its first step, and the number of its steps: (epochs,).
    _, epoch_begins, steps_in_epoch = np.unique(steps.epoch[0], return_index=True, return_counts=True)
    has_first = (steps_in_epoch > 1) & (epoch_begins > 0)
    kinds[epoch_begins[has_first]] = FIRST
    images = steps.images.sum(axis=0, dtype=np.float64)  # of all ranks, (S,)
    kinds[images < images.max()] = SHORT
    return kinds


def medians(values: FloatArray) -> FloatArray:
    """Return medians along the last axis of the values that are not NaN; NaN where there are none.

    `np.nanmedian` gives the same, and takes 3 to 40 times as long for the arrays of a study.
    """
    ordered = np.sort(values, axis=-1)  # NaN comes last
    known_count = values.shape[-1] - np.isnan(values).sum(axis=-1, keepdims=True)  # (..., 1)
    below_middle = np.take_along_axis(ordered, np.maximum(known_count - 1, 0) // 2, axis=-1)
    above_middle = np.take_along_axis(ordered, known_count // 2, axis=-1)  # the same value for an odd count
    is_odd = known_count % 2
    with np.errstate(over="ignore"):
        middle = np.where(is_odd, below_middle, (below_middle + above_middle) / 2)  # (..., 1)
    return np.asarray(middle[..., 0])


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


def slow_steps(numbers: Integers, seconds: FloatArray, kinds: npt.NDArray[np.uint8]) -> list[list[SlowStep]]:
    """Find the slow steps among each run's light steps after warm-up, in their order.

    A step is slow where it takes more than 1.5 times the median whole step, and lies more than 6 scaled median absolute
    deviations of the logarithms beyond it. A step that begins an epoch is compared with the shortest of its kind
    instead, where there are two or more and that is longer: waiting for the loader is part of every epoch.

    Args:
        numbers: numbers of the S steps, which all B runs have.
        seconds: seconds that each step adds to the time that passed (`elapsed_seconds`), (B, S).
        kinds: kinds of the steps (`step_kinds`), (S,).

    Returns:
        For each run its slow steps; none where there are fewer than `FEWEST_STEPS` steps.
    """
    slow_by_run: list[list[SlowStep]] = [[] for _ in seconds]
    if len(numbers) < FEWEST_STEPS:
        return slow_by_run
    whole_seconds = seconds[:, kinds == WHOLE]
    noise = _log_noise(whole_seconds if whole_seconds.shape[1] else seconds)
    margin = np.fmax(math.log(SLOWER_TIMES), DEVIATIONS * noise)  # of logarithms, (B,)
    usual_whole = medians(whole_seconds if whole_seconds.shape[1] >= FEWEST_STEPS else seconds)  # (B,)
    usual = _usual_seconds(usual_whole, seconds, kinds)  # (B, S)
    has_usual = (usual_whole > 0)[:, None]  # (B, 1)
    # Logarithms are taken of the few candidates alone. Candidate c is step positions[c] of run runs[c].
    runs, positions = np.nonzero((seconds > usual) & has_usual)
    candidate_seconds = seconds[runs, positions]
    candidate_usual = usual[runs, positions]
    is_slow = np.log(candidate_seconds) - np.log(candidate_usual) > margin[runs]
    slow_numbers = numbers[positions[is_slow]].tolist()
    excess_seconds = (candidate_seconds - candidate_usual)[is_slow].tolist()
    for run, number, excess in zip(runs[is_slow].tolist(), slow_numbers, excess_seconds, strict=True):
        slow_by_run[run].append(SlowStep(number, excess))
    return slow_by_run


def _usual_seconds(usual_whole: FloatArray, seconds: FloatArray, kinds: npt.NDArray[np.uint8]) -> FloatArray:
    """Return the seconds that a step of its run and kind usually takes, for each step: (B, S).

    They are those of a whole step. For a step that begins an epoch they are the shortest such step of the run, where
    there are two or more and that is longer.

    Args:
        usual_whole: usual seconds of a whole step in each run, (B,).
        seconds: elapsed seconds of the steps, (B, S).
        kinds: kinds of the steps, (S,).
    """
    usual_first = usual_whole
    first_seconds = seconds[:, kinds == FIRST]  # (B, steps that begin an epoch)
    if first_seconds.shape[1] > 1:
        usual_first = np.fmax(usual_whole, first_seconds.min(axis=1))
    return np.where(kinds == FIRST, usual_first[:, None], usual_whole[:, None])


def _log_noise(seconds: FloatArray) -> FloatArray:
    """Return the scaled median absolute deviation of the logarithms of each run's steps: (B, S) gives (B,)."""
    logs = np.log(np.where(seconds > 0, seconds, math.nan))
    with np.errstate(invalid="ignore"):
        return MAD_TO_SIGMA * medians(np.abs(logs - medians(logs)[:, None]))


def decide_slow_steps(
    slow_by_run: Sequence[Sequence[SlowStep]], first_short_steps: Sequence[int | None]
) -> list[SlowSteps]:
    """Decide once for all runs of a trial which of their slow steps are set aside, and which are kept.

    Two kinds of slow steps do not recur once in so many steps, and are set aside:

    - in each run its first short step: its batch has a new shape, for which kernels are compiled or chosen anew;
    - among all other slow steps of all runs the only one of its size (`one_off`).

    Args:
        slow_by_run: the slow steps of each run (`slow_steps`).
        first_short_steps: the number of each run's first short step, slow or not; None where it has none, or had it in
            its warm-up.

    Returns:
        One for each run.
    """
    other_slow_by_run = []
    for slow_steps_of_run, first_short in zip(slow_by_run, first_short_steps, strict=True):
        other_slow_by_run.append([slow for slow in slow_steps_of_run if slow.step != first_short])
    only_one = one_off(other_slow_by_run)
    decisions = []
    for run, (slow_steps_of_run, first_short) in enumerate(zip(slow_by_run, first_short_steps, strict=True)):
        steps_to_set_aside = {first_short}
        if only_one is not None and only_one.run == run:
            steps_to_set_aside.add(only_one.step)
        set_aside = [slow.step for slow in slow_steps_of_run if slow.step in steps_to_set_aside]
        kept = [slow.step for slow in slow_steps_of_run if slow.step not in steps_to_set_aside]
        decisions.append(SlowSteps(tuple(sorted(set_aside)), tuple(kept)))
    return decisions


class OneOff(NamedTuple):
    """The only slow step of its size in all runs of a trial."""

    run: int
    """Index of its run among the runs."""
    step: int
    """Its number in the run."""


def one_off(slow_by_run: Sequence[Sequence[SlowStep]]) -> OneOff | None:
    """Return the slow step that is the only one of its size in all runs of a trial; None where there is none.

    It is the only one if every other slow step exceeds the usual seconds by less than a quarter as much.

    A step that recurs with probability p is mistaken for a single event only where the runs' N steps show it once. So
    the mean over many studies lacks exp(-N p) of what such steps add: 22 % at N p = 1.5, 5 % at 3. There no rule can
    tell the two apart.
    """
    slow_steps_of_all = []
    for run, slow_steps_of_run in enumerate(slow_by_run):
        slow_steps_of_all += [_SlowStepOfRun(run, slow.step, slow.excess_seconds) for slow in slow_steps_of_run]
    if not slow_steps_of_all:
        return None
    slowest = max(slow_steps_of_all, key=lambda slow: slow.excess_seconds)
    same_size_excess = _SAME_SIZE_SHARE * slowest.excess_seconds
    same_size = [slow for slow in slow_steps_of_all if slow.excess_seconds >= same_size_excess]
    if len(same_size) > 1:
        return None
    return OneOff(slowest.run, slowest.step)


class _SlowStepOfRun(NamedTuple):
    """A slow step with the index of its run among several."""

    run: int
    step: int
    excess_seconds: float


class _HasStep(Protocol):
    @property
    def step(self) -> int: ...


Line = TypeVar("Line", bound=_HasStep)


def common_steps(run: Run, lines_of: Callable[[RankRecord], Sequence[Line]]) -> list[tuple[Line, ...]]:
    """Return the lines, one per rank, of each step that every needed rank has, in order; empty if a rank is missing.

    Args:
        run: the record.
        lines_of: the lines of one rank, each with a `step`.
    """
    lines_by_rank = [_lines_by_step(lines_of(rank)) for rank in explained_ranks(run)]
    if not lines_by_rank or len(run.ranks) < len(run.ranks_needed):
        return []
    steps_of_all_ranks = set.intersection(*map(set, lines_by_rank))
    common_lines = []
    for step in sorted(steps_of_all_ranks):
        common_lines.append(tuple(lines_by_step[step] for lines_by_step in lines_by_rank))
    return common_lines


def _lines_by_step(lines: Iterable[Line]) -> dict[int, Line]:
    return {line.step: line for line in lines}


def explained_ranks(run: Run) -> tuple[RankRecord, ...]:
    """Return all ranks of a run; for a user's script that records no step itself only those with explained steps."""
    if run.header.trial.train.script is None or not has_only_whole_epochs(run):
        return tuple(run.ranks)
    return tuple(rank for rank in run.ranks if rank.explained)


PaceSource = Literal["steps", "epochs"]
"""steps: timed steps. epochs: whole epochs of an imported log that records no step."""
LastStepSource = Literal["measured", "share"]
"""measured: the short last step of an epoch was timed. share: its slots' share of a whole step."""


@dataclass(frozen=True)
class Pace:
    """How fast a run goes; None where unknown."""

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


def pace_of_steps(
    run: Run, elapsed: FloatArray, kinds: npt.NDArray[np.uint8], images: Integers, model: ModelLine | None
) -> Pace:
    """Return the pace of a run by its T timed steps, at least one.

    Args:
        run: the record.
        elapsed: `elapsed_seconds` of these steps, (T,).
        kinds: `step_kinds` of these steps, (T,).
        images: images of these steps on R ranks, (R, T).
        model: the model that was built.
    """
    trial = run.header.trial
    epoch = epoch_size(trial, model)
    if _has_images_for_steps(run, images):
        rate = _recorded_rate(run, elapsed, images)
        epoch_seconds = positive_or_none(epoch.images / rate) if epoch.images and rate else None
        return Pace(
            epoch_seconds=epoch_seconds,
            images_per_second=positive_or_none(rate),
            source="steps",
            epoch_images=epoch.images,
        )
    seconds = _SecondsByKind.of(elapsed, kinds)
    if not epoch.images or not epoch.steps:  # no step is known as the last of an epoch
        return Pace(
            step_seconds=positive_or_none(seconds.mean_of_like_steps()),
            images_per_second=positive_or_none(_recorded_rate(run, elapsed, images)),
            source="steps",
        )
    if epoch.steps == 1:  # the step is the whole epoch
        return _epoch_pace(seconds.mean_of_like_steps(), effective_steps=1.0, last_step=None, epoch_images=epoch.images)
    short_share = last_step_share(trial, epoch.images)
    whole_steps = epoch.steps if short_share is None else epoch.steps - 1
    step_seconds = _whole_step_seconds(seconds, whole_steps, short_share)
    if short_share is None or step_seconds <= 0:
        return _epoch_pace(step_seconds, float(epoch.steps), last_step=None, epoch_images=epoch.images)
    if seconds.short:
        effective_steps = whole_steps + _mean(seconds.short) / step_seconds
        return _epoch_pace(step_seconds, effective_steps, last_step="measured", epoch_images=epoch.images)
    return _epoch_pace(step_seconds, whole_steps + short_share, last_step="share", epoch_images=epoch.images)


def _has_images_for_steps(run: Run, images: Integers) -> bool:
    """Whether the run was imported from a table of rates without a batch: then its "steps" are one image per GPU."""
    imported = run.header.imported
    return imported is not None and imported.batch_told is False and bool((images == 1).all())


def _recorded_rate(run: Run, elapsed: FloatArray, images: Integers) -> float | None:
    """Return images of all ranks / seconds of the timed steps; None where they take no time.

    An imported log may hold some ranks only: then the other ranks are taken to have trained on as many images.
    """
    seconds: float = sum(elapsed.tolist())
    if not seconds > 0:
        return None
    ranks_per_recorded = run.header.trial.layout.data / len(run.ranks_needed)
    return ranks_per_recorded * float(images.sum(dtype=np.float64)) / seconds


class _SecondsByKind(NamedTuple):
    """Elapsed seconds of the timed steps of each kind."""

    whole: list[float]
    first: list[float]
    short: list[float]

    @classmethod
    def of(cls, elapsed: FloatArray, kinds: npt.NDArray[np.uint8]) -> _SecondsByKind:
        """Sort the seconds of T timed steps by the kinds of these steps."""
        return cls(
            whole=elapsed[kinds == WHOLE].tolist(),
            first=elapsed[kinds == FIRST].tolist(),
            short=elapsed[kinds == SHORT].tolist(),
        )

    def mean_of_like_steps(self) -> float:
        """Return the mean of the steps with a full global batch; of the short ones where there are no others."""
        return _mean([*self.whole, *self.first] or self.short)


def _whole_step_seconds(seconds: _SecondsByKind, whole_steps: int, short_share: float | None) -> float:
    """Return the mean seconds over the whole steps of an epoch, of which the one that begins it may take longer.

    Args:
        seconds: of the timed steps.
        whole_steps: number of whole steps in an epoch, with the one that begins it.
        short_share: share of the images of a whole step that the short last one has; None: there is no short one.
    """
    if not seconds.whole and not seconds.first:
        return _mean(seconds.short) / (short_share or 1.0)
    usual_step = _mean(seconds.whole or seconds.first)
    first_step = _mean(seconds.first) if seconds.first else usual_step
    return usual_step + (first_step - usual_step) / whole_steps


def _mean(values: Sequence[float]) -> float:
    """Return the mean, also of values whose sum overflows."""
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def _epoch_pace(
    step_seconds: float, effective_steps: float, last_step: LastStepSource | None, epoch_images: int
) -> Pace:
    """Return the pace of a run of whose steps it is known how many are an epoch; `NO_PACE` where a step takes no time.

    Args:
        step_seconds: seconds of a whole step.
        effective_steps: how many whole steps take as long as an epoch.
        last_step: how the time of the short last step is known; None where the last step is a whole one.
        epoch_images: images that are trained in an epoch.
    """
    if positive_or_none(step_seconds) is None:
        return NO_PACE
    return Pace(
        step_seconds=step_seconds,
        epoch_seconds=positive_or_none(effective_steps * step_seconds),
        images_per_second=positive_or_none(epoch_images / effective_steps / step_seconds),
        source="steps",
        effective_steps=effective_steps,
        last_step_source=last_step,
        epoch_images=epoch_images,
    )


def pace_of_epochs(trial: Trial, model: ModelLine | None, epoch_seconds: float | None) -> Pace:
    """Return the pace of a run that records whole epochs alone; without steps where the epoch's images are unknown."""
    if epoch_seconds is None or positive_or_none(epoch_seconds) is None:
        return NO_PACE
    epoch = epoch_size(trial, model)
    if not epoch.images or not epoch.steps:
        return Pace(epoch_seconds=epoch_seconds, source="epochs")
    short_share = last_step_share(trial, epoch.images)
    effective_steps = float(epoch.steps)
    last_step: LastStepSource | None = None
    if short_share is not None and epoch.steps != 1:
        effective_steps = epoch.steps - 1 + short_share
        last_step = "share"
    return Pace(
        step_seconds=positive_or_none(epoch_seconds / effective_steps),
        epoch_seconds=epoch_seconds,
        images_per_second=positive_or_none(epoch.images / epoch_seconds),
        source="epochs",
        effective_steps=effective_steps,
        last_step_source=last_step,
        epoch_images=epoch.images,
    )


class EpochSize(NamedTuple):
    """The size of an epoch; None where the size of the dataset is not known."""

    images: int | None
    """Images that are trained in it."""
    steps: int | None
    """Its optimizer steps."""


def epoch_size(trial: Trial, model: ModelLine | None) -> EpochSize:
    """Return the size of a trial's epochs. `model`: the model line of a run, which records the dataset's images."""
    if model is None or model.train_samples is None:
        return EpochSize(images=None, steps=None)
    samples = samples_used(model.train_samples, trial.data.fraction)
    steps = trial.steps_per_epoch(samples)
    images = steps * trial.global_batch if trial.train.drop_last else samples
    return EpochSize(images, steps)


def has_only_whole_epochs(run: Run) -> bool:
    """Return whether a run that was imported, or that ran a user's own script, recorded no steps."""
    may_lack_steps = run.header.imported is not None or run.header.trial.train.script is not None
    return may_lack_steps and not any(rank.steps for rank in run.ranks)


def positive_or_none(value: float | None) -> float | None:
    """Return `value`; None where it is unknown, or not positive and finite. Records may hold any number."""
    if value is None or not math.isfinite(value):
        return None
    return value if value > 0 else None
