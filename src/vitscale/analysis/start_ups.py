"""The start-up of each run, without compilations that one run pays for and later ones do not.

DeepSpeed compiles an extension (fused_adam, cpu_adam) on a machine that has none of it yet: minutes in the first run of
an engine, and never again. `torch.compile` keeps what it compiled in the first step on disk for the trial's later runs.
A rank records this (`PhaseLine.compiled`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.statistics import known_median
from vitscale.analysis.trials import StartUp, TrialFigures
from vitscale.trial.trial import WRAPPER_FIELDS

_COMPILING_PHASES = ("engine", "first_step")
"""Phases of the start-up in which something may be compiled."""


def start_ups_by_trial(trials: Mapping[str, TrialFigures]) -> dict[str, tuple[StartUp, ...]]:
    """Return trial identity -> the start-up of each of its runs, without the seconds of compilations.

    Where a run compiled something in a phase, the phase gets the median of the runs that do the same work in it and
    compiled nothing. Where no such run is recorded, the phase is left out. `StartUp.one_off` has what was taken out.

    Args:
        trials: the figures of all trials of a study, by identity.
    """
    start_ups: dict[str, list[StartUp]] = {}
    for trial_id, figures in trials.items():
        start_ups[trial_id] = [StartUp(run.phase_seconds, one_off={}) for run in figures.run_figures]
    for phases in _phases_of_same_work(trials):
        usual_seconds = known_median(phase.seconds for phase in phases if not phase.has_compilation)
        for phase in phases:
            if phase.has_compilation:
                trial_start_ups = start_ups[phase.trial.trial_id]
                start_up = trial_start_ups[phase.run_index]
                trial_start_ups[phase.run_index] = _without_compilation(start_up, phase, usual_seconds)
    return {trial_id: tuple(trial_start_ups) for trial_id, trial_start_ups in start_ups.items()}


class _Phase(NamedTuple):
    """A phase of one run's start-up in which something may have been compiled."""

    name: str
    trial: TrialFigures
    run_index: int
    """Index of the run among the trial's runs."""

    @property
    def _run(self) -> RunFigures:
        return self.trial.run_figures[self.run_index]

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank, a compilation included."""
        return self._run.phase_seconds[self.name]

    @property
    def has_compilation(self) -> bool:
        """Whether the run's record says that something was compiled in it."""
        return self.name in self._run.compiled


def _phases_of_same_work(trials: Mapping[str, TrialFigures]) -> Iterator[list[_Phase]]:
    """Yield the phases of all runs that may hold a compilation, those with the same work in one list."""
    phases_by_work: dict[tuple[str, ...], list[_Phase]] = {}
    for figures in trials.values():
        for name in _COMPILING_PHASES:
            phases = [
                _Phase(name, figures, run_index)
                for run_index, run in enumerate(figures.run_figures)
                if name in run.phase_seconds
            ]
            if phases:
                work = (name, *_phase_work(name, figures))
                phases_by_work.setdefault(work, []).extend(phases)
    yield from phases_by_work.values()


def _phase_work(phase: str, figures: TrialFigures) -> tuple[str, ...]:
    """Return a key of the work in a phase: equal where runs build the same engine, or train the same first step."""
    trial = figures.trial
    if phase == "first_step":
        return (figures.trial_id,)
    # As text: a DeepSpeed file is a dict, which cannot be a key.
    wrapper = trial.train.model_dump_json(include=set(WRAPPER_FIELDS))
    return (trial.launcher, trial.train.device, trial.train.optimizer, trial.model.model_dump_json(), wrapper)


def _without_compilation(start_up: StartUp, phase: _Phase, usual_seconds: float | None) -> StartUp:
    """Return the start-up without the compilation in one of its phases.

    Args:
        start_up: the start-up.
        phase: the phase with a compilation.
        usual_seconds: seconds of the phase without one; None where they are unknown, and then the whole phase is taken
            out.
    """
    other_phases = {name: seconds for name, seconds in start_up.phases.items() if name != phase.name}
    if usual_seconds is None:
        return StartUp(other_phases, one_off={**start_up.one_off, phase.name: phase.seconds})
    compiling_seconds = max(0.0, phase.seconds - usual_seconds)
    phases = {**other_phases, phase.name: min(usual_seconds, phase.seconds)}
    return StartUp(phases, one_off={**start_up.one_off, phase.name: compiling_seconds})
