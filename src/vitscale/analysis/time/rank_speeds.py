"""How fast each rank computes: by what an image takes it in forward and backward; and what other shares would save."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from vitscale.analysis.time.timelines import explained_steps, lanes
from vitscale.analysis.trials import TrialResult
from vitscale.base.time_spans import length
from vitscale.store.results import Run
from vitscale.trial.rank_batches import longest, micro_batches, shares

_COMPUTING = ("forward", "backward")


def rank_speeds(result: TrialResult) -> tuple[float, ...] | None:
    """Each rank's speed against the fastest, 1.0, to two decimals; None where no full step was explained on all ranks.

    The median over explained steps of all runs. Waiting and transfers are not in it. It holds for about as many images
    as were taken: a micro-step costs something whatever its images.
    """
    by_step = [
        per_image
        for run, figures in zip(result.records, result.runs, strict=True)
        for step in explained_steps(run)
        if step >= (figures.steady_from or 0) and (per_image := _seconds_per_image(run, step)) is not None
    ]
    if not by_step:
        return None
    seconds = [statistics.median(of_rank) for of_rank in zip(*by_step, strict=True)]
    if len(seconds) != result.trial.world.size:
        return None
    return tuple(max(0.01, round(min(seconds) / each, 2)) for each in seconds)


def gain(result: TrialResult, speeds: Sequence[float]) -> float:
    """Share by which forward and backward of a step would be shorter, were its images shared out by `speeds`."""
    taken = micro_batches(result.trial.train, result.trial.world.size)
    return 1 - longest(shares(sum(taken), speeds), speeds) / longest(taken, speeds)


def _seconds_per_image(run: Run, step: int) -> tuple[float, ...] | None:
    """Of each rank; None where the step was not full, or a rank's figures are missing."""
    images = {rank.rank: line.images for rank in run.ranks for line in rank.steps if line.step == step}
    if sum(images.values()) != run.header.trial.global_batch or min(images.values()) < 1:
        return None
    seconds = [
        sum(length(parts.get(part, ())) for part in _COMPUTING) / images[rank] if rank in images else 0.0
        for rank, parts in lanes(run, step).items()
    ]
    return tuple(seconds) if min(seconds) > 0 else None
