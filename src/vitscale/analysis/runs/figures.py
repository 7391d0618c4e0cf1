"""The figures of one run, from the raw values of its ranks.

All figures of time derive from the timed steps: light ones, without warm-up and without a one-off slow step. Warm-up is
what is marked as such, and the steps after it that are still slow (`warmup`). `steps` tells which steps are slow, and
what pace the others come to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from vitscale.analysis.runs import steps as step_figures
from vitscale.analysis.runs.warmup import WarmUp, warm_up
from vitscale.analysis.statistics import finite_or_none
from vitscale.base.arrays import FloatArray
from vitscale.store.lines import Steps
from vitscale.store.records import ModelLine, RankRecord
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

PHASES: tuple[str, ...] = ("launch", "imports", "data", "model", "engine", "script", "first_step")
"""Parts of the start-up, in order."""
OF_SCRIPT = ("script",)
"""Phases that only a user's own script has: everything up to its first step."""

LEARNED = ("train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "mean_iou")
"""What an epoch tells about learning."""
FEWEST_FOR_TAILS = 100
"""Fewest steps of a run for its tails: with fewer, the 99th percentile is little else than the largest."""
_FEWEST_FOR_SPREAD = 5
_MOST_NAMED = 4


@dataclass(frozen=True)
class EpochFigures:
    """One epoch, reduced over ranks. Accuracies, of images or of pixels, and mean IoU are shares in [0, 1]."""

    epoch: int
    elapsed_seconds: float | None
    """Seconds from barrier to barrier, slow steps included; None where a rank does not tell."""
    complete: bool
    train_loss: float | None
    train_accuracy: float | None
    held_out_loss: float | None
    held_out_accuracy: float | None
    mean_iou: float | None = None
    runs: int = 1
    """Number of runs that these are the means of: fewer than the trial's where some ended before."""


@dataclass(frozen=True, eq=False, repr=False)
class LossByStep(Sequence[tuple[int, float | None]]):
    """Pairs of step number and loss; None where the loss was not finite."""

    step: step_figures.Integers
    loss: FloatArray
    """NaN where the loss was not finite."""

    @classmethod
    def means(cls, step: step_figures.Integers, loss: FloatArray) -> list[LossByStep]:
        """Each run's mean over the rows of its `loss`, (runs, rows, steps); NaN where a value is not finite."""
        if not loss.shape[1]:
            return [cls(step, np.full(len(step), math.nan)) for _ in loss]
        with np.errstate(over="ignore", invalid="ignore"):
            means = loss.mean(axis=1)
        return [cls(step, own) for own in np.where(np.isfinite(means), means, math.nan)]

    def known(self) -> LossByStep:
        """Only the steps whose loss was finite."""
        return self._at(~np.isnan(self.loss))

    def _at(self, places: slice | step_figures.Flags) -> LossByStep:
        return LossByStep(self.step[places], self.loss[places])

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float | None]: ...
    @overload
    def __getitem__(self, index: slice) -> LossByStep: ...
    def __getitem__(self, index: int | slice) -> tuple[int, float | None] | LossByStep:
        if isinstance(index, slice):
            return self._at(index)
        loss = float(self.loss[index])
        return int(self.step[index]), None if math.isnan(loss) else loss

    def __iter__(self) -> Iterator[tuple[int, float | None]]:
        for step, loss in zip(self.step.tolist(), self.loss.tolist(), strict=True):
            yield step, None if math.isnan(loss) else loss

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, LossByStep) else other)

    def __hash__(self) -> int:
        return hash((self.step.tobytes(), self.loss.tobytes()))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class RunFigures:
    """What one completed run says. None stands for what its record does not tell."""

    run: str
    """Trial and repeat, for messages."""
    steps: int
    """Number of steps that were recorded."""
    timed_steps: int
    """Number of steps that the figures rest on."""
    detected_warmup_steps: int
    """Number of light steps after the marked warm-up that were still slow: recorded, but in none of these figures."""
    steady_from: int | None
    """Number of the first timed step: all steps before it, of whatever window, are warm-up."""
    slow: step_figures.SlowSteps
    slow_share: float | None
    """Time of the slow steps that were set aside, as a share of that of all light steps after warm-up."""
    kept_slow_share: float | None
    """The same share for slow steps that recur in the trial's runs."""
    trend: float | None
    """Share by which step times fall (below 0) or rise through the rest of the run; None where they are steady."""
    step_spread: float | None
    """Interquartile range of the times of like steps over their median."""
    pace: step_figures.Pace
    """The source of `step_seconds`, `epoch_seconds` and `images_per_second`."""
    step_seconds_p95: float | None
    """95th percentile over steps of the slowest rank, slow steps included; None, as p99, below `FEWEST_FOR_TAILS`."""
    step_seconds_p99: float | None
    tail_steps: int
    """Number of steps behind p95 and p99."""
    elapsed_epoch_seconds: float | None
    """Median of the complete epochs of light steps alone, from barrier to barrier, slow steps included."""
    elapsed_epochs: int
    """Number of epochs behind `elapsed_epoch_seconds`."""
    training_seconds: float | None
    """Seconds of all steps but the first, which belongs to the start-up; warm-up and slow steps included."""
    phase_seconds: Mapping[str, float]
    """Phase of the start-up to the seconds of its slowest rank, compilations included."""
    evaluation_seconds: float | None
    """The slowest rank's seconds after an epoch, median over epochs; None where nothing was evaluated or timed."""
    epochs: tuple[EpochFigures, ...]
    loss_by_step: LossByStep
    """Mean over ranks."""
    peak_bytes: int | None
    """Peak of the rank that needed most."""
    model: ModelLine | None
    notes: tuple[str, ...]
    """What the record lacks."""
    compiled: Mapping[str, tuple[str, ...]]
    """Phase to what was compiled in it, as the ranks record it."""

    @property
    def step_seconds(self) -> float | None:
        """Mean elapsed seconds of a whole step."""
        return self.pace.step_seconds

    @property
    def images_per_second(self) -> float | None:
        """Real images per second of all ranks."""
        return self.pace.images_per_second

    @property
    def epoch_seconds(self) -> float | None:
        """Seconds of an epoch by its steps; where a log tells of whole epochs alone, their median."""
        return self.pace.epoch_seconds

    @property
    def last_epoch(self) -> EpochFigures | None:
        """The last whole epoch: the fragment that `measure.steps` may end a run in is the last only where it is all."""
        return next(
            (epoch for epoch in reversed(self.epochs) if epoch.complete), self.epochs[-1] if self.epochs else None
        )


def run_figures(run: Run) -> RunFigures:
    """The figures of a trial's only run; see `all_run_figures`."""
    return all_run_figures([run])[0]


def all_run_figures(runs: Sequence[Run]) -> list[RunFigures]:
    """Works out the figures of each run of one trial from its record.

    Runs whose steps differ in seconds and losses alone are worked out together; which slow steps are set aside is
    decided once for all of them. An imported run needs only the ranks that its files tell of.
    """
    recorded = [step_figures.recorded_steps(run) for run in runs]
    like_groups = step_figures.in_like_groups(recorded)
    groups = [_LikeRuns.of([recorded[index] for index in like]) for like in like_groups]
    place_of = {index: (group, place) for group, like in enumerate(like_groups) for place, index in enumerate(like)}
    places = [place_of[index] for index in range(len(runs))]
    decided = step_figures.decide_slow_steps(
        [groups[group].steady[place].slow for group, place in places],
        [groups[group].new_shape for group, _ in places],
    )
    return [
        _of_run(run, groups[group], place, slow)
        for run, (group, place), slow in zip(runs, places, decided, strict=True)
    ]


class _Tails(NamedTuple):
    """Percentiles over one run's steps, of the slowest rank's seconds; None below `FEWEST_FOR_TAILS` steps."""

    steps: int
    p95_seconds: float | None = None
    p99_seconds: float | None = None


def _tails(slowest_seconds: FloatArray) -> list[_Tails]:
    """The tails of each row of (runs, steps): seconds of the slowest rank."""
    runs, steps = slowest_seconds.shape
    if steps < FEWEST_FOR_TAILS:
        return [_Tails(steps)] * runs
    p95_seconds, p99_seconds = np.quantile(slowest_seconds, (0.95, 0.99), axis=1).tolist()
    return [_Tails(steps, p95, p99) for p95, p99 in zip(p95_seconds, p99_seconds, strict=True)]


class _SteadySteps(NamedTuple):
    """The light steps of one run after its warm-up."""

    warm: WarmUp
    places: step_figures.Integers
    """Their places among the run's steps."""
    slow: list[step_figures.SlowStep]
    tails: _Tails
    disturbed_epochs: Collection[int]
    """Epochs with a step that is not a light one after warm-up."""


@dataclass(frozen=True, eq=False)
class _LikeRuns:
    """Runs whose steps differ in seconds and losses alone."""

    steps: step_figures.RunSteps
    elapsed: FloatArray
    """Seconds that each step adds, (runs, steps)."""
    kinds: npt.NDArray[np.uint8]
    losses: Sequence[LossByStep]
    light: int
    """Number of light steps after marked warm-up."""
    new_shape: int | None
    """Number of the first short step; None without one."""
    steady: Sequence[_SteadySteps]
    """One for each run."""

    @classmethod
    def of(cls, recorded: Sequence[Sequence[Steps]]) -> _LikeRuns:
        """The runs from the steps of their ranks."""
        steps = step_figures.RunSteps.of(recorded)
        is_light = steps.in_window(step_figures.LIGHT)
        elapsed, kinds = step_figures.elapsed_seconds(steps), step_figures.step_kinds(steps)
        light = np.flatnonzero(is_light)
        alike = np.flatnonzero(is_light & (kinds == step_figures.WHOLE))
        short_steps = steps.step[kinds == step_figures.SHORT]
        steady: dict[int, _SteadySteps] = {}
        warm = warm_up(elapsed[:, alike])
        for warm_steps in sorted({run.steps for run in warm}):
            members = [run for run in range(len(recorded)) if warm[run].steps == warm_steps]
            places = _steady(light, alike, warm_steps)
            slow = step_figures.slow_steps(steps.step[places], elapsed[members][:, places], kinds[places])
            tails = _tails(steps.seconds[members][:, :, places].max(axis=1, initial=0.0))
            warming = steps.step < (steps.step[places[0]] if len(places) else 0)
            no_light = steps.warmup | (steps.window != step_figures.LIGHT) | warming
            disturbed = set(steps.epoch[no_light].tolist())
            for run, slow_of_run, tails_of_run in zip(members, slow, tails, strict=True):
                steady[run] = _SteadySteps(warm[run], places, slow_of_run, tails_of_run, disturbed)
        return cls(
            steps,
            elapsed,
            kinds,
            LossByStep.means(steps.step, steps.loss),
            len(light),
            int(short_steps[0]) if len(short_steps) else None,
            [steady[run] for run in range(len(recorded))],
        )


def _of_run(run: Run, like: _LikeRuns, place: int, slow: step_figures.SlowSteps) -> RunFigures:
    """The figures of the run at `place` among its like, of whose slow steps some are set aside."""
    header = run.header
    name = f"{header.trial_id} repeat {header.repeat + 1}"
    steps, elapsed, kinds, losses = like.steps, like.elapsed[place], like.kinds, like.losses[place]
    steady_steps = like.steady[place]
    notes = _lacking(run, len(steps))
    steady = steady_steps.places
    timed = steady[~np.isin(steps.step[steady], slow.set_aside)] if slow.set_aside else steady
    passed: float = sum(elapsed[steady].tolist())
    if (passed if timed is steady else sum(elapsed[timed].tolist())) <= 0:
        timed = timed[:0]
        if not step_figures.whole_epochs_alone(run):
            notes.append("no timed step that all ranks recorded")
    steady_from = int(steps.step[steady[0]]) if len(steady) else None
    model = next((rank.model for rank in run.ranks if rank.model is not None), None)
    epochs = _epochs(run.ranks, run.ranks_needed if header.imported else (), notes)
    whole_epochs = _elapsed_epochs(header.trial, model, epochs, steady_steps.disturbed_epochs)
    elapsed_epoch = step_figures.cost(statistics.median(whole_epochs)) if whole_epochs else None
    phase_seconds = _phase_seconds(run.ranks)
    of_script = header.trial.train.script is not None
    missing = [phase for phase in PHASES if phase not in phase_seconds and of_script == (phase in OF_SCRIPT)]
    if missing and header.imported is None and not step_figures.whole_epochs_alone(run):
        notes.append(f"start-up lacks {', '.join(missing)}")
    pace = step_figures.NO_PACE
    if len(timed):
        pace = step_figures.of_steps(run, elapsed[timed], kinds[timed], steps.images[:, timed], model)
    elif step_figures.whole_epochs_alone(run):
        pace = step_figures.of_epochs(header.trial, model, elapsed_epoch)
    if header.imported is not None and pace.epoch_seconds is None and elapsed_epoch is not None:
        pace = replace(pace, epoch_seconds=elapsed_epoch, source="epochs")  # a table of epochs beside steps or rates
    has_step_times = len(timed) > 0 and pace.step_seconds is not None
    tails = steady_steps.tails if has_step_times else _Tails(steps=0)

    def share(of: Collection[int]) -> float | None:
        if not of or not len(timed):
            return 0.0 if len(timed) else None
        return float(elapsed[np.isin(steps.step, list(of))].sum() / passed)

    return RunFigures(
        run=name,
        steps=len(steps),
        timed_steps=len(timed),
        detected_warmup_steps=like.light - len(steady),
        steady_from=steady_from,
        slow=slow,
        slow_share=share(slow.set_aside),
        kept_slow_share=share(slow.kept),
        trend=steady_steps.warm.trend,
        step_spread=_quartile_range(elapsed[timed[kinds[timed] == step_figures.WHOLE]].tolist()),
        pace=pace,
        step_seconds_p95=tails.p95_seconds,
        step_seconds_p99=tails.p99_seconds,
        tail_steps=tails.steps,
        elapsed_epoch_seconds=elapsed_epoch,
        elapsed_epochs=len(whole_epochs),
        training_seconds=sum(elapsed[1:].tolist()) if len(steps) > 1 else None,
        phase_seconds=phase_seconds,
        evaluation_seconds=_evaluation(run.ranks),
        epochs=epochs,
        loss_by_step=_told(run, losses),
        peak_bytes=max((e.peak_bytes for r in run.ranks for e in r.epochs if e.peak_bytes is not None), default=None),
        model=model,
        notes=tuple(f"{name}: {note}" for note in notes),
        compiled=_compiled(run.ranks),
    )


def _lacking(run: Run, common: int) -> list[str]:
    """Notes on ranks and steps that are missing, where `common` steps are on all ranks."""
    present = {rank.rank for rank in run.ranks}
    if absent := [rank for rank in run.ranks_needed if rank not in present]:
        return [f"no record of {'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))}"]
    counts = [len(rank.steps) for rank in run.ranks]
    if any(count != common for count in counts):
        counts = [len(np.unique(Steps.of(rank.steps).step)) for rank in run.ranks]
    if any(count != common for count in counts):
        return [f"ranks disagree in their steps: only the {common} of {max(counts)} that all recorded count"]
    return []


def _told(run: Run, losses: LossByStep) -> LossByStep:
    """The losses but those that an imported run or a script does not tell: unknown, rather than not finite.

    A script that told the loss of every step up to one, and of none after it, told it until it was not finite.
    """
    if run.header.imported is None and run.header.trial.train.script is None:
        return losses
    told = ~np.isnan(losses.loss)
    from_the_first_on = told.any() and told[: told.sum()].all()
    return losses.known() if run.header.imported is not None or not from_the_first_on else losses


def _steady(light: step_figures.Integers, alike: step_figures.Integers, warm: int) -> step_figures.Integers:
    """The places in `light` after warm-up, which is the first `warm` steps of `alike`; at least half of `light`."""
    if not warm:
        return light
    return light[min(int(np.searchsorted(light, alike[warm - 1])) + 1, len(light) // 2) :]


def _quartile_range(seconds: Sequence[float]) -> float | None:
    """The distance of the quartiles as a share of the median; None where there are too few steps to tell it."""
    if len(seconds) < _FEWEST_FOR_SPREAD:
        return None
    # Of one short list numpy's quantiles take twice as long as these.
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / median if median > 0 else None


def _epochs(ranks: Sequence[RankRecord], needed: Collection[int], notes: list[str]) -> tuple[EpochFigures, ...]:
    """Each epoch once, with the figures that all ranks share and the seconds of the slowest rank.

    Where a rank of `needed` lacks an epoch, the slowest is unknown, and that epoch has no seconds.
    """
    by_rank = {rank.rank: {line.epoch: line for line in rank.epochs} for rank in ranks}
    epochs, partial = [], []
    for number in sorted({number for lines in by_rank.values() for number in lines}):
        same = [lines[number] for lines in by_rank.values() if number in lines]
        first = same[0]
        whole = all(number in by_rank.get(rank, {}) for rank in needed)
        if not whole:
            partial.append(number)
        epochs.append(
            EpochFigures(
                epoch=number,
                elapsed_seconds=max(line.seconds for line in same) if whole else None,
                complete=all(line.complete for line in same),
                runs=1,
                **{name: finite_or_none(getattr(first, name)) for name in LEARNED},
            )
        )
    if partial:
        listed = f"{', '.join(map(str, partial[:_MOST_NAMED]))}{', ...' if len(partial) > _MOST_NAMED else ''}"
        notes.append(f"not every rank tells of epoch{'s' if len(partial) > 1 else ''} {listed}: left out of its time")
    return tuple(epochs)


def _elapsed_epochs(
    trial: Trial, model: ModelLine | None, epochs: Sequence[EpochFigures], disturbed: Collection[int]
) -> list[float]:
    """Seconds of the complete epochs after warm-up that consist of light steps alone.

    Which epochs hold warm-up is counted, not read from the steps: a marked step's line may have been left out.
    """
    _, steps = step_figures.of_an_epoch(trial, model)
    warmup = trial.window.warmup_steps if trial.train.script is None else 0  # no epoch of a script has steps
    if steps is None and warmup:
        return []
    return [
        e.elapsed_seconds
        for e in epochs
        if e.complete and e.epoch * (steps or 0) >= warmup and e.elapsed_seconds and e.epoch not in disturbed
    ]


def _phase_seconds(ranks: Sequence[RankRecord]) -> dict[str, float]:
    slowest: dict[str, float] = {}
    for rank in ranks:
        own: dict[str, float] = {}
        for phase in rank.phases:
            own[phase.name] = own.get(phase.name, 0) + phase.seconds
        for name, seconds in own.items():
            slowest[name] = max(slowest.get(name, seconds), seconds)
    return {name: slowest[name] for name in PHASES if name in slowest}


def _evaluation(ranks: Sequence[RankRecord]) -> float | None:
    of_epochs: dict[int, float] = {}
    for line in (line for rank in ranks for line in rank.epochs if line.evaluation_seconds is not None):
        of_epochs[line.epoch] = max(of_epochs.get(line.epoch, 0.0), line.evaluation_seconds or 0.0)
    return statistics.median(of_epochs.values()) if of_epochs else None


def _compiled(ranks: Sequence[RankRecord]) -> dict[str, tuple[str, ...]]:
    by_phase: dict[str, set[str]] = {}
    for phase in (phase for rank in ranks for phase in rank.phases if phase.compiled):
        by_phase.setdefault(phase.name, set()).update(phase.compiled)
    return {phase: tuple(sorted(names)) for phase, names in by_phase.items()}
