"""How much of its arithmetic a device gives to training: the rates achieved, measured and published.

The energy per image of a run is that of all ranks' devices, each device once, over the images of all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.analysis.peaks import Peak, peak
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.steps import LIGHT
from vitscale.errors import VitscaleError
from vitscale.store.lines import Steps
from vitscale.store.records import EnergyReading, RankRecord
from vitscale.store.results import Run
from vitscale.trial.model_cost import training_flops
from vitscale.trial.trial import Precision, Trial

_DTYPES: Mapping[Precision, str] = {"fp32": "fp32", "bf16": "bf16", "bf16-params": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Compute:
    """Rates of one run in the model's own FLOPs, 3 x forward (1 MAC = 2 FLOP): what is recomputed counts once."""

    achieved_flops_per_second: float | None
    """Per rank: FLOPs of an image x images/s of all ranks / ranks."""
    matmul_flops_per_second: float | None
    """Measured rate of the devices, mean over ranks."""
    peak: Peak | None
    reason: str
    """Why MFU is unknown; empty where it is known."""
    shares_of_matmul: Mapping[int, float]
    """Rank to its achieved rate / the rate of its own device."""

    @property
    def share_of_matmul(self) -> float | None:
        """Achieved rate / measured rate."""
        return _ratio(self.achieved_flops_per_second, self.matmul_flops_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: achieved / published peak (Chowdhery et al., "PaLM", 2022, appendix B)."""
        return _ratio(self.achieved_flops_per_second, self.peak.flops_per_second if self.peak else None)


def compute(run: Run, figures: RunFigures) -> Compute:
    """Works out the rates of one run."""
    trial = run.header.trial
    told = figures.model.flops_per_image if figures.model is not None else None
    flops = flops_per_image(trial) if told is None else told
    rates = {rank.rank: rank.matmul.flops_per_second for rank in run.ranks if rank.matmul is not None}
    everybody = len(rates) == trial.world.size
    published = _peak(run)
    reasons = [published] if isinstance(published, str) else []
    achieved = None
    if isinstance(flops, str):
        reasons.insert(0, flops)
    elif figures.images_per_second is None:
        reasons.insert(0, "no light step was timed")
    else:
        achieved = flops * figures.images_per_second / trial.world.size
    return Compute(
        achieved_flops_per_second=achieved,
        matmul_flops_per_second=statistics.fmean(rates.values()) if everybody and rates else None,
        peak=published if isinstance(published, Peak) else None,
        reason=reasons[0] if reasons else "",
        shares_of_matmul={} if achieved is None else _by_rank(run, achieved, rates),
    )


def flops_per_image(trial: Trial) -> int | str:
    """Training FLOPs of one image, or why they are unknown."""
    if trial.model.factory is not None:
        return "the FLOPs of a model made by a factory are unknown"
    try:
        flops = training_flops(trial.model)
    except ValueError:
        return "the model's shape was not recorded"
    except VitscaleError as error:  # a Hugging Face configuration that is not here any more
        return f"the model's FLOPs are unknown here: {error}"
    if flops is None and trial.train.script is not None:
        return "a script tells the FLOPs of its model, if at all, as it runs: probe.describe(flops_per_image=...)"
    return "the FLOPs of this architecture are not known here" if flops is None else flops


def _peak(run: Run) -> Peak | str:
    """The peak of the devices, if they are all of one type."""
    devices: dict[tuple[str, str, str], None] = {}
    for rank in run.ranks:
        if rank.start is not None:
            device = rank.start.environment.device
            dtype = rank.matmul.dtype if rank.matmul else _DTYPES[run.header.trial.train.precision]
            devices[device.type, device.name, dtype] = None
    if not devices:
        return "no rank recorded its device"
    if len(devices) > 1:
        return f"the ranks computed on different devices: {', '.join(dict.fromkeys(name for _, name, _ in devices))}"
    ((device_type, name, dtype),) = devices
    return peak(device_type, name, dtype)


def _by_rank(run: Run, mean_achieved: float, rates: Mapping[int, float]) -> dict[int, float]:
    images = {rank.rank: _timed_images(rank) for rank in run.ranks}
    mean_images = statistics.fmean(images.values())
    if mean_images == 0:
        return {}
    return {rank: mean_achieved * images[rank] / mean_images / rate for rank, rate in rates.items() if rank in images}


def _timed_images(rank: RankRecord) -> int:
    steps = Steps.of(rank.steps)
    return sum(steps.images[(steps.window == LIGHT) & ~steps.warmup].tolist())


def _ratio(value: float | None, whole: float | None) -> float | None:
    return None if value is None or whole is None else value / whole


NOT_RECORDED = "this run recorded no energy"
SHORTEST_SECONDS = 10.0
"""Shortest stretch that counts. NVML moves its counter every 20 to 100 ms: in such a stretch each end may be off by 1 %
at most."""
_WHOLE_HOST = "RAPL"
"""A reading whose source begins with this covers all ranks of its host."""


@dataclass(frozen=True)
class Energy:
    """What one run used per image; `reason` says why that is unknown."""

    joules_per_image: float | None
    source: str | None
    reason: str


def energy_per_image(run: Run, spans: Mapping[int, range]) -> Energy:
    """Joules of timed steps on all ranks / their images on all ranks.

    Where one rank's energy is unknown, so is the run's.

    Args:
        run: the record.
        spans: epochs whose resources cover timed steps alone, and these steps. Those too short are left out.
    """
    if len(run.ranks) < run.header.trial.world.size:
        return Energy(None, None, "not every rank left a record")
    lines = [line for rank in run.ranks for line in rank.resources]
    if all(line.energy is None for line in lines):
        return Energy(None, None, NOT_RECORDED)
    seconds = {epoch: min(line.seconds for line in lines if line.epoch == epoch) for epoch in spans}
    long_enough = [epoch for epoch in sorted(spans) if seconds[epoch] >= SHORTEST_SECONDS]
    joules = [_of_epoch(run, epoch) for epoch in long_enough or sorted({line.epoch for line in lines})]
    if reason := next((unknown for unknown in joules if isinstance(unknown, str)), ""):
        return Energy(None, None, reason)
    if not long_enough:
        longest = f"the longest took {max(seconds.values()):.2g} s" if seconds else "there is none"
        return Energy(None, None, f"it takes a stretch of timed steps of {SHORTEST_SECONDS:g} s, and {longest}")
    images = 0
    for rank in run.ranks:
        for epoch in long_enough:
            steps, span = Steps.of(rank.steps), spans[epoch]
            own = steps.images[(steps.step >= span.start) & (steps.step < span.stop)]
            if len(own) != len(span):
                return Energy(None, None, f"not all images of epoch {epoch} were recorded")
            images += sum(own.tolist())
    if images == 0:
        return Energy(None, None, NOT_RECORDED)
    readings = [line.energy for line in lines if line.epoch in long_enough]
    sources = dict.fromkeys(reading.source for reading in readings if reading and reading.source)
    return Energy(sum(each for each in joules if isinstance(each, float)) / images, "; ".join(sources), "")


def _of_epoch(run: Run, epoch: int) -> float | str:
    readings = {
        rank.rank: next((line.energy for line in rank.resources if line.epoch == epoch), None) for rank in run.ranks
    }
    return _joules(readings, {r.rank: r.start.environment.host if r.start else "" for r in run.ranks})


def _joules(readings: Mapping[int, EnergyReading | None], host_of: Mapping[int, str]) -> float | str:
    """The sum over one epoch's devices, or why it is unknown."""
    counted: set[str] = set()
    covered_hosts: set[str] = set()
    without: list[tuple[str, str]] = []
    total = 0.0
    for rank in sorted(readings):
        reading = readings[rank]
        if reading is None or reading.joules is None:
            without.append((host_of[rank], (reading.reason if reading else None) or NOT_RECORDED))
            continue
        devices = set(reading.devices)
        if reading.source and reading.source.startswith(_WHOLE_HOST):
            covered_hosts.add(host_of[rank])
        if devices and devices <= counted:
            continue  # ranks that share a device each read the whole of it
        if devices & counted:
            return f"rank {rank} measured some of the devices of another rank, and others"
        counted |= devices
        total += reading.joules
    return next((reason for host, reason in without if host not in covered_hosts), total)
