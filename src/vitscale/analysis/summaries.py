"""Makes the figures of one trial from its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitscale.analysis.learning.convergence import convergence
from vitscale.analysis.quality.measurement import clock_anomalies
from vitscale.analysis.quality.shares import explained_rank_speeds
from vitscale.analysis.runs.environments import RunEnvironment, differences, largest_like_group, run_environments
from vitscale.analysis.runs.figures import LEARNING_FIGURES, EpochFigures, LossByStep, RunFigures, all_run_figures
from vitscale.analysis.runs.repeats import (
    Components,
    allocation_of,
    clusters_of,
    components,
    count_deciding_runs,
    groups,
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
        combine_unlike: whether runs on different hardware or software are combined; otherwise only the largest group
            of runs on the same counts.
        target_ci: the precision of epoch times that the study asked for, if runs were added until it is reached.
    """
    combined = _combined_runs(all_runs, combine_unlike)
    runs = combined.runs
    figures_by_run = tuple(all_run_figures(runs))
    sample = _sample(runs, figures_by_run, target_ci)

    def over_runs(values: Sequence[float | None]) -> Estimate | None:
        """The geometric mean of one value per run, with its interval; None where no run has the figure."""
        observed_values = observations(values, sample.clusters)
        return interval(observed_values, deciding_runs=sample.deciding_runs) if observed_values else None

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
        resources=resource_figures(runs, figures_by_run, sample.clusters, sample.deciding_runs),
        convergence=convergence(runs, figures_by_run, sample.clusters),
        traffic=_traffic(trial, runs, figures_by_run, sample),
        checkpoint=checkpoint_cost(runs),
        deciding_runs=sample.deciding_runs,
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
    """Hardware and software of the first of them, which the others share unless unlike runs are combined; None without
    a run."""
    left_out: tuple[str, ...]
    """Why each other completed run does not count with them."""


def _combined_runs(all_runs: Sequence[Run], combine_unlike: bool) -> _CombinedRuns:
    """Return the largest group of completed runs on the same hardware and software; all runs if `combine_unlike`."""
    completed = [run for run in all_runs if run.outcome.kind == "completed"]
    if not completed:
        return _CombinedRuns(runs=(), environment=None, left_out=())
    completed.sort(key=lambda run: run.header.repeat)
    environments = run_environments(completed)
    # Indices in `completed`.
    combined = list(range(len(completed))) if combine_unlike else largest_like_group(environments)
    environment = environments[combined[0]]
    runs = tuple(completed[index] for index in combined)
    left_out = []
    for index, run in enumerate(completed):
        if index not in combined:
            reasons = "; ".join(differences(environment, environments[index]))
            left_out.append(f"repeat {run.header.repeat + 1}: {reasons}")
    return _CombinedRuns(runs, environment, tuple(left_out))


class _Sample(NamedTuple):
    """The runs of a trial as a sample: what counts as one observation, and what decided how many there are."""

    allocations: tuple[tuple[int, ...], ...]
    """Indices of the runs of each allocation of a batch system, or of the same hosts."""
    components: Components | None
    """The spread between allocations and inside them."""
    clusters: tuple[tuple[int, ...], ...]
    """Indices of the runs of each observation."""
    deciding_runs: int
    """Number of first runs that decided how many there are; 0 where none did."""


def _sample(runs: Sequence[Run], figures: Sequence[RunFigures], target_ci: float | None) -> _Sample:
    """Return what counts as an observation among a trial's runs, by their epoch times and their allocations."""
    allocations = groups([allocation_of(run) for run in runs])
    epoch_seconds = [run_figures.epoch_seconds for run_figures in figures]
    seconds_by_allocation = []
    for allocation in allocations:
        seconds_of_runs = [epoch_seconds[run] for run in allocation]
        seconds_by_allocation.append([seconds for seconds in seconds_of_runs if seconds is not None])
    spread = components(seconds_by_allocation)
    clusters = clusters_of(len(runs), allocations, spread)
    deciding_runs = 0
    is_each_run_observation = len(clusters) == len(runs)
    if is_each_run_observation:  # `target_ci` counts runs, and decides nothing where allocations are the observations
        deciding_runs = count_deciding_runs([seconds for seconds in epoch_seconds if seconds], target_ci)
    return _Sample(allocations, spread, clusters, deciding_runs)


def _breakdown(runs: Sequence[Run], figures: Sequence[RunFigures], sample: _Sample) -> Breakdown | None:
    """Return the parts of a step's time, mean over observations; None where no step was explained."""
    by_run = []
    for run, run_figures in zip(runs, figures, strict=True):
        by_run.append(breakdown(run, run_figures.steady_from or 0))
    return mean_breakdown(by_run, sample.clusters)


def _traffic(trial: Trial, runs: Sequence[Run], figures: Sequence[RunFigures], sample: _Sample) -> Traffic | None:
    """Return what an optimizer step of the trial sends; None where no run recorded it."""
    ranks_share_model = trial.parallel.pipeline * trial.parallel.sequence > 1
    reason = exchanges_unknown(trial) if trial.world.size > 1 else ""
    return traffic(runs, figures, sample.clusters, ranks_differ=ranks_share_model, exchanges_unknown=reason)


def _peak_bytes(figures: Sequence[RunFigures]) -> int | None:
    """Return the peak of the run that needed most; None where no run recorded it."""
    peaks = [run_figures.peak_bytes for run_figures in figures if run_figures.peak_bytes is not None]
    return max(peaks, default=None)


def _last_clock_anomalies(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the impossible times in the last run that has any."""
    for run in reversed(runs):
        anomalies = clock_anomalies(run)
        if anomalies:
            return anomalies
    return ()


def _failures(all_runs: Sequence[Run]) -> tuple[Failure, ...]:
    """Return the failure of each run that did not complete."""
    failures = []
    for run in all_runs:
        if run.outcome.kind == "completed":
            continue
        failures.append(
            Failure(
                repeat=run.header.repeat,
                kind=run.outcome.kind,
                reason=run.outcome.reason,
                rank=run.outcome.rank,
                detail=run.outcome.detail,
                log=run.header.log,
            )
        )
    return tuple(failures)


def _epoch_seconds_source(figures: Sequence[RunFigures]) -> PaceSource | None:
    """Return what the epoch time derives from: "epochs" if that of any run does; None without an epoch time."""
    sources = {run_figures.pace.source for run_figures in figures if run_figures.epoch_seconds is not None}
    if "epochs" in sources:
        return "epochs"
    return next(iter(sources), None)


class _TrialOutcome(NamedTuple):
    """How a trial ended, all its runs together."""

    kind: OutcomeKind | None
    """None: it has no run yet."""
    reason: str
    """Empty where every run completed."""


def _outcome(all_runs: Sequence[Run]) -> _TrialOutcome:
    """Return the outcome of a trial: completed if any run is, else that of the run that began last."""
    if not all_runs:
        return _TrialOutcome(kind=None, reason=NOT_RUN_YET)
    runs_by_start = sorted(all_runs, key=lambda run: run.outcome.started_unix_seconds)
    failures = [run.outcome for run in runs_by_start if run.outcome.kind != "completed"]
    if not failures:
        return _TrialOutcome("completed", reason="")
    last_failure = failures[-1]
    if len(failures) == len(all_runs):
        return _TrialOutcome(last_failure.kind, last_failure.reason)
    kinds = " and ".join(sorted({failure.kind for failure in failures}))
    reason = f"{len(failures)} of {len(all_runs)} repeats ended in {kinds}: {last_failure.reason}"
    return _TrialOutcome("completed", reason)


def _mean_epochs(figures: Sequence[RunFigures]) -> tuple[EpochFigures, ...]:
    """Return each epoch once, mean over the runs that had it, by its number."""
    epochs_by_number: dict[int, list[EpochFigures]] = {}
    for run_figures in figures:
        for epoch in run_figures.epochs:
            epochs_by_number.setdefault(epoch.epoch, []).append(epoch)
    return tuple(_mean_epoch(epochs_by_number[number]) for number in sorted(epochs_by_number))


def _mean_of_last_epochs(figures: Sequence[RunFigures]) -> EpochFigures | None:
    """Return the mean over runs, each at its own last whole epoch; None where no run has one."""
    last_epochs = [run_figures.last_epoch for run_figures in figures if run_figures.last_epoch is not None]
    return _mean_epoch(last_epochs) if last_epochs else None


def _mean_epoch(epochs: Sequence[EpochFigures]) -> EpochFigures:
    """Put one epoch of each run together: means of losses and accuracies, the median time, the highest number.

    Args:
        epochs: one of each run, at least one.
    """
    return EpochFigures(
        epoch=max(epoch.epoch for epoch in epochs),
        elapsed_seconds=known_median(epoch.elapsed_seconds for epoch in epochs),
        complete=all(epoch.complete for epoch in epochs),
        runs=len(epochs),
        **{name: whole_mean([getattr(epoch, name) for epoch in epochs]) for name in LEARNING_FIGURES},
    )


def _mean_loss_by_step(by_run: Sequence[LossByStep]) -> LossByStep:
    """Return the loss of each step, mean over the runs that have the step.

    `LossByStep.means` averages over the second axis of (runs, ranks, steps). Here the trial's runs lie along that axis,
    and the first one has length 1.
    """
    have_same_steps = all(np.array_equal(losses.step, by_run[0].step) for losses in by_run)
    if by_run and have_same_steps:
        losses_by_run = np.stack([losses.loss for losses in by_run])  # (runs of the trial, steps)
        return LossByStep.means(by_run[0].step, losses_by_run[np.newaxis])[0]
    # The steps and losses of all runs one after the other; without runs, empty arrays.
    all_steps = np.concatenate([np.array([], dtype=np.int64), *(losses.step for losses in by_run)])
    all_losses = np.concatenate([np.array([]), *(losses.loss for losses in by_run)])
    steps, positions = np.unique(all_steps, return_inverse=True)  # all_steps[k] is steps[positions[k]]
    totals = np.bincount(positions, weights=all_losses, minlength=len(steps))
    counts = np.bincount(positions, minlength=len(steps))
    mean_losses = totals / counts  # (steps,)
    return LossByStep.means(steps, mean_losses[np.newaxis, np.newaxis])[0]
