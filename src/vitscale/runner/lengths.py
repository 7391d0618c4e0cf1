"""How many optimizer steps a planned trial has."""

from __future__ import annotations

from vitscale.runner.planning import Plan
from vitscale.trial.trial import Trial, samples_used, steps_per_epoch


def steps_of(plan: Plan, trial_id: str, trial: Trial) -> tuple[int, int]:
    """Optimizer steps in an epoch and in the run."""
    train = trial.train
    images = samples_used(plan.expansion.train_samples[trial_id], trial.data.fraction)
    epoch = steps_per_epoch(images, trial.world.size, train.micro_batch, train.grad_accum, train.drop_last)
    if trial.window.steps is not None:
        return epoch, trial.window.steps + trial.window.warmup_steps
    return epoch, epoch * (train.epochs or 0)
