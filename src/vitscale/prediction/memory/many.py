"""Peaks of many configurations that differ in the micro-batch: straight lines, worked out once.

Every moment of a step takes a fixed number of bytes and so many for each image of the micro-batch. The peak is the
highest of these lines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitscale.prediction.memory.forecast import totals, unavailable
from vitscale.trial.trial import Trial, World


def peak_bytes_of_many(
    template: Trial, gpus: int, accumulates: bool, micro_batches: NDArray[np.int_]
) -> NDArray[np.float64]:
    """Peak bytes of a rank of `template` on so many ranks, for each micro-batch; NaN: unknown.

    The same as `forecast_bytes` of the trials that have them, some hundred times as fast. Every rank takes a
    micro-batch's images.

    Args:
        template: its world and batch are not asked for.
        gpus: ranks.
        accumulates: whether a step has more micro-steps than one.
        micro_batches: images of a rank.
    """
    at_one, at_two = (_variant(template, gpus, accumulates, micro_batch) for micro_batch in (1, 2))
    if unavailable(at_one):
        return np.full(len(micro_batches), np.nan)
    first = np.array(totals(at_one), dtype=float)
    per_image = np.array(totals(at_two), dtype=float) - first
    peaks: NDArray[np.float64] = (first + per_image * (micro_batches[:, None] - 1)).max(axis=1)
    return peaks


def _variant(template: Trial, gpus: int, accumulates: bool, micro_batch: int) -> Trial:
    """The template with these fields, not validated again: that would take longer than all the rest."""
    changed = {"grad_accum": 1 + accumulates, "micro_batch": micro_batch, "micro_batches": None}
    world = World.model_construct(nodes=1, ranks_per_node=gpus, threads_per_rank=template.world.threads_per_rank)
    return template.model_copy(update={"train": template.train.model_copy(update=changed), "world": world})
