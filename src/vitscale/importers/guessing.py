"""Which format a file is, by what stands in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from vitscale.errors import RequestError, explain, shown
from vitscale.importers import links
from vitscale.importers.files import lines
from vitscale.importers.options import FORMATS, OF_LINKS, LinkFormat, LogFormat

_LOOKED_AT = 20_000
"""Lines: what comes before the first timed step of a DeepSpeed log is thousands of lines at most."""
_STATE = re.compile(r'^\s*\{?\s*"(log_history|best_metric|best_model_checkpoint|best_global_step|epoch|global_step)"')
_TIMERS = re.compile(r"time \(ms\) \|")
_SPEEDS = {"step_seconds", "images_per_second", "epoch_seconds"}


def guess(paths: Sequence[Path]) -> LogFormat | LinkFormat:
    """The format of all these files.

    Raises:
        RequestError: a file is none of them, or the files are of different ones.
        StoreError: a file cannot be read.
    """
    found = {path: _of(path) for path in paths}
    for path, taken in found.items():
        if taken is None:
            raise RequestError(
                explain(
                    f"nothing in {shown(path.name)} tells its format",
                    valid=(*FORMATS, *OF_LINKS),
                    next_step="Name it with --format; docs/importing.md says what each needs",
                )
            )
    kinds = {taken for taken in found.values() if taken is not None}
    if len(kinds) != 1:
        each = ", ".join(f"{path.name} is {taken}" for path, taken in list(found.items())[:4])
        raise RequestError(explain(f"the files are of different formats: {each}", next_step="Import them one by one"))
    return kinds.pop()


def _of(path: Path) -> LogFormat | LinkFormat | None:
    for number, text, _ in islice(lines(path), _LOOKED_AT):
        if number == 1 and (table := _table(text)):
            return table
        if (of_link := links.guessed(text)) is not None:
            return of_link
        if number == 1 and text.lstrip().startswith("{") and '"nccl_version"' in text:
            return "nccl-tests"
        if _TIMERS.search(text):
            return "deepspeed"
        if number <= 3 and _STATE.match(text):
            return "trainer-state"
    return None


def _table(text: str) -> LogFormat | None:
    columns = {cell.strip().strip('"').lower() for cell in text.split(",")}
    if "gpus" not in columns or not columns & _SPEEDS:
        return None
    return "epochs" if "epoch_seconds" in columns and columns & {"epoch", "rank", "run"} else "csv"
