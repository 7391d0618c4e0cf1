from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.learning.convergence import (
    AccuracyPoint,
    Convergence,
    Reach,
    TargetRun,
    accuracy_at_images,
    accuracy_at_seconds,
    common_reach,
)
from vitscale.analysis.learning.convergence import accuracy_points as course_of
from vitscale.analysis.learning.convergence import convergence as convergence_of
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.summaries import summarise
from vitscale.store.records import EpochLine, StepLine
from vitscale.store.results import Run
from vitscale.trial.trial import StepWindow, Trial

TWO_RANKS = make_trial("ddp", 2, micro_batch=4)
WITH_TARGET = make_trial("ddp", 1, target_accuracy=0.5)


def run_of(
    accuracies: Sequence[float | None],
    trial: Trial = WITH_TARGET,
    repeat: int = 0,
    step_seconds: float = 0.5,
    seed: int | None = None,
) -> Run:
    """Epochs of four light steps of 8 images, with these held-out accuracies."""
    rank = make_rank(trial, 0, [step_seconds] * 4 * len(accuracies), steps_in_epoch=4)
    epochs = tuple(
        line.model_copy(update={"held_out_accuracy": accuracy})
        for line, accuracy in zip(rank.epochs, accuracies, strict=True)
    )
    run = make_run(trial, [rank.model_copy(update={"epochs": epochs})], repeat)
    return run.model_copy(update={"header": run.header.model_copy(update={"seed": seed})})


def course(run: Run) -> tuple[AccuracyPoint, ...]:
    return course_of(run, run_figures(run))


def convergence(runs: Sequence[Run]) -> Convergence | None:
    return convergence_of(runs, [run_figures(run) for run in runs])


def of_points(*points: tuple[int, float | None, float | None]) -> Convergence:
    """(images, seconds, accuracy) after each epoch."""
    found = tuple(AccuracyPoint(k + 1, *point) for k, point in enumerate(points))
    return Convergence(None, "", None, (), None, None, found)


# --- the course of one run -----------------------------------------------------------------------------------------


def windowed(rank_steps: Sequence[StepLine], **windows: StepWindow) -> tuple[StepLine, ...]:
    """`s3="explained"` puts step 3 into that window."""
    return tuple(
        line.model_copy(update={"window": windows[key]}) if (key := f"s{line.step}") in windows else line
        for line in rank_steps
    )


def test_by_hand_at_two_ranks_with_a_warm_up_an_explained_and_a_light_epoch() -> None:
    # Two ranks, three epochs of three steps. Step 0 is warm-up, step 4 explained, step 5 settling.
    seconds = [
        [9.0, 1.0, 1.0, 1.0, 5.0, 2.0, 1.0, 1.0, 1.0],
        [8.0, 1.5, 0.5, 2.0, 4.0, 2.0, 0.5, 0.5, 2.0],
    ]
    ranks = [make_rank(TWO_RANKS, k, own, warmup=1, steps_in_epoch=3) for k, own in enumerate(seconds)]
    ranks = [
        rank.model_copy(
            update={
                "steps": windowed(rank.steps, s4="explained", s5="settling"),
                # The barrier at its end makes an epoch longer than its steps.
                "epochs": tuple(line.model_copy(update={"seconds": line.seconds + 0.25}) for line in rank.epochs),
            }
        )
        for rank in ranks
    ]
    # Light steps add 1.5, 0.5 | 2.0 | 1.0, 1.0, 1.0: of those that begin an epoch the mean is 1.5, of the others 1.0.
    # Each step holds 2 x 4 images; an epoch of 1,024 has 128.
    rate = 1024 / (1.5 + 127 * 1.0)
    points = course(make_run(TWO_RANKS, ranks))
    assert [(point.epoch, point.images) for point in points] == [(1, 24), (2, 48), (3, 72)]
    assert [point.seconds for point in points] == pytest.approx([24 / rate, 48 / rate, 72 / rate])
    assert [point.held_out_accuracy for point in points] == pytest.approx([0.35, 0.5, 0.65])


def test_warm_up_that_goes_on_is_no_training_time() -> None:
    """Four epochs of eight steps of 1 s, but the first three steps take 10 s: the first epoch still counts as 8 s."""
    run = make_run(WITH_TARGET, [make_rank(WITH_TARGET, 0, [10.0] * 3 + [1.0] * 29, steps_in_epoch=8)])
    assert run_figures(run).steady_from == 3
    assert [point.seconds for point in course(run)] == [8.0, 16.0, 24.0, 32.0]


def test_an_epoch_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [make_rank(TWO_RANKS, k, [s] * 2) for k, s in enumerate([1.0, 3.0])]
    assert course(make_run(TWO_RANKS, ranks))[0].seconds == 6.0


def test_a_lost_step_costs_what_the_others_do() -> None:
    """Whatever the lost line was, the epoch's wall time of 13 s is not believed."""
    rank = make_rank(WITH_TARGET, 0, [1.0, 10.0, 1.0, 1.0], steps_in_epoch=4)
    lost = rank.model_copy(update={"steps": (rank.steps[0], *rank.steps[2:])})
    assert course(make_run(WITH_TARGET, [lost]))[0].seconds == 4.0


def test_without_light_steps_seconds_are_unknown_and_images_are_not() -> None:
    points = course(make_run(WITH_TARGET, [make_rank(WITH_TARGET, 0, [1.0] * 2, warmup=2, steps_in_epoch=1)]))
    assert [(point.images, point.seconds) for point in points] == [(8, None), (16, None)]


def test_without_one_ranks_record_seconds_are_unknown() -> None:
    points = course(make_run(TWO_RANKS, [make_rank(TWO_RANKS, 0, [1.0] * 2)]))
    assert [(point.images, point.seconds) for point in points] == [(16, None)]


def test_points_end_where_the_record_has_a_hole() -> None:
    """How many images came before the third epoch is not known without the second."""
    run = run_of([0.1, 0.2, 0.3])
    holed = run.ranks[0].model_copy(update={"epochs": (run.ranks[0].epochs[0], run.ranks[0].epochs[2])})
    assert [point.epoch for point in course(run.model_copy(update={"ranks": (holed,)}))] == [1]
    headless = run.ranks[0].model_copy(update={"epochs": run.ranks[0].epochs[1:]})
    assert course(run.model_copy(update={"ranks": (headless,)})) == ()


def test_a_run_that_ends_inside_an_epoch_counts_the_images_it_saw() -> None:
    rank = make_rank(WITH_TARGET, 0, [1.0] * 6, steps_in_epoch=4)
    assert [point.images for point in course(make_run(WITH_TARGET, [rank]))] == [32, 48]


def test_an_accuracy_that_is_no_number_is_unknown() -> None:
    assert [point.held_out_accuracy for point in course(run_of([float("nan"), 0.5]))] == [None, 0.5]


def test_absurd_times_are_no_error() -> None:
    points = course(run_of([0.1, 0.2, 0.3], step_seconds=2e307))
    assert [point.seconds for point in points] == [
        pytest.approx(8e307),
        pytest.approx(1.6e308),
        None,
    ]  # three times that is no float


# --- over runs -----------------------------------------------------------------------------------------------------


def test_without_runs_there_is_none() -> None:
    assert convergence([]) is None
    assert summarise("t", WITH_TARGET, [], combine_unlike=False).convergence is None


def test_a_trial_carries_its_convergence() -> None:
    found = summarise("t", WITH_TARGET, [run_of([0.4, 0.6])], combine_unlike=False).convergence
    assert found is not None
    assert found.images_to_target is not None
    assert found.images_to_target.value == 64


def test_points_are_means_of_accuracy_and_of_seconds() -> None:
    """Epochs of 2, 3 and 8 s: a mean of the one beside a median of the other would be no run."""
    runs = [run_of([0.2, a], repeat=r, step_seconds=s) for r, (a, s) in enumerate([(0.3, 0.5), (0.45, 0.75), (0.6, 2)])]
    found = convergence(runs)
    assert found is not None
    assert [(point.epoch, point.images) for point in found.points] == [(1, 32), (2, 64)]
    assert [point.seconds for point in found.points] == pytest.approx([13 / 3, 26 / 3])
    assert [point.held_out_accuracy for point in found.points] == pytest.approx([0.2, 0.45])


def test_points_go_as_far_as_every_run_went() -> None:
    """Beyond the first run that stopped at its target only the slower ones are left: no mean over all runs."""
    found = convergence([run_of([0.6], repeat=0), run_of([0.2, 0.55], repeat=1)])
    assert found is not None
    assert [point.epoch for point in found.points] == [1]
    assert found.points[0].held_out_accuracy == pytest.approx(0.4)


def test_a_point_is_unknown_as_soon_as_one_run_does_not_know_it() -> None:
    found = convergence([run_of([0.2, 0.3], repeat=0), run_of([0.2, None], repeat=1)])
    assert found is not None
    assert found.points[0].held_out_accuracy == pytest.approx(0.2)
    assert found.points[1].held_out_accuracy is None


def test_the_target_is_told_run_by_run_with_its_seed() -> None:
    """Epochs of 32 images and 2 s; the target is 0.5, and 0.5 itself reaches it."""
    runs = [
        run_of([0.2, 0.3, 0.4], repeat=2, seed=12),
        run_of([0.2, 0.5], repeat=0, seed=10),
        run_of([0.2, 0.4, 0.7], repeat=1, seed=11),
    ]
    found = convergence(runs)
    assert found is not None
    assert found.target_accuracy == 0.5
    assert found.target_runs == (
        TargetRun(0, 10, 2, 64, 4.0, None, 64, 4.0),
        TargetRun(1, 11, 3, 96, 6.0, None, 96, 6.0),
        TargetRun(2, 12, None, None, None, None, 96, 6.0),
    )


def test_a_run_that_missed_the_target_bounds_what_it_takes_and_is_not_dropped() -> None:
    """Reached after 64 and 96 images; the third gave up after 96, so that the geometric mean is no less than this."""
    runs = [run_of(accuracies, repeat=r) for r, accuracies in enumerate([[0.2, 0.5], [0.2, 0.4, 0.7], [0.2, 0.3, 0.4]])]
    found = convergence(runs)
    assert found is not None
    assert (found.images_to_target, found.seconds_to_target) == (None, None)
    assert found.images_to_target_at_least == pytest.approx((64 * 96 * 96) ** (1 / 3))
    assert found.seconds_to_target_at_least == pytest.approx((4 * 6 * 6) ** (1 / 3))
    reached = convergence(runs[:2])
    assert reached is not None
    assert reached.images_to_target is not None
    assert reached.seconds_to_target is not None
    assert reached.images_to_target.value == pytest.approx((64 * 96) ** 0.5)
    assert reached.seconds_to_target.value == pytest.approx(24**0.5)
    assert (reached.images_to_target_at_least, reached.seconds_to_target_at_least) == (None, None)


def test_evaluation_is_told_beside_the_training_that_it_is_no_part_of() -> None:
    run = run_of([0.2, 0.5])
    (rank,) = run.ranks
    epochs = tuple(line.model_copy(update={"evaluation_seconds": 0.25 + line.epoch}) for line in rank.epochs)
    found = convergence([run.model_copy(update={"ranks": (rank.model_copy(update={"epochs": epochs}),)})])
    assert found is not None
    (target,) = found.target_runs
    assert (target.seconds, target.evaluation_seconds) == (4.0, 0.25 + 1.25)


def test_a_target_that_no_run_reached_is_unknown_and_never_0() -> None:
    found = convergence([run_of([0.2, 0.4], repeat=r, seed=r) for r in range(2)])
    assert found is not None
    assert [run.epochs for run in found.target_runs] == [None, None]
    assert (found.images_to_target, found.seconds_to_target) == (None, None)


def test_the_first_epoch_that_reaches_the_target_counts() -> None:
    found = convergence([run_of([0.6, 0.4, 0.8])])
    assert found is not None
    assert found.target_runs[0].epochs == 1


def test_without_a_target_nothing_is_said_of_one() -> None:
    found = convergence([run_of([0.6], trial=make_trial("ddp", 1))])
    assert found is not None
    assert (found.target_accuracy, found.target_runs, found.images_to_target) == (None, (), None)


def test_a_target_reached_in_unknown_time_keeps_its_images() -> None:
    run = make_run(WITH_TARGET, [make_rank(WITH_TARGET, 0, [1.0] * 2, warmup=2, steps_in_epoch=1)])
    found = convergence([run])
    assert found is not None
    assert found.target_runs == (TargetRun(0, 0, 2, 16, None, None, 16, None),)
    assert found.images_to_target is not None
    assert found.seconds_to_target is None


def test_the_noise_scale_says_why_it_is_unknown() -> None:
    found = convergence([run_of([0.5])])
    assert found is not None
    assert found.noise_scale_images is None
    assert found.noise_reason == "one rank and one micro-step: no gradient of fewer images than the step has"


# --- at equal images and at equal time -----------------------------------------------------------------------------

SLOW_LARGE_BATCH = of_points((100, 1.0, 0.2), (200, 2.0, 0.3), (300, 3.0, 0.6))
FAST_SMALL_BATCH = of_points((100, 2.0, 0.4), (200, 4.0, 0.8))


def test_accuracy_at_equal_images_and_at_equal_time() -> None:
    reach = common_reach([SLOW_LARGE_BATCH, FAST_SMALL_BATCH])
    assert reach == Reach(images=200, seconds=3.0)
    assert accuracy_at_images(SLOW_LARGE_BATCH, 200) == 0.3
    assert accuracy_at_images(FAST_SMALL_BATCH, 200) == 0.8
    assert accuracy_at_seconds(SLOW_LARGE_BATCH, 3.0) == 0.6
    assert accuracy_at_seconds(FAST_SMALL_BATCH, 3.0) == pytest.approx(0.6)  # half-way between its epochs


@pytest.mark.parametrize(
    ("images", "accuracy"), [(99, None), (100, 0.2), (125, 0.225), (200, 0.3), (250, 0.45), (300, 0.6), (301, None)]
)
def test_accuracy_is_linear_between_epochs_and_unknown_outside(images: int, accuracy: float | None) -> None:
    assert accuracy_at_images(SLOW_LARGE_BATCH, images) == (None if accuracy is None else pytest.approx(accuracy))


def test_nothing_is_drawn_across_an_unknown_accuracy() -> None:
    holed = of_points((100, 1.0, 0.2), (200, 2.0, None), (300, 3.0, 0.6))
    assert [accuracy_at_images(holed, images) for images in (100, 150, 200, 250, 300)] == [0.2, None, None, None, 0.6]


def test_points_of_unknown_time_are_at_no_time() -> None:
    found = of_points((100, None, 0.2), (200, None, 0.3))
    assert accuracy_at_seconds(found, 1.0) is None
    assert accuracy_at_images(found, 150) == pytest.approx(0.25)


def test_how_far_trials_can_be_compared() -> None:
    nothing = of_points()
    unknown = of_points((10, 0.1, None))
    assert common_reach([]) == Reach(None, None)
    assert common_reach([nothing, unknown]) == Reach(None, None)
    assert common_reach([SLOW_LARGE_BATCH, nothing, unknown]) == Reach(300, 3.0)
    assert common_reach([of_points((100, 1.0, 0.2), (200, 2.0, None))]) == Reach(100, 1.0)
    timeless = of_points((50, None, 0.1))
    assert common_reach([SLOW_LARGE_BATCH, timeless]) == Reach(50, None)


shares = st.floats(0, 1)
epochs = st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3), shares), min_size=1, max_size=8)


@given(epochs=epochs, place=st.floats(0, 1))
def test_an_interpolated_accuracy_lies_between_its_neighbours(
    epochs: list[tuple[int, float, float]], place: float
) -> None:
    images, seconds, points = 0, 0.0, []
    for more_images, more_seconds, accuracy in epochs:
        images, seconds = images + more_images, seconds + more_seconds
        points.append((images, seconds, accuracy))
    found = of_points(*points)
    accuracies = [accuracy for *_, accuracy in points]
    for which, at in ((0, accuracy_at_images), (1, accuracy_at_seconds)):
        first, last = points[0][which], points[-1][which]
        inside = first + place * (last - first)
        between = at(found, min(inside, last))
        assert between is not None
        assert min(accuracies) - 1e-9 <= between <= max(accuracies) + 1e-9
        assert at(found, first * 0.999) is None
        assert at(found, last * 1.001) is None
        for point in points:
            assert at(found, point[which]) == point[2]


def epoch_line(**fields: Any) -> EpochLine:
    return run_of([0.5]).ranks[0].epochs[0].model_copy(update=fields)


@given(epochs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**9), shares | st.none()), max_size=6))
def test_any_epoch_lines_are_read_without_an_error(epochs: list[tuple[int, int, float | None]]) -> None:
    lines = tuple(epoch_line(epoch=e, images=i, held_out_accuracy=a) for e, i, a in epochs)
    run = run_of([0.5])
    found = convergence([run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"epochs": lines}),)})])
    assert found is not None
    assert [point.epoch for point in found.points] == list(range(1, len(found.points) + 1))
    assert [point.images for point in found.points] == sorted(point.images for point in found.points)
