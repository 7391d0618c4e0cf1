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
    """Share of each run's time in which another run was under way, in [0, 1]."""
    began = np.array([run.outcome.started_unix_seconds for run in runs])
    ended = began + np.array([run.outcome.wall_seconds for run in runs])
    moments = np.concatenate([began, ended])
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    under_way = np.cumsum(np.where(order < len(runs), 1, -1))
    together = np.concatenate([[0.0], np.cumsum(np.diff(moments) * (under_way[:-1] > 1))])
    spent = np.interp(ended, moments, together) - np.interp(began, moments, together)
    took = np.where(ended > began, ended - began, 1.0)
    return np.asarray(np.clip(spent / took, 0.0, 1.0), dtype=np.float64)


def slowdowns(measured: Sequence[TrialResult], beside: Mapping[str, float]) -> list[Slowdown]:
    """What runs lost to others beside them; empty where no trial has runs both alone and beside others.

    Args:
        measured: trials with their runs.
        beside: run folder to the share of its time in which another run was under way.
    """
    contrast: dict[str, float] = {}
    product: dict[str, float] = {}
    total = freedom = 0.0
    for trial in measured:
        known = [
            (beside[record.header.folder], math.log(figures.step_seconds))
            for record, figures in zip(trial.recorded_runs, trial.run_figures, strict=True)
            if record.header.folder in beside and figures.step_seconds
        ]
        if len(known) < 2:
            continue
        x, y = (values - values.mean() for values in np.array(known).T)
        hosts = "within one host" if trial.trial.world.nodes == 1 else "over several hosts"
        contrast[hosts] = contrast.get(hosts, 0.0) + float(x @ x)
        product[hosts] = product.get(hosts, 0.0) + float(x @ y)
        total += float(y @ y)
        freedom += len(known) - 1
    told = [hosts for hosts, squares in contrast.items() if squares >= _LEAST_CONTRAST]
    freedom -= len(told)
    if not told or freedom < _FEWEST_FREEDOM:
        return []
    left = max(0.0, total - sum(product[hosts] ** 2 / contrast[hosts] for hosts in told))
    slowed = []
    for hosts in told:
        delta, error = product[hosts] / contrast[hosts], math.sqrt(left / freedom / contrast[hosts])
        half = t_quantile(freedom) * error
        p = 2 * t_below(freedom, -abs(delta) / error) if error > 0 else float(delta == 0)
        slowed.append(Slowdown(hosts, math.exp(delta), math.exp(delta - half), math.exp(delta + half), p))
    return slowed


def _on_one_host(runs: Sequence[Run]) -> dict[str, str]:
    """Trials with a run that went on beside another on one of its hosts -> that host."""
    shared: dict[str, str] = {}
    latest: dict[str, Run] = {}
    """Host to the run that ends last of those that have begun there."""
    for run in sorted(runs, key=lambda run: run.outcome.started_unix_seconds):
        for host in run.header.hosts:
            before = latest.get(host)
            if before is not None and run.outcome.started_unix_seconds < _ended(before):
                shared |= dict.fromkeys((before.header.trial_id, run.header.trial_id), host)
            latest[host] = run if before is None else max(before, run, key=_ended)
    return shared


def _ended(run: Run) -> float:
    return run.outcome.started_unix_seconds + run.outcome.wall_seconds


def side_by_side(measured: Sequence[TrialResult], runs: Sequence[Run]) -> Iterable[Finding]:
    """Studies whose runs went on side by side. `runs`: all runs, failed ones too."""
    own = [run for run in runs if run.header.imported is None and run.header.hosts]
    shares = shares_beside(own) if own else np.zeros(0)
    if not (count := int((shares > _ALONE).sum())):
        return
    if shared := _on_one_host(own):
        yield warning(
            "shared-host",
            f"runs went on at the same time on one host ({next(iter(shared.values()))}) in "
            f"{counted(len(shared), 'trial')}: each had less than the host",
            'Ask for whole nodes (slurm.options = ["--exclusive"]).',
            shared,
        )
    beside = {run.header.folder: float(share) for run, share in zip(own, shares, strict=True)}
    said = f"{count} of {counted(len(own), 'run')} had others of the study beside them"
    slowed = slowdowns(measured, beside)
    if not slowed:
        yield note(
            "side-by-side",
            f"{said}; whether these slowed them is unknown: too few trials have runs alone and beside others",
            "With measure.repeats = 3 or more `vitscale run` lets some runs be alone, to tell.",
        )
        return
    different = [p < 1 - CONFIDENCE for p in holm([each.p for each in slowed])]
    figures = listed(
        f"{percent(each.factor - 1)} ({percent(each.low - 1)} to {percent(each.high - 1)}) longer {each.hosts}"
        if each.factor >= 1
        else f"{percent(1 - each.factor)} ({percent(1 - each.high)} to {percent(1 - each.low)}) shorter {each.hosts}"
        for each in slowed
    )
    if any(different):
        slower = any(each.factor > 1 for each, differs in zip(slowed, different, strict=True) if differs)
        yield warning(
            "side-by-side",
            f"{said}, and took another time for a step than runs of the same trial alone: {figures}",
            "What they share is storage, switches and the driver's machine: these times are of a cluster that others "
            "use too. For those of an idle one leave out measure.parallel_runs, or set it lower, and give -o a new "
            "folder."
            if slower
            else "Nothing that they share makes a step shorter: their hosts, clocks or power differed. Compare these.",
        )
    else:
        yield note(
            "side-by-side",
            f"{said}; no significant difference to steps of the same trials alone: {figures}",
            "What these runs share may still slow them: by "
            f"{percent(max(1.0, *(each.high for each in slowed)) - 1)} at most, by that interval.",
        )
