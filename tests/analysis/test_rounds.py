"""Runs in turn: read from when they began, and compared so that what changes from session to session claims nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vitscale.analysis.rounds import Round, rounds, span
from vitscale.analysis.statistics import compare, compare_pairs

RUN_SECONDS = 100.0


def side(begins: Sequence[float], costs: Sequence[float], *, imported: bool = False, left_out: float = 0.0) -> Any:
    """A trial whose runs took 100 s each and began then; only what `rounds` reads of one."""
    records = [
        SimpleNamespace(
            header=SimpleNamespace(imported=SimpleNamespace() if imported else None),
            outcome=SimpleNamespace(started_unix_seconds=begin, wall_seconds=RUN_SECONDS),
        )
        for begin in begins
    ]
    return SimpleNamespace(recorded_runs=records, run_costs=list(costs), images_left_out=left_out)


def pairs_of(order: str, **gaps: float) -> tuple[Round, ...]:
    """Rounds of runs in this order, "o" of the first side and "n" of the other, ten seconds between them; the first
    side's cost 1, 2, 3, ..., the other's 10, 20, 30, .... `after2=900` makes it 900 s after the third run."""
    begins: dict[str, list[float]] = {"o": [], "n": []}
    moment = 1e9
    for place, letter in enumerate(order):
        begins[letter].append(moment)
        moment += RUN_SECONDS + gaps.get(f"after{place}", 10.0)
    first = side(begins["o"], [1.0 + k for k in range(len(begins["o"]))])
    return rounds(first, side(begins["n"], [10.0 * (1 + k) for k in range(len(begins["n"]))]))


def test_neighbours_of_two_sides_are_a_round_whichever_went_first() -> None:
    assert pairs_of("onnoon") == (Round(1.0, 10.0), Round(2.0, 20.0), Round(3.0, 30.0))
    assert pairs_of("ononon") == (Round(1.0, 10.0), Round(2.0, 20.0), Round(3.0, 30.0))


@pytest.mark.parametrize("order", ["ooonnn", "nnnooo", "onno", "oonn", "ooooonnnnnooooonnnnn"])
def test_sides_in_blocks_and_fewer_than_3_pairs_are_not_in_turn(order: str) -> None:
    assert pairs_of(order) == ()


def test_a_run_that_is_missing_leaves_out_its_round_alone() -> None:
    assert pairs_of("onnoonoon") == (Round(1.0, 10.0), Round(2.0, 20.0), Round(3.0, 30.0), Round(5.0, 40.0))


def test_a_round_with_an_interruption_in_it_is_left_out() -> None:
    """Ten minutes after the first of its runs, or overnight; not where that lies between two rounds."""
    whole = pairs_of("onnoonno")
    assert len(whole) == 4
    assert pairs_of("onnoonno", after4=50_000.0) == (*whole[:2], whole[3])
    assert pairs_of("onnoonno", after5=50_000.0) == whole
    assert pairs_of("onnoonno", after4=500.0) == whole


def test_long_rounds_are_no_interruptions() -> None:
    """A study of many trials comes back to one of them after hours, in every round."""
    assert len(pairs_of("onnoon", after0=9_000.0, after2=9_000.0, after4=9_500.0)) == 3


def test_runs_side_by_side_and_imported_ones_are_not_in_turn() -> None:
    begins, costs = [1e9 + 1000 * k for k in range(4)], [1.0] * 4
    assert rounds(side(begins, costs), side([begin + 50 for begin in begins], costs)) == ()
    after = [begin + 200 for begin in begins]
    assert len(rounds(side(begins, costs), side(after, costs))) == 4
    assert rounds(side(begins, costs), side(after, costs, imported=True)) == ()


def test_a_round_has_the_costs_of_all_images() -> None:
    begins, costs = [1e9 + 1000 * k for k in range(3)], [1.0] * 3
    with_less = side([begin + 200 for begin in begins], [0.9] * 3, left_out=0.1)
    assert rounds(side(begins, costs), with_less)[0] == pytest.approx(Round(1.0, 1.0))


def test_the_span_of_trials_is_from_the_first_begin_to_the_last_end() -> None:
    trials = [side([1e9 + 500, 1e9 + 900], [1.0, 1.0]), side([1e9], [1.0])]
    assert span(trials) == (1e9, 1e9 + 900 + RUN_SECONDS)
    assert span([side([1e9], [1.0], imported=True)]) is None


@pytest.mark.parametrize("between_sessions", [0.02, 0.03])
@pytest.mark.parametrize("runs", [3, 5])
def test_sessions_2_and_3_percent_apart_claim_no_direction_in_turn(runs: int, between_sessions: float) -> None:
    """Equal sides, runs 1 % apart: 5 % of claims where rounds have their session in common (2,000 studies: 1 % more by
    chance), and 40 % and more where each side has a session of its own."""
    random = np.random.default_rng(53)
    claims = {"in turn": 0, "apart": 0}
    for _ in range(2000):
        noise = np.exp(0.01 * random.standard_normal((2, runs)))
        first, other = noise * np.exp(between_sessions * random.standard_normal(runs))
        claims["in turn"] += compare_pairs(other.tolist(), first.tolist()).verdict in ("faster", "slower")
        first, other = noise * np.exp(between_sessions * random.standard_normal((2, 1)))
        claims["apart"] += compare(other.tolist(), first.tolist()).verdict in ("faster", "slower")
    assert claims["in turn"] <= 0.06 * 2000
    assert claims["apart"] >= 0.38 * 2000


def test_a_difference_in_turn_is_found_that_sessions_would_hide() -> None:
    ours, theirs = [1.0, 1.3, 0.8, 1.1], [1.05, 1.36, 0.84, 1.16]
    assert compare_pairs(theirs, ours).verdict == "slower"
    assert compare_pairs(ours, theirs).verdict == "faster"
    assert compare(theirs, ours).verdict == "no significant difference"
    assert compare_pairs(theirs[:2], ours[:2]).verdict == "too few repeats to tell"
