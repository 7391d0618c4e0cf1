"""Each part of a series' step fitted from what measured it; what nothing measured stays at its prior."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from vitscale.prediction.evidence import Evidence, Point, Series
from vitscale.prediction.levelled import draw_levelled
from vitscale.prediction.likelihood import Likelihood, by_name
from vitscale.prediction.parameters import priors
from vitscale.prediction.results import REACH
from vitscale.prediction.sampling import sample
from vitscale.prediction.step.model import Array, Draws, StepModel
from vitscale.prediction.step.of_series import fitted_points, model_of

DRAWS = 512
SEED = 20260221
"""Seed of every fit: no random number differs from one call to the next."""
FEWEST_DRAWS = 200.0
"""Effective draws below which an answer is widened, and says so."""
_MODEL_SPREAD = 0.02
"""Standard deviation of the logarithm by which even the best model is off."""
_STRONG = 20.0
"""Odds that are strong evidence (Kass & Raftery, "Bayes Factors", J. Am. Stat. Assoc. 1995)."""
_FAR = 3.5
"""Standard deviations at which a point no longer fits; one in two thousand points that fit lies further."""


@dataclass(frozen=True)
class Misfit:
    """A measured point that the fitted model is far from."""

    gpus: int
    measured_seconds: float
    """The median run's step."""
    fitted_seconds: float


@dataclass(frozen=True)
class FittedSeries:
    """The parts of one series' step, as draws from what the evidence leaves open."""

    series: Series
    points: tuple[Point, ...]
    """The points that the fit rests on."""
    left_out: str
    """Why other points were left out; empty where none was."""
    model: StepModel
    draws: Draws
    """Parameter -> (DRAWS, 1)."""
    job_spread: Array
    """(DRAWS, 1): scale of the logarithm of a run's step time about the mean of many, a t of `JOB_FREEDOM`."""
    effective_draws: float
    """Independent draws that `draws` are worth."""
    misfits: tuple[Misfit, ...]
    """Measured points that the model does not fit."""
    told_odds: float | None = None
    """How many times less probable the measurements are with the engine and parameters that were told of an import than
    without; None: these were not set aside."""
    untold: FittedSeries | None = None
    """The fit without what was told of an import and is not set aside; None: nothing is."""

    @property
    def misfit_spread(self) -> float:
        """Added standard deviation of a step's logarithm: the 90 % interval then holds the points that do not fit."""
        apart = (abs(math.log(misfit.measured_seconds / misfit.fitted_seconds)) for misfit in self.misfits)
        return max(apart, default=0.0) / REACH

    @property
    def widening(self) -> float:
        """Factor on intervals where too few draws count for their ends to be known."""
        return max(1.0, math.sqrt(FEWEST_DRAWS / self.effective_draws))


@dataclass(frozen=True)
class Fitted:
    """All series of a results folder."""

    evidence: Evidence
    series: Mapping[str, FittedSeries]
    """Name -> the series' fit."""

    def keep(self, fits: Iterable[FittedSeries]) -> None:
        """Takes over fits that were made of this evidence in forks of this process."""
        if isinstance(self.series, _OnDemand):
            by_name = self.series.by_name
            self.series.known |= {fit.series.name: replace(fit, series=by_name[fit.series.name]) for fit in fits}


class _OnDemand(Mapping[str, FittedSeries]):
    """Each series fitted when it is first asked for."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.by_name = {series.name: series for series in evidence.series}
        self.known: dict[str, FittedSeries] = {}

    def __getitem__(self, name: str) -> FittedSeries:
        if name not in self.known:
            self.known[name] = fit_series(self.by_name[name], self.evidence)
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)


def fit(evidence: Evidence) -> Fitted:
    """Every series of the evidence, each fitted when it is first asked for."""
    return Fitted(evidence, _OnDemand(evidence))


def fit_series(series: Series, evidence: Evidence) -> FittedSeries:
    """Fits one series.

    What was told of an import may be wrong, or its rates may count tokens where its batch counts samples. Where the
    measurements are strong evidence against the messages that follow from it, messages are taken as unknown. Elsewhere
    both fits count (`evaluating`).
    """
    points, left_out = fitted_points(series)
    model = model_of(points, evidence)
    fitted, log_evidence = _fit(series, points, left_out, model, evidence)
    if points[-1].trial.origin is None or model.messages is None:
        return fitted
    untold, without = _fit(series, points, left_out, replace(model, messages=None), evidence)
    odds = math.exp(min(700.0, without - log_evidence))
    return replace(untold, told_odds=odds) if odds > _STRONG else replace(fitted, untold=untold)


def _fit(
    series: Series, points: tuple[Point, ...], left_out: str, model: StepModel, evidence: Evidence
) -> tuple[FittedSeries, float]:
    """(the fit, the logarithm of the evidence for this model up to a constant of the points)."""
    known = priors(points, evidence.network, model.messages is not None)
    likelihood = Likelihood(model, points, known)
    rng = np.random.default_rng(SEED)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of sets that are tried and have no density
        if likelihood.many_runs:
            drawn, standard = draw_levelled(likelihood, rng, DRAWS)
        else:
            drawn = sample(likelihood.log_density, likelihood.proposals(), rng, DRAWS)
            standard = drawn.rows
    draws = by_name(likelihood.rows(standard, rng))
    misfits = _misfits(points, model.times(draws, likelihood.worlds).total, likelihood.job_to_job)
    fitted = FittedSeries(
        series, points, left_out, model, draws, np.exp(drawn.rows[:, [-1]]), drawn.effective_size, misfits
    )
    return fitted, drawn.log_evidence


def _misfits(points: tuple[Point, ...], steps: Array, job_to_job: float) -> tuple[Misfit, ...]:
    """Points whose median run is further from the model than runs of one rank count are from one another.

    That distance is the larger of what runs are known to differ by and what these runs did. What a bad fit leaves is
    not in it.

    Args:
        points: the measured ones.
        steps: the model's, (draws, points).
        job_to_job: what runs are known to differ by.
    """
    apart = np.concatenate([np.log(point.step_seconds) - np.median(np.log(point.step_seconds)) for point in points])
    beyond_first = len(apart) - len(points)
    # Robustly: one run that hung must not widen what runs differ by.
    own = 1.4826 * float(np.median(np.abs(apart))) if beyond_first >= len(points) else job_to_job
    misfits = []
    for point, of_model in zip(points, np.median(steps, axis=0), strict=True):
        measured = statistics.median(point.step_seconds)
        scale = math.hypot(max(own, job_to_job) / math.sqrt(len(point.step_seconds)), _MODEL_SPREAD)
        if abs(math.log(measured / of_model)) > _FAR * scale:
            misfits.append(Misfit(point.gpus, measured, float(of_model)))
    return tuple(misfits)
