"""Do ranks of unlike speed take the images that suit them, so that none waits for another?

A rank's speed is judged by the time that an image takes in forward and backward.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from vitscale.analysis.quality.wording import count, name, note, warning
from vitscale.analysis.runs.environments import environments
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.time.exposure import computing_seconds, explained
from vitscale.analysis.trials import TrialResult
from vitscale.present.document import Finding
from vitscale.present.units import rough_percent as percent
from vitscale.store.lines import Steps
from vitscale.store.results import Run
from vitscale.trial.rank_batches import longest, micro_batches, shares
from vitscale.trial.trial import Trial

_WORTH_IT = 0.05
"""Saving, as a share of the time of forward and backward, from which other shares are advised."""


def mixed_hardware(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose ranks differ in type or quota but take equally many images; with the shares that suit them."""
    mixed = [trial for trial in measured if trial.trial.train.micro_batches is None and _unlike(trial)]
    if not mixed:
        return
    widest = _widest(mixed)
    speeds = widest.rank_speeds
    otherwise = "Or use one device type, or read the figures as those of the slowest."
    if speeds is None:
        advice = f"Set train.rank_speeds: `vitscale check` measures them. {otherwise}"
    elif gain(widest, speeds) < _WORTH_IT:
        advice = f"Other shares would save less than {percent(_WORTH_IT)} of forward and backward."
    else:
        advice = f"{_set(widest, speeds)} {otherwise}"
    yield warning(
        "mixed-hardware",
        f"mixed hardware inside {count(mixed)}: {_unlike(widest)}; all ranks take equally many images, so that the "
        f"slowest sets the pace of every step{_measured(speeds)}",
        advice,
        mixed,
    )


def unequal_shares(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose ranks take unequal shares of the images, and whether the shares suit the ranks."""
    unequal = [trial for trial in measured if trial.trial.train.micro_batches is not None]
    if not unequal:
        return
    widest = _widest(unequal)
    speeds = widest.rank_speeds
    suits = speeds is None or gain(widest, speeds) < _WORTH_IT
    hardware = f" ({_unlike(widest)})" if _unlike(widest) else ""
    same = "A step has the images and the gradient of equal shares: these trials compare as any other."
    yield (note if suits else warning)(
        "unequal-shares",
        f"unequal shares in {count(unequal)}: {name(widest)}{hardware}{_measured(speeds)}",
        same if speeds is None or suits else f"{_set(widest, speeds)} {same}",
        unequal,
    )


def _widest(trials: Sequence[TrialResult]) -> TrialResult:
    """The trial with the most ranks: smaller ones use the first of its speeds."""
    return max(trials, key=lambda trial: trial.trial.world.size)


def _set(trial: TrialResult, speeds: Sequence[float]) -> str:
    return (
        f"Set rank_speeds = {list(speeds)} under [train]: forward and backward of a step then take "
        f"{percent(gain(trial, speeds))} less time, with the same images in it."
    )


def _measured(speeds: Sequence[float] | None) -> str:
    if speeds is None:
        return ""
    slowest = min(speeds)
    return (
        f". By the time an image takes them, rank {speeds.index(slowest)} computes at {slowest:g} of the fastest, and "
        f"{len(speeds)} ranks do the work of {sum(speeds):.3g} like that one"
    )


def _unlike(trial: TrialResult) -> str:
    """The types or quotas that differ among a trial's ranks; empty where none do, or where nothing is known."""
    for run in trial.records:
        ranks = environments(run)
        if len(devices := sorted({rank.device.name for rank in ranks})) > 1:
            return " and ".join(devices)
        if len(quotas := {rank.cpu_quota_cores for rank in ranks}) > 1:
            each = sorted(quotas, key=lambda cores: math.inf if cores is None else cores)
            return f"CPU quotas of {' and '.join('none' if cores is None else f'{cores:g}' for cores in each)} cores"
    return ""


def rank_speeds(trial: Trial, runs: Sequence[Run], figures: Sequence[RunFigures]) -> tuple[float, ...] | None:
    """Each rank's speed against the fastest, 1.0, to two decimals; None where no full step was explained on all ranks.

    It is the median over the explained steps of all runs, without waiting and transfers. It holds for about as many
    images as were taken: a micro-step has a cost that does not depend on its images.
    """
    by_step = [
        per_image
        for run, own in zip(runs, figures, strict=True)
        for per_image in _seconds_per_image(run, own.steady_from or 0)
    ]
    if not by_step:
        return None
    seconds = [statistics.median(of_rank) for of_rank in zip(*by_step, strict=True)]
    if len(seconds) != trial.world.size:
        return None
    return tuple(max(0.01, round(min(seconds) / each, 2)) for each in seconds)


def gain(result: TrialResult, speeds: Sequence[float]) -> float:
    """Share by which forward and backward of a step would be shorter if its images were divided by `speeds`."""
    taken = micro_batches(result.trial.train, result.trial.layout.data)
    return 1 - longest(shares(sum(taken), speeds), speeds) / longest(taken, speeds)


def _seconds_per_image(run: Run, steady_from: int) -> Iterator[tuple[float, ...]]:
    """Seconds of forward and backward per image and rank, for each full step from `steady_from` that all explained."""
    of_ranks = {rank.rank: Steps.of(rank.steps) for rank in run.ranks}
    for lines in explained(run, steady_from):
        images: dict[int, int] = {}
        for rank, steps in of_ranks.items():
            if len(own := steps.images[steps.step == lines[0][1].step]):
                images[rank] = int(own[-1])
        if sum(images.values()) != run.header.trial.global_batch or min(images.values()) < 1:
            continue
        seconds = [computing_seconds(line) / images[rank] if rank in images else 0.0 for rank, line in lines]
        if min(seconds) > 0:
            yield tuple(seconds)
