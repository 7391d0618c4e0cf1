"""Causes that come once in several steps: evaluation, checkpoints, logging, a loader that starts again."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitscale.explanation.cause import LEAST_SHARE, CauseKind, SlowCause
from vitscale.explanation.code_lines import top_line
from vitscale.explanation.parts import JobParts
from vitscale.explanation.rank_causes import WORK_WORDS
from vitscale.explanation.rare_work import RareWork
from vitscale.explanation.step_table import WORK_PARTS
from vitscale.present.estimate import Estimate
from vitscale.present.units import counted, listed, seconds

_KINDS: dict[str, CauseKind] = {"evaluation": "evaluation", "checkpoint": "checkpoint", "other": "pause"}
"""Kind of a break -> kind of the cause."""
_CLAUSES: dict[CauseKind, str] = {
    "evaluation": "is evaluation",
    "checkpoint": "is saving checkpoints",
    "pause": "is pauses between steps",
    "loader-restarts": "is the loader starting again",
    "slow-fetches": "is slow fetches now and then",
    "periodic-work": "is work done now and then, such as logging",
}


def rare_causes(parts: JobParts) -> Iterator[SlowCause]:
    """Yield a cause for each rare work that takes a good share of the time, and was seen twice or more."""
    for work in parts.rare:
        cost_seconds = work.seconds_per_step
        if cost_seconds is not None and cost_seconds >= LEAST_SHARE * parts.mean_step_seconds:
            yield _cause(work, cost_seconds, parts)


def _cause(work: RareWork, cost_seconds: float, parts: JobParts) -> SlowCause:
    """Return the cause that some rare work is.

    Args:
        work: the work.
        cost_seconds: what it adds to a step on average.
        parts: the job.
    """
    kind = cause_kind(work, parts)
    cost = Estimate(cost_seconds)
    code = top_line(parts.records, work.kind) if not work.is_break else None
    line = str(code) if code is not None else work.code
    location = f", most of it at {line}" if line is not None else ""
    is_of_some_ranks = len(work.ranks) < len(parts.records)
    who = f"; only {_rank_names(work.ranks)} does it, and the others wait" if is_of_some_ranks else ""
    evidence = f"{rare_text(work, parts)}{location}{who}"
    return SlowCause(
        kind,
        _clause(kind, work),
        evidence,
        _change(kind, work, parts),
        cost,
        cost,
        weight=cost_seconds,
        ranks=work.ranks if is_of_some_ranks else (),
        code=code,
    )


def _clause(kind: CauseKind, work: RareWork) -> str:
    """Return what the work does to the step: "is evaluation (every 50 steps)"."""
    if work.every is None:
        return _CLAUSES[kind]
    return f"{_CLAUSES[kind]} (every {counted(round(work.every), 'step')})"


def cause_kind(work: RareWork, parts: JobParts) -> CauseKind:
    """Return the kind of cause that some rare work is."""
    if work.is_break:
        return _KINDS[work.kind]
    if work.kind != "data":
        return "periodic-work"
    loaders = [record.loader for record in parts.records if record.loader is not None]
    restarts = any(loader.workers > 0 and not loader.persistent_workers for loader in loaders)
    return "loader-restarts" if restarts else "slow-fetches"


def rare_text(work: RareWork, parts: JobParts) -> str:
    """Return a sentence on some rare work without its full stop: how long, how often, what it adds to a step."""
    kind = cause_kind(work, parts)
    subject = {
        "evaluation": "An evaluation"
        if work.batches is None
        else f"An evaluation of {counted(work.batches, 'batch', 'batches')}",
        "checkpoint": "Saving a checkpoint",
        "pause": "A pause between steps",
        "loader-restarts": "A first batch of a loader that starts again",
        "slow-fetches": "A slow fetch of data",
        "periodic-work": f"More work than usual in {_part_words(work)}",
    }[kind]
    took = f"{subject} takes {seconds(work.seconds)}"
    if work.every is not None and work.seconds_per_step is not None:
        return (
            f"{took} every {counted(round(work.every), 'step')}, which adds {seconds(work.seconds_per_step)} to a step"
        )
    if work.seconds_per_step is not None:
        return f"{took}, {work.times} times at unequal distances, which adds {seconds(work.seconds_per_step)} to a step"
    return f"{took}; it was seen once (at step {work.after_steps[0]:,}), so that how often it comes is not known"


def _part_words(work: RareWork) -> str:
    """Return the words for the part of a step that holds rare work."""
    for part in WORK_PARTS:
        if part == work.kind:
            return WORK_WORDS[part]
    return "a step"


def _rank_names(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"each of ranks {listed(ranks, most=4)}"


def _change(kind: CauseKind, work: RareWork, parts: JobParts) -> str:
    """Return what to change, with the distance at which the work takes `LEAST_SHARE` of the usual time."""
    rarer = _rarer(work, parts)
    if kind == "evaluation":
        return f"Evaluate{rarer}, or on fewer images"
    if kind == "checkpoint":
        return f"Save{rarer}, or beside training (torch.distributed.checkpoint.async_save)"
    if kind == "loader-restarts":
        return "Set persistent_workers=True, so that workers outlive an epoch"
    if kind == "slow-fetches":
        return "Look at the disk and at what decodes the largest files; prefetch_factor=4 evens out single slow batches"
    return f"Do it{rarer}, on a thread beside training, or not at all"


def _rarer(work: RareWork, parts: JobParts) -> str:
    """Return " every 200 steps instead of 50 (then 5 % of the time)"; " less often" where the distance is unknown."""
    if work.every is None or not parts.step.value > 0:
        return " less often"
    allowed_seconds = parts.step.value * LEAST_SHARE / (1 - LEAST_SHARE)
    distance = math.ceil(work.seconds / allowed_seconds)
    return f" every {distance:,} steps instead of {round(work.every):,} (then {100 * LEAST_SHARE:.0f} % of the time)"
