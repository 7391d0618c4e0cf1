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

_MAY_COMPILE = ("engine", "first_step")
"""Phases of the start-up in which something may be compiled."""


def start_ups_by_trial(trials: Mapping[str, TrialFigures]) -> dict[str, tuple[StartUp, ...]]:
    """The start-ups of each trial's runs, in their order; what was compiled is beside the phases, in `one_off`.

    Where a run compiled, a phase gets the median of the runs that do the same and did not. Where no such run is
    recorded, the phase is left out: unavailable.

    Args:
        trials: the figures of all trials of a study, by identity.
    """
    start_ups = {
        trial_id: [StartUp(run.phase_seconds, one_off={}) for run in figures.run_figures]
        for trial_id, figures in trials.items()
    }
    for alike in _alike_phases(trials):
        usual_seconds = known_median(phase.seconds for phase in alike if not phase.has_compilation)
        for phase in alike:
            if phase.has_compilation:
                of_trial = start_ups[phase.trial.trial_id]
                of_trial[phase.place] = _without_compilation(of_trial[phase.place], phase, usual_seconds)
    return {trial_id: tuple(of_trial) for trial_id, of_trial in start_ups.items()}


class _Phase(NamedTuple):
    """A phase of one run's start-up in which something may have been compiled."""

    name: str
    trial: TrialFigures
    place: int
    """Place of the run among the trial's runs."""

    @property
    def _run(self) -> RunFigures:
        return self.trial.run_figures[self.place]

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank, a compilation included."""
        return self._run.phase_seconds[self.name]

    @property
    def has_compilation(self) -> bool:
        """Whether the run's record says that something was compiled in it."""
        return self.name in self._run.compiled


def _alike_phases(trials: Mapping[str, TrialFigures]) -> Iterator[list[_Phase]]:
    """The phases of all runs that may hold a compilation; those in which the same is done come together."""
    groups: dict[tuple[str, ...], list[_Phase]] = {}
    for figures in trials.values():
        for name in _MAY_COMPILE:
            phases = [
                _Phase(name, figures, place)
                for place, run in enumerate(figures.run_figures)
                if name in run.phase_seconds
            ]
            if phases:
                groups.setdefault((name, *_work_of_phase(name, figures)), []).extend(phases)
    yield from groups.values()


def _work_of_phase(phase: str, figures: TrialFigures) -> tuple[str, ...]:
    """What runs share that do the same in a phase: the engine that they build, or the first step that they train."""
    trial = figures.trial
    if phase == "first_step":
        return (figures.trial_id,)
    # As text: a DeepSpeed file is a dict, which cannot be a key.
    wrapper = trial.train.model_dump_json(include=set(WRAPPER_FIELDS))
    return (trial.launcher, trial.train.device, trial.train.optimizer, trial.model.model_dump_json(), wrapper)


def _without_compilation(start_up: StartUp, phase: _Phase, usual: float | None) -> StartUp:
    """The start-up with the `usual` seconds of a phase that holds a compilation; without the phase where it is None."""
    others = {name: seconds for name, seconds in start_up.phases.items() if name != phase.name}
    if usual is None:
        return StartUp(others, one_off={**start_up.one_off, phase.name: phase.seconds})
    compiling = max(0.0, phase.seconds - usual)
    phases = {**others, phase.name: min(usual, phase.seconds)}
    return StartUp(phases, one_off={**start_up.one_off, phase.name: compiling})
