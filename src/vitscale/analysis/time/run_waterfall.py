"""Works out the waterfall of a whole run, from its start to its end: with start-up, evaluation and a checkpoint.

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
from vitscale.analysis.trials import StartUp, TrialResult

START_UP = "start-up"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
_EPOCHS = "epochs"


def epochs_of(result: TrialResult) -> int | None:
    """Return the epochs of a whole run: those that the trial trains; one where it only measures some steps.

    None where a run ends as soon as it has reached an accuracy: runs of one trial then train unlike numbers of epochs.
    """
    if result.trial.train.target_accuracy is not None:
        return None
    if result.trial.window.steps is not None:
        return 1
    return result.trial.train.epochs or 1


def run_parts(result: TrialResult) -> Mapping[str, float]:
    """Return part -> seconds of a whole run, over its runs: the geometric mean for epochs, as everywhere, else medians.

    There is no "evaluation" where the trial evaluates nothing, and no "checkpoint" where none was measured.

    Raises:
        Unexplained: a part is not known.
    """
    epoch_costs = [] if result.has_rates_alone else result.comparable_costs
    if not epoch_costs:
        raise of_epoch.Unexplained(result.reason or "no run has completed with an epoch time")
    startup_seconds = result.startup_seconds
    if startup_seconds is None:
        raise of_epoch.Unexplained("how long a run takes to start is unknown")
    step_seconds = result.median_of(lambda run: run.step_seconds)
    if step_seconds is None:
        raise of_epoch.Unexplained("how long a step takes is unknown")
    epochs = epochs_of(result)
    if epochs is None:
        raise of_epoch.Unexplained("runs end with the epoch that reaches train.target_accuracy, each with another one")
    parts = {
        START_UP: max(0.0, startup_seconds - step_seconds),
        _EPOCHS: epochs * math.exp(statistics.fmean(math.log(cost) for cost in epoch_costs)),
    }
    if result.trial.window.evaluate:
        evaluation_seconds = result.median_of(lambda run: run.evaluation_seconds)
        if evaluation_seconds is None:
            raise of_epoch.Unexplained("how long an evaluation takes is unknown")
        parts[EVALUATION] = epochs * evaluation_seconds
    if result.checkpoint is not None:
        parts[CHECKPOINT] = result.checkpoint.save_seconds
    return parts


def run_seconds(trial: TrialResult) -> list[float]:
    """Return the seconds of each observation's whole run, the sum of `run_parts`; empty where a part is not known."""
    try:
        parts = run_parts(trial)
    except of_epoch.Unexplained:
        return []
    epochs = epochs_of(trial)
    trained_share = 1 - trial.images_left_out

    def whole_run_seconds(run: RunFigures, start_up: StartUp) -> float | None:
        """R of the module's docstring for one run; None where a part of it is unknown."""
        if epochs is None or run.epoch_seconds is None or start_up.seconds is None:
            return None
        evaluation_seconds = (run.evaluation_seconds or 0.0) if EVALUATION in parts else 0.0
        start_up_seconds = max(0.0, start_up.seconds - (run.step_seconds or 0.0))
        epoch_seconds = run.epoch_seconds / trained_share + evaluation_seconds
        return start_up_seconds + epochs * epoch_seconds + parts.get(CHECKPOINT, 0.0)

    seconds_by_run = [
        whole_run_seconds(run, start_up) for run, start_up in zip(trial.run_figures, trial.start_ups, strict=True)
    ]
    return observations(seconds_by_run, trial.clusters)


def run_breakdown(trial: TrialResult) -> Mapping[str, float]:
    """Return part -> seconds of a whole run: `run_parts`, with the epochs split into `light_step_parts`.

    Raises:
        Unexplained: a part is not known.
    """
    parts = run_parts(trial)
    step_parts = of_epoch.light_step_parts(trial)
    steps_in_run = parts[_EPOCHS] / sum(step_parts.values())
    inside_epochs = {name: steps_in_run * seconds for name, seconds in step_parts.items()}
    outside_epochs = {name: seconds for name, seconds in parts.items() if name != _EPOCHS}
    return inside_epochs | outside_epochs


def run_waterfalls(curve: CurveResult, trials: Mapping[str, TrialResult]) -> tuple[of_epoch.Waterfall, ...]:
    """Return the waterfall of the whole run for each trial of a curve but its baseline."""
    return tuple(_run_waterfall(waterfall, trials) for waterfall in of_epoch.waterfalls(curve, trials))


def _run_waterfall(waterfall: of_epoch.Waterfall, trials: Mapping[str, TrialResult]) -> of_epoch.Waterfall:
    """Return the waterfall of a whole run, from that of an epoch."""
    if waterfall.baseline_trial is None or not waterfall.factors:
        return replace(waterfall, efficiency=None, interval=None)
    trial = trials[waterfall.trial_id]
    reference = trials[waterfall.baseline_trial]
    time_share = of_epoch.ideal_time_share(waterfall.mode, waterfall.baseline_gpus, waterfall.gpus)
    try:
        factors = of_epoch.with_intervals(trial, reference, time_share, _run_factors)
    except of_epoch.Unexplained as unexplained:
        return replace(waterfall, efficiency=None, interval=None, factors=(), reason=str(unexplained))
    efficiency = math.prod(factor.factor for factor in factors)
    speedup = ratio(run_seconds(reference), run_seconds(trial), (reference.deciding_runs, trial.deciding_runs))
    interval = replace(speedup.times(efficiency / speedup.value), value=efficiency)
    return replace(waterfall, efficiency=efficiency, interval=interval, factors=factors)


def _run_factors(trial: TrialResult, reference: TrialResult, time_share: float) -> tuple[of_epoch.Factor, ...]:
    """Return the factors of a whole run's efficiency, without their intervals.

    The formulas, with the parts x of the trial and y of the ideal, are those of the module's docstring.

    Args:
        trial: the trial.
        reference: the baseline.
        time_share: `ideal_time_share` of the two.

    Raises:
        Unexplained: with the reason.
    """
    epoch_factors = of_epoch.step_factors(trial, reference, time_share)
    parts = run_parts(trial)
    reference_parts = run_parts(reference)
    # A checkpoint or an evaluation that was timed on one side alone is in neither run.
    measured = {name: seconds for name, seconds in parts.items() if name in reference_parts}  # x
    ideal = {name: time_share * reference_parts[name] for name in measured}  # y
    mean_of_sums = of_epoch.logarithmic_mean(sum(measured.values()), sum(ideal.values()))  # L(X, Y)
    epochs_weight = of_epoch.logarithmic_mean(measured[_EPOCHS], ideal[_EPOCHS]) / mean_of_sums
    log_factors = {factor.name: epochs_weight * math.log(factor.factor) for factor in epoch_factors}
    for name in measured:
        if name != _EPOCHS:
            log_factors[name] = (ideal[name] - measured[name]) / mean_of_sums
    return of_epoch.factors_of(log_factors, math.exp(sum(log_factors.values())))
