"""Did runs that went on at the same time slow one another, by what their hosts share: storage, switches, the driver?

`vitscale run` starts several runs of a study at once where there are hosts for them. When each run began and how long
it took shows which runs were under way together. The step time y of run r of trial t depends on x, the share of the
run's time in which another run of the study was under way (its concurrent share):

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
from typing import NamedTuple

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
"""Fewest degrees of freedom of the noise with which a slowdown is estimated."""
_LEAST_CONTRAST = 0.25
"""Least sum of squares of x within trials: 0.5 is one run alone and one that had others beside it all its time."""
_LARGEST_SHARE_ALONE = 0.05
"""Largest concurrent share of a run that counts as alone."""


@dataclass(frozen=True)
class Slowdown:
    """Factor by which steps take longer beside other runs, in trials within one host or over several."""

    hosts: str
    """The trials: "within one host" or "over several hosts"."""
    factor: float
    low: float
    """Lower end of the 95 % interval; `high` is the upper one."""
    high: float
    p: float
    """Two-sided p-value of no difference."""


def concurrent_shares(runs: Sequence[Run]) -> npt.NDArray[np.float64]:
    """Return the share of each run's time in which another run was under way, in [0, 1]; in the order of the runs.

    Time is cut at each moment at which a run starts or ends. Of R runs, at least one, these are 2 R moments, with
    2 R - 1 pieces of time between them. Runs that last from 0 to 10 s and from 6 to 12 s have the moments 0, 6, 10 and
    12, with 1, 2 and 1 runs under way between them, so that they share 4 s: 0.4 of the first and 0.67 of the second.
    """
    starts = np.array([run.outcome.started_unix_seconds for run in runs])
    ends = starts + np.array([run.outcome.wall_seconds for run in runs])
    unordered_moments = np.concatenate([starts, ends])
    order = np.argsort(unordered_moments, kind="stable")
    moments = unordered_moments[order]
    is_start = order < len(runs)  # the first R are starts
    runs_under_way = np.cumsum(np.where(is_start, 1, -1))  # from each moment on, (2 R,)
    is_concurrent = runs_under_way[:-1] > 1  # of each piece, (2 R - 1,)
    concurrent_pieces = np.diff(moments) * is_concurrent  # seconds
    # Seconds, from the first moment to each one, in which several runs were under way: (2 R,).
    concurrent_until = np.concatenate([[0.0], np.cumsum(concurrent_pieces)])
    concurrent_seconds = np.interp(ends, moments, concurrent_until) - np.interp(starts, moments, concurrent_until)
    run_seconds = np.where(ends > starts, ends - starts, 1.0)
    return np.asarray(np.clip(concurrent_seconds / run_seconds, 0.0, 1.0), dtype=np.float64)


@dataclass
class _Sums:
    """Sums over the runs of trials within one host, or of those over several.

    x is a run's concurrent share less the mean of its trial, and y the logarithm of its step seconds less the trial's.
    """

    x_squares: float = 0.0
    """Sum of x^2."""
    products: float = 0.0
    """Sum of x y."""

    @property
    def delta(self) -> float:
        """The least-squares slope of y over x."""
        return self.products / self.x_squares


def slowdowns(measured: Sequence[TrialResult], share_by_folder: Mapping[str, float]) -> list[Slowdown]:
    """Return how much slower runs were for others beside them: one for trials within one host, one for those over more.

    Empty where no trial has runs both alone and beside others, or the runs are too few.

    Args:
        measured: trials with their runs.
        share_by_folder: folder of a run to its concurrent share.
    """
    sums_by_hosts: dict[str, _Sums] = {}
    y_squares = 0.0  # of all runs: both kinds of trials have the same noise
    freedom = 0
    for result in measured:
        observations = _observations(result, share_by_folder)
        if len(observations) < 2:
            continue  # a single run equals its trial's mean
        shares = np.array([observation.concurrent_share for observation in observations])
        logs = np.array([observation.log_seconds for observation in observations])
        x = shares - shares.mean()
        y = logs - logs.mean()
        hosts = "within one host" if result.trial.world.nodes == 1 else "over several hosts"
        sums = sums_by_hosts.setdefault(hosts, _Sums())
        sums.x_squares += float(x @ x)
        sums.products += float(x @ y)
        y_squares += float(y @ y)
        freedom += len(observations) - 1  # one for the trial's mean
    estimable = {hosts: sums for hosts, sums in sums_by_hosts.items() if sums.x_squares >= _LEAST_CONTRAST}
    freedom -= len(estimable)  # one for each delta
    if not estimable or freedom < _FEWEST_FREEDOM:
        return []
    explained_squares = sum(sums.products**2 / sums.x_squares for sums in estimable.values())
    noise_squares = max(0.0, y_squares - explained_squares)
    return [_slowdown(hosts, sums, noise_squares, freedom) for hosts, sums in estimable.items()]


class _Observation(NamedTuple):
    """One run."""

    concurrent_share: float
    """Share of its time in which another run was under way."""
    log_seconds: float
    """Logarithm of its seconds for a step."""


def _observations(trial: TrialResult, share_by_folder: Mapping[str, float]) -> list[_Observation]:
    """Return the observations of those runs of the trial of which both values are known."""
    observations = []
    for record, figures in zip(trial.recorded_runs, trial.run_figures, strict=True):
        concurrent_share = share_by_folder.get(record.header.folder)
        if concurrent_share is not None and figures.step_seconds:
            observations.append(_Observation(concurrent_share, math.log(figures.step_seconds)))
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
    error = math.sqrt(noise_squares / freedom / sums.x_squares)  # of a least-squares slope
    # Between runs without noise any difference is a real one.
    p = 2 * t_below(freedom, -abs(delta) / error) if error > 0 else float(delta == 0)
    half_width = t_quantile(freedom) * error
    low = math.exp(delta - half_width)
    high = math.exp(delta + half_width)
    return Slowdown(hosts, factor=math.exp(delta), low=low, high=high, p=p)


def _shared_host_by_trial(runs: Sequence[Run]) -> dict[str, str]:
    """Return trial identity -> a host on which another run was under way at the same time as one of its runs.

    Trials whose runs had their hosts to themselves are left out.
    """
    shared_hosts: dict[str, str] = {}
    last_to_end: dict[str, Run] = {}  # host to the run that ends last of those that have begun there
    for run in sorted(runs, key=_start_unix_seconds):
        for host in run.header.hosts:
            earlier_run = last_to_end.get(host)
            if earlier_run is None:
                last_to_end[host] = run
                continue
            if _start_unix_seconds(run) < _end_unix_seconds(earlier_run):
                shared_hosts[earlier_run.header.trial_id] = host
                shared_hosts[run.header.trial_id] = host
            last_to_end[host] = max(earlier_run, run, key=_end_unix_seconds)
    return shared_hosts


def _start_unix_seconds(run: Run) -> float:
    return run.outcome.started_unix_seconds


def _end_unix_seconds(run: Run) -> float:
    return run.outcome.started_unix_seconds + run.outcome.wall_seconds


def side_by_side(measured: Sequence[TrialResult], runs: Sequence[Run]) -> Iterable[Finding]:
    """Reports runs that went on at the same time, on one host or on several, and whether that slowed them.

    Args:
        measured: the trials with their runs.
        runs: all runs of the study, failed ones too: others may have run beside these.
    """
    runs_with_hosts = [run for run in runs if run.header.imported is None and run.header.hosts]
    if not runs_with_hosts:
        return
    shares = concurrent_shares(runs_with_hosts)
    concurrent_runs = int((shares > _LARGEST_SHARE_ALONE).sum())
    if concurrent_runs == 0:
        return
    host_by_trial = _shared_host_by_trial(runs_with_hosts)
    if host_by_trial:
        yield _shared_host_warning(host_by_trial)
    subject = f"{concurrent_runs} of {counted(len(runs_with_hosts), 'run')} had others of the study beside them"
    share_by_folder = {run.header.folder: float(share) for run, share in zip(runs_with_hosts, shares, strict=True)}
    yield _slowdown_finding(subject, slowdowns(measured, share_by_folder))


def _shared_host_warning(host_by_trial: Mapping[str, str]) -> Finding:
    """Return the warning on runs that went on at the same time on one host (`_shared_host_by_trial`)."""
    first_host = next(iter(host_by_trial.values()))
    return warning(
        "shared-host",
        message=f"runs went on at the same time on one host ({first_host}) in "
        f"{counted(len(host_by_trial), 'trial')}: each had less than the host",
        advice='Ask for whole nodes (slurm.options = ["--exclusive"]).',
        trials=host_by_trial,
    )


def _slowdown_finding(subject: str, estimates: Sequence[Slowdown]) -> Finding:
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
    adjusted_p_values = holm([estimate.p for estimate in estimates])
    significant = [estimate for estimate, p in zip(estimates, adjusted_p_values, strict=True) if p < 1 - CONFIDENCE]
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
    """Return "12 % (11 % to 13 %) longer over several hosts"; "shorter" where steps take less time beside others."""
    if estimate.factor >= 1:
        interval = f"{percent(estimate.low - 1)} to {percent(estimate.high - 1)}"
        return f"{percent(estimate.factor - 1)} ({interval}) longer {estimate.hosts}"
    interval = f"{percent(1 - estimate.high)} to {percent(1 - estimate.low)}"
    return f"{percent(1 - estimate.factor)} ({interval}) shorter {estimate.hosts}"
