"""Marks with known times -> parts and breaks, computed by hand; no torch."""

from __future__ import annotations

import pytest

from vitscale.hook.lines import HookedBreakLine
from vitscale.hook.marks import BACKWARD, CHECKPOINT, DATA, EVALUATION, FORWARD, OPTIMIZER, Mark
from vitscale.hook.steps import BackwardTimes, ClosedStep, DividedStep, Pause, divide
from vitscale.hook.training_loaders import TrainingLoaders

pytestmark = pytest.mark.computing

MS = 1_000_000
TRAIN, VALIDATION = 1, 2


def mark(kind: str, begin_ms: float, end_ms: float, **fields: int | bool | None) -> Mark:
    return Mark(kind, round(begin_ms * MS), round(end_ms * MS), **fields)  # type: ignore[arg-type]


def data(begin_ms: float, end_ms: float, source: int = TRAIN, *, is_batch: bool = True) -> Mark:
    return mark(DATA, begin_ms, end_ms, source=source, is_batch=is_batch)


def divided(
    *marks: Mark,
    begin_ms: float | None = 0,
    end_ms: float,
    pause: Pause = Pause(0, 0),  # noqa: B008, an immutable tuple
    times: BackwardTimes | None = None,
    is_forward_timed: bool = True,
) -> DividedStep:
    closed = ClosedStep(
        number=5,
        begin_ns=None if begin_ms is None else round(begin_ms * MS),
        end_ns=round(end_ms * MS),
        pause=pause,
        marks=marks,
        is_forward_timed=is_forward_timed,
        backward_times=times,
    )
    return divide(closed, training_loaders={TRAIN})


def test_a_plain_step_is_its_parts_and_the_rest_between_them() -> None:
    step = divided(
        data(1, 11), mark(FORWARD, 12, 32, images=8), mark(BACKWARD, 33, 73), mark(OPTIMIZER, 75, 80), end_ms=80
    ).step
    assert step.seconds == pytest.approx(0.080)
    assert step.data_seconds == pytest.approx(0.010)
    assert step.forward_seconds == pytest.approx(0.020)
    assert step.backward_seconds == pytest.approx(0.040)
    assert step.optimizer_seconds == pytest.approx(0.005)
    assert step.other_seconds == pytest.approx(0.005)
    assert (step.images, step.micro_steps, step.copy_seconds, step.own_backward_seconds) == (8, 1, None, None)


def test_accumulation_adds_micro_steps_and_a_second_forward_on_the_same_batch_is_none() -> None:
    step = divided(
        *(data(0, 1), mark(FORWARD, 1, 2, images=4), mark(BACKWARD, 2, 4)),
        *(data(4, 6), mark(FORWARD, 6, 7, images=3), mark(FORWARD, 7, 8, images=3, is_batch=False)),
        *(mark(BACKWARD, 8, 10), mark(OPTIMIZER, 10, 11)),
        end_ms=11,
    ).step
    assert (step.images, step.micro_steps) == (7, 2)
    assert step.data_seconds == pytest.approx(0.003)
    assert step.forward_seconds == pytest.approx(0.003)
    assert step.backward_seconds == pytest.approx(0.004)


def test_an_evaluation_before_the_step_is_a_break_with_the_time_around_it() -> None:
    result = divided(
        *(data(2, 3, VALIDATION, is_batch=False), data(3, 5, VALIDATION), mark(EVALUATION, 5, 9)),
        *(data(9, 11, VALIDATION), mark(EVALUATION, 11, 14), data(14, 15, VALIDATION, is_batch=False)),
        *(data(20, 25), mark(FORWARD, 25, 26), mark(BACKWARD, 26, 28), mark(OPTIMIZER, 28, 30)),
        end_ms=30,
    )
    expected = HookedBreakLine(after_step=4, began_ns=0, seconds=0.020, kind="evaluation", evaluated_batches=2)
    assert result.break_lines == [expected]
    assert result.step.began_ns == 20 * MS
    assert result.step.seconds == pytest.approx(0.010)
    assert result.step.data_seconds == pytest.approx(0.005)
    assert result.step.other_seconds == pytest.approx(0, abs=1e-12)


def test_a_checkpoint_between_epochs_leaves_the_end_of_the_epoch_in_the_step() -> None:
    result = divided(
        *(data(1, 2, is_batch=False), mark(CHECKPOINT, 4, 9), data(10, 13), mark(FORWARD, 13, 14)),
        *(mark(BACKWARD, 14, 15), mark(OPTIMIZER, 15, 16)),
        end_ms=16,
    )
    (cut,) = result.break_lines
    assert (cut.kind, cut.evaluated_batches) == ("checkpoint", None)
    assert cut.seconds == pytest.approx(0.008)
    assert result.step.seconds == pytest.approx(0.008)
    assert result.step.data_seconds == pytest.approx(0.004)
    assert result.step.other_seconds == pytest.approx(0.001)


@pytest.mark.parametrize(("pause_ms", "step_ms", "break_ms"), [(1, 10, 17), (21, 7, 20)])
def test_the_hooks_own_time_counts_neither_in_the_step_nor_in_a_break(
    pause_ms: int, step_ms: int, break_ms: int
) -> None:
    result = divided(
        *(mark(EVALUATION, 5, 9), data(20, 25), mark(FORWARD, 25, 26), mark(BACKWARD, 26, 28)),
        mark(OPTIMIZER, 28, 30),
        end_ms=30,
        pause=Pause(pause_ms * MS, (pause_ms + 3) * MS),
    )
    assert result.step.seconds == pytest.approx(step_ms / 1000)
    assert result.break_lines[0].seconds == pytest.approx(break_ms / 1000)


def test_the_first_step_begins_with_its_first_training_mark() -> None:
    result = divided(
        *(data(0, 50, VALIDATION), data(100, 103), mark(BACKWARD, 105, 106), mark(OPTIMIZER, 106, 107)),
        begin_ms=None,
        end_ms=107,
        is_forward_timed=False,
    )
    assert result.breaks == []
    assert result.step.began_ns == 100 * MS
    assert result.step.seconds == pytest.approx(0.007)
    assert result.step.forward_seconds is None
    assert result.step.other_seconds == pytest.approx(0.002)


def test_forwards_of_which_some_are_missing_say_nothing() -> None:
    step = divided(
        *(mark(BACKWARD, 1, 3), mark(FORWARD, 3, 5, images=4), mark(BACKWARD, 5, 8), mark(OPTIMIZER, 8, 9)),
        end_ms=9,
        is_forward_timed=False,
    ).step
    assert (step.forward_seconds, step.images, step.micro_steps) == (None, None, 2)
    assert step.other_seconds == pytest.approx(0.003)


def test_a_closure_is_forward_and_backward_and_not_optimizer_too() -> None:
    step = divided(
        *(data(0, 1), mark(FORWARD, 2, 5, images=2), mark(BACKWARD, 5, 9)),
        mark(OPTIMIZER, 1, 12, nested_ns=7 * MS),
        end_ms=12,
    ).step
    assert step.optimizer_seconds == pytest.approx(0.004)
    assert step.forward_seconds == pytest.approx(0.003)
    assert step.backward_seconds == pytest.approx(0.004)
    assert step.other_seconds == pytest.approx(0, abs=1e-12)


def test_own_backward_ends_with_the_ranks_last_gradient() -> None:
    marks = [data(0, 1), mark(BACKWARD, 2, 4), mark(BACKWARD, 5, 15), mark(OPTIMIZER, 15, 16)]
    step = divided(*marks, end_ms=16, times=BackwardTimes(first_bucket_ns=6 * MS, last_gradient_ns=8 * MS)).step
    assert step.own_backward_seconds == pytest.approx(0.005)
    assert step.first_bucket_seconds == pytest.approx(0.001)
    earlier = BackwardTimes(first_bucket_ns=3 * MS, last_gradient_ns=3 * MS)
    stale = divided(*marks, end_ms=16, times=earlier).step
    assert (stale.own_backward_seconds, stale.first_bucket_seconds) == (None, None)


def test_the_training_loader_is_the_one_before_a_backward_and_one_that_is_read_beside_it() -> None:
    loaders = TrainingLoaders()
    beside = 3
    loaders.learn([data(0, 1, VALIDATION), mark(EVALUATION, 1, 2), data(2, 3), mark(BACKWARD, 3, 4)])
    assert (loaders.numbers, loaders.last) == (frozenset({TRAIN}), TRAIN)
    loaders.learn([data(0, 1, beside), data(2, 3), mark(BACKWARD, 3, 4)])
    assert loaders.numbers == {TRAIN}
    loaders.learn([data(0, 1, beside), data(2, 3), mark(BACKWARD, 3, 4)])
    assert loaders.numbers == {TRAIN, beside}
