"""What an optimizer step really sends: its collectives by operation and dtype, in logical and in physical bytes.

Logical is what the engine asks for, in the units of the ZeRO paper (arXiv 1910.02054, section 7): a collective over a
tensor of S bytes moves S, and an all-reduce 2 S, because it is a reduce-scatter and an all-gather. The tensor is the
whole one: what an all-gather puts out, what a reduce-scatter takes in.

Physical is what a rank then puts on the wire, the mean over the ranks of a communicator of N, under a ring:

    all_reduce                                  2 (N-1)/N S
    all_gather, broadcast, all_to_all, reduce   (N-1)/N S
    send                                        S, and a recv nothing: both ranks record the one transfer
    reduce_scatter                              (N-1)/N S under NCCL, 2 (N-1)/N S under gloo: it sends an all_reduce

NCCL may choose another algorithm than a ring; these are the bytes of its bus bandwidth (PERFORMANCE.md of nccl-tests).
The bytes of gloo were read off the network's counters (docs/traffic.md); its reduce's do not follow from the size.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.repeats import Clusters, over_runs
from vitscale.analysis.runs.steps import common_steps
from vitscale.analysis.time.exposure import explained, exposures
from vitscale.present.estimate import Estimate
from vitscale.store.records import Collective
from vitscale.store.results import Run

_VOLUMES = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1, "all_to_all": 1, "barrier": 0,
    "send": 1, "recv": 0,
}  # fmt: skip
"""Logical bytes in units of the tensor's bytes."""
_ON_THE_WIRE: dict[str, dict[str, int | None]] = {
    "nccl": dict(_VOLUMES),
    "gloo": {**_VOLUMES, "reduce_scatter": 2, "reduce": None},
}
"""Backend and operation to physical bytes, in units of (N-1)/N of the tensor's."""
_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "none": 0,
}  # fmt: skip
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
_LEAST_SHARE = 0.01
"""Least share of the reduced elements for a dtype of gradients: less is a norm or two."""


@dataclass(frozen=True)
class Sent:
    """All collectives of one kind in an optimizer step of a rank."""

    operation: str
    dtype: str
    ranks: int
    """Size of the communicator."""
    calls: int
    elements: int
    """Elements of the whole tensors, all calls together."""
    logical_bytes: int | None
    """None where the volume of such an operation, or the size of its dtype, is unknown."""
    physical_bytes: float | None
    """Bytes that a rank sends, mean over ranks."""

    @property
    def tensor_bytes(self) -> int | None:
        """Bytes of the whole tensors, all calls together; None where their dtype's size is unknown."""
        size = _BYTES.get(self.dtype)
        return None if size is None else size * self.elements


@dataclass(frozen=True)
class Traffic:
    """What an optimizer step of a trial sends: the same on each rank, in each counted step and run, or nothing is said.

    Where ranks hold stages or tokens of one model, each of them sends the same in every step and run, and the figures
    are those of the rank that sends most.
    """

    backend: str | None
    sent: tuple[Sent, ...]
    """In the order of each kind's first call; empty where nothing is sent, or where this is unknown: see `reason`."""
    logical_bytes: int | None
    physical_bytes: float | None
    wire_seconds: Estimate | None
    """Transfer in an explained step, exposed or not; None where wait and wire are mixed or no step was explained."""
    reason: str
    """Why bytes are None; empty where all are known."""

    @property
    def calls(self) -> int | None:
        """Number of collectives in a step; None where unknown."""
        return sum(sent.calls for sent in self.sent) if self.sent or not self.reason else None

    @property
    def bytes_per_second(self) -> Estimate | None:
        """The bandwidth reached: physical bytes of a rank over the seconds of transfer."""
        if not self.physical_bytes or self.wire_seconds is None or self.wire_seconds.value <= 0:
            return None
        return self.wire_seconds.into(self.physical_bytes)

    @property
    def gradient_dtypes(self) -> Mapping[str, float]:
        """The floating dtypes that are reduced, with their shares of the reduced elements, the largest first."""
        elements: Counter[str] = Counter()
        for sent in self.sent:
            if sent.operation in _REDUCTIONS and "float" in sent.dtype:
                elements[sent.dtype] += sent.elements
        return {
            dtype: count / elements.total()
            for dtype, count in elements.most_common()
            if count >= _LEAST_SHARE * elements.total()
        }

    @property
    def gradient_dtype(self) -> str | None:
        """The dtype in which most of the gradient travels; None where there is no gradient, or this is unknown."""
        return next(iter(self.gradient_dtypes), None)


def traffic(
    runs: Sequence[Run],
    figures: Sequence[RunFigures],
    clusters: Clusters = None,
    *,
    unlike: bool = False,
    exchanges_unknown: str = "",
) -> Traffic | None:
    """What a trial sends in an optimizer step; None where none of its runs recorded it.

    Args:
        runs: completed runs of one trial.
        figures: figures of the same runs.
        clusters: the runs of each observation.
        unlike: whether ranks hold stages or tokens of one model, and so send different things.
        exchanges_unknown: why a counted step says nothing of others (`engines.checks.exchanges_unknown`).
    """
    counted = [line for run in runs for rank in run.ranks for line in rank.traffic]
    if not counted:
        return None
    backend = counted[0].backend
    if reason := exchanges_unknown or _why_not(runs, unlike=unlike):
        return Traffic(backend, (), None, None, None, reason)
    of_ranks = [_sent(backend, rank.traffic[0].collectives or ()) for rank in runs[0].ranks[: None if unlike else 1]]
    sent = max(of_ranks, key=lambda own: sum(exchange.physical_bytes or 0.0 for exchange in own))
    logical = [exchange.logical_bytes for exchange in sent if exchange.logical_bytes is not None]
    physical = [exchange.physical_bytes for exchange in sent if exchange.physical_bytes is not None]
    unknown = sorted(
        {f"{exchange.operation} of {exchange.dtype}" for exchange in sent if exchange.physical_bytes is None}
    )
    return Traffic(
        backend=backend,
        sent=sent,
        logical_bytes=sum(logical) if len(logical) == len(sent) else None,
        physical_bytes=sum(physical, 0.0) if len(physical) == len(sent) else None,
        wire_seconds=_wire_seconds(runs, figures, clusters),
        reason=f"what {backend} sends for {' and '.join(unknown)} is unknown" if unknown else "",
    )


def _why_not(runs: Sequence[Run], *, unlike: bool) -> str:
    """Why the counts differ between steps or ranks (`unlike`: between steps of a rank); empty where they do not."""
    firsts: dict[int, tuple[str, Counter[Collective]]] = {}
    for run in runs:
        steps = common_steps(run, lambda rank: rank.traffic)
        if not steps:
            return "not every rank counted the same steps"
        for lines in steps:
            for rank, line in enumerate(lines):
                if line.collectives is None:
                    return line.reason or "they could not be counted"
                where = f"rank {rank} in step {line.step} of repeat {run.header.repeat + 1}"
                # Names of groups of ranks differ from rank to rank.
                kinds = Counter(collective.model_copy(update={"communicator": ""}) for collective in line.collectives)
                first = firsts.setdefault(rank if unlike else 0, (where, kinds))
                if kinds != first[1]:
                    return f"{first[0]} and {where} differ: {_difference(first[1], kinds)}"
    return ""


def _difference(first: Counter[Collective], other: Counter[Collective]) -> str:
    """The first collective that only one of the two has, or has more often."""
    missing = first - other
    extra = other - first
    kind = next(iter(missing or extra))
    size = max(kind.input_elements, kind.output_elements)
    return f"{first[kind]} against {other[kind]} {kind.operation} of {size:,} {kind.dtype}"


def _sent(backend: str, collectives: Iterable[Collective]) -> tuple[Sent, ...]:
    by_kind: dict[tuple[str, str, int], list[int]] = {}
    for collective in collectives:
        kind = (collective.operation, collective.dtype, collective.ranks)
        by_kind.setdefault(kind, []).append(_whole(collective))
    sent = []
    for (operation, dtype, ranks), elements in by_kind.items():
        size = _BYTES.get(dtype)
        volume, carried = _VOLUMES.get(operation), _ON_THE_WIRE.get(backend, {}).get(operation)
        logical = None if volume is None or size is None else volume * size * sum(elements)
        share = 1.0 if operation == "send" else (ranks - 1) / ranks
        physical = None if carried is None or size is None else carried * size * sum(elements) * share
        sent.append(Sent(operation, dtype, ranks, len(elements), sum(elements), logical, physical))
    return tuple(sent)


def _whole(collective: Collective) -> int:
    """Elements of the whole tensor; for DTensor's own gathers and scatters torch records only parts."""
    own, result = collective.input_elements, collective.output_elements
    if collective.operation == "all_gather":
        own *= collective.ranks
    elif collective.operation == "reduce_scatter":
        result *= collective.ranks
    return max(own, result)


def _wire_seconds(runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters) -> Estimate | None:
    """Seconds of transfer in an explained step, over runs: the mean over steps of the median over ranks."""
    means: list[float | None] = []
    for run, own in zip(runs, figures, strict=True):
        by_run = []
        for lines in explained(run, own.steady_from or 0):
            of_ranks = [exposure.wire_seconds for exposure in exposures(lines)]
            known = [seconds for seconds in of_ranks if seconds is not None]
            if len(known) < len(of_ranks):
                return None
            by_run.append(statistics.median(known))
        means.append(statistics.fmean(by_run) if by_run else None)
    return over_runs(means, clusters)
