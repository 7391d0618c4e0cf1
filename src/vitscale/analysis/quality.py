"""Can this be trusted? Verdicts, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.analysis.environments import oversubscription
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.analysis.trials import TrialResult

Level = Literal["warning", "note"]

_FEWEST_TIMED_STEPS = 5


@dataclass(frozen=True)
class Verdict:
    """One thing a reader must know before believing the figures."""

    kind: str
    """A fixed name: too-few-repeats, baseline-missing, ..."""
    level: Level
    """warning: figures may mislead; note: figures stand, but know this."""
    message: str
    advice: str
    trials: tuple[str, ...] = ()
    """The trials it is about; empty: the whole study."""


def verdicts(trials: Sequence[TrialResult], curves: Sequence[CurveResult], repeats: int) -> tuple[Verdict, ...]:
    """All verdicts on a study, warnings first."""
    measured = [trial for trial in trials if trial.runs]
    found = [
        *_few_repeats(measured),
        *_unfinished(trials, repeats),
        *_baselines(curves),
        *_unlike_repeats(measured),
        *_unlike_points(curves),
        *_mixed_hardware(measured),
        *_oversubscribed(measured),
        *_synchronised(measured),
        *_diverged(measured),
        *_few_steps(measured),
        *_mixed_epochs(curves, trials),
        *_startup(measured),
        *_gradients(measured),
        *_surroundings_changed(measured),
    ]
    return tuple(sorted(found, key=lambda verdict: verdict.level != "warning"))


def _few_repeats(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    one = [trial.trial_id for trial in measured if len(trial.runs) == 1]
    two = [trial.trial_id for trial in measured if 1 < len(trial.runs) < FEWEST_REPEATS]
    if one or two:
        how = [f"{_count(one)} with one run (no interval)"] if one else []
        how += [f"{_count(two)} with 2 runs (the interval is too wide to decide much)"] if two else []
        yield Verdict(
            "too-few-repeats",
            "warning",
            f"too few repeats: {', '.join(how)}",
            f"Set repeats = {FEWEST_REPEATS} or more under [measure] and run the study again: what is done is kept. "
            "From 6 repeats intervals assume no distribution.",
            (*one, *two),
        )


def _unfinished(trials: Sequence[TrialResult], repeats: int) -> Iterable[Verdict]:
    lacking = [trial.trial_id for trial in trials if trial.runs_done < repeats]
    missing = sum(repeats - trial.runs_done for trial in trials if trial.runs_done < repeats)
    if lacking:
        yield Verdict(
            "unfinished",
            "warning",
            f"unfinished: {missing} of {repeats * len(trials)} runs are still to be done",
            "`vitscale run` with the same study and folder does only what is missing.",
            tuple(lacking),
        )


def _baselines(curves: Sequence[CurveResult]) -> Iterable[Verdict]:
    if without := [curve for curve in curves if curve.baseline is None]:
        yield Verdict(
            "baseline-missing",
            "warning",
            f"baseline missing: no run has completed with an epoch time of {_names(without)}",
            "See why they ended under the failed trials; speedup and efficiency need at least one.",
            tuple(point.trial_id for curve in without for point in curve.points),
        )
    if larger := [curve for curve in curves if curve.baseline is not None and curve.baseline.gpus > 1]:
        each = [curve.baseline for curve in larger if curve.baseline is not None]
        yield Verdict(
            "baseline-missing",
            "warning",
            f"baseline missing at one rank: figures of {_names(larger)} are relative to "
            f"{' or '.join(str(gpus) for gpus in sorted({base.gpus for base in each}))} ranks, which looks better than "
            "against one",
            "Add 1 to scaling.gpus, or make the smallest trial fit (a smaller micro_batch, accumulation).",
            tuple(base.trial_id for base in each),
        )


def _unlike_repeats(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    apart = [trial for trial in measured if trial.left_out]
    if apart:
        yield Verdict(
            "unlike-runs",
            "warning",
            f"unlike runs are not combined: of {_count(apart)} some repeats are left out "
            f"({apart[0].trial_id}, {apart[0].left_out[0]})",
            "Run the study again in one folder on one kind of machine with one set of library versions.",
            tuple(trial.trial_id for trial in apart),
        )


def _unlike_points(curves: Sequence[CurveResult]) -> Iterable[Verdict]:
    for curve in curves:
        if curve.unlike:
            yield Verdict(
                "unlike-runs",
                "warning",
                f"unlike runs are not combined: {curve.name} ({curve.mode}) has points that differ from the baseline "
                f"in more than rank count ({curve.unlike[0]}); they have no speedup",
                "Run the whole curve on one kind of machine with one set of library versions.",
                tuple(point.trial_id for point in curve.points if point.speedup is None),
            )


def _mixed_hardware(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    mixed = [trial for trial in measured if trial.surroundings and len(trial.surroundings.devices) > 1]
    if mixed and mixed[0].surroundings:
        yield Verdict(
            "mixed-hardware",
            "warning",
            f"mixed hardware inside {_count(mixed)}: {' and '.join(mixed[0].surroundings.devices)}; the slowest type "
            "sets the pace of every step",
            "Use one device type, or read the figures as those of the slowest.",
            tuple(trial.trial_id for trial in mixed),
        )


def _oversubscribed(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    shared = {trial.trial_id: how for trial in measured for run in trial.records if (how := oversubscription(run))}
    if shared:
        yield Verdict(
            "oversubscribed",
            "warning",
            f"oversubscribed: {_count(shared)} shared cores or GPUs ({next(iter(shared.values()))}); their times say "
            "nothing about scaling",
            "Use fewer ranks or fewer threads_per_rank, so that each rank has cores of its own.",
            tuple(shared),
        )


def _synchronised(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    waiting = _those(measured, lambda trial: any(run.model and run.model.synchronised_timing for run in trial.runs))
    if waiting:
        yield Verdict(
            "synchronised-timing",
            "warning",
            "synchronised timing: the DeepSpeed file's wall_clock_breakdown waits for the device",
            "Remove wall_clock_breakdown from the file for figures that can be compared.",
            waiting,
        )


def _diverged(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    lost = _those(measured, lambda trial: any(loss is None for _, loss in trial.loss_by_step))
    if lost:
        yield Verdict(
            "loss-not-finite",
            "warning",
            f"the loss of {_count(lost)} was not finite at some step: the training diverged",
            "Lower train.learning_rate, or set train.gradient_clipping; the step times stand.",
            lost,
        )


def _few_steps(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    short = {t.trial_id: n for t in measured if (n := min(run.timed_steps for run in t.runs)) < _FEWEST_TIMED_STEPS}
    if short:
        yield Verdict(
            "few-steps",
            "warning",
            f"few steps: {_count(short)} timed fewer than {_FEWEST_TIMED_STEPS} steps a run (as few as "
            f"{min(short.values())})",
            "Train longer (train.epochs or measure.steps), so that the median step is a typical one.",
            tuple(short),
        )


def _mixed_epochs(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Verdict]:
    source = {trial.trial_id: trial.epoch_seconds_source for trial in trials}
    for curve in curves:
        kinds = {source[point.trial_id] for point in curve.points} - {None}
        if len(kinds) > 1:
            yield Verdict(
                "mixed-epoch-times",
                "note",
                f"{curve.name} ({curve.mode}): some epoch times are measured and some extrapolated from steps; a "
                "measured epoch also holds its closing barrier",
                "Train at least one epoch beyond the warm-up steps at every rank count.",
                tuple(point.trial_id for point in curve.points),
            )


def _startup(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    heavy: list[tuple[float, float, TrialResult]] = []
    for trial in measured:
        training = trial.median_of(lambda run: run.training_seconds)
        if trial.startup_seconds is not None and training is not None and trial.startup_seconds > training:
            heavy.append((trial.startup_seconds, training, trial))
    if heavy:
        startup, training, worst = max(heavy, key=lambda item: item[0] / (item[0] + item[1]))
        yield Verdict(
            "startup-dominates",
            "note",
            f"start-up dominates {_count(heavy)}: up to {startup:.1f} s of start-up against {training:.1f} s of "
            f"training ({startup / (startup + training):.0%}; {worst.trial_id})",
            "No step or epoch time holds it, so scaling stands. For the time to a result, train longer per run.",
            tuple(trial.trial_id for _, _, trial in heavy),
        )


def _gradients(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    by_dtype: dict[str, list[str]] = {}
    for trial in measured:
        if dtype := next((run.model.gradient_dtype for run in trial.runs if run.model), None):
            by_dtype.setdefault(dtype, []).append(trial.trial_id)
    if len(by_dtype) > 1:
        each = " and ".join(f"{dtype} in {_count(ids)}" for dtype, ids in by_dtype.items())
        yield Verdict(
            "gradient-dtype",
            "note",
            f"gradients travel as {each}: those trials do not move the same number of bytes",
            "Compare only trials of one dtype where the network matters.",
            tuple(trial for ids in by_dtype.values() for trial in ids),
        )


def _surroundings_changed(measured: Sequence[TrialResult]) -> Iterable[Verdict]:
    around = [trial.surroundings for trial in measured if trial.surroundings]
    changed = []
    if len({one.hosts for one in around if len(one.hosts) == 1}) > 1:
        changed.append("host")
    if len({one.settings for one in around}) > 1:
        changed.append("NCCL or gloo settings")
    if len({one.git_revision for one in around}) > 1:
        changed.append("git revision of the working directory")
    if changed:
        yield Verdict(
            "surroundings-changed",
            "note",
            f"not all trials ran under the same {', '.join(changed)}",
            "See the environment below; run again under one of them if that matters here.",
        )


def _those(measured: Sequence[TrialResult], holds: Callable[[TrialResult], bool]) -> tuple[str, ...]:
    return tuple(trial.trial_id for trial in measured if holds(trial))


def _names(curves: Sequence[CurveResult]) -> str:
    return "; ".join(f"{curve.name} ({curve.mode})" for curve in curves)


def _count(trials: Collection[object]) -> str:
    return f"{len(trials)} trial{'s' if len(trials) != 1 else ''}"
