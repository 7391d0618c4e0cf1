"""Energy per image of a run: of all ranks' devices, each device once, over the images of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vitscale.record import EnergyReading, Run

NOT_RECORDED = "this run recorded no energy"
_WHOLE_HOST = "RAPL"
"""A reading whose source begins so covers all ranks of its host."""


@dataclass(frozen=True)
class Energy:
    """What one run used per image; `reason` says why that is unknown."""

    joules_per_image: float | None
    source: str | None
    reason: str


def energy_per_image(run: Run, epochs: Collection[int]) -> Energy:
    """Joules of `epochs` on all ranks / images of these epochs on all ranks.

    A part of the ranks is no answer: where one rank's energy is unknown, so is the run's.
    """
    if len(run.ranks) < run.header.trial.world.size:
        return Energy(None, None, "not every rank left a record")
    images = {line.epoch: line.images for line in run.ranks[0].epochs if line.images is not None}
    total_joules, total_images = 0.0, 0
    sources: dict[str, None] = {}
    for epoch in sorted(epochs):
        if epoch not in images:
            return Energy(None, None, f"the images of epoch {epoch} were not recorded")
        readings = {
            rank.rank: next((line.energy for line in rank.resources if line.epoch == epoch), None) for rank in run.ranks
        }
        joules = _joules(readings, {r.rank: r.start.environment.host if r.start else "" for r in run.ranks})
        if isinstance(joules, str):
            return Energy(None, None, joules)
        total_joules += joules
        total_images += images[epoch]
        sources |= {reading.source: None for reading in readings.values() if reading and reading.source}
    if total_images == 0:
        return Energy(None, None, NOT_RECORDED)
    return Energy(total_joules / total_images, "; ".join(sources), "")


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
