"""Makes a trial's result from its runs, and keeps one-off compilations out of all start-up figures.

DeepSpeed compiles an extension (fused_adam, cpu_adam) on a machine that has none of it yet: minutes in the first run of
an engine, and never again. `torch.compile` keeps what it compiled in the first step on disk for the trial's later runs.
A rank records this (`PhaseLine.compiled`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitscale.analysis.learning.convergence import convergence
from vitscale.analysis.quality.measurement import clock_anomalies
from vitscale.analysis.quality.shares import explained_rank_speeds
from vitscale.analysis.runs.environments import differences, largest_like_group, run_environments
from vitscale.analysis.runs.figures import LEARNED, PHASES, EpochFigures, LossByStep, RunFigures, all_run_figures
from vitscale.analysis.runs.repeats import allocation_of, clusters_of, components, groups, looked_at, observations
from vitscale.analysis.runs.resources import resource_figures
from vitscale.analysis.statistics import interval, known_median, whole_mean
from vitscale.analysis.time.breakdown import breakdown, combined
from vitscale.analysis.time.traffic import traffic
from vitscale.analysis.trials import Failure, LoaderFigures, TrialResult, checkpoint_cost
from vitscale.engines.checks import exchanges_unknown
from vitscale.present.estimate import Estimate
from vitscale.store.results import OutcomeKind, Run
from vitscale.trial.trial import OF_THE_WRAPPER, Trial

NOT_RUN_YET = "not run yet"

_MAY_COMPILE = ("engine", "first_step")


def summarise(
    trial_id: str, trial: Trial, all_runs: Sequence[Run], combine_unlike: bool, target_ci: float | None = None
) -> TrialResult:
    """Puts the runs of one trial together. Runs from unlike surroundings stay apart unless `combine_unlike`.

    `target_ci`: the precision of epoch times that the study asked for, if runs were added until it is reached.
    """
    completed = [run for run in all_runs if run.outcome.kind == "completed"]
    completed.sort(key=lambda run: run.header.repeat)
    environments = run_environments(completed)
    alike = [*range(len(completed))] if combine_unlike else largest_like_group(environments)
    used, together = [completed[index] for index in alike], set(alike)
    around = environments[alike[0]] if used else None
    left_out = [
        f"repeat {run.header.repeat + 1}: {'; '.join(differences(around, environment))}"
        for index, (run, environment) in enumerate(zip(completed, environments, strict=True))
        if index not in together
    ]
    figures = tuple(all_run_figures(used))
    outcome, reason = _outcome(all_runs)
    by_allocation = groups([allocation_of(run) for run in used])
    spread = components([observations([f.epoch_seconds for f in figures], [[i] for i in own]) for own in by_allocation])
    clusters = clusters_of(len(used), by_allocation, spread)
    clustered = len(clusters) < len(used)
    looked = 0 if clustered else looked_at([f.epoch_seconds for f in figures if f.epoch_seconds], target_ci)

    def over_runs(values: Sequence[float | None]) -> Estimate | None:
        known = observations(values, clusters)
        return interval(known, looked=looked) if known else None

    explained = combined(
        [breakdown(run, own.steady_from or 0) for run, own in zip(used, figures, strict=True)], clusters
    )
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
            Failure(r.header.repeat, r.outcome.kind, r.outcome.reason, r.outcome.rank, r.outcome.detail, r.header.log)
            for r in all_runs
            if r.outcome.kind != "completed"
        ),
        environment=around,
        step_seconds=over_runs([figure.step_seconds for figure in figures]),
        images_per_second=over_runs([figure.images_per_second for figure in figures]),
        epoch_seconds=over_runs([figure.epoch_seconds for figure in figures]),
        epoch_seconds_source="epochs" if "epochs" in sources else next(iter(sources), None),
        elapsed_epoch_seconds=over_runs([figure.elapsed_epoch_seconds for figure in figures]),
        startup=_startup(figures),
        startup_seconds=known_median([figure.startup_seconds for figure in figures]),
        epochs=_mean_epochs(figures),
        loss_by_step=_mean_losses(figures),
        peak_bytes=max((figure.peak_bytes for figure in figures if figure.peak_bytes is not None), default=None),
        breakdown=explained,
        resources=resource_figures(used, figures, clusters, looked),
        convergence=convergence(used, figures, clusters),
        traffic=traffic(
            used,
            figures,
            clusters,
            unlike=trial.parallel.pipeline * trial.parallel.sequence > 1,
            exchanges_unknown=exchanges_unknown(trial) if trial.world.size > 1 else "",
        ),
        checkpoint=checkpoint_cost(used),
        looked=looked,
        allocations=by_allocation,
        components=spread,
        clock_anomalies=next(filter(None, map(clock_anomalies, reversed(used))), ()),
        loader=LoaderFigures.of(trial, used),
        last_epoch=_mean_epoch([own for figure in figures if (own := figure.last_epoch) is not None]),
        rank_speeds=explained_rank_speeds(trial, used, figures) if explained else None,
    )


def without_one_off(trials: Mapping[str, TrialResult]) -> dict[str, TrialResult]:
    """The same trials; a phase in which a run compiled gets the median of runs that did not.

    The remaining seconds go to `one_off`. Without a run that did not compile the phase is left out: unavailable.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, int, RunFigures]]] = {}
    for trial_id, result in trials.items():
        for n, run in enumerate(result.runs):
            for phase in _MAY_COMPILE:
                if phase in run.startup:
                    groups.setdefault((phase, *_kind(phase, result)), []).append((trial_id, n, run))
    mended: dict[str, dict[int, RunFigures]] = {}
    for (phase, *_), members in groups.items():
        usual = known_median(run.startup[phase] for _, _, run in members if phase not in run.compiled)
        for trial_id, n, run in members:
            if phase in run.compiled:
                runs = mended.setdefault(trial_id, {})
                runs[n] = _without(runs.get(n, run), phase, usual)
    return {
        trial_id: with_start_up(result, tuple(mended[trial_id].get(n, run) for n, run in enumerate(result.runs)))
        if trial_id in mended
        else result
        for trial_id, result in trials.items()
    }


def _without(run: RunFigures, phase: str, usual: float | None) -> RunFigures:
    """The run with a compilation taken out of a phase. `usual`: the phase's seconds in other runs; None without any."""
    rest = {name: seconds for name, seconds in run.startup.items() if name != phase}
    seconds = run.startup[phase]
    if usual is None:
        return replace(run, startup=rest, one_off={**run.one_off, phase: seconds})
    one_off = {**run.one_off, phase: max(0.0, seconds - usual)}
    return replace(run, startup=rest | {phase: min(usual, seconds)}, one_off=one_off)


def _kind(phase: str, result: TrialResult) -> tuple[Any, ...]:
    """What runs share that do the same in a phase: the engine that they build, or the first step that they train."""
    trial = result.trial
    if phase == "first_step":
        return (result.trial_id,)
    # As text: a DeepSpeed file is a dict, which cannot be a key.
    wrapper = trial.train.model_dump_json(include=set(OF_THE_WRAPPER))
    return (trial.launcher, trial.train.device, trial.train.optimizer, trial.model.model_dump_json(), wrapper)


def with_start_up(result: TrialResult, runs: tuple[RunFigures, ...]) -> TrialResult:
    """The same result with the start-up of these run figures."""
    return replace(
        result, runs=runs, startup=_startup(runs), startup_seconds=known_median([run.startup_seconds for run in runs])
    )


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


def _startup(figures: Sequence[RunFigures]) -> dict[str, float]:
    by_phase = {phase: known_median([figure.startup.get(phase) for figure in figures]) for phase in PHASES}
    return {phase: seconds for phase, seconds in by_phase.items() if seconds is not None}


def _mean_epochs(figures: Sequence[RunFigures]) -> tuple[EpochFigures, ...]:
    same: dict[int, list[EpochFigures]] = {}
    for epoch in (epoch for figure in figures for epoch in figure.epochs):
        same.setdefault(epoch.epoch, []).append(epoch)
    return tuple(mean for number in sorted(same) if (mean := _mean_epoch(same[number])) is not None)


def _mean_epoch(of_runs: Sequence[EpochFigures]) -> EpochFigures | None:
    """The mean of an epoch of each run, numbered as the latest of them; None without any."""
    if not of_runs:
        return None
    return EpochFigures(
        epoch=max(epoch.epoch for epoch in of_runs),
        seconds=known_median([epoch.seconds for epoch in of_runs]),
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
