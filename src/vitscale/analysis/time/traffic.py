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

_LOGICAL_VOLUMES = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1, "all_to_all": 1, "barrier": 0,
    "send": 1, "recv": 0,
}  # fmt: skip
"""Operation to its logical bytes, in units of the tensor's bytes S."""
_PHYSICAL_VOLUMES: dict[str, dict[str, int | None]] = {
    "nccl": dict(_LOGICAL_VOLUMES),
    "gloo": {**_LOGICAL_VOLUMES, "reduce_scatter": 2, "reduce": None},
}
"""Backend and operation to physical bytes, in units of (N-1)/N S (of S for a send). None: unknown."""
_ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "none": 0,
}  # fmt: skip
"""Bytes of an element of each dtype; a collective of dtype "none" has no tensor."""
_REDUCING_OPERATIONS = ("all_reduce", "reduce_scatter", "reduce")
"""Operations in which gradients travel."""
_LEAST_GRADIENT_SHARE = 0.01
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
        element_bytes = _ELEMENT_BYTES.get(self.dtype)
        return None if element_bytes is None else element_bytes * self.elements


@dataclass(frozen=True)
class Traffic:
    """What an optimizer step of a trial sends.

    It is the same on each rank, in each counted step and run; where counts differ, the bytes are None (`reason`). Where
    ranks hold stages or tokens of one model, they send different things, but each the same in every step and run: then
    the figures are those of the rank that sends most.
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
        if self.reason and not self.sent:
            return None
        return sum(kind.calls for kind in self.sent)

    @property
    def bytes_per_second(self) -> Estimate | None:
        """The bandwidth reached: physical bytes of a rank over the seconds of transfer."""
        if not self.physical_bytes or self.wire_seconds is None or self.wire_seconds.value <= 0:
            return None
        return self.wire_seconds.into(self.physical_bytes)

    @property
    def gradient_dtypes(self) -> Mapping[str, float]:
        """The floating dtypes that are reduced, with their shares of the reduced elements, the largest first."""
        elements_by_dtype: Counter[str] = Counter()
        for kind in self.sent:
            if kind.operation in _REDUCING_OPERATIONS and "float" in kind.dtype:
                elements_by_dtype[kind.dtype] += kind.elements
        reduced_elements = elements_by_dtype.total()
        shares = {}
        for dtype, elements in elements_by_dtype.most_common():
            if elements >= _LEAST_GRADIENT_SHARE * reduced_elements:
                shares[dtype] = elements / reduced_elements
        return shares

    @property
    def gradient_dtype(self) -> str | None:
        """The dtype in which most of the gradient travels; None where there is no gradient, or this is unknown."""
        return next(iter(self.gradient_dtypes), None)


def traffic(
    runs: Sequence[Run],
    figures: Sequence[RunFigures],
    clusters: Clusters = None,
    *,
    ranks_differ: bool = False,
    exchanges_unknown: str = "",
) -> Traffic | None:
    """Return what a trial sends in an optimizer step; None where none of its runs recorded it.

    Args:
        runs: completed runs of one trial.
        figures: figures of the same runs.
        clusters: the runs of each observation.
        ranks_differ: whether ranks hold stages or tokens of one model, and so send different things.
        exchanges_unknown: why a counted step does not stand for the others (`engines.checks.exchanges_unknown`); empty
            where it does.
    """
    backend = _backend(runs)
    if backend is None:
        return None
    reason = exchanges_unknown or _inconsistency(runs, ranks_differ=ranks_differ)
    if reason:
        return Traffic(backend, sent=(), logical_bytes=None, physical_bytes=None, wire_seconds=None, reason=reason)
    # All counts agree, so that the first counted step of the first run stands for all.
    ranks = runs[0].ranks if ranks_differ else runs[0].ranks[:1]
    sent_by_rank = [_sent_by_kind(backend, rank.traffic[0].collectives or ()) for rank in ranks]
    sent = max(sent_by_rank, key=_known_physical_bytes)
    return Traffic(
        backend=backend,
        sent=sent,
        logical_bytes=_logical_bytes(sent),
        physical_bytes=None if _unknown_kinds(sent) else _known_physical_bytes(sent),
        wire_seconds=_wire_seconds(runs, figures, clusters),
        reason=_unknown_bytes_reason(backend, sent),
    )


def _backend(runs: Sequence[Run]) -> str | None:
    """Return the backend of the first counted step; None where no step was counted."""
    for run in runs:
        for rank in run.ranks:
            for line in rank.traffic:
                return line.backend
    return None


def _logical_bytes(sent: Sequence[Sent]) -> int | None:
    """Return the logical bytes of all kinds together; None where those of one are unknown."""
    total = 0
    for kind in sent:
        if kind.logical_bytes is None:
            return None
        total += kind.logical_bytes
    return total


def _known_physical_bytes(sent: Sequence[Sent]) -> float:
    """Return the physical bytes of all kinds of which they are known."""
    return sum((kind.physical_bytes for kind in sent if kind.physical_bytes is not None), 0.0)


def _unknown_kinds(sent: Sequence[Sent]) -> list[str]:
    """Return the kinds of which the physical bytes are unknown: ["reduce of float32"]."""
    return sorted({f"{kind.operation} of {kind.dtype}" for kind in sent if kind.physical_bytes is None})


def _unknown_bytes_reason(backend: str, sent: Sequence[Sent]) -> str:
    """Return why physical bytes are unknown; empty where all are known."""
    unknown_kinds = _unknown_kinds(sent)
    if not unknown_kinds:
        return ""
    return f"what {backend} sends for {' and '.join(unknown_kinds)} is unknown"


class _CountedStep(NamedTuple):
    """The collectives of one step of a rank, without their communicators."""

    name: str
    """Where it was counted: "rank 0 in step 3 of repeat 1"."""
    kinds: Counter[Collective]


def _inconsistency(runs: Sequence[Run], *, ranks_differ: bool) -> str:
    """Return how the counts differ between steps or ranks; empty where they agree.

    Each counted step is compared with the first one, or with the first one of its rank where `ranks_differ`.

    Args:
        runs: completed runs of one trial.
        ranks_differ: whether ranks send different things, so that only the steps of each rank must agree.
    """
    first_steps: dict[int, _CountedStep] = {}  # rank -> its first counted step; 0 -> that of all ranks
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
                first = first_steps.setdefault(rank if ranks_differ else 0, step)
                if step.kinds != first.kinds:
                    return f"{first.name} and {name} differ: {_difference(first.kinds, step.kinds)}"
    return ""


def _kinds(collectives: Iterable[Collective]) -> Counter[Collective]:
    """Return each different collective -> its number. Communicators' names, which differ by rank, are left out."""
    return Counter(collective.model_copy(update={"communicator": ""}) for collective in collectives)


def _difference(first: Counter[Collective], other: Counter[Collective]) -> str:
    """Return how two different counts differ: "2 against 1 all_reduce of 4,096 float32".

    It is the first collective that only one of the two has, or has more often.
    """
    missing = first - other
    extra = other - first
    kind = next(iter(missing or extra))
    elements = max(kind.input_elements, kind.output_elements)
    return f"{first[kind]} against {other[kind]} {kind.operation} of {elements:,} {kind.dtype}"


class _CollectiveKind(NamedTuple):
    """What collectives have in common that a report puts together."""

    operation: str
    dtype: str
    ranks: int
    """Size of the communicator."""


def _sent_by_kind(backend: str, collectives: Iterable[Collective]) -> tuple[Sent, ...]:
    """Return the collectives of a step by kind, in the order of each kind's first call."""
    elements_by_kind: dict[_CollectiveKind, list[int]] = {}
    for collective in collectives:
        kind = _CollectiveKind(collective.operation, collective.dtype, collective.ranks)
        elements_by_kind.setdefault(kind, []).append(_tensor_elements(collective))
    return tuple(_sent_of_kind(backend, kind, elements) for kind, elements in elements_by_kind.items())


def _sent_of_kind(backend: str, kind: _CollectiveKind, elements_by_call: Sequence[int]) -> Sent:
    """Return what is sent for one kind of collectives, by the formulas of the module's docstring.

    Args:
        backend: "nccl" or "gloo"; of others the physical bytes are unknown.
        kind: the kind.
        elements_by_call: elements of each call's whole tensor.
    """
    elements = sum(elements_by_call)
    element_bytes = _ELEMENT_BYTES.get(kind.dtype)
    logical_volume = _LOGICAL_VOLUMES.get(kind.operation)
    physical_volume = _PHYSICAL_VOLUMES.get(backend, {}).get(kind.operation)
    logical_bytes = None
    if element_bytes is not None and logical_volume is not None:
        logical_bytes = logical_volume * element_bytes * elements
    physical_bytes = None
    if element_bytes is not None and physical_volume is not None:
        # A ring of N ranks passes N - 1 of N pieces on. A send has no ring: one rank sends the whole tensor.
        ring_share = 1.0 if kind.operation == "send" else (kind.ranks - 1) / kind.ranks
        physical_bytes = physical_volume * element_bytes * elements * ring_share
    return Sent(
        operation=kind.operation,
        dtype=kind.dtype,
        ranks=kind.ranks,
        calls=len(elements_by_call),
        elements=elements,
        logical_bytes=logical_bytes,
        physical_bytes=physical_bytes,
    )


def _tensor_elements(collective: Collective) -> int:
    """Return the elements of the whole tensor of a collective.

    It is the output of an all-gather and the input of a reduce-scatter. For those of DTensor torch records the part of
    one rank on both sides, so that the whole tensor is worked out from the part.
    """
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
        seconds_by_run = [
            _mean_wire_seconds(run, run_figures.steady_from or 0)
            for run, run_figures in zip(runs, figures, strict=True)
        ]
    except _WireUnknown:
        return None
    return over_runs(seconds_by_run, clusters)


def _mean_wire_seconds(run: Run, steady_from: int) -> float | None:
    """Return the seconds of transfer in a run's explained steps: the median over ranks, mean over steps.

    None where no step after `steady_from`, the number of the first steady step, was explained.

    Raises:
        _WireUnknown: a rank's transfer is unknown.
    """
    median_by_step = []
    for lines in explained(run, steady_from):
        seconds_by_rank = [exposure.wire_seconds for exposure in exposures(lines)]
        known_seconds = [seconds for seconds in seconds_by_rank if seconds is not None]
        if len(known_seconds) < len(seconds_by_rank):
            raise _WireUnknown
        median_by_step.append(statistics.median(known_seconds))
    return statistics.fmean(median_by_step) if median_by_step else None
