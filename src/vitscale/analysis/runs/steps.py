"""The steps of a run on all its ranks: what each adds to the time that passed, which are alike, and which are slow.

All ranks' clocks start together, at a barrier. From there the time that has passed by the end of step k is the largest
over ranks of the sum of their steps, and a step is what it adds to that:

    T(k) = max over ranks of (d(r, 1) + ... + d(r, k))          elapsed(k) = T(k) - T(k - 1)

so that any stretch of consecutive steps adds up to what passed. The largest over ranks of each step would not:
collectives tie the ranks' pace, so that a rank which stamps late in one step is short in the next, and a sum of such
maxima is more than passed, the more ranks the more.

A step is slow beyond all others of its run by a preemption, a page-cache miss, a kernel compiled anew. One such step
among 80 that takes eight seconds would decide what all 80 say. It is set aside, on all ranks, where it is rare: at most
one step in a hundred. What comes more often is the machine's nature, and stays in every figure.

How fast a run goes: from its timed steps, or of an imported one from whole epochs shared out over their steps.

An epoch of K optimizer steps, of which the last one holds the images that are left, takes

    epoch = K_eff x step         K_eff = K - 1 + t_last / step          images/s = images trained in an epoch / epoch

with `step` the mean of whole steps: the one that begins an epoch (it may wait for the loader) counts once in K where it
was timed. t_last is the mean of the short steps that were timed, else its slots' share of a whole step
(`trial.last_step_share`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from vitscale.store.records import ModelLine, RankRecord, StepLine
from vitscale.store.results import Run
from vitscale.trial.trial import Trial, last_step_share, samples_used, steps_per_epoch

StepKind = Literal["whole", "first", "short"]
"""whole: a full global batch. first: one that begins an epoch after the first, and may wait for the loader. short: the
last of an epoch, with the images that are left."""

FEWEST_STEPS = 8
"""Below it nobody knows what is usual, and nothing is set aside."""
SLOWER_TIMES = 1.5
DEVIATIONS = 6.0
"""Of the logarithms: with both, chance alone sets a step aside in at most 2 % of runs of log-normal noise."""
ONE_IN = 100
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of normal noise to its standard deviation."""
_AS_LONG = 0.5


def elapsed_by_step(steps: Mapping[int, Sequence[StepLine]]) -> dict[int, float]:
    """Seconds that each step adds to the time that passed: see the module.

    Clocks start together where an epoch or an explained block begins and after such a block. After marked warm-up they
    are taken as together, and so they are after a step that is missing in the record.

    Args:
        steps: step number to one line per rank, in rising order.
    """
    elapsed: dict[int, float] = {}
    sums: list[float] = []
    before: StepLine | None = None
    for step, lines in steps.items():
        line = lines[0]
        if (
            before is None
            or (before.step + 1, before.epoch, before.warmup) != (step, line.epoch, line.warmup)
            or (before.window == "explained") != (line.window == "explained")
        ):
            sums = [0.0] * len(lines)
        passed = max(sums)
        sums = [total + own.seconds for total, own in zip(sums, lines, strict=True)]
        elapsed[step] = max(sums) - passed
        before = line
    return elapsed


def step_kinds(steps: Mapping[int, Sequence[StepLine]]) -> dict[int, StepKind]:
    """What work each step holds, by its images and its place.

    The run's very first step is a whole one: if it is slow, that is warm-up.
    """
    images = {step: sum(line.images for line in lines) for step, lines in steps.items()}
    whole = max(images.values(), default=0)
    by_epoch: dict[int, list[int]] = {}
    for step, lines in steps.items():
        by_epoch.setdefault(lines[0].epoch, []).append(step)
    begins = {same[0] for same in list(by_epoch.values())[1:] if len(same) > 1}
    return {step: "short" if images[step] < whole else "first" if step in begins else "whole" for step in steps}


@dataclass(frozen=True)
class SlowSteps:
    """The slow steps of one run, by number."""

    set_aside: tuple[int, ...] = ()
    """In no figure of the run but its tails (p95, p99) and its elapsed epochs."""
    kept: tuple[int, ...] = ()
    """They come too often to be set aside, and are in every figure."""


def slow_steps(seconds: Mapping[int, float], kinds: Mapping[int, StepKind]) -> SlowSteps:
    """Finds the slow ones among a run's light steps after warm-up.

    A step is slow where it takes 1.5 times the median whole step, and more than 6 scaled median absolute deviations of
    the logarithms beyond it. One that begins an epoch is held against the least of its like instead, where there are
    two or more and that is longer: waiting for the loader is part of every epoch.

    At most one in a hundred is set aside, and one in runs shorter than that: the slowest. One is not set aside where
    one more is at least half as long beyond the usual as it is: such steps come more often than that.

    Args:
        seconds: elapsed seconds by step (`elapsed_by_step`).
        kinds: of each step (`step_kinds`).
    """
    if len(seconds) < FEWEST_STEPS:
        return SlowSteps()
    whole = [value for step, value in seconds.items() if kinds[step] == "whole"]
    usual = statistics.median(whole if len(whole) >= FEWEST_STEPS else seconds.values())
    if usual <= 0:
        return SlowSteps()
    logs = [math.log(value) for value in whole or seconds.values() if value > 0]
    centre = statistics.median(logs)
    noise = _MAD_TO_SIGMA * statistics.median(abs(log - centre) for log in logs)
    margin = max(math.log(SLOWER_TIMES), DEVIATIONS * noise)
    firsts = sorted(value for step, value in seconds.items() if kinds[step] == "first")
    of_a_first = max(usual, firsts[0]) if len(firsts) > 1 else usual
    beyond = {
        step: value - level
        for step, value in seconds.items()
        if value > (level := of_a_first if kinds[step] == "first" else usual)
        and math.log(value) - math.log(level) > margin
    }
    slowest = sorted(beyond, key=beyond.__getitem__, reverse=True)
    most = max(1, len(seconds) // ONE_IN)
    count = next(
        count
        for count in range(min(most, len(slowest)), -1, -1)
        if count in (0, len(slowest)) or beyond[slowest[count]] < _AS_LONG * beyond[slowest[count - 1]]
    )
    return SlowSteps(tuple(sorted(slowest[:count])), tuple(sorted(slowest[count:])))


class _OfAStep(Protocol):
    @property
    def step(self) -> int: ...


Line = TypeVar("Line", bound=_OfAStep)


def common_steps(run: Run, lines_of: Callable[[RankRecord], Sequence[Line]]) -> list[tuple[Line, ...]]:
    """The lines, one per rank, of each step of which every rank needed has one, in order; empty if a rank is missing.

    Args:
        run: the record.
        lines_of: the lines of one rank, each with a `step`.
    """
    by_rank = [{line.step: line for line in lines_of(rank)} for rank in run.ranks]
    if not by_rank or len(by_rank) < len(run.ranks_needed):
        return []
    common = set.intersection(*(set(lines) for lines in by_rank))
    return [tuple(lines[step] for lines in by_rank) for step in sorted(common)]


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
