"""Start-ups that held a one-off compilation, kept out of all start-up figures.

DeepSpeed compiles an extension (fused_adam, cpu_adam) where a machine has none of it yet: minutes in the first run of
an engine, and never again. `torch.compile` keeps what it compiled in the first step on disk, for the runs of a trial
that follow. A rank says so (`PhaseLine.compiled`). An older record does not; but the phase is beyond that of the other
runs that do the same by more than any run differs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitscale.analysis.runs import RunFigures
from vitscale.analysis.trials import TrialResult, with_start_up
from vitscale.trial.trial import OF_THE_WRAPPER

_MAY_COMPILE = ("engine", "first_step")
_TIMES, _SECONDS_MORE = 5.0, 20.0
"""A phase is one with a compilation where it is beyond the others' median by both."""


def without_one_off(trials: Mapping[str, TrialResult]) -> dict[str, TrialResult]:
    """The same trials; in runs that compiled, that phase is the others' median, and the rest is told apart.

    Where a run is said to have compiled and no other tells of the phase without, it is left out: unavailable.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, int, RunFigures]]] = {}
    for trial_id, result in trials.items():
        for n, run in enumerate(result.runs):
            for phase in _MAY_COMPILE:
                if phase in run.startup:
                    groups.setdefault((phase, *_kind(phase, result)), []).append((trial_id, n, run))
    mended: dict[str, dict[int, RunFigures]] = {}
    for (phase, *_), members in groups.items():
        for trial_id, n, run in members:
            rest = [other.startup[phase] for _, _, other in members if other is not run and phase not in other.compiled]
            usual = statistics.median(rest) if rest else None
            may_have = phase == "engine" or trials[trial_id].trial.train.compile
            if phase in run.compiled or (may_have and usual is not None and _far_beyond(run.startup[phase], usual)):
                own = mended.setdefault(trial_id, {})
                own[n] = _without(own.get(n, run), phase, usual)
    return {
        trial_id: with_start_up(result, tuple(mended[trial_id].get(n, run) for n, run in enumerate(result.runs)))
        if trial_id in mended
        else result
        for trial_id, result in trials.items()
    }


def _far_beyond(seconds: float, usual: float) -> bool:
    return seconds > _TIMES * usual and seconds > usual + _SECONDS_MORE


def _without(run: RunFigures, phase: str, usual: float | None) -> RunFigures:
    """`usual`: seconds of the phase in other runs; None where there are none."""
    rest = {name: seconds for name, seconds in run.startup.items() if name != phase}
    seconds = run.startup[phase]
    if usual is None:
        return replace(run, startup=rest, one_off={**run.one_off, phase: seconds})
    one_off = {**run.one_off, phase: max(0.0, seconds - usual)}
    return replace(run, startup=rest | {phase: min(usual, seconds)}, one_off=one_off)


def _kind(phase: str, result: TrialResult) -> tuple[Any, ...]:
    """Of runs that do the same in this phase: build the same engine in the same way, or train the same first step."""
    trial = result.trial
    if phase == "first_step":
        return (result.trial_id,)
    # As text: a DeepSpeed file is a dict, which is no key.
    wrapper = trial.train.model_dump_json(include=set(OF_THE_WRAPPER))
    return (trial.launcher, trial.train.device, trial.train.optimizer, trial.model.model_dump_json(), wrapper)
