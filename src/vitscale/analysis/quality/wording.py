"""How findings on figures are made, and the words that they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import About, Finding
from vitscale.present.units import counted

_Cause = TypeVar("_Cause", bound=Hashable)


class _HasTrialId(Protocol):
    """A trial, or a point of a curve."""

    @property
    def trial_id(self) -> str: ...


def warning(kind: str, message: str, advice: str, trials: Iterable[_HasTrialId | str] = ()) -> Finding:
    """Return a finding on figures that may mislead.

    Args:
        kind: the fixed name of the finding: "unfinished", "drift", ...
        message: what is the matter.
        advice: what to do about it.
        trials: the trials concerned, points of a curve, or their identities; none where it concerns the whole study.
    """
    return Finding(kind, "warning", message, advice, About(trials=_trial_ids(trials)))


def note(kind: str, message: str, advice: str, trials: Iterable[_HasTrialId | str] = ()) -> Finding:
    """Return a finding on figures that stand: something to know about them. Arguments are those of `warning`."""
    return Finding(kind, "note", message, advice, About(trials=_trial_ids(trials)))


def _trial_ids(trials: Iterable[_HasTrialId | str]) -> tuple[str, ...]:
    """Return the identities of the trials, each once, in the order of the trials."""
    ids = [trial if isinstance(trial, str) else trial.trial_id for trial in trials]
    return tuple(dict.fromkeys(ids))


def by_cause(
    trials: Iterable[TrialResult], cause_of: Callable[[TrialResult], _Cause | None]
) -> dict[_Cause, list[TrialResult]]:
    """Return cause -> the trials that it holds for, in the order of the trials; trials without a cause are left out."""
    trials_by_cause: dict[_Cause, list[TrialResult]] = {}
    for trial in trials:
        cause = cause_of(trial)
        if cause is not None:
            trials_by_cause.setdefault(cause, []).append(trial)
    return trials_by_cause


class TrialsAbove(NamedTuple):
    """The trials whose figure is above a limit."""

    highest: float
    """The highest figure."""
    worst_trial: TrialResult
    """The trial with the highest figure."""
    trials: tuple[TrialResult, ...]
    """All trials above the limit, the highest figure first."""


def trials_above(
    limit: float, measured: Sequence[TrialResult], figure: Callable[[TrialResult], float | None]
) -> TrialsAbove | None:
    """Return the trials whose figure is known and above `limit`; None where there are none.

    Args:
        limit: the figure from which on trials are reported.
        measured: the trials to choose from.
        figure: trial -> its figure; None where it is unknown.
    """
    above = []
    for trial in measured:
        value = figure(trial)
        if value is not None and value > limit:
            above.append(_TrialValue(value, trial))
    if not above:
        return None
    above.sort(key=lambda trial_value: trial_value.value, reverse=True)
    worst = above[0]
    return TrialsAbove(worst.value, worst.trial, tuple(trial_value.trial for trial_value in above))


class _TrialValue(NamedTuple):
    """A trial and its value of a figure."""

    value: float
    trial: TrialResult


def any_imported(trials: Sequence[TrialResult]) -> bool:
    """Whether one of these trials is imported, so that nobody can run it again from here."""
    return any(result.trial.origin is not None for result in trials)


def run_name(trial: TrialResult, run: RunFigures) -> str:
    """Return a run as a sentence names it: "run 2 of ddp on 2 ranks"; runs of a trial count from 1."""
    position = trial.run_figures.index(run)
    repeat = trial.recorded_runs[position].header.repeat
    return f"run {repeat + 1} of {trial.name}"


def curve_names(curves: Sequence[CurveResult]) -> str:
    """Return curves as a sentence names them: "ddp (weak); fsdp (weak)"."""
    return "; ".join(f"{curve.name} ({curve.mode})" for curve in curves)


def counted_trials(trials: Collection[object]) -> str:
    """Return "1 trial", "3 trials"."""
    return counted(len(trials), "trial")
