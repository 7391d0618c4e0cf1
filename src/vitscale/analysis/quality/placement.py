"""Did everything run where it should: on like hardware, with cores and GPUs of its own, under one set of settings?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from vitscale.analysis.quality.wording import by_cause, count, note, warning
from vitscale.analysis.runs.environments import (
    environments,
    in_unlike_places,
    off_their_gpus_node,
    oversubscription,
    shared_physical_cores,
)
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import rough_percent as percent
from vitscale.store.results import Run

_Seen = TypeVar("_Seen")
_THROTTLED = 0.01
"""Share of the time above which throttling is reported: below it no step time changes by more than that."""


def unlike_repeats(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials with runs that may not be combined with the others."""
    apart = [trial for trial in measured if trial.left_out]
    if apart:
        yield warning(
            "unlike-runs",
            f"unlike runs are not combined: of {count(apart)} some repeats are left out "
            f"({apart[0].name}, {apart[0].left_out[0]})",
            "Run the study again in one folder on one kind of machine, with one vitscale and one set of library "
            "versions; --combine-unlike takes all runs together.",
            apart,
        )


def across_hosts(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> Iterable[Finding]:
    """Curves that begin inside one host and go on over several: one line over two networks."""
    nodes = {trial.trial_id: trial.trial.world.nodes for trial in trials}
    for curve in curves:
        inside = [point for point in curve.points if nodes[point.trial_id] == 1]
        beyond = [point for point in curve.points if nodes[point.trial_id] > 1]
        # One rank alone exchanges nothing: it belongs to either network.
        if beyond and any(point.gpus > 1 for point in inside):
            yield note(
                "across-hosts",
                f"{curve.name} ({curve.mode}): up to {inside[-1].gpus} ranks lie on one host, from {beyond[0].gpus} on "
                "they lie on several: what is lost between the two is the network between hosts",
                "To see what it costs, compare the same rank count packed and spread: sweep scaling.gpus_per_node.",
                beyond,
            )


def unlike_points(curves: Sequence[CurveResult]) -> Iterable[Finding]:
    """Points that may not be compared with their baseline."""
    for curve in curves:
        if curve.unlike:
            yield warning(
                "unlike-runs",
                f"unlike runs are not combined: {curve.name} ({curve.mode}) has points that differ from the baseline "
                f"in more than rank count ({next(iter(curve.unlike.values()))}); they have no speedup",
                "Run the whole curve on one kind of machine, with one vitscale, one set of library versions and the "
                "same images.",
                curve.unlike,
            )


def _by_trial(measured: Sequence[TrialResult], look: Callable[[Run], _Seen]) -> dict[str, _Seen]:
    """Identity of a trial to what a look at its runs tells, where it tells anything."""
    return {
        trial.trial_id: seen
        for trial in measured
        for run in in_unlike_places(trial.recorded_runs)
        if (seen := look(run))
    }


def oversubscribed(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Ranks that shared cores or a GPU."""
    shared = _by_trial(measured, oversubscription)
    if shared:
        yield warning(
            "oversubscribed",
            f"oversubscribed: {count(shared)} shared cores or GPUs ({next(iter(shared.values()))}); their times say "
            "nothing about scaling",
            "Use fewer ranks or fewer threads_per_rank, so that each rank has cores of its own.",
            shared,
        )


def on_shared_physical_cores(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Ranks that shared physical cores."""
    shared = _by_trial(measured, shared_physical_cores)
    if shared:
        yield warning(
            "shared-physical-cores",
            f"ranks shared physical cores in {count(shared)} ({next(iter(shared.values()))}): a trial with fewer ranks "
            "has the execution units to itself, and scaling looks worse than it is",
            "Use fewer launch.threads_per_rank, or bind each rank to whole cores.",
            shared,
        )


def far_from_gpu(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Ranks that computed on cores far from their GPU."""
    far = _by_trial(measured, off_their_gpus_node)
    if far:
        ranks = next(iter(far.values()))
        yield warning(
            "far-from-gpu",
            f"ranks computed on cores of another memory node than their GPU's in {count(far)} (rank "
            f"{', '.join(map(str, ranks))}): kernels are launched and batches copied across sockets",
            "Leave the binding to vitscale, ask for cores on every socket, or use fewer launch.threads_per_rank.",
            far,
        )


def gpus_unused(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials that trained on the CPU beside GPUs."""
    idle = {trial.trial_id: gpus for trial in measured if (gpus := _unused_gpus(trial))}
    if idle:
        yield note(
            "gpus-unused",
            f"{count(idle)} trained on the CPU, and torch saw {max(idle.values())} CUDA device(s) there",
            "Set train.device = 'cuda' if they were to be used.",
            idle,
        )


def _unused_gpus(trial: TrialResult) -> int:
    """Most GPUs that a rank of the trial saw and did not use."""
    gpus = [0]
    for run in in_unlike_places(trial.recorded_runs):
        gpus += [environment.gpus_unused or 0 for environment in environments(run)]
    return max(gpus)


def throttled_gpus(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """GPUs that slowed their clocks for more than 1 % of the time, or for an unknown one."""
    hot = {}
    for trial in measured:
        if trial.resources is None or not trial.resources.throttle_reasons:
            continue
        reasons, share = ", ".join(trial.resources.throttle_reasons), trial.resources.throttled_share
        if share is None or share > _THROTTLED:
            hot[trial.trial_id] = reasons if share is None else f"{reasons} in {percent(share)} of the samples"
    if hot:
        yield warning(
            "throttled",
            f"throttled: GPUs slowed their clocks in {count(hot)} ({next(iter(hot.values()))})",
            "See to cooling and the power supply (nvidia-smi -q -d PERFORMANCE names the cause), or lock the clocks "
            "lower for all runs alike.",
            hot,
        )


def at_power_limit(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """GPUs that ran at their power limit, or at another one, for more than 1 % of the time."""
    at_limit = [trial for trial in measured if trial.resources and (trial.resources.limited_share or 0.0) > _THROTTLED]
    if at_limit:
        used = [trial.resources for trial in at_limit if trial.resources]
        watts = sorted({limit for trial in used for limit in trial.power_limit_watts})
        of = f" of {' and '.join(f'{limit:g}' for limit in watts)} W" if watts else ""
        clocks = [trial.sm_clock_mhz for trial in used if trial.sm_clock_mhz is not None]
        clock = f", median clock {min(clocks):,.0f} to {max(clocks):,.0f} MHz" if clocks else ""
        rest = sorted({limit for trial in used for limit in trial.limits} - {"power cap"})
        others = f" ({', '.join(rest)})" if rest else ""
        where = f"their power limit{of}" if any("power cap" in trial.limits for trial in used) else "a limit"
        yield note(
            "power-limit",
            f"GPUs ran at {where}{others} in {count(at_limit)}{clock}",
            "That is normal under load. Times belong to this limit: compare only GPUs with the same one.",
            at_limit,
        )


def throttled_by_cpu_quota(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Ranks that the CPU controller held back for more than 1 % of the time."""
    throttled = {}
    for trial in measured:
        share = trial.resources.cpu_throttled_share if trial.resources else None
        if share is not None and share > _THROTTLED:
            throttled[trial.trial_id] = share
    if throttled:
        most = max(throttled.values())
        yield warning(
            "throttled",
            f"throttled: the CPU quota held back {count(throttled)} (up to {percent(most)} of their threads' time)",
            "Use fewer ranks, threads_per_rank or data.workers than the quota has cores, or ask for a larger quota.",
            throttled,
        )


def gradients_sent_otherwise(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose gradients travel in another dtype than the engine names."""
    otherwise = {}
    for trial in measured:
        sent, named = _sent_dtype(trial), _named_dtype(trial)
        if sent and named and sent != named:
            otherwise[trial.trial_id] = f"{sent} where {trial.trial.train.engine} names {named}"
    if otherwise:
        asked = any(trial.trial.train.gradient_dtype for trial in measured if trial.trial_id in otherwise)
        yield (warning if asked else note)(
            "gradient-dtype-sent",
            f"gradients do not travel in the dtype that the engine names: in {count(otherwise)} they travel as "
            f"{' and as '.join(dict.fromkeys(otherwise.values()))}",
            "Go by what was sent: it was counted. See the table of what an optimizer step sends.",
            otherwise,
        )


def unlike_gradient_dtypes(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials that move different numbers of bytes, for their gradients travel in unlike dtypes."""
    trials_by_dtype = by_cause(measured, lambda trial: _sent_dtype(trial) or _named_dtype(trial))
    if len(trials_by_dtype) > 1:
        each = " and ".join(f"{dtype} in {count(trials)}" for dtype, trials in trials_by_dtype.items())
        yield note(
            "gradient-dtype",
            f"gradients travel as {each}: those trials do not move the same number of bytes",
            "Compare only trials of one dtype where the network matters.",
            [trial for trials in trials_by_dtype.values() for trial in trials],
        )


def _sent_dtype(trial: TrialResult) -> str | None:
    """The dtype in which gradients were counted."""
    return trial.traffic.gradient_dtype if trial.traffic else None


def _named_dtype(trial: TrialResult) -> str | None:
    """The dtype in which gradients travel by the engine's own account."""
    return next((run.model.gradient_dtype for run in trial.run_figures if run.model), None)


def surroundings_changed(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Host, settings or revision that changed in the course of the study."""
    around = [trial.environment for trial in measured if trial.environment]
    changed = []
    if len({run.hosts for run in around if len(run.hosts) == 1}) > 1:
        changed.append("host")
    if len({run.settings for run in around}) > 1:
        changed.append("NCCL or gloo settings")
    if len({run.git_revision for run in around} - {None}) > 1:
        changed.append("git revision of the working directory")
    if changed:
        yield note(
            "surroundings-changed",
            f"not all trials ran under the same {', '.join(changed)}",
            "See the environment below; run again under one of them if that matters here.",
        )
