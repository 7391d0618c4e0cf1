"""Causes in the loader: training waits for data, or copies it to the device for long.

worker seconds of a batch  = what a fetch takes without workers, else the step times the number of workers, which are
                             all busy while training waits for them
workers that suffice       = worker seconds of a batch / the rest of the step
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.explanation.cause import SlowCause, is_worth_naming, part_cost, saving_without
from vitscale.explanation.code_lines import top_line
from vitscale.explanation.host_cores import host_cores
from vitscale.explanation.parts import JobParts
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.step_table import JobStepTimes
from vitscale.present.estimate import Estimate
from vitscale.present.units import counted, percent, seconds

CHEAPER_IMAGES = "store images at the size that is trained on, or decode them smaller"


def data_causes(parts: JobParts, table: JobStepTimes) -> Iterator[SlowCause]:
    """Yield the causes in the loader.

    Args:
        parts: the job.
        table: its steps, without what single ranks cost.
    """
    waiting = _data_wait(parts, table)
    if waiting is not None:
        yield waiting
    copies = _copies(parts, table)
    if copies is not None:
        yield copies


def _data_wait(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that training waits for data; None where it hardly does."""
    if not table.part_is_known("data"):
        return None
    saving = saving_without(table, {"data": np.zeros_like(table.work["data"])})
    if not is_worth_naming(saving, parts.mean_step_seconds):
        return None
    cost = part_cost(table, "data")
    supply = _LoaderSupply.of(parts.records, cost.value, parts.step.value)
    code = top_line(parts.records, "data")
    in_process = supply.workers == 0
    location = f"; most of it at {code}" if code is not None and in_process else ""
    evidence = f"{seconds(cost.value)} of a step ({percent(cost.value / parts.mean_step_seconds)}) goes by until the "
    evidence += f"loader delivers a batch: it has {supply.text}{location}"
    return SlowCause(
        "data-wait", "waits for data", evidence, supply.advice, cost, saving, weight=saving.value, code=code
    )


@dataclass(frozen=True)
class _LoaderSupply:
    """What a rank's loader has, and what it would need."""

    workers: int | None
    """None: unknown."""
    free_cores: int
    """Cores of the rank that do not compute."""
    cores: int
    """Cores of the rank: its share of those that the ranks of its host may use."""
    needed_workers: int | None
    """Workers that suffice for data to be there in time; None where that is unknown."""

    @classmethod
    def of(cls, records: Sequence[HookedRank], wait_seconds: float, step_seconds: float) -> _LoaderSupply:
        """Work out the supply of the first rank's loader, which stands for all.

        Args:
            records: what the ranks recorded.
            wait_seconds: mean seconds of a step in which it waits for data.
            step_seconds: the usual step.
        """
        record = records[0]
        rank = record.rank
        cores = host_cores(records, rank.host).cores_of_rank
        computing = max(1, rank.threads) if rank.device == "cpu" else 1
        workers = record.loader.workers if record.loader is not None else None
        batch_seconds = wait_seconds if not workers else workers * step_seconds
        remaining_seconds = step_seconds - wait_seconds
        is_known = workers is not None and workers >= 0 and remaining_seconds > 0
        needed = math.ceil(min(batch_seconds / remaining_seconds, 1e6)) if is_known else None
        return cls(workers, free_cores=max(1, cores - computing), cores=cores, needed_workers=needed)

    @property
    def text(self) -> str:
        """What it has, in words: "0 workers; the rank has 8 cores"."""
        workers = counted(self.workers, "worker") if self.workers is not None else "an unknown number of workers"
        return f"{workers}, and the rank has {counted(self.cores, 'core')}"

    @property
    def advice(self) -> str:
        """What to change, with a number of workers where one helps."""
        if self.workers is None or self.needed_workers is None:
            return f"Load batches ahead in worker processes (DataLoader's num_workers), or {CHEAPER_IMAGES}"
        useful = min(self.needed_workers, self.free_cores)
        if useful <= self.workers:
            return f"More workers would find no free core: {CHEAPER_IMAGES}, or give the job more cores"
        raised = f"Set num_workers={useful} (now {self.workers}) and persistent_workers=True"
        if self.needed_workers > useful:
            return f"{raised}; about {self.needed_workers:,} would be needed, so also {CHEAPER_IMAGES}"
        return raised


def _copies(parts: JobParts, table: JobStepTimes) -> SlowCause | None:
    """Return the cause that copies to the device hold up training; None where they hardly do, or are unknown."""
    if not table.part_is_known("copy"):
        return None
    saving: Estimate = saving_without(table, {"copy": np.zeros_like(table.work["copy"])})
    if not is_worth_naming(saving, parts.mean_step_seconds):
        return None
    cost = part_cost(table, "copy")
    loader = parts.records[0].loader
    pinned = "unknown" if loader is None else str(loader.pin_memory)
    evidence = f"The device waits {seconds(cost.value)} a step for copies of the batch (pin_memory: {pinned})"
    change = "Set pin_memory=True and copy with non_blocking=True; convert images to floats on the device, not before"
    return SlowCause("copies", "waits for copies to the device", evidence, change, cost, saving, weight=saving.value)
