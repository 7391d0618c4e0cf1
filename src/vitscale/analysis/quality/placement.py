"""Did everything run where it should: on like hardware, with cores and GPUs of its own, under one set of settings?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from vitscale.analysis.quality.wording import by_cause, counted_trials, note, warning
from vitscale.analysis.runs.environments import (
    environments,
    last_in_each_environment,
    off_their_gpus_node,
    oversubscription,
    shared_physical_cores,
)
from vitscale.analysis.runs.resources import ResourceFigures
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.trials import TrialResult
from vitscale.machine.gpus import VENDORS
from vitscale.present.document import Finding
from vitscale.present.units import rough_percent as percent
from vitscale.store.results import Run

_Fault = TypeVar("_Fault")
_REPORTED_THROTTLED_SHARE = 0.01
"""Share of the time above which throttling is reported: below it no step time changes by more than that."""
_POWER_CAP = "power cap"
_CAUSE_COMMANDS = " or ".join(vendor.cause_command for vendor in VENDORS)
"""The limit of a GPU's clocks that is its power limit, as `ResourceFigures.limits` names it."""


def unlike_repeats(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials with repeats on other hardware or software than most, which are left out of their figures.

    The message has the first repeat that is left out, as an example.
    """
    incomplete_trials = [trial for trial in measured if trial.left_out]
    if not incomplete_trials:
        return
    first_trial = incomplete_trials[0]
    first_repeat = first_trial.left_out[0]  # "repeat 2: torch 2.12 against 2.13"
    yield warning(
        "unlike-runs",
        message=f"unlike runs are not combined: of {counted_trials(incomplete_trials)} some repeats are left out "
        f"({first_trial.name}, {first_repeat})",
        advice="Run the study again in one folder on one kind of machine, with one vitscale and one set of library "
        "versions; --combine-unlike takes all runs together.",
        trials=incomplete_trials,
    )


def across_hosts(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes curves that begin inside one host and go on over several: one line over two networks."""
    hosts_by_trial = {result.trial_id: result.trial.world.nodes for result in trials}
    for curve in curves:
        # Both from few ranks to many, as the points of a curve are.
        on_one_host = [point for point in curve.points if hosts_by_trial[point.trial_id] == 1]
        on_several = [point for point in curve.points if hosts_by_trial[point.trial_id] > 1]
        # One rank alone exchanges nothing: it belongs to either network.
        uses_network_inside = any(point.gpus > 1 for point in on_one_host)
        if on_several and uses_network_inside:
            most_on_one_host = on_one_host[-1].gpus
            fewest_on_several = on_several[0].gpus
            yield note(
                "across-hosts",
                message=f"{curve.name} ({curve.mode}): up to {most_on_one_host} ranks lie on one host, from "
                f"{fewest_on_several} on they lie on several: what is lost between the two is the network between "
                "hosts",
                advice="To see what it costs, compare the same rank count packed and spread: sweep "
                "scaling.gpus_per_node.",
                trials=on_several,
            )


def unlike_points(curves: Sequence[CurveResult]) -> Iterable[Finding]:
    """Warns of points that are not compared with their baseline, because hardware, software or the data differ."""
    for curve in curves:
        if curve.unlike:
            yield warning(
                "unlike-runs",
                message=f"unlike runs are not combined: {curve.name} ({curve.mode}) has points that differ from the "
                f"baseline in more than rank count ({_first_value(curve.unlike)}); they have no speedup",
                advice="Run the whole curve on one kind of machine, with one vitscale, one set of library versions and "
                "the same images.",
                trials=curve.unlike,
            )


def _faults_by_trial(measured: Sequence[TrialResult], fault_of_run: Callable[[Run], _Fault]) -> dict[str, _Fault]:
    """Return identity of a trial -> a fault in the placement of its ranks; lacks trials without a fault.

    Of runs that share the environments of their ranks only the last is examined. Of several faults in a trial the last
    one counts.

    Args:
        measured: the trials.
        fault_of_run: run -> its fault; empty where it has none.
    """
    faults = {}
    for trial in measured:
        for run in last_in_each_environment(trial.recorded_runs):
            fault = fault_of_run(run)
            if fault:
                faults[trial.trial_id] = fault
    return faults


def _first_value(values_by_trial: Mapping[str, _Fault]) -> _Fault:
    """Return the value of the first trial, as an example in a message."""
    return next(iter(values_by_trial.values()))


def oversubscribed(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of ranks that shared cores or a GPU."""
    shared = _faults_by_trial(measured, oversubscription)
    if not shared:
        return
    yield warning(
        "oversubscribed",
        message=f"oversubscribed: {counted_trials(shared)} shared cores or GPUs ({_first_value(shared)}); their times "
        "say nothing about scaling",
        advice="Use fewer ranks or fewer threads_per_rank, so that each rank has cores of its own.",
        trials=shared,
    )


def on_shared_physical_cores(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of ranks that shared physical cores."""
    shared = _faults_by_trial(measured, shared_physical_cores)
    if not shared:
        return
    yield warning(
        "shared-physical-cores",
        message=f"ranks shared physical cores in {counted_trials(shared)} ({_first_value(shared)}): a trial with fewer "
        "ranks has the execution units to itself, and scaling looks worse than it is",
        advice="Use fewer launch.threads_per_rank, or bind each rank to whole cores.",
        trials=shared,
    )


def far_from_gpu(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of ranks that computed on cores far from their GPU."""
    far_ranks = _faults_by_trial(measured, off_their_gpus_node)
    if not far_ranks:
        return
    ranks = _first_value(far_ranks)
    yield warning(
        "far-from-gpu",
        message="ranks computed on cores of another memory node than their GPU's in "
        f"{counted_trials(far_ranks)} (rank {', '.join(map(str, ranks))}): kernels are launched and batches copied "
        "across sockets",
        advice="Leave the binding to vitscale, ask for cores on every socket, or use fewer launch.threads_per_rank.",
        trials=far_ranks,
    )


def gpus_unused(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials that trained on the CPU beside GPUs."""
    unused_by_trial: dict[str, int] = {}
    for trial in measured:
        unused = _unused_gpus(trial)
        if unused:
            unused_by_trial[trial.trial_id] = unused
    if not unused_by_trial:
        return
    yield note(
        "gpus-unused",
        message=f"{counted_trials(unused_by_trial)} trained on the CPU, and torch saw {max(unused_by_trial.values())} "
        "CUDA device(s) there",
        advice="Set train.device = 'cuda' if they were to be used.",
        trials=unused_by_trial,
    )


def _unused_gpus(trial: TrialResult) -> int:
    """Return the largest number of GPUs that a rank of the trial saw and did not use."""
    most_unused = 0
    for run in last_in_each_environment(trial.recorded_runs):
        for environment in environments(run):
            most_unused = max(most_unused, environment.gpus_unused or 0)
    return most_unused


def throttled_gpus(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of GPUs that slowed their clocks for more than 1 % of the time, or for an unknown one."""
    throttling_by_trial: dict[str, str] = {}
    for trial in measured:
        throttling = _gpu_throttling(trial.resources)
        if throttling is not None:
            throttling_by_trial[trial.trial_id] = throttling
    if not throttling_by_trial:
        return
    yield warning(
        "throttled",
        message=f"throttled: GPUs slowed their clocks in {counted_trials(throttling_by_trial)} "
        f"({_first_value(throttling_by_trial)})",
        advice=f"See to cooling and the power supply ({_CAUSE_COMMANDS} names the cause), or lock the clocks lower for "
        "all runs alike.",
        trials=throttling_by_trial,
    )


def _gpu_throttling(resources: ResourceFigures | None) -> str | None:
    """Return "thermal (driver) in 12 % of the samples"; the reasons alone where the share is unknown.

    None where clocks were not throttled, or hardly.
    """
    if resources is None or not resources.throttle_reasons:
        return None
    reasons = ", ".join(resources.throttle_reasons)
    share = resources.throttled_share
    if share is None:
        return reasons
    return f"{reasons} in {percent(share)} of the samples" if share > _REPORTED_THROTTLED_SHARE else None


def at_power_limit(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes GPUs that ran at their power limit, or at another one, for more than 1 % of the time."""
    limited_trials: list[TrialResult] = []
    resources: list[ResourceFigures] = []
    for trial in measured:
        if trial.resources is not None and (trial.resources.limited_share or 0.0) > _REPORTED_THROTTLED_SHARE:
            limited_trials.append(trial)
            resources.append(trial.resources)
    if not limited_trials:
        return
    yield note(
        "power-limit",
        message=f"GPUs ran at {_limits_in_words(resources)} in {counted_trials(limited_trials)}"
        f"{_median_clocks_clause(resources)}",
        advice="That is normal under load. Times belong to this limit: compare only GPUs with the same one.",
        trials=limited_trials,
    )


def _limits_in_words(resources: Sequence[ResourceFigures]) -> str:
    """Return "their power limit of 300 and 350 W", "a limit (reliability)"."""
    limits = set(chain.from_iterable(figures.limits for figures in resources))
    watts = sorted(set(chain.from_iterable(figures.power_limit_watts for figures in resources)))
    if _POWER_CAP in limits:
        values = " and ".join(f"{limit:g}" for limit in watts)
        name = f"their power limit of {values} W" if watts else "their power limit"
    else:
        name = "a limit"
    other_limits = sorted(limits - {_POWER_CAP})
    return f"{name} ({', '.join(other_limits)})" if other_limits else name


def _median_clocks_clause(resources: Sequence[ResourceFigures]) -> str:
    """Return ", median clock 1,200 to 1,410 MHz": the lowest and the highest of the trials; empty where unknown."""
    clocks = [figures.sm_clock_mhz for figures in resources if figures.sm_clock_mhz is not None]
    return f", median clock {min(clocks):,.0f} to {max(clocks):,.0f} MHz" if clocks else ""


def throttled_by_cpu_quota(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of ranks that the CPU controller held back for more than 1 % of the time."""
    share_by_trial: dict[str, float] = {}  # of trials that were held back
    for trial in measured:
        share = trial.resources.cpu_throttled_share if trial.resources is not None else None
        if share is not None and share > _REPORTED_THROTTLED_SHARE:
            share_by_trial[trial.trial_id] = share
    if not share_by_trial:
        return
    yield warning(
        "throttled",
        message=f"throttled: the CPU quota held back {counted_trials(share_by_trial)} (up to "
        f"{percent(max(share_by_trial.values()))} of their threads' time)",
        advice="Use fewer ranks, threads_per_rank or data.workers than the quota has cores, or ask for a larger quota.",
        trials=share_by_trial,
    )


def gradients_sent_otherwise(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Reports trials whose gradients travel in another dtype than the engine names.

    It is a warning where a study asked for a dtype (`train.gradient_dtype`), else a note.
    """
    differing: list[TrialResult] = []
    clauses: list[str] = []
    for result in measured:
        sent_dtype = _sent_dtype(result)
        named_dtype = _named_dtype(result)
        if not sent_dtype or not named_dtype:  # not recorded
            continue
        if sent_dtype != named_dtype:
            differing.append(result)
            clauses.append(f"{sent_dtype} where {result.trial.train.engine} names {named_dtype}")
    if not differing:
        return
    is_requested = any(result.trial.train.gradient_dtype for result in differing)
    warning_or_note = warning if is_requested else note
    yield warning_or_note(
        "gradient-dtype-sent",
        message="gradients do not travel in the dtype that the engine names: in "
        f"{counted_trials(differing)} they travel as {' and as '.join(dict.fromkeys(clauses))}",
        advice="Go by what was sent: it was counted. See the table of what an optimizer step sends.",
        trials=differing,
    )


def unlike_gradient_dtypes(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials that move different numbers of bytes, for their gradients travel in unlike dtypes."""
    trials_by_dtype = by_cause(measured, lambda trial: _sent_dtype(trial) or _named_dtype(trial))
    if len(trials_by_dtype) < 2:
        return
    clauses = [f"{dtype} in {counted_trials(trials)}" for dtype, trials in trials_by_dtype.items()]
    yield note(
        "gradient-dtype",
        message=f"gradients travel as {' and '.join(clauses)}: those trials do not move the same number of bytes",
        advice="Compare only trials of one dtype where the network matters.",
        trials=chain.from_iterable(trials_by_dtype.values()),
    )


def _sent_dtype(trial: TrialResult) -> str | None:
    """Return the dtype in which gradients were counted; None where no run recorded what it sends."""
    return trial.traffic.gradient_dtype if trial.traffic is not None else None


def _named_dtype(trial: TrialResult) -> str | None:
    """Return the dtype in which gradients travel by the engine's own account; None where no run recorded its model."""
    for run in trial.run_figures:
        if run.model is not None:
            return run.model.gradient_dtype
    return None


def surroundings_changed(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes a host, settings or a revision that changed in the course of the study."""
    surroundings = [trial.environment for trial in measured if trial.environment is not None]
    single_hosts = {environment.hosts for environment in surroundings if len(environment.hosts) == 1}
    settings = {environment.settings for environment in surroundings}
    revisions = {environment.git_revision for environment in surroundings} - {None}
    changed = []
    if len(single_hosts) > 1:
        changed.append("host")
    if len(settings) > 1:
        changed.append("settings of NCCL, gloo or the network")
    if len(revisions) > 1:
        changed.append("git revision of the working directory")
    if changed:
        yield note(
            "surroundings-changed",
            message=f"not all trials ran under the same {', '.join(changed)}",
            advice="See the environment below; run again under one of them if that matters here.",
        )
