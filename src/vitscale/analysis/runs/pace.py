"""How fast a run goes: from its timed steps, or of an imported one from whole epochs shared out over their steps.

An epoch of K optimizer steps, of which the last one holds the images that are left, takes

    epoch = K_eff x step         K_eff = K - 1 + t_last / step          images/s = images trained in an epoch / epoch

with `step` the mean of whole steps: the one that begins an epoch (it may wait for the loader) counts once in K where it
was timed. t_last is the mean of the short steps that were timed, else its slots' share of a whole step
(`trial.last_step_share`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.analysis.runs.steps import StepKind
from vitscale.store.records import ModelLine, StepLine
from vitscale.store.results import Run
from vitscale.trial.trial import Trial, last_step_share, samples_used, steps_per_epoch

PaceSource = Literal["steps", "epochs"]
"""steps: timed steps. epochs: whole epochs of an imported log that tells of no step."""
LastStepSource = Literal["measured", "share"]
"""measured: the short last step of an epoch was timed. share: its slots' share of a whole step."""


@dataclass(frozen=True)
class Pace:
    """What a run's figures of time derive from; None where unknown."""

    step_seconds: float | None = None
    """Mean elapsed seconds of a whole step, such that `effective_steps` of them are an epoch."""
    epoch_seconds: float | None = None
    images_per_second: float | None = None
    """Real images of all ranks."""
    source: PaceSource | None = None
    effective_steps: float | None = None
    """K_eff."""
    last_step_source: LastStepSource | None = None
    """None where the last step is as long as any."""
    epoch_images: int | None = None
    """Trained in one epoch: what drop_last leaves out is not among them."""


NO_PACE = Pace()
"""Of a run that tells of neither steps nor epochs."""


def of_steps(
    run: Run,
    timed: Mapping[int, Sequence[StepLine]],
    elapsed: Mapping[int, float],
    kinds: Mapping[int, StepKind],
    model: ModelLine | None,
) -> Pace:
    """The pace by timed steps, at least one, with their seconds by `elapsed_by_step` and their `step_kinds`."""
    trial = run.header.trial
    seconds = {kind: [elapsed[step] for step in timed if kinds[step] == kind] for kind in ("whole", "first", "short")}
    mean = {kind: _mean(values) for kind, values in seconds.items() if values}
    trained, count = of_an_epoch(trial, model)
    if not trained or not count or count == 1:
        # Of an epoch of one step that step is the whole; of an unknown dataset nobody knows which step is its last.
        whole = [*seconds["whole"], *seconds["first"]] or seconds["short"]
        step = _mean(whole)
        if count == 1 and trained:
            return _pace(step, 1.0, None, trained)
        # Where an imported log tells of some ranks alone, the others take as many images: a step is everybody's.
        of_each = trial.world.size / len(run.ranks_needed)
        images = of_each * sum(line.images for lines in timed.values() for line in lines)
        passed = sum(elapsed[step] for step in timed)
        return Pace(cost(step), None, cost(images / passed) if passed > 0 else None, "steps")
    share = last_step_share(trial, trained)
    wholes = count if share is None else count - 1
    step = _whole_step(mean, wholes, share)
    if share is None or step <= 0:
        return _pace(step, float(count), None, trained)
    source: LastStepSource = "measured" if "short" in mean else "share"
    return _pace(step, wholes + (mean["short"] / step if source == "measured" else share), source, trained)


def _whole_step(mean: Mapping[str, float], wholes: int, share: float | None) -> float:
    """The mean over the `wholes` whole steps of an epoch, of which one begins it, from the means of those timed."""
    if "whole" not in mean and "first" not in mean:
        return mean["short"] / (share or 1.0)
    inner = mean.get("whole", mean.get("first", 0.0))
    return inner + (mean.get("first", inner) - inner) / wholes


def _mean(values: Sequence[float]) -> float:
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def _pace(step: float, effective_steps: float, source: LastStepSource | None, trained: int) -> Pace:
    if cost(step) is None:
        return NO_PACE
    rate = trained / effective_steps / step
    return Pace(step, cost(effective_steps * step), cost(rate), "steps", effective_steps, source, trained)


def of_epochs(trial: Trial, model: ModelLine | None, epoch_seconds: float | None) -> Pace:
    """The pace of a run that tells of whole epochs alone. A step is known where the images of an epoch are."""
    if cost(epoch_seconds) is None or epoch_seconds is None:
        return NO_PACE
    trained, count = of_an_epoch(trial, model)
    if not trained or not count:
        return Pace(epoch_seconds=epoch_seconds, source="epochs")
    share = last_step_share(trial, trained)
    steps = float(count) if share is None or count == 1 else count - 1 + share
    return Pace(
        step_seconds=cost(epoch_seconds / steps),
        epoch_seconds=epoch_seconds,
        images_per_second=cost(trained / epoch_seconds),
        source="epochs",
        effective_steps=steps,
        last_step_source=None if share is None or count == 1 else "share",
        epoch_images=trained,
    )


def of_an_epoch(trial: Trial, model: ModelLine | None) -> tuple[int | None, int | None]:
    """Images trained in an epoch and its optimizer steps; None where the size of the dataset is not known."""
    if model is None or model.train_samples is None:
        return None, None
    samples, train = samples_used(model.train_samples, trial.data.fraction), trial.train
    steps = steps_per_epoch(samples, trial.world.size, train.micro_batch, train.grad_accum, train.drop_last)
    return steps * trial.global_batch if train.drop_last else samples, steps


def whole_epochs_alone(run: Run) -> bool:
    """Whether an imported run tells of epochs and of no step."""
    return run.header.imported is not None and not any(rank.steps for rank in run.ranks)


def cost(value: float | None) -> float | None:
    """What statistics can work with: positive and finite. Records are input, and may hold anything."""
    return value if value is not None and math.isfinite(value) and value > 0 else None
