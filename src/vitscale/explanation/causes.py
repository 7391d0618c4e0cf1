"""Finds what makes the steps of a job slow, what it costs, and what to change; the costliest cause first.

Causes are looked for one after the other, so that no time is counted twice: first those that make ranks wait for each
other, then, in the steps without these, what all ranks spend time on.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.explanation.cause import SlowCause
from vitscale.explanation.data_causes import data_causes
from vitscale.explanation.parts import JobParts
from vitscale.explanation.rank_causes import jitter_seconds, rank_causes
from vitscale.explanation.rare_causes import rare_causes
from vitscale.explanation.step_causes import communication_cause, part_causes, thread_cause


@dataclass(frozen=True)
class FoundCauses:
    """The causes of slow steps."""

    causes: tuple[SlowCause, ...]
    """The costliest first."""
    jitter_seconds: float | None
    """Mean seconds of a step in which ranks wait for whichever is slowest, without these causes; None: unavailable."""


def find_causes(parts: JobParts) -> FoundCauses:
    """Return the causes of a job's slow steps; none where nothing stands out."""
    causes = [*rare_causes(parts)]
    jitter = None
    if parts.ranks:
        of_ranks = rank_causes(parts)
        causes += of_ranks.causes
        causes += data_causes(parts, of_ranks.table)
        causes += part_causes(parts, of_ranks.table)
        communication = communication_cause(parts, of_ranks.table)
        threads = thread_cause(parts)
        causes += [cause for cause in (communication, threads) if cause is not None]
        jitter = jitter_seconds(of_ranks.table)
    ordered = sorted(causes, key=lambda cause: cause.weight, reverse=True)
    return FoundCauses(tuple(ordered), jitter)
