"""Reads `GPUS MINUTES`, a line for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitscale.importers.contents import LogContents, LogRank, LogRun, Options, Setting, identified, lines
from vitscale.importers.records import an_epoch
from vitscale.store.records import EpochLine

UNTOLD = ("train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "peak_bytes")


def read(paths: Sequence[Path], options: Options) -> LogContents:
    """One run a line; what the file does not tell is None."""
    runs = []
    for path in paths:
        for number, text, _ in lines(path):
            gpus, minutes = text.split()
            setting = Setting(int(gpus), nodes=-(-int(gpus) // 8))
            steps, images = an_epoch(setting, options)
            told = {"epoch": 0, "seconds": 60 * float(minutes), "steps": steps, "images": images, "complete": True}
            epoch = EpochLine.model_validate(told | dict.fromkeys(UNTOLD))
            rank = LogRank(0, epochs=(epoch,))
            runs.append(LogRun(setting, f"line {number}", (identified(path),), (rank,), of_the_run=True))
    return LogContents(tuple(runs), notes=("minutes are told to one decimal",), problems=())
