"""Measures how fast a rank computes: the matrix-multiply rate that its device really reaches in the trial's arithmetic,
and the rate of a fixed piece of training, which shows which rank is slow."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes.gpu_monitor import GpuMonitor
from vitscale.probes.steps import finish_device_work
from vitscale.store.checks import ComputeLine
from vitscale.store.records import MatmulLine
from vitscale.trial.trial import DeviceName, Precision

_SECONDS = 0.2
"""Seconds of a measurement, without those until clocks settle."""
_SETTLING_SECONDS = {"cpu": 0.0, "cuda": 1.5}
"""Seconds until clocks settle: a GPU begins at boost clocks, and its power limit lowers them within a second."""
_LONG_ENOUGH_SECONDS = {"cpu": 5e-3, "cuda": 1e-3}
"""Least seconds of a product that starting it does not slow noticeably and that fills the device."""
_SMALLEST_SIZE = 256
"""Rows of the first matrices that are tried."""
_LARGEST_SIZE = {"cpu": 4096, "cuda": 8192}
"""Largest size: 0.2 GB on a host, where running out of memory ends the process, and 0.8 GB on a GPU."""
_FEWEST_PRODUCTS = 3

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-params": torch.bfloat16, "fp16": torch.float16}

Product = Callable[[int], float]
"""Multiplies two square matrices of n rows and returns the seconds it took; raises `torch.OutOfMemoryError`."""


def measured_matmul(device: torch.device, precision: Precision) -> MatmulLine | None:
    """Measures the rate of square products on `device`, once its clocks have settled.

    All ranks call it at once, so that they share memory bandwidth and power here as they do in training. Returns None
    where not even the smallest matrices fit in the device's memory.
    """
    kind = device.type
    products = _Products(device, _DTYPES[precision])
    rate = best_rate(
        products, _LARGEST_SIZE[kind], _LONG_ENOUGH_SECONDS[kind], settling_seconds=_SETTLING_SECONDS[kind]
    )
    if rate is None:
        return None
    return MatmulLine(dtype=arithmetic(device, precision), size=rate.size, flops_per_second=rate.flops_per_second)


def arithmetic(device: torch.device, precision: Precision) -> str:
    """Returns the arithmetic in which matrices of `precision` are multiplied: bf16, fp16, fp32, or tf32 if allowed."""
    name = "bf16" if precision == "bf16-params" else precision
    if device.type != "cuda" or name != "fp32":
        return name
    # NVIDIA's libraries obey it whatever a program sets: "0" forbids TF32, another number demands it.
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    return "tf32" if products_in_tf32(override) else "fp32"


class MatmulRate(NamedTuple):
    """The rate of square products of one size."""

    size: int
    """Rows of each matrix."""
    flops_per_second: float


def best_rate(
    product: Product,
    largest: int,
    long_enough_seconds: float,
    *,
    settling_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulRate | None:
    """Returns the rate of square products: 2 n^3 FLOPs each (1 MAC = 2 FLOP). None where not even the smallest fits.

    The size doubles, up to `largest`, until one product takes `long_enough_seconds`. That size is measured for what is
    left of `_SECONDS`, by three products at least.

    Args:
        product: multiplies two matrices of a size.
        largest: the largest size to try.
        long_enough_seconds: seconds of a product that is large enough.
        settling_seconds: time to compute before the rate is measured, until clocks have settled.
        clock: returns the time in seconds.
    """
    began = clock()
    size = _large_enough_size(product, largest, long_enough_seconds)
    if size is None:
        return None
    settled_at = clock() + settling_seconds
    while clock() < settled_at:
        product(size)
    began_without_settling = began + settling_seconds
    product_seconds: list[float] = []
    while len(product_seconds) < _FEWEST_PRODUCTS or clock() - began_without_settling < _SECONDS:
        product_seconds.append(product(size))
    # Settled clocks still vary: a GPU keeps up its median. A processor's best counts, since others only slow it down.
    seconds = statistics.median(product_seconds) if settling_seconds else min(product_seconds)
    return MatmulRate(size, flops_per_second=2 * size**3 / seconds)


def _large_enough_size(product: Product, largest: int, long_enough_seconds: float) -> int | None:
    """Doubles the size, up to `largest`, until one product takes long enough; returns the last that fits in memory.

    A size's first product does not count: libraries choose their kernel then.
    """
    size = _SMALLEST_SIZE
    fitting: int | None = None
    while fitting is None or size <= largest:
        try:
            product(size)
            seconds = min(product(size), product(size))  # either may have been disturbed by other processes
        except torch.OutOfMemoryError:
            return fitting
        fitting = size
        if seconds >= long_enough_seconds:
            return fitting
        size *= 2
    return fitting


class _Products:
    """Multiplies random matrices: on zeros a GPU is faster, because they take less power."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._matrices: tuple[torch.Tensor, ...] = ()

    def __call__(self, size: int) -> float:
        if not self._matrices or len(self._matrices[0]) != size:
            self._matrices = ()  # frees the smaller matrices first
            self._matrices = tuple(torch.randn(size, size, device=self._device, dtype=self._dtype) for _ in range(3))
        left, right, product = self._matrices
        return seconds_of(lambda: torch.mm(left, right, out=product), self._device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Calls `work`, and returns the seconds that the device takes for what `work` starts on it."""
    if device.type == "cuda":
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class _BlockShape(NamedTuple):
    """A transformer block, and the size of its input."""

    images: int
    tokens: int
    width: int
    heads: int


# A piece takes milliseconds on either device.
_SHAPES: dict[DeviceName, _BlockShape] = {
    "cpu": _BlockShape(images=4, tokens=65, width=192, heads=3),
    "cuda": _BlockShape(images=64, tokens=197, width=768, heads=12),
}


def compute_speed(device: torch.device, repeats: int, seconds: float, monitor: GpuMonitor) -> ComputeLine:
    """Measures the rate of a fixed piece of training: forward and backward of one transformer block.

    All ranks call it at once.

    Args:
        device: what it is computed on.
        repeats: number of rates to measure.
        seconds: seconds of each. They should be many periods of the CPU controller (0.1 s): in each period a rank with
            a quota computes at full speed first, and then not at all.
        monitor: samples the GPU meanwhile.
    """
    shape = _SHAPES["cuda" if device.type == "cuda" else "cpu"]
    block = nn.TransformerEncoderLayer(
        shape.width,
        shape.heads,
        dim_feedforward=4 * shape.width,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        device=device,
    )
    inputs = torch.randn(shape.images, shape.tokens, shape.width, device=device)

    def train_piece() -> None:
        block(inputs).sum().backward()
        finish_device_work(device)

    for _ in range(3):  # to warm up
        train_piece()
    monitor.begin()
    throttled_before = cpu_throttled_seconds()
    began = time.perf_counter()
    cpu_began = time.process_time()
    rates = tuple(_pieces_per_second(train_piece, seconds) for _ in range(repeats))
    wall_seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - cpu_began
    throttled_after = cpu_throttled_seconds()
    throttled_share: float | None = None
    if throttled_before is not None and throttled_after is not None:
        throttled_share = max(0.0, throttled_after - throttled_before) / wall_seconds
    return ComputeLine(
        work=(
            f"forward and backward of a block of width {shape.width}, {shape.tokens} tokens, {shape.images} images, "
            "fp32"
        ),
        pieces_per_second=rates,
        cpu_throttled_share=throttled_share,
        cpu_share=cpu_seconds / wall_seconds,
        gpu=monitor.end(),
        gpu_reason=monitor.reason,
    )


def _pieces_per_second(train_piece: Callable[[], None], least_seconds: float) -> float:
    """Trains pieces one after the other for at least `least_seconds`, and returns how many a second."""
    began = time.perf_counter()
    ended = began
    pieces = 0
    while ended - began < least_seconds:
        train_piece()
        pieces += 1
        ended = time.perf_counter()
    return pieces / (ended - began)


def forbid_tf32() -> None:
    """Makes torch multiply fp32 matrices, and convolve, in fp32, however a program has set it before.

    The present settings are touched only where a program's own still allow it: else libraries that ask for the earlier
    ones would be refused.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for backend in (torch.backends.cuda.matmul, _cudnn_backend("conv"), _cudnn_backend("rnn")):
        if getattr(backend, "fp32_precision", "none") == "tf32":
            backend.fp32_precision = "ieee"


def tf32_allowed(override: str | None) -> bool | None:
    """Whether matrix products or convolutions may use TF32; None where torch does not say.

    Args:
        override: NVIDIA_TF32_OVERRIDE: "0" forbids it, any other number demands it, whatever a program sets.
    """
    cudnn = torch.backends.cudnn
    in_convolutions = _is_tf32_allowed(override, [_cudnn_backend("conv"), cudnn], lambda: cudnn.allow_tf32)
    are_allowed = (products_in_tf32(override), in_convolutions)
    if True in are_allowed:
        return True
    return None if None in are_allowed else False


def products_in_tf32(override: str | None) -> bool | None:
    """Whether matrix products may use TF32; see `tf32_allowed`."""
    matmul = torch.backends.cuda.matmul
    return _is_tf32_allowed(override, [matmul], lambda: matmul.allow_tf32)


def _cudnn_backend(part: str) -> Any:
    """Returns cuDNN's settings of "conv" or "rnn"; None where this torch has no settings of its own for it."""
    return getattr(torch.backends.cudnn, part, None)


def _is_tf32_allowed(override: str | None, backends: Sequence[Any], earlier_setting: Callable[[], bool]) -> bool | None:
    """Returns whether TF32 is allowed, by the first of these that says so; None where none does.

    Once a program has used the present settings, torch's getters of the earlier ones may raise (torch 2.9 and later).

    Args:
        override: NVIDIA_TF32_OVERRIDE.
        backends: the settings that may name a precision, before those of torch as a whole.
        earlier_setting: reads torch's earlier setting.
    """
    if override and override.strip():
        return override.strip() != "0"
    for backend in (*backends, torch.backends):
        precision = getattr(backend, "fp32_precision", "none")
        if precision != "none":
            return str(precision) == "tf32"
    try:
        return earlier_setting()
    except RuntimeError:
        return None
