"""The curves of the results as a study's figures see them: workload, place, and costs against one GPU.

Published measurements stand beside them only for the same dataset, micro-batch, mode, place and model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from vitscale.analysis import Analysis, CurveResult, TrialResult, base_of
from vitscale.analysis.scaling import times_as_fast
from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.published import ClusterLayout, PublishedFact, published
from vitscale.trial.trial import Mode

Hosts = Literal["one host", "one GPU a host", "several like hosts", "several unlike hosts"]
"""Where the GPUs of a series are. Unlike hosts have GPUs of unlike kinds, however many each; like hosts with one GPU in
each are "one GPU a host"."""
_SAID_OTHERWISE = ("data.name", "train.micro_batch", "train.grad_accum")
SAME = 1e-3
"""Epoch times closer than this, as a share, are the published measurement itself, imported."""
_OF_HOSTS = ("layout", "scaling.gpus_per_node")
_OF_DEVICES = ("device",)
"""Labels that only some curves of an import have: what the devices are is compared by the records."""


@dataclass(frozen=True)
class Member:
    """One measured rank count of a series."""

    gpus: int
    trial: TrialResult
    against_base: Estimate | None = None
    """How many times as fast an epoch is as the base's; None where the two must not be compared."""
    reasons: tuple[str, ...] = ()
    """Why `against_base` is None."""
    base_gpus: int | None = None
    """Rank count of the base."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device, by name."""
        return self.trial.environment.devices if self.trial.environment is not None else ()

    @property
    def why_not(self) -> str:
        """The reasons in one clause; empty where there is none."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class FigureSeries:
    """One curve, with the properties by which figures choose."""

    curve: CurveResult
    mode: Mode
    dataset: str
    micro_batch: int
    hosts: Hosts
    members: tuple[Member, ...]
    """Members with an epoch time or an accuracy, by rank count."""
    base_elsewhere: Member | None = None
    """The base of the same workload on other devices, which has fewer ranks than any member here; None: there is none.
    """

    @property
    def base(self) -> Member | None:
        """What members are compared with: the base elsewhere, or the member with the smallest rank count that may be
        compared, of the kind of costs that most members tell."""
        if self.base_elsewhere is not None:
            return self.base_elsewhere
        base = base_of([member.trial for member in self.members])
        return next((member for member in self.members if member.trial is base), None)

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device, by name."""
        return tuple(dict.fromkeys(name for member in self.members for name in member.devices))

    @property
    def cluster(self) -> str:
        """The cluster as an import names it; empty where none is named."""
        return str(self.curve.labels.get("cluster") or "")

    @property
    def group(self) -> tuple[Any, ...]:
        """Equal for series that differ only in where their GPUs are, and perhaps in what these are."""
        labels = {k: v for k, v in self.curve.labels.items() if k not in (*_OF_HOSTS, *_OF_DEVICES)}
        return self.mode, self.dataset, self.micro_batch, tuple(sorted((k, str(v)) for k, v in labels.items()))


def all_series(analysis: Analysis) -> list[FigureSeries]:
    """Every curve with a measurement; a curve that begins in one host and goes on over several makes two series.

    A series over several hosts that lacks one GPU borrows it from its twin in one host, whose GPU is of the same kind:
    on one GPU both are the same.

    A series that begins with more GPUs than the same workload on other devices is compared with that one's base, not
    with itself: a curve beside one that has the single GPU has no speedup of its own.
    """
    measured = [series for curve in analysis.curves for series in _of_curve(analysis, curve)]
    single = {
        (series.group, first.devices): first
        for series in measured
        for first in series.members[:1]
        if series.hosts == "one host" and first.gpus == 1
    }
    whole = []
    for series in measured:
        twin = single.get((series.group, series.members[0].devices))
        if series.hosts != "one host" and twin is not None and series.members[0].gpus > 1:
            series = replace(series, members=(twin, *series.members))
        whole.append(series)
    based = [replace(series, base_elsewhere=_base_elsewhere(series, whole)) for series in whole]
    return [_compared(series, analysis.combine_unlike) for series in based]


def _base_elsewhere(series: FigureSeries, others: Sequence[FigureSeries]) -> Member | None:
    """The base of the same workload on other devices, if it has fewer GPUs than all of `series`; one whose devices are
    among those of `series` comes first."""
    first = series.members[0]
    smaller = [
        base
        for other in others
        if other.group == series.group and (base := other.base) is not None
        if base.gpus < first.gpus and base.devices and first.devices and base.devices != first.devices
    ]
    return min(smaller, key=lambda base: (base.gpus, not set(base.devices) <= set(series.devices)), default=None)


def names(some: Sequence[FigureSeries]) -> list[str]:
    """What tells these series apart, in a reader's words; the full name where that is not enough."""
    differences = _Differences.of(some)
    shorts = [differences.name(series) for series in some]
    shorts = [
        differences.name(series, all_devices=True) if shorts.count(short) > 1 else short
        for series, short in zip(some, shorts, strict=True)
    ]
    unclear = [
        series.curve.name if shorts.count(short) > 1 else short for series, short in zip(some, shorts, strict=True)
    ]
    return [
        f"{name} ({unclear[: index + 1].count(name)})" if unclear.count(name) > 1 else name
        for index, name in enumerate(unclear)
    ]


@dataclass(frozen=True)
class _Differences:
    """In what some series differ, and so what their names must tell."""

    dataset: bool
    micro_batch: bool
    hosts: bool
    labels: tuple[str, ...]
    """The labels whose values differ, but for those that are told otherwise."""
    devices: bool
    told_clusters: frozenset[str]
    """Clusters whose names tell their devices."""

    @classmethod
    def of(cls, some: Sequence[FigureSeries]) -> _Differences:
        hosts_differ = len({series.hosts for series in some}) > 1
        told_otherwise = (*_SAID_OTHERWISE, *(_OF_HOSTS if hosts_differ else ()))
        fields = dict.fromkeys(field for series in some for field in series.curve.labels)
        labels = tuple(
            field
            for field in fields
            if field not in told_otherwise
            and len({_said(field, series.curve.labels.get(field)) for series in some}) > 1
        )
        return cls(
            dataset=len({series.dataset for series in some}) > 1,
            micro_batch=len({series.micro_batch for series in some}) > 1,
            hosts=hosts_differ,
            labels=labels,
            devices=len({_kind(series) for series in some}) > 1,
            told_clusters=frozenset(_clusters_of_one_kind(some) if "cluster" in labels else ()),
        )

    def name(self, series: FigureSeries, *, all_devices: bool = False) -> str:
        """What tells a series from the others. `all_devices`: name its devices also where they are of several kinds."""
        dataset, micro_batch = DATASET_NAMES.get(series.dataset, series.dataset), f"micro-batch {series.micro_batch:,}"
        parts = [dataset] if self.dataset else []
        parts += [micro_batch] if self.micro_batch else []
        parts += filter(None, (_said(field, series.curve.labels.get(field)) for field in self.labels))
        if all_devices:
            parts.append(" and ".join(series.devices) or _kind(series))
        elif self.devices and series.cluster not in self.told_clusters:
            parts.append(_kind(series))
        if self.hosts:
            parts.append("one host" if series.hosts == "one host" else "several hosts")
        # Some importers label a curve with its device too: it is said once.
        return ", ".join(dict.fromkeys(parts)) or f"{dataset}, {micro_batch}"


def _kind(series: FigureSeries) -> str:
    """A series' kind of device in a few words."""
    if len(series.devices) > 1:
        return "unlike GPUs"
    return series.devices[0] if series.devices else "unknown device"


def _clusters_of_one_kind(some: Sequence[FigureSeries]) -> set[str]:
    """The clusters whose series all have the same kind of device."""
    kinds_of: dict[str, set[str]] = {}
    for series in some:
        kinds_of.setdefault(series.cluster, set()).add(_kind(series))
    return {cluster for cluster, kinds in kinds_of.items() if len(kinds) == 1}


def apart_in_micro_batch(some: Sequence[FigureSeries]) -> list[tuple[str, list[FigureSeries]]]:
    """Sets of two or more series that differ only in micro-batch, each with a name that leaves it out."""
    sets: dict[tuple[Any, ...], list[FigureSeries]] = {}
    for series in some:
        sets.setdefault((series.dataset, *_labels_without(series, "train.micro_batch")), []).append(series)
    several = [members for members in sets.values() if len({member.micro_batch for member in members}) > 1]
    labelled = names([replace(members[0], micro_batch=0) for members in several])
    return [(name.partition(", micro-batch")[0], members) for name, members in zip(labelled, several, strict=True)]


def apart_in_dataset(some: Sequence[FigureSeries]) -> list[tuple[str, list[FigureSeries]]]:
    """Sets of two or more series that differ only in dataset, each with a name that leaves it out."""
    sets: dict[tuple[Any, ...], list[FigureSeries]] = {}
    for series in some:
        sets.setdefault((series.micro_batch, *_labels_without(series, "data.name")), []).append(series)
    several = [members for members in sets.values() if len({member.dataset for member in members}) > 1]
    if len(several) == 1:
        return [(f"micro-batch {several[0][0].micro_batch:,}", several[0])]
    return list(zip(names([replace(members[0], dataset="") for members in several]), several, strict=True))


def _labels_without(series: FigureSeries, left_out: str) -> tuple[Any, ...]:
    """What else a curve is of: its mode, where its GPUs are, and its labels but one."""
    labels = tuple((field, str(value)) for field, value in series.curve.labels.items() if field != left_out)
    return series.mode, series.hosts, labels


DATASET_NAMES: Mapping[str, str] = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "ade20k": "ADE20K"}


def _said(field: str, value: Any) -> str:
    """A swept value as it stands in a name; numbers and switches follow their field; all of the data is left out."""
    if value is None or (field, value) == ("data.fraction", 1.0):
        return ""
    return value if isinstance(value, str) else f"{field.rpartition('.')[2]} {value}"


def _of_curve(analysis: Analysis, curve: CurveResult) -> list[FigureSeries]:
    members = [
        Member(point.gpus, trial)
        for point in sorted(curve.points, key=lambda point: point.gpus)
        if (trial := analysis.trials[point.trial_id]).run_figures
    ]
    several = any(member.trial.trial.world.nodes > 1 for member in members)
    inside = [member for member in members if member.trial.trial.world.nodes == 1]
    parts: list[tuple[Hosts, list[Member]]] = []
    if inside and (len(inside) > 1 or not several):
        parts.append(("one host", inside))
    if several:
        parts.append((_kind_of_hosts(curve, members), members))
    return [
        FigureSeries(curve, curve.mode, largest.data.name, largest.train.micro_batch, hosts, tuple(some))
        for hosts, some in parts
        for largest in [members[-1].trial.trial]
    ]


def _kind_of_hosts(curve: CurveResult, members: Sequence[Member]) -> Hosts:
    """What several hosts are like, and whether each has one GPU."""
    devices = {name for member in members for name in member.devices}
    if len(devices) > 1 or _published_as_unlike(curve, members):
        return "several unlike hosts"
    if all(member.trial.trial.world.ranks_per_node == 1 for member in members):
        return "one GPU a host"
    return "several like hosts"


def _published_as_unlike(curve: CurveResult, members: Sequence[Member]) -> bool:
    """Whether these are published measurements of a cluster of unlike hosts, whose raw data name one kind of GPU.

    One of its epoch times is enough where the curve names the cluster; all of them are needed where it names none, as
    it does not in results of one cluster.
    """
    for cluster in published().unlike_clusters:
        facts = [fact for fact in published().facts if fact.cluster == cluster]
        same = [_is_among(facts, member) for member in members]
        name = curve.labels.get("cluster")
        if any(same) if name == cluster else not name and all(same):
            return True
    return False


def _is_among(facts: Sequence[PublishedFact], member: Member) -> bool:
    """Whether a member has the epoch time that was published of its workload and GPU count."""
    trial = member.trial.trial
    return any(
        _is_one_of({fact.gpus: fact}, member)
        for fact in facts
        if (fact.dataset, fact.micro_batch) == (trial.data.name, trial.train.micro_batch)
    )


def _compared(series: FigureSeries, combine_unlike: bool) -> FigureSeries:
    """`series` with every member compared with its smallest, as the analysis compares the points of a curve."""
    base = series.base
    if base is None:
        return series
    members = []
    for member in series.members:
        told: dict[str, Any] = {"base_gpus": base.gpus}
        if not member.trial.comparable_costs:
            told["reasons"] = ("it has no epoch time that may be compared",)
        elif between := base.trial.unlike(member.trial, combine_unlike):
            told["reasons"] = between
        else:
            told["against_base"] = times_as_fast(base.trial, member.trial)
        members.append(replace(member, **told))
    return replace(series, members=tuple(members))


_MODEL, _IMAGE_SIZE = "vit-b16", 224


@dataclass(frozen=True)
class PublishedPoints:
    """Published facts for the series of a figure."""

    facts: tuple[tuple[FigureSeries, tuple[PublishedFact, ...]], ...] = ()
    note: str = ""
    """What sets the facts apart, or why none are drawn; empty where there is nothing to say."""


def published_points(series: Sequence[FigureSeries]) -> PublishedPoints:
    """What was published of the workloads of these series, but for what they draw already."""
    beside = []
    other_work: list[str] = []
    seen = {facts for curve in series for facts in [_facts(curve)] if _are_all_published(curve, facts)}
    for curve in series:
        facts = _facts(curve)
        if not facts or facts in seen:
            continue
        if difference := _other_work(curve):
            other_work.append(difference)
        else:
            seen.add(facts)
            beside.append((curve, facts))
    notes = [_themselves_note(series)]
    if beside:
        first = beside[0][1][0]
        hardware = ", ".join(dict.fromkeys(name for _, facts in beside for fact in facts for name in fact.devices))
        notes.append(
            f"hollow grey: published (arXiv {published().source.arxiv}), {hardware}, {first.precision}; other hardware"
        )
    elif other_work:
        notes.append(f"published points left out: they are of {other_work[0]}")
    return PublishedPoints(tuple(beside), "; ".join(filter(None, notes)))


def _facts(series: FigureSeries) -> tuple[PublishedFact, ...]:
    if series.mode == "strong-global" or series.hosts == "several like hosts":
        return ()
    layout: ClusterLayout = "single-node" if series.hosts == "one host" else "one-gpu-per-node"
    weak = series.mode == "weak"
    unlike = series.hosts == "several unlike hosts"
    clusters = dict.fromkeys(fact.cluster for fact in published().facts)
    cluster = next(name for name in clusters if (name in published().unlike_clusters) == unlike)
    of = partial(published().of, dataset=series.dataset, micro_batch=series.micro_batch, weak=weak, cluster=cluster)
    measured = of(layout=layout)
    if layout == "single-node" or not measured or measured[0].gpus == 1:
        return measured
    # On one GPU both layouts are the same.
    return (*(fact for fact in of(layout="single-node") if fact.gpus == 1), *measured)


def _other_work(series: FigureSeries) -> str:
    """How what was published differs from what a trial of a series trains; empty where it is the same.

    Compared are the model, its images, how many of them, and accumulation.
    """
    for member in series.members:
        trial = member.trial.trial
        share = member.gpus / 10 if series.mode == "weak" else 1.0
        if not trial.model_name:
            return "ViT-B/16 at 224 x 224, and these results name no model"
        model = member.trial.model_name, trial.model.image_size, trial.train.grad_accum
        if model != (_MODEL, _IMAGE_SIZE, 1):
            return "ViT-B/16 at 224 x 224, other work than this"
        if abs(trial.data.fraction - share) > 1e-9:
            return "another share of the images"
    return ""


def _themselves_note(series: Sequence[FigureSeries]) -> str:
    """At which GPU counts all that is drawn is a published measurement itself, by its value; empty where at none."""
    is_published: dict[int, bool] = {}
    for curve in series:
        fact_of = _by_gpus(_facts(curve))
        for member in curve.members:
            if member.trial.epoch_seconds is not None:
                is_published[member.gpus] = is_published.get(member.gpus, True) and _is_one_of(fact_of, member)
    counts = sorted(gpus for gpus, all_are in is_published.items() if all_are)
    if not counts:
        return ""
    themselves = "these are the published measurements themselves"
    if len(counts) == len(is_published):
        return themselves
    return f"at {units.listed(counts)} GPU{'s' if max(counts) > 1 else ''} {themselves}"


def _are_all_published(series: FigureSeries, facts: Sequence[PublishedFact]) -> bool:
    """Whether a series draws the published measurements: the same time at every GPU count that was published, if any
    of these was measured."""
    fact_of = _by_gpus(facts)
    same = [
        _is_one_of(fact_of, member)
        for member in series.members
        if member.trial.epoch_seconds is not None and member.gpus in fact_of
    ]
    return bool(same) and all(same)


def _by_gpus(facts: Sequence[PublishedFact]) -> dict[int, PublishedFact]:
    return {fact.gpus: fact for fact in facts}


def _is_one_of(fact_of: Mapping[int, PublishedFact], member: Member) -> bool:
    """Whether a member is what was published for its GPU count: the same epoch time of the same share of the images."""
    fact, seconds = fact_of.get(member.gpus), member.trial.epoch_seconds
    if fact is None or seconds is None:
        return False
    same_share = abs(member.trial.trial.data.fraction - fact.fraction) < 1e-9
    return same_share and abs(seconds.value / fact.epoch_seconds - 1) < SAME
