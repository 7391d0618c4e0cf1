"""Peak memory of a rank's tensors, in exact bytes: as torch's allocators count them, not as pages become resident."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override


class TensorMemory(ABC):
    """The bytes that tensors take on one device, above what they took when this was made.

    Make it before the model. What the libraries themselves keep is not seen: a CUDA context, NCCL's and gloo's own
    buffers, oneDNN's scratch memory, Python.
    """

    peak_bytes: int = 0
    """The highest of the last `watch`."""

    @abstractmethod
    def watch(self) -> Any:
        """A context; after it `peak_bytes` is the highest moment inside it."""


class CpuTensorMemory(TensorMemory):
    """By the running total of torch's CPU allocator, read at every allocation and release of the calling thread.

    The profiler alone loses what other threads release, and gloo's do: its totals then grow with every step. With
    libc10's own flag for it the allocator counts for all threads. A peak that another thread reaches and leaves
    between two events of the calling thread is not seen.
    """

    def __init__(self) -> None:
        _count_in_all_threads()
        self._base_bytes = 0
        with self.watch():
            pass
        self._base_bytes = self.peak_bytes

    @override
    @contextmanager
    def watch(self) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as finished:
            mark = torch.empty(1, dtype=torch.uint8)  # so that there is an event even where nothing is allocated
            yield
            del mark
        results: Any = finished.profiler
        totals = _totals(results.kineto_results.experimental_event_tree())
        self.peak_bytes = max(totals) - self._base_bytes


class CudaTensorMemory(TensorMemory):
    """By the counters of torch's caching allocator: blocks in use, each a multiple of 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._base_bytes = torch.cuda.memory_allocated(device)

    @override
    @contextmanager
    def watch(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        torch.cuda.synchronize(self._device)
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._base_bytes


def tensor_memory(device: torch.device) -> TensorMemory:
    """The meter of a device."""
    return CudaTensorMemory(device) if device.type == "cuda" else CpuTensorMemory()


def _totals(events: Any) -> list[int]:
    """The allocator's total after each of its events, in no order; the first `watch` sees at least its own mark."""
    totals = []
    pending = list(events)
    while pending:
        event = pending.pop()
        if event.tag == _EventType.Allocation:
            # Before a release the total was higher by what is released.
            totals.append(event.extra_fields.total_allocated + max(0, -event.extra_fields.alloc_size))
        pending.extend(event.children)
    return totals


def _count_in_all_threads() -> None:
    """Sets libc10's flag `caffe2_report_cpu_memory_usage` (c10/core/CPUAllocator.cpp), which no function sets."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError) as error:
        raise RuntimeError(f"torch {torch.__version__} cannot count its CPU memory in all threads: {error}") from error
    flag.value = True
