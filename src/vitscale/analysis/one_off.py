"""Start-ups that held a one-off compilation, kept out of all start-up figures.

DeepSpeed compiles an extension (fused_adam, cpu_adam) where a machine has none of it yet: minutes in the first run of
an engine, and never again. A rank says so (`PhaseLine.compiled`). An older record does not; but its engine phase is
beyond that of the other runs of the same engine and launcher by more than any run differs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitscale.analysis.runs import RunFigures
from vitscale.analysis.trials import TrialResult, with_start_up
from vitscale.trial import OF_THE_WRAPPER

_TIMES, _SECONDS_MORE = 5.0, 20.0
"""An engine phase is one with a compilation where it is beyond the others' median by both."""


def without_one_off(trials: Mapping[str, TrialResult]) -> dict[str, TrialResult]:
    """The same trials; in runs that compiled, the engine phase is the others' median, and the rest is told apart.

    Where a run is said to have compiled and no other tells of the engine without, that phase is left out: unavailable.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, int, RunFigures]]] = {}
    for trial_id, result in trials.items():
        for n, run in enumerate(result.runs):
            if "engine" in run.startup:
                groups.setdefault(_kind(result), []).append((trial_id, n, run))
    mended: dict[str, dict[int, RunFigures]] = {}
    for members in groups.values():
        for trial_id, n, run in members:
            others = [other.startup["engine"] for _, _, other in members if other is not run and not other.compiled]
            usual = statistics.median(others) if others else None
            if run.compiled or (usual is not None and _far_beyond(run.startup["engine"], usual)):
                mended.setdefault(trial_id, {})[n] = _without(run, usual)
    return {
        trial_id: with_start_up(result, tuple(mended[trial_id].get(n, run) for n, run in enumerate(result.runs)))
        if trial_id in mended
        else result
        for trial_id, result in trials.items()
    }


def _far_beyond(seconds: float, usual: float) -> bool:
    return seconds > _TIMES * usual and seconds > usual + _SECONDS_MORE


def _without(run: RunFigures, usual: float | None) -> RunFigures:
    """`usual`: seconds of the engine phase in other runs; None where there are none."""
    rest = {phase: seconds for phase, seconds in run.startup.items() if phase != "engine"}
    seconds = run.startup["engine"]
    if usual is None:
        return replace(run, startup=rest, one_off_seconds=seconds)
    return replace(run, startup=rest | {"engine": min(usual, seconds)}, one_off_seconds=max(0.0, seconds - usual))


def _kind(result: TrialResult) -> tuple[Any, ...]:
    """Runs that build the same engine in the same way."""
    trial = result.trial
    # As text: a DeepSpeed file is a dict, which is no key.
    wrapper = trial.train.model_dump_json(include=set(OF_THE_WRAPPER))
    return (trial.launcher, trial.train.device, trial.train.optimizer, trial.model.model_dump_json(), wrapper)
