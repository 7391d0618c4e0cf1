"""Exposed transfers by hand, and what must hold of any schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.engines.messages import Message, MicroSteps
from vitscale.prediction.step.messages import exposed_seconds

ONE = np.ones((1, 1))


def bucket(size: float, ready: float | None, every: bool = False) -> Message:
    return Message("all_reduce", size, 1, "backward", ready, "all" if every else "last")


def exposed(
    found: list[Message], forward: float = 1.0, backward: float = 2.0, accum: int = 1, rate: float = 1.0
) -> float:
    """At `rate` bytes a second, without latency."""
    result = exposed_seconds(
        tuple(found), lambda one: one.tensor_bytes / rate * ONE, forward * ONE, backward * ONE, accum
    )
    assert result.shape == (1, 1)
    return float(result[0, 0])


def test_buckets_by_hand() -> None:
    """Backward of 2 s; buckets at 1 s and 2 s. The first takes 0.5 s and is hidden, the second sticks out."""
    assert exposed([bucket(0.5, 0.5), bucket(0.25, 1.0)]) == 0.25
    # The first takes 1.5 s, until 2.5 s; the second follows it and ends at 2.75 s.
    assert exposed([bucket(1.5, 0.5), bucket(0.25, 1.0)]) == 0.75
    assert exposed([bucket(1.5, None), bucket(0.25, 1.0)]) == 1.75
    assert exposed([bucket(0.5, 0.5)]) == 0.0


def test_gathered_weights_by_hand() -> None:
    """Forward of 4 s in two blocks. The second's weights are asked for at 0 s, take 3 s, and are needed at 2 s: 1 s."""
    second = Message("all_gather", 3.0, 1, "forward", 0.0, "all", 0.5)
    assert exposed([second], forward=4.0) == 1.0
    # Ahead of them the first's, needed at once: 1 s, and the second's come at 4 s instead of 3 s: needed at 2 s.
    first = Message("all_gather", 1.0, 1, "forward", 0.0, "all", 0.0)
    assert exposed([first, second], forward=4.0) == 2.0
    # Asked for when the first has come they do not come earlier.
    third = Message("all_gather", 1.0, 1, "forward", 0.5, "all", 0.75)
    assert exposed([first, second, third], forward=4.0) == 2.0


def test_a_scatter_that_a_gather_holds_up() -> None:
    """Backward of 2 s. A gather until 1.5 s, needed at 1 s; the scatter of 0.6 s at 1 s ends at 2.1 s of 2.5 s."""
    gather = Message("all_gather", 1.5, 1, "backward", 0.0, "all", 0.5)
    scatter = Message("reduce_scatter", 0.6, 1, "backward", 0.5, "all")
    assert exposed([gather, scatter]) == 0.5
    late = Message("reduce_scatter", 0.6, 1, "backward", 1.0, "all")
    assert exposed([gather, late]) == pytest.approx(1.1)


def test_what_is_sent_in_each_micro_step_counts_each_time() -> None:
    assert exposed([bucket(3.0, 1.0)], accum=4) == 3.0
    assert exposed([bucket(3.0, 1.0, every=True)], accum=4) == 12.0
    # In the last of four both: 3 s and 1 s.
    assert exposed([bucket(3.0, 1.0, every=True), bucket(1.0, 1.0)], accum=4) == 13.0


@pytest.mark.parametrize(("accum", "seconds"), [(1, 5.0), (2, 5.0 + 2.5), (4, 5.0 + 3 * 2.5)])
def test_the_first_micro_step_may_send_other_than_later_ones(accum: int, seconds: float) -> None:
    """Weights that forward waits for take 4 s over all ranks in the first micro-step, and 1.5 s in a group in others;
    1 s more in each. With thousands of configurations each has its own number of micro-steps."""
    first = Message("all_gather", 4.0, 1, "forward", None, "first")
    later = Message("all_gather", 1.5, 1, "forward", None, "later", group="second shard")
    always = Message("all_gather", 1.0, 1, "forward", None, "all")
    assert exposed([first, later, always], accum=accum) == seconds
    assert sum(one.tensor_bytes * one.times(accum) for one in (first, later, always)) == seconds
    accums = np.array([[1, accum]])
    found = exposed_seconds((first, later, always), lambda one: one.tensor_bytes * ONE, ONE, ONE, accums)
    assert found.tolist() == [[5.0, seconds]]


def test_first_and_later_micro_steps_overlap_on_their_own() -> None:
    """By hand, of a forward of 4 s. The first micro-step's gather ends at 3 s and is needed at 2 s: 1 s. That of later
    ones ends in time; in the last another one sticks out by 0.5 s, and in a single micro-step both do."""
    first = Message("all_gather", 3.0, 1, "forward", 0.0, "first", 0.5)
    later = Message("all_gather", 1.0, 1, "forward", 0.0, "later", 0.5)
    last = Message("all_gather", 0.5, 1, "forward", 1.0, "last")
    assert exposed([first, later, last], forward=4.0, accum=3) == 1.0 + 0.5
    assert exposed([first, later, last], forward=4.0, accum=1) == 1.0 + 0.5
    slow = replace(later, tensor_bytes=2.5)  # in two of three micro-steps
    assert exposed([first, slow, last], forward=4.0, accum=3) == 1.0 + 2 * 0.5 + 0.5


def test_after_backward_nothing_hides_anything() -> None:
    after = Message("all_gather", 2.0, 3, "after", None, "last")
    assert exposed([after], accum=5) == 6.0


def test_draws_and_configurations_broadcast() -> None:
    rates = np.array([[1.0], [2.0]])
    result = exposed_seconds((bucket(3.0, 1.0),), lambda one: one.tensor_bytes / rates, ONE, np.ones((1, 4)), 1)
    assert np.broadcast_to(result, (2, 4)).tolist() == [[3.0] * 4, [1.5] * 4]


def test_each_size_is_asked_for_once() -> None:
    asked: list[Any] = []

    def collective(one: Message) -> Any:
        asked.append((one.operation, one.tensor_bytes))
        return ONE

    exposed_seconds(tuple(bucket(5.0, n / 10) for n in range(10)), collective, ONE, ONE, 3)
    assert asked == [("all_reduce", 5.0)]


SHARES = st.floats(0.0, 1.0)


@st.composite
def schedules(draw: st.DrawFn) -> list[Message]:
    found = []
    for phase in ("forward", "backward"):
        shares = sorted(draw(st.lists(SHARES, max_size=6)))
        for place, ready in enumerate(shares):
            needed = draw(st.none() | st.floats(ready, 1.0)) if place + 1 == len(shares) else None
            if place + 1 < len(shares) and draw(st.booleans()):
                needed = shares[place + 1]
            size = draw(st.floats(1.0, 1e3))
            hidden = None if draw(st.booleans()) else ready
            micro_steps: MicroSteps = draw(st.sampled_from(("all", "last", "first", "later")))
            calls = draw(st.integers(1, 3))
            found.append(Message("all_reduce", size, calls, phase, hidden, micro_steps, needed))
    if draw(st.booleans()):
        found.append(Message("all_gather", draw(st.floats(1.0, 1e3)), 1, "after", None, "last"))
    return found


@given(schedules(), st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.integers(1, 4), st.floats(0.1, 10.0))
def test_whatever_the_schedule(found: list[Message], forward: float, backward: float, accum: int, rate: float) -> None:
    total = sum(one.tensor_bytes * one.times(accum) for one in found) / rate
    sticks_out = exposed(found, forward, backward, accum, rate)
    assert 0 <= sticks_out <= total * (1 + 1e-9) + 1e-9
    assert exposed(found, forward, backward, accum, 2 * rate) <= sticks_out + 1e-9
    assert exposed(found, 0.0, 0.0, accum, rate) == pytest.approx(total)
    assert exposed(found, forward, backward, accum, np.inf) == pytest.approx(0.0, abs=1e-9)
