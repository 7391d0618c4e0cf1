"""How fast a rank computes a fixed piece of training, again and again: what tells a slow rank from the others."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes.gpu_monitor import GpuMonitor
from vitscale.store.check_records import ComputeLine
from vitscale.trial.trial import Device

# (images, tokens, width, heads) of one transformer block, so that a piece takes milliseconds on either device.
_SHAPES: dict[Device, tuple[int, int, int, int]] = {"cpu": (4, 65, 192, 3), "cuda": (64, 197, 768, 12)}


def compute_speed(device: torch.device, repeats: int, seconds: float, monitor: GpuMonitor) -> ComputeLine:
    """Forward and backward of one transformer block, for `repeats` x `seconds`. Called on all ranks at once.

    A repeat lasts much longer than the CPU controller's period (0.1 s): a rank with a quota computes at full speed at
    its beginning, and then not at all.
    """
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    images, tokens, width, heads = _SHAPES[kind]
    block = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device=device
    )
    inputs = torch.randn(images, tokens, width, device=device)

    def piece() -> None:
        block(inputs).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        piece()
    monitor.begin()
    throttled = cpu_throttled_seconds()
    began, worked = time.perf_counter(), time.process_time()
    rates = tuple(_rate(piece, seconds) for _ in range(repeats))
    lasted, worked = time.perf_counter() - began, time.process_time() - worked
    after = cpu_throttled_seconds()
    return ComputeLine(
        work=f"forward and backward of a block of width {width}, {tokens} tokens, {images} images, fp32",
        pieces_per_second=rates,
        cpu_throttled_share=None if throttled is None or after is None else max(0.0, after - throttled) / lasted,
        cpu_share=worked / lasted,
        gpu=monitor.end(),
        gpu_reason=monitor.reason,
    )


def _rate(piece: Callable[[], None], seconds: float) -> float:
    began = now = time.perf_counter()
    done = 0
    while now - began < seconds:
        piece()
        done += 1
        now = time.perf_counter()
    return done / (now - began)
