"""Turns the records of a study into results. Pure: no charts, no torch, and no I/O but that of `analyse_folder`.

statistics    intervals, ratios, comparisons over runs, Student's t
runs/         the figures of one run, and which runs count together
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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from vitscale.analysis.comparisons import CurveComparison, compare_curves
from vitscale.analysis.learning.drift import drift_by_trial
from vitscale.analysis.quality import findings
from vitscale.analysis.scaling import CurveResult, ScalingPoint, base_of, by_mode, curve_result, trial_names
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


_FEWEST_PACKS_PER_PROCESS = 5
"""Number of packs (files of many runs) that a process has to read at least, for its fork to be worth its cost."""


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
        """Faults that put figures in doubt, each with advice."""
        study_findings = findings(list(self.trials.values()), self.curves, self.study, self.runs)
        return (*_unread_findings(self.unread), *study_findings)

    @cached_property
    @without_collection()
    def waterfalls(self) -> tuple[Waterfall, ...]:
        """The waterfall of each trial on each curve, except the baselines."""
        return tuple(itertools.chain.from_iterable(waterfalls(curve, self.trials) for curve in self.curves))

    def along(self, curves: Iterable[CurveResult]) -> Iterator[TrialOnCurve]:
        """Yield each point of these curves with its trial, in order; a trial on several curves comes with each."""
        for curve in curves:
            for point in curve.points:
                yield TrialOnCurve(curve, point, self.trials[point.trial_id])

    def curve_of(self, trial_id: str) -> PointOnCurve | None:
        """Return the first curve that a trial is on, with its point; None where it is on none."""
        for curve in self.curves:
            for point in curve.points:
                if point.trial_id == trial_id:
                    return PointOnCurve(curve, point)
        return None


class TrialOnCurve(NamedTuple):
    """A trial where it stands on a curve."""

    curve: CurveResult
    point: ScalingPoint
    trial: TrialResult


class PointOnCurve(NamedTuple):
    """A curve and one of its points."""

    curve: CurveResult
    point: ScalingPoint


@without_collection()
def analyse(results: Results, *, combine_unlike: bool = False) -> Analysis:
    """Work out every figure of a study.

    Args:
        results: the records.
        combine_unlike: combine runs even if they ran on unlike devices or under other library versions. Otherwise they
            stay apart, and a finding says so.
    """
    figures_by_trial = _figures_by_trial(results, results.study.trials, combine_unlike)
    return _analysis_of_figures(figures_by_trial, results, combine_unlike)


@without_collection()
def analyse_folder(folder: Path, *, combine_unlike: bool = False) -> Analysis:
    """Read a results folder, or a bundle of it, and analyse it.

    A folder of many runs is read by a fork for each further core, where this process has no thread but its own: each
    reads and summarises the runs of its part of the trials, and hands on their figures. Of these runs the ranks' lines
    are read again where they are asked for.

    Raises:
        StoreError: the folder does not exist, cannot be read or holds no study.
    """
    results_folder = folder_of(folder)
    packs = len(pack_files(results_folder))
    processes = min(len(usable_cores()), packs // _FEWEST_PACKS_PER_PROCESS)
    # Packs are read by polars, whose threads a fork would lack.
    may_fork = processes >= 2 and not has_other_threads()
    study = read_study(results_folder) if may_fork else None
    if study is None:
        return analyse(load(folder), combine_unlike=combine_unlike)
    parts = _read_in_forks(results_folder, sorted(study.trials), processes, combine_unlike)
    figures_by_trial: dict[str, TrialFigures] = {}
    for part in parts:
        for trial_id, figures in part.figures_by_trial.items():
            # A fork hands on a copy of the trial: all that follows has the study's.
            figures_by_trial[trial_id] = replace(figures, trial=study.trials[trial_id])
    results = Results(
        study=study,
        runs=tuple(itertools.chain.from_iterable(part.runs for part in parts)),
        problems=_unique(part.problems for part in parts),
        unread=_unique(part.unread for part in parts),
    )
    return _analysis_of_figures(figures_by_trial, results, combine_unlike)


class _Part(NamedTuple):
    """The part of a folder that one process has read: some trials, with their runs."""

    figures_by_trial: dict[str, TrialFigures]
    runs: tuple[Run, ...]
    problems: tuple[str, ...]
    unread: tuple[Unread, ...]


def _read_in_forks(folder: Path, trials: Sequence[str], processes: int, combine_unlike: bool) -> list[_Part]:
    """Read and summarise the runs of these trials in several processes.

    Packs mostly hold runs in the order of their trials, so each process gets a range of these.
    """
    bounds = [len(trials) * number // processes for number in range(processes + 1)]  # [0, 3, 7]: trials 0-2 and 3-6
    trials_by_process = [trials[first:end] for first, end in itertools.pairwise(bounds)]
    return spread(lambda part_trials: _read_part(folder, part_trials, combine_unlike), trials_by_process, fewest=2)


def _read_part(folder: Path, trials: Sequence[str], combine_unlike: bool) -> _Part:
    """Read and summarise the runs of some trials. The runs that are handed on read their ranks' lines when needed."""
    loaded = load(folder, frozenset(trials))
    # Figures and `runs` share each run: both get the same one without lines.
    light_run_by_id = {id(run): without_lines(folder, run) for run in loaded.runs}
    figures_by_trial = {}
    for trial_id, figures in _figures_by_trial(loaded, trials, combine_unlike).items():
        recorded_runs = tuple(light_run_by_id[id(run)] for run in figures.recorded_runs)
        figures_by_trial[trial_id] = replace(figures, recorded_runs=recorded_runs)
    return _Part(figures_by_trial, tuple(light_run_by_id.values()), loaded.problems, loaded.unread)


_Item = TypeVar("_Item", bound=Hashable)


def _unique(groups: Iterable[Iterable[_Item]]) -> tuple[_Item, ...]:
    """Return each different item of the groups once, in order."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(groups)))


def _figures_by_trial(results: Results, trials: Iterable[str], combine_unlike: bool) -> dict[str, TrialFigures]:
    """Return trial identity -> its figures from its own runs, for these trials, which may have none."""
    study = results.study
    runs_by_trial: dict[str, list[Run]] = {}
    for run in results.runs:
        runs_by_trial.setdefault(run.header.trial_id, []).append(run)
    figures_by_trial = {}
    for trial_id in trials:
        runs = runs_by_trial.get(trial_id, [])
        figures_by_trial[trial_id] = summarise(trial_id, study.trials[trial_id], runs, combine_unlike, study.target_ci)
    return figures_by_trial


def _analysis_of_figures(
    figures_by_trial: Mapping[str, TrialFigures], results: Results, combine_unlike: bool
) -> Analysis:
    """Return the analysis of a study from the figures of its trials.

    A trial's name, its start-up without compilations that other runs share, and whether its loss drifts from that of
    other trials follow from all trials together. With these each trial gets its result, and each curve its speedups.

    Args:
        figures_by_trial: the figures of each trial of the study by itself.
        results: the study, and all its runs.
        combine_unlike: as for `analyse`.
    """
    study = results.study
    curves = _curves_of_recorded_trials(study)
    names = trial_names(study.trials, curves)
    start_ups = start_ups_by_trial(figures_by_trial)
    drifts = drift_by_trial(figures_by_trial)
    trial_results = {}
    for trial_id in _trials_in_curve_order(study.trials, curves):
        trial_results[trial_id] = TrialResult.of(
            figures_by_trial[trial_id], start_ups=start_ups[trial_id], drift=drifts[trial_id], name=names[trial_id]
        )
    return Analysis(
        study=study,
        trials=trial_results,
        curves=tuple(curve_result(curve, trial_results, combine_unlike) for curve in curves),
        problems=(*results.problems, *_run_notes(trial_results.values())),
        unread=results.unread,
        runs=results.runs,
        combine_unlike=combine_unlike,
    )


def _unread_findings(unread: Sequence[Unread]) -> Iterator[Finding]:
    """Yield a warning for each file of finished runs that cannot be read."""
    for file in unread:
        yield Finding("unread", "warning", file.reason, f"{file.remedy[:1].upper()}{file.remedy[1:]}.")


def _curves_of_recorded_trials(study: StudyRecord) -> list[Curve]:
    """Return the study's curves with those points alone whose trial is recorded; without curves that have none."""
    curves = []
    for curve in study.curves:
        recorded_points = tuple(point for point in curve.points if point.trial_id in study.trials)
        if recorded_points:
            curves.append(curve.model_copy(update={"points": recorded_points}))
    return curves


def _trials_in_curve_order(trials: Iterable[str], curves: Iterable[Curve]) -> list[str]:
    """Return all trials, each once: first those of the curves, from few ranks to many."""
    trials_on_curves = []
    for curve in curves:
        points_by_ranks = sorted(curve.points, key=lambda point: point.gpus)
        trials_on_curves += [point.trial_id for point in points_by_ranks]
    return list(dict.fromkeys([*trials_on_curves, *trials]))


def _run_notes(trials: Iterable[TrialResult]) -> Iterator[str]:
    """Yield the notes on what the combined runs lack, by the names of their trials: "ddp on 2 ranks repeat 1: ..."."""
    for trial in trials:
        for run in trial.run_figures:
            for note in run.notes:
                yield _with_trial_name(note, trial)


def _with_trial_name(note: str, trial: TrialResult) -> str:
    """Return a note on a run with its trial's name in place of the identity that it begins with."""
    if not note.startswith(trial.trial_id):
        return note
    return trial.name + note.removeprefix(trial.trial_id)
