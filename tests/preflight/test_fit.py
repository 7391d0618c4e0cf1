"""Known links go in, and must come out: bus bandwidth by hand, and fits to times made from known figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from check_factory import checked, sweep
from vitscale.preflight.fit import TimedSize, fit, fits, points
from vitscale.store.checks import CheckedRank, CollectiveLine, Operation, bus_factor

MB = 1e6


@pytest.mark.parametrize(
    ("operation", "ranks", "size", "seconds", "bandwidth"),
    [
        # nccl-tests' own rule, worked out by hand: S/t times 2(n-1)/n, or (n-1)/n.
        ("all_reduce", 2, 100, 2.0, 50.0),
        ("all_reduce", 4, 100, 1.0, 150.0),
        ("all_gather", 4, 100, 1.0, 75.0),
        ("reduce_scatter", 8, 800, 2.0, 350.0),
        ("all_to_all", 2, 100, 1.0, 50.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(
    operation: Operation, ranks: int, size: int, seconds: float, bandwidth: float
) -> None:
    assert bus_factor(operation, ranks) * size / seconds == bandwidth


def test_fit_by_hand() -> None:
    """Two points: 1 s at 10 bytes and 3 s at 30 bytes lie on 0 + x/10; 2 s and 4 s on 1 + x/10."""
    assert fit([TimedSize(10, 10, 1.0), TimedSize(30, 30, 3.0)]) == pytest.approx((0.0, 10.0))
    assert fit([TimedSize(10, 10, 2.0), TimedSize(30, 30, 4.0)]) == pytest.approx((1.0, 10.0))


def test_neither_figure_is_negative() -> None:
    """1 s at 10 bytes and 4 s at 20 would need a latency of -2 s; without one b = (sum r^2)/(sum r), r = x/t."""
    ratios = (10 / 1.0, 20 / 4.0)
    expected = sum(r * r for r in ratios) / sum(ratios)
    assert fit([TimedSize(10, 10, 1.0), TimedSize(20, 20, 4.0)]) == pytest.approx((0.0, expected))


def test_times_that_do_not_grow_give_no_bandwidth() -> None:
    assert fit([TimedSize(10, 10, 4.0), TimedSize(20, 20, 1.0)]) is None
    assert fit([TimedSize(10, 10, 1.0)]) is None
    assert fit([]) is None


@given(
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e5, 1e12),
    operation=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    ranks=st.integers(2, 1024),
)
def test_what_was_put_in_comes_out(latency: float, bandwidth: float, operation: Operation, ranks: int) -> None:
    lines = sweep("all ranks", operation, ranks, latency, bandwidth)
    (found,) = fits([CheckedRank(rank=0, collectives=lines)])
    assert found.ranks == ranks
    assert found.latency_seconds == pytest.approx(latency, rel=1e-3)
    # Where even the largest message is all latency, its bytes cannot be told from rounding.
    if bus_factor(operation, ranks) * lines[-1].size_bytes / bandwidth > 1e-3 * latency:
        assert found.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-3)
    assert found.worst_residual < 1e-3


@given(burst=st.integers(0, 256 * 1024), noise=st.lists(st.floats(-0.03, 0.03), min_size=9, max_size=9))
def test_a_burst_and_noise_do_not_hide_the_bandwidth(burst: int, noise: list[float]) -> None:
    """A token bucket lets its first bytes pass at once: small messages seem to need no time at all."""
    bandwidth, latency = 25 * MB, 5e-4
    made = [
        TimedSize(size, size, (1 + noise[power]) * (latency + max(0, size - burst) / bandwidth))
        for power, size in ((power, 1024 * 4**power) for power in range(9))
    ]
    found = fit(made)
    assert found is not None
    assert found[1] == pytest.approx(bandwidth, rel=0.1)
    assert 0 <= found[0] < 10 * latency


def test_the_slowest_rank_counts_and_the_median_over_repeats() -> None:
    def line(*seconds: float) -> CollectiveLine:
        return CollectiveLine(
            group="all ranks", operation="all_gather", ranks=2, size_bytes=200, calls=1, seconds=seconds
        )

    ranks = [checked(0, collectives=(line(1.0, 5.0, 2.0),)), checked(1, collectives=(line(3.0, 1.0, 9.0),))]
    # Slowest in each repeat: 3, 5, 9; their median is 5. Bus bytes: 200 x (2-1)/2.
    assert points(ranks, "all ranks", "all_gather") == (2, [TimedSize(200, 100.0, 5.0)])


def test_inside_nodes_the_slowest_host_counts_and_unlike_groups_are_kept_apart() -> None:
    quick = sweep("inside nodes", "all_reduce", 4, 0.0, 100 * MB)
    slow = sweep("inside nodes", "all_reduce", 4, 0.0, 50 * MB)
    smaller = sweep("inside nodes", "all_reduce", 2, 0.0, 1 * MB)
    ranks = [checked(n, 3, collectives=lines) for n, lines in enumerate((quick, slow, smaller))]
    (found,) = fits(ranks)
    assert found.ranks == 4
    assert found.bandwidth_bytes_per_second == pytest.approx(50 * MB)


def test_times_of_a_clock_that_stood_still_are_no_bandwidth() -> None:
    """Four bytes in the least second that a float can be: no network passes 1e304 bytes a second."""
    line = CollectiveLine(group="across nodes", operation="rdma", ranks=2, size_bytes=4, calls=1, seconds=(5e-324,))
    assert fits([CheckedRank(rank=rank, collectives=(line,)) for rank in (0, 1)]) == ()
