"""Bounds of transfer and waiting from one rank's own times, where both are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.quality.imports import OneRankBounds, one_rank_bounds, ring_bytes
from vitscale.store.records import ExplainedLine
from vitscale.store.results import Imported, Run

TRANSFER = 0.04


def line(step: int, own: float, exchange: float) -> ExplainedLine:
    end = own + exchange
    return ExplainedLine(
        step=step,
        block=0,
        device="cuda",
        seconds=end,
        phases=(("forward", 0.0, own / 3), ("backward", own / 3, end)),
        idle=((own, end),),
        collectives=(("world", "all_reduce", own, end),),
    )


def run_of(lines: list[ExplainedLine], gpus: int = 4) -> Run:
    trial = make_trial(gpus=gpus)
    rank = make_rank(trial, 0, [one.seconds for one in lines]).model_copy(update={"explained": tuple(lines)})
    run = make_run(trial, [rank])
    header = run.header.model_copy(update={"imported": Imported(log_format="deepspeed", files=(), ranks=(0,))})
    return run.model_copy(update={"header": header})


def simulated(early_by: float, steps: int = 200, jitter: float = 0.004) -> tuple[OneRankBounds, float]:
    """A rank that is early by so much beside another; its bounds, and how long it truly waited in the mean."""
    chance = random.Random(7)
    lines, waits = [], []
    for step in range(steps):
        own, other = 0.3 + chance.gauss(0, jitter), 0.3 + early_by + chance.gauss(0, jitter)
        waits.append(max(0.0, other - own))
        lines.append(line(step, own, TRANSFER + waits[-1]))
    found = one_rank_bounds(run_of(lines))
    assert found is not None
    return found, sum(waits) / steps


@pytest.mark.parametrize("early_by", [-0.05, 0.0, 0.02, 0.1])
def test_the_truth_lies_within_the_bounds(early_by: float) -> None:
    found, waited = simulated(early_by)
    assert found.transfer_low <= TRANSFER <= found.transfer_high + 1e-12
    assert found.wait_low - 1e-12 <= waited <= found.wait_high + 1e-12
    assert found.exchange_seconds == pytest.approx(TRANSFER + waited)


def test_a_rank_that_is_always_early_hides_its_wait_in_the_quickest_step() -> None:
    found, waited = simulated(0.1)
    assert waited == pytest.approx(0.1, rel=0.05)
    assert found.transfer_high > 2 * TRANSFER, "the quickest step is no lower bound of the transfer"


@pytest.mark.parametrize(("early_by", "waits"), [(0.1, True), (-0.1, False)])
def test_its_own_pace_tells_whether_it_waits(early_by: float, waits: bool) -> None:
    found, _ = simulated(early_by, jitter=0.004)
    assert found.waits is waits
    if not waits:
        assert found.follows_own_pace == pytest.approx(0.0, abs=1e-9)


def test_a_pace_that_never_changes_tells_nothing() -> None:
    found = one_rank_bounds(run_of([line(step, 0.3, 0.05) for step in range(50)]))
    assert found is not None
    assert found.follows_own_pace is None
    assert found.waits is None


def test_a_link_bounds_the_transfer_from_below() -> None:
    run = run_of([line(step, 0.3, 0.05) for step in range(50)])
    known = one_rank_bounds(run, sent_bytes=ring_bytes(200e6, 4), link_bytes_per_second=10e9)
    assert known is not None
    assert known.transfer_low == pytest.approx(0.03)
    assert known.wait_high == pytest.approx(0.02)
    slow = one_rank_bounds(run, sent_bytes=ring_bytes(200e6, 4), link_bytes_per_second=1e9)
    assert slow is not None
    assert slow.transfer_low == slow.transfer_high == pytest.approx(0.05)


def test_what_a_ring_sends() -> None:
    assert ring_bytes(100.0, 2) == 100.0
    assert ring_bytes(100.0, 4) == 150.0


@pytest.mark.parametrize(
    "run",
    [
        lambda: run_of([line(step, 0.3, 0.05) for step in range(10)]),
        lambda: run_of([line(step, 0.3, 0.05) for step in range(50)], gpus=1),
        lambda: make_run(make_trial(gpus=2), [make_rank(make_trial(gpus=2), rank, [0.1] * 50) for rank in (0, 1)]),
    ],
    ids=["few steps", "one rank in all", "every rank recorded"],
)
def test_where_there_is_nothing_to_bound(run: Callable[[], Run]) -> None:
    assert one_rank_bounds(run()) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.001, 10.0), min_size=20, max_size=40), st.floats(1.0, 1e12))
def test_bounds_are_in_order(exchanges: list[float], link: float) -> None:
    found = one_rank_bounds(
        run_of([line(step, 0.5, one) for step, one in enumerate(exchanges)]),
        sent_bytes=1e9,
        link_bytes_per_second=link,
    )
    assert found is not None
    assert 0 <= found.transfer_low <= found.transfer_high
    assert -1e-9 <= found.wait_low <= found.wait_high + 1e-9
    assert found.transfer_high + found.wait_low == pytest.approx(found.exchange_seconds)
