"""What a trial used: processor time, memory, GPUs, energy, and how much of the arithmetic its devices can do.

Shares and rates cover timed steps alone: each epoch's longest stretch of them, or they are unknown. Memory peaks cover
all epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from vitscale.analysis.runs.compute import Compute, Energy, compute, energy_per_image
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
    """One rank of a trial, median over runs."""

    rank: int
    cpu_utilisation: float | None
    """Processor seconds / (seconds x threads): 1 where its threads compute all the time; the loader's may add to it."""
    peak_bytes: int | None
    """Highest allocation on the device; on CPU the highest resident memory."""
    gpu_utilisation: float | None
    share_of_matmul: float | None
    cores: tuple[int, ...] = ()
    """Cores that it was allowed, in the first run; empty where it did not record them."""
    numa_nodes: tuple[int, ...] | None = None
    """The memory nodes of these cores; None where the kernel does not tell."""


@dataclass(frozen=True)
class ResourceFigures:
    """Medians over a trial's runs, and means of shares of throttling, which one run in three may have; memory is the
    highest of any run, and intervals are those of `over_runs`.

    None where unavailable.
    """

    by_rank: tuple[RankResources, ...]
    peak_rss_bytes: int | None
    """Peak of the rank that needed most, as are the other peaks."""
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
    """One rank of one run."""

    rank: int
    all_lines: tuple[ResourcesLine, ...]
    seconds: float
    """Seconds of the epochs that count; `cpu_seconds`, `held_seconds` and `gpu` cover the same."""
    cpu_seconds: float
    held_seconds: float | None
    """Core-seconds for which its host's group was held back."""
    host: str
    gpu: tuple[GpuSamples, ...]
    threads: int
    peak_bytes: int | None
    cores: tuple[int, ...]
    numa_nodes: tuple[int, ...] | None

    @property
    def cpu_utilisation(self) -> float | None:
        whole = self.seconds * self.threads
        return self.cpu_seconds / whole if whole > 0 else None

    def gpu_mean(self, field: Callable[[GpuSamples], float | None]) -> float | None:
        """Mean over epochs, each weighted by its number of samples."""
        if not self.gpu:
            return None
        known = [(value, max(1, samples.samples)) for samples in self.gpu if (value := field(samples)) is not None]
        return sum(value * weight for value, weight in known) / sum(w for _, w in known) if known else None


@dataclass(frozen=True)
class _RunUse:
    """One run."""

    ranks: tuple[_RankUse, ...]
    of_quota: float | None
    energy: Energy
    compute: Compute

    @property
    def held_share(self) -> float | None:
        """`ResourceFigures.cpu_throttled_share`. The kernel adds up over cores, as processor time does."""
        computed: dict[str, float] = {}
        for rank in self.ranks:
            computed[rank.host] = computed.get(rank.host, 0.0) + rank.cpu_seconds
        held = [(rank.held_seconds, computed[rank.host]) for rank in self.ranks]
        return _highest(seconds and seconds / (seconds + used) for seconds, used in held)


def resource_figures(
    runs: Sequence[Run], figures: Sequence[RunFigures], clusters: Clusters = None, looked: int = 0
) -> ResourceFigures | None:
    """The figures of one trial, from its completed runs and what `run_figures` says of each; None without a run.

    `clusters`: the runs of each observation. `looked`: first runs that decided how many there are, as in `over_runs`.
    """
    if not runs:
        return None
    used = [_use(run, own) for run, own in zip(runs, figures, strict=True)]
    ranks = [rank for use in used for rank in use.ranks]
    lines = [line for rank in ranks for line in rank.all_lines]
    samples = [seen for rank in ranks for seen in rank.gpu]
    by_rank = _by_rank(used)
    utilisation = whole_mean([rank.gpu_utilisation for rank in by_rank])
    joules = [use.energy.joules_per_image for use in used]
    mfu = over_runs([use.compute.mfu for use in used], clusters, looked)
    return ResourceFigures(
        by_rank=by_rank,
        peak_rss_bytes=_highest(line.peak_rss_bytes for line in lines),
        cuda_allocated_bytes=_highest(line.cuda_allocated_bytes for line in lines),
        cuda_reserved_bytes=_highest(line.cuda_reserved_bytes for line in lines),
        cuda_device_bytes=_highest(line.cuda_device_bytes for line in lines),
        cpu_utilisation=whole_mean([rank.cpu_utilisation for rank in by_rank]),
        cpu_utilisation_of_quota=known_median(use.of_quota for use in used),
        cpu_throttled_share=known_mean(use.held_share for use in used),
        gpu_utilisation=utilisation,
        sm_clock_mhz=known_median(
            whole_mean([r.gpu_mean(lambda gpu: gpu.sm_clock_mhz_median) for r in use.ranks]) for use in used
        ),
        sm_clock_mhz_min=min(
            (gpu.sm_clock_mhz_min for gpu in samples if gpu.sm_clock_mhz_min is not None), default=None
        ),
        temperature_celsius_max=_highest(gpu.temperature_celsius_max for gpu in samples),
        power_watts=known_median(
            whole_mean([r.gpu_mean(lambda gpu: gpu.power_watts_mean) for r in use.ranks]) for use in used
        ),
        throttle_reasons=tuple(sorted({reason for gpu in samples for reason in gpu.throttle_reasons})),
        throttled_share=known_mean(
            _highest(rank.gpu_mean(lambda gpu: gpu.throttled_share) for rank in use.ranks) for use in used
        ),
        limits=tuple(sorted({limit for gpu in samples for limit in gpu.limits or ()})),
        limited_share=known_mean(
            _highest(rank.gpu_mean(lambda gpu: gpu.limited_share) for rank in use.ranks) for use in used
        ),
        power_limit_watts=tuple(
            sorted(
                {
                    e.device.settings.power_limit_watts
                    for run in runs
                    for e in environments(run)
                    if e.device.settings and e.device.settings.power_limit_watts is not None
                }
            )
        ),
        gpu_reason=_gpu_reason(ranks) if utilisation is None else "",
        joules_per_image=over_runs(joules, clusters, looked),
        energy_source=next((use.energy.source for use in used if use.energy.source), None),
        energy_reason="" if any(value is not None for value in joules) else used[0].energy.reason,
        matmul_flops_per_second=known_median(use.compute.matmul_flops_per_second for use in used),
        achieved_flops_per_second=over_runs([use.compute.achieved_flops_per_second for use in used], clusters, looked),
        share_of_matmul=over_runs([use.compute.share_of_matmul for use in used], clusters, looked),
        mfu=mfu,
        peak_name=next((use.compute.peak.name for use in used if use.compute.peak), None),
        mfu_reason="" if mfu is not None else used[0].compute.reason,
    )


def timed_spans(run: Run, steady_from: int = 0) -> dict[int, range]:
    """Epoch to the steps that its resources cover, where these are all timed ones after warm-up, on all ranks.

    Args:
        run: the record.
        steady_from: `RunFigures.steady_from`; light steps before it are warm-up that went on.
    """
    spans: dict[int, set[range]] = {}
    disturbed: list[Integers] = []
    for rank in run.ranks:
        steps = Steps.of(rank.steps)
        for line in rank.resources:
            first, last = line.steps or (0, -1)
            spans.setdefault(line.epoch, set()).add(range(first, last + 1))
        timed = (steps.window == LIGHT) & ~steps.warmup & (steps.step >= steady_from)
        disturbed.append(steps.step[~timed])
    alike = {epoch: stretch for epoch, (stretch, *others) in spans.items() if not others and stretch}
    numbers = np.concatenate([*disturbed, np.array([], dtype=np.int64)])
    return {
        epoch: stretch
        for epoch, stretch in alike.items()
        if not ((numbers >= stretch.start) & (numbers < stretch.stop)).any()
    }


def _use(run: Run, figures: RunFigures) -> _RunUse:
    spans = timed_spans(run, figures.steady_from or 0)
    ranks = tuple(_rank_use(run, rank, spans) for rank in run.ranks)
    return _RunUse(ranks, _of_quota(run, ranks), energy_per_image(run, spans), compute(run, figures))


def _rank_use(run: Run, rank: RankRecord, epochs: Collection[int]) -> _RankUse:
    environment = rank.start.environment if rank.start else None
    lines = [line for line in rank.resources if line.epoch in epochs]
    seconds = sum(line.seconds for line in lines)
    held = [line.cpu_throttled_seconds for line in lines]
    on_gpu = run.header.trial.train.device == "cuda"
    return _RankUse(
        rank=rank.rank,
        all_lines=rank.resources,
        seconds=seconds,
        cpu_seconds=sum(line.cpu_seconds for line in lines),
        held_seconds=None if None in held or not held else sum(filter(None, held)),
        host=environment.host if environment else "",
        gpu=tuple(line.gpu for line in lines if line.gpu is not None),
        threads=(environment.threads if environment else None) or run.header.trial.world.threads_per_rank,
        peak_bytes=_highest(line.cuda_allocated_bytes if on_gpu else line.peak_rss_bytes for line in rank.resources),
        cores=environment.cores_allowed if environment else (),
        numa_nodes=environment.numa_nodes if environment else None,
    )


def _of_quota(run: Run, ranks: Sequence[_RankUse]) -> float | None:
    quota_of: dict[str, float] = {}
    used_on: dict[str, list[_RankUse]] = {}
    for record, use in zip(run.ranks, ranks, strict=True):
        if record.start is None or record.start.environment.cpu_quota_cores is None or use.seconds <= 0:
            return None
        host = record.start.environment.host
        quota_of[host] = record.start.environment.cpu_quota_cores
        used_on.setdefault(host, []).append(use)
    shares = [
        sum(use.cpu_seconds / use.seconds for use in used_on[host]) / quota
        for host, quota in quota_of.items()
        if quota > 0
    ]
    return known_mean(shares)


def _by_rank(used: Sequence[_RunUse]) -> tuple[RankResources, ...]:
    of_ranks: dict[int, list[_RankUse]] = {}
    for rank in (rank for use in used for rank in use.ranks):
        of_ranks.setdefault(rank.rank, []).append(rank)
    return tuple(
        RankResources(
            rank=number,
            cpu_utilisation=known_median(rank.cpu_utilisation for rank in same),
            peak_bytes=_highest(rank.peak_bytes for rank in same),
            gpu_utilisation=known_median(rank.gpu_mean(lambda gpu: gpu.utilisation) for rank in same),
            share_of_matmul=known_median(use.compute.shares_of_matmul.get(number) for use in used),
            cores=same[0].cores,
            numa_nodes=same[0].numa_nodes,
        )
        for number, same in sorted(of_ranks.items())
    )


def _gpu_reason(ranks: Sequence[_RankUse]) -> str:
    """Why the utilisation is unknown of those ranks of which it is; of a slice (MIG) NVML tells none."""
    silent = [rank for rank in ranks if rank.gpu_mean(lambda gpu: gpu.utilisation) is None]
    if any(rank.gpu for rank in silent):
        return "NVML does not tell the utilisation of this GPU, or slice of one"
    lines = [line for rank in silent for line in rank.all_lines]
    if any(line.gpu for line in lines):
        return "no sample lies among timed steps alone"
    return next((line.gpu_reason for line in lines if line.gpu_reason), NOT_RECORDED)


_Number = TypeVar("_Number", int, float)


def _highest(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)
