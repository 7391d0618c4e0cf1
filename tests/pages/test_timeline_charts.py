"""Timelines: rectangles by hand, which steps and ranks are drawn, and what was left out is said."""

from __future__ import annotations

from typing import Any

import pytest

from explained_factory import batch_study, run_of
from results_factory import explained_run, make_curve, make_results, make_trial, one_curve
from vitscale.analysis import analyse
from vitscale.pages.charts import timeline
from vitscale.pages.charts.timeline import timeline_chart, timelines
from vitscale.store.records import ExplainedLine, RankRecord
from vitscale.store.results import Results, Run


def test_the_lanes_of_two_ranks_by_hand() -> None:
    """Micro-batch 16: rank 0 waits 12 ms after 50 of work, rank 1 is late; the transfer ends both at 72 ms."""
    ((one,), left_out) = timelines(analyse(batch_study([16], [1, 2])))
    assert left_out == []
    assert one.label == "ddp, 2 ranks, micro-batch 16"
    assert one.unit.sign == "ms"
    first: list[tuple[Any, ...]] = [
        (row["rank"], row["part"], pytest.approx(row["start"]), pytest.approx(row["end"]))
        for row in one.rows
        if row["place"] == 0
    ]
    assert first == [
        (0, "data wait", 0, 2), (0, "forward", 2, 18), (0, "backward", 18, 50), (0, "exposed wait", 50, 62),
        (0, "exposed wire", 62, 72), (0, "optimizer", 72, 76), (0, "other", 76, 77),
        (1, "data wait", 0, 2), (1, "forward", 2, 22), (1, "backward", 22, 62),
        (1, "exposed wire", 62, 72), (1, "optimizer", 72, 76), (1, "other", 76, 77),
    ]  # fmt: skip
    assert one.text[0] == (
        f"Step {one.steps[0]}: rank 0: 77.0 ms: data wait 2.00 ms, forward 16.0 ms, backward 32.0 ms, exposed wait "
        "12.0 ms, exposed wire 10.0 ms, optimizer 4.00 ms, other 1.00 ms; rank 1: 77.0 ms: data wait 2.00 ms, "
        "forward 20.0 ms, backward 40.0 ms, exposed wire 10.0 ms, optimizer 4.00 ms, other 1.00 ms"
    )


def test_a_step_of_unknown_parts_is_as_long_as_it_was_and_says_how_much_of_it_they_are() -> None:
    """The update and what follows it, the last 5 of 55 ms, are unknown: nothing of it is too short to be drawn."""
    trial = make_trial("ddp", 1, micro_batch=16)
    run = run_of(trial)
    (rank,) = run.ranks
    lines = [own.model_copy(update={"unknown": {"optimizer": "lost", "other": "lost"}}) for own in rank.explained]
    run = run.model_copy(update={"ranks": (rank.model_copy(update={"explained": tuple(lines)}),)})
    ((drawn,), _) = timelines(analyse(make_results([(make_curve([trial]), [trial])], [run])))
    assert drawn.text[0].endswith(
        "rank 0: 55.0 ms: data wait 2.00 ms, forward 16.0 ms, backward 32.0 ms, unknown 5.00 ms"
    )
    assert not any("too short" in note for note in drawn.notes)


def test_the_first_a_middle_and_the_last_explained_step_are_drawn_and_the_others_counted() -> None:
    results = batch_study([16], [2])
    explained = [line.step + 1 for line in results.runs[0].ranks[0].explained]
    ((one,), _) = timelines(analyse(results))
    assert len(explained) == 8
    assert one.steps == (explained[0], explained[4], explained[7])
    assert one.notes == ("3 of the 8 explained steps are drawn",)
    found = timeline_chart(analyse(results))
    assert found is not None
    assert [view.choices["step"].label for view in found.views] == [f"step {step}" for step in one.steps]
    assert {view.subtitle for view in found.views} == {
        "each rank's own clock begins at 0 with its step; 3 of the 8 explained steps are drawn"
    }
    assert {row["panel"] for row in one.rows} == {f"step {step}" for step in one.steps}


def test_one_timeline_of_the_largest_trial_of_each_curve_and_each_trial_once() -> None:
    results = batch_study([16, 64], [1, 2])
    found, _ = timelines(analyse(results))
    assert [one.label for one in found] == [
        "ddp, micro_batch 16, 2 ranks",
        "ddp, micro_batch 64, 2 ranks",
    ]
    trial = make_trial("ddp", 2)
    curves = [(make_curve([trial], mode), [trial]) for mode in ("strong-micro", "strong-global")]
    assert len(timelines(analyse(make_results(curves, [run_of(trial)])))[0]) == 1


def many_ranks(slow: int) -> Results:
    trial = make_trial("ddp", 20, epochs=4)
    parts = [
        {"forward": 0.02, "backward": 0.02 + (0.02 if rank == slow else 0.0), "wait": 0.0 if rank == slow else 0.02}
        for rank in range(20)
    ]
    return make_results([(make_curve([trial]), [trial])], [explained_run(trial, parts)])


def test_of_many_ranks_sixteen_are_drawn_and_the_slow_one_is_among_them() -> None:
    ((spread,), _) = timelines(analyse(many_ranks(slow=0)))
    missing = next(rank for rank in range(20) if rank not in spread.ranks)
    ((one,), _) = timelines(analyse(many_ranks(slow=missing)))
    assert len(one.ranks) == 16
    assert missing in one.ranks
    assert "16 of the 20 ranks are drawn" in one.notes
    assert {row["rank"] for row in one.rows} == set(one.ranks)


def crowded(trial_count: int, buckets: int) -> Results:
    """Trials on 16 ranks whose backward pass is cut up by so many all-reduces."""
    curves, runs = [], []
    for place in range(trial_count):
        trial = make_trial("ddp", 16, epochs=8, learning_rate=0.1 + place)
        run = explained_run(trial, [{"forward": 0.01, "backward": 0.02}] * 16)
        curves.append((make_curve([trial], train__learning_rate=0.1 + place), [trial]))
        runs.append(run.model_copy(update={"ranks": tuple(_crowded(rank, buckets) for rank in run.ranks)}))
    return make_results(curves, runs)


def _crowded(rank: RankRecord, buckets: int) -> RankRecord:
    def line(one: ExplainedLine) -> ExplainedLine:
        width = 0.02 / buckets
        places = [(0.01 + k * width, 0.01 + (k + 0.5) * width) for k in range(buckets)]
        return one.model_copy(
            update={
                "idle": tuple(places),
                "collectives": tuple(("gloo", "all_reduce", start, end) for start, end in places),
            }
        )

    return rank.model_copy(update={"explained": tuple(line(one) for one in rank.explained)})


def rectangles(results: Results) -> int:
    return sum(len(one.rows) for one in timelines(analyse(results))[0])


def test_a_page_has_a_few_thousand_rectangles_however_crowded_its_steps_are() -> None:
    results = crowded(3, buckets=60)
    assert 3 * 3 * 16 * 60 > 2000  # transfers alone
    assert 1300 < rectangles(results) <= 2000
    for one in timelines(analyse(results))[0]:
        assert one.notes[-1].startswith("not drawn: pieces too short, ")


def test_pieces_narrower_than_a_pixel_are_left_out_and_their_share_is_told() -> None:
    """One piece in twenty thousand of the step: half of the transfers' place is theirs, half computation."""
    ((one,), _) = timelines(analyse(crowded(1, buckets=2000)))
    assert {row["part"] for row in one.rows} == {"forward"}
    assert one.notes[-1] == "not drawn: pieces too short, 66.7 % of the time"


def test_curves_without_room_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MOST_TIMELINES", 1)
    found = timeline_chart(analyse(batch_study([16, 64], [2])))
    assert found is not None
    left_out = "No room for the timelines of: ddp, micro_batch 64, 2 ranks."
    assert found.views[0].summary.endswith(left_out)


def test_a_rank_without_an_explained_step_has_no_lane_and_is_counted() -> None:
    """A script's own traces may be of some ranks."""
    trial = make_trial("script", 3, script="train.py", micro_batch=16)
    run = run_of(trial)
    ranks = [rank.model_copy(update={"steps": (), "explained": rank.explained[:1]}) for rank in run.ranks]
    ranks[1] = ranks[1].model_copy(update={"explained": ()})
    ((drawn,), _) = timelines(
        analyse(make_results([(make_curve([trial]), [trial])], [run.model_copy(update={"ranks": tuple(ranks)})]))
    )
    assert (drawn.ranks, drawn.notes) == ((0, 2), ("2 of the 3 ranks are drawn",))


def test_without_an_explained_step_there_is_no_timeline() -> None:
    assert timeline_chart(analyse(one_curve({1: [0.1], 2: [0.1]}))) is None


def test_a_run_whose_ranks_explained_nothing_in_common_is_left_aside() -> None:
    trial = make_trial("ddp", 2, micro_batch=16)
    run = run_of(trial)
    torn = run.model_copy(update={"ranks": (run.ranks[0], run.ranks[1].model_copy(update={"explained": ()}))})
    whole: Run = run_of(trial, repeat=1)
    ((one,), _) = timelines(analyse(make_results([(make_curve([trial]), [trial])], [torn, whole])))
    assert one.repeat == 1
