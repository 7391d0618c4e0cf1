"""What a step sends: volumes by hand, and silence where ranks, steps or runs do not agree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explained_factory import WIRE, run_of
from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.time.traffic import Traffic, traffic
from vitscale.store.records import Collective, TrafficLine
from vitscale.store.results import Run

MILLION = 1_000_000


def one(
    operation: str = "all_reduce",
    elements: int = MILLION,
    dtype: str = "float32",
    ranks: int = 2,
    communicator: str = "0",
) -> Collective:
    whole, part = elements, elements // ranks
    return Collective(
        communicator=communicator,
        ranks=ranks,
        operation=operation,
        dtype=dtype,
        input_elements=part if operation == "all_gather" else whole,
        output_elements=part if operation == "reduce_scatter" else whole,
    )


def sent(*collectives: Collective, backend: str = "gloo", step: int = 9) -> TrafficLine:
    return TrafficLine(step=step, backend=backend, collectives=collectives)


def run_with(by_rank: Sequence[Sequence[TrafficLine]], repeat: int = 0) -> Run:
    trial = make_trial("ddp", len(by_rank))
    ranks = [
        make_rank(trial, rank, [0.1] * 4).model_copy(update={"traffic": tuple(lines)})
        for rank, lines in enumerate(by_rank)
    ]
    return make_run(trial, ranks, repeat)


def told(*runs: Run) -> Traffic:
    found = traffic(runs, [run_figures(run) for run in runs])
    assert found is not None
    return found


def alike(*collectives: Collective, ranks: int = 2, backend: str = "gloo") -> Traffic:
    """Two steps that send the same on every rank."""
    lines = [sent(*collectives, backend=backend, step=step) for step in (8, 9)]
    return told(run_with([lines] * ranks))


@pytest.mark.parametrize(
    ("operation", "backend", "ranks", "logical", "physical"),
    [
        # Of 4 MB of float32, at 2 and 4 ranks.
        ("all_reduce", "gloo", 2, 8e6, 4e6),
        ("all_reduce", "nccl", 4, 8e6, 6e6),
        ("all_gather", "gloo", 2, 4e6, 2e6),
        ("all_gather", "nccl", 4, 4e6, 3e6),
        ("reduce_scatter", "nccl", 4, 4e6, 3e6),
        ("reduce_scatter", "gloo", 4, 4e6, 6e6),
        ("broadcast", "gloo", 4, 4e6, 3e6),
        ("reduce", "nccl", 2, 4e6, 2e6),
        ("all_to_all", "nccl", 4, 4e6, 3e6),
        ("all_reduce", "gloo", 1, 8e6, 0.0),
    ],
)
def test_volumes_by_hand(operation: str, backend: str, ranks: int, logical: float, physical: float) -> None:
    found = alike(one(operation, ranks=ranks), ranks=ranks, backend=backend)
    assert (found.logical_bytes, found.physical_bytes) == (logical, physical)
    assert (found.calls, found.reason) == (1, "")


def test_kinds_are_told_apart_and_added_up() -> None:
    """2 all-reduces of 1 M float32, one of 3 in bf16, a barrier: 16 MB and 12 MB asked for, half of it on the wire."""
    barrier = one("barrier", 0, "none")
    found = alike(one(), one(elements=3 * MILLION, dtype="bfloat16"), one(), barrier)
    assert [(s.operation, s.dtype, s.calls, s.elements, s.logical_bytes) for s in found.sent] == [
        ("all_reduce", "float32", 2, 2 * MILLION, 16 * MILLION),
        ("all_reduce", "bfloat16", 1, 3 * MILLION, 12 * MILLION),
        ("barrier", "none", 1, 0, 0),
    ]
    assert (found.calls, found.logical_bytes, found.physical_bytes) == (4, 28 * MILLION, 14 * MILLION)


@pytest.mark.parametrize(("operation", "own", "result"), [("all_gather", 250, 250), ("reduce_scatter", 250, 250)])
def test_where_parts_alone_are_recorded_the_whole_is_told(operation: str, own: int, result: int) -> None:
    """As torch records DTensor's own exchanges: a gather among 4 ranks puts out 4 x 250 elements."""
    parts = one(operation, ranks=4).model_copy(update={"input_elements": own, "output_elements": result})
    assert [kind.elements for kind in alike(parts, ranks=4).sent] == [1000]


def test_of_stages_the_rank_that_sends_most_is_told_and_each_must_send_the_same_in_every_step() -> None:
    """The middle one of three sends activations and gradients, 4 MB each; a message is no ring's."""
    sends, receives = one("send", ranks=3), one("recv", ranks=3)
    by_rank = [[sends, receives], [sends, sends, receives, receives], [sends, receives]]
    run = run_with([[sent(*own, step=8), sent(*own)] for own in by_rank])
    found = traffic([run], [run_figures(run)], ranks_differ=True)
    assert found is not None
    assert (found.logical_bytes, found.physical_bytes, found.reason) == (8_000_000, 8e6, "")
    assert "differ" in told(run).reason
    other = run_with([[sent(sends, step=8), sent(receives)]] + [[sent(sends, step=8), sent(sends)]] * 2)
    unlike = traffic([other], [run_figures(other)], ranks_differ=True)
    assert unlike is not None
    assert "rank 0 in step 8 of repeat 1 and rank 0 in step 9 of repeat 1 differ" in unlike.reason


@pytest.mark.parametrize("unknown", [one("window_put"), one(dtype="float4"), one("gather")])
def test_what_is_unknown_is_kept_under_its_name_and_no_sum_is_made_of_the_rest(unknown: Collective) -> None:
    found = alike(one(), unknown)
    assert (found.logical_bytes, found.physical_bytes, found.calls) == (None, None, 2)
    assert found.sent[0].logical_bytes == 8 * MILLION
    assert found.sent[1].logical_bytes is None
    assert found.reason == f"what gloo sends for {unknown.operation} of {unknown.dtype} is unknown"


def test_a_reduce_of_gloo_is_asked_for_in_known_bytes_and_sent_in_unknown_ones() -> None:
    found = alike(one("reduce"), one("all_gather"))
    assert (found.logical_bytes, found.physical_bytes) == (8 * MILLION, None)
    assert found.reason == "what gloo sends for reduce of float32 is unknown"


def test_ranks_that_differ_are_named_and_not_averaged() -> None:
    found = told(run_with([[sent(one(), one())], [sent(one())]]))
    assert found.reason == (
        "rank 0 in step 9 of repeat 1 and rank 1 in step 9 of repeat 1 differ: "
        "2 against 1 all_reduce of 1,000,000 float32"
    )
    assert (found.sent, found.calls, found.logical_bytes, found.physical_bytes) == ((), None, None, None)


def test_steps_and_runs_that_differ_are_named_too() -> None:
    steps = told(run_with([[sent(one(), step=8), sent(one(dtype="bfloat16"), step=9)]] * 2))
    assert "rank 0 in step 8 of repeat 1 and rank 0 in step 9 of repeat 1 differ" in steps.reason
    runs = told(run_with([[sent(one())]] * 2), run_with([[sent(one("broadcast"))]] * 2, repeat=1))
    assert "rank 0 in step 9 of repeat 1 and rank 0 in step 9 of repeat 2 differ" in runs.reason


def test_groups_of_some_ranks_may_have_names_of_their_own_and_orders_may_differ() -> None:
    lines = [[sent(one(communicator="1"), one("broadcast"))], [sent(one("broadcast"), one(communicator="2"))]]
    assert told(run_with(lines)).calls == 2


def test_a_step_that_could_not_be_counted_says_why() -> None:
    lost = TrafficLine(step=9, backend="gloo", collectives=None, reason="the ring is too small")
    found = told(run_with([[sent(one())], [lost]]))
    assert (found.reason, found.calls) == ("the ring is too small", None)


def test_ranks_that_counted_other_steps_say_nothing() -> None:
    found = told(run_with([[sent(one(), step=8)], [sent(one(), step=9)]]))
    assert found.reason == "not every rank counted the same steps"


def test_runs_of_before_say_nothing_at_all() -> None:
    run = run_with([[], []])
    assert traffic([run], [run_figures(run)]) is None


def test_a_rank_that_is_alone_sends_nothing_and_that_is_known() -> None:
    found = told(run_with([[TrafficLine(step=9, backend="none", collectives=())]]))
    assert (found.calls, found.logical_bytes, found.physical_bytes, found.reason) == (0, 0, 0, "")
    assert found.gradient_dtype is None


def test_the_bandwidth_is_the_wires_bytes_over_its_seconds() -> None:
    run = run_of(make_trial("ddp", 2, epochs=3))
    lines = (sent(one()),)
    run = run.model_copy(update={"ranks": tuple(r.model_copy(update={"traffic": lines}) for r in run.ranks)})
    found = told(run)
    assert found.wire_seconds is not None
    assert found.wire_seconds.value == pytest.approx(WIRE)
    assert found.bytes_per_second is not None
    assert found.bytes_per_second.value == pytest.approx(4e6 / WIRE)
    assert found.bytes_per_second.low is None


def test_without_explained_steps_or_told_apart_ones_the_bandwidth_is_unknown() -> None:
    assert alike(one()).bytes_per_second is None
    run = run_of(make_trial("ddp", 2, epochs=3), told_apart=False)
    run = run.model_copy(update={"ranks": tuple(r.model_copy(update={"traffic": (sent(one()),)}) for r in run.ranks)})
    found = told(run)
    assert (found.physical_bytes, found.wire_seconds, found.bytes_per_second) == (4e6, None, None)


@pytest.mark.parametrize(
    ("collectives", "shares"),
    [
        ([one()], {"float32": 1.0}),
        # A norm or two are no gradients; nor is what is gathered.
        ([one(dtype="bfloat16"), one(elements=2), one("all_gather")], {"bfloat16": pytest.approx(1, abs=1e-5)}),
        ([one(elements=300), one("reduce_scatter", 700, "bfloat16")], {"bfloat16": 0.7, "float32": 0.3}),
        ([one(dtype="int32"), one("broadcast")], {}),
    ],
)
def test_the_dtypes_of_gradients(collectives: list[Collective], shares: dict[str, float]) -> None:
    found = alike(*collectives)
    assert found.gradient_dtypes == shares
    assert found.gradient_dtype == next(iter(shares), None)


@given(
    st.lists(
        st.tuples(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]), st.integers(0, 10**9)),
        min_size=1,  # several ranks that sent nothing are ranks that were not seen
        max_size=6,
    ),
    st.sampled_from([1, 2, 4, 8]),
)
def test_the_wire_never_carries_more_than_was_asked_for_under_nccl_and_nothing_alone(
    asked: list[tuple[str, int]], ranks: int
) -> None:
    found = alike(
        *[one(operation, size * ranks, ranks=ranks) for operation, size in asked], ranks=ranks, backend="nccl"
    )
    assert found.physical_bytes is not None
    assert found.logical_bytes is not None
    assert found.physical_bytes == pytest.approx(found.logical_bytes * (ranks - 1) / ranks)
