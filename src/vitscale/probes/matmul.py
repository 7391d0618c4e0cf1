"""How fast a rank computes: the matrix-multiply rate that its device really reaches in the trial's arithmetic; and a
fixed piece of training, repeated, which shows which rank is slow."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes.gpu_monitor import GpuMonitor
from vitscale.probes.steps import finish_device_work
from vitscale.store.checks import ComputeLine
from vitscale.store.records import MatmulLine
from vitscale.trial.trial import DeviceName, Precision

_SECONDS = 0.2
_SETTLING_SECONDS = {"cpu": 0.0, "cuda": 1.5}
"""Seconds until clocks settle: a GPU begins at boost clocks, and its power limit lowers them within a second."""
_LONG_ENOUGH_SECONDS = {"cpu": 5e-3, "cuda": 1e-3}
"""Least seconds of a product that starting it does not slow noticeably and that fills the device."""
_SMALLEST = 256
_LARGEST = {"cpu": 4096, "cuda": 8192}
"""Largest size: 0.2 GB on a host, where running out of memory ends the process, and 0.8 GB on a GPU."""
_FEWEST = 3

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-params": torch.bfloat16, "fp16": torch.float16}

Product = Callable[[int], float]
"""Multiplies two square matrices of n rows and returns the seconds it took; raises `torch.OutOfMemoryError`."""


def measured_matmul(device: torch.device, precision: Precision) -> MatmulLine | None:
    """The rate of square products on `device`, once its clocks have settled; None where not even the smallest fits.

    Called on all ranks at once: what ranks take from each other in training they take from each other here.
    """
    kind, products = device.type, _Products(device, _DTYPES[precision])
    settling = _SETTLING_SECONDS[kind]
    best = best_rate(products, _LARGEST[kind], _LONG_ENOUGH_SECONDS[kind], settling_seconds=settling)
    if best is None:
        return None
    size, flops_per_second = best
    return MatmulLine(dtype=arithmetic(device, precision), size=size, flops_per_second=flops_per_second)


def arithmetic(device: torch.device, precision: Precision) -> str:
    """The arithmetic in which matrices of `precision` are multiplied: bf16, fp16, fp32, or tf32 if allowed."""
    name = "bf16" if precision == "bf16-params" else precision
    # NVIDIA's libraries obey it whatever a program sets: "0" forbids TF32, another number demands it.
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    return "tf32" if device.type == "cuda" and name == "fp32" and products_in_tf32(override) else name


def best_rate(
    product: Product,
    largest: int,
    long_enough_seconds: float,
    *,
    settling_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float] | None:
    """(size, FLOP/s) of the fastest product; 2 n^3 FLOPs each (1 MAC = 2 FLOP). None where none fits in memory.

    The size doubles, up to `largest`, until one product takes `long_enough_seconds`. What is left of `_SECONDS`, but
    three products at least, goes into that size. A size's first product does not count: libraries choose their kernel
    then.
    """
    began = clock()
    size = _SMALLEST
    fits: int | None = None
    while True:
        try:
            product(size)
            took = min(product(size), product(size))  # either may have been disturbed by other processes
        except torch.OutOfMemoryError:
            break
        fits = size
        if took >= long_enough_seconds or 2 * size > largest:
            break
        size *= 2
    if fits is None:
        return None
    end = clock() + settling_seconds
    while clock() < end:
        product(fits)
    began += settling_seconds
    times: list[float] = []
    while len(times) < _FEWEST or clock() - began < _SECONDS:
        times.append(product(fits))
    # Settled clocks still vary, so the median is what lasts. On a processor other processes can only slow it down.
    return fits, 2 * fits**3 / (statistics.median(times) if settling_seconds else min(times))


class _Products:
    """Multiplies random matrices: on zeros a GPU is faster, because they take less power."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._matrices: tuple[torch.Tensor, ...] = ()

    def __call__(self, size: int) -> float:
        if not self._matrices or len(self._matrices[0]) != size:
            self._matrices = ()  # frees the smaller matrices first
            self._matrices = tuple(torch.randn(size, size, device=self._device, dtype=self._dtype) for _ in range(3))
        left, right, product = self._matrices
        return seconds_of(lambda: torch.mm(left, right, out=product), self._device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that a device takes for what `work` starts on it."""
    if device.type == "cuda":
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# (images, tokens, width, heads) of one transformer block: a piece takes milliseconds on either device.
_SHAPES: dict[DeviceName, tuple[int, int, int, int]] = {"cpu": (4, 65, 192, 3), "cuda": (64, 197, 768, 12)}


def compute_speed(device: torch.device, repeats: int, seconds: float, monitor: GpuMonitor) -> ComputeLine:
    """Measures forward and backward of one transformer block, for `repeats` x `seconds`. Called on all ranks at once.

    A repeat lasts much longer than the CPU controller's period (0.1 s): a rank with a quota computes at full speed at
    its beginning, and then not at all.
    """
    kind: DeviceName = "cuda" if device.type == "cuda" else "cpu"
    images, tokens, width, heads = _SHAPES[kind]
    block = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device=device
    )
    inputs = torch.randn(images, tokens, width, device=device)

    def piece() -> None:
        block(inputs).sum().backward()
        finish_device_work(device)

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


def forbid_tf32() -> None:
    """Makes torch multiply fp32 matrices, and convolve, in fp32, however a program has set it before.

    The present settings are touched only where a program's own still allow it: else libraries that ask for the earlier
    ones would be refused.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for backend in (torch.backends.cuda.matmul, *map(_of_cudnn, ("conv", "rnn"))):
        if getattr(backend, "fp32_precision", "none") == "tf32":
            backend.fp32_precision = "ieee"


def tf32_allowed(override: str | None) -> bool | None:
    """Whether matrix products or convolutions may use TF32; None where torch does not tell.

    Args:
        override: NVIDIA_TF32_OVERRIDE: "0" forbids it, any other number demands it, whatever a program sets.
    """
    cudnn = torch.backends.cudnn
    convolutions = _allowed(override, [_of_cudnn("conv"), cudnn], lambda: cudnn.allow_tf32)
    told = (products_in_tf32(override), convolutions)
    return True if True in told else None if None in told else False


def products_in_tf32(override: str | None) -> bool | None:
    """The same of matrix products alone."""
    matmul = torch.backends.cuda.matmul
    return _allowed(override, [matmul], lambda: matmul.allow_tf32)


def _of_cudnn(part: str) -> Any:
    return getattr(torch.backends.cudnn, part, None)


def _allowed(override: str | None, backends: Sequence[Any], earlier: Callable[[], bool]) -> bool | None:
    """Obeys `override`, else the first of these backends, or torch as a whole, that names a precision, else `earlier`.

    Once a program has used the present settings, torch's getters of the earlier ones may raise (torch 2.9 and later).
    """
    if override and override.strip():
        return override.strip() != "0"
    named = (getattr(backend, "fp32_precision", "none") for backend in (*backends, torch.backends))
    precision = next((name for name in named if name != "none"), None)
    if precision is not None:
        return str(precision) == "tf32"
    try:
        return earlier()
    except RuntimeError:
        return None
