"""Wait and wire, by hand: two or three ranks whose collectives are written down with their clocks apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.analysis.time.exposure import exposures, step_parts
from vitscale.base.time_spans import length
from vitscale.store.records import ExplainedLine

Collectives = list[tuple[float, float]]


def line(
    collectives: Collectives,
    idle: list[tuple[float, float]],
    seconds: float = 10.0,
    operation: str = "all_reduce",
    **more: object,
) -> ExplainedLine:
    return ExplainedLine(
        step=0,
        block=0,
        device="cpu",
        seconds=seconds,
        phases=(("backward", 0.0, seconds),),
        idle=tuple(idle),
        collectives=tuple(("gloo", operation, start, end) for start, end in collectives),
        **more,  # type: ignore[arg-type]  # fields of the line
    )


def test_the_late_rank_transfers_and_the_early_one_waits_before_it() -> None:
    """Rank 1 issues 3 s later (in its own clock, 100 s off); both are done after 2 s more."""
    early, late = exposures([(0, line([(2.0, 7.0)], [(2.0, 7.0)])), (1, line([(5.0, 7.0)], [(5.0, 7.0)]))])
    assert early.wait == ((2.0, 5.0),)
    assert early.wire == ((5.0, 7.0),)
    assert late.wait == ()
    assert late.wire == ((5.0, 7.0),)
    assert (early.waiting_seconds, late.waiting_seconds) == (3.0, 0.0)


def test_overlapping_collectives_are_served_one_after_the_other() -> None:
    """Three buckets issued at 1, 2 and 3 and done at 4, 6 and 8: 3 + 2 + 2 s of link, not 3 + 4 + 5."""
    both = [(1.0, 4.0), (2.0, 6.0), (3.0, 8.0)]
    for one in exposures([(0, line(both, [])), (1, line(both, []))]):
        assert one.wire_seconds == 7.0
        assert one.waiting_seconds == 0.0


def test_only_idle_time_is_exposed() -> None:
    computing_until_5 = [(5.0, 7.0)]
    first, second = exposures([(0, line([(2.0, 7.0)], computing_until_5)), (1, line([(4.0, 7.0)], [(4.0, 7.0)]))])
    assert first.exposed == ((5.0, 7.0),)
    assert first.wait == ()  # it computed while rank 1 was on its way
    assert first.wire == ((5.0, 7.0),)
    assert first.waiting_seconds == 2.0
    assert second.wire == ((4.0, 7.0),)


def test_a_collective_that_ends_before_the_one_issued_earlier_costs_nothing() -> None:
    """gloo has two threads: the second of two may finish first."""
    for one in exposures([(rank, line([(1.0, 6.0), (2.0, 5.0)], [])) for rank in (0, 1)]):
        assert one.wire_seconds == 5.0


def test_one_rank_alone_has_wire_and_no_wait() -> None:
    (alone,) = exposures([(0, line([(1.0, 2.0)], [(1.0, 2.0)]))])
    assert alone.wait == ()
    assert alone.wire == ((1.0, 2.0),)


@pytest.mark.parametrize("operation", ["broadcast", "reduce", "gather"])
def test_rooted_operations_are_exposed_but_not_told_apart(operation: str) -> None:
    found = exposures([(rank, line([(1.0, 3.0)], [(1.0, 3.0)], operation=operation)) for rank in (0, 1)])
    for one in found:
        assert (one.wait, one.wire) == (None, None)
        assert one.exposed == ((1.0, 3.0),)
        assert operation in one.reason


def test_collectives_without_a_name_may_have_a_root() -> None:
    for one in exposures([(rank, line([(1.0, 3.0)], [(1.0, 3.0)], operation="unknown")) for rank in (0, 1)]):
        assert (one.wait, one.wire, one.exposed) == (None, None, ((1.0, 3.0),))
        assert "do not name their operation" in one.reason


def test_what_a_profile_has_lost_is_the_reason_before_that_the_ranks_differ() -> None:
    lost = line([], [], unknown={"wait": "kernels were lost", "wire": "kernels were lost"})
    for one in exposures([(0, line([(1.0, 3.0)], [])), (1, lost)]):
        assert one.reason == "kernels were lost"


def test_ranks_that_recorded_different_collectives_are_not_compared() -> None:
    found = exposures([(0, line([(1.0, 3.0)], [])), (1, line([(1.0, 3.0), (4.0, 5.0)], []))])
    assert {one.reason for one in found} == {"the ranks recorded different collectives"}


def test_a_backend_that_does_not_tell_gives_its_reason() -> None:
    found = exposures([(0, line([], [], unknown={"wait": "no kernel", "wire": "no kernel"})), (1, line([], []))])
    assert {one.reason for one in found} == {"no kernel"}


def test_communicators_are_served_side_by_side() -> None:
    def two(shift: float) -> ExplainedLine:
        return ExplainedLine(
            step=0, block=0, device="cuda", seconds=10.0, phases=(), idle=((0.0, 10.0),),
            collectives=(("nccl-0", "all_reduce", 1.0 + shift, 5.0), ("nccl-1", "all_gather", 2.0, 4.0)),
        )  # fmt: skip

    early, late = exposures([(0, two(0.0)), (1, two(2.0))])
    # nccl-0: 2 s of transfer (3 to 5); nccl-1: 2 to 4. Rank 0 waits from 1 to 2; from 2 on something is transferred.
    assert early.wire == ((2.0, 5.0),)
    assert early.wait == ((1.0, 2.0),)
    assert late.wait == ()


def test_a_norms_transfer_is_its_own_part_and_waiting_in_it_for_a_rank_stays_waiting() -> None:
    """Rank 1 comes 3 s late to the norm, which then takes 1 s; later a bucket of 2 s sticks out."""
    gradients = (6.0, 8.0)
    early, late = exposures(
        [
            (0, line([(1.0, 5.0), gradients], [(1.0, 5.0), gradients], norms=(0,))),
            (1, line([(4.0, 5.0), gradients], [(4.0, 5.0), gradients], norms=(0,))),
        ]
    )
    assert (early.wait, early.norm, early.wire) == (((1.0, 4.0),), ((4.0, 5.0),), (gradients,))
    assert (late.wait, late.norm, late.wire) == ((), ((4.0, 5.0),), (gradients,))
    assert early.wire_seconds == 3.0


def test_waiting_for_a_stage_is_the_bubble_and_no_exposed_communication() -> None:
    """A message that is under way while the stage computes, and gaps of its own there, are neither."""
    phases = (("forward", 0.0, 2.0), ("bubble", 2.0, 5.0), ("backward", 5.0, 9.0))
    collectives = (("gloo", "send", 1.0, 5.5), ("gloo", "recv", 2.0, 5.0), ("gloo", "all_reduce", 8.0, 9.0))
    unknown = {"wait": "several groups", "wire": "several groups"}
    own = line([], [(1.5, 5.2), (8.0, 9.0)], unknown=unknown).model_copy(
        update={"phases": phases, "collectives": collectives}
    )
    (found,) = exposures([(0, own)])
    assert found.exposed == ((8.0, 9.0),)
    assert step_parts(own, found) == {
        "forward": [(0.0, 2.0)], "bubble": [(2.0, 5.0)], "backward": [(5.0, 8.0)], "communication": [(8.0, 9.0)],
        "other": [(9.0, 10.0)],
    }  # fmt: skip


def test_a_norm_that_passes_a_bucket_has_its_own_time_and_one_that_queues_behind_it_not_the_buckets() -> None:
    """gloo's threads serve both at once, and the norm is done first; NCCL's stream serves one after the other."""
    for end, of_norm, of_bucket in ((3.0, ((2.0, 3.0),), ()), (7.0, ((6.0, 7.0),), ((2.0, 6.0),))):
        own = line([(1.0, 6.0), (2.0, end)], [(2.0, end)], norms=(1,))
        (found,) = exposures([(0, own)])
        assert (found.norm, found.wire, found.wait) == (of_norm, of_bucket, ())


def test_ranks_that_disagree_on_what_a_norm_sent_are_not_compared() -> None:
    marked, unmarked = (line([(1.0, 3.0)], [(1.0, 3.0)], norms=norms) for norms in ((0,), ()))
    assert {one.reason for one in exposures([(0, marked), (1, unmarked)])} == {
        "the ranks recorded different collectives"
    }
    (alone,) = exposures([(0, line([(1.0, 3.0)], [], norms=(7,)))])  # of a broken record
    assert alone.norm == ()


def test_where_norms_cannot_be_told_from_the_rest_they_are_unknown_and_without_any_they_are_nothing() -> None:
    for norms, expected in (((0,), None), ((), ())):
        own = line([(1.0, 3.0)], [(1.0, 3.0)], operation="broadcast", norms=norms)
        for one in exposures([(0, own), (1, own)]):
            assert (one.wait, one.wire, one.norm) == (None, None, expected)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(-1000, 1000),
)
def test_serial_links_are_recovered_whatever_the_arrivals_and_clocks(
    arrivals: list[tuple[int, int, int]], offset: int
) -> None:
    """A link that carries one transfer at a time, each starting when both ranks have come: its times come back."""
    issued, free, true_wire = [0, 0], 0, 0
    logs: list[Collectives] = [[], []]
    for first, second, wire in arrivals:
        issued = [issued[0] + first, issued[1] + second]
        end = max(free, *issued) + wire
        for rank in (0, 1):
            logs[rank].append((float(issued[rank]), float(end)))
        # Only where one of the ranks did not wait is the service the transfer; else the construction says less.
        true_wire += end - max(free, *issued)
        free = end
    shifted = [(start + 1000.0 + offset, end + 1000.0 + offset) for start, end in logs[1]]
    found = exposures([(0, line(logs[0], [], seconds=5000.0)), (1, line(shifted, [], seconds=5000.0))])
    for one in found:
        assert one.wire_seconds == pytest.approx(true_wire)
        assert length(one.wait or ()) == 0.0  # nothing is idle


def test_an_end_that_a_rank_sees_late_makes_no_transfer_shorter() -> None:
    """Five transfers of 2 s, back to back; each rank sees two of the ends 1.5 s late, because it was not scheduled."""
    issued = [1.0, 1.5, 2.0, 2.5, 3.0]
    ends = [3.0, 5.0, 7.0, 9.0, 11.0]
    late = {0: (1, 3), 1: (0, 2)}
    found = exposures(
        [
            (
                rank,
                line([(s, e + 1.5 * (k in late[rank])) for k, (s, e) in enumerate(zip(issued, ends, strict=True))], []),
            )
            for rank in (0, 1)
        ]
    )
    for one in found:
        assert one.wire_seconds == pytest.approx(10.0)


def test_what_still_travels_to_another_rank_is_transfer_and_no_wait_for_it() -> None:
    """Rank 1 has all of a norm's exchange after 20 s; its end reaches rank 0 only 40 s later.

    At the next rank 1 is there at 21 and rank 0 at 61, for it computed for a second. Then rank 1 computes for 30 s."""
    delayed = [(0.0, 60.0), (61.0, 80.0), (81.0, 131.0)]
    left_early = [(0.0, 20.0), (21.0, 80.0), (111.0, 131.0)]
    first, second = exposures(
        [(rank, line(own, own, seconds=140.0, norms=(0,))) for rank, own in enumerate((delayed, left_early))]
    )
    assert (first.norm, first.wire) == (((0.0, 60.0),), ((61.0, 80.0), (111.0, 131.0)))
    assert first.wait == ((81.0, 111.0),)
    assert (second.norm, second.wire) == (((0.0, 20.0), (21.0, 60.0)), ((61.0, 80.0), (111.0, 131.0)))
    assert second.wait == ((60.0, 61.0),)
    assert (first.waiting_seconds, second.waiting_seconds) == (30.0, 1.0)


def test_a_constant_difference_between_the_ends_is_one_between_the_clocks() -> None:
    """Rank 1's clock is 4 s ahead; it comes second to the first collective and first to the second."""
    ahead = 4.0
    first, second = exposures(
        [
            (0, line([(1.0, 5.0), (8.0, 9.0)], [(1.0, 5.0), (8.0, 9.0)])),
            (1, line([(3.0 + ahead, 5.0 + ahead), (7.0 + ahead, 9.0 + ahead)], [], seconds=20.0)),
        ]
    )
    assert first.wait == ((1.0, 3.0),)
    assert first.wire == ((3.0, 5.0), (8.0, 9.0))
    assert (first.waiting_seconds, second.waiting_seconds) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("starts", "waits", "wires"),
    [
        # Rank 0 is there first: truly it waits for 3 s, and its transfer takes 1.7 s.
        ((0.0, 3.0), (2.7, 0.0), (2.0, 2.0)),
        # Rank 1 is there first: truly it waits for 3 s, and its transfer takes 2 s.
        ((3.0, 0.0), (0.0, 3.3), (1.7, 1.7)),
    ],
)
def test_a_rank_that_always_leaves_first_moves_wait_and_wire_by_its_lead_and_no_more(
    starts: tuple[float, float], waits: tuple[float, float], wires: tuple[float, float]
) -> None:
    """The root of a tree, 0.3 s ahead: the ends of collectives alone cannot tell it from a rank whose clock is."""
    lead = 0.3
    ends = (5.0 - lead, 5.0)
    found = exposures([(rank, line([(starts[rank], ends[rank])], [(0.0, 9.0)])) for rank in (0, 1)])
    assert tuple(one.waiting_seconds for one in found) == pytest.approx(waits)
    assert tuple(one.wire_seconds for one in found) == pytest.approx(wires)
    last_arrival = max(starts)
    for rank, one in enumerate(found):
        assert abs((one.waiting_seconds or 0.0) - (last_arrival - starts[rank])) <= lead + 1e-9
        assert abs((one.wire_seconds or 0.0) - (ends[rank] - last_arrival)) <= lead + 1e-9
