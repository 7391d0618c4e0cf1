from __future__ import annotations

import numpy as np
import pytest

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.runs.figures import RunFigures, all_run_figures, run_figures
from vitscale.analysis.runs.steps import FEWEST_STEPS, FIRST, SHORT, WHOLE, SlowSteps, decide_slow_steps, slow_steps
from vitscale.store.results import Run

TWO_RANKS = make_trial("ddp", 2, warmup_steps=0)


def found(seconds: list[float], **kinds: int) -> SlowSteps:
    """Of a trial's only run. `s3=FIRST` makes step 3 one that begins an epoch."""
    of_steps = [kinds.get(f"s{k}", WHOLE) for k in range(len(seconds))]
    slow = slow_steps(np.arange(len(seconds)), np.array([seconds]), np.array(of_steps, dtype=np.uint8))
    return decide_slow_steps(slow, [None])[0]


def figures_of(*runs: list[float], steps_in_epoch: int | None = None) -> list[RunFigures]:
    """Of one trial's runs, from the seconds of their steps on one rank."""
    trial = make_trial("ddp", 1, warmup_steps=0)
    return all_run_figures(
        [
            make_run(trial, [make_rank(trial, 0, seconds, steps_in_epoch=steps_in_epoch)], repeat)
            for repeat, seconds in enumerate(runs)
        ]
    )


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
    # They exceed the usual by 8 and 2, or by 8 and 1.9: less than a quarter.
    assert found([1.0] * 78 + [9.0, 3.0]) == SlowSteps((), (78, 79))
    assert found([1.0] * 78 + [9.0, 2.9]) == SlowSteps((78,), (79,))


def test_of_300_steps_three_of_a_kind_stay() -> None:
    """They come once in a hundred steps, and so they do in a long run."""
    assert found([1.0] * 297 + [9.0, 8.0, 7.0]) == SlowSteps((), (297, 298, 299))
    assert found([1.0] * 299 + [9.0]) == SlowSteps((299,), ())


QUIET = [0.1] * 80


def with_slow(*steps: int, seconds: float = 8.1) -> list[float]:
    return [seconds if step in steps else 0.1 for step in range(80)]


def test_one_sleep_in_one_of_several_runs_changes_no_figure() -> None:
    for place in range(3):
        runs = [QUIET, QUIET, QUIET]
        runs[place] = with_slow(40)
        of_runs = figures_of(*runs)
        assert [run.step_seconds for run in of_runs] == pytest.approx([0.1] * 3)
        assert [run.slow.set_aside for run in of_runs] == [(40,) if place == run else () for run in range(3)]
        assert [run.timed_steps for run in of_runs] == [79 if place == run else 80 for run in range(3)]


def test_slow_steps_that_recur_over_the_runs_count_in_each_at_their_rate() -> None:
    """Two runs with one each and one with two: none is set aside because its run has no other."""
    of_runs = figures_of(with_slow(10), with_slow(70), with_slow(30, 50))
    assert [run.slow for run in of_runs] == [SlowSteps((), (10,)), SlowSteps((), (70,)), SlowSteps((), (30, 50))]
    assert [run.step_seconds for run in of_runs] == pytest.approx([0.2, 0.2, 0.3])


def test_runs_of_unlike_steps_are_decided_on_together() -> None:
    """A run of other steps is worked out apart from the others, and its slow step is one of all runs' all the same."""
    trial = make_trial("ddp", 1, warmup_steps=0)
    short = [8.1 if step == 20 else 0.1 for step in range(50)]
    runs = [make_run(trial, [make_rank(trial, 0, seconds)], n) for n, seconds in enumerate((with_slow(10), short))]
    assert [run.slow for run in all_run_figures(runs)] == [SlowSteps((), (10,)), SlowSteps((), (20,))]


def test_a_sleep_among_lesser_slow_steps_that_recur_is_set_aside() -> None:
    lesser = with_slow(10, 20, seconds=0.25)
    of_runs = figures_of([*lesser[:40], 8.1, *lesser[41:]], lesser, QUIET)
    assert [run.slow for run in of_runs] == [SlowSteps((40,), (10, 20)), SlowSteps((), (10, 20)), SlowSteps()]


def test_the_first_short_step_is_set_aside_in_every_run_and_a_later_one_is_not() -> None:
    """Kernels for its shape are made once a run; the rate at which later ones come is that of epochs."""
    trial = make_trial("ddp", 1, warmup_steps=0)

    def run(repeat: int, *slow: int) -> Run:
        rank = make_rank(trial, 0, [4.0 if step in slow else 0.1 for step in range(40)], steps_in_epoch=20)
        steps = tuple(line.model_copy(update={"images": 4}) if line.step in (19, 39) else line for line in rank.steps)
        return make_run(trial, [rank.model_copy(update={"steps": steps})], repeat)

    first = all_run_figures([run(repeat, 19) for repeat in range(3)])
    assert [of_run.slow for of_run in first] == [SlowSteps((19,), ())] * 3
    later = all_run_figures([run(repeat, 39) for repeat in range(3)])
    assert [of_run.slow for of_run in later] == [SlowSteps((), (39,))] * 3


def test_the_long_run_mean_of_steps_ten_times_as_long_is_met() -> None:
    """At one step in 200, which a run of 200 shows about once: the mean over studies of 3 runs. The rule that looked at
    each run alone came out 1.9 % below."""
    rng = np.random.default_rng(23)
    means = []
    for _ in range(200):
        slow = rng.random((3, 200)) < 0.005
        seconds = np.exp(0.02 * rng.standard_normal((3, 200))) * np.where(slow, 10.0, 1.0)
        means += [run.step_seconds for run in figures_of(*seconds.tolist())]
    assert np.mean(np.array(means, dtype=float)) / (1 + 0.005 * 9) == pytest.approx(1.0, abs=0.008)


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
        assert sum(bool(slow) for slow in seen) <= 0.025 * 500
