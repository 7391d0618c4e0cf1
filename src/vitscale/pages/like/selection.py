"""The series of the results that a figure draws; or what the results lack, and the study file that would produce it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from vitscale.pages.like.series import DATASET_NAMES, FigureSeries, Hosts
from vitscale.pages.like.study import Quantity, StudyFigure
from vitscale.present import units
from vitscale.trial.trial import Mode

_STUDY_DATASETS = ("cifar10", "cifar100")
"""Datasets that figures ask for by name."""
_STUDY_MICRO_BATCHES = (16, 64)
"""Micro-batches that figures ask for."""
_STUDY_CLUSTERS = ("nebula", "tesla", "vector")
"""Clusters of the study whose results were published."""
_NEEDING_SEVERAL_COUNTS: tuple[Quantity, ...] = (
    "epoch time", "speedup", "one host against several", "epoch time by micro-batch"
)  # fmt: skip
"""Quantities that a curve of one GPU count does not show."""
_ACCURACY_QUANTITIES: tuple[Quantity, ...] = ("accuracy of datasets", "accuracy by micro-batch", "loss and accuracy")
_MODE_NAMES: Mapping[Mode, str] = {
    "strong-micro": "strong scaling",
    "strong-global": "strong scaling at one global batch",
    "weak": "weak scaling",
}
_HOSTS_NAMES: Mapping[Hosts, str] = {
    "one host": "in one host",
    "one GPU a host": "over several hosts with one GPU in each",
    "several like hosts": "over several hosts with several GPUs in each",
    "several unlike hosts": "over several hosts with GPUs of unlike kinds",
}
_HOSTS_OF_ONE_KIND = "over several hosts"
"""Words for "several unlike hosts" whose records name one kind of GPU only."""


@dataclass(frozen=True)
class Selection:
    """The series that a figure draws."""

    series: tuple[FigureSeries, ...]
    notes: tuple[str, ...] = ()
    """Notes on what is drawn in place of what the study's figure shows."""


@dataclass(frozen=True)
class _Workload:
    """One of the workloads that a figure needs. A property that is None may have any value."""

    mode: Mode
    hosts: Hosts | None
    dataset: str | None
    micro_batch: int | None

    def fits(self, series: FigureSeries) -> bool:
        """Whether a curve has all four properties."""
        return all(self._matching_properties(series))

    def shared_properties(self, series: FigureSeries) -> int:
        """The number of the four properties that a curve has."""
        return sum(self._matching_properties(series))

    def _matching_properties(self, series: FigureSeries) -> tuple[bool, ...]:
        """Return, for mode, hosts, dataset and micro-batch, whether a curve has the workload's."""
        return (
            self.mode == series.mode,
            self.hosts in (None, series.hosts),
            self.dataset in (None, series.dataset),
            self.micro_batch in (None, series.micro_batch),
        )


def select(figure: StudyFigure, series_list: Sequence[FigureSeries]) -> Selection | str:
    """Return the series of a figure; where the results lack one of them, return a sentence on what is missing."""
    if not series_list:
        return "No trial of these results has completed."
    candidates = [series for series in series_list if _is_candidate(figure, series)]
    datasets = _drawn_datasets(figure, series_list)
    if len(set(datasets)) < len(datasets):
        return f"These results hold one dataset only, {datasets[0]}: there is none to set beside it."
    micro_batch = _drawn_micro_batch(figure, candidates, datasets)
    selected: list[FigureSeries] = []
    for hosts, dataset in product(figure.hosts or (None,), datasets or (None,)):
        workload = _Workload(figure.mode, hosts, dataset, micro_batch)
        fitting = [series for series in candidates if workload.fits(series)]
        if not fitting:
            return _missing_workload(figure, workload, series_list)
        selected += _with_their_bases(fitting, candidates)
    selected.sort(key=lambda series: (series.hosts != "one host", series.dataset, series.micro_batch))
    return Selection(tuple(selected), _replacement_notes(figure, datasets, micro_batch))


def _is_candidate(figure: StudyFigure, series: FigureSeries) -> bool:
    """Whether a figure may draw a curve: it is of the figure's cluster, and has as many GPU counts as are needed."""
    if _is_of_another_cluster(figure, series):
        return False
    return figure.quantity not in _NEEDING_SEVERAL_COUNTS or len(_gpu_counts(series)) > 1


def _with_their_bases(fitting: Sequence[FigureSeries], candidates: Sequence[FigureSeries]) -> list[FigureSeries]:
    """Return the series with the bases of some of them, which come first (`_is_base_of_some`); each once."""
    bases = [series for series in candidates if _is_base_of_some(series, fitting)]
    each_once = {id(series): series for series in (*bases, *fitting)}
    return list(each_once.values())


def _gpu_counts(series: FigureSeries) -> set[int]:
    return {member.gpus for member in series.members}


def _is_base_of_some(series: FigureSeries, other_series: Sequence[FigureSeries]) -> bool:
    """Whether the first member of a curve over several hosts is the base of one of the others; it is then drawn too."""
    if series.hosts == "one host" or not series.members:
        return False
    first = series.members[0].trial
    bases = [other.base_on_other_devices for other in other_series if other.base_on_other_devices is not None]
    return any(base.trial == first for base in bases)


def _is_of_another_cluster(figure: StudyFigure, series: FigureSeries) -> bool:
    """Whether a curve was measured on another of the study's clusters than the figure's."""
    cluster = series.cluster.lower()
    return bool(figure.cluster) and cluster in _STUDY_CLUSTERS and cluster != figure.cluster.lower()


def _lack_study_datasets(series_list: Sequence[FigureSeries]) -> bool:
    """Whether no series is of a dataset of the study."""
    return not any(series.dataset in _STUDY_DATASETS for series in series_list)


def _drawn_datasets(figure: StudyFigure, series_list: Sequence[FigureSeries]) -> list[str]:
    """Return the datasets to draw, one for each of the figure's, in their order.

    Where the results hold none of the study's datasets, their own take the place: the first dataset of the results
    stands for the first of the study, and so on; the last stands for all further ones.
    """
    if not _lack_study_datasets(series_list):
        return list(figure.datasets)
    measured = list(dict.fromkeys(series.dataset for series in series_list))
    last = len(measured) - 1
    return [measured[min(_STUDY_DATASETS.index(name), last)] for name in figure.datasets]


def _drawn_micro_batch(figure: StudyFigure, candidates: Sequence[FigureSeries], datasets: Sequence[str]) -> int | None:
    """Return the micro-batch to draw; None means that each is drawn separately.

    It is the figure's, unless that was not measured and the results are of other datasets than the study's, or have
    neither of the study's micro-batches. Then the smallest measured one stands for the study's smaller one, and the
    largest for its larger one.
    """
    micro_batch = figure.micro_batch
    otherwise_fitting = [series for series in candidates if _fits_but_for_micro_batch(series, figure, datasets)]
    measured = {series.micro_batch for series in otherwise_fitting}
    if micro_batch is None or not measured or micro_batch in measured:
        return micro_batch
    has_study_micro_batch = bool(measured.intersection(_STUDY_MICRO_BATCHES))
    if has_study_micro_batch and not _lack_study_datasets(candidates):
        return micro_batch
    return min(measured) if micro_batch == min(_STUDY_MICRO_BATCHES) else max(measured)


def _fits_but_for_micro_batch(series: FigureSeries, figure: StudyFigure, datasets: Sequence[str]) -> bool:
    """Whether a curve has the mode, one of the hosts and one of the datasets of a figure, where it names any."""
    if series.mode != figure.mode:
        return False
    if figure.hosts and series.hosts not in figure.hosts:
        return False
    return not datasets or series.dataset in datasets


def _replacement_notes(figure: StudyFigure, datasets: Sequence[str], micro_batch: int | None) -> tuple[str, ...]:
    """Return notes on what is drawn in place of what the figure asks for: "my-images in place of CIFAR-10"."""
    replaced = [
        f"{drawn} in place of {DATASET_NAMES[name]}"
        for drawn, name in zip(datasets, figure.datasets, strict=True)
        if drawn != name
    ]
    if micro_batch != figure.micro_batch:
        replaced.append(f"{micro_batch} in place of {figure.micro_batch}")
    return tuple(replaced)


def _missing_workload(figure: StudyFigure, workload: _Workload, series_list: Sequence[FigureSeries]) -> str:
    """Return two sentences: on the workload that no series has, and on those of the results, the most similar first."""
    parts = [_MODE_NAMES[workload.mode]]
    if workload.hosts is not None:
        parts.append(_HOSTS_NAMES[workload.hosts])
    if workload.dataset is not None:
        parts.append(f"on {_dataset_name(workload.dataset)}")
    if workload.micro_batch is not None:
        parts.append(f"at micro-batch {workload.micro_batch}")
    if any(_is_of_another_cluster(figure, series) and workload.fits(series) for series in series_list):
        parts.append(f"of the cluster {figure.cluster}")
    most_similar_first = sorted(series_list, key=workload.shared_properties, reverse=True)
    measured = _measured_workloads(most_similar_first)
    return f"These results hold no {' '.join(parts)}. They hold {'; '.join(measured)}."


def _hosts_of_series(series: FigureSeries) -> str:
    """Return words for a curve's hosts, called unlike only where the records name several kinds of GPU."""
    if series.hosts == "several unlike hosts" and len(series.devices) < 2:
        return _HOSTS_OF_ONE_KIND
    return _HOSTS_NAMES[series.hosts]


def _dataset_name(dataset: str) -> str:
    return DATASET_NAMES.get(dataset, dataset)


class _WorkloadWords(NamedTuple):
    """The words for a measured workload of any micro-batch."""

    workload: str
    """ "strong scaling in one host on CIFAR-10"."""
    cluster: str
    """ "cluster vector"; empty where there is one cluster only."""
    single_count: str
    """ "2 GPUs alone" where it was measured at one GPU count only, else empty."""


def _measured_workloads(series_list: Sequence[FigureSeries]) -> list[str]:
    """Return the workloads of the results in words, in their order, those that differ only in micro-batch as one.

    Example: "strong scaling in one host on CIFAR-10 (micro-batch 16 and 64)".
    """
    has_clusters = len({series.cluster for series in series_list}) > 1
    micro_batches_by_words: dict[_WorkloadWords, set[int]] = {}
    for series in series_list:
        words = _workload_words(series, says_cluster=has_clusters)
        micro_batches_by_words.setdefault(words, set()).add(series.micro_batch)
    workloads = []
    for words, micro_batches in micro_batches_by_words.items():
        details = (words.cluster, f"micro-batch {units.listed(sorted(micro_batches))}", words.single_count)
        workloads.append(f"{words.workload} ({', '.join(filter(None, details))})")
    return workloads


def _workload_words(series: FigureSeries, *, says_cluster: bool) -> _WorkloadWords:
    """Return the words for the workload of a curve. `says_cluster`: whether its cluster is named."""
    counts = _gpu_counts(series)
    return _WorkloadWords(
        workload=f"{_MODE_NAMES[series.mode]} {_hosts_of_series(series)} on {_dataset_name(series.dataset)}",
        cluster=f"cluster {series.cluster}" if says_cluster and series.cluster else "",
        single_count=f"{units.counted(min(counts), 'GPU')} alone" if len(counts) == 1 else "",
    )


def steps_for(figure: StudyFigure) -> tuple[str, ...]:
    """Return the lines of a study file (valid TOML) that would produce a figure, and its commands as comments."""
    has_several_hosts = any(hosts != "one host" for hosts in figure.hosts)
    hostfile = " --hostfile HOSTS" if has_several_hosts else ""
    return (
        *_data_lines(figure),
        *_train_lines(figure),
        *_scaling_lines(figure, one_gpu_a_host=has_several_hosts and len(figure.hosts) == 1),
        *_sweep_lines(figure),
        *_measure_lines(figure),
        f"# vitscale run STUDY.toml{hostfile} -o RESULTS",
        f"# vitscale report --like {figure.study} RESULTS",
    )


def needs_of(figure: StudyFigure) -> tuple[str, ...]:
    """Return two sentences on what a study needs for a figure: its fields as KEY = VALUE, and its hosts."""
    sections = tomllib.loads("\n".join(steps_for(figure)))
    needs = []
    for section, fields in sections.items():
        for field, value in fields.items():
            value_text = json.dumps(value)
            needs.append(
                f"{field}: each of {value_text}" if section == "sweep" else f"{section}.{field} = {value_text}"
            )
    return f"In STUDY.toml: {', '.join(needs)}.", f"Hosts: {_hosts_needed(figure)}."


def _hosts_needed(figure: StudyFigure) -> str:
    """Return the hosts that a figure needs in words: "one with 8 GPUs, and 8 with one GPU in each"."""
    most = max(figure.gpus)
    needed: Mapping[Hosts, str] = {
        "one host": f"one with {most} GPUs",
        "one GPU a host": f"{most} with one GPU in each",
        "several like hosts": "several with like GPUs",
        "several unlike hosts": f"{most} with GPUs of unlike kinds, one in each",
    }
    return ", and ".join(needed[hosts] for hosts in figure.hosts) or f"any with {most} GPUs in all"


def _data_lines(figure: StudyFigure) -> list[str]:
    if len(figure.datasets) != 1:
        return []  # several are swept, and any will do where none is named
    return ["[data]", f'name = "{figure.datasets[0]}"']


def _train_lines(figure: StudyFigure) -> list[str]:
    """Return the lines of the section [train]; none where nothing must be set."""
    settings = []
    if figure.micro_batch is not None:
        settings.append(f"micro_batch = {figure.micro_batch}")
    if figure.quantity in _ACCURACY_QUANTITIES:
        settings.append("epochs = 5")
    return ["[train]", *settings] if settings else []


def _scaling_lines(figure: StudyFigure, *, one_gpu_a_host: bool) -> list[str]:
    lines = ["[scaling]", f'mode = "{figure.mode}"', f"gpus = {list(figure.gpus)}"]
    if one_gpu_a_host:
        lines.append("gpus_per_node = 1")
    return lines


def _sweep_lines(figure: StudyFigure) -> list[str]:
    """Return the lines of the section [sweep]: what a figure compares beside GPU counts; none where it is nothing."""
    if len(figure.datasets) > 1:
        datasets = ", ".join(f'"{name}"' for name in figure.datasets)
        return ["[sweep]", f'"data.name" = [{datasets}]']
    if len(figure.hosts) > 1:
        return ["[sweep]", f'"scaling.gpus_per_node" = [1, {max(figure.gpus)}]']
    if figure.quantity in ("epoch time by micro-batch", "accuracy by micro-batch"):
        return ["[sweep]", '"train.micro_batch" = [16, 32, 64, 128]']
    return []


def _measure_lines(figure: StudyFigure) -> list[str]:
    """Return the lines of the section [measure]; none where nothing must be set."""
    if figure.quantity == "run waterfall":
        return ["[measure]", "steps = 50", "explain = true", "checkpoint = true"]
    if figure.quantity == "epoch time by micro-batch":
        return ["[measure]", "explain = true"]
    return []
