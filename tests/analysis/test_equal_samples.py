"""Accuracy after equally many images, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from results_factory import make_trial, steady_run
from vitscale.pages.like.accuracy_claim import equal_samples
from vitscale.store.records import EpochLine
from vitscale.store.results import Run


def run_of(course: Sequence[tuple[int | None, float | None]], split: str = "held_out_accuracy", repeat: int = 0) -> Run:
    """A run with one line per epoch: (images, accuracy)."""
    run = steady_run(make_trial(), 0.1, repeat)
    run = run.model_copy(update={"header": run.header.model_copy(update={"seed": repeat})})
    (rank,) = run.ranks
    lines = [
        EpochLine(
            epoch=epoch, steps=1, images=images, seconds=1.0, complete=True, train_loss=None, train_accuracy=None,
            held_out_loss=None, held_out_accuracy=None, peak_bytes=None,
        ).model_copy(update={split: accuracy})
        for epoch, (images, accuracy) in enumerate(course)
    ]  # fmt: skip
    return run.model_copy(update={"ranks": (rank.model_copy(update={"epochs": tuple(lines)}),)})


def test_at_the_end_of_the_shorter_run_linear_between_epochs() -> None:
    long, short = run_of([(100, 0.2), (100, 0.4), (100, 0.5)]), run_of([(75, 0.1), (75, 0.3)])
    found = equal_samples([long], [short])
    assert found is not None
    assert (found.split, found.images) == ("held-out", 150)
    assert found.reference == pytest.approx((0.3,))
    assert found.other == (0.3,)


def test_held_out_accuracy_comes_before_training_accuracy() -> None:
    trained = run_of([(100, 0.9)], "train_accuracy")
    held_out = run_of([(100, 0.5)])
    only_trained = equal_samples([trained], [trained])
    assert only_trained is not None
    assert only_trained.split == "train"
    assert equal_samples([trained], [held_out]) is None


def test_every_run_counts_and_the_shortest_decides() -> None:
    found = equal_samples([run_of([(100, 0.2), (100, 0.4)]), run_of([(100, 0.3)], repeat=1)], [run_of([(100, 0.1)])])
    assert found is not None
    assert (found.images, found.reference, found.other) == (100, (0.2, 0.3), (0.1,))


@pytest.mark.parametrize("course", [[], [(None, 0.5)], [(0, 0.5)], [(100, None)], [(100, float("nan"))], [(100, 1.2)]])
def test_what_is_not_recorded_is_not_compared(course: list[tuple[int | None, float | None]]) -> None:
    assert equal_samples([run_of([(100, 0.5)])], [run_of(course)]) is None
    assert equal_samples([], [run_of([(100, 0.5)])]) is None


def test_before_the_first_epoch_nothing_is_known() -> None:
    assert equal_samples([run_of([(100, 0.5)])], [run_of([(50, 0.4)])]) is None
