"""Parts of a step worked out by hand, and records that nobody would write on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hooked_factory import SimulatedJob
from vitscale.explanation.answer import explain_ranks
from vitscale.explanation.parts import JobParts, StepPart, job_parts
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.start_up_steps import start_up_steps
from vitscale.explanation.step_table import read_steps
from vitscale.explanation.words import SessionFacts, answer_document, answer_fields
from vitscale.hook import lines
from vitscale.present.terminal import lines as terminal_lines

pytestmark = pytest.mark.computing

SESSION = SessionFacts(Path("vitscale-explain-1"))


def parts_of(records: Sequence[HookedRank]) -> JobParts:
    parts = job_parts(records, None)
    assert parts is not None
    return parts


def without_noise(ranks: int = 2, **changes: object) -> SimulatedJob:
    return replace(SimulatedJob(ranks=ranks, spread=0.0), **changes)  # type: ignore[arg-type]


def hand_parts(parts: JobParts, rank: int) -> dict[StepPart, float]:
    """The known parts of a rank in milliseconds."""
    return {part: round(1e3 * value, 6) for part, value in parts.ranks[rank].parts.items() if value is not None}


def test_parts_of_two_ranks_by_hand() -> None:
    """Rank 1 works 80 ms longer in backward, so rank 0 waits 80 ms; the transfer of 3 ms is the same on both."""
    parts = parts_of(without_noise(planted={"backward": lambda rank, step: 0.08 * rank}).records())
    common = {"data": 2.0, "forward": 30.0, "optimizer": 4.0, "other": 1.0, "transfer": 3.0}
    assert hand_parts(parts, 0) == common | {"backward": 60.0, "wait": 80.0}
    assert hand_parts(parts, 1) == common | {"backward": 140.0, "wait": 0.0}
    assert parts.step.value == pytest.approx(0.18)
    for rank in parts.ranks:
        assert math.fsum(value for value in rank.parts.values() if value is not None) == pytest.approx(0.18)


def test_parts_of_one_rank_have_no_exchange() -> None:
    parts = parts_of(without_noise(ranks=1).records())
    assert hand_parts(parts, 0) == {"data": 2.0, "forward": 30.0, "backward": 60.0, "optimizer": 4.0, "other": 1.0}


def test_backward_keeps_the_exchange_where_nothing_tells_them_apart() -> None:
    job = without_noise(planted={"backward": lambda rank, step: 0.08 * rank}, knows_own_backward=False)
    parts = parts_of(job.records())
    assert hand_parts(parts, 0)["backward"] == 143.0
    assert {"wait", "transfer", "exchange"}.isdisjoint(hand_parts(parts, 0))
    (reason,) = parts.unavailable.values()
    assert reason == "nothing records when each rank's own gradients were ready (DDP)"


def test_waiting_and_transfer_stay_together_where_a_rank_s_record_is_missing() -> None:
    """Of three ranks the slowest is missing: rank 0 waits 80 ms for it and transfers for 3 ms."""
    records = without_noise(ranks=3, planted={"backward": lambda rank, step: 0.04 * rank}).records()
    parts = parts_of(records[:2])
    assert hand_parts(parts, 0)["exchange"] == 83.0
    assert hand_parts(parts, 1)["exchange"] == 43.0
    assert parts.images_per_second is None
    assert parts.unavailable == {
        "waiting for the slowest rank, apart from transfer": "the records of 1 rank are missing"
    }


def test_evaluation_is_spread_over_the_steps_between_and_counts_for_images_per_second() -> None:
    """100 ms a step and 1 s every 10 steps are 200 ms a step: 64 images in 0.2 s are 320 a second."""
    job = without_noise(breaks={step: {0: 1.0, 1: 1.0} for step in range(10, 41, 10)})
    parts = parts_of(job.records())
    (evaluation,) = parts.rare
    assert (evaluation.every, evaluation.times, evaluation.kind) == (10.0, 4, "evaluation")
    assert parts.step.value == pytest.approx(0.1)
    assert parts.mean_step_seconds == pytest.approx(0.2)
    assert parts.images_per_second is not None
    assert parts.images_per_second.value == pytest.approx(320.0)


def test_ranks_that_wait_for_the_evaluation_of_one_do_not_wait_for_a_slow_rank() -> None:
    parts = parts_of(without_noise(breaks={step: {0: 1.0} for step in range(10, 40, 10)}).records())
    assert hand_parts(parts, 1)["wait"] == pytest.approx(0.0)
    assert hand_parts(parts, 1)["transfer"] == pytest.approx(3.0)
    assert parts.mean_step_seconds == pytest.approx(0.2)


@pytest.mark.parametrize(("distance", "times"), [(5, 8), (10, 4), (20, 2)])
def test_periodic_work_inside_steps_is_taken_out_of_the_usual_step(distance: int, times: int) -> None:
    """Rank 0 logs for 300 ms every so many steps, and rank 1 waits for it."""
    job = without_noise(planted={"other": lambda rank, step: 0.3 if rank == 0 and step % distance == 0 else 0.0})
    parts = parts_of(job.records())
    (logging,) = parts.rare
    assert (logging.ranks, logging.every, logging.times) == ((0,), distance, times)
    assert logging.seconds == pytest.approx(0.3)
    assert parts.step.value == pytest.approx(0.1)
    assert hand_parts(parts, 1)["wait"] == pytest.approx(0.0)


@pytest.mark.parametrize("part", ["other", "data"])
def test_a_wait_in_forward_for_the_rare_work_of_another_rank_is_not_counted_again(part: str) -> None:
    """As where DDP exchanges buffers: rank 1 waits in its forward while rank 0 logs, or fetches a slow batch."""

    def waiting(guilty: int) -> Callable[[int, int], float]:
        return lambda rank, step: 0.3 if rank == guilty and step % 10 == 0 else 0.0

    parts = parts_of(without_noise(planted={part: waiting(0), "forward": waiting(1)}).records())
    (work,) = parts.rare
    assert (work.kind, work.ranks, work.every) == (part, (0,), 10)
    assert parts.mean_step_seconds == pytest.approx(0.13)


def test_a_machine_that_is_busy_for_a_moment_does_not_hide_that_logging_is_regular() -> None:
    """Rank 0 logs for 300 ms every 10 steps; three times something else takes 60 ms, on either rank."""

    def other_seconds(rank: int, step: int) -> float:
        logging = 0.3 if rank == 0 and step % 10 == 0 else 0.0
        return logging + (0.06 if (rank, step) in ((0, 13), (1, 14), (0, 27)) else 0.0)

    logging, busy = parts_of(without_noise(planted={"other": other_seconds}).records()).rare
    assert (logging.ranks, logging.every, logging.times) == ((0,), 10, 4)
    assert logging.seconds == pytest.approx(0.3)
    assert (busy.ranks, busy.every, busy.times) == ((0, 1), None, 3)
    assert busy.seconds_per_step == pytest.approx(3 * 0.06 / 39)


def test_two_times_that_are_close_by_chance_are_not_regular() -> None:
    breaks = {12: {0: 1.0, 1: 1.0}, 14: {0: 1.0, 1: 1.0}}
    (pauses,) = parts_of(without_noise(breaks=breaks, break_kind="other").records()).rare
    assert (pauses.every, pauses.times) == (None, 2)
    assert pauses.seconds_per_step == pytest.approx(2 / 39)


def test_a_time_that_lies_in_a_profiled_step_leaves_the_period_as_it_is() -> None:
    records = []
    for record in without_noise(planted={"other": lambda rank, step: 0.3 if step % 10 == 0 else 0.0}).records():
        steps = [replace(step, profiled=19 <= step.number < 22) for step in record.steps]
        records.append(replace(record, steps=steps))
    (logging,) = parts_of(records).rare
    assert (logging.every, logging.times) == (10.0, 3)


@pytest.mark.parametrize(
    ("seconds", "compiles", "left_out"),
    [
        ([0.5, 0.1, 0.1, 0.1], False, 0),
        ([0.1] * 20, False, 1),
        ([0.5, *[0.1] * 19], False, 1),
        ([5.0, 3.0, 0.1, 4.0, *[0.1] * 26], True, 4),
        ([*[5.0] * 20, *[0.1] * 40], True, 10),
        ([*[0.1] * 3, *[0.5, *[0.1] * 4] * 8], False, 1),
    ],
)
def test_start_up_steps(seconds: list[float], compiles: bool, left_out: int) -> None:
    """Too few; none slow; the first; up to the last compilation; ten at most; every fifth step is slow for ever."""
    start_up = start_up_steps(np.array(seconds), compiles=compiles)
    assert start_up.steps == left_out
    assert ("torch.compile" in start_up.reason) == (compiles and left_out > 1)


def test_an_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    """95 % of 100 intervals of a step of 97 ms are 95; 7 more or fewer are three standard deviations."""
    hits = 0
    for seed in range(100):
        step = parts_of(SimulatedJob(ranks=1, spread=0.2, seed=seed).records()).step
        low, high = step.ends
        hits += low <= 0.097 <= high
    assert 88 <= hits <= 100


def with_steps(record: HookedRank, steps: Sequence[lines.HookedStepLine]) -> HookedRank:
    return replace(record, steps=steps)


def spoiled(position: int, **changes: object) -> list[HookedRank]:
    """Two ranks, of the second of which one step is not as it should be."""
    first, second = without_noise().records()
    steps = list(second.steps)
    steps[position] = replace(steps[position], **changes)  # type: ignore[arg-type]
    return [first, with_steps(second, steps)]


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": math.nan},
        {"seconds": -1.0},
        {"seconds": 0.0},
        {"seconds": 1e300},
        {"data_seconds": math.inf},
        {"data_seconds": -0.5},
        {"backward_seconds": 3.0},
        {"number": -1},
        {"number": 2**80},
    ],
    ids=str,
)
def test_a_step_with_impossible_times_is_left_out_and_said(changes: dict[str, object]) -> None:
    parts = parts_of(spoiled(20, **changes))
    assert parts.timed_steps == 38
    assert parts.step.value == pytest.approx(0.1)
    assert "rank 1: 1 step with impossible times left out" in parts.notes


@pytest.mark.parametrize("images", [None, -5, 0, 10**30])
def test_impossible_counts_of_images_make_their_rate_unavailable(images: int | None) -> None:
    answer = explain_ranks(spoiled(20, images=images))
    assert answer.parts is not None
    assert answer.parts.images_per_second is None
    assert "images/s unavailable" in answer.summary


def test_step_numbers_of_a_billion_take_no_more_than_others() -> None:
    records = []
    for record in without_noise().records():
        records.append(with_steps(record, [replace(step, number=step.number + 10**9) for step in record.steps]))
    assert parts_of(records).step.value == pytest.approx(0.1)


def test_of_very_many_steps_the_last_ones_count() -> None:
    (record,) = without_noise(ranks=1, steps=30).records()
    step = record.steps[-1]
    many = [replace(step, number=number) for number in range(1, 25_001)]
    assert parts_of([with_steps(record, many)]).timed_steps == 19_999


def test_ranks_of_unequal_length_are_compared_in_the_steps_that_both_have() -> None:
    first, second = without_noise().records()
    assert parts_of([first, with_steps(second, second.steps[:25])]).timed_steps == 24


def test_a_rank_without_steps_is_left_out_and_said() -> None:
    first, second = without_noise().records()
    parts = parts_of([first, with_steps(second, ())])
    assert [rank.rank for rank in parts.ranks] == [0]
    assert "1 rank recorded no step that can be timed: left out" in parts.notes


def test_of_two_records_of_one_rank_the_longer_counts() -> None:
    first, second = without_noise().records()
    restarted = with_steps(second, second.steps[:3])
    parts = parts_of([first, second, restarted])
    assert parts.timed_steps == 39
    assert "rank 1 has several records, as after a restart: the longest counts" in parts.notes


@pytest.mark.parametrize("records", [[], without_noise(steps=0).records()], ids=["no rank", "no step"])
def test_nothing_is_made_up_where_no_step_was_seen(records: list[HookedRank]) -> None:
    answer = explain_ranks(records)
    assert (answer.parts, answer.causes) == (None, ())
    assert answer.summary == "no step was seen that every rank finished"
    assert answer_fields(answer, SESSION)["step_seconds"] is None
    assert terminal_lines(answer_document(answer, SESSION))


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_of_few_steps_there_is_an_answer_without_an_interval(steps: int) -> None:
    answer = explain_ranks(without_noise(steps=steps, start_up_factor=1.0).records())
    assert answer.parts is not None
    assert answer.parts.step.value == pytest.approx(0.1)
    assert answer.parts.step.low is None
    assert any("could be timed: there is no interval" in sentence for sentence in answer.seen)


def test_parts_of_a_gpu_s_step_are_unavailable_without_a_trace() -> None:
    """The host's marks say nothing of them: only how long steps are is known."""
    job = without_noise(planted={"data": lambda rank, step: 0.2}, rank_fields={"device": "NVIDIA H100 80GB HBM3"})
    answer = explain_ranks(job.records(), Path("no-such-folder"))
    assert answer.parts is not None
    assert answer.parts.ranks == ()
    assert answer.causes == ()
    assert "parts of a step" in answer.unavailable
    assert answer.parts.step.value == pytest.approx(0.3)


def test_breaks_with_impossible_times_are_left_out() -> None:
    record = without_noise(ranks=1).records()[0]
    breaks = [lines.HookedBreakLine(10, 0, math.nan, "evaluation"), lines.HookedBreakLine(20, 0, -1.0, "odd kind")]
    breaks += [lines.HookedBreakLine(10**12, 0, 5.0, "other"), lines.HookedBreakLine(30, 0, 1.0, "odd kind")]
    (pause,) = parts_of([replace(record, breaks=breaks)]).rare
    assert (pause.kind, pause.after_steps) == ("other", (30,))


def test_unknown_parts_stand_in_other() -> None:
    records = []
    for record in without_noise().records():
        steps = [replace(step, data_seconds=None, other_seconds=step.other_seconds + 0.002) for step in record.steps]
        records.append(with_steps(record, steps))
    parts = parts_of(records)
    assert "data" not in hand_parts(parts, 0)
    assert hand_parts(parts, 0)["other"] == 3.0


def test_steps_are_read_as_columns_of_all_ranks() -> None:
    table = read_steps(without_noise(steps=7).records()).table
    assert table.seconds.shape == (2, 7)
    assert table.numbers.tolist() == [1, 2, 3, 4, 5, 6, 7]
