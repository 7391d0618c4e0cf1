"""Marks of a closed step -> its parts and the breaks before it. Pure arithmetic, which knows neither torch nor clocks.

A step reaches from the end of the step before to its own end. Breaks inside it are cut out: runs of evaluation marks
(forwards without gradients, fetches of another loader, saved checkpoints), each with the time around it, from the end
of the last training mark before the run to the begin of the first one after it. The rest is

    seconds = data + forward + backward + optimizer + other
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from .lines import HookedBreakLine, HookedStepLine
from .marks import BACKWARD, CHECKPOINT, DATA, EVALUATION, FORWARD, OPTIMIZER, Mark

_NS = 1e-9


class Break(NamedTuple):
    """Time inside a step's marks that belongs to no step."""

    begin_ns: int
    end_ns: int
    kind: str
    """"evaluation" or "checkpoint"."""
    evaluated_batches: int


class Pause(NamedTuple):
    """Time that the hook itself took between two steps: to write, to learn the model, to profile."""

    begin_ns: int
    end_ns: int


class BackwardTimes(NamedTuple):
    """When things happened in a rank's last backward, in nanoseconds of the host's monotonic clock; None if unknown."""

    first_bucket_ns: int | None
    """The first bucket of gradients was handed to the exchange."""
    last_gradient_ns: int | None
    """The rank's last gradient was ready."""


class ClosedStep(NamedTuple):
    """All that is known of a step when it is closed."""

    number: int
    begin_ns: int | None
    """End of the step before; None for the first step, which begins with its first training mark."""
    end_ns: int
    pause: Pause
    """Counts neither in the step nor in a break."""
    marks: Sequence[Mark]
    """In the order in which they ended."""
    is_forward_timed: bool
    """Whether all forwards of the step are among the marks."""
    backward_times: BackwardTimes | None = None
    profiled: bool = False


class DividedStep(NamedTuple):
    """A step's lines, and the breaks as times."""

    step: HookedStepLine
    break_lines: list[HookedBreakLine]
    breaks: list[Break]


def divide(closed: ClosedStep, training_loaders: Collection[int]) -> DividedStep:
    """The step's parts in seconds, and the breaks that were cut out of it.

    Args:
        training_loaders: numbers of the loaders whose fetches belong to training.
    """
    marks = sorted(closed.marks, key=_begin_ns)
    begin_ns = closed.begin_ns
    if begin_ns is None:
        begin_ns = first_training_begin(marks, training_loaders)
        marks = [mark for mark in marks if mark.begin_ns >= begin_ns]
    breaks = find_breaks(marks, begin_ns, training_loaders)
    training = [mark for mark in marks if not _is_evaluation(mark, training_loaders)]
    break_ns = sum(cut.end_ns - cut.begin_ns for cut in breaks)
    is_paused_in_break = any(_contains(cut, closed.pause) for cut in breaks)
    paused_ns = 0 if is_paused_in_break else closed.pause.end_ns - closed.pause.begin_ns
    seconds = (closed.end_ns - begin_ns - break_ns - paused_ns) * _NS
    data_seconds = _part_seconds(training, DATA)
    if not closed.is_forward_timed:
        training = [mark for mark in training if mark.kind != FORWARD]
    forward_seconds = _part_seconds(training, FORWARD)
    backward_seconds = _part_seconds(training, BACKWARD)
    optimizer_seconds = _part_seconds(training, OPTIMIZER)
    parts = [part or 0.0 for part in (data_seconds, forward_seconds, backward_seconds, optimizer_seconds)]
    last_backward = _last_backward(training)
    times = closed.backward_times
    step = HookedStepLine(
        number=closed.number,
        began_ns=_begin_after_breaks(begin_ns, breaks),
        seconds=seconds,
        images=_images(training),
        micro_steps=_micro_steps(training),
        data_seconds=data_seconds,
        copy_seconds=None,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        own_backward_seconds=_own_backward_seconds(training, last_backward, times),
        first_bucket_seconds=_seconds_into(last_backward, times.first_bucket_ns) if times is not None else None,
        optimizer_seconds=optimizer_seconds,
        other_seconds=max(seconds - sum(parts), 0.0),
        profiled=closed.profiled,
    )
    break_lines = [_break_line(cut, closed.pause, after_step=closed.number - 1) for cut in breaks]
    return DividedStep(step=step, break_lines=break_lines, breaks=breaks)


def find_breaks(marks: Iterable[Mark], begin_ns: int, training_loaders: Collection[int]) -> list[Break]:
    """Runs of evaluation marks with the time around them, in order.

    Args:
        marks: in order of their begin; the last one belongs to training.
        begin_ns: end of the step before.
        training_loaders: loaders whose fetches belong to training.
    """
    breaks = []
    training_end_ns = begin_ns
    run: list[Mark] = []
    for mark in marks:
        if _is_evaluation(mark, training_loaders):
            run.append(mark)
            continue
        if run:
            breaks.append(_break_around(run, begin_ns=training_end_ns, end_ns=mark.begin_ns))
            run = []
        training_end_ns = max(training_end_ns, mark.end_ns)
    return breaks


def first_training_begin(marks: Sequence[Mark], training_loaders: Collection[int]) -> int:
    """Begin of the first training mark after the last evaluation mark: where the first step of all begins.

    Raises:
        ValueError: no training mark follows.
    """
    begin_ns = None
    for mark in marks:
        if _is_evaluation(mark, training_loaders):
            begin_ns = None
        elif begin_ns is None:
            begin_ns = mark.begin_ns
    if begin_ns is None:
        raise ValueError("no training mark after the last evaluation")
    return begin_ns


def loader_before_backward(marks: Iterable[Mark]) -> int | None:
    """Number of the loader whose batch was the last one before the first backward; None without a fetch."""
    loader = None
    for mark in marks:
        if mark.kind == BACKWARD:
            break
        if mark.kind == DATA and mark.is_batch:
            loader = mark.source
    return loader


def _begin_ns(mark: Mark) -> int:
    return mark.begin_ns


def _is_evaluation(mark: Mark, training_loaders: Collection[int]) -> bool:
    if mark.kind == DATA:
        return mark.source not in training_loaders
    return mark.kind in (EVALUATION, CHECKPOINT)


def _break_around(run: Sequence[Mark], *, begin_ns: int, end_ns: int) -> Break:
    fetched_batches = sum(mark.kind == DATA and mark.is_batch for mark in run)
    forwards = sum(mark.kind == EVALUATION for mark in run)
    evaluated_batches = fetched_batches or forwards
    kind = "evaluation" if evaluated_batches else "checkpoint"
    return Break(begin_ns, max(begin_ns, end_ns), kind, evaluated_batches)


def _contains(cut: Break, pause: Pause) -> bool:
    return cut.begin_ns <= pause.begin_ns < cut.end_ns


def _break_line(cut: Break, pause: Pause, *, after_step: int) -> HookedBreakLine:
    paused_ns = pause.end_ns - pause.begin_ns if _contains(cut, pause) else 0
    return HookedBreakLine(
        after_step=after_step,
        began_ns=cut.begin_ns,
        seconds=(cut.end_ns - cut.begin_ns - paused_ns) * _NS,
        kind=cut.kind,
        evaluated_batches=cut.evaluated_batches or None,
    )


def _begin_after_breaks(begin_ns: int, breaks: Iterable[Break]) -> int:
    """Begin of the step itself: after a break that follows the step before without a training mark between them."""
    for cut in breaks:
        if cut.begin_ns == begin_ns:
            begin_ns = cut.end_ns
    return begin_ns


def _part_seconds(marks: Iterable[Mark], kind: str) -> float | None:
    """Seconds of all marks of this kind without what is nested in them; None if there are none."""
    durations = [mark.own_ns for mark in marks if mark.kind == kind]
    return sum(durations) * _NS if durations else None


def _images(training: Iterable[Mark]) -> int | None:
    """Images of all different batches of the step; None if that of one of them is unknown."""
    images = 0
    has_forward = False
    for mark in training:
        if mark.kind != FORWARD or not mark.is_batch:
            continue
        if mark.images is None:
            return None
        images += mark.images
        has_forward = True
    return images if has_forward else None


def _micro_steps(training: Iterable[Mark]) -> int:
    """Batches that the model ran on; backward calls where forwards are unknown."""
    forwards = sum(mark.kind == FORWARD and mark.is_batch for mark in training)
    backwards = sum(mark.kind == BACKWARD for mark in training)
    return max(forwards or backwards, 1)


def _last_backward(training: Sequence[Mark]) -> Mark | None:
    for mark in reversed(training):
        if mark.kind == BACKWARD:
            return mark
    return None


def _own_backward_seconds(
    training: Sequence[Mark], last_backward: Mark | None, times: BackwardTimes | None
) -> float | None:
    """Seconds of all backwards, the last one only until this rank's last gradient was ready.

    Backwards before the last one exchange nothing when gradients are accumulated without synchronisation.
    """
    if times is None or last_backward is None:
        return None
    last_seconds = _seconds_into(last_backward, times.last_gradient_ns)
    if last_seconds is None:
        return None
    earlier_ns = sum(mark.own_ns for mark in training if mark.kind == BACKWARD and mark is not last_backward)
    return earlier_ns * _NS + last_seconds


def _seconds_into(backward: Mark | None, moment_ns: int | None) -> float | None:
    """Seconds from the backward's begin to this moment; None if that is not inside this backward."""
    if backward is None or moment_ns is None:
        return None
    if not backward.begin_ns <= moment_ns <= backward.end_ns:
        return None
    return (moment_ns - backward.begin_ns) * _NS
