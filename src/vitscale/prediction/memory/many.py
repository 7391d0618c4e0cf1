"""Peaks of thousands of configurations that differ in a few fields: each kind worked out once, then straight lines.

Every moment of a step takes a fixed number of bytes and so many for each image of the micro-batch. The peak is the
highest of these lines: worked out for one engine, stage and rank count, it is known for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.prediction.memory.forecast import totals, unavailable
from vitscale.trial.trial import Trial, World

_TEMPLATES = 32
"""Templates whose lines are remembered."""


class _Line(NamedTuple):
    per_image: int
    fixed: int


class _Kind(NamedTuple):
    """All that decides on memory beside the micro-batch and the template."""

    gpus: int
    engine: str
    zero_stage: int
    accumulates: bool
    activation_checkpointing: bool


class Peaks:
    """Peaks of one template trial's variants, remembered by kind."""

    def __init__(self, template: Trial) -> None:
        self._template = template
        self.lines = lru_cache(maxsize=65_536)(self._lines)

    def _lines(self, kind: _Kind) -> tuple[_Line, ...]:
        """Those of which one is highest at some micro-batch; none where memory is unknown."""
        one, two = (self._variant(kind, micro_batch) for micro_batch in (1, 2))
        if unavailable(one):
            return ()
        at_one, at_two = totals(one), totals(two)
        return _highest(_Line(b - a, 2 * a - b) for a, b in zip(at_one, at_two, strict=True))

    def _variant(self, kind: _Kind, micro_batch: int) -> Trial:
        """The template with these fields, not validated again: that would take longer than all the rest."""
        train = self._template.train
        changed = {
            "engine": kind.engine,
            "accelerate_backend": train.accelerate_backend if kind.engine == train.engine else None,
            "zero_stage": kind.zero_stage,
            "grad_accum": 1 + kind.accumulates,
            "activation_checkpointing": kind.activation_checkpointing,
            "micro_batch": micro_batch,
            "micro_batches": None,
        }
        world = World.model_construct(
            nodes=1, ranks_per_node=kind.gpus, threads_per_rank=self._template.world.threads_per_rank
        )
        return self._template.model_copy(update={"train": train.model_copy(update=changed), "world": world})


def peak_bytes_of_many(
    template: Trial,
    gpus: int,
    engine: str,
    zero_stage: int,
    accumulates: bool,
    activation_checkpointing: bool,
    micro_batches: NDArray[np.int_],
) -> NDArray[np.float64]:
    """Peak bytes of a rank of `template` with these fields in place of its own, for each micro-batch; NaN: unknown.

    The same as `forecast_bytes` of the trials that have them, some hundred times as fast once a kind is known. Every
    rank takes a micro-batch's images. The template is remembered by its identity as an object: hand in the same one.
    """
    kind = _Kind(gpus, engine, zero_stage, accumulates, activation_checkpointing)
    lines = _peaks(template).lines(kind)
    heights = [line.fixed + line.per_image * micro_batches for line in lines]
    return np.max(heights, axis=0).astype(float) if heights else np.full(len(micro_batches), np.nan)


_peaks_by_id: dict[int, tuple[Trial, Peaks]] = {}
"""`id` of a template -> itself, so that no other object gets that id, and its peaks. (A trial with a DeepSpeed file has
no hash.)"""


def _peaks(template: Trial) -> Peaks:
    found = _peaks_by_id.get(id(template))
    if found is None:
        if len(_peaks_by_id) >= _TEMPLATES:
            del _peaks_by_id[next(iter(_peaks_by_id))]
        found = _peaks_by_id[id(template)] = (template, Peaks(template))
    return found[1]


def _highest(lines: Iterable[_Line]) -> tuple[_Line, ...]:
    """The upper envelope over all micro-batches from 1 on."""
    kept_lines: list[_Line] = []
    for line in sorted(set(lines)):
        while kept_lines and line.fixed + line.per_image >= kept_lines[-1].fixed + kept_lines[-1].per_image:
            # Steeper or as steep, and as high already at one image.
            kept_lines.pop()
        kept_lines.append(line)
    return tuple(kept_lines)
