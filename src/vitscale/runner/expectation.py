"""Expected times of a plan's runs: from measurements, else roughly from FLOPs.

From a results folder, a trial whose step was measured has that step; any other is predicted from the nearest of the
series that train the same. Start-up, evaluations and the end of a run are added where they were measured. Trials on
which no results exist get an order of magnitude: their FLOPs over a third of the matrix-multiply rate that a stored
`vitscale check` of their hosts measured.
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
from vitscale.advice.request import future_run_estimate
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
"""Share of the matrix-multiply rate that training reaches; the interval is from a ninth to all of it.

`_flops_origin` names this third.
"""
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
        """Return the time of all certain runs together (`Plan.certain_runs`); None where no run's time is known.

        Args:
            plan: the study.
            without: trials to leave out.
            done: runs to leave out, as (trial, repeat).
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
        """Add a value with the ends of its interval."""
        self._value += value
        self._low += low
        self._high += high

    def estimate(self) -> Estimate:
        """Return the sum with its interval."""
        return future_run_estimate(self._value, self._low, self._high)


def expectations(plan: Plan, results: Path | None, price_per_gpu_hour: float | None = None) -> Expectations:
    """Return how long each trial is expected to take.

    Args:
        plan: the study.
        results: folder to predict from. None: the one that `vitscale run` would continue, where it exists.
        price_per_gpu_hour: in any currency.

    Raises:
        StoreError: `results` was given, and holds no results.
    """
    must_exist = results is not None
    folder = results if results is not None else Path("results") / plan.record.name
    predicted = _times_from_results(plan, folder, must_exist=must_exist)
    times = dict(predicted.by_trial)
    origins = [predicted.origin]
    without_time = [
        trial_id for trial_id in plan.record.trials if trial_id not in times or times[trial_id].seconds is None
    ]
    rough = _times_from_flops(plan, without_time) if without_time else None
    if rough is not None:
        times |= rough.by_trial
        origins.append(rough.origin)
    unavailable = Expected(None, "", _NO_EVIDENCE)
    return Expectations(
        by_trial={trial_id: times.get(trial_id, unavailable) for trial_id in plan.record.trials},
        origin="; ".join(filter(None, origins)),
        price_per_gpu_hour=price_per_gpu_hour,
        unread=predicted.unread,
    )


class _Source(NamedTuple):
    """The expected times that one source gives: a results folder, or checks."""

    by_trial: dict[str, Expected]
    """Trial id -> the time of one run, or why the source has none; trials of which it says nothing are missing."""
    origin: str = ""
    """The source in words; empty where it has no times."""
    unread: tuple[Unread, ...] = ()
    """Parts of the source that cannot be read."""


class _StepTime(NamedTuple):
    """The known time of one step of a trial."""

    seconds: Estimate
    known_by: str
    """measured, interpolated, extrapolated or prior-driven."""


class _NoStepTime(NamedTuple):
    """A step whose time is not known, and why."""

    reason: str


def _times_from_results(plan: Plan, results: Path, *, must_exist: bool) -> _Source:
    """Return the expected times that a results folder gives; none where it has no measured series.

    Args:
        plan: the study.
        results: the folder.
        must_exist: refuse a folder that holds no results; else it just gives no times.

    Raises:
        StoreError: the folder must hold results, and does not.
    """
    analysed = _analysed_results(results, must_exist=must_exist)
    if analysed is None:
        return _Source(by_trial={})
    evidence = evidence_of(results, analysed)
    if not evidence.series:
        return _Source(by_trial={}, unread=analysed.unread)
    all_points: list[MeasuredPoint] = []
    for series in evidence.series:
        all_points += series.points
    by_trial = {}
    for trial_id, step in _step_times(plan, evidence, results).items():
        if isinstance(step, _NoStepTime):
            by_trial[trial_id] = Expected(None, "", reason=step.reason)
        else:
            by_trial[trial_id] = _run_time(plan, trial_id, all_points, step)
    return _Source(by_trial, f"predicted from {results}", analysed.unread)


def _analysed_results(results: Path, *, must_exist: bool) -> analysis.Analysis | None:
    """Return the analysis of a results folder; None where it need not exist, and holds no results that can be read."""
    if must_exist:
        return analysis.analyse_folder(results)
    if not (results / "study.json").is_file():
        return None
    try:
        return analysis.analyse_folder(results)
    except StoreError:
        return None


def _step_times(plan: Plan, evidence: Evidence, results: Path) -> dict[str, _StepTime | _NoStepTime]:
    """Return the time of one step of each trial, or why it is not known, by trial id.

    A trial whose configuration was measured has the measured time. Others are predicted, those with the same nearest
    series together.
    """
    fitted = fit(evidence)
    steps: dict[str, _StepTime | _NoStepTime] = {}
    trials_by_series: dict[str, list[str]] = {}
    for trial_id, trial in plan.record.trials.items():
        measured = _measured_step_time(evidence.series, trial)
        nearest = _nearest_series(evidence.series, trial) if measured is None else None
        if measured is not None:
            steps[trial_id] = measured
        elif nearest is not None:
            trials_by_series.setdefault(nearest.name, []).append(trial_id)
        else:
            steps[trial_id] = _NoStepTime(f"{results} holds no run of this model, data and training")
    for series_name, trial_ids in trials_by_series.items():
        steps |= _predicted_steps(plan, fitted, series_name, trial_ids)
    return steps


def _measured_step_time(all_series: Sequence[Series], trial: Trial) -> _StepTime | None:
    """Return the measured time of a step of the trial's own configuration; None where it was not measured.

    Trials whose ranks have different micro-batches are always predicted.
    """
    if trial.train.micro_batches:
        return None
    points = measured_like(all_series, trial)
    for point in points:
        if Candidate.of(point.trial) == Candidate.of(trial):
            return _StepTime(measured_step(points, point), "measured")
    return None


def _nearest_series(all_series: Sequence[Series], trial: Trial) -> Series | None:
    """Return the series of the same work whose configuration is the nearest; None where there is none of that work."""
    same_work = [series for series in all_series if workload(series.points[-1].trial) == workload(trial)]
    if not same_work:
        return None
    return ComparableSeries(same_work[0], tuple(same_work)).nearest(Candidate.of(trial))


def _predicted_steps(
    plan: Plan, fitted: Fitted, series_name: str, trial_ids: list[str]
) -> dict[str, _StepTime | _NoStepTime]:
    """Return the time of a step of each trial as predicted from one series, or why it cannot be predicted."""
    candidates = [Candidate.of(plan.record.trials[trial_id]) for trial_id in trial_ids]
    try:
        evaluated = evaluate_all(fitted, series_name, candidates)
    except RequestError as error:
        return dict.fromkeys(trial_ids, _NoStepTime(str(error)))
    steps: dict[str, _StepTime | _NoStepTime] = {}
    for candidate_index, (trial_id, label) in enumerate(zip(trial_ids, evaluated.labels, strict=True)):
        seconds = evaluated.step.at(candidate_index)
        if math.isnan(seconds.value):
            steps[trial_id] = _NoStepTime("its step cannot be predicted")
        else:
            steps[trial_id] = _StepTime(seconds, label)
    return steps


def _run_time(plan: Plan, trial_id: str, points: Sequence[MeasuredPoint], step: _StepTime) -> Expected:
    """Return the time of one run: its start-up, steps, evaluations and end.

    A measured start-up includes the first step. Where none was measured, only the steps count.

    Args:
        plan: the study.
        trial_id: the trial.
        points: all measured points of the results, from which start-up and evaluations are taken.
        step: the time of one step.
    """
    trial = plan.record.trials[trial_id]
    steps = plan.steps_of(trial_id)
    start_up_forecast = start_up(points, trial, beside_later_steps)
    if start_up_forecast is None:
        start_up_seconds = None
        later_steps = steps.per_run
        evaluations_seconds = 0.0
    else:
        start_up_seconds = start_up_forecast.seconds
        later_steps = steps.per_run - 1  # the first one is in the start-up
        epochs = steps.per_run / steps.per_epoch
        evaluations_seconds = epochs * evaluation_seconds(points, trial)

    def seconds_after_start_up(step_seconds: float) -> float:
        return later_steps * step_seconds + evaluations_seconds

    shortest_step, longest_step = step.seconds.future_ends
    run_seconds, shortest, longest = with_start_up(
        start_up_seconds,
        seconds_after_start_up(step.seconds.value),
        seconds_after_start_up(shortest_step),
        seconds_after_start_up(longest_step),
    )
    return Expected(
        future_run_estimate(run_seconds, shortest, longest),
        step.known_by,
        without_start_up="" if start_up_forecast is not None else trial.launcher,
    )


class _Arithmetic(NamedTuple):
    """How trials multiply matrices: a check on one device in one precision says nothing about another."""

    device: DeviceName
    precision: Precision


class _CheckedRate(NamedTuple):
    """The matrix-multiply rate that a check measured."""

    flops_per_second: float
    """The median over all ranks of what one rank computes in a second."""
    day: str
    """The day of the check: "2026-11-28"."""


def _times_from_flops(plan: Plan, trial_ids: Sequence[str]) -> _Source | None:
    """Return rough times of these trials, from their FLOPs and the matrix-multiply rates that checks measured.

    Transfers and start-up are left out. Returns None where no check has measured the plan's hosts.
    """
    hosts = _names_in_checks(plan)
    if not hosts:
        return None
    arithmetic_by_trial = {}
    for trial_id in trial_ids:
        train = plan.record.trials[trial_id].train
        arithmetic_by_trial[trial_id] = _Arithmetic(train.device, train.precision)
    # To search for a check reads all of them: once for each arithmetic, not for each trial.
    rates = {arithmetic: _checked_rate(hosts, arithmetic) for arithmetic in set(arithmetic_by_trial.values())}
    by_trial = {}
    days = set()
    for trial_id, arithmetic in arithmetic_by_trial.items():
        rate = rates[arithmetic]
        if rate is not None:
            by_trial[trial_id] = _rough_time(plan, trial_id, rate.flops_per_second)
            days.add(rate.day)
    if not by_trial:
        return None
    return _Source(by_trial, _flops_origin(sorted(days)))


def _flops_origin(days: Sequence[str]) -> str:
    """Return words on what rough times rest on. Args: days: those of the checks, the first one first."""
    return (
        f"{ROUGHLY} from FLOPs at a third of the matrix-multiply rate of vitscale check, {' and '.join(days)}, "
        "start-up and transfers left out"
    )


def _names_in_checks(plan: Plan) -> tuple[str, ...]:
    """Return the names by which stored checks know the plan's hosts; empty where no check can be of them."""
    largest_world = max((trial.world for trial in plan.record.trials.values()), key=lambda world: world.size)
    hosts = tuple(host.name for host in plan.scheduler.hosts(largest_world))
    if hosts:
        return hosts
    if isinstance(plan.scheduler, Submitter) or plan.scheduler.machine() != this_machine():
        return ()  # no check is known of a machine that [node] describes
    return (socket.gethostname(),)


def _rough_time(plan: Plan, trial_id: str, matmul_flops_per_second: float) -> Expected:
    """Return the time of a run on ranks that multiply matrices at this rate at most, each for itself."""
    trial = plan.record.trials[trial_id]
    flops = flops_per_image(trial)
    if isinstance(flops, str):
        return Expected(None, "", reason=flops)
    steps = plan.steps_of(trial_id).per_run
    # Each stage of a pipeline stands still while the pipeline fills and drains.
    working_share = 1 - trial.parallel.bubble_share(trial.train.grad_accum)
    # Seconds if a rank multiplied matrices all the time: its images, times the FLOPs of one, over FLOP/s.
    shortest = steps * trial.global_batch / trial.world.size * flops / matmul_flops_per_second / working_share
    expected = shortest / _MATMUL_SHARE
    longest = shortest / _MATMUL_SHARE**2
    return Expected(future_run_estimate(expected, shortest, longest), ROUGHLY)


_MATMUL_DTYPES: Mapping[Precision, tuple[str, ...]] = {
    "fp32": ("fp32", "tf32"),
    "bf16": ("bf16",),
    "bf16-params": ("bf16",),
    "fp16": ("fp16",),
}
"""Precision -> names that a check may give to the arithmetic of its matrix products.

TF32 is fp32 as some GPUs compute it.
"""


def _checked_rate(hosts: tuple[str, ...], arithmetic: _Arithmetic) -> _CheckedRate | None:
    """Return the rate by the newest of the user's own checks of these hosts that multiplied matrices like this.

    Returns None where there is no such check.
    """

    def rates_of(check: CheckRecord) -> list[float]:
        return _matmul_rates(check, arithmetic.device, arithmetic.precision)

    check = latest(None, hosts, is_suitable=lambda candidate: bool(rates_of(candidate)))
    if check is None:
        return None
    day = time.strftime("%Y-%m-%d", time.gmtime(check.started_unix_seconds))
    return _CheckedRate(statistics.median(rates_of(check)), day)


def _matmul_rates(check: CheckRecord, device: DeviceName, precision: Precision) -> list[float]:
    """Return the FLOP/s of matrix products on each rank of a check; empty for another device or another precision."""
    if check.request.device != device:
        return []
    lines = [rank.matmul for rank in check.ranks]
    dtypes = _MATMUL_DTYPES[precision]
    return [line.flops_per_second for line in lines if line is not None and line.dtype in dtypes]
