"""Reads `GPUS MINUTES`, a line for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitscale.importers.contents import ImportOptions, LogContents, LogRank, LogRun, TrialSetting, identified, lines
from vitscale.importers.records import an_epoch, epoch_line


def read(paths: Sequence[Path], options: ImportOptions) -> LogContents:
    """One run a line; what the file does not tell is None."""
    runs = []
    for path in paths:
        for number, text, _ in lines(path):
            gpus, minutes = text.split()
            setting = TrialSetting(int(gpus), nodes=-(-int(gpus) // 8))
            rank = LogRank(0, epochs=(epoch_line(0, 60 * float(minutes), an_epoch(setting, options)),))
            runs.append(LogRun(setting, f"line {number}", (identified(path),), (rank,), of_the_run=True))
    return LogContents(tuple(runs), notes=("minutes are told to one decimal",), problems=())
