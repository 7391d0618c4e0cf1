"""Makes the figures of one trial from its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitscale.analysis.learning.convergence import convergence
from vitscale.analysis.quality.measurement import clock_anomalies
from vitscale.analysis.quality.shares import explained_rank_speeds
from vitscale.analysis.runs.environments import RunEnvironment, differences, largest_like_group, run_environments
from vitscale.analysis.runs.figures import LEARNED, EpochFigures, LossByStep, RunFigures, all_run_figures
from vitscale.analysis.runs.repeats import (
    Components,
    allocation_of,
    clusters_of,
    components,
    groups,
    looked_at,
    observations,
)
from vitscale.analysis.runs.resources import resource_figures
from vitscale.analysis.runs.steps import PaceSource
from vitscale.analysis.statistics import interval, known_median, whole_mean
from vitscale.analysis.time.breakdown import Breakdown, breakdown, mean_breakdown
from vitscale.analysis.time.traffic import Traffic, traffic
from vitscale.analysis.trials import Failure, LoaderFigures, TrialFigures, checkpoint_cost
from vitscale.engines.checks import exchanges_unknown
from vitscale.present.estimate import Estimate
from vitscale.store.results import OutcomeKind, Run
from vitscale.trial.trial import Trial

NOT_RUN_YET = "not run yet"


def summarise(
    trial_id: str, trial: Trial, all_runs: Sequence[Run], combine_unlike: bool, target_ci: float | None = None
) -> TrialFigures:
    """Put the runs of one trial together.

    Args:
        trial_id: identity of the trial.
        trial: the trial.
        all_runs: all its runs with an outcome.
        combine_unlike: whether runs from unlike surroundings are combined; otherwise only the largest group counts.
        target_ci: the precision of epoch times that the study asked for, if runs were added until it is reached.
    """
    combined = _combined_runs(all_runs, combine_unlike)
    runs = combined.runs
    figures_by_run = tuple(all_run_figures(runs))
    sample = _sample(runs, figures_by_run, target_ci)

    def over_runs(values: Sequence[float | None]) -> Estimate | None:
        known_values = observations(values, sample.clusters)
        return interval(known_values, looked=sample.looked) if known_values else None

    outcome = _outcome(all_runs)
    explained = _breakdown(runs, figures_by_run, sample)
    return TrialFigures(
        trial_id=trial_id,
        trial=trial,
        outcome=outcome.kind,
        reason=outcome.reason,
        run_figures=figures_by_run,
        recorded_runs=runs,
        runs_done=len(all_runs),
        left_out=combined.left_out,
        failures=_failures(all_runs),
        environment=combined.environment,
        step_seconds=over_runs([figures.step_seconds for figures in figures_by_run]),
        images_per_second=over_runs([figures.images_per_second for figures in figures_by_run]),
        epoch_seconds=over_runs([figures.epoch_seconds for figures in figures_by_run]),
        epoch_seconds_source=_epoch_seconds_source(figures_by_run),
        elapsed_epoch_seconds=over_runs([figures.elapsed_epoch_seconds for figures in figures_by_run]),
        epochs=_mean_epochs(figures_by_run),
        loss_by_step=_mean_loss_by_step([figures.loss_by_step for figures in figures_by_run]),
        peak_bytes=_peak_bytes(figures_by_run),
        breakdown=explained,
        resources=resource_figures(runs, figures_by_run, sample.clusters, sample.looked),
        convergence=convergence(runs, figures_by_run, sample.clusters),
        traffic=_traffic(trial, runs, figures_by_run, sample),
        checkpoint=checkpoint_cost(runs),
        looked=sample.looked,
        allocations=sample.allocations,
        components=sample.components,
        clock_anomalies=_last_clock_anomalies(runs),
        loader=LoaderFigures.of(trial, runs),
        last_epoch=_mean_of_last_epochs(figures_by_run),
        rank_speeds=explained_rank_speeds(trial, runs, figures_by_run) if explained else None,
    )


class _CombinedRuns(NamedTuple):
    """The completed runs that count together."""

    runs: tuple[Run, ...]
    """In the order of repeats."""
    environment: RunEnvironment | None
    """The surroundings of the first of them; None without a run."""
    left_out: tuple[str, ...]
    """Why each other completed run does not count with them."""


def _combined_runs(all_runs: Sequence[Run], combine_unlike: bool) -> _CombinedRuns:
    """The largest group of completed runs from like surroundings; all of them if `combine_unlike`."""
    completed = [run for run in all_runs if run.outcome.kind == "completed"]
    if not completed:
        return _CombinedRuns(runs=(), environment=None, left_out=())
    completed.sort(key=lambda run: run.header.repeat)
    environments = run_environments(completed)
    all_places = list(range(len(completed)))
    combined_places = all_places if combine_unlike else largest_like_group(environments)
    environment = environments[combined_places[0]]
    left_out = []
    for place in all_places:
        if place not in combined_places:
            reasons = "; ".join(differences(environment, environments[place]))
            left_out.append(f"repeat {completed[place].header.repeat + 1}: {reasons}")
    return _CombinedRuns(tuple(completed[place] for place in combined_places), environment, tuple(left_out))


class _Sample(NamedTuple):
    """The runs of a trial as a sample: what counts as one observation, and what decided how many there are."""

    allocations: tuple[tuple[int, ...], ...]
    components: Components | None
    clusters: tuple[tuple[int, ...], ...]
    """Places of the runs of each observation."""
    looked: int
    """Number of first runs that decided how many there are; 0 where none did."""


def _sample(runs: Sequence[Run], figures: Sequence[RunFigures], target_ci: float | None) -> _Sample:
    """The sample that a trial's runs are, by their epoch times and the allocations in which they were made."""
    allocations = groups([allocation_of(run) for run in runs])
    epoch_seconds = [of_run.epoch_seconds for of_run in figures]
    known_by_allocation = []
    for runs_of_allocation in allocations:
        each_run_alone = [[run] for run in runs_of_allocation]
        known_by_allocation.append(observations(epoch_seconds, each_run_alone))
    spread = components(known_by_allocation)
    clusters = clusters_of(len(runs), allocations, spread)
    looked = 0
    if len(clusters) == len(runs):  # `target_ci` counts runs, which are no observations where allocations are
        looked = looked_at([seconds for seconds in epoch_seconds if seconds], target_ci)
    return _Sample(allocations, spread, clusters, looked)


def _breakdown(runs: Sequence[Run], figures: Sequence[RunFigures], sample: _Sample) -> Breakdown | None:
    """The parts of a step's time, mean over observations; None where no step was explained."""
    by_run = []
    for run, of_run in zip(runs, figures, strict=True):
        by_run.append(breakdown(run, of_run.steady_from or 0))
    return mean_breakdown(by_run, sample.clusters)


def _traffic(trial: Trial, runs: Sequence[Run], figures: Sequence[RunFigures], sample: _Sample) -> Traffic | None:
    ranks_share_model = trial.parallel.pipeline * trial.parallel.sequence > 1
    reason = exchanges_unknown(trial) if trial.world.size > 1 else ""
    return traffic(runs, figures, sample.clusters, unlike=ranks_share_model, exchanges_unknown=reason)


def _peak_bytes(figures: Sequence[RunFigures]) -> int | None:
    """Peak of the run that needed most; None where no run recorded it."""
    return max((of_run.peak_bytes for of_run in figures if of_run.peak_bytes is not None), default=None)


def _last_clock_anomalies(runs: Sequence[Run]) -> tuple[str, ...]:
    """Impossible times in the last run that has any."""
    for run in reversed(runs):
        anomalies = clock_anomalies(run)
        if anomalies:
            return anomalies
    return ()


def _failures(all_runs: Sequence[Run]) -> tuple[Failure, ...]:
    failed = [run for run in all_runs if run.outcome.kind != "completed"]
    return tuple(
        Failure(
            repeat=run.header.repeat,
            kind=run.outcome.kind,
            reason=run.outcome.reason,
            rank=run.outcome.rank,
            detail=run.outcome.detail,
            log=run.header.log,
        )
        for run in failed
    )


def _epoch_seconds_source(figures: Sequence[RunFigures]) -> PaceSource | None:
    """What the epoch time rests on: whole epochs if that of any run does; None without an epoch time."""
    sources = {of_run.pace.source for of_run in figures if of_run.epoch_seconds is not None}
    return "epochs" if "epochs" in sources else next(iter(sources), None)


class _TrialOutcome(NamedTuple):
    """How a trial ended, all its runs together."""

    kind: OutcomeKind | None
    """None: it has no run yet."""
    reason: str
    """Empty where every run completed."""


def _outcome(all_runs: Sequence[Run]) -> _TrialOutcome:
    """Completed if any run is, else the outcome of the last run."""
    if not all_runs:
        return _TrialOutcome(kind=None, reason=NOT_RUN_YET)
    in_time = sorted(all_runs, key=lambda run: run.outcome.started_unix_seconds)
    failed = [run.outcome for run in in_time if run.outcome.kind != "completed"]
    if not failed:
        return _TrialOutcome("completed", reason="")
    last = failed[-1]
    if len(failed) == len(all_runs):
        return _TrialOutcome(last.kind, last.reason)
    kinds = " and ".join(sorted({outcome.kind for outcome in failed}))
    return _TrialOutcome("completed", f"{len(failed)} of {len(all_runs)} repeats ended in {kinds}: {last.reason}")


def _mean_epochs(figures: Sequence[RunFigures]) -> tuple[EpochFigures, ...]:
    """Each epoch once, mean over the runs that had it."""
    runs_by_epoch: dict[int, list[EpochFigures]] = {}
    for of_run in figures:
        for epoch in of_run.epochs:
            runs_by_epoch.setdefault(epoch.epoch, []).append(epoch)
    return tuple(_mean_epoch(runs_by_epoch[number]) for number in sorted(runs_by_epoch))


def _mean_of_last_epochs(figures: Sequence[RunFigures]) -> EpochFigures | None:
    """The mean over runs, each at its own last whole epoch; None where no run has one."""
    last_epochs = [of_run.last_epoch for of_run in figures if of_run.last_epoch is not None]
    return _mean_epoch(last_epochs) if last_epochs else None


def _mean_epoch(of_runs: Sequence[EpochFigures]) -> EpochFigures:
    """One epoch of each run, at least one, put together.

    Means of what was learned, the median of the time, the highest number.
    """
    return EpochFigures(
        epoch=max(epoch.epoch for epoch in of_runs),
        elapsed_seconds=known_median(epoch.elapsed_seconds for epoch in of_runs),
        complete=all(epoch.complete for epoch in of_runs),
        runs=len(of_runs),
        **{name: whole_mean([getattr(epoch, name) for epoch in of_runs]) for name in LEARNED},
    )


def _mean_loss_by_step(by_run: Sequence[LossByStep]) -> LossByStep:
    """The loss of each step, mean over the runs that have the step."""
    have_same_steps = all(np.array_equal(losses.step, by_run[0].step) for losses in by_run)
    if by_run and have_same_steps:
        losses = np.stack([losses.loss for losses in by_run])
        return LossByStep.means(by_run[0].step, losses[np.newaxis])[0]
    all_steps = np.concatenate([np.array([], dtype=np.int64), *(losses.step for losses in by_run)])
    all_losses = np.concatenate([np.array([]), *(losses.loss for losses in by_run)])
    steps, positions = np.unique(all_steps, return_inverse=True)
    totals = np.bincount(positions, weights=all_losses, minlength=len(steps))
    counts = np.bincount(positions, minlength=len(steps))
    return LossByStep.means(steps, (totals / counts)[np.newaxis, np.newaxis])[0]
