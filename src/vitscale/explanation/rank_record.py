"""All that one rank wrote, sorted by kind of line: what explanations are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.hook import lines


@dataclass(frozen=True)
class HookedRank:
    """The lines of one rank's file. Of lines that are written again the last one counts."""

    rank: lines.HookedRankLine
    model: lines.HookedModelLine | None = None
    loader: lines.HookedLoaderLine | None = None
    optimizer: lines.HookedOptimizerLine | None = None
    """The first of its optimizers."""
    steps: Sequence[lines.HookedStepLine] = ()
    """In the order in which they were written."""
    breaks: Sequence[lines.HookedBreakLine] = ()
    samples: Sequence[lines.HookedSamplesLine] = ()
    """The last line of each part."""
    profile: lines.HookedProfileLine | None = None
    end: lines.HookedEndLine | None = None
    """None: the file was cut off."""
    notes: Sequence[str] = ()

    def rows_of(self, part: str) -> Sequence[lines.SampleRow]:
        """Return the sampled lines of a part, the most frequent first; empty where there are none."""
        for samples in self.samples:
            if samples.part == part:
                return samples.rows
        return ()
