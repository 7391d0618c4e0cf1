"""Which weights ZeRO-3 has gathered when, where not all of them may stay: by hand, and beside what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from prediction.memory.test_offload import BENCHMARKED, trial
from vitscale.engines.deepspeed.settings import ZeroSettings
from vitscale.engines.deepspeed.traversal import GatheredMoment, PlacedModule, gathered_moments
from vitscale.prediction.memory.forecast import forecast
from vitscale.trial.model_counts import linear

THREE_MATRICES = tuple(PlacedModule(linear(10, width, 1, ""), block=0) for width in (10, 20, 30))
"""Matrices of 100, 200 and 300 elements, with biases of 10, 20 and 30, which stay gathered."""


def moments(*, prefetch: int, max_live: int, max_reuse: int) -> list[GatheredMoment]:
    settings = ZeroSettings(
        reduce_bucket=1,
        prefetch_bucket=prefetch,
        persistence_threshold=50,
        max_live=max_live,
        max_reuse=max_reuse,
        overlap=False,
    )
    return list(gathered_moments(THREE_MATRICES, settings, checkpointing=False))


def highest(found: list[GatheredMoment], *, in_forward: bool) -> list[int]:
    """The most elements that are there at each module, in buffers and out of them."""
    totals = [0, 0, 0]
    for moment in found:
        if moment.in_forward == in_forward:
            total = moment.copied + moment.buffered + moment.copying
            totals[moment.module] = max(totals[moment.module], total)
    return totals


def test_without_fetching_ahead_a_module_has_its_own_weights_twice_while_they_are_copied() -> None:
    found = moments(prefetch=1, max_live=0, max_reuse=0)
    assert highest(found, in_forward=True) == [200, 400, 600]
    assert highest(found, in_forward=False) == [200, 400, 600]
    forward_end = [moment for moment in found if moment.in_forward][-1]
    assert (forward_end.copied, forward_end.buffered) == (0, 0)


def test_fetching_ahead_goes_on_until_the_limit_is_reached() -> None:
    """A bucket of one element fetches one matrix ahead at every module, as long as fewer than 301 elements are there.

    The third has a buffer of 300 and its copy beside nothing else, for the second one is released then.
    """
    found = moments(prefetch=1, max_live=301, max_reuse=0)
    assert highest(found, in_forward=True) == [100 + 200, 200 + 300, 2 * 300]


def test_gathers_wait_in_buffers_until_a_module_needs_one_of_them() -> None:
    """All 600 elements arrive in one buffer, and are copied at the first module."""
    found = moments(prefetch=600, max_live=599, max_reuse=10_000)
    (copied,) = [moment for moment in found if moment.copying]
    assert (copied.module, copied.copied, copied.buffered, copied.copying) == (0, 0, 600, 600)
    # Backward releases them one by one.
    assert highest(found, in_forward=False) == [100, 300, 600]


LARGE = 2_654_208
"""The elements of all matrices in the blocks of the model that `benchmarks/memory.py` trains."""
MEASURED: list[tuple[float, float, float, int, float]] = [
    (0.8, 0, 0.02, 1, 40.88), (0.8, 0, 0.02, 8, 48.07), (0.8, 0, 0.3, 1, 46.41), (0.8, 0, 0.3, 8, 49.19),
    (0.5, 0, 0.02, 1, 37.34), (0.5, 0, 0.02, 8, 45.51), (0.5, 0, 0.3, 1, 39.34), (0.5, 0, 0.3, 8, 45.36),
    (0.25, 0, 0.1, 1, 36.84), (0.25, 0, 0.1, 8, 43.05), (0.5, 1.0, 0.3, 1, 41.25), (0.5, 1.0, 0.3, 8, 50.13),
    (0.8, 0.3, 0.1, 1, 41.75), (0.8, 0.3, 0.1, 8, 49.19), (0.25, 0.3, 0.02, 1, 35.87), (0.25, 0.3, 0.02, 8, 42.76),
]  # fmt: skip
"""Shares of `LARGE` that may be live, half of the distance of reuse and a bucket; images; and the peak of two ranks in
MB: DeepSpeed 0.19.8 and torch 2.13 on two cores of an AMD EPYC, the highest of three steps."""


@pytest.mark.parametrize(("live", "reuse", "prefetch", "images", "megabytes"), MEASURED)
def test_two_ranks_took_what_is_forecast(
    live: float, reuse: float, prefetch: float, images: int, megabytes: float
) -> None:
    settings: dict[str, Any] = {
        "stage3_max_live_parameters": int(live * LARGE),
        "stage3_max_reuse_distance": int(reuse * 2 * LARGE),
        "stage3_prefetch_bucket_size": int(prefetch * LARGE),
        "stage3_param_persistence_threshold": 20_000,
    }
    file = {"zero_optimization": settings}
    options: dict[str, Any] = {"zero_stage": 3, "bucket_mib": 1, "micro_batch": images, "deepspeed_config": file}
    found = forecast(trial(2, model=BENCHMARKED, device="cpu", engine="deepspeed", **options))
    assert found is not None
    assert found.peak_bytes / 1e6 == pytest.approx(megabytes, rel=0.05)
