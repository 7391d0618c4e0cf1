"""Which entries belong to a step, and what stands for a reduce-scatter that gloo sends as all-reduces."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroup

from vitscale.probes import traffic
from vitscale.probes.traffic import (
    CLOCK_SET,
    NO_GROUP,
    CountedStep,
    Entry,
    ReduceScatter,
    TrafficCounter,
    Unreadable,
    collectives,
)
from vitscale.store.records import Collective


def entry(
    record: int, created_ns: int, operation: str = "all_reduce", elements: int = 10, dtype: str = "float32"
) -> Entry:
    return Entry(record, created_ns, "0", operation, dtype, elements, elements)


def found(entries: list[Entry], step: CountedStep) -> list[tuple[str, int, int]]:
    told = collectives([entries], step, 1, lambda name: 2)
    assert {one.ranks for one in told} <= {2}
    return [(one.operation, one.input_elements, one.output_elements) for one in told]


def test_a_step_has_what_was_called_from_its_beginning_to_its_end() -> None:
    entries = [entry(n, moment, elements=moment) for n, moment in enumerate([9, 10, 15, 19, 20])]
    assert found(entries, CountedStep(0, 10, 20)) == [("all_reduce", n, n) for n in (10, 15, 19)]


def test_a_ring_that_has_lost_the_steps_beginning_tells_nothing() -> None:
    entries = [entry(n, n) for n in range(5, 8)]
    assert len(found(entries, CountedStep(0, 6, 20))) == 2
    with pytest.raises(Unreadable, match="ring of 3 entries is too small: set TORCH_FR_BUFFER_SIZE to more"):
        found(entries, CountedStep(0, 5, 20))
    # One that has lost nothing may begin inside the step.
    assert len(found([entry(0, 5), entry(1, 6)], CountedStep(0, 5, 20))) == 2


def test_ranks_that_trained_together_cannot_have_sent_nothing() -> None:
    before, after = entry(0, 4), entry(1, 20)
    with pytest.raises(Unreadable, match="saw no collective, though 8 ranks trained together"):
        collectives([[before, after]], CountedStep(0, 5, 20), 8, lambda name: 8)
    with pytest.raises(Unreadable, match="though 2 ranks"):
        collectives([[]], CountedStep(0, 5, 20), 2, lambda name: 2)
    assert collectives([[]], CountedStep(0, 5, 20), 1, lambda name: 1) == []  # the plain engine alone calls nothing


def test_a_group_with_two_backends_is_read_off_both_recorders_each_entry_once() -> None:
    device, host = [entry(0, 5), entry(1, 9)], [entry(0, 7, "broadcast")]
    step = CountedStep(0, 5, 20)
    assert [one.operation for one in collectives([device, host], step, 2, lambda name: 2)] == [
        "all_reduce", "broadcast", "all_reduce",
    ]  # fmt: skip
    assert len(collectives([device, device], step, 2, lambda name: 2)) == 2
    with pytest.raises(Unreadable, match="ring of 1 entries is too small"):
        collectives([device, [entry(3, 7)]], CountedStep(0, 6, 20), 2, lambda name: 2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("config", "carrier", "read"),
    [
        ("cpu:gloo,cuda:gloo", "gloo", ["gloo"]),
        ("cuda:nccl", "nccl", ["nccl"]),
        ("cpu:gloo,cuda:nccl", "nccl", ["nccl", "gloo"]),
    ],
)
def test_which_recorder_is_read_follows_from_the_groups_backend(
    monkeypatch: pytest.MonkeyPatch, config: str, carrier: str, read: list[str]
) -> None:
    asked: list[str] = []

    def of(backend: str) -> tuple[Entry, ...]:
        asked.append(backend)
        return ()

    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(traffic, "entries", of)
    counter = TrafficCounter()
    with counter.step(0):
        pass
    (line,) = counter.lines()
    assert (asked, line.backend, line.collectives) == (read, carrier, None)
    assert line.reason == "the flight recorder saw no collective, though 8 ranks trained together"


def test_a_clock_that_was_set_tells_nothing() -> None:
    with pytest.raises(Unreadable, match=CLOCK_SET):
        found([entry(0, 5)], CountedStep(0, 0, 20, clock_set=True))


@pytest.mark.parametrize(
    ("steady_ns", "wall_ns", "known"),
    [
        ((0, 1, 100, 101), (5_000, 5_100), True),
        # Kept from its core for 50 ms between two readings of a clock, before the step or after it.
        ((0, 50_000_000, 50_000_100, 50_000_101), (5_000, 50_005_100), True),
        ((0, 1, 100, 50_000_101), (5_000, 5_100), True),
        # Set forward and back by 2 ms.
        ((0, 1, 100, 101), (5_000, 2_005_100), False),
        ((0, 1, 100, 101), (5_000_000, 3_000_100), False),
    ],
)
def test_a_clock_was_set_where_it_leaves_the_steady_one_and_not_where_a_rank_was_kept_waiting(
    monkeypatch: pytest.MonkeyPatch, steady_ns: tuple[int, ...], wall_ns: tuple[int, ...], known: bool
) -> None:
    steadily, wall = iter(steady_ns), iter(wall_ns)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(steadily))
    monkeypatch.setattr(time, "time_ns", lambda: next(wall))
    counter = TrafficCounter()
    with counter.step(0):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(traffic, "entries", lambda backend: ())
    (line,) = counter.lines()
    assert (line.collectives == (), line.reason == CLOCK_SET) == (known, not known)


def test_a_reduce_scatter_stands_where_its_all_reduces_stood() -> None:
    entries = [entry(0, 1), entry(1, 5, elements=6), entry(2, 6, elements=4), entry(3, 9), entry(4, 12, elements=8)]
    step = CountedStep(0, 0, 20, (ReduceScatter(4, 8, 10), ReduceScatter(11, 13, 8)))
    assert found(entries, step) == [
        ("all_reduce", 10, 10), ("reduce_scatter", 10, 5), ("all_reduce", 10, 10), ("reduce_scatter", 8, 4),
    ]  # fmt: skip


def test_a_reduce_scatter_of_two_dtypes_is_one_for_each() -> None:
    entries = [entry(0, 5, elements=6), entry(1, 6, elements=4, dtype="bfloat16")]
    told = collectives([entries], CountedStep(0, 0, 20, (ReduceScatter(4, 8, 10),)), 1, lambda name: 2)
    assert [(one.operation, one.dtype, one.input_elements, one.output_elements) for one in told] == [
        ("reduce_scatter", "float32", 6, 3), ("reduce_scatter", "bfloat16", 4, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry(0, 5, elements=8)], "of 10 elements was carried out as all_reduce of 8"),
        ([entry(0, 5, "reduce_scatter")], "of 10 elements was carried out as reduce_scatter of 10"),
        ([entry(0, 9)], "of 1 reduce-scatters of gloo the recorder saw nothing"),
    ],
)
def test_a_reduce_scatter_carried_out_otherwise_is_not_guessed_at(entries: list[Entry], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        found(entries, CountedStep(0, 0, 20, (ReduceScatter(4, 8, 10),)))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_without_a_group_sends_nothing() -> None:
    assert TrafficCounter().backend == NO_GROUP


@pytest.mark.usefixtures("alone")
def test_calls_of_a_real_group_in_and_around_two_steps() -> None:
    methods = {name: method for name, method in vars(ProcessGroup).items() if "reduce_scatter" in name}
    counter = TrafficCounter()
    dist.all_reduce(torch.ones(99))
    for step in (4, 5):
        with counter.step(step):
            dist.all_reduce(torch.ones(3, 5, dtype=torch.bfloat16))
            dist.reduce_scatter_single(torch.empty(8), torch.ones(8))
            dist.reduce_scatter(torch.empty(6), [torch.ones(6)])
            dist.broadcast(torch.ones(2, dtype=torch.int64), 0)
        dist.all_reduce(torch.ones(99))
    assert dict(vars(ProcessGroup)) | methods == dict(vars(ProcessGroup))  # as before
    lines = counter.lines()
    assert [(line.step, line.backend, line.reason) for line in lines] == [(4, "gloo", None), (5, "gloo", None)]
    for line in lines:
        assert line.collectives is not None
        assert [_brief(one) for one in line.collectives] == [
            ("all_reduce", "bfloat16", 15), ("reduce_scatter", "float32", 8), ("reduce_scatter", "float32", 6),
            ("broadcast", "int64", 2),
        ]  # fmt: skip
        assert {one.ranks for one in line.collectives} == {1}


def _brief(one: Collective) -> tuple[str, str, int]:
    return one.operation, one.dtype, one.input_elements


@pytest.mark.usefixtures("alone")
def test_without_a_recorder_a_step_has_a_reason_and_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = TrafficCounter()
    with counter.step(0):
        dist.all_reduce(torch.ones(1))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    (line,) = counter.lines()
    assert line.collectives is None
    assert line.reason == "the flight recorder is switched off (TORCH_FR_BUFFER_SIZE=0)"
