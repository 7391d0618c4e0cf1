"""Is the measurement itself sound: do clocks agree, is every part of a step accounted for, and at what cost?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np

from vitscale.analysis.quality.wording import by_cause, count, note, warning, worst
from vitscale.analysis.runs.steps import LIGHT
from vitscale.analysis.trials import TrialResult
from vitscale.present import units
from vitscale.present.document import Finding
from vitscale.store.lines import Steps
from vitscale.store.records import EpochLine, RankRecord
from vitscale.store.results import Run

percent = units.rough_percent

_OVERHEAD = 0.1
_OVERHEAD_MISLEADS = 0.5
"""Above this the breakdown describes other steps than those that were timed."""
_MISLED = {
    "cpu": "Of the breakdown, the compute parts are blown up by as much.",
    "cuda": "On a GPU that is taken out of launch gaps and other: kernels last as long, but are launched later.",
}
"""Device to what explaining does to a breakdown."""
_ATTACHED = 0.05
_OTHER = 0.03
_OTHER_MISLEADS = 0.2


def clocks(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs whose times contradict one another."""
    odd = [trial for trial in measured if trial.clock_anomalies]
    if odd:
        first = odd[0]
        yield warning(
            "clock-anomaly",
            f"clock anomaly in {count(odd)}: {'; '.join(first.clock_anomalies)} ({first.name})",
            "Do not trust these times. A suspended or migrated virtual machine does this, and so does work between "
            "steps that no step holds: run again on a machine whose clock runs evenly.",
            odd,
        )


def synchronised(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Runs in which something waited for the device within a step."""
    waiting = [trial for trial in measured if any(r.model and r.model.synchronised_timing for r in trial.run_figures)]
    if waiting:
        yield warning(
            "synchronised-timing",
            "synchronised timing: the DeepSpeed file's wall_clock_breakdown waits for the device",
            "Remove wall_clock_breakdown from the file for figures that can be compared.",
            waiting,
        )


def _marks_no_step(trial: TrialResult) -> bool:
    """Whether the trial ran a user's script that has no Probe around its steps."""
    return trial.trial.train.script is not None and not any(run.timed_steps for run in trial.run_figures)


class _NoProfile(Enum):
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
    for cause in _NoProfile:
        trials = trials_by_cause.get(cause)
        if trials:
            yield note(
                kind="profile-missing",
                message=f"profile missing: {_no_profile_clause(cause, trials)}",
                advice=cause.value,
                trials=trials,
            )


def _cause_of_no_profile(trial: TrialResult) -> _NoProfile | None:
    """The cause; None where the trial has a profile, or was imported: no option brings what a log does not tell."""
    if trial.trial.origin is not None:
        return None
    if trial.breakdown is not None:
        parts = trial.breakdown.typical.parts.values()
        has_no_part = set(parts) == {None}
        return _NoProfile.PROFILER_FAILED if has_no_part else None
    if not trial.trial.window.explain:
        return _NoProfile.SWITCHED_OFF
    return _NoProfile.NO_PROBE if _marks_no_step(trial) else _NoProfile.TOO_SHORT


def _no_profile_clause(cause: _NoProfile, trials: Sequence[TrialResult]) -> str:
    consequence = "so that nothing says where the time goes"
    match cause:
        case _NoProfile.SWITCHED_OFF:
            return f"{count(trials)} ran with measure.explain = false, {consequence}"
        case _NoProfile.NO_PROBE:
            return f"the script of {count(trials)} tells of no step, {consequence}"
        case _NoProfile.TOO_SHORT:
            return f"no step of {count(trials)} was explained on all ranks, {consequence}"
        case _NoProfile.PROFILER_FAILED:
            first = trials[0]
            return f"no part of a step of {count(trials)} is known: {_profiler_error(first)} ({first.name})"


def _profiler_error(trial: TrialResult) -> str:
    """The first reason why a part of the trial's step is unknown."""
    reasons = list(trial.breakdown.reasons.values()) if trial.breakdown is not None else []
    return reasons[0] if reasons else "its record is empty"


def timed_whole(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Scripts that told of no step, so that the time of a whole run stands where an epoch's should."""
    whole = [trial for trial in measured if trial.timed_as_a_whole]
    if whole:
        yield warning(
            "timed-as-a-whole",
            f"timed as a whole: the script of {count(whole)} tells of no step, so that "
            f"{units.seconds(whole[0].median_of(lambda run: run.epoch_seconds))} are a whole run, imports included, "
            f"and no epoch ({whole[0].name})",
            "Put a Probe around its step (docs/own-script.md). Until then every figure of an epoch is of a whole run: "
            "start-up is in it, and does not become less with more ranks.",
            whole,
        )


def missing_readings(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes the trials in which a meter of another package failed, or returned what is no number."""
    missing = [
        (trial, rank.rank, line)
        for trial in measured
        for run in trial.recorded_runs
        for rank in run.ranks
        for line in rank.meters
        if line.reason is not None
    ]
    if missing:
        trial, rank, line = missing[0]
        yield note(
            "meter-unavailable",
            f"meter unavailable: {line.reason} (epoch {line.epoch} of rank {rank}, {trial.name}); "
            f"{units.counted(len(missing), 'reading')} in all",
            "These readings are missing in the records, and nothing else: times and throughput stand.",
            [trial for trial, *_ in missing],
        )


def costly_profile(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose explained steps take more than 10 % longer than the timed ones beside them."""
    slowed = worst(measured, lambda trial: trial.breakdown.overhead if trial.breakdown else None, _OVERHEAD)
    if slowed:
        devices = {trial.trial.train.device for trial in slowed.trials}
        misleads = slowed.value > _OVERHEAD_MISLEADS and slowed.trial.trial.train.device == "cpu"
        yield (warning if misleads else note)(
            "explaining-costs",
            f"explaining costs: in {count(slowed.trials)} explained steps take more than {percent(_OVERHEAD)} longer "
            f"than the timed ones beside them (up to {percent(slowed.value)}, {slowed.trial.name})",
            "Times and throughput stand: they hold light steps alone. "
            f"{' '.join(_MISLED[device] for device in sorted(devices))} Larger micro-batches make it small.",
            slowed.trials,
        )


def attached_profiler(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials on GPUs whose timed steps take more than 5 % longer once the profiler has run."""
    slowed = worst(measured, lambda trial: trial.breakdown.attached_overhead if trial.breakdown else None, _ATTACHED)
    if slowed:
        yield note(
            "profiler-stays-attached",
            f"profiler stays attached: in {count(slowed.trials)} steps after the profiler stopped take more than "
            f"{percent(_ATTACHED)} longer than those before it started (up to {percent(slowed.value)}, "
            f"{slowed.trial.name})",
            "Times and throughput stand: all of their steps come before the profiler, and what it adds is taken out of "
            "the breakdown. A process that has profiled once runs at this pace until it ends.",
            slowed.trials,
        )


def unaccounted(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials with more than 3 % of a step in no part."""
    unclear = worst(measured, _other, _OTHER)
    if unclear:
        scripted = all(trial.trial.train.script is not None for trial in unclear.trials)
        if all(trial.trial.origin is not None for trial in unclear.trials):
            more = "traces whose steps are marked tell more"
        elif scripted:
            more = 'a script says what it is at by probe.phase("forward") and the like'
        else:
            more = "measure.traces = true keeps what the profiler saw"
        yield (note if scripted or unclear.value <= _OTHER_MISLEADS else warning)(
            "unaccounted-time",
            f"unaccounted time: in {count(unclear.trials)} more than {percent(_OTHER)} of a step is in no part of the "
            f'breakdown ("other": {percent(unclear.value)} in {unclear.trial.name})',
            f'It is shown as "other", never spread over the parts; {more}.',
            unclear.trials,
        )


def _other(trial: TrialResult) -> float | None:
    """The largest share of a step, over ranks, that is in no part."""
    if trial.breakdown is None:
        return None
    shares = [(rank.parts["other"] or 0.0) / rank.seconds for rank in trial.breakdown.ranks if rank.seconds > 0]
    return max(shares, default=None)


_SHARE = 0.01
_BARRIER_SECONDS = 0.01
"""Time that the barrier at an epoch's end may take besides: in an epoch of a few short steps it is more than 1 %."""


def clock_anomalies(run: Run) -> tuple[str, ...]:
    """Contradictions in a run's times, a phrase for each kind; empty where the clocks agree.

    Every rank counts an epoch between the same two barriers, so the ranks' epochs take equally long. In an epoch of
    light steps alone nothing lies between the steps, so that a rank's steps add up to its epoch. Both must hold within
    1 %, and 10 ms for the closing barrier. Nothing is said of an imported run: who timed it, and between which
    barriers, is not known.
    """
    if run.header.imported is not None:
        return ()
    return tuple(filter(None, (_without_length(run), _steps_against_epochs(run), _ranks_against_ranks(run))))


def _without_length(run: Run) -> str:
    zero = sum(int(np.count_nonzero(Steps.of(rank.steps).seconds <= 0)) for rank in run.ranks)
    return f"{zero} step{'s' if zero != 1 else ''} of no length" if zero else ""


def _steps_against_epochs(run: Run) -> str:
    off: list[tuple[float, str]] = []
    for rank in run.ranks:
        steps = Steps.of(rank.steps)
        light = steps.window == LIGHT
        for epoch in rank.epochs:
            own = steps.epoch == epoch.epoch
            seconds = steps.seconds[own]
            if len(seconds) != epoch.steps or not light[own].all():
                continue  # a line was lost, or the epoch holds the pauses between windows
            difference = float(seconds.sum()) - epoch.seconds
            if _too_far(difference, epoch.seconds):
                off.append((abs(difference) / epoch.seconds, _said(difference, epoch, rank)))
    return max(off, key=lambda pair: pair[0])[1] if off else ""


def _said(difference: float, epoch: EpochLine, rank: RankRecord) -> str:
    how = f"{100 * abs(difference) / epoch.seconds:.1f} % {'more' if difference > 0 else 'less'}"
    return f"the steps of epoch {epoch.epoch} on rank {rank.rank} add up to {how} than the epoch took"


def _ranks_against_ranks(run: Run) -> str:
    by_epoch: dict[int, list[float]] = {}
    for rank in run.ranks:
        for epoch in rank.epochs:
            by_epoch.setdefault(epoch.epoch, []).append(epoch.seconds)
    off: list[tuple[float, str]] = []
    for number, seconds in by_epoch.items():
        difference = max(seconds) - min(seconds)
        if _too_far(difference, min(seconds)):
            share = difference / min(seconds)
            off.append((share, f"epoch {number} took {100 * share:.1f} % longer on one rank than on another"))
    return max(off, key=lambda pair: pair[0])[1] if off else ""


def _too_far(difference: float, seconds: float) -> bool:
    """Whether a difference is beyond what clocks and a barrier explain; never for an epoch without length."""
    return seconds > 0 and abs(difference) > _SHARE * seconds + _BARRIER_SECONDS
