from __future__ import annotations

import numpy as np
import pytest

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.runs.steps import FEWEST_STEPS, FIRST, SHORT, WHOLE, SlowSteps, slow_steps

TWO_RANKS = make_trial("ddp", 2, warmup_steps=0)


def found(seconds: list[float], **kinds: int) -> SlowSteps:
    """`s3=FIRST` makes step 3 one that begins an epoch."""
    of_steps = [kinds.get(f"s{k}", WHOLE) for k in range(len(seconds))]
    return slow_steps(np.arange(len(seconds)), np.array([seconds]), np.array(of_steps, dtype=np.uint8))[0]


def test_one_sleep_of_8_seconds_among_80_steps_changes_no_figure() -> None:
    for slow in (0, 1):
        steps = [[0.1] * 80, [0.1] * 80]
        steps[slow][40] += 8.0
        run = make_run(TWO_RANKS, [make_rank(TWO_RANKS, k, own) for k, own in enumerate(steps)])
        of_run = run_figures(run)
        assert of_run.slow == SlowSteps((40,), ())
        assert of_run.timed_steps == 79
        assert of_run.images_per_second == pytest.approx(16 / 0.1)
        assert of_run.slow_share == pytest.approx(8.1 / 16.0)
        assert of_run.kept_slow_share == 0.0


def test_the_elapsed_epoch_holds_the_slow_step() -> None:
    trial = make_trial("ddp", 1, warmup_steps=0)
    rank = make_rank(trial, 0, [0.1] * 40 + [8.1] + [0.1] * 39, steps_in_epoch=80, model={"train_samples": 640})
    of_run = run_figures(make_run(trial, [rank]))
    assert [of_run.epoch_seconds, of_run.elapsed_epoch_seconds] == pytest.approx([8.0, 16.0])


def test_what_is_within_half_of_the_median_or_6_deviations_is_not_slow() -> None:
    assert found([1.0] * 40 + [1.5]) == SlowSteps()
    assert found([1.0] * 40 + [1.51]) == SlowSteps((40,))
    # 0.9 and 1 / 0.9 in turn: the median is 1, the deviation of the logarithms 0.1054; exp(6 x 0.1562) = 2.55.
    noisy = [0.9, 1 / 0.9] * 20 + [1.0] * 2
    assert found([*noisy, 2.5]) == SlowSteps()
    assert found([*noisy, 2.6]) == SlowSteps((42,))


def test_two_of_a_kind_among_80_stay_and_of_unlike_ones_the_longest_goes() -> None:
    assert found([1.0] * 78 + [9.0, 8.0]) == SlowSteps((), (78, 79))
    assert found([1.0] * 78 + [4.9, 9.0]) == SlowSteps((79,), (78,))


def test_of_300_steps_three_may_go() -> None:
    assert found([1.0] * 297 + [9.0, 8.0, 7.0]) == SlowSteps((297, 298, 299))
    assert found([1.0] * 296 + [9.0, 8.0, 7.0, 7.0]) == SlowSteps((), (296, 297, 298, 299))


@pytest.mark.parametrize("steps", [FEWEST_STEPS - 1, FEWEST_STEPS])
def test_of_a_few_steps_none_is_known_to_be_slow(steps: int) -> None:
    assert bool(found([9.0] + [1.0] * (steps - 1)).set_aside) is (steps == FEWEST_STEPS)


def test_waiting_for_the_loader_at_the_start_of_each_epoch_is_not_slow() -> None:
    epochs = [3.0, *[1.0] * 9] * 3
    assert found(epochs, s0=FIRST, s10=FIRST, s20=FIRST) == SlowSteps()
    assert found(epochs, s0=WHOLE, s10=WHOLE, s20=WHOLE) == SlowSteps((), (0, 10, 20))
    epochs[10] = 12.0
    assert found(epochs, s0=FIRST, s10=FIRST, s20=FIRST) == SlowSteps((10,))


def test_a_short_last_step_that_is_compiled_anew_is_slow() -> None:
    assert found([0.26] * 11 + [42.9], s11=SHORT) == SlowSteps((11,))


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("sigma", [0.05, 0.2, 0.4])
def test_noise_alone_sets_a_step_aside_in_few_runs(rho: float, sigma: float) -> None:
    """Log-normal noise, independent or AR(1). The limits were chosen with seed 7, and are tried here with others."""
    for steps in (8, 20, 300):
        rng = np.random.default_rng([steps, 1])
        noise = rng.standard_normal((500, steps))
        for k in range(1, steps):
            noise[:, k] = rho * noise[:, k - 1] + np.sqrt(1 - rho**2) * noise[:, k]
        seen = slow_steps(np.arange(steps), np.exp(sigma * noise), np.full(steps, WHOLE, dtype=np.uint8))
        assert sum(bool(of_run.set_aside) for of_run in seen) <= 0.025 * 500
