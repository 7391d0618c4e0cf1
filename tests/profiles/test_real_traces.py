"""The device's side of the breakdown on traces of real GPUs: whole ones are read, and what is lost is said."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kineto_traces import A100, MI300X, V100, real_trace, trace_of
from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.time.breakdown import RankParts, breakdown
from vitscale.base.time_spans import intersection, length
from vitscale.profiles.timeline import NO_NCCL, Event, steps_on_cuda
from vitscale.profiles.trace_figures import DeviceTime, step_spans, steps_of
from vitscale.store.records import COMMUNICATION, PARTS, ExplainedLine

STEPS = {A100: 3, V100: 5, MI300X: 3}


def lines_of(name: str, change: Callable[[list[Event]], list[Event]] = lambda events: events) -> list[ExplainedLine]:
    return steps_on_cuda(change(real_trace(name)), range(STEPS[name]), block=0, world_size=2)


def parts_of(lines: list[ExplainedLine]) -> RankParts:
    """As far as one rank alone tells: it waits for nobody."""
    trial = make_trial("ddp", 1)
    rank = make_rank(trial, 0, [0.1]).model_copy(update={"explained": tuple(lines)})
    found = breakdown(make_run(trial, [rank]))
    assert found is not None
    return found.typical


def busy_seconds(events: list[Event], begin_ns: float, end_ns: float, *, nccl: bool) -> float:
    """Seconds in which a kernel ran, on a grid of microseconds: by other means than intervals."""
    running = np.zeros(int((end_ns - begin_ns) / 1000) + 1, bool)
    for event in events:
        if event.kind == "kernel" and event.name.startswith("nccl") is nccl:
            low, high = (max(0, round((moment - begin_ns) / 1000)) for moment in (event.start_ns, event.end_ns))
            running[low:high] = True
    return float(running.sum()) / 1e6


@pytest.mark.parametrize(
    ("name", "collectives"),
    [(A100, {"all_reduce": 5, "broadcast": 2}), (V100, {"all_reduce": 404})],
)
def test_a_whole_trace_is_read(name: str, collectives: dict[str, int]) -> None:
    lines = lines_of(name)
    assert len(lines) == STEPS[name] - 1
    for line in lines:
        assert set(line.unknown) == {"data_wait"}  # no loader is marked
        operations = [operation for _, operation, _, _ in line.collectives]
        assert {operation: operations.count(operation) for operation in set(operations)} == collectives
        assert {communicator for communicator, *_ in line.collectives} == {"nccl-0"}
    typical = parts_of(lines)
    assert typical.sum_of(*typical.parts) == pytest.approx(typical.seconds, abs=1e-5)


@pytest.mark.parametrize("name", [A100, V100, MI300X])
def test_a_launch_gap_is_time_in_which_nothing_ran_on_the_device(name: str) -> None:
    """As `vitscale import` has it; on the MI300X copies on the device are five times as long as such gaps."""
    lines = lines_of(name)
    trace = trace_of(name)
    spans = [span for _, span, _ in step_spans(trace, steps_of(trace))][-len(lines) :]
    idle = sum(DeviceTime(trace).shares(span).idle_seconds for span in spans) / len(lines)
    assert parts_of(lines).parts["launch_gaps"] == pytest.approx(idle, abs=2e-6)


def test_what_is_computed_agrees_with_the_kernels_laid_on_a_grid() -> None:
    events = real_trace(A100)
    lines = lines_of(A100)
    typical = parts_of(lines)
    ends = [max(e.end_ns for e in events if e.kind in ("kernel", "copy"))]
    begin = ends[0] - sum(line.seconds for line in lines) * 1e9  # the last step ends with the trace's last kernel
    computing = busy_seconds(events, begin, ends[0], nccl=False) / len(lines)
    assert typical.sum_of("forward", "backward", "optimizer", "other") == pytest.approx(computing, rel=0.02)


def test_a_trace_without_its_kernels_makes_every_part_unknown() -> None:
    lines = lines_of(A100, lambda events: [e for e in events if e.kind not in ("kernel", "copy")])
    assert len(lines) == 2
    for line in lines:
        assert set(line.unknown) == {*PARTS, COMMUNICATION}
        assert "saw none of the 1,2" in line.unknown["forward"]  # 1,220 launches and copies a step
        assert NO_NCCL not in line.unknown.values()
        assert line.seconds > 0
    typical = parts_of(lines)
    assert (set(typical.parts.values()), typical.exposed_seconds) == ({None}, None)


@pytest.mark.parametrize("name", [A100, V100])
@pytest.mark.parametrize(
    "lose",
    [
        lambda event: None,
        lambda event: event._replace(start_ns=0),
        lambda event: event._replace(start_ns=event.start_ns - 60_000_000_000),  # a minute before it was launched
    ],
)
def test_kernels_lost_or_with_impossible_times_make_every_part_unknown_above_1_percent(
    name: str, lose: Callable[[Event], Event | None]
) -> None:
    drawn = random.Random(13)

    def change(events: list[Event]) -> list[Event]:
        found = (lose(e) if e.kind == "kernel" and drawn.random() < 0.03 else e for e in events)
        return [event for event in found if event is not None]

    for line in lines_of(name, change):
        assert set(line.unknown) == {*PARTS, COMMUNICATION}
        assert "launched kernels and copies (" in line.unknown["backward"]


def test_one_lost_kernel_makes_its_phase_unknown_and_what_it_would_be_taken_for() -> None:
    events = real_trace(A100)
    last_step = max(e.start_ns for e in events if e.name == "vitscale.step")
    backward = next(e for e in events if e.name == "vitscale.backward" and e.start_ns > last_step)
    launches = [e for e in events if e.name == "cudaLaunchKernel" and backward.start_ns < e.start_ns < backward.end_ns]
    lost = launches[len(launches) // 2].correlation
    first, last = lines_of(A100, lambda events: [e for e in events if e.kind != "kernel" or e.correlation != lost])
    assert set(first.unknown) == {"data_wait"}
    assert set(last.unknown) == {"data_wait", "backward", "wait", "wire", "launch_gaps", COMMUNICATION}
    assert last.unknown["backward"].startswith("the profiler lost 1 of 1,2")


def test_work_launched_before_the_profile_began_belongs_to_no_step_and_is_not_lost() -> None:
    """A quarter of what ran in the MI300X's trace: the device was a step behind the host."""
    for line in lines_of(MI300X):
        assert set(line.unknown) == {"data_wait"}
        assert [phase for phase, _, _ in line.phases] == ["forward", "backward", "optimizer"]


def test_work_without_its_launch_belongs_to_no_phase() -> None:
    def unlaunched(events: list[Event]) -> list[Event]:
        launches = [event for event in events if event.kind == "launch"]
        gone = {event.correlation for event in launches[1::4]}
        return [event for event in events if event.kind != "launch" or event.correlation not in gone]

    for line in lines_of(A100, unlaunched):
        assert set(line.unknown) == {*PARTS, COMMUNICATION}
        assert line.unknown["forward"].startswith("the launches of 9")
        assert " kernels and copies (25 %) were lost, or " in line.unknown["forward"]


def test_collectives_that_do_not_name_their_operation_are_no_computation() -> None:
    """`ncclDevKernel_Generic`: the call that launched it says what it is, where the profiler links the two."""

    def unlinked(events: list[Event]) -> list[Event]:
        return [event._replace(operation="", communicator="") for event in events]

    for lines, operations in [
        (lines_of(MI300X), {"all_reduce", "broadcast"}),
        (lines_of(MI300X, unlinked), {"unknown"}),
    ]:
        assert {operation for line in lines for _, operation, _, _ in line.collectives} == operations
        for line in lines:
            exposed = intersection(line.idle, [(start, end) for _, _, start, end in line.collectives])
            assert length(exposed) > 0  # while nothing else ran they are idle time, not computation
