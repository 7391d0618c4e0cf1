"""Extensions that DeepSpeed compiles while an engine is built: told while it happens, and named in the record.

DeepSpeed loads an operator by `OpBuilder.jit_load`, which has torch compile what its folder of extensions lacks
(`torch.utils.cpp_extension.load`): minutes the first time, tenths of a second ever after. A new or changed library in
that folder tells which it was, also to a rank that only waited for another one's compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitscale.lifeline import COMPILING, PROGRESS

_BUILDER = "deepspeed.ops.op_builder.builder"


@contextmanager
def watched() -> Iterator[list[str]]:
    """Fills the list it gives with the names of extensions that are compiled inside, by this rank or another one.

    It looks at DeepSpeed only where that is loaded already, and imports nothing itself.
    """
    compiled: list[str] = []
    builder = getattr(sys.modules.get(_BUILDER), "OpBuilder", None)
    original = getattr(builder, "jit_load", None)
    if builder is None or original is None:
        yield compiled
        return

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, phase = _libraries(self.name), PROGRESS.phase
        PROGRESS.phase = f"{'loading ' if before else COMPILING}{self.name}"
        try:
            return original(self, *args, **kwargs)
        finally:
            PROGRESS.phase = phase
            if _libraries(self.name) != before:
                compiled.append(self.name)

    builder.jit_load = jit_load
    try:
        yield compiled
    finally:
        builder.jit_load = original


def _libraries(name: str) -> dict[str, int]:
    """The libraries in an extension's folder, with the times at which they were written."""
    # As `jit_load` does next. The function is torch's own for `load`; where a version lacks it nothing is told apart.
    from torch.utils import cpp_extension

    folder = getattr(cpp_extension, "_get_build_directory", None)
    if folder is None:
        return {}
    found: dict[str, int] = {}
    for path in Path(folder(name, verbose=False)).glob("*.so"):
        try:
            found[path.name] = path.stat().st_mtime_ns
        except OSError:
            continue  # another rank's linker has just taken it away
    return found
