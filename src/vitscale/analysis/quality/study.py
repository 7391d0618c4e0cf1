"""Is the study whole, and may its trials be compared with one another?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vitscale.analysis.quality.wording import by_cause, count, imported, names, note, warning, worst
from vitscale.analysis.runs.repeats import half_width
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.analysis.trials import TrialResult, target_status
from vitscale.engines.checks import computation
from vitscale.engines.facts import ONE_PROCESS
from vitscale.present.document import Finding
from vitscale.present.units import listed
from vitscale.present.units import rough_percent as percent
from vitscale.store.results import StudyRecord
from vitscale.trial.rank_batches import needless_micro_steps

_MOST_NAMED = 4
_LEFT_OUT, _LEFT_OUT_MISLEADS = 0.005, 0.03
"""Share of an epoch's images; above the second, an epoch is markedly less work than its name says."""


def few_repeats(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials with only one or two runs."""
    once = [trial.trial_id for trial in measured if len(trial.run_figures) == 1]
    twice = [trial.trial_id for trial in measured if 1 < len(trial.run_figures) < FEWEST_REPEATS]
    if once or twice:
        how = [f"{count(once)} with one run (no interval)"] if once else []
        how += [f"{count(twice)} with 2 runs (which settle no direction)"] if twice else []
        yield warning("too-few-repeats", f"too few repeats: {', '.join(how)}", _more_runs(measured), (*once, *twice))


def _more_runs(measured: Sequence[TrialResult]) -> str:
    if imported(measured):
        return f"Import {FEWEST_REPEATS} or more runs of each setting together: how far runs differ is not known."
    return (
        f"Set repeats = {FEWEST_REPEATS} or more under [measure] and run the study again: what is done is kept. "
        "Each further run narrows the intervals."
    )


def unfinished(trials: Sequence[TrialResult], study: StudyRecord) -> Iterable[Finding]:
    """Runs that are still to be made: those of every trial, and those that `measure.target_ci` may ask for."""
    lacking = [trial for trial in trials if trial.runs_done < study.repeats]
    missing = sum(study.repeats - trial.runs_done for trial in lacking)
    said = [f"{missing} of {study.repeats * len(trials)} runs are still to be done"] if lacking else []
    if study.target_ci is not None and study.max_repeats is not None:
        wanting = [t for t in trials if target_status(t, study.target_ci, study.max_repeats) == "open"]
        if more := sum(study.max_repeats - max(trial.runs_done, study.repeats) for trial in wanting):
            said.append(f"up to {more} more may follow until epoch times are known within {percent(study.target_ci)}")
            lacking += [trial for trial in wanting if trial not in lacking]
    if said:
        yield warning(
            "unfinished",
            f"unfinished: {', and '.join(said)}",
            "`vitscale run` with the same study and folder does only what is missing.",
            lacking,
        )


def target_ci(trials: Sequence[TrialResult], study: StudyRecord) -> Iterable[Finding]:
    """Which trials are known as closely as the study asked, and which stopped before that."""
    target, most = study.target_ci, study.max_repeats
    if target is None or most is None:
        return
    by_status = by_cause(trials, lambda trial: target_status(trial, target, most))
    reached = by_status.get("reached", [])
    share = f"{len(reached)} of {count(trials)}"
    said = []
    if stopped := by_status.get("stopped", []):
        said.append(f"stopped at max_repeats = {most}: {_named(stopped)}")
    if failed := by_status.get("failed", []):
        said.append(f"no runs added, for a run failed: {_named(failed)}")
    if untimed := by_status.get("untimed", []):
        said.append(f"no runs added, for they tell no epoch time: {_named(untimed)}")
    if said:
        yield warning(
            "target-ci-missed",
            f"target_ci missed: {share} reached {percent(target)}; {'; '.join(said)}",
            "Raise measure.max_repeats, or stop what else the machine does, and run the study again: what is done is "
            "kept. Runs that failed are done again with --retry-failed.",
            (*stopped, *failed, *untimed),
        )
    if reached:
        runs = [trial.runs_done for trial in reached]
        after = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
        wider = [trial for trial in reached if (half_width(trial.epoch_seconds) or 0.0) > target]
        but = f"; wider all the same: {_named(wider)}" if wider else ""
        yield note(
            "target-ci-reached",
            f"target_ci reached: {share} have the runs that their first ones asked for to be known within "
            f"{percent(target)}, {after} runs: {_named(reached)}{but}",
            "The first runs decided how many there are, and the later ones how wide the interval is: so it holds the "
            "truth as often as it says, and may come out wider than was asked. For a narrower one set a smaller "
            "measure.target_ci.",
            reached,
        )


def _named(trials: Sequence[TrialResult]) -> str:
    """The names of a few trials, each with how closely it is known."""
    each = [
        f"{trial.name} ({f'within {percent(width)}' if width is not None else 'no interval'})"
        for trial in trials[:_MOST_NAMED]
        for width in [half_width(trial.epoch_seconds)]
    ]
    return ", ".join(each) + (f" and {len(trials) - _MOST_NAMED} more" if len(trials) > _MOST_NAMED else "")


def missing_baselines(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Curves without a baseline; `drift` tells of curves with drifting trials."""
    drifting = {trial.trial_id for trial in trials if trial.drifts}
    unmeasured = [curve for curve in curves if not any(point.trial_id in drifting for point in curve.points)]
    if without := [curve for curve in unmeasured if curve.baseline is None]:
        ids = {point.trial_id for curve in without for point in curve.points}
        untold = all(trial.trial.origin is not None and trial.run_figures for trial in trials if trial.trial_id in ids)
        advice = "Import them with --micro-batch" if untold else "See why they ended under the failed trials"
        yield warning(
            "baseline-missing",
            f"baseline missing: no run has completed with an epoch time or images/s of {names(without)}",
            f"{advice}; speedup and efficiency need at least one.",
            [point for curve in without for point in curve.points],
        )


def baselines_of_several_ranks(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Curves whose baseline has more than one rank."""
    if larger := [curve for curve in curves if curve.baseline is not None and curve.baseline.gpus > 1]:
        each = [curve.baseline for curve in larger if curve.baseline is not None]
        yield warning(
            "baseline-missing",
            f"baseline missing at one rank: figures of {names(larger)} are relative to "
            f"{' or '.join(str(gpus) for gpus in sorted({base.gpus for base in each}))} ranks, which looks better than "
            "against one",
            "Import a run on one GPU too, if there is one."
            if imported(trials)
            else "Add 1 to scaling.gpus, or make the smallest trial fit (a smaller micro_batch, accumulation).",
            each,
        )


def drift(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials that compute something else than those they are compared with."""
    if drifting := [trial for trial in measured if trial.drifts]:
        each = [
            f"{trial.name}: its loss differs by {_difference(own.difference)} from that of "
            f"{own.reference_name} at step {(own.step or 0) + 1} (rounding: up to {own.tolerance:.1g})"
            for trial in drifting[:_MOST_NAMED]
            for own in [trial.drift]
        ]
        more = f"; and {len(drifting) - _MOST_NAMED} more" if len(drifting) > _MOST_NAMED else ""
        yield warning(
            "drift",
            f"drift: {count(drifting)} of {len(measured)} did not train the same. {'; '.join(each)}{more}",
            "Their times are shown, and are in no speedup, efficiency or comparison. What differs is usually in the "
            "engine's own configuration: gradient clipping, gradient averaging, the learning rate's schedule, the "
            "optimizer's epsilon or weight decay.",
            drifting,
        )


def unknown_drift(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials of which nothing says whether they compute the same as those they are compared with."""
    unsure = [trial for trial in measured if _cause_of_unknown_drift(trial) is not None]
    if unsure:
        trials_by_cause = by_cause(unsure, _cause_of_unknown_drift)
        most_different = [max(trials, key=_drift_difference) for trials in trials_by_cause.values()]
        most_different.sort(key=_drift_difference, reverse=True)
        reasons = [trial.drift.reason for trial in most_different[:_MOST_NAMED]]
        yield note(
            "drift-unknown",
            f"equality unknown of {count(unsure)}: {'; '.join(reasons)}",
            "With a lower learning rate, or learning_rate_warmup_steps, trials that compute the same stay together; "
            'two more runs with engine = "none" and other accumulations show how far rounding reaches.',
            unsure,
        )


def training_otherwise(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials of engines that do not train like one process, or do not say, beside some that do."""
    others = [trial for trial in measured if computation(trial.trial) != ONE_PROCESS]
    if others and len(others) < len(measured):
        engines = listed(list(dict.fromkeys(trial.trial.train.wrapper for trial in others)))
        verb = "trains" if len(others) == 1 else "train"
        yield note(
            "trains-otherwise",
            f"{count(others)} of {engines} {verb} otherwise than the others, or nobody knows: in no comparison with "
            "them, and not among the fastest",
            "Compare them by the time to an accuracy (train.target_accuracy).",
            others,
        )


def _cause_of_unknown_drift(trial: TrialResult) -> str | None:
    """Why it is unknown, without the numbers of this trial; None where it is known, or nothing computes the same."""
    if trial.drift.status != "unknown" or trial.drift.reference is None:
        return None
    return trial.drift.reason.rpartition(": ")[2]


def _drift_difference(trial: TrialResult) -> float:
    return trial.drift.difference or 0.0


def _difference(share: float | None) -> str:
    """A relative difference as text, "1.2 %"; a loss that is not finite has no difference."""
    if share is None or share == float("inf"):
        return "all (one of the two is not finite)"
    return percent(share) if share >= 1e-3 else f"{share:.1e}"


def badly_divided(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Points of a constant global batch whose share has no divisor near the micro-batch of the other points."""
    spec = {trial.trial_id: trial.trial.train for trial in trials}
    for curve in curves:
        largest = max((spec[point.trial_id].micro_batch for point in curve.points), default=1)
        cut = {point: needless_micro_steps(spec[point.trial_id], largest) for point in curve.points}
        if curve.mode == "strong-global" and any(cut.values()):
            bad = [(point, how) for point, how in cut.items() if how]
            yield note(
                "badly-divided-batch",
                f"{curve.name}: {'; '.join(f'{point.gpus} ranks take {how}' for point, how in bad)}",
                "Small micro-batches are slow: part of what this curve loses there is no cost of scaling. A global "
                "batch whose shares have larger divisors does not have it.",
                [point for point, _ in bad],
            )


def images_left_out(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose epochs lack more than 0.5 % of the images because of `drop_last`."""
    lacking = worst(measured, lambda trial: trial.images_left_out, _LEFT_OUT)
    if lacking:
        yield (warning if lacking.value > _LEFT_OUT_MISLEADS else note)(
            "images-left-out",
            f"images left out: with drop_last, an epoch of {count(lacking.trials)} lacks more than "
            f"{percent(_LEFT_OUT)} of the images (up to {percent(lacking.value)}, {lacking.trial.name})",
            "Speedup, efficiency and comparisons are per image, and stand. Epoch times and accuracies are those of "
            "fewer images: set train.drop_last = false, or batches that divide the data.",
            lacking.trials,
        )


def mixed_epochs(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Imported curves with some epoch times from steps and some from whole epochs."""
    source = {trial.trial_id: trial.epoch_seconds_source for trial in trials}
    for curve in curves:
        kinds = {source[point.trial_id] for point in curve.points} - {None}
        if len(kinds) > 1:
            yield note(
                "mixed-epoch-times",
                f"{curve.name} ({curve.mode}): some epoch times come from steps and some from whole epochs, which "
                "also hold what lies between steps",
                "Import logs of one kind for every rank count.",
                curve.points,
            )
