"""How fast a run goes: from its steps, or of an imported one from whole epochs shared out over their steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.record import ModelLine, Run, StepLine
from vitscale.trial import Trial, samples_used, steps_per_epoch

StepSource = Literal["steps", "epochs"]


@dataclass(frozen=True)
class Pace:
    """Seconds of a step and images a second; None where unknown."""

    step_seconds: float | None
    images_per_second: float | None
    source: StepSource | None


NO_PACE = Pace(None, None, None)
"""Of a run that tells of neither."""


def of_steps(run: Run, timed: Sequence[Sequence[StepLine]], slowest: Sequence[float]) -> Pace:
    """Of timed steps: their lines by rank, and the seconds of the slowest rank in each; at least one step.

    The step is the median; images are those of all ranks / the seconds of these steps.
    """
    # Where an imported log tells of some ranks alone, the others take as many images: an optimizer step is everybody's.
    of_each = run.header.trial.world.size / len(run.ranks_needed)
    images = of_each * sum(line.images for lines in timed for line in lines)
    return Pace(cost(statistics.median(slowest)), cost(images / sum(slowest)), "steps")


def of_epochs(trial: Trial, model: ModelLine | None, epoch_seconds: float | None) -> Pace:
    """Of a run that tells of whole epochs alone, where it is known how many images an epoch has."""
    samples, steps = of_an_epoch(trial, model)
    if epoch_seconds is None or epoch_seconds <= 0 or not samples or not steps:
        return NO_PACE
    return Pace(cost(epoch_seconds / steps), cost(samples / epoch_seconds), "epochs")


def of_an_epoch(trial: Trial, model: ModelLine | None) -> tuple[int | None, int | None]:
    """Images and optimizer steps; None where the size of the dataset is not known."""
    if model is None or model.train_samples is None:
        return None, None
    samples, train = samples_used(model.train_samples, trial.data.fraction), trial.train
    return samples, steps_per_epoch(samples, trial.world.size, train.micro_batch, train.grad_accum, train.drop_last)


def whole_epochs_alone(run: Run) -> bool:
    """Whether an imported run tells of epochs and of no step."""
    return run.header.imported is not None and not any(rank.steps for rank in run.ranks)


def cost(value: float | None) -> float | None:
    """What statistics can work with: positive and finite. Records are input, and may hold anything."""
    return value if value is not None and math.isfinite(value) and value > 0 else None
