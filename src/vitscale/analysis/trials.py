"""One trial: its outcome, and its figures over all its completed runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vitscale.analysis import runs
from vitscale.analysis.allocations import Components, allocation_of, components, groups, observations
from vitscale.analysis.breakdown import Breakdown, breakdown, combined
from vitscale.analysis.checkpoints import CheckpointCost, checkpoint_cost
from vitscale.analysis.convergence import Convergence, convergence
from vitscale.analysis.environments import Surroundings, differences, largest_like_group, surroundings
from vitscale.analysis.pace import PaceSource
from vitscale.analysis.resources import ResourceFigures, resource_figures
from vitscale.analysis.runs import EpochFigures, RunFigures
from vitscale.analysis.statistics import Interval, interval
from vitscale.analysis.target_ci import looked_at
from vitscale.analysis.traffic import Traffic, traffic
from vitscale.store.records import OutcomeKind, Run
from vitscale.trial.trial import Trial, samples_used

NOT_RUN_YET = "not run yet"


@dataclass(frozen=True)
class Failure:
    """One run that did not complete."""

    repeat: int
    kind: OutcomeKind
    reason: str
    rank: int | None
    detail: str
    """The guilty rank's traceback, or the end of the log."""


@dataclass(frozen=True)
class Drift:
    """Whether a trial's loss is that of a trial that must compute the same (`vitscale.analysis.drift`)."""

    status: Literal["reference", "agrees", "drifts", "unknown"]
    reference: str | None = None
    """The trial it was held against; None where there is none."""
    reference_name: str = ""
    difference: float | None = None
    """The largest relative difference of the loss of an optimizer step; infinite where one of the two is not finite."""
    tolerance: float | None = None
    step: int | None = None
    """Where the difference is largest."""
    reason: str = ""
    """Why it is unknown."""


@dataclass(frozen=True)
class TrialResult:
    """A trial and what its runs say of it. None where that is unknown."""

    trial_id: str
    trial: Trial
    outcome: OutcomeKind | None
    """None: it has no run yet."""
    reason: str
    runs: tuple[RunFigures, ...]
    """Of the completed runs that were combined."""
    records: tuple[Run, ...]
    """The same runs as they were recorded."""
    runs_done: int
    """Runs with an outcome of any kind."""
    left_out: tuple[str, ...]
    """Why completed runs were not combined with the others."""
    failures: tuple[Failure, ...]
    surroundings: Surroundings | None
    step_seconds: Interval | None
    images_per_second: Interval | None
    """Times `epoch_seconds` it is the images trained in an epoch, where the size of the dataset is known."""
    epoch_seconds: Interval | None
    epoch_seconds_source: PaceSource | None
    elapsed_epoch_seconds: Interval | None
    """From barrier to barrier, slow steps included: of each run its median epoch of light steps alone."""
    startup: Mapping[str, float]
    """Phase to seconds, median over runs."""
    startup_seconds: float | None
    epochs: tuple[EpochFigures, ...]
    """Mean over runs."""
    loss_by_step: tuple[tuple[int, float | None], ...]
    """Mean over runs."""
    peak_bytes: int | None
    breakdown: Breakdown | None = None
    """Where the time of a step goes; None where no step was explained."""
    resources: ResourceFigures | None = None
    """What the devices did; None where no run completed."""
    convergence: Convergence | None = None
    """Accuracy by images and seconds, the target, the noise scale; None where no run has completed."""
    traffic: Traffic | None = None
    """What an optimizer step sends; None where no run recorded it."""
    checkpoint: CheckpointCost | None = None
    """What a checkpoint takes; None where no run measured it."""
    drift: Drift = Drift("unknown", reason="not held against another trial")
    looked: int = 0
    """By how many of the first runs it was decided how many there are (`vitscale.analysis.target_ci`)."""
    allocations: tuple[tuple[int, ...], ...] = ()
    """The runs of each allocation, or of the same hosts, by their place in `runs`; empty where no run is."""
    components: Components | None = None
    """The spread between allocations and inside them; None where fewer than 2 of them have 2 runs."""

    @property
    def drifts(self) -> bool:
        """Whether it computes something else than the others: its times stand for other work than theirs."""
        return self.drift.status == "drifts"

    @property
    def comparable_costs(self) -> list[float]:
        """What speedups, efficiencies and comparisons may rest on: of each observation its seconds for all images.

        They are those of an epoch, but for `drop_last`: what it leaves out is charged as what was trained. None where
        the trial drifts.
        """
        trained = 1 - self.images_left_out
        return [] if self.drifts else [seconds / trained for seconds in self.observed_costs]

    @property
    def observed_costs(self) -> list[float]:
        """Epoch seconds of each observation: a run, or an allocation with its runs where allocations differ."""
        return observations([run.epoch_seconds for run in self.runs], self.clusters)

    def without(self, dropped: Collection[int]) -> TrialResult:
        """The same from fewer runs: costs and breakdown alone, for their uncertainty. `dropped`: places in `runs`."""
        kept = [place for place in range(len(self.runs)) if place not in dropped]
        fewer = replace(
            self,
            runs=tuple(self.runs[place] for place in kept),
            allocations=tuple(
                own for some in self.allocations if (own := tuple(kept.index(run) for run in some if run in kept))
            ),
        )
        if (known := self.breakdown) is None:
            return fewer
        by_run = [known.by_run[place] for place in kept]
        return replace(fewer, breakdown=combined(by_run, fewer.clusters, known.typical.rank))

    @property
    def explained_runs(self) -> int:
        """How many runs say where the time of a step goes."""
        return sum(one is not None for one in self.breakdown.by_run) if self.breakdown else 0

    @property
    def clusters(self) -> tuple[tuple[int, ...], ...]:
        """The runs of each observation, by their place in `runs`."""
        return _clusters(len(self.runs), self.allocations, self.components)

    @property
    def epoch_costs(self) -> list[float]:
        """Epoch seconds of each run that tells them."""
        return [run.epoch_seconds for run in self.runs if run.epoch_seconds is not None]

    @property
    def images_left_out(self) -> float:
        """Share of an epoch's images that `drop_last` leaves out; 0 where it is off or the dataset's size unknown."""
        samples = next((run.model.train_samples for run in self.runs if run.model is not None), None)
        if samples is None or not self.trial.train.drop_last:
            return 0.0
        used = samples_used(samples, self.trial.data.fraction)
        return used % self.trial.global_batch / used if used >= self.trial.global_batch else 0.0

    @property
    def decoding_share(self) -> float | None:
        """Of the time of its loaders' threads, what decoding took; None where a record does not tell."""
        lines = [line for run in self.records for rank in run.ranks for line in rank.epochs]
        spent = [(line.loader_reading_seconds, line.loader_decoding_seconds) for line in lines]
        known = [(reading, decoding) for reading, decoding in spent if reading is not None and decoding is not None]
        if not known or len(known) < len(spent):
            return None
        reading, decoding = (math.fsum(column) for column in zip(*known, strict=True))
        return decoding / (reading + decoding) if reading + decoding > 0 else None

    @property
    def slow_share(self) -> float | None:
        """Of the time after warm-up, of the slow steps that were set aside; over all runs."""
        known = [run.slow_share for run in self.runs if run.slow_share is not None]
        return statistics.fmean(known) if known else None

    @property
    def kept_slow_share(self) -> float | None:
        """The same of those that come too often to be set aside."""
        known = [run.kept_slow_share for run in self.runs if run.kept_slow_share is not None]
        return statistics.fmean(known) if known else None

    @property
    def effective_steps(self) -> float | None:
        """Whole steps that an epoch comes to, median over runs: its short last step counts as long as it took."""
        return self.median_of(lambda run: run.pace.effective_steps)

    @property
    def elapsed_epochs(self) -> int:
        """Epochs behind `elapsed_epoch_seconds`, of all runs."""
        return sum(run.elapsed_epochs for run in self.runs)

    def median_of(self, figure: Callable[[RunFigures], float | None]) -> float | None:
        """Median over runs of one figure, or None where no run has it."""
        return _median([figure(run) for run in self.runs])

    @property
    def model_name(self) -> str:
        """The model, as the user named it."""
        model = self.trial.model
        return model.name or model.hf or model.factory or "unknown model"


def summarise(
    trial_id: str, trial: Trial, all_runs: Sequence[Run], combine_unlike: bool, target_ci: float | None = None
) -> TrialResult:
    """Puts the runs of one trial together. Runs from unlike surroundings stay apart unless `combine_unlike`.

    `target_ci`: what the study asked for, if its runs were added until epoch times are known so closely.
    """
    completed = [run for run in all_runs if run.outcome.kind == "completed"]
    completed.sort(key=lambda run: run.header.repeat)
    used = completed if combine_unlike else largest_like_group(completed)
    around = surroundings(used[0]) if used else None
    left_out = [
        f"repeat {run.header.repeat}: {'; '.join(differences(around, surroundings(run)))}"
        for run in completed
        if run not in used
    ]
    figures = tuple(runs.figures(run) for run in used)
    outcome, reason = _outcome(all_runs)
    by_allocation = groups([allocation_of(run) for run in used])
    spread = components([observations([f.epoch_seconds for f in figures], [[i] for i in own]) for own in by_allocation])
    clusters = _clusters(len(used), by_allocation, spread)
    clustered = len(clusters) < len(used)
    looked = 0 if clustered else looked_at([f.epoch_seconds for f in figures if f.epoch_seconds], target_ci)

    def over_runs(values: Sequence[float | None]) -> Interval | None:
        known = observations(values, clusters)
        return interval(known, looked=looked) if known else None

    elapsed = observations([figure.elapsed_epoch_seconds for figure in figures], clusters)
    sources = {figure.pace.source for figure in figures if figure.epoch_seconds is not None}
    return TrialResult(
        trial_id=trial_id,
        trial=trial,
        outcome=outcome,
        reason=reason,
        runs=figures,
        records=tuple(used),
        runs_done=len(all_runs),
        left_out=tuple(left_out),
        failures=tuple(
            Failure(r.header.repeat, r.outcome.kind, r.outcome.reason, r.outcome.rank, r.outcome.detail)
            for r in all_runs
            if r.outcome.kind != "completed"
        ),
        surroundings=around,
        step_seconds=over_runs([figure.step_seconds for figure in figures]),
        images_per_second=over_runs([figure.images_per_second for figure in figures]),
        epoch_seconds=over_runs([figure.epoch_seconds for figure in figures]),
        epoch_seconds_source="epochs" if "epochs" in sources else next(iter(sources), None),
        elapsed_epoch_seconds=interval(elapsed) if elapsed else None,
        startup=_startup(figures),
        startup_seconds=_median([figure.startup_seconds for figure in figures]),
        epochs=_mean_epochs(figures),
        loss_by_step=_mean_losses(figures),
        peak_bytes=max((figure.peak_bytes for figure in figures if figure.peak_bytes is not None), default=None),
        breakdown=combined(
            [breakdown(run, own.steady_from or 0) for run, own in zip(used, figures, strict=True)], clusters
        ),
        resources=resource_figures(used, figures, clusters),
        convergence=convergence(used, figures, clusters),
        traffic=traffic(used, figures, clusters),
        checkpoint=checkpoint_cost(used),
        looked=looked,
        allocations=by_allocation,
        components=spread,
    )


def with_start_up(result: TrialResult, runs: tuple[RunFigures, ...]) -> TrialResult:
    """The same with the start-up of other run figures."""
    return replace(
        result,
        runs=runs,
        startup=_startup(runs),
        startup_seconds=_median([run.startup_seconds for run in runs]),
    )


def _clusters(
    runs: int, by_allocation: tuple[tuple[int, ...], ...], spread: Components | None
) -> tuple[tuple[int, ...], ...]:
    """The runs of each observation."""
    return by_allocation if spread is not None and spread.clustered else tuple((run,) for run in range(runs))


def _outcome(all_runs: Sequence[Run]) -> tuple[OutcomeKind | None, str]:
    """Completed as soon as one run is; else as the last run ended; None where there is none."""
    if not all_runs:
        return None, NOT_RUN_YET
    in_time = sorted(all_runs, key=lambda run: run.outcome.started_unix_seconds)
    failed = [run.outcome for run in in_time if run.outcome.kind != "completed"]
    if len(failed) == len(all_runs):
        return failed[-1].kind, failed[-1].reason
    if not failed:
        return "completed", ""
    kinds = sorted({outcome.kind for outcome in failed})
    return "completed", (
        f"{len(failed)} of {len(all_runs)} repeats ended in {' and '.join(kinds)}: {failed[-1].reason}"
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _startup(figures: Sequence[RunFigures]) -> dict[str, float]:
    by_phase = {phase: _median([figure.startup.get(phase) for figure in figures]) for phase in runs.PHASES}
    return {phase: seconds for phase, seconds in by_phase.items() if seconds is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    """None as soon as one run has no finite value: a mean of the others would hide that it diverged."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if values and len(known) == len(values) else None


def _mean_epochs(figures: Sequence[RunFigures]) -> tuple[EpochFigures, ...]:
    numbers = sorted({epoch.epoch for figure in figures for epoch in figure.epochs})
    found = []
    for number in numbers:
        same = [epoch for figure in figures for epoch in figure.epochs if epoch.epoch == number]
        found.append(
            EpochFigures(
                epoch=number,
                seconds=_median([epoch.seconds for epoch in same]),
                complete=all(epoch.complete for epoch in same),
                train_loss=_mean([epoch.train_loss for epoch in same]),
                train_accuracy=_mean([epoch.train_accuracy for epoch in same]),
                held_out_loss=_mean([epoch.held_out_loss for epoch in same]),
                held_out_accuracy=_mean([epoch.held_out_accuracy for epoch in same]),
                mean_iou=_mean([epoch.mean_iou for epoch in same]),
            )
        )
    return tuple(found)


def _mean_losses(figures: Sequence[RunFigures]) -> tuple[tuple[int, float | None], ...]:
    by_step: dict[int, list[float | None]] = {}
    for figure in figures:
        for step, loss in figure.loss_by_step:
            by_step.setdefault(step, []).append(loss)
    return tuple((step, _mean(by_step[step])) for step in sorted(by_step))
