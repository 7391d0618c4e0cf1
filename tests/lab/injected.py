"""A rank with a fault of known size put into it, started in place of `python -m vitscale.worker` with its argument.

INJECTED is a JSON object:
  loader_seconds    every batch takes so much longer to read
  loader_period     with it only the batches of every other so many steps do
  forward_seconds   the model computes so much longer in every training forward
  image_seconds     it computes so much longer for each image; one number for each rank
  stage_seconds     every stage sleeps so long in a micro-batch's forward, and twice as long in its backward
  norm_bytes        every exchange of a synchronised norm is so much larger
  rank              on this rank alone; on all of them without it
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitscale.worker import __main__ as worker


def inject(fault: dict[str, Any]) -> None:
    """Puts the fault in."""
    if fault.get("rank", int(os.environ.get("RANK", "0"))) != int(os.environ.get("RANK", "0")):
        return
    if fault.get("loader_seconds"):
        _delay_the_loader(fault["loader_seconds"], fault.get("loader_period"))
    if fault.get("forward_seconds"):
        _compute_longer(lambda images: fault["forward_seconds"])
    if fault.get("image_seconds"):
        own = fault["image_seconds"][int(os.environ.get("RANK", "0"))]
        _compute_longer(lambda images: images * own)
    if fault.get("stage_seconds"):
        _sleep_in_stages(fault["stage_seconds"])
    if fault.get("norm_bytes"):
        _exchange_more(fault["norm_bytes"])


def _sleep_in_stages(seconds: float) -> None:
    from torch.distributed.pipelining import PipelineStage

    def slowed(name: str, longer: float) -> None:
        compute = getattr(PipelineStage, name)

        def sleeping(*arguments: Any, **named: Any) -> Any:
            time.sleep(longer)
            return compute(*arguments, **named)

        setattr(PipelineStage, name, sleeping)

    slowed("forward_one_chunk", seconds)
    slowed("backward_one_chunk", 2 * seconds)


def _exchange_more(more_bytes: int) -> None:
    import torch

    from vitscale.models import batch_norm

    exchange = batch_norm._exchange

    def larger(sums: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> None:
        own = sums.flatten()
        both = torch.cat([own, own.new_zeros(more_bytes // own.element_size())])
        exchange(both, group)
        own.copy_(both[: len(own)])

    batch_norm._exchange = larger


def _delay_the_loader(seconds: float, period: int | None) -> None:
    from vitscale.datasets.batches import Batches

    read = Batches._read

    def slow(self: Batches, step: int, micro_step: int) -> Any:
        began = time.monotonic()
        if period is None or step // period % 2:
            time.sleep(seconds)
        batch = read(self, step, micro_step)
        with (Path(sys.argv[1]) / "loading-seconds.txt").open("a") as file:
            file.write(f"{time.monotonic() - began}\n")
        return batch

    Batches._read = slow  # type: ignore[method-assign]  # the fault


def _compute_longer(seconds_of: Callable[[int], float]) -> None:
    """`seconds_of`: images of a micro-batch to seconds."""
    import torch
    from torch import nn

    from vitscale import models

    build = models.build

    def slowed(spec: Any) -> nn.Module:
        model = build(spec)
        matrix = torch.randn(192, 192)

        def compute(module: nn.Module, arguments: Any) -> None:
            end = time.perf_counter() + seconds_of(len(arguments[0]))
            while module.training and time.perf_counter() < end:
                torch.mm(matrix, matrix)

        model.register_forward_pre_hook(compute)
        return model

    models.build = slowed


if __name__ == "__main__":
    inject(json.loads(os.environ.get("INJECTED", "{}")))
    worker.main(Path(sys.argv[1]))
