from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.learning.convergence import FEWEST_STEPS, ONE_SEED, noise_scale, seed_of
from vitscale.analysis.statistics import ONE_RUN
from vitscale.store.records import GradientLine
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

TWO_RANKS = make_trial("ddp", 2, micro_batch=16)
Norms = tuple[float | None, float | None]
"""Small and big squared norm of one step on one rank."""


def line(
    step: int, norms: Norms, small_images: int = 16, big_images: int = 32, reason: str | None = None
) -> GradientLine:
    return GradientLine(
        step=step,
        small_images=small_images,
        small_squared_norm=norms[0],
        big_images=big_images,
        big_squared_norm=norms[1],
        reason=reason,
    )


def run_of(ranks: Sequence[Sequence[GradientLine]], trial: Trial = TWO_RANKS, repeat: int = 0, seed: int = 0) -> Run:
    """A run whose rank k recorded the lines `ranks[k]`."""
    records = [
        make_rank(trial, rank, [0.1]).model_copy(update={"gradients": tuple(lines)}) for rank, lines in enumerate(ranks)
    ]
    run = make_run(trial, records, repeat)
    return run.model_copy(update={"header": run.header.model_copy(update={"seed": seed})})


def steady(small: float, big: float, steps: int = FEWEST_STEPS, repeat: int = 0, seed: int = 0) -> Run:
    """The same norms on both ranks in every step."""
    lines = [line(step, (small, big)) for step in range(steps)]
    return run_of([lines, lines], repeat=repeat, seed=seed)


def drawn_run(ranks: int, small_images: int, steps: int, gradient: float, noise: float, seed: int) -> Run:
    """Gradients of 100 parameters drawn with |G|^2 = `gradient` and tr(Sigma) = `noise`, unevenly over them."""
    random = np.random.default_rng(seed)
    direction = random.normal(size=100)
    mean = direction * np.sqrt(gradient / (direction**2).sum())
    shares = np.linspace(0.2, 1.8, 100)
    deviation = np.sqrt(noise * shares / shares.sum())
    # The mean of b images of covariance Sigma has covariance Sigma / b.
    small = mean + random.normal(size=(steps, ranks, 100)) * deviation / np.sqrt(small_images)
    small_norms = (small**2).sum(axis=2).tolist()
    big_norms = (small.mean(axis=1) ** 2).sum(axis=1).tolist()
    by_rank = [
        [line(s, (small_norms[s][rank], big_norms[s]), small_images, ranks * small_images) for s in range(steps)]
        for rank in range(ranks)
    ]
    return run_of(by_rank, make_trial("ddp", ranks, micro_batch=small_images), seed=seed)


@pytest.mark.parametrize(
    ("gradient", "noise", "ranks", "small_images"),
    [(1.0, 20.0, 2, 16), (0.25, 8.0, 4, 8), (4.0, 2000.0, 2, 16)],
)
def test_a_known_noise_scale_is_found_again(gradient: float, noise: float, ranks: int, small_images: int) -> None:
    """tr(Sigma) / |G|^2 is 20, 32 and 500 images: below, at and far above the batch. Within 5 % over 20,000 steps: the
    standard error is at most 2.5 %, for 500.
    """
    found, reason = noise_scale([drawn_run(ranks, small_images, 20_000, gradient, noise, seed=1)])
    assert reason == ""
    assert found is not None
    assert found.value == pytest.approx(noise / gradient, rel=0.05)


def test_a_known_noise_scale_is_found_again_from_unequal_shares() -> None:
    """tr(Sigma) / |G|^2 is 20 images; three ranks take 20, 9 and 3 of 32. Within 5 % over 20,000 steps."""
    shares, steps, noise = (20, 9, 3), 20_000, 20.0
    random = np.random.default_rng(3)
    mean = np.full(100, 0.1)
    own = [mean + random.normal(size=(steps, 100)) * np.sqrt(noise / 100 / images) for images in shares]
    big = sum(images * gradient for images, gradient in zip(shares, own, strict=True)) / 32
    ranks = [
        [
            line(step, (small, whole), images, 32)
            for step, (small, whole) in enumerate(
                zip((gradient**2).sum(axis=1).tolist(), (big**2).sum(axis=1).tolist(), strict=True)
            )
        ]
        for images, gradient in zip(shares, own, strict=True)
    ]
    found, reason = noise_scale([run_of(ranks, make_trial("ddp", 3))])
    assert reason == ""
    assert found is not None
    assert found.value == pytest.approx(noise, rel=0.05)


def test_the_estimate_has_no_bias_from_dividing_by_a_noisy_number() -> None:
    """In two steps of five of this run |G|^2 comes out negative: the mean of the steps' ratios is far off."""
    run = drawn_run(2, 16, 20_000, gradient=1.0, noise=500.0, seed=2)
    ratios = []
    for one, other in zip(run.ranks[0].gradients, run.ranks[1].gradients, strict=True):
        assert one.small_squared_norm is not None
        assert other.small_squared_norm is not None
        assert one.big_squared_norm is not None
        small = (one.small_squared_norm + other.small_squared_norm) / 2
        ratios.append((small - one.big_squared_norm) * 32 / (2 * one.big_squared_norm - small))
    assert abs(sum(ratios) / len(ratios) - 500) > 250
    found, _ = noise_scale([run])
    assert found is not None
    assert found.value == pytest.approx(500, rel=0.05)


def test_by_hand() -> None:
    # b = 16, B = 32. Step norms: small 3 and 5 on the ranks (mean 4), big 3: |G|^2 = (32*3 - 16*4) / 16 = 2,
    # tr(Sigma) = (4 - 3) / (1/16 - 1/32) = 32. Then small 8, big 5: |G|^2 = 2, tr(Sigma) = 96.
    norms = [((3.0, 3.0), (5.0, 3.0)), ((8.0, 5.0), (8.0, 5.0))] * 2
    ranks = [[line(step, both[rank]) for step, both in enumerate(norms)] for rank in range(2)]
    found, _ = noise_scale([run_of(ranks)])
    assert found is not None
    assert found.value == pytest.approx((32 + 96) / (2 + 2))
    assert (found.low, found.high, found.note) == (None, None, ONE_RUN)


positive = st.floats(1e-6, 1e6)


@given(norms=st.lists(st.tuples(positive, st.floats(0.51, 0.99)), min_size=FEWEST_STEPS, max_size=12), unit=positive)
def test_units_and_the_order_of_ranks_do_not_matter(norms: list[tuple[float, float]], unit: float) -> None:
    """Above half of the small norm the big one leaves a positive |G|^2."""
    uneven = [[line(k, (s * skew, s * share)) for k, (s, share) in enumerate(norms)] for skew in (0.7, 1.3)]
    scaled = [
        [line(k, (s * skew * unit, s * share * unit)) for k, (s, share) in enumerate(norms)] for skew in (0.7, 1.3)
    ]
    found, _ = noise_scale([run_of(uneven)])
    assert found is not None
    assert found.value > 0
    for same in (scaled, uneven[::-1]):
        other, _ = noise_scale([run_of(same)])
        assert other is not None
        assert other.value == pytest.approx(found.value, rel=1e-6)


def test_runs_of_different_seeds_give_an_interval() -> None:
    # B_noise = 32 (1 - q) / (2 q - 1) for big = q small: 64, 32 and 16 images.
    runs = [steady(1.0, q, repeat=r, seed=r) for r, q in enumerate([0.6, 2 / 3, 0.75])]
    found, reason = noise_scale(runs)
    assert reason == ""
    assert found is not None
    assert found.value == pytest.approx(32)  # the geometric mean
    assert found.low is not None
    assert found.high is not None
    assert found.low < 32 < found.high


def test_runs_of_one_seed_are_one_observation() -> None:
    """They see the same gradients: an interval over them would have no width, and say nothing."""
    found, _ = noise_scale([steady(1.0, 0.75, repeat=r) for r in range(3)])
    assert found is not None
    assert found.value == pytest.approx(16)
    assert (found.low, found.high, found.note) == (None, None, ONE_SEED)


def test_a_run_without_norms_does_not_make_the_other_one_of_a_shared_seed() -> None:
    found, _ = noise_scale([steady(1.0, 0.75, seed=0), steady(1.0, 0.75, steps=1, repeat=1, seed=1)])
    assert found is not None
    assert found.note == ONE_RUN


def test_the_seed_of_an_old_record_is_its_trials() -> None:
    run = make_run(make_trial(seed=7), [make_rank(make_trial(seed=7), 0, [0.1])])
    assert run.header.seed is None
    assert seed_of(run) == 7
    assert seed_of(steady(1.0, 0.75, seed=9)) == 9


def without(run: Run, **window: object) -> Run:
    trial = run.header.trial.model_copy(update={"window": run.header.trial.window.model_copy(update=window)})
    return run.model_copy(update={"header": run.header.model_copy(update={"trial": trial})})


def one_rank_missing(run: Run) -> Run:
    return run.model_copy(update={"ranks": run.ranks[:1]})


def unlike_steps(run: Run) -> Run:
    late = [line_.model_copy(update={"step": line_.step + 100}) for line_ in run.ranks[1].gradients]
    return run.model_copy(update={"ranks": (run.ranks[0], run.ranks[1].model_copy(update={"gradients": tuple(late)}))})


TOO_SHORT = "no step took the gradients' norms: the run has too few steps for it"
CONTRADICTION = "the recorded norms of the gradients contradict each other"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            lambda: make_run(make_trial("ddp", 1), [make_rank(make_trial("ddp", 1), 0, [0.1])]),
            "one rank and one micro-step: no gradient of fewer images than the step has",
        ),
        (
            lambda: without(steady(1.0, 0.75), explain=False),
            "measure.explain is false: no step takes the gradients' norms",
        ),
        (lambda: run_of([[], []]), TOO_SHORT),
        (lambda: one_rank_missing(steady(1.0, 0.75)), TOO_SHORT),
        (lambda: unlike_steps(steady(1.0, 0.75)), TOO_SHORT),
        (lambda: steady(1.0, 0.75, steps=3), "the gradients' norms are known in 3 steps, and 4 are needed"),
        (lambda: run_of([[line(k, (None, None), reason="why") for k in range(9)]] * 2), "why"),
        (
            lambda: steady(1.0, 0.5),  # |G|^2 = (32 * 0.5 - 16 * 1) / 16 = 0
            "the noise drowns the mean gradient: over 4 steps the estimate of its square is not positive, and more "
            "steps are needed",
        ),
        (lambda: steady(1.0, 1.0), "the gradients of all micro-batches are alike: there is no noise"),
        (lambda: steady(0.0, 0.0), "the noise drowns the mean gradient: over 4 steps the estimate of its square is not "
         "positive, and more steps are needed"),
        (lambda: steady(1.0, 1.02), CONTRADICTION),  # a mean longer than what it is the mean of
        (lambda: steady(1e308, 0.9e308), CONTRADICTION),  # 32 times that is no float
        (lambda: run_of([[line(k, (1.0, 0.75), 32, 32) for k in range(4)]] * 2), CONTRADICTION),
        (lambda: run_of([[line(k, (1.0, 0.75), 16 * (r + 1), 64) for k in range(4)] for r in range(2)]), CONTRADICTION),
    ],
)  # fmt: skip
def test_where_it_is_unknown_the_reason_is_said(run: Callable[[], Run], reason: str) -> None:
    assert noise_scale([run()]) == (None, reason)


def test_without_runs_there_is_nothing() -> None:
    assert noise_scale([]) == (None, "no run has completed")


def test_a_run_that_drowns_is_not_left_out() -> None:
    """The runs whose |G|^2 came out large would remain, and their noise scale is too small."""
    found, reason = noise_scale([steady(1.0, 0.75, seed=0), steady(1.0, 0.4, repeat=1, seed=1)])
    assert found is None
    assert reason.startswith("in 1 of 2 runs the noise drowns the mean gradient: over 4 steps")


def test_steps_without_norms_are_skipped() -> None:
    padded = line(9, (None, None), 16, 20, reason="the step holds padding")
    lines = [line(step, (1.0, 0.75)) for step in range(FEWEST_STEPS)]
    found, _ = noise_scale([run_of([[*lines, padded], [*lines, padded]])])
    assert found is not None
    assert found.value == pytest.approx(16)
