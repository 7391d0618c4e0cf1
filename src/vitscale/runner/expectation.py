"""How long a plan's runs are expected to take: from measurements, else roughly from FLOPs."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vitscale import analysis
from vitscale.advice.comparable_series import ComparableSeries
from vitscale.advice.request import of_a_run
from vitscale.analysis.runs.compute import flops_per_image
from vitscale.errors import RequestError, StoreError
from vitscale.machine.hardware import this_machine
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evaluating import measured_step
from vitscale.prediction.evidence import MeasuredPoint, Series, evidence_of
from vitscale.prediction.finishing import with_start_up
from vitscale.prediction.fitting import Fitted, fit
from vitscale.prediction.start_up import beside_later_steps, evaluation_seconds, start_up
from vitscale.prediction.workloads import evaluate_all, measured_like, workload
from vitscale.present.estimate import Estimate
from vitscale.present.unread import Unread
from vitscale.runner.planning import Plan
from vitscale.schedulers import Submitter
from vitscale.store.checks import CheckRecord, latest
from vitscale.trial.trial import DeviceName, Precision, Trial

ROUGHLY = "order of magnitude"
_SHARE_OF_MATMUL = 1 / 3
"""Share of the matrix-multiply rate that training reaches; the interval is from a ninth to all of it."""
_NOTHING_TO_GO_BY = (
    "no results to predict from (give --from RESULTS), and no stored `vitscale check` of its hosts on its device and "
    "in its precision"
)


@dataclass(frozen=True)
class Expected:
    """Expected time of one run of a trial. `seconds` None: unavailable, and `reason` says why."""

    seconds: Estimate | None
    """Seconds, with start-up and end where they were measured; the interval is the 90 % interval of a future run."""
    known_by: str
    """measured, interpolated, extrapolated, prior-driven, or `ROUGHLY`; empty where unavailable."""
    reason: str = ""
    without_start_up: str = ""
    """The launcher for which no start-up was measured; empty where start-up is included, or no results were used."""


@dataclass(frozen=True)
class Expectations:
    """Expected times of all trials of a plan; empty where nobody asked for them."""

    by_trial: Mapping[str, Expected] = field(default_factory=dict)
    origin: str = ""
    """What the expectations rest on."""
    price_per_gpu_hour: float | None = None
    unread: tuple[Unread, ...] = ()
    """What cannot be read of the results that they rest on."""

    def total(
        self, plan: Plan, without: Collection[str] = (), done: Collection[tuple[str, int]] = ()
    ) -> tuple[Estimate, int, Estimate] | None:
        """(seconds of all runs one after another, number of runs, GPU-hours); None where no run's time is known.

        The runs are those that are certain (`Plan.certain_runs`). Trials `without` and runs (trial, repeat) that are
        `done` are left out.

        The intervals' ends are added up too, as if all runs were slow or fast together.
        """
        seconds, hours, runs = [0.0] * 3, [0.0] * 3, 0
        for run in plan.certain_runs:
            own = self.by_trial[run[0]].seconds if self.by_trial else None
            if own is None or run[0] in without or run in done:
                continue
            runs += 1
            ranks = plan.record.trials[run[0]].world.size
            for n, end in enumerate((own.value, *own.ends)):
                seconds[n] += end
                hours[n] += ranks * end / 3600
        return (of_a_run(*seconds), runs, of_a_run(*hours)) if runs else None


def expectations(plan: Plan, results: Path | None, price_per_gpu_hour: float | None = None) -> Expectations:
    """How long each trial is expected to take.

    Args:
        plan: the study.
        results: folder to predict from. None: the one that `vitscale run` would continue, where it exists.
        price_per_gpu_hour: in any currency.

    Raises:
        StoreError: `results` was given, and holds no results.
    """
    own = Path("results") / plan.record.name
    known, origin, unread = _from_results(plan, own if results is None else results, needed=results is not None)
    missing = [trial_id for trial_id in plan.record.trials if trial_id not in known or known[trial_id].seconds is None]
    if missing and (rough := _from_flops(plan, missing)) is not None:
        known |= rough[0]
        origin = "; ".join(part for part in (origin, rough[1]) if part)
    unavailable = Expected(None, "", _NOTHING_TO_GO_BY)
    by_trial = {trial_id: known.get(trial_id, unavailable) for trial_id in plan.record.trials}
    return Expectations(by_trial, origin, price_per_gpu_hour, unread)


class _FromResults(NamedTuple):
    """What a results folder tells of a plan's trials."""

    known: dict[str, Expected]
    origin: str
    unread: tuple[Unread, ...]


def _from_results(plan: Plan, results: Path, *, needed: bool) -> _FromResults:
    if not needed and not (results / "study.json").is_file():
        return _FromResults({}, "", ())
    try:
        analysed = analysis.analyse_folder(results)
    except StoreError:
        if needed:
            raise
        return _FromResults({}, "", ())
    evidence = evidence_of(results, analysed)
    if not evidence.series:
        return _FromResults({}, "", analysed.unread)
    fitted = fit(evidence)
    groups: dict[str, list[str]] = {}
    steps: dict[str, tuple[Estimate, str] | str] = {}
    for trial_id, trial in plan.record.trials.items():
        own = measured_like(evidence.series, trial)
        alike = [point for point in own if Candidate.of(point.trial) == Candidate.of(trial)]
        if alike and not trial.train.micro_batches:
            steps[trial_id] = measured_step(own, alike[0]), "measured"
        elif (near := _nearest(evidence.series, trial)) is None:
            steps[trial_id] = f"{results} holds no run of this model, data and training"
        else:
            groups.setdefault(near.name, []).append(trial_id)
    for series, members in groups.items():
        steps |= _predicted(plan, fitted, series, members)
    points = [point for measured_series in evidence.series for point in measured_series.points]
    known = {
        trial_id: Expected(None, "", step) if isinstance(step, str) else _run(plan, trial_id, points, *step)
        for trial_id, step in steps.items()
    }
    return _FromResults(known, f"predicted from {results}", analysed.unread)


def _nearest(series: Sequence[Series], trial: Trial) -> Series | None:
    alike = [candidate for candidate in series if workload(candidate.points[-1].trial) == workload(trial)]
    return ComparableSeries(alike[0], tuple(alike)).nearest(Candidate.of(trial)) if alike else None


def _predicted(plan: Plan, fitted: Fitted, series: str, members: list[str]) -> dict[str, tuple[Estimate, str] | str]:
    try:
        evaluated = evaluate_all(fitted, series, [Candidate.of(plan.record.trials[trial_id]) for trial_id in members])
    except RequestError as error:
        return dict.fromkeys(members, str(error))
    steps = [evaluated.step.at(n) for n in range(len(members))]
    return {
        trial_id: "its step cannot be predicted" if math.isnan(step.value) else (step, label)
        for trial_id, step, label in zip(members, steps, evaluated.labels, strict=True)
    }


def _run(plan: Plan, trial_id: str, points: Sequence[MeasuredPoint], step: Estimate, label: str) -> Expected:
    """What one run is expected to take, with its start-up, of which the first step is part, evaluations and its end."""
    trial = plan.record.trials[trial_id]
    of_epoch, count = plan.steps_of(trial_id)
    starts = start_up(points, trial, beside_later_steps)
    evaluated = count / of_epoch * evaluation_seconds(points, trial) if starts is not None else 0.0
    ends = [(count - (starts is not None)) * seconds + evaluated for seconds in (step.value, *step.future_ends)]
    seconds = of_a_run(*with_start_up(starts.seconds if starts else None, *ends))
    return Expected(seconds, label, "", "" if starts is not None else trial.launcher)


def _from_flops(plan: Plan, trial_ids: list[str]) -> tuple[dict[str, Expected], str] | None:
    """Times at a third of the matrix-multiply rate that a check measured, without transfers and start-up."""
    largest = max((trial.world for trial in plan.record.trials.values()), key=lambda world: world.size)
    hosts = tuple(host.name for host in plan.scheduler.hosts(largest))
    if not hosts:
        if isinstance(plan.scheduler, Submitter) or plan.scheduler.machine() != this_machine():
            return None  # no check is known of a machine that [node] describes
        hosts = (socket.gethostname(),)
    checks: dict[tuple[DeviceName, Precision], CheckRecord | None] = {}
    expected = {}
    for trial_id in trial_ids:
        trial = plan.record.trials[trial_id]
        kind = trial.train.device, trial.train.precision
        if kind not in checks:
            checks[kind] = _check_of(hosts, *kind)
        if (check := checks[kind]) is None:
            continue
        rate = statistics.median(_rates(check, *kind))
        flops = flops_per_image(trial)
        if isinstance(flops, str):
            expected[trial_id] = Expected(None, "", flops)
            continue
        _, count = plan.steps_of(trial_id)
        # Each stage of a pipeline stands still while the pipeline fills and drains.
        working = 1 - trial.parallel.bubble_share(trial.train.grad_accum)
        least = count * trial.global_batch / trial.world.size * flops / rate / working
        expected[trial_id] = Expected(
            of_a_run(least / _SHARE_OF_MATMUL, least, least / _SHARE_OF_MATMUL**2), ROUGHLY
        )  # fmt: skip
    used = sorted({check.started_unix_seconds for check in checks.values() if check is not None})
    if not used:
        return None
    days = dict.fromkeys(time.strftime("%Y-%m-%d", time.gmtime(started)) for started in used)
    how = f"{ROUGHLY} from FLOPs at a third of the matrix-multiply rate of vitscale check, {' and '.join(days)}"
    return expected, f"{how}, start-up and transfers left out"


_PRODUCTS: Mapping[Precision, tuple[str, ...]] = {
    "fp32": ("fp32", "tf32"),
    "bf16": ("bf16",),
    "bf16-params": ("bf16",),
    "fp16": ("fp16",),
}
"""Precision -> how a check may say that its matrices are multiplied: TF32 is fp32 as some GPUs compute it."""


def _check_of(hosts: tuple[str, ...], device: DeviceName, precision: Precision) -> CheckRecord | None:
    """The newest of the user's own checks of these hosts that multiplied matrices as trials of this kind do."""
    return latest(None, hosts, lambda check: bool(_rates(check, device, precision)))


def _rates(check: CheckRecord, device: DeviceName, precision: Precision) -> list[float]:
    """FLOP/s of matrix products on its ranks; empty for another device or another arithmetic."""
    lines = [rank.matmul for rank in check.ranks if check.request.device == device]
    return [line.flops_per_second for line in lines if line is not None and line.dtype in _PRODUCTS[precision]]
