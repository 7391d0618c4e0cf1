"""The curves of the results as a study's figures see them: workload, place, and costs against one GPU.

Published measurements stand beside them only for the same dataset, micro-batch, mode, place and model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

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
    measured: list[FigureSeries] = []
    for curve in analysis.curves:
        measured += _series_of_curve(analysis, curve)
    completed = _with_borrowed_gpu(measured)
    based = [replace(series, base_elsewhere=_base_elsewhere(series, completed)) for series in completed]
    return [_compared(series, analysis.combine_unlike) for series in based]


def _with_borrowed_gpu(measured: Sequence[FigureSeries]) -> list[FigureSeries]:
    """The series, those over several hosts with the one GPU of their twin in one host where they lack it."""
    single_gpus: dict[Any, Member] = {}
    for series in measured:
        first = series.members[0]
        if series.hosts == "one host" and first.gpus == 1:
            single_gpus[series.group, first.devices] = first
    completed = []
    for series in measured:
        first = series.members[0]
        twin = single_gpus.get((series.group, first.devices))
        if series.hosts != "one host" and twin is not None and first.gpus > 1:
            completed.append(replace(series, members=(twin, *series.members)))
        else:
            completed.append(series)
    return completed


def _base_elsewhere(series: FigureSeries, candidates: Sequence[FigureSeries]) -> Member | None:
    """The base of the same workload on other devices, if it has fewer GPUs than all of `series`.

    One whose devices are among those of `series` comes first.
    """
    first = series.members[0]
    smaller = []
    for candidate in candidates:
        base = candidate.base
        if candidate.group == series.group and base is not None and _is_smaller_elsewhere(base, first):
            smaller.append(base)
    return min(smaller, key=lambda base: (base.gpus, not set(base.devices) <= set(series.devices)), default=None)


def _is_smaller_elsewhere(base: Member, first: Member) -> bool:
    """Whether a base has fewer GPUs than the first member of a series, on other devices; both are named."""
    are_named = bool(base.devices) and bool(first.devices)
    return base.gpus < first.gpus and are_named and base.devices != first.devices


def names(series: Sequence[FigureSeries]) -> list[str]:
    """Name what tells these series from one another, in a reader's words; the full name where that is not enough."""
    differences = _Differences.of(series)
    labels = [differences.name(member) for member in series]
    uses = Counter(labels)
    labels = [
        label if uses[label] == 1 else differences.name(member, all_devices=True)
        for member, label in zip(series, labels, strict=True)
    ]
    uses = Counter(labels)
    labels = [label if uses[label] == 1 else member.curve.name for member, label in zip(series, labels, strict=True)]
    uses = Counter(labels)
    return [
        label if uses[label] == 1 else f"{label} ({labels[: index + 1].count(label)})"
        for index, label in enumerate(labels)
    ]


@dataclass(frozen=True)
class _Differences:
    """In what some series differ, and so what their names must say."""

    dataset: bool
    micro_batch: bool
    hosts: bool
    labels: tuple[str, ...]
    """The labels whose values differ, but for those that are said otherwise."""
    devices: bool
    clusters_of_one_kind: frozenset[str]
    """Clusters whose names say their devices."""

    @classmethod
    def of(cls, series: Sequence[FigureSeries]) -> _Differences:
        """Compare the series."""
        have_different_hosts = len({member.hosts for member in series}) > 1
        said_otherwise = (*_SAID_OTHERWISE, *_OF_HOSTS) if have_different_hosts else _SAID_OTHERWISE
        fields = dict.fromkeys(field for member in series for field in member.curve.labels)
        labels = [field for field in fields if field not in said_otherwise and _is_different(field, series)]
        return cls(
            dataset=len({member.dataset for member in series}) > 1,
            micro_batch=len({member.micro_batch for member in series}) > 1,
            hosts=have_different_hosts,
            labels=tuple(labels),
            devices=len({_kind(member) for member in series}) > 1,
            clusters_of_one_kind=frozenset(_clusters_of_one_kind(series) if "cluster" in labels else ()),
        )

    def name(self, series: FigureSeries, *, all_devices: bool = False) -> str:
        """Name what sets a series off. `all_devices`: name its devices also where they are of several kinds."""
        dataset = DATASET_NAMES.get(series.dataset, series.dataset)
        micro_batch = f"micro-batch {series.micro_batch:,}"
        parts = []
        if self.dataset:
            parts.append(dataset)
        if self.micro_batch:
            parts.append(micro_batch)
        label_texts = [_label_text(field, series.curve.labels.get(field)) for field in self.labels]
        parts += [text for text in label_texts if text]
        if all_devices:
            parts.append(" and ".join(series.devices) or _kind(series))
        elif self.devices and series.cluster not in self.clusters_of_one_kind:
            parts.append(_kind(series))
        if self.hosts:
            parts.append("one host" if series.hosts == "one host" else "several hosts")
        # Some importers label a curve with its device too: it is said once.
        return ", ".join(dict.fromkeys(parts)) or f"{dataset}, {micro_batch}"


def _is_different(field: str, series: Sequence[FigureSeries]) -> bool:
    """Whether a label reads differently in some of the series."""
    return len({_label_text(field, member.curve.labels.get(field)) for member in series}) > 1


def _kind(series: FigureSeries) -> str:
    """A series' kind of device in a few words."""
    if len(series.devices) > 1:
        return "unlike GPUs"
    return series.devices[0] if series.devices else "unknown device"


def _clusters_of_one_kind(series: Sequence[FigureSeries]) -> set[str]:
    """The clusters whose series all have the same kind of device."""
    kinds_by_cluster: dict[str, set[str]] = {}
    for member in series:
        kinds_by_cluster.setdefault(member.cluster, set()).add(_kind(member))
    return {cluster for cluster, kinds in kinds_by_cluster.items() if len(kinds) == 1}


class NamedSet(NamedTuple):
    """Two or more series that differ in one thing, under a name that leaves it out."""

    name: str
    series: list[FigureSeries]


def apart_in_micro_batch(series: Sequence[FigureSeries]) -> list[NamedSet]:
    """Sets of series that differ only in micro-batch."""
    sets: dict[Any, list[FigureSeries]] = {}
    for member in series:
        sets.setdefault((member.dataset, _work_without(member, "train.micro_batch")), []).append(member)
    several = [members for members in sets.values() if len({member.micro_batch for member in members}) > 1]
    labels = names([replace(members[0], micro_batch=0) for members in several])
    return [
        NamedSet(label.partition(", micro-batch")[0], members) for label, members in zip(labels, several, strict=True)
    ]


def apart_in_dataset(series: Sequence[FigureSeries]) -> list[NamedSet]:
    """Sets of series that differ only in dataset."""
    sets: dict[Any, list[FigureSeries]] = {}
    for member in series:
        sets.setdefault((member.micro_batch, _work_without(member, "data.name")), []).append(member)
    several = [members for members in sets.values() if len({member.dataset for member in members}) > 1]
    if len(several) == 1:
        return [NamedSet(f"micro-batch {several[0][0].micro_batch:,}", several[0])]
    labels = names([replace(members[0], dataset="") for members in several])
    return [NamedSet(label, members) for label, members in zip(labels, several, strict=True)]


class _Work(NamedTuple):
    """What else a curve is of."""

    mode: Mode
    hosts: Hosts
    labels: tuple[tuple[str, str], ...]


def _work_without(series: FigureSeries, left_out: str) -> _Work:
    """A series' mode, where its GPUs are, and its labels but one."""
    labels = tuple((field, str(value)) for field, value in series.curve.labels.items() if field != left_out)
    return _Work(series.mode, series.hosts, labels)


DATASET_NAMES: Mapping[str, str] = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "ade20k": "ADE20K"}


def _label_text(field: str, value: Any) -> str:
    """A swept value as it stands in a name; numbers and switches follow their field; all of the data is left out."""
    if value is None or (field, value) == ("data.fraction", 1.0):
        return ""
    return value if isinstance(value, str) else f"{field.rpartition('.')[2]} {value}"


def _series_of_curve(analysis: Analysis, curve: CurveResult) -> list[FigureSeries]:
    """The series that a curve makes: in one host, over several, or both; none without a measured point."""
    points = sorted(curve.points, key=lambda point: point.gpus)
    members = [Member(point.gpus, analysis.trials[point.trial_id]) for point in points]
    members = [member for member in members if member.trial.run_figures]
    inside = [member for member in members if member.trial.trial.world.nodes == 1]
    has_several_hosts = any(member.trial.trial.world.nodes > 1 for member in members)
    made = []
    if len(inside) > 1 or (inside and not has_several_hosts):
        made.append(_series(curve, members, hosts="one host", shown=inside))
    if has_several_hosts:
        made.append(_series(curve, members, hosts=_kind_of_hosts(curve, members), shown=members))
    return made


def _series(curve: CurveResult, members: Sequence[Member], *, hosts: Hosts, shown: Sequence[Member]) -> FigureSeries:
    """A series of some members of a curve, whose workload is that of the largest of all its members."""
    largest = members[-1].trial.trial
    return FigureSeries(curve, curve.mode, largest.data.name, largest.train.micro_batch, hosts, tuple(shown))


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
    label = curve.labels.get("cluster")
    for cluster in published().unlike_clusters:
        facts = [fact for fact in published().facts if fact.cluster == cluster]
        are_published = [_is_among(facts, member) for member in members]
        if label == cluster and any(are_published):
            return True
        if not label and all(are_published):
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
    members = [_compared_member(member, base, combine_unlike=combine_unlike) for member in series.members]
    return replace(series, members=tuple(members))


def _compared_member(member: Member, base: Member, *, combine_unlike: bool) -> Member:
    """A member compared with the base of its series, or why it may not be."""
    if not member.trial.comparable_costs:
        reasons: tuple[str, ...] = ("it has no epoch time that may be compared",)
        return replace(member, base_gpus=base.gpus, reasons=reasons)
    differences = base.trial.unlike(member.trial, combine_unlike)
    if differences:
        return replace(member, base_gpus=base.gpus, reasons=differences)
    return replace(member, base_gpus=base.gpus, against_base=times_as_fast(base.trial, member.trial))


_MODEL = "vit-b16"
_IMAGE_SIZE = 224


@dataclass(frozen=True)
class PublishedPoints:
    """Published facts for the series of a figure."""

    facts: tuple[tuple[FigureSeries, tuple[PublishedFact, ...]], ...] = ()
    note: str = ""
    """What sets the facts apart, or why none are drawn; empty where there is nothing to say."""


def published_points(series: Sequence[FigureSeries]) -> PublishedPoints:
    """Select what was published of the workloads of these series, but for what they draw already."""
    shown: set[tuple[PublishedFact, ...]] = set()
    for member in series:
        facts = _facts(member)
        if _are_all_published(member, facts):
            shown.add(facts)
    selected: list[tuple[FigureSeries, tuple[PublishedFact, ...]]] = []
    differences: list[str] = []
    for member in series:
        facts = _facts(member)
        if not facts or facts in shown:
            continue
        difference = _other_work(member)
        if difference:
            differences.append(difference)
        else:
            shown.add(facts)
            selected.append((member, facts))
    notes = [_themselves_note(series)]
    if selected:
        notes.append(_hardware_note([fact for _, facts in selected for fact in facts]))
    elif differences:
        notes.append(f"published points left out: they are of {differences[0]}")
    return PublishedPoints(tuple(selected), "; ".join(note for note in notes if note))


def _hardware_note(facts: Sequence[PublishedFact]) -> str:
    """What published points were measured with; the precision is that of the first."""
    hardware = ", ".join(dict.fromkeys(name for fact in facts for name in fact.devices))
    source = f"arXiv {published().source.arxiv}"
    return f"hollow grey: published ({source}), {hardware}, {facts[0].precision}; other hardware"


def _facts(series: FigureSeries) -> tuple[PublishedFact, ...]:
    """What was published of the workload of a series, by GPU count; empty where nothing was."""
    if series.mode == "strong-global" or series.hosts == "several like hosts":
        return ()
    layout: ClusterLayout = "single-node" if series.hosts == "one host" else "one-gpu-per-node"
    of_workload = partial(
        published().of,
        dataset=series.dataset,
        micro_batch=series.micro_batch,
        weak=series.mode == "weak",
        cluster=_published_cluster(is_unlike=series.hosts == "several unlike hosts"),
    )
    facts = of_workload(layout=layout)
    if layout == "single-node" or not facts or facts[0].gpus == 1:
        return facts
    # On one GPU both layouts are the same.
    single_gpu = [fact for fact in of_workload(layout="single-node") if fact.gpus == 1]
    return (*single_gpu, *facts)


def _published_cluster(*, is_unlike: bool) -> str:
    """The first published cluster whose hosts are unlike, or like, one another."""
    clusters = dict.fromkeys(fact.cluster for fact in published().facts)
    return next(cluster for cluster in clusters if (cluster in published().unlike_clusters) == is_unlike)


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
        fact_by_gpus = _fact_by_gpus(_facts(curve))
        for member in curve.members:
            if member.trial.epoch_seconds is not None:
                are_so_far = is_published.get(member.gpus, True)
                is_published[member.gpus] = are_so_far and _is_one_of(fact_by_gpus, member)
    counts = sorted(gpus for gpus, all_are in is_published.items() if all_are)
    if not counts:
        return ""
    themselves = "these are the published measurements themselves"
    if len(counts) == len(is_published):
        return themselves
    return f"at {units.listed(counts)} GPU{'s' if max(counts) > 1 else ''} {themselves}"


def _are_all_published(series: FigureSeries, facts: Sequence[PublishedFact]) -> bool:
    """Whether a series draws the published measurements.

    That is the same time at every GPU count that was published, if any of these was measured.
    """
    fact_by_gpus = _fact_by_gpus(facts)
    timed = [member for member in series.members if member.trial.epoch_seconds is not None]
    comparable = [member for member in timed if member.gpus in fact_by_gpus]
    return bool(comparable) and all(_is_one_of(fact_by_gpus, member) for member in comparable)


def _fact_by_gpus(facts: Sequence[PublishedFact]) -> dict[int, PublishedFact]:
    return {fact.gpus: fact for fact in facts}


def _is_one_of(fact_by_gpus: Mapping[int, PublishedFact], member: Member) -> bool:
    """Whether a member is what was published for its GPU count: the same epoch time of the same share of the images."""
    fact = fact_by_gpus.get(member.gpus)
    seconds = member.trial.epoch_seconds
    if fact is None or seconds is None:
        return False
    has_same_share = abs(member.trial.trial.data.fraction - fact.fraction) < 1e-9
    return has_same_share and abs(seconds.value / fact.epoch_seconds - 1) < SAME
