"""One trial: `TrialFigures`, from its runs alone; `TrialResult`, with what all trials of its study say together.

`summaries` makes the figures; `vitscale.analysis.analyse` makes each result, once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

from vitscale.analysis.learning.convergence import Convergence
from vitscale.analysis.runs.environments import RunEnvironment, differences
from vitscale.analysis.runs.figures import PHASES, EpochFigures, LossByStep, RunFigures
from vitscale.analysis.runs.repeats import Components, clusters_of, count_deciding_runs, observations
from vitscale.analysis.runs.resources import ResourceFigures
from vitscale.analysis.runs.steps import PaceSource
from vitscale.analysis.statistics import known_mean, known_median
from vitscale.analysis.time.breakdown import Breakdown, mean_breakdown
from vitscale.analysis.time.traffic import Traffic
from vitscale.present.estimate import Estimate
from vitscale.store.records import CheckpointLine, EpochLine, RankRecord
from vitscale.store.results import OutcomeKind, Run
from vitscale.trial.model_words import UNNAMED_MODEL
from vitscale.trial.trial import Trial, samples_used

_LARGEST_SAMPLES_DIFFERENCE = 0.05
"""Share by which the recorded sizes of one dataset may differ: some logs give steps x batch."""


@dataclass(frozen=True)
class Failure:
    """One run that did not complete."""

    repeat: int
    kind: OutcomeKind
    reason: str
    rank: int | None
    detail: str
    """The guilty rank's traceback, or the end of the log."""
    log: str = ""
    """Path inside the results folder."""


@dataclass(frozen=True)
class CheckpointCost:
    """What a checkpoint costs: in one run, or the median over runs."""

    save_seconds: float
    """Seconds until the last rank has its files on the disk."""
    load_seconds: float
    """Seconds until the last rank has restored everything, perhaps from files still in the host's memory."""
    bytes: float
    """Size of all files together."""


def checkpoint_cost(runs: Sequence[Run]) -> CheckpointCost | None:
    """Return the cost of a checkpoint; None where no run measured it (`measure.checkpoint`)."""
    cost_by_run = []
    for run in runs:
        lines = [rank.checkpoint for rank in run.ranks if rank.checkpoint is not None]
        if lines:
            cost_by_run.append(_run_checkpoint_cost(lines))
    if not cost_by_run:
        return None
    return CheckpointCost(
        save_seconds=statistics.median(cost.save_seconds for cost in cost_by_run),
        load_seconds=statistics.median(cost.load_seconds for cost in cost_by_run),
        bytes=statistics.median(cost.bytes for cost in cost_by_run),
    )


def _run_checkpoint_cost(lines: Sequence[CheckpointLine]) -> CheckpointCost:
    """Return the cost of one run's checkpoint: the largest of each figure over its ranks, of at least one rank."""
    return CheckpointCost(
        save_seconds=max(line.save_seconds for line in lines),
        load_seconds=max(line.load_seconds for line in lines),
        bytes=max(line.bytes for line in lines),
    )


@dataclass(frozen=True)
class Drift:
    """Whether a trial's loss equals that of a trial that must compute the same (`vitscale.analysis.learning.drift`)."""

    status: Literal["reference", "agrees", "drifts", "unknown"]
    reference: str | None = None
    """The trial it was compared with; None where there is none."""
    reference_name: str = ""
    difference: float | None = None
    """The largest relative difference of the loss of an optimizer step; infinite where one of the two is not finite."""
    tolerance: float | None = None
    step: int | None = None
    """Step at which the difference is largest."""
    reason: str = ""
    """Why the status is unknown."""


@dataclass(frozen=True)
class LoaderFigures:
    """What the loaders of a trial's ranks did; None where it was not recorded."""

    images_per_second: float | None = None
    """Rate at which a loader reads, median over ranks and epochs."""
    share_of_cores: float | None = None
    """Share of the time of a rank's cores that its loader threads are at work, median over ranks and epochs. None also
    on GPUs, whose hosts' cores compute nothing else, and without loader threads."""
    decoding_share: float | None = None
    """Share of the loader threads' time that decoding took; None where any record lacks it."""

    @classmethod
    def of(cls, trial: Trial, runs: Sequence[Run]) -> LoaderFigures:
        """Work out the figures from the epochs of all ranks of a trial's runs."""
        epoch_lines = _epoch_lines(runs)
        recorded_work = []
        for line in epoch_lines:
            work = _loader_work(line)
            if work is not None:
                recorded_work.append(work)
        share_of_cores = None
        if trial.train.device == "cpu" and trial.data.workers > 0:  # loader threads take cores from training
            share_of_cores = _share_of_cores(recorded_work, cores=trial.world.threads_per_rank)
        decoding_share = None
        if len(recorded_work) == len(epoch_lines):
            decoding_share = _decoding_share(recorded_work)
        return cls(
            images_per_second=known_median(line.loader_images_per_second for line in epoch_lines),
            share_of_cores=share_of_cores,
            decoding_share=decoding_share,
        )


def _epoch_lines(runs: Sequence[Run]) -> list[EpochLine]:
    """Return the epoch lines of all ranks of all runs."""
    lines: list[EpochLine] = []
    for run in runs:
        for rank in run.ranks:
            lines += rank.epochs
    return lines


class _LoaderWork(NamedTuple):
    """The work of one rank's loader in one epoch, all its threads together."""

    reading_seconds: float
    decoding_seconds: float
    epoch_seconds: float
    """Elapsed seconds of the epoch."""


def _loader_work(line: EpochLine) -> _LoaderWork | None:
    """Return the work that an epoch line records; None where it lacks a part of it."""
    if line.loader_reading_seconds is None or line.loader_decoding_seconds is None:
        return None
    return _LoaderWork(line.loader_reading_seconds, line.loader_decoding_seconds, line.seconds)


def _share_of_cores(work: Sequence[_LoaderWork], cores: int) -> float | None:
    """Return seconds that a rank's loader was at work / (seconds x cores of the rank), median over ranks and epochs."""
    return known_median(
        (epoch.reading_seconds + epoch.decoding_seconds) / (epoch.epoch_seconds * cores)
        for epoch in work
        if epoch.epoch_seconds > 0
    )


def _decoding_share(work: Sequence[_LoaderWork]) -> float | None:
    """Return seconds of decoding / seconds of reading and decoding, all epochs together; None where there are none."""
    reading_seconds = math.fsum(epoch.reading_seconds for epoch in work)
    decoding_seconds = math.fsum(epoch.decoding_seconds for epoch in work)
    busy_seconds = reading_seconds + decoding_seconds
    return decoding_seconds / busy_seconds if busy_seconds > 0 else None


@dataclass(frozen=True)
class StartUp:
    """The start-up of one run, without what was compiled in it once (`vitscale.analysis.start_ups`)."""

    phases: Mapping[str, float]
    """Phase to the seconds of its slowest rank; lacks a phase that is only known with a compilation."""
    one_off: Mapping[str, float]
    """Phase to the seconds that compiling added; all of the phase, which `phases` then lacks, where no run without a
    compilation tells them apart. Empty where nothing was compiled."""

    @property
    def seconds(self) -> float | None:
        """Sum of the phases; None without any, and where one of them is only known with a compilation."""
        if not self.phases or not self.one_off.keys() <= self.phases.keys():
            return None
        return sum(self.phases.values())


@dataclass(frozen=True)
class TrialFigures:
    """A trial and what its runs say about it by themselves. None stands for what is unknown."""

    trial_id: str
    trial: Trial
    outcome: OutcomeKind | None
    """None: the trial has no run yet."""
    reason: str
    """How runs ended that did not complete, in words; empty where all completed."""
    run_figures: tuple[RunFigures, ...]
    """Figures of each completed run that was combined."""
    recorded_runs: tuple[Run, ...]
    """The same runs as they were recorded, in the same order."""
    runs_done: int
    """Runs with an outcome of any kind."""
    left_out: tuple[str, ...]
    """For each completed run that was not combined with the others, why: "repeat 2: device: ..."."""
    failures: tuple[Failure, ...]
    environment: RunEnvironment | None
    """Hardware and software of the combined runs; None where no run completed."""
    step_seconds: Estimate | None
    """Mean seconds of a whole step, by the timed steps of each run."""
    images_per_second: Estimate | None
    """Images of all ranks. Multiplied by `epoch_seconds` it gives the images trained in an epoch, where the size of the
    dataset is known."""
    epoch_seconds: Estimate | None
    """Seconds of a steady epoch: the pace of timed steps, times the steps of an epoch (`RunFigures.epoch_seconds`)."""
    epoch_seconds_source: PaceSource | None
    """What `epoch_seconds` derives from; None without it."""
    elapsed_epoch_seconds: Estimate | None
    """Seconds from barrier to barrier, slow steps included, from each run's median epoch of light steps alone."""
    epochs: tuple[EpochFigures, ...]
    """Mean over the runs that had each epoch."""
    loss_by_step: LossByStep
    """Mean over runs."""
    peak_bytes: int | None
    """Peak of memory of the rank and run that needed most."""
    breakdown: Breakdown | None
    """The parts of a step's time; None where no step was explained."""
    resources: ResourceFigures | None
    """What the devices did; None where no run completed."""
    convergence: Convergence | None
    """Accuracy by images and seconds, the target, the noise scale; None where no run has completed."""
    traffic: Traffic | None
    """What an optimizer step sends; None where no run recorded it."""
    checkpoint: CheckpointCost | None
    """What a checkpoint takes; None where no run measured it."""
    deciding_runs: int
    """Number of first runs that decided how many runs there are (`vitscale.analysis.runs.repeats`)."""
    allocations: tuple[tuple[int, ...], ...]
    """Indices in `run_figures` of the runs of each allocation, or of the same hosts; empty without runs."""
    components: Components | None
    """The spread between allocations and inside them; None where there is one, or none has 2 runs."""
    clock_anomalies: tuple[str, ...]
    """Impossible times in the last run that has any (`quality.measurement.clock_anomalies`)."""
    loader: LoaderFigures
    last_epoch: EpochFigures | None
    """Mean over runs, each at its own last whole epoch, which a target accuracy lets differ."""
    rank_speeds: tuple[float, ...] | None
    """Each rank's speed against the fastest (`quality.shares.explained_rank_speeds`); None where unknown."""

    @property
    def batch_known(self) -> bool:
        """Whether the micro-batch is known: images per rank and micro-step.

        It may be unknown only for imported logs that do not state it: `train.micro_batch` is then 1, as a placeholder.
        """
        is_imported = self.trial.origin is not None
        is_placeholder = is_imported and self.trial.train.micro_batch == 1
        if not is_placeholder:
            return True
        imports = [run.header.imported for run in self.recorded_runs if run.header.imported]
        recorded_answers = [imported.batch_told for imported in imports if imported.batch_told is not None]
        if recorded_answers:
            return any(recorded_answers)
        # Older records lack `batch_told`: with an unknown micro-batch they have neither images of steps nor epochs.
        return any(_counts_images_or_epochs(run) for run in self.recorded_runs)

    @property
    def timed_as_a_whole(self) -> bool:
        """Whether a whole run stands for an epoch: its script recorded no step, and left no trace of any."""
        if self.trial.train.script is None:
            return False  # without a look at its ranks' lines, which would be read from disk for it
        return any(line.steps is None for line in _epoch_lines(self.recorded_runs))

    @cached_property
    def observed_costs(self) -> list[float]:
        """Epoch seconds of each observation: a run, or an allocation with its runs where allocations differ.

        Where no run has them (`has_rates_alone`), the seconds of one image times the share of the images that is
        trained.
        """
        return observations(self.run_costs, self.clusters)

    @property
    def run_costs(self) -> list[float | None]:
        """Epoch seconds of each of `run_figures`; None for a run that has none.

        Where no run has them (`has_rates_alone`), the seconds of one image by each run's rate, times the share of the
        images that is trained.
        """
        if not self.has_rates_alone:
            return [run.epoch_seconds for run in self.run_figures]
        trained_share = self.trial.data.fraction
        return [trained_share / run.images_per_second if run.images_per_second else None for run in self.run_figures]

    @property
    def observed_steps(self) -> list[float]:
        """Seconds of a whole step of each observation, as `observed_costs`."""
        return observations([run.step_seconds for run in self.run_figures], self.clusters)

    def reasons_not_to_compare(self, other: TrialFigures, combine: bool = False) -> tuple[str, ...]:
        """Return why the times of two trials must not be compared; empty where no reason is known.

        It is a reason that one has the time of an epoch, and the other a rate of images alone. So are other hardware or
        software (`differences`), and among imports datasets of markedly other size.

        Args:
            other: the other trial.
            combine: whether trials are compared also where hardware, software or datasets differ.
        """
        if self.has_rates_alone != other.has_rates_alone:
            return ("one tells the time of an epoch, the other images/s alone",)
        if combine:
            return ()
        reasons = differences(self.environment, other.environment)
        if _have_like_size(self.train_samples, other.train_samples):
            return reasons
        return (*reasons, f"images of the dataset: {self.train_samples:,} against {other.train_samples:,}")

    @property
    def train_samples(self) -> int | None:
        """Images of the whole dataset; None where it is not recorded."""
        return next((run.model.train_samples for run in self.run_figures if run.model is not None), None)

    @property
    def explained_runs(self) -> int:
        """Number of runs with explained steps."""
        if self.breakdown is None:
            return 0
        return sum(run is not None for run in self.breakdown.by_run)

    @property
    def clusters(self) -> tuple[tuple[int, ...], ...]:
        """The runs of each observation, by their index in `run_figures`: ((0, 1), (2,)) are two of three runs."""
        return clusters_of(len(self.run_figures), self.allocations, self.components)

    @property
    def epoch_costs(self) -> list[float]:
        """Epoch seconds of each run that has them."""
        return [run.epoch_seconds for run in self.run_figures if run.epoch_seconds is not None]

    @property
    def has_rates_alone(self) -> bool:
        """Whether some run has images/s, and none has the time of an epoch."""
        return not self.epoch_costs and any(run.images_per_second for run in self.run_figures)

    @property
    def images_left_out(self) -> float:
        """Share of an epoch's images that `drop_last` leaves out; 0 where it is off or the dataset's size unknown."""
        samples = self.train_samples
        if samples is None or not self.trial.train.drop_last:
            return 0.0
        used = samples_used(samples, self.trial.data.fraction)
        if used < self.trial.global_batch:
            return 0.0
        return used % self.trial.global_batch / used

    @property
    def slow_share(self) -> float | None:
        """Share of the time after warm-up in slow steps that were set aside; mean over runs."""
        return known_mean(run.slow_share for run in self.run_figures)

    @property
    def kept_slow_share(self) -> float | None:
        """Share of that time in slow steps that recur in the runs; mean over runs."""
        return known_mean(run.kept_slow_share for run in self.run_figures)

    @property
    def effective_steps(self) -> float | None:
        """Number of whole steps that an epoch is worth: a short last step counts by its time.

        Geometric mean over runs, as of their times: so many times the step is the epoch.
        """
        steps_by_run = [run.pace.effective_steps for run in self.run_figures if run.pace.effective_steps]
        if not steps_by_run:
            return None
        if len(set(steps_by_run)) == 1:
            return steps_by_run[0]  # exactly: the geometric mean of equal values is off in the last digit
        return statistics.geometric_mean(steps_by_run)

    @property
    def elapsed_epochs(self) -> int:
        """Number of epochs behind `elapsed_epoch_seconds`, over all runs."""
        return sum(run.elapsed_epochs for run in self.run_figures)

    def median_of(self, figure: Callable[[RunFigures], float | None]) -> float | None:
        """Return the median over runs of one figure; None where no run has it."""
        return known_median([figure(run) for run in self.run_figures])

    @property
    def model_name(self) -> str:
        """The model, as the user named it."""
        return self.trial.model_name or UNNAMED_MODEL


def _counts_images_or_epochs(run: Run) -> bool:
    """Whether any rank of a run has recorded the images of a step, or an epoch."""
    return any(_has_images(rank) or rank.epochs for rank in run.ranks)


def _has_images(rank: RankRecord) -> bool:
    """Whether any step of a rank records images."""
    return any(line.images for line in rank.steps)


def _have_like_size(samples: int | None, other_samples: int | None) -> bool:
    """Whether two recorded sizes may be those of one dataset; True where either is unknown."""
    if samples is None or other_samples is None:
        return True
    return max(samples, other_samples) <= (1 + _LARGEST_SAMPLES_DIFFERENCE) * min(samples, other_samples)


@dataclass(frozen=True)
class TrialResult(TrialFigures):
    """A trial among all trials of its study: its figures, and what they say beside those of the others."""

    start_ups: tuple[StartUp, ...]
    """Start-up of each run, in the order of `run_figures`."""
    drift: Drift
    name: str
    """The trial's name among those of its study, for sentences (`vitscale.analysis.scaling.trial_names`)."""

    @classmethod
    def of(cls, figures: TrialFigures, *, start_ups: tuple[StartUp, ...], drift: Drift, name: str) -> Self:
        """Put the figures of a trial together with what all trials say about it."""
        fields_of_figures = {field.name: getattr(figures, field.name) for field in fields(TrialFigures)}
        return cls(**fields_of_figures, start_ups=start_ups, drift=drift, name=name)

    @property
    def startup(self) -> dict[str, float]:
        """Phase of the start-up to seconds, median over the runs that have it; in the order of phases."""
        medians = {}
        for phase in PHASES:
            seconds = known_median(start_up.phases.get(phase) for start_up in self.start_ups)
            if seconds is not None:
                medians[phase] = seconds
        return medians

    @property
    def startup_seconds(self) -> float | None:
        """Seconds of the whole start-up, median over the runs that have it."""
        return known_median(start_up.seconds for start_up in self.start_ups)

    @property
    def drifts(self) -> bool:
        """Whether its loss differs from that of a trial that must compute the same: its times stand for other work."""
        return self.drift.status == "drifts"

    @cached_property
    def comparable_costs(self) -> list[float]:
        """The seconds that each observation needs for all images: the basis of speedups, efficiencies and comparisons.

        They are an epoch's seconds, scaled up for the images that `drop_last` leaves out. Where no run has those of an
        epoch (`has_rates_alone`), they are those of one image times the share that is trained. Empty where the trial
        drifts.
        """
        if self.drifts:
            return []
        trained_share = 1 - self.images_left_out
        return [seconds / trained_share for seconds in self.observed_costs]

    def without(self, dropped: Collection[int]) -> TrialResult:
        """Return the same trial from fewer runs, for a jackknife: only its costs, start-up and breakdown change.

        All other fields stay those of all runs; `recorded_runs` too, which then are more than `run_figures`.

        Args:
            dropped: indices in `run_figures` of the runs to leave out.
        """
        remaining = [run for run in range(len(self.run_figures)) if run not in dropped]
        trial_of_remaining = replace(
            self,
            run_figures=tuple(self.run_figures[run] for run in remaining),
            start_ups=tuple(self.start_ups[run] for run in remaining),
            allocations=_renumbered(self.allocations, remaining),
        )
        if self.breakdown is None:
            return trial_of_remaining
        breakdown = mean_breakdown(
            [self.breakdown.by_run[run] for run in remaining],
            trial_of_remaining.clusters,
            self.breakdown.typical.rank,
        )
        return replace(trial_of_remaining, breakdown=breakdown)


def _renumbered(allocations: Sequence[Sequence[int]], remaining: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the allocations of the remaining runs, by their indices among these.

    Example: allocations (0, 1) and (2, 3) without run 1 are (0,) and (1, 2).
    """
    new_index_by_run = {run: new_index for new_index, run in enumerate(remaining)}
    renumbered = []
    for allocation in allocations:
        new_indices = tuple(new_index_by_run[run] for run in allocation if run in new_index_by_run)
        if new_indices:
            renumbered.append(new_indices)
    return tuple(renumbered)


TargetStatus = Literal["reached", "open", "stopped", "failed", "untimed"]
"""reached: it has as many runs as its first ones asked for. open: another run is wanted. stopped: not reached with as
many runs as are allowed. failed: a run did not complete, so none is added. untimed: no run has an epoch time."""


def target_status(figures: TrialFigures, target_ci: float, max_repeats: int) -> TargetStatus:
    """Return whether a trial's epoch time is known as closely as the study asks (`vitscale.analysis.runs.repeats`).

    Args:
        figures: the trial; only its runs that may be combined count.
        target_ci: how far the interval may reach from its centre, as a share of it.
        max_repeats: largest number of runs of a trial.
    """
    if figures.failures:
        return "failed"
    if figures.run_figures and not figures.epoch_costs:
        return "untimed"
    if count_deciding_runs(figures.epoch_costs, target_ci):
        return "reached"
    return "stopped" if figures.runs_done >= max_repeats else "open"
