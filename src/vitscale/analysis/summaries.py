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
from vitscale.analysis.time.breakdown import breakdown, mean_breakdown
from vitscale.analysis.time.traffic import traffic
from vitscale.analysis.trials import Failure, LoaderFigures, TrialFigures, checkpoint_cost
from vitscale.engines.checks import exchanges_unknown
from vitscale.present.estimate import Estimate
from vitscale.store.results import OutcomeKind, Run
from vitscale.trial.trial import Trial

NOT_RUN_YET = "not run yet"


def summarise(
    trial_id: str, trial: Trial, all_runs: Sequence[Run], combine_unlike: bool, target_ci: float | None = None
) -> TrialFigures:
    """Puts the runs of one trial together. Runs from unlike surroundings stay apart unless `combine_unlike`.

    `target_ci`: the precision of epoch times that the study asked for, if runs were added until it is reached.
    """
    combined = _combined_runs(all_runs, combine_unlike)
    runs = combined.runs
    figures = tuple(all_run_figures(runs))
    sample = _sample(runs, figures, target_ci)

    def over_runs(values: Sequence[float | None]) -> Estimate | None:
        known = observations(values, sample.clusters)
        return interval(known, looked=sample.looked) if known else None

    outcome, reason = _outcome(all_runs)
    explained_runs = [breakdown(run, own.steady_from or 0) for run, own in zip(runs, figures, strict=True)]
    explained = mean_breakdown(explained_runs, sample.clusters)
    shares_model = trial.parallel.pipeline * trial.parallel.sequence > 1
    last_epochs = [own.last_epoch for own in figures if own.last_epoch is not None]
    return TrialFigures(
        trial_id=trial_id,
        trial=trial,
        outcome=outcome,
        reason=reason,
        run_figures=figures,
        recorded_runs=runs,
        runs_done=len(all_runs),
        left_out=combined.left_out,
        failures=_failures(all_runs),
        environment=combined.environment,
        step_seconds=over_runs([own.step_seconds for own in figures]),
        images_per_second=over_runs([own.images_per_second for own in figures]),
        epoch_seconds=over_runs([own.epoch_seconds for own in figures]),
        epoch_seconds_source=_epoch_seconds_source(figures),
        elapsed_epoch_seconds=over_runs([own.elapsed_epoch_seconds for own in figures]),
        epochs=_mean_epochs(figures),
        loss_by_step=_mean_losses(figures),
        peak_bytes=max((own.peak_bytes for own in figures if own.peak_bytes is not None), default=None),
        breakdown=explained,
        resources=resource_figures(runs, figures, sample.clusters, sample.looked),
        convergence=convergence(runs, figures, sample.clusters),
        traffic=traffic(
            runs,
            figures,
            sample.clusters,
            unlike=shares_model,
            exchanges_unknown=exchanges_unknown(trial) if trial.world.size > 1 else "",
        ),
        checkpoint=checkpoint_cost(runs),
        looked=sample.looked,
        allocations=sample.allocations,
        components=sample.components,
        clock_anomalies=next(filter(None, map(clock_anomalies, reversed(runs))), ()),
        loader=LoaderFigures.of(trial, runs),
        last_epoch=_mean_epoch(last_epochs),
        rank_speeds=explained_rank_speeds(trial, runs, figures) if explained else None,
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
    alike = [*range(len(completed))] if combine_unlike else largest_like_group(environments)
    environment = environments[alike[0]]
    left_out = []
    for place in sorted({*range(len(completed))} - {*alike}):
        why = "; ".join(differences(environment, environments[place]))
        left_out.append(f"repeat {completed[place].header.repeat + 1}: {why}")
    return _CombinedRuns(tuple(completed[place] for place in alike), environment, tuple(left_out))


class _Sample(NamedTuple):
    """The runs of a trial as a sample: what counts as one observation, and what decided how many there are."""

    allocations: tuple[tuple[int, ...], ...]
    components: Components | None
    clusters: tuple[tuple[int, ...], ...]
    """Places of the runs of each observation."""
    looked: int


def _sample(runs: Sequence[Run], figures: Sequence[RunFigures], target_ci: float | None) -> _Sample:
    """The sample that a trial's runs are, by their epoch times and the allocations in which they were made."""
    allocations = groups([allocation_of(run) for run in runs])
    epoch_seconds = [own.epoch_seconds for own in figures]
    known_by_allocation = [observations(epoch_seconds, [[run] for run in places]) for places in allocations]
    spread = components(known_by_allocation)
    clusters = clusters_of(len(runs), allocations, spread)
    looked = 0
    if len(clusters) == len(runs):  # `target_ci` counts runs, which are no observations where allocations are
        looked = looked_at([seconds for seconds in epoch_seconds if seconds], target_ci)
    return _Sample(allocations, spread, clusters, looked)


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
    sources = {own.pace.source for own in figures if own.epoch_seconds is not None}
    return "epochs" if "epochs" in sources else next(iter(sources), None)


def _outcome(all_runs: Sequence[Run]) -> tuple[OutcomeKind | None, str]:
    """Completed if any run is, else the outcome of the last run; None without runs."""
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


def _mean_epochs(figures: Sequence[RunFigures]) -> tuple[EpochFigures, ...]:
    same: dict[int, list[EpochFigures]] = {}
    for epoch in (epoch for figure in figures for epoch in figure.epochs):
        same.setdefault(epoch.epoch, []).append(epoch)
    return tuple(mean for number in sorted(same) if (mean := _mean_epoch(same[number])) is not None)


def _mean_epoch(of_runs: Sequence[EpochFigures]) -> EpochFigures | None:
    """One epoch of each run put together: means of what was learned, the median of the time, the highest number.

    None without any.
    """
    if not of_runs:
        return None
    return EpochFigures(
        epoch=max(epoch.epoch for epoch in of_runs),
        elapsed_seconds=known_median([epoch.elapsed_seconds for epoch in of_runs]),
        complete=all(epoch.complete for epoch in of_runs),
        runs=len(of_runs),
        **{name: whole_mean([getattr(epoch, name) for epoch in of_runs]) for name in LEARNED},
    )


def _mean_losses(figures: Sequence[RunFigures]) -> LossByStep:
    of_runs = [figure.loss_by_step for figure in figures]
    if of_runs and all(np.array_equal(losses.step, of_runs[0].step) for losses in of_runs):
        return LossByStep.means(of_runs[0].step, np.stack([losses.loss for losses in of_runs])[np.newaxis])[0]
    step, position = np.unique(
        np.concatenate([np.array([], dtype=np.int64), *(r.step for r in of_runs)]), return_inverse=True
    )
    losses = np.concatenate([np.array([]), *(r.loss for r in of_runs)])
    total = np.bincount(position, weights=losses, minlength=len(step))
    return LossByStep.means(step, (total / np.bincount(position, minlength=len(step)))[np.newaxis, np.newaxis])[0]
