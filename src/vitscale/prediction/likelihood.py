"""How well a model of a series explains what was measured, for many sets of parameters at once.

Three things bear on the parameters: their priors (`prediction.parameters`), with a checked network in them; the
compute, optimizer and exposed transfers of explained steps, each against its own part of the model; and the step time
of every run. The logarithm of a run's step is the model's plus the effect of that job. The effect is Student's t of 4
degrees of freedom, so that one run that hung does not move three that did not. The scale of jobs is a parameter as
well, under a scaled inverse chi-squared prior, cut off at 8 %. Where the report calls the runs of one rank count
unstable, they say themselves how far runs differ: the prior is then about that scale, the cut three times as far,
and parts of explained steps are as uncertain as the runs that they were explained in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitscale.analysis.quality.steadiness import RUNS_DIFFER
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.prediction.evidence import Point, StepParts
from vitscale.prediction.parameters import JOB_DEVIATION, JOB_FREEDOM, JOB_TO_JOB_RUNS, NAMES, Prior, job_scale
from vitscale.prediction.sampling import Normal, Proposal, StudentT, spread_out_normals
from vitscale.prediction.step.model import Array, Calls, Draws, StepModel, StepTimes, Worlds
from vitscale.prediction.step.of_series import device_factors, typical_slowdown, worlds_of
from vitscale.store.records import EXPOSED

MOST_JOB_TO_JOB = 0.08
"""Largest scale of jobs that is believed without runs that differ so: what differs by more has another cause."""
_OF_A_DIFFERENCE = 1.0483
"""Standard deviation of a normal distribution over the median difference of two of its values."""
_BEYOND_OWN_SPREAD = 3.0
"""Largest scale of jobs that is believed, over the spread of the runs of one rank count."""
_PARTS_SPREAD = {"compute": 0.03, "optimizer": 0.10, "exposed": 0.15, "wire": 0.10, "norm": 0.10, "wait": 0.30}
"""Relative standard deviation of a part of explained steps about the model's."""
_EXPOSED_FLOOR = 0.01
"""Share of a step by which exposed transfers are uncertain at least."""
_MOST_EVALUATIONS = 60
_CLOSE = 1e-4
"""Least gain of a step, as a share of the sum of squares, for the search to go on: it only finds where to begin."""
_DIFFERENCE = 1e-4
"""Step of a parameter, in standard deviations of its prior, for derivatives."""
_TRIED = 64
COMPUTE = NAMES.index("compute")
_SETS_AT_ONCE = 64
_MANY_RUNS = 10
"""Runs of a point from which a series is one of many runs."""
_FOLDS = 4
"""Times that terms of many runs are multiplied in halves before logarithms are taken: of 1, not of 16."""


def spread_of_runs(points: Sequence[Point]) -> float:
    """Standard deviation of the logarithm of a step from run to run at one rank count; 0 where none has three runs.

    It is Shamos's: the median of all differences between two runs of one count (Rousseeuw & Croux, "Alternatives to the
    Median Absolute Deviation", J. Am. Stat. Assoc. 1993, section 4). A run that hung is in few of them.
    """
    repeated = [point for point in points if len(point.step_seconds) >= FEWEST_REPEATS]
    pairs = [pair for point in repeated for pair in combinations(point.step_seconds, 2)]
    differences = [abs(math.log(one) - math.log(other)) for one, other in pairs]
    return _OF_A_DIFFERENCE * statistics.median(differences) if differences else 0.0


def noise_of_runs(points: Sequence[Point]) -> float:
    """How far runs of one rank count differ (`spread_of_runs`), where the report calls that unstable; else 0."""
    spread = spread_of_runs(points)
    return spread if spread > RUNS_DIFFER else 0.0


def scale_of_jobs(points: Sequence[Point]) -> float:
    """Expected scale of the t of `JOB_FREEDOM` by which the logarithm of a run's step differs from the mean of many."""
    return max(job_scale(points[-1].trial), noise_of_runs(points) / JOB_DEVIATION)


def by_name(rows: Array) -> Draws:
    """Parameter -> its column (sets, 1) of `rows`, which may have further columns."""
    return {name: rows[:, [n]] for n, name in enumerate(NAMES)}


class Likelihood:
    """Density of parameters, in standard deviations of their priors; the last is the logarithm of the scale of jobs."""

    def __init__(self, model: StepModel, points: Sequence[Point], known: Mapping[str, Prior]) -> None:
        self.model = model
        self.noise = noise_of_runs(points)
        self.job_to_job = scale_of_jobs(points)
        """Scale of jobs that the prior is about."""
        self.most_job_to_job = max(MOST_JOB_TO_JOB, _BEYOND_OWN_SPREAD * self.noise)
        """Scale of jobs beyond which there is no density."""
        self.worlds: Worlds = worlds_of(points)
        self.mean = np.array([known[name].mean for name in NAMES])
        self.spread = np.array([max(1e-6, known[name].spread) for name in NAMES])
        self.of_point = np.concatenate([np.full(len(point.step_seconds), n) for n, point in enumerate(points)])
        self.log_steps = np.log(np.concatenate([np.asarray(point.step_seconds) for point in points]))
        self.medians = np.array([math.log(statistics.median(point.step_seconds)) for point in points])
        self.many_runs = max(len(point.step_seconds) for point in points) >= _MANY_RUNS
        """Whether it is drawn as `prediction.levelled` does."""
        self.factors = device_factors(points)
        self.explained = [(n, point) for n, point in enumerate(points) if point.parts is not None]
        self._known_calls: tuple[Array, Calls] = np.empty(0), {}
        self.active = self._active()

    def rows(self, standard: Array, rng: np.random.Generator | None = None) -> Array:
        """(sets, parameters) that `standard` stands for: (sets, active parameters and the scale of jobs).

        Parameters that nothing measured depends on are drawn from their priors; without `rng` they are at the middle.
        """
        full = np.zeros((len(standard), len(NAMES)))
        if rng is not None:
            full = np.hstack([spread_out_normals(rng, len(standard)) for _ in NAMES])
        full[:, self.active] = standard[:, :-1]
        return self.mean + self.spread * full

    def log_density(self, standard: Array) -> Array:
        """Log density of the posterior, (sets,), up to a constant that all models of the same points share."""
        of_points, others = self._log_model(standard)
        log_scale = standard[:, -1]
        scale = np.exp(log_scale)
        of_runs = np.empty(len(standard))
        for rows in _in_parts(len(standard)):
            runs = self._residuals(of_points[rows])
            np.divide(runs, scale[rows, None], out=runs)
            for change, by in ((np.multiply, runs), (np.divide, JOB_FREEDOM)):
                change(runs, by, out=runs)
            if self.many_runs:
                of_runs[rows] = (JOB_FREEDOM + 1) / 2 * _log_of_product(runs + 1)
                continue
            of_runs[rows] = np.multiply(np.log1p(runs, out=runs), (JOB_FREEDOM + 1) / 2, out=runs).sum(axis=1)
        density = -0.5 * (others**2).sum(axis=1) - of_runs - len(self.of_point) * log_scale
        density += self._of_scale(log_scale) - 0.5 * len(self.active) * math.log(2 * math.pi)
        return np.asarray(np.where(log_scale < math.log(self.most_job_to_job), density, -np.inf), dtype=np.float64)

    def residuals(self, standard: Array) -> tuple[Array, Array]:
        """((sets, runs) logarithm of each run's step over the model's; (sets, ...) residuals of parameters and of
        explained parts, in their standard deviations)."""
        of_points, others = self._log_model(standard)
        return self._residuals(of_points), others

    def median_residuals(self, standard: Array) -> Array:
        """Median of the runs' `residuals` over all runs, (sets,)."""
        of_points, _ = self._log_model(standard)
        middles = np.empty(len(standard))
        for rows in _in_parts(len(standard)):
            middles[rows] = np.median(self._residuals(of_points[rows]), axis=1)
        return middles

    def mean_residuals(self, standard: Array) -> Array:
        """Mean over points of the logarithm of the median run's step over the model's, (sets,)."""
        return np.asarray((self.medians - self._log_model(standard)[0]).mean(axis=1), dtype=np.float64)

    def _log_model(self, standard: Array) -> tuple[Array, Array]:
        """((sets, points) logarithm of the model's step; the residuals of all but the runs)."""
        draws = by_name(self.rows(standard))
        but_compute = np.delete(standard[:, :-1], np.searchsorted(self.active, COMPUTE), axis=1)
        if not np.array_equal(but_compute, self._known_calls[0]):
            # The density of the prior's proposals asks for the same sets again, with only the compute changed.
            self._known_calls = but_compute, self.model.calls(draws, self.worlds)
        times = self.model.times(draws, self.worlds, self._known_calls[1])
        others = [standard[:, :-1]]
        for n, point in self.explained:
            others += self._parts(times, point, n)
        return np.log(times.total), np.concatenate(others, axis=1)

    def _residuals(self, of_points: Array) -> Array:
        """Logarithm of each run's step over the model's, (sets, runs)."""
        runs = of_points[:, self.of_point]
        return np.asarray(np.subtract(self.log_steps, runs, out=runs), dtype=np.float64)

    def proposals(self) -> tuple[Proposal, ...]:
        """First proposals: around the best explanation of all runs, around one that may omit some, and the prior."""
        return (
            self._around_the_maximum(self.job_to_job / 2, every_run=True),
            self._around_the_maximum(2 * self.job_to_job, every_run=False),
            _FromThePrior(self),
        )

    def prior(self) -> Normal:
        """Normals of a row whose compute is told from the compute that meets the measured steps."""
        scales = np.ones(len(self.active) + 1)
        scales[-1] = 0.5
        scales[np.searchsorted(self.active, COMPUTE)] = 2 * self.job_to_job / self.spread[COMPUTE]
        return Normal(np.append(np.zeros(len(self.active)), math.log(self.job_to_job)), scales)

    def _of_scale(self, log_scale: Array) -> Array:
        return -JOB_TO_JOB_RUNS * (log_scale + (self.job_to_job / np.exp(log_scale)) ** 2 / 2)

    def _active(self) -> NDArray[np.int64]:
        """Parameters that any measurement depends on; the posterior of others is their prior and need not be sampled.

        They are found by moving each parameter by a standard deviation, from many sets of the prior.
        """
        self.active = np.arange(len(NAMES))
        rng = np.random.default_rng(7)
        size = len(NAMES)
        standard = np.column_stack([rng.standard_normal((_TRIED, size)), np.zeros(_TRIED)])
        moved = standard + np.eye(size, size + 1)[:, None, :]
        both = np.column_stack(self._log_model(np.vstack([standard, *moved])))
        change = np.abs(both[_TRIED:].reshape(size, _TRIED, -1) - both[:_TRIED])
        own = np.arange(size)
        change[own, :, len(self.medians) + own] = 0.0  # the priors
        return np.array(sorted({COMPUTE, *np.flatnonzero(change.max(axis=(1, 2)) > 1e-9).tolist()}))

    def _parts(self, times: StepTimes, point: Point, n: int) -> list[Array]:
        """Residuals of the point's explained parts, (sets, 1) each; `n`: its place."""
        parts = point.parts
        residuals: list[Array] = []
        if parts is None:
            return residuals
        pace = self._pace_of_explained_steps(times, parts, n)
        of_runs = self.noise / math.sqrt(len(point.step_seconds))
        spread_of = {name: math.hypot(spread, of_runs) for name, spread in _PARTS_SPREAD.items()}
        if parts.compute > 0:
            typical = parts.compute / typical_slowdown(point, self.factors)
            residuals.append(np.log(typical / (pace * times.compute[:, [n]])) / spread_of["compute"])
        if parts.optimizer:
            residuals.append(np.log(parts.optimizer / (pace * times.optimizer[:, [n]])) / spread_of["optimizer"])
        floor = _EXPOSED_FLOOR * statistics.median(point.step_seconds)
        if point.gpus > 1 and self.worlds.slowdown[n] < 1.05:
            names = [name for name in EXPOSED if name != "norm" or self.model.norms]
            of_model = {name: pace * getattr(times, name)[:, [n]] for name in names}
            measured: dict[str, float | None] = {name: getattr(parts, name) for name in of_model}
            if None in measured.values():
                of_model, measured = {"exposed": sum(of_model.values())}, {"exposed": parts.exposed}
            for name, seconds in measured.items():
                scale = spread_of[name] * (seconds or 0.0) + floor
                residuals.append(((seconds or 0.0) - of_model[name]) / scale)
        return residuals

    def _pace_of_explained_steps(self, times: StepTimes, parts: StepParts, n: int) -> Array | float:
        """Explained step of a point over the model's, (sets, 1), where runs differ much; 1 where they do not.

        Explained steps are of the same runs as the others. Where these are slow by luck all parts are long by the same
        luck, and would tell of it a second time: their shares alone tell something new.
        """
        if not self.noise:
            return 1.0
        explained_seconds = parts.compute + (parts.optimizer or 0.0) + (parts.data_wait or 0.0) + parts.exposed
        model_seconds = times.total[:, [n]] - times.bubble[:, [n]]
        return np.asarray(explained_seconds / model_seconds, dtype=np.float64)

    def _around_the_maximum(self, job_scale: float, *, every_run: bool) -> Proposal:
        """A t around the most probable parameters if jobs differ by `job_scale`, found by least squares.

        With `every_run` runs count alike, else by Student's t. That lets go of what the first guess is far from: a
        step that several ranks make twice as long would never be explained.
        """
        from scipy.optimize import least_squares

        size = len(self.active)

        def residuals(rows: Array) -> Array:
            """(sets, residuals) of (sets, active parameters), whose squares add up to -2 times the log density."""
            standard = np.column_stack([rows, np.full(len(rows), math.log(job_scale))])
            of_runs, others = self.residuals(standard)
            deviations = of_runs / job_scale
            if not every_run:
                deviations = _as_of_normals(deviations)
            return np.concatenate([deviations, others], axis=1)

        def jacobian(centre: Array) -> Array:
            """(residuals, active parameters), by forward differences of all parameters at once."""
            at_centre_and_beside = residuals(np.vstack([centre, centre + _DIFFERENCE * np.eye(size)]))
            changes = at_centre_and_beside[1:] - at_centre_and_beside[0]
            return np.asarray(changes.T / _DIFFERENCE, dtype=np.float64)

        maximum = least_squares(
            lambda centre: residuals(centre[None])[0], np.zeros(size), jacobian, ftol=_CLOSE, xtol=None, gtol=None,
            max_nfev=_MOST_EVALUATIONS,
        )  # fmt: skip
        covariance = np.zeros((size + 1, size + 1))
        covariance[:size, :size] = np.linalg.inv(maximum.jac.T @ maximum.jac)
        covariance[-1, -1] = 0.5**2
        return StudentT(np.append(maximum.x, math.log(job_scale)), covariance)


def _as_of_normals(deviations: Array) -> Array:
    """Deviations of a normal distribution that are as improbable as these of Student's t of `JOB_FREEDOM`."""
    squares = (JOB_FREEDOM + 1) * np.log1p(deviations**2 / JOB_FREEDOM)
    return np.asarray(np.copysign(np.sqrt(squares), deviations), dtype=np.float64)


def meeting(residuals: Callable[[Array], Array], column: int, by_one: float, rows: Array) -> Array:
    """The compute of each row at which `residuals` vanish, nearly; the row's own compute does not matter.

    It is moved once as if it were the whole step, then once by the secant.

    Args:
        residuals: logarithm of measured steps over the model's, (sets,).
        column: the column of the compute.
        by_one: what a step of 1 in that column adds to the logarithm of the compute.
        rows: sets in standard deviations of their priors.
    """
    at = rows.copy()
    at[:, column] = 0.0
    apart = residuals(at)
    moved = np.clip(apart, -1.0, 1.0)
    at[:, column] = moved / by_one
    left = residuals(at)
    slope = np.divide(apart - left, moved, out=np.ones_like(moved), where=moved != 0)
    at[:, column] += np.clip(left / np.maximum(slope, 0.05), -1.0, 1.0) / by_one
    return np.asarray(at[:, column], dtype=np.float64)


def _log_of_product(terms: Array) -> Array:
    """Sum of the logarithms of each row's terms, all at least 1; infinite where a product overflows."""
    for _ in range(_FOLDS):
        half = terms.shape[1] // 2
        if not half:
            break
        folded = terms[:, :half] * terms[:, half : 2 * half]
        folded[:, : terms.shape[1] % 2] *= terms[:, 2 * half :]
        terms = folded
    return np.asarray(np.log(terms, out=terms).sum(axis=1), dtype=np.float64)


class _FromThePrior:
    """Draws all but the compute from the prior, and the compute so that it meets the measured steps.

    It is wide where these do not decide, and where they allow more than one explanation.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.column = int(np.searchsorted(likelihood.active, COMPUTE))
        self._prior = likelihood.prior()
        self._meeting = partial(meeting, likelihood.median_residuals, self.column, likelihood.spread[COMPUTE])

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """See `Proposal`."""
        rows = self._prior.draw(rng, count)
        rows[:, self.column] += self._meeting(rows)
        return rows

    def log_density(self, rows: Array) -> Array:
        """See `Proposal`."""
        apart = rows.copy()
        apart[:, self.column] -= self._meeting(rows)
        return self._prior.log_density(apart)


def _in_parts(sets: int) -> Iterator[slice]:
    """Slices of the sets: with many runs an array of all sets is larger than a processor's caches."""
    return (slice(first, first + _SETS_AT_ONCE) for first in range(0, sets, _SETS_AT_ONCE))
