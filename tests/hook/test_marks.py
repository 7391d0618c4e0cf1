"""Calls in an order -> which of them end a step."""

from __future__ import annotations

import threading

import pytest

from vitscale.hook.marks import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, Mark, StepMarks

pytestmark = pytest.mark.computing


class Training:
    """A program's calls, and the steps that they closed as lists of kinds."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.marks = StepMarks(self._close)

    def _close(self) -> None:
        self.steps.append([mark.kind for mark in self.marks.take_step()])

    def call(self, *kinds: str) -> None:
        for kind in kinds:
            opening = self.marks.enter(kind)
            if opening is not None:
                self.marks.leave(opening)

    def optimize(self, optimizer: int = 1, *, ends_step: bool = True, closure: tuple[str, ...] = ()) -> None:
        opening = self.marks.enter_optimizer(optimizer)
        self.call(*closure)
        if opening is not None:
            self.marks.leave_optimizer(opening, optimizer, ends_step=ends_step)


def test_a_step_is_closed_by_the_next_fetch() -> None:
    training = Training()
    for _ in range(3):
        training.call(DATA, FORWARD, BACKWARD)
        training.optimize()
    assert training.steps == [[DATA, FORWARD, BACKWARD, OPTIMIZER]] * 2


def test_without_a_loader_a_step_is_closed_by_the_next_forward() -> None:
    training = Training()
    for _ in range(3):
        training.call(FORWARD, BACKWARD)
        training.optimize()
    assert training.steps == [[FORWARD, BACKWARD, OPTIMIZER]] * 2


def test_two_optimizers_one_after_the_other_end_one_step() -> None:
    training = Training()
    for _ in range(3):
        training.call(DATA, FORWARD, BACKWARD)
        training.optimize(1)
        training.optimize(2)
    assert training.steps == [[DATA, FORWARD, BACKWARD, OPTIMIZER, OPTIMIZER]] * 2


def test_two_models_that_are_trained_in_turn_on_one_batch_are_one_step_once_that_is_known() -> None:
    training = Training()
    for _ in range(5):
        training.call(DATA, FORWARD, BACKWARD)
        training.optimize(1)
        training.call(FORWARD, BACKWARD)
        training.optimize(2)
    whole = [DATA, FORWARD, BACKWARD, OPTIMIZER, FORWARD, BACKWARD, OPTIMIZER]
    assert training.steps[-2:] == [whole] * 2


def test_a_new_optimizer_without_a_loader_does_not_join_all_steps_into_one() -> None:
    training = Training()
    for optimizer in (1, 1, 2, 2, 2, 2):
        training.call(FORWARD, BACKWARD)
        training.optimize(optimizer)
    assert training.steps[-1] == [FORWARD, BACKWARD, OPTIMIZER]
    assert sum(step.count(OPTIMIZER) for step in training.steps) == 5


def test_accumulation_and_calls_without_a_backward_end_no_step() -> None:
    training = Training()
    training.optimize()  # states are made before the training
    training.call(DATA, FORWARD, BACKWARD)
    training.optimize(ends_step=False)  # DeepSpeed's engine before its boundary
    training.call(DATA, FORWARD, BACKWARD)
    training.optimize()
    training.call(DATA)
    expected = [OPTIMIZER, DATA, FORWARD, BACKWARD, OPTIMIZER, DATA, FORWARD, BACKWARD, OPTIMIZER]
    assert training.steps == [expected]


def test_a_closure_counts_as_forward_and_backward() -> None:
    training = Training()
    for _ in range(2):
        training.call(DATA)
        training.optimize(closure=(FORWARD, BACKWARD))
    assert training.steps == [[DATA, FORWARD, BACKWARD, OPTIMIZER]]


def test_calls_inside_others_and_of_other_threads_count_as_nothing() -> None:
    training = Training()
    outer = training.marks.enter(BACKWARD)
    assert outer is not None
    training.call(FORWARD, DATA)  # recomputed activations
    training.marks.leave(outer)
    thread = threading.Thread(target=training.call, args=(DATA, EVALUATION))
    thread.start()
    thread.join()
    training.optimize()
    training.call(DATA)
    assert training.steps == [[BACKWARD, OPTIMIZER]]


def test_an_optimizer_that_raised_is_forgotten() -> None:
    training = Training()
    training.call(DATA, FORWARD, BACKWARD)
    assert training.marks.enter_optimizer(1) is not None
    training.marks.abandon_open_call()
    training.call(DATA, FORWARD, BACKWARD)
    training.optimize()
    training.call(DATA)
    assert training.steps == [[DATA, FORWARD, BACKWARD, DATA, FORWARD, BACKWARD, OPTIMIZER]]


def test_marks_are_bounded_where_no_step_ends() -> None:
    training = Training()
    training.call(*[EVALUATION] * 250_000)
    training.call(BACKWARD)
    training.optimize()
    kept: list[Mark] = training.marks.take_step()
    assert len(kept) <= 100_002
    assert kept[-1].kind == OPTIMIZER
