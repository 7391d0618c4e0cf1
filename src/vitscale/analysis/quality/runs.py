"""Did the runs run steadily, warm, long enough, and to some purpose?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vitscale.analysis.quality.steadiness import RUNS_DIFFER, unsteady_trials
from vitscale.analysis.quality.wording import count, imported, note, run_name, warning, worst
from vitscale.analysis.runs.figures import FEWEST_FOR_TAILS, RunFigures
from vitscale.analysis.runs.steps import whole_epochs_alone
from vitscale.analysis.trials import StartUp, TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import rough_percent as percent

_FEWEST_TIMED_STEPS = 5
_STEPS_DIFFER = 0.2
_STEPS_MISLEAD = 0.5
"""Above this no step is typical, and the mean of a few is down to chance."""
_SLOW_SHARE = 0.02
_LEAST_SECONDS = 10.0
_DATA_BOUND = 0.1


def unsteady_runs(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs whose times have a standard deviation above 5 %."""
    if runs := unsteady_trials(measured):
        times = "epoch times" if runs.trial.epoch_costs else "step times" if runs.trial.step_seconds else "images/s"
        yield warning(
            "unstable",
            f"unstable: the {times} of {count(runs.trials)} differ from run to run by more than "
            f"{percent(RUNS_DIFFER)} (standard deviation; {percent(runs.value)} in {runs.trial.name})",
            "Look for what differed between the imported runs, or read each trial's time with its interval."
            if imported(runs.trials)
            else "Stop what else runs on the machine, or give the study nodes of its own; measure.target_ci adds runs "
            "until the interval is narrow enough.",
            runs.trials,
        )


def unsteady_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs in which the middle half of the steps spans more than 20 % of the median."""
    if steps := worst(measured, lambda trial: trial.median_of(lambda run: run.step_spread), _STEPS_DIFFER):
        yield (warning if steps.value > _STEPS_MISLEAD else note)(
            "unstable",
            f"unstable: in {count(steps.trials)} the middle half of a run's steps spans more than "
            f"{percent(_STEPS_DIFFER)} of the median ({percent(steps.value)} in {steps.trial.name})",
            f"Look for other work on the machine, a loader that comes and goes, or clocks that change; runs of "
            f"{FEWEST_FOR_TAILS} steps and more have p95 and p99 beside their step.",
            steps.trials,
        )


def single_slow_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Single slow steps that take more than 2 % of the time and were set aside."""
    if aside := worst(measured, lambda trial: trial.slow_share, _SLOW_SHARE):
        trial = aside.trial
        steps = sum(len(run.slow.set_aside) for run in trial.run_figures)
        all_steps = steps + sum(run.timed_steps for run in trial.run_figures)
        yield note(
            "slow-steps",
            f"slow steps: in {count(aside.trials)} a single slow step took more than {percent(_SLOW_SHARE)} of the "
            f"time and is set aside ({percent(aside.value)} in {steps} of {all_steps} steps of {trial.name})",
            "Times and images/s stand without it; elapsed epochs hold it. Look for what stops the machine: other work, "
            "paging, a kernel that is compiled anew. One event does not say how often it comes; longer runs do.",
            aside.trials,
        )


def recurring_slow_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Slow steps that recur and take more than 2 % of the time."""
    if kept := worst(measured, lambda trial: trial.kept_slow_share, _SLOW_SHARE):
        steps = sum(len(run.slow.kept) for run in kept.trial.run_figures)
        yield warning(
            "slow-steps",
            f"slow steps: in {count(kept.trials)} they recur and stay in every figure "
            f"({percent(kept.value)} of the time in {steps} steps of {kept.trial.name})",
            "Stop what else the machine does and run again; or read these times as what this machine gives.",
            kept.trials,
        )


def slowing_down(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials in which the step times of at least half the runs rise until the end."""
    slowing = [trial for trial in measured if _in_half_of_runs(trial, lambda run: (run.trend or 0.0) > 0)]
    if slowing:
        rises = [run.trend or 0.0 for trial in slowing for run in trial.run_figures]
        yield warning(
            "slowing-down",
            f"slowing down: in {count(slowing)} step times rise through the run (by up to {percent(max(rises))})",
            "Read these times as those of the run's middle."
            if imported(slowing)
            else "Look for heat, falling clocks, memory that fills up and other work; let the machine cool, and train "
            "longer, until the times are level.",
            slowing,
        )


def still_warming_up(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials in which the step times of at least half the runs fall until the end."""
    restless = [trial for trial in measured if _in_half_of_runs(trial, lambda run: (run.trend or 0.0) < 0)]
    if restless:
        falls = [-(run.trend or 0.0) for trial in restless for run in trial.run_figures]
        yield warning(
            "still-warming-up",
            f"still warming up: in {count(restless)} step times go on falling through the run (by up to "
            f"{percent(max(falls))})",
            "Import a longer log, or read these times as too high."
            if imported(restless)
            else "Train longer (train.epochs or measure.steps) and raise measure.warmup_steps, until the times are "
            "level.",
            restless,
        )


def long_warm_up(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials in which at least half the runs were slow still after the marked warm-up."""
    long = [trial for trial in measured if _in_half_of_runs(trial, lambda run: run.detected_warmup_steps > 0)]
    if long:
        trial = max(long, key=_longest_warm_up)
        most = _longest_warm_up(trial)
        marked = trial.trial.window.warmup_steps
        yield note(
            "long-warm-up",
            f"long warm-up: in {count(long)} the first steps after the marked warm-up were slow still and are left out "
            f"of every figure (up to {most} of a run; {trial.name})",
            "Nothing need be done: the times of an imported log stand without them."
            if imported(long)
            else f"Set measure.warmup_steps = {marked + most} to mark them from the beginning (now {marked}).",
            long,
        )


def _in_half_of_runs(trial: TrialResult, condition: Callable[[RunFigures], bool]) -> bool:
    """Whether a condition holds for a run of the trial, and for at least half of its runs."""
    runs = sum(condition(run) for run in trial.run_figures)
    return runs > 0 and 2 * runs >= len(trial.run_figures)


def _longest_warm_up(trial: TrialResult) -> int:
    """Most steps of a run that were slow still after the marked warm-up."""
    return max(run.detected_warmup_steps for run in trial.run_figures)


def few_steps(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs with too few steps for a typical one."""
    # An imported step may be the mean of many steps or of an epoch, and so may a script's whole time: how few steps are
    # behind it is unknown.
    own = [
        trial
        for trial in measured
        if trial.trial.origin is None and not all(map(whole_epochs_alone, trial.recorded_runs))
    ]
    short = {t.trial_id: n for t in own if (n := min(run.timed_steps for run in t.run_figures)) < _FEWEST_TIMED_STEPS}
    if short:
        yield warning(
            "few-steps",
            f"few steps: {count(short)} timed fewer than {_FEWEST_TIMED_STEPS} steps a run (as few as "
            f"{min(short.values())})",
            "Train longer (train.epochs or measure.steps), so that the mean step is a typical one.",
            short,
        )


def short_runs(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs on a GPU that are over before its clocks have come down from their boost."""
    own = [trial for trial in measured if trial.trial.origin is None and trial.trial.train.device == "cuda"]
    short = {
        trial.trial_id: seconds
        for trial in own
        if (seconds := trial.median_of(lambda run: run.training_seconds)) is not None and seconds < _LEAST_SECONDS
    }
    if short:
        yield note(
            "short-runs",
            f"short runs: {count(short)} trained for less than {_LEAST_SECONDS:g} s on a GPU (as little as "
            f"{min(short.values()):.2g} s): boost clocks, not those of a warm device",
            "Train longer (train.epochs or measure.steps) for what the device does for hours.",
            short,
        )


def diverged(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs whose loss was not finite."""
    lost = [trial for trial in measured if any(loss is None for _, loss in trial.loss_by_step)]
    if lost:
        yield warning(
            "loss-not-finite",
            f"the loss of {count(lost)} was not finite at some step: the training diverged",
            "Lower train.learning_rate, or set train.gradient_clipping; the step times stand.",
            lost,
        )


def data_bound(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials that wait for data for more than 10 % of a step."""
    hungry = worst(measured, _data_wait, _DATA_BOUND)
    if hungry:
        data = hungry.trial.trial.data
        rate = hungry.trial.loader.images_per_second
        reads = f"; its loader reads {rate:,.0f} images/s a rank" if rate is not None else ""
        reads += f" from {data.source}" if rate is not None and data.source is not None else ""
        decoded = ', or data.source = "cache"' if data.source == "jpeg" else ""
        others = imported(hungry.trials)  # no file tells their workers
        workers = "" if others else f", with data.workers = {data.workers}{reads}"
        yield warning(
            "data-bound",
            f"data-bound: {count(hungry.trials)} wait for data for more than {percent(_DATA_BOUND)} of a step "
            f"({percent(hungry.value)} in {hungry.trial.name}{workers})",
            "Look at the loader of that training: its workers and their cores, what it reads, and what it decodes; "
            "these figures say how the loader scales."
            if others
            else f"Set data.workers = {2 * data.workers or 2} or more, as far as there are cores for them{decoded}: "
            "until then the figures say how the loader scales.",
            hungry.trials,
        )


def loader_on_the_cores(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose loader takes more than 10 % of the cores that compute, without being waited for (`data_bound`)."""
    not_waiting = [trial for trial in measured if (_data_wait(trial) or 0.0) <= _DATA_BOUND]
    beside = worst(not_waiting, lambda trial: trial.loader.on_the_cores, _DATA_BOUND)
    if beside:
        rate = beside.trial.loader.images_per_second
        reads = f", reading {rate:,.0f} images/s a rank" if rate is not None else ""
        yield warning(
            "loader-on-the-cores",
            f"loader on the ranks' cores: in {count(beside.trials)} its threads were at work for more than "
            f"{percent(_DATA_BOUND)} of the time of the cores that compute ({percent(beside.value)} in "
            f"{beside.trial.name}{reads}), so that computing takes longer there, and no wait shows it",
            'Set data.source = "cache", or leave cores to the loader (fewer ranks): until then the figures say how the '
            "loader scales.",
            beside.trials,
        )


def _data_wait(trial: TrialResult) -> float | None:
    if trial.breakdown is None:
        return None
    typical = trial.breakdown.typical
    waits = typical.parts["data_wait"]
    return waits / typical.seconds if waits is not None and typical.seconds > 0 else None


def one_off_compilation(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes the runs that compiled what later ones find compiled."""
    if compiled := _compilations(measured):
        longest = max(compiled, key=lambda compilation: compilation.seconds)
        phase, run = longest.phase, longest.run
        names = ", ".join(run.compiled[phase])
        longer, than = (" longer", " than in other runs") if phase in longest.start_up.phases else ("", "")
        count_of_runs = len({compilation.run.run for compilation in compiled})
        yield note(
            "one-off-compilation",
            f"the {phase.replace('_', ' ')} of {run_name(longest.trial, run)} took {longest.seconds:.0f} s{longer}"
            f"{' to build' if phase == 'engine' else ''}{than}: a one-off compilation of {names} "
            f"({count_of_runs} run{'s' if count_of_runs > 1 else ''} in all)",
            "It is in no start-up, prediction or advice. A new machine pays it once more: keep "
            f"{'TORCH_EXTENSIONS_DIR' if phase == 'engine' else 'TORCHINDUCTOR_CACHE_DIR'}.",
            [compilation.trial for compilation in compiled],
        )


class _Compilation(NamedTuple):
    """What one run compiled in a phase of its start-up, and later runs find."""

    seconds: float
    phase: str
    run: RunFigures
    start_up: StartUp
    trial: TrialResult


def _compilations(trials: Sequence[TrialResult]) -> list[_Compilation]:
    compilations = []
    for trial in trials:
        for run, start_up in zip(trial.run_figures, trial.start_ups, strict=True):
            for phase, seconds in start_up.one_off.items():
                if seconds > 0:
                    compilations.append(_Compilation(seconds, phase, run, start_up, trial))
    return compilations


def startup_dominates(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose start-up takes longer than their training."""
    heavy: list[tuple[float, float, TrialResult]] = []
    for trial in measured:
        training = trial.median_of(lambda run: run.training_seconds)
        if trial.startup_seconds is not None and training is not None and trial.startup_seconds > training:
            heavy.append((trial.startup_seconds, training, trial))
    if heavy:
        startup, training, most = max(heavy, key=lambda item: item[0] / (item[0] + item[1]))
        yield note(
            "startup-dominates",
            f"start-up dominates {count(heavy)}: up to {startup:.1f} s of start-up against {training:.1f} s of "
            f"training ({startup / (startup + training):.0%}; {most.name})",
            "No step or epoch time holds it, so scaling stands. For the time to a result, train longer per run.",
            [trial for *_, trial in heavy],
        )
