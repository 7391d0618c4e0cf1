"""What a few tiny runs prove about an engine on these devices, from records alone; each claim with its figure."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.analysis import TrialResult
from vitscale.analysis.scaling import split_name
from vitscale.engines.names import engine_name
from vitscale.prediction.step.messages import messages
from vitscale.present import units
from vitscale.profiles.timeline import LOST_KERNELS, NO_KERNELS, NO_LAUNCH, NO_NCCL
from vitscale.store.records import Environment, StepLine
from vitscale.store.results import Run

Status = Literal["holds", "fails", "untold"]
_BYTES_OFF = 64
"""Bytes by which an engine's traffic in a step may differ from arithmetic: it pads numbers to whole rows."""
_CLOCKS_APART, _EPOCH_SECONDS = 0.05, 0.02
"""Share of an epoch, or of a step, by which two clocks may differ; and seconds at an epoch's ends that do not count."""
_SLOWED = 0.05
_SCATTERS = 3.0
"""Standard errors beyond which two medians do not differ by chance; a median's is 1.253 times a mean's."""
_UNSTEADY = 0.1
"""Largest standard deviation, as a share of a step, with which a difference of 5 % can be told."""
_SETTLED = 4
"""First steps that are left out: in them engines lay out their buckets and learn their order."""
_FEWEST = 5
"""Fewest timed steps on either side for a comparison."""
_NOT_SEEN = tuple(
    re.compile(re.sub(r"\\\{.*?\\\}", ".*", re.escape(text))) for text in (NO_KERNELS, LOST_KERNELS, NO_LAUNCH, NO_NCCL)
)


@dataclass(frozen=True)
class Proof:
    """One claim about one run."""

    subject: Literal["placement", "losses", "traffic", "launches", "clocks", "profiling", "run"]
    engine: str
    status: Status
    message: str
    """What was found, with its figure; or why the claim is untold."""
    figure: float | None = None
    limit: float | None = None
    """Limit that the figure may not exceed."""


def proofs(result: TrialResult) -> tuple[Proof, ...]:
    """All claims about a trial's first completed run; where none completed, the one claim that it did not."""
    name = ", ".join(filter(None, (engine_name(result.trial.train), split_name(result.trial.parallel))))
    if not result.recorded_runs:
        why = result.reason or "it did not end"
        return (Proof("run", name, "fails", f"{result.outcome or 'not run'}: {why}"),)
    run = result.recorded_runs[0]
    return (
        _placement(name, run),
        _losses(name, result),
        _traffic(name, result),
        _launches(name, run),
        _clocks(name, run),
        _profiling(name, run),
    )


def _placement(name: str, run: Run) -> Proof:
    """Whether each rank has its own device of the right type, the right number of threads, and cores of its own."""
    trial = run.header.trial
    environments = {rank.rank: rank.start.environment for rank in run.ranks if rank.start is not None}
    wrong = list(_misplaced(environments, trial.world.threads_per_rank, trial.train.device))
    if len(environments) < trial.world.size:
        wrong.insert(0, f"{len(environments)} of {trial.world.size} ranks told where they are")
    if wrong:
        return Proof("placement", name, "fails", "; ".join(wrong), float(len(wrong)), 0.0)
    return Proof("placement", name, "holds", f"{units.ranks(trial.world.size)}, each on its own", 0.0, 0.0)


def _misplaced(ranks: dict[int, Environment], threads: int, device: str) -> Iterator[str]:
    for rank, own in ranks.items():
        if own.device.type != device:
            yield f"rank {rank} computes on {own.device.type}, not on {device}"
        if own.threads is not None and own.threads != threads:
            yield f"rank {rank} computes with {own.threads} threads, not with {threads}"
        nodes = own.numa_nodes
        if own.device.numa_node is not None and nodes and own.device.numa_node not in nodes:
            near = f"memory node {own.device.numa_node}"
            yield f"rank {rank} has cores of memory node {', '.join(map(str, nodes))}, and its GPU is at {near}"
    for rank, own in ranks.items():
        for other in (other for other in ranks if other > rank and ranks[other].host == own.host):
            theirs = ranks[other]
            if own.device.uuid is not None and own.device.uuid == theirs.device.uuid:
                yield f"ranks {rank} and {other} share a GPU"
            if shared := set(own.cores_allowed) & set(theirs.cores_allowed):
                yield f"ranks {rank} and {other} share {units.counted(len(shared), 'core')}"


def _losses(name: str, result: TrialResult) -> Proof:
    drift = result.drift
    if drift.status == "reference":
        return Proof("losses", name, "holds", "the others are held against it")
    if drift.status == "unknown" or drift.difference is None:
        return Proof("losses", name, "untold", drift.reason or "nothing to hold it against")
    against = f"{drift.difference:.2g} apart from {drift.reference_name} at step {(drift.step or 0) + 1}"
    status: Status = "holds" if drift.status == "agrees" else "fails"
    return Proof("losses", name, status, against, drift.difference, drift.tolerance)


def _traffic(name: str, result: TrialResult) -> Proof:
    """Whether the bytes counted for each operation in an optimizer step are those that arithmetic gives.

    Operations among all ranks and in groups of ranks that share a model count separately.
    """
    planned, told = messages(result.trial), result.traffic
    if result.trial.world.size == 1:
        return Proof("traffic", name, "untold", "one rank has nobody to send to")
    if told is None or told.reason:
        return Proof("traffic", name, "untold", told.reason if told else "not recorded")
    if planned is None:
        return Proof("traffic", name, "untold", "what this engine sends is not known by arithmetic")
    expected, counted = Counter[str](), Counter[str]()
    layout, world = result.trial.layout, result.trial.world.size
    sizes = {"replicas": layout.replicas, "all": world} | layout.by_axis
    for message in planned:
        operation, ranks = message.operation, sizes[message.group]
        if message.group == "tensor" and operation == "reduce_scatter" and told.backend == "gloo":
            operation = "all_reduce"  # which DTensor uses with gloo
        if ranks > 1:
            sent_bytes = message.tensor_bytes * message.times(result.trial.train.grad_accum)
            expected[_among(operation, ranks, world)] += round(sent_bytes)
    for sent in told.sent:
        if sent.ranks > 1 and sent.operation != "recv":  # the other end of a send
            counted[_among(sent.operation, sent.ranks, world)] += sent.tensor_bytes or 0
    kinds = sorted(expected.keys() | counted.keys())
    off = {kind: counted[kind] - expected[kind] for kind in kinds}
    worst = max(kinds, key=lambda kind: abs(off[kind]), default="")
    figure = float(abs(off[worst])) if worst else 0.0
    listed = ", ".join(
        f"{kind} {units.size(counted[kind])} (by arithmetic {units.size(expected[kind])})" for kind in kinds
    )
    return Proof("traffic", name, "holds" if figure <= _BYTES_OFF else "fails", listed or "nothing", figure, _BYTES_OFF)


def _among(operation: str, ranks: int, world: int) -> str:
    return operation if ranks == world else f"{operation} in groups of {ranks}"


def _launches(name: str, run: Run) -> Proof:
    """Whether the profiler saw the kernel of each launch, and each collective."""
    lines = [(rank.rank, line) for rank in run.ranks for line in rank.explained]
    if not lines:
        return Proof("launches", name, "untold", "no step was explained")
    if run.header.trial.train.device == "cpu":
        return Proof("launches", name, "untold", "a host launches nothing")
    lost = {
        (rank, line.step): why
        for rank, line in lines
        for why in line.unknown.values()
        if any(pattern.fullmatch(why) for pattern in _NOT_SEEN)
    }
    steps = f"{len(lost)} of {len(lines)} explained steps of ranks"
    if lost:
        (rank, step), why = next(iter(lost.items()))
        return Proof(
            "launches", name, "fails", f"{steps}; rank {rank}, step {step + 1}: {why}", len(lost) / len(lines), 0.0
        )
    return Proof("launches", name, "holds", f"each launch ran, in {len(lines)} explained steps of ranks", 0.0, 0.0)


def _clocks(name: str, run: Run) -> Proof:
    """Whether steps by the step clock agree with epochs by the wall clock, and with steps by the profiler's clock."""
    apart: list[tuple[float, str]] = []
    for rank in run.ranks:
        by_epoch: dict[int, list[StepLine]] = {}
        for line in rank.steps:
            by_epoch.setdefault(line.epoch, []).append(line)
        for epoch in rank.epochs:
            own = by_epoch.get(epoch.epoch, [])
            if epoch.epoch == 0 or len(own) != epoch.steps or {line.window for line in own} != {"light"}:
                continue  # the epoch's wall time includes pauses for measurements
            off = abs(sum(line.seconds for line in own) - epoch.seconds)
            share = max(0.0, off - _EPOCH_SECONDS) / epoch.seconds if epoch.seconds > 0 else 0.0
            apart.append((share, f"epoch {epoch.epoch + 1} of rank {rank.rank} against the sum of its steps"))
        timed = {line.step: line.seconds for line in rank.steps}
        pairs = [(timed[line.step], line.seconds) for line in rank.explained if timed.get(line.step)]
        if pairs:
            share = abs(statistics.median(profiled / step for step, profiled in pairs) - 1)
            apart.append((share, f"explained steps of rank {rank.rank} by the profiler's clock"))
    if not apart:
        return Proof("clocks", name, "untold", "no epoch of timed steps alone, and no step explained")
    worst, where = max(apart)
    status: Status = "holds" if worst <= _CLOCKS_APART else "fails"
    return Proof("clocks", name, status, f"{units.percent(worst, 1)} apart at most: {where}", worst, _CLOCKS_APART)


def _profiling(name: str, run: Run) -> Proof:
    """Whether timed steps are as fast after the profiler first ran as before; on a GPU there must be none after it."""
    before, after = list[float](), list[float]()
    for rank in run.ranks[:1]:
        first = min((line.step for line in rank.steps if line.window == "explained"), default=None)
        begins = {min(line.step for line in rank.steps if line.epoch == epoch.epoch) for epoch in rank.epochs}
        # Warm-up steps do not count in a run's figures, but here their later part lies before the profiler.
        timed = [s for s in rank.steps if s.window == "light" and s.step >= _SETTLED and s.step not in begins]
        before += [line.seconds for line in timed if first is not None and line.step < first]
        after += [line.seconds for line in timed if first is not None and line.step > first]
    if run.header.trial.train.device == "cuda" and before:
        status: Status = "fails" if after else "holds"
        return Proof("profiling", name, status, f"{len(after)} timed steps after it first ran", float(len(after)), 0.0)
    if min(len(before), len(after)) < _FEWEST:
        return Proof("profiling", name, "untold", f"{len(before)} timed steps before it and {len(after)} after")
    (middle, spread), (later, spread_later) = _middle(before), _middle(after)
    if middle <= 0 or max(spread / middle, spread_later / middle) > _UNSTEADY:
        share = units.percent(max(spread, spread_later) / middle) if middle > 0 else "all"
        return Proof("profiling", name, "untold", f"timed steps vary by {share} by themselves: other work goes on here")
    slower = later / middle - 1
    chance = _SCATTERS * 1.253 * math.hypot(spread / math.sqrt(len(before)), spread_later / math.sqrt(len(after)))
    status = "fails" if slower > _SLOWED and later - middle > chance else "holds"
    told = f"{units.percent(slower, 1)} slower" if slower > 0 else f"{units.percent(-slower, 1)} faster"
    message = f"timed steps are {told} after it first ran; chance is within {units.percent(chance / middle, 1)}"
    return Proof("profiling", name, status, message, slower, _SLOWED)


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The median, and a standard deviation from the median absolute deviation, which slow steps do not affect."""
    middle = statistics.median(values)
    return middle, 1.4826 * statistics.median([abs(value - middle) for value in values])


def failures(proofs: Iterable[Proof]) -> list[Proof]:
    """The proofs of claims that fail."""
    return [proof for proof in proofs if proof.status == "fails"]
