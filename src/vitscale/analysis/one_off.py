"""Start-ups that held a one-off compilation, kept out of all start-up figures.

DeepSpeed compiles an extension (fused_adam, cpu_adam) where a machine has none of it yet: minutes in the first run of
an engine, and never again. A record does not tell, but its engine phase does: it is beyond that of the other runs of
the same engine and launcher by more than any run differs.
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
    """The same trials; in runs that compiled, the engine phase is the others' median, and the rest is told apart."""
    groups: dict[tuple[Any, ...], list[tuple[str, int, float]]] = {}
    for trial_id, result in trials.items():
        for place, run in enumerate(result.runs):
            if "engine" in run.startup:
                groups.setdefault(_kind(result), []).append((trial_id, place, run.startup["engine"]))
    mended: dict[str, dict[int, RunFigures]] = {}
    for members in groups.values():
        for index, (trial_id, place, seconds) in enumerate(members):
            others = [other for n, (_, _, other) in enumerate(members) if n != index]
            usual = statistics.median(others) if others else seconds
            if seconds > _TIMES * usual and seconds > usual + _SECONDS_MORE:
                run = trials[trial_id].runs[place]
                mended.setdefault(trial_id, {})[place] = replace(
                    run, startup={**run.startup, "engine": usual}, one_off_seconds=seconds - usual
                )
    return {
        trial_id: with_start_up(result, tuple(mended[trial_id].get(n, run) for n, run in enumerate(result.runs)))
        if trial_id in mended
        else result
        for trial_id, result in trials.items()
    }


def _kind(result: TrialResult) -> tuple[Any, ...]:
    """Runs that build the same engine in the same way."""
    trial = result.trial
    wrapper = (getattr(trial.train, name) for name in sorted(OF_THE_WRAPPER))
    return (trial.launcher, trial.train.device, trial.train.optimizer, trial.model, *wrapper)
