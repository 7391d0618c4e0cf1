"""Watches what a rank compiles before its second step and later runs reuse.

It is shown while it happens, and named in the record.

DeepSpeed loads an operator by `OpBuilder.jit_load`, which has torch compile what its folder of extensions lacks
(`torch.utils.cpp_extension.load`): minutes the first time, tenths of a second ever after. A new or changed library in
that folder shows which it was, also to a rank that only waited for another one's compiler. Most are loaded while an
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
    """Yields a list, to which names are added of what is compiled in the block: of extensions also by another rank.

    DeepSpeed and torch's compiler are watched only where they are loaded already: this imports nothing.
    """
    compiled: list[str] = []
    with _watched_extensions(compiled), _watched_blocks(compiled):
        yield compiled


@contextmanager
def _watched_extensions(compiled: list[str]) -> Iterator[None]:
    """For the length of a block, adds names of DeepSpeed's operators that are compiled to `compiled`.

    While one loads, the rank's progress shows it.
    """
    builder = getattr(sys.modules.get(_BUILDER), "OpBuilder", None)
    original = getattr(builder, "jit_load", None)
    if builder is None or original is None:
        yield
        return

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        libraries_before = _libraries_on_disk(self.name)
        phase = PROGRESS.phase
        PROGRESS.phase = f"loading {self.name}" if libraries_before else f"{COMPILING}{self.name}, once for all runs"
        try:
            return original(self, *args, **kwargs)
        finally:
            PROGRESS.phase = phase
            if _libraries_on_disk(self.name) != libraries_before:
                compiled.append(self.name)

    builder.jit_load = jit_load
    try:
        yield
    finally:
        builder.jit_load = original


@contextmanager
def _watched_blocks(compiled: list[str]) -> Iterator[None]:
    """For the length of a block, lets the rank's progress show when torch compiles; then adds `BLOCKS` to `compiled`
    if inductor did not find all that it needed on disk."""
    dynamo = sys.modules.get("torch._dynamo")
    handler = getattr(getattr(dynamo, "callback", None), "callback_handler", None)
    counters = getattr(getattr(dynamo, "utils", None), "counters", None)
    if handler is None or counters is None:
        yield
        return
    phase_before = PROGRESS.phase

    def note_begin(_: Any) -> None:
        nonlocal phase_before
        phase_before = PROGRESS.phase
        PROGRESS.phase = COMPILING + BLOCKS

    def note_end(_: Any) -> None:
        PROGRESS.phase = phase_before

    misses_before = counters["inductor"]["fxgraph_cache_miss"]
    handler.register_start_callback(note_begin)
    handler.register_end_callback(note_end)
    try:
        yield
    finally:
        with suppress(ValueError):  # the compiler was reset meanwhile
            handler.remove_start_callback(note_begin)
            handler.remove_end_callback(note_end)
        if counters["inductor"]["fxgraph_cache_miss"] > misses_before:
            compiled.append(BLOCKS)


def _libraries_on_disk(name: str) -> dict[str, int]:
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
