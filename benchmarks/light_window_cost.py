"""What a light step's measurement costs: microseconds per step, and their share of a real step, with an upper bound.

    python benchmarks/light_window_cost.py [--pairs 30] [--steps 400]

The training loop runs over an engine that computes nothing, once as it is and once with its recorder taken out, which
drives the clock, the record and the idle explainer; pairs alternate, so that drift falls on both. Their difference is
the measurement, the writing thread included. It is set against the median step of a small model at a small batch, which
is a short step. Exit code 1 where the upper bound exceeds 0.5 % of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vitscale import models, sources
from vitscale.engines.base import Engine
from vitscale.engines.plain.wrap import PlainEngine
from vitscale.store import RankLog
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.recorder import EpochMeasures
from vitscale.worker.training import Training

LIMIT_SHARE = 0.005
PLACE = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
CPU = torch.device("cpu")


class Idle(Engine):
    """Computes nothing."""

    gradient_dtype = None

    def __init__(self) -> None:
        self._loss = torch.zeros(())

    @staticmethod
    def preload(device_type: str) -> None: ...

    def micro_step(self, images: Any, loss_of: Any, *, last: bool, phase: Any = None) -> torch.Tensor:
        return self._loss

    def step(self) -> None: ...

    def set_learning_rate(self, learning_rate: float) -> None: ...

    def evaluate(self, images: Any) -> torch.Tensor:
        return self._loss

    @property
    def module(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Unrecorded:
    """Stands for the recorder: it counts steps, and records nothing."""

    window = "light"
    has_profile = False
    backend = None
    resources = SimpleNamespace(peak_bytes=lambda _: None)
    begin_epoch = begin_step = close = staticmethod(lambda *_: None)
    end_epoch = staticmethod(lambda: EpochMeasures(wall_seconds=0.0, resources=None))  # type: ignore[arg-type]  # unread

    def __init__(self) -> None:
        self.step = 0

    def end_step(self, _images: int, _loss: torch.Tensor) -> None:
        self.step += 1

    def phase(self, _name: str) -> AbstractContextManager[None]:
        return _NULL


class Taken:
    """Stands for the preprocessing: images as they are stored. They are the same work in both, and dwarf what is
    looked for."""

    def prepare(self, images: torch.Tensor, labels: torch.Tensor, _ids: torch.Tensor, **_: Any) -> tuple[Any, Any]:
        return lambda: images, labels


_NULL = nullcontext()


def trial(steps: int) -> Trial:
    """A small model at a small batch on one rank."""
    model = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8), 10)
    return Trial(
        model=model,
        data=DataSpec(name="digits", augment=False),
        train=TrainSpec(engine="none", precision="fp32", device="cpu", micro_batch=8),
        world=World(ranks_per_node=1, threads_per_rank=1),
        window=WindowSpec(steps=steps, warmup_steps=0, evaluate=False, explain=False),
        launcher="local",
    )


def seconds_per_step(steps: int, measured: bool) -> float:
    """The loop over the idle engine."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = trial(steps)
        log = RankLog(Path(folder), 0)
        training = Training(wanted, PLACE, sources.load(wanted.data), Idle(), CPU, log, 0)
        if not measured:
            training.recorder.close()
            training.recorder = Unrecorded()  # type: ignore[assignment]  # stands for it
            training.log = SimpleNamespace(write=lambda _: None)  # type: ignore[assignment]  # stands for it
        training.passes.preprocess = Taken()  # type: ignore[assignment]  # stands for it
        began = time.perf_counter()
        training.run()
        log.close()  # what the writing thread has still to do belongs to the measurement
        return (time.perf_counter() - began) / steps


def real_step_seconds() -> float:
    """The median step of the real model."""
    wanted = trial(40)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        log = RankLog(Path(folder), 0)
        engine = PlainEngine(models.build(wanted.model), wanted, CPU)
        Training(wanted, PLACE, sources.load(wanted.data), engine, CPU, log, 0).run()
        log.close()
        lines = [json.loads(line) for line in (Path(folder) / "rank-0.jsonl").read_text().splitlines()]
    return statistics.median(line["seconds"] for line in lines if line["kind"] == "step" and line["step"] >= 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    step = real_step_seconds()
    seconds_per_step(options.steps, measured=True)
    differences = []
    for pair in range(options.pairs):
        order = (True, False) if pair % 2 else (False, True)
        found = {measured: seconds_per_step(options.steps, measured) for measured in order}
        differences.append(found[True] - found[False])
    cost = statistics.fmean(differences)
    # One-sided 97.5 %: t is below 2.1 from 20 pairs on.
    upper = cost + 2.1 * statistics.stdev(differences) / len(differences) ** 0.5
    print(f"on {platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    print(f"measurement: {cost * 1e6:.1f} us a step, at most {upper * 1e6:.1f} us ({options.pairs} pairs)")
    print(f"a real step: {step * 1e3:.1f} ms (vit-ti16 at 32 pixels, micro-batch 8)")
    print(f"share: {cost / step:.3%}, at most {upper / step:.3%}; limit {LIMIT_SHARE:.1%}")
    return 0 if upper / step <= LIMIT_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
