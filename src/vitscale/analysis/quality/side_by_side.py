"""Did runs that went on side by side slow one another, by what their hosts share: storage, switches, the driver?

When each run began and how long it took tells which runs were beside others. The step time y of run r of trial t
depends on x, the share of the run's time in which another run of the study was under way:

    ln y = mu_t + delta * x + noise

Trials differ by their mu alone, so that runs are compared with runs of the same trial (the within-group estimator of a
panel with fixed effects: Wooldridge, "Econometric Analysis of Cross Section and Panel Data", MIT Press, 2nd edition
2010, section 10.5). There is one delta for trials within one host and one for trials over several, as only these cross
switches. The noise is that of all runs together, so that a few runs that were alone suffice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitscale.analysis.quality.wording import note, warning
from vitscale.analysis.statistics import CONFIDENCE, holm, t_below, t_quantile
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import counted, listed
from vitscale.present.units import rough_percent as percent
from vitscale.store.results import Run

_FEWEST_FREEDOM = 3
_LEAST_CONTRAST = 0.25
"""Sum of squares of x within trials: 0.5 is one run alone and one that had others beside it all its time."""
_ALONE = 0.05
"""A run counts as alone if others were beside it for no larger share of its time than this."""


@dataclass(frozen=True)
class Slowdown:
    """Factor by which steps take longer beside other runs, in trials within one host or over several."""

    hosts: str
    factor: float
    low: float
    """Lower end of the 95 % interval; `high` is the upper one."""
    high: float
    p: float
    """P-value of no difference."""


def shares_beside(runs: Sequence[Run]) -> npt.NDArray[np.float64]:
    """Return the share of each run's time in which another run was under way, in [0, 1]; in the order of the runs.

    Time is cut at each moment at which a run starts or ends. Of R runs these are 2 R moments, with 2 R - 1 pieces of
    time between them. Runs that last from 0 to 10 s and from 6 to 12 s have the moments 0, 6, 10 and 12, with 1, 2 and
    1 runs under way between them, so that they share 4 s: 0.4 of the first and 0.67 of the second.
    """
    starts = np.array([run.outcome.started_unix_seconds for run in runs])
    ends = starts + np.array([run.outcome.wall_seconds for run in runs])
    unordered_moments = np.concatenate([starts, ends])
    order = np.argsort(unordered_moments, kind="stable")
    moments = unordered_moments[order]
    is_start = order < len(runs)  # the first R are starts
    runs_under_way = np.cumsum(np.where(is_start, 1, -1))  # from each moment on
    is_shared = runs_under_way[:-1] > 1  # of each piece
    # Seconds, from the first moment to each one, in which several runs were under way.
    shared_until = np.concatenate([[0.0], np.cumsum(np.diff(moments) * is_shared)])
    shared_seconds = np.interp(ends, moments, shared_until) - np.interp(starts, moments, shared_until)
    run_seconds = np.where(ends > starts, ends - starts, 1.0)
    return np.asarray(np.clip(shared_seconds / run_seconds, 0.0, 1.0), dtype=np.float64)


@dataclass
class _Sums:
    """Sums over runs, where x and ln y are taken from their means within the trial."""

    x_squares: float = 0.0
    products: float = 0.0
    """x times ln y."""

    @property
    def delta(self) -> float:
        """The least-squares slope of ln y over x."""
        return self.products / self.x_squares


def slowdowns(measured: Sequence[TrialResult], beside: Mapping[str, float]) -> list[Slowdown]:
    """Return how much slower runs were for others beside them.

    Empty where no trial has runs both alone and beside others, or the runs are too few.

    Args:
        measured: trials with their runs.
        beside: run folder to the share of its time in which another run was under way.
    """
    sums_by_hosts: dict[str, _Sums] = {}
    y_squares = 0.0
    freedom = 0
    for trial in measured:
        observations = _observations(trial, beside)
        if len(observations) < 2:
            continue
        x, y = (values - values.mean() for values in np.array(observations).T)
        hosts = "within one host" if trial.trial.world.nodes == 1 else "over several hosts"
        sums = sums_by_hosts.setdefault(hosts, _Sums())
        sums.x_squares += float(x @ x)
        sums.products += float(x @ y)
        y_squares += float(y @ y)
        freedom += len(observations) - 1
    estimable = {hosts: sums for hosts, sums in sums_by_hosts.items() if sums.x_squares >= _LEAST_CONTRAST}
    freedom -= len(estimable)
    if not estimable or freedom < _FEWEST_FREEDOM:
        return []
    explained_squares = sum(sums.products**2 / sums.x_squares for sums in estimable.values())
    noise_squares = max(0.0, y_squares - explained_squares)
    return [_slowdown(hosts, sums, noise_squares, freedom) for hosts, sums in estimable.items()]


def _observations(trial: TrialResult, beside: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return x and ln y of each run of the trial of which both are known."""
    observations = []
    for record, figures in zip(trial.recorded_runs, trial.run_figures, strict=True):
        share = beside.get(record.header.folder)
        if share is not None and figures.step_seconds:
            observations.append((share, math.log(figures.step_seconds)))
    return observations


def _slowdown(hosts: str, sums: _Sums, noise_squares: float, freedom: int) -> Slowdown:
    """Return the slowdown exp(delta), with its interval and p-value by Student's t.

    Args:
        hosts: which trials: "within one host" or "over several hosts".
        sums: the sums over their runs.
        noise_squares: sum of squares of the noise of all runs, of whatever trials.
        freedom: degrees of freedom of the noise.
    """
    delta = sums.delta
    error = math.sqrt(noise_squares / freedom / sums.x_squares)
    half = t_quantile(freedom) * error
    p = 2 * t_below(freedom, -abs(delta) / error) if error > 0 else float(delta == 0)
    return Slowdown(hosts, factor=math.exp(delta), low=math.exp(delta - half), high=math.exp(delta + half), p=p)


def _shared_host_by_trial(runs: Sequence[Run]) -> dict[str, str]:
    """Return the identity of each trial with a run beside which another one went on at the same host -> that host."""
    shared: dict[str, str] = {}
    last_to_end: dict[str, Run] = {}
    """Host to the run that ends last of those that have begun there."""
    for run in sorted(runs, key=lambda run: run.outcome.started_unix_seconds):
        for host in run.header.hosts:
            earlier = last_to_end.get(host)
            if earlier is None:
                last_to_end[host] = run
                continue
            if run.outcome.started_unix_seconds < _end(earlier):
                shared[earlier.header.trial_id] = host
                shared[run.header.trial_id] = host
            last_to_end[host] = max(earlier, run, key=_end)
    return shared


def _end(run: Run) -> float:
    """The Unix time, in seconds, at which the run ended."""
    return run.outcome.started_unix_seconds + run.outcome.wall_seconds


def side_by_side(measured: Sequence[TrialResult], runs: Sequence[Run]) -> Iterable[Finding]:
    """Reports runs that went on side by side, and whether that slowed them.

    Args:
        measured: the trials with their runs.
        runs: all runs of the study, failed ones too.
    """
    placed_runs = [run for run in runs if run.header.imported is None and run.header.hosts]
    if not placed_runs:
        return
    shares = shares_beside(placed_runs)
    runs_beside = int((shares > _ALONE).sum())
    if runs_beside == 0:
        return
    host_by_trial = _shared_host_by_trial(placed_runs)
    if host_by_trial:
        example = next(iter(host_by_trial.values()))
        yield warning(
            "shared-host",
            message=f"runs went on at the same time on one host ({example}) in "
            f"{counted(len(host_by_trial), 'trial')}: each had less than the host",
            advice='Ask for whole nodes (slurm.options = ["--exclusive"]).',
            trials=host_by_trial,
        )
    subject = f"{runs_beside} of {counted(len(placed_runs), 'run')} had others of the study beside them"
    share_by_folder = {run.header.folder: float(share) for run, share in zip(placed_runs, shares, strict=True)}
    yield _finding_of_slowdowns(subject, slowdowns(measured, share_by_folder))


def _finding_of_slowdowns(subject: str, estimates: Sequence[Slowdown]) -> Finding:
    """Return the finding on how runs beside others differ from those alone.

    Args:
        subject: how many runs had others beside them, in words.
        estimates: the slowdowns within one host and over several, as far as they can be estimated.
    """
    if not estimates:
        return note(
            "side-by-side",
            message=f"{subject}; whether these slowed them is unknown: too few trials have runs alone and beside "
            "others",
            advice="With measure.repeats = 3 or more `vitscale run` lets some runs be alone, to tell.",
        )
    figures = listed(_slowdown_in_words(estimate) for estimate in estimates)
    p_values = holm([estimate.p for estimate in estimates])
    significant = [estimate for estimate, p in zip(estimates, p_values, strict=True) if p < 1 - CONFIDENCE]
    if not significant:
        most_lost = max(1.0, *(estimate.high for estimate in estimates)) - 1
        return note(
            "side-by-side",
            message=f"{subject}; no significant difference to steps of the same trials alone: {figures}",
            advice=f"What these runs share may still slow them: by {percent(most_lost)} at most, by that interval.",
        )
    if any(estimate.factor > 1 for estimate in significant):
        advice = (
            "What they share is storage, switches and the driver's machine: these times are of a cluster that others "
            "use too. For those of an idle one leave out measure.parallel_runs, or set it lower, and give -o a new "
            "folder."
        )
    else:
        advice = "Nothing that they share makes a step shorter: their hosts, clocks or power differed. Compare these."
    return warning(
        "side-by-side",
        message=f"{subject}, and took another time for a step than runs of the same trial alone: {figures}",
        advice=advice,
    )


def _slowdown_in_words(estimate: Slowdown) -> str:
    """ "12 % (11 % to 13 %) longer over several hosts"; "shorter" where steps take less time beside other runs."""
    if estimate.factor >= 1:
        interval = f"{percent(estimate.low - 1)} to {percent(estimate.high - 1)}"
        return f"{percent(estimate.factor - 1)} ({interval}) longer {estimate.hosts}"
    interval = f"{percent(1 - estimate.high)} to {percent(1 - estimate.low)}"
    return f"{percent(1 - estimate.factor)} ({interval}) shorter {estimate.hosts}"
