"""The figures of one run, from the raw values of its ranks.

An optimizer step takes as long as its slowest rank. Warm-up steps are in no figure: neither those that are marked, nor
those after them that are seen to be slow still (`vitscale.analysis.warmup`). Where an imported log tells of whole
epochs alone, a step is the epoch shared out over its steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.analysis.pace import NO_PACE, StepSource, cost, of_an_epoch, of_epochs, of_steps, whole_epochs_alone
from vitscale.analysis.statistics import quantile
from vitscale.analysis.warmup import WarmUp, warm_up
from vitscale.record import ModelLine, PhaseLine, RankRecord, Run, StepLine
from vitscale.trial import Trial

PHASES: tuple[str, ...] = ("launch", "imports", "data", "model", "engine", "first_step")
"""Parts of the start-up, in order."""

EpochSource = Literal["measured", "extrapolated"]

_FEWEST_FOR_SPREAD = 5
_MOST_NAMED = 4


@dataclass(frozen=True)
class EpochFigures:
    """One epoch, reduced over ranks. Accuracy is a share in [0, 1]."""

    epoch: int
    seconds: float | None
    complete: bool
    train_loss: float | None
    train_accuracy: float | None
    held_out_loss: float | None
    held_out_accuracy: float | None


@dataclass(frozen=True)
class RunFigures:
    """What one completed run says. None where its record does not tell."""

    run: str
    """Trial and repeat, for messages."""
    timed_steps: int
    detected_warmup_steps: int
    """Light steps after the marked warm-up that were slow still: kept in the record, in none of these figures."""
    steady_from: int | None
    """Number of the first timed step: what lies before it is warm-up, of whatever window."""
    still_falling_by: float | None
    """Share by which step times go on falling through the rest of the run; None where they are steady."""
    step_spread: float | None
    """Interquartile range of the times of like steps over their median."""
    step_seconds: float | None
    """Median over the timed steps of the slowest rank's seconds."""
    step_seconds_source: StepSource | None
    """epochs: an imported run's epoch seconds / steps of an epoch, for its log tells of no step."""
    step_seconds_p95: float | None
    step_seconds_p99: float | None
    images_per_second: float | None
    """Real images of all ranks in the timed steps / the seconds of those steps."""
    epoch_seconds: float | None
    epoch_seconds_source: EpochSource | None
    training_seconds: float | None
    """All steps but the first, which belongs to the start-up; warm-up included."""
    startup: Mapping[str, float]
    """Phase to the seconds of its slowest rank."""
    epochs: tuple[EpochFigures, ...]
    loss_by_step: tuple[tuple[int, float | None], ...]
    """Step number and the mean loss over ranks; None where it was not finite."""
    peak_bytes: int | None
    """Of the rank that needed most."""
    model: ModelLine | None
    notes: tuple[str, ...]
    """What the record lacks."""

    @property
    def startup_seconds(self) -> float | None:
        """Sum of the phases."""
        return sum(self.startup.values()) if self.startup else None


def figures(run: Run) -> RunFigures:
    """Works out the figures of one run from its record.

    Of an imported run only the ranks that its files tell of are needed.
    """
    header = run.header
    name = f"{header.trial_id} repeat {header.repeat}"
    notes: list[str] = []
    steps = _common_steps(run.ranks, run.ranks_needed, notes)
    light = {n: lines for n, lines in steps.items() if all(s.window == "light" and not s.warmup for s in lines)}
    alike = _alike(light, steps)
    warm = warm_up([_slowest(light[step]) for step in alike])
    steady = _steady(list(light), alike, warm)
    timed = [light[step] for step in steady]
    slowest = [_slowest(lines) for lines in timed]
    total = sum(slowest)
    if total <= 0 and not whole_epochs_alone(run):
        notes.append("no timed step that all ranks recorded")
    if total <= 0:
        slowest = []
    model = next((rank.model for rank in run.ranks if rank.model is not None), None)
    epochs = _epochs(run.ranks, run.ranks_needed if header.imported else (), notes)
    disturbed = {
        line.epoch
        for step, lines in steps.items()
        for line in lines
        if line.warmup or line.window != "light" or (steady and step < steady[0])
    }
    epoch_seconds, source = _epoch_seconds(header.trial, model, epochs, slowest, disturbed)
    startup = _startup(run.ranks)
    missing = [phase for phase in PHASES if phase not in startup]
    if missing and header.imported is None:
        notes.append(f"start-up lacks {', '.join(missing)}")
    after_first = [_slowest(lines) for lines in list(steps.values())[1:]]
    pace = NO_PACE
    if slowest:
        pace = of_steps(run, timed, slowest)
    elif whole_epochs_alone(run):
        pace = of_epochs(header.trial, model, epoch_seconds)
    return RunFigures(
        run=name,
        timed_steps=len(slowest),
        detected_warmup_steps=len(light) - len(steady),
        steady_from=steady[0] if steady else None,
        still_falling_by=warm.still_falling_by,
        step_spread=_spread([_slowest(light[step]) for step in alike if step >= steady[0]]),
        step_seconds=pace.step_seconds,
        step_seconds_source=pace.source,
        step_seconds_p95=quantile(slowest, 0.95) if slowest else None,
        step_seconds_p99=quantile(slowest, 0.99) if slowest else None,
        images_per_second=pace.images_per_second,
        epoch_seconds=cost(epoch_seconds),
        epoch_seconds_source=source if cost(epoch_seconds) else None,
        training_seconds=sum(after_first) if after_first else None,
        startup=startup,
        epochs=epochs,
        loss_by_step=_loss_by_step(run, steps),
        peak_bytes=max((e.peak_bytes for r in run.ranks for e in r.epochs if e.peak_bytes is not None), default=None),
        model=model,
        notes=tuple(f"{name}: {note}" for note in notes),
    )


def _common_steps(
    ranks: Sequence[RankRecord], needed: Iterable[int], notes: list[str]
) -> dict[int, tuple[StepLine, ...]]:
    """Step number to one line per rank, in order, for the steps that every rank of `needed` recorded."""
    present = {rank.rank for rank in ranks}
    if absent := [rank for rank in needed if rank not in present]:
        notes.append(f"no record of {'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))}")
        return {}
    if not ranks:
        return {}
    by_rank = [{line.step: line for line in rank.steps} for rank in ranks]
    common = set(by_rank[0]).intersection(*by_rank[1:])
    most = max(len(lines) for lines in by_rank)
    if any(len(lines) != len(common) for lines in by_rank):
        notes.append(f"ranks disagree in their steps: only the {len(common)} of {most} that all recorded count")
    return {step: tuple(lines[step] for lines in by_rank) for step in sorted(common)}


def _loss_by_step(run: Run, steps: Mapping[int, Sequence[StepLine]]) -> tuple[tuple[int, float | None], ...]:
    """Of an imported run the steps whose loss the log tells: elsewhere it is not known, rather than not finite."""
    means = [(step, _mean([line.loss for line in lines])) for step, lines in steps.items()]
    return tuple((step, loss) for step, loss in means if loss is not None or run.header.imported is None)


def _slowest(lines: Sequence[StepLine]) -> float:
    return max(line.seconds for line in lines)


def _alike(light: Mapping[int, Sequence[StepLine]], steps: Mapping[int, Sequence[StepLine]]) -> list[int]:
    """The light steps that do equal work: of whole batches, and none that waits for the loader to begin an epoch.

    The run's very first step is one of them: if it is slow, that is warm-up.
    """
    images = {step: sum(line.images for line in lines) for step, lines in light.items()}
    whole = max(images.values(), default=0)
    begins: dict[int, int] = {}
    for step, lines in steps.items():
        begins.setdefault(lines[0].epoch, step)
    later = set(list(begins.values())[1:])
    return [step for step in light if images[step] == whole and step not in later]


def _steady(light: Sequence[int], alike: Sequence[int], warm: WarmUp) -> Sequence[int]:
    """The light steps after the last of `alike` that is warm-up; at least half of them."""
    if not warm.steps:
        return light
    return light[min(light.index(alike[warm.steps - 1]) + 1, len(light) // 2) :]


def _spread(seconds: Sequence[float]) -> float | None:
    if len(seconds) < _FEWEST_FOR_SPREAD or statistics.median(seconds) <= 0:
        return None
    return (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / statistics.median(seconds)


def _epochs(ranks: Sequence[RankRecord], needed: Collection[int], notes: list[str]) -> tuple[EpochFigures, ...]:
    """Each epoch once: its figures are the same on every rank, its seconds are the slowest rank's.

    Where a rank of `needed` lacks an epoch, nobody knows the slowest: that epoch has no seconds.
    """
    by_rank = {rank.rank: {line.epoch: line for line in rank.epochs} for rank in ranks}
    found, partial = [], []
    for number in sorted({number for lines in by_rank.values() for number in lines}):
        same = [lines[number] for lines in by_rank.values() if number in lines]
        first = same[0]
        whole = all(number in by_rank.get(rank, {}) for rank in needed)
        if not whole:
            partial.append(number)
        found.append(
            EpochFigures(
                epoch=number,
                seconds=max(line.seconds for line in same) if whole else None,
                complete=all(line.complete for line in same),
                train_loss=_finite(first.train_loss),
                train_accuracy=_finite(first.train_accuracy),
                held_out_loss=_finite(first.held_out_loss),
                held_out_accuracy=_finite(first.held_out_accuracy),
            )
        )
    if partial:
        listed = f"{', '.join(map(str, partial[:_MOST_NAMED]))}{', ...' if len(partial) > _MOST_NAMED else ''}"
        notes.append(f"not every rank tells of epoch{'s' if len(partial) > 1 else ''} {listed}: left out of its time")
    return tuple(found)


def _epoch_seconds(
    trial: Trial,
    model: ModelLine | None,
    epochs: Sequence[EpochFigures],
    slowest: Sequence[float],
    disturbed: Collection[int],
) -> tuple[float | None, EpochSource | None]:
    """Median of the complete epochs of light steps alone; else steps per epoch x mean timed step.

    Which epochs hold warm-up is counted, not read off the steps: a step's mark may be in a line that was left out.
    """
    _, steps = of_an_epoch(trial, model)
    warmup = trial.window.warmup_steps
    if steps is None and warmup:
        return None, None
    measured = [
        e.seconds
        for e in epochs
        if e.complete and e.epoch * (steps or 0) >= warmup and e.seconds and e.epoch not in disturbed
    ]
    if measured:
        return statistics.median(measured), "measured"
    return (steps * statistics.fmean(slowest), "extrapolated") if steps and slowest else (None, None)


def _startup(ranks: Sequence[RankRecord]) -> dict[str, float]:
    def seconds(phases: Iterable[PhaseLine], name: str) -> float | None:
        found = [phase.seconds for phase in phases if phase.name == name]
        return sum(found) if found else None

    by_phase = {name: [s for rank in ranks if (s := seconds(rank.phases, name)) is not None] for name in PHASES}
    return {name: max(found) for name, found in by_phase.items() if found}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None as soon as one value is unknown or not finite."""
    known = [value for value in map(_finite, values) if value is not None]
    return statistics.fmean(known) if values and len(known) == len(values) else None
