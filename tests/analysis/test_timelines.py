"""Intervals of a step's parts: by hand, and as long as the parts of the breakdown whatever the step looks like."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import explained_line, make_rank, make_run, make_trial
from vitscale.analysis.time.breakdown import breakdown
from vitscale.analysis.time.exposure import explained_steps, lanes
from vitscale.base.time_spans import Interval, intersection, length
from vitscale.store.records import COMMUNICATION, PARTS, ExplainedLine, PhaseName
from vitscale.store.results import Run


def run_of(*lines: list[ExplainedLine], gpus: int | None = None) -> Run:
    """A run of one rank per argument; its explained lines."""
    trial = make_trial("ddp", gpus or len(lines))
    ranks = [
        make_rank(trial, rank, [1.0] * 10).model_copy(update={"explained": tuple(own)})
        for rank, own in enumerate(lines)
    ]
    return make_run(trial, ranks)


def test_every_part_lies_where_it_was() -> None:
    """Rank 0 computes 3 s of 8 and waits 2; rank 1 computes 5; the transfer takes 1.5, the update 1, the rest 0.5."""
    early = explained_line(4, 0, data_wait=1.0, forward=1.0, backward=2.0, wait=2.0, wire=1.5, optimizer=1.0, other=0.5)
    late = explained_line(4, 0, data_wait=1.0, forward=2.0, backward=3.0, wire=1.5, optimizer=1.0, other=0.5)
    found = lanes(run_of([early], [late]), 4)
    assert found[0] == {
        "data_wait": [(0.0, 1.0)], "forward": [(1.0, 2.0)], "backward": [(2.0, 4.0)], "wait": [(4.0, 6.0)],
        "wire": [(6.0, 7.5)], "optimizer": [(7.5, 8.5)], "other": [(8.5, 9.0)],
    }  # fmt: skip
    assert found[1] == {
        "data_wait": [(0.0, 1.0)], "forward": [(1.0, 3.0)], "backward": [(3.0, 6.0)],
        "wire": [(6.0, 7.5)], "optimizer": [(7.5, 8.5)], "other": [(8.5, 9.0)],
    }  # fmt: skip


def test_wait_and_wire_that_cannot_be_told_apart_are_one_part() -> None:
    line = explained_line(0, 0, forward=1.0, backward=1.0, wait=1.0, wire=1.0, told_apart=False)
    found = lanes(run_of([line], [line]), 0)
    assert found[0] == {"forward": [(0.0, 1.0)], "backward": [(1.0, 2.0)], COMMUNICATION: [(2.0, 4.0)]}


def test_an_idle_gpu_copies_starves_or_waits_for_a_launch() -> None:
    line = ExplainedLine(
        step=0,
        block=0,
        device="cuda",
        seconds=10.0,
        phases=(("forward", 2.0, 6.0), ("backward", 6.0, 10.0)),
        idle=((0.0, 3.0), (5.0, 7.0), (8.0, 9.5)),
        collectives=(("nccl", "all_reduce", 8.0, 9.0),),
        copies=((1.0, 2.0),),
        host_data=((0.0, 1.5),),
    )
    assert lanes(run_of([line]), 0)[0] == {
        "data_wait": [(0.0, 1.0)], "h2d": [(1.0, 2.0)], "launch_gaps": [(2.0, 3.0), (5.0, 7.0), (9.0, 9.5)],
        "forward": [(3.0, 5.0)], "backward": [(7.0, 8.0), (9.5, 10.0)], "wire": [(8.0, 9.0)],
    }  # fmt: skip


def test_only_steps_that_every_rank_explained_can_be_laid_side_by_side() -> None:
    both = explained_line(3, 0, forward=1.0, backward=1.0)
    alone = explained_line(5, 1, forward=1.0, backward=1.0)
    assert explained_steps(run_of([both, alone], [both])) == (3,)
    assert explained_steps(run_of([both], gpus=2)) == ()
    assert explained_steps(run_of([], [])) == ()


@st.composite
def some_intervals(draw: st.DrawFn, until: float) -> list[Interval]:
    """Disjoint intervals in order, some of them next to each other."""
    points = sorted(draw(st.lists(st.integers(0, 40), min_size=2, max_size=10, unique=True)))
    return [(a * until / 40, b * until / 40) for a, b in zip(points[::2], points[1::2], strict=False)]


@st.composite
def explained_steps_of_two_ranks(draw: st.DrawFn) -> list[ExplainedLine]:
    device: Literal["cpu", "cuda"] = draw(st.sampled_from(["cpu", "cuda"]))
    collectives = draw(st.integers(0, 3))
    lines = []
    for _ in range(2):
        seconds = 10.0
        names: list[PhaseName] = ["data", "h2d", "forward", "backward", "optimizer"]
        cuts = sorted(draw(st.lists(st.integers(0, 40), min_size=5, max_size=5)))
        ends = [cut * seconds / 40 for cut in cuts]
        phases = list(zip(names, [0.0, *ends], ends, strict=False))
        ends_of_collectives = sorted(draw(st.lists(st.integers(1, 40), min_size=collectives, max_size=collectives)))
        lines.append(
            ExplainedLine(
                step=0,
                block=0,
                device=device,
                seconds=seconds,
                phases=tuple(phases),
                idle=tuple(draw(some_intervals(seconds))),
                collectives=tuple(
                    ("group", "all_reduce", end * draw(st.floats(0, 0.25)), end * 0.25) for end in ends_of_collectives
                ),
                copies=tuple(draw(some_intervals(seconds))) if device == "cuda" else (),
                host_data=tuple(draw(some_intervals(seconds))) if device == "cuda" else (),
                unknown=draw(st.sampled_from([{}, {"wait": "why"}, {"launch_gaps": "why"}])),
            )
        )
    return lines


@given(explained_steps_of_two_ranks())
def test_the_intervals_never_overlap_and_are_as_long_as_the_breakdowns_parts(lines: list[ExplainedLine]) -> None:
    run = run_of(*([line] for line in lines))
    found = breakdown(run)
    assert found is not None
    for rank, own in lanes(run, 0).items():
        told = found.ranks[rank]
        for part in PARTS:
            if told.parts[part] is not None:
                assert length(own.get(part, [])) == pytest.approx(told.parts[part], abs=1e-9)
            else:
                assert part not in own
        if told.parts["wait"] is None:
            assert length(own.get(COMMUNICATION, [])) == pytest.approx(told.exposed_seconds, abs=1e-9)
        every = list(own.values())
        for place, one in enumerate(every):
            assert all(length(intersection(one, other)) < 1e-9 for other in every[place + 1 :])
