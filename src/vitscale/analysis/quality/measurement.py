"""Is the measurement itself sound: do clocks agree, is every part of a step accounted for, and at what cost?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import NamedTuple

import numpy as np

from vitscale.analysis.quality.wording import by_cause, counted_trials, note, trials_above, warning
from vitscale.analysis.runs.steps import LIGHT
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import counted, seconds
from vitscale.present.units import rough_percent as percent
from vitscale.store.lines import Steps
from vitscale.store.records import EpochLine
from vitscale.store.results import Run

_REPORTED_OVERHEAD = 0.1
"""Share by which explained steps take longer above which their cost is reported."""
_MISLEADING_OVERHEAD = 0.5
"""Above this the breakdown describes other steps than those that were timed."""
_EFFECT_OF_EXPLAINING = {
    "cpu": "Of the breakdown, the compute parts are blown up by as much.",
    "cuda": "On a GPU that is taken out of launch gaps and other: kernels last as long, but are launched later.",
}
"""Device -> what explaining does to a breakdown."""
_REPORTED_ATTACHED_OVERHEAD = 0.05
"""Share by which steps take longer once the profiler has run above which that is reported."""
_REPORTED_UNACCOUNTED_SHARE = 0.03
"""Share of a step in no part of the breakdown above which it is reported."""
_MISLEADING_UNACCOUNTED_SHARE = 0.2
"""Above this the breakdown may mislead."""
_LARGEST_CLOCK_DIFFERENCE = 0.01
"""Share of an epoch by which two times of it may differ."""
_BARRIER_SECONDS = 0.01
"""Time that the barrier at an epoch's end may take besides: in an epoch of a few short steps it is more than 1 %."""


def clocks(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of runs whose times contradict one another."""
    contradicting = [trial for trial in measured if trial.clock_anomalies]
    if not contradicting:
        return
    first = contradicting[0]
    anomalies = "; ".join(first.clock_anomalies)
    yield warning(
        "clock-anomaly",
        message=f"clock anomaly in {counted_trials(contradicting)}: {anomalies} ({first.name})",
        advice="Do not trust these times. A suspended or migrated virtual machine does this, and so does work between "
        "steps that no step holds: run again on a machine whose clock runs evenly.",
        trials=contradicting,
    )


def synchronised(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of runs in which something waited for the device within a step."""
    waiting = [trial for trial in measured if _waits_for_device(trial)]
    if not waiting:
        return
    yield warning(
        "synchronised-timing",
        message="synchronised timing: the DeepSpeed file's wall_clock_breakdown waits for the device",
        advice="Remove wall_clock_breakdown from the file for figures that can be compared.",
        trials=waiting,
    )


def _waits_for_device(trial: TrialResult) -> bool:
    """Whether a run of the trial recorded that its engine waits for the device to time the parts of a step."""
    models = [run.model for run in trial.run_figures if run.model is not None]
    return any(model.synchronised_timing for model in models)


class _NoProfileCause(Enum):
    """Why nothing says where the time of a trial's steps goes; the value is the advice."""

    SWITCHED_OFF = (
        "Set measure.explain = true for the breakdown. Reported times hold no explained step either way, and on a GPU "
        "no step after the profiler first started."
    )
    NO_PROBE = "Put a Probe around its step, or let it leave a profiler's traces in {output} (docs/own-script.md)."
    TOO_SHORT = (
        "Train longer (train.epochs or measure.steps): a run must hold several light steps for each explained one. On "
        "a GPU they come last: a run that ends early, at its target accuracy, has none."
    )
    PROFILER_FAILED = (
        "End other profilers of this GPU (Nsight, DCGM's profiling); where only administrators may profile it "
        "(NVreg_RestrictProfilingToAdminUsers), ask one. Times and throughput stand."
    )


def no_profile(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials that do not tell where the time of a step goes, one finding for each cause."""
    trials_by_cause = by_cause(measured, _cause_of_no_profile)
    for cause in _NoProfileCause:
        trials = trials_by_cause.get(cause)
        if trials:
            yield note(
                "profile-missing",
                message=f"profile missing: {_no_profile_clause(cause, trials)}",
                advice=cause.value,
                trials=trials,
            )


def _cause_of_no_profile(result: TrialResult) -> _NoProfileCause | None:
    """Return why a trial has no profile; None where it has one.

    None also for an imported trial: no option brings what its log does not hold.
    """
    if result.trial.origin is not None:
        return None
    if result.breakdown is not None:
        parts = result.breakdown.typical.parts.values()
        has_no_part = set(parts) == {None}
        return _NoProfileCause.PROFILER_FAILED if has_no_part else None
    if not result.trial.window.explain:
        return _NoProfileCause.SWITCHED_OFF
    return _NoProfileCause.NO_PROBE if _marks_no_step(result) else _NoProfileCause.TOO_SHORT


def _marks_no_step(result: TrialResult) -> bool:
    """Whether the trial ran a user's script that has no Probe around its steps."""
    return result.trial.train.script is not None and not any(run.timed_steps for run in result.run_figures)


def _no_profile_clause(cause: _NoProfileCause, trials: Sequence[TrialResult]) -> str:
    """Return in words which trials have no profile, and why."""
    consequence = "so that nothing says where the time goes"
    match cause:
        case _NoProfileCause.SWITCHED_OFF:
            return f"{counted_trials(trials)} ran with measure.explain = false, {consequence}"
        case _NoProfileCause.NO_PROBE:
            return f"the script of {counted_trials(trials)} tells of no step, {consequence}"
        case _NoProfileCause.TOO_SHORT:
            return f"no step of {counted_trials(trials)} was explained on all ranks, {consequence}"
        case _NoProfileCause.PROFILER_FAILED:
            first = trials[0]
            return f"no part of a step of {counted_trials(trials)} is known: {_profiler_error(first)} ({first.name})"


def _profiler_error(trial: TrialResult) -> str:
    """Return the first reason why a part of the trial's step is unknown."""
    reasons = list(trial.breakdown.reasons.values()) if trial.breakdown is not None else []
    return reasons[0] if reasons else "its record is empty"


def timed_whole(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of scripts that mark no step, so that the time of a whole run stands where an epoch's should."""
    without_steps = [trial for trial in measured if trial.timed_as_a_whole]
    if not without_steps:
        return
    first = without_steps[0]
    run_seconds = first.median_of(lambda run: run.epoch_seconds)
    yield warning(
        "timed-as-a-whole",
        message=f"timed as a whole: the script of {counted_trials(without_steps)} tells of no step, so that "
        f"{seconds(run_seconds)} are a whole run, imports included, and no epoch ({first.name})",
        advice="Put a Probe around its step (docs/own-script.md). Until then every figure of an epoch is of a whole "
        "run: start-up is in it, and does not become less with more ranks.",
        trials=without_steps,
    )


class _MissingReading(NamedTuple):
    """A reading that a meter of another package failed to give."""

    trial: TrialResult
    rank: int
    epoch: int
    reason: str


def missing_readings(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes the trials in which a meter of another package failed, or returned what is no number."""
    missing = list(chain.from_iterable(_missing_readings_of(trial) for trial in measured))
    if not missing:
        return
    first = missing[0]
    yield note(
        "meter-unavailable",
        message=f"meter unavailable: {first.reason} (epoch {first.epoch} of rank {first.rank}, {first.trial.name}); "
        f"{counted(len(missing), 'reading')} in all",
        advice="These readings are missing in the records, and nothing else: times and throughput stand.",
        trials=[reading.trial for reading in missing],
    )


def _missing_readings_of(trial: TrialResult) -> Iterator[_MissingReading]:
    """Yield the readings that are missing in the runs of a trial."""
    for run in trial.recorded_runs:
        for rank in run.ranks:
            for line in rank.meters:
                if line.reason is not None:
                    yield _MissingReading(trial, rank.rank, line.epoch, line.reason)


def costly_profile(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Reports trials whose explained steps, which a profiler records, take over 10 % longer than those beside them."""
    slowed = trials_above(_REPORTED_OVERHEAD, measured, figure=_overhead)
    if slowed is None:
        return
    devices = sorted({result.trial.train.device for result in slowed.trials})
    effects = " ".join(_EFFECT_OF_EXPLAINING[device] for device in devices)
    is_on_cpu = slowed.worst_trial.trial.train.device == "cpu"
    is_misleading = is_on_cpu and slowed.highest > _MISLEADING_OVERHEAD
    warning_or_note = warning if is_misleading else note
    yield warning_or_note(
        "explaining-costs",
        message=f"explaining costs: in {counted_trials(slowed.trials)} explained steps take more than "
        f"{percent(_REPORTED_OVERHEAD)} longer than the timed ones beside them (up to {percent(slowed.highest)}, "
        f"{slowed.worst_trial.name})",
        advice=f"Times and throughput stand: they hold light steps alone. {effects} Larger micro-batches make it "
        "small.",
        trials=slowed.trials,
    )


def _overhead(trial: TrialResult) -> float | None:
    """Return how much longer explained steps take (0.03: 3 %); None where that is unknown."""
    return trial.breakdown.overhead if trial.breakdown is not None else None


def attached_profiler(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials on GPUs whose timed steps take more than 5 % longer once the profiler has run."""
    slowed = trials_above(_REPORTED_ATTACHED_OVERHEAD, measured, figure=_attached_overhead)
    if slowed is None:
        return
    yield note(
        "profiler-stays-attached",
        message=f"profiler stays attached: in {counted_trials(slowed.trials)} steps after the profiler stopped take "
        f"more than {percent(_REPORTED_ATTACHED_OVERHEAD)} longer than those before it started (up to "
        f"{percent(slowed.highest)}, {slowed.worst_trial.name})",
        advice="Times and throughput stand: all of their steps come before the profiler, and what it adds is taken out "
        "of the breakdown. A process that has profiled once runs at this pace until it ends.",
        trials=slowed.trials,
    )


def _attached_overhead(trial: TrialResult) -> float | None:
    """Return how much longer steps take with the profiler attached (0.03: 3 %); None where that is unknown."""
    return trial.breakdown.attached_overhead if trial.breakdown is not None else None


def unaccounted(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Reports trials with more than 3 % of a step in no part."""
    unclear = trials_above(_REPORTED_UNACCOUNTED_SHARE, measured, figure=_largest_unaccounted_share)
    if unclear is None:
        return
    are_scripts = all(result.trial.train.script is not None for result in unclear.trials)
    are_imported = all(result.trial.origin is not None for result in unclear.trials)
    if are_imported:
        way_to_know_more = "traces whose steps are marked tell more"
    elif are_scripts:
        way_to_know_more = 'a script says what it is at by probe.phase("forward") and the like'
    else:
        way_to_know_more = "measure.traces = true keeps what the profiler saw"
    is_misleading = unclear.highest > _MISLEADING_UNACCOUNTED_SHARE and not are_scripts
    warning_or_note = warning if is_misleading else note
    yield warning_or_note(
        "unaccounted-time",
        message=f"unaccounted time: in {counted_trials(unclear.trials)} more than "
        f"{percent(_REPORTED_UNACCOUNTED_SHARE)} of a step is "
        f'in no part of the breakdown ("other": {percent(unclear.highest)} in {unclear.worst_trial.name})',
        advice=f'It is shown as "other", never spread over the parts; {way_to_know_more}.',
        trials=unclear.trials,
    )


def _largest_unaccounted_share(trial: TrialResult) -> float | None:
    """Return the largest share of a step, over ranks, that is in no part; None where no step was explained."""
    if trial.breakdown is None:
        return None
    shares = []
    for rank in trial.breakdown.ranks:
        if rank.seconds > 0:
            shares.append((rank.parts["other"] or 0.0) / rank.seconds)
    return max(shares, default=None)


def clock_anomalies(run: Run) -> tuple[str, ...]:
    """Return the contradictions in a run's times, a phrase for each kind; empty where the clocks agree.

    Every rank counts an epoch between the same two barriers, so the ranks' epochs take equally long. In an epoch of
    light steps alone nothing lies between the steps, so that a rank's steps add up to its epoch. Both must hold within
    1 %, and 10 ms for the closing barrier. Nothing is said of an imported run: who timed it, and between which
    barriers, is not known.
    """
    if run.header.imported is not None:
        return ()
    contradictions = (_steps_without_length(run), _epoch_against_its_steps(run), _epoch_against_other_ranks(run))
    return tuple(phrase for phrase in contradictions if phrase)


def _steps_without_length(run: Run) -> str:
    """Return "2 steps of no length"; empty where every step took time."""
    steps = sum(int(np.count_nonzero(Steps.of(rank.steps).seconds <= 0)) for rank in run.ranks)
    if steps == 0:
        return ""
    return f"{steps} step{'s' if steps != 1 else ''} of no length"


class _Contradiction(NamedTuple):
    """Two times of one epoch that differ by more than clocks and a barrier explain."""

    share: float
    """Their difference / the epoch's seconds."""
    phrase: str


def _largest_contradiction(contradictions: Sequence[_Contradiction]) -> str:
    """Return the phrase of the largest one; empty without any."""
    if not contradictions:
        return ""
    return max(contradictions, key=lambda contradiction: contradiction.share).phrase


def _epoch_against_its_steps(run: Run) -> str:
    """Return a phrase on the epoch whose steps add up to a sum that differs most from its time; empty if all agree."""
    contradictions = []
    for rank in run.ranks:
        steps = Steps.of(rank.steps)
        for epoch in rank.epochs:
            contradiction = _steps_contradiction(rank.rank, epoch, steps)
            if contradiction is not None:
                contradictions.append(contradiction)
    return _largest_contradiction(contradictions)


def _steps_contradiction(rank: int, epoch: EpochLine, steps: Steps) -> _Contradiction | None:
    """Return how the steps of an epoch contradict its time; None where they agree, or cannot be compared.

    Args:
        rank: the rank that recorded them.
        epoch: its line of the epoch.
        steps: its steps of all epochs.
    """
    is_in_epoch = steps.epoch == epoch.epoch
    step_seconds = steps.seconds[is_in_epoch]
    is_light = steps.window[is_in_epoch] == LIGHT
    if len(step_seconds) != epoch.steps or not is_light.all():
        return None  # a line was lost, or the epoch has pauses before and after its explained steps
    difference = float(step_seconds.sum()) - epoch.seconds
    if not _is_contradiction(difference, epoch.seconds):
        return None
    direction = "more" if difference > 0 else "less"
    percentage = 100 * abs(difference) / epoch.seconds
    return _Contradiction(
        share=abs(difference) / epoch.seconds,
        phrase=f"the steps of epoch {epoch.epoch} on rank {rank} add up to {percentage:.1f} % {direction} than the "
        "epoch took",
    )


def _epoch_against_other_ranks(run: Run) -> str:
    """Return a phrase on the epoch whose times differ most between ranks; empty where all agree."""
    seconds_by_epoch: dict[int, list[float]] = {}
    for rank in run.ranks:
        for epoch in rank.epochs:
            seconds_by_epoch.setdefault(epoch.epoch, []).append(epoch.seconds)
    contradictions = []
    for epoch_number, rank_seconds in seconds_by_epoch.items():
        shortest = min(rank_seconds)
        difference = max(rank_seconds) - shortest
        if _is_contradiction(difference, shortest):
            share = difference / shortest
            phrase = f"epoch {epoch_number} took {100 * share:.1f} % longer on one rank than on another"
            contradictions.append(_Contradiction(share, phrase))
    return _largest_contradiction(contradictions)


def _is_contradiction(difference: float, epoch_seconds: float) -> bool:
    """Whether two times of an epoch differ by more than clocks and a barrier explain; never if it has no length."""
    largest_difference = _LARGEST_CLOCK_DIFFERENCE * epoch_seconds + _BARRIER_SECONDS
    return epoch_seconds > 0 and abs(difference) > largest_difference
