"""Finds the line of the user's program that reads a tensor's value, for which the host waits until the GPU has it.

Such a line (`loss.item()` in each step) keeps the host from launching ahead, so that the device idles afterwards. It is
one in which samples of the stack are frequent, and whose text reads a value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from vitscale.base.files import open_regular
from vitscale.explanation.code_lines import CodeLine, top_line
from vitscale.explanation.rank_record import HookedRank

_READS_A_VALUE = re.compile(
    r"\.(item|cpu|tolist|numpy)\(\s*\)|\b(float|int|bool)\(\s*\w*loss|\bprint\(|\.synchronize\(|\.isnan\("
)
_PARTS = ("other", "optimizer", "backward", "forward")
"""Parts of a step in which a program may read a value; while it waits for data, it waits for nothing else."""
_LARGEST_SOURCE_BYTES = 4 << 20
_LONGEST_LINE = 10_000


def waiting_line(records: Sequence[HookedRank]) -> CodeLine | None:
    """Return the line at which the host waits for the GPU; None where samples show none that reads a value."""
    for part in _PARTS:
        line = top_line(records, part)
        if line is not None and _READS_A_VALUE.search(_source_text(line)):
            return line
    return None


def _source_text(line: CodeLine) -> str:
    """Return the text of a line; empty where its file cannot be read, as in a trace from another machine."""
    path = Path(line.file)
    if path.suffix != ".py" or line.line < 1:
        return ""
    try:
        with open_regular(path, largest_bytes=_LARGEST_SOURCE_BYTES) as file:
            lines = list(islice(file, line.line - 1, line.line))
    except (OSError, ValueError):  # ValueError: a name with a NUL, or a number beyond islice's
        return ""
    return lines[0][:_LONGEST_LINE].decode("utf-8", errors="replace") if lines else ""
