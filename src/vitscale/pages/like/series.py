"""The curves of the results as a study's figures see them: as series.

A series is a curve with its workload (dataset and micro-batch), its hosts (where the GPUs are), and its members, which
are the GPU counts that were measured. Each member is compared with the base of the series, usually its smallest count.
Published measurements are drawn with a series only where dataset, micro-batch, mode, hosts and model are the same.

The mode says what stays the same from one GPU count to the next: in "strong-micro" the images of an epoch and the batch
of each GPU, in "strong-global" the images of an epoch and the batch of all GPUs together, in "weak" the images per GPU.
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
"""Where the GPUs of a series are.

"several unlike hosts" have GPUs of different kinds, however many each has. Hosts with GPUs of one kind are "one GPU a
host" or "several like hosts".
"""
_LABELS_IN_EVERY_NAME = ("data.name", "train.micro_batch", "train.grad_accum")
"""Labels of curves that names do not repeat, because they say the dataset and the micro-batch anyway."""
_SAME_EPOCH_TIME = 1e-3
"""Epoch times closer than this, as a share, are the published measurement itself, imported."""
_HOSTS_LABELS = ("layout", "scaling.gpus_per_node")
"""Labels of curves that say where GPUs are."""
_DEVICE_LABELS = ("device",)
"""Labels of curves that say what GPUs are. Only some imports have them, so devices are compared by the records."""


@dataclass(frozen=True)
class Member:
    """One measured rank count of a series."""

    gpus: int
    trial: TrialResult
    speedup_over_base: Estimate | None = None
    """How many times as fast an epoch is as the base's; None where the two must not be compared."""
    reasons_not_compared: tuple[str, ...] = ()
    """Why `speedup_over_base` is None."""
    base_gpus: int | None = None
    """Rank count of the base."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device, by name."""
        return self.trial.environment.devices if self.trial.environment is not None else ()

    @property
    def why_not_compared(self) -> str:
        """The reasons in one clause; empty where there is none."""
        return "; ".join(self.reasons_not_compared)


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
    base_on_other_devices: Member | None = None
    """The base of another series of the same workload, on other devices and with fewer ranks than any member here."""

    @property
    def base(self) -> Member | None:
        """The member that the others are compared with; None where there is none.

        It is the base elsewhere if there is one. Else it is the member with the smallest rank count among those that
        may be compared: those with the kind of costs (epoch times or rates) that most members have.
        """
        if self.base_on_other_devices is not None:
            return self.base_on_other_devices
        base = base_of([member.trial for member in self.members])
        return next((member for member in self.members if member.trial is base), None)

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device, by name."""
        devices: dict[str, None] = {}
        for member in self.members:
            devices |= dict.fromkeys(member.devices)
        return tuple(devices)

    @property
    def cluster(self) -> str:
        """The cluster as an import names it; empty where none is named."""
        return str(self.curve.labels.get("cluster") or "")

    @property
    def workload_key(self) -> tuple[Any, ...]:
        """A key that is equal for series of the same workload, which differ only in their hosts or devices."""
        labels = []
        for field, value in self.curve.labels.items():
            if field not in _HOSTS_LABELS and field not in _DEVICE_LABELS:
                labels.append((field, str(value)))
        return self.mode, self.dataset, self.micro_batch, tuple(sorted(labels))


def all_series(analysis: Analysis) -> list[FigureSeries]:
    """Return the series of all curves with a measurement, each member compared with its base.

    A curve that begins in one host and goes on over several makes two series.

    A series over several hosts without a single GPU borrows that member from the series of the same workload in one
    host, if its GPU is of the same kind, because one GPU is the same measurement in both.

    A series whose fewest GPUs are more than those of the same workload on other devices is compared with the base of
    that other series (`base_on_other_devices`).
    """
    measured: list[FigureSeries] = []
    for curve in analysis.curves:
        measured += _series_of_curve(analysis, curve)
    completed = _with_borrowed_gpu(measured)
    based = [replace(series, base_on_other_devices=_base_on_other_devices(series, completed)) for series in completed]
    return [_with_comparisons(series, analysis.combine_unlike) for series in based]


def _with_borrowed_gpu(measured: Sequence[FigureSeries]) -> list[FigureSeries]:
    """Return the series, with the single GPU of the same workload in one host where one over several hosts lacks it."""
    single_gpus: dict[Any, Member] = {}
    for series in measured:
        first = series.members[0]
        if series.hosts == "one host" and first.gpus == 1:
            single_gpus[series.workload_key, first.devices] = first
    completed = []
    for series in measured:
        first = series.members[0]
        single_gpu = single_gpus.get((series.workload_key, first.devices))
        if series.hosts == "one host" or first.gpus == 1 or single_gpu is None:
            completed.append(series)
        else:
            completed.append(replace(series, members=(single_gpu, *series.members)))
    return completed


def _base_on_other_devices(series: FigureSeries, candidates: Sequence[FigureSeries]) -> Member | None:
    """Return the base of the same workload on other devices, if it has fewer GPUs than all of `series`; else None.

    Of several, return that with the fewest GPUs; of equally many, one whose devices are among those of `series`.
    """
    first = series.members[0]
    smaller = []
    for candidate in candidates:
        base = candidate.base
        if candidate.workload_key == series.workload_key and base is not None and _is_smaller_elsewhere(base, first):
            smaller.append(base)
    return min(smaller, key=lambda base: (base.gpus, not set(base.devices) <= set(series.devices)), default=None)


def _is_smaller_elsewhere(base: Member, first: Member) -> bool:
    """Whether a base has fewer GPUs than a series' first member, and other devices; False where devices are unknown."""
    are_named = bool(base.devices) and bool(first.devices)
    return base.gpus < first.gpus and are_named and base.devices != first.devices


def strong_micro_series(series_list: Sequence[FigureSeries]) -> list[FigureSeries]:
    """Return the series of strong scaling with a fixed batch on each GPU, which the studies' claims are about."""
    return [series for series in series_list if series.mode == "strong-micro"]


def distinct_series_names(series_list: Sequence[FigureSeries]) -> list[str]:
    """Return a name for each series that says in what it differs from the others: "CIFAR-10, micro-batch 16".

    Names that are equal become longer: first with all devices, then the full name of the curve, then with a number.
    """
    differences = _Differences.of(series_list)
    short = [differences.name(series) for series in series_list]
    with_devices = [differences.name(series, all_devices=True) for series in series_list]
    curve_names = [series.curve.name for series in series_list]
    labels = _replaced_where_equal(_replaced_where_equal(short, with_devices), curve_names)
    numbered = [f"{label} ({labels[: index + 1].count(label)})" for index, label in enumerate(labels)]
    return _replaced_where_equal(labels, numbered)


def _replaced_where_equal(labels: Sequence[str], longer: Sequence[str]) -> list[str]:
    """Return the labels; those that occur more than once are replaced by the longer ones at the same position."""
    uses = Counter(labels)
    return [label if uses[label] == 1 else long for label, long in zip(labels, longer, strict=True)]


@dataclass(frozen=True)
class _Differences:
    """In what some series differ, and so what their names must say. Each yes means that the series differ in it."""

    dataset: bool
    micro_batch: bool
    hosts: bool
    labels: tuple[str, ...]
    """The labels of curves whose values differ, without those that names say in other words."""
    devices: bool
    clusters_of_one_kind: frozenset[str]
    """Clusters whose names say their devices, because all series of the cluster have the same kind."""

    @classmethod
    def of(cls, series_list: Sequence[FigureSeries]) -> _Differences:
        """Compare the series."""
        have_different_hosts = len({series.hosts for series in series_list}) > 1
        worded_labels = (*_LABELS_IN_EVERY_NAME, *_HOSTS_LABELS) if have_different_hosts else _LABELS_IN_EVERY_NAME
        other_labels = [field for field in _label_fields(series_list) if field not in worded_labels]
        different_labels = [field for field in other_labels if _is_different(field, series_list)]
        return cls(
            dataset=len({series.dataset for series in series_list}) > 1,
            micro_batch=len({series.micro_batch for series in series_list}) > 1,
            hosts=have_different_hosts,
            labels=tuple(different_labels),
            devices=len({_device_kind(series) for series in series_list}) > 1,
            clusters_of_one_kind=frozenset(_clusters_of_one_kind(series_list) if "cluster" in different_labels else ()),
        )

    def name(self, series: FigureSeries, *, all_devices: bool = False) -> str:
        """Return a name that says in what a series differs.

        Args:
            series: one of the series that were compared.
            all_devices: whether to name each of its devices, also where they are of several kinds.
        """
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
            parts.append(" and ".join(series.devices) or _device_kind(series))
        elif self.devices and series.cluster not in self.clusters_of_one_kind:
            parts.append(_device_kind(series))
        if self.hosts:
            parts.append("one host" if series.hosts == "one host" else "several hosts")
        # Some importers label a curve with its device too: it is said once.
        return ", ".join(dict.fromkeys(parts)) or f"{dataset}, {micro_batch}"


def _label_fields(series_list: Sequence[FigureSeries]) -> list[str]:
    """Return the fields of all labels of the curves, each once."""
    fields: dict[str, None] = {}
    for series in series_list:
        fields |= dict.fromkeys(series.curve.labels)
    return list(fields)


def _is_different(field: str, series_list: Sequence[FigureSeries]) -> bool:
    """Whether a label has different texts in some of the series."""
    return len({_label_text(field, series.curve.labels.get(field)) for series in series_list}) > 1


def _device_kind(series: FigureSeries) -> str:
    """Return the kind of a series' devices in a few words: "A100", "unlike GPUs"."""
    if len(series.devices) > 1:
        return "unlike GPUs"
    return series.devices[0] if series.devices else "unknown device"


def _clusters_of_one_kind(series_list: Sequence[FigureSeries]) -> set[str]:
    """Return the clusters whose series all have the same kind of device."""
    kinds_by_cluster: dict[str, set[str]] = {}
    for series in series_list:
        kinds_by_cluster.setdefault(series.cluster, set()).add(_device_kind(series))
    return {cluster for cluster, kinds in kinds_by_cluster.items() if len(kinds) == 1}


class SeriesSet(NamedTuple):
    """Two or more series that differ in one thing alone, under a name that leaves this thing out."""

    name: str
    series: list[FigureSeries]


def sets_differing_in_micro_batch(series_list: Sequence[FigureSeries]) -> list[SeriesSet]:
    """Return the sets of series that differ only in micro-batch, each of two series or more."""
    series_by_workload: dict[Any, list[FigureSeries]] = {}
    for series in series_list:
        workload = (series.dataset, _work_key_without(series, "train.micro_batch"))
        series_by_workload.setdefault(workload, []).append(series)
    sets = [series_set for series_set in series_by_workload.values() if _have_different_micro_batches(series_set)]
    names = distinct_series_names([replace(series_set[0], micro_batch=0) for series_set in sets])
    named_sets = []
    for name, series_set in zip(names, sets, strict=True):
        # A name that says nothing else ends with the micro-batch, which does not hold of the whole set.
        name_without_batch = name.partition(", micro-batch")[0]
        named_sets.append(SeriesSet(name_without_batch, series_set))
    return named_sets


def _have_different_micro_batches(series_list: Sequence[FigureSeries]) -> bool:
    return len({series.micro_batch for series in series_list}) > 1


def sets_differing_in_dataset(series_list: Sequence[FigureSeries]) -> list[SeriesSet]:
    """Return the sets of series that differ only in dataset, each of two series or more."""
    series_by_workload: dict[Any, list[FigureSeries]] = {}
    for series in series_list:
        workload = (series.micro_batch, _work_key_without(series, "data.name"))
        series_by_workload.setdefault(workload, []).append(series)
    sets = [series_set for series_set in series_by_workload.values() if _have_different_datasets(series_set)]
    if len(sets) == 1:
        (only_set,) = sets
        return [SeriesSet(f"micro-batch {only_set[0].micro_batch:,}", only_set)]
    names = distinct_series_names([replace(series_set[0], dataset="") for series_set in sets])
    return [SeriesSet(name, series_set) for name, series_set in zip(names, sets, strict=True)]


def _have_different_datasets(series_list: Sequence[FigureSeries]) -> bool:
    return len({series.dataset for series in series_list}) > 1


class _WorkKey(NamedTuple):
    """Mode, hosts and labels of a series: equal for series that differ only in dataset or micro-batch."""

    mode: Mode
    hosts: Hosts
    labels: tuple[tuple[str, str], ...]


def _work_key_without(series: FigureSeries, left_out: str) -> _WorkKey:
    """Return a series' mode, hosts, and labels except the one that is left out."""
    labels = tuple((field, str(value)) for field, value in series.curve.labels.items() if field != left_out)
    return _WorkKey(series.mode, series.hosts, labels)


DATASET_NAMES: Mapping[str, str] = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "ade20k": "ADE20K"}


def _label_text(field: str, value: Any) -> str:
    """Return a label's value as a part of a name: "ddp", but numbers and switches with their field: "lr 0.1".

    Return "" for an unknown value, and for a fraction of the data that is all of them.
    """
    if value is None or (field, value) == ("data.fraction", 1.0):
        return ""
    return value if isinstance(value, str) else f"{field.rpartition('.')[2]} {value}"


def _series_of_curve(analysis: Analysis, curve: CurveResult) -> list[FigureSeries]:
    """Return the series of a curve: in one host, over several hosts, or both; none without a measured point.

    That over several hosts has all members. That in one host has those in one host; where the curve goes on over
    several hosts, these must be two or more.
    """
    members = []
    for point in sorted(curve.points, key=lambda point: point.gpus):
        trial = analysis.trials[point.trial_id]
        if trial.run_figures:
            members.append(Member(point.gpus, trial))
    in_one_host = [member for member in members if member.trial.trial.world.nodes == 1]
    has_several_hosts = any(member.trial.trial.world.nodes > 1 for member in members)
    fewest_in_one_host = 2 if has_several_hosts else 1
    series_of_curve = []
    if len(in_one_host) >= fewest_in_one_host:
        series_of_curve.append(_figure_series(curve, members, hosts="one host", shown_members=in_one_host))
    if has_several_hosts:
        series_of_curve.append(
            _figure_series(curve, members, hosts=_kind_of_hosts(curve, members), shown_members=members)
        )
    return series_of_curve


def _figure_series(
    curve: CurveResult, members: Sequence[Member], *, hosts: Hosts, shown_members: Sequence[Member]
) -> FigureSeries:
    """Return a series with the members `shown_members` of a curve.

    Its dataset and micro-batch are those of the largest GPU count of all of the curve's `members`.
    """
    largest = members[-1].trial.trial
    return FigureSeries(curve, curve.mode, largest.data.name, largest.train.micro_batch, hosts, tuple(shown_members))


def _kind_of_hosts(curve: CurveResult, members: Sequence[Member]) -> Hosts:
    """Return where the GPUs of a curve over several hosts are."""
    devices = {name for member in members for name in member.devices}
    if len(devices) > 1 or _published_as_unlike(curve, members):
        return "several unlike hosts"
    if all(member.trial.trial.world.ranks_per_node == 1 for member in members):
        return "one GPU a host"
    return "several like hosts"


def _published_as_unlike(curve: CurveResult, members: Sequence[Member]) -> bool:
    """Whether a curve holds published measurements of a cluster with unlike hosts.

    This is asked because the raw data of that cluster name one kind of GPU only. Where the curve names the cluster, one
    published epoch time among the members is enough. Where it names none, as in results of a single cluster, all
    members must have published epoch times.
    """
    label = curve.labels.get("cluster")
    for cluster in published().unlike_clusters:
        facts = [fact for fact in published().facts if fact.cluster == cluster]
        are_published = [_is_published_measurement(facts, member) for member in members]
        is_named_cluster = label == cluster and any(are_published)
        is_unnamed_cluster = not label and all(are_published)
        if is_named_cluster or is_unnamed_cluster:
            return True
    return False


def _is_published_measurement(facts: Sequence[PublishedFact], member: Member) -> bool:
    """Whether a member has the epoch time that was published of its workload and GPU count."""
    trial = member.trial.trial
    workload = (trial.data.name, trial.train.micro_batch)
    same_workload = [fact for fact in facts if (fact.dataset, fact.micro_batch) == workload]
    return any(_is_published_at_its_count({fact.gpus: fact}, member) for fact in same_workload)


def _with_comparisons(series: FigureSeries, combine_unlike: bool) -> FigureSeries:
    """Return the series with each member compared with its base, as the analysis compares the points of a curve."""
    base = series.base
    if base is None:
        return series
    members = [_compared_member(member, base, combine_unlike=combine_unlike) for member in series.members]
    return replace(series, members=tuple(members))


def _compared_member(member: Member, base: Member, *, combine_unlike: bool) -> Member:
    """Return the member with its speed against the base, or with the reasons why the two may not be compared."""
    if not member.trial.comparable_costs:
        reasons: tuple[str, ...] = ("it has no epoch time that may be compared",)
        return replace(member, base_gpus=base.gpus, reasons_not_compared=reasons)
    differences = base.trial.reasons_not_to_compare(member.trial, combine_unlike)
    if differences:
        return replace(member, base_gpus=base.gpus, reasons_not_compared=differences)
    return replace(member, base_gpus=base.gpus, speedup_over_base=times_as_fast(base.trial, member.trial))


_PUBLISHED_MODEL = "vit-b16"
_PUBLISHED_IMAGE_SIZE = 224


@dataclass(frozen=True)
class PublishedPoints:
    """Published facts for the series of a figure."""

    facts: tuple[tuple[FigureSeries, tuple[PublishedFact, ...]], ...] = ()
    note: str = ""
    """How the facts were measured, or why none are drawn; empty where there is nothing to say."""


def published_points(series_list: Sequence[FigureSeries]) -> PublishedPoints:
    """Return the published facts of the workloads of these series, each once.

    Facts are left out where a series is the published measurements themselves, imported, or differs from the published
    work in its model or its images.
    """
    shown_facts: set[tuple[PublishedFact, ...]] = set()
    for series in series_list:
        facts = _published_facts(series)
        if _are_all_published(series, facts):
            shown_facts.add(facts)
    selected: list[tuple[FigureSeries, tuple[PublishedFact, ...]]] = []
    differences: list[str] = []
    for series in series_list:
        facts = _published_facts(series)
        if not facts or facts in shown_facts:
            continue
        difference = _difference_from_published_work(series)
        if difference:
            differences.append(difference)
        else:
            shown_facts.add(facts)
            selected.append((series, facts))
    notes = [_published_themselves_note(series_list)]
    if selected:
        selected_facts: list[PublishedFact] = []
        for _, facts in selected:
            selected_facts += facts
        notes.append(_hardware_note(selected_facts))
    elif differences:
        notes.append(f"published points left out: they are of {differences[0]}")
    return PublishedPoints(tuple(selected), "; ".join(note for note in notes if note))


def _hardware_note(facts: Sequence[PublishedFact]) -> str:
    """Return a note on the hardware that published points were measured with; the precision is that of the first."""
    devices: dict[str, None] = {}
    for fact in facts:
        devices |= dict.fromkeys(fact.devices)
    hardware = ", ".join(devices)
    source = f"arXiv {published().source.arxiv}"
    return f"hollow grey: published ({source}), {hardware}, {facts[0].precision}; other hardware"


def _published_facts(series: FigureSeries) -> tuple[PublishedFact, ...]:
    """Return the published facts of the workload of a series, by GPU count; empty where nothing was published."""
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
    """Return the first published cluster with unlike hosts, or with like hosts, as `is_unlike` says."""
    clusters = dict.fromkeys(fact.cluster for fact in published().facts)
    return next(cluster for cluster in clusters if (cluster in published().unlike_clusters) == is_unlike)


def _difference_from_published_work(series: FigureSeries) -> str:
    """Return how the published work differs from that of a series; empty where it is the same.

    Compared are the model, its image size, gradient accumulation, and the share of the images.
    """
    for member in series.members:
        trial = member.trial.trial
        if not trial.model_name:
            return "ViT-B/16 at 224 x 224, and these results name no model"
        has_same_model = member.trial.model_name == _PUBLISHED_MODEL and trial.model.image_size == _PUBLISHED_IMAGE_SIZE
        if not has_same_model or trial.train.grad_accum != 1:
            return "ViT-B/16 at 224 x 224, other work than this"
        published_share = member.gpus / 10 if series.mode == "weak" else 1.0
        if abs(trial.data.fraction - published_share) > 1e-9:
            return "another share of the images"
    return ""


def _published_themselves_note(series_list: Sequence[FigureSeries]) -> str:
    """Return a note on the GPU counts at which all drawn measurements are the published ones; empty where at none."""
    measured_counts: set[int] = set()
    counts_with_own_measurements: set[int] = set()
    for series in series_list:
        fact_by_gpus = _fact_by_gpus(_published_facts(series))
        for member in series.members:
            if member.trial.epoch_seconds is None:
                continue
            measured_counts.add(member.gpus)
            if not _is_published_at_its_count(fact_by_gpus, member):
                counts_with_own_measurements.add(member.gpus)
    published_counts = sorted(measured_counts - counts_with_own_measurements)
    if not published_counts:
        return ""
    themselves = "these are the published measurements themselves"
    if len(published_counts) == len(measured_counts):
        return themselves
    plural = "s" if max(published_counts) > 1 else ""
    return f"at {units.listed(published_counts)} GPU{plural} {themselves}"


def _are_all_published(series: FigureSeries, facts: Sequence[PublishedFact]) -> bool:
    """Whether a series is the published measurements themselves.

    It is where its epoch times are the published ones at all of its GPU counts that were published, one or more.
    """
    fact_by_gpus = _fact_by_gpus(facts)
    timed = [member for member in series.members if member.trial.epoch_seconds is not None]
    comparable = [member for member in timed if member.gpus in fact_by_gpus]
    return bool(comparable) and all(_is_published_at_its_count(fact_by_gpus, member) for member in comparable)


def _fact_by_gpus(facts: Sequence[PublishedFact]) -> dict[int, PublishedFact]:
    return {fact.gpus: fact for fact in facts}


def _is_published_at_its_count(fact_by_gpus: Mapping[int, PublishedFact], member: Member) -> bool:
    """Whether a member has the epoch time and the share of the images that were published for its GPU count."""
    fact = fact_by_gpus.get(member.gpus)
    seconds = member.trial.epoch_seconds
    if fact is None or seconds is None:
        return False
    has_same_share = abs(member.trial.trial.data.fraction - fact.fraction) < 1e-9
    return has_same_share and abs(seconds.value / fact.epoch_seconds - 1) < _SAME_EPOCH_TIME
