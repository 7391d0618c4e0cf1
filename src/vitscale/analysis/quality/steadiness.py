"""Do runs of one trial agree with one another? One answer for the finding, `predict`, `advise` and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from vitscale.analysis.quality.wording import TrialsAbove, any_imported, counted_trials, trials_above
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.analysis.trials import TrialResult
from vitscale.present.units import rough_percent

RUNS_DIFFER = 0.05
"""Standard deviation of the logarithm of a trial's time, from run to run, above which its runs are unsteady."""


def unsteady_trials(measured: Sequence[TrialResult]) -> TrialsAbove | None:
    """Return the trials whose times differ by more than `RUNS_DIFFER` from run to run, the worst first.

    None where there are none.
    """
    return trials_above(RUNS_DIFFER, measured, figure=spread_of_runs)


def spread_of_runs(trial: TrialResult) -> float | None:
    """Return the standard deviation of the logarithms of a trial's times, which is the relative one where it is small.

    The times are those of epochs; where no run has one, those of mean steps; where none has these, images/s, whose
    logarithms spread as those of times do. None for fewer than three runs.
    """
    epoch_seconds = list(trial.epoch_costs)
    step_seconds = [run.step_seconds for run in trial.run_figures if run.step_seconds is not None]
    rates = [run.images_per_second for run in trial.run_figures if run.images_per_second is not None]
    costs = epoch_seconds or step_seconds or rates
    if len(costs) < FEWEST_REPEATS:
        return None
    return statistics.stdev(math.log(cost) for cost in costs)


def steady_first(measured: Sequence[TrialResult]) -> str:
    """Return a sentence on runs that are too unsteady to conclude from, and what to do first.

    It is empty where they are steady.

    Example: "Run-to-run spread is 58 % (ddp on 1 rank; 4 of 6 trials are above 5 %): first stop what else runs there,
    then add runs (measure.target_ci)."
    """
    unsteady = unsteady_trials(measured)
    if unsteady is None:
        return ""
    verb = "is" if len(unsteady.trials) == 1 else "are"
    share_of_trials = f"{len(unsteady.trials)} of {counted_trials(measured)} {verb} above {rough_percent(RUNS_DIFFER)}"
    if any_imported(unsteady.trials):
        next_step = "first look for what differed between these runs, then import more of each"
    else:
        next_step = "first stop what else runs there, then add runs (measure.target_ci)"
    spread = rough_percent(unsteady.highest)
    return f"Run-to-run spread is {spread} ({unsteady.worst_trial.name}; {share_of_trials}): {next_step}."
