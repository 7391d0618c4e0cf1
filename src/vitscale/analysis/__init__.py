"""Analysis: records in, results out. Pure: no charts, no torch, and no I/O but that of `analyse_folder`.

statistics    intervals, ratios, comparisons over runs, Student's t
peaks         what GPUs can compute, as published
runs/         what one run says, and which runs count together
time/         where the time of a step goes, from exposure to the waterfall
learning/     accuracy, the noise scale, and whether trials compute the same
trials        one trial: its figures over its runs, which `summaries` makes, and its result among all trials
start_ups     the start-up of each run, without one-off compilations
scaling       speedup and efficiency along a curve; what curves are called
comparisons   curve against curve at equal rank count
claims        published claims as tests
quality/      can this be trusted? what to do?
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from vitscale.analysis.comparisons import CurveComparison, compare_curves
from vitscale.analysis.learning.drift import drift_by_trial
from vitscale.analysis.quality import findings
from vitscale.analysis.scaling import CurveResult, ScalingPoint, base_of, by_mode, scale, trial_names
from vitscale.analysis.start_ups import start_ups_by_trial
from vitscale.analysis.summaries import summarise
from vitscale.analysis.time.waterfall import Factor, Waterfall, waterfalls
from vitscale.analysis.trials import TrialFigures, TrialResult
from vitscale.base.forks import has_other_threads, spread
from vitscale.base.processors import usable_cores
from vitscale.present.document import Finding
from vitscale.present.unread import Unread
from vitscale.store.packs import pack_files
from vitscale.store.reading import folder_of, load, read_study, without_collection, without_lines
from vitscale.store.results import Curve, Results, Run, StudyRecord

__all__ = [
    "Analysis", "CurveComparison", "CurveResult", "Factor", "ScalingPoint", "TrialResult", "Waterfall", "analyse",
    "analyse_folder", "base_of", "by_mode",
]  # fmt: skip


_PACKS_EACH = 5
"""Number of packs that a process has to read at least, for its fork to be worth its cost."""


@dataclass(frozen=True)
class Analysis:
    """All that a results folder says."""

    study: StudyRecord
    trials: Mapping[str, TrialResult]
    """Trials by identity, in the order of the curves; each trial once."""
    curves: tuple[CurveResult, ...]
    problems: tuple[str, ...]
    """What in the records could not be used, and why."""
    unread: tuple[Unread, ...]
    """Finished runs that cannot be read; every answer from this analysis begins with them (`present.unread`)."""
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
        of_results = findings(list(self.trials.values()), self.curves, self.study, self.runs)
        return (*_of_unread(self.unread), *of_results)

    @cached_property
    @without_collection()
    def waterfalls(self) -> tuple[Waterfall, ...]:
        """The waterfall of each trial on each curve, except the baselines."""
        return tuple(waterfall for curve in self.curves for waterfall in waterfalls(curve, self.trials))

    def along(self, curves: Iterable[CurveResult]) -> Iterator[tuple[CurveResult, ScalingPoint, TrialResult]]:
        """(curve, point, trial) of each point of some curves, in their order; a trial on several comes with each."""
        for curve in curves:
            for point in curve.points:
                yield curve, point, self.trials[point.trial_id]

    def curve_of(self, trial_id: str) -> tuple[CurveResult, ScalingPoint] | None:
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
    return _analysis(_figures_by_trial(results, results.study.trials, combine_unlike), results, combine_unlike)


@without_collection()
def analyse_folder(folder: Path, *, combine_unlike: bool = False) -> Analysis:
    """Reads a results folder, or a bundle of it, and analyses it.

    A folder of many runs is read by a fork for each further core, where this process has no thread but its own: each
    reads and summarises the runs of its part of the trials, and hands on what they come to. Of these runs the ranks'
    lines are read again where they are asked for.

    Raises:
        StoreError: the folder does not exist, cannot be read or holds no study.
    """
    named = folder
    folder = folder_of(named)
    count = min(len(usable_cores()), len(pack_files(folder)) // _PACKS_EACH)
    # Packs are read by polars, whose threads a fork would lack.
    if count < 2 or has_other_threads():
        return analyse(load(named), combine_unlike=combine_unlike)
    study = read_study(folder)
    if study is None:
        return analyse(load(named), combine_unlike=combine_unlike)

    def read_part(trials: Sequence[str]) -> _Part:
        loaded = load(folder, frozenset(trials))
        # Figures and `runs` share each run: both get the same one without lines.
        run_without_lines = {id(run): without_lines(folder, run) for run in loaded.runs}
        figures = {
            trial_id: replace(
                of_trial, recorded_runs=tuple(run_without_lines[id(run)] for run in of_trial.recorded_runs)
            )
            for trial_id, of_trial in _figures_by_trial(loaded, trials, combine_unlike).items()
        }
        return _Part(figures, tuple(run_without_lines.values()), loaded.problems, loaded.unread)

    # Packs mostly hold runs in the order of their trials, so each process gets a range of these.
    trials = sorted(study.trials)
    edges = [len(trials) * number // count for number in range(count + 1)]
    parts = spread(read_part, [trials[first:end] for first, end in itertools.pairwise(edges)], fewest=2)
    figures = {
        trial_id: replace(of_trial, trial=study.trials[trial_id])
        for part_read in parts
        for trial_id, of_trial in part_read.figures.items()
    }
    results = Results(
        study=study,
        runs=tuple(run for part_read in parts for run in part_read.runs),
        problems=tuple(dict.fromkeys(problem for part_read in parts for problem in part_read.problems)),
        unread=tuple(dict.fromkeys(unread for part_read in parts for unread in part_read.unread)),
    )
    return _analysis(figures, results, combine_unlike)


class _Part(NamedTuple):
    """What one process has read of a folder."""

    figures: dict[str, TrialFigures]
    runs: tuple[Run, ...]
    problems: tuple[str, ...]
    unread: tuple[Unread, ...]


def _figures_by_trial(results: Results, trials: Iterable[str], combine_unlike: bool) -> dict[str, TrialFigures]:
    """The figures of some trials by identity, each from its own runs alone."""
    study = results.study
    runs: dict[str, list[Run]] = {}
    for run in results.runs:
        runs.setdefault(run.header.trial_id, []).append(run)
    return {
        trial_id: summarise(trial_id, study.trials[trial_id], runs.get(trial_id, []), combine_unlike, study.target_ci)
        for trial_id in trials
    }


def _analysis(figures: Mapping[str, TrialFigures], results: Results, combine_unlike: bool) -> Analysis:
    """The analysis of a study: what all trials say beside each other, then each trial's result, then the curves."""
    study = results.study
    curves = _curves_of_known_trials(study)
    names = trial_names(study.trials, curves)
    start_ups = start_ups_by_trial(figures)
    drifts = drift_by_trial(figures)
    trials = {
        trial_id: TrialResult.of(
            figures[trial_id], start_ups=start_ups[trial_id], drift=drifts[trial_id], name=names[trial_id]
        )
        for trial_id in _in_order_of_curves(study.trials, curves)
    }
    return Analysis(
        study=study,
        trials=trials,
        curves=tuple(scale(curve, trials, combine_unlike) for curve in curves),
        problems=(*results.problems, *_notes(trials.values())),
        unread=results.unread,
        runs=results.runs,
        combine_unlike=combine_unlike,
    )


def _of_unread(unread: Sequence[Unread]) -> Iterator[Finding]:
    """A warning for each file of finished runs that cannot be read."""
    for one in unread:
        yield Finding("unread", "warning", one.reason, f"{one.remedy[:1].upper()}{one.remedy[1:]}.")


def _curves_of_known_trials(study: StudyRecord) -> list[Curve]:
    """The study's curves without points whose trial is not recorded, and without curves that have no other points."""
    curves = []
    for curve in study.curves:
        known = tuple(point for point in curve.points if point.trial_id in study.trials)
        if known:
            curves.append(curve.model_copy(update={"points": known}))
    return curves


def _in_order_of_curves(trials: Iterable[str], curves: Iterable[Curve]) -> list[str]:
    """All trials, each once: first those of the curves, from few ranks to many."""
    on_curves = [point.trial_id for curve in curves for point in sorted(curve.points, key=lambda point: point.gpus)]
    return [*dict.fromkeys([*on_curves, *trials])]


def _notes(trials: Iterable[TrialResult]) -> Iterator[str]:
    """What the records of the combined runs lack, by the names of their trials."""
    for trial in trials:
        for run in trial.run_figures:
            for note in run.notes:
                yield _by_name(note, trial)


def _by_name(note: str, trial: TrialResult) -> str:
    """A note on a run, which begins with its trial's identity, with the trial's name instead: "ddp on 2 ranks ..."."""
    return f"{trial.name}{note.removeprefix(trial.trial_id)}" if note.startswith(trial.trial_id) else note
