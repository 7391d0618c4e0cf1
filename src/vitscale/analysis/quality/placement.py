"""Did everything run where it should: on like hardware, with cores and GPUs of its own, under one set of settings?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from vitscale.analysis.quality.wording import count, note, warning
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


def ill_placed(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Ranks that shared physical cores, lay far from their GPU, or left GPUs idle."""
    shared = _by_trial(measured, shared_physical_cores)
    if shared:
        yield warning(
            "shared-physical-cores",
            f"ranks shared physical cores in {count(shared)} ({next(iter(shared.values()))}): a trial with fewer ranks "
            "has the execution units to itself, and scaling looks worse than it is",
            "Use fewer launch.threads_per_rank, or bind each rank to whole cores.",
            shared,
        )
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
    idle = {
        trial.trial_id: most
        for trial in measured
        if (
            most := max(
                (e.gpus_unused or 0 for run in in_unlike_places(trial.recorded_runs) for e in environments(run)),
                default=0,
            )
        )
    }
    if idle:
        yield note(
            "gpus-unused",
            f"{count(idle)} trained on the CPU, and torch saw {max(idle.values())} CUDA device(s) there",
            "Set train.device = 'cuda' if they were to be used.",
            idle,
        )


def throttled(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Clocks held back by a GPU, or ranks held back by the CPU controller, for more than 1 % of the time."""
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
    held = {
        trial.trial_id: trial.resources.cpu_throttled_share
        for trial in measured
        if trial.resources and (trial.resources.cpu_throttled_share or 0.0) > _THROTTLED
    }
    if held:
        most = max(share or 0.0 for share in held.values())
        yield warning(
            "throttled",
            f"throttled: the CPU quota held back {count(held)} (up to {percent(most)} of their threads' time)",
            "Use fewer ranks, threads_per_rank or data.workers than the quota has cores, or ask for a larger quota.",
            held,
        )


def gradient_dtypes(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials that move different numbers of bytes, and engines that name another dtype than is sent."""
    by_dtype: dict[str, list[str]] = {}
    otherwise: list[tuple[TrialResult, str]] = []
    for trial in measured:
        claimed = next((run.model.gradient_dtype for run in trial.run_figures if run.model), None)
        sent = trial.traffic.gradient_dtype if trial.traffic else None
        if dtype := sent or claimed:
            by_dtype.setdefault(dtype, []).append(trial.trial_id)
        if sent and claimed and sent != claimed:
            otherwise.append((trial, f"{sent} where {trial.trial.train.engine} names {claimed}"))
    if otherwise:
        asked = any(trial.trial.train.gradient_dtype for trial, _ in otherwise)
        yield (warning if asked else note)(
            "gradient-dtype-sent",
            f"gradients do not travel in the dtype that the engine names: in {count(otherwise)} they travel as "
            f"{' and as '.join(dict.fromkeys(how for _, how in otherwise))}",
            "Go by what was sent: it was counted. See the table of what an optimizer step sends.",
            [trial for trial, _ in otherwise],
        )
    if len(by_dtype) > 1:
        each = " and ".join(f"{dtype} in {count(ids)}" for dtype, ids in by_dtype.items())
        yield note(
            "gradient-dtype",
            f"gradients travel as {each}: those trials do not move the same number of bytes",
            "Compare only trials of one dtype where the network matters.",
            [trial for ids in by_dtype.values() for trial in ids],
        )


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
