"""Do ranks of unlike speed take the images that suit them, so that none waits for another?

A rank's share is its part of the images of a step.

A rank's speed is judged by the time that an image takes in forward and backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from vitscale.analysis.quality.wording import counted_trials, note, warning
from vitscale.analysis.runs.environments import environments
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.time.exposure import computing_seconds, explained
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import rough_percent as percent
from vitscale.store.lines import Steps
from vitscale.store.results import Run
from vitscale.trial.rank_batches import longest, micro_batches, shares, speeds_from_rates
from vitscale.trial.trial import Trial

_LEAST_SAVING = 0.05
"""Least saving, as a share of the time of forward and backward, for which other shares are advised."""


def mixed_hardware(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Warns of trials whose ranks differ in type or quota but take equally many images; names shares that suit them."""
    with_equal_shares = [result for result in measured if result.trial.train.micro_batches is None]
    mixed = [result for result in with_equal_shares if _hardware_difference(result)]
    if not mixed:
        return
    largest = _largest_trial(mixed)
    speeds = largest.rank_speeds
    alternative = "Or use one device type, or read the figures as those of the slowest."
    if speeds is None:
        advice = f"Set train.rank_speeds: `vitscale check` measures them. {alternative}"
    elif time_saved(largest.trial, speeds) < _LEAST_SAVING:
        advice = f"Other shares would save less than {percent(_LEAST_SAVING)} of forward and backward."
    else:
        advice = f"{_advice_to_set(speeds, largest)} {alternative}"
    yield warning(
        "mixed-hardware",
        message=f"mixed hardware inside {counted_trials(mixed)}: {_hardware_difference(largest)}; all ranks take "
        f"equally many images, so that the slowest sets the pace of every step{_measured_speeds(speeds)}",
        advice=advice,
        trials=mixed,
    )


def unequal_shares(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials whose ranks take unequal shares of the images; warns where other shares would save time."""
    unequal = [result for result in measured if result.trial.train.micro_batches is not None]
    if not unequal:
        return
    largest = _largest_trial(unequal)
    speeds = largest.rank_speeds
    difference = _hardware_difference(largest)
    hardware = f" ({difference})" if difference else ""
    message = f"unequal shares in {counted_trials(unequal)}: {largest.name}{hardware}{_measured_speeds(speeds)}"
    reassurance = "A step has the images and the gradient of equal shares: these trials compare as any other."
    if speeds is None or time_saved(largest.trial, speeds) < _LEAST_SAVING:
        yield note("unequal-shares", message=message, advice=reassurance, trials=unequal)
    else:
        advice = f"{_advice_to_set(speeds, largest)} {reassurance}"
        yield warning("unequal-shares", message=message, advice=advice, trials=unequal)


def _largest_trial(trials: Sequence[TrialResult]) -> TrialResult:
    """Return the trial with the most ranks, which stands for all: smaller ones use the first of its speeds."""
    return max(trials, key=lambda result: result.trial.world.size)


def _advice_to_set(speeds: Sequence[float], trial: TrialResult) -> str:
    """Return the advice to divide the images by these speeds, with what that saves in a trial."""
    saved = percent(time_saved(trial.trial, speeds))
    return (
        f"Set rank_speeds = {list(speeds)} under [train]: forward and backward of a step then take {saved} less time, "
        "with the same images in it."
    )


def _measured_speeds(speeds: Sequence[float] | None) -> str:
    """Return ". By the time an image takes them, rank 3 computes at 0.5 of the fastest, ...": the end of a message.

    Empty where nothing was measured.
    """
    if speeds is None:
        return ""
    slowest = min(speeds)
    return (
        f". By the time an image takes them, rank {speeds.index(slowest)} computes at {slowest:g} of the fastest, and "
        f"{len(speeds)} ranks do the work of {sum(speeds):.3g} like that one"
    )


def _hardware_difference(trial: TrialResult) -> str:
    """Return how the ranks of a trial differ: "A100 and V100", "CPU quotas of 2 and 4 cores".

    Empty where they are alike, or where nothing is known of them.
    """
    for run in trial.recorded_runs:
        ranks = environments(run)
        devices = sorted({rank.device.name for rank in ranks})
        if len(devices) > 1:
            return " and ".join(devices)
        quotas = {rank.cpu_quota_cores for rank in ranks}
        if len(quotas) > 1:
            return f"CPU quotas of {_quotas_in_words(quotas)} cores"
    return ""


def _quotas_in_words(quotas: Collection[float | None]) -> str:
    """Return "2 and 4 and none": the smallest first, no quota last."""
    limited = sorted(cores for cores in quotas if cores is not None)
    words = [f"{cores:g}" for cores in limited]
    if None in quotas:
        words.append("none")
    return " and ".join(words)


def explained_rank_speeds(trial: Trial, runs: Sequence[Run], figures: Sequence[RunFigures]) -> tuple[float, ...] | None:
    """Return values for `train.rank_speeds` from explained steps; None where no full step was explained on all ranks.

    It is the median over the explained steps of all runs, without waiting and transfers. It holds for about as many
    images as were taken: a micro-step has a cost that does not depend on its images.
    """
    image_seconds_by_step: list[tuple[float, ...]] = []  # [step][rank]
    for run, run_figures in zip(runs, figures, strict=True):
        image_seconds_by_step += _seconds_per_image(run, run_figures.steady_from or 0)
    if not image_seconds_by_step:
        return None
    image_seconds_by_rank = zip(*image_seconds_by_step, strict=True)  # [rank][step]
    median_seconds = [statistics.median(image_seconds) for image_seconds in image_seconds_by_rank]
    if len(median_seconds) != trial.world.size:
        return None
    fastest_seconds = min(median_seconds)
    return speeds_from_rates([fastest_seconds / seconds for seconds in median_seconds])


def time_saved(trial: Trial, speeds: Sequence[float]) -> float:
    """Return the share by which forward and backward of a step would be shorter if its images suited `speeds`."""
    images = micro_batches(trial.train, trial.layout.data)
    better_images = shares(sum(images), speeds)
    return 1 - longest(better_images, speeds) / longest(images, speeds)


def _seconds_per_image(run: Run, steady_from: int) -> Iterator[tuple[float, ...]]:
    """Yield the seconds of forward and backward per image, by rank, of each full step that was explained on all ranks.

    Args:
        run: one run of a trial.
        steady_from: number of the first step that counts; those before it are warm-up.
    """
    steps_by_rank = {rank.rank: Steps.of(rank.steps) for rank in run.ranks}
    for lines in explained(run, steady_from):
        _, first_line = lines[0]
        images_by_rank = _images_in_step(steps_by_rank, first_line.step)
        images = images_by_rank.values()
        is_full = sum(images) == run.header.trial.global_batch and min(images) > 0
        if not is_full or any(rank not in images_by_rank for rank, _ in lines):
            continue
        seconds = tuple(computing_seconds(line) / images_by_rank[rank] for rank, line in lines)
        if min(seconds) > 0:
            yield seconds


def _images_in_step(steps_by_rank: Mapping[int, Steps], step: int) -> dict[int, int]:
    """Return rank -> its images in a step; ranks without a record of the step are left out."""
    images_by_rank = {}
    for rank, steps in steps_by_rank.items():
        images = steps.images[steps.step == step]
        if len(images) > 0:
            images_by_rank[rank] = int(images[-1])
    return images_by_rank
