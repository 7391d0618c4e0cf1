"""Simulated ranks of a job as the hook records them: all wait for the slowest one, and truths are planted.

a rank's step   data + other + forward + own backward, then it waits until all ranks have come so far, then the
                transfer, then the optimizer
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitscale.explanation.rank_record import HookedRank
from vitscale.hook import lines

Seconds = Callable[[int, int], float]
"""(rank, step) -> seconds, before noise."""
HOST = "node-a"


def always(seconds: float) -> Seconds:
    return lambda rank, step: seconds


@dataclass(frozen=True)
class SimulatedJob:
    """A job, by default of two healthy ranks: 100 ms a step, of which 3 ms are transfer and 2 ms data wait."""

    ranks: int = 2
    steps: int = 40
    spread: float = 0.05
    """Standard deviation of the logarithm of each part of each step."""
    seed: int = 0
    data: Seconds = lambda rank, step: 0.002
    forward: Seconds = lambda rank, step: 0.030
    backward: Seconds = lambda rank, step: 0.060
    """The rank's own."""
    optimizer: Seconds = lambda rank, step: 0.004
    other: Seconds = lambda rank, step: 0.001
    transfer: Seconds = lambda rank, step: 0.003
    planted: Mapping[str, Seconds] = field(default_factory=dict)
    """Part -> seconds that are added to it without noise, as by a sleep."""
    images: Callable[[int, int], int | None] = lambda rank, step: 32
    breaks: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Number of a step -> rank -> seconds of the break after it."""
    break_kind: str = "evaluation"
    start_up_factor: float = 5.0
    """How many times as long as usual the first step is."""
    knows_own_backward: bool = True
    rank_fields: Mapping[str, Any] = field(default_factory=dict)
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    loader_fields: Mapping[str, Any] = field(default_factory=dict)
    optimizer_fields: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[int, Sequence[lines.HookedSamplesLine]] = field(default_factory=dict)

    def records(self) -> list[HookedRank]:
        """What the ranks record."""
        noise = random.Random(self.seed)
        ready = [0.0] * self.ranks
        steps: list[list[lines.HookedStepLine]] = [[] for _ in range(self.ranks)]
        breaks: list[list[lines.HookedBreakLine]] = [[] for _ in range(self.ranks)]
        for step in range(1, self.steps + 1):
            works = [self._work(rank, step, noise) for rank in range(self.ranks)]
            arrivals = [
                begin + sum(work.values()) - work["optimizer"] for begin, work in zip(ready, works, strict=True)
            ]
            transfer = self._noisy(self.transfer(0, step), noise) if self.ranks > 1 else 0.0
            if "transfer" in self.planted:
                transfer += self.planted["transfer"](0, step)
            for rank, work in enumerate(works):
                exchange = max(arrivals) - arrivals[rank] + transfer
                line = self._line(rank, step, ready[rank], work, exchange)
                steps[rank].append(line)
                ready[rank] += line.seconds
                pause = self.breaks.get(step, {}).get(rank)
                if pause is not None:
                    breaks[rank].append(lines.HookedBreakLine(step, int(1e9 * ready[rank]), pause, self.break_kind))
                    ready[rank] += pause
        return [self._record(rank, steps[rank], breaks[rank]) for rank in range(self.ranks)]

    def _noisy(self, seconds: float, noise: random.Random) -> float:
        return seconds * noise.lognormvariate(-(self.spread**2) / 2, self.spread)

    def _work(self, rank: int, step: int, noise: random.Random) -> dict[str, float]:
        factor = self.start_up_factor if step == 1 else 1.0
        parts = {
            "data": self.data,
            "other": self.other,
            "forward": self.forward,
            "backward": self.backward,
            "optimizer": self.optimizer,
        }
        work = {name: factor * self._noisy(seconds(rank, step), noise) for name, seconds in parts.items()}
        for name, planted in self.planted.items():
            if name in work:
                work[name] += planted(rank, step)
        return work

    def _line(
        self, rank: int, step: int, began: float, work: Mapping[str, float], exchange: float
    ) -> lines.HookedStepLine:
        is_known = self.knows_own_backward and self.ranks > 1
        return lines.HookedStepLine(
            number=step,
            began_ns=int(1e9 * began),
            seconds=sum(work.values()) + exchange,
            images=self.images(rank, step),
            micro_steps=1,
            data_seconds=work["data"],
            copy_seconds=None,
            forward_seconds=work["forward"],
            backward_seconds=work["backward"] + exchange,
            own_backward_seconds=work["backward"] if is_known else None,
            first_bucket_seconds=None,
            optimizer_seconds=work["optimizer"],
            other_seconds=work["other"],
        )

    def _record(
        self, rank: int, steps: Sequence[lines.HookedStepLine], breaks: Sequence[lines.HookedBreakLine]
    ) -> HookedRank:
        strategy = "DDP" if self.ranks > 1 else "none"
        rank_fields: dict[str, Any] = {
            "rank": rank, "world_size": self.ranks, "local_rank": rank, "local_world_size": self.ranks, "host": HOST,
            "pid": 100 + rank, "program": "train.py", "python": "3.12.3", "torch": "2.13.0", "device": "cpu",
            "threads": 2, "cpus": 2 * self.ranks, "wall_ns": 0, "monotonic_ns": 0,
        }  # fmt: skip
        model_fields: dict[str, Any] = {
            "class_name": "ViT", "parameters": 86_000_000, "trainable_parameters": 86_000_000, "strategy": strategy,
            "dtype": "float32", "compiled": False, "autocast": "none",
            "bucket_cap_mb": 25.0 if self.ranks > 1 else None,
        }  # fmt: skip
        loader_fields: dict[str, Any] = {
            "workers": 0, "batch_size": 32, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False,
            "dataset": "Pictures", "sampler": None,
        }  # fmt: skip
        optimizer_fields: dict[str, Any] = {"class_name": "AdamW", "groups": 1, "fused": None, "foreach": None}
        return HookedRank(
            rank=lines.HookedRankLine(**{**rank_fields, **self.rank_fields}),
            model=lines.HookedModelLine(**{**model_fields, **self.model_fields}),
            loader=lines.HookedLoaderLine(**{**loader_fields, **self.loader_fields}),
            optimizer=lines.HookedOptimizerLine(**{**optimizer_fields, **self.optimizer_fields}),
            steps=steps,
            breaks=breaks,
            samples=tuple(self.samples.get(rank, ())),
        )


def samples(part: str, rows: Sequence[tuple[str, int, str, int]], of_all: int) -> lines.HookedSamplesLine:
    """Samples of a part: rows of (file, line, function, count)."""
    return lines.HookedSamplesLine(part, [lines.SampleRow(*row, of_all=of_all) for row in rows])
