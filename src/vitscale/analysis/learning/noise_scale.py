"""The gradient noise scale: how large a batch may grow before a larger one hardly gives a better gradient.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), appendix A.1. Let G be the
gradient over all data, Sigma the covariance of one image's gradient and G_b the mean gradient of b images. Then
E|G_b|^2 = |G|^2 + tr(Sigma)/b, so that two batch sizes b < B in one step give, without bias,

    |G|^2     = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

A ratio of two noisy numbers is biased: both are averaged over the steps of a run before they are divided. The (simple)
noise scale B_noise = tr(Sigma) / |G|^2, in images, is that of the moment of training at which it was taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis.runs.steps import common_steps
from vitscale.analysis.statistics import interval
from vitscale.present.estimate import Estimate
from vitscale.store.records import GradientLine
from vitscale.store.results import Run
from vitscale.trial.engines import norms_unknown
from vitscale.trial.step_schedule import has_two_batch_sizes

FEWEST_STEPS = 4
"""With norms at two batch sizes, in a run."""
ONE_SEED = "runs of one seed: no interval"
_ROUNDING = 1.01
"""A mean of gradients is never longer than they are in the mean square; bfloat16 may round it up by less than this."""


@dataclass(frozen=True)
class _Estimate:
    """What one run says."""

    images: float | None
    reason: str
    drowned: bool = False


def noise_scale(runs: Sequence[Run]) -> tuple[Estimate | None, str]:
    """B_noise in images over the runs of one trial; or None, with the reason.

    Runs of one seed see the same gradients, so they count as one observation. Where noise drowns the gradient in any
    run there is no figure: the other runs alone would make it too small.
    """
    if not runs:
        return None, "no run has completed"
    if not has_two_batch_sizes(runs[0].header.trial):
        return None, "one rank and one micro-step: no gradient of fewer images than the step has"
    if not runs[0].header.trial.window.explain:
        return None, "measure.explain is false: no step takes the gradients' norms"
    estimates = [_estimate(run) for run in runs]
    if drowned := [estimate for estimate in estimates if estimate.drowned]:
        in_runs = f"in {len(drowned)} of {len(estimates)} runs " if len(estimates) > 1 else ""
        return None, f"{in_runs}{drowned[0].reason}"
    by_seed: dict[int, list[float]] = {}
    for run, estimate in zip(runs, estimates, strict=True):
        if estimate.images is not None:
            by_seed.setdefault(seed_of(run), []).append(estimate.images)
    if not by_seed:
        return None, estimates[0].reason
    figures = [statistics.median(same) for same in by_seed.values()]
    if len(figures) == 1 and sum(map(len, by_seed.values())) > 1:
        return Estimate(figures[0], None, None, note=ONE_SEED), ""
    return interval(figures), ""


def seed_of(run: Run) -> int:
    """The seed that a run used; in format 1 that was its trial's."""
    header = run.header
    return header.trial.train.seed if header.seed is None else header.seed


def _estimate(run: Run) -> _Estimate:
    steps = common_steps(run, lambda rank: rank.gradients)
    if not steps:
        few = "no step took the gradients' norms: the run has too few steps for it"
        return _Estimate(None, norms_unknown(run.header.trial) or few)
    known = [lines for lines in steps if all(_known(line) for line in lines)]
    if len(known) < FEWEST_STEPS:
        why = next((line.reason for lines in steps for line in lines if line.reason), None)
        return _Estimate(
            None, why or f"the gradients' norms are known in {len(known)} steps, and {FEWEST_STEPS} are needed"
        )
    parts = [_parts(lines) for lines in known]
    if any(part is None for part in parts):
        return _Estimate(None, "the recorded norms of the gradients contradict each other")
    squared_gradient = sum(part[0] for part in parts if part) / len(parts)
    noise = sum(part[1] for part in parts if part) / len(parts)
    if squared_gradient <= 0:
        return _Estimate(
            None,
            f"the noise drowns the mean gradient: over {len(parts)} steps the estimate of its square is not positive, "
            "and more steps are needed",
            drowned=True,
        )
    if noise <= 0:
        return _Estimate(None, "the gradients of all micro-batches are alike: there is no noise")
    images = noise / squared_gradient
    if not math.isfinite(images):
        return _Estimate(None, "the recorded norms of the gradients contradict each other")
    return _Estimate(images, "")


def _known(line: GradientLine) -> bool:
    return line.small_squared_norm is not None and line.big_squared_norm is not None


def _parts(lines: Sequence[GradientLine]) -> tuple[float, float] | None:
    """|G|^2 and tr(Sigma) of one step; None where its norms cannot be those of gradients and their mean.

    Ranks of unequal shares b_r count in proportion to them: `sum(b_r |G_b_r|^2) / sum(b_r)` is expected to be
    |G|^2 + tr(Sigma) / b with b the mean share.
    """
    at_once = sum(line.small_images for line in lines)
    few = at_once / len(lines)
    small = sum(line.small_images / few * (line.small_squared_norm or 0.0) for line in lines) / len(lines)
    big = sum(line.big_squared_norm or 0.0 for line in lines) / len(lines)
    many, *others = {line.big_images for line in lines}
    if others or many % at_once or few >= many or not big <= _ROUNDING * small:
        return None
    squared_gradient = (many * big - few * small) / (many - few)
    noise = (small - big) / (1 / few - 1 / many)
    return (squared_gradient, noise) if math.isfinite(squared_gradient) and math.isfinite(noise) else None
