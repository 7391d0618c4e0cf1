"""Analysis: records in, results out. Pure: no I/O, no charts, no torch.

statistics    intervals, ratios, comparisons over runs, Student's t
peaks         what GPUs can compute, as published
runs/         what one run says, and which runs count together
time/         where the time of a step goes, from exposure to the waterfall
learning/     accuracy, the noise scale, and whether trials compute the same
trials        one trial over its runs; `summaries` makes it
scaling       speedup and efficiency along a curve; what curves are called
comparisons   curve against curve at equal rank count
claims        published claims as tests
quality/      can this be trusted? what to do?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vitscale.analysis.comparisons import CurveComparison, compare_curves
from vitscale.analysis.learning.drift import judged
from vitscale.analysis.quality import findings
from vitscale.analysis.scaling import CurveResult, Point, by_mode, named_apart, scale
from vitscale.analysis.summaries import summarise, without_one_off
from vitscale.analysis.time.waterfall import Factor, Waterfall, waterfalls
from vitscale.analysis.trials import TrialResult
from vitscale.base.forks import spread
from vitscale.present.document import Finding
from vitscale.store.reading import without_collection
from vitscale.store.results import Results, Run, StudyRecord

__all__ = [
    "Analysis", "CurveComparison", "CurveResult", "Factor", "Point", "TrialResult", "Waterfall", "analyse", "by_mode",
]  # fmt: skip


_MANY_RUNS = 1000
"""Number of runs from which forking this process is worth its cost."""


@dataclass(frozen=True)
class Analysis:
    """All that a results folder says."""

    study: StudyRecord
    trials: Mapping[str, TrialResult]
    """Trials by identity, in the order of the curves; each trial once."""
    curves: tuple[CurveResult, ...]
    problems: tuple[str, ...]
    """What in the records could not be used, and why."""
    runs: Sequence[Run]
    combine_unlike: bool

    # What only reports show is worked out on demand, so that plan, predict and advise begin sooner.

    @cached_property
    @without_collection()
    def comparisons(self) -> tuple[CurveComparison, ...]:
        """Comparisons of curve against curve at equal rank count."""
        return compare_curves(self.curves, self.trials, self.combine_unlike)

    @cached_property
    @without_collection()
    def findings(self) -> tuple[Finding, ...]:
        """What to know before trusting a figure, and what to do."""
        return findings(list(self.trials.values()), self.curves, self.study, self.runs)

    @cached_property
    @without_collection()
    def waterfalls(self) -> tuple[Waterfall, ...]:
        """The waterfall of each trial on each curve, except the baselines."""
        return tuple(waterfall for curve in self.curves for waterfall in waterfalls(curve, self.trials))

    def curve_of(self, trial_id: str) -> tuple[CurveResult, Point] | None:
        """The first curve that holds a trial, and the trial's point on it."""
        return next(
            ((curve, point) for curve in self.curves for point in curve.points if point.trial_id == trial_id), None
        )


@without_collection()
def analyse(results: Results, *, combine_unlike: bool = False) -> Analysis:
    """Works out every figure of a study.

    Args:
        results: the records.
        combine_unlike: combine runs even if they ran on unlike devices or under other library versions. Otherwise they
            stay apart, and a finding says so.
    """
    study = results.study
    runs: dict[str, list[Run]] = {}
    for run in results.runs:
        runs.setdefault(run.header.trial_id, []).append(run)
    on_curves = [point.trial_id for curve in study.curves for point in sorted(curve.points, key=lambda p: p.gpus)]
    wanted = [trial_id for trial_id in dict.fromkeys([*on_curves, *study.trials]) if trial_id in study.trials]

    def summary(trial_id: str) -> TrialResult:
        return summarise(trial_id, study.trials[trial_id], runs.get(trial_id, []), combine_unlike, study.target_ci)

    def without_records(trial_id: str) -> tuple[TrialResult, list[int]]:
        result = summary(trial_id)
        return replace(result, records=()), [run.header.repeat for run in result.records]

    if len(results.runs) < _MANY_RUNS:
        summaries = {trial_id: summary(trial_id) for trial_id in wanted}
    else:
        summaries = {}
        for trial_id, (result, repeats) in zip(wanted, spread(without_records, wanted, fewest=2), strict=True):
            of_repeat = {run.header.repeat: run for run in runs.get(trial_id, ())}
            records = tuple(of_repeat[repeat] for repeat in repeats)
            summaries[trial_id] = replace(result, trial=study.trials[trial_id], records=records)
    trials = without_one_off(judged(summaries))
    known = [
        curve.model_copy(update={"points": tuple(point for point in curve.points if point.trial_id in trials)})
        for curve in study.curves
    ]
    curves = tuple(scale(curve, trials, combine_unlike) for curve in known if curve.points)
    trials = named_apart(trials, curves)
    notes = [note for trial in trials.values() for run in trial.runs for note in run.notes]
    return Analysis(
        study=study,
        trials=trials,
        curves=curves,
        problems=(*results.problems, *notes),
        runs=results.runs,
        combine_unlike=combine_unlike,
    )
