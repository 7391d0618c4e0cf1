"""Energy per image of a run: of all ranks' devices, each device once, over the images of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.store.records import EnergyReading
from vitscale.store.results import Run

NOT_RECORDED = "this run recorded no energy"
SHORTEST_SECONDS = 10.0
"""Of a stretch that counts. NVML moves its counter every 20 to 100 ms: of so long a stretch each end may be off by 1 %
at most."""
_WHOLE_HOST = "RAPL"
"""A reading whose source begins so covers all ranks of its host."""


@dataclass(frozen=True)
class Energy:
    """What one run used per image; `reason` says why that is unknown."""

    joules_per_image: float | None
    source: str | None
    reason: str


def energy_per_image(run: Run, spans: Mapping[int, range]) -> Energy:
    """Joules of timed steps on all ranks / their images on all ranks.

    A part of the ranks is no answer: where one rank's energy is unknown, so is the run's.

    Args:
        run: the record.
        spans: of epochs whose resources tell of timed steps alone, these steps. Those too short are left out.
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
            steps = [step.images for step in rank.steps if step.step in spans[epoch]]
            if len(steps) != len(spans[epoch]):
                return Energy(None, None, f"not all images of epoch {epoch} were recorded")
            images += sum(steps)
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
