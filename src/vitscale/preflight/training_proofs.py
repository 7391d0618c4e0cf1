"""Proofs of claims about an engine on these devices, such as that each rank has its own GPU.

The records of a few tiny runs show whether a claim holds or fails, with a figure. Where they do not show it, the claim
is "untold".
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitscale.analysis import TrialResult
from vitscale.analysis.scaling import split_name
from vitscale.analysis.time.traffic import Traffic
from vitscale.engines import wrapper_facts
from vitscale.engines.messages import Message
from vitscale.engines.names import engine_name
from vitscale.prediction.step.messages import messages
from vitscale.present import units
from vitscale.profiles.timeline import LOST_KERNELS, NO_KERNELS, NO_LAUNCH, NO_NCCL
from vitscale.store.records import Environment, ExplainedLine, RankRecord, StepLine
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

Status = Literal["holds", "fails", "untold"]
_MOST_BYTES_OFF = 64
"""Most bytes by which an engine's traffic in a step may differ from arithmetic: it pads numbers to whole rows."""
_MOST_CLOCK_DIFFERENCE = 0.05
"""Share of an epoch, or of a step, by which two clocks may differ."""
_UNCOUNTED_EPOCH_SECONDS = 0.02
"""Seconds at an epoch's ends that do not count."""
_MOST_SLOWDOWN = 0.05
"""Share by which timed steps may be slower after the profiler first ran."""
_CHANCE_ERRORS = 3.0
"""Standard errors beyond which two medians do not differ by chance."""
_MEDIAN_ERROR_RATIO = 1.253
"""The standard error of a median / that of a mean."""
_MOST_DEVIATION = 0.1
"""Largest standard deviation, as a share of a step, with which a difference of 5 % can be told."""
_UNSETTLED_STEPS = 4
"""First steps that are left out: in them engines lay out their buckets and learn their order."""
_FEWEST_COMPARED_STEPS = 5
"""Fewest timed steps on either side for a comparison."""
_LOSS_PATTERNS = tuple(
    re.compile(re.sub(r"\\\{.*?\\\}", ".*", re.escape(text))) for text in (NO_KERNELS, LOST_KERNELS, NO_LAUNCH, NO_NCCL)
)


@dataclass(frozen=True)
class Proof:
    """One claim about one run."""

    subject: Literal["placement", "losses", "traffic", "launches", "clocks", "profiling", "run"]
    engine: str
    status: Status
    message: str
    """The facts, with the figure; or why the claim is untold."""
    figure: float | None = None
    limit: float | None = None
    """Limit that the figure may not exceed."""


def proofs(result: TrialResult) -> tuple[Proof, ...]:
    """Return all claims about a trial's first completed run; where none completed, the one claim that it did not."""
    name = _checked_name(result.trial)
    if not result.recorded_runs:
        reason = result.reason or "it did not end"
        return (Proof("run", name, "fails", f"{result.outcome or 'not run'}: {reason}"),)
    run = result.recorded_runs[0]
    return (
        _prove_placement(name, run),
        _prove_losses(name, result),
        _prove_traffic(name, result),
        _prove_launches(name, run),
        _prove_clocks(name, run),
        _prove_profiling(name, run),
    )


def _checked_name(trial: Trial) -> str:
    """Return what tells the checked engines apart: "deepspeed ZeRO-3, hpZ 2", "fsdp2, tensor 2"."""
    second_shard = f"hpZ {trial.train.hpz}" if trial.train.hpz > 1 else ""
    return ", ".join(filter(None, (engine_name(trial.train), second_shard, split_name(trial.parallel))))


def _prove_placement(name: str, run: Run) -> Proof:
    """Whether each rank has its own device of the right type, the right number of threads, and cores of its own."""
    trial = run.header.trial
    environments = {rank.rank: rank.start.environment for rank in run.ranks if rank.start is not None}
    faults: list[str] = []
    if len(environments) < trial.world.size:
        faults.append(f"{len(environments)} of {trial.world.size} ranks told where they are")
    for rank, environment in environments.items():
        faults += _misplacements(rank, environment, trial.world.threads_per_rank, trial.train.device)
    faults += _shared_resources(environments)
    if faults:
        return Proof("placement", name, "fails", "; ".join(faults), figure=float(len(faults)), limit=0.0)
    return Proof("placement", name, "holds", f"{units.ranks(trial.world.size)}, each on its own", figure=0.0, limit=0.0)


def _misplacements(rank: int, environment: Environment, threads: int, device_type: str) -> Iterator[str]:
    """Yield what is wrong with a rank's device, threads and cores."""
    device = environment.device
    if device.type != device_type:
        yield f"rank {rank} computes on {device.type}, not on {device_type}"
    if environment.threads is not None and environment.threads != threads:
        yield f"rank {rank} computes with {environment.threads} threads, not with {threads}"
    nodes = environment.numa_nodes
    if nodes and device.numa_node is not None and device.numa_node not in nodes:
        cores_nodes = ", ".join(map(str, nodes))
        yield (f"rank {rank} has cores of memory node {cores_nodes}, and its GPU is at memory node {device.numa_node}")


def _shared_resources(environments: Mapping[int, Environment]) -> Iterator[str]:
    """Yield the GPUs and cores that two ranks of a host share."""
    for rank, environment in environments.items():
        for other_rank, other in environments.items():
            if other_rank <= rank or other.host != environment.host:
                continue
            uuid = environment.device.uuid
            if uuid is not None and uuid == other.device.uuid:
                yield f"ranks {rank} and {other_rank} share a GPU"
            shared_cores = set(environment.cores_allowed) & set(other.cores_allowed)
            if shared_cores:
                yield f"ranks {rank} and {other_rank} share {units.counted(len(shared_cores), 'core')}"


def _prove_losses(name: str, result: TrialResult) -> Proof:
    """Whether the losses agree with those of the reference."""
    drift = result.drift
    if drift.status == "reference":
        return Proof("losses", name, "holds", "the others are held against it")
    if drift.status == "unknown" or drift.difference is None:
        return Proof("losses", name, "untold", drift.reason or "nothing to hold it against")
    message = f"{drift.difference:.2g} apart from {drift.reference_name} at step {(drift.step or 0) + 1}"
    status: Status = "holds" if drift.status == "agrees" else "fails"
    return Proof("losses", name, status, message, drift.difference, drift.tolerance)


def _prove_traffic(name: str, result: TrialResult) -> Proof:
    """Whether the bytes counted for each operation in an optimizer step are those that arithmetic gives.

    Operations among all ranks and in groups of ranks that share a model count separately.
    """
    if result.trial.world.size == 1:
        return Proof("traffic", name, "untold", "one rank has nobody to send to")
    traffic = result.traffic
    if traffic is None or traffic.reason:
        return Proof("traffic", name, "untold", traffic.reason if traffic else "not recorded")
    planned = messages(result.trial)
    if planned is None:
        return Proof("traffic", name, "untold", "what this engine sends is not known by arithmetic")
    expected = _expected_bytes(result.trial, planned, traffic.backend)
    counted = _counted_bytes(traffic, result.trial.world.size)
    kinds = sorted(expected.keys() | counted.keys())
    error_by_kind = {kind: abs(counted[kind] - expected[kind]) for kind in kinds}
    worst_error = float(max(error_by_kind.values(), default=0))
    comparisons = [f"{kind} {units.size(counted[kind])} (by arithmetic {units.size(expected[kind])})" for kind in kinds]
    status: Status = "holds" if worst_error <= _MOST_BYTES_OFF else "fails"
    return Proof("traffic", name, status, ", ".join(comparisons) or "nothing", worst_error, _MOST_BYTES_OFF)


def _expected_bytes(trial: Trial, planned: Iterable[Message], backend: str | None) -> Counter[str]:
    """Return the bytes of tensors in an optimizer step by arithmetic, by `_traffic_kind`."""
    layout = trial.layout
    ranks_by_group = {"replicas": layout.replicas, "all": trial.world.size} | layout.by_axis
    ranks_by_group |= {"sharding": layout.sharding_ranks, "replication": layout.replicate}
    second_shard_ranks = wrapper_facts(trial.train).second_shard_ranks(trial.train)
    ranks_by_group["second shard"] = min(second_shard_ranks, trial.world.size)
    expected = Counter[str]()
    for message in planned:
        operation = message.operation
        if message.group == "tensor" and operation == "reduce_scatter" and backend == "gloo":
            operation = "all_reduce"  # which DTensor uses with gloo
        ranks = ranks_by_group[message.group]
        if ranks > 1:
            total_bytes = message.tensor_bytes * message.times(trial.train.grad_accum)
            expected[_traffic_kind(operation, ranks, trial.world.size)] += round(total_bytes)
    return expected


def _counted_bytes(traffic: Traffic, world_size: int) -> Counter[str]:
    """Return the bytes of tensors in an optimizer step as they were counted, by `_traffic_kind`."""
    counted = Counter[str]()
    for sent in traffic.sent:
        if sent.ranks > 1 and sent.operation != "recv":  # the other end of a send
            counted[_traffic_kind(sent.operation, sent.ranks, world_size)] += sent.tensor_bytes or 0
    return counted


def _traffic_kind(operation: str, ranks: int, world_size: int) -> str:
    """Return "all_reduce" among all ranks, and "all_reduce in groups of 2" else."""
    return operation if ranks == world_size else f"{operation} in groups of {ranks}"


def _prove_launches(name: str, run: Run) -> Proof:
    """Whether the profiler saw the kernel of each launch, and each collective."""
    steps = [_ExplainedStep(rank.rank, line) for rank in run.ranks for line in rank.explained]
    if not steps:
        return Proof("launches", name, "untold", "no step was explained")
    if run.header.trial.train.device == "cpu":
        return Proof("launches", name, "untold", "a host launches nothing")
    lost_steps = [step for step in steps if step.lost_reasons]
    if not lost_steps:
        message = f"each launch ran, in {len(steps)} explained steps of ranks"
        return Proof("launches", name, "holds", message, figure=0.0, limit=0.0)
    # A rank may explain a step in several lines, of which the last one counts.
    reason_by_step = {(step.rank, step.line.step): step.lost_reasons[-1] for step in lost_steps}
    first_rank, first_step = next(iter(reason_by_step))
    reason = reason_by_step[first_rank, first_step]
    message = (
        f"{len(reason_by_step)} of {len(steps)} explained steps of ranks; rank {first_rank}, step {first_step + 1}: "
        f"{reason}"
    )
    return Proof("launches", name, "fails", message, figure=len(reason_by_step) / len(steps), limit=0.0)


class _ExplainedStep(NamedTuple):
    """A step of one rank, as the profiler explained it."""

    rank: int
    line: ExplainedLine

    @property
    def lost_reasons(self) -> list[str]:
        """Reasons that mean that the profiler has lost kernels or launches."""
        reasons = self.line.unknown.values()
        return [reason for reason in reasons if any(pattern.fullmatch(reason) for pattern in _LOSS_PATTERNS)]


class _ClockDifference(NamedTuple):
    """A difference of two clocks; they compare by their share, then by their words."""

    share: float
    words: str


def _prove_clocks(name: str, run: Run) -> Proof:
    """Whether steps by the step clock agree with epochs by the wall clock, and with steps by the profiler's clock."""
    differences: list[_ClockDifference] = []
    for rank in run.ranks:
        differences += _epoch_differences(rank)
        seconds_by_step = {line.step: line.seconds for line in rank.steps}
        ratios = [
            line.seconds / seconds_by_step[line.step] for line in rank.explained if seconds_by_step.get(line.step)
        ]
        if ratios:
            share = abs(statistics.median(ratios) - 1)
            differences.append(_ClockDifference(share, f"explained steps of rank {rank.rank} by the profiler's clock"))
    if not differences:
        return Proof("clocks", name, "untold", "no epoch of timed steps alone, and no step explained")
    largest = max(differences)
    status: Status = "holds" if largest.share <= _MOST_CLOCK_DIFFERENCE else "fails"
    message = f"{units.percent(largest.share, 1)} apart at most: {largest.words}"
    return Proof("clocks", name, status, message, largest.share, _MOST_CLOCK_DIFFERENCE)


def _epoch_differences(rank: RankRecord) -> Iterator[_ClockDifference]:
    """Yield the differences of epochs, without the first, from the sums of their steps."""
    steps_by_epoch: dict[int, list[StepLine]] = {}
    for line in rank.steps:
        steps_by_epoch.setdefault(line.epoch, []).append(line)
    for epoch in rank.epochs:
        steps = steps_by_epoch.get(epoch.epoch, [])
        are_all_timed = {line.window for line in steps} == {"light"}  # timed, and no profiler or other probe ran
        if epoch.epoch == 0 or len(steps) != epoch.steps or not are_all_timed:
            continue  # the epoch's wall time includes pauses for measurements
        difference = abs(sum(line.seconds for line in steps) - epoch.seconds)
        share = max(0.0, difference - _UNCOUNTED_EPOCH_SECONDS) / epoch.seconds if epoch.seconds > 0 else 0.0
        yield _ClockDifference(share, f"epoch {epoch.epoch + 1} of rank {rank.rank} against the sum of its steps")


def _prove_profiling(name: str, run: Run) -> Proof:
    """Whether timed steps are as fast after the profiler first ran as before; on a GPU there must be none after it.

    Timed steps are those without a profiler, from which reported times come ("light" in the records). On a GPU the
    profiler stays attached once it has run, so that all timed steps must come before it (docs/decisions/0017).
    """
    steps = _steps_around_profiler(run)
    if run.header.trial.train.device == "cuda" and steps.before:
        clean_status: Status = "fails" if steps.after else "holds"
        message = f"{len(steps.after)} timed steps after it first ran"
        return Proof("profiling", name, clean_status, message, figure=float(len(steps.after)), limit=0.0)
    if min(len(steps.before), len(steps.after)) < _FEWEST_COMPARED_STEPS:
        message = f"{len(steps.before)} timed steps before it and {len(steps.after)} after"
        return Proof("profiling", name, "untold", message)
    return _prove_equal_pace(name, before=_spread(steps.before), after=_spread(steps.after))


def _prove_equal_pace(name: str, *, before: _Spread, after: _Spread) -> Proof:
    """Whether timed steps after the profiler first ran are not slower than those before, by more than chance.

    Chance may explain a difference of up to three standard errors. The standard error of a median is taken as 1.253
    times that of a mean, as it is for values that are normally distributed.
    """
    largest_deviation = max(before.deviation, after.deviation)
    if before.median <= 0 or largest_deviation / before.median > _MOST_DEVIATION:
        share = units.percent(largest_deviation / before.median) if before.median > 0 else "all"
        return Proof("profiling", name, "untold", f"timed steps vary by {share} by themselves: other work goes on here")
    slowdown = after.median / before.median - 1
    chance_seconds = _CHANCE_ERRORS * _MEDIAN_ERROR_RATIO * math.hypot(before.standard_error, after.standard_error)
    is_beyond_chance = after.median - before.median > chance_seconds
    status: Status = "fails" if slowdown > _MOST_SLOWDOWN and is_beyond_chance else "holds"
    change = f"{units.percent(slowdown, 1)} slower" if slowdown > 0 else f"{units.percent(-slowdown, 1)} faster"
    chance = units.percent(chance_seconds / before.median, 1)
    message = f"timed steps are {change} after it first ran; chance is within {chance}"
    return Proof("profiling", name, status, message, slowdown, _MOST_SLOWDOWN)


class _StepSeconds(NamedTuple):
    """Seconds of rank 0's timed steps before and after the first step that was explained."""

    before: list[float]
    after: list[float]


def _steps_around_profiler(run: Run) -> _StepSeconds:
    """Return the timed steps of rank 0, without the first of each epoch; none where no step was explained."""
    no_steps = _StepSeconds([], [])
    if not run.ranks:
        return no_steps
    rank = run.ranks[0]
    explained_steps = [line.step for line in rank.steps if line.window == "explained"]
    if not explained_steps:
        return no_steps
    first_explained = min(explained_steps)
    epoch_begins = _first_steps_of_epochs(rank)
    # Warm-up steps do not count in a run's figures, but here their later part lies before the profiler.
    settled = [line for line in rank.steps if line.window == "light" and line.step >= _UNSETTLED_STEPS]
    timed = [line for line in settled if line.step not in epoch_begins]
    return _StepSeconds(
        before=[line.seconds for line in timed if line.step < first_explained],
        after=[line.seconds for line in timed if line.step > first_explained],
    )


def _first_steps_of_epochs(rank: RankRecord) -> set[int]:
    """Return the first step of each epoch that a rank has recorded whole."""
    first_step_by_epoch: dict[int, int] = {}
    for line in rank.steps:
        first_step_by_epoch[line.epoch] = min(line.step, first_step_by_epoch.get(line.epoch, line.step))
    return {first_step_by_epoch[epoch.epoch] for epoch in rank.epochs}


class _Spread(NamedTuple):
    """The centre and the spread of some values."""

    values: int
    """How many values there are."""
    median: float
    deviation: float
    """A standard deviation from the median absolute deviation, which slow steps do not affect."""

    @property
    def standard_error(self) -> float:
        """The standard error of the values' mean."""
        return self.deviation / math.sqrt(self.values)


def _spread(values: Sequence[float]) -> _Spread:
    median = statistics.median(values)
    # For normally distributed values the standard deviation is 1.4826 times the median absolute deviation.
    deviation = 1.4826 * statistics.median([abs(value - median) for value in values])
    return _Spread(len(values), median, deviation)


def failures(proofs: Iterable[Proof]) -> list[Proof]:
    """Return the proofs of claims that fail."""
    return [proof for proof in proofs if proof.status == "fails"]
