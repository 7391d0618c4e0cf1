"""Works out the answer from what the ranks recorded: the parts of a step, the causes, and what else was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.analysis.runs.compute import Peak, peak
from vitscale.explanation.cause import SlowCause
from vitscale.explanation.causes import find_causes
from vitscale.explanation.host_cores import host_cores
from vitscale.explanation.host_waits import waiting_line
from vitscale.explanation.parts import JobParts, job_parts
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.rare_causes import rare_text
from vitscale.explanation.rare_work import RareWork
from vitscale.present.units import counted, number, percent, seconds

_NOTICEABLE_SHARE = 0.05
"""Share of the step from which waiting by turns is mentioned."""
_NOTICEABLE_RARE_SHARE = 0.02
"""Share of the step from which rare work inside steps is mentioned."""
_NOTICEABLE_STEPS = 3.0
"""Usual steps that rare work must take which was seen once inside a step."""
_FEWEST_SURE_STEPS = 6
"""Timed steps below which no interval is given."""
_FAST_BF16_FACTOR = 1.5
"""How many times the rate of fp32 that of bf16 must be for bf16 to be worth a try."""
_IDLE_CORES_FACTOR = 2
"""Cores per thread of all ranks from which more threads are worth a try."""


@dataclass(frozen=True)
class ExplainAnswer:
    """Why a training is as fast as it is."""

    records: tuple[HookedRank, ...]
    parts: JobParts | None
    """None where no step was seen on all ranks."""
    causes: tuple[SlowCause, ...]
    """The costliest first; empty where nothing stands out, or nothing was seen."""
    seen: tuple[str, ...]
    """Sentences on what is odd, though it is no cause by itself."""
    tries: tuple[str, ...]
    """Settings that may help, without anything that bounds by how much."""
    unavailable: Mapping[str, str]
    """What could not be seen -> why."""

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        if self.parts is None:
            return "no step was seen that every rank finished"
        return f"{_pace(self.parts)}{self._reason(self.parts)}"

    def _reason(self, parts: JobParts) -> str:
        """Return what follows the pace: the costliest cause with its bound, or that there is none."""
        if not self.causes:
            return _without_cause(parts)
        cause = self.causes[0]
        share = cause.share_of(parts.mean_step_seconds)
        gain = cause.gain_of(parts.mean_step_seconds)
        if share is None or gain is None:
            return f"; it {cause.clause} (by how much that slows it down is not known)"
        return f"; {percent(share)} of it {cause.clause}: up to {number(gain, 2)}x faster without"


def explain_ranks(records: Sequence[HookedRank], traces: Path | None = None) -> ExplainAnswer:
    """Return why a training is as fast as it is.

    Args:
        records: what its ranks recorded.
        traces: the folder of their traces; None: there is none.
    """
    parts = job_parts(records, traces)
    if parts is None:
        return ExplainAnswer(tuple(records), None, (), (), (), {})
    found = find_causes(parts)
    unavailable = {**parts.unavailable, "MFU": "the FLOPs of the model are not counted"}
    for record in records:
        for note in record.notes:
            unavailable.setdefault(f"rank {record.rank.rank}", note)
    return ExplainAnswer(
        records=tuple(records),
        parts=parts,
        causes=found.causes,
        seen=(
            *_few_steps(parts),
            *_rare_sentences(parts, found.causes),
            *_turns(parts, found.jitter_seconds),
            *_host_waits(parts),
        ),
        tries=(*_bf16(parts), *_more_threads(parts)),
        unavailable=unavailable,
    )


def _pace(parts: JobParts) -> str:
    """Return "412 ms a step, 155 images/s on 2 ranks"; a step has its share of rare work."""
    rate = parts.images_per_second
    images = "images/s unavailable" if rate is None else f"{number(rate.value)} images/s"
    return f"{seconds(parts.mean_step_seconds)} a step, {images} on {counted(parts.world_size, 'rank')}"


def _without_cause(parts: JobParts) -> str:
    """Return what follows the pace where no cause was found."""
    if not parts.ranks:
        return "; what a step is made of could not be seen"
    computing = math.fsum(parts.mean_rank[part] or 0.0 for part in ("forward", "backward", "optimizer"))
    return f"; nothing stands out: {percent(computing / parts.mean_step_seconds)} is forward, backward and optimizer"


def _few_steps(parts: JobParts) -> list[str]:
    """Return a sentence on too few steps; none where there are enough."""
    if parts.timed_steps >= _FEWEST_SURE_STEPS:
        return []
    return [
        f"Only {counted(parts.timed_steps, 'step')} could be timed: there is no interval, and what varies from step to "
        "step cannot be told from what is always so (--steps 30)"
    ]


def _rare_sentences(parts: JobParts, causes: Sequence[SlowCause]) -> list[str]:
    """Return a sentence for each rare work that is no cause: it takes little, or was seen once."""
    cause_seconds = {cause.cost.value for cause in causes if cause.cost is not None}
    sentences = []
    for work in parts.rare:
        is_cause = work.seconds_per_step in cause_seconds
        if not is_cause and _is_noticeable(work, parts):
            sentences.append(rare_text(work, parts))
    return sentences


def _is_noticeable(work: RareWork, parts: JobParts) -> bool:
    """Whether rare work is worth a sentence; a step that is longer now and then is not, on a busy machine."""
    if work.is_break:
        return True
    if work.seconds_per_step is None:
        return work.seconds >= _NOTICEABLE_STEPS * parts.step.value
    return work.seconds_per_step >= _NOTICEABLE_RARE_SHARE * parts.mean_step_seconds


def _turns(parts: JobParts, jitter_seconds: float | None) -> list[str]:
    """Return a sentence on ranks that take turns at being the slowest; none where they hardly do."""
    if jitter_seconds is None or jitter_seconds < _NOTICEABLE_SHARE * parts.step.value:
        return []
    share = percent(jitter_seconds / parts.step.value)
    return [f"Ranks take turns at being the slowest: waiting for that takes {share} of a step on average"]


def _host_waits(parts: JobParts) -> list[str]:
    """Return a sentence on the line that reads a tensor's value; none on a CPU, where this costs nothing."""
    line = waiting_line(parts.records) if parts.on_gpu else None
    if line is None:
        return []
    return [f"{line} reads a tensor's value, so that the host waits for the device: do it only where it is logged"]


def _bf16(parts: JobParts) -> list[str]:
    """Return that bf16 may be tried, where a GPU trains in fp32 and has much faster units for bf16."""
    record = parts.records[0]
    model = record.model
    if model is None or record.rank.device == "cpu":
        return []
    trains_in_fp32 = model.dtype == "float32" and model.autocast == "none"
    if not trains_in_fp32:
        return []
    bf16_peak = peak("cuda", record.rank.device, "bf16")
    fp32_peak = peak("cuda", record.rank.device, "fp32")
    if not isinstance(bf16_peak, Peak) or not isinstance(fp32_peak, Peak):
        return []
    if bf16_peak.flops_per_second < _FAST_BF16_FACTOR * fp32_peak.flops_per_second:
        return []
    return ['It trains in fp32: try torch.autocast("cuda", torch.bfloat16), and compare the loss, which it changes']


def _more_threads(parts: JobParts) -> list[str]:
    """Return that more threads may be tried, where ranks on a CPU leave most cores idle."""
    record = parts.records[0]
    if record.rank.device != "cpu":
        return []
    host = host_cores(parts.records, record.rank.host)
    workers = max(0, record.loader.workers) if record.loader is not None else 0
    busy_cores = host.ranks * (max(1, record.rank.threads) + workers)
    if host.cores < _IDLE_CORES_FACTOR * busy_cores:
        return []
    threads = max(1, host.cores_of_rank - workers)
    return [
        f"Ranks compute with {counted(record.rank.threads, 'thread')} each, and {host.cores:,} cores are there: "
        f"try OMP_NUM_THREADS={threads} (torchrun sets 1)"
    ]
