"""The breakdown of a run from its explained lines: parts that add up, who is waited for, what explaining cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import NOT_TOLD_APART, explained_line, explained_run, make_rank, make_run, make_trial, steady_run
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.time.breakdown import Breakdown, breakdown, mean_breakdown
from vitscale.store.records import COMMUNICATION, PARTS, ExplainedLine
from vitscale.store.results import Run

FAST: dict[str, Any] = {
    "data_wait": 0.01,
    "forward": 0.04,
    "backward": 0.08,
    "wait": 0.025,
    "wire": 0.05,
    "optimizer": 0.01,
}
SLOW: dict[str, Any] = {
    "data_wait": 0.01,
    "forward": 0.065,
    "backward": 0.08,
    "wait": 0.0,
    "wire": 0.05,
    "optimizer": 0.01,
}


def test_parts_of_every_rank_come_out_as_they_went_in() -> None:
    found = breakdown(explained_run(make_trial(gpus=2, epochs=4), [FAST, SLOW | {"other": 0.002}]))
    assert found is not None
    for rank, truth in zip(found.ranks, (FAST, SLOW | {"other": 0.002}), strict=True):
        for name, seconds in truth.items():
            assert rank.parts[name] == pytest.approx(seconds), name
        assert rank.parts["h2d"] is None
        assert rank.exposed_seconds == pytest.approx(truth["wait"] + truth["wire"])
    assert found.steps >= 4
    assert found.reasons["h2d"]


def test_the_slow_rank_is_named_with_how_much_longer_it_works() -> None:
    found = breakdown(explained_run(make_trial(gpus=3, epochs=5), [FAST, SLOW, FAST]))
    assert found is not None
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.share_of_steps) == (1, 1.0)
    # 0.165 s of own work against 0.14.
    assert found.straggler.slower_by == pytest.approx(0.165 / 0.14 - 1)
    assert found.typical.rank != 1


def test_a_wait_too_short_to_notice_names_nobody() -> None:
    barely = FAST | {"wait": 0.001}
    found = breakdown(explained_run(make_trial(gpus=2, epochs=4), [barely, SLOW | {"forward": 0.041}]))
    assert found is not None
    assert found.straggler is None


def test_ranks_that_take_turns_at_being_late_name_nobody() -> None:
    """Jitter: rank 0 is late in three steps of five, rank 1 in two, by as much."""
    trial = make_trial(gpus=2)
    late, early = SLOW, FAST
    turns = [(late, early), (early, late), (late, early), (early, late), (late, early)]
    ranks = [
        make_rank(trial, rank, [0.2] * 10).model_copy(
            update={"explained": tuple(explained_line(4 + n, n, **pair[rank]) for n, pair in enumerate(turns))}
        )
        for rank in (0, 1)
    ]
    found = breakdown(make_run(trial, ranks))
    assert found is not None
    assert found.straggler is None


def test_the_cost_of_explaining_is_held_against_the_light_steps_beside_it() -> None:
    found = breakdown(explained_run(make_trial(epochs=4), [SLOW], slowdown=0.08))
    assert found is not None
    assert found.overhead == pytest.approx(0.08)


def test_what_explaining_costs_goes_by_what_passed_and_without_a_rare_slow_step() -> None:
    """Two ranks stamp late in turn: of 0.11 and 0.09 s 0.1 passes a step. The largest of each step would be 0.11."""
    trial = make_trial(gpus=2, warmup_steps=0)
    ranks = []
    for rank in range(2):
        seconds = [(0.11, 0.09)[(step + rank) % 2] for step in range(16)]
        seconds[6], seconds[8] = 5.0, 0.12
        record = make_rank(trial, rank, seconds)
        steps = [line.model_copy(update={"window": "explained"}) if line.step == 8 else line for line in record.steps]
        line = explained_line(8, 0, forward=0.06, backward=0.06)
        ranks.append(record.model_copy(update={"steps": tuple(steps), "explained": (line,)}))
    found = breakdown(make_run(trial, ranks))
    assert found is not None
    # Steps 3, 4, 5 and 7 before it, and 9 to 12: 0.09 + 0.11 + 0.09 + 0.11 s, twice.
    assert found.overhead == pytest.approx(0.12 / 0.1 - 1)


def profiled_last(slowdown: float, attached: float) -> Run:
    """A run on a GPU: explained steps slowed against those beside them, and all from the profiler's start on."""
    run = explained_run(make_trial(epochs=4, device="cuda"), [SLOW], slowdown=slowdown)
    (rank,) = run.ranks
    steps = [
        line.model_copy(update={"seconds": line.seconds * (1 + attached * (line.window in ("attached", "explained")))})
        for line in rank.steps
    ]
    return run.model_copy(update={"ranks": (rank.model_copy(update={"steps": tuple(steps)}),)})


def test_what_an_attached_profiler_costs_is_told_apart_from_explaining_and_is_in_no_reported_time() -> None:
    run = profiled_last(slowdown=0.08, attached=0.2)
    found = breakdown(run)
    assert found is not None
    assert found.overhead == pytest.approx(0.08)
    assert found.attached_overhead == pytest.approx(0.2)
    assert found.slowdown == pytest.approx(1.08 * 1.2)
    undisturbed = run_figures(profiled_last(slowdown=0.08, attached=0.0))
    assert run_figures(run).step_seconds == pytest.approx(undisturbed.step_seconds)
    assert run_figures(run).images_per_second == pytest.approx(undisturbed.images_per_second)
    both = mean_breakdown([found, found])
    assert both is not None
    assert both.attached_overhead == pytest.approx(0.2)


def on_a_gpu(line: ExplainedLine, gap: float) -> ExplainedLine:
    """The same step, of 0.09 s of work and a gap in forward's launches."""
    return ExplainedLine(
        step=line.step,
        block=line.block,
        device="cuda",
        seconds=0.09 + gap,
        phases=(
            ("forward", 0.0, 0.035 + gap),
            ("backward", 0.035 + gap, 0.085 + gap),
            ("optimizer", 0.085 + gap, 0.09 + gap),
        ),
        idle=((0.015, 0.015 + gap),),
        collectives=(),
    )


@pytest.mark.parametrize("slowdown", [0.0, 0.25, 0.6])
@pytest.mark.parametrize("attached", [0.0, 0.2])
def test_on_a_gpu_the_parts_are_those_of_the_steps_that_are_timed(slowdown: float, attached: float) -> None:
    """Of 100 ms the device is idle for 10. Its kernels last as long under the profiler, which only keeps the host from
    launching: however much that costs, the gaps are 10 ms, and the step is 100."""
    seconds = 0.1 * (1 + slowdown) * (1 + attached)
    trial = make_trial(epochs=4, device="cuda")
    run = explained_run(trial, [{"forward": seconds / 2, "backward": seconds / 2}], slowdown=slowdown)
    (rank,) = run.ranks
    steps = [line.model_copy(update={"seconds": 0.1}) if line.window == "light" else line for line in rank.steps]
    explained = tuple(on_a_gpu(line, seconds - 0.09) for line in rank.explained)
    record = rank.model_copy(update={"steps": tuple(steps), "explained": explained})
    found = breakdown(run.model_copy(update={"ranks": (record,)}))
    assert found is not None
    (own,) = found.ranks
    assert own.seconds == pytest.approx(0.1)
    assert own.parts == pytest.approx(
        dict.fromkeys(PARTS, 0.0) | {"forward": 0.035, "backward": 0.05, "optimizer": 0.005, "launch_gaps": 0.01}
    )


def test_what_the_profiler_adds_to_another_ranks_gaps_is_taken_out_of_this_ranks_wait() -> None:
    """Two ranks of a GPU each: the first has work of 90 ms and waits 8 for the second, whose launches take 20 ms longer
    under the profiler."""
    trial = make_trial(gpus=2, epochs=4, device="cuda")
    run = explained_run(trial, [{"forward": 0.06, "backward": 0.06}] * 2, step_seconds=0.1)
    ranks = []
    for rank in run.ranks:
        lines = []
        for line in rank.explained:
            ready, idle = (0.09, ((0.09, 0.12),)) if rank.rank == 0 else (0.118, ((0.01, 0.058), (0.118, 0.12)))
            lines.append(
                ExplainedLine(
                    step=line.step,
                    block=line.block,
                    device="cuda",
                    seconds=0.12,
                    phases=(("forward", 0.0, 0.06), ("backward", 0.06, 0.12)),
                    idle=idle,
                    collectives=(("0", "all_reduce", ready, 0.12),),
                )
            )
        ranks.append(rank.model_copy(update={"explained": tuple(lines)}))
    found = breakdown(run.model_copy(update={"ranks": tuple(ranks)}))
    assert found is not None
    first, second = found.ranks
    assert first.seconds == second.seconds == pytest.approx(0.1)
    assert first.sum_of("forward", "backward") == pytest.approx(0.09)
    assert first.parts["wait"] == pytest.approx(0.008)
    assert first.exposed_seconds == pytest.approx(0.01)
    assert second.sum_of("forward", "backward") == pytest.approx(0.07)
    assert second.parts["launch_gaps"] == pytest.approx(0.028)
    assert found.straggler is not None
    assert found.straggler.rank == 1
    assert found.straggler.slower_by == pytest.approx(0.098 / 0.09 - 1)


def test_steps_that_nothing_times_beside_the_profiler_stand_as_they_are() -> None:
    """As in traces: all of their steps are explained, and nobody knows what light ones would take."""
    run = explained_run(make_trial(epochs=4, device="cuda"), [SLOW])
    (rank,) = run.ranks
    numbers = {line.step for line in rank.explained}
    alone = [line.model_copy(update={"window": "light"}) for line in rank.steps if line.step in numbers]
    explained = tuple(on_a_gpu(line, 0.03) for line in rank.explained)
    record = rank.model_copy(update={"steps": tuple(alone), "explained": explained})
    found = breakdown(run.model_copy(update={"ranks": (record,)}))
    assert found is not None
    assert (found.overhead, found.attached_overhead) == (None, None)
    assert found.ranks[0].seconds == pytest.approx(0.12)
    assert found.ranks[0].parts["launch_gaps"] == pytest.approx(0.03)


def test_on_a_host_no_profiler_stays_attached() -> None:
    found = breakdown(explained_run(make_trial(epochs=4), [SLOW], slowdown=0.08))
    assert found is not None
    assert found.attached_overhead is None
    assert found.slowdown == pytest.approx(1.08)


def test_where_wait_and_wire_cannot_be_told_apart_their_sum_still_stands() -> None:
    found = breakdown(explained_run(make_trial(gpus=2, epochs=4), [FAST | {"told_apart": False}] * 2))
    assert found is not None
    for rank in found.ranks:
        assert (rank.parts["wait"], rank.parts["wire"], rank.parts["norm"]) == (None, None, 0.0)
        assert rank.exposed_seconds == pytest.approx(0.075)
        assert rank.parts["other"] == pytest.approx(0.0, abs=1e-9)
    assert found.reasons["wait"] == found.reasons["wire"] == NOT_TOLD_APART
    assert not found.wait_known
    assert found.straggler is None


def test_what_synchronised_norms_exchange_is_a_part_of_its_own() -> None:
    run = explained_run(make_trial(gpus=2, epochs=4), [FAST | {"norm": 0.03}, SLOW | {"norm": 0.03}])
    found = breakdown(run)
    assert found is not None
    for rank in found.ranks:
        assert [rank.parts["norm"], rank.parts["wire"]] == pytest.approx([0.03, 0.05])
        assert sum(seconds or 0.0 for seconds in rank.parts.values()) == pytest.approx(rank.seconds)
        assert rank.exposed_seconds == pytest.approx(rank.sum_of("wait", "wire", "norm"))
    assert found.straggler is not None


def test_the_typical_rank_is_one_of_those_that_wait_known_or_not() -> None:
    for told_apart in (True, False):
        parts = [SLOW | {"told_apart": told_apart}, FAST | {"told_apart": told_apart}]
        found = breakdown(explained_run(make_trial(gpus=2, epochs=4), parts))
        assert found is not None
        assert found.typical.rank == 1


def test_a_run_without_explained_steps_or_with_a_rank_missing_has_none() -> None:
    trial = make_trial(gpus=2)
    assert breakdown(steady_run(trial, 0.1)) is None
    whole = explained_run(make_trial(gpus=2, epochs=4), [FAST, SLOW])
    assert breakdown(whole.model_copy(update={"ranks": whole.ranks[:1]})) is None


def test_only_steps_that_every_rank_explained_count() -> None:
    trial = make_trial(gpus=2)
    lines = [explained_line(step, step, **SLOW) for step in (5, 6, 7)]
    ranks = [make_rank(trial, rank, [0.2] * 10) for rank in (0, 1)]
    ranks[0] = ranks[0].model_copy(update={"explained": tuple(lines)})
    ranks[1] = ranks[1].model_copy(update={"explained": tuple(lines[1:])})
    found = breakdown(make_run(trial, ranks))
    assert found is not None
    assert found.steps == 2


def test_steps_before_the_run_was_warm_are_left_out() -> None:
    trial = make_trial()
    cold, warm = (
        explained_line(step, step, **(FAST | {"wait": 0.0, "forward": f})) for step, f in ((4, 0.4), (7, 0.04))
    )
    run = make_run(trial, [make_rank(trial, 0, [0.2] * 10).model_copy(update={"explained": (cold, warm)})])
    found = breakdown(run, steady_from=6)
    assert found is not None
    assert found.steps == 1
    assert found.typical.parts["forward"] == pytest.approx(0.04)
    assert breakdown(run, steady_from=8) is None


def lossy(run: Run, steps: int) -> Run:
    """`run` whose rank 1 lost events of the first explained steps."""
    lost = dict.fromkeys(("forward", "wait", "wire", COMMUNICATION), "the profiler lost 9 of 900")
    lines = list(run.ranks[1].explained)
    lines[:steps] = [line.model_copy(update={"unknown": {**line.unknown, **lost}}) for line in lines[:steps]]
    other = run.ranks[1].model_copy(update={"explained": tuple(lines)})
    return run.model_copy(update={"ranks": (run.ranks[0], other)})


def test_a_step_with_lost_events_is_left_out_of_the_mean_and_counted() -> None:
    run = explained_run(make_trial(gpus=2, epochs=4), [FAST, SLOW])
    whole, found = breakdown(run), breakdown(lossy(run, 1))
    assert whole is not None
    assert found is not None
    assert (found.steps, found.left_out) == (whole.steps - 1, ("the profiler lost 9 of 900",))
    assert found.ranks[1].parts == pytest.approx(whole.ranks[1].parts)
    assert found.reasons == whole.reasons
    assert found.straggler == whole.straggler
    none_whole = breakdown(lossy(run, whole.steps))
    assert none_whole is not None
    assert (none_whole.steps, none_whole.left_out) == (whole.steps, ())
    assert none_whole.ranks[1].parts["forward"] is None


def test_a_run_with_lost_events_in_every_step_is_left_out_of_the_trials_mean() -> None:
    run = explained_run(make_trial(gpus=2, epochs=4), [FAST, SLOW])
    whole, lost = breakdown(run), breakdown(lossy(run, 99))
    assert whole is not None
    found = mean_breakdown([whole, lost])
    assert found is not None
    assert (found.steps, len(found.left_out)) == (whole.steps, whole.steps)
    assert found.ranks[1].parts == pytest.approx(whole.ranks[1].parts)
    assert [used is not None for used in found.by_run] == [True, False]


def test_steps_of_unlike_kinds_are_not_chosen_by_what_is_known_of_them() -> None:
    """Where wait and wire are mixed in most steps, a step without any transfer does not stand for all."""
    run = explained_run(make_trial(gpus=2, epochs=4), [FAST | {"told_apart": False}] * 2)
    ranks = []
    for rank in run.ranks:
        alone = explained_line(rank.explained[0].step, 0, forward=0.04, backward=0.08)
        bare = alone.model_copy(update={"collectives": (), "idle": ()})
        ranks.append(rank.model_copy(update={"explained": (bare, *rank.explained[1:])}))
    found = breakdown(run.model_copy(update={"ranks": tuple(ranks)}))
    assert found is not None
    assert (found.steps, found.left_out, found.ranks[0].parts["wait"]) == (len(run.ranks[0].explained), (), None)


def test_runs_are_combined_by_their_mean() -> None:
    trial = make_trial(gpus=2, epochs=4)
    runs = [
        explained_run(trial, [FAST | {"wire": w}, SLOW | {"wire": w}], repeat=n) for n, w in enumerate((0.04, 0.06))
    ]
    found = mean_breakdown([one for run in runs if (one := breakdown(run))])
    assert found is not None
    assert found.ranks[0].parts["wire"] == pytest.approx(0.05)
    assert found.straggler is not None
    assert found.straggler.rank == 1
    assert mean_breakdown([]) is None


def of_ranks(seconds: dict[int, float]) -> Breakdown:
    """A run of a script whose ranks left traces: the backward seconds of each."""
    lines = {rank: (explained_line(0, 0, forward=0.02, backward=own),) for rank, own in seconds.items()}
    run = steady_run(make_trial("script", 3, epochs=1, warmup_steps=0, script="train.py"), 0.1)
    ranks = [rank.model_copy(update={"steps": (), "explained": lines.get(rank.rank, ())}) for rank in run.ranks]
    found = breakdown(run.model_copy(update={"ranks": tuple(ranks)}))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("runs", "backward", "used"),
    [
        ([{0: 0.04, 1: 0.06}, {0: 0.08}], {0: 0.06}, [True, True]),
        ([{0: 0.04, 1: 0.06, 2: 0.02}, {1: 0.08, 2: 0.04}], {1: 0.07, 2: 0.03}, [True, True]),
        # No rank is in all: rank 1 is in most, and rank 2 is in both runs that have it.
        ([{0: 0.04}, {1: 0.06, 2: 0.01}, {1: 0.08, 2: 0.03}], {1: 0.07, 2: 0.02}, [False, True, True]),
        ([{0: 0.04}, {1: 0.06}], {0: 0.04}, [True, False]),
    ],
)
def test_runs_that_explain_unlike_ranks_are_combined_by_those_that_they_share(
    runs: list[dict[int, float]], backward: dict[int, float], used: list[bool]
) -> None:
    found = mean_breakdown([of_ranks(seconds) for seconds in runs])
    assert found is not None
    assert {rank.rank: rank.parts["backward"] for rank in found.ranks} == pytest.approx(backward)
    assert [run is not None for run in found.by_run] == used
    for number in backward:  # every run that is used answers for every rank
        over_runs = found.part_seconds(number, "backward")
        assert over_runs is not None
        assert over_runs.value == pytest.approx(backward[number])
    assert found.exposed_share is not None


def test_a_straggler_that_not_all_runs_explained_is_not_named() -> None:
    whole = breakdown(explained_run(make_trial(gpus=2, epochs=5), [FAST, SLOW]))
    assert whole is not None
    assert whole.straggler is not None
    alone = replace(whole, ranks=whole.ranks[:1], straggler=None)
    found = mean_breakdown([whole, whole, alone])
    assert found is not None
    assert ([own.rank for own in found.ranks], found.straggler) == ([0], None)


@given(
    st.lists(st.fixed_dictionaries({name: st.floats(0.001, 1.0) for name in (*FAST, "other")}), min_size=1, max_size=4)
)
def test_parts_never_overlap_and_add_up(ranks: list[dict[str, Any]]) -> None:
    """Whatever the parts: they sum to the step, and none is negative."""
    trial = make_trial(gpus=len(ranks))
    records = [
        make_rank(trial, rank, [9.0] * 6).model_copy(update={"explained": (explained_line(5, 0, **parts),)})
        for rank, parts in enumerate(ranks)
    ]
    found = breakdown(make_run(trial, records))
    assert found is not None
    for rank in found.ranks:
        assert set(rank.parts) == set(PARTS)
        assert all(value is None or value >= 0 for value in rank.parts.values())
        assert rank.sum_of(*PARTS) == pytest.approx(rank.seconds)
