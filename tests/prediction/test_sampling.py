"""Densities whose moments are known by hand go into the sampler, and those must come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from published_folder import Entry, Table
from sampler import DRAWS, density

from vitscale.prediction.sampling import (
    ENOUGH,
    FEW,
    Array,
    Sample,
    StudentT,
    effective_size,
    sample,
    spread_out_normals,
    spread_out_student_t,
)

SIZE = 6
LogDensity = Callable[[Array], Array]


def normal(mean: Array, spread: Array) -> LogDensity:
    def log_density(rows: Array) -> Array:
        return np.asarray(-0.5 * (((rows - mean) / spread) ** 2).sum(axis=1) - np.log(spread).sum(), dtype=np.float64)

    return log_density


def drawn(log_target: LogDensity, *around: tuple[float, float]) -> Sample:
    first = [StudentT(np.full(SIZE, centre), np.eye(SIZE) * spread**2) for centre, spread in around]
    return sample(log_target, first, np.random.default_rng(3), 2048)


def test_kish_counts_draws_by_their_weights() -> None:
    """(1 + 1 + 2)^2 / (1 + 1 + 4) = 16/6."""
    assert effective_size(np.log([1.0, 1.0, 2.0]) - 500) == pytest.approx(16 / 6)
    assert effective_size(np.array([0.0, -math.inf, -math.inf])) == pytest.approx(1.0)


def test_a_density_far_from_the_first_proposals_is_walked_to() -> None:
    """Three spreads away in each of six dimensions: of the first 1,500 proposals hardly one counts."""
    mean, spread = np.full(SIZE, 3.0), np.linspace(0.2, 2.0, SIZE)
    target, start = normal(mean, spread), StudentT(np.zeros(SIZE), np.eye(SIZE))
    first = start.draw(np.random.default_rng(3), 1500)
    assert effective_size(target(first) - start.log_density(first)) < 10
    found = drawn(target, (0.0, 1.0))
    assert found.effective_size >= ENOUGH
    assert found.rows.mean(axis=0) == pytest.approx(mean, abs=0.2)
    assert found.rows.std(axis=0) == pytest.approx(spread, rel=0.12)


def test_where_the_usual_rounds_do_not_arrive_more_are_made() -> None:
    """Twelve spreads away, where one direction is twenty times as narrow as another."""
    mean, spread = np.full(SIZE, 12.0), np.geomspace(0.1, 2.0, SIZE)
    found = drawn(normal(mean, spread), (0.0, 1.0))
    assert found.effective_size >= FEW
    assert found.rows.mean(axis=0) == pytest.approx(mean, abs=0.3)


def test_two_explanations_are_both_kept_in_their_proportion() -> None:
    """Three quarters of the mass in a narrow mode, a quarter in a wide one eight away."""
    narrow, wide = normal(np.zeros(SIZE), np.full(SIZE, 0.2)), normal(np.full(SIZE, 8.0), np.full(SIZE, 1.0))

    def log_target(rows: Array) -> Array:
        return np.logaddexp(math.log(0.75) + narrow(rows), math.log(0.25) + wide(rows))

    found = drawn(log_target, (0.5, 0.5), (6.5, 2.0))
    assert found.effective_size >= ENOUGH
    assert float((found.rows[:, 0] > 4).mean()) == pytest.approx(0.25, abs=0.05)
    in_narrow = found.rows[found.rows[:, 0] < 4]
    assert in_narrow.std(axis=0) == pytest.approx(np.full(SIZE, 0.2), rel=0.15)


def test_what_cannot_be_is_not_drawn() -> None:
    def log_target(rows: Array) -> Array:
        return np.where(rows[:, 0] > 0, -0.5 * (rows**2).sum(axis=1), np.where(rows[:, 1] > 0, -np.inf, np.nan))

    found = drawn(log_target, (0.0, 1.0))
    assert float(found.rows[:, 0].min()) > 0
    assert float(found.rows[:, 0].mean()) == pytest.approx(math.sqrt(2 / math.pi), rel=0.05)


def test_the_same_again_is_the_same_to_the_bit() -> None:
    target = normal(np.zeros(SIZE), np.ones(SIZE))
    assert np.array_equal(drawn(target, (0.5, 1.0)).rows, drawn(target, (0.5, 1.0)).rows)


def test_what_is_held_against_a_peer_is_the_step_on_the_largest_count_held_back() -> None:
    """`benchmarks/sampler.py`: steps of half a second on 1, 2 and 4 GPUs, so hardly more on 8."""
    rows = tuple({"gpus": str(n), "step_seconds": "0.5", "micro_batch": "64"} for n in (1, 2, 4, 8, 16))
    entry = Entry(name="even", file="even.csv", fit=(1, 2, 4), held=(8, 16), source="by hand", per_node=16)
    likelihood, answer = density(Table(entry, rows))
    found = sample(likelihood.log_density, likelihood.proposals(), np.random.default_rng(0), DRAWS)
    assert found.effective_size >= ENOUGH
    assert float(np.exp(np.median(answer(found.rows)))) == pytest.approx(0.51, rel=0.02)


def test_the_evidence_is_the_integral_of_the_density() -> None:
    mean, spread = np.full(SIZE, 1.0), np.linspace(0.2, 2.0, SIZE)
    found = drawn(normal(mean, spread), (0.0, 1.0), (1.0, 2.0))
    # `normal` leaves out the constant of a normal density.
    assert found.log_evidence == pytest.approx(SIZE / 2 * math.log(2 * math.pi), abs=0.05)


@pytest.mark.parametrize("count", [1, 8, 501])
def test_spread_out_draws_lie_in_the_middles_of_equally_likely_parts(count: int) -> None:
    """By the distribution functions: the normal one, and Student's t of 4 degrees of freedom in closed form."""
    middles = (np.arange(count) + 0.5) / count
    normals = np.sort(spread_out_normals(np.random.default_rng(2), count)[:, 0])
    assert [NormalDist().cdf(value) for value in normals] == pytest.approx(middles)
    values = np.sort(spread_out_student_t(np.random.default_rng(2), count, freedom=4)[:, 0])
    stretched = values / np.sqrt(4 + values**2)
    assert 0.5 + 0.75 * (stretched - stretched**3 / 3) == pytest.approx(middles)
