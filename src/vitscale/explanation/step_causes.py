"""Causes in the passes and around them: communication, the optimizer, launch gaps, own code, too many threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitscale.explanation.cause import CauseKind, SlowCause, is_worth_naming, part_cost, saving_without
from vitscale.explanation.code_lines import top_line
from vitscale.explanation.host_cores import host_cores
from vitscale.explanation.host_waits import waiting_line
from vitscale.explanation.intervals import step_interval
from vitscale.explanation.parts import JobParts, transfer_by_step
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.step_table import JobStepTimes, WorkPart
from vitscale.present.estimate import Estimate
from vitscale.present.units import counted, seconds, size

_LEAST_OPTIMIZER_SHARE = 0.1
"""Share of the step from which the optimizer is worth changing: it always takes some."""
_LEAST_EXCHANGE_SHARE = 0.1
"""Share of the step from which waiting and transfer together are worth naming."""
_LEAST_OVERSUBSCRIPTION = 1.5
"""Threads per core from which there are too many."""
_GOOD_TRANSFER_SHARE = 0.1
"""Share of the step that accumulation of gradients is to bring the transfer down to."""
_MOST_ACCUMULATION = 64
_DEFAULT_BUCKET_MB = 25.0
_LEAST_BUCKET_MB = 2
"""MiB of a bucket below which latency, not bandwidth, decides how long its transfer takes."""
_USUAL_BUCKETS = 4
_WITH_FUSED_UPDATE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have `fused=True`, on a CPU too."""
_MB = 1 << 20
_GRADIENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def communication_cause(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that ranks exchange for long; None where that is little, hidden, or unknown."""
    if parts.world_size < 2 or table.mixed_reason:
        return None
    if table.untold_reason:
        return _untold_exchange(parts, table)
    transfer = step_interval(transfer_by_step(parts.table))
    if not is_worth_naming(transfer, parts.mean_step_seconds):
        return None
    evidence = (
        f"Ranks exchange gradients for {seconds(transfer.value)} of a step after their own backward has ended"
        f"{_exchange_facts(parts)}"
    )
    return SlowCause(
        "communication",
        "is transfer between ranks",
        evidence,
        _advice_on_exchange(parts, transfer.value),
        transfer,
        transfer,
        weight=transfer.value,
    )


def _untold_exchange(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that ranks exchange or wait for long, where the two cannot be told apart."""
    exchange = step_interval((table.seconds - table.own).mean(axis=0))
    if not is_worth_naming(exchange, parts.mean_step_seconds, _LEAST_EXCHANGE_SHARE):
        return None
    evidence = (
        f"Ranks exchange gradients, or wait for a slower rank, for {seconds(exchange.value)} of a step; which of the "
        f"two is not known: {table.untold_reason}"
    )
    change = "Explain again with all ranks' records; check the network and the machines: vitscale check"
    clause = "is communication or waiting for other ranks"
    return SlowCause("communication", clause, evidence, change, exchange, exchange, weight=exchange.value)


def _gradient_bytes(record: HookedRank) -> int | None:
    """Return the bytes of a model's gradients; None where they are unknown."""
    model = record.model
    if model is None or model.trainable_parameters <= 0:
        return None
    element_bytes = _GRADIENT_BYTES.get(model.dtype or "")
    return None if element_bytes is None else model.trainable_parameters * element_bytes


def _exchange_facts(parts: JobParts) -> str:
    """Return a clause on what is exchanged: " (330 MiB of gradients, DDP, buckets of 25 MiB)"; empty if unknown."""
    record = parts.records[0]
    gradient_bytes = _gradient_bytes(record)
    if record.model is None or gradient_bytes is None:
        return ""
    facts = [f"{size(gradient_bytes)} of gradients", record.model.strategy]
    if record.model.bucket_cap_mb is not None:
        facts.append(f"buckets of {record.model.bucket_cap_mb:.3g} MiB")
    return f" ({', '.join(facts)})"


def _advice_on_exchange(parts: JobParts, transfer_seconds: float) -> str:
    """Return what to change where the exchange takes long, with values from what was seen."""
    record = parts.records[0]
    gradient_bytes = _gradient_bytes(record)
    bucket_mb = record.model.bucket_cap_mb if record.model is not None else None
    network = "check the network: vitscale check"
    if gradient_bytes is not None and bucket_mb is not None and gradient_bytes <= bucket_mb * _MB:
        smaller_mb = math.ceil(min(gradient_bytes / _MB / _USUAL_BUCKETS, _DEFAULT_BUCKET_MB))
        if _LEAST_BUCKET_MB <= smaller_mb < bucket_mb:
            one_bucket = "all gradients are in one bucket, so that nothing is sent before backward ends"
            return f"Set DDP's bucket_cap_mb={smaller_mb} (now {bucket_mb:.3g}; {one_bucket}), and {network}"
    micro_steps = _micro_steps(record)
    factor = _accumulation(transfer_seconds, parts.step.value)
    accumulate = f"accumulate {micro_steps * factor} micro-batches a step under no_sync() (now {micro_steps})"
    return f"Use a larger micro-batch, or {accumulate}, so that ranks exchange less often; {network}"


def _micro_steps(record: HookedRank) -> int:
    """Return the micro-steps of a rank's last step."""
    return max(1, record.steps[-1].micro_steps) if record.steps else 1


def _accumulation(transfer_seconds: float, step_seconds: float) -> int:
    """Return how many steps' batches must share a transfer for it to take `_GOOD_TRANSFER_SHARE` of the time.

    Example: of a step of 100 ms with 50 ms of transfer, 9: 9 x 50 ms + 50 ms = 500 ms, of which 50 ms are 10 %.
    """
    computing_seconds = max(step_seconds - transfer_seconds, step_seconds / _MOST_ACCUMULATION)
    allowed_seconds = computing_seconds * _GOOD_TRANSFER_SHARE / (1 - _GOOD_TRANSFER_SHARE)
    return min(_MOST_ACCUMULATION, max(2, math.ceil(transfer_seconds / allowed_seconds)))


def part_causes(parts: JobParts, table: JobStepTimes) -> Iterator[SlowCause]:
    """Yield the causes in single parts of the step: own code, the optimizer, launch gaps.

    Args:
        parts: the job.
        table: its steps, without what single ranks cost.
    """
    for cause in (_own_code(parts, table), _optimizer(parts, table), _launch_gaps(parts, table)):
        if cause is not None:
            yield cause


def _saving_of_part(table: JobStepTimes, part: WorkPart) -> Estimate | None:
    """Return what the job would save without a part; None where the part is unknown."""
    if not table.part_is_known(part):
        return None
    return saving_without(table, {part: np.zeros_like(table.work[part])})


def _own_code(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that the program does other things between the parts of each step."""
    saving = _saving_of_part(table, "other")
    if saving is None or not is_worth_naming(saving, parts.mean_step_seconds):
        return None
    cost = part_cost(table, "other")
    code = top_line(parts.records, "other")
    location = f", most of it at {code}" if code is not None else ""
    evidence = f"{seconds(cost.value)} of each step is code between loading, the passes and the optimizer{location}"
    change = "Move that work out of the loop, do it every 50 steps, or read values only where they are logged"
    return SlowCause(
        "own-code", "is code outside of the passes", evidence, change, cost, saving, weight=saving.value, code=code
    )


def _optimizer(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that the optimizer takes long and is not fused; None where it is, or takes little."""
    saving = _saving_of_part(table, "optimizer")
    if saving is None or not is_worth_naming(saving, parts.mean_step_seconds, _LEAST_OPTIMIZER_SHARE):
        return None
    record = parts.records[0]
    optimizer = record.optimizer
    exchanges_there = record.model is not None and record.model.strategy not in ("none", "DDP")
    if optimizer is None or optimizer.fused or exchanges_there:
        return None
    cost = part_cost(table, "optimizer")
    evidence = (
        f"{optimizer.class_name}'s update takes {seconds(cost.value)} of a step "
        f"({counted(optimizer.groups, 'parameter group')}, fused: {_setting(optimizer.fused)}, "
        f"foreach: {_setting(optimizer.foreach)})"
    )
    if optimizer.class_name in _WITH_FUSED_UPDATE:
        change = f"Make it {optimizer.class_name}(..., fused=True), which updates all parameters in one pass"
    else:
        change = "Use an optimizer with a fused or foreach update, such as torch.optim.AdamW(..., fused=True)"
    clause = "is the optimizer's update"
    return SlowCause("optimizer", clause, evidence, change, cost, saving, weight=saving.value)


def _setting(value: bool | None) -> str:
    return "not set" if value is None else str(value)


def _launch_gaps(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that the device waits for the host to launch kernels."""
    saving = _saving_of_part(table, "launch_gaps")
    if saving is None or not is_worth_naming(saving, parts.mean_step_seconds):
        return None
    cost = part_cost(table, "launch_gaps")
    model = parts.records[0].model
    is_compiled = model is not None and model.compiled
    evidence = f"The device idles {seconds(cost.value)} of a step until the host launches its next kernel"
    line = waiting_line(parts.records)
    if line is not None:
        evidence += f"; {line} reads a tensor's value, so that the host cannot launch ahead"
    compile_it = "torch.compile(model)" if not is_compiled else 'torch.compile(mode="reduce-overhead")'
    change = f"Use a larger micro-batch, or {compile_it}, so that fewer and longer kernels are launched"
    clause = "waits for kernels to be launched"
    return SlowCause("launch-gaps", clause, evidence, change, cost, saving, weight=saving.value)


def thread_cause(parts: JobParts) -> SlowCause | None:
    """Return the cause that ranks on a host have more threads than cores, where they compute on the CPU.

    No part of the step bounds what it costs: all that computes is slower. It is ranked by the share of the computing
    for which a thread finds no core.
    """
    if parts.on_gpu:
        return None
    crowded = [host for host in _hosts(parts) if host.oversubscription >= _LEAST_OVERSUBSCRIPTION]
    if not crowded:
        return None
    worst = max(crowded, key=lambda host: host.oversubscription)
    computing = math.fsum(parts.mean_rank[part] or 0.0 for part in ("forward", "backward", "optimizer"))
    threads_each = max(1, worst.cores // worst.ranks)
    evidence = (
        f"{counted(worst.ranks, 'rank')} on {worst.name} run {worst.threads} threads on "
        f"{counted(worst.cores, 'core')}: they take turns"
    )
    kind: CauseKind = "too-many-threads"
    return SlowCause(
        kind,
        "runs with more threads than cores",
        evidence,
        f"Set OMP_NUM_THREADS={threads_each} (now {worst.threads // worst.ranks}) in the command's environment",
        cost=None,
        saving=None,
        weight=computing * (1 - 1 / worst.oversubscription),
        hosts=tuple(host.name for host in crowded),
    )


@dataclass(frozen=True)
class HostThreads:
    """Ranks, threads and cores of one host."""

    name: str
    ranks: int
    """Ranks that left a record, whose threads are counted."""
    threads: int
    cores: int

    @property
    def oversubscription(self) -> float:
        """Threads per core."""
        return self.threads / self.cores


def _hosts(parts: JobParts) -> list[HostThreads]:
    """Return the ranks, threads and cores of each host."""
    records_by_host: dict[str, list[HookedRank]] = {}
    for record in parts.records:
        records_by_host.setdefault(record.rank.host, []).append(record)
    hosts = []
    for name, records in records_by_host.items():
        threads = sum(max(1, record.rank.threads) for record in records)
        hosts.append(HostThreads(name, len(records), threads, host_cores(records, name).cores))
    return hosts
