"""Watches what a rank compiles before its second step and later runs reuse.

It is shown while it happens, and named in the record.

DeepSpeed loads an operator by `OpBuilder.jit_load`, which has torch compile what its folder of extensions lacks
(`torch.utils.cpp_extension.load`): minutes the first time, tenths of a second ever after. A new or changed library in
that folder tells which it was, also to a rank that only waited for another one's compiler. Most are loaded while an
engine is built; those of quantized gradients at their first exchange.

`torch.compile` compiles blocks in the first step. Inductor keeps them on disk, and counts what it did not find there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitscale.processes.heartbeat import COMPILING, PROGRESS

BLOCKS = "blocks (torch.compile)"
_BUILDER = "deepspeed.ops.op_builder.builder"


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yields a list, and fills it with names of what is compiled meanwhile, for extensions also by another rank.

    It looks at DeepSpeed and torch's compiler only where they are loaded already, and imports nothing itself.
    """
    compiled: list[str] = []
    with _extensions(compiled), _blocks(compiled):
        yield compiled


@contextmanager
def _extensions(compiled: list[str]) -> Iterator[None]:
    """Meanwhile adds names of DeepSpeed's operators that are compiled to `compiled`, and shows them while they load."""
    builder = getattr(sys.modules.get(_BUILDER), "OpBuilder", None)
    original = getattr(builder, "jit_load", None)
    if builder is None or original is None:
        yield
        return

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        libraries_before = _libraries(self.name)
        phase = PROGRESS.phase
        PROGRESS.phase = f"loading {self.name}" if libraries_before else f"{COMPILING}{self.name}, once for all runs"
        try:
            return original(self, *args, **kwargs)
        finally:
            PROGRESS.phase = phase
            if _libraries(self.name) != libraries_before:
                compiled.append(self.name)

    builder.jit_load = jit_load
    try:
        yield
    finally:
        builder.jit_load = original


@contextmanager
def _blocks(compiled: list[str]) -> Iterator[None]:
    """Meanwhile shows when torch compiles blocks, and adds `BLOCKS` to `compiled` if any was not on disk."""
    dynamo = sys.modules.get("torch._dynamo")
    handler = getattr(getattr(dynamo, "callback", None), "callback_handler", None)
    counters = getattr(getattr(dynamo, "utils", None), "counters", None)
    if handler is None or counters is None:
        yield
        return
    phase = PROGRESS.phase

    def begins(_: Any) -> None:
        nonlocal phase
        phase = PROGRESS.phase
        PROGRESS.phase = COMPILING + BLOCKS

    def ends(_: Any) -> None:
        PROGRESS.phase = phase

    misses_before = counters["inductor"]["fxgraph_cache_miss"]
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        yield
    finally:
        with suppress(ValueError):  # the compiler was reset meanwhile
            handler.remove_start_callback(begins)
            handler.remove_end_callback(ends)
        if counters["inductor"]["fxgraph_cache_miss"] > misses_before:
            compiled.append(BLOCKS)


def _libraries(name: str) -> dict[str, int]:
    """Returns the libraries in an extension's folder: file name -> time in ns at which it was written."""
    # As `jit_load` does next. The function is torch's own for `load`; a version without it shows no change.
    from torch.utils import cpp_extension

    folder = getattr(cpp_extension, "_get_build_directory", None)
    if folder is None:
        return {}
    written_ns: dict[str, int] = {}
    for path in Path(folder(name, verbose=False)).glob("*.so"):
        try:
            written_ns[path.name] = path.stat().st_mtime_ns
        except OSError:
            continue  # another rank's linker has just removed it
    return written_ns
