"""Each part fitted from what measured it; what nothing measured stays at its prior.

Of a series these are looked at together: the step times of all runs; the compute, optimizer and exposed transfers of
explained steps, each against its own part of the model; and what is known beforehand (`prediction.parameters`), with a
checked network in it. The logarithm of a run's step time is the model's plus the effect of that job, normal with an
unknown standard deviation under a scaled inverse chi-squared prior, cut off at 15 %, which is integrated out. A third
of the proposals come from a multivariate t around the posterior's maximum, as Gauss-Newton finds it, a third from one
around the best explanation by steady jobs, a third from the prior; they are weighted to what the posterior is
(importance sampling; Geweke, Econometrica 1989). No random number differs from one call to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.prediction.evidence import Evidence, Point, Series
from vitscale.prediction.parameters import JOB_TO_JOB, JOB_TO_JOB_FREEDOM, NAMES, OF_UNKNOWN_JOBS, Prior, priors
from vitscale.prediction.step.model import Draws, StepModel, StepTimes, Worlds
from vitscale.prediction.step.of_series import device_factors, fitted_points, model_of, typical_slowdown, worlds_of
from vitscale.record import EXPOSED

Array = NDArray[np.float64]
DRAWS = 512
_PROPOSED = 4096
_ITERATIONS = 30
_T_FREEDOM = 5
_MOST_JOB_TO_JOB = 0.15
"""No spread of jobs above it is believed: what grows by more has another cause."""
_PARTS_SPREAD = {"compute": 0.03, "optimizer": 0.10, "exposed": 0.15, "wire": 0.10, "norm": 0.10, "wait": 0.30}
"""Relative standard deviation of a part of explained steps about the model's."""
_EXPOSED_FLOOR = 0.01
"""Of a step: exposed transfers are not told more closely than that."""


@dataclass(frozen=True)
class FittedSeries:
    """The parts of one series' step, as draws from what the evidence leaves open."""

    series: Series
    points: tuple[Point, ...]
    """Those that the fit rests on."""
    left_out: str
    """Why others were left out; empty where none was."""
    model: StepModel
    draws: Draws
    """Parameter -> (DRAWS, 1)."""
    job_spread: Array
    """(DRAWS, 1): standard deviation of the logarithm of a run's step time about the mean of many."""


@dataclass(frozen=True)
class Fitted:
    """All series of a results folder."""

    evidence: Evidence
    series: Mapping[str, FittedSeries]
    """By name."""


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
    """Fits one series."""
    points, left_out = fitted_points(series)
    model = model_of(points, evidence)
    known = priors(points, evidence.network, model.messages is not None)
    observed = _Observed(model, points, known)
    draws, spread = _posterior(observed)
    return FittedSeries(series, points, left_out, model, _by_name(draws), spread)


def spread_out_normals(rng: np.random.Generator, count: int) -> Array:
    """(count, 1) standard normals, one from each of `count` equally likely parts of the line, in random order: tails
    differ less from one use to the next than with independent ones."""
    from scipy.special import ndtri

    return np.asarray(ndtri((rng.permutation(count) + 0.5) / count), dtype=np.float64)[:, None]


def _by_name(rows: Array) -> Draws:
    return {name: rows[:, [place]] for place, name in enumerate(NAMES)}


class _Observed:
    """What was measured of a series, against a model of it: residuals for many sets of parameters at once."""

    def __init__(self, model: StepModel, points: Sequence[Point], known: Mapping[str, Prior]) -> None:
        self.model = model
        self.job_to_job = OF_UNKNOWN_JOBS if model.messages is None else JOB_TO_JOB
        self.worlds: Worlds = worlds_of(points)
        self.mean = np.array([known[name].mean for name in NAMES])
        self.spread = np.array([max(1e-6, known[name].spread) for name in NAMES])
        self.place = np.concatenate([np.full(len(point.step_seconds), n) for n, point in enumerate(points)])
        self.log_steps = np.log(np.concatenate([np.asarray(point.step_seconds) for point in points]))
        self.factors = device_factors(points)
        self.explained = [(n, point) for n, point in enumerate(points) if point.parts is not None]

    def steps(self, rows: Array) -> Array:
        """(sets, runs): logarithm of each run's step time less the model's."""
        residual: Array = self.log_steps - np.log(self.model.times(_by_name(rows), self.worlds).total)[:, self.place]
        return residual

    def others(self, rows: Array) -> Array:
        """(sets, ...): residuals of parameters and of explained parts, in their standard deviations."""
        found = [(rows - self.mean) / self.spread]
        if self.explained:
            times = self.model.times(_by_name(rows), self.worlds)
            for n, point in self.explained:
                found += self._parts(times, point, n)
        return np.concatenate(found, axis=1)

    def _parts(self, times: StepTimes, point: Point, n: int) -> list[Array]:
        parts = point.parts
        found: list[Array] = []
        if parts is None:
            return found
        if parts.compute > 0:
            typical = parts.compute / typical_slowdown(point, self.factors)
            found.append(np.log(typical / times.compute[:, [n]]) / _PARTS_SPREAD["compute"])
        if parts.optimizer:
            found.append(np.log(parts.optimizer / times.optimizer[:, [n]]) / _PARTS_SPREAD["optimizer"])
        floor = _EXPOSED_FLOOR * float(np.median(point.step_seconds))
        if point.gpus > 1 and self.worlds.slowdown[n] < 1.05:
            of_model = {name: getattr(times, name)[:, [n]] for name in EXPOSED if name != "norm" or self.model.norms}
            measured: dict[str, float | None] = {name: getattr(parts, name) for name in of_model}
            if None in measured.values():
                of_model, measured = {"exposed": sum(of_model.values())}, {"exposed": parts.exposed}
            for name, seconds in measured.items():
                scale = _PARTS_SPREAD[name] * (seconds or 0.0) + floor
                found.append(((seconds or 0.0) - of_model[name]) / scale)
        return found


def _posterior(observed: _Observed) -> tuple[Array, Array]:
    """(DRAWS, parameters) and the job-to-job spread (DRAWS, 1)."""
    from scipy.special import chdtrc, chdtri

    rng = np.random.default_rng(20260221)
    proposals = (
        _AroundTheMaximum(observed), _AroundTheMaximum(observed, observed.job_to_job), _FromThePrior(observed)
    )  # fmt: skip
    rows = np.vstack([one.draw(rng, _PROPOSED // len(proposals)) for one in proposals])
    proposed = np.logaddexp.reduce([one.log_density(rows) for one in proposals])
    squares = (observed.steps(rows) ** 2).sum(axis=1)
    freedom = JOB_TO_JOB_FREEDOM + len(observed.log_steps)
    scale_squares = JOB_TO_JOB_FREEDOM * observed.job_to_job**2 + squares
    # With the spread of jobs integrated out: this is the part of it that lies below the largest believed one.
    believed = np.maximum(chdtrc(freedom, scale_squares / _MOST_JOB_TO_JOB**2), 1e-300)
    target = -0.5 * (observed.others(rows) ** 2).sum(axis=1) - 0.5 * freedom * np.log(scale_squares) + np.log(believed)
    weight = np.exp((target - proposed) - (target - proposed).max())
    # Systematic resampling: one offset, equal steps through the cumulated weights.
    edges = np.cumsum(weight) / weight.sum()
    chosen = np.minimum(np.searchsorted(edges, (np.arange(DRAWS) + 0.5) / DRAWS), len(rows) - 1)
    rng.shuffle(chosen)
    variance = scale_squares[chosen] / chdtri(freedom, believed[chosen] * rng.uniform(size=DRAWS))
    return rows[chosen], np.sqrt(variance)[:, None]


class _AroundTheMaximum:
    """A multivariate t around the most probable parameters: close where measurements decide. With a spread of jobs that
    is given it is around the best explanation of steps that are so steady, which may be another one."""

    def __init__(self, observed: _Observed, job_spread: float | None = None) -> None:
        self.best, covariance = _maximum(observed, job_spread)
        self.factor = np.linalg.cholesky(covariance)

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        standard = rng.standard_normal((count, len(self.best)))
        wide = np.sqrt(_T_FREEDOM / rng.chisquare(_T_FREEDOM, (count, 1)))
        rows: Array = self.best + standard * wide @ self.factor.T
        return rows

    def log_density(self, rows: Array) -> Array:
        size = len(self.best)
        standard = np.linalg.solve(self.factor, (rows - self.best).T)
        constant = (
            math.lgamma((_T_FREEDOM + size) / 2)
            - math.lgamma(_T_FREEDOM / 2)
            - size / 2 * math.log(_T_FREEDOM * math.pi)
            - float(np.log(np.diag(self.factor)).sum())
        )
        density: Array = constant - (_T_FREEDOM + size) / 2 * np.log1p((standard**2).sum(axis=0) / _T_FREEDOM)
        return density


class _FromThePrior:
    """All but the compute from the prior, and the compute so that it meets the measured steps: wide where they do not
    decide, and where they allow more than one explanation."""

    def __init__(self, observed: _Observed) -> None:
        self.observed = observed
        self.spread = 2 * observed.job_to_job / math.sqrt(len(observed.log_steps))
        self.place = NAMES.index("compute")

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        rows = self.observed.mean + self.observed.spread * rng.standard_normal((count, len(NAMES)))
        rows[:, self.place] = self._meeting(rows) + self.spread * rng.standard_normal(count)
        return rows

    def log_density(self, rows: Array) -> Array:
        standard = (rows - self.observed.mean) / self.observed.spread
        standard[:, self.place] = (rows[:, self.place] - self._meeting(rows)) / self.spread
        scales = self.observed.spread.copy()
        scales[self.place] = self.spread
        density: Array = -0.5 * (standard**2).sum(axis=1) - float(np.log(scales * math.sqrt(2 * math.pi)).sum())
        return density

    def _meeting(self, rows: Array) -> Array:
        """The compute with which the steps are met in the mean, by a few steps of Newton's method from the prior's."""
        at = rows.copy()
        at[:, self.place] = self.observed.mean[self.place]
        for _ in range(4):
            residual = self.observed.steps(at).mean(axis=1)
            above = at.copy()
            above[:, self.place] += 0.01
            slope = (residual - self.observed.steps(above).mean(axis=1)) / 0.01
            at[:, self.place] += np.clip(residual / np.maximum(slope, 0.05), -1.0, 1.0)
        met: Array = at[:, self.place]
        return met


def _maximum(observed: _Observed, job_spread: float | None) -> tuple[Array, Array]:
    """The most probable parameters, and the covariance of a normal around them: damped Gauss-Newton.

    Args:
        observed: what was measured.
        job_spread: of the logarithm of a run's step; None: what the residuals say, at most the largest believed one.
    """
    freedom = JOB_TO_JOB_FREEDOM + len(observed.log_steps)

    def variance_of(steps: Array) -> Array:
        if job_spread is not None:
            return np.full(len(steps), job_spread**2)
        found = (JOB_TO_JOB_FREEDOM * observed.job_to_job**2 + (steps**2).sum(axis=1)) / freedom
        return np.asarray(np.minimum(found, _MOST_JOB_TO_JOB**2), dtype=np.float64)

    def residuals(rows: Array) -> tuple[Array, Array, Array]:
        steps, others = observed.steps(rows), observed.others(rows)
        variance = variance_of(steps)
        squares = JOB_TO_JOB_FREEDOM * observed.job_to_job**2 + (steps**2).sum(axis=1)
        of_steps = freedom * np.log(variance) + squares / variance
        return steps, others, 0.5 * (of_steps + (others**2).sum(axis=1))

    best: Array = observed.mean.copy()
    damping = 1e-2
    step_size = 1e-4
    moved = np.eye(len(best)) * step_size
    hessian = np.eye(len(best))
    for _ in range(_ITERATIONS):
        steps, others, cost = residuals(np.vstack([best, best + moved]))
        variance = variance_of(steps[:1])[0]
        now = np.concatenate([steps[0] / np.sqrt(variance), others[0]])
        jacobian = (np.hstack([steps[1:] / np.sqrt(variance), others[1:]]) - now) / step_size
        hessian, gradient = jacobian @ jacobian.T, jacobian @ now
        while damping < 1e8:
            proposal = best - np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            new_cost = residuals(proposal[None, :])[2][0]
            if new_cost <= cost[0]:
                break
            damping *= 10
        else:
            break
        best = np.asarray(proposal, dtype=np.float64)
        damping = max(1e-9, damping / 10)
        if cost[0] - new_cost < 1e-9:
            break
    return best, np.asarray(np.linalg.inv(hessian), dtype=np.float64)
