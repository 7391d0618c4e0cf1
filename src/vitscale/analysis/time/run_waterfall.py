"""The waterfall of a whole run, as someone who waits for it counts: with start-up, evaluation and a checkpoint.

A run of e epochs of T seconds takes

    R = start-up + e * (T + evaluation) + one checkpoint saved

where start-up lasts until the end of the first step, less a usual step, which the epochs contain. With perfect scaling
it would take y = R_b * N_b / N (weak: R_b), from the baseline's R_b. By the logarithmic mean Divisia index, as in
`analysis.time.waterfall`, with parts x of the trial and y of that ideal, and X and Y their sums,

    ln f = (y - x) / L(X, Y)        for start-up, evaluation and checkpoint
    ln f = ln f_epoch * L(x, y) / L(X, Y)        for each factor f_epoch of the epochs' own efficiency y / x

The second line is the first for all epochs together, ln(y / x) * L(x, y) = y - x, divided as their own waterfall
divides it: the index is consistent in aggregation (Ang, Energy Policy 32, 2004). So all factors multiply to Y / X
again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.repeats import observations
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.statistics import ratio
from vitscale.analysis.time import waterfall as of_epoch
from vitscale.analysis.trials import TrialResult

START_UP, EVALUATION, CHECKPOINT = "start-up", "evaluation", "checkpoint"
_EPOCHS = "epochs"


def epochs_of(trial: TrialResult) -> int | None:
    """Epochs of a whole run: those that the trial trains; one where it only measures some steps. None where a run ends
    as soon as it has reached an accuracy: runs of one trial then train unlike numbers of epochs."""
    if trial.trial.train.target_accuracy is not None:
        return None
    return trial.trial.train.epochs or 1 if trial.trial.window.steps is None else 1


def run_parts(trial: TrialResult) -> Mapping[str, float]:
    """Seconds of each part of a whole run, over its runs: the geometric mean for epochs, as everywhere, else medians.

    There is no "evaluation" where the trial evaluates nothing, and no "checkpoint" where none was measured.

    Raises:
        Unexplained: a part is not known.
    """
    costs = [] if trial.of_rates else trial.comparable_costs
    if not costs:
        raise of_epoch.Unexplained(trial.reason or "no run has completed with an epoch time")
    started = trial.startup_seconds
    if started is None:
        raise of_epoch.Unexplained("how long a run takes to start is unknown")
    first = trial.median_of(lambda run: run.step_seconds)
    if first is None:
        raise of_epoch.Unexplained("how long a step takes is unknown")
    epochs = epochs_of(trial)
    if epochs is None:
        raise of_epoch.Unexplained("runs end with the epoch that reaches train.target_accuracy, each with another one")
    parts = {
        START_UP: max(0.0, started - first),
        _EPOCHS: epochs * math.exp(statistics.fmean(math.log(cost) for cost in costs)),
    }
    if trial.trial.window.evaluate:
        evaluated = trial.median_of(lambda run: run.evaluation_seconds)
        if evaluated is None:
            raise of_epoch.Unexplained("how long an evaluation takes is unknown")
        parts[EVALUATION] = epochs * evaluated
    if trial.checkpoint is not None:
        parts[CHECKPOINT] = trial.checkpoint.save_seconds
    return parts


def run_seconds(trial: TrialResult) -> list[float]:
    """Seconds of each observation's whole run, the sum of `run_parts`; empty where a part is not known."""
    try:
        parts = run_parts(trial)
    except of_epoch.Unexplained:
        return []
    epochs, trained = epochs_of(trial), 1 - trial.images_left_out

    def of(run: RunFigures, startup_seconds: float | None) -> float | None:
        if epochs is None or run.epoch_seconds is None or startup_seconds is None:
            return None
        evaluated = (run.evaluation_seconds or 0.0) if EVALUATION in parts else 0.0
        started = max(0.0, startup_seconds - (run.step_seconds or 0.0))
        return started + epochs * (run.epoch_seconds / trained + evaluated) + parts.get(CHECKPOINT, 0.0)

    seconds = [of(run, start_up.seconds) for run, start_up in zip(trial.run_figures, trial.start_ups, strict=True)]
    return observations(seconds, trial.clusters)


def run_breakdown(trial: TrialResult) -> Mapping[str, float]:
    """Seconds of each part of a whole run: `run_parts`, with the epochs split into `light_step_parts`.

    Raises:
        Unexplained: a part is not known.
    """
    parts = run_parts(trial)
    inside = of_epoch.light_step_parts(trial)
    scale = parts[_EPOCHS] / sum(inside.values())
    return {name: scale * seconds for name, seconds in inside.items()} | {
        name: seconds for name, seconds in parts.items() if name != _EPOCHS
    }


def run_waterfalls(curve: CurveResult, trials: Mapping[str, TrialResult]) -> tuple[of_epoch.Waterfall, ...]:
    """The waterfall of the whole run for each trial of a curve but its baseline, like `waterfalls` for an epoch."""
    return tuple(_of_run(waterfall, trials) for waterfall in of_epoch.waterfalls(curve, trials))


def _of_run(waterfall: of_epoch.Waterfall, trials: Mapping[str, TrialResult]) -> of_epoch.Waterfall:
    if waterfall.baseline_trial is None or not waterfall.factors:
        return replace(waterfall, efficiency=None, interval=None)
    trial, reference = trials[waterfall.trial_id], trials[waterfall.baseline_trial]
    ranks = of_epoch.share_of_ranks(waterfall.mode, waterfall.baseline_gpus, waterfall.gpus)
    try:
        factors = of_epoch.with_intervals(trial, reference, ranks, _run_factors)
    except of_epoch.Unexplained as why:
        return replace(waterfall, efficiency=None, interval=None, factors=(), reason=str(why))
    efficiency = math.prod(factor.factor for factor in factors)
    whole = ratio(run_seconds(reference), run_seconds(trial), (reference.looked, trial.looked))
    around = replace(whole.times(efficiency / whole.value), value=efficiency)
    return replace(waterfall, efficiency=efficiency, interval=around, factors=factors)


def _run_factors(trial: TrialResult, reference: TrialResult, ranks: float) -> tuple[of_epoch.Factor, ...]:
    of_epochs = of_epoch.step_factors(trial, reference, ranks)
    parts, base = run_parts(trial), run_parts(reference)
    # A checkpoint or an evaluation that was timed on one side alone is in neither run.
    measured = {name: seconds for name, seconds in parts.items() if name in base}
    ideal = {name: ranks * base[name] for name in measured}
    mean = of_epoch.logarithmic_mean(sum(measured.values()), sum(ideal.values()))
    weight = of_epoch.logarithmic_mean(measured[_EPOCHS], ideal[_EPOCHS]) / mean
    logs = {factor.name: weight * math.log(factor.factor) for factor in of_epochs}
    logs |= {name: (ideal[name] - measured[name]) / mean for name in measured if name != _EPOCHS}
    return of_epoch.factors_of(logs, math.exp(sum(logs.values())))
