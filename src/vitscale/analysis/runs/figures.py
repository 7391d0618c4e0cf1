"""Works out the figures of one run from the raw values of its ranks.

    light steps     after marked warm-up; not explained, and without a profiler attached
    steady steps    light ones without the first of them that are still slow (`warmup`)
    timed steps     steady ones without the slow ones that were set aside (`steps.decide_slow_steps`)

All figures of time derive from the timed steps. `steps` decides which are slow, and works out the pace of the others.
"""

from __future__ import annotations

import itertools
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
from vitscale.store.records import EpochLine, ModelLine, RankRecord
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

PHASES: tuple[str, ...] = ("launch", "imports", "data", "model", "engine", "script", "first_step")
"""Parts of the start-up, in order."""
SCRIPT_PHASES = ("script",)
"""Phases that only a user's own script has: everything up to its first step."""

LEARNING_FIGURES = ("train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "mean_iou")
"""Figures of an epoch about learning."""
FEWEST_FOR_TAILS = 100
"""Fewest steps of a run for its tails: with fewer, the 99th percentile is little else than the largest."""
_FEWEST_SPREAD_STEPS = 5
"""Fewest whole steps of a run whose spread is given."""
_MOST_EPOCHS_NAMED = 4
"""Most epochs that a note lists by number."""


@dataclass(frozen=True)
class EpochFigures:
    """One epoch, reduced over ranks. Accuracies, of images or of pixels, and mean IoU are shares in [0, 1]."""

    epoch: int
    elapsed_seconds: float | None
    """Seconds from barrier to barrier, slow steps included; None where a rank did not record them."""
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
        """Return each run's mean loss over its ranks.

        Args:
            step: numbers of the steps, (steps,).
            loss: (runs, ranks, steps). A mean of any value that is not finite is NaN, and so is that of no rank.
        """
        if not loss.shape[1]:
            return [cls(step, np.full(len(step), math.nan)) for _ in loss]
        with np.errstate(over="ignore", invalid="ignore"):
            means = loss.mean(axis=1)
        return [cls(step, losses) for losses in np.where(np.isfinite(means), means, math.nan)]

    def known(self) -> LossByStep:
        """Return only the steps whose loss was finite."""
        return self._selected(~np.isnan(self.loss))

    def _selected(self, positions: slice | step_figures.Flags) -> LossByStep:
        return LossByStep(self.step[positions], self.loss[positions])

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float | None]: ...
    @overload
    def __getitem__(self, index: slice) -> LossByStep: ...
    def __getitem__(self, index: int | slice) -> tuple[int, float | None] | LossByStep:
        if isinstance(index, slice):
            return self._selected(index)
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
    """The figures of one completed run; None where its record lacks them."""

    run: str
    """Trial and repeat, for messages."""
    steps: int
    """Number of steps that were recorded."""
    timed_steps: int
    """Number of steps that the figures rest on."""
    detected_warmup_steps: int
    """Number of light steps after the marked warm-up that were still slow: recorded, but in none of these figures."""
    steady_from: int | None
    """Number of the first steady step: all steps before it, of whatever window, are warm-up."""
    slow: step_figures.SlowSteps
    slow_share: float | None
    """Time of the slow steps that were set aside, as a share of that of all light steps after warm-up."""
    kept_slow_share: float | None
    """Time of the slow steps that recur in the trial's runs, as a share of the same."""
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
        """Seconds of an epoch by its steps; where a log has whole epochs alone, their median."""
        return self.pace.epoch_seconds

    @property
    def last_epoch(self) -> EpochFigures | None:
        """The last complete epoch; where there is none, the fragment that `measure.steps` ended the run in."""
        for epoch in reversed(self.epochs):
            if epoch.complete:
                return epoch
        return self.epochs[-1] if self.epochs else None


def run_figures(run: Run) -> RunFigures:
    """Return the figures of a trial's only run; see `all_run_figures`."""
    return all_run_figures([run])[0]


def all_run_figures(runs: Sequence[Run]) -> list[RunFigures]:
    """Work out the figures of each run of one trial from its record.

    Which slow steps are set aside is decided once for all runs. An imported run needs only the ranks that its files
    hold.

    Returns:
        One for each run, in their order.
    """
    steps_by_run = _steps_by_run(runs)
    slow_steps_by_run = step_figures.decide_slow_steps(
        slow_by_run=[steps.steady.slow for steps in steps_by_run],
        first_short_steps=[steps.group.first_short_step for steps in steps_by_run],
    )
    figures_by_run = []
    for run, steps, slow_steps in zip(runs, steps_by_run, slow_steps_by_run, strict=True):
        timed_steps = _TimedSteps.of(steps, slow_steps)
        figures_by_run.append(_figures_of_run(run, timed_steps))
    return figures_by_run


def _steps_by_run(runs: Sequence[Run]) -> list[_StepsOfRun]:
    """Return the steps of each run, in the order of the runs.

    Runs whose steps differ in seconds and losses alone share their arrays, for numpy handles a trial's runs together in
    a fraction of the time.
    """
    recorded_steps = [step_figures.recorded_steps(run) for run in runs]
    steps_by_index: dict[int, _StepsOfRun] = {}
    for run_indices in step_figures.group_runs_by_steps(recorded_steps):
        group = _RunGroup.of([recorded_steps[run_index] for run_index in run_indices])
        for index_in_group, run_index in enumerate(run_indices):
            steps_by_index[run_index] = _StepsOfRun(group, index_in_group)
    return [steps_by_index[run_index] for run_index in range(len(runs))]


class _Tails(NamedTuple):
    """Percentiles over one run's steps, of the slowest rank's seconds; None below `FEWEST_FOR_TAILS` steps."""

    steps: int
    p95_seconds: float | None = None
    p99_seconds: float | None = None


def _tails(slowest_seconds: FloatArray) -> list[_Tails]:
    """Return the tails of each row of (runs, steps): seconds of the slowest rank."""
    runs, steps = slowest_seconds.shape
    if steps < FEWEST_FOR_TAILS:
        return [_Tails(steps)] * runs
    p95_seconds, p99_seconds = np.quantile(slowest_seconds, (0.95, 0.99), axis=1).tolist()
    return [_Tails(steps, p95, p99) for p95, p99 in zip(p95_seconds, p99_seconds, strict=True)]


class _SteadySteps(NamedTuple):
    """The steady steps of one run (the module's docstring), and what is worked out from them."""

    warm_up: WarmUp
    positions: step_figures.Integers
    """Their positions in `RunSteps`."""
    detected_warmup_steps: int
    """Number of light steps before them."""
    slow: list[step_figures.SlowStep]
    tails: _Tails
    disturbed_epochs: Collection[int]
    """Epochs with a step that is not steady."""


@dataclass(frozen=True, eq=False)
class _RunGroup:
    """Runs whose steps differ in seconds and losses alone."""

    steps: step_figures.RunSteps
    elapsed: FloatArray
    """Seconds that each step adds to the time that passed, (runs, steps)."""
    kinds: npt.NDArray[np.uint8]
    """Kind of each step (`steps.step_kinds`), (steps,)."""
    losses: Sequence[LossByStep]
    """One for each run."""
    first_short_step: int | None
    """Number of the first step with a smaller batch; None without one."""
    steady: Sequence[_SteadySteps]
    """One for each run."""

    @classmethod
    def of(cls, recorded: Sequence[Sequence[Steps]]) -> _RunGroup:
        """Work out what the runs have together. `recorded`: for each run the steps of its ranks."""
        steps = step_figures.RunSteps.of(recorded)
        elapsed = step_figures.elapsed_seconds(steps)
        kinds = step_figures.step_kinds(steps)
        short_steps = steps.step[kinds == step_figures.SHORT]
        return cls(
            steps=steps,
            elapsed=elapsed,
            kinds=kinds,
            losses=LossByStep.means(steps.step, steps.loss),
            first_short_step=int(short_steps[0]) if len(short_steps) else None,
            steady=_steady_steps(steps, elapsed, kinds),
        )


def _steady_steps(
    steps: step_figures.RunSteps, elapsed: FloatArray, kinds: npt.NDArray[np.uint8]
) -> list[_SteadySteps]:
    """Return the steady steps of each run: those that ran without a profiler, after warm-up.

    Runs with equally long warm-up have the same ones, and are worked out together.

    Args:
        steps: of all runs.
        elapsed: seconds that each step adds, (runs, steps).
        kinds: kind of each step, (steps,).
    """
    is_light = steps.in_window(step_figures.LIGHT)
    light_positions = np.flatnonzero(is_light)
    whole_positions = np.flatnonzero(is_light & (kinds == step_figures.WHOLE))
    warm_ups = warm_up(elapsed[:, whole_positions])
    steady_by_run: dict[int, _SteadySteps] = {}
    for warmup_steps in sorted({run_warm_up.steps for run_warm_up in warm_ups}):
        # All runs with so many steps of warm-up, together.
        runs = [run for run, run_warm_up in enumerate(warm_ups) if run_warm_up.steps == warmup_steps]
        positions = _positions_after_warm_up(light_positions, whole_positions, warmup_steps)
        steady_elapsed = elapsed[runs][:, positions]  # (runs, positions)
        slow_by_run = step_figures.slow_steps(steps.step[positions], steady_elapsed, kinds[positions])
        rank_seconds = steps.seconds[runs][:, :, positions]  # (runs, ranks, positions)
        tails_by_run = _tails(rank_seconds.max(axis=1, initial=0.0))
        disturbed_epochs = _disturbed_epochs(steps, positions)
        for run, slow, tails in zip(runs, slow_by_run, tails_by_run, strict=True):
            steady_by_run[run] = _SteadySteps(
                warm_up=warm_ups[run],
                positions=positions,
                detected_warmup_steps=len(light_positions) - len(positions),
                slow=slow,
                tails=tails,
                disturbed_epochs=disturbed_epochs,
            )
    return [steady_by_run[run] for run in range(len(warm_ups))]


def _positions_after_warm_up(
    light_positions: step_figures.Integers, whole_positions: step_figures.Integers, warmup_steps: int
) -> step_figures.Integers:
    """Return the positions of the light steps that follow warm-up, and at least of the later half of them.

    Args:
        light_positions: positions of the light steps, in rising order.
        whole_positions: positions of those of them that have a full batch.
        warmup_steps: number of first whole steps that are warm-up.
    """
    if not warmup_steps:
        return light_positions
    last_warmup_position = whole_positions[warmup_steps - 1]
    begin = int(np.searchsorted(light_positions, last_warmup_position)) + 1  # index of the light step after it
    half = len(light_positions) // 2
    return light_positions[min(begin, half) :]


def _disturbed_epochs(steps: step_figures.RunSteps, steady_positions: step_figures.Integers) -> set[int]:
    """Return the epochs with a step that is not steady: their elapsed seconds are not those of an undisturbed epoch."""
    steady_from = steps.step[steady_positions[0]] if len(steady_positions) else 0
    is_disturbing = steps.warmup | (steps.window != step_figures.LIGHT) | (steps.step < steady_from)
    return set(steps.epoch[is_disturbing].tolist())


@dataclass(frozen=True, eq=False)
class _StepsOfRun:
    """The steps of one run: its rows in the arrays of its group."""

    group: _RunGroup
    index: int
    """Index of the run among those of the group."""

    @property
    def numbers(self) -> step_figures.Integers:
        """Numbers of the steps, (steps,)."""
        return self.group.steps.step

    @property
    def elapsed(self) -> FloatArray:
        """Seconds that each step adds to the time that passed, (steps,)."""
        return np.asarray(self.group.elapsed[self.index])

    @property
    def kinds(self) -> npt.NDArray[np.uint8]:
        return self.group.kinds

    @property
    def losses(self) -> LossByStep:
        return self.group.losses[self.index]

    @property
    def steady(self) -> _SteadySteps:
        return self.group.steady[self.index]

    @property
    def first_steady_step(self) -> int | None:
        """Number of the first steady step; None where there is none."""
        positions = self.steady.positions
        return int(self.numbers[positions[0]]) if len(positions) else None

    @property
    def seconds_after_first_step(self) -> float | None:
        """Elapsed seconds of all steps but the first one; None where there are no others."""
        return sum(self.elapsed[1:].tolist()) if len(self.numbers) > 1 else None


@dataclass(frozen=True, eq=False)
class _TimedSteps:
    """The steps of one run that its figures of time rest on."""

    steps: _StepsOfRun
    slow: step_figures.SlowSteps
    positions: step_figures.Integers
    """Positions of the timed steps; none where these take no time."""
    steady_seconds: float
    """Seconds of the steady steps, with the slow ones that were set aside."""

    @classmethod
    def of(cls, steps: _StepsOfRun, slow: step_figures.SlowSteps) -> _TimedSteps:
        """Return the steady steps without those that were set aside.

        Args:
            steps: the steps of the run.
            slow: its slow steps (`steps.decide_slow_steps`).
        """
        steady_positions = steps.steady.positions
        steady_seconds: float = sum(steps.elapsed[steady_positions].tolist())
        timed_positions = steady_positions
        timed_seconds = steady_seconds
        if slow.set_aside:
            is_set_aside = np.isin(steps.numbers[steady_positions], slow.set_aside)
            timed_positions = steady_positions[~is_set_aside]
            timed_seconds = sum(steps.elapsed[timed_positions].tolist())
        if timed_seconds <= 0:
            timed_positions = timed_positions[:0]  # steps that take no time have no rate
        return cls(steps, slow, timed_positions, steady_seconds)

    def __len__(self) -> int:
        return len(self.positions)

    def share_of(self, numbers: Collection[int]) -> float | None:
        """Return the time of the steps with these numbers as a share of that of all steady ones.

        None where there are no timed steps.
        """
        if not len(self):
            return None
        if not numbers:
            return 0.0
        has_number = np.isin(self.steps.numbers, list(numbers))
        return float(self.steps.elapsed[has_number].sum() / self.steady_seconds)

    def spread(self) -> float | None:
        """Return the interquartile range of the whole timed steps over their median; None where there are too few."""
        is_whole = self.steps.kinds[self.positions] == step_figures.WHOLE
        return _quartile_range(self.steps.elapsed[self.positions[is_whole]].tolist())

    def pace(self, run: Run, model: ModelLine | None) -> step_figures.Pace:
        """Return the pace by these steps, at least one."""
        elapsed = self.steps.elapsed[self.positions]
        kinds = self.steps.kinds[self.positions]
        images = self.steps.group.steps.images[:, self.positions]
        return step_figures.pace_of_steps(run, elapsed, kinds, images, model)


def _figures_of_run(run: Run, timed: _TimedSteps) -> RunFigures:
    """Put the figures of one run together. `timed`: its timed steps, perhaps none."""
    header = run.header
    steps = timed.steps
    steady = steps.steady
    model = _model_line(run.ranks)
    epochs = _epochs(run)
    undisturbed_epochs = _undisturbed_epoch_seconds(header.trial, model, epochs, steady.disturbed_epochs)
    elapsed_epoch_seconds = None
    if undisturbed_epochs:
        elapsed_epoch_seconds = step_figures.positive_or_none(statistics.median(undisturbed_epochs))
    phase_seconds = _phase_seconds(run.ranks)
    pace = _pace_of_run(run, timed, model, elapsed_epoch_seconds)
    has_step_times = len(timed) > 0 and pace.step_seconds is not None
    tails = steady.tails if has_step_times else _Tails(steps=0)
    name = f"{header.trial_id} repeat {header.repeat + 1}"
    notes = [
        *_missing_records(run, len(steps.numbers)),
        *_missing_times(run, timed),
        *_partial_epochs(epochs),
        *_missing_phases(run, phase_seconds),
    ]
    return RunFigures(
        run=name,
        steps=len(steps.numbers),
        timed_steps=len(timed),
        detected_warmup_steps=steady.detected_warmup_steps,
        steady_from=steps.first_steady_step,
        slow=timed.slow,
        slow_share=timed.share_of(timed.slow.set_aside),
        kept_slow_share=timed.share_of(timed.slow.kept),
        trend=steady.warm_up.trend,
        step_spread=timed.spread(),
        pace=pace,
        step_seconds_p95=tails.p95_seconds,
        step_seconds_p99=tails.p99_seconds,
        tail_steps=tails.steps,
        elapsed_epoch_seconds=elapsed_epoch_seconds,
        elapsed_epochs=len(undisturbed_epochs),
        training_seconds=steps.seconds_after_first_step,
        phase_seconds=phase_seconds,
        evaluation_seconds=_evaluation_seconds(run.ranks),
        epochs=tuple(epoch.figures for epoch in epochs),
        loss_by_step=_recorded_losses(run, steps.losses),
        peak_bytes=_peak_bytes(run.ranks),
        model=model,
        notes=tuple(f"{name}: {note}" for note in notes),
        compiled=_compiled(run.ranks),
    )


def _model_line(ranks: Sequence[RankRecord]) -> ModelLine | None:
    """Return the first record of the model that was built; None without one."""
    for rank in ranks:
        if rank.model is not None:
            return rank.model
    return None


def _pace_of_run(
    run: Run, timed: _TimedSteps, model: ModelLine | None, elapsed_epoch_seconds: float | None
) -> step_figures.Pace:
    """Return the pace by the timed steps; by whole epochs where a run records no step.

    An imported run may have recorded epochs beside steps from which no epoch time follows: then the epochs give it.
    """
    pace = step_figures.NO_PACE
    if len(timed):
        pace = timed.pace(run, model)
    elif step_figures.has_only_whole_epochs(run):
        pace = step_figures.pace_of_epochs(run.header.trial, model, elapsed_epoch_seconds)
    lacks_epoch = pace.epoch_seconds is None and elapsed_epoch_seconds is not None
    if run.header.imported is not None and lacks_epoch:
        return replace(pace, epoch_seconds=elapsed_epoch_seconds, source="epochs")
    return pace


def _missing_records(run: Run, common_steps: int) -> list[str]:
    """Return notes on ranks and steps that are missing. `common_steps`: number of steps that all ranks have."""
    present = {rank.rank for rank in run.ranks}
    absent = [rank for rank in run.ranks_needed if rank not in present]
    if absent:
        ranks = "rank" if len(absent) == 1 else "ranks"
        return [f"no record of {ranks} {', '.join(map(str, absent))}"]
    line_counts = [len(rank.steps) for rank in run.ranks]
    if all(count == common_steps for count in line_counts):
        return []
    step_counts = [len(np.unique(Steps.of(rank.steps).step)) for rank in run.ranks]  # a step may have several lines
    if all(count == common_steps for count in step_counts):
        return []
    return [f"ranks disagree in their steps: only the {common_steps} of {max(step_counts)} that all recorded count"]


def _missing_times(run: Run, timed: _TimedSteps) -> list[str]:
    """Return a note if a run that records steps has no timed one."""
    if len(timed) or step_figures.has_only_whole_epochs(run):
        return []
    return ["no timed step that all ranks recorded"]


def _missing_phases(run: Run, phase_seconds: Mapping[str, float]) -> list[str]:
    """Return a note on the phases of the start-up that a run should have recorded, and has not."""
    if run.header.imported is not None or step_figures.has_only_whole_epochs(run):
        return []
    if run.header.trial.train.script is not None:
        expected = list(SCRIPT_PHASES)
    else:
        expected = [phase for phase in PHASES if phase not in SCRIPT_PHASES]
    missing = [phase for phase in expected if phase not in phase_seconds]
    return [f"start-up lacks {', '.join(missing)}"] if missing else []


def _recorded_losses(run: Run, losses: LossByStep) -> LossByStep:
    """Return the losses without those that an imported run or a script did not record.

    Both a loss that was not recorded and one that was not finite are NaN. Where a script recorded the loss of every
    step up to one, and of none after it, the later ones are taken to be not finite, and stay.
    """
    if run.header.imported is not None:
        return losses.known()
    if run.header.trial.train.script is None:
        return losses
    is_recorded = ~np.isnan(losses.loss)
    recorded_count = int(is_recorded.sum())
    are_first_ones = bool(is_recorded[:recorded_count].all())
    if recorded_count > 0 and are_first_ones:
        return losses
    return losses.known()


def _quartile_range(seconds: Sequence[float]) -> float | None:
    """Return the distance of the quartiles as a share of the median; None where there are too few steps for it."""
    if len(seconds) < _FEWEST_SPREAD_STEPS:
        return None
    # Of one short list numpy's quantiles take twice as long as these.
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / median if median > 0 else None


class _Epoch(NamedTuple):
    """One epoch of a run."""

    figures: EpochFigures
    is_partial: bool
    """Whether a rank lacks it that an imported run needs."""


def _epochs(run: Run) -> list[_Epoch]:
    """Return each epoch once, with the figures that all ranks share and the seconds of the slowest rank.

    Where an imported run's rank lacks an epoch, the slowest is unknown, and that epoch has no seconds.
    """
    needed = run.ranks_needed if run.header.imported else ()
    lines_by_epoch: dict[int, dict[int, EpochLine]] = {}
    for rank in run.ranks:
        for line in rank.epochs:
            lines_by_epoch.setdefault(line.epoch, {})[rank.rank] = line
    epochs = []
    for number, line_by_rank in sorted(lines_by_epoch.items()):
        lines = list(line_by_rank.values())
        is_partial = any(rank not in line_by_rank for rank in needed)
        figures = EpochFigures(
            epoch=number,
            elapsed_seconds=None if is_partial else max(line.seconds for line in lines),
            complete=all(line.complete for line in lines),
            runs=1,
            **{name: finite_or_none(getattr(lines[0], name)) for name in LEARNING_FIGURES},
        )
        epochs.append(_Epoch(figures, is_partial))
    return epochs


def _partial_epochs(epochs: Sequence[_Epoch]) -> list[str]:
    """Return a note on the epochs that some rank lacks; empty where there are none."""
    partial = [epoch.figures.epoch for epoch in epochs if epoch.is_partial]
    if not partial:
        return []
    names = ", ".join(map(str, partial[:_MOST_EPOCHS_NAMED]))
    if len(partial) > _MOST_EPOCHS_NAMED:
        names += ", ..."
    noun = "epochs" if len(partial) > 1 else "epoch"
    return [f"not every rank tells of {noun} {names}: left out of its time"]


def _undisturbed_epoch_seconds(
    trial: Trial, model: ModelLine | None, epochs: Sequence[_Epoch], disturbed_epochs: Collection[int]
) -> list[float]:
    """Return the elapsed seconds of each complete epoch after warm-up that ran without a profiler.

    Which epochs hold warm-up is counted, not read from the steps: a marked step's line may have been left out.
    """
    steps_per_epoch = step_figures.epoch_size(trial, model).steps
    warmup_steps = trial.window.warmup_steps if trial.train.script is None else 0  # no epoch of a script has steps
    if steps_per_epoch is None and warmup_steps:
        return []
    seconds = []
    for epoch in epochs:
        figures = epoch.figures
        steps_before = figures.epoch * (steps_per_epoch or 0)
        is_after_warmup = steps_before >= warmup_steps
        is_undisturbed = figures.complete and figures.epoch not in disturbed_epochs
        if is_after_warmup and is_undisturbed and figures.elapsed_seconds:
            seconds.append(figures.elapsed_seconds)
    return seconds


def _peak_bytes(ranks: Sequence[RankRecord]) -> int | None:
    """Return the highest peak of any rank and epoch; None where none was recorded."""
    lines = itertools.chain.from_iterable(rank.epochs for rank in ranks)
    return max((line.peak_bytes for line in lines if line.peak_bytes is not None), default=None)


def _phase_seconds(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """Return phase of the start-up -> seconds of its slowest rank, in the order of `PHASES`."""
    slowest_by_phase: dict[str, float] = {}
    for rank in ranks:
        seconds_by_phase: dict[str, float] = {}  # of this rank, which may record a phase in several pieces
        for phase in rank.phases:
            seconds_by_phase[phase.name] = seconds_by_phase.get(phase.name, 0) + phase.seconds
        for name, seconds in seconds_by_phase.items():
            slowest_by_phase[name] = max(slowest_by_phase.get(name, seconds), seconds)
    return {name: slowest_by_phase[name] for name in PHASES if name in slowest_by_phase}


def _evaluation_seconds(ranks: Sequence[RankRecord]) -> float | None:
    """Return the slowest rank's seconds of evaluation, median over epochs; None where nothing was evaluated."""
    slowest_by_epoch: dict[int, float] = {}
    for rank in ranks:
        for line in rank.epochs:
            if line.evaluation_seconds is not None:
                slowest = slowest_by_epoch.get(line.epoch, 0.0)
                slowest_by_epoch[line.epoch] = max(slowest, line.evaluation_seconds)
    return statistics.median(slowest_by_epoch.values()) if slowest_by_epoch else None


def _compiled(ranks: Sequence[RankRecord]) -> dict[str, tuple[str, ...]]:
    """Return phase -> what any rank compiled in it, in alphabetical order."""
    names_by_phase: dict[str, set[str]] = {}
    for rank in ranks:
        for phase in rank.phases:
            if phase.compiled:
                names_by_phase.setdefault(phase.name, set()).update(phase.compiled)
    return {phase: tuple(sorted(names)) for phase, names in names_by_phase.items()}
