"""How far the losses of two trials lie apart, optimizer step by optimizer step, over the first ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.analysis.trials import TrialResult

STEPS = 20
"""Optimizer steps from the beginning that are compared: later ones amplify rounding."""
_LEAST_SHARE = 0.01
"""Differences are relative to the reference's loss, or to this share of its first one where it has fallen below."""

Losses = Mapping[int, float | None]
"""Step to loss; None where it is not finite."""


@dataclass(frozen=True)
class LossDifference:
    """Step and relative difference of two runs' losses. Infinite: one loss is finite where the other is not."""

    by_step: tuple[tuple[int, float], ...]

    @property
    def worst(self) -> tuple[int, float]:
        """The step with the largest difference, and that."""
        return max(self.by_step, key=lambda pair: pair[1])

    def equal_steps(self, tolerance: float) -> int:
        """How many steps pass before the first that differs by more than `tolerance`."""
        beyond = (place for place, (_, difference) in enumerate(self.by_step) if difference > tolerance)
        return next(beyond, len(self.by_step))

    def early(self, after_one_update: float, after_two: float) -> bool:
        """Whether losses differ by more than rounding does before training has had the time to amplify it."""
        first = [difference for _, difference in self.by_step[:3]]
        return max(first[:2]) > after_one_update or max(first) > after_two


def largest(member: TrialResult, reference: TrialResult) -> LossDifference | None:
    """The run of `member` that differs most; None where no two of their runs can be compared."""
    found = [between_runs(run, reference) for run in losses(member)]
    return max((one for one in found if one is not None), key=lambda one: one.worst[1], default=None)


def between_runs(run: tuple[int, Losses], reference: TrialResult) -> LossDifference | None:
    """A run against the reference's first one; where repeats have seeds of their own, against the same repeat."""
    repeat, ours = run
    candidates = [theirs for number, theirs in losses(reference) if number == repeat or not seeded(reference)]
    by_step = differences(ours, candidates[0]) if candidates else ()
    return LossDifference(by_step) if by_step else None


def seeded(result: TrialResult) -> bool:
    """Whether each repeat has a seed of its own, and losses of its own with it."""
    return result.trial.train.target_accuracy is not None


def losses(result: TrialResult) -> list[tuple[int, Losses]]:
    """Repeat and first losses of each completed run, in the order of repeats."""
    pairs = zip(result.records, result.runs, strict=True)
    found = [(run.header.repeat, dict(figures.loss_by_step[:STEPS])) for run, figures in pairs]
    return sorted(found, key=lambda pair: pair[0])


def differences(ours: Losses, theirs: Losses) -> tuple[tuple[int, float], ...]:
    """Step and `|l - r| / max(r, r_first / 100)` of the steps that both have; empty where they have no two to tell by.

    Infinite where one is finite and the other not; where neither is any more, what follows tells nothing.
    """
    common = sorted(ours.keys() & theirs.keys())
    if len(common) < 2:
        return ()
    first = abs(theirs[common[0]] or 0.0)
    found: list[tuple[int, float]] = []
    for step in common:
        loss, reference = ours[step], theirs[step]
        if loss is None and reference is None:
            break
        if loss is None or reference is None:
            return (*found, (step, math.inf))
        scale = max(abs(reference), _LEAST_SHARE * first)
        gap = abs(loss - reference)
        found.append((step, gap / scale if scale > 0 else math.inf if gap else 0.0))
    return tuple(found) if len(found) > 1 else ()
