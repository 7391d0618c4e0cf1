"""Works out what an optimizer step sends: its collectives by operation and dtype, in logical and in physical bytes.

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
from typing import NamedTuple

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
_PHYSICAL_VOLUMES: dict[str, dict[str, int | None]] = {
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
    """Return what a trial sends in an optimizer step; None where none of its runs recorded it.

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
    reason = exchanges_unknown or _inconsistency(runs, unlike=unlike)
    if reason:
        return Traffic(backend, sent=(), logical_bytes=None, physical_bytes=None, wire_seconds=None, reason=reason)
    ranks = runs[0].ranks if unlike else runs[0].ranks[:1]
    sent_by_rank = [_sent(backend, rank.traffic[0].collectives or ()) for rank in ranks]
    sent = max(sent_by_rank, key=_known_physical_bytes)
    unknown = sorted({f"{kind.operation} of {kind.dtype}" for kind in sent if kind.physical_bytes is None})
    are_logical_bytes_known = all(kind.logical_bytes is not None for kind in sent)
    return Traffic(
        backend=backend,
        sent=sent,
        logical_bytes=sum(kind.logical_bytes or 0 for kind in sent) if are_logical_bytes_known else None,
        physical_bytes=None if unknown else _known_physical_bytes(sent),
        wire_seconds=_wire_seconds(runs, figures, clusters),
        reason=f"what {backend} sends for {' and '.join(unknown)} is unknown" if unknown else "",
    )


def _known_physical_bytes(sent: Sequence[Sent]) -> float:
    return sum((kind.physical_bytes for kind in sent if kind.physical_bytes is not None), 0.0)


class _CountedStep(NamedTuple):
    """The collectives of one step of a rank, without their communicators."""

    name: str
    """Where it was counted: "rank 0 in step 3 of repeat 1"."""
    kinds: Counter[Collective]


def _inconsistency(runs: Sequence[Run], *, unlike: bool) -> str:
    """Return how the counts differ between steps or ranks; empty where they agree.

    `unlike`: whether ranks send different things, so that only the steps of each rank must agree.
    """
    first_by_rank: dict[int, _CountedStep] = {}
    for run in runs:
        steps = common_steps(run, lambda rank: rank.traffic)
        if not steps:
            return "not every rank counted the same steps"
        for lines in steps:
            for rank, line in enumerate(lines):
                if line.collectives is None:
                    return line.reason or "they could not be counted"
                name = f"rank {rank} in step {line.step} of repeat {run.header.repeat + 1}"
                step = _CountedStep(name, _kinds(line.collectives))
                first = first_by_rank.setdefault(rank if unlike else 0, step)
                if step.kinds != first.kinds:
                    return f"{first.name} and {name} differ: {_difference(first.kinds, step.kinds)}"
    return ""


def _kinds(collectives: Iterable[Collective]) -> Counter[Collective]:
    """Return how often each collective occurs. Names of communicators differ from rank to rank, and are left out."""
    return Counter(collective.model_copy(update={"communicator": ""}) for collective in collectives)


def _difference(first: Counter[Collective], other: Counter[Collective]) -> str:
    """Return in words the first collective that only one of the two has, or has more often."""
    missing = first - other
    extra = other - first
    kind = next(iter(missing or extra))
    size = max(kind.input_elements, kind.output_elements)
    return f"{first[kind]} against {other[kind]} {kind.operation} of {size:,} {kind.dtype}"


class _Kind(NamedTuple):
    """Collectives that a report puts together."""

    operation: str
    dtype: str
    ranks: int


def _sent(backend: str, collectives: Iterable[Collective]) -> tuple[Sent, ...]:
    """Return the collectives of a step by kind, in the order of each kind's first call."""
    tensors_by_kind: dict[_Kind, list[int]] = {}
    for collective in collectives:
        kind = _Kind(collective.operation, collective.dtype, collective.ranks)
        tensors_by_kind.setdefault(kind, []).append(_tensor_elements(collective))
    return tuple(_sent_of_kind(backend, kind, tensors) for kind, tensors in tensors_by_kind.items())


def _sent_of_kind(backend: str, kind: _Kind, tensors: Sequence[int]) -> Sent:
    """Return what is sent for one kind of collectives. `tensors`: elements of each call's whole tensor."""
    elements = sum(tensors)
    element_bytes = _BYTES.get(kind.dtype)
    logical_volume = _VOLUMES.get(kind.operation)
    physical_volume = _PHYSICAL_VOLUMES.get(backend, {}).get(kind.operation)
    logical_bytes = None
    if element_bytes is not None and logical_volume is not None:
        logical_bytes = logical_volume * element_bytes * elements
    physical_bytes = None
    if element_bytes is not None and physical_volume is not None:
        share = 1.0 if kind.operation == "send" else (kind.ranks - 1) / kind.ranks
        physical_bytes = physical_volume * element_bytes * elements * share
    return Sent(
        operation=kind.operation,
        dtype=kind.dtype,
        ranks=kind.ranks,
        calls=len(tensors),
        elements=elements,
        logical_bytes=logical_bytes,
        physical_bytes=physical_bytes,
    )


def _tensor_elements(collective: Collective) -> int:
    """Return the elements of the whole tensor; for DTensor's own gathers and scatters torch records only parts."""
    input_elements = collective.input_elements
    output_elements = collective.output_elements
    if collective.operation == "all_gather":
        input_elements *= collective.ranks
    elif collective.operation == "reduce_scatter":
        output_elements *= collective.ranks
    return max(input_elements, output_elements)


class _WireUnknown(Exception):
    """Raised where the transfer of an explained step is unknown on some rank."""


def _wire_seconds(runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters) -> Estimate | None:
    """Return seconds of transfer in an explained step, over runs; None where they are unknown in some run."""
    try:
        by_run = [_mean_wire_seconds(run, of_run.steady_from or 0) for run, of_run in zip(runs, figures, strict=True)]
    except _WireUnknown:
        return None
    return over_runs(by_run, clusters)


def _mean_wire_seconds(run: Run, steady_from: int) -> float | None:
    """Return the mean over a run's explained steps of the median over ranks; None without such a step.

    Raises:
        _WireUnknown: a rank's transfer is unknown.
    """
    medians = []
    for lines in explained(run, steady_from):
        by_rank = [exposure.wire_seconds for exposure in exposures(lines)]
        known_seconds = [seconds for seconds in by_rank if seconds is not None]
        if len(known_seconds) < len(by_rank):
            raise _WireUnknown
        medians.append(statistics.median(known_seconds))
    return statistics.fmean(medians) if medians else None
