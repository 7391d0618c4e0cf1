"""Which series of the results a figure draws; or what these lack, and which study file would produce it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from vitscale.present import units
from vitscale.report.like.series import DATASET_NAMES, Hosts, Series
from vitscale.report.like.study import Quantity, StudyFigure
from vitscale.trial.trial import Mode

_DATASETS = ("cifar10", "cifar100")
"""Datasets that figures ask for by name."""
_MICRO_BATCHES = (16, 64)
"""Micro-batches that figures ask for."""
_CLUSTERS = ("nebula", "tesla", "vector")
"""Clusters of the study whose results were published."""
_OF_SEVERAL_COUNTS: tuple[Quantity, ...] = (
    "epoch time", "speedup", "one host against several", "epoch time by micro-batch"
)  # fmt: skip
"""Quantities that a curve of one GPU count does not show."""
_OF_ACCURACY: tuple[Quantity, ...] = ("accuracy of datasets", "accuracy by micro-batch", "loss and accuracy")
_MODE_NAMES: Mapping[Mode, str] = {
    "strong-micro": "strong scaling",
    "strong-global": "strong scaling at one global batch",
    "weak": "weak scaling",
}
_PLACES: Mapping[Hosts, str] = {
    "one host": "in one host",
    "one GPU a host": "over several hosts with one GPU in each",
    "several like hosts": "over several hosts with several GPUs in each",
    "several unlike hosts": "over several hosts with GPUs of unlike kinds",
}
_PLACE_OF_ONE_KIND = "over several hosts"
"""Where the GPUs of "several unlike hosts" are if the records name one kind of them."""


@dataclass(frozen=True)
class Selection:
    """What a figure draws."""

    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    """Departures from the study's own figure."""


@dataclass(frozen=True)
class _Workload:
    """One of the workloads that a figure needs; None: any."""

    mode: Mode
    hosts: Hosts | None
    dataset: str | None
    micro_batch: int | None

    def fits(self, curve: Series) -> bool:
        return self.matches(curve) == 4

    def matches(self, curve: Series) -> int:
        """In how many of its four properties a curve is as wanted."""
        return (
            (self.mode == curve.mode)
            + (self.hosts in (None, curve.hosts))
            + (self.dataset in (None, curve.dataset))
            + (self.micro_batch in (None, curve.micro_batch))
        )


def select(figure: StudyFigure, series: Sequence[Series]) -> Selection | str:
    """The series of a figure, or what is missing, in words."""
    if not series:
        return "No trial of these results has completed."
    candidates = [curve for curve in series if not _is_of_another_cluster(figure, curve)]
    if figure.quantity in _OF_SEVERAL_COUNTS:
        candidates = [curve for curve in candidates if len(_gpu_counts(curve)) > 1]
    datasets = _datasets(figure, series)
    if len(set(datasets)) < len(datasets):
        return f"These results hold one dataset only, {datasets[0]}: there is none to set beside it."
    micro_batch = _micro_batch(figure, candidates, datasets)
    chosen: list[Series] = []
    for hosts, dataset in product(figure.hosts or (None,), datasets or (None,)):
        workload = _Workload(figure.mode, hosts, dataset, micro_batch)
        fitting = [curve for curve in candidates if workload.fits(curve)]
        if not fitting:
            return _reason(figure, workload, series)
        bases = [curve for curve in candidates if _is_base_of_some(curve, fitting)]
        chosen += {id(curve): curve for curve in (*bases, *fitting)}.values()
    in_order = sorted(chosen, key=lambda curve: (curve.hosts != "one host", curve.dataset, curve.micro_batch))
    return Selection(tuple(in_order), _departures(figure, datasets, micro_batch))


def _gpu_counts(curve: Series) -> set[int]:
    return {member.gpus for member in curve.members}


def _is_base_of_some(curve: Series, others: Sequence[Series]) -> bool:
    """Whether some series over several hosts is compared with this one's first, which its figure must show then."""
    trials = [member.trial for member in curve.members[:1]]
    return curve.hosts != "one host" and any(
        other.base_elsewhere is not None and other.base_elsewhere.trial in trials for other in others
    )


def _is_of_another_cluster(figure: StudyFigure, curve: Series) -> bool:
    """Whether a curve was measured on another of the study's clusters than the figure's."""
    cluster = curve.cluster.lower()
    return bool(figure.cluster) and cluster in _CLUSTERS and cluster != figure.cluster.lower()


def _are_of_other_datasets(series: Sequence[Series]) -> bool:
    """Whether the results hold none of the study's datasets."""
    return not any(curve.dataset in _DATASETS for curve in series)


def _datasets(figure: StudyFigure, series: Sequence[Series]) -> list[str]:
    """The datasets to draw: the figure's; where the results hold none of the study's, their own in its place."""
    if not _are_of_other_datasets(series):
        return list(figure.datasets)
    own = list(dict.fromkeys(curve.dataset for curve in series))
    return [own[min(_DATASETS.index(name), len(own) - 1)] for name in figure.datasets]


def _micro_batch(figure: StudyFigure, candidates: Sequence[Series], datasets: Sequence[str]) -> int | None:
    """The micro-batch to draw, or the smallest or largest that there is in its place.

    Another stands in where the results are of other datasets than the study's, or have neither of its micro-batches.
    """
    wanted = figure.micro_batch
    own = {
        curve.micro_batch
        for curve in candidates
        if curve.mode == figure.mode
        and curve.hosts in (figure.hosts or (curve.hosts,))
        and curve.dataset in (datasets or (curve.dataset,))
    }
    if wanted is None or not own or wanted in own:
        return wanted
    if own.intersection(_MICRO_BATCHES) and not _are_of_other_datasets(candidates):
        return wanted
    return min(own) if wanted == min(_MICRO_BATCHES) else max(own)


def _departures(figure: StudyFigure, datasets: Sequence[str], micro_batch: int | None) -> tuple[str, ...]:
    replaced = [
        f"{own} in place of {DATASET_NAMES[name]}"
        for own, name in zip(datasets, figure.datasets, strict=True)
        if own != name
    ]
    if micro_batch != figure.micro_batch:
        replaced.append(f"{micro_batch} in place of {figure.micro_batch}")
    return tuple(replaced)


def _reason(figure: StudyFigure, wanted: _Workload, series: Sequence[Series]) -> str:
    """What is missing, and what the results hold instead, the most alike first."""
    parts = [_MODE_NAMES[wanted.mode]]
    if wanted.hosts is not None:
        parts.append(_PLACES[wanted.hosts])
    if wanted.dataset is not None:
        parts.append(f"on {DATASET_NAMES.get(wanted.dataset, wanted.dataset)}")
    if wanted.micro_batch is not None:
        parts.append(f"at micro-batch {wanted.micro_batch}")
    if any(_is_of_another_cluster(figure, curve) and wanted.fits(curve) for curve in series):
        parts.append(f"of the cluster {figure.cluster}")
    in_order = sorted(series, key=wanted.matches, reverse=True)
    held = _held(in_order, says_cluster=len({curve.cluster for curve in series}) > 1)
    return f"These results hold no {' '.join(parts)}. They hold {'; '.join(held)}."


def _place(curve: Series) -> str:
    """Where its GPUs are; they are called unlike only where the records name several kinds of them."""
    if curve.hosts == "several unlike hosts" and len(curve.devices) < 2:
        return _PLACE_OF_ONE_KIND
    return _PLACES[curve.hosts]


def _held(series: Sequence[Series], *, says_cluster: bool) -> list[str]:
    """The workloads of the results in words: those that differ only in micro-batch together."""
    alike: dict[tuple[str, ...], list[Series]] = {}
    for curve in series:
        dataset = DATASET_NAMES.get(curve.dataset, curve.dataset)
        counts = _gpu_counts(curve)
        alone = f"{units.counted(min(counts), 'GPU')} alone" if len(counts) == 1 else ""
        cluster = f"cluster {curve.cluster}" if says_cluster and curve.cluster else ""
        workload = f"{_MODE_NAMES[curve.mode]} {_place(curve)} on {dataset}"
        alike.setdefault((workload, cluster, alone), []).append(curve)
    held = []
    for (workload, cluster, alone), curves in alike.items():
        sizes = sorted({curve.micro_batch for curve in curves})
        micro_batches = f"micro-batch {units.listed(sizes)}"
        held.append(f"{workload} ({', '.join(filter(None, (cluster, micro_batches, alone)))})")
    return held


def steps_for(figure: StudyFigure) -> tuple[str, ...]:
    """What to write into a study file (valid TOML), and what to run then."""
    is_spread = any(hosts != "one host" for hosts in figure.hosts)
    sweep = _sweep(figure)
    lines = []
    if len(figure.datasets) == 1:
        lines += ["[data]", f'name = "{figure.datasets[0]}"']
    train = [f"micro_batch = {figure.micro_batch}"] if figure.micro_batch is not None else []
    train += ["epochs = 5"] if figure.quantity in _OF_ACCURACY else []
    lines += ["[train]", *train] if train else []
    lines += ["[scaling]", f'mode = "{figure.mode}"', f"gpus = {list(figure.gpus)}"]
    lines += ["gpus_per_node = 1"] if is_spread and len(figure.hosts) == 1 else []
    lines += ["[sweep]", *sweep] if sweep else []
    lines += _measure(figure)
    hosts = " --hostfile HOSTS" if is_spread else ""
    return (*lines, f"# vitscale run STUDY.toml{hosts} -o RESULTS", f"# vitscale report --like {figure.study} RESULTS")


def needs_of(figure: StudyFigure) -> tuple[str, ...]:
    """What a study needs for a figure: its fields as KEY = VALUE, and its hosts."""
    sections = tomllib.loads("\n".join(steps_for(figure)))
    fields = [
        f"{section}.{key} = {json.dumps(value)}" if section != "sweep" else f"{key}: each of {json.dumps(value)}"
        for section, of_section in sections.items()
        for key, value in of_section.items()
    ]
    return f"In STUDY.toml: {', '.join(fields)}.", f"Hosts: {_hosts_needed(figure)}."


def _hosts_needed(figure: StudyFigure) -> str:
    most = max(figure.gpus)
    needed: Mapping[Hosts, str] = {
        "one host": f"one with {most} GPUs",
        "one GPU a host": f"{most} with one GPU in each",
        "several like hosts": "several with like GPUs",
        "several unlike hosts": f"{most} with GPUs of unlike kinds, one in each",
    }
    return ", and ".join(needed[hosts] for hosts in figure.hosts) or f"any with {most} GPUs in all"


def _sweep(figure: StudyFigure) -> list[str]:
    """What a figure compares beside GPU counts."""
    if len(figure.datasets) > 1:
        return [f'"data.name" = [{", ".join(f"{chr(34)}{name}{chr(34)}" for name in figure.datasets)}]']
    if len(figure.hosts) > 1:
        return [f'"scaling.gpus_per_node" = [1, {max(figure.gpus)}]']
    if figure.quantity in ("epoch time by micro-batch", "accuracy by micro-batch"):
        return ['"train.micro_batch" = [16, 32, 64, 128]']
    return []


def _measure(figure: StudyFigure) -> list[str]:
    if figure.quantity == "run waterfall":
        return ["[measure]", "steps = 50", "explain = true", "checkpoint = true"]
    if figure.quantity == "epoch time by micro-batch":
        return ["[measure]", "explain = true"]
    return []
