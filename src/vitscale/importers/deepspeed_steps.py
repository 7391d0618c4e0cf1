"""Makes the steps of one rank of its timers: how long each took, and where its time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from vitscale.importers.deepspeed_lines import Broken, Times
from vitscale.store.records import ExplainedLine, PhaseName, StepLine
from vitscale.trial.step_schedule import StepWindow

MOST_EXPLAINED = 2000
"""Of a rank's steps; of more, evenly spaced ones."""
WARMUP_STEPS = 1
"""The first step of a log builds kernels and allocates memory; further slow ones are found by the analysis."""
_PAUSE = 0.2
"""Of a step: so much more than usual between two lines is a pause (evaluation, a checkpoint, a lost line)."""
_ROUNDING = 0.005
"""Seconds by which a timestamp and the timers may disagree."""
UNTOLD = {
    "data_wait": "DeepSpeed's timers leave out what lies between two steps",
    "h2d": "DeepSpeed's timers leave out what lies between two steps",
    "launch_gaps": "DeepSpeed's timers do not tell when the device is idle",
}
ONE_RANK = (
    "the exchange of gradients on rank {} holds the transfer and the wait for the slowest rank: without the times of "
    "the others they cannot be told apart"
)


@dataclass
class RankTimes:
    """One rank's timers in order; None stands for a step whose line is broken."""

    steps: list[tuple[Times, tuple[Times, ...]] | None] = field(default_factory=list)
    """A step, and its micro-steps where all of them were printed."""
    broken_at: dict[int, float | None] = field(default_factory=dict)
    """Step to the time of its broken line."""
    micro: list[Times] = field(default_factory=list)
    """Of the step that is not over."""

    def take(self, timer: Times | Broken) -> None:
        """The next line."""
        if timer.micro:
            if isinstance(timer, Times):
                self.micro.append(timer)
        elif isinstance(timer, Broken):
            self.broken_at[len(self.steps)] = timer.unix_seconds
            self.steps.append(None)
            self.micro = []
        else:
            self.steps.append((timer, tuple(self.micro)))
            self.micro = []


@dataclass(frozen=True)
class _Timed:
    number: int
    times: Times
    micro: tuple[Times, ...]
    gap: float | None
    """Seconds between the end of the step before and the first timer of this one; null where no time was printed."""


def step_lines(
    rank: RankTimes, images: int, grad_accum: int, untold: str
) -> tuple[tuple[StepLine, ...], tuple[ExplainedLine, ...]]:
    """The steps of one rank, and where their time went.

    A step lasts from the line of the step before to its own, as `StepLine` means it: what lies between two steps (data,
    Python) is in it, which the timers leave out. Where lines carry no time it is the timers' sum. A step after a pause
    is kept, marked as settling.

    Args:
        rank: its timers.
        images: of one step of one rank.
        grad_accum: micro-steps of a step.
        untold: why waiting and transfer cannot be told apart; empty where they can.
    """
    timed = _timed(rank)
    gaps = [step.gap for step in timed if step.gap is not None]
    usual = statistics.median(gaps) if gaps else 0.0
    stride = max(1, -(-len(timed) // MOST_EXPLAINED))
    steps, explained = [], []
    for step in timed:
        gap = usual if step.gap is None else step.gap
        paused = step.gap is not None and gap > usual + _PAUSE * step.times.total
        window: StepWindow = "settling" if paused else "light"
        # The first line of a log has none before it.
        seconds = step.times.total + (gap if step.number else 0.0)
        steps.append(
            StepLine(
                step=step.number,
                epoch=0,
                seconds=seconds,
                images=images,
                loss=None,
                warmup=step.number < WARMUP_STEPS,
                window=window,
            )
        )
        if step.number % stride == 0 and not paused:
            micro = step.micro if len(step.micro) == grad_accum and grad_accum > 1 else (step.times,)
            explained.append(_explained(step, micro, seconds, untold))
    return tuple(steps), tuple(explained)


def _timed(rank: RankTimes) -> list[_Timed]:
    timed_steps = []
    before: float | None = None
    for number, step in enumerate(rank.steps):
        if step is None:
            before = rank.broken_at.get(number)
            continue
        times, micro = step
        gap = None
        if before is not None and times.unix_seconds is not None:
            gap = times.unix_seconds - before - times.total
            # Less than nothing: a clock that was set, or lines that were held back.
            gap = None if gap < -_ROUNDING else max(0.0, gap)
        timed_steps.append(_Timed(number, times, micro, gap))
        before = times.unix_seconds
    return timed_steps


def _explained(step: _Timed, micro: Sequence[Times], seconds: float, untold: str) -> ExplainedLine:
    """The parts in their order: between the steps, then forward, backward and the exchange of each micro-step."""
    at = max(0.0, seconds - step.times.total)
    # Micro-steps are printed with two decimals each: the step's own figures are those that add up.
    scale = (step.times.total - step.times.step) / (sum(times.total - times.step for times in micro) or 1.0)
    phases: list[tuple[PhaseName, float, float]] = []
    exchanges: list[tuple[float, float]] = []
    for times in micro:
        forward = at + scale * times.forward
        computed = forward + scale * times.inner
        exchanged = computed + scale * (times.allreduce or 0.0)
        phases += [("forward", at, forward), ("backward", forward, exchanged)]
        if times.allreduce:
            exchanges.append((computed, exchanged))
        at = exchanged
    phases.append(("optimizer", at, seconds))
    return ExplainedLine(
        step=step.number,
        block=0,
        device="cuda",
        seconds=seconds,
        phases=tuple(phases),
        idle=tuple(exchanges),
        collectives=tuple(("world", "all_reduce", start, end) for start, end in exchanges),
        unknown=UNTOLD | ({"wait": untold, "wire": untold} if untold else {}),
    )
