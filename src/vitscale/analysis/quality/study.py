"""Is the study whole, and may its trials be compared with one another?

Each public function yields the findings on one question. Trials that are `measured` have at least one completed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from vitscale.analysis.quality.wording import (
    any_imported,
    by_cause,
    counted_trials,
    curve_names,
    note,
    trials_above,
    warning,
)
from vitscale.analysis.runs.repeats import half_width
from vitscale.analysis.scaling import CurveResult, ScalingPoint
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.analysis.trials import TargetStatus, TrialResult, target_status
from vitscale.engines.checks import computation
from vitscale.engines.facts import ONE_PROCESS
from vitscale.present.document import Finding
from vitscale.present.units import listed
from vitscale.present.units import rough_percent as percent
from vitscale.store.results import StudyRecord
from vitscale.trial.rank_batches import needless_micro_steps

_MOST_TRIALS_NAMED = 4
"""Most trials that a message names; of the others it says how many there are."""
_REPORTED_SHARE_LEFT_OUT = 0.005
"""Share of an epoch's images above which it is reported that an epoch lacks them."""
_MISLEADING_SHARE_LEFT_OUT = 0.03
"""Share of an epoch's images above which an epoch without them is markedly less work than its name says."""


def few_repeats(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials with only one or two runs."""
    with_one_run = [trial for trial in measured if len(trial.run_figures) == 1]
    with_two_runs = [trial for trial in measured if 1 < len(trial.run_figures) < FEWEST_REPEATS]
    clauses = []
    if with_one_run:
        clauses.append(f"{counted_trials(with_one_run)} with one run (no interval)")
    if with_two_runs:
        clauses.append(f"{counted_trials(with_two_runs)} with 2 runs (which settle no direction)")
    if clauses:
        yield warning(
            "too-few-repeats",
            message=f"too few repeats: {', '.join(clauses)}",
            advice=_advice_to_repeat(measured),
            trials=with_one_run + with_two_runs,
        )


def _advice_to_repeat(measured: Sequence[TrialResult]) -> str:
    """Return how to get more runs of the trials."""
    if any_imported(measured):
        return f"Import {FEWEST_REPEATS} or more runs of each setting together: how far runs differ is not known."
    return (
        f"Set repeats = {FEWEST_REPEATS} or more under [measure] and run the study again: what is done is kept. "
        "Each further run narrows the intervals."
    )


def unfinished(trials: Sequence[TrialResult], study: StudyRecord) -> Iterable[Finding]:
    """Warns of runs that are still to be made: those of every trial, and those that `measure.target_ci` may ask for."""
    unfinished_trials = [trial for trial in trials if trial.runs_done < study.repeats]
    clauses = []
    if unfinished_trials:
        missing_runs = sum(study.repeats - trial.runs_done for trial in unfinished_trials)
        all_runs = study.repeats * len(trials)
        clauses.append(f"{missing_runs} of {all_runs} runs are still to be done")
    runs_that_may_follow = _runs_that_may_follow(trials, study)
    if runs_that_may_follow and study.target_ci is not None:
        most_runs = sum(runs_that_may_follow.values())
        clauses.append(
            f"up to {most_runs} more may follow until epoch times are known within {percent(study.target_ci)}"
        )
    if clauses:
        yield warning(
            "unfinished",
            message=f"unfinished: {', and '.join(clauses)}",
            advice="`vitscale run` with the same study and folder does only what is missing.",
            trials=[trial.trial_id for trial in unfinished_trials] + list(runs_that_may_follow),
        )


def _runs_that_may_follow(trials: Sequence[TrialResult], study: StudyRecord) -> dict[str, int]:
    """Return trial identity -> most runs that `measure.target_ci` may still add to those that every trial has.

    Empty where the study has no target, or no trial may get another run.
    """
    target = study.target_ci
    most_repeats = study.max_repeats
    if target is None or most_repeats is None:
        return {}
    open_trials = [trial for trial in trials if target_status(trial, target, most_repeats) == "open"]
    runs_by_trial = {trial.trial_id: most_repeats - max(trial.runs_done, study.repeats) for trial in open_trials}
    return runs_by_trial if sum(runs_by_trial.values()) else {}


def target_ci(trials: Sequence[TrialResult], study: StudyRecord) -> Iterable[Finding]:
    """Warns of trials that did not get the runs for an interval as narrow as `measure.target_ci`; notes those that did.

    The statuses are those of `target_status`.
    """
    target = study.target_ci
    most_repeats = study.max_repeats
    if target is None or most_repeats is None:
        return
    trials_by_status = by_cause(trials, lambda trial: target_status(trial, target, most_repeats))
    reached = trials_by_status.get("reached", [])
    reached_share = f"{len(reached)} of {counted_trials(trials)}"
    causes: dict[TargetStatus, str] = {
        "stopped": f"stopped at max_repeats = {most_repeats}",
        "failed": "no runs added, for a run failed",
        "untimed": "no runs added, for they tell no epoch time",
    }
    clauses = []
    missed: list[TrialResult] = []
    for status, cause in causes.items():
        trials_of_status = trials_by_status.get(status, [])
        if trials_of_status:
            clauses.append(f"{cause}: {_names_and_widths(trials_of_status)}")
            missed += trials_of_status
    if missed:
        yield warning(
            "target-ci-missed",
            message=f"target_ci missed: {reached_share} reached {percent(target)}; {'; '.join(clauses)}",
            advice="Raise measure.max_repeats, or stop what else the machine does, and run the study again: what is "
            "done is kept. Runs that failed are done again with --retry-failed.",
            trials=missed,
        )
    if reached:
        yield _target_reached(reached, reached_share, target)


def _target_reached(reached: Sequence[TrialResult], reached_share: str, target: float) -> Finding:
    """Return the note on the trials that have as many runs as the target asked for.

    Args:
        reached: these trials.
        reached_share: how many they are, in words: "2 of 3 trials".
        target: the target, `measure.target_ci`.
    """
    run_counts = [trial.runs_done for trial in reached]
    fewest_runs = min(run_counts)
    most_runs = max(run_counts)
    run_range = f"{fewest_runs}" if fewest_runs == most_runs else f"{fewest_runs} to {most_runs}"
    wider_trials = [trial for trial in reached if (half_width(trial.epoch_seconds) or 0.0) > target]
    exception = f"; wider all the same: {_names_and_widths(wider_trials)}" if wider_trials else ""
    return note(
        "target-ci-reached",
        message=f"target_ci reached: {reached_share} have the runs that their first ones asked for to be known within "
        f"{percent(target)}, {run_range} runs: {_names_and_widths(reached)}{exception}",
        advice="The first runs decided how many there are, and the later ones how wide the interval is: so it holds "
        "the truth as often as it says, and may come out wider than was asked. For a narrower one set a smaller "
        "measure.target_ci.",
        trials=reached,
    )


def _names_and_widths(trials: Sequence[TrialResult]) -> str:
    """Return how closely epoch times are known, in words.

    Example: "ddp on 2 ranks (within 3 %), ddp on 4 ranks (no interval) and 2 more".
    """
    texts = []
    for trial in trials[:_MOST_TRIALS_NAMED]:
        width = half_width(trial.epoch_seconds)
        precision = "no interval" if width is None else f"within {percent(width)}"
        texts.append(f"{trial.name} ({precision})")
    more = f" and {len(trials) - _MOST_TRIALS_NAMED} more" if len(trials) > _MOST_TRIALS_NAMED else ""
    return ", ".join(texts) + more


def missing_baselines(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of curves without a baseline: no trial of theirs has a time, so that they have no speedup.

    Curves with drifting trials are left to `drift`, which warns of these trials.
    """
    drifting_ids = {trial.trial_id for trial in trials if trial.drifts}
    without_baseline = [
        curve for curve in curves if curve.baseline is None and drifting_ids.isdisjoint(_trial_ids(curve))
    ]
    if not without_baseline:
        return
    points = list(chain.from_iterable(curve.points for curve in without_baseline))
    trial_ids = {point.trial_id for point in points}
    trials_of_curves = [trial for trial in trials if trial.trial_id in trial_ids]
    names = curve_names(without_baseline)
    if _lack_micro_batch(trials_of_curves):
        advice = "Import them with --micro-batch"
    else:
        advice = "See why they ended under the failed trials"
    yield warning(
        "baseline-missing",
        message=f"baseline missing: no run has completed with an epoch time or images/s of {names}",
        advice=f"{advice}; speedup and efficiency need at least one.",
        trials=points,
    )


def _trial_ids(curve: CurveResult) -> list[str]:
    return [point.trial_id for point in curve.points]


def _lack_micro_batch(trials: Sequence[TrialResult]) -> bool:
    """Whether trials without an epoch time have none because their images per step are unknown.

    So it is if all were imported and have runs with figures: times of steps are then known, but not their images.
    """
    return all(result.trial.origin is not None and result.run_figures for result in trials)


def baselines_of_several_ranks(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of curves whose baseline has more than one rank."""
    curves_above_one_rank = []
    baselines = []
    for curve in curves:
        if curve.baseline is not None and curve.baseline.gpus > 1:
            curves_above_one_rank.append(curve)
            baselines.append(curve.baseline)
    if not baselines:
        return
    rank_counts = sorted({baseline.gpus for baseline in baselines})
    if any_imported(trials):
        advice = "Import a run on one GPU too, if there is one."
    else:
        advice = "Add 1 to scaling.gpus, or make the smallest trial fit (a smaller micro_batch, accumulation)."
    yield warning(
        "baseline-missing",
        message=f"baseline missing at one rank: figures of {curve_names(curves_above_one_rank)} are relative to "
        f"{' or '.join(map(str, rank_counts))} ranks, which looks better than against one",
        advice=advice,
        trials=baselines,
    )


def drift(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials that compute something else than those they are compared with."""
    drifting = [trial for trial in measured if trial.drifts]
    if not drifting:
        return
    clauses = [_drift_clause(trial) for trial in drifting[:_MOST_TRIALS_NAMED]]
    if len(drifting) > _MOST_TRIALS_NAMED:
        clauses.append(f"and {len(drifting) - _MOST_TRIALS_NAMED} more")
    yield warning(
        "drift",
        message=f"drift: {counted_trials(drifting)} of {len(measured)} did not train the same. {'; '.join(clauses)}",
        advice="Their times are shown, and are in no speedup, efficiency or comparison. What differs is usually in the "
        "engine's own configuration: gradient clipping, gradient averaging, the learning rate's schedule, the "
        "optimizer's epsilon or weight decay.",
        trials=drifting,
    )


def _drift_clause(trial: TrialResult) -> str:
    """Return "ddp on 2 ranks: its loss differs by 1.2 % from that of ... at step 7 (rounding: up to 1e-05)"."""
    drift = trial.drift
    step_number = (drift.step or 0) + 1  # messages count from 1
    return (
        f"{trial.name}: its loss differs by {_difference_in_words(drift.difference)} from that of "
        f"{drift.reference_name} at step {step_number} (rounding: up to {drift.tolerance:.1g})"
    )


def _difference_in_words(share: float | None) -> str:
    """Return a relative difference as text: "1.2 %", "3.1e-05"; a phrase where one of the losses is not finite."""
    if share is None or share == float("inf"):
        return "all (one of the two is not finite)"
    return percent(share) if share >= 1e-3 else f"{share:.1e}"


def unknown_drift(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials of which it is unknown whether they compute the same as those they are compared with."""
    trials_by_cause = by_cause(measured, _cause_of_unknown_drift)
    if not trials_by_cause:
        return
    # Of each cause the trial that differs most is named.
    examples = [max(trials, key=_drift_difference) for trials in trials_by_cause.values()]
    examples.sort(key=_drift_difference, reverse=True)
    reasons = [trial.drift.reason for trial in examples[:_MOST_TRIALS_NAMED]]
    unknown_trials = [trial for trial in measured if _cause_of_unknown_drift(trial) is not None]
    yield note(
        "drift-unknown",
        message=f"equality unknown of {counted_trials(unknown_trials)}: {'; '.join(reasons)}",
        advice="With a lower learning rate, or learning_rate_warmup_steps, trials that compute the same stay together; "
        'two more runs with engine = "none" and other accumulations show how far rounding reaches.',
        trials=unknown_trials,
    )


def _cause_of_unknown_drift(trial: TrialResult) -> str | None:
    """Return why a trial's drift is unknown; None where it is known, or no other trial computes the same.

    Numbers of this trial are left out, so that trials of one cause are grouped: "equal over 3 steps, then apart by up
    to 0.1: rounding that ..." gives "rounding that ...".
    """
    if trial.drift.status != "unknown" or trial.drift.reference is None:
        return None
    return trial.drift.reason.rpartition(": ")[2]


def _drift_difference(trial: TrialResult) -> float:
    """Return the largest relative difference of a trial's loss from its reference's; 0 where none is known."""
    return trial.drift.difference or 0.0


def training_otherwise(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials whose engines train otherwise than one process does, where the study has others that train like it.

    An engine trains like one process if its ranks together compute the same updates as one process on the same global
    batch. Of some engines it is not known: they count as training otherwise.
    """
    results_otherwise = [result for result in measured if computation(result.trial) != ONE_PROCESS]
    if not results_otherwise or len(results_otherwise) == len(measured):
        return
    engines = listed(dict.fromkeys(result.trial.train.wrapper for result in results_otherwise))
    verb = "trains" if len(results_otherwise) == 1 else "train"
    yield note(
        "trains-otherwise",
        message=f"{counted_trials(results_otherwise)} of {engines} {verb} otherwise than the others, or nobody knows: "
        "in no comparison with them, and not among the fastest",
        advice="Compare them by the time to an accuracy (train.target_accuracy).",
        trials=results_otherwise,
    )


def badly_divided(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes the points of strong-global curves at which a rank takes small micro-batches because of how it divides.

    Under strong-global the global batch is constant. A rank's share of it is cut into micro-batches of equal size, so
    that a share without a divisor near the curve's largest micro-batch is cut into many small ones, which are slow.
    """
    result_by_id = {trial.trial_id: trial for trial in trials}
    for curve in curves:
        if curve.mode != "strong-global":
            continue
        division_by_point = _bad_divisions(curve, result_by_id)
        if not division_by_point:
            continue
        clauses = [f"{point.gpus} ranks take {division}" for point, division in division_by_point.items()]
        yield note(
            "badly-divided-batch",
            message=f"{curve.name}: {'; '.join(clauses)}",
            advice="Small micro-batches are slow: part of what this curve loses there is no cost of scaling. A global "
            "batch whose shares have larger divisors does not have it.",
            trials=division_by_point,
        )


def _bad_divisions(curve: CurveResult, result_by_id: Mapping[str, TrialResult]) -> dict[ScalingPoint, str]:
    """Return point -> how its share is cut, in words; lacks points with no more micro-batches than they need.

    Example: "37 x 1 of 37 images a rank, where 3 micro-steps would hold them".

    Args:
        curve: the curve.
        result_by_id: trial identity -> its result.
    """
    train_by_point = {point: result_by_id[point.trial_id].trial.train for point in curve.points}
    largest_micro_batch = max((train.micro_batch for train in train_by_point.values()), default=1)
    division_by_point = {}
    for point, train in train_by_point.items():
        division = needless_micro_steps(train, largest_micro_batch)
        if division:
            division_by_point[point] = division
    return division_by_point


def images_left_out(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Reports trials whose epochs lack more than 0.5 % of the images because of `drop_last`."""
    lacking = trials_above(_REPORTED_SHARE_LEFT_OUT, measured, figure=lambda trial: trial.images_left_out)
    if lacking is None:
        return
    warning_or_note = warning if lacking.highest > _MISLEADING_SHARE_LEFT_OUT else note
    yield warning_or_note(
        "images-left-out",
        message=f"images left out: with drop_last, an epoch of {counted_trials(lacking.trials)} lacks more than "
        f"{percent(_REPORTED_SHARE_LEFT_OUT)} of the images (up to {percent(lacking.highest)}, "
        f"{lacking.worst_trial.name})",
        advice="Speedup, efficiency and comparisons are per image, and stand. Epoch times and accuracies are those of "
        "fewer images: set train.drop_last = false, or batches that divide the data.",
        trials=lacking.trials,
    )


def mixed_epochs(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes imported curves with some epoch times from steps and some from whole epochs."""
    source_by_trial = {trial.trial_id: trial.epoch_seconds_source for trial in trials}
    for curve in curves:
        sources = {source_by_trial[point.trial_id] for point in curve.points} - {None}
        if len(sources) > 1:
            yield note(
                "mixed-epoch-times",
                message=f"{curve.name} ({curve.mode}): some epoch times come from steps and some from whole epochs, "
                "which also hold what lies between steps",
                advice="Import logs of one kind for every rank count.",
                trials=curve.points,
            )
