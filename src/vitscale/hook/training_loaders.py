"""Which of the program's loaders feed the training, and which an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .marks import DATA, EVALUATION, Mark
from .steps import loader_before_backward


class TrainingLoaders:
    """Numbers of the loaders whose batches the model is trained on.

    These are the loaders whose batch was the last one before a backward, and those fetched from in two steps one after
    the other without an evaluation: two loaders that are read side by side.
    """

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()
        self.last = 0
        """Number of the loader before the last backward; 0 without a loader."""
        self._previous: frozenset[int] = frozenset()

    def learn(self, marks: Sequence[Mark]) -> None:
        """Learn from the marks of a closed step, in the order in which they ended."""
        fetched = frozenset(mark.source for mark in marks if mark.kind == DATA and mark.is_batch)
        training = set(self.numbers)
        loader = loader_before_backward(marks)
        if loader is not None:
            self.last = loader
            training.add(loader)
        if not _has_evaluation(marks):
            training |= fetched & self._previous
        self._previous = fetched
        self.numbers = frozenset(training)


def _has_evaluation(marks: Iterable[Mark]) -> bool:
    return any(mark.kind == EVALUATION for mark in marks)
