"""Did the runs run steadily, warm, long enough, and to some purpose?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from vitscale.analysis.quality.steadiness import RUNS_DIFFER, unsteady_trials
from vitscale.analysis.quality.wording import any_imported, counted_trials, note, run_name, trials_above, warning
from vitscale.analysis.runs.figures import FEWEST_FOR_TAILS, RunFigures
from vitscale.analysis.runs.steps import has_only_whole_epochs
from vitscale.analysis.trials import StartUp, TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import rough_percent as percent

_FEWEST_TIMED_STEPS = 5
"""Fewest timed steps of a run whose mean step is not reported as one of too few."""
_UNSTEADY_STEP_SPREAD = 0.2
"""Interquartile range of a run's steps, as a share of their median, above which they are unsteady."""
_MISLEADING_STEP_SPREAD = 0.5
"""The same range above which no step is typical, and the mean of a few is down to chance."""
_REPORTED_SLOW_SHARE = 0.02
"""Share of a run's time in slow steps above which they are reported."""
_SHORT_TRAINING_SECONDS = 10.0
"""Training on a GPU that takes less is over before the boost clocks have come down."""
_LARGEST_LOADER_SHARE = 0.1
"""Share of the time that a loader may take, of a step by being waited for or of the cores by its threads."""


def unsteady_runs(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials whose runs' times have a standard deviation above 5 %."""
    unsteady = unsteady_trials(measured)
    if unsteady is None:
        return
    if any_imported(unsteady.trials):
        advice = "Look for what differed between the imported runs, or read each trial's time with its interval."
    else:
        advice = (
            "Stop what else runs on the machine, or give the study nodes of its own; measure.target_ci adds runs "
            "until the interval is narrow enough."
        )
    yield warning(
        "unstable",
        message=f"unstable: the {_compared_times(unsteady.worst_trial)} of {counted_trials(unsteady.trials)} differ "
        f"from run to run by more than {percent(RUNS_DIFFER)} (standard deviation; {percent(unsteady.highest)} in "
        f"{unsteady.worst_trial.name})",
        advice=advice,
        trials=unsteady.trials,
    )


def _compared_times(trial: TrialResult) -> str:
    """Return the name of the figures by which `steadiness.spread_of_runs` compares the runs of the trial."""
    if trial.epoch_costs:
        return "epoch times"
    return "step times" if trial.step_seconds else "images/s"


def unsteady_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Reports runs in which the middle half of the steps spans more than 20 % of the median."""
    unsteady = trials_above(_UNSTEADY_STEP_SPREAD, measured, figure=_step_spread)
    if unsteady is None:
        return
    warning_or_note = warning if unsteady.highest > _MISLEADING_STEP_SPREAD else note
    yield warning_or_note(
        "unstable",
        message=f"unstable: in {counted_trials(unsteady.trials)} the middle half of a run's steps spans more than "
        f"{percent(_UNSTEADY_STEP_SPREAD)} of the median ({percent(unsteady.highest)} in {unsteady.worst_trial.name})",
        advice="Look for other work on the machine, a loader that comes and goes, or clocks that change; runs of "
        f"{FEWEST_FOR_TAILS} steps and more have p95 and p99 beside their step.",
        trials=unsteady.trials,
    )


def _step_spread(trial: TrialResult) -> float | None:
    """Return the interquartile range of a run's steps over their median; median over runs."""
    return trial.median_of(lambda run: run.step_spread)


def single_slow_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes single slow steps that take more than 2 % of the time and were set aside."""
    slow = trials_above(_REPORTED_SLOW_SHARE, measured, figure=lambda trial: trial.slow_share)
    if slow is None:
        return
    trial = slow.worst_trial
    slow_steps = sum(len(run.slow.set_aside) for run in trial.run_figures)
    all_steps = slow_steps + sum(run.timed_steps for run in trial.run_figures)
    yield note(
        "slow-steps",
        message=f"slow steps: in {counted_trials(slow.trials)} a single slow step took more than "
        f"{percent(_REPORTED_SLOW_SHARE)} of the time and is set aside ({percent(slow.highest)} in {slow_steps} of "
        f"{all_steps} steps of {trial.name})",
        advice="Times and images/s stand without it; elapsed epochs hold it. Look for what stops the machine: other "
        "work, paging, a kernel that is compiled anew. One event does not say how often it comes; longer runs do.",
        trials=slow.trials,
    )


def recurring_slow_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of slow steps that recur and take more than 2 % of the time."""
    slow = trials_above(_REPORTED_SLOW_SHARE, measured, figure=lambda trial: trial.kept_slow_share)
    if slow is None:
        return
    slow_steps = sum(len(run.slow.kept) for run in slow.worst_trial.run_figures)
    yield warning(
        "slow-steps",
        message=f"slow steps: in {counted_trials(slow.trials)} they recur and stay in every figure "
        f"({percent(slow.highest)} of the time in {slow_steps} steps of {slow.worst_trial.name})",
        advice="Stop what else the machine does and run again; or read these times as what this machine gives.",
        trials=slow.trials,
    )


def slowing_down(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials in which the step times of at least half the runs rise until the end."""
    slowing = [trial for trial in measured if _holds_in_half_of_runs(trial, _is_slowing_down)]
    if not slowing:
        return
    largest_rise = max(_rise_share(run) for run in _all_run_figures(slowing))
    if any_imported(slowing):
        advice = "Read these times as those of the run's middle."
    else:
        advice = (
            "Look for heat, falling clocks, memory that fills up and other work; let the machine cool, and train "
            "longer, until the times are level."
        )
    yield warning(
        "slowing-down",
        message=f"slowing down: in {counted_trials(slowing)} step times rise through the run (by up to "
        f"{percent(largest_rise)})",
        advice=advice,
        trials=slowing,
    )


def still_warming_up(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials in which the step times of at least half the runs fall until the end."""
    warming_up = [trial for trial in measured if _holds_in_half_of_runs(trial, _is_speeding_up)]
    if not warming_up:
        return
    largest_fall = max(-_rise_share(run) for run in _all_run_figures(warming_up))
    if any_imported(warming_up):
        advice = "Import a longer log, or read these times as too high."
    else:
        advice = (
            "Train longer (train.epochs or measure.steps) and raise measure.warmup_steps, until the times are level."
        )
    yield warning(
        "still-warming-up",
        message=f"still warming up: in {counted_trials(warming_up)} step times go on falling through the run (by up to "
        f"{percent(largest_fall)})",
        advice=advice,
        trials=warming_up,
    )


def _rise_share(run: RunFigures) -> float:
    """Return the share by which the step times of a run rise: 0.1 is 10 % longer in the end, -0.1 is 10 % shorter.

    0 where they are steady.
    """
    return run.trend or 0.0


def _is_slowing_down(run: RunFigures) -> bool:
    return _rise_share(run) > 0


def _is_speeding_up(run: RunFigures) -> bool:
    return _rise_share(run) < 0


def _all_run_figures(trials: Sequence[TrialResult]) -> Iterator[RunFigures]:
    """Return the figures of all runs of these trials."""
    return chain.from_iterable(trial.run_figures for trial in trials)


def long_warm_up(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials in which at least half the runs were slow still after the marked warm-up."""
    warming_up = [result for result in measured if _holds_in_half_of_runs(result, _has_detected_warm_up)]
    if not warming_up:
        return
    result = max(warming_up, key=_most_warm_up_steps)
    detected_steps = _most_warm_up_steps(result)
    marked_steps = result.trial.window.warmup_steps
    if any_imported(warming_up):
        advice = "Nothing need be done: the times of an imported log stand without them."
    else:
        needed_steps = marked_steps + detected_steps
        advice = f"Set measure.warmup_steps = {needed_steps} to mark them from the beginning (now {marked_steps})."
    yield note(
        "long-warm-up",
        message=f"long warm-up: in {counted_trials(warming_up)} the first steps after the marked warm-up were slow "
        f"still and are left out of every figure (up to {detected_steps} of a run; {result.name})",
        advice=advice,
        trials=warming_up,
    )


def _has_detected_warm_up(run: RunFigures) -> bool:
    return run.detected_warmup_steps > 0


def _holds_in_half_of_runs(trial: TrialResult, condition: Callable[[RunFigures], bool]) -> bool:
    """Whether a condition holds for at least half of a trial's runs, and for one or more."""
    runs = sum(condition(run) for run in trial.run_figures)
    return runs > 0 and 2 * runs >= len(trial.run_figures)


def _most_warm_up_steps(trial: TrialResult) -> int:
    """Return how many steps after the marked warm-up were slow still in the run with the most of them."""
    return max(run.detected_warmup_steps for run in trial.run_figures)


def few_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of runs with too few steps for a typical one."""
    short = [
        trial for trial in measured if _has_single_steps(trial) and _fewest_timed_steps(trial) < _FEWEST_TIMED_STEPS
    ]
    if not short:
        return
    fewest = min(_fewest_timed_steps(trial) for trial in short)
    yield warning(
        "few-steps",
        message=f"few steps: {counted_trials(short)} timed fewer than {_FEWEST_TIMED_STEPS} steps a run (as few as "
        f"{fewest})",
        advice="Train longer (train.epochs or measure.steps), so that the mean step is a typical one.",
        trials=short,
    )


def _has_single_steps(result: TrialResult) -> bool:
    """Whether each recorded step of the trial is a single step.

    An imported step may be the mean of many steps or of an epoch, and so may a script's whole time: how few steps are
    behind it is unknown.
    """
    if result.trial.origin is not None:
        return False
    return not all(has_only_whole_epochs(run) for run in result.recorded_runs)


def _fewest_timed_steps(trial: TrialResult) -> int:
    """Return the number of timed steps of the run with the fewest."""
    return min(run.timed_steps for run in trial.run_figures)


def short_runs(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes runs on a GPU that are over before its clocks have come down from their boost."""
    seconds_by_trial: dict[str, float] = {}  # of trials that are too short
    for result in measured:
        ran_here_on_gpu = result.trial.origin is None and result.trial.train.device == "cuda"
        seconds = _training_seconds(result) if ran_here_on_gpu else None
        if seconds is not None and seconds < _SHORT_TRAINING_SECONDS:
            seconds_by_trial[result.trial_id] = seconds
    if not seconds_by_trial:
        return
    yield note(
        "short-runs",
        message=f"short runs: {counted_trials(seconds_by_trial)} trained for less than "
        f"{_SHORT_TRAINING_SECONDS:g} s on a GPU (as little as {min(seconds_by_trial.values()):.2g} s): boost clocks, "
        "not those of a warm device",
        advice="Train longer (train.epochs or measure.steps) for what the device does for hours.",
        trials=seconds_by_trial,
    )


def _training_seconds(trial: TrialResult) -> float | None:
    """Return the seconds of all steps but the first, median over the trial's runs."""
    return trial.median_of(lambda run: run.training_seconds)


def diverged(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials whose loss was not finite at a step."""
    diverging = [trial for trial in measured if _has_loss_that_is_not_finite(trial)]
    if not diverging:
        return
    yield warning(
        "loss-not-finite",
        message=f"the loss of {counted_trials(diverging)} was not finite at some step: the training diverged",
        advice="Lower train.learning_rate, or set train.gradient_clipping; the step times stand.",
        trials=diverging,
    )


def _has_loss_that_is_not_finite(trial: TrialResult) -> bool:
    return any(loss is None for _step, loss in trial.loss_by_step)


def data_bound(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials that wait for data for more than 10 % of a step."""
    waiting = trials_above(_LARGEST_LOADER_SHARE, measured, figure=_data_wait_share)
    if waiting is None:
        return
    if any_imported(waiting.trials):
        loader_clause = ""  # no file states their workers
        advice = (
            "Look at the loader of that training: its workers and their cores, what it reads, and what it decodes; "
            "these figures say how the loader scales."
        )
    else:
        loader_clause = _loader_clause(waiting.worst_trial)
        advice = _loader_advice(waiting.worst_trial)
    yield warning(
        "data-bound",
        message=f"data-bound: {counted_trials(waiting.trials)} wait for data for more than "
        f"{percent(_LARGEST_LOADER_SHARE)} of a step ({percent(waiting.highest)} in {waiting.worst_trial.name}"
        f"{loader_clause})",
        advice=advice,
        trials=waiting.trials,
    )


def _loader_clause(result: TrialResult) -> str:
    """Return ", with data.workers = 2; its loader reads 1,200 images/s a rank from /data", as far as it is known."""
    workers = f", with data.workers = {result.trial.data.workers}"
    rate = result.loader.images_per_second
    if rate is None:
        return workers
    source = result.trial.data.source
    origin = f" from {source}" if source is not None else ""
    return f"{workers}; its loader reads {rate:,.0f} images/s a rank{origin}"


def _loader_advice(result: TrialResult) -> str:
    """Return how the images of a trial come faster."""
    data = result.trial.data
    more_workers = 2 * data.workers if data.workers else 2
    decoded_source = ', or data.source = "cache"' if data.source == "jpeg" else ""
    return (
        f"Set data.workers = {more_workers} or more, as far as there are cores for them{decoded_source}: "
        "until then the figures say how the loader scales."
    )


def loader_on_the_cores(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials whose loader takes more than 10 % of the cores that compute.

    Trials that wait for data are left to `data_bound`.
    """
    not_waiting = [trial for trial in measured if (_data_wait_share(trial) or 0.0) <= _LARGEST_LOADER_SHARE]
    busy = trials_above(_LARGEST_LOADER_SHARE, not_waiting, figure=lambda trial: trial.loader.share_of_cores)
    if busy is None:
        return
    rate = busy.worst_trial.loader.images_per_second
    reading = f", reading {rate:,.0f} images/s a rank" if rate is not None else ""
    yield warning(
        "loader-on-the-cores",
        message=f"loader on the ranks' cores: in {counted_trials(busy.trials)} its threads were at work for more than "
        f"{percent(_LARGEST_LOADER_SHARE)} of the time of the cores that compute ({percent(busy.highest)} in "
        f"{busy.worst_trial.name}{reading}), so that computing takes longer there, and no wait shows it",
        advice='Set data.source = "cache", or leave cores to the loader (fewer ranks): until then the figures say how '
        "the loader scales.",
        trials=busy.trials,
    )


def _data_wait_share(trial: TrialResult) -> float | None:
    """Return the share of the typical rank's step in which it waits for data; None where it is unknown."""
    if trial.breakdown is None:
        return None
    step = trial.breakdown.typical
    wait_seconds = step.parts["data_wait"]
    if wait_seconds is None or step.seconds <= 0:
        return None
    return wait_seconds / step.seconds


class _Compilation(NamedTuple):
    """What one run compiled in a phase of its start-up, and later runs find compiled."""

    seconds: float
    phase: str
    """Name of the phase: "engine" or "first_step"."""
    run: RunFigures
    start_up: StartUp
    trial: TrialResult

    @property
    def is_added_time(self) -> bool:
        """Whether `seconds` are what compiling added to the phase.

        Else they are those of the whole phase, because no run without a compilation shows how long the rest takes.
        """
        return self.phase in self.start_up.phases


def one_off_compilation(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes the runs that compiled what later ones find compiled, with the seconds of the longest compilation."""
    compilations = _compilations(measured)
    if not compilations:
        return
    longest = max(compilations, key=lambda compilation: compilation.seconds)
    compiled_names = ", ".join(longest.run.compiled[longest.phase])
    names_of_runs = {compilation.run.run for compilation in compilations}  # a run may compile in several phases
    runs_text = f"{len(names_of_runs)} run{'s' if len(names_of_runs) > 1 else ''}"
    cache_variable = "TORCH_EXTENSIONS_DIR" if longest.phase == "engine" else "TORCHINDUCTOR_CACHE_DIR"
    yield note(
        "one-off-compilation",
        message=f"{_compilation_clause(longest)}: a one-off compilation of {compiled_names} ({runs_text} in all)",
        advice=f"It is in no start-up, prediction or advice. A new machine pays it once more: keep {cache_variable}.",
        trials=[compilation.trial for compilation in compilations],
    )


def _compilation_clause(compilation: _Compilation) -> str:
    """Return how long a phase of start-up took because of a compilation.

    Example: "the engine of <run> took 80 s longer to build than in other runs"; where all runs compiled, "the engine of
    <run> took 80 s to build".
    """
    phase_of_run = f"the {compilation.phase.replace('_', ' ')} of {run_name(compilation.trial, compilation.run)}"
    purpose = " to build" if compilation.phase == "engine" else ""
    if compilation.is_added_time:
        return f"{phase_of_run} took {compilation.seconds:.0f} s longer{purpose} than in other runs"
    return f"{phase_of_run} took {compilation.seconds:.0f} s{purpose}"


def _compilations(trials: Sequence[TrialResult]) -> list[_Compilation]:
    """Return the compilations of all runs that took time."""
    compilations = []
    for trial in trials:
        for run, start_up in zip(trial.run_figures, trial.start_ups, strict=True):
            for phase, seconds in start_up.one_off.items():
                if seconds > 0:
                    compilations.append(_Compilation(seconds, phase, run, start_up, trial))
    return compilations


class _HeavyStartUp(NamedTuple):
    """A trial whose start-up takes longer than its training."""

    start_up_seconds: float
    training_seconds: float
    trial: TrialResult

    @property
    def share(self) -> float:
        """The start-up as a share of both together."""
        return self.start_up_seconds / (self.start_up_seconds + self.training_seconds)


def startup_dominates(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials whose start-up takes longer than their training."""
    heavy = []
    for trial in measured:
        start_up_seconds = trial.startup_seconds
        training_seconds = _training_seconds(trial)
        if start_up_seconds is None or training_seconds is None:
            continue
        if start_up_seconds > training_seconds:
            heavy.append(_HeavyStartUp(start_up_seconds, training_seconds, trial))
    if not heavy:
        return
    heaviest = max(heavy, key=lambda start_up: start_up.share)
    yield note(
        "startup-dominates",
        message=f"start-up dominates {counted_trials(heavy)}: up to {heaviest.start_up_seconds:.1f} s of start-up "
        f"against {heaviest.training_seconds:.1f} s of training ({heaviest.share:.0%}; {heaviest.trial.name})",
        advice="No step or epoch time holds it, so scaling stands. For the time to a result, train longer per run.",
        trials=[start_up.trial for start_up in heavy],
    )
