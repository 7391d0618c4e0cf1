"""`vitscale.load("RESULTS")`: what a results folder holds as polars frames, for notebooks."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitscale import store
from vitscale.analysis import Analysis, analyse
from vitscale.present.markdown import to_markdown
from vitscale.report.contract import frame, run_rows, trial_rows
from vitscale.report.document import terminal_document
from vitscale.store.results import Results
from vitscale.store.steps import WINDOWS, Steps

if TYPE_CHECKING:
    import polars


class Frames:
    """A results folder: read when it is made, each frame worked out when it is first asked for."""

    def __init__(self, results: Results, *, combine_unlike: bool = False) -> None:
        """`combine_unlike`: as for `vitscale report`."""
        self._results, self._combine_unlike = results, combine_unlike

    @cached_property
    def _analysis(self) -> Analysis:
        return analyse(self._results, combine_unlike=self._combine_unlike)

    @cached_property
    def trials(self) -> polars.LazyFrame:
        """A row for each trial: the columns of `vitscale report --format parquet`."""
        return frame(trial_rows(self._analysis)).lazy()

    @cached_property
    def runs(self) -> polars.LazyFrame:
        """A row for each completed run, the swept fields among its columns."""
        return frame(run_rows(self._analysis)).lazy()

    @cached_property
    def steps(self) -> polars.LazyFrame:
        """A row for each optimizer step of each rank of each run, warm-up and profiled ones too: `trial`, `repeat`,
        `rank`, `step`, `epoch`, `seconds`, `images`, `loss` (null: not told), `warmup`, `window`."""
        import polars  # starts threads, which no process that is forked may have

        windows = np.array(WINDOWS)
        frames = [
            polars.DataFrame(
                {
                    "step": steps.step,
                    "epoch": steps.epoch,
                    "seconds": steps.seconds,
                    "images": steps.images,
                    "loss": polars.Series(steps.loss).fill_nan(None),
                    "warmup": steps.warmup,
                    "window": windows[steps.window],
                }
            ).select(
                polars.lit(run.header.trial_id).alias("trial"),
                polars.lit(run.header.repeat).alias("repeat"),
                polars.lit(rank.rank).alias("rank"),
                polars.all(),
            )
            for run in self._results.runs
            for rank in run.ranks
            if len(steps := Steps.of(rank.steps))
        ]
        return polars.concat(frames).lazy() if frames else polars.LazyFrame()

    def __repr__(self) -> str:
        study = self._results.study
        return f"<results of {study.name}: {len(study.trials)} trials, {len(self._results.runs)} runs>"

    def _repr_markdown_(self) -> str:
        """What a notebook shows: the tables that `vitscale report` prints."""
        return to_markdown(terminal_document(self._analysis))


def load(results: str | Path, *, combine_unlike: bool = False) -> Frames:
    """The frames of a results folder.

    Args:
        results: the folder.
        combine_unlike: combine runs of unlike hardware or library versions all the same.

    Raises:
        StoreError: it holds no results, or of a newer format.
    """
    return Frames(store.load(Path(results)), combine_unlike=combine_unlike)
