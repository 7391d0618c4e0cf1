"""Works out what a trial used: processor time, memory, GPUs, energy, and its share of its devices' arithmetic.

Each rank records a line of resources an epoch, which covers the epoch's longest stretch of timed steps. Shares and
rates use only lines that cover timed steps alone, on all ranks (`timed_spans`); without one they are unknown. Memory
peaks cover all epochs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from vitscale.analysis.runs.compute import Compute, Energy, FlopsSource, ImageFlops, compute, energy_per_image
from vitscale.analysis.runs.environments import environments
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.repeats import Clusters, over_runs
from vitscale.analysis.runs.steps import LIGHT, Integers
from vitscale.analysis.statistics import known_mean, known_median, whole_mean
from vitscale.present.estimate import Estimate
from vitscale.store.lines import Steps
from vitscale.store.records import GpuSamples, RankRecord, ResourcesLine
from vitscale.store.results import Run

NOT_RECORDED = "this run recorded no use of its GPUs"


@dataclass(frozen=True)
class RankResources:
    """What one rank of a trial used, median over runs; None where unknown."""

    rank: int
    cpu_utilisation: float | None
    """Processor seconds / (seconds x threads): 1 where they always compute; a loader's threads add to it."""
    peak_bytes: int | None
    """Highest allocation on the device; on CPU the highest resident memory."""
    gpu_utilisation: float | None
    share_of_matmul: float | None
    cores: tuple[int, ...] = ()
    """Cores that it was allowed, in its first run; empty where it did not record them."""
    numa_nodes: tuple[int, ...] | None = None
    """The memory nodes of these cores; None where the kernel does not report them."""


@dataclass(frozen=True)
class ResourceFigures:
    """What a trial used; None where unavailable.

    Figures are medians over its runs. Shares of throttling are means, as one run of three may have it alone. Memory is
    the highest of any run, and intervals are those of `over_runs`.
    """

    by_rank: tuple[RankResources, ...]
    peak_rss_bytes: int | None
    """Resident memory of the rank that needed most; the other peaks too are of the rank that needed most of each."""
    cuda_allocated_bytes: int | None
    cuda_reserved_bytes: int | None
    cuda_device_bytes: int | None
    cpu_utilisation: float | None
    """Use of the ranks' threads, mean over ranks."""
    cpu_utilisation_of_quota: float | None
    """Processor seconds of all ranks of a host / (seconds x cores that the quota grants), mean over hosts; None without
    a quota."""
    cpu_throttled_share: float | None
    """Share in which the CPU controller held back the threads of the worst rank's host, of the time that they would
    have computed; None without a quota."""
    gpu_utilisation: float | None
    """Mean over ranks of the share of time in which a kernel ran."""
    sm_clock_mhz: float | None
    """Mean over ranks of their median clocks."""
    sm_clock_mhz_min: float | None
    temperature_celsius_max: float | None
    power_watts: float | None
    """Mean per GPU."""
    throttle_reasons: tuple[str, ...]
    """Reasons seen in any run."""
    throttled_share: float | None
    """Share of the worst rank's samples."""
    limits: tuple[str, ...]
    """Limits at which GPUs held their clocks, in any run."""
    limited_share: float | None
    """Share of the worst rank's samples."""
    power_limit_watts: tuple[float, ...]
    """Different limits of the GPUs."""
    gpu_reason: str
    """Why the figures of GPUs are None; empty where they are known."""
    joules_per_image: Estimate | None
    energy_source: str | None
    energy_reason: str
    """Why the energy is None; empty where it is known."""
    flops_per_image: int | None
    """FLOPs of training one image, forward and backward (1 MAC = 2 FLOP)."""
    flops_source: FlopsSource | None
    """How these are known; None where they are not."""
    matmul_flops_per_second: float | None
    """Measured on these devices, mean over ranks."""
    achieved_flops_per_second: Estimate | None
    """Rate per rank, by the run's images/s."""
    share_of_matmul: Estimate | None
    mfu: Estimate | None
    peak_name: str | None
    mfu_reason: str
    """Why MFU is None; empty where it is known."""


@dataclass(frozen=True)
class _RankUse:
    """What one rank used in one run."""

    rank: int
    all_lines: tuple[ResourcesLine, ...]
    """Its lines of all epochs; the figures below cover the epochs of `timed_spans` alone."""
    seconds: float
    cpu_seconds: float
    held_back_seconds: float | None
    """Core-seconds for which the CPU controller held back the group of its host; None where an epoch lacks them."""
    host: str
    gpu_samples: tuple[GpuSamples, ...]
    """Those of each epoch that has any."""
    threads: int
    peak_bytes: int | None
    cores: tuple[int, ...]
    numa_nodes: tuple[int, ...] | None

    @property
    def cpu_utilisation(self) -> float | None:
        """Processor seconds / (seconds x threads); None where there is no such time."""
        thread_seconds = self.seconds * self.threads
        return self.cpu_seconds / thread_seconds if thread_seconds > 0 else None

    @property
    def gpu_utilisation(self) -> float | None:
        """Mean share of time in which a kernel ran on its GPU."""
        return self.gpu_mean(lambda samples: samples.utilisation)

    def gpu_mean(self, figure: Callable[[GpuSamples], float | None]) -> float | None:
        """Mean of a GPU's figure over epochs, each weighted by its number of samples; None where no epoch has it."""
        values = []
        weights = []
        for samples in self.gpu_samples:
            value = figure(samples)
            if value is not None:
                weight = max(1, samples.samples)
                values.append(value * weight)
                weights.append(weight)
        return sum(values) / sum(weights) if weights else None


@dataclass(frozen=True)
class _RunUse:
    """What one run used."""

    ranks: tuple[_RankUse, ...]
    cpu_utilisation_of_quota: float | None
    energy: Energy
    compute: Compute

    @property
    def cpu_throttled_share(self) -> float | None:
        """Held seconds / (held + computed ones) of the worst rank's host.

        The kernel adds held seconds up over cores, as it does processor time.
        """
        cpu_seconds_by_host: dict[str, float] = {}
        for rank in self.ranks:
            cpu_seconds_by_host[rank.host] = cpu_seconds_by_host.get(rank.host, 0.0) + rank.cpu_seconds
        return _highest(_held_back_share(rank.held_back_seconds, cpu_seconds_by_host[rank.host]) for rank in self.ranks)

    @property
    def sm_clock_mhz(self) -> float | None:
        """Mean over ranks of their median clocks; None where a rank has none."""
        return whole_mean([rank.gpu_mean(lambda samples: samples.sm_clock_mhz_median) for rank in self.ranks])

    @property
    def power_watts(self) -> float | None:
        """Mean per GPU; None where a rank has none."""
        return whole_mean([rank.gpu_mean(lambda samples: samples.power_watts_mean) for rank in self.ranks])

    @property
    def gpu_throttled_share(self) -> float | None:
        """Share of the worst rank's samples in which heat or a fault slowed the clocks."""
        return _highest(rank.gpu_mean(lambda samples: samples.throttled_share) for rank in self.ranks)

    @property
    def gpu_limited_share(self) -> float | None:
        """Share of the worst rank's samples in which a limit, such as that of power, held the clocks."""
        return _highest(rank.gpu_mean(lambda samples: samples.limited_share) for rank in self.ranks)


def _held_back_share(held_back_seconds: float | None, cpu_seconds: float) -> float | None:
    """Return held seconds / (held + computed ones); None where the held ones are unknown."""
    if held_back_seconds is None:
        return None
    if held_back_seconds == 0:
        return 0.0
    return held_back_seconds / (held_back_seconds + cpu_seconds)


def resource_figures(
    runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters = None, deciding_runs: int = 0
) -> ResourceFigures | None:
    """Return what the completed runs of one trial used; None without a run.

    Args:
        runs: the records.
        figures: `run_figures` of each.
        clusters: the runs of each observation.
        deciding_runs: number of first runs that decided how many there are, as in `over_runs`.
    """
    if not runs:
        return None
    uses = [_run_use(run, run_figures) for run, run_figures in zip(runs, figures, strict=True)]
    ranks = list(itertools.chain.from_iterable(use.ranks for use in uses))
    lines = list(itertools.chain.from_iterable(rank.all_lines for rank in ranks))
    gpu_samples = list(itertools.chain.from_iterable(rank.gpu_samples for rank in ranks))
    by_rank = _rank_resources(uses)
    gpu_utilisation = whole_mean([rank.gpu_utilisation for rank in by_rank])

    def estimate(values: Sequence[float | None]) -> Estimate | None:
        """The trial's figure from one value per run, with its interval."""
        return over_runs(values, clusters, deciding_runs)

    joules_per_image = estimate([use.energy.joules_per_image for use in uses])
    mfu = estimate([use.compute.mfu for use in uses])
    image_flops = _first_known_flops(uses)
    return ResourceFigures(
        by_rank=by_rank,
        peak_rss_bytes=_highest(line.peak_rss_bytes for line in lines),
        cuda_allocated_bytes=_highest(line.cuda_allocated_bytes for line in lines),
        cuda_reserved_bytes=_highest(line.cuda_reserved_bytes for line in lines),
        cuda_device_bytes=_highest(line.cuda_device_bytes for line in lines),
        cpu_utilisation=whole_mean([rank.cpu_utilisation for rank in by_rank]),
        cpu_utilisation_of_quota=known_median(use.cpu_utilisation_of_quota for use in uses),
        cpu_throttled_share=known_mean(use.cpu_throttled_share for use in uses),
        gpu_utilisation=gpu_utilisation,
        sm_clock_mhz=known_median(use.sm_clock_mhz for use in uses),
        sm_clock_mhz_min=_lowest(samples.sm_clock_mhz_min for samples in gpu_samples),
        temperature_celsius_max=_highest(samples.temperature_celsius_max for samples in gpu_samples),
        power_watts=known_median(use.power_watts for use in uses),
        throttle_reasons=_all_different(samples.throttle_reasons for samples in gpu_samples),
        throttled_share=known_mean(use.gpu_throttled_share for use in uses),
        limits=_all_different(samples.limits or () for samples in gpu_samples),
        limited_share=known_mean(use.gpu_limited_share for use in uses),
        power_limit_watts=_all_different(_power_limits(run) for run in runs),
        gpu_reason=_gpu_reason(ranks) if gpu_utilisation is None else "",
        joules_per_image=joules_per_image,
        energy_source=_first_nonempty(use.energy.source for use in uses),
        energy_reason=uses[0].energy.reason if joules_per_image is None else "",
        flops_per_image=None if image_flops is None else image_flops.flops,
        flops_source=None if image_flops is None else image_flops.source,
        matmul_flops_per_second=known_median(use.compute.matmul_flops_per_second for use in uses),
        achieved_flops_per_second=estimate([use.compute.achieved_flops_per_second for use in uses]),
        share_of_matmul=estimate([use.compute.share_of_matmul for use in uses]),
        mfu=mfu,
        peak_name=_first_nonempty(use.compute.peak_name for use in uses),
        mfu_reason=uses[0].compute.reason if mfu is None else "",
    )


def _first_known_flops(uses: Sequence[_RunUse]) -> ImageFlops | None:
    """Return the FLOPs of the first run that knows them: all runs of a trial train one model."""
    for use in uses:
        if use.compute.image_flops is not None:
            return use.compute.image_flops
    return None


def timed_spans(run: Run, steady_from: int = 0) -> dict[int, range]:
    """Return epoch -> the steps that its resources cover, where these are all timed ones after warm-up, on all ranks.

    Epochs whose ranks cover different steps, or steps that are not timed, are left out.

    Args:
        run: the record.
        steady_from: `RunFigures.steady_from`; light steps before it are warm-up that went on.
    """
    spans_by_epoch: dict[int, set[range]] = {}  # the different spans of its ranks
    disturbing_by_rank: list[Integers] = [np.array([], dtype=np.int64)]
    for rank in run.ranks:
        for line in rank.resources:
            spans_by_epoch.setdefault(line.epoch, set()).add(_covered_steps(line))
        disturbing_by_rank.append(_disturbing_steps(rank, steady_from))
    disturbing_steps = np.concatenate(disturbing_by_rank)  # their numbers, of all ranks
    timed_span_by_epoch = {}
    for epoch, spans in spans_by_epoch.items():
        if len(spans) > 1:
            continue
        (span,) = spans
        is_disturbed = ((disturbing_steps >= span.start) & (disturbing_steps < span.stop)).any()
        if span and not is_disturbed:
            timed_span_by_epoch[epoch] = span
    return timed_span_by_epoch


def _covered_steps(line: ResourcesLine) -> range:
    """Return the numbers of the steps that a line covers; empty where it covers none."""
    if line.steps is None:
        return range(0)
    first, last = line.steps
    return range(first, last + 1)


def _disturbing_steps(rank: RankRecord, steady_from: int) -> Integers:
    """Return the numbers of a rank's steps that are warm-up, or not light (recorded with a profiler)."""
    steps = Steps.of(rank.steps)
    is_timed = (steps.window == LIGHT) & ~steps.warmup & (steps.step >= steady_from)
    disturbing: Integers = steps.step[~is_timed]
    return disturbing


def _run_use(run: Run, figures: RunFigures) -> _RunUse:
    """Return what one run used in the epochs of `timed_spans`."""
    spans = timed_spans(run, figures.steady_from or 0)
    ranks = tuple(_rank_use(run, rank, spans) for rank in run.ranks)
    return _RunUse(
        ranks=ranks,
        cpu_utilisation_of_quota=_cpu_utilisation_of_quota(run, ranks),
        energy=energy_per_image(run, spans),
        compute=compute(run, figures),
    )


def _rank_use(run: Run, rank: RankRecord, epochs: Collection[int]) -> _RankUse:
    """Return what a rank used in these epochs; its memory is that of all epochs."""
    environment = rank.start.environment if rank.start else None
    recorded_threads = environment.threads if environment else None
    lines = [line for line in rank.resources if line.epoch in epochs]
    if run.header.trial.train.device == "cuda":
        peak_bytes = _highest(line.cuda_allocated_bytes for line in rank.resources)
    else:
        peak_bytes = _highest(line.peak_rss_bytes for line in rank.resources)
    return _RankUse(
        rank=rank.rank,
        all_lines=rank.resources,
        seconds=sum(line.seconds for line in lines),
        cpu_seconds=sum(line.cpu_seconds for line in lines),
        held_back_seconds=_sum_if_complete([line.cpu_throttled_seconds for line in lines]),
        host=environment.host if environment else "",
        gpu_samples=tuple(line.gpu for line in lines if line.gpu is not None),
        threads=recorded_threads or run.header.trial.world.threads_per_rank,
        peak_bytes=peak_bytes,
        cores=environment.cores_allowed if environment else (),
        numa_nodes=environment.numa_nodes if environment else None,
    )


def _cpu_utilisation_of_quota(run: Run, ranks: Sequence[_RankUse]) -> float | None:
    """Return cores that the ranks of a host kept busy / cores of its quota, mean over hosts.

    None where a rank has no quota, or no time is known.

    Args:
        run: the record.
        ranks: the use of each of its ranks, in the same order.
    """
    quota_by_host: dict[str, float] = {}
    busy_cores_by_host: dict[str, list[float]] = {}
    for record, rank in zip(run.ranks, ranks, strict=True):
        quota = record.start.environment.cpu_quota_cores if record.start is not None else None
        if quota is None or rank.seconds <= 0:
            return None
        quota_by_host[rank.host] = quota
        busy_cores_by_host.setdefault(rank.host, []).append(rank.cpu_seconds / rank.seconds)
    utilisations = []
    for host, quota_cores in quota_by_host.items():
        if quota_cores > 0:
            utilisations.append(sum(busy_cores_by_host[host]) / quota_cores)
    return known_mean(utilisations)


def _rank_resources(uses: Sequence[_RunUse]) -> tuple[RankResources, ...]:
    """Return the resources of each rank that is in any run, in the order of the ranks' numbers."""
    uses_by_rank: dict[int, list[_RankUse]] = {}
    for use in uses:
        for rank_use in use.ranks:
            uses_by_rank.setdefault(rank_use.rank, []).append(rank_use)
    resources = []
    for number, rank_uses in sorted(uses_by_rank.items()):
        resources.append(
            RankResources(
                rank=number,
                cpu_utilisation=known_median(rank_use.cpu_utilisation for rank_use in rank_uses),
                peak_bytes=_highest(rank_use.peak_bytes for rank_use in rank_uses),
                gpu_utilisation=known_median(rank_use.gpu_utilisation for rank_use in rank_uses),
                share_of_matmul=known_median(use.compute.shares_of_matmul.get(number) for use in uses),
                cores=rank_uses[0].cores,
                numa_nodes=rank_uses[0].numa_nodes,
            )
        )
    return tuple(resources)


def _power_limits(run: Run) -> list[float]:
    """Return the power limit in W of each rank's GPU that has one."""
    limits = []
    for environment in environments(run):
        settings = environment.device.settings
        if settings and settings.power_limit_watts is not None:
            limits.append(settings.power_limit_watts)
    return limits


def _gpu_reason(ranks: Sequence[_RankUse]) -> str:
    """Return why the GPU utilisation of some ranks is unknown. Of a slice of a GPU (MIG) NVML does not report it."""
    unknown_ranks = [rank for rank in ranks if rank.gpu_utilisation is None]
    if any(rank.gpu_samples for rank in unknown_ranks):
        return "NVML does not tell the utilisation of this GPU, or slice of one"
    lines = list(itertools.chain.from_iterable(rank.all_lines for rank in unknown_ranks))
    if any(line.gpu for line in lines):
        return "no sample lies among timed steps alone"
    return _first_nonempty(line.gpu_reason for line in lines) or NOT_RECORDED


_Number = TypeVar("_Number", int, float)
_Value = TypeVar("_Value", str, float)


def _highest(values: Iterable[_Number | None]) -> _Number | None:
    """Return the highest of the known values; None where none is known."""
    return max((value for value in values if value is not None), default=None)


def _lowest(values: Iterable[float | None]) -> float | None:
    """Return the lowest of the known values; None where none is known."""
    return min((value for value in values if value is not None), default=None)


def _all_different(groups: Iterable[Iterable[_Value]]) -> tuple[_Value, ...]:
    """Return each different value that is in any group, in rising order."""
    return tuple(sorted(set(itertools.chain.from_iterable(groups))))


def _first_nonempty(texts: Iterable[str | None]) -> str | None:
    """Return the first text that is neither empty nor None; None where there is none."""
    return next((text for text in texts if text), None)


def _sum_if_complete(values: Sequence[float | None]) -> float | None:
    """Return the sum of the values; None where any of them is unknown, or there is none."""
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return None
    return sum(known_values)
