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


class _Named(Protocol):
    @property
    def trial_id(self) -> str: ...


def warning(kind: str, message: str, advice: str, trials: Iterable[_Named | str] = ()) -> Finding:
    """Figures may mislead. `trials`: the trials concerned, points of a curve, or their identities."""
    return Finding(kind, "warning", message, advice, About(trials=_ids(trials)))


def note(kind: str, message: str, advice: str, trials: Iterable[_Named | str] = ()) -> Finding:
    """Figures stand, but there is something to know about them."""
    return Finding(kind, "note", message, advice, About(trials=_ids(trials)))


def _ids(trials: Iterable[_Named | str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(trial if isinstance(trial, str) else trial.trial_id for trial in trials))


def by_cause(
    trials: Iterable[TrialResult], cause_of: Callable[[TrialResult], _Cause | None]
) -> dict[_Cause, list[TrialResult]]:
    """Cause -> the trials that it holds for, in the order of the trials; trials without a cause are left out."""
    groups: dict[_Cause, list[TrialResult]] = {}
    for trial in trials:
        cause = cause_of(trial)
        if cause is not None:
            groups.setdefault(cause, []).append(trial)
    return groups


class Worst(NamedTuple):
    """The trials whose figure is above a limit."""

    value: float
    """The highest figure."""
    trial: TrialResult
    """The trial with the highest figure."""
    trials: tuple[TrialResult, ...]
    """All these trials, the highest figure first."""


def worst(measured: Sequence[TrialResult], figure: Callable[[TrialResult], float | None], limit: float) -> Worst | None:
    """The trials whose figure is known and above `limit`; None where there are none."""
    above = [(value, trial) for trial in measured if (value := figure(trial)) is not None and value > limit]
    if not above:
        return None
    above.sort(key=lambda pair: pair[0], reverse=True)
    return Worst(*above[0], tuple(trial for _, trial in above))


def imported(trials: Sequence[TrialResult]) -> bool:
    """Whether these trials are imported, so that nobody can run them again from here."""
    return any(trial.trial.origin is not None for trial in trials)


def run_name(trial: TrialResult, run: RunFigures) -> str:
    """A run as a sentence names it: "run 2 of ddp on 2 ranks"; runs of a trial count from 1."""
    repeats = [record.header.repeat for record in trial.recorded_runs]
    return f"run {repeats[trial.run_figures.index(run)] + 1} of {trial.name}"


def names(curves: Sequence[CurveResult]) -> str:
    """Curves as a sentence names them."""
    return "; ".join(f"{curve.name} ({curve.mode})" for curve in curves)


def count(trials: Collection[object]) -> str:
    """ "1 trial", "3 trials"."""
    return counted(len(trials), "trial")
