"""Expected times of a plan's runs: from measurements, else roughly from FLOPs.

From a results folder, a trial whose step was measured has that step; any other is predicted from the nearest of the
series that train the same. Start-up, evaluations and the end of a run are added where they were measured. Trials that
no results say anything of get an order of magnitude from the matrix-multiply rate that a stored check of their hosts
measured.
"""

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
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series, evidence_of
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
_MATMUL_SHARE = 1 / 3
"""Share of the matrix-multiply rate that training reaches; the interval is from a ninth to all of it."""
_NO_EVIDENCE = (
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
    """The results or checks that the expectations rest on, in words."""
    price_per_gpu_hour: float | None = None
    unread: tuple[Unread, ...] = ()
    """Parts that cannot be read of the results that they rest on."""

    def total(
        self, plan: Plan, without: Collection[str] = (), done: Collection[tuple[str, int]] = ()
    ) -> ExpectedTotal | None:
        """Return the time of all runs together; None where no run's time is known.

        The runs are those that are certain (`Plan.certain_runs`). Trials `without` and runs (trial, repeat) that are
        `done` are left out.
        """
        if not self.by_trial:
            return None
        seconds = _IntervalSum()
        gpu_hours = _IntervalSum()
        runs = 0
        for run in plan.certain_runs:
            expected = self.by_trial[run.trial_id].seconds
            if expected is None or run.trial_id in without or run in done:
                continue
            runs += 1
            low, high = expected.ends
            ranks = plan.record.trials[run.trial_id].world.size
            seconds.add(expected.value, low, high)
            gpu_hours.add(ranks * expected.value / 3600, ranks * low / 3600, ranks * high / 3600)
        if not runs:
            return None
        return ExpectedTotal(seconds.estimate(), runs, gpu_hours.estimate())


class ExpectedTotal(NamedTuple):
    """The time of several runs together."""

    seconds: Estimate
    """One run after another."""
    runs: int
    gpu_hours: Estimate


class _IntervalSum:
    """A sum of values whose intervals' ends are added up too, as if all runs were slow or fast together."""

    def __init__(self) -> None:
        self._value = 0.0
        self._low = 0.0
        self._high = 0.0

    def add(self, value: float, low: float, high: float) -> None:
        self._value += value
        self._low += low
        self._high += high

    def estimate(self) -> Estimate:
        return of_a_run(self._value, self._low, self._high)


def expectations(plan: Plan, results: Path | None, price_per_gpu_hour: float | None = None) -> Expectations:
    """Return how long each trial is expected to take.

    Args:
        plan: the study.
        results: folder to predict from. None: the one that `vitscale run` would continue, where it exists.
        price_per_gpu_hour: in any currency.

    Raises:
        StoreError: `results` was given, and holds no results.
    """
    default_folder = Path("results") / plan.record.name
    source = _from_results(plan, default_folder if results is None else results, needed=results is not None)
    by_trial = dict(source.by_trial)
    origins = [source.origin]
    missing = [
        trial_id for trial_id in plan.record.trials if trial_id not in by_trial or by_trial[trial_id].seconds is None
    ]
    rough = _from_flops(plan, missing) if missing else None
    if rough is not None:
        by_trial |= rough.by_trial
        origins.append(rough.origin)
    unavailable = Expected(None, "", _NO_EVIDENCE)
    return Expectations(
        {trial_id: by_trial.get(trial_id, unavailable) for trial_id in plan.record.trials},
        "; ".join(filter(None, origins)),
        price_per_gpu_hour,
        source.unread,
    )


class _Source(NamedTuple):
    """Expected times from one source."""

    by_trial: dict[str, Expected]
    origin: str = ""
    """The source in words; empty where it has no times."""
    unread: tuple[Unread, ...] = ()


class _StepTime(NamedTuple):
    """Seconds of one step of a trial."""

    seconds: Estimate
    known_by: str
    """measured, interpolated, extrapolated or prior-driven."""


def _from_results(plan: Plan, results: Path, *, needed: bool) -> _Source:
    """Return the times that a results folder gives; none where it holds no results, and is not `needed`.

    Raises:
        StoreError: it is needed, and holds no results.
    """
    if not needed and not (results / "study.json").is_file():
        return _Source({})
    try:
        analysed = analysis.analyse_folder(results)
    except StoreError:
        if needed:
            raise
        return _Source({})
    evidence = evidence_of(results, analysed)
    if not evidence.series:
        return _Source({}, unread=analysed.unread)
    steps = _step_times(plan, evidence, results)
    points = [point for series in evidence.series for point in series.points]
    by_trial = {}
    for trial_id, step in steps.items():
        if isinstance(step, _StepTime):
            by_trial[trial_id] = _run_time(plan, trial_id, points, step)
        else:
            by_trial[trial_id] = Expected(None, "", reason=step)
    return _Source(by_trial, f"predicted from {results}", analysed.unread)


def _step_times(plan: Plan, evidence: Evidence, results: Path) -> dict[str, _StepTime | str]:
    """Return the time of a step of each trial, or why it is not known."""
    fitted = fit(evidence)
    steps: dict[str, _StepTime | str] = {}
    trials_by_series: dict[str, list[str]] = {}
    for trial_id, trial in plan.record.trials.items():
        points = measured_like(evidence.series, trial)
        same_configuration = [point for point in points if Candidate.of(point.trial) == Candidate.of(trial)]
        if same_configuration and not trial.train.micro_batches:
            steps[trial_id] = _StepTime(measured_step(points, same_configuration[0]), "measured")
            continue
        nearest = _nearest_series(evidence.series, trial)
        if nearest is None:
            steps[trial_id] = f"{results} holds no run of this model, data and training"
        else:
            trials_by_series.setdefault(nearest.name, []).append(trial_id)
    for series_name, trial_ids in trials_by_series.items():
        steps |= _predicted_steps(plan, fitted, series_name, trial_ids)
    return steps


def _nearest_series(all_series: Sequence[Series], trial: Trial) -> Series | None:
    """Return the series of the same work whose configuration is the nearest; None where there is none of that work."""
    same_work = [series for series in all_series if workload(series.points[-1].trial) == workload(trial)]
    if not same_work:
        return None
    return ComparableSeries(same_work[0], tuple(same_work)).nearest(Candidate.of(trial))


def _predicted_steps(plan: Plan, fitted: Fitted, series_name: str, trial_ids: list[str]) -> dict[str, _StepTime | str]:
    """Return the time of a step of each trial as predicted from one series, or why it cannot be predicted."""
    candidates = [Candidate.of(plan.record.trials[trial_id]) for trial_id in trial_ids]
    try:
        evaluated = evaluate_all(fitted, series_name, candidates)
    except RequestError as error:
        return dict.fromkeys(trial_ids, str(error))
    steps: dict[str, _StepTime | str] = {}
    for position, (trial_id, label) in enumerate(zip(trial_ids, evaluated.labels, strict=True)):
        seconds = evaluated.step.at(position)
        if math.isnan(seconds.value):
            steps[trial_id] = "its step cannot be predicted"
        else:
            steps[trial_id] = _StepTime(seconds, label)
    return steps


def _run_time(plan: Plan, trial_id: str, points: Sequence[MeasuredPoint], step: _StepTime) -> Expected:
    """Return the time of one run, with its start-up, of which the first step is part, evaluations and its end.

    `points`: all measured points, from which start-up and evaluations are taken.
    """
    trial = plan.record.trials[trial_id]
    steps = plan.steps_of(trial_id)
    start_up_forecast = start_up(points, trial, beside_later_steps)
    if start_up_forecast is None:
        step_count = steps.per_run
        evaluations = 0.0
    else:
        step_count = steps.per_run - 1
        evaluations = steps.per_run / steps.per_epoch * evaluation_seconds(points, trial)
    steps_and_evaluations = [
        step_count * seconds + evaluations for seconds in (step.seconds.value, *step.seconds.future_ends)
    ]
    start_up_seconds = start_up_forecast.seconds if start_up_forecast else None
    return Expected(
        of_a_run(*with_start_up(start_up_seconds, *steps_and_evaluations)),
        step.known_by,
        without_start_up="" if start_up_forecast is not None else trial.launcher,
    )


class _Arithmetic(NamedTuple):
    """The arithmetic of a trial's matrix products: a check says nothing of another one."""

    device: DeviceName
    precision: Precision


def _from_flops(plan: Plan, trial_ids: list[str]) -> _Source | None:
    """Return times at a third of the matrix-multiply rate that a check measured, without transfers and start-up.

    None where no check of the plan's hosts is known.
    """
    hosts = _names_in_checks(plan)
    if not hosts:
        return None
    checks: dict[_Arithmetic, CheckRecord | None] = {}
    by_trial = {}
    for trial_id in trial_ids:
        trial = plan.record.trials[trial_id]
        arithmetic = _Arithmetic(trial.train.device, trial.train.precision)
        if arithmetic not in checks:
            checks[arithmetic] = _check_of(hosts, *arithmetic)
        check = checks[arithmetic]
        if check is not None:
            rate = statistics.median(_rates(check, *arithmetic))
            by_trial[trial_id] = _rough_time(plan, trial_id, rate)
    check_times = sorted({check.started_unix_seconds for check in checks.values() if check is not None})
    if not check_times:
        return None
    days = dict.fromkeys(time.strftime("%Y-%m-%d", time.gmtime(started)) for started in check_times)
    origin = (
        f"{ROUGHLY} from FLOPs at a third of the matrix-multiply rate of vitscale check, {' and '.join(days)}, "
        "start-up and transfers left out"
    )
    return _Source(by_trial, origin)


def _names_in_checks(plan: Plan) -> tuple[str, ...]:
    """Return the names by which stored checks know the plan's hosts; empty where no check can be of them."""
    largest_world = max((trial.world for trial in plan.record.trials.values()), key=lambda world: world.size)
    hosts = tuple(host.name for host in plan.scheduler.hosts(largest_world))
    if hosts:
        return hosts
    if isinstance(plan.scheduler, Submitter) or plan.scheduler.machine() != this_machine():
        return ()  # no check is known of a machine that [node] describes
    return (socket.gethostname(),)


def _rough_time(plan: Plan, trial_id: str, flops_per_second: float) -> Expected:
    """Return the time of a run whose ranks multiply matrices at this rate, each for itself."""
    trial = plan.record.trials[trial_id]
    flops = flops_per_image(trial)
    if isinstance(flops, str):
        return Expected(None, "", reason=flops)
    steps = plan.steps_of(trial_id).per_run
    # Each stage of a pipeline stands still while the pipeline fills and drains.
    working_share = 1 - trial.parallel.bubble_share(trial.train.grad_accum)
    shortest = steps * trial.global_batch / trial.world.size * flops / flops_per_second / working_share
    return Expected(of_a_run(shortest / _MATMUL_SHARE, shortest, shortest / _MATMUL_SHARE**2), ROUGHLY)


_PRODUCTS: Mapping[Precision, tuple[str, ...]] = {
    "fp32": ("fp32", "tf32"),
    "bf16": ("bf16",),
    "bf16-params": ("bf16",),
    "fp16": ("fp16",),
}
"""Precision -> how a check may say that its matrices are multiplied: TF32 is fp32 as some GPUs compute it."""


def _check_of(hosts: tuple[str, ...], device: DeviceName, precision: Precision) -> CheckRecord | None:
    """Return the newest of the user's own checks of these hosts that multiplied matrices as trials of this kind do."""
    return latest(None, hosts, lambda check: bool(_rates(check, device, precision)))


def _rates(check: CheckRecord, device: DeviceName, precision: Precision) -> list[float]:
    """Return the FLOP/s of matrix products on its ranks; empty for another device or another arithmetic."""
    if check.request.device != device:
        return []
    lines = [rank.matmul for rank in check.ranks]
    return [line.flops_per_second for line in lines if line is not None and line.dtype in _PRODUCTS[precision]]
